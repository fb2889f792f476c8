"""The sampling transform and the draw. Settings are arrays: each row has its own, and a new value compiles nothing.

Logits `[B V]` -> scores (divided by the temperature; -inf for ids that cannot be sampled) -> one token and its log-prob
a row. A draw takes two uniform numbers and searches the cumulated mass on two levels, blocks of the vocabulary and then
ids within one: exact where a single float32 sum over a large vocabulary is not, and cheaper than noise for every logit.

Axes: B rows (slots), V vocabulary, A alternatives.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from tunix.errors import UserError
from tunix.types import MOST_TOP, Sampling

MOST_STOPS = 16
"""Stop ids of a request at most."""


class Transform(NamedTuple):
    """The sampling settings of each row."""

    temperature: jax.Array | np.ndarray
    """`[B]` float32, e.g. 0.7; 0 is greedy, and log-probs are then reported at temperature 1."""
    top_k: jax.Array | np.ndarray
    """`[B]` int32: the k most likely ids can be sampled, e.g. 50; 0 for all."""
    top_p: jax.Array | np.ndarray
    """`[B]` float32: the most likely ids with this mass together can be sampled, e.g. 0.9; 1 for all."""
    min_p: jax.Array | np.ndarray
    """`[B]` float32: ids with this share of the most likely one's mass can be sampled, e.g. 0.05; 0 for all."""
    top: jax.Array | np.ndarray
    """`[B]` bool: whether the most likely ids are reported."""

    @classmethod
    def of(cls, settings: Sequence[Sampling]) -> "Transform":
        """The settings of several requests, one row each."""
        return cls(
            np.array([s.temperature for s in settings], np.float32),
            np.array([s.top_k for s in settings], np.int32),
            np.array([s.top_p for s in settings], np.float32),
            np.array([s.min_p for s in settings], np.float32),
            np.array([s.top_logprobs > 0 for s in settings], bool),
        )


class Draw(NamedTuple):
    """One sampled token a row."""

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    """Log-probs under the transform: the probabilities of all ids that can be sampled sum to 1."""
    top_ids: Int[Array, "B A"]
    """The most likely ids, where a row wants them."""
    top_logprobs: Float[Array, "B A"]
    """Log-probs of the most likely ids."""


@jax.named_scope("draw")
def draw(logits: Float[Array, "B V"], keys: Key[Array, "B"], settings: Transform, live: Bool[Array, "B"]) -> Draw:
    """Samples one token a row, with keys that are used for nothing else.

    Args:
        live: rows whose result is read; the costly parts run only where one of these wants them.
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
    number = min(MOST_TOP, scores.shape[1])
    of_ids, ids = jax.lax.cond(
        jnp.any(live & settings.top),
        lambda below: tuple(jax.lax.top_k(below, number)),
        lambda below: (jnp.zeros((len(below), number)), jnp.zeros((len(below), number), jnp.int32)),
        below,
    )
    return Draw(tokens, logprobs, ids, of_ids - log_total)


def transformed(logits: Float[Array, "B V"], settings: Transform, live: Bool[Array, "B"]) -> Float[Array, "B V"]:
    """Scores whose softmax a token is sampled from, -inf where it never is; `types.Sampling` has the order of cuts."""
    temperature = jnp.where(settings.temperature == 0, 1.0, settings.temperature)
    scores = logits / temperature[:, None]
    sorts = jnp.any(live & ((settings.top_k > 0) | (settings.top_p < 1)))

    def whole(scores: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, vocab = scores.shape
        return jnp.full((rows, 1), -jnp.inf, scores.dtype), jnp.full((rows, 1), vocab - 1, jnp.int32)

    # Two numbers a row, not scores: a branch that cuts nothing would copy them.
    least, last = jax.lax.cond(sorts, _truncated, whole, scores, settings.top_k, settings.top_p)
    kept = (scores > least) | ((scores == least) & (jnp.arange(scores.shape[1]) <= last))
    # The most likely id is always kept, so masses relative to its own do not depend on what was cut before.
    floor = jnp.max(scores, axis=-1, keepdims=True) + jnp.log(settings.min_p)[:, None]
    return jnp.where(kept & (scores >= floor), scores, -jnp.inf)


def pick(mass: Float[Array, "B V"], uniform: Float[Array, "B 2"]) -> Int[Array, "B"]:
    """Samples an index a row with probabilities proportional to the mass, by two uniform numbers in [0, 1)."""
    rows, vocab = mass.shape
    width = 1 << math.ceil(math.log2(vocab) / 2)
    blocks = jnp.pad(mass, ((0, 0), (0, -vocab % width))).reshape(rows, -1, width)
    block = _walk(jnp.sum(blocks, axis=-1), uniform[:, 0])
    within = _walk(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
    return block * width + within


def _walk(mass: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """The first index at which the cumulated mass is above `uniform` of the whole; never one without mass."""
    # Sums of a parallel scan may be out of order by a rounding error, so places without mass are excluded explicitly.
    reached = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), 0.0)
    whole = jnp.max(reached, axis=-1)
    # The product may round up to the whole, which no index is above.
    goal = jnp.minimum(uniform * whole, jnp.nextafter(whole, jnp.zeros_like(whole)))
    size = mass.shape[1]
    return jnp.min(jnp.where(reached > goal[:, None], jnp.arange(size), size - 1), axis=-1)


def _truncated(
    scores: Float[Array, "B V"], top_k: Int[Array, "B"], top_p: Float[Array, "B"]
) -> tuple[Float[Array, "B 1"], Int[Array, "B 1"]]:
    """The score and the id of the least likely id that top-k and then top-p keep, the higher one of equal scores."""
    vocab = scores.shape[1]
    order = jnp.argsort(-scores, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scores, order, axis=-1)
    kept = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    mass = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    # At top_p = 1 rounding must not cut the tail.
    kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    least = jnp.sum(kept, axis=-1, keepdims=True) - 1
    return jnp.take_along_axis(ranked, least, axis=-1), jnp.take_along_axis(order, least, axis=-1)


def check(sampling: Sampling, vocab: int) -> None:
    """Refuses invalid sampling settings for a vocabulary (V) by a UserError with the field, its value and what it may
    be."""
    s = sampling
    rules = (
        ("max_tokens", s.max_tokens >= (0 if s.prompt_logprobs else 1), "at least 1"),
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
