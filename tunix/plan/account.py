"""What a compiled program costs on each device: FLOPs, bytes of memory traffic, and what devices send each other.

XLA's own cost analysis counts the body of a loop once. Here a loop counts as often as it runs: by the trip count that
XLA found, or, where that is known only at run time, by what its scope states (`util/loops.py`). So a choice between
branches costs their mean, weighted by how often each is taken.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tunix.plan.groups import group
from tunix.plan.hlo import Computation, Instruction, Program, parsed, size
from tunix.util.loops import CHOICE, SCOPE

RAGGED = "ragged-all-to-all"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", RAGGED, "collective-permute")
FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota", "partition-id"),
    *("replica-id", "opt-barrier", "copy-done", "async-done", "async-update", "domain", "add-dependency"),
    *(f"{kind}-done" for kind in COLLECTIVES),
}
"""Operations that move no memory, or whose start has been counted."""
SLICING = {"dynamic-slice", "gather", "slice"}
"""Operations that read only a part of their first operand."""
UPDATING = {"dynamic-update-slice", "scatter"}
"""Operations that change a part of their first operand, in place."""
PASSING = {"bitcast", "copy", "reshape", "transpose", "convert"}
"""Operations that only pass on, element by element, what a slice of it will read."""


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
    """What one run of a program costs each device."""

    flops: float = 0.0
    """Multiplications and additions of matrix products."""
    bytes: float = 0.0
    """Read from memory and written to it; what stays within a fusion is left out."""
    cycles: float = 0.0
    """What a TPU's compiler estimates; 0 by others. Kernels of our own are in no estimate."""
    collectives: list[Collective] = field(default_factory=list)
    kernels: dict[str, float] = field(default_factory=dict)
    """How often each custom kernel runs, by its name; their FLOPs are not counted, their operands are."""
    unbounded: list[str] = field(default_factory=list)
    """Scopes of the loops whose trip count nobody states; they are counted once."""

    def sent(self, *kinds: str) -> float:
        """Bytes that a device sends in collectives of these kinds, or in all."""
        return sum((one.bytes * one.times for one in self.collectives if not kinds or one.kind in kinds), 0.0)

    def sent_far(self, near: int) -> float:
        """Bytes that a device sends in collectives whose groups reach beyond so many consecutive devices."""
        far = (one for one in self.collectives if len({device // near for device in one.group}) > 1)
        return sum((one.bytes * one.times for one in far), 0.0)

    def number(self, *kinds: str) -> float:
        """How many collectives of these kinds run, or of all."""
        return sum((one.times for one in self.collectives if not kinds or one.kind in kinds), 0.0)

    def add(self, other: "Account", times: float = 1.0, loops: int = 0) -> None:
        """Adds another account that is run so many times, within so many more loops."""
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.cycles += times * other.cycles
        self.collectives += [
            replace(one, times=one.times * times, loops=one.loops + loops) for one in other.collectives
        ]
        for name, number in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0.0) + times * number
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
    for one in home.values():
        if one.opcode == "while":
            trips = trip_count(program, one)
            if trips is None:
                result.unbounded.append(scope(one))
            body = one.attribute("body")
            assert body is not None, f"a loop has a body: {one}"
            result.add(_executed(program, body), float(1 if trips is None else trips), loops=1)
        elif one.opcode == "conditional":
            branches = [_executed(program, branch) for branch in _branches(one)]
            for branch, share in zip(branches, _shares(one, branches), strict=True):
                result.add(branch, share)
        elif one.opcode in ("call", "async-start"):
            for called in one.calls:
                result.add(_executed(program, called))
        else:
            result.add(_single(program, one, home))
            for channel, collective in _fused_collectives(program, one):
                if channel not in fused:
                    result.collectives.append(collective)
                fused.add(channel)
    return result


def _fused_collectives(program: Program, one: Instruction) -> Iterator[tuple[str, Collective]]:
    """The collectives that are fused into an instruction, each with its channel.

    A TPU's compiler fuses a sum and the cut of a device's part, which sends what a scattered sum does; and where it
    exchanges beside products, each of these is fused with the same collective, of the same channel.
    """
    for name in one.calls if one.opcode == "fusion" else ():
        inside, scattered = program.computations[name], name.startswith("all-reduce-scatter")
        for inner in inside.values():
            for kind in COLLECTIVES:
                if inner.opcode == kind:
                    own = "reduce-scatter" if scattered else kind
                    where = scope(inner) or scope(one)
                    collective = Collective(own, sent(own, inner, inside), where, tuple(group(inner.text)))
                    yield inner.attribute("channel_id") or inner.name, collective
            yield from _fused_collectives(program, inner)


def _single(program: Program, one: Instruction, home: Computation) -> Account:
    """The account of one instruction that runs no others but those fused into it."""
    result = Account(flops=flops(program, one, home), bytes=traffic(program, one, home))
    result.cycles = float(_quoted(one, "estimated_cycles", ":") or 0)
    for kind in COLLECTIVES:
        if one.opcode in (kind, f"{kind}-start"):
            result.collectives.append(Collective(kind, sent(kind, one, home), scope(one), tuple(group(one.text))))
    if one.opcode == "custom-call":
        result.kernels[one.attribute("custom_call_target") or _quoted(one, "custom_call_target")] = 1.0
    return result


def trip_count(program: Program, loop: Instruction) -> int | None:
    """How often a loop runs, or usually runs; None where nobody states it."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
        return int(known[1])
    if stated := re.search(rf"{SCOPE}(\d+)\)*/while$", scope(loop)):
        return int(stated[1])
    return _counted(program, loop)


def _counted(program: Program, loop: Instruction) -> int | None:
    """How often a loop runs whose condition compares a counter with a number: a TPU's compiler does not note it.

    jax's loops count from 0 in ones. The compiler's own, which exchange parts of a product's operand, count in twos
    where it has unrolled them.
    """
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
    steps = [int(one.literal) for name in raised.operands if (one := inside[name]).opcode == "constant"]
    return steps[0] if steps else 1


def scope(one: Instruction) -> str:
    """Where an instruction comes from in the source, e.g. `jit(step)/while/body/dot_general`."""
    return _quoted(one, "op_name")


def _quoted(one: Instruction, name: str, equals: str = "=") -> str:
    found = re.search(rf'\b{name}"?{equals}"([^"]*)"', one.text)
    return found[1] if found else ""


def _branches(one: Instruction) -> list[str]:
    listed = one.attribute("branch_computations")
    if listed is not None:
        return re.findall(r"[\w.\-]+", listed)
    return [name for kind in ("true", "false") if (name := one.attribute(f"{kind}_computation"))]


def _shares(one: Instruction, branches: list[Account]) -> list[float]:
    """How often each branch is taken: by what its scope states, else always the one that costs most."""
    stated = re.findall(rf"{CHOICE}(\d+(?:_\d+)*)", scope(one))
    times = list(map(int, stated[-1].split("_"))) if stated else []
    if len(times) == len(branches):
        return [number / sum(times) for number in times]
    dearest = max(branches, key=lambda branch: (branch.flops, branch.bytes))
    return [float(branch is dearest) for branch in branches]


def flops(program: Program, one: Instruction, home: Computation) -> float:
    """FLOPs of the product that an instruction is, or of those fused into it."""
    if one.opcode == "dot":
        shape = home[one.operands[0]].shape
        return 2.0 * math.prod(one.shape) * math.prod(shape[axis] for axis in one.numbers("lhs_contracting_dims"))
    if one.opcode == "convolution":
        return _convolved(one, home)
    if one.opcode == "custom-call" and "dot_dimension_numbers" in one.text:
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.text)
        contracted = [int(axis) for axis in re.findall(r"\d+", axes[1] if axes else "")]
        return 2.0 * math.prod(one.shape) * math.prod(home[one.operands[0]].shape[axis] for axis in contracted)
    inner = [program.computations[name] for name in one.calls if one.opcode == "fusion"]
    return sum((flops(program, fused, fusion) for fusion in inner for fused in fusion.values()), 0.0)


def _convolved(one: Instruction, home: Computation) -> float:
    """FLOPs of a convolution, which a TPU's compiler makes of products.

    A free axis may become a window that slides over padding, of which every position meets a single number: only pairs
    of an output and an element of the window that meet one are multiplied.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.text)
    image, kernel = (home[name].shape for name in one.operands[:2])
    if labels is None:
        return 2.0 * math.prod(one.shape) * math.prod(kernel)
    axes = [label for label in labels[2] if label.isdigit()]
    met = [
        _met(one, number, image[labels[1].index(axis)], one.shape[labels[3].index(axis)])
        for number, axis in enumerate(sorted(axes))
    ]
    features = one.shape[labels[3].index("b")] * one.shape[labels[3].index("f")] * kernel[labels[2].index("i")]
    return 2.0 * features * math.prod(met)


def _met(one: Instruction, axis: int, inputs: int, outputs: int) -> int:
    """How many pairs of an output and an element of the window meet an input, along one axis of a convolution."""

    def of(key: str, usual: str) -> list[int]:
        found = re.search(rf"\b{key}=([\dx_\-]+)", window)
        return [int(number) for number in (found[1].split("x")[axis] if found else usual).split("_")]

    stated = re.search(r"window=\{([^}]*)\}", one.text)
    window = stated[1] if stated else ""
    (size,), (stride,), (low, *_) = of("size", "1"), of("stride", "1"), of("pad", "0_0")
    (spread,), (step,) = of("lhs_dilate", "1"), of("rhs_dilate", "1")
    places = (output * stride - low + element * step for output in range(outputs) for element in range(size))
    return sum(0 <= place <= (inputs - 1) * spread and place % spread == 0 for place in places)


def traffic(program: Program, one: Instruction, home: Computation) -> float:
    """Bytes that an instruction reads and writes: of what it slices or updates, the slice alone."""
    if one.opcode in FREE:
        return 0.0
    operands = [home[name] for name in one.operands if name in home]
    if one.opcode == "copy-start":  # its result names both places
        return float(one.size)
    if one.opcode in SLICING:
        return 2.0 * one.size
    if one.opcode == "dynamic-update-slice":
        return 2.0 * operands[1].size
    if one.opcode == "scatter":
        return 2.0 * _scattered(one, home)
    if one.opcode != "fusion":
        return float(one.size + sum(operand.size for operand in operands))
    (called, *_) = one.calls
    inside = program.computations[called]
    read = sum(_read(program, inside, number, operand.size) for number, operand in enumerate(operands))
    return float(read + _written(inside, program.root(called)))


def _read(program: Program, inside: Computation, number: int, whole: int) -> int:
    """Bytes of its operand with this number, which has so many, that a fusion reads."""
    parameter = next(one for one in inside.values() if one.opcode == "parameter" and one.literal == str(number))
    users = _users(inside, parameter.name)
    return min(whole, sum(_of(program, one, names, whole) for one, names in users)) if users else whole


def _of(program: Program, one: Instruction, names: set[str], whole: int) -> int:
    """Bytes that an instruction reads of an array, its operand under these names: of what it slices, the slice."""
    if one.opcode == "fusion":
        inside = program.computations[one.calls[0]]
        return sum(_read(program, inside, at, whole) for at, name in enumerate(one.operands) if name in names)
    if one.opcode in SLICING and one.operands[0] in names:
        return one.size
    # What is updated in place is not read.
    return 0 if one.opcode in UPDATING and one.operands[0] in names else whole


def _users(inside: Computation, name: str) -> list[tuple[Instruction, set[str]]]:
    """The instructions that read a value, past those that only pass it on, each with the names it is passed under."""
    found: list[tuple[Instruction, set[str]]] = []
    for one in inside.values():
        if name in one.operands:
            found += _users(inside, one.name) if one.opcode in PASSING else [(one, {name})]
    return found


def _written(inside: Computation, root: Instruction) -> int:
    """Bytes that a fusion writes: of an array that it updates in place, the update."""
    if root.opcode == "tuple":
        return sum(_written(inside, inside[name]) for name in root.operands)
    made = root
    while made.opcode in PASSING and made.operands[0] in inside:
        made = inside[made.operands[0]]
    if made.opcode == "scatter":
        return _scattered(made, inside)
    return inside[made.operands[1]].size if made.opcode == "dynamic-update-slice" else root.size


def _scattered(one: Instruction, home: Computation) -> int:
    """Bytes of a scatter's updates; an array that it may not change in place is copied first, which counts itself."""
    return sum(home[name].size for name in one.operands[len(one.operands) // 2 + 1 :])


def sent(kind: str, one: Instruction, home: Computation) -> int:
    """Bytes that each device sends in a collective, as a ring over its group does; the most, where data decide."""
    # Of the others, one is where the rows come to, and the rest are numbers of rows.
    names = one.operands[:1] if kind == RAGGED else one.operands
    # In whichever memory they are.
    operands = sum(size(home[name].kind, caches=True) for name in names if name in home)
    number = len(group(one.text))
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
    found: dict[str, tuple[int, str, str, str]] = {}
    fused = {name for home in program.computations.values() for one in home.values() for name in _fusions(one)}
    for name, home in program.computations.items():
        for one in home.values():
            if name not in fused and one.opcode not in FREE and not one.kind.startswith("("):
                found.setdefault(
                    one.kind.split("{")[0], (size(one.kind), one.kind.split("{")[0], scope(one), program.line(one))
                )
    return sorted(found.values(), reverse=True)[:number]


def _fusions(one: Instruction) -> tuple[str, ...]:
    return one.calls if one.opcode not in ("call", "async-start") else ()
