"""A head applied in blocks of tokens and chunks of the vocabulary, without ever holding logits `[B T V]`.

The needed tokens are moved to the front of each row. Blocks `[B C]` of them are multiplied by the table one after the
other; how many is computed at run time, so that a prompt that is not trained costs nothing here. Within a block the
vocabulary is processed in chunks of W: logits `[B C W]`. `token_logprobs.py` turns them into log-probs, `divergence.py`
compares those of two models.

Axes: B rows, T time, C tokens at a time, V vocabulary, W ids of a chunk, D model width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.mesh import constrain

BLOCK_TOKENS = 2048
"""Tokens of a block, over all rows: enough that multiplying by the table takes far longer than reading it."""
BLOCKS = 2
"""Blocks of a row at least, so that a prompt that fills half of it costs nothing here."""
CHUNK_LOGITS = 1 << 22
"""Logits that exist at a time: 16 MiB in float32. Wider chunks are slower on a CPU, where each row is a memory page."""
NEVER = -1e30
"""Logit of the ids that pad the last chunk."""


class Bend(NamedTuple):
    """How the product of state and table becomes logits; known when a program is compiled."""

    softcap: float | None
    """`softcap * tanh(logits / softcap)` (Gemma 2), or None."""
    temperature: float
    """Divides the logits."""
    vocab: int
    """V: ids without the padding of the last chunk."""


class Mass(NamedTuple):
    """The log-sum-exp of a token's logits in two parts, whose sum would round away digits of the smaller one.

    With an offset of 1e4 that all logits share, log-probs from the sum are off by 5e-4, from the parts by 5e-7.
    """

    top: Float[Array, "..."]
    """The largest logit."""
    log_total: Float[Array, "..."]
    """`log sum_v exp(logit_v - top)`."""

    def log_p(self, logits: Float[Array, "..."]) -> Float[Array, "..."]:
        """Log-probs of logits of the same shape, or of `per_id`'s."""
        return logits - self.top - self.log_total

    def per_id(self) -> "Mass":
        """Both parts with a last axis that broadcasts over the ids of a chunk."""
        return Mass(self.top[..., None], self.log_total[..., None])


class Visit(NamedTuple):
    """The order in which the tokens of each row are visited, needed ones first."""

    order: Int[Array, "B places"]
    """Token indices, needed ones first; `places` is T rounded up to whole blocks."""
    back: Int[Array, "B T"]
    """Index of token t in `order`."""
    number: Int[Array, ""]
    """Number of blocks that hold a needed token."""


def block_length(rows: int, length: int) -> int:
    """C: tokens of each row in a block."""
    return min(max(BLOCK_TOKENS // rows, 1), -(-length // BLOCKS))


def chunk_width(tokens: int, vocab: int) -> int:
    """W for a block of `tokens`: the vocabulary in as few equal chunks as CHUNK_LOGITS allows, in steps of 128."""
    chunks = -(-tokens * vocab // CHUNK_LOGITS)
    return vocab if chunks == 1 else -(-vocab // (128 * chunks)) * 128


def in_chunks(table: Float[Array, "V D"], chunk: int) -> Float[Array, "chunks W D"]:
    """The table in chunks of W ids, the last one padded with zeros."""
    vocab, width = table.shape
    padded = jnp.pad(constrain(table, None, None), ((0, -vocab % chunk), (0, 0)))
    return constrain(padded.reshape(-1, chunk, width), None, "vocab", None)


def visit_of(needed: Bool[Array, "B T"]) -> Visit:
    """The order that visits the needed tokens of each row first."""
    rows, length = needed.shape
    block = block_length(rows, length)
    order = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    back = jnp.zeros_like(order).at[jnp.arange(rows)[:, None], order].set(jnp.arange(length, dtype=jnp.int32))
    number = (jnp.max(jnp.sum(needed, axis=1)) + block - 1) // block
    return Visit(jnp.pad(order, ((0, 0), (0, -length % block))), back, number.astype(jnp.int32))


def pick(values: jax.Array, order: jax.Array) -> jax.Array:
    """Each row's values at the indices `order`, for `[B T]` and `[B T D]`."""
    index = order if values.ndim == 2 else order[..., None]
    return jnp.take_along_axis(values, index, axis=1)


def chunk_logits(
    bend: Bend, hidden: Float[Array, "B C D"], chunks: Float[Array, "chunks W D"], index: Int[Array, ""]
) -> tuple[Float[Array, "B C W"], Float[Array, "B C W"] | float]:
    """Float32 logits of one chunk of the vocabulary, and their derivative with respect to the product `h w`."""
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
    """True at each token's target id, where chunk `index` holds it."""
    return targets[..., None] == index * width + jnp.arange(width)
