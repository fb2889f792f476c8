"""Whether devices multiply the experts of a mixture, and exchange tokens, as they should: asked before weights are
loaded."""

from jax.sharding import Mesh

from tunix.config import DType
from tunix.errors import UserError
from tunix.models.attention.gate import LIMIT
from tunix.models.config import DecoderConfig
from tunix.models.exchange_gate import exchange_difference
from tunix.models.grouped_gate import grouped_difference

EXCHANGED = 1e-5
"""The largest relative difference of float32 numbers that are sent, multiplied by a whole number and added up."""


def check_products(config: DecoderConfig, dtype: DType, mesh: Mesh) -> None:
    """Refuses devices whose kernels for experts give other numbers than plain products (`models/grouped_gate.py`).

    Nothing is asked of a CPU, which has no kernel, nor for a model without experts.

    Args:
        config: the structure of the model.
        dtype: that it computes in.
        mesh: the devices.

    Raises:
        UserError: they do, and by how much.
    """
    if config.experts is None or _platform(mesh) == "cpu":
        return
    split = mesh.shape["tensor"]
    f = config.ffn // split if config.ffn % split == 0 else config.ffn
    if (apart := grouped_difference(config.d_model, f, dtype)) > LIMIT:
        raise UserError(
            f"model: the kernels that multiply experts of {config.d_model} x {f} are off plain products by {apart:.2g} "
            f"of their size on this device, more than {LIMIT}: try another version of tokamax or jax, or uninstall "
            "tokamax, without which XLA multiplies them (slowly)"
        )


def check_exchange(config: DecoderConfig, mesh: Mesh) -> None:
    """Refuses devices that hand each other other tokens than they should (`models/exchange_gate.py`).

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


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
