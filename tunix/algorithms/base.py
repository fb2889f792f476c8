"""What every algorithm is: a config, a pure loss, and one update written in the client's verbs.

A subclass changes an algorithm by overriding one of its methods; nothing is registered. `run.py` calls `update` once
per batch of the data pipeline.
"""

from abc import ABC, abstractmethod
from typing import Literal

from tunix.client import Client
from tunix.config import Config
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics


class Algorithm(ABC):
    """The interface that a run drives."""

    Config: type[Config]
    """The pydantic model of the recipe's `algorithm` section."""

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Arrays in, terms out; jax, pure."""

    @property
    def train_on(self) -> Literal["completion", "all"]:
        """Which tokens of a row are targets: the completion's, or every one after the first."""
        return "completion"

    @property
    def objective(self) -> Loss:
        """The loss and what it needs of the model."""
        return Loss(self.loss)

    def update(self, client: Client, batch: Batch) -> Metrics:
        """One update from one batch."""
        return client.step(batch, self.objective)
