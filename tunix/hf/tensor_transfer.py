"""Brings tensors from files onto a mesh, each byte read once, several tensors ahead of the one that is placed; and
sends them back to the host, some time before they are written, in the layout of a file.

Every device reads an equal run of a tensor's rows, so that files are read in long pieces by all hosts together,
whatever axis a weight is split along. The rows become one array over all devices; one compiled program for each kind of
tensor moves them to where they belong, transposes them into our layout, rounds a matrix that is quantized, and writes
them into the stack of the layers, in place. Readers are threads, and how far they run ahead is bounded in bytes.

Axes: D model width, N query heads, H head dim.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.config import DType
from tunix.distributed.global_arrays import everywhere
from tunix.hf.packed_weights import PACKED, SCALES, SHAPE, VALUES, pack_words
from tunix.hf.safetensors_io import WRITTEN, Entry, Sent, Stored
from tunix.mesh import sharding
from tunix.models.config import DecoderConfig
from tunix.models.families.base import Tensor
from tunix.models.families.table import tensors_of
from tunix.models.model import Model, Params
from tunix.models.quantization.formats import SCALE, Quantization, is_scale, quantize
from tunix.models.quantization.schemes import BITS, WORDS, Packing
from tunix.util.ahead import ahead, limit_of
from tunix.util.exact import jit

STORED_DTYPE = {"float32": "F32", "bfloat16": "BF16"}
THREADS = 8
HOST_TURNS = ("cpu",)
"""Platforms whose compilers take ten times as long to transpose an array as the host, which then does it."""
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
    """The layout of what is read, under no name."""
    axis: int
    """Which axis of it are rows, that the devices share out: 0, or 1 where the host hands over transposed matrices."""
    shape: tuple[int, ...]
    """Shape of the weight in our layout, e.g. `[D N H]` of a layer's queries."""
    single: NamedSharding
    """Where such a weight belongs."""
    stacks: tuple[jax.ShapeDtypeStruct, ...]
    """What the stacks are, and where: a parameter's, or those of its rounded values and of their scales, then the
    next's."""
    rounding: tuple[Quantization, int] | None = None
    """How the weight is rounded, and the number of its axes that are inputs."""
    taken: tuple[int, ...] = ()
    """Which of the weights that take turns in the file become the stacks, e.g. gates and ups `(0, 1)`; `shape` then has
    an axis for all of them in front. Empty where the file has one weight."""

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.tensor.their_shape(self.shape)[self.axis]

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
        mesh, names = self.single.mesh, [(x,) if isinstance(x, str) else x or () for x in self.split]
        every = tuple(dict.fromkeys(name for part in (names[self.axis], *names, mesh.axis_names) for name in part))
        return NamedSharding(mesh, PartitionSpec(*[None] * self.axis, every))

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

    names: tuple[str, ...]
    """The stacks of the target by our names, e.g. `("layers/q/w",)`, `("layers/q/w", "layers/q/w_scale")` or
    `("layers/gates/w", "layers/ups/w")`."""
    stored: Stored
    target: Target
    place: Place

    @property
    def size(self) -> int:
        """Bytes that this host's share of it takes."""
        mesh = self.target.single.mesh
        return self.stored.size * len(self.target.spread.addressable_devices) // mesh.size


def load(model: Model, stored: Mapping[str, Stored], dtypes: Mapping[str, DType], mesh: Mesh) -> Params:
    """Reads a folder's tensors onto a mesh, each once, also where parts of several parameters take turns in it.

    Args:
        stored: the folder's tensors, among them those of the parameters; on every host in the same order.
        dtypes: dtype by name of the wanted parameters; scales come with their values.

    Raises:
        UserError: a file cannot be read.
    """
    table = tensors_of(model.config)
    together = dict[Any, list[tuple[str, Stored, Place]]]()
    for name in (name for name in dtypes if not is_scale(name)):
        for key, place in places_of(model.config, table[name], model.shapes[name]).items():
            tensor = stored[key]
            whole = tensor.turns[0] if tensor.turns else (name, key)
            together.setdefault(whole, []).append((name, tensor, place))
    targets, reads = dict[Any, Target](), list[Read]()
    for parts in together.values():
        names, (_, first, place) = tuple(name for name, _, _ in parts), parts[0]
        taken = tuple(x.turns[1] for _, x, _ in parts if x.turns)
        stacks = tuple(x for name in names for x in ((name, name + SCALE) if name in model.quantized else (name,)))
        kind = names, first.turned, taken
        if kind not in targets:
            name, depth = names[0], len(place)  # all are alike; so many of our axes number the tensors
            layout = replace((table[name].turned if first.turned else table[name]).single, name="")
            axis = int(layout.is_transposed and mesh.devices.flat[0].platform in HOST_TURNS)
            layout = layout.turned if axis else layout
            shape, axes = model.shapes[name][depth:], model.axes[name][depth:]
            if first.turns:  # weights alike along a first axis; outputs take turns in the file: `D F` as `D (F 2)`
                _, _, number = first.turns
                outputs = layout.ours.split()[-1]
                theirs = layout.theirs.replace(outputs, f"({outputs} {number})")
                layout = replace(layout, theirs=theirs, ours=f"{number} {layout.ours}")
                shape, axes = (number, *shape), (None, *axes)
            targets[kind] = Target(
                layout,
                axis,
                shape,
                sharding(axes, shape, mesh),
                tuple(
                    jax.ShapeDtypeStruct(
                        model.shapes[x],
                        model.kinds.get(x, dtypes[x.removesuffix(SCALE)]),
                        sharding=sharding(model.axes[x], model.shapes[x], mesh),
                    )
                    for x in stacks
                ),
                model.rounding(name) if name in model.quantized else None,
                taken,
            )
        reads.append(Read(stacks, first.turns[0] if first.turns else first, targets[kind], place))
    loaded = Params()
    limit = limit_of(read.size for read in reads)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="loading") as pool:
        try:
            for read, parts in ahead(reads, lambda read: read.size, lambda read: _started(read, pool), limit):
                # The stacks to be written into, taken out of what is loaded, or new ones; none for a table.
                stacks = tuple(
                    loaded.pop(name) if name in loaded else jnp.zeros(stack.shape, stack.dtype, device=stack.sharding)
                    for name, stack in (zip(read.names, read.target.stacks, strict=True) if read.place else ())
                )
                stacks = _put(read.target)(stacks, _whole(read, parts), np.array(read.place, np.int32))
                # Without waiting, what was read would be held until the device gets to it.
                loaded |= zip(read.names, jax.block_until_ready(stacks), strict=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return loaded


def places_of(config: DecoderConfig, tensor: Tensor, shape: tuple[int, ...]) -> dict[str, Place]:
    """The tensors that hold a parameter, and where each belongs in it."""
    if tensor.layered:
        keys = {(place,): tensor.keys(at, shape[1:]) for place, at in enumerate(config.layers_with(tensor.mixer))}
    else:
        keys = {(): tensor.keys(None, shape)}
    return {
        key: (*place, expert) if tensor.by_expert else place
        for place, tensors in keys.items()
        for expert, key in enumerate(tensors)
    }


def _started(read: Read, pool: ThreadPoolExecutor) -> dict[Any, Part]:
    """The parts of this host's devices, being read."""
    target = read.target
    parts: dict[Any, Part] = {}
    for device, index in target.spread.addressable_devices_indices_map(target.read_shape).items():
        assert index is not None, "a device of this host"
        start, stop, _ = index[target.axis].indices(target.read_shape[target.axis])
        # Made here, since malloc keeps memory for each thread that asks for some.
        array = np.empty((stop - start, *read.stored.shape[1:]), WRITTEN[read.stored.dtype])
        there = min(max(target.rows - start, 0), len(array))
        array[there:] = 0  # rows beyond the last
        step = max(PIECE * len(array) // max(array.nbytes, 1), 1)
        pieces = [(array[at : min(at + step, there)], start + at) for at in range(0, there, step)]
        parts[device] = array, [pool.submit(read.stored.read_into, rows, begin) for rows, begin in pieces]
    return parts


def _whole(read: Read, parts: dict[Any, Part]) -> jax.Array:
    """The array of all devices, once this host's parts are read, which are let go."""
    arrays: list[jax.Array] = []
    for device, (array, pieces) in parts.items():
        for piece in pieces:
            piece.result()
        arrays.append(jax.device_put(array.T if read.target.axis else array, device))
    parts.clear()
    shape, place = read.target.read_shape, read.target.spread
    return jax.make_array_from_single_device_arrays(shape, place, arrays, dtype=arrays[0].dtype)


@cache
def _put(target: Target) -> Callable[..., tuple[jax.Array, ...]]:
    """The compiled function that writes a tensor that was read into its stack, or its values and scales into theirs.

    All parameters and folders share it, so that it is compiled once for each kind of tensor.
    """

    def put(stacks: tuple[jax.Array, ...], read: jax.Array, place: jax.Array) -> tuple[jax.Array, ...]:
        there = jax.lax.slice_in_dim(read, 0, target.rows, axis=target.axis)
        there = jax.lax.with_sharding_constraint(there, NamedSharding(target.single.mesh, target.split))
        weight = target.tensor.read(there, target.shape)
        weights = [weight[i] for i in target.taken] if target.taken else [weight]
        parts = [part for x in weights for part in (quantize(x, *target.rounding) if target.rounding else (x,))]
        cast = [part.astype(stack.dtype) for part, stack in zip(parts, target.stacks, strict=True)]
        if not stacks:
            return tuple(cast)
        written = []
        for stack, part in zip(stacks, cast, strict=True):
            start, whole = [*place, *[0] * part.ndim], part.reshape([1] * len(place) + list(part.shape))
            # As bits: XLA's CPU compiler would widen a whole bfloat16 stack, and narrow it again.
            as_bits = stack.dtype.itemsize == 2
            if as_bits:
                stack, whole = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (stack, whole))
            stack = jax.lax.dynamic_update_slice(stack, whole, start)
            written.append(jax.lax.bitcast_convert_type(stack, part.dtype) if as_bits else stack)
        return tuple(written)

    return jit(put, donate_argnums=0, out_shardings=tuple(stack.sharding for stack in target.stacks))


def entry_of(key: str, array: jax.Array, place: Place, tensor: Tensor, dtype: str) -> Entry:
    """One tensor of a stack as it is written to a file.

    Args:
        key: its name there.
        array: the stack, or a table.
        place: index of the tensor in it.
        tensor: its layout in the file.
        dtype: in which it is sent to the host, and written.
    """

    def send() -> Sent:
        there = everywhere(_taken(array, place).astype(dtype))
        there.copy_to_host_async()
        return lambda: tensor.write(np.asarray(there))

    return Entry(key, tensor.single.their_shape(array.shape[len(place) :]), STORED_DTYPE[dtype], send)


def packed_entries(module: str, array: jax.Array, place: Place, tensor: Tensor, packing: Packing) -> Iterator[Entry]:
    """The tensors that one matrix of a stack is written as in few bits (`packed_weights`).

    It is rounded once for its values and once for its scales: kept in between, all matrices would be on the host at
    once.

    Args:
        module: the name of the matrix in the file, up to `weight`.
        array, place: as in `entry_of`.
        tensor: its layout in the file, outputs before inputs.
        packing: how it is packed.
    """
    kind, (outputs, inputs) = packing.rule.weights, packing.shape
    assert kind is not None
    words, rounding = packing.format == WORDS, Quantization(kind, packing.tile)

    def send(part: int) -> Sent:
        rounded = jit(quantize, static_argnums=(1, 2))(_taken(array, place), rounding, tensor.contracted)
        arriving, runs = everywhere(rounded[part]), tensor.order_of_runs(array.shape[len(place) :])
        arriving.copy_to_host_async()

        def values() -> np.ndarray:
            laid = tensor.write(np.asarray(arriving))
            return pack_words(laid, BITS[kind]) if words else laid

        def scales() -> np.ndarray:
            laid = np.asarray(arriving).reshape(len(arriving), -1).T
            return laid if runs is None else laid.take(runs, axis=0)

        return scales if part else values

    if words:
        yield Entry(module + PACKED, (outputs, -(-inputs * BITS[kind] // 32)), "I32", partial(send, 0))
        yield Entry(module + SHAPE, (2,), "I64", lambda: partial(np.array, packing.shape))
    else:
        yield Entry(module + VALUES, packing.shape, "F8_E4M3" if kind == "fp8" else "I8", partial(send, 0))
    yield Entry(module + SCALES, (outputs, inputs // packing.tile), "F32", partial(send, 1))


def _taken(array: jax.Array, place: Place) -> jax.Array:
    for index in place:
        array = jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False)
    return array
