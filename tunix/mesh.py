"""The mesh of devices, and how each logical axis is split over it.

Weights and activations name their axes in words (`embed`, `heads`, ...). One table says which mesh axis each word is
split over; a dimension that the mesh does not divide, such as a single scalar head, stays whole. A recipe's mesh has to
divide those of its model (`trainer/mesh_choice.py`). Rows of a batch are split over data x fsdp x expert, the
tokens of a row over context.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax._src.mesh import get_concrete_mesh  # while a program is traced, jax.sharding gives the abstract one alone
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tunix.config import DType, MeshConfig
from tunix.errors import UserError

Axes = tuple[str | None, ...]
AXES = ("data", "fsdp", "context", "expert", "tensor")
APART = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
"""An option of XLA for CPUs: YNNPACK computes products alone. It would take along what stands before and after them, up
to whole layers, with an exp, tanh and rsqrt of its own whose last bit is another; and where a fusion ends depends on
who else reads a number, as a backward pass does. In bfloat16 a last bit may be a whole digit: a policy would differ
from its own reference, and the sampler from both."""
PRODUCTS = {
    ("cpu", "float32"): {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"},
    ("cpu", "bfloat16"): {**APART, "xla_disable_hlo_passes": "while-loop-invariant-code-motion"},
}
"""Options of XLA for programs of many tokens, by platform and dtype of the computation, where its default is slower,
takes more memory or rounds otherwise. On a CPU float32 products go to Eigen, and YNNPACK keeps the reductions. One of
bfloat16 multiplies float32 copies: a layer's matrices are copied when it is their turn, not those of all layers before
the first."""
SCANS: dict[str, dict[str, bool]] = {"gpu": {"xla_gpu_enable_dynamic_slice_fusion": False}}
"""Options of XLA for the same programs, by platform. On a GPU a kernel would write its result into a scan's stacked
output itself; where the scan's body reads that result too, jax 0.11.2 clones the kernel: attention's forward pass ran
twice in every layer, 50 of 459 ms of a step on an H200. jax 0.10.2 and 0.12.0.1 do not fuse it, and compile the same
program with and without the option."""


def build_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that a recipe asks for, over all devices or those given.

    Devices of several slices, or hosts, are ordered so that `data` crosses the slow network between them as far as its
    size allows, then `fsdp`, `context` and `expert`, and `tensor` last.

    Raises:
        UserError: the sizes do not multiply to the number of devices, or these are of several kinds.
    """
    devices = jax.devices() if devices is None else list(devices)
    kinds = Counter(device.device_kind for device in devices)
    if len(kinds) > 1:
        raise UserError(
            f"a program is compiled for one kind of device, and these are "
            f"{' and '.join(f'{number} x {kind}' for kind, number in kinds.items())}: choose those of one kind, GPUs "
            "with CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)"
        )
    asked = (config.data, config.fsdp, config.context, config.expert, config.tensor)
    fixed = math.prod(size for size in asked if size != -1)
    sizes = tuple(len(devices) // fixed if size == -1 else size for size in asked)
    if math.prod(sizes) != len(devices):
        written = ", ".join(f"{axis}: {size}" for axis, size in zip(AXES, asked, strict=True))
        hosts = len({device.process_index for device in devices})
        several = f" of {hosts} processes" if hosts > 1 else ""
        raise UserError(
            f"mesh: {{{written}}} does not fit {len(devices)} device(s) ({devices[0].platform}){several}: "
            f"the sizes must multiply to {len(devices)}. Set one axis to -1 to take what is left."
        )
    left = len(groups_of(devices))
    if left == 1:
        ordered = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        across: list[int] = []
        for size in sizes:
            across.append(math.gcd(size, left))
            left //= across[-1]
        within = [size // number for size, number in zip(sizes, across, strict=True)]
        by_host = devices[0].platform != "tpu"
        ordered = mesh_utils.create_hybrid_device_mesh(
            within, across, devices, process_is_granule=by_host, allow_split_physical_axes=True
        )
    return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def groups_of(devices: Sequence[Any]) -> list[list[Any]]:
    """Devices in groups with a fast network each: slices of TPUs, hosts of GPUs; one group if they differ in size."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        number = device.process_index
        if device.platform == "tpu":  # its network joins the hosts of a slice; a single one is not named
            number = device.slice_index if hasattr(device, "slice_index") else 0
        groups.setdefault(number, []).append(device)
    listed = [groups[index] for index in sorted(groups)]
    return listed if len({len(group) for group in listed}) == 1 else [list(devices)]


def partition(axes: Axes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """How an array with these logical axes is split; a dimension that its mesh axes do not divide stays whole."""
    split = []
    for axis, size in zip(axes, shape, strict=True):
        over = RULES[axis] if axis else None
        width = _width(over, mesh)
        split.append(over if width > 1 and size % width == 0 else None)
    return PartitionSpec(*split)


def _width(axes: str | tuple[str, ...] | None, mesh: Mesh | AbstractMesh) -> int:
    """The number of shards over these mesh axes."""
    return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes or ()))


def sharding(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of an array with these logical axes on a mesh (`partition`)."""
    return NamedSharding(mesh, partition(axes, shape, mesh))


def compiler_options(mesh: Mesh, dtype: DType) -> dict[str, Any]:
    """`compiler_options` of `jax.jit` for programs of many tokens that multiply in this dtype, for the mesh's devices.

    None for bfloat16 changes a product: trainer and sampler have to round alike.
    """
    kind = _platform(mesh.devices.flat[0].platform)
    return {**PRODUCTS.get((kind, dtype), {}), **SCANS.get(kind, {})}


def row_shards(mesh: Mesh) -> int:
    """Into how many shards the rows of a batch are split."""
    return _width(RULES["rows"], mesh)


def by_rows(mesh: Mesh, length: int) -> NamedSharding:
    """The sharding of micro-batches `[M R T]`, or `[M R T D]`, of rows of this length."""
    time = RULES["time"] if length % mesh.shape["context"] == 0 else None
    return NamedSharding(mesh, PartitionSpec(None, RULES["rows"], time))


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what the program that is being traced is compiled for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.default_backend() if device is None else device.platform
    return _platform(kind)


def _platform(name: str) -> str:
    """A device's platform as tables have it: the compilers of GPUs that are not here have names of their own."""
    return "gpu" if name in ("cuda", "rocm") else name


def device_in_use() -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
    """A device that the program which is being traced is compiled for."""
    mesh = get_concrete_mesh()
    return jax.devices()[0] if mesh is None or mesh.empty else mesh.devices.flat[0]


def shards(axis: str) -> int:
    """Into how many shards a dimension with this logical axis is split, if it can be, by the mesh in use."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else _width(RULES[axis], mesh)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains an activation to the sharding of its logical axes, in a compiled function under `jax.set_mesh`.

    Does nothing on one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ("data", "fsdp", "expert"),
    "time": "context",
    "pieces": ("data", "fsdp", "expert", "context"),
    "draws": AXES,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "expert": "expert",
    "head": None,
    "layers": None,
    "rank": None,
}
"""Logical axis -> the mesh axes that it is split over."""


def compile_on(mesh: Mesh, program: jax.stages.Lowered) -> None:
    """Compiles a program as a call under this mesh would, which finds it then; for threads, which have no mesh."""
    with jax.set_mesh(mesh):
        program.compile()


def bytes_of(tree: object, itemsize: int | None = None) -> int:
    """Bytes that a tree of arrays, or of shapes, takes on each device; 4-bit numbers are two to a byte.

    Args:
        itemsize: bytes of a number, where they are counted in another dtype than their own.
    """
    total = 0
    for x in jax.tree.leaves(tree):
        shape, name = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape), str(x.dtype)
        bits = 4 if name.endswith("int4") else 2 if name.endswith("int2") else 8 * x.dtype.itemsize
        bits = bits if itemsize is None else 8 * itemsize
        total += -(-math.prod(shape) * bits // 8)
    return total
