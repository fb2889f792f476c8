"""Brings tensors from files onto a mesh, each byte read once, several tensors ahead of the one that is placed.

Every device reads an equal run of a tensor's rows, so that files are read in long pieces by all hosts together,
whatever axis a weight is split along. The rows become one array over all devices; one compiled program for each kind of
tensor moves them to where they belong, transposes them into our layout, rounds a matrix that is quantized, and writes
them into the stack of the layers, in place. Readers are threads, and how far they run ahead is bounded in bytes.

Axes: D model width, N query heads, H head dim.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.config import DType
from tunix.hf.safetensors_io import WRITTEN, Stored
from tunix.mesh import sharding
from tunix.models.families.base import Tensor
from tunix.models.model import Model, Params
from tunix.models.quantization.formats import SCALE, Quantization, quantize
from tunix.util.ahead import ahead, limit_of
from tunix.util.exact import jit

THREADS = 8
PIECE = 1 << 23
"""Bytes of a file that one thread reads at a time: a large tensor is read by several."""
Part = tuple[np.ndarray, list[Future[None]]]
"""The rows of one device, complete once all of their pieces are read."""
Place = tuple[int, ...]
"""Index of a file's tensor in our stacked array: () for a table, (layer,), or (layer, expert)."""


@dataclass(frozen=True)
class Target:
    """What tensors of one kind become. Equal ones, such as keys and values, share a compiled program."""

    tensor: Tensor
    """The layout of what is read, under no name; its rows are the first axis, or the last where they are `turned`."""
    turned: bool
    """Whether the host hands over transposed arrays."""
    shape: tuple[int, ...]
    """Shape of the weight in our layout, e.g. `[D N H]` of a layer's queries."""
    single: NamedSharding
    """Where such a weight belongs."""
    places: tuple[NamedSharding, ...]
    """Where the stack belongs, or the stacks of rounded values and of their scales."""
    stacked: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes and dtypes of the stacks."""
    rounding: tuple[Quantization, int] | None = None
    """How the weight is rounded, and the number of its axes that are inputs."""

    @property
    def rows(self) -> int:
        """Length of the axis that the devices share out among each other."""
        return self.tensor.their_shape(self.shape)[self.axis]

    @property
    def axis(self) -> int:
        """Which axis that is."""
        return len(self.tensor.their_shape(self.shape)) - 1 if self.turned else 0

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of the array that all devices read together: as many rows for each, of which the last may be none."""
        shape, devices = list(self.tensor.their_shape(self.shape)), self.single.mesh.size
        shape[self.axis] = -(-self.rows // devices) * devices
        return tuple(shape)

    @property
    def spread(self) -> NamedSharding:
        """The sharding of the array that is read: its rows, over all devices.

        The mesh axes that the rows stay split over come first, so that the others are gathered or exchanged alone.
        """
        kept, others = _names(self.split[self.axis]), [name for part in self.split for name in _names(part)]
        every = tuple(dict.fromkeys([*kept, *others, *self.single.mesh.axis_names]))
        return NamedSharding(self.single.mesh, PartitionSpec(*[None] * self.axis, every))

    @property
    def split(self) -> PartitionSpec:
        """How the array is split where it belongs, in the layout of what is read."""
        ours = dict(zip(self.tensor.ours.split(), (*self.single.spec, *[None] * len(self.shape)), strict=False))
        # Flattened axes are contiguous runs as long as only the outermost is split, which mesh.RULES ensures.
        assert all(ours[axis] is None for group in self.tensor.groups for axis in group[1:]), self
        return PartitionSpec(*(ours[group[0]] if group else None for group in self.tensor.groups))


@dataclass(frozen=True)
class Read:
    """One tensor of a file that is to be read, and where it goes."""

    name: str
    """Our parameter, e.g. `layers/q/w`."""
    stored: Stored
    target: Target
    place: Place

    @property
    def size(self) -> int:
        """Bytes that this host's share of it takes."""
        mesh = self.target.single.mesh
        return self.stored.size * len(self.target.spread.addressable_devices) // mesh.size


def load(reads: Sequence[Read]) -> Params:
    """Reads tensors onto their mesh.

    Args:
        reads: the tensors; those of one parameter follow each other, on every host in the same order.

    Raises:
        UserError: a file cannot be read.
    """
    loaded: dict[str, tuple[jax.Array, ...]] = {}
    limit = limit_of(read.size for read in reads)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="loading") as pool:
        try:
            for read, parts in ahead(reads, lambda read: read.size, lambda read: _started(read, pool), limit):
                stacks = loaded.pop(read.name, None) or _empty(read.target)
                loaded[read.name] = _put(read.target)(stacks, _whole(read, parts), np.array(read.place, np.int32))
                # Without waiting, what was read would be held until the device gets to it.
                jax.block_until_ready(loaded[read.name])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name + end: x for name, stacks in loaded.items() for end, x in zip(("", SCALE), stacks, strict=False)}


def target_of(model: Model, name: str, tensor: Tensor, depth: int, dtype: DType, mesh: Mesh) -> Target:
    """What the tensors of one of our parameters become.

    Args:
        depth: how many of our axes number the tensors: layers, experts.
        dtype: of the parameter, where it is not quantized.
    """
    quantized = name in model.quantized
    names = (name, name + SCALE) if quantized else (name,)
    shape, axes = model.shapes[name][depth:], model.axes[name][depth:]
    plain = replace(tensor.single, name="")
    turned = plain.is_transposed and _host_turns(mesh)
    return Target(
        plain.turned if turned else plain,
        turned,
        shape,
        sharding(axes, shape, mesh),
        tuple(sharding(model.axes[one], model.shapes[one], mesh) for one in names),
        tuple(jax.ShapeDtypeStruct(model.shapes[one], model.kinds.get(one, dtype)) for one in names),
        model.rounding(name) if quantized else None,
    )


def _host_turns(mesh: Mesh) -> bool:
    """Whether arrays are transposed when they are handed to a device: a CPU's compiler takes ten times as long."""
    return mesh.devices.flat[0].platform == "cpu"


def _started(read: Read, pool: ThreadPoolExecutor) -> dict[Any, Part]:
    """The parts of this host's devices, being read."""
    target = read.target
    found = target.spread.addressable_devices_indices_map(target.read_shape)
    parts: dict[Any, Part] = {}
    for device, index in found.items():
        assert index is not None, "a device of this host"
        start, stop, _ = index[target.axis].indices(target.read_shape[target.axis])
        # Made here, since malloc keeps memory for each thread that asks for some.
        array = np.empty((stop - start, *read.stored.shape[1:]), WRITTEN[read.stored.dtype])
        there = min(max(target.rows - start, 0), len(array))
        array[there:] = 0  # rows beyond the last
        step = max(PIECE * len(array) // max(array.nbytes, 1), 1)
        pieces = [(array[at : min(at + step, there)], start + at) for at in range(0, there, step)]
        parts[device] = array, [pool.submit(read.stored.read_into, *piece) for piece in pieces]
    return parts


def _whole(read: Read, parts: dict[Any, Part]) -> jax.Array:
    """The array of all devices, once this host's parts are read, which are let go."""
    arrays: list[jax.Array] = []
    for device, (array, pieces) in parts.items():
        for piece in pieces:
            piece.result()
        arrays.append(jax.device_put(array.T if read.target.turned else array, device))
    parts.clear()
    shape, place = read.target.read_shape, read.target.spread
    return jax.make_array_from_single_device_arrays(shape, place, arrays, dtype=arrays[0].dtype)


def _empty(target: Target) -> tuple[jax.Array, ...]:
    """Stacks to be written into; none for a table, which is no stack."""
    if len(target.shape) == len(target.stacked[0].shape):
        return ()
    return tuple(
        jnp.zeros(one.shape, one.dtype, device=place) for one, place in zip(target.stacked, target.places, strict=True)
    )


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one axis is split over."""
    return (part,) if isinstance(part, str) else part or ()


@cache
def _put(target: Target) -> Callable[..., tuple[jax.Array, ...]]:
    """The compiled function that writes a tensor that was read into its stack, or its values and scales into theirs.

    All parameters and folders share it, so that it is compiled once for each kind of tensor.
    """

    def put(stacks: tuple[jax.Array, ...], read: jax.Array, place: jax.Array) -> tuple[jax.Array, ...]:
        there = jax.lax.slice_in_dim(read, 0, target.rows, axis=target.axis)
        there = jax.lax.with_sharding_constraint(there, NamedSharding(target.single.mesh, target.split))
        weight = target.tensor.read(there, target.shape)
        parts = quantize(weight, *target.rounding) if target.rounding else (weight,)
        cast = [part.astype(one.dtype) for part, one in zip(parts, target.stacked, strict=True)]
        if not stacks:
            return tuple(cast)
        return tuple(_written(stack, part, place) for stack, part in zip(stacks, cast, strict=True))

    return jit(put, donate_argnums=0, out_shardings=target.places)


def _written(stack: jax.Array, part: jax.Array, place: jax.Array) -> jax.Array:
    """The stack with one part replaced."""
    start = [*place, *[0] * part.ndim]
    whole = part.reshape([1] * len(place) + list(part.shape))
    if stack.dtype.itemsize != 2:
        return jax.lax.dynamic_update_slice(stack, whole, start)
    # As bits: XLA's CPU compiler would widen the whole bfloat16 stack, and narrow it again.
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (stack, whole)]
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(bits[0], bits[1], start), stack.dtype)
