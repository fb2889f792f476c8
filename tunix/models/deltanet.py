"""The mixer of Qwen 3.5's linear layers: a Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464).

Projections -> a short causal convolution and SiLU -> queries and keys of unit length -> the gated delta rule
(`delta_rule.py`) -> a norm of each head, times SiLU(z) -> the output. Training and prefill compute it in chunks; a slot
that decodes holds a state and the last inputs of the convolution, however long its sequence is.

    beta = sigmoid(x W_beta),   g = -exp(A) softplus(x W_g + bias),   y = (norm(o) silu(x W_z)) W_o

Axes: B rows, T time, C tokens at a time, D model width, Sl slots, Hk key heads, Jv value heads of a key head, Dk width
of a key, Dv width of a value, U runs of a key head's channels, s shards of the rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from tunix.config import DType
from tunix.mesh import Axes, constrain, platform
from tunix.models.attention.inputs import Segments
from tunix.models.config import DecoderConfig, DeltaNet
from tunix.models.delta_rule import (
    CHUNKS,
    Begins,
    Chunks,
    Gates,
    by_first,
    chunked,
    convolved,
    convolved_after,
    recurrent,
    unit,
    widened,
)
from tunix.models.layers import Norm, Projection, TokenKeys

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


class StepView(NamedTuple):
    """One new token of each slot."""

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
        self.conv = Taps(c, rngs)
        self.rate = Rate(c, rngs)
        self.out_norm = Norm(c.value_dim, "head", eps=config.norm_eps, offset=False)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: tuple[jax.Array, jax.Array],
        view: View,
        cache: SlotStates | None = None,
        dropout_keys: TokenKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], SlotStates | None]:
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
        if isinstance(view, Segments):
            mixed, cache = self._packed(mixed_in, gates, view), None
        elif isinstance(view, PieceStates):
            assert cache is not None, "a piece comes with what the slots hold"
            mixed, cache = self._piece(mixed_in, gates, view, cache)
        else:
            assert cache is not None, "a step comes with what the slots hold"
            mixed, cache = self._step(mixed_in, gates, view, cache)
        mixed = self.out_norm(mixed.reshape(z.shape)) * jax.nn.silu(z.astype(jnp.float32))
        return self.out(mixed.astype(x.dtype), dropout_keys), cache

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
        read, _ = chunked(q, k, v, _masked(gates, ids > 0), Chunks.packed(ids, parents, size))
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
        gates, chunks = _masked(gates, view.ids > 0), Chunks.aligned(view.ids, size)
        read, after = chunked(q, k, v, gates, chunks, Begins(begins, states_before))
        assert after is not None, "chunks that begin with states have states after them"
        ends = view.ends.reshape(rows, slots)
        chunk, place = jnp.maximum(ends, 0) // size, jnp.maximum(ends, 0) % size
        last = jnp.take_along_axis(whole, widened(chunk, whole), axis=1)
        columns = widened(place[..., None] + 1 + jnp.arange(lags), whole)
        new = SlotStates(
            jnp.take_along_axis(last, columns, axis=2),
            jnp.take_along_axis(after, widened(chunk, after), axis=1),
        )
        before = SlotStates(inputs, states)
        kept = jax.tree.map(lambda x, y, z: by_first(ends >= 0, x, y).reshape(z.shape), new, before, held)
        return read, kept.placed()

    def _step(
        self, mixed: Float[Array, "Sl 1 Hk U Dk"], gates: Gates, view: StepView, held: SlotStates
    ) -> tuple[jax.Array, SlotStates]:
        """The mixed token of each slot, and what the slots hold after it."""
        q, k, v = self._heads(convolved_after(mixed, self.conv.w[...], held.inputs).astype(mixed.dtype))
        read, states = recurrent(q[:, 0], k[:, 0], v[:, 0], gates.decay[:, 0], gates.beta[:, 0], held.states)
        inputs = jnp.concatenate([held.inputs, mixed.astype(held.inputs.dtype)], axis=1)[:, 1:]
        new = jax.tree.map(partial(by_first, view.live), SlotStates(inputs, states), held)
        return read[:, None], new.placed()


class Taps(nnx.Module):
    """The taps of the convolution: each channel's own, the present token's last."""

    def __init__(self, sizes: DeltaNet, rngs: nnx.Rngs):
        shape = (*sizes.runs, sizes.taps)
        self.w = nnx.Param(
            jax.random.uniform(rngs.params(), shape, jnp.float32, -1.0, 1.0) * sizes.taps**-0.5,
            axes=("heads", None, None, None),
        )


class Rate(nnx.Module):
    """How fast each head's state decays: `A` is exp(a_log), uniform at first, and `bias` is added to the step."""

    def __init__(self, sizes: DeltaNet, rngs: nnx.Rngs):
        rates = jax.random.uniform(rngs.params(), (sizes.value_heads,), jnp.float32, 0.01, 16.0)
        self.a_log = nnx.Param(jnp.log(rates), axes=("heads",))
        self.bias = nnx.Param(jnp.ones((sizes.value_heads,), jnp.float32), axes=("heads",))


def _masked(gates: Gates, real: Bool[Array, "B T"]) -> Gates:
    """Gates of which those of padding leave the state as it is."""
    return jax.tree.map(lambda x: jnp.where(real[..., None, None], x, 0.0), gates)
