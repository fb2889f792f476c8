"""Log-probs of the taken tokens, their entropy and both gradients, without ever holding logits `[B T V]`.

The tokens that count are moved to the front of each row. Blocks of `[B C]` of them meet the head one after the other;
their number is found at run time, so that a prompt that is not trained costs nothing here. Within a block the
vocabulary goes by in chunks of W: logits `[B C W]` -> a running log-sum-exp -> log-prob. The backward pass makes each
chunk's logits again, and writes each chunk of the table's gradient once a block. Under a frozen table (LoRA) it has
nothing to make: the forward pass gathers each log-prob's own gradient by the state, `[B T D]`, beside the sum.

Axes: B rows, T time, C tokens of a block, V vocabulary, W vocabulary of a chunk, D model.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from tunix.mesh import constrain

BLOCK_TOKENS = 2048
"""Tokens of a block, over all rows: enough that reading the table does not matter beside multiplying by it."""
CHUNK_LOGITS = 1 << 22
"""Logits that exist at a time: 16 MiB in float32. Wider chunks are slower on a CPU, where each row is a memory page."""
NEVER = -1e30
"""Logit of the ids that pad the last chunk."""


class _Head(NamedTuple):
    """What is known when a program is compiled."""

    softcap: float | None
    temperature: float
    entropy: bool
    vocab: int


class _Visit(NamedTuple):
    """The order in which tokens are visited."""

    order: Int[Array, "B P"]
    """Token indices, those that count first; P is T rounded up to whole blocks."""
    back: Int[Array, "B T"]
    """Where token t stands in `order`."""
    number: Int[Array, ""]
    """Blocks that hold a token that counts."""


def block_length(rows: int, length: int) -> int:
    """C: tokens of each row in a block."""
    return min(max(BLOCK_TOKENS // rows, 1), length)


def chunk_width(tokens: int, vocab: int) -> int:
    """W for a block of `tokens`: the vocabulary in as few equal chunks as CHUNK_LOGITS allows, in steps of 128."""
    chunks = -(-tokens * vocab // CHUNK_LOGITS)
    return vocab if chunks == 1 else -(-vocab // (128 * chunks)) * 128


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
    rows, length, width = hidden.shape
    vocab = table.shape[0]
    chunk = chunk_width(rows * block_length(rows, length), vocab)
    padded = jnp.pad(constrain(table, None, None), ((0, -vocab % chunk), (0, 0)))
    chunks = constrain(padded.reshape(-1, chunk, width), None, "vocab", None)
    return _token_logprobs(_Head(softcap, temperature, entropy, vocab), hidden, chunks, targets, needed)


def _visit(needed: jax.Array) -> _Visit:
    rows, length = needed.shape
    block = block_length(rows, length)
    order = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    back = jnp.zeros_like(order).at[jnp.arange(rows)[:, None], order].set(jnp.arange(length, dtype=jnp.int32))
    number = (jnp.max(jnp.sum(needed, axis=1)) + block - 1) // block
    return _Visit(jnp.pad(order, ((0, 0), (0, -length % block))), back, number.astype(jnp.int32))


def _pick(values: jax.Array, order: jax.Array) -> jax.Array:
    """Rows' values at `order`, for `[B T]` and `[B T D]`."""
    index = order if values.ndim == 2 else order[..., None]
    return jnp.take_along_axis(values, index, axis=1)


def _logits(head: _Head, hidden: jax.Array, chunks: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """`[B C W]` float32 logits of one chunk of the vocabulary, and their derivative by the product `h w`."""
    logits = jnp.einsum("BCD,WD->BCW", hidden, chunks[index], preferred_element_type=jnp.float32)
    logits = constrain(logits, "rows", None, "vocab")
    slope: jax.Array | float = 1.0
    if head.softcap is not None:
        bent = jnp.tanh(logits / head.softcap)
        logits, slope = head.softcap * bent, 1 - bent**2
    if head.temperature != 1:
        logits, slope = logits / head.temperature, slope / head.temperature
    number, width, _ = chunks.shape
    if number * width != head.vocab:
        logits = jnp.where(index * width + jnp.arange(width) < head.vocab, logits, NEVER)
    return logits, slope


def _taken(targets: jax.Array, width: int, index: jax.Array) -> jax.Array:
    """`[B C W]`: where a chunk holds the target."""
    return targets[..., None] == index * width + jnp.arange(width)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(head, hidden, chunks, targets, needed):
    logprobs, spread, _, _ = _values(head, hidden, chunks, targets, _visit(needed), needed, pulled=False)
    return logprobs, spread


def _values(head, hidden, chunks, targets, visit, needed, *, pulled):
    """Log-probs and entropies `[B T]`; in the order of the visit log-sum-exps `[B P]` and, if asked, pulls `[B P D]`.

    A pull is the gradient of a token's log-prob by its state, `w_target - sum_v p_v w_v` (each times its slope). Like
    the log-sum-exp it is gathered chunk by chunk, and shrunk whenever a larger logit turns up.
    """
    block = block_length(*needed.shape)
    number, width, size = chunks.shape
    size = size if pulled else 0

    def over_vocabulary(h: jax.Array, wanted: jax.Array) -> tuple[jax.Array, ...]:
        """Log-prob, entropy, log-sum-exp `[B C]` and pull `[B C D]` of a block."""

        def body(index, running):
            top, total, weighted, taken, mixed, steep = running
            logits, slope = _logits(head, h, chunks, index)
            new_top = jnp.maximum(top, jnp.max(logits, -1))
            shrink, p = jnp.exp(top - new_top), jnp.exp(logits - new_top[..., None])
            total = total * shrink + jnp.sum(p, -1)
            weighted = weighted * shrink + jnp.sum(p * logits, -1) if head.entropy else weighted
            here = _taken(wanted, width, index)
            taken = taken + jnp.sum(jnp.where(here, logits, 0.0), -1)
            if pulled:
                # The barrier has these made once, not fused (and made again) into the product.
                weights = jax.lax.optimization_barrier((p * slope).astype(chunks.dtype))
                new = jnp.einsum("BCW,WD->BCD", weights, chunks[index], preferred_element_type=jnp.float32)
                mixed = mixed * shrink[..., None] + new
                steep = steep + jnp.sum(jnp.where(here, slope, 0.0), -1)
            return new_top, total, weighted, taken, mixed, steep

        zero = jnp.zeros(wanted.shape, jnp.float32)
        start = (zero + NEVER, zero, zero, zero, jnp.zeros((*wanted.shape, size), jnp.float32), zero)
        top, total, weighted, taken, mixed, steep = jax.lax.fori_loop(0, number, body, start)
        lse = top + jnp.log(total)
        pull = mixed
        if pulled:
            target = chunks[wanted // width, wanted % width].astype(jnp.float32)
            pull = steep[..., None] * target - mixed / total[..., None]
        return taken - lse, lse - weighted / total if head.entropy else zero, lse, pull

    def body(i, found):
        order = jax.lax.dynamic_slice_in_dim(visit.order, i * block, block, 1)
        values = over_vocabulary(_pick(hidden, order), _pick(targets, order))
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, i * block, 1) for old, new in zip(found, values, strict=True)
        )

    empty = jnp.zeros(visit.order.shape, jnp.float32)
    start = (empty, empty, empty, jnp.zeros((*visit.order.shape, size), jnp.float32))
    logprobs, spread, lse, pull = jax.lax.fori_loop(0, visit.number, body, start)
    logprobs, spread = (jnp.where(needed, _pick(x, visit.back), 0.0) for x in (logprobs, spread))
    return logprobs, spread, lse, pull


def _forward(head, hidden, chunks, targets, needed):
    trained = chunks.perturbed
    # The entropy's gradient is another sum over the vocabulary: with it the backward pass makes the logits again.
    pulled = not trained and not head.entropy
    hidden, chunks, targets, needed = (x.value for x in (hidden, chunks, targets, needed))
    visit = _visit(needed)
    logprobs, spread, lse, pull = _values(head, hidden, chunks, targets, visit, needed, pulled=pulled)
    if pulled:
        return (logprobs, spread), (_pick(pull, visit.back).astype(hidden.dtype), targets, needed)
    # What is saved holds arrays only: () says that the table trains, None that it is frozen under an adapter.
    return (logprobs, spread), (hidden, chunks, targets, needed, visit, lse, spread, () if trained else None)


def _backward(head, saved, cotangents):
    d_logprobs, d_spread = (None if isinstance(d, SymbolicZero) else d for d in cotangents)
    d_table = None
    if len(saved) == 3:
        pull, targets, needed = saved
        d = jnp.zeros(needed.shape) if d_logprobs is None else jnp.where(needed, d_logprobs, 0.0)
        # where, not a product alone: the pull of a token that does not count was never made.
        d_hidden = jnp.where(needed[..., None], d[..., None] * pull, 0).astype(pull.dtype)
    else:
        targets, needed = saved[2:4]
        zero = jnp.zeros(needed.shape)
        pulls = (zero if d is None else jnp.where(needed, d, 0.0) for d in (d_logprobs, d_spread))
        d_hidden, d_table = _gradients(head, saved, *pulls)
    nothing = (np.zeros(targets.shape, jax.dtypes.float0), np.zeros(needed.shape, jax.dtypes.float0))
    return d_hidden, d_table, *nothing


def _gradients(head, saved, d_logprobs, d_spread):
    """Gradients by the states and, where it trains, by the table; each chunk's logits are made again."""
    hidden, chunks, targets, needed, visit, lse, spread, trained = saved
    length = needed.shape[1]
    block = block_length(*needed.shape)
    number, width, size = chunks.shape

    def body(i, gradients):
        d_hidden, d_chunks = gradients
        order = jax.lax.dynamic_slice_in_dim(visit.order, i * block, block, 1)
        h, wanted = _pick(hidden, order), _pick(targets, order)
        own_lse = jax.lax.dynamic_slice_in_dim(lse, i * block, block, 1)[..., None]
        # Padding of the last block repeats token 0: its cotangent counts only where the place in `order` is a real one.
        real = (i * block + jnp.arange(block)) < length
        pull, pull_spread = (jnp.where(real, _pick(d, order), 0.0)[..., None] for d in (d_logprobs, d_spread))
        own_spread = _pick(spread, order)[..., None]

        def one_chunk(index, gradients):
            d_h, d_chunks = gradients
            logits, slope = _logits(head, h, chunks, index)
            p = jnp.exp(logits - own_lse)
            d_logits = pull * (_taken(wanted, width, index) - p)
            if head.entropy:
                d_logits -= pull_spread * p * (logits - own_lse + own_spread)
            d_logits *= slope
            # The barrier has the gradient of the logits made once, not fused (and made again) into each product.
            d_logits = jax.lax.optimization_barrier(d_logits.astype(chunks.dtype))
            d_h += jnp.einsum("BCW,WD->BCD", d_logits, chunks[index], preferred_element_type=jnp.float32)
            if trained is None:
                return d_h, d_chunks
            # As [D W]: the operand that a CPU has to transpose is then the narrow one.
            new = jnp.einsum("BCD,BCW->DW", h, d_logits, preferred_element_type=jnp.float32)
            return d_h, d_chunks.at[index].add(new)

        start = (jnp.zeros(h.shape, jnp.float32), d_chunks)
        d_h, d_chunks = jax.lax.fori_loop(0, number, one_chunk, start)
        d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_h.astype(hidden.dtype), i * block, 1)
        return d_hidden, d_chunks

    nowhere = jnp.zeros((0 if trained is None else number, size, width), jnp.float32)
    start = (jnp.zeros((*visit.order.shape, size), hidden.dtype), constrain(nowhere, None, None, "vocab"))
    d_hidden, d_chunks = jax.lax.fori_loop(0, visit.number, body, start)
    d_hidden = jnp.where(needed[..., None], _pick(d_hidden, visit.back), 0)
    return d_hidden, None if trained is None else d_chunks.transpose(0, 2, 1).astype(chunks.dtype)


_token_logprobs.defvjp(_forward, _backward, symbolic_zeros=True)
