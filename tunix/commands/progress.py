"""For a person who waits: a bar, and completions behind it, for `tunix generate` and `tunix eval`.

`Drawing` is what a `Collector` samples from. Requests are numbered on from call to call, so that rows which are given
in several calls draw what they would have drawn in one.
"""

import time
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import Request
from tunix.trainer.progress import Display
from tunix.types import Completion, Reply, Sampling

PATIENCE = 2.0
"""Seconds before progress is shown."""


class Bar:
    """Progress, once something has taken long enough to wonder."""

    def __init__(self, title: str, total: int):
        """Args:
        title: what is going on, e.g. `generate`.
        total: of what is counted.
        """
        self._title, self._total = title, total
        self._began = time.monotonic()
        self._display: Display | None = None

    def show(self, done: int, tokens: int = 0) -> None:
        """Tells how far it is.

        Args:
            done: of the total.
            tokens: since the bar was made, for their speed.
        """
        seconds = time.monotonic() - self._began
        if self._display is None and seconds > PATIENCE:
            self._display = Display(self._title, self._total, done)
        if self._display is not None:
            self._display.update(done, {"perf/tokens_per_second": tokens / max(seconds, 1e-9)} if tokens else {})

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._display is not None:
            self._display.close()


@dataclass
class Drawing:
    """An engine that tells how far it is."""

    engine: Engine
    bar: Bar
    drawn: int = 0
    """Completions there are, also from an earlier process."""
    tokens: int = 0
    """Drawn here."""

    def sample(
        self, prompts: List[np.ndarray], n: int, sampling: Sampling, seed: int, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """`protocols.Sampler.sample`; the first request has the number `drawn`."""
        first = self.drawn
        requests = [Request(prompts[i // n], sampling, seed, first + i) for i in range(n * len(prompts))]
        found = self.engine.run(requests, reply, on_tokens=self._hear)
        self.drawn = first + len(found)
        self.bar.show(self.drawn, self.tokens)
        return [found[i : i + n] for i in range(0, len(found), n)]

    def _hear(self, request: int, tokens: np.ndarray) -> None:
        """Requests begin in their order, so all but the latest `slots` of those that were heard of have ended."""
        self.tokens += len(tokens)
        self.bar.show(self.drawn + max(0, request + 1 - self.engine.slots), self.tokens)
