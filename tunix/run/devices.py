"""The devices of a run: what its recipe asks of a mesh, and the mesh."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.models.config import DecoderConfig
from tunix.recipe.recipe import Recipe
from tunix.run.row_layout import layout
from tunix.trainer.mesh_choice import Demand, placed, state_bytes


def mesh_of(
    recipe: Recipe, decoder: DecoderConfig, algorithm: Algorithm, devices: Sequence[Any], memory: float | None
) -> tuple[Mesh, str | None]:
    """The mesh of a recipe's `mesh`, and why it was chosen; None where it was written.

    Args:
        recipe: the recipe.
        decoder: the structure of its model.
        algorithm: decides about the reference, and how many sequences share a row at least.
        devices: all that the policy may use.
        memory: bytes of a device; None where that is not known.

    Raises:
        UserError: the mesh does not fit the devices, the model or the rows.
    """
    return placed(recipe.mesh, demand_of(recipe, decoder, algorithm), devices, memory)


def demand_of(recipe: Recipe, decoder: DecoderConfig, algorithm: Algorithm) -> Demand:
    """What a recipe's model and rows ask of a mesh."""
    model, full = recipe.model, recipe.adapter is None
    return Demand(
        model=decoder,
        state=state_bytes(
            decoder,
            model.dtype,
            (model.param_dtype or "float32") if full else None,
            recipe.optimizer.moments_dtype,
            copies=int(full and algorithm.needs_reference),
        ),
        rows=recipe.sequences_per_update // algorithm.sequences_per_example,
        packing=bool(recipe.data.packing),
        micro=recipe.micro_batch_size,
        length=layout(algorithm).length(recipe.data),
        sampled=algorithm.train_on == RowKind.PROMPT,
    )
