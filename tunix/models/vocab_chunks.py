"""A head applied in blocks of tokens and chunks of the vocabulary, without ever holding logits `[B T V]`.

The needed tokens are moved to the front of each row. Blocks `[B C]` of them are multiplied by the table one after the
other; how many is computed at run time, so that a prompt that is not trained costs nothing here. Within a block the
vocabulary is processed in chunks: logits `[B C p W]`. `token_logprobs.py` turns them into log-probs, `divergence.py`
compares those of two models.

Where the table is split over devices, each has p-th of the vocabulary, and a chunk is W ids of each part: no device
ever holds the others' ids, and sums over a part need no communication.

Axes: B rows, T time, C tokens at a time, V vocabulary, p parts of the vocabulary, W ids of a chunk, s
shards of the rows, D model width.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.mesh import constrain, platform, shards
from tunix.util.loops import needed_first

BLOCK_TOKENS = 2048
"""Tokens of a block on a CPU: enough that multiplying by the table takes far longer than reading it."""
BLOCK_TOKENS_ELSEWHERE = 4096
"""The same on each GPU or TPU, where twice as many move 23 of 390 GB less in a step of Qwen3 0.6B over 1 x 16,384; of
still larger blocks more would be filled with tokens that nobody needs."""
BLOCKS = 2
"""Blocks of a row at least, so that a prompt that fills half of it costs nothing here."""
CHUNK_LOGITS = 1 << 22
"""Logits that a CPU holds at a time: 16 MiB in float32. Wider chunks are slower there, where each row is a memory
page."""
CHUNK_LOGITS_ELSEWHERE = 1 << 26
"""The same on each GPU or TPU: 256 MiB. Each chunk updates its part of the table's gradient once per block."""
NEVER = -1e30
"""Logit of the ids that pad the last chunk."""


class LogitScaling(NamedTuple):
    """How the product of state and table becomes logits; known when a program is compiled."""

    softcap: float | None
    """`softcap * tanh(logits / softcap)` (Gemma 2), or None."""
    temperature: float
    """Divides the logits."""
    vocab: int
    """V: ids without the padding of the last chunk."""


class LogSumExp(NamedTuple):
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

    def per_id(self) -> "LogSumExp":
        """Both parts with axes that broadcast over the parts and ids of a chunk."""
        return LogSumExp(self.top[..., None, None], self.log_total[..., None, None])


class Visit(NamedTuple):
    """The order in which the tokens of each row are visited, needed ones first."""

    order: Int[Array, "B places"]
    """Token indices, needed ones first; `places` is T rounded up to whole blocks."""
    back: Int[Array, "B T"]
    """Index of token t in `order`."""
    number: Int[Array, ""]
    """Number of blocks that hold a needed token."""


def in_pieces(x: jax.Array) -> jax.Array:
    """`[B T ...]` as `[B n T/n ...]` with the first two axes joined: parts of rows, which the mesh splits, as rows.

    A head reads each token by itself, so a device has no need of the others' parts.
    """
    parts = shards("time")
    if parts == 1:
        return x
    rows, length = x.shape[:2]
    padded = jnp.pad(x, ((0, 0), (0, -length % parts), *((0, 0),) * (x.ndim - 2)))
    return constrain(padded.reshape(rows * parts, -1, *x.shape[2:]), "pieces", *(None,) * (x.ndim - 1))


def in_rows(x: jax.Array, rows: int, length: int) -> jax.Array:
    """The inverse of `in_pieces` for values `[B T]`."""
    return x if shards("time") == 1 else x.reshape(rows, -1)[:, :length]


def block_length(rows: int, length: int) -> int:
    """C: tokens of each row in a block."""
    tokens = BLOCK_TOKENS if platform() == "cpu" else BLOCK_TOKENS_ELSEWHERE
    return min(max(tokens // -(-rows // shards_of_rows(rows)), 1), -(-length // BLOCKS))


def shards_of_rows(rows: int) -> int:
    """Into how many shards these rows are split; 1 where the mesh does not divide them."""
    return shards("pieces") if rows % shards("pieces") == 0 else 1


def chunk_width(rows: int, length: int, vocab: int) -> int:
    """W for blocks of rows of this length: the vocabulary in as few equal chunks as fit, in steps of 128 ids."""
    tokens = rows // shards_of_rows(rows) * block_length(rows, length)
    part = -(-vocab // shards("vocab"))
    chunks = -(-tokens * part // (CHUNK_LOGITS if platform() == "cpu" else CHUNK_LOGITS_ELSEWHERE))
    return part if chunks == 1 else -(-part // (128 * chunks)) * 128


def in_chunks(table: Float[Array, "V D"], targets: tuple[int, ...]) -> Float[Array, "chunks p W D"]:
    """The table in chunks of each part of the vocabulary, padded with zeros, for targets of shape `[B T]`."""
    parts = shards("vocab")
    vocab, dim = table.shape
    rows, length = targets
    width = chunk_width(rows, length, vocab)
    split = jnp.pad(constrain(table, "vocab", None), ((0, -vocab % parts), (0, 0))).reshape(parts, -1, dim)
    padded = jnp.pad(constrain(split, "vocab", None, None), ((0, 0), (0, -split.shape[1] % width), (0, 0)))
    return constrain(padded.reshape(parts, -1, width, dim).swapaxes(0, 1), None, "vocab", None, None)


def no_gradient(chunks: Float[Array, "chunks p W D"], rows: int, trained: bool) -> Float[Array, "_ s D p W"]:
    """The sums that `add_at` adds to and `table_gradient` reads, before the first block; without chunks if frozen."""
    number, parts, width, size = chunks.shape
    sums = jnp.zeros((number if trained else 0, shards_of_rows(rows), size, parts, width), jnp.float32)
    return constrain(sums, None, "pieces", None, "vocab", None)


def table_gradient(sums: Float[Array, "chunks s D p W"], vocab: int) -> Float[Array, "V D"]:
    """The table's gradient from the sums of each shard of the rows: the one place where shards are added."""
    chunks = constrain(jnp.sum(sums, axis=1).transpose(2, 0, 3, 1), "vocab", None, None, "embed")
    parts, _, _, dim = chunks.shape
    whole = chunks.reshape(parts, -1, dim)[:, : -(-vocab // parts)].reshape(-1, dim)
    return constrain(whole[:vocab], "vocab", "embed")


def visit_of(needed: Bool[Array, "B T"]) -> Visit:
    """The order that visits the needed tokens of each row first."""
    rows, length = needed.shape
    block = block_length(rows, length)
    order, back = needed_first(needed)
    number = (jnp.max(jnp.sum(needed, axis=1)) + block - 1) // block
    return Visit(jnp.pad(order, ((0, 0), (0, -length % block))), back, number.astype(jnp.int32))


def pick(values: jax.Array, order: jax.Array) -> jax.Array:
    """Each row's values at the indices `order`, for `[B T]` and `[B T D]`."""
    index = order if values.ndim == 2 else order[..., None]
    return jnp.take_along_axis(values, index, axis=1)


def chunk_logits(
    scaling: LogitScaling, hidden: Float[Array, "B C D"], chunks: Float[Array, "chunks p W D"], index: Int[Array, ""]
) -> tuple[Float[Array, "B C p W"], Float[Array, "B C p W"] | float]:
    """Float32 logits of one chunk of the vocabulary, and their derivative with respect to the product `h w`."""
    logits = jnp.einsum("BCD,pWD->BCpW", hidden, chunks[index], preferred_element_type=jnp.float32)
    logits = constrain(logits, "pieces", None, "vocab", None)
    slope: jax.Array | float = 1.0
    if scaling.softcap is not None:
        bent = jnp.tanh(logits / scaling.softcap)
        logits, slope = scaling.softcap * bent, 1 - bent**2
    if scaling.temperature != 1:
        logits, slope = logits / scaling.temperature, slope / scaling.temperature
    number, parts, width, _ = chunks.shape
    if number * parts * width != scaling.vocab:
        logits = jnp.where(ids_of(chunks, scaling.vocab, index) >= 0, logits, NEVER)
    return logits, slope


def ids_of(chunks: Float[Array, "chunks p W D"], vocab: int, index: Int[Array, ""]) -> Int[Array, "p W"]:
    """The ids of a chunk; -1 where it is padded."""
    _, parts, width, _ = chunks.shape
    part = -(-vocab // parts)
    inside = index * width + jnp.arange(width)
    ids = jnp.arange(parts)[:, None] * part + inside
    return jnp.where((inside < part) & (ids < vocab), ids, -1)


def place_of(
    targets: Int[Array, "B C"], chunks: Float[Array, "chunks p W D"], vocab: int
) -> tuple[Int[Array, "B C"], Int[Array, "B C"], Int[Array, "B C"]]:
    """The chunk, the part and the place there of each target: indices into `chunks`."""
    _, parts, width, _ = chunks.shape
    part, inside = jnp.divmod(targets, -(-vocab // parts))
    return inside // width, part, inside % width


def taken_in(
    targets: Int[Array, "B C"], chunks: Float[Array, "chunks p W D"], vocab: int, index: Int[Array, ""]
) -> Bool[Array, "B C p W"]:
    """True at each token's target id, where chunk `index` holds it."""
    return targets[..., None, None] == ids_of(chunks, vocab, index)


def table_product(
    weights: Float[Array, "B C p W"], chunks: Float[Array, "chunks p W D"], index: Int[Array, ""]
) -> Float[Array, "B C p D"]:
    """The sum of a chunk's rows of the table by weights, for each part, in float32."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    if chunks.shape[1] == 1:  # for a batched product XLA would copy the weights
        return product("BCW,WD->BCD", weights[:, :, 0], chunks[index, 0])[:, :, None]
    return constrain(product("BCpW,pWD->BCpD", weights, chunks[index]), "pieces", None, "vocab", None)


def outer_product(hidden: Float[Array, "B C D"], weights: Float[Array, "B C p W"]) -> Float[Array, "s D p W"]:
    """The sum of `hidden` times `weights` over the tokens of each shard of the rows, in float32.

    As [D W]: the operand that a CPU has to transpose is then the narrow one.
    """
    product, number = partial(jnp.einsum, preferred_element_type=jnp.float32), shards_of_rows(len(hidden))
    if number == 1:
        return product("BCD,BCpW->DpW", hidden, weights)[None]
    hidden = constrain(hidden.reshape(number, -1, *hidden.shape[1:]), "pieces", None, None, None)
    weights = constrain(weights.reshape(number, -1, *weights.shape[1:]), "pieces", None, None, "vocab", None)
    return constrain(product("sBCD,sBCpW->sDpW", hidden, weights), "pieces", None, "vocab", None)
