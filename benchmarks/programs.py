"""Compiled programs, read from the text that XLA prints: what runs on each device and how often, and how products are
computed. For tests and benchmarks alone: the text is another with each version of XLA, and says neither what a kernel
multiplies nor what a fusion reads.

The text is what `jax.stages.Compiled.as_text()` returns, the program of one device after all optimizations:
computations of instructions. A loop counts as often as it runs: by the trip count that XLA found, or, where that is
known only at run time, by what its scope states (`tunix/util/loops.py`). So a choice between branches counts as their
mean, weighted by how often each is taken.

A product is an instruction, the inside of a fusion (TPU, CPU), or a call of a library or a Triton kernel (NVIDIA). A
weight that it reads as the program's argument, maybe copied, is converted on the way into the product; else the
converted matrix was written to memory before.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tunix.util.loops import CHOICE, SCOPE

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of the types whose name does not end in them."""
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
PRODUCTS = ("dot", "convolution", "scaled-dot")
LIBRARIES = ("__cublas", "__cudnn", "__onednn", "__triton")
PASSING = (
    *("copy", "bitcast", "copy-start", "copy-done", "reshape", "transpose", "tuple", "get-tuple-element"),
    *("opt-barrier", "async-start", "async-done", "slice", "slice-start", "slice-done"),
)
"""Operations that pass an array on without changing its type."""


# --- The text, as computations of instructions ----------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    kind: str
    """Type and shape of the result, layouts included, e.g. `bf16[16,8192]{1,0}`; a tuple in parentheses."""
    opcode: str
    operands: tuple[str, ...]
    """Names of the instructions of the same computation whose results it reads."""
    text: str
    """What follows the operands: attributes such as `calls=...`."""
    root: bool = False
    """Whether its result is that of the computation."""
    literal: str = ""
    """What stands in the parentheses: the number of a parameter, the value of a constant."""

    @property
    def calls(self) -> list[str]:
        """The computations that a fusion, a call or a reduction runs."""
        return re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", self.text)

    @property
    def size(self) -> int:
        """Bytes of the result in the device's memory: of all arrays of a tuple, but for those in its caches."""
        return size(self.kind)

    @property
    def scope(self) -> str:
        """Where it comes from in the source, e.g. `jit(step)/while/body/dot_general`."""
        return self.quoted("op_name")

    def attribute(self, name: str) -> str | None:
        """The name or braces that follow `name=`, e.g. `{1}` for `lhs_contracting_dims`; None without it."""
        match = re.search(rf"\b{name}=(%?[\w.\-]+|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})", self.text)
        return match[1].lstrip("%") if match else None

    def quoted(self, name: str, equals: str = "=") -> str:
        """What stands in quotation marks after a name; nothing without it."""
        match = re.search(rf'\b{name}"?{equals}"([^"]*)"', self.text)
        return match[1] if match else ""


Computation = dict[str, Instruction]
"""Instructions by name, in the program's order."""


@dataclass(frozen=True)
class Program:
    """All computations of a program."""

    computations: dict[str, Computation]
    entry: str
    """Name of the computation that runs first."""

    def root(self, computation: str) -> Instruction:
        """The instruction whose result is that of a computation."""
        return next(one for one in self.computations[computation].values() if one.root)


def parsed(text: str) -> Program:
    """The program of a text.

    Raises:
        ValueError: it has no entry, so that it is not a program's text.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if (match := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
            current = match[2]
            computations[current] = {}
            entry = current if match[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            # Operands go up to the closing parenthesis, then come attributes.
            depth, rest = 1, match[5]
            end = next(at for at, sign in enumerate(rest) if (depth := depth + (sign == "(") - (sign == ")")) == 0)
            inside = rest[:end]
            names = re.findall(r"%([\w.\-]+)", inside) or [name.strip() for name in inside.split(",") if name.strip()]
            instruction = Instruction(
                match[2], match[3], match[4], tuple(names), rest[end:], root=bool(match[1]), literal=inside
            )
            computations[current][instruction.name] = instruction
    if not entry:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY")
    return Program(computations, entry)


def arrays(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of each array in a type as XLA prints it, e.g. `(f32[2,3]{1,0}, s32[])`."""
    return [(one[1], tuple(int(n) for n in one[2].split(",") if n)) for one in _ARRAY.finditer(kind)]


def size(kind: str, *, caches: bool = False) -> int:
    """Bytes of a type as XLA prints it; 4-bit numbers are two to a byte.

    Args:
        caches: whether arrays count that are in another memory than the device's main one, such as a TPU's vector
            memory (`S(1)`).
    """
    counted = (one for one in _ARRAY.finditer(kind) if caches or not re.search(r"S\([1-9]", one[3] or ""))
    return sum(math.prod(int(n) for n in one[2].split(",") if n) * bits(one[1]) for one in counted) // 8


def bits(dtype: str) -> int:
    """Bits of one number of a type: 32 for `f32`, 8 for `f8e4m3fn`."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def sharers(text: str) -> int:
    """How many devices exchange in each group of the collective that an instruction's text describes.

    replica_groups={{0,2},{1,3}}                                    lists
    replica_groups=[2,4]<=[4,2]T(1,0)                               two groups of four
    replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}    along axes of a mesh; `'b':(2)2` is the part of
                                                                    size 2 of an axis, past a part of size 2
    """
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\S+\))? \{([^}]*)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", text)
    return len(listed[1].split(",")) if listed and listed[1] else 2


# --- How often each thing runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One instruction by which devices exchange arrays."""

    kind: str
    """As XLA calls it, e.g. `all-reduce`."""
    bytes: int
    """What a device sends in one execution, by the fewest that a ring needs."""
    scope: str
    """Where it comes from in the source, e.g. `jit(step)/while/body/dot_general`."""
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
                result.unbounded.append(instruction.scope)
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
                    where = inner.scope or instruction.scope
                    collective = Collective(sent_as, sent(sent_as, inner, inside), where)
                    yield inner.attribute("channel_id") or inner.name, collective
            yield from _fused_collectives(program, inner)


def _single(program: Program, instruction: Instruction, home: Computation) -> Account:
    """The account of one instruction that runs no others but those fused into it."""
    result = Account()
    result.cycles = float(instruction.quoted("estimated_cycles", ":") or 0)
    for kind in COLLECTIVES:
        if instruction.opcode in (kind, f"{kind}-start"):
            result.collectives.append(Collective(kind, sent(kind, instruction, home), instruction.scope))
    for kernel in (inner for inner in (instruction, *_fused(program, instruction)) if inner.opcode == "custom-call"):
        name = kernel.attribute("custom_call_target") or kernel.quoted("custom_call_target")
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
    if stated := re.search(rf"{SCOPE}(\d+)\)*/while$", loop.scope):
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


def _shares(instruction: Instruction, branches: list[Account]) -> list[float]:
    """How often each branch is taken: by what its scope states, else always the one that does most."""
    stated = re.findall(rf"{CHOICE}(\d+(?:_\d+)*)", instruction.scope)
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
    number = sharers(instruction.text)
    if kind == "collective-permute":
        return operands
    if kind == "all-gather":
        return operands * (number - 1)
    share = (number - 1) / number
    return round(operands * share * (2 if kind == "all-reduce" else 1))


def largest(text: str, number: int = 5) -> list[tuple[int, str, str]]:
    """The largest arrays that a program writes: bytes, type and shape, and scope; each kind once.

    Raises:
        ValueError: it is not the text of a program.
    """
    program = parsed(text)
    written: dict[str, tuple[int, str, str]] = {}
    fused: set[str] = set()
    for home in program.computations.values():
        for instruction in home.values():
            fused |= set(instruction.calls) if instruction.opcode not in ("call", "async-start") else set()
    for name, home in program.computations.items():
        for instruction in home.values():
            if name not in fused and instruction.opcode not in FREE and not instruction.kind.startswith("("):
                kind = instruction.kind.split("{")[0]
                written.setdefault(kind, (instruction.size, kind, instruction.scope))
    return sorted(written.values(), reverse=True)[:number]


# --- Products -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """One product of a program."""

    by: str
    """`dot`, `convolution`, or the library's name."""
    types: tuple[str, ...]
    """Types of both operands and of the result, e.g. `("s8", "s8", "s32")`."""
    reads: tuple[str, ...]
    """Types of the program's own arguments that its kernel reads."""
    made: tuple[str, ...]
    """Types and shapes that were written to memory for it: `f32[256,1024]`."""


def products(program: str) -> list[Product]:
    """Every product that the program's entry runs, in its order."""
    found = parsed(program)
    entry = found.computations[found.entry]
    return [product for one in entry.values() for product in _of(one, found.computations, entry)]


def elements(kind: str) -> int:
    """Number of elements of a type and shape: 6 for `f32[2,3]`."""
    sizes = re.search(r"\[([\d,]*)\]", kind)
    return math.prod(int(size) for size in sizes[1].split(",") if size) if sizes else 0


def dtype(kind: str) -> str:
    """The type alone: `bf16` for `bf16[16,8192]{1,0}`; for a tuple, that of its first member."""
    return kind.lstrip("(").split("[")[0]


def _of(one: Instruction, computations: dict[str, Computation], entry: Computation) -> Iterator[Product]:
    """The products of an instruction of the entry."""
    sources = [_source(name, entry) for name in one.operands if name in entry]
    reads = tuple(dtype(source.kind) for source in sources if source.opcode == "parameter")
    made = tuple(
        source.kind.split("{")[0] for source in sources if source.opcode not in ("parameter", "constant", "iota")
    )
    for product, home in _inside(one, entry, computations):
        types = (*(dtype(home[name].kind) for name in product.operands[:2]), dtype(product.kind))
        yield Product(_name(product), types, reads, made)


def _inside(
    one: Instruction, home: Computation, computations: dict[str, Computation]
) -> Iterator[tuple[Instruction, Computation]]:
    """The product that an instruction is, or those that it runs, each with its computation."""
    if one.opcode in PRODUCTS or (one.opcode == "custom-call" and any(name in one.text for name in LIBRARIES)):
        yield one, home
        return
    for name in one.calls:
        for inner in computations.get(name, {}).values():
            yield from _inside(inner, computations[name], computations)


def _source(name: str, home: Computation) -> Instruction:
    """The instruction that made an array, past all that only pass it on."""
    one = home[name]
    while (one.opcode in PASSING or "ConcatBitcast" in one.text) and one.operands and one.operands[0] in home:
        one = home[one.operands[0]]
    return one


def _name(product: Instruction) -> str:
    library = re.search(r'custom_call_target="([^"]+)"', product.text)
    return library[1] if library else product.opcode
