"""The base class of algorithms: a config, a pure loss, what it needs, and one update written in the client's methods.

A subclass changes an algorithm by overriding one of its methods; nothing is registered. The loop calls `update` once
per step with an item of the data stream: a packed batch of given sequences, or `Rollouts` where the policy samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tunix.config import AlgorithmConfig, CriticKind, RowKind
from tunix.data.types import Packed
from tunix.protocols import Client
from tunix.rollout.types import Span
from tunix.types import Batch, Divergence, Loss, LossInputs, LossOutputs, Metrics, Sampling, Sequence


@dataclass(frozen=True)
class Needs:
    """What an algorithm asks for; what is not named here is not computed, and no model is loaded for it."""

    logprobs: bool = True
    """Whether the loss reads the policy's log-probs; False for one of values or of a divergence alone."""
    entropy: bool = False
    """Whether the loss reads `inputs.entropy`, at a small cost in the head."""
    whole: bool = False
    """Whether entropy and reference are over all ids, where the sampler cuts some off, and `inputs.whole_logprobs` is
    read."""
    values: CriticKind | None = None
    """Where values come from: `own` is a separate model, `shared` a head on the policy's trunk, `alone` a model that
    gives values and no log-probs; None for no values."""
    reference: Literal["update", "step", "run"] | None = None
    """When log-probs under the reference, the weights that the run starts from, are computed: within each `update`, on
    its rows; before the updates of a `step`; or those of all given sequences before the first step of the `run`, after
    which the reference is freed. None for no reference."""
    divergence: Divergence | None = None
    """The divergence from a teacher that the loss reads as `inputs.compared`; None for none."""
    measured: tuple[str, ...] = ()
    """What is computed of single completions while others are sampled, whatever their rewards, as per-token values:
    `old_logprobs` by the policy, `reference_logprobs`, `teacher_logprobs`, or what the class's `measure` adds."""
    fresh: str | None = None
    """Why completions of older weights cannot be learned from, and the remedy; None where they can."""

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference stays in memory while the policy trains."""
        return self.reference in ("update", "step")


@dataclass(frozen=True)
class Update:
    """The results of one step."""

    metrics: Metrics
    """Scalars by name."""
    batches: tuple[Batch, ...]
    """The batches that were trained on, from which tokens and FLOPs are counted."""
    samples: Iterable[Mapping[str, Any]] = ()
    """What may be recorded of it (`logging.samples`), a row for each completion in the order of their groups; made
    where they are read, by another thread."""
    notes: tuple[str, ...] = ()
    """Messages for the user, e.g. about rewards that failed."""
    spans: tuple[Span, ...] = ()
    """When each activity of the step went on, for `tunix trace`."""
    rewards: tuple[np.ndarray, ...] = ()
    """The total reward of each sequence of each batch, NaN without a score; empty where the loss reads none."""


class Algorithm(ABC):
    """The interface that a run drives."""

    Config: type[AlgorithmConfig]
    """The pydantic model of the recipe's `algorithm` section."""

    sequences_per_example: int = 1
    """Sequences of an example, which are compared with each other and share a row, e.g. 2 for pairs."""

    extra_tokens: int = 0
    """Tokens by which sequences that a scalar head reads are longer than `data.max_length`, e.g. 1."""

    precomputed_logprobs: Callable[[Sequence], np.ndarray] | None = None
    """A given sequence -> its `[T]` log-probs under the reference; the run sets it where `needs.reference` is `run`."""

    def __init__(self, config: Any, sampling: Sampling | None = None):
        """An algorithm with its settings.

        Args:
            config: the recipe's `algorithm` section, of this class's `Config`.
            sampling: how completions are sampled, for algorithms that train on the policy's completions.

        Raises:
            UserError: the sampling is cut off in a way that the loss cannot replay (`Sampling.for_training`).
        """
        self.config = config
        self.sampling = (sampling or Sampling()).for_training

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss: arrays in, terms out; a pure function in jax."""

    @property
    def needs(self) -> Needs:
        """What the loss and the update ask for besides the policy's log-probs."""
        return Needs()

    @property
    def group(self) -> int:
        """Completions of a prompt that follow each other in every batch, in whole groups: some may share a row and, in
        it, the prompt's tokens."""
        return 1

    @property
    def temperature(self) -> float:
        """Temperature of log-probs: the sampler's where the completions are the policy's."""
        return self.sampling.temperature if self.config.reads == RowKind.PROMPT else 1.0

    @property
    def objective(self) -> Loss:
        """The loss and what it needs from the model."""
        needs = self.needs
        return Loss(
            self.loss,
            logprobs=needs.logprobs,
            entropy=needs.entropy,
            whole=needs.whole,
            values=needs.values in ("shared", "alone"),
            reference=needs.reference == "update",
            divergence=needs.divergence,
            temperature=self.temperature,
        )

    @property
    def held_out_objective(self) -> Loss:
        """The loss that is evaluated on held-out rows, and what it needs from the model."""
        return self.objective

    @property
    def held_out_on(self) -> RowKind | None:
        """What is read of a held-out row to evaluate the loss; None where only rewards are evaluated."""
        return None if self.config.reads == RowKind.PROMPT else self.config.reads

    @property
    def measures_likelihood(self) -> bool:
        """Whether the held-out loss is the rows' negative log-likelihood in nats per token, which can be compared with
        the entropy of the tokens' frequencies."""
        return self.config.reads.is_text and self.held_out_objective.divergence is None

    def prepare_sequence(self, sequence: Sequence) -> Sequence:
        """Hook before packing: returns a given sequence with what the loss reads of it."""
        return sequence

    def prepare_batch(self, client: Client, batch: Batch, sequences: List[Sequence]) -> Batch:
        """Hook before each update: returns the batch with what the loss reads, as far as the client has to compute it.

        Args:
            client: computes log-probs and values.
            batch: the packed batch.
            sequences: the sequences that were packed into it.
        """
        return batch

    def evaluate(self, client: Client, held_out: List[Packed]) -> dict[str, float]:
        """Evaluates the loss and its metrics on held-out rows, as `eval/...`."""
        batches = [self.prepare_batch(client, packed.batch, packed.sequences) for packed in held_out]
        return client.evaluate(batches, self.held_out_objective)

    def update(self, client: Client, data: Any) -> Update:
        """Trains one step; on given sequences (`data` is `Packed`) that is one optimizer update."""
        batch = self.prepare_batch(client, data.batch, data.sequences)
        return Update(self.step(client, batch), (batch,))

    def step(self, client: Client, batch: Batch) -> Metrics:
        """Makes one optimizer update."""
        return client.step(batch, self.objective)

    def get_state(self) -> dict[str, Any]:
        """The algorithm's own state between steps, as JSON values; part of every checkpoint."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        assert not state, f"{type(self).__name__} remembers {state}, but has no set_state"
