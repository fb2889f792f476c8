"""Completions for a person who waits: the engine behind a bar, for `tunix generate` and `tunix eval`.

`Drawing` is what a `Collector` samples from. Requests are numbered on from call to call, so that rows which are given
in several calls draw what they would have drawn in one.
"""

import time
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import numpy as np

from tunix.rollout.engine import Engine
from tunix.rollout.episode import Request
from tunix.trainer.progress import Display
from tunix.types import Completion, Reply, Sampling

PATIENCE = 2.0
"""Seconds before progress is shown."""


@dataclass
class Drawing:
    """An engine that tells how far it is."""

    engine: Engine
    total: int
    """Completions that are asked for in all calls."""
    title: str = "generate"
    """Of the bar."""
    drawn: int = 0
    """Completions there are, also from an earlier process."""
    tokens: int = 0
    """Drawn here."""
    _began: float = field(default_factory=time.monotonic)
    _display: Display | None = None

    def sample(
        self, prompts: List[np.ndarray], n: int, sampling: Sampling, seed: int, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """`client.Sampler.sample`; the first request has the number `drawn`."""
        first = self.drawn
        requests = [Request(prompts[i // n], sampling, seed, first + i) for i in range(n * len(prompts))]
        found = self.engine.run(requests, reply, on_tokens=self._hear)
        self.drawn = first + len(found)
        self._show(self.drawn)
        return [found[i : i + n] for i in range(0, len(found), n)]

    def close(self) -> None:
        """Takes the bar away."""
        if self._display is not None:
            self._display.close()

    def _hear(self, request: int, tokens: np.ndarray) -> None:
        """Requests begin in their order, so all but the latest `slots` of those that were heard of have ended."""
        self.tokens += len(tokens)
        self._show(self.drawn + max(0, request + 1 - self.engine.slots))

    def _show(self, done: int) -> None:
        seconds = time.monotonic() - self._began
        if self._display is None and seconds > PATIENCE:
            self._display = Display(self.title, self.total, done)
        if self._display is not None:
            self._display.update(done, {"perf/tokens_per_second": self.tokens / max(seconds, 1e-9)})
