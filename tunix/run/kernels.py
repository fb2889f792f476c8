"""Which kernels compute the attention of a run's rows and the experts of a mixture, and whether they, and the exchange
of tokens between devices, give the right numbers: asked before weights are loaded."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.models.attention import attend
from tunix.models.attention.attend import Implementation, spec_of
from tunix.models.attention.inputs import AttentionSpec, Segments
from tunix.models.attention.tokamax_ops import capability
from tunix.models.config import DecoderConfig
from tunix.models.grouped_products import ALIGNED, GroupedSpec, described, implementation
from tunix.models.kernel_gates import LIMIT, difference, exchange_difference, grouped_difference


def attention_of(
    config: DecoderConfig, model: ModelConfig, mesh: Mesh, length: int, *, branched: bool, tried: bool = True
) -> tuple[ModelConfig, str]:
    """The recipe's model with the implementation that is to be used, and a line that says which and why no faster one.

    A kernel has to give the einsums' numbers on this device (`models/kernel_gates.py`); else the next implementation
    of the table that computes all layers replaces it. Rows have `length` tokens, T, and where they are `branched`
    sequences that share a prompt. Where nothing is `tried` the devices need not be here, and none is asked.

    Raises:
        UserError: the implementation that the recipe names cannot be used here, or gives other numbers, and why.
    """
    specs, ids = list[AttentionSpec](), jnp.zeros((1, length), jnp.int32)
    with jax.set_mesh(mesh):
        pictures = ids if config.vision is not None and not config.vision.any_shape else None
        for kind in config.paged_kinds:
            q, k = (
                jax.ShapeDtypeStruct((1, length, heads, kind.head_dim), model.dtype)
                for heads in (config.num_heads, kind.kv_heads)
            )
            view = Segments(ids, ids, ids if branched else None, kind.window, pictures=pictures)
            specs.append(spec_of(q, k, view, config.attention_softcap))
    try:
        line = f"attention: {attend.described(specs, model.attention)}"
    except ValueError as error:
        raise UserError(f"model.{error}. Leave it at auto, which takes what this device has.") from error

    def right(kernel: Implementation) -> bool:
        """Whether an implementation computes these calls, and rightly on this device."""
        if any(map(kernel.lacks, specs)):
            return False
        return not kernel.kernel or all(difference(kernel.name, spec) <= LIMIT for spec in specs)

    for spec in specs if tried else ():
        kernel = attend.implementation(spec, model.attention)
        if not kernel.kernel or (off := difference(kernel.name, spec)) <= LIMIT:
            continue
        wrong = f"{kernel.name} is off the einsums by {off:.2g} of their size on this device, more than {LIMIT}"
        faster = [other.name for other in attend.IMPLEMENTATIONS].index(kernel.name) + 1
        after = next(other.name for other in attend.IMPLEMENTATIONS[faster:] if right(other))
        if model.attention != "auto":
            raise UserError(f"model.attention: {wrong}. Leave it at auto, which takes {after} instead.")
        return model.model_copy(update={"attention": after}), f"attention: {after} ({wrong})"
    return model, line


E4M3 = "float8_e4m3fn"
EXCHANGED = 1e-5
"""The largest relative difference of float32 numbers that are sent, multiplied by a whole number and added up."""


def experts_line(config: DecoderConfig, model: ModelConfig, mesh: Mesh) -> str | None:
    """Which kernels multiply the experts on GPUs, and why no faster ones: `experts: triton (mosaic: ...)`.

    None on other devices, which have no choice, and for a model without experts.
    """
    specs = _expert_specs(config, model, mesh)
    return f"experts: {described(specs)}" if specs and specs[0].capability is not None else None


def check_products(config: DecoderConfig, model: ModelConfig, mesh: Mesh) -> None:
    """Refuses devices whose kernels for experts give other numbers than plain products (`models/kernel_gates.py`).

    Nothing is asked of a CPU, which has no kernel, nor for a model without experts.

    Raises:
        UserError: they do, and by how much.
    """
    for spec in [] if _platform(mesh) == "cpu" else _expert_specs(config, model, mesh):
        (d, f), dtype = spec.widths, spec.dtypes[0]
        if (apart := grouped_difference(d, f, dtype)) > LIMIT:
            remedy = "leave out model.quantization" if dtype == E4M3 else "try another version of jax"
            if implementation(spec) == "mosaic":
                remedy = "uninstall tokamax, which leaves them to Triton kernels"
            raise UserError(
                f"model: the kernels that multiply experts of {d} x {f} in {dtype} are off plain products by "
                f"{apart:.2g} of their size on this device, more than {LIMIT}: {remedy}"
            )


def check_exchange(config: DecoderConfig, mesh: Mesh) -> None:
    """Refuses devices that hand each other other tokens than they should (`models/kernel_gates.py`).

    Every process of the run calls it. Nothing is asked of CPUs, nor where experts are not split.

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


def _expert_specs(config: DecoderConfig, model: ModelConfig, mesh: Mesh) -> list[GroupedSpec]:
    """The products of an expert on one device, those of 8-bit floats first; none for a model without experts."""
    if config.experts is None:
        return []
    split = mesh.shape["tensor"]
    f = config.ffn // split if config.ffn % split == 0 else config.ffn
    dtypes = [model.dtype] if model.quantization is None else [E4M3, model.dtype]
    return [GroupedSpec(ALIGNED, (config.d_model, f), (x, x), capability(mesh.devices.flat[0])) for x in dtypes]


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
