"""The light client between algorithms and machinery: a handful of verbs, as protocols only.

`trainer/` implements them in this process. An algorithm that speaks these verbs runs unchanged on whatever
implements them next. The cut (`forward_backward`, `optim_step`, `sample`, `save`) follows the Tinker API's
(https://tinker-docs.thinkingmachines.ai); losses are plain sums, divided once by counts of the whole batch.
"""

from collections.abc import Iterable
from collections.abc import Sequence as List
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from tunix.types import Batch, Completion, Loss, Metrics, Reply, Sampling, Sequence


@runtime_checkable
class Sampler(Protocol):
    """What draws completions: the client, or an engine that holds weights and trains nothing."""

    def sample(
        self, prompts: List[np.ndarray], n: int, sampling: Sampling, seed: int, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """`n` completions for each prompt of token ids, from the weights that were published or loaded last.

        Args:
            prompts: token ids, at least one each.
            n: request i is sample i % n of prompt i // n.
            seed: a draw depends on (seed, request, token index) alone.
            reply: answers to finished turns, where an environment does; called between the sampler's steps.
        """
        ...


@runtime_checkable
class Client(Sampler, Protocol):
    """What an algorithm may ask of the machinery. Nothing here names a mesh, a model or an optimizer."""

    def step(self, batch: Batch, loss: Loss, of: Literal["policy", "critic"] = "policy") -> Metrics:
        """One update: gradients of the loss and their application, compiled together with donated buffers.

        Args:
            of: what is updated; a critic is a model of its own.
        """
        ...

    def forward_backward(self, batch: Batch, loss: Loss) -> Metrics:
        """Adds the gradients of the batch's loss to those not yet applied."""
        ...

    def optim_step(self) -> Metrics:
        """Applies the gradients gathered so far and clears them."""
        ...

    def evaluate(self, batches: Iterable[Batch], loss: Loss) -> dict[str, float]:
        """The loss and its metrics over all the batches, forward only, each divided by its count over all of them."""
        ...

    def logprobs(
        self,
        sequences: List[Sequence],
        of: Literal["policy", "reference", "teacher"] = "policy",
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """For each sequence the `[T]` log-probs of its tokens, 0 for the first; forward only."""
        ...

    def entropies(self, sequences: List[Sequence], temperature: float = 1.0) -> list[np.ndarray]:
        """For each sequence the `[T]` entropies in nats of what its tokens were drawn from under the policy, 0 for the
        first; forward only."""
        ...

    def values(self, sequences: List[Sequence]) -> list[np.ndarray]:
        """For each sequence the critic's `[T]` values: at t of the state before token t is drawn; 0 for the first."""
        ...

    def publish(self) -> int:
        """From now on `sample` uses the current weights. Returns their version."""
        ...

    def save(self, path: Path) -> None:
        """Writes the whole train state as one folder, atomically."""
        ...

    def load(self, path: Path) -> None:
        """Restores what `save` wrote, bit for bit, onto this client's mesh."""
        ...

    def export(self, path: Path, adapter: bool = False) -> None:
        """Writes a Hugging Face folder, or the trained adapter alone as a PEFT folder."""
        ...
