"""`python -m benchmarks.kernels`: how products of few bits are computed, here or by the compiler of another device.

Each operation is compiled, timed in turns with the others (medians), and its optimized program read: what is
multiplied, and whether a rounded weight is converted on the way into the product or written to memory first. For a TPU
the compiler's own estimate in cycles is shown too.
`--compile v5e:2x2` (or v6e:2x2, v5p:2x2x1; needs libtpu) and `--compile h100` (needs jax-cuda12-plugin with its CUDA
libraries) compile for a device that need not be there. docs/kernels.md has the findings.

Axes: B rows, T time, D inputs, F outputs, N query heads, K kv heads, H head dim.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from benchmarks.programs import account, elements, products
from benchmarks.train import interleaved
from tunix.config import BaseType, DType
from tunix.models.attention.attend import attend
from tunix.models.attention.inputs import Segments
from tunix.models.layers import Projection
from tunix.models.quantization.formats import ROUNDED, Quantization
from tunix.util import chips

TILE = 128
SIZES = {"small": (256, 1024), "1b": (2048, 8192)}
"""Inputs and outputs of the widest matrix of the small Llama of the other benchmarks, and of Llama 3.2 1B's."""
ROWS = {"training": 2048, "decoding": 16}
PAIRS: tuple[tuple[BaseType, BaseType], ...] = (("int8", "int8"), ("int8", "int4"), ("int4", "int4"), ("fp8", "fp8"))
HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 64, 256


@dataclass(frozen=True)
class Operation:
    """Something to compile: a function and its arguments."""

    function: Callable[..., jax.Array]
    arguments: Any
    """A tree of shapes."""


def projection(rounded: BaseType | None, dtype: DType, rows: int, size: tuple[int, int]) -> Operation:
    """The product of a layer's projection, as the models compute it."""

    def build() -> Projection:
        one = Projection("BTD,DF->BTF", size, ("embed", "ffn"), nnx.Rngs(0), contracted=1)
        if rounded is not None:
            one.quantize("up", Quantization(rounded, TILE))
        return one

    graph, state = nnx.split(nnx.eval_shape(build))
    weights = nnx.to_pure_dict(state)
    if rounded is None:
        weights = {"w": jax.ShapeDtypeStruct(size, dtype)}
    x = jax.ShapeDtypeStruct(shape_of(rows, size[0]), dtype)
    return Operation(lambda x, weights: nnx.merge(graph, weights)(x), (x, weights))


def low_bits(inputs: BaseType, rounded: BaseType, rows: int, size: tuple[int, int]) -> Operation:
    """A product of rounded numbers as qwix computes it, one scale for each row and each output; tunix has none."""
    w = jax.eval_shape(
        lambda w: qwix.quantize(w, ROUNDED[rounded], channelwise_axes=(1,)), jax.ShapeDtypeStruct(size, jnp.float32)
    )

    def multiplied(x: jax.Array, w: qwix.QArray) -> jax.Array:
        return qwix.einsum("BTD,DF->BTF", qwix.quantize(x, ROUNDED[inputs], channelwise_axes=(0, 1)), w)

    return Operation(multiplied, (jax.ShapeDtypeStruct(shape_of(rows, size[0]), jnp.bfloat16), w))


def shape_of(rows: int, inputs: int) -> tuple[int, int, int]:
    """`[B T D]`: whole sequences where there are enough rows, else one token in each."""
    return (rows // LENGTH, LENGTH, inputs) if rows >= LENGTH else (rows, 1, inputs)


def attended(plain: bool, dtype: DType, rows: int) -> Operation:
    """Causal attention: tunix's einsums, or `jax.nn.dot_product_attention`, as it is implemented for the device."""
    q, kv = ((rows, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS))
    ids = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)

    def einsums(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        return attend(q, k, v, Segments(ids, positions), scale=DIM**-0.5)

    def shipped(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        seen = (ids[:, None, :, None] == ids[:, None, None]) & jnp.tri(LENGTH, dtype=bool)
        return jax.nn.dot_product_attention(q, k, v, mask=seen)

    arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in (q, kv, kv))
    return Operation(einsums if plain else shipped, (*arrays, ids))


def operations(rows: int, size: tuple[int, int]) -> dict[str, Operation]:
    """Everything that is compared, by its name in docs/kernels.md."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    found: dict[str, Operation] = {}
    for dtype in dtypes:
        found[dtype] = projection(None, dtype, rows, size)
        found |= {f"{base} weights, {dtype}": projection(base, dtype, rows, size) for base in ROUNDED}
    pairs: tuple[tuple[BaseType, BaseType], ...] = (
        ("int8", "int8"),
        ("int8", "int4"),
        ("int4", "int4"),
        ("fp8", "fp8"),
    )
    found |= {f"{inputs} x {rounded}": low_bits(inputs, rounded, rows, size) for inputs, rounded in pairs}
    if rows >= LENGTH:
        for dtype in dtypes:
            found[f"attention, {dtype}"] = attended(True, dtype, rows // LENGTH)
            found[f"attention of jax, {dtype}"] = attended(False, dtype, rows // LENGTH)
    return found


def compiled(one: Operation, device: Any) -> jax.stages.Compiled:
    """The compiled program for a device, which need not be attached."""
    place = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), one.arguments)
    return jax.jit(one.function).lower(*arguments).compile()


def drawn(one: Operation) -> Any:
    """Random arguments of an operation."""
    rng = np.random.default_rng(0)

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype == jnp.int32:  # all tokens of one segment
            return jnp.ones(x.shape, x.dtype)
        return jnp.asarray(np.abs(rng.standard_normal(x.shape, np.float32))).astype(x.dtype)

    return jax.tree.map(fill, one.arguments)


def run(program: jax.stages.Compiled, given: Any) -> None:
    """Runs a program once and waits for its end."""
    jax.block_until_ready(program(*given))


def device_of(target: str) -> Any:
    """A device of a TPU topology such as `v5e:2x2`, or an H100, to compile for."""
    chips.prepare()
    return chips.devices_of(target)[0]


def told(program: str, smallest: int) -> tuple[str, ...]:
    """Cells of a row: what is multiplied by what, what its kernel reads of the arguments, what was written for it.

    Args:
        smallest: elements of the smallest array that is shown.
    """
    found = list(dict.fromkeys(products(program)))
    multiplied = "; ".join(dict.fromkeys(f"{one.by} {' x '.join(one.types[:-1])} -> {one.types[-1]}" for one in found))
    reads = "; ".join(dict.fromkeys(" ".join(one.reads) for one in found if one.reads))
    made = dict.fromkeys(kind for one in found for kind in one.made if elements(kind) >= smallest)
    return multiplied or "none found", reads, " ".join(made)


def main() -> None:
    """Compiles, measures where the device is here, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="which matrices; by default small, and 1b to compile")
    parser.add_argument("--uses", nargs="+", choices=ROWS, default=list(ROWS), help="with how many rows")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each operation")
    parser.add_argument("--compile", metavar="TARGET", help="v5e:2x2 or another TPU topology, or h100; nothing is run")
    parser.add_argument("--dump", type=Path, help="a folder for the optimized programs")
    arguments = parser.parse_args()
    device = device_of(arguments.compile) if arguments.compile else jax.devices()[0]
    console = Console(width=200)
    for name in arguments.sizes or (["1b"] if arguments.compile else ["small"]):
        for use in arguments.uses:
            console.print(table(arguments, device, name, use))


def table(arguments: argparse.Namespace, device: Any, name: str, use: str) -> Table:
    """One size and number of rows: the time of each operation, and how it is computed."""
    rows, (inputs, outputs) = ROWS[use], SIZES[name]
    title = f"{use}: {rows} rows, {inputs} x {outputs}; {device.device_kind}"
    found = Table("", "ms", "cycles", "multiplies", "reads", "written before", title=title)
    programs: dict[str, str] = {}
    work: dict[str, Callable[[], None]] = {}
    for operation, one in operations(rows, (inputs, outputs)).items():
        try:
            made = compiled(one, device)
        except jax.errors.JaxRuntimeError as error:
            found.add_row(operation, "", "", f"refused: {str(error).splitlines()[0][:120]}")
            continue
        programs[operation] = made.as_text() or ""
        if arguments.dump:
            file = f"{name}-{rows}-{operation}.txt".replace(" ", "_").replace(",", "")
            (arguments.dump / file).write_text(programs[operation])
        if not arguments.compile:
            work[operation] = partial(run, made, drawn(one))
    seconds = interleaved(work, arguments.rounds) if work else {}
    for operation, program in programs.items():
        median = f"{np.median(seconds[operation]) * 1e3:.2f}" if operation in seconds else ""
        expected = account(program).cycles
        estimate = f"{expected:.0f}" if expected else ""
        found.add_row(operation, median, estimate, *told(program, inputs * outputs))
    return found


if __name__ == "__main__":
    main()
