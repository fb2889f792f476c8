"""The devices of a run: what its recipe asks of a mesh, and the mesh."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.errors import UserError
from tunix.mesh import AXES
from tunix.models.config import DecoderConfig
from tunix.recipe.recipe import Recipe
from tunix.rollout.config import RolloutMeshConfig
from tunix.run.inputs import layout
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


def apart(config: RolloutMeshConfig | None, devices: Sequence[Any]) -> tuple[list[Any], Mesh | None]:
    """`(training's, sampling's)` devices: those that only sample are the last ones of each process.

    Args:
        config: the recipe's `rollout.mesh`; None for auto.
        devices: of all processes, without those of a teacher.

    Raises:
        UserError: they cannot be shared out over the processes, or none is left to train.
    """
    number = None if config is None else config.devices
    if number is None:
        return list(devices), None
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(device.process_index, []).append(device)
    each = number // len(groups)
    if number % len(groups):
        near = " or ".join(str(one * len(groups)) for one in (each, each + 1) if one)
        raise UserError(
            f"rollout.mesh: devices {number} are not as many for each of {len(groups)} processes; {near} would be"
        )
    if least := [len(group) for group in groups.values() if len(group) <= each]:
        raise UserError(
            f"rollout.mesh: of {least[0]} device(s) of a process {each} would only sample, so that none is left to "
            "train: give it fewer, or leave `devices` out, and sampling and training share all"
        )
    training = [device for group in groups.values() for device in group[:-each]]
    sampling = np.asarray([device for group in groups.values() for device in group[-each:]])
    return training, Mesh(sampling.reshape(1, -1, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))


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
            copies=int(full and algorithm.needs.keeps_reference),
        ),
        rows=recipe.sequences_per_update // algorithm.sequences_per_example,
        packing=bool(recipe.data.packing),
        micro=recipe.micro_batch_size,
        length=layout(algorithm).length(recipe.data),
        sampled=algorithm.train_on == RowKind.PROMPT,
    )
