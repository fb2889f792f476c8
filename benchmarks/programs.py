"""How a compiler computes a product, read from its optimized program: the types multiplied, and what is read.

XLA prints a program as computations of instructions. A product is an instruction, the inside of a fusion (TPU, CPU), or
a call of a library or a Triton kernel (NVIDIA). A weight that it reads as the program's argument, maybe copied, is
converted on the way into the product; else the converted matrix was written to memory before.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tunix.plan.hlo import Computation, Instruction, parsed

PRODUCTS = ("dot", "convolution", "scaled-dot")
LIBRARIES = ("__cublas", "__cudnn", "__onednn", "__triton")
PASSING = (
    *("copy", "bitcast", "copy-start", "copy-done", "reshape", "transpose", "tuple", "get-tuple-element"),
    *("opt-barrier", "async-start", "async-done", "slice", "slice-start", "slice-done"),
)
"""Operations that pass an array on without changing its type."""


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
