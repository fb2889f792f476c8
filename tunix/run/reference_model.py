"""A reference that is named: another model of the same structure than the one that the run starts from."""

from dataclasses import asdict, replace

from jax.sharding import Mesh

from tunix.errors import UserError
from tunix.hf.safetensors_io import some
from tunix.hf.source import Source, must_speak, pretrained, weights
from tunix.hf.vocabulary import check_tokens
from tunix.models.model import Model, Params
from tunix.models.quantization.rules import RULES_FILE

KEY = "algorithm.reference_path"


def reference_source(path: str, trained: Source) -> Source:
    """The reference's structure and where its weights are.

    Args:
        path: a hub id, a folder or a run.
        trained: the model that trains.

    Raises:
        UserError: there is no such model, it gives scores or rounds its activations, or its vocabulary or structure is
            not that of `trained`.
    """
    found = pretrained(path)
    must_speak(found, path)
    if found.tokenizer is not None and trained.tokenizer is not None:
        check_tokens(KEY, path, found.tokenizer, trained.tokenizer)
    mine, theirs = (asdict(replace(source.decoder, stops=())) for source in (trained, found))
    if different := [f"{name} {theirs[name]} instead of {mine[name]}" for name in mine if mine[name] != theirs[name]]:
        raise UserError(
            f"{KEY}: {path} is of another structure than the model that trains ({some(different)}): take one of the "
            "same, such as the model that it was trained from"
        )
    if found.rules is not None and found.rules.inputs:
        raise UserError(
            f"{KEY}: {path} rounds its activations ({RULES_FILE}), which comparing with it would leave out: take the "
            "weights that it was made of"
        )
    return found


def reference_weights(source: Source, model: Model, mesh: Mesh) -> Params:
    """The reference's weights in the compute dtype.

    Args:
        source: what `reference_source` found.
        model: what trains.
    """
    plain = replace(model, adapt=None, critic=False)
    return weights(source, plain, mesh, seed=0, trained=model.dtype, frozen=model.dtype, full=True)[0]
