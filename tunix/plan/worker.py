"""`python -m tunix.plan.worker`: plans one recipe; reads a request on standard input, writes lines of JSON.

What a run's programs need together, whether that fits, and how fast they could be. A program runs beside everything
that the run holds meanwhile: the need of the run is the largest sum of a program's own peak and of what it does not
read. Its compiler says the peak, which is kept in the user's cache by digest. What programs multiply, move and send,
and the least times that follow, are arithmetic (`arithmetic.py`), at the peaks of the devices: no run is faster.

Where a recipe does not fit, a short list of changes is tried, the smallest first (`remedies`). All that is done in a
process of its own, since compilers of devices that are not here are set up once in a process, and since it may have to
be stopped.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from tunix.errors import UserError
from tunix.plan.record import Program, programs_of
from tunix.plan.subject import Place, Subject, subject_of
from tunix.recipe.recipe import Recipe
from tunix.trainer.mesh_choice import memory_of
from tunix.util import chips
from tunix.util.atomic_io import write_text_atomic
from tunix.util.chips import Chip, chip_of, number_of
from tunix.util.yaml_io import overridden

KEPT = Path("~/.cache/tunix/plans")
VERSION = "7"
"""Part of every digest: raised where what is kept of a program changes."""
NUMBER = r"([\d.]+)\s*([KMGT]?)i?B?"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
Tell = Callable[[dict[str, Any]], None]
AT_ONCE = 2
"""Programs that are compiled at a time: each takes a gigabyte or two of the host's memory."""
SHOWN = (
    *("name", "place", "times", "tokens", "model_flops", "work", "total", "kinds", "buffers", "refused"),
    *("seconds", "bound", "traced_in", "compiled_in"),
)
"""What a report has of each program."""


def compiled(lowered: jax.stages.Lowered, target: str) -> dict[str, Any]:
    """What the compiler for `target` says of a program, or is known to have said: fields of `Program`."""
    said = (VERSION, jax.__version__, target, lowered.as_text())
    file = KEPT.expanduser() / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()}.json"
    if file.is_file():
        return json.loads(file.read_text())
    start = time.perf_counter()
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        answer = refusal(str(error))
    else:
        assert memory is not None, "its compiler has an analysis of a program's memory"
        # Backends that do not report a peak: what is there at the end, and all temporaries.
        whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        answer: dict[str, Any] = {"peak": int(memory.peak_memory_in_bytes or whole + memory.temp_size_in_bytes)}
    answer["compiled_in"] = time.perf_counter() - start
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps(answer))
    return answer


def refusal(message: str) -> dict[str, Any]:
    """What the message of a compiler that ran out of memory says: fields of `Program`."""
    asked = re.search(rf"(?:Used|requires?|allocate|need\w*)\D{{0,40}}{NUMBER}", message)
    # A TPU's compiler lists the largest allocations: size, shape, and the operation that they belong to.
    listed = re.findall(rf"Size: {NUMBER}\s+(?:Operator: op_name=\"([^\"]*)\"[^\n]*\s+)?Shape: ([\w\[\],]+)", message)
    return {
        "peak": int(float(asked[1]) * UNITS[asked[2]]) if asked else 0,
        "refused": message.splitlines()[0][:300],
        "buffers": [[int(float(n) * UNITS[unit]), shape, scope] for n, unit, scope, shape in listed[:5]],
    }


@dataclass(frozen=True)
class Target:
    """The devices of a plan."""

    name: str
    """A topology such as `h100:8`, or the kind of the devices at hand."""
    number: int
    """How many there are, of all places together."""
    limit: int
    """Bytes that programs may take on each."""
    chip: Chip | None = None
    """Published figures; None where they are not known."""


def target_of(named: str | None) -> tuple[Target, list[Any]]:
    """The devices of a topology, or those at hand, and what they have."""
    if named is not None:
        chip = chip_of(named)
        chips.hasten(chip.platform)
        devices = chips.devices_of(named)
        return Target(named, len(devices), chips.limit_of(named), chip), devices
    devices = jax.devices()
    chips.hasten(devices[0].platform)
    # Virtual devices of a CPU share its memory.
    limit = memory_of(devices) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    return Target(devices[0].device_kind, len(devices), int(limit)), devices


@dataclass(frozen=True)
class Verdict:
    """The needs of a run beside what its devices have."""

    target: Target
    held: dict[Place, dict[str, int]]
    """Bytes on each device between two programs, by place and by what they are."""
    programs: list[Program]
    """Those with the largest need first."""
    devices: dict[Place, int]
    """How many devices each place has."""
    chosen: tuple[str, ...] = ()
    """Lines about what was left to tunix, from `Subject`."""
    concurrent: bool = False
    """Whether places work at the same time, and not in turns."""

    def most_on(self, place: Place) -> int:
        """Bytes that the run needs on each device of a place."""
        needed = [program.total for program in self.programs if program.place == place]
        return max(needed or [sum(self.held[place].values())])

    @property
    def misfits(self) -> list[Place]:
        """The places whose devices have not enough memory."""
        refused = {program.place for program in self.programs if program.refused}
        return [place for place in self.held if place in refused or self.most_on(place) > self.target.limit]

    def report(self) -> dict[str, Any]:
        """Plain values of everything, for JSON."""
        places = {
            place: {"number": self.devices[place], "needed": self.most_on(place), "held": held}
            for place, held in self.held.items()
        }
        return {
            "devices": self.target.name,
            "number": self.target.number,
            "limit": self.target.limit,
            "needed": max(map(self.most_on, self.held)),
            "fits": not self.misfits,
            "places": places,
            "chosen": self.chosen,
            "programs": [
                {"sent": program.sent.kinds, **{name: vars(program)[name] for name in SHOWN}}
                for program in self.programs
            ],
            "prediction": self.prediction(),
        }

    def prediction(self) -> dict[str, float] | None:
        """Seconds of a step, trained tokens a second and MFU by the rooflines; None where they are not known."""
        chip, timed = self.target.chip, [program for program in self.programs if program.times]
        if chip is None or not timed or any(program.refused for program in timed):
            return None
        each = [
            sum(program.times * (program.seconds or 0.0) for program in timed if program.place == place)
            for place in self.held
        ]
        seconds = max(each) if self.concurrent else sum(each)
        trained = [program for program in timed if program.model_flops]
        work, peak = sum(one.times * one.model_flops for one in trained), chip.flops * self.target.number
        tokens = sum(program.times * program.tokens for program in trained if program.name == "step")
        return {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": work / peak / seconds}


def examined(subject: Subject, target: Target, tell: Callable[[str], None] = lambda _: None) -> Verdict:
    """Compiles all programs of a run, and tells the name of each before that."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        each = pool.map(lambda x: measured(x, subject.held[x.place], target, tell), programs_of(subject))
        programs = sorted(each, key=lambda x: x.total, reverse=True)
    concurrent = subject.setup.recipe.rollout.max_staleness > 0
    return Verdict(target, subject.held, programs, subject.devices, subject.chosen, concurrent)


def refuted(subject: Subject, target: Target, place: Place) -> bool:
    """Whether the run does not fit the devices of a place: stops at the first program that is too large, and compiles
    none needlessly."""
    held = subject.held[place]
    if sum(held.values()) > target.limit:
        return True
    # Those that arithmetic knows come first.
    programs = sorted(programs_of(subject), key=lambda program: program.lowered is not None)
    needs = (measured(program, held, target) for program in programs if program.place == place)
    return any(program.refused or program.total > target.limit for program in needs)


def measured(
    program: Program, held: dict[str, int], target: Target, tell: Callable[[str], None] = lambda _: None
) -> Program:
    """A program with what it needs and the least time that it takes, by its compiler where it has to be asked; `held`
    are bytes on each device that the run holds between two programs, by what they are."""
    if program.lowered is None:
        kinds = {**held, "caches": program.caches, "copies": program.peak - program.caches}
        total = sum(kinds.values())
    else:
        tell(program.name)
        program = replace(program, **compiled(program.lowered, target.name))
        beside = sum(size for name, size in held.items() if name not in program.reads) + program.besides
        total, kinds = program.peak + beside, {**held, "caches": program.caches + max(program.besides, 0)}
        rest = max(total - sum(kinds.values()), 0)
        # A compiler may let gradients take the place of what is no longer read.
        gradients = min(program.gradients, rest)
        kinds |= {"gradients": gradients, "activations and temporaries": rest - gradients}
        if target.chip is not None:
            seconds, bound = program.work.seconds(target.chip.fastest)
            times = {bound: seconds, **program.sent.seconds(target.chip)}
            bound = max(times, key=lambda name: times[name])
            program = replace(program, seconds=times[bound], bound=bound)
    return replace(program, total=total, kinds={name: size for name, size in kinds.items() if size})


MOST_DEVICES = 64
"""Devices that are suggested at most."""
Change = tuple[str, ...]
"""Words for `tunix plan`: overrides such as `model.remat=block`, and other devices as `--topology h100:8`."""
TOPOLOGY = "--topology "


def remedies(recipe: Recipe, worst: str, topology: str | None, place: Place = "training") -> Iterator[Change]:
    """Changes to a recipe without stages to try, in order, where the devices of a place have not enough memory for the
    program of name `worst`."""
    slots, size = recipe.rollout.slots or 256, recipe.micro_batch_size or recipe.sequences_per_update
    fewer_slots = [(f"rollout.slots={slots // part}",) for part in (2, 4, 8, 16) if slots // part]
    smaller = [f"micro_batch_size={size // part}" for part in (2, 4, 16) if size // part]
    if place == "teaching":
        yield from ((words,) for words in smaller)
        return
    if place == "sampling":
        yield from fewer_slots
        # Copies of the weights on more of the devices that only sample.
        mesh = recipe.rollout.devices
        assert mesh is not None, "devices of its own are written"
        assert mesh.devices is not None
        tensor = 2 * mesh.tensor
        while tensor <= mesh.devices:
            yield (f"rollout.mesh.tensor={tensor}",)
            tensor *= 2
        return
    if worst in ("decode", "prefill", "pages of the cache", "publish"):
        yield from fewer_slots
    else:  # fewer activations at a time: recomputed layers, then smaller micro-batches
        layers = () if recipe.model.remat != "none" else ("model.remat=block",)
        if layers:
            yield layers
        yield from ((*layers, words) for words in smaller)
    optimizer = recipe.optimizer
    if optimizer.name in ("adamw", "lion") and optimizer.moments_dtype == "float32":
        # Moments in bfloat16, with the decay that they need.
        slow = optimizer.name == "adamw" and optimizer.constants["b2"] > 0.996
        yield ("optimizer.moments_dtype=bfloat16", *(["optimizer.b2=0.99"] if slow else []))
    if recipe.adapter is None:
        yield ("adapter={kind: lora, rank: 16, alpha: 32}",)
    if topology is not None:  # the same chips, 2 to 64 of them; of TPUs the shapes that exist
        name = topology.split(":")[0]
        gpus = chip_of(topology).platform == "gpu"
        for shape in ("2", "4", "8", "16", "32", "64") if gpus else chips.SHAPES[name]:
            if number_of(topology) < number_of(f"{name}:{shape}") <= MOST_DEVICES:
                yield (f"{TOPOLOGY}{name}:{shape}",)


def change(recipe: Recipe, verdict: Verdict, named: str | None, tell: Tell) -> str | None:
    """The changes with which the recipe fits, one for each place that is too small; None where there are none."""

    def suits(words: Change, places: Collection[Place]) -> bool:
        overrides = [word for word in words if not word.startswith(TOPOLOGY)]
        others = [word.removeprefix(TOPOLOGY) for word in words if word.startswith(TOPOLOGY)]
        try:
            changed = Recipe.build(overridden(recipe.sections(), overrides), "plan") if overrides else recipe
            target, devices = target_of(others[0] if others else named)
            subject = subject_of(changed, devices, float(target.limit))
        except UserError:  # a change that this recipe does not allow
            return False
        return not any(refuted(subject, target, place) for place in places)

    def first(place: Place) -> Change | None:
        worst = next((program.name for program in verdict.programs if program.place == place), "")
        for words in remedies(recipe, worst, named, place):
            tell({"trying": " ".join(words)})
            if suits(words, [place]):
                return words
        return None

    changes = [words for words in map(first, verdict.misfits) if words is not None]
    together = tuple(word for words in changes for word in words)
    # What helps one place must not be too much for another.
    return " ".join(together) if len(changes) == len(verdict.misfits) and suits(together, verdict.held) else None


SOURCE = ("path", "init", "family", "preset", "sizes")
"""Keys of `model` that say what it is."""


def answer(request: dict[str, Any], tell: Tell) -> None:
    """Plans every stage of a recipe, and tries changes where one does not fit.

    A request has `recipe` and `name` of `Recipe.build`, `topology` (None for the devices at hand) and `remedies`.
    """
    named = request["topology"]
    recipe = Recipe.build(request["recipe"], request["name"])
    for number, stage in enumerate(recipe.stages or (recipe,)):
        # A later stage's folder does not exist yet: its model is the first one's.
        model = stage.model.model_copy(update={name: vars(recipe.model)[name] for name in SOURCE})
        stage = stage.model_copy(update={"model": model})
        tell({"begun": number})
        target, devices = target_of(named)
        subject = subject_of(stage, devices, float(target.limit))
        verdict = examined(subject, target, lambda program: tell({"compiling": program}))
        tell({"verdict": verdict.report(), "stage": number})
        if verdict.misfits and request["remedies"]:
            tell({"change": change(stage, verdict, named, tell), "stage": number})


def main() -> None:
    """Answers the request: one line for each stage's verdict, one for each change that was tried, or one error."""
    request = json.loads(sys.stdin.read())
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Compilers write to both: only the lines of this protocol go to the first.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    if request["topology"] is not None:
        chips.prepare()
    # A program that is read back from it may not say its peak.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        answer(request, tell)
    except UserError as error:
        tell({"error": str(error)})


if __name__ == "__main__":
    main()
