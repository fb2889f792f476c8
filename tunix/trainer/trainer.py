"""`Trainer`, the in-process implementation of `tunix.protocols.Client`, over a learner and a sampler.

`learner.py` trains, the sampler completes prompts with the last published weights, `export.py` writes folders,
`state_files.py` saves the whole train state.

Axes: T time.
"""

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from tunix.models.model import Params
from tunix.protocols import Client, Metered, Sampler, Saving
from tunix.trainer.digest import checksum, digest
from tunix.trainer.export import Exporter
from tunix.trainer.frozen_model import unreplayed
from tunix.trainer.learner import Learner, required
from tunix.trainer.state_files import Writing, flatten, load_state
from tunix.trainer.step import TrainState
from tunix.types import Batch, Completion, Loss, Metrics, OnDone, Reply, Request, Sequence, Usage, Workload
from tunix.util.faults import planned
from tunix.util.object_store import path_of


class Trainer(Client):
    """The client of one process: trains, samples, saves and exports one policy."""

    def __init__(self, learner: Learner, sampler: Sampler, exporter: Exporter, critic: Learner | None = None):
        """Combines the parts; no weights are published yet.

        Args:
            learner: the policy.
            sampler: completes prompts, with the weights of each `publish`.
            exporter: writes exported folders.
            critic: a separate model that predicts values; None where the policy has a value head, or none is needed.
        """
        self.learner, self.sampler, self.exporter, self.critic = learner, sampler, exporter, critic
        self._version = int(learner.state.step)
        """Updates that made the weights; it goes on after a restart: tokens of earlier weights may be left."""
        self._stale = True

    @property
    def state(self) -> TrainState:
        """Everything that training updates, including the critic's state."""
        return self.learner.state if self.critic is None else replace(self.learner.state, critic=self.critic.state)

    @state.setter
    def state(self, state: TrainState) -> None:
        self.learner.state, self._stale = replace(state, critic=None), True
        self._version = int(state.step)
        if self.critic is not None:
            assert state.critic is not None
            self.critic.state = state.critic

    def step(self, batch: Batch, loss: Loss, of: Literal["policy", "critic"] = "policy") -> Metrics:
        """One update, compiled as a single program with a donated state.

        Raises:
            ValueError: `of` is critic, and there is no separate critic.
        """
        if of == "critic":
            if self.critic is None:
                raise ValueError("there is no separate critic: build the client with critic='own'")
            return self.critic.step(replace(batch, experts=None), loss)
        self._version, self._stale = self._version + 1, True
        if planned("gradient", self._version):
            batch = replace(batch, weights=batch.weights * np.float32(np.inf))
        return self.learner.step(batch, loss)

    def forward_backward(self, batch: Batch, loss: Loss) -> Metrics:
        return self.learner.forward_backward(batch, loss)

    def optim_step(self) -> Metrics:
        """Applies the accumulated gradients and clears them.

        Raises:
            ValueError: no gradients were accumulated.
        """
        self._version, self._stale = self._version + 1, True
        return self.learner.optim_step()

    def evaluate(self, batches: Iterable[Batch], loss: Loss) -> dict[str, float]:
        """The loss and its metrics over all batches, named `eval/...`; see `Learner.evaluate`."""
        return self.learner.evaluate(batches, loss)

    def logprobs(
        self,
        sequences: List[Sequence],
        of: Literal["policy", "reference", "teacher"] = "policy",
        temperature: float = 1.0,
        size: int | None = None,
    ) -> List[np.ndarray]:
        """The `[T]` log-probs of each sequence's tokens, 0 for the first.

        Raises:
            ValueError: `of` names a reference or a teacher, and there is none.
        """
        if of == "policy":
            return self.learner.scorer.scores("logprobs", self.learner.params, sequences, size, temperature)
        model = self.learner.teacher if of == "teacher" else self.learner.reference
        return required(of, model).logprobs(sequences, temperature, size)

    def values(self, sequences: List[Sequence], size: int | None = None) -> List[np.ndarray]:
        """The `[T]` values of each sequence's states: at t, of the state before token t is sampled; 0 for the first.

        Raises:
            ValueError: there is no critic and no value head.
        """
        learner = self.critic or self.learner
        if not learner.spec.model.has_scalar_head:
            raise ValueError("there is no value head: build the model with has_scalar_head=True")
        sequences = sequences if self.critic is None else unreplayed(sequences)
        return learner.scorer.scores("values", learner.params, sequences, size)

    def run(
        self, requests: List[Request], reply: Reply | None = None, on_done: OnDone | None = None
    ) -> list[Completion]:
        """Completes each request with the published weights.

        Raises:
            ValueError: the weights have changed since the last `publish`.
        """
        if self._stale:
            raise ValueError("the weights have changed: publish() before sample()")
        return self.sampler.run(requests, reply, on_done)

    @property
    def usage(self) -> Usage | None:
        """What the last call of `run` took, where the sampler counts it."""
        return self.sampler.usage if isinstance(self.sampler, Metered) else None

    def publish(self) -> int:
        """Passes the current weights to the sampler if they have changed; returns their version: the updates so far."""
        if self._stale:
            self._stale = False
            self.sampler.publish(self.learner.params, self._version)
        return self._version

    def warm(self, work: Workload) -> None:
        """Compiles every shape that this workload of the sampler can need, so that nothing compiles afterwards."""
        self.publish()
        self.sampler.warm(work)

    def save(self, path: Path) -> Saving:
        writer = Writing()
        writer.save(path_of(path), flatten(self.state))
        return writer

    def load(self, path: Path) -> None:
        """Restores what `save` wrote; accumulated gradients are dropped.

        Raises:
            UserError: the folder holds another model's state, would lose precision, or is damaged.
        """
        self.state = load_state(path, self.state)
        self.learner.gradients = None

    def export(self, path: Path, adapter: bool = False, packed: bool = False) -> float | None:
        """Writes a Hugging Face folder, or the trained adapter alone as a PEFT folder; see `Exporter`."""
        learner = self.learner
        return self.exporter(path, learner.spec, learner.state.params, learner.frozen, adapter=adapter, packed=packed)

    def fingerprint(self, of: Literal["policy", "reference"] = "policy") -> str:
        params: Params = self.learner.params if of == "policy" else required("reference", self.learner.reference).params
        sums = {name: checksum(x) for name, x in sorted(params.items())}
        return digest(f"{name} {params[name].shape} {params[name].dtype} {int(x)}" for name, x in sums.items())
