"""Log-probs of the target tokens, their entropy and both gradients, without ever holding logits `[B T V]`.

The needed tokens are moved to the front of each row. Blocks `[B C]` of them are multiplied by the table one after the
other; how many is computed at run time, so that a prompt that is not trained costs nothing here. Within a block the
vocabulary is processed in chunks: logits `[B C p W]` -> a running maximum and the sum of exponentials under it ->
log-prob. The backward pass recomputes each chunk's logits, and updates each chunk of the table's gradient once per
block. With a frozen table (LoRA) it recomputes nothing: the forward pass accumulates the gradient of each log-prob with
respect to its state, `[B T D]`, along with the sum. `divergence.py` compares the logits of two models in the same way.

Where the table is split over devices, each has p-th of the vocabulary, and a chunk is W ids of each part: no device
ever holds the others' ids. Whatever is summed over ids or rows that devices share is kept apart, by parts p and shards
s, until its loop is done: no step of a loop waits for another device.

Axes: B rows, T time, A alternatives, C tokens at a time, V vocabulary, p parts of the vocabulary, W ids of a chunk, s
shards of the rows, D model width.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int, PyTree

from tunix.mesh import constrain, platform, shards
from tunix.util.loops import add_at, loop, needed_first

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
LEAST = 1e-37
"""Lowest probability of several ids together, so that its logarithm is finite."""


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


def visit_of(needed: Bool[Array, "B T"]) -> Visit:
    """The order that visits the needed tokens of each row first."""
    rows, length = needed.shape
    block = block_length(rows, length)
    order, back = needed_first(needed)
    number = (jnp.max(jnp.sum(needed, axis=1)) + block - 1) // block
    return Visit(jnp.pad(order, ((0, 0), (0, -length % block))), back, number.astype(jnp.int32))


def pick(values: jax.Array, order: jax.Array) -> jax.Array:
    """Each row's values at the indices `order`, for `[B T]`, `[B T D]` and `[B T A]`."""
    index = order if values.ndim == 2 else order[..., None]
    return jnp.take_along_axis(values, index, axis=1)


def chunk_logits(
    scaling: LogitScaling,
    hidden: Float[Array, "B C D"],
    chunks: Float[Array, "chunks p W D"],
    index: Int[Array, ""],
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


def listed_in(
    candidates: Int[Array, "B C A"], chunks: Float[Array, "chunks p W D"], vocab: int, index: Int[Array, ""]
) -> Bool[Array, "B C p W"]:
    """True at the ids of a chunk that are among each token's candidates, and at all where it has none."""
    _, parts, width, _ = chunks.shape
    # Written, not compared with each id of the chunk: a third of the head's time on a CPU with 64 candidates.
    chunk, part, inside = place_of(candidates.reshape(len(candidates), -1), chunks, vocab)
    at = jnp.where((chunk == index)[..., None] & (part[..., None] == jnp.arange(parts)), inside[..., None], width)
    at = at.reshape(*candidates.shape, parts).swapaxes(-1, -2)
    listed = jnp.zeros((*candidates.shape[:2], parts, width), bool)
    listed = jnp.put_along_axis(listed, at, True, axis=-1, inplace=False, mode="drop")
    return listed | (candidates[..., :1, None] < 0)


def ids_of(chunks: Float[Array, "chunks p W D"], vocab: int, index: Int[Array, ""]) -> Int[Array, "p W"]:
    """The ids of a chunk; -1 where it is padded."""
    _, parts, width, _ = chunks.shape
    part = -(-vocab // parts)
    inside = index * width + jnp.arange(width)
    ids = jnp.arange(parts)[:, None] * part + inside
    return jnp.where((inside < part) & (ids < vocab), ids, -1)


def place_of(
    targets: Int[Array, "B C *A"], chunks: Float[Array, "chunks p W D"], vocab: int
) -> tuple[Int[Array, "B C *A"], Int[Array, "B C *A"], Int[Array, "B C *A"]]:
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


def over_blocks(visit: Visit, block: int, block_of: Callable[[Int[Array, "B C"]], PyTree], start: PyTree) -> PyTree:
    """`block_of(order)` of each block of tokens, side by side in visiting order `[B places ...]`.

    Args:
        block: tokens of each (`block_length`).
        start: the results before the first block; those of blocks that nobody needs stay like that.
    """

    def body(i: Int[Array, ""], results: PyTree) -> PyTree:
        values = block_of(jax.lax.dynamic_slice_in_dim(visit.order, i * block, block, 1))
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, i * block, 1), results, values)

    return loop(visit.number, body, start, usual=visit.order.shape[1] // block)


DLogits = Callable[[Int[Array, ""]], Float[Array, "B C p W"]]
"""The number of a chunk -> the gradient by its products of states and table, for a block of tokens."""


def gradients(
    hidden: Float[Array, "B T D"],
    chunks: Float[Array, "chunks p W D"],
    needed: Bool[Array, "B T"],
    visit: Visit,
    vocab: int,
    trained: bool,
    d_logits_of: Callable[[Int[Array, "B C"], Float[Array, "B C D"], Bool[Array, "C"], Callable], DLogits],
) -> tuple[Float[Array, "B T D"], Float[Array, "V D"] | None]:
    """Gradients by the states and, where it trains, by the table.

    Args:
        d_logits_of: called for each block with its tokens, their states, which of them are not padding of the last
            block (which repeats token 0), and a function that takes the block out of an array in visiting order.
    """
    block = block_length(*needed.shape)
    number, parts, _, size = chunks.shape

    def body(i: Int[Array, ""], so_far: tuple) -> tuple[jax.Array, jax.Array]:
        d_hidden, d_chunks = so_far
        sliced = partial(jax.lax.dynamic_slice_in_dim, start_index=i * block, slice_size=block, axis=1)
        order = sliced(visit.order)
        h, real = pick(hidden, order), (i * block + jnp.arange(block)) < needed.shape[1]
        d_logits_in = d_logits_of(order, h, real, sliced)

        def one_chunk(index: Int[Array, ""], so_far: tuple) -> tuple[jax.Array, jax.Array]:
            d_h, d_chunks = so_far
            # The barrier makes XLA compute the logits' gradient once, not fuse (and recompute) it in each product.
            d_logits = jax.lax.optimization_barrier(d_logits_in(index).astype(chunks.dtype))
            d_h += table_product(d_logits, chunks, index)
            return d_h, add_at(d_chunks, index, outer_product(h, d_logits)) if trained else d_chunks

        start = (jnp.zeros((*order.shape, parts, size), jnp.float32), d_chunks)
        d_h, d_chunks = jax.lax.fori_loop(0, number, one_chunk, start)
        d_h = jnp.sum(d_h, -2).astype(hidden.dtype)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, d_h, i * block, 1), d_chunks

    # Without chunks where the table is frozen.
    sums = jnp.zeros((number if trained else 0, shards_of_rows(len(hidden)), size, parts, chunks.shape[2]), jnp.float32)
    sums = constrain(sums, None, "pieces", None, "vocab", None)
    start = (jnp.zeros((*visit.order.shape, size), hidden.dtype), sums)
    d_hidden, sums = loop(visit.number, body, start, usual=visit.order.shape[1] // block)
    d_hidden = jnp.where(needed[..., None], pick(d_hidden, visit.back), 0)
    if not trained:
        return d_hidden, None
    # The one place where the sums of each shard of the rows are added.
    by_part = constrain(jnp.sum(sums, axis=1).transpose(2, 0, 3, 1), "vocab", None, None, "embed")
    whole = by_part.reshape(parts, -1, size)[:, : -(-vocab // parts)].reshape(-1, size)
    return d_hidden, constrain(whole[:vocab], "vocab", "embed").astype(chunks.dtype)


def token_logprobs(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    needed: Bool[Array, "B T"],
    *,
    softcap: float | None,
    entropy: bool,
    temperature: float = 1.0,
    candidates: Int[Array, "B T A"] | None = None,
    whole: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """`log softmax(cap(hidden @ table.T) / temperature)[target]`, that distribution's entropy in nats, and, with
    `whole`, the log of the mass that the candidates have together among all ids: added to the first it gives the
    log-prob among all ids.

    All in float32, and 0 where not needed.

    Args:
        hidden: states that predict `targets` (already shifted).
        table: the head, in the compute dtype; logits are float32.
        needed: tokens that count.
        softcap: `softcap * tanh(logits / softcap)` (Gemma 2), or None.
        entropy: whether the entropy is computed; zeros otherwise.
        temperature: the sampler's, above 0.
        candidates: the ids that a target was sampled from, its own among them, padded with -1: the softmax is over
            these alone. All ids where a token's first one is -1, and everywhere where it is None.
        whole: whether the entropy is that of the distribution over all ids, and the mass is computed; zeros otherwise.
    """
    whole &= candidates is not None
    scaling = LogitScaling(softcap, temperature, len(table))
    hidden, targets_of, needed_of = in_pieces(hidden), in_pieces(targets), in_pieces(needed)
    split = None if candidates is None else in_pieces(candidates)
    results = _token_logprobs(scaling, entropy, whole, hidden, table, targets_of, needed_of, split)
    return jax.tree.map(lambda x: in_rows(x, *targets.shape), results)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _token_logprobs(scaling, entropy, whole, hidden, table, targets, needed, candidates):
    chunks, visit = in_chunks(table, needed.shape), visit_of(needed)
    return _values(scaling, entropy, whole, hidden, chunks, targets, visit, needed, candidates, pulled=False)[:3]


def _values(scaling, entropy, whole, hidden, chunks, targets, visit, needed, candidates, *, pulled):
    """Log-probs, entropies and masses `[B T]`, and in visiting order each token's `LogSumExp` `[B places]` and pull.

    A pull `[B places D]` (computed if `pulled`) is the gradient of a token's log-prob with respect to its state,
    `w_target - sum_v p_v w_v` (each times its slope). Like the log-sum-exp it is accumulated chunk by chunk, and scaled
    down whenever a larger logit appears. Everything is relative to the largest logit so far: an offset that all logits
    share costs no precision.
    """

    def block_of(order):
        listed = None if candidates is None else pick(candidates, order)
        states, wanted = pick(hidden, order), pick(targets, order)
        return _block(scaling, entropy, whole, states, chunks, wanted, listed, pulled=pulled)

    empty = jnp.zeros(visit.order.shape, jnp.float32)
    pulls = jnp.zeros((*visit.order.shape, chunks.shape[-1] if pulled else 0), jnp.float32)
    start = (empty, empty, empty, empty, empty, pulls)
    *values, top, log_total, pull = over_blocks(visit, block_length(*needed.shape), block_of, start)
    logprobs, spread, mass = (jnp.where(needed, pick(x, visit.back), 0.0) for x in values)
    return logprobs, spread, mass, LogSumExp(top, log_total), pull


def _block(
    scaling, entropy, whole, h: jax.Array, chunks, wanted: jax.Array, candidates: jax.Array | None, *, pulled: bool
) -> tuple[jax.Array, ...]:
    """Log-prob, entropy, mass, both parts of the log-sum-exp `[B C]` and pull `[B C D]` of a block of tokens."""
    number, parts, _, size = chunks.shape

    def body(index, running):
        top, total, within, weighted, taken, mixed, steep = running
        logits, slope = chunk_logits(scaling, h, chunks, index)
        listed = None if candidates is None else listed_in(candidates, chunks, scaling.vocab, index)
        if listed is not None and not whole:
            logits = jnp.where(listed, logits, NEVER)
        new_top = jnp.maximum(top, jnp.max(logits, -1))
        shrink, below = jnp.exp(top - new_top), logits - new_top[..., None]
        p = jnp.exp(below)
        if entropy:
            # The sum was relative to the old maximum; it becomes relative to the new one.
            weighted = shrink * (weighted + total * (top - new_top)) + jnp.sum(p * below, -1)
        total = total * shrink + jnp.sum(p, -1)
        if listed is not None and whole:
            within = within * shrink + jnp.sum(jnp.where(listed, p, 0.0), -1)
        is_target = taken_in(wanted, chunks, scaling.vocab, index)
        taken = taken + jnp.sum(jnp.where(is_target, logits, 0.0), -1)
        if pulled:
            # The barrier makes XLA compute these once, instead of fusing (and recomputing) them in the product.
            weights = jax.lax.optimization_barrier((p * slope).astype(chunks.dtype))
            mixed = mixed * shrink[..., None] + table_product(weights, chunks, index)
            steep = steep + jnp.sum(jnp.where(is_target, slope, 0.0), -1)
        return new_top, total, within, weighted, taken, mixed, steep

    zero = constrain(jnp.zeros((*wanted.shape, parts), jnp.float32), "pieces", None, "vocab")
    start = (zero + NEVER, zero, zero, zero, zero, jnp.zeros((*zero.shape, size if pulled else 0), jnp.float32), zero)
    tops, total, within, weighted, taken, mixed, steep = jax.lax.fori_loop(0, number, body, start)
    # The parts' sums were relative to their own maxima.
    top = jnp.max(tops, -1)
    above = tops - top[..., None]
    shrink = jnp.exp(above)
    weighted = jnp.sum(shrink * (weighted + total * above), -1)
    total, taken, steep = jnp.sum(total * shrink, -1), jnp.sum(taken, -1), jnp.sum(steep, -1)
    log_total, pull = jnp.log(total), jnp.sum(mixed * shrink[..., None], -2)
    if pulled:
        target = chunks[place_of(wanted, chunks, scaling.vocab)].astype(jnp.float32)
        pull = steep[..., None] * target - pull / total[..., None]
    logprob, mass = LogSumExp(top, log_total).log_p(taken), jnp.zeros_like(top)
    if whole:
        # Bounded, since all candidates may be 87 nats below the most likely id, long after they were sampled from.
        mass = jnp.log(jnp.maximum(jnp.sum(within * shrink, -1), LEAST)) - log_total
        logprob -= mass
    return logprob, log_total - weighted / total if entropy else jnp.zeros_like(top), mass, top, log_total, pull


def _forward(scaling, entropy, whole, hidden, table, targets, needed, candidates):
    trained = table.perturbed
    # The entropy's gradient, or the mass's, is another sum over ids: with it the backward pass recomputes the logits.
    pulled = not trained and not entropy and not whole
    hidden, table, targets, needed = (x.value for x in (hidden, table, targets, needed))
    candidates = jax.tree.map(lambda x: x.value, candidates, is_leaf=lambda x: hasattr(x, "perturbed"))
    chunks = in_chunks(table, needed.shape)
    visit = visit_of(needed)
    *values, lse, pull = _values(
        scaling, entropy, whole, hidden, chunks, targets, visit, needed, candidates, pulled=pulled
    )
    if pulled:
        return tuple(values), (pick(pull, visit.back).astype(hidden.dtype), targets, needed, candidates)
    # Only arrays can be saved: () stands for a table that trains, None for one that is frozen under an adapter.
    return tuple(values), (
        hidden,
        chunks,
        targets,
        needed,
        candidates,
        visit,
        lse,
        *values[1:],
        () if trained else None,
    )


def _backward(scaling, entropy, whole, saved, cotangents):
    """Gradients by the states and, where it trains, by the table; each chunk's logits are made again without pulls."""
    d_logprobs, *others = (None if isinstance(d, SymbolicZero) else d for d in cotangents)
    d_table = None
    if len(saved) == 4:
        pull, targets, needed, candidates = saved
        d = jnp.zeros(needed.shape) if d_logprobs is None else jnp.where(needed, d_logprobs, 0.0)
        # where, not a product alone: the pull of a token that is not needed was never computed.
        d_hidden = jnp.where(needed[..., None], d[..., None] * pull, 0).astype(pull.dtype)
    else:
        hidden, chunks, targets, needed, candidates, visit, lse, spread, mass, trained = saved
        zero = jnp.zeros(needed.shape)
        needed_pulls = [zero if d is None else jnp.where(needed, d, 0.0) for d in (d_logprobs, *others)]

        def d_logits_of(order, h, real, sliced):
            wanted, block_lse = pick(targets, order), LogSumExp(*map(sliced, lse)).per_id()
            pulls = (jnp.where(real, pick(d, order), 0.0) for d in needed_pulls)
            values = (pick(x, order) for x in (spread, mass))
            pull, pull_spread, pull_mass, entropies, masses = (x[..., None, None] for x in (*pulls, *values))
            listed = None if candidates is None else pick(candidates, order)

            def of_chunk(index):
                logits, slope = chunk_logits(scaling, h, chunks, index)
                among = jnp.array(True) if listed is None else listed_in(listed, chunks, scaling.vocab, index)
                if listed is not None and not whole:
                    logits = jnp.where(among, logits, NEVER)
                log_p = block_lse.log_p(logits)
                p = jnp.exp(log_p)
                # The mass is the log-sum-exp of the candidates' logits less that of all; p / mass is among these alone.
                p_listed = jnp.where(among, p * jnp.exp(-masses), 0.0) if whole else p
                d_logits = pull * (taken_in(wanted, chunks, scaling.vocab, index) - p_listed)
                if whole:
                    d_logits += pull_mass * (p_listed - p)
                if entropy:
                    d_logits -= pull_spread * p * (log_p + entropies)
                return d_logits * slope

            return of_chunk

        vocab, trains = scaling.vocab, trained is not None
        d_hidden, d_table = gradients(hidden, chunks, needed, visit, vocab, trains, d_logits_of)
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (targets, needed, candidates))
    return d_hidden, d_table, *nothing


_token_logprobs.defvjp(_forward, _backward, symbolic_zeros=True)
