"""Loads the reference that `algorithm.reference_path` names: another model with the policy's structure."""

from dataclasses import asdict, replace

from jax.sharding import Mesh

from tunix.errors import UserError
from tunix.hf.safetensors_io import some
from tunix.hf.source import Source, check_tokens, pretrained, require_lm_head, weights
from tunix.models.model import Model, Params
from tunix.models.quantization.rules import RULES_FILE

KEY = "algorithm.reference_path"


def reference_source(path: str, trained: Source) -> Source:
    """The structure of the reference and the location of its weights.

    Args:
        path: a hub id, a folder or a run.
        trained: the model to train.

    Raises:
        UserError: there is no such model, it gives scores or rounds its activations, or its vocabulary or structure is
            not that of `trained`.
    """
    source = pretrained(path)
    require_lm_head(source, path)
    if source.tokenizer is not None and trained.tokenizer is not None:
        check_tokens(KEY, path, source.tokenizer, trained.tokenizer)
    ours, theirs = (asdict(replace(one.decoder, stops=())) for one in (trained, source))
    if different := [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name]]:
        raise UserError(
            f"{KEY}: {path} is of another structure than the model that trains ({some(different)}): take one of the "
            "same, such as the model that it was trained from"
        )
    if source.rules is not None and source.rules.inputs:
        raise UserError(
            f"{KEY}: {path} rounds its activations ({RULES_FILE}), which comparing with it would leave out: take the "
            "weights that it was made of"
        )
    return source


def reference_weights(source: Source, model: Model, mesh: Mesh) -> Params:
    """The reference's weights in the compute dtype.

    Args:
        source: from `reference_source`.
        model: the model to train.
    """
    plain = replace(model, adapt=None, has_scalar_head=False)
    return weights(source, plain, mesh, seed=0, trained=model.dtype, frozen=model.dtype, full=True)[0]
