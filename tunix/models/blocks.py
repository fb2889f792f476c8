"""One layer of a decoder: a mixer of tokens and an ffn, each after a norm and added to the residual stream.

The config names which mixer and which ffn (`MIXERS` and `FEED_FORWARDS` at the end); a custom one is a class with the
same call, and one line there. Training, prefill and decoding share this code: with a cache the mixer
first writes its new tokens there, then attends to what the cache holds.

Axes: B rows, T time, D model width, F ffn width, N query heads, K kv heads, H head dim.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from tunix.mesh import constrain
from tunix.models.attention.attend import attend, attend_cached
from tunix.models.attention.inputs import ByKind, Segments
from tunix.models.attention.layouts import Pages
from tunix.models.attention.pages import CachedView, SlotsView
from tunix.models.config import DELTANET, EXPERTS, DecoderConfig
from tunix.models.deltanet import GatedDeltaNet, PieceStates, SlotStates, StepView
from tunix.models.gated_ffn import GatedFFN
from tunix.models.layers import Norm, Projection, TokenKeys, rotate
from tunix.models.moe import MixtureOfExperts

PARTS = ("mixer", "ffn")
"""Fields of a block that the names of parameters leave out: `layers/q/w`, not `layers/mixer/q/w`."""

RopeTables = tuple[jax.Array, jax.Array]
"""cos and sin `[B T H/2]`."""
View = Segments | ByKind | CachedView | StepView | PieceStates
"""Which tokens see each other: in packed rows, the same for several kinds of layers, or with a cache."""
Cache = Pages | SlotStates
"""What a layer keeps of earlier tokens: keys and values, or states."""
Auxiliary = dict[str, Float[Array, "..."]]
"""What a layer returns with its output, such as the load-balance loss of a router; stacked over layers."""


class Mixer(Protocol):
    """A module that mixes the tokens of a row; its projections are attributes, named as the parameters are.

    `view` is a `View` and `cache` a `Cache` of the mixer's own kind.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: RopeTables,
        view: Any,
        cache: Any = None,
        dropout_keys: TokenKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The mixed tokens for normed inputs, and the updated cache where one is given."""
        ...


class FeedForward(Protocol):
    """A module that transforms each token alone; its projections are attributes, named as the parameters are."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_keys: TokenKeys | None = None,
        real: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """The output for normed inputs, and the auxiliary terms.

        Args:
            real: which tokens are not padding, of which the output does not matter; None where all may be real.
        """
        ...


class Attention(nnx.Module):
    """Grouped-query attention with rope; with `qk_norm` each head's query and key are normed before rope.

    With `output_gate` q's matrix has a second half for each head, whose sigmoid multiplies the head's output.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c, bias = config, config.qkv_bias
        d, n, k, h = c.d_model, c.num_heads, c.num_kv_heads, c.head_dim
        self.config, outputs = config, 2 * h if c.output_gate else h
        self.q = Projection("BTD,DNH->BTNH", (d, n, outputs), ("embed", "heads", "head"), rngs, contracted=1, bias=bias)
        self.k = Projection("BTD,DKH->BTKH", (d, k, h), ("embed", "kv_heads", "head"), rngs, contracted=1, bias=bias)
        self.v = Projection("BTD,DKH->BTKH", (d, k, h), ("embed", "kv_heads", "head"), rngs, contracted=1, bias=bias)
        self.o = Projection("BTNH,NHD->BTD", (n, h, d), ("heads", "head", "embed"), rngs, contracted=2)
        self.q_norm = Norm(h, "head", eps=c.norm_eps, offset=c.norm_offset) if c.qk_norm else None
        self.k_norm = Norm(h, "head", eps=c.norm_eps, offset=c.norm_offset) if c.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: RopeTables,
        view: View,
        cache: Cache | None = None,
        dropout_keys: TokenKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        q, k, v = self.q(x, dropout_keys), self.k(x, dropout_keys), self.v(x, dropout_keys)
        q, gate = jnp.split(q, 2, axis=-1) if self.config.output_gate else (q, None)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = checkpoint_name(q, "q"), checkpoint_name(k, "k"), checkpoint_name(v, "v")
        how = {"scale": self.config.scale, "softcap": self.config.attention_softcap}
        if isinstance(view, Segments | ByKind):
            mixed, cache = attend(q, k, v, view, **how), None
        else:
            assert isinstance(cache, Pages), "a view of pages comes with the pages"
            assert isinstance(view, CachedView), "pages come with their view"
            mixed, cache = attend_cached(q, k, v, cache, view, **how)
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(checkpoint_name(gate, "q"))
        return self.o(mixed, dropout_keys), cache


class Block(nnx.Module):
    """One decoder layer: a mixer and an ffn, with their norms and residual connections.

    A parameter has one shape in all layers that have it; layers of several mixers differ in which they have.
    """

    mixer: Mixer
    ffn: FeedForward

    def __init__(self, config: DecoderConfig, mixer: str, rngs: nnx.Rngs):
        d, norm = config.d_model, {"eps": config.norm_eps, "offset": config.norm_offset}
        self.mixer = MIXERS[mixer](config, rngs)
        self.ffn = FEED_FORWARDS[config.feed_forward](config, rngs)
        self.pre_attn_norm = Norm(d, "embed", **norm)
        self.pre_mlp_norm = Norm(d, "embed", **norm)
        self.post_attn_norm = Norm(d, "embed", **norm) if config.post_norms else None
        self.post_mlp_norm = Norm(d, "embed", **norm) if config.post_norms else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: RopeTables,
        view: View,
        cache: Cache | None = None,
        dropout_keys: TokenKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None, Auxiliary]:
        """The residual stream after the layer, its cache where one is given, and the ffn's auxiliary terms.

        Args:
            x: the residual stream.
            rope: cos and sin of the tokens' positions, for this layer's kind.
            view: which tokens see each other, within this layer's window.
            cache: the mixer's pages of earlier tokens, only with a `CachedView`.
            dropout_keys: a key for each token, by which adapters drop inputs.
        """
        y, cache = self.mixer(self.pre_attn_norm(x), rope, view, cache, dropout_keys)
        x = x + (y if self.post_attn_norm is None else self.post_attn_norm(y))
        x = checkpoint_name(x, "x")
        y, auxiliary = self.ffn(self.pre_mlp_norm(x), dropout_keys, _real(view, x.shape[:2]))
        x = x + (y if self.post_mlp_norm is None else self.post_mlp_norm(y))
        return constrain(x, "rows", "time", None), cache, auxiliary

    def projections(self) -> dict[str, Projection]:
        """The projections of the layer by name, the mixer's first."""
        fields = {**vars(self.mixer), **vars(self.ffn)}
        return {name: module for name, module in fields.items() if isinstance(module, Projection)}


def _real(view: View, shape: tuple[int, ...]) -> Bool[Array, "B T"] | None:
    """Which tokens are not padding, as far as a view tells."""
    if isinstance(view, ByKind):
        return view.views[0].ids > 0
    if isinstance(view, StepView):
        return jnp.broadcast_to(view.live[:, None], shape)
    return None if isinstance(view, SlotsView) else view.ids > 0


MIXERS: Mapping[str, Callable[[DecoderConfig, nnx.Rngs], Mixer]] = {"attention": Attention, DELTANET: GatedDeltaNet}
"""`LayerKind.mixer` -> the class of the mixer."""
FEED_FORWARDS: Mapping[str, Callable[[DecoderConfig, nnx.Rngs], FeedForward]] = {
    "gated": GatedFFN,
    EXPERTS: MixtureOfExperts,
}
"""`DecoderConfig.feed_forward` -> the class of the ffn."""
