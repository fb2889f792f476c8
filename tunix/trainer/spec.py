"""The fixed parts of a trainer: the model, the optimizer, and how batches are placed on the devices."""

from dataclasses import dataclass

import optax
from jax.sharding import Mesh

from tunix.lora.config import AdapterConfig
from tunix.models.model import Model
from tunix.trainer.microbatches import Microbatcher


@dataclass(frozen=True)
class TrainerSpec:
    """A model, its optimizer and its mesh, fixed while it trains."""

    model: Model
    mesh: Mesh
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    """Updates done -> learning rate, reported as `train/learning_rate`."""
    microbatcher: Microbatcher
    length: int
    """T of packed rows, e.g. 2048."""
    seed: int
    """Seed of everything random during training, e.g. 0."""
    adapter: AdapterConfig | None = None
    """The adapter that trains on a frozen base; None where all weights train."""
    remat_reason: str | None = None
    """Why the model's `remat` was chosen, for the run's first lines; None where the recipe names it."""
