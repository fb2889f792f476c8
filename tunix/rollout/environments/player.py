"""Starts the episodes of the environment that a recipe names, in worker processes."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tunix.data.tokenizer import Tokenizer
from tunix.rollout.environments.base import Episode, Episodes
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import EnvironmentPool
from tunix.rollout.environments.shipped import read_environment


class Player:
    """Starts the episodes of an environment."""

    def __init__(
        self, config: EnvironmentConfig, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any] | None = None
    ):
        """Loads the environment's class, and makes one in a worker.

        Raises:
            UserError: see `read_environment` and `EnvironmentPool`.
        """
        self._pool = EnvironmentPool(read_environment(config), config.deadline, config.workers)
        self._turns, self._tokenizer, self._template_kwargs = config.turns, tokenizer, template_kwargs or {}
        self.scores: bool = self._pool.kind.scores
        """Whether the environment gives rewards."""
        self.stop_strings: tuple[str, ...] = self._pool.kind.stop_strings
        """Texts that end a turn."""

    def __call__(self, rows: Sequence[Mapping[str, Any]], seed: int, numbers: Sequence[int] | None = None) -> Episodes:
        """Starts an episode for each row; random numbers follow from the seed and these numbers, or the places.

        Raises:
            UserError: an environment does not start.
        """
        given = list(zip(range(len(rows)) if numbers is None else numbers, rows, strict=True))
        made = [self._pool.make() for _ in given]

        def start(environment: Any, of: tuple[int, Mapping[str, Any]]) -> Episode:
            rng = np.random.default_rng([seed, of[0]])
            return Episode(environment, of[1], rng, self._tokenizer, self._turns, self._template_kwargs)

        with ThreadPoolExecutor(len(self._pool), thread_name_prefix="environment") as threads:
            return Episodes(list(threads.map(start, made, given)), len(self._pool))

    def close(self) -> None:
        """Ends the workers; episodes that have not ended are lost."""
        self._pool.close()
