"""Which experts a mixture used for each token, as the engine records them for the trainer (routing replay, R3).

Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"
(https://arxiv.org/abs/2510.11370): sampler and trainer round differently, so that near ties fall to other experts, and
log-probs differ by far more than by rounding. The trainer uses the sampler's choice instead.

A dispatch returns the experts of the tokens that it samples with the tokens themselves. Those of prompts and of
observations come from the pieces that computed them; requests that share a prompt have those of the one that was
computed. A token keeps what was recorded first, also where its slot made room and it was computed again.

Memory: 2 L k bytes for each token, e.g. 48 layers x 8 experts x 2 = 768 bytes for Qwen3-30B-A3B.

Axes: T time, C tokens at a time, L layers, k chosen experts of a token, s shards of the rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

UNKNOWN = -1
"""The expert of a token of which nothing was recorded: the trainer's router chooses."""


class Recorded:
    """The experts of all tokens of a piece, on their way from the device."""

    def __init__(self, experts: Int[Array | np.ndarray, "s C L k"]):
        """Starts to copy them, where they are not here."""
        self._experts = experts
        if isinstance(experts, jax.Array):
            experts.copy_to_host_async()

    def read(self) -> np.ndarray:
        """`[s C L k]` int16, which the device need not keep any more; waits for the piece."""
        self._experts = np.asarray(self._experts)
        return self._experts


class Known(NamedTuple):
    """What a piece tells about some tokens of a sequence."""

    piece: Recorded
    row: int
    begin: int
    """Column of the first of them."""
    number: int
    """How many they are."""
    position: int
    """Position of the first of them in the sequence."""

    @classmethod
    def of(cls, experts: np.ndarray, position: int) -> "Known":
        """What is here already: the experts `[T L k]` of tokens from a position on."""
        return cls(Recorded(experts[None]), 0, 0, len(experts), position)


def of_sequence(prompt: int, after: np.ndarray | None, known: Sequence[Known]) -> np.ndarray | None:
    """`[T L k]` int16, the experts of a prompt of so many tokens and of those after it; None for a model without.

    Args:
        after: `[T L k]` those of the tokens after it, `UNKNOWN` where an environment wrote.
        known: what pieces tell, from which unknown ones are filled in; the first has precedence.
    """
    if after is None:
        return None
    experts = np.concatenate([np.full((prompt, *after.shape[1:]), UNKNOWN, np.int16), after])
    for part in known:
        tokens = experts[part.position : part.position + part.number]
        missing = tokens[:, 0, 0] == UNKNOWN
        recorded = part.piece.read()[part.row, part.begin : part.begin + part.number]
        tokens[missing] = recorded[: len(tokens)][missing]
    return experts
