"""The divergence of student and teacher at every needed token, without ever holding logits `[B T V]`.

Their states `[B T D]` and `[B T Te]` are multiplied by their own tables, block by block of tokens and chunk by chunk of
the vocabulary (`token_logprobs.py`). A first sweep over the chunks computes both masses and, for `top_k`, the logit
that an id needs to be among the teacher's k most likely; a second one sums the divergence. The backward pass recomputes
each chunk's logits; only the student gets a gradient.

Every divergence here is a sum over ids of `f(log p, log q)`, p the student's and q the teacher's probability. With
`g = df/dp`, its derivative with respect to the student's logit k is `p_k (g_k - s)` where `s = sum_v p_v g_v`.

Axes: B rows, T time, C tokens at a time, V vocabulary, p parts of the vocabulary, W ids of a chunk, s
shards of the rows, D model width (the student's), Te teacher's width.
"""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from tunix.models.token_logprobs import (
    LEAST,
    NEVER,
    LogitScaling,
    LogSumExp,
    Visit,
    block_length,
    chunk_logits,
    gradients,
    ids_of,
    in_chunks,
    in_pieces,
    in_rows,
    over_blocks,
    pick,
    place_of,
    taken_in,
    visit_of,
)
from tunix.types import Compared, Divergence

LEAST_STORED = 1e-6
"""As `LEAST`, where it is what stored probabilities leave of 1, which are rounded to as much."""


class Side(NamedTuple):
    """One of the two models, at the tokens that are compared."""

    hidden: Float[Array, "B T D"]
    """States that predict the targets (already shifted)."""
    table: Float[Array, "V D"]
    """The head, in the compute dtype; logits are float32."""
    softcap: float | None
    """`softcap * tanh(logits / softcap)` (Gemma 2), or None."""


class Stored(NamedTuple):
    """What a teacher said in advance: its log-probs of some ids, all others being one bucket."""

    ids: Int[Array, "B T A"]
    """The ids, which may repeat; -1 for none."""
    logprobs: Float[Array, "B T A"]
    """Their log-probs in nats."""


class _Pair(NamedTuple):
    """The settings that are known when a program is compiled."""

    student: LogitScaling
    teacher: LogitScaling | None
    """None for a teacher that is stored."""
    settings: Divergence

    @property
    def has_rest(self) -> bool:
        """Whether ids are one bucket."""
        return self.teacher is None or self.settings.top_k > 0


class _Results(NamedTuple):
    """The sweeps' results: for each token of a block `[B C]`, then for all in visiting order `[B places]`."""

    divergence: jax.Array
    taken: jax.Array
    """The teacher's log-prob of the target."""
    agree: jax.Array
    """1 where both have the same most likely id."""
    student: LogSumExp
    teacher: LogSumExp
    mean: jax.Array
    """`s`: the mean of g under the student."""
    least: jax.Array
    """The teacher's logit from which on an id is among the k most likely."""
    rest: jax.Array
    """Log of the student's probability of all other ids together."""
    pull: jax.Array
    """`p g` of all other ids together."""


@jax.named_scope("head")
def compared(
    student: Side, teacher: Side | Stored, targets: Int[Array, "B T"], needed: Bool[Array, "B T"], settings: Divergence
) -> Compared:
    """The divergence of teacher and student at each token, both at `settings.temperature` over the ids that both have.

    forward_kl: `KL(q || p) = sum_v q_v log(q_v / p_v)`, q the teacher's distribution and p the student's.
    reverse_kl: `KL(p || q)`.
    jsd: `beta KL(q || m) + (1 - beta) KL(p || m)` with `m = beta q + (1 - beta) p` (generalised Jensen-Shannon, Agarwal
    et al. 2023, https://arxiv.org/abs/2306.13649, eq. 1). Divided by beta it tends to forward_kl for beta -> 0, divided
    by 1 - beta to reverse_kl for beta -> 1; at either end itself it is 0, so the two are named instead.

    With `top_k` the teacher's k most likely ids (and what ties with the last one) are counted one by one, all others
    as one bucket. That is a divergence again: never above the full one, 0 where p and q agree on the k ids. So are the
    ids of a `Stored` teacher, whatever `top_k` is; its log-probs are at temperature 1.

    Returns:
        float32 `[B T]` each, 0 where not needed; only the divergence has a gradient, with respect to the student alone.
    """
    sides = [side for side in (student, teacher) if isinstance(side, Side)]
    vocab = min(len(side.table) for side in sides)
    scalings = [LogitScaling(side.softcap, settings.temperature, vocab) for side in sides]
    pair = _Pair(scalings[0], scalings[1] if isinstance(teacher, Side) else None, settings)
    table, *tables = (side.table[:vocab] for side in sides)
    theirs = teacher.hidden if isinstance(teacher, Side) else teacher
    hidden, theirs, wanted, visited = jax.tree.map(in_pieces, (student.hidden, theirs, targets, needed))
    results = _compared(pair, hidden, table, theirs, tables, wanted, visited)
    return Compared(*(in_rows(x, *targets.shape) for x in cast(tuple[jax.Array, ...], results)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compared(pair, hidden, table, teacher, tables, targets, needed):
    visit, chunks = visit_of(needed), [in_chunks(x, needed.shape) for x in (table, *tables)]
    return _in_place(_values(pair, (hidden, teacher), chunks, targets, visit), visit, needed)


def _in_place(results: _Results, visit: Visit, needed: jax.Array) -> tuple[jax.Array, ...]:
    """The fields of `Compared`, each token back in its place; 0 where not needed."""
    fields = (results.divergence, results.taken, results.agree)
    return tuple(jnp.where(needed, pick(x, visit.back), 0.0) for x in fields)


def _values(pair: _Pair, states, chunks, targets: jax.Array, visit: Visit) -> _Results:
    """The results of both sweeps over every block of tokens."""

    def block_of(order):
        student, teacher = jax.tree.map(lambda x: pick(x, order), states)
        return _block(pair, (student, teacher), chunks, pick(targets, order))

    empty = jnp.zeros(visit.order.shape, jnp.float32)
    nothing = LogSumExp(empty, empty)
    start = _Results(empty, empty, empty, nothing, nothing, empty, empty, empty, empty)
    return over_blocks(visit, block_length(*targets.shape), block_of, start)


def _block(pair: _Pair, states, chunks, wanted: jax.Array) -> _Results:
    """The results of both sweeps of the vocabulary for one block of tokens."""
    vocab, zero = pair.student.vocab, jnp.zeros(wanted.shape, jnp.float32)

    def first(index, running):
        sums, taken, highest = running
        z, y, _ = _both(pair, states, chunks, index)
        ids = ids_of(chunks[0], vocab, index).ravel()
        flat = [logits.reshape(*logits.shape[:2], -1) for logits in (z, y)]  # a chunk's parts along one axis
        sums = tuple(_joined(sum_, logits, ids) for sum_, logits in zip(sums, flat, strict=True))
        taken = taken + jnp.sum(jnp.where(taken_in(wanted, chunks[0], vocab, index), y, 0.0), (-2, -1))
        if pair.settings.top_k and pair.teacher is not None:
            highest = jax.lax.top_k(jnp.concatenate([highest, flat[1]], -1), highest.shape[-1])[0]
        return sums, taken, highest

    nothing = (zero + NEVER, zero, jnp.zeros(wanted.shape, jnp.int32))
    highest = jnp.full((*wanted.shape, pair.settings.top_k + 1), NEVER)
    sums, taken, highest = jax.lax.fori_loop(0, len(chunks[0]), first, ((nothing, nothing), zero, highest))
    (top, total, best), (teacher_top, teacher_total, teacher_best) = sums
    masses = LogSumExp(top, jnp.log(total)), LogSumExp(teacher_top, jnp.log(teacher_total))
    if pair.teacher is None:
        masses = masses[0], LogSumExp(zero, zero)  # log-probs, not logits
    taken = masses[1].log_p(taken)
    # Halfway between the k-th and the next: rounding that differs between sweeps does not move an id across.
    least = 0.5 * (highest[..., -2] + highest[..., -1]) if pair.settings.top_k else zero + NEVER
    if pair.teacher is None:
        least = zero + NEVER / 2

    def second(index, running):
        z, y, _ = _both(pair, states, chunks, index)
        log_p, log_q = (mass.per_id().log_p(logits) for mass, logits in zip(masses, (z, y), strict=True))
        parts = _summands(pair.settings, log_p, log_q)
        if pair.has_rest:
            inside = y >= least[..., None, None]
            # Of the teacher's ids that are not stored only their sum is known: what the others leave.
            of_teacher = jnp.where(inside, -jnp.exp(log_q) if pair.teacher is None else 0.0, jnp.exp(log_q))
            others = (jnp.where(inside, 0.0, jnp.exp(log_p)), of_teacher)
            parts = (*(jnp.where(inside, x, 0.0) for x in parts), *others)
        return tuple(old + jnp.sum(x, (-2, -1)) for old, x in zip(running, parts, strict=True))

    sums = (zero,) * (2 if not pair.has_rest else 4)
    if pair.teacher is None:
        sums = (zero, zero, zero, zero + 1.0)
    divergence, mean, *rests = jax.lax.fori_loop(0, len(chunks[0]), second, sums)
    log_rest = rest_pull = zero
    if pair.has_rest:
        least_rest = LEAST if pair.teacher is not None else LEAST_STORED
        log_rest, teacher_log_rest = (
            jnp.log(jnp.maximum(x, y)) for x, y in zip(rests, (LEAST, least_rest), strict=True)
        )
        rest_f, rest_pull = _summands(pair.settings, log_rest, teacher_log_rest)
        divergence, mean = divergence + rest_f, mean + rest_pull
    agree = (best == teacher_best).astype(jnp.float32)
    return _Results(divergence, taken, agree, masses[0], masses[1], mean, least, log_rest, rest_pull)


def _both(pair: _Pair, states, chunks, index) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Student's and teacher's logits `[B C p W]` of a chunk, and the derivative of the student's by their product."""
    z, slope = chunk_logits(pair.student, states[0], chunks[0], index)
    if pair.teacher is not None:
        return z, chunk_logits(pair.teacher, states[1], chunks[1], index)[0], slope
    ids, logprobs = states[1]
    chunk, part, inside = place_of(ids, chunks[0], pair.student.vocab)
    # What is not in this chunk is written beyond its end, that is nowhere.
    inside = jnp.where((chunk == index) & (ids >= 0), inside, z.shape[-1])
    rows, places = jnp.ogrid[: z.shape[0], : z.shape[1]]
    y = jnp.full(z.shape, NEVER).at[rows[..., None], places[..., None], part, inside].set(logprobs, mode="drop")
    return z, y, slope


def _joined(running, logits: Float[Array, "B C chunk"], ids: Int[Array, "chunk"]) -> tuple[jax.Array, ...]:
    """The largest logit so far, the sum of exponentials relative to it, and its id."""
    top, total, best = running
    highest = jnp.max(logits, -1)
    new = jnp.maximum(top, highest)
    total = total * jnp.exp(top - new) + jnp.sum(jnp.exp(logits - new[..., None]), -1)
    id_here = ids[jnp.argmax(logits, -1)]
    return new, total, jnp.where(highest > top, id_here, best)


def _summands(settings: Divergence, log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`f` and `p g` of each id. Constants in g are left out: they cancel in `g - s`."""
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if settings.kind == "forward_kl":
        return q * (log_q - log_p), -q
    if settings.kind == "reverse_kl":
        both = p * (log_p - log_q)
        return both, both
    log_m = jnp.logaddexp(np.log(settings.beta) + log_q, np.log1p(-settings.beta) + log_p)
    pull = (1 - settings.beta) * p * (log_p - log_m)
    return settings.beta * q * (log_q - log_m) + pull, pull


def _forward(pair, *arguments):
    trained = arguments[1].perturbed
    is_leaf = lambda x: hasattr(x, "perturbed")  # noqa: E731
    hidden, table, teacher, tables, targets, needed = jax.tree.map(lambda x: x.value, arguments, is_leaf=is_leaf)
    visit, chunks = visit_of(needed), [in_chunks(x, needed.shape) for x in (table, *tables)]
    results = _values(pair, (hidden, teacher), chunks, targets, visit)
    # Only arrays can be saved: () stands for a table that trains, None for one that is frozen under an adapter.
    saved = ((hidden, teacher), chunks, needed, visit, results, () if trained else None)
    return _in_place(results, visit, needed), saved


def _backward(pair, saved, cotangents):
    """Gradients with respect to the student's states and, where it trains, its table."""
    states, chunks, needed, visit, results, trained = saved
    zero = isinstance(cotangents[0], SymbolicZero)
    cotangent = jnp.zeros(needed.shape) if zero else jnp.where(needed, cotangents[0], 0.0)

    def d_logits_of(order, h, real, sliced):
        block_results = jax.tree.map(sliced, results)
        d = jnp.where(real, pick(cotangent, order), 0.0)[..., None, None]
        block_states = (h, jax.tree.map(lambda x: pick(x, order), states[1]))

        def of_chunk(index):
            """Derivatives of the divergence with respect to the student's product of state and table."""
            z, y, slope = _both(pair, block_states, chunks, index)
            log_p = block_results.student.per_id().log_p(z)
            pull = _summands(pair.settings, log_p, block_results.teacher.per_id().log_p(y))[1]
            if pair.has_rest:
                share = jnp.exp(log_p - block_results.rest[..., None, None])
                inside = y >= block_results.least[..., None, None]
                pull = jnp.where(inside, pull, share * block_results.pull[..., None, None])
            return d * ((pull - jnp.exp(log_p) * block_results.mean[..., None, None]) * slope)

        return of_chunk

    vocab, trains = pair.student.vocab, trained is not None
    d_hidden, d_table = gradients(states[0], chunks[0], needed, visit, vocab, trains, d_logits_of)
    nothing = np.zeros(needed.shape, jax.dtypes.float0)
    return d_hidden, d_table, None, None, nothing, nothing


_compared.defvjp(_forward, _backward, symbolic_zeros=True)
