"""The client interface between algorithms and whatever trains and samples: a few methods, as protocols only.

`trainer/` implements them in this process. An algorithm that calls only these methods runs unchanged on every other
implementation. The division (`forward_backward`, `optim_step`, `sample`, `save`) follows the Tinker API
(https://tinker-docs.thinkingmachines.ai); losses are plain sums, divided once by counts of the whole batch.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from tunix.types import (
    Batch,
    Completion,
    Loss,
    Metrics,
    OnDone,
    Reply,
    Request,
    Sampling,
    Sequence,
    Usage,
    Workload,
    requests_of,
)


@runtime_checkable
class Saving(Protocol):
    """A write to the disk that is still in progress."""

    def result(self) -> None:
        """Waits until everything is on the disk; raises the error of a write that failed."""
        ...


@runtime_checkable
class SamplingClient(Protocol):
    """Anything that completes prompts: a client, or a sampler alone. What extends it writes `run`, and has `sample`."""

    def run(
        self, requests: List[Request], reply: Reply | None = None, on_done: OnDone | None = None
    ) -> list[Completion]:
        """Completes each request with the weights that were published last.

        Args:
            requests: a sampled token depends on (seed, index, token index) of its request alone.
            reply: the environment's answer to a finished turn, or None; called in threads, for one turn of a request
                at a time.
            on_done: receives each completion as soon as it has ended, and may end the call by that where no
                environment answers. A sampler need not call it; what it returns then has been sampled to the end.

        Returns:
            The completions, in the order of the requests; those that `on_done` did not wait for are paused.
        """
        ...

    def sample(self, prompts: List[np.ndarray], n: int, sampling: Sampling, seed: int) -> list[list[Completion]]:
        """Samples `n` completions of each prompt.

        Args:
            prompts: `[T]` int32 token ids each, at least one.
            n: completions of a prompt; request i is sample i % n of prompt i // n.
            sampling: how tokens are sampled.
            seed: a sampled token depends on (seed, request, token index) alone.

        Raises:
            UserError: no completion is asked for.
        """
        completions = self.run(requests_of(prompts, n, sampling, seed))
        return [completions[i : i + n] for i in range(0, len(completions), n)]


@runtime_checkable
class Metered(Protocol):
    """A sampler that counts its work."""

    @property
    def usage(self) -> Usage | None:
        """What the last call of `run` took; None where there was none."""
        ...


@runtime_checkable
class Sampler(SamplingClient, Protocol):
    """An inference engine that holds weights and trains nothing: in this process, another one, or on other devices."""

    def publish(self, params: Mapping[str, Any], version: int) -> None:
        """Sets the weights that completions are sampled from, starting with the next call.

        Args:
            params: all weights by name; training may overwrite the arrays as soon as this returns.
            version: recorded with each sampled token, e.g. 3.
        """
        ...

    def warm(self, work: Workload) -> None:
        """Prepares for a workload, e.g. compiles what it needs; weights have been published before."""
        ...


@runtime_checkable
class Client(SamplingClient, Protocol):
    """Everything that an algorithm and a run may call. No method mentions a mesh, a model or an optimizer."""

    def step(self, batch: Batch, loss: Loss, of: Literal["policy", "critic"] = "policy") -> Metrics:
        """One update: gradients of the loss and their application, compiled together with donated buffers.

        Args:
            batch: packed rows.
            loss: what is minimised.
            of: which model is updated; a critic is a separate model.

        Returns:
            The loss and its metrics by name, on their way from the device.
        """
        ...

    def forward_backward(self, batch: Batch, loss: Loss) -> Metrics:
        """Accumulates the gradients of the batch's loss, to be applied by `optim_step`."""
        ...

    def optim_step(self) -> Metrics:
        """Applies the accumulated gradients and clears them."""
        ...

    def evaluate(self, batches: Iterable[Batch], loss: Loss) -> dict[str, float]:
        """Loss and metrics over all batches, forward pass only; each is divided by its count over all of them."""
        ...

    def logprobs(
        self,
        sequences: List[Sequence],
        of: Literal["policy", "reference", "teacher"] = "policy",
        temperature: float = 1.0,
        size: int | None = None,
    ) -> List[np.ndarray]:
        """Log-probs in nats of each sequence's tokens, `[T]` each with 0 for the first; forward pass only.

        Args:
            sequences: at least one.
            of: the model.
            temperature: divides the logits.
            size: number of sequences, at least as many as are given, that the work is shaped for: calls of one size
                compile once. None for the number that is given.

        Returns:
            The arrays, which may be on their way from the devices: who looks at one waits.
        """
        ...

    def values(self, sequences: List[Sequence], size: int | None = None) -> List[np.ndarray]:
        """The critic's values of each sequence, `[T]` each: at t of the state before token t; 0 for the first. See
        `logprobs`."""
        ...

    def publish(self) -> int:
        """Makes `run` use the current weights from the next call on. Returns their version, a number that grows with
        every update and goes on where a saved state is loaded."""
        ...

    def warm(self, work: Workload) -> None:
        """Publishes the weights and has the sampler prepare for a workload."""
        ...

    def save(self, path: Path) -> Saving:
        """Starts to write the whole train state to the new folder `path`, which appears when it is complete; returns
        as soon as training may continue."""
        ...

    def load(self, path: Path) -> None:
        """Restores what `save` wrote, bit for bit, onto this client's mesh."""
        ...

    def export(self, path: Path, adapter: bool = False) -> float | None:
        """Writes a Hugging Face folder, or the trained adapter alone as a PEFT folder.

        Returns:
            The relative change of a quantized base's matrices by merging an adapter, e.g. 0.01; None where nothing was
            merged.
        """
        ...

    def fingerprint(self, of: Literal["policy", "reference"] = "policy") -> str:
        """A digest of every bit of the weights: equal weights have equal digests, however they are sharded."""
        ...
