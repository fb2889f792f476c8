"""Whether this device multiplies the experts of a mixture as it should, asked before weights are loaded."""

from jax.sharding import Mesh

from tunix.config import DType
from tunix.errors import UserError
from tunix.models.attention.gate import LIMIT
from tunix.models.config import DecoderConfig
from tunix.models.grouped_gate import grouped_difference


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


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
