"""What a compiled program executes on each device: kernels, copies, and what devices send each other.

A loop counts as often as it runs: by the trip count that XLA found, or, where that is known only at run time, by what
its scope states (`util/loops.py`). So a choice between branches counts as their mean, weighted by how often each is
taken. FLOPs, bytes and times are not read here: XLA's text says neither what a kernel multiplies nor what a fusion
reads (`arithmetic.py`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tunix.plan.hlo import Computation, Instruction, Program, group, parsed, size
from tunix.util.loops import CHOICE, SCOPE

RAGGED = "ragged-all-to-all"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", RAGGED, "collective-permute")
FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota", "partition-id"),
    *("replica-id", "opt-barrier", "copy-done", "fusion-done", "async-done", "async-update", "domain"),
    "add-dependency",
    *(f"{kind}-done" for kind in COLLECTIVES),
}
"""Operations that move no memory, or whose start has been counted."""
COPYING = {"copy", "copy-done", "dynamic-slice", "dynamic-update-slice", "slice", "reshape", "transpose"}
"""Operations that only move numbers."""
FUSIONS = ("fusion", "fusion-start")
INDICES = 4096
"""Bytes below which what stands in a fusion beside its copies only says where they begin."""


@dataclass(frozen=True)
class Collective:
    """One instruction by which devices exchange arrays."""

    kind: str
    """As XLA calls it, e.g. `all-reduce`."""
    bytes: int
    """What a device sends in one execution, by the fewest that a ring needs."""
    scope: str
    """Where it comes from in the source, e.g. `jit(step)/while/body/dot_general`."""
    group: tuple[int, ...] = ()
    """Numbers of the devices of its first group, in the order of the mesh."""
    times: float = 1.0
    """How often it runs."""
    loops: int = 0
    """How many loops it stands in; 0 for the entry."""


@dataclass
class Account:
    """What one run of a program executes on each device."""

    cycles: float = 0.0
    """What a TPU's compiler estimates; 0 by others. Kernels of our own are in no estimate."""
    collectives: list[Collective] = field(default_factory=list)
    kernels: dict[str, float] = field(default_factory=dict)
    """How often each custom kernel runs, by its name, those within fusions included."""
    copies: dict[int, float] = field(default_factory=dict)
    """How often so many bytes are copied by an instruction that does nothing else, e.g. a slice of a scan's stack."""
    unbounded: list[str] = field(default_factory=list)
    """Scopes of the loops whose trip count nobody states; they are counted once."""

    def sent(self, *kinds: str) -> float:
        """Bytes that a device sends in collectives of these kinds, or in all."""
        return sum((x.bytes * x.times for x in self.collectives if not kinds or x.kind in kinds), 0.0)

    def sent_far(self, near: int) -> float:
        """Bytes that a device sends in collectives whose groups reach beyond so many consecutive devices."""
        far = (one for one in self.collectives if len({device // near for device in one.group}) > 1)
        return sum((one.bytes * one.times for one in far), 0.0)

    def number(self, *kinds: str) -> float:
        """How many collectives of these kinds run, or of all."""
        return sum((one.times for one in self.collectives if not kinds or one.kind in kinds), 0.0)

    def copied(self, least: int) -> float:
        """How many copies of at least so many bytes run."""
        return sum((times for copied, times in self.copies.items() if copied >= least), 0.0)

    def add(self, other: "Account", times: float = 1.0, loops: int = 0) -> None:
        """Adds another account that is run so many times, within so many more loops."""
        self.cycles += times * other.cycles
        self.collectives += [
            replace(one, times=one.times * times, loops=one.loops + loops) for one in other.collectives
        ]
        for name, number in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0.0) + times * number
        for copied, number in other.copies.items():
            self.copies[copied] = self.copies.get(copied, 0.0) + times * number
        self.unbounded += other.unbounded


def account(text: str) -> Account:
    """The account of a program as `jax.stages.Compiled.as_text()` prints it.

    Raises:
        ValueError: it is not the text of a program.
    """
    program = parsed(text)
    return _executed(program, program.entry)


def _executed(program: Program, name: str) -> Account:
    """The account of one execution of a computation."""
    home, result = program.computations[name], Account()
    fused: set[str] = set()
    for instruction in home.values():
        if instruction.opcode == "while":
            trips = trip_count(program, instruction)
            if trips is None:
                result.unbounded.append(scope(instruction))
            body = instruction.attribute("body")
            assert body is not None, f"a loop has a body: {instruction}"
            result.add(_executed(program, body), float(1 if trips is None else trips), loops=1)
        elif instruction.opcode == "conditional":
            listed = instruction.attribute("branch_computations")
            if listed is not None:
                names = re.findall(r"[\w.\-]+", listed)
            else:
                sides = (instruction.attribute(f"{side}_computation") for side in ("true", "false"))
                names = [side for side in sides if side]
            branches = [_executed(program, branch) for branch in names]
            for branch, share in zip(branches, _shares(instruction, branches), strict=True):
                result.add(branch, share)
        elif instruction.opcode in ("call", "async-start"):
            for called in instruction.calls:
                result.add(_executed(program, called))
        else:
            result.add(_single(program, instruction, home))
            for channel, collective in _fused_collectives(program, instruction):
                if channel not in fused:
                    result.collectives.append(collective)
                fused.add(channel)
    return result


def _fused_collectives(program: Program, instruction: Instruction) -> Iterator[tuple[str, Collective]]:
    """The collectives that are fused into an instruction, each with its channel.

    A TPU's compiler fuses a sum and the cut of a device's part, which sends what a scattered sum does; and where it
    exchanges beside products, each of these is fused with the same collective, of the same channel.
    """
    for name in instruction.calls if instruction.opcode in FUSIONS else ():
        inside, scattered = program.computations[name], name.startswith("all-reduce-scatter")
        for inner in inside.values():
            for kind in COLLECTIVES:
                if inner.opcode == kind:
                    sent_as = "reduce-scatter" if scattered else kind
                    where = scope(inner) or scope(instruction)
                    collective = Collective(sent_as, sent(sent_as, inner, inside), where, tuple(group(inner.text)))
                    yield inner.attribute("channel_id") or inner.name, collective
            yield from _fused_collectives(program, inner)


def _single(program: Program, instruction: Instruction, home: Computation) -> Account:
    """The account of one instruction that runs no others but those fused into it."""
    result = Account()
    result.cycles = float(_quoted(instruction, "estimated_cycles", ":") or 0)
    for kind in COLLECTIVES:
        if instruction.opcode in (kind, f"{kind}-start"):
            result.collectives.append(
                Collective(kind, sent(kind, instruction, home), scope(instruction), tuple(group(instruction.text)))
            )
    for kernel in (inner for inner in (instruction, *_fused(program, instruction)) if inner.opcode == "custom-call"):
        name = kernel.attribute("custom_call_target") or _quoted(kernel, "custom_call_target")
        result.kernels[name] = result.kernels.get(name, 0.0) + 1.0
    if copied := _copied(program, instruction, home):
        result.copies[copied] = 1.0
    return result


def _fused(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions that are fused into one."""
    for name in instruction.calls if instruction.opcode in FUSIONS else ():
        for inner in program.computations[name].values():
            yield inner
            yield from _fused(program, inner)


def _copied(program: Program, instruction: Instruction, home: Computation) -> int:
    """Bytes that an instruction copies: of an array that it updates in place, the update; 0 where it computes."""
    if instruction.opcode not in FUSIONS:
        return _moved(instruction, home) if instruction.opcode in COPYING else 0
    (called, *_) = instruction.calls
    inside, root = program.computations[called], program.root(called)
    working = (x for x in inside.values() if x.opcode not in COPYING and x.opcode not in FREE and x.size >= INDICES)
    if any(working):
        return 0
    return sum(_moved(inside[name], inside) for name in (root.operands if root.opcode == "tuple" else (root.name,)))


def _moved(instruction: Instruction, home: Computation) -> int:
    """Bytes of an instruction's result, or of what it puts into an array in place, however that is seen afterwards."""
    seen = instruction
    while seen.opcode in ("bitcast", "copy", "reshape") and seen.operands[0] in home:
        seen = home[seen.operands[0]]
    return home[seen.operands[1]].size if seen.opcode == "dynamic-update-slice" else instruction.size


def trip_count(program: Program, loop: Instruction) -> int | None:
    """How often a loop runs, or usually runs; None where nobody states it."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
        return int(known[1])
    if stated := re.search(rf"{SCOPE}(\d+)\)*/while$", scope(loop)):
        return int(stated[1])
    # A condition that compares a counter with a number: a TPU's compiler does not note it. jax's loops count from 0 in
    # ones. The compiler's own, which exchange parts of a product's operand, count in twos where it has unrolled them.
    condition, body = loop.attribute("condition"), loop.attribute("body")
    assert condition is not None, f"a loop has a condition: {loop}"
    assert body is not None, f"a loop has a body: {loop}"
    home, root = program.computations[condition], program.root(condition)
    limit = home.get(root.operands[-1]) if root.opcode == "compare" and "direction=LT" in root.text else None
    if limit is None or limit.opcode != "constant":
        return None
    return -(-int(limit.literal) // _step(program, body, home.get(root.operands[0])))


def _step(program: Program, body: str, counter: Instruction | None) -> int:
    """By how much the body raises a counter of the condition; 1 where that cannot be read."""
    place = re.search(r"index=(\d+)", counter.text) if counter is not None else None
    inside, root = program.computations[body], program.root(body)
    if place is None or root.opcode != "tuple":
        return 1
    raised = inside.get(root.operands[int(place[1])])
    if raised is None or raised.opcode != "add":
        return 1
    steps = [int(operand.literal) for name in raised.operands if (operand := inside[name]).opcode == "constant"]
    return steps[0] if steps else 1


def scope(instruction: Instruction) -> str:
    """Where an instruction comes from in the source, e.g. `jit(step)/while/body/dot_general`."""
    return _quoted(instruction, "op_name")


def _quoted(instruction: Instruction, name: str, equals: str = "=") -> str:
    match = re.search(rf'\b{name}"?{equals}"([^"]*)"', instruction.text)
    return match[1] if match else ""


def _shares(instruction: Instruction, branches: list[Account]) -> list[float]:
    """How often each branch is taken: by what its scope states, else always the one that does most."""
    stated = re.findall(rf"{CHOICE}(\d+(?:_\d+)*)", scope(instruction))
    times = list(map(int, stated[-1].split("_"))) if stated else []
    if len(times) == len(branches):
        return [number / sum(times) for number in times]

    def work(branch: Account) -> tuple[float, ...]:
        return branch.sent(), float(sum(branch.kernels.values())), float(sum(branch.copies.values()))

    dearest = max(branches, key=work)
    return [float(branch is dearest) for branch in branches]


def sent(kind: str, instruction: Instruction, home: Computation) -> int:
    """Bytes that each device sends in a collective, as a ring over its group does; the most, where data decide."""
    # Of the others, one is where the rows come to, and the rest are numbers of rows.
    names = instruction.operands[:1] if kind == RAGGED else instruction.operands
    # In whichever memory they are.
    operands = sum(size(home[name].kind, caches=True) for name in names if name in home)
    number = len(group(instruction.text))
    if kind == "collective-permute":
        return operands
    if kind == "all-gather":
        return operands * (number - 1)
    share = (number - 1) / number
    return round(operands * share * (2 if kind == "all-reduce" else 1))


def largest(text: str, number: int = 5) -> list[tuple[int, str, str, str]]:
    """The largest arrays that a program writes: bytes, type and shape, scope, and line of tunix; each kind once.

    Raises:
        ValueError: it is not the text of a program.
    """
    program = parsed(text)
    arrays: dict[str, tuple[int, str, str, str]] = {}
    fused: set[str] = set()
    for home in program.computations.values():
        for instruction in home.values():
            fused |= set(instruction.calls) if instruction.opcode not in ("call", "async-start") else set()
    for name, home in program.computations.items():
        for instruction in home.values():
            if name not in fused and instruction.opcode not in FREE and not instruction.kind.startswith("("):
                kind, line = instruction.kind.split("{")[0], program.line(instruction)
                arrays.setdefault(kind, (size(instruction.kind), kind, scope(instruction), line))
    return sorted(arrays.values(), reverse=True)[:number]
