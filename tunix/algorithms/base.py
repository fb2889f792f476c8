"""What every algorithm is: a config, a pure loss, and one update written in the client's verbs.

A subclass changes an algorithm by overriding one of its methods; nothing is registered. `loop.py` calls `update` once
per step, with what the data stream hands out: a packed batch of given sequences, or `Rollouts` where the policy writes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tunix.config import Config
from tunix.data.pipeline import Packed
from tunix.protocols import Client
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics, Sampling, Sequence


@dataclass(frozen=True)
class Update:
    """What a step did."""

    metrics: Metrics
    """Scalars by name."""
    batches: tuple[Batch, ...]
    """What was trained on; for counts of tokens and FLOPs."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """Rows for `samples.jsonl`."""
    notes: tuple[str, ...] = ()
    """What a person should be told."""


class Algorithm(ABC):
    """The interface that a run drives."""

    Config: type[Config]
    """The pydantic model of the recipe's `algorithm` section."""

    members: int = 1
    """Sequences of an example, which are compared with each other: 2 for pairs. They share a row."""

    spare_tokens: int = 0
    """Tokens by which sequences that are valued are longer than `data.max_length`."""

    answers: Callable[[Sequence], np.ndarray] | None = None
    """A given sequence's `[T]` log-probs under the reference, asked before training where the algorithm `precomputes`;
    the run sets it."""

    def __init__(self, config: Any, sampling: Sampling | None = None):
        """Args:
        config: the recipe's `algorithm` section, of this class's `Config`.
        sampling: how the policy's completions are drawn, for algorithms that have it write some.
        """
        self.config = config
        self.sampling = sampling or Sampling()

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Arrays in, terms out; jax, pure."""

    @property
    def train_on(self) -> Literal["completion", "all", "prompt", "pairs", "labels"]:
        """What is read of a row: the completion's tokens are targets, or every one after the first; only prompts, and
        the policy writes the completions; two completions that are compared; or one with a verdict."""
        return "completion"

    @property
    def group(self) -> int:
        """Completions of a prompt that follow each other in every batch, whole groups only: some of them may share a
        row, and the prompt there."""
        return 1

    def prepared(self, sequence: Sequence) -> Sequence:
        """The last word on a sequence before it is packed."""
        return sequence

    @property
    def needs_reference(self) -> bool:
        """Whether the weights that the run starts from are asked for log-probs."""
        return False

    @property
    def reference_path(self) -> str | None:
        """Another model that is asked in their place."""
        return None

    @property
    def precomputes(self) -> bool:
        """Whether the reference is asked for all given sequences before training, and then let go of."""
        return False

    @property
    def critic(self) -> str | None:
        """`own` for a model of its own that values states, `shared` for a head on the policy's trunk, `alone` where the
        model gives values and no log-probs, None for none."""
        return None

    @property
    def objective(self) -> Loss:
        """The loss and what it needs of the model."""
        return Loss(self.loss)

    @property
    def held_out_objective(self) -> Loss:
        """What held-out rows are measured by."""
        return self.objective

    @property
    def held_out_on(self) -> Literal["completion", "all", "pairs", "labels"] | None:
        """What is read of a held-out row for that; None where only rewards tell."""
        return None if self.train_on == "prompt" else self.train_on

    def evaluate(self, client: Client, held_out: List[Packed]) -> dict[str, float]:
        """The loss and its metrics over held-out rows, as `eval/...`."""
        return client.evaluate([packed.batch for packed in held_out], self.held_out_objective)

    def update(self, client: Client, data: Any) -> Update:
        """One step. Of given sequences (`data.batch`): one update."""
        return Update(client.step(data.batch, self.objective), (data.batch,))

    def get_state(self) -> dict[str, Any]:
        """What the algorithm itself remembers from step to step; JSON values, part of every checkpoint."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `get_state` told."""
        assert not state, f"{type(self).__name__} remembers {state}, but has no set_state"
