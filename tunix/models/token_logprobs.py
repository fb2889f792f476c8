"""Log-probs of the target tokens, their entropy and both gradients, without ever holding logits `[B T V]`.

Blocks of tokens and chunks of the vocabulary are those of `vocab_chunks.py`: logits `[B C p W]` -> a running maximum
and the sum of exponentials under it -> log-prob. The backward pass recomputes each chunk's logits, and updates each
chunk of the table's gradient once per block. With a frozen table (LoRA) it recomputes nothing: the forward pass
accumulates the gradient of each log-prob with respect to its state, `[B T D]`, along with the sum.

Whatever is summed over ids or rows that devices share is kept apart, by parts p and shards s, until its loop is done:
no step of a loop waits for another device.

Axes: B rows, T time, C tokens at a time, V vocabulary, p parts of the vocabulary, W ids of a chunk, s
shards of the rows, D model width.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from tunix.mesh import constrain
from tunix.models.vocab_chunks import (
    NEVER,
    LogitScaling,
    LogSumExp,
    block_length,
    chunk_logits,
    in_chunks,
    in_pieces,
    in_rows,
    no_gradient,
    outer_product,
    pick,
    place_of,
    table_gradient,
    table_product,
    taken_in,
    visit_of,
)
from tunix.util.loops import add_at, loop


class _Head(NamedTuple):
    """The settings that are known when a program is compiled."""

    scaling: LogitScaling
    entropy: bool


def token_logprobs(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    needed: Bool[Array, "B T"],
    *,
    softcap: float | None,
    entropy: bool,
    temperature: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`log softmax(cap(hidden @ table.T) / temperature)[target]` and that distribution's entropy in nats.

    Both in float32, and 0 where not needed.

    Args:
        hidden: states that predict `targets` (already shifted).
        table: the head, in the compute dtype; logits are float32.
        needed: tokens that count.
        softcap: `softcap * tanh(logits / softcap)` (Gemma 2), or None.
        entropy: whether the entropy is computed; zeros otherwise.
        temperature: the sampler's, above 0.
    """
    head = _Head(LogitScaling(softcap, temperature, len(table)), entropy)
    results = _token_logprobs(head, in_pieces(hidden), table, in_pieces(targets), in_pieces(needed))
    return jax.tree.map(lambda x: in_rows(x, *targets.shape), results)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(head, hidden, table, targets, needed):
    chunks = in_chunks(table, needed.shape)
    logprobs, spread, _, _ = _values(head, hidden, chunks, targets, visit_of(needed), needed, pulled=False)
    return logprobs, spread


def _values(head, hidden, chunks, targets, visit, needed, *, pulled):
    """Log-probs and entropies `[B T]`, and in visiting order each token's `LogSumExp` `[B places]` and pull.

    A pull `[B places D]` (computed if `pulled`) is the gradient of a token's log-prob with respect to its state,
    `w_target - sum_v p_v w_v` (each times its slope). Like the log-sum-exp it is accumulated chunk by chunk, and scaled
    down whenever a larger logit appears. Everything is relative to the largest logit so far: an offset that all logits
    share costs no precision.
    """
    block = block_length(*needed.shape)

    def body(i, results):
        order = jax.lax.dynamic_slice_in_dim(visit.order, i * block, block, 1)
        values = _block(head, pick(hidden, order), chunks, pick(targets, order), pulled=pulled)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, i * block, 1)
            for old, new in zip(results, values, strict=True)
        )

    empty = jnp.zeros(visit.order.shape, jnp.float32)
    pulls = jnp.zeros((*visit.order.shape, chunks.shape[-1] if pulled else 0), jnp.float32)
    start = (empty, empty, empty, empty, pulls)
    logprobs, spread, top, log_total, pull = loop(visit.number, body, start, usual=visit.order.shape[1] // block)
    logprobs, spread = (jnp.where(needed, pick(x, visit.back), 0.0) for x in (logprobs, spread))
    return logprobs, spread, LogSumExp(top, log_total), pull


def _block(head, h: jax.Array, chunks, wanted: jax.Array, *, pulled: bool) -> tuple[jax.Array, ...]:
    """Log-prob, entropy, both parts of the log-sum-exp `[B C]` and pull `[B C D]` of a block of tokens."""
    number, parts, _, size = chunks.shape

    def body(index, running):
        top, total, weighted, taken, mixed, steep = running
        logits, slope = chunk_logits(head.scaling, h, chunks, index)
        new_top = jnp.maximum(top, jnp.max(logits, -1))
        shrink, below = jnp.exp(top - new_top), logits - new_top[..., None]
        p = jnp.exp(below)
        if head.entropy:
            # The sum was relative to the old maximum; it becomes relative to the new one.
            weighted = shrink * (weighted + total * (top - new_top)) + jnp.sum(p * below, -1)
        total = total * shrink + jnp.sum(p, -1)
        is_target = taken_in(wanted, chunks, head.scaling.vocab, index)
        taken = taken + jnp.sum(jnp.where(is_target, logits, 0.0), -1)
        if pulled:
            # The barrier makes XLA compute these once, instead of fusing (and recomputing) them in the product.
            weights = jax.lax.optimization_barrier((p * slope).astype(chunks.dtype))
            mixed = mixed * shrink[..., None] + table_product(weights, chunks, index)
            steep = steep + jnp.sum(jnp.where(is_target, slope, 0.0), -1)
        return new_top, total, weighted, taken, mixed, steep

    zero = constrain(jnp.zeros((*wanted.shape, parts), jnp.float32), "pieces", None, "vocab")
    start = (zero + NEVER, zero, zero, zero, jnp.zeros((*zero.shape, size if pulled else 0), jnp.float32), zero)
    tops, total, weighted, taken, mixed, steep = jax.lax.fori_loop(0, number, body, start)
    # The parts' sums were relative to their own maxima.
    top = jnp.max(tops, -1)
    above = tops - top[..., None]
    shrink = jnp.exp(above)
    weighted = jnp.sum(shrink * (weighted + total * above), -1)
    total, taken, steep = jnp.sum(total * shrink, -1), jnp.sum(taken, -1), jnp.sum(steep, -1)
    log_total, pull = jnp.log(total), jnp.sum(mixed * shrink[..., None], -2)
    if pulled:
        target = chunks[place_of(wanted, chunks, head.scaling.vocab)].astype(jnp.float32)
        pull = steep[..., None] * target - pull / total[..., None]
    logprob = LogSumExp(top, log_total).log_p(taken)
    return logprob, log_total - weighted / total if head.entropy else jnp.zeros_like(top), top, log_total, pull


def _forward(head, hidden, table, targets, needed):
    trained = table.perturbed
    # The entropy's gradient is another sum over the vocabulary: with it the backward pass recomputes the logits.
    pulled = not trained and not head.entropy
    hidden, table, targets, needed = (x.value for x in (hidden, table, targets, needed))
    chunks = in_chunks(table, needed.shape)
    visit = visit_of(needed)
    logprobs, spread, lse, pull = _values(head, hidden, chunks, targets, visit, needed, pulled=pulled)
    if pulled:
        return (logprobs, spread), (pick(pull, visit.back).astype(hidden.dtype), targets, needed)
    # Only arrays can be saved: () stands for a table that trains, None for one that is frozen under an adapter.
    return (logprobs, spread), (hidden, chunks, targets, needed, visit, lse, spread, () if trained else None)


def _backward(head, saved, cotangents):
    d_logprobs, d_spread = (None if isinstance(d, SymbolicZero) else d for d in cotangents)
    d_table = None
    if len(saved) == 3:
        pull, targets, needed = saved
        d = jnp.zeros(needed.shape) if d_logprobs is None else jnp.where(needed, d_logprobs, 0.0)
        # where, not a product alone: the pull of a token that is not needed was never computed.
        d_hidden = jnp.where(needed[..., None], d[..., None] * pull, 0).astype(pull.dtype)
    else:
        targets, needed = saved[2:4]
        zero = jnp.zeros(needed.shape)
        d_logprobs, d_spread = (zero if d is None else jnp.where(needed, d, 0.0) for d in (d_logprobs, d_spread))
        d_hidden, d_table = _gradients(head, saved, d_logprobs, d_spread)
    nothing = (np.zeros(targets.shape, jax.dtypes.float0), np.zeros(needed.shape, jax.dtypes.float0))
    return d_hidden, d_table, *nothing


def _gradients(head, saved, d_logprobs, d_spread):
    """Gradients by the states and, where it trains, by the table; each chunk's logits are made again."""
    hidden, chunks, targets, needed, visit, lse, spread, trained = saved
    length = needed.shape[1]
    block = block_length(*needed.shape)
    number, parts, _, size = chunks.shape

    def body(i, gradients):
        d_hidden, d_chunks = gradients
        order = jax.lax.dynamic_slice_in_dim(visit.order, i * block, block, 1)
        h, wanted = pick(hidden, order), pick(targets, order)
        block_lse = LogSumExp(*(jax.lax.dynamic_slice_in_dim(x, i * block, block, 1) for x in lse)).per_id()
        # Padding of the last block repeats token 0: its cotangent counts only where the place in `order` is a real one.
        real = (i * block + jnp.arange(block)) < length
        pulls = (jnp.where(real, pick(d, order), 0.0) for d in (d_logprobs, d_spread))
        pull, pull_spread, own_spread = (x[..., None, None] for x in (*pulls, pick(spread, order)))

        def one_chunk(index, gradients):
            d_h, d_chunks = gradients
            logits, slope = chunk_logits(head.scaling, h, chunks, index)
            log_p = block_lse.log_p(logits)
            p = jnp.exp(log_p)
            d_logits = pull * (taken_in(wanted, chunks, head.scaling.vocab, index) - p)
            if head.entropy:
                d_logits -= pull_spread * p * (log_p + own_spread)
            d_logits *= slope
            # The barrier makes XLA compute the logits' gradient once, not fuse (and recompute) it in each product.
            d_logits = jax.lax.optimization_barrier(d_logits.astype(chunks.dtype))
            d_h += table_product(d_logits, chunks, index)
            return d_h, d_chunks if trained is None else add_at(d_chunks, index, outer_product(h, d_logits))

        start = (jnp.zeros((*wanted.shape, parts, size), jnp.float32), d_chunks)
        d_h, d_chunks = jax.lax.fori_loop(0, number, one_chunk, start)
        d_h = jnp.sum(d_h, -2).astype(hidden.dtype)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, d_h, i * block, 1), d_chunks

    nothing = no_gradient(chunks, len(hidden), trained is not None)
    start = (jnp.zeros((*visit.order.shape, size), hidden.dtype), nothing)
    d_hidden, d_chunks = loop(visit.number, body, start, usual=visit.order.shape[1] // block)
    d_hidden = jnp.where(needed[..., None], pick(d_hidden, visit.back), 0)
    return d_hidden, None if trained is None else table_gradient(d_chunks, head.scaling.vocab).astype(chunks.dtype)


_token_logprobs.defvjp(_forward, _backward, symbolic_zeros=True)
