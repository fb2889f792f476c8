"""`tunix trace`: what a run spent its time on.

Of a step of a run on completions it is a chart for https://ui.perfetto.dev. Such a run writes `spans.jsonl`: for each
step its activities, such as sampling, waiting for rewards and updates, each with the thread that was busy with it. The
chart has a row for each thread. Of an asynchronous run a step's completions were sampled while earlier steps were
learned from: its own sampling is shown, and all that happened while it was learned from.

Of a profile (`logging.profile`) it is a table of kernels: a GPU's streams, a TPU's operations, or a CPU's threads, read
by `jax.profiler.ProfileData`. Which part of the model a kernel belongs to is in the compiled programs, which the same
file holds as HLO (`_parts`); `PARTS` are the scopes that tunix's programs name.

At the end, what a run has recorded for another tool: its completions as trajectories (`tunix export --format atif`).
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from tunix import __version__
from tunix.errors import UserError
from tunix.recipe.recipe import recipe_of_run
from tunix.rollout.types import SPANS, Span
from tunix.serving.tinker.wire import message_classes
from tunix.trainer.config import PROFILE
from tunix.util.atomic_io import MOVE, SAMPLES, atomic_folder, read_rows, reading, refuse_out, write_text_atomic
from tunix.util.yaml_io import read_mapping

PARTS = (
    *("embed", "norm", "attention", "deltanet", "ffn", "experts", "vision", "head", "loss", "optimizer", "draw"),
    r"layer\d+",
)
"""Scopes (`jax.named_scope`) of the parts of tunix's programs; layers have theirs where they run unrolled."""
SCOPE = re.compile(rf"(?<![^/(])(?:{'|'.join(PARTS)})(?![^/)])")
HOLDERS = re.compile(r"(while|conditional|call)(\.|$)")
"""Operations that only run others, which a CPU and a TPU list too; what a GPU lists of them are kernels, or copies."""
SHOWN = 20
"""Kernels in the table."""
SCHEMA = """
XSpace: 1 planes *XPlane
XPlane: 2 name bytes, 4 event_metadata *EventMetadataEntry
EventMetadataEntry: 2 value XEventMetadata
XEventMetadata: 2 name bytes, 5 stats *XStat
XStat: 6 bytes_value bytes
HloProto: 1 hlo_module HloModuleProto
HloModuleProto: 3 computations *HloComputationProto
HloComputationProto: 2 instructions *HloInstructionProto
HloInstructionProto: 1 name string, 7 metadata OpMetadata
OpMetadata: 2 op_name string
"""
"""What is read of a profile's messages; names may be no text."""


def trace(run: Path, step: int, out: Path | None = None) -> Path:
    """Writes a step's activities in Chrome's trace format, which Perfetto opens; returns the file.

    Args:
        run: the run folder.
        step: the step's number, from 1.
        out: the file; None for `trace-STEP.json` in the run folder, which may be written again.

    Raises:
        UserError: the run has recorded no such step, or the file exists.
    """
    rows = read_rows(run / SPANS, "step", "spans")
    with reading(run / SPANS, MOVE):
        steps = {row["step"]: [Span(*span) for span in row["spans"]] for row in rows}
    if step not in steps:
        there = (
            f"it has recorded steps {min(steps)} to {max(steps)}" if steps else "only runs on completions record any"
        )
        raise UserError(f"{run / SPANS} has nothing of step {step}: {there}")
    if out is not None:
        refuse_out(out)
    with reading(run / SPANS, MOVE):
        # The activities of the step, and of others meanwhile, in microseconds since the first of them.
        learned = [span for span in steps[step] if span.name == "update"] or steps[step]
        opened, ended = min(span.start for span in learned), max(span.end for span in learned)
        shown = [
            (number, span)
            for number, spans in steps.items()
            for span in spans
            if number == step or (span.end > opened and span.start < ended)
        ]
        begin = min(span.start for _, span in shown)
        threads = sorted({span.thread for _, span in shown}, key=lambda name: (name != "MainThread", name))
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
            for number, name in enumerate(threads)
        ]
        for number, span in shown:
            times = {"ts": round(1e6 * (span.start - begin)), "dur": round(1e6 * (span.end - span.start))}
            about = {"name": span.name, "cat": f"step {number}", "args": {"step": number}}
            events.append({"ph": "X", **about, "pid": 1, "tid": threads.index(span.thread), **times})
    file = out or run / f"trace-{step}.json"
    write_text_atomic(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return file


class Kernel(NamedTuple):
    """One execution of a kernel or, on a TPU and a CPU, of an operation."""

    name: str
    """Without the number by which a compiler tells copies apart, e.g. `fusion` of `fusion.3.clone`."""
    start: float
    """Nanoseconds, as is `end`."""
    end: float
    program: str
    """The compiled program, e.g. `step`; empty where the profile does not say."""
    scope: str
    """Where in the program it was written, e.g. `jit(step)/.../transpose(jvp(head))/dot_general`, or empty."""


def profiled(run: Path) -> Iterator[str]:
    """Yields the lines of the table of a run's newest profile: busy share, host's gaps, parts, kernels.

    Raises:
        UserError: the folder is no run, has no profile yet, or one that is damaged.
    """
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no recipe.yaml")
    folders = [run / PROFILE, *run.glob(f"*/{PROFILE}")]  # with stages, of each stage
    files = sorted(
        (x for folder in folders for x in folder.rglob("*.xplane.pb") if x.is_file()), key=lambda x: x.stat().st_mtime
    )
    if not files:
        recipe = recipe_of_run(run)
        window = None if recipe is None else recipe.logging.profile
        if window is None:
            raise UserError(
                f"{run} has no profile: set logging.profile.steps=[10,12] before those steps; of a run on completions "
                f"`tunix trace {run} STEP` draws a step"
            )
        raise UserError(f"{run} has no profile yet: it is written after step {window.steps[1]}")
    import jax  # reading needs no device

    data = files[-1].read_bytes()
    try:
        planes = jax.profiler.ProfileData.from_serialized_xspace(data).planes
        devices, steps = kernels_of(planes, _scopes(data))
    except (RuntimeError, LookupError, TypeError, ValueError, DecodeError) as error:
        raise UserError(f"{files[-1]} is damaged, or still being written: {str(error).splitlines()[0]}") from error
    if not devices:
        raise UserError(f"{files[-1]} has no kernel in it: the profiler saw no device at work")
    yield f"{files[-1]}" + f", the newest of {len(files)}" * (len(files) > 1)
    yield from table(devices, steps)


def kernels_of(
    planes: Iterable[Any], scopes: Mapping[tuple[str, str], str]
) -> tuple[dict[str, list[Kernel]], dict[int, float]]:
    """The kernels of each device, in the order of time, and when each step began, in nanoseconds.

    Args:
        planes: as `jax.profiler.ProfileData` has them. That of `/device:GPU:0` has lines such as `Stream #13(Compute)`,
            that of `/device:TPU:0` a line `XLA Ops`; without any the operations of the host's threads count.
        scopes: see `_scopes`.
    """
    devices, host, steps = defaultdict[str, list[Kernel]](list), list[Kernel](), dict[int, float]()
    for plane in planes:
        on_device = plane.name.startswith("/device:")
        for line in plane.lines:
            if on_device and not line.name.startswith(("Stream", "XLA Ops")):
                continue
            for event in line.events:
                stats = {name: value for name, value in event.stats if name is not None}
                if event.name == "step" and "step_num" in stats:
                    steps[int(stats["step_num"])] = event.start_ns
                if not on_device and "hlo_op" not in stats:
                    continue
                name = event.name.removeprefix("%").partition(" = ")[0]
                operation = str(stats.get("hlo_op", name))
                if not line.name.startswith("Stream") and HOLDERS.match(operation):
                    continue
                program, number = str(stats.get("hlo_module", "")), str(stats.get("program_id", ""))
                scope = stats.get("tf_op") or scopes.get((number, operation)) or scopes.get((program, operation), "")
                name = re.sub(r"(\.(\d+|clone|remat\d*))+$", "", name)
                kernel = Kernel(name, event.start_ns, event.end_ns, program.removeprefix("jit_"), str(scope))
                (devices[plane.name] if on_device else host).append(kernel)
    if not devices and host:
        devices["/host:CPU"] = host
    return {name: sorted(kernels, key=lambda kernel: kernel.start) for name, kernels in devices.items()}, steps


def table(devices: Mapping[str, list[Kernel]], steps: Mapping[int, float]) -> Iterator[str]:
    """Yields lines of at most 80 columns; numbers are for one step of one device, in the mean.

    Args:
        devices: of each device its kernels, at least one, in the order of time.
        steps: when each step began.
    """
    number, busy, window = max(len(steps), 1) * len(devices), 0.0, 0.0
    share = 1e6 * number  # what is nanoseconds of them all, divided by this, is milliseconds of a step
    gaps: list[tuple[float, float, str]] = []
    for kernels in devices.values():
        # From the first step's beginning: the device waits for the host there, too.
        reached = begin = min([kernels[0].start, *steps.values()])
        for kernel in kernels:
            if kernel.start > reached:
                gaps.append((kernel.start - reached, reached, kernel.name))
            busy += max(0.0, kernel.end - max(reached, kernel.start))
            reached = max(reached, kernel.end)
        window += reached - begin
    every = [kernel for kernels in devices.values() for kernel in kernels]
    of = f"steps {min(steps)} to {max(steps)}" if steps else "all that was traced, as one step"
    kind = next(iter(devices)).partition(":")[2]
    yield f"{of}; {len(devices)} x {kind}; {len(every) / number:,.0f} kernels a step"
    yield f"busy {busy / window:.1%}: {busy / share:,.3f} of {window / share:,.3f} ms a step"
    if gaps:
        longest, at, name = max(gaps)
        step = max((step for step, start in steps.items() if start <= at), default=None)
        where = f" in step {step}" * (step is not None)
        yield f"idle {(window - busy) / share:,.3f} ms a step, in {len(gaps) / number:,.0f} gaps between kernels"
        yield f"the longest: {longest / 1e6:,.3f} ms{where}, before {name[:40]}"
    parts, names, launches = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    layers = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
    for kernel in every:
        spent, named = kernel.end - kernel.start, SCOPE.findall(kernel.scope)
        part = next((name for name in reversed(named) if not name.startswith("layer")), "other")
        backward = ", backward" if "transpose(" in kernel.scope else ""
        parts[f"{kernel.program or 'unknown'}: {part}{backward}"] += spent
        names[kernel.name] += spent
        launches[kernel.name] += 1
        for layer in (name for name in named if name.startswith("layer")):
            layers[kernel.program][layer] += spent
    whole = sum(parts.values())
    for title, times in (("  program: part", parts), ("launches  kernel", names)):
        yield f"\n   ms a step   share  {title}"
        for name, spent in sorted(times.items(), key=lambda item: -item[1])[:SHOWN]:
            number_of = f"{launches[name] / number:8,.1f}" if times is names else ""
            yield f"{spent / share:12,.3f}  {spent / whole:6.1%}  {number_of}  {name}"[:80]
    for program, times in layers.items():
        fastest, slowest = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
        least, most = times[fastest] / share, times[slowest] / share
        yield f"\n{program}: {len(times)} layers of {least:,.3f} ms ({fastest}) to {most:,.3f} ms ({slowest})"


def _scopes(data: bytes) -> dict[tuple[str, str], str]:
    """Program (its number, and its name) and operation -> where it was written, of all programs in a profile.

    Its plane `/host:metadata` has an `HloProto` as a stat of each program's event metadata (openxla's `xplane.proto`,
    `hlo.proto`), which `ProfileData` does not give.
    """
    messages, scopes = message_classes(SCHEMA), dict[tuple[str, str], str]()
    for plane in messages["XSpace"].FromString(data).planes:
        for event in plane.event_metadata if plane.name == b"/host:metadata" else ():
            module, _, number = event.value.name.decode().removesuffix(")").rpartition("(")
            for stat in event.value.stats:
                for computation in messages["HloProto"].FromString(stat.bytes_value).hlo_module.computations:
                    for instruction in computation.instructions:
                        if scope := instruction.metadata.op_name:
                            scopes[number, instruction.name] = scopes[module, instruction.name] = scope
    return scopes


ATIF = "ATIF-v1.7"
"""Version of the Agent Trajectory Interchange Format, https://www.harborframework.com/docs/agents/trajectory-format."""


def export_trajectories(run: Path, out: Path) -> int:
    """Writes each recorded completion as a trajectory, `STEP-GROUP-NUMBER.json` in a new folder; returns how many.

    Raises:
        UserError: the run has recorded none, or the folder exists.
    """
    samples = [row for row in read_rows(run / SAMPLES, "step") if "prompt" in row and "completion" in row]
    if not samples:
        raise UserError(f"{run} has recorded no samples: logging.samples and eval.samples say how many are")
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no recipe.yaml")
    with reading(run / "recipe.yaml"):
        model = read_mapping(run / "recipe.yaml").get("model", {})
        model = model.get("path") or model.get("family")
    agent = {"name": "tunix", "version": __version__, "model_name": str(model)}
    counts = Counter[str]()
    with atomic_folder(out) as folder, reading(run / SAMPLES):
        for row in samples:
            group = "-".join(str(row[key]) for key in ("step", "task", "group") if key in row).replace("/", "_")
            name = f"{group}-{counts[group]}"
            counts[group] += 1
            begin = {"schema_version": ATIF, "session_id": run.resolve().name, "trajectory_id": name, "agent": agent}
            (folder / f"{name}.json").write_text(json.dumps({**begin, **_trajectory(row)}, indent=1))
    return len(samples)


def _trajectory(row: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of a sample. Where the values of its tokens tell them apart, the model's turns are steps of the agent,
    and what an environment wrote after one is the observation of that step; else its completion is one step."""
    prompt, completion = (x if isinstance(x := row[key], str) else json.dumps(x) for key in ("prompt", "completion"))
    steps: list[dict[str, Any]] = [{"source": "user", "message": prompt}]
    values = row.get("per_token", {})
    tokens = [str(token) for token in values.get("tokens", ())]
    turns = [(drawn, list(places)) for drawn, places in groupby(range(len(tokens)), lambda i: values["trained"][i])]
    for drawn, places in turns if len(turns) > 1 else ():
        text = "".join(tokens[i] for i in places)
        if drawn:
            measured = {name: [x[i] for i in places] for name, x in values.items() if name not in ("tokens", "trained")}
            metrics = {"completion_tokens": len(places), "logprobs": measured.pop("logprobs")}
            steps.append({"source": "agent", "message": text, "metrics": metrics, "extra": measured})
        elif steps[-1]["source"] == "agent":
            steps[-1]["observation"] = {"results": [{"content": text}]}
        else:  # before its first turn
            steps.append({"source": "user", "message": text})
    if len(steps) == 1:
        metrics = {"completion_tokens": row.get("tokens", len(tokens) or None)}
        metrics |= {"logprobs": values["logprobs"]} if values else {}
        steps.append({"source": "agent", "message": completion, "metrics": metrics})
    extra = {name: x for name, x in row.items() if name not in ("prompt", "completion", "per_token")}
    return {"steps": [{"step_id": i, **step} for i, step in enumerate(steps, 1)], "extra": extra}
