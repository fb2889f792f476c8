"""Trains a recipe: starts or resumes the run, finishes it, exports its weights.

The run folder holds `recipe.yaml` (resolved), `log.txt`, `metrics.jsonl`, `samples.jsonl`, `checkpoints/` (unless
`checkpoint.folder` is elsewhere) and at the end `curves.svg` and `export/`: a Hugging Face folder, or a PEFT adapter
where an adapter was trained on a published base. A recipe with stages has one such folder per stage, each starting from
the export of the one before.
"""

import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tunix import __version__
from tunix.config import RowKind
from tunix.distributed import processes
from tunix.distributed.meeting import together
from tunix.errors import UserError
from tunix.hf.source import TOKENIZER
from tunix.recipe.recipe import Recipe, flattened
from tunix.rollout.types import SPANS
from tunix.run.build import assemble
from tunix.run.curves import write_curves
from tunix.run.evaluation import unigram_entropy
from tunix.run.export import report_merging
from tunix.run.folder import checkpoint_folder, claimed, explaining_full_disk, move_aside, trained
from tunix.run.loop import Loop, handling
from tunix.run.recorder import Recorder
from tunix.run.watchdog import Watchdog
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.metrics import JsonLines, Sink, perplexity, require_trackers
from tunix.trainer.progress import Display, readable
from tunix.trainer.trackers import trackers
from tunix.util.atomic_io import SAMPLES, forget_after, read_rows, write_text_atomic
from tunix.util.startup import prepare_jax


@dataclass(frozen=True)
class RunResult:
    """The metrics, samples and exported weights of a finished run."""

    folder: Path
    """The run folder; with stages, that of the last one."""
    metrics: list[dict[str, Any]]
    """The rows of metrics.jsonl, e.g. `{"step": 7, "train/loss": 2.04}`."""
    samples: list[dict[str, Any]]
    """The rows of samples.jsonl."""
    unigram_entropy: float | None
    """Held-out loss in nats of predicting tokens by their frequency alone; None where it is not computed."""

    @property
    def export(self) -> Path:
        """The exported weights: a Hugging Face folder, or a PEFT adapter."""
        return self.folder / "export"


def result_of(folder: Path, entropy: float | None) -> RunResult:
    """Reads the result of a finished run from its folder."""
    return RunResult(folder, read_rows(folder / "metrics.jsonl", "step"), read_rows(folder / SAMPLES, "step"), entropy)


def summary(result: RunResult, recipe: Recipe, picture: Path | None) -> list[str]:
    """The final lines of a run or a stage: what was reached, and where the curves and the weights are."""
    sides = (
        "completions on their label's side" if recipe.algorithm.reads == RowKind.LABELS else "pairs in the right order"
    )
    measured = (
        ("eval/reward", "held-out reward", " (greedy answers)"),
        ("eval/rewards/accuracy", f"held-out {sides}", ""),
        ("eval/distill/divergence", "held-out distance to the teacher", " nats per token"),
        *((x, f"{task.name}: {x.rpartition('/')[2]}", "") for task in recipe.eval.tasks for x in task.metrics),
    )
    lines: list[str] = []
    for metric, words, end in measured:
        if values := [row[metric] for row in result.metrics if isinstance(row.get(metric), int | float)]:
            lines.append(f"{words} {values[0]:.3f} -> {values[-1]:.3f}{end}")
    losses = [row["eval/loss"] for row in result.metrics if isinstance(row.get("eval/loss"), int | float)]
    if losses and result.unigram_entropy is not None:
        first, last = losses[0], losses[-1]
        lines.append(f"held-out loss {first:.3f} -> {last:.3f} nats per token (perplexity {perplexity(last):.3g})")
        # What an adapter can do on a random model, as with --tiny, says nothing beside it.
        if recipe.adapter is None or recipe.model.init == "pretrained":
            lines.append(f"knowing only how common each token is would give {result.unigram_entropy:.3f}")
    lines += [f"curves: {picture}"] if picture else []
    return [*lines, f"weights: {result.export}"]


def next_commands(recipe: Recipe, run: Path, *, chats: bool) -> list[str]:
    """What people do next with a finished run: the commands that work for it, a line each.

    `recipe` is the last stage's; one that was trained on token ids alone, without a tokenizer, cannot chat.
    """
    name = shlex.quote(str(run))
    held_out = bool(recipe.data.eval or recipe.data.eval_split)
    commands = {
        f"tunix chat {name}": "talk with it" if chats and recipe.algorithm.has_lm_head else None,
        f"tunix eval {name}": "measure it on its held-out rows" if held_out else None,
        f"tunix eval {name} ROWS": None if held_out else "measure it on rows of yours",
        f"tunix export {name} OUT": "a folder for transformers and vLLM",
    }
    width = max(len(command) for command, use in commands.items() if use)
    return ["next:", *(f"  {command:<{width}}  {use}" for command, use in commands.items() if use)]


LOG = "log.txt"
"""What was said while the run went on, with times, and the details that were not displayed."""


def run(recipe: Recipe, *, fresh: bool, minutes: int | None, verbose: bool) -> RunResult:
    """As `opening.train`, of a recipe about which the first line has been said."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    prepare_jax()
    if any(stage.logging.profile is not None for stage in recipe.stages or (recipe,)):
        # Else a program that the cache has from before, of the same text, would say where that one was written.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    # SIGTERM is handled like Ctrl-C, so that everything is cleaned up, also outside of the training loop.
    with (
        handling((signal.SIGTERM,), signal.default_int_handler),
        together(partial(print, file=sys.stderr, flush=True)),
        explaining_full_disk(recipe.output),
        ExitStack() as stack,
    ):
        # What all processes of a run have in common.
        values = {f"recipe, {name}": str(value) for name, value in flattened(recipe.sections())}
        processes.agree({"version of tunix": __version__, "version of jax": jax.__version__, **values})
        if processes.lead():  # the others write into folders of their own
            for stage in recipe.stages or (recipe,):
                require_trackers(stage.logging)
            folder = stack.enter_context(claimed(recipe, fresh))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tunix-")))
        processes.barrier("folder")
        if not recipe.stages:
            return _run(recipe, folder, folder, deadline=deadline, verbose=verbose)
        # In folders within that one; finished stages only report that they are.
        places = [folder / Path(stage.output).name for stage in recipe.stages]
        results: list[RunResult] = []
        for number, (stage, place) in enumerate(zip(recipe.stages, places, strict=True), 1):
            place.mkdir(exist_ok=True)
            write_text_atomic(place / "recipe.yaml", stage.to_yaml())
            name, after = f"stage {number} of {len(places)}, ", (*places, None)[number]
            results.append(_run(stage, place, folder, name, results, after, deadline=deadline, verbose=verbose))
        return results[-1]


def _run(
    recipe: Recipe,
    folder: Path,
    root: Path,
    name: str = "",
    before: Sequence[RunResult] = (),
    after: Path | None = None,
    *,
    deadline: float | None,
    verbose: bool,
) -> RunResult:
    """Runs one stage from its last checkpoint to its end.

    Args:
        root: the folder of the whole run; `folder` itself where there is one stage.
        name: what the line about the stage begins with, e.g. `stage 1 of 2, `.
        before: the results of the stages before it.
        after: the folder of the next stage, which starts from this one's export; None without one.
        deadline: when to stop with a checkpoint, by `time.monotonic`; None for no limit.
    """
    with ExitStack() as stack:
        place = checkpoint_folder(recipe, Path(recipe.output).expanduser())
        checkpoints = stack.enter_context(closing(Checkpoints(place, recipe.checkpoint)))
        start = processes.broadcast("start", checkpoints.latest)
        display = Display(folder.name, recipe.steps or 0, start or 0, log=folder / LOG, verbose=verbose)
        stack.enter_context(closing(display))
        stack.enter_context(display.collecting_warnings())
        stack.enter_context(closing(Watchdog(display)))
        if start is None and processes.broadcast("exported", (folder / "export").exists):
            display.say(f"{folder} is finished and its checkpoints are gone: it can only start again, with --fresh")
            return result_of(folder, None)
        # What earlier starts wrote after that checkpoint is deleted, or was being written when a process was killed.
        for path in folder.glob(f"*.tmp-{'[0-9a-f]' * 8}"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        forget_after(folder / SAMPLES, start)
        if (folder / SPANS).exists():  # of runs on completions alone
            forget_after(folder / SPANS, start)
        if start is None and (folder / TOKENIZER).is_dir():
            shutil.rmtree(folder / TOKENIZER)  # trained on rows that may have been corrected since
        job = assemble(recipe, folder, display, name)
        stack.callback(job.close)
        display.total = job.total
        # A process that does not lead its run writes the file alone.
        sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", start)]
        if processes.lead():
            sections = recipe.sections()
            sinks += trackers(recipe.logging, folder, sections, dict(flattened(sections)), display, start)
        recorder = Recorder(sinks, display, recipe.logging, job.work, recipe.optimizer.on_nonfinite, folder)
        stack.enter_context(closing(recorder))
        if deadline is not None:
            timer = threading.Timer(max(deadline - time.monotonic(), 0), job.stop.set)
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        stack.enter_context(closing(job.samples))
        before_run = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop_after_step(number: int, _: object) -> None:  # a second signal acts at once
            job.stop.set()
            signal.signal(number, before_run[signal.Signals(number)])

        with handling(before_run, stop_after_step):
            loop = Loop(job, checkpoints, recorder, start)
            if loop.finished:
                display.say(f"finished already, at step {loop.step}; a higher steps=... goes on from there")
            else:
                if loop.step:
                    display.say(f"going on from step {loop.step}")
                if (folder / "export").exists():  # of fewer steps
                    if after is not None and trained(after):
                        raise UserError(
                            f"{folder} was asked for more steps, but {after} has started from its weights already: "
                            "start again with --fresh or another output"
                        )
                    move_aside(folder / "export")
                loop.run()
                display.stop()
                display.say(f"done in {readable(recorder.seconds)} s: {folder}")
        if not processes.broadcast("exported", (folder / "export").exists):
            moved = job.client.export(folder / "export", adapter=job.exports_adapter)
            report_merging(moved, recipe, display)
        display.stop()
        measured = job.evaluation.held_out if job.algorithm.measures_likelihood else []
        result = result_of(folder, unigram_entropy([packed.batch for packed in measured]) if measured else None)
        picture = write_curves(folder, [(folder.name, result.metrics)])
        if folder != root:
            # One picture of all stages, in addition to that of each stage.
            picture = write_curves(root, [(stage.folder.name, stage.metrics) for stage in (*before, result)])
        display.say("\n".join(summary(result, recipe, picture)))
        if after is None:
            display.say("\n".join(next_commands(recipe, root, chats=job.samples.tokenizer is not None)))
            if picture is not None:
                display.picture(picture)
    return result
