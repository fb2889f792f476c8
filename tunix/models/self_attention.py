"""Attention as a mixer of tokens: projections of queries, keys and values, norms of each head, rope.

In most decoders all layers have heads of the same sizes. Where global layers have others (Gemma 4), their projections
have names of their own, because a parameter has one shape in all layers that have it.

Axes: B rows, T time, D model width, N query heads, K kv heads, H head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from tunix.models.attention.attend import attend, attend_cached
from tunix.models.attention.inputs import ByKind, Segments
from tunix.models.attention.pages import CachedView, Pages
from tunix.models.config import DecoderConfig
from tunix.models.layers import Norm, Projection, RopeTables, TokenKeys, rms_norm, rotate


class Kept(NamedTuple):
    """Keys and values of the tokens at hand that later layers read too."""

    keys: Float[Array, "B T K H"]
    """Normed and rotated."""
    values: Float[Array, "B T K H"]
    pages: Pages | None = None
    """Where decoding keeps them, with those of earlier tokens."""


class Heads(NamedTuple):
    """The modules of one layer's attention."""

    q: Projection
    k: Projection | None
    """None where keys and values are another layer's."""
    v: Projection | None
    """None where values are made of the keys before their norm and rope, or there are no keys."""
    o: Projection
    q_norm: Norm | None
    k_norm: Norm | None

    @classmethod
    def made(
        cls,
        config: DecoderConfig,
        kv_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
        *,
        keys_are_values: bool = False,
        shared: bool = False,
    ) -> "Heads":
        """Random projections, and norms that change nothing yet.

        Args:
            kv_heads: K.
            head_dim: H.
            keys_are_values: whether there is no v.
            shared: whether there is neither k nor v.
        """
        c, bias = config, config.qkv_bias
        d, n, k, h = c.d_model, c.num_heads, kv_heads, head_dim
        outputs = 2 * h if c.output_gate else h

        def narrow() -> Projection:
            axes = ("embed", "kv_heads", "head")
            return Projection("BTD,DKH->BTKH", (d, k, h), axes, rngs, contracted=1, bias=bias)

        def norm() -> Norm | None:
            return Norm(h, "head", eps=c.norm_eps, offset=c.norm_offset) if c.qk_norm else None

        return cls(
            Projection("BTD,DNH->BTNH", (d, n, outputs), ("embed", "heads", "head"), rngs, contracted=1, bias=bias),
            None if shared else narrow(),
            None if shared or keys_are_values else narrow(),
            Projection("BTNH,NHD->BTD", (n, h, d), ("heads", "head", "embed"), rngs, contracted=2, bias=c.o_bias),
            norm(),
            None if shared else norm(),
        )


class _Attention(nnx.Module):
    """What the mixers here have in common."""

    config: DecoderConfig
    sinks: nnx.Param | None = None
    """Each head's sink (`DecoderConfig.sinks`)."""

    def heads(self) -> Heads:
        """The modules that compute it."""
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: RopeTables,
        view: Segments | ByKind | CachedView,
        cache: Pages | Kept | None = None,
        dropout_keys: TokenKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], Pages | Kept | None]:
        c, heads = self.config, self.heads()
        q = heads.q(x, dropout_keys)
        q, gate = jnp.split(q, 2, axis=-1) if c.output_gate else (q, None)
        q = rotate(q if heads.q_norm is None else heads.q_norm(q), rope)
        if heads.k is None:
            assert isinstance(cache, Kept), "keys and values of another layer are handed on"
            k, v, pages = cache
        else:
            assert not isinstance(cache, Kept), "a layer has keys and values, or those of another"
            k, pages = heads.k(x, dropout_keys), cache
            v = k if heads.v is None else heads.v(x, dropout_keys)
            k = rotate(k if heads.k_norm is None else heads.k_norm(k), rope)
            if c.value_norm:  # without weights
                v = rms_norm(v, jnp.ones((), jnp.float32), eps=c.norm_eps, offset=False)
            k, v = checkpoint_name(k, "k"), checkpoint_name(v, "v")
        sinks = None if self.sinks is None else self.sinks[...]
        q = checkpoint_name(q, "q")
        if isinstance(view, Segments | ByKind):
            mixed = attend(q, k, v, view, scale=c.scale, softcap=c.attention_softcap, sinks=sinks)
        else:
            assert pages is not None, "a view of pages comes with the pages"
            assert isinstance(view, CachedView), "pages come with their view"
            mixed, pages = attend_cached(
                q,
                k,
                v,
                pages,
                view,
                scale=c.scale,
                softcap=c.attention_softcap,
                sinks=sinks,
                written=heads.k is None,
            )
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(checkpoint_name(gate, "q"))
        kept = Kept(k, v, pages) if c.shared_layers else pages
        return heads.o(mixed, dropout_keys), None if heads.k is None else kept


class Attention(_Attention):
    """Grouped-query attention with rope; with `qk_norm` each head's query and key are normed before rope.

    With `output_gate` q's matrix has a second half for each head, whose sigmoid multiplies the head's output. With
    `sinks` each head has a score that takes part in its softmax and mixes no value.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        heads = Heads.made(config, config.num_kv_heads, config.head_dim, rngs)
        self.q, self.k, self.v, self.o, self.q_norm, self.k_norm = heads
        self.sinks = nnx.Param(jnp.zeros(config.num_heads, jnp.float32), axes=("heads",)) if config.sinks else None

    def heads(self) -> Heads:
        """The modules that compute it."""
        return Heads(self.q, self.k, self.v, self.o, self.q_norm, self.k_norm)


class GlobalAttention(_Attention):
    """The attention of global layers with heads of other sizes (`DecoderConfig.global_heads`)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config, sizes = config, config.global_heads
        assert sizes is not None, "layers with this mixer come with their sizes"
        heads = Heads.made(config, sizes.kv_heads, sizes.head_dim, rngs, keys_are_values=sizes.keys_are_values)
        self.global_q, self.global_k, self.global_v, self.global_o = heads.q, heads.k, heads.v, heads.o
        self.global_q_norm, self.global_k_norm = heads.q_norm, heads.k_norm

    def heads(self) -> Heads:
        """The modules that compute it."""
        return Heads(self.global_q, self.global_k, self.global_v, self.global_o, self.global_q_norm, self.global_k_norm)


class SharedAttention(_Attention):
    """The attention of layers that read the keys and values of the last layer of their kind before them."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        heads = Heads.made(config, config.num_kv_heads, config.head_dim, rngs, shared=True)
        self.q, self.o, self.q_norm = heads.q, heads.o, heads.q_norm

    def heads(self) -> Heads:
        """The modules that compute it."""
        return Heads(self.q, None, None, self.o, self.q_norm, None)


class GlobalSharedAttention(_Attention):
    """As `SharedAttention`, of global layers with heads of other sizes."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config, sizes = config, config.global_heads
        assert sizes is not None, "layers with this mixer come with their sizes"
        heads = Heads.made(config, sizes.kv_heads, sizes.head_dim, rngs, shared=True)
        self.global_q, self.global_o, self.global_q_norm = heads.q, heads.o, heads.q_norm

    def heads(self) -> Heads:
        """The modules that compute it."""
        return Heads(self.global_q, None, None, self.global_o, self.global_q_norm, None)
