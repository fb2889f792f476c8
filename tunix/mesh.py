"""Devices as a mesh, and where each logical axis lives on it.

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
"""What XLA is given, by platform and dtype of the computation, where its own choice of a library is the slower one: on
a CPU YNNPACK keeps the reductions, and products go to Eigen."""


# The ignored rule: jax makes `Device` as a variable, which pyright takes for no type.
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
    """Where an array with these logical axes lives; a dimension that its mesh axes do not divide stays whole."""
    return PartitionSpec(*(_home(axis, size, mesh) for axis, size in zip(axes, shape, strict=True)))


def _home(axis: str | None, size: int, mesh: Mesh | AbstractMesh) -> str | tuple[str, ...] | None:
    """The mesh axes of one dimension."""
    home = RULES[axis] if axis else None
    width = math.prod(mesh.shape[name] for name in ((home,) if isinstance(home, str) else home or ()))
    return home if width > 1 and size % width == 0 else None


def sharding(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """`partition` on its mesh."""
    return NamedSharding(mesh, partition(axes, shape, mesh))


def fast_products(mesh: Mesh, dtype: DType) -> dict[str, str]:
    """`compiler_options` for programs of many tokens that multiply in this dtype. Not for bfloat16, where a trainer's
    rounding has to be its sampler's."""
    return PRODUCTS.get((mesh.devices.flat[0].platform, dtype), {})


def row_shards(mesh: Mesh) -> int:
    """Into how many shards the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Holds an activation to its axes' places inside a compiled function, under `jax.set_mesh`.

    On one device there is nothing to do.
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
"""Logical axis -> mesh axes."""
