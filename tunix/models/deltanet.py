"""The mixer of Qwen 3.5's linear layers: a Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464).

Projections -> a short causal convolution and SiLU -> queries and keys of unit length -> the gated delta rule -> a norm
of each head, times SiLU(z) -> the output. Training and prefill compute it in chunks; a slot that decodes holds a state
and the last inputs of the convolution, however long its sequence is.

    beta = sigmoid(x W_beta),   g = -exp(A) softplus(x W_g + bias),   y = (norm(o) silu(x W_z)) W_o

The gated delta rule has a state `S` per head in place of a cache. Each token decays the state, then replaces what is
stored under its key by its value, as far as `beta` says:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q.

`recurrent` computes it token by token, `chunked` in chunks of tokens, whose products with each other are matrices (the
WY form of section 3.3). In packed rows a segment never sees another: a chunk passes on the state of the segment that
its last token belongs to, tokens of other segments neither read nor change it, and pairs of tokens of two segments are
masked. A segment may continue an earlier one, as answers in one row continue their prompt (`types.Batch`): it starts
from that one's state. `convolved` is the short causal convolution before it, whose taps stop at a segment's start
likewise. The rule and the convolution are computed in float32.

Axes: B rows, T time, C tokens at a time, D model width, Sl slots, Hk key heads, Jv value heads of a key head, Dk width
of a key, Dv width of a value, U runs of a key head's channels, s shards of the rows.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Shaped

from tunix.config import DType
from tunix.mesh import Axes, constrain, platform
from tunix.models.attention.inputs import Segments
from tunix.models.config import DecoderConfig, DeltaNet
from tunix.models.layers import Matrix, Norm, Projection, TokenKeys

CHUNKS = {"cpu": 32, "gpu": 64, "tpu": 64}
"""Tokens of a chunk in packed rows, by platform: on a CPU 32 take 0.6 to 0.9 times as long as 64
(`benchmarks.mixers`)."""
State = Float[Array, "B Hk Jv Dk Dv"]
# On GPUs and TPUs float32 products are rounded to fewer bits otherwise, and states add the errors of all tokens up.
_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Gates(NamedTuple):
    """What each token does to the state."""

    decay: Float[Array, "B T Hk Jv"]
    """g: the logarithm of what is left of it; at most 0."""
    beta: Float[Array, "B T Hk Jv"]
    """How much of what is stored under the key is replaced, between 0 and 1."""


class Branches(NamedTuple):
    """Segments that continue another one, which several may: its state is kept beside the present one, for the latest
    segment that is no branch (the root)."""

    from_root: Bool[Array, "B c C"]
    """Tokens that see the root's state from before the chunk, instead of the present one."""
    root: Int[Array, "B c"]
    """The last token of a root in the chunk, or some other where `any_root` is False."""
    any_root: Bool[Array, "B c"]


class Chunks(NamedTuple):
    """Which tokens of chunks see each other and the state, as segments have it."""

    pairs: Bool[Array, "B c C C"]
    """Whether a token sees another of its chunk: an earlier one of its segment, or of that which it continues, or
    itself."""
    carried: Bool[Array, "B c C"]
    """Tokens that see the state from before the chunk."""
    branches: Branches | None = None

    @classmethod
    def packed(cls, ids: Int[Array, "B T"], parents: Int[Array, "B T"] | None, size: int) -> "Chunks":
        """Those of packed rows, whose length is a multiple of `size`; `parents` as in `types.Batch`."""
        rows = ids.reshape(len(ids), -1, size)
        earlier = jnp.tri(size, dtype=bool)
        before = _before(rows[..., -1])
        same = rows[..., :, None] == rows[..., None, :]
        if parents is None:
            return cls(same & earlier, rows == before)
        above = parents.reshape(rows.shape)
        carried = (rows == before) | (above == before)
        last = _last_root(ids, parents).reshape(rows.shape)[..., -1]  # of the row up to each chunk's end
        root = jnp.take_along_axis(ids, jnp.maximum(last, 0), axis=1)
        from_root = ~carried & (above == _before(jnp.where(last >= 0, root, -1)))
        offset = last - jnp.arange(last.shape[1]) * size
        branches = Branches(from_root, jnp.maximum(offset, 0), offset >= 0)
        return cls((same | (above[..., :, None] == rows[..., None, :])) & earlier, carried, branches)

    @classmethod
    def aligned(cls, ids: Int[Array, "B T"], size: int) -> "Chunks":
        """Those of segments that each begin with a chunk of their own; padding follows them."""
        real = ids.reshape(len(ids), -1, size) > 0
        return cls(real[..., None, :] & jnp.tri(size, dtype=bool), jnp.ones_like(real))


def _before(of_chunk: Int[Array, "B c"]) -> Int[Array, "B c 1"]:
    """For each chunk what the one before it has; -1 for the first."""
    return jnp.pad(of_chunk[:, :-1], ((0, 0), (1, 0)), constant_values=-1)[..., None]


def _last_root(ids: Int[Array, "B T"], parents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The index of the last token up to each one whose segment is no branch; -1 where there is none."""
    index = jnp.where((parents == ids) & (ids > 0), jnp.arange(ids.shape[1]), -1)
    return jax.lax.cummax(index, axis=1)


def before_each(ids: Int[Array, "B T"], parents: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """The index of the token before each one in its sequence; -1 for a sequence's first token."""
    start: jax.Array | int = -1
    if parents is not None:  # what goes on behind other segments: a branch, or a trunk
        root = _later(_last_root(ids, parents), 1, -1)
        start = jnp.where(jnp.take_along_axis(ids, jnp.maximum(root, 0), axis=1) == parents, root, -1)
    return jnp.where(_later(ids, 1, -1) == ids, jnp.arange(ids.shape[1]) - 1, start)


class Begins(NamedTuple):
    """Chunks that begin a segment, with the state from before it."""

    starts: Bool[Array, "B c"]
    states: Float[Array, "B c Hk Jv Dk Dv"]


def chunked(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hk Jv Dv"],
    gates: Gates,
    chunks: Chunks,
    begins: Begins | None = None,
) -> tuple[Float[Array, "B T Hk Jv Dv"], Float[Array, "B c Hk Jv Dk Dv"] | None]:
    """What each token reads; with `begins` also the state after each chunk.

    Args:
        q: scaled queries of unit length; T is a multiple of C.
        k: keys of unit length.
        v: values.
        gates: of the tokens; of padding both are 0.
        chunks: which tokens see each other.
        begins: states of earlier tokens; without, all segments start with a state of zeros.
    """
    size = chunks.pairs.shape[-1]
    q, k = (_heads_first(x, size, 1) for x in (q, k))
    v, decay, beta = (_heads_first(x, size, 2) for x in (v, gates.decay, gates.beta))
    # [B c Hk Jv C]: the logarithm of what is left at a token of the state that it sees from before its chunk.
    total = _product("Bcij,BcKJj->BcKJi", chunks.pairs.astype(jnp.float32), decay)
    pairs = chunks.pairs[:, :, None, None]
    between = jnp.exp(jnp.where(pairs, total[..., :, None] - total[..., None, :], -jnp.inf))
    seen = _product("BcKid,BcKjd->BcKij", q, k)[:, :, :, None] * between
    overlap = beta[..., None] * _product("BcKid,BcKjd->BcKij", k, k)[:, :, :, None] * between
    left = jnp.exp(total) * chunks.carried[..., None, None, :]
    if chunks.branches is not None:
        left += jnp.exp(total) * chunks.branches.from_root[..., None, None, :]
    wanted = jnp.concatenate([beta[..., None] * v, (beta * left)[..., None] * k[:, :, :, None]], axis=-1)
    new, read = jnp.split(_solved(overlap, wanted), [v.shape[-1]], axis=-1)
    inputs = (new, read, left[..., None] * q[:, :, :, None], seen, k, between, left, chunks.branches, begins)
    start = jnp.zeros((v.shape[0], *v.shape[2:4], k.shape[-1], v.shape[-1]), jnp.float32)
    kept = None if chunks.branches is None else start
    _, (mixed, states) = jax.lax.scan(_chunk, (start, kept), jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
    mixed = mixed.transpose(1, 0, 4, 2, 3, 5)  # from [c B Hk Jv C Dv]
    return mixed.reshape(len(mixed), -1, *mixed.shape[3:]), None if states is None else jnp.moveaxis(states, 0, 1)


def _chunk(states: tuple[State, State | None], inputs: tuple) -> tuple[tuple, tuple[jax.Array, State | None]]:
    """The states after a chunk, the present one and the root's, and what its tokens read."""
    (state, root), (new, read, queries, seen, k, between, left, branches, begins) = states, inputs
    if begins is not None:
        state = by_first(begins.starts, begins.states, state)

    def seen_before(rows: Float[Array, "B Hk Jv C Dk"]) -> Float[Array, "B Hk Jv C Dv"]:
        """Products with the state that each token sees."""
        present = _product("BKJid,BKJdv->BKJiv", rows, state)
        if branches is None or root is None:
            return present
        return jnp.where(
            branches.from_root[..., None, None, :, None], _product("BKJid,BKJdv->BKJiv", rows, root), present
        )

    new = new - seen_before(read)
    mixed = seen_before(queries) + _product("BKJij,BKJjv->BKJiv", seen, new)

    def after(of_token: Callable[[Array], Array]) -> State:
        """The state after a token of each row, which a function takes out of `[B C ...]`."""
        shares, lasts = (of_token(jnp.moveaxis(x, 3, 1)) for x in (between, left))
        start = state
        if branches is not None and root is not None:
            start = by_first(of_token(branches.from_root), root, state)
        keys = shares[..., None] * k[:, :, None]
        return lasts[..., None, None] * start + _product("BKJid,BKJiv->BKJdv", keys, new)

    last = after(lambda x: x[:, -1])
    if branches is not None and root is not None:
        at = branches.root[:, None]
        ended = after(lambda x: jnp.take_along_axis(x, widened(at, x), axis=1)[:, 0])
        root = by_first(branches.any_root, ended, root)
    return (last, root), (mixed, None if begins is None else last)


@jax.custom_vjp
def _solved(below: Float[Array, "*at C C"], wanted: Float[Array, "*at C n"]) -> Float[Array, "*at C n"]:
    """x of `(1 + below) x = wanted`, where only what is below the diagonal counts.

    By products of matrices: XLA's triangular solve has waited for itself for ever in a program on a CPU with two cores.
    """
    return _solved_forward(below, wanted)[0]


def _solved_forward(below: jax.Array, wanted: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _inverse(below)
    solution = _product("...ij,...jn->...in", inverse, wanted)
    return solution, (inverse, solution)


def _solved_backward(saved: tuple[jax.Array, jax.Array], d_solution: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, solution = saved
    d_wanted = _product("...ji,...jn->...in", inverse, d_solution)
    return jnp.tril(-_product("...in,...jn->...ij", d_wanted, solution), -1), d_wanted


_solved.defvjp(_solved_forward, _solved_backward)


def _inverse(below: Float[Array, "*at C C"]) -> Float[Array, "*at C C"]:
    """The inverse of `1 + below`; C is a power of two.

    From blocks to blocks twice as large, `[[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]`: as exact as forward
    substitution, unlike the product of the powers of `below`. Where keys repeat, these are large and cancel.
    """
    length = below.shape[-1]
    assert length & (length - 1) == 0, "chunks are halved"
    inverse, size = jnp.ones((*below.shape[:-1], 1, 1), below.dtype), 1
    while size < length:
        blocks = below.reshape(*below.shape[:-2], length // (2 * size), 2 * size, length // (2 * size), 2 * size)
        lower = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product("...ij,...jk,...kl->...il", second, lower, first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def widened(x: jax.Array, like: jax.Array) -> jax.Array:
    """The same with as many axes as another array, of which the last have one place."""
    return x.reshape(*x.shape, *(1,) * (like.ndim - x.ndim))


def by_first(condition: jax.Array, chosen: jax.Array, other: jax.Array | float) -> jax.Array:
    """`jnp.where` for a condition of the first axes alone."""
    return jnp.where(widened(condition, chosen), chosen, other)


def _heads_first(x: Float[Array, "B T *heads_and_width"], size: int, heads: int) -> jax.Array:
    """`[B T heads ...]` as `[B c heads C ...]` in float32: the tokens of a chunk stand after the heads."""
    x = x.astype(jnp.float32).reshape(len(x), -1, size, *x.shape[2:])
    return jnp.moveaxis(x, 2, 2 + heads)


def recurrent(
    q: Float[Array, "B Hk Dk"],
    k: Float[Array, "B Hk Dk"],
    v: Float[Array, "B Hk Jv Dv"],
    decay: Float[Array, "B Hk Jv"],
    beta: Float[Array, "B Hk Jv"],
    state: State,
) -> tuple[Float[Array, "B Hk Jv Dv"], State]:
    """What one token of each row reads, and the state after it."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    state = jnp.exp(decay)[..., None, None] * state
    stored = jnp.sum(state * k[:, :, None, :, None], axis=-2)
    change = beta[..., None] * (v - stored)
    state = state + k[:, :, None, :, None] * change[..., None, :]
    return jnp.sum(state * q[:, :, None, :, None], axis=-2), state


def unit(x: Float[Array, "*at Dk"]) -> jax.Array:
    """Vectors of unit length, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def convolved(
    x: Float[Array, "B T *channels"],
    taps: Float[Array, "*channels n"],
    ids: Int[Array, "B T"],
    parents: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T *channels"]:
    """Each channel's sum over its last `n` tokens of the same segment, times its taps, the present token's last.

    Args:
        x: the channels.
        taps: of each channel.
        ids: the segment of each token.
        parents: see `types.Batch`: a branch is preceded by the tokens of its parent.
    """
    x32, taps = x.astype(jnp.float32), taps.astype(jnp.float32)
    total = x32 * taps[..., -1]
    before = at = None
    if parents is not None:
        before = at = before_each(ids, parents)
    for lag in range(1, taps.shape[-1]):
        if before is None or at is None:
            same, earlier = _later(ids, lag, -1) == ids, _later(x32, lag, 0)
        else:
            same, index = at >= 0, jnp.maximum(at, 0)
            earlier = jnp.take_along_axis(x32, widened(index, x), axis=1)
            at = jnp.where(same, jnp.take_along_axis(before, index, axis=1), -1)
        total += by_first(same, earlier, 0.0) * taps[..., -1 - lag]
    return total


def _later(x: Shaped[Array, "B T *rest"], lag: int, first: int) -> Shaped[Array, "B T *rest"]:
    """Each token's place has what stood so many tokens before it."""
    return jnp.pad(x, ((0, 0), (lag, 0), *((0, 0),) * (x.ndim - 2)), constant_values=first)[:, : x.shape[1]]


def convolved_after(
    x: Float[Array, "B C *channels"], taps: Float[Array, "*channels n"], before: Float[Array, "B m *channels"]
) -> Float[Array, "B C *channels"]:
    """As `convolved`, for tokens of one segment a row whose `n - 1` earlier ones are `before`."""
    whole, taps = jnp.concatenate([before, x], axis=1).astype(jnp.float32), taps.astype(jnp.float32)
    lags = [whole[:, lag : lag + x.shape[1]] * taps[..., lag] for lag in range(taps.shape[-1])]
    return jnp.sum(jnp.stack(lags), axis=0)


PIECE_CHUNK = 32
"""Tokens of a chunk in a piece of prompts, in which each segment begins with a chunk of its own."""


class SlotStates(NamedTuple):
    """What slots hold of their sequences in one layer."""

    inputs: Float[Array, "Sl m Hk U Dk"]
    """The last inputs of the convolution, the latest last; m is one less than its taps."""
    states: Float[Array, "Sl Hk Jv Dk Dv"]
    """In float32."""

    @classmethod
    def empty(cls, sizes: DeltaNet, slots: int, dtype: DType) -> "SlotStates":
        """What slots hold of sequences without tokens."""
        heads, of_head = sizes.key_heads, sizes.value_heads // sizes.key_heads
        inputs = jnp.zeros((slots, sizes.taps - 1, *sizes.runs), dtype)
        states = jnp.zeros((slots, heads, of_head, sizes.key_dim, sizes.value_dim), jnp.float32)
        return cls(inputs, states).placed()

    def placed(self) -> "SlotStates":
        """The same, split over the devices as slots and heads are."""
        return SlotStates(*(constrain(x, *axes) for x, axes in zip(self, STATE_AXES, strict=True)))


STATE_AXES: tuple[Axes, Axes] = (("rows", None, "heads", None, None), ("rows", "heads", None, None, None))
"""The logical axes of the arrays of `SlotStates`."""


class StatesAhead(NamedTuple):
    """What slots hold in one layer after each of several new tokens, of which a first few will stand."""

    inputs: Float[Array, "Sl m+C Hk U Dk"]
    """Those of `SlotStates` before the new tokens, and the new ones after them."""
    states: Float[Array, "Sl 1+C Hk Jv Dk Dv"]
    """Before the new tokens, and after each."""

    def after(self, number: Int[Array, "Sl"]) -> SlotStates:
        """What slots hold after the first so many of the new tokens; 0 for what they held before."""
        lags = self.inputs.shape[1] - self.states.shape[1] + 1
        columns = widened(number[:, None] + jnp.arange(lags), self.inputs)
        inputs = jnp.take_along_axis(self.inputs, columns, axis=1)
        states = jnp.take_along_axis(self.states, widened(number[:, None], self.states), axis=1)[:, 0]
        return SlotStates(inputs, states).placed()


class StepView(NamedTuple):
    """One new token of each slot, or several: then a layer returns its `StatesAhead`."""

    live: Bool[Array, "Sl"]
    """Whether the slot takes it: what others hold stays as it is."""


class PieceStates(NamedTuple):
    """Pieces of prompts, packed in rows: each segment begins with a chunk, after what its slot holds."""

    ids: Int[Array, "s C"]
    """The segment of each token, 0 for padding."""
    sources: Int[Array, "s c"]
    """For a chunk that begins a segment the slot, within its shard, that holds what comes before; -1 for a sequence's
    first tokens, -2 for a chunk that continues the one before."""
    ends: Int[Array, "Sl"]
    """The token, within the row of its shard, that a slot has last; -1 to leave what it holds."""


View = Segments | StepView | PieceStates


class GatedDeltaNet(nnx.Module):
    """The mixer; its projections are attributes, named as the parameters are."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        assert config.delta is not None, "its sizes come with the layers"
        c = self.sizes = config.delta
        d, heads, values = config.d_model, ("embed", "heads", None), (c.value_heads, c.value_dim)
        self.qkv = Projection("BTD,Dkuc->BTkuc", (d, *c.runs), (*heads, None), rngs, contracted=1)
        self.z = Projection("BTD,Dhv->BThv", (d, *values), heads, rngs, contracted=1)
        self.beta = Projection("BTD,Dh->BTh", (d, c.value_heads), heads[:2], rngs, contracted=1)
        self.decay = Projection("BTD,Dh->BTh", (d, c.value_heads), heads[:2], rngs, contracted=1)
        self.out = Projection("BThv,hvD->BTD", (*values, d), ("heads", "head", "embed"), rngs, contracted=2)
        # Each channel's taps of the convolution, the present token's last.
        taps = jax.random.uniform(rngs.params(), (*c.runs, c.taps), jnp.float32, -1.0, 1.0) * c.taps**-0.5
        self.conv = Matrix(nnx.Param(taps, axes=("heads", None, None, None)))
        self.rate = Rate(c, rngs)
        self.out_norm = Norm(c.value_dim, "head", eps=config.norm_eps, offset=False)

    @jax.named_scope("deltanet")
    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: tuple[jax.Array, jax.Array],
        view: View,
        cache: SlotStates | None = None,
        dropout_keys: TokenKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], SlotStates | StatesAhead | None]:
        """The mixed tokens for normed inputs, and what the slots hold then; `rope` plays no part."""
        mixed_in = checkpoint_name(self.qkv(x, dropout_keys), "q")
        z = checkpoint_name(self.z(x, dropout_keys), "gate")
        c = self.sizes
        beta, step = self.beta(x, dropout_keys), self.decay(x, dropout_keys)
        decay = -jnp.exp(self.rate.a_log[...].astype(jnp.float32)) * jax.nn.softplus(
            step.astype(jnp.float32) + self.rate.bias[...].astype(jnp.float32)
        )
        shape = (*x.shape[:2], c.key_heads, -1)
        gates = Gates(decay.reshape(shape), jax.nn.sigmoid(beta.astype(jnp.float32)).reshape(shape))
        if not isinstance(view, StepView):  # padding leaves the state as it is
            gates = jax.tree.map(lambda x: jnp.where(view.ids[..., None, None] > 0, x, 0.0), gates)
        held: SlotStates | StatesAhead | None = None
        if isinstance(view, Segments):
            mixed = self._packed(mixed_in, gates, view)
        elif isinstance(view, PieceStates):
            assert cache is not None, "a piece comes with what the slots hold"
            mixed, held = self._piece(mixed_in, gates, view, cache)
        else:
            assert cache is not None, "a step comes with what the slots hold"
            mixed, held = self._step(mixed_in, gates, view, cache)
        mixed = self.out_norm(mixed.reshape(z.shape)) * jax.nn.silu(z.astype(jnp.float32))
        return self.out(mixed.astype(x.dtype), dropout_keys), held

    def _heads(self, mixed: Float[Array, "B T Hk U Dk"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of the convolution's outputs."""
        c = self.sizes
        # In the dtype of the model, as what comes out of a kernel of this convolution is.
        mixed = jax.nn.silu(mixed)
        q, k, v = mixed[..., 0, :], mixed[..., 1, :], mixed[..., 2:, :]
        v = v.reshape(*q.shape[:-1], -1, c.value_dim)
        return unit(q) * c.key_dim**-0.5, unit(k), v

    def _packed(self, mixed: Float[Array, "B T Hk U Dk"], gates: Gates, view: Segments) -> jax.Array:
        """The mixed tokens of packed rows, in which every segment is a whole sequence."""
        length = mixed.shape[1]
        size = min(CHUNKS[platform()], 1 << (length - 1).bit_length())
        over = -length % size
        # A row's chunks follow each other: a device has all of them, however the tokens are split elsewhere.
        mixed = constrain(mixed, "rows", None, "heads", None, None)
        mixed, ids, parents, gates = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, over), *((0, 0),) * (x.ndim - 2))), (mixed, view.ids, view.parents, gates)
        )
        q, k, v = self._heads(convolved(mixed, self.conv.w[...], ids, parents).astype(mixed.dtype))
        read, _ = chunked(q, k, v, gates, Chunks.packed(ids, parents, size))
        return read[:, :length]

    def _piece(
        self, mixed: Float[Array, "s C Hk U Dk"], gates: Gates, view: PieceStates, held: SlotStates
    ) -> tuple[jax.Array, SlotStates]:
        """The mixed tokens of pieces, and what the slots hold after them."""
        rows, length = view.ids.shape
        size, slots = length // view.sources.shape[1], len(held.states) // rows
        begins = view.sources >= -1
        inputs, states = (x.reshape(rows, slots, *x.shape[1:]) for x in held)
        # What the slots of a row's chunks hold; zeros where no slot is named.
        sources = jnp.maximum(view.sources, 0)
        before, states_before = (
            by_first(view.sources >= 0, jnp.take_along_axis(x, widened(sources, x), axis=1), 0.0)
            for x in (inputs, states)
        )
        blocks = mixed.reshape(rows, -1, size, *mixed.shape[2:])
        lags = before.shape[2]
        follow = jnp.pad(blocks[:, :-1, size - lags :], ((0, 0), (1, 0), *((0, 0),) * 4))
        before = by_first(begins, before, follow)
        whole = jnp.concatenate([before, blocks], axis=2)
        flat = (blocks.reshape(-1, *blocks.shape[2:]), before.reshape(-1, *before.shape[2:]))
        q, k, v = self._heads(convolved_after(flat[0], self.conv.w[...], flat[1]).astype(mixed.dtype))
        q, k, v = (x.reshape(rows, length, *x.shape[2:]) for x in (q, k, v))
        read, after = chunked(q, k, v, gates, Chunks.aligned(view.ids, size), Begins(begins, states_before))
        assert after is not None, "chunks that begin with states have states after them"
        ends = view.ends.reshape(rows, slots)
        chunk, place = jnp.maximum(ends, 0) // size, jnp.maximum(ends, 0) % size
        last = jnp.take_along_axis(whole, widened(chunk, whole), axis=1)
        columns = widened(place[..., None] + 1 + jnp.arange(lags), whole)
        new = SlotStates(
            jnp.take_along_axis(last, columns, axis=2), jnp.take_along_axis(after, widened(chunk, after), axis=1)
        )
        before = SlotStates(inputs, states)
        kept = jax.tree.map(lambda x, y, z: by_first(ends >= 0, x, y).reshape(z.shape), new, before, held)
        return read, kept.placed()

    def _step(
        self, mixed: Float[Array, "Sl C Hk U Dk"], gates: Gates, view: StepView, held: SlotStates
    ) -> tuple[jax.Array, SlotStates | StatesAhead]:
        """The mixed tokens of each slot, and what the slots hold after them: after each where there are several."""
        q, k, v = self._heads(convolved_after(mixed, self.conv.w[...], held.inputs).astype(mixed.dtype))
        inputs = jnp.concatenate([held.inputs, mixed.astype(held.inputs.dtype)], axis=1)
        reads, states = [], [held.states]
        for token in range(mixed.shape[1]):
            decay, beta = gates.decay[:, token], gates.beta[:, token]
            read, after = recurrent(q[:, token], k[:, token], v[:, token], decay, beta, states[-1])
            reads.append(read)
            states.append(after)
        if len(reads) > 1:
            return jnp.stack(reads, axis=1), StatesAhead(inputs, jnp.stack(states, axis=1))
        new = jax.tree.map(partial(by_first, view.live), SlotStates(inputs[:, 1:], states[1]), held)
        return reads[0][:, None], new.placed()


class Rate(nnx.Module):
    """How fast each head's state decays: `A` is exp(a_log), uniform at first, and `bias` is added to the step."""

    def __init__(self, sizes: DeltaNet, rngs: nnx.Rngs):
        rates = jax.random.uniform(rngs.params(), (sizes.value_heads,), jnp.float32, 0.01, 16.0)
        self.a_log = nnx.Param(jnp.log(rates), axes=("heads",))
        self.bias = nnx.Param(jnp.ones((sizes.value_heads,), jnp.float32), axes=("heads",))
