"""Which mesh a model and its rows can be split over: the check of a given one, and the choice of `mesh: auto`.

A `Demand` names what is to be split. A mesh that somebody wrote has to divide all of it (`require`); `auto` takes the
first of all meshes of the devices by a fixed order (`choose`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from tunix.config import DType, MeshConfig
from tunix.errors import UserError
from tunix.mesh import RULES, build_mesh, groups_of, row_shards
from tunix.models.config import DecoderConfig
from tunix.trainer.perf import idle_weights, matmul_weights

MOST_FSDP = 16
"""Shards of the weights up to which every matrix is gathered whole; above, `auto` splits products over `tensor`. On 64
TPUs XLA sends 844 GB for a step of 70B with fsdp 64, and 107 with fsdp 8 x tensor 8 (compiled, not run)."""
PART = 128
"""Tokens of which the parts of a row are made, so that attention's blocks are large."""
STATE_SHARE = 0.5
"""Share of a device's memory for weights, gradients and moments; the rest is for activations."""
BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}
WORDS = {
    "heads": "query heads",
    "kv_heads": "kv heads",
    "ffn": "columns of the MLP (ffn)",
    "vocab": "ids of the vocabulary",
    "embed": "columns of the model (d_model)",
    "expert": "experts",
}
"""What a message calls a logical axis."""


@dataclass(frozen=True)
class Demand:
    """What is to be split over a mesh."""

    model: DecoderConfig
    state: float = 0.0
    """Bytes of weights, gradients and moments, over all devices that share one copy; see `state_bytes`."""
    rows: int | None = None
    """Rows of an update if each sequence, or each pair, has its own, e.g. 64; None where that is not known."""
    packing: bool = True
    """Whether sequences share rows, so that their number adapts to the mesh."""
    micro: int | None = None
    """`micro_batch_size` as it is configured."""
    length: int | None = None
    """T, the tokens of a row, which `context` splits; None where that is not known."""
    sampled: bool = False
    """Whether the model completes prompts as well, on the same mesh."""

    def split_by(self, axis: str) -> dict[str, int]:
        """The dimensions that a mesh axis splits and has to divide, by logical axis. None splits the layers."""
        c = self.model
        sizes = {
            "heads": c.num_heads,
            "kv_heads": math.gcd(*(kind.kv_heads for kind in c.paged_kinds)),
            "ffn": c.ffn,
            "vocab": c.vocab_size,
            "embed": c.d_model,
            **({} if c.experts is None else {"expert": c.experts.number}),
        }
        return {name: size for name, size in sizes.items() if RULES[name] == axis}


def state_bytes(
    model: DecoderConfig, dtype: DType, trained: DType | None, moments: DType = "float32", copies: int = 0
) -> float:
    """Bytes of a model in training: weights, gradients and two moments; without the norms, which are small.

    Args:
        dtype: dtype of frozen weights.
        trained: dtype of the weights if all of them train; None under an adapter, whose own are small.
        moments: dtype of the optimizer's moments.
        copies: frozen copies besides, e.g. 1 for a reference.
    """
    weights = matmul_weights(model) + idle_weights(model) + (0 if model.tied else model.vocab_size * model.d_model)
    trained_bytes = BYTES[dtype] if trained is None else 2 * BYTES[trained] + 2 * BYTES[moments]
    return float(weights * (trained_bytes + copies * BYTES[dtype]))


def placed(
    config: MeshConfig | Literal["auto"],
    demand: Demand,
    devices: Sequence[Any],
    memory: float | None = None,
) -> tuple[Mesh, str | None]:
    """The mesh of a section of a recipe, and why it was chosen; None where it was written.

    Args:
        config: the section.
        demand: what the mesh splits.
        devices: what it is made of.
        memory: bytes of a device (`memory_of`); None where that is not known.

    Raises:
        UserError: the sizes do not multiply to the number of devices, or do not divide what they are to split.
    """
    if config == "auto":
        chosen, why = choose(demand, devices, memory)
        return build_mesh(chosen, devices), why
    mesh = build_mesh(config, devices)
    require(mesh, demand)
    return mesh, None


def require(mesh: Mesh, demand: Demand, key: str = "mesh") -> None:
    """Checks that a mesh divides everything that it is to split: what would stay whole is no use of the devices.

    Raises:
        UserError: it does not; with the numbers, and the nearest ones that would.
    """
    wrong = []
    for axis in ("fsdp", "expert", "tensor"):
        width, sizes = mesh.shape[axis], demand.split_by(axis)
        wrong += [f"{key}: {problem}" for problem in undivided(axis, width, sizes)]
    if demand.model.experts is None and mesh.shape["expert"] > 1:
        family = demand.model.family
        wrong.append(f"{key}: expert {mesh.shape['expert']}: {family} has no experts to split; leave it at 1")
    for problem in _uneven(demand, row_shards(mesh)):
        axes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in RULES["rows"] or () if mesh.shape[axis] > 1)
        wrong.append(f"{key}: rows are split over {axes}, but {problem}")
    if (context := mesh.shape["context"]) > 1:
        if demand.sampled:
            wrong.append(
                f"{key}: context {context} splits rows of training, but the model also completes prompts, whose cache "
                "it cannot split"
            )
        # A part may be a single block, and else has to fill all of its blocks.
        length, step = demand.length, context * PART
        if length is not None and (length % context or (length > step and length % step)):
            wrong.append(
                f"{key}: context {context} makes no whole blocks of {PART} of rows of {length} tokens "
                f"(data.max_length); {-(-length // step) * step} would do"
            )
    if wrong:
        sizes, _ = choose(demand, mesh.devices.flatten().tolist(), None)
        raise UserError("\n".join([*wrong, f"`mesh: auto` would take {_written(sizes)}."]))


def undivided(axis: str, width: int, sizes: dict[str, int]) -> Iterator[str]:
    """What a width does not divide, and the divisors of all sizes next to it: `tensor 3 does not divide 8 query heads;
    tensor 2 or 4 would`."""
    if whole := [f"{size} {WORDS.get(name, name)}" for name, size in sizes.items() if size % width]:
        common = math.gcd(*sizes.values())
        fitting = [size for size in range(1, common + 1) if common % size == 0]
        below, above = max(x for x in fitting if x < width), [x for x in fitting if x > width][:1]
        near = " or ".join(map(str, [below, *above]))
        yield f"{axis} {width} does not divide {', '.join(whole)}; {axis} {near} would"


def _uneven(demand: Demand, shards: int) -> Iterator[str]:
    """What is wrong with so many shards of the rows."""
    rows, micro = demand.rows, demand.micro
    next_rows, next_micro = (None if x is None else -(-x // shards) * shards for x in (rows, micro))
    if rows is not None and rows < shards:
        yield f"an update has {rows} of them, so that {shards - rows} of {shards} shards have none; {shards} would do"
    elif rows is not None and not demand.packing and rows % shards:
        yield f"without packing an update has {rows}, no multiple of {shards}; {next_rows} would do"
    if micro is not None and micro % shards:
        yield f"micro_batch_size is {micro}, no multiple of {shards}; {next_micro} would do"


def choose(demand: Demand, devices: Sequence[Any], memory: float | None) -> tuple[MeshConfig, str]:
    """The mesh of `auto`, and the reason in a line.

    Of all meshes whose `fsdp` and `tensor` divide what they split, the first by: each shard of the rows has as many as
    the others; weights, gradients and moments fit in half of a device's memory; only `data` crosses the slow network
    between slices or hosts; at most 16 shards of the weights; few copies of them; few shards of each product.

    Args:
        devices: what the mesh is made of.
        memory: bytes of a device; None where that is not known, and everything is taken to fit.
    """
    number, near = len(devices), len(devices) // len(groups_of(devices))

    def order(sizes: tuple[int, int, int]) -> tuple:
        data, fsdp, tensor = sizes
        large = memory is not None and demand.state / (fsdp * tensor) > STATE_SHARE * memory
        crosses = near % (fsdp * tensor) != 0
        return (any(_uneven(demand, data * fsdp)), large, crosses, fsdp > MOST_FSDP, data, tensor)

    most_fsdp, most_tensor = (math.gcd(*demand.split_by(axis).values()) for axis in ("fsdp", "tensor"))
    divided = [
        (number // (tensor * fsdp), fsdp, tensor)
        for tensor in range(1, number + 1)
        for fsdp in range(1, number // tensor + 1)
        if number % (tensor * fsdp) == most_tensor % tensor == most_fsdp % fsdp == 0
    ]
    data, fsdp, tensor = min(divided, key=order)
    sizes = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    each = demand.state / (fsdp * tensor)
    parts = [f"mesh: auto takes {_written(sizes)} for {number} device(s)"]
    if each > 1e7:
        of = "" if memory is None else f" of {memory / 1e9:.3g}"
        parts.append(f"{each / 1e9:.3g}{of} GB a device are weights, gradients and moments")
    if near < number:
        parts.append(f"{number // near} groups of {near} have a fast network each")
    parts += list(_uneven(demand, data * fsdp))
    return sizes, "; ".join(parts)


def memory_of(devices: Sequence[jax.Device]) -> float | None:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes of a device that JAX may use; None where it does not say, as on a CPU."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    stats = local[0].memory_stats() if local else None
    return stats.get("bytes_limit") if stats else None


def _written(sizes: MeshConfig) -> str:
    """Sizes as in a recipe: `{data: 2, fsdp: 4, tensor: 1}`."""
    context = "" if sizes.context == 1 else f"context: {sizes.context}, "
    expert = "" if sizes.expert == 1 else f"expert: {sizes.expert}, "
    return f"{{data: {sizes.data}, fsdp: {sizes.fsdp}, {context}{expert}tensor: {sizes.tensor}}}"
