"""The sampling transform and the draw, with settings that are arrays: each row has its own, and no value compiles anew.

Logits `[S V]` -> scores (divided by the temperature, what cannot be drawn at -inf) -> one token and its log-prob a row.
A draw takes two uniform numbers and walks down the cumulated mass in two levels, of blocks of the vocabulary and then
within one: exact where a single float32 sum over a large vocabulary is not, and cheaper than noise for every logit.

Axes: S rows (slots), V vocabulary, M stop ids, A the most likely ids that are reported.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from tunix.errors import UserError
from tunix.types import Sampling

MOST_STOPS = 16
"""M: stop ids of a request at most."""
MOST_TOP = 20
"""A: log-probs beside the drawn token's at most."""


class Transform(NamedTuple):
    """The settings of each row."""

    temperature: jax.Array | np.ndarray
    """`[S]` float32; 0 is greedy, and reports log-probs at temperature 1."""
    top_k: jax.Array | np.ndarray
    """`[S]` int32; 0 for all."""
    top_p: jax.Array | np.ndarray
    """`[S]` float32."""
    min_p: jax.Array | np.ndarray
    """`[S]` float32."""
    top: jax.Array | np.ndarray
    """`[S]` bool: whether the most likely ids are reported."""

    @classmethod
    def of(cls, settings: Sequence[Sampling]) -> "Transform":
        """One row for each."""
        return cls(
            np.array([s.temperature for s in settings], np.float32),
            np.array([s.top_k for s in settings], np.int32),
            np.array([s.top_p for s in settings], np.float32),
            np.array([s.min_p for s in settings], np.float32),
            np.array([s.top_logprobs > 0 for s in settings], bool),
        )


class Draw(NamedTuple):
    """What was drawn."""

    tokens: Int[Array, "S"]
    logprobs: Float[Array, "S"]
    """Under the transform, so that the ids that can be drawn sum to 1."""
    top_ids: Int[Array, "S A"]
    """The most likely ids, where a row asks for them."""
    top_logprobs: Float[Array, "S A"]
    """Theirs."""


def draw(logits: Float[Array, "S V"], keys: Key[Array, "S"], settings: Transform, live: Bool[Array, "S"]) -> Draw:
    """One token a row.

    Args:
        logits: float32.
        keys: `[S]`, of this draw alone.
        live: rows whose result is read; the costly parts run only where one of these asks for them.
    """
    scores = transformed(logits, settings, live)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    below = scores - peak
    mass = jnp.exp(below)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    sampled = pick(mass, uniform)
    # Not argmax: two plain reductions are vectorised on a CPU, a reduction of pairs is not.
    greedy = jnp.min(jnp.where(scores == peak, jnp.arange(scores.shape[1]), scores.shape[1]), axis=-1)
    tokens = jnp.where(settings.temperature == 0, greedy, sampled).astype(jnp.int32)
    # From the peak on, not from 0: an offset that all logits share takes no digit away.
    log_total = jnp.log(jnp.sum(mass, axis=-1, keepdims=True))
    logprobs = (jnp.take_along_axis(below, tokens[:, None], axis=-1) - log_total)[:, 0]
    ids, found = _most_likely(below, jnp.any(live & settings.top))
    return Draw(tokens, logprobs, ids, found - log_total)


def transformed(logits: Float[Array, "S V"], settings: Transform, live: Bool[Array, "S"]) -> Float[Array, "S V"]:
    """Scores whose softmax is what a token is drawn from: `types.Sampling` says in which order. -inf is never drawn."""
    temperature = jnp.where(settings.temperature == 0, 1.0, settings.temperature)
    scores = logits / temperature[:, None]
    sorts = jnp.any(live & ((settings.top_k > 0) | (settings.top_p < 1)))
    scores = jax.lax.cond(sorts, _truncated, lambda scores, *_: scores, scores, settings.top_k, settings.top_p)
    # The most likely id is always kept, so masses relative to its own do not depend on what was cut before.
    floor = jnp.max(scores, axis=-1, keepdims=True) + jnp.log(settings.min_p)[:, None]
    return jnp.where(scores >= floor, scores, -jnp.inf)


def logprobs(logits: Float[Array, "S V"], targets: Int[Array, "S"], settings: Transform) -> Float[Array, "S"]:
    """Log-probs of given tokens under the transform."""
    scores = transformed(logits, settings, jnp.ones(targets.shape, bool))
    below = scores - jnp.max(scores, axis=-1, keepdims=True)
    taken = jnp.take_along_axis(below, targets[:, None], axis=-1)[:, 0]
    return taken - jnp.log(jnp.sum(jnp.exp(below), axis=-1))


def pick(mass: Float[Array, "S V"], uniform: Float[Array, "S 2"]) -> Int[Array, "S"]:
    """Indices with probabilities in proportion to the mass, by two uniform numbers in [0, 1) a row."""
    rows, vocab = mass.shape
    width = 1 << math.ceil(math.log2(vocab) / 2)
    blocks = jnp.pad(mass, ((0, 0), (0, -vocab % width))).reshape(rows, -1, width)
    block = _walk(jnp.sum(blocks, axis=-1), uniform[:, 0])
    within = _walk(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
    return block * width + within


def _walk(mass: Float[Array, "S V"], uniform: Float[Array, "S"]) -> Int[Array, "S"]:
    """The first index at which the cumulated mass is above `uniform` of the whole; never one without mass."""
    # Sums of a parallel scan need not be in order by a rounding error, so what has no mass is taken out by name.
    reached = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), 0.0)
    whole = jnp.max(reached, axis=-1)
    # The product may round up to the whole, which no index is above.
    goal = jnp.minimum(uniform * whole, jnp.nextafter(whole, jnp.zeros_like(whole)))
    size = mass.shape[1]
    return jnp.min(jnp.where(reached > goal[:, None], jnp.arange(size), size - 1), axis=-1)


def _truncated(scores: Float[Array, "S V"], top_k: Int[Array, "S"], top_p: Float[Array, "S"]) -> Float[Array, "S V"]:
    """Top-k and then top-p; among equals the lower id is the more likely one."""
    vocab = scores.shape[1]
    order = jnp.argsort(-scores, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scores, order, axis=-1)
    kept = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    mass = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    # At top_p = 1 rounding must not cut the tail.
    kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    rows = jnp.arange(scores.shape[0])[:, None]
    return jnp.where(jnp.zeros(scores.shape, bool).at[rows, order].set(kept), scores, -jnp.inf)


def _most_likely(scores: Float[Array, "S V"], asked: Bool[Array, ""]) -> tuple[Int[Array, "S A"], Float[Array, "S A"]]:
    number = min(MOST_TOP, scores.shape[1])

    def found(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(scores, number)
        return ids, values

    def nothing(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = (scores.shape[0], number)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return jax.lax.cond(asked, found, nothing, scores)


def check(sampling: Sampling, vocab: int) -> None:
    """Refuses settings that mean nothing.

    Args:
        vocab: V of the model.

    Raises:
        UserError: naming the field, its value and what it may be.
    """
    s = sampling
    rules = (
        ("max_tokens", s.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= s.temperature < math.inf, "0 (greedy) or positive"),
        ("top_k", s.top_k >= 0, "0 (all ids) or positive"),
        ("top_p", 0 < s.top_p <= 1, "above 0 and at most 1 (all ids)"),
        ("min_p", 0 <= s.min_p <= 1, "between 0 (all ids) and 1"),
        ("top_logprobs", 0 <= s.top_logprobs <= min(MOST_TOP, vocab), f"between 0 and {min(MOST_TOP, vocab)}"),
        ("stop_ids", len(s.stop_ids) <= MOST_STOPS, f"{MOST_STOPS} ids at most"),
        ("stop_ids", all(0 <= i < vocab for i in s.stop_ids), f"ids of the vocabulary, 0 to {vocab - 1}"),
        ("stop_strings", all(s.stop_strings), "texts of at least one character: an empty one would stop at once"),
    )
    for name, holds, allowed in rules:
        if not holds:
            raise UserError(f"sampling: {name} is {getattr(s, name)!r}; it must be {allowed}")
