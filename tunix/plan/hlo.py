"""A program as XLA prints it, read into computations of instructions. Loads without jax.

The text is what `jax.stages.Compiled.as_text()` returns: the program of one device, after all optimizations. It says in
one of three ways which devices exchange arrays in a collective (`group`):

replica_groups={{0,2},{1,3}}                                    lists
replica_groups=[2,4]<=[4,2]T(1,0)                               two groups of four of the numbers 0..7, as `[4, 2]`
                                                                transposed
replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}    along axes of a mesh of those numbers
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of the types whose name does not end in them."""


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

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """The computations that a fusion, a call or a reduction runs."""
        return tuple(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", self.text))

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Type and shape of each array of the result, e.g. `[("bf16", (16, 8192))]`."""
        return arrays(self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result, or of its first array."""
        return self.arrays[0][1]

    @property
    def size(self) -> int:
        """Bytes of the result in the device's memory: of all arrays of a tuple, but for those in its caches."""
        return size(self.kind)

    def attribute(self, name: str) -> str | None:
        """The name or braces that follow `name=`, e.g. `{1}` for `lhs_contracting_dims`; None without it."""
        match = re.search(rf"\b{name}=(%?[\w.\-]+|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})", self.text)
        return match[1].lstrip("%") if match else None

    def numbers(self, name: str) -> list[int]:
        """The numbers of an attribute such as `lhs_contracting_dims={1}`; none without it."""
        return [int(number) for number in re.findall(r"\d+", self.attribute(name) or "")]


Computation = dict[str, Instruction]
"""Instructions by name, in the program's order."""


@dataclass(frozen=True)
class Program:
    """All computations of a program."""

    computations: dict[str, Computation]
    entry: str
    """Name of the computation that runs first."""
    lines: dict[str, str] = field(default_factory=dict)
    """Number of a stack frame -> the innermost line of tunix in it, e.g. `models/layers.py:240`."""

    def line(self, instruction: Instruction) -> str:
        """The line of tunix that an instruction comes from, e.g. `models/layers.py:240`; empty where it is unknown."""
        frame = re.search(r"\bstack_frame_id=(\d+)", instruction.text)
        return self.lines.get(frame[1], "") if frame else ""

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
    return Program(computations, entry, _lines(text[: text.index("ENTRY ")]))


def _lines(text: str) -> dict[str, str]:
    """The lines of the stack frames that a program's text lists before its computations."""
    files = {
        number: name.rpartition("/tunix/")[2] for number, name in re.findall(r'^(\d+) "(/.*/tunix/.*)"$', text, re.M)
    }
    places = {
        number: f"{files[file]}:{line}"
        for number, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", text, re.M)
        if file in files
    }
    frames = {
        number: (place, parent)
        for number, place, parent in re.findall(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", text, re.M)
    }

    def innermost(frame: str) -> str:
        place, parent = frames[frame]
        return places.get(place) or (innermost(parent) if parent != frame and parent in frames else "")

    return {frame: innermost(frame) for frame in frames}


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


ARRANGED = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
"""Consecutive numbers of this shape, transposed."""


def group(text: str) -> Sequence[int]:
    """The first group of the collective that an instruction's text describes; `(0, 1)` where it names none."""
    if match := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={ARRANGED}", text):
        return _numbers(match[3], match[4]).reshape(int(match[1]), int(match[2]))[0].tolist()
    if match := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({ARRANGED}\))? \{{([^}}]*)\}}", text):
        return _along(match[1], match[2], match[3], match[4])
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", text)
    return _integers(listed[1]) if listed and listed[1] else (0, 1)


def _along(sizes: str, shape: str | None, order: str | None, axes: str) -> Sequence[int]:
    """The first group along axes of a mesh. `'a':(2)4` is the part of size 4 of an axis, past a part of size 2."""
    mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    wanted = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    parts = {name: (int(before or 1), int(size or mesh[name])) for name, before, size in wanted}
    split: list[int] = []
    taken: list[slice | int] = []
    for name, size in mesh.items():
        before, middle = parts.get(name, (1, 1))
        split += [before, middle, size // before // middle]
        taken += [0, slice(None), 0]
    numbers = np.arange(math.prod(mesh.values())) if shape is None else _numbers(shape, order)
    return numbers.reshape(split)[tuple(taken)].reshape(-1).tolist()


def _numbers(shape: str, order: str | None) -> np.ndarray:
    """`[N]`: consecutive numbers of a shape, transposed."""
    sizes = _integers(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return (numbers if order is None else numbers.transpose(_integers(order))).reshape(-1)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
