"""How a head meets its tokens without ever holding logits `[B T V]`: in blocks of tokens and chunks of the vocabulary.

The tokens that count are moved to the front of each row. Blocks of `[B C]` of them meet the table one after the other;
their number is found at run time, so that a prompt that is not trained costs nothing here. Within a block the
vocabulary goes by in chunks of W: logits `[B C W]`. `token_logprobs.py` makes log-probs of them, `divergence.py`
compares two.

Axes: B rows, T time, C tokens of a block, V vocabulary, W vocabulary of a chunk, D model.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.mesh import constrain

BLOCK_TOKENS = 2048
"""Tokens of a block, over all rows: enough that reading the table does not matter beside multiplying by it."""
BLOCKS = 2
"""Blocks of a row at least, so that a prompt that fills half of it costs nothing here."""
CHUNK_LOGITS = 1 << 22
"""Logits that exist at a time: 16 MiB in float32. Wider chunks are slower on a CPU, where each row is a memory page."""
NEVER = -1e30
"""Logit of the ids that pad the last chunk."""


class Bend(NamedTuple):
    """What becomes of the product of state and table; known when a program is compiled."""

    softcap: float | None
    """`softcap * tanh(logits / softcap)` (Gemma 2), or None."""
    temperature: float
    """Divides the logits."""
    vocab: int
    """V: ids that are real."""


class Mass(NamedTuple):
    """The log-sum-exp of a token's logits in two parts: their sum would keep the digits of the larger one alone. Under
    an offset of 1e4 that all logits share, log-probs by the sum are off by 5e-4, by the parts by 5e-7."""

    top: Float[Array, "..."]
    """The largest logit."""
    log_total: Float[Array, "..."]
    """`log sum_v exp(logit_v - top)`."""

    def log_p(self, logits: Float[Array, "..."]) -> Float[Array, "..."]:
        """Log-probs of logits of the same shape, or of `per_id`'s."""
        return logits - self.top - self.log_total

    def per_id(self) -> "Mass":
        """With an axis for the ids of a chunk."""
        return Mass(self.top[..., None], self.log_total[..., None])


class Visit(NamedTuple):
    """The order in which tokens are visited."""

    order: Int[Array, "B P"]
    """Token indices, those that count first; P is T rounded up to whole blocks."""
    back: Int[Array, "B T"]
    """Where token t stands in `order`."""
    number: Int[Array, ""]
    """Blocks that hold a token that counts."""


def block_length(rows: int, length: int) -> int:
    """C: tokens of each row in a block."""
    return min(max(BLOCK_TOKENS // rows, 1), -(-length // BLOCKS))


def chunk_width(tokens: int, vocab: int) -> int:
    """W for a block of `tokens`: the vocabulary in as few equal chunks as CHUNK_LOGITS allows, in steps of 128."""
    chunks = -(-tokens * vocab // CHUNK_LOGITS)
    return vocab if chunks == 1 else -(-vocab // (128 * chunks)) * 128


def in_chunks(table: Float[Array, "V D"], chunk: int) -> Float[Array, "N W D"]:
    """The table in chunks of W ids, the last one padded with zeros."""
    vocab, width = table.shape
    padded = jnp.pad(constrain(table, None, None), ((0, -vocab % chunk), (0, 0)))
    return constrain(padded.reshape(-1, chunk, width), None, "vocab", None)


def visit_of(needed: Bool[Array, "B T"]) -> Visit:
    """The tokens that count come first."""
    rows, length = needed.shape
    block = block_length(rows, length)
    order = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    back = jnp.zeros_like(order).at[jnp.arange(rows)[:, None], order].set(jnp.arange(length, dtype=jnp.int32))
    number = (jnp.max(jnp.sum(needed, axis=1)) + block - 1) // block
    return Visit(jnp.pad(order, ((0, 0), (0, -length % block))), back, number.astype(jnp.int32))


def pick(values: jax.Array, order: jax.Array) -> jax.Array:
    """Rows' values at `order`, for `[B T]` and `[B T D]`."""
    index = order if values.ndim == 2 else order[..., None]
    return jnp.take_along_axis(values, index, axis=1)


def chunk_logits(
    bend: Bend, hidden: Float[Array, "B C D"], chunks: Float[Array, "N W D"], index: Int[Array, ""]
) -> tuple[Float[Array, "B C W"], Float[Array, "B C W"] | float]:
    """Float32 logits of one chunk of the vocabulary, and their derivative by the product `h w`."""
    logits = jnp.einsum("BCD,WD->BCW", hidden, chunks[index], preferred_element_type=jnp.float32)
    logits = constrain(logits, "rows", None, "vocab")
    slope: jax.Array | float = 1.0
    if bend.softcap is not None:
        bent = jnp.tanh(logits / bend.softcap)
        logits, slope = bend.softcap * bent, 1 - bent**2
    if bend.temperature != 1:
        logits, slope = logits / bend.temperature, slope / bend.temperature
    number, width, _ = chunks.shape
    if number * width != bend.vocab:
        logits = jnp.where(index * width + jnp.arange(width) < bend.vocab, logits, NEVER)
    return logits, slope


def taken_in(targets: Int[Array, "B C"], width: int, index: Int[Array, ""]) -> Bool[Array, "B C W"]:
    """Where a chunk holds the target."""
    return targets[..., None] == index * width + jnp.arange(width)
