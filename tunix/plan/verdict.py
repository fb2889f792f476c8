"""What a run's programs need together, whether that fits, and how fast they could be.

A program runs beside everything that the run holds meanwhile: the need of the run is the largest sum of a program's own
peak and of what it does not read; its compiler says the peak. The least times are arithmetic (`arithmetic.py`), at the
peaks of the devices: no run is faster.

What a compiler says of a program is kept in the user's cache by digest. jax's own cache of compiled programs does not
look at scopes, from which the trip counts of loops are read: it is not used here.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from tunix.plan.account import COLLECTIVES, account, largest
from tunix.plan.arithmetic import NOTHING, Work
from tunix.plan.chips import Chip
from tunix.plan.record import Program, programs_of
from tunix.plan.subject import Place, Subject
from tunix.plan.topology import BETWEEN_HOSTS
from tunix.util.atomic_io import write_text_atomic

KEPT = Path("~/.cache/tunix/plans")
VERSION = "6"
"""Part of every digest: raised where what is read of a program changes."""
NUMBER = r"([\d.]+)\s*([KMGT]?)i?B?"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program, for each device."""

    peak: int
    """Bytes at the most, arguments included."""
    arguments: int
    """Bytes of the arguments."""
    sent: dict[str, list[float]]
    """Kind of collective -> how many run, and the bytes that a device sends in them."""
    sent_far: float
    """Those of these bytes that leave the devices which a fast network joins."""
    buffers: list[list[Any]]
    """The largest arrays that it writes: bytes, type and shape, scope, line of tunix."""
    seconds: float
    """What compiling took."""
    refused: str = ""
    """The compiler's message where the program does not fit; `peak` is then what it asks for."""


def compiled(lowered: jax.stages.Lowered, target: str, near: int) -> Compiled:
    """Compiles a program, or returns what is known of it.

    Args:
        target: the devices' name: programs for other devices are others.
        near: how many devices, in the order of the mesh, a fast network joins.
    """
    text = lowered.as_text()
    said = (VERSION, jax.__version__, target, near, text)
    file = KEPT.expanduser() / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()}.json"
    if file.is_file():
        return Compiled(**json.loads(file.read_text()))
    result = _compiled(lowered, near)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps(asdict(result)))
    return result


def _compiled(lowered: jax.stages.Lowered, near: int) -> Compiled:
    start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(str(error), time.perf_counter() - start)
    seconds, text, memory = time.perf_counter() - start, program.as_text(), program.memory_analysis()
    assert text is not None, "a program for devices has a text"
    assert memory is not None, "and its compiler an analysis of its memory"
    executed = account(text)
    # Backends that do not report a peak: what is there at the end, and all temporaries.
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    reported = getattr(memory, "peak_memory_in_bytes", 0)
    return Compiled(
        peak=int(reported or whole + memory.temp_size_in_bytes),
        arguments=int(memory.argument_size_in_bytes),
        sent={kind: [executed.number(kind), executed.sent(kind)] for kind in COLLECTIVES if executed.number(kind)},
        sent_far=executed.sent_far(near),
        buffers=list(map(list, largest(text))),
        seconds=seconds,
    )


def _refused(message: str, seconds: float) -> Compiled:
    """What the message of a compiler that ran out of memory says."""
    asked = re.search(rf"(?:Used|requires?|allocate|need\w*)\D{{0,40}}{NUMBER}", message)
    peak = int(float(asked[1]) * UNITS[asked[2]]) if asked else 0
    # A TPU's compiler lists the largest allocations: size, shape, and the operation that they belong to.
    listed = re.findall(rf"Size: {NUMBER}\s+(?:Operator: op_name=\"([^\"]*)\"[^\n]*\s+)?Shape: ([\w\[\],]+)", message)
    buffers = [[int(float(n) * UNITS[unit]), shape, scope, ""] for n, unit, scope, shape in listed[:5]]
    return Compiled(peak, 0, {}, 0.0, buffers, seconds, message.splitlines()[0][:300])


AT_ONCE = 2
"""Programs that are compiled at a time: each takes a gigabyte or two of the host's memory."""


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
    near: int = 1
    """How many of them, in the order of the mesh, a fast network joins."""


@dataclass(frozen=True)
class Need:
    """What one program needs on each device, and what it costs."""

    name: str
    total: int
    """Bytes: its own peak and everything that the run holds meanwhile."""
    kinds: dict[str, int]
    """The same by what they are."""
    buffers: list[list[Any]] = field(default_factory=list)
    """The largest arrays that it writes: bytes, type and shape, scope, line of tunix."""
    work: Work = NOTHING
    """What each device multiplies and moves at the least, by arithmetic."""
    sent: dict[str, list[float]] = field(default_factory=dict)
    """Kind of collective -> how many run, and the bytes that a device sends in them."""
    traced_in: float = 0.0
    """Seconds, here."""
    compiled_in: float = 0.0
    """Seconds, here, with what else was compiled at the time; of a TPU's program at the effort of a plan."""
    refused: str = ""
    times: float = 0.0
    """How often it runs in a step of the recipe."""
    model_flops: float = 0.0
    tokens: int = 0
    seconds: float | None = None
    """The least time of one run; None where the devices' figures are not known."""
    bound: str = ""
    """What that is bound by: `compute`, `memory`, `links` or, between hosts of GPUs, `network`."""
    place: Place = "training"
    """Whose devices run it."""


@dataclass(frozen=True)
class Verdict:
    """The needs of a run beside what its devices have."""

    target: Target
    held: dict[Place, dict[str, int]]
    """Bytes on each device between two programs, by place and by what they are."""
    needs: list[Need]
    """Those with the largest first."""
    devices: dict[Place, int]
    """How many devices each place has."""
    chosen: tuple[str, ...] = ()
    """Lines about what was left to tunix, from `Subject`."""
    ahead: bool = False
    """Whether places work at the same time, and not in turns."""

    @property
    def most(self) -> int:
        """Bytes that the run needs on a device, wherever that is most."""
        return max(map(self.most_on, self.held))

    def most_on(self, place: Place) -> int:
        """Bytes that the run needs on each device of a place."""
        return max([need.total for need in self.needs if need.place == place] or [sum(self.held[place].values())])

    @property
    def fits(self) -> bool:
        """Whether every program does."""
        return not self.misfits

    @property
    def misfits(self) -> list[Place]:
        """The places whose devices have not enough memory."""
        refused = {need.place for need in self.needs if need.refused}
        return [place for place in self.held if place in refused or self.most_on(place) > self.target.limit]

    def report(self) -> dict[str, Any]:
        """Plain values of everything, for JSON."""
        places = {
            place: {"number": self.devices[place], "needed": self.most_on(place), "held": held}
            for place, held in self.held.items()
        }
        numbers = {"needed": self.most, "fits": self.fits, "places": places, "chosen": self.chosen}
        target = {"devices": self.target.name, "number": self.target.number, "limit": self.target.limit}
        return {**target, **numbers, "programs": [asdict(need) for need in self.needs], "prediction": self.prediction()}

    def prediction(self) -> dict[str, float] | None:
        """Seconds of a step, trained tokens a second and MFU by the rooflines; None where they are not known."""
        chip, timed = self.target.chip, [need for need in self.needs if need.times]
        if chip is None or not timed or any(need.refused for need in timed):
            return None
        each = [sum(need.times * (need.seconds or 0.0) for need in timed if need.place == place) for place in self.held]
        seconds = max(each) if self.ahead else sum(each)
        trained = [need for need in timed if need.model_flops]
        work, peak = sum(need.times * need.model_flops for need in trained), chip.flops * self.target.number
        tokens = sum(need.times * need.tokens for need in trained if need.name == "step")
        return {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": work / peak / seconds}


def examined(subject: Subject, target: Target, tell: Callable[[str], None] = lambda _: None) -> Verdict:
    """Compiles all programs of a run.

    Args:
        tell: receives the name of each program before it is compiled.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        needs = list(pool.map(lambda program: _need_of(program, subject, target, tell), programs_of(subject)))
    needs.sort(key=lambda need: need.total, reverse=True)
    ahead = subject.setup.recipe.rollout.max_staleness > 0
    return Verdict(target, subject.held, needs, subject.devices, subject.chosen, ahead)


def with_arrays(verdict: Verdict, subject: Subject, target: Target) -> Verdict:
    """A verdict with the largest arrays of the programs that a compiler refused without naming any.

    Args:
        subject: the same run on devices with more memory.
        target: those devices.
    """
    refused = {need.name for need in verdict.needs if need.refused and not need.buffers}
    buffers = {
        program.name: compiled(program.lowered, target.name, target.near).buffers
        for program in programs_of(subject)
        if program.name in refused and program.lowered is not None
    }
    needs = [replace(need, buffers=buffers.get(need.name, need.buffers)) for need in verdict.needs]
    return replace(verdict, needs=needs)


def refuted(subject: Subject, target: Target, place: Place) -> bool:
    """Whether the run does not fit the devices of a place: stops at the first program that is too large, and compiles
    none needlessly."""
    if sum(subject.held[place].values()) > target.limit:
        return True
    # Those that arithmetic knows come first.
    programs = sorted(programs_of(subject), key=lambda program: program.lowered is not None)
    needs = (_need_of(program, subject, target) for program in programs if program.place == place)
    return any(need.refused or need.total > target.limit for need in needs)


def _need_of(program: Program, subject: Subject, target: Target, tell: Callable[[str], None] = lambda _: None) -> Need:
    """What a program needs, by its compiler where it has to be asked."""
    held = subject.held[program.place]
    if program.lowered is not None:
        tell(program.name)
        return _need(program, held, compiled(program.lowered, target.name, target.near), target)
    needed = {"caches": program.caches, "copies": program.peak - program.caches}
    kinds = {**held, **{name: size for name, size in needed.items() if size}}
    return Need(program.name, sum(kinds.values()), kinds, place=program.place)


def _need(program: Program, held: dict[str, int], result: Compiled, target: Target) -> Need:
    rest = sum(size for name, size in held.items() if name not in program.reads) + program.besides
    total = result.peak + rest
    kinds = {**held, "caches": program.caches + max(program.besides, 0)}
    rest = max(total - sum(kinds.values()), 0)
    # A compiler may let gradients take the place of what is no longer read.
    gradients = min(program.gradients, rest)
    kinds |= {"gradients": gradients, "activations and temporaries": rest - gradients}
    seconds, bound = _least(result, program, target)
    return Need(
        program.name,
        total,
        {name: size for name, size in kinds.items() if size},
        result.buffers,
        program.work,
        result.sent,
        program.traced_in,
        result.seconds,
        result.refused,
        program.times,
        program.flops,
        program.tokens,
        seconds,
        bound,
        program.place,
    )


def _least(result: Compiled, program: Program, target: Target) -> tuple[float | None, str]:
    """Seconds that one run takes at the least, and what it waits for."""
    if target.chip is None:
        return None, ""
    seconds, bound = program.work.seconds(target.chip.fastest)
    times = {
        bound: seconds,
        "links": sum(amount for _, amount in result.sent.values()) / target.chip.link,
        "network": result.sent_far / BETWEEN_HOSTS,
    }
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound
