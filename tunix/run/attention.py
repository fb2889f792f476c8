"""Which implementation computes the attention of a run's rows, decided before its weights are loaded."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.models.attention import attend, gate
from tunix.models.attention.attend import Implementation, described, implementation, spec_of
from tunix.models.attention.inputs import AttentionSpec, Segments
from tunix.models.config import DecoderConfig, LayerKind


def attention_of(
    config: DecoderConfig, model: ModelConfig, mesh: Mesh, length: int, *, branched: bool
) -> tuple[ModelConfig, str]:
    """The recipe's model with the implementation that is to be used, and a line that says which and why no faster one.

    A kernel has to give the einsums' numbers on this device (`models/attention/gate.py`); else the next implementation
    of the table that computes all layers replaces it.

    Args:
        config: the structure of the model.
        model: its dtype, and the implementation that the recipe names.
        mesh: the devices.
        length: T, tokens of a row.
        branched: whether sequences share a prompt in a row.

    Raises:
        UserError: the implementation that the recipe names cannot be used here, or gives other numbers, and why.
    """
    line = attention_line(config, model, mesh, length, branched=branched)
    specs = _specs(config, model, mesh, length, branched=branched)
    for spec in specs:
        one = implementation(spec, model.attention)
        if not one.kernel or (off := gate.difference(one.name, spec)) <= gate.LIMIT:
            continue
        wrong = f"{one.name} is off the einsums by {off:.2g} of their size on this device, more than {gate.LIMIT}"
        faster = [other.name for other in attend.IMPLEMENTATIONS].index(one.name) + 1
        after = next(other.name for other in attend.IMPLEMENTATIONS[faster:] if _right(other, specs))
        if model.attention != "auto":
            raise UserError(f"model.attention: {wrong}. Leave it at auto, which takes {after} instead.")
        return model.model_copy(update={"attention": after}), f"attention: {after} ({wrong})"
    return model, line


def _right(one: Implementation, specs: list[AttentionSpec]) -> bool:
    """Whether an implementation computes these calls, and rightly on this device."""
    if any(map(one.lacks, specs)):
        return False
    return not one.kernel or all(gate.difference(one.name, spec) <= gate.LIMIT for spec in specs)


def attention_line(config: DecoderConfig, model: ModelConfig, mesh: Mesh, length: int, *, branched: bool) -> str:
    """The line of `attention_of` before a kernel is tried: it asks nothing of the devices, which need not be here.

    Raises:
        UserError: the implementation that the recipe names cannot be used there, and why.
    """
    try:
        return f"attention: {described(_specs(config, model, mesh, length, branched=branched), model.attention)}"
    except ValueError as error:
        raise UserError(f"model.{error}. Leave it at auto, which takes what this device has.") from error


def _specs(
    config: DecoderConfig, model: ModelConfig, mesh: Mesh, length: int, *, branched: bool
) -> list[AttentionSpec]:
    """The calls of the model's kinds of layers."""
    ids = jnp.zeros((1, length), jnp.int32)

    def one(kind: LayerKind) -> AttentionSpec:
        q, k = (
            jax.ShapeDtypeStruct((1, length, heads, kind.head_dim), model.dtype)
            for heads in (config.num_heads, kind.kv_heads)
        )
        ahead = config.vision is not None and config.vision.sees_ahead
        view = Segments(ids, ids, ids if branched else None, kind.window, pictures=ids if ahead else None)
        return spec_of(q, k, view, config.attention_softcap)

    with jax.set_mesh(mesh):
        return list(map(one, config.paged_kinds))
