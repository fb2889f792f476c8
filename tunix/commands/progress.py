"""Progress of `tunix generate` and `tunix eval`: a bar, and a sampler that updates it.

A `Collector` samples from a `ProgressSampler`. Requests are numbered consecutively across calls, so that rows which are
sampled in several calls get the completions that they would get in one.
"""

import time
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import Request
from tunix.trainer.progress import Display
from tunix.types import Begun, Completion, OnDone, Reply, Sampling

PATIENCE = 2.0
"""Seconds before progress is shown."""


class Bar:
    """A progress bar that appears after `PATIENCE` seconds."""

    def __init__(self, title: str, total: int):
        """Starts the clock; displays nothing yet.

        Args:
            title: name of the command, e.g. `generate`.
            total: number of items to be done.
        """
        self._title, self._total = title, total
        self._began = time.monotonic()
        self._display: Display | None = None

    def show(self, done: int, tokens: int = 0) -> None:
        """Displays the progress.

        Args:
            done: number of items done.
            tokens: number of tokens since the bar was created, for the speed.
        """
        seconds = time.monotonic() - self._began
        if self._display is None and seconds > PATIENCE:
            self._display = Display(self._title, self._total, done)
        if self._display is not None:
            self._display.update(done, {"perf/tokens_per_second": tokens / max(seconds, 1e-9)} if tokens else {})

    def close(self) -> None:
        """Ends the bar and restores the terminal."""
        if self._display is not None:
            self._display.close()


@dataclass
class ProgressSampler:
    """A sampler over an engine that updates a progress bar."""

    engine: Engine
    bar: Bar
    done: int = 0
    """Completions so far, including those of an earlier process."""
    tokens: int = 0
    """Tokens that this object has sampled."""

    def sample(
        self,
        prompts: List[np.ndarray],
        n: int,
        sampling: Sampling,
        seed: int,
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        begun: List[Begun] | None = None,
    ) -> list[list[Completion]]:
        """Implements `protocols.Sampler.sample`; the first request has the number `done`."""
        first = self.done
        begun_at = begun or [Begun(seed, first + i) for i in range(n * len(prompts))]
        requests = [
            Request(prompts[i // n], sampling, x.seed, x.index, so_far=x.so_far, pictures=x.pictures)
            for i, x in enumerate(begun_at)
        ]
        sampled = self.engine.run(requests, reply, self._on_tokens, on_done)
        self.done = first + len(sampled)
        self.bar.show(self.done, self.tokens)
        return [sampled[i : i + n] for i in range(0, len(sampled), n)]

    def _on_tokens(self, request: int, tokens: np.ndarray) -> None:
        """Counts tokens. Requests start in order, so all but the latest `slots` of those seen have ended."""
        self.tokens += len(tokens)
        self.bar.show(self.done + max(0, request + 1 - self.engine.slots), self.tokens)
