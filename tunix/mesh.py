"""The mesh of devices, and how each logical axis is split over it.

Weights and activations name their axes in words (`embed`, `heads`, ...). One table says which mesh axis each word is
split over; a dimension that the mesh does not divide stays whole. Rows of a batch are split over data x fsdp.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tunix.config import DType, MeshConfig
from tunix.errors import UserError

Axes = tuple[str | None, ...]
AXES = ("data", "fsdp", "tensor")
PRODUCTS = {("cpu", "float32"): {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}}
"""Options of XLA, by platform and dtype of the computation, where its default library is the slower one: on a CPU,
YNNPACK keeps the reductions, and products go to Eigen."""


# The ignored rule: jax defines `Device` as a variable, which pyright does not accept as a type.
def build_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """The mesh that a recipe asks for, over all devices or those given.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    asked = (config.data, config.fsdp, config.tensor)
    fixed = math.prod(size for size in asked if size != -1)
    sizes = tuple(len(devices) // fixed if size == -1 else size for size in asked)
    if math.prod(sizes) != len(devices):
        written = ", ".join(f"{axis}: {size}" for axis, size in zip(AXES, asked, strict=True))
        raise UserError(
            f"mesh: {{{written}}} does not fit {len(devices)} device(s) ({devices[0].platform}): "
            f"the sizes must multiply to {len(devices)}. Set one axis to -1 to take what is left."
        )
    return jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 3, devices=devices)


def partition(axes: Axes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """How an array with these logical axes is split; a dimension that its mesh axes do not divide stays whole."""
    return PartitionSpec(*(_mesh_axes(axis, size, mesh) for axis, size in zip(axes, shape, strict=True)))


def _mesh_axes(axis: str | None, size: int, mesh: Mesh | AbstractMesh) -> str | tuple[str, ...] | None:
    """The mesh axes that one dimension is split over; None where it stays whole."""
    axes = RULES[axis] if axis else None
    width = _width(axes, mesh)
    return axes if width > 1 and size % width == 0 else None


def _width(axes: str | tuple[str, ...] | None, mesh: Mesh | AbstractMesh) -> int:
    """The number of shards over these mesh axes."""
    return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes or ()))


def sharding(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of an array with these logical axes on a mesh (`partition`)."""
    return NamedSharding(mesh, partition(axes, shape, mesh))


def fast_products(mesh: Mesh, dtype: DType) -> dict[str, str]:
    """`compiler_options` for programs of many tokens that multiply in this dtype.

    There are none for bfloat16, where trainer and sampler have to round alike.
    """
    return PRODUCTS.get((mesh.devices.flat[0].platform, dtype), {})


def row_shards(mesh: Mesh) -> int:
    """Into how many shards the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what the program that is being traced is compiled for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.default_backend() if device is None else device.platform
    return "gpu" if kind in ("cuda", "rocm") else kind


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
    "rows": ("data", "fsdp"),
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "head": None,
    "layers": None,
    "rank": None,
}
"""Logical axis -> the mesh axes that it is split over."""
