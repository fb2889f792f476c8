"""How devices multiply the experts of a mixture, and whether they do that, and exchange tokens, as they should: asked
before weights are loaded."""

from jax.sharding import Mesh

from tunix.config import DType
from tunix.errors import UserError
from tunix.models.attention.gate import LIMIT
from tunix.models.attention.tokamax_ops import capability
from tunix.models.config import DecoderConfig
from tunix.models.expert_gates import exchange_difference, grouped_difference
from tunix.models.grouped_products import ALIGNED, GroupedSpec, described, implementation

EXCHANGED = 1e-5
"""The largest relative difference of float32 numbers that are sent, multiplied by a whole number and added up."""


def experts_line(config: DecoderConfig, dtype: DType, mesh: Mesh) -> str | None:
    """Which kernels multiply the experts on GPUs, and why no faster ones: `experts: triton (mosaic: ...)`.

    None on other devices, which have no choice, and for a model without experts.
    """
    spec = _spec(config, dtype, mesh)
    return None if spec is None or spec.capability is None else f"experts: {described([spec])}"


def check_products(config: DecoderConfig, dtype: DType, mesh: Mesh) -> None:
    """Refuses devices whose kernels for experts give other numbers than plain products (`models/expert_gates.py`).

    Nothing is asked of a CPU, which has no kernel, nor for a model without experts.

    Args:
        config: the structure of the model.
        dtype: that it computes in.
        mesh: the devices.

    Raises:
        UserError: they do, and by how much.
    """
    spec = _spec(config, dtype, mesh)
    if spec is None or _platform(mesh) == "cpu":
        return
    d, f = spec.widths
    if (apart := grouped_difference(d, f, dtype)) > LIMIT:
        mosaic = implementation(spec) == "mosaic"
        remedy = "uninstall tokamax, which leaves them to Triton kernels" if mosaic else "try another version of jax"
        raise UserError(
            f"model: the kernels that multiply experts of {d} x {f} are off plain products by {apart:.2g} "
            f"of their size on this device, more than {LIMIT}: {remedy}"
        )


def check_exchange(config: DecoderConfig, mesh: Mesh) -> None:
    """Refuses devices that hand each other other tokens than they should (`models/expert_gates.py`).

    Every process of the run calls it. Nothing is asked of CPUs, nor where experts are not split.

    Args:
        config: the structure of the model.
        mesh: the devices.

    Raises:
        UserError: they do, and by how much.
    """
    if config.experts is None or _platform(mesh) == "cpu" or mesh.shape["expert"] == 1:
        return
    apart = exchange_difference(mesh)
    if not apart < EXCHANGED:
        raise UserError(
            f"mesh: expert {mesh.shape['expert']}: what these devices send each other comes back off by {apart:.2g} "
            f"of its size, more than {EXCHANGED}: try another version of jax, or split the model by fsdp and tensor"
        )


def _spec(config: DecoderConfig, dtype: DType, mesh: Mesh) -> GroupedSpec | None:
    """The products of an expert on one device; None for a model without experts."""
    if config.experts is None:
        return None
    split = mesh.shape["tensor"]
    f = config.ffn // split if config.ffn % split == 0 else config.ffn
    return GroupedSpec(ALIGNED, (config.d_model, f), (dtype, dtype), capability(mesh.devices.flat[0]))


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
