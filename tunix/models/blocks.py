"""One layer of a decoder: a mixer of tokens and an ffn, each after a norm and added to the residual stream.

The config names which mixer and which ffn (`MIXERS` and `FEED_FORWARDS` at the end); a custom one is a class with the
same call, and one line there. Training, prefill and decoding share this code: with a cache the mixer
first writes its new tokens there, then attends to what the cache holds.

Axes: B rows, T time, D model width, F ffn width, N query heads, K kv heads, H head dim, L layers, Dp width of inputs of
layers, Da width of all of them, Vl ids that have inputs of layers, k chosen experts of a token.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Num

from tunix.config import CacheType
from tunix.mesh import constrain
from tunix.models.attention.attend import attend, attend_cached
from tunix.models.attention.inputs import ByKind, Segments
from tunix.models.attention.pages import CachedView, Pages, SlotsView, rounded
from tunix.models.config import DELTANET, DENSE_AND_EXPERTS, EXPERTS, GLOBAL, SHARED, WIDE, DecoderConfig
from tunix.models.deltanet import GatedDeltaNet, PieceStates, SlotStates, StatesAhead, StepView
from tunix.models.layers import (
    GatedFFN,
    Matrix,
    Norm,
    Projection,
    RopeTables,
    TokenKeys,
    project,
    rms_norm,
    rotate,
    weight,
)
from tunix.models.moe import Bank, DenseAndExperts, MixtureOfExperts

NAMES = ("inputs/embed/w", "inputs/context/w", "inputs/norm/w")
"""The parameters of `LayerInputs` in a model, in the order in which `layer_inputs` takes them."""


class LayerInputs(nnx.Module):
    """The weights that make the inputs of all layers: embeddings that a token has for each layer.

    For each layer, a token's row of a second table and a projection of its usual embedding are added up. The layer
    gates them by its output, and adds what it makes of them to the stream (Gemma 4 E2B and E4B, after Gemma 3n). The
    table may have more rows than there are ids, or fewer: an id beyond it has the projection alone.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        rows = None if config.gemma4 is None else config.gemma4.layer_vocab
        v, d = rows or config.vocab_size, config.d_model
        layers, width = config.num_layers, config.layer_inputs
        # Rows as long as all layers' together: a TPU would copy the whole table to gather rows of several dimensions.
        self.embed = Matrix(weight(rngs, (v, layers * width), ("vocab", "embed"), std=width**-0.5))
        self.context = Matrix(weight(rngs, (d, layers, width), ("embed", None, None), std=1.0))
        self.norm = Norm(width, "head", eps=config.norm_eps, offset=config.norm_offset)


def layer_inputs(
    config: DecoderConfig,
    table: Float[Array, "Vl Da"],
    context: Float[Array, "D L Dp"],
    norm: Float[Array, "Dp"],
    tokens: Int[Array, "B T"],
    x: Float[Array, "B T D"],
) -> Float[Array, "L B T Dp"]:
    """The inputs of all layers, in the dtype of the embedded tokens `x`.

    Args:
        table: for each id the embeddings of all layers, one after the other.
    """
    looked_up = table[tokens] if len(table) >= config.vocab_size else table.at[tokens].get(mode="fill", fill_value=0)
    looked_up = looked_up.reshape(*tokens.shape, *context.shape[1:])
    looked_up = looked_up.astype(x.dtype) * jnp.asarray(config.layer_inputs**0.5, x.dtype)
    projected = project("BTD,DLF->BTLF", x, context) * config.d_model**-0.5
    projected = rms_norm(projected, norm, eps=config.norm_eps, offset=config.norm_offset)
    mixed = jnp.moveaxis((projected + looked_up) * 2**-0.5, 2, 0)
    return constrain(mixed, None, "rows", "time", None)


class InputGate(nnx.Module):
    """`out(act(gate x) * layer_input)`: what a layer makes of its own input and the stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, width = config.d_model, config.layer_inputs
        self.input_gate = Projection("BTD,DF->BTF", (d, width), ("embed", "ffn"), rngs, contracted=1)
        self.input_out = Projection("BTF,FD->BTD", (width, d), ("ffn", "embed"), rngs, contracted=1)

    def __call__(
        self, x: Float[Array, "B T D"], layer_input: Float[Array, "B T Dp"], dropout_keys: TokenKeys | None = None
    ) -> Float[Array, "B T D"]:
        gate = jax.nn.gelu(self.input_gate(x, dropout_keys), approximate=True)
        return self.input_out(gate * layer_input, dropout_keys)


class Kept(NamedTuple):
    """Keys and values of the tokens at hand that later layers read too."""

    keys: Float[Array, "B T K H"]
    """Normed and rotated."""
    values: Float[Array, "B T K H"]
    pages: Pages | None = None
    """Where decoding keeps them, with those of earlier tokens."""


class Attention(nnx.Module):
    """Grouped-query attention with rope; with `qk_norm` each head's query and key are normed before rope.

    With `output_gate` q's matrix has a second half for each head, whose sigmoid multiplies the head's output. With
    `sinks` each head has a score that takes part in its softmax and mixes no value.

    In most decoders all layers have heads of the same sizes. Where global layers have others (Gemma 4), the names of
    their projections begin with `global_`, because a parameter has one shape in all layers that have it. Layers that
    read the keys and values of the last layer of their kind before them have neither k nor v, and those whose values
    are made of the keys, before their norm and rope, have no v.
    """

    cache_dtype: CacheType | None = None
    """As in `Model`, which sets it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, mixer: str = "attention"):
        self.config, c, shared = config, config, mixer in SHARED
        wide = c.gemma4 if SHARED.get(mixer, mixer) == GLOBAL else None
        d, n, h = c.d_model, c.num_heads, wide.global_head_dim if wide else c.head_dim
        kv_heads, outputs = wide.global_kv_heads if wide else c.num_kv_heads, 2 * h if c.output_gate else h

        def narrow() -> Projection:
            shape, axes = (d, kv_heads, h), ("embed", "kv_heads", "head")
            return Projection("BTD,DKH->BTKH", shape, axes, rngs, contracted=1, bias=c.qkv_bias)

        def norm() -> Norm | None:
            return Norm(h, "head", eps=c.norm_eps, offset=c.norm_offset) if c.qk_norm else None

        axes = ("embed", "heads", "head")
        parts = {
            "q": Projection("BTD,DNH->BTNH", (d, n, outputs), axes, rngs, contracted=1, bias=c.qkv_bias),
            "k": None if shared else narrow(),
            "v": None if shared or (wide and wide.keys_are_values) else narrow(),
            "o": Projection("BTNH,NHD->BTD", (n, h, d), (*axes[1:], "embed"), rngs, contracted=2, bias=c.o_bias),
            "q_norm": norm(),
            "k_norm": None if shared else norm(),
        }
        self.names = tuple(f"global_{name}" if wide else name for name in parts)
        for name, part in zip(self.names, parts.values(), strict=True):
            setattr(self, name, part)
        self.sinks = nnx.Param(jnp.zeros(n, jnp.float32), axes=("heads",)) if c.sinks else None

    @jax.named_scope("attention")
    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: RopeTables,
        view: Segments | ByKind | CachedView,
        cache: Pages | Kept | None = None,
        dropout_keys: TokenKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], Pages | Kept | None]:
        c = self.config
        of_q, of_k, of_v, of_o, q_norm, k_norm = (getattr(self, name) for name in self.names)
        q = of_q(x, dropout_keys)
        q, gate = jnp.split(q, 2, axis=-1) if c.output_gate else (q, None)
        q = rotate(q if q_norm is None else q_norm(q), rope)
        if of_k is None:
            assert isinstance(cache, Kept), "keys and values of another layer are handed on"
            k, v, pages = cache
        else:
            assert not isinstance(cache, Kept), "a layer has keys and values, or those of another"
            k, pages = of_k(x, dropout_keys), cache
            v = k if of_v is None else of_v(x, dropout_keys)
            k = rotate(k if k_norm is None else k_norm(k), rope)
            if c.gemma4 is not None:  # normed without weights
                v = rms_norm(v, jnp.ones((), jnp.float32), eps=c.norm_eps, offset=False)
            if self.cache_dtype is not None and cache is None:
                # Exactly what a cache gives back: a value less itself is 0, and has a gradient of 1.
                keys, values = jax.lax.stop_gradient((k, v))
                kept = rounded(keys, values, self.cache_dtype).exact(k.dtype)
                k, v = kept[0] + (k - keys), kept[1] + (v - values)
            k, v = checkpoint_name(k, "k"), checkpoint_name(v, "v")
        sinks = None if self.sinks is None else self.sinks[...]
        q = checkpoint_name(q, "q")
        scale, softcap = c.scale, c.attention_softcap
        if isinstance(view, Segments | ByKind):
            mixed = attend(q, k, v, view, scale=scale, softcap=softcap, sinks=sinks)
        else:
            assert pages is not None, "a view of pages comes with the pages"
            mixed, pages = attend_cached(
                q, k, v, pages, view, scale=scale, softcap=softcap, sinks=sinks, written=of_k is None
            )
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(checkpoint_name(gate, "q"))
        kept = Kept(k, v, pages) if c.shared_layers else pages
        return of_o(mixed, dropout_keys), None if of_k is None else kept


PARTS = ("mixer", "ffn", "own_input")
"""Fields of a block that the names of parameters leave out: `layers/q/w`, not `layers/mixer/q/w`."""

View = Segments | ByKind | CachedView | StepView | PieceStates
"""Which tokens see each other: in packed rows, the same for several kinds of layers, or with a cache."""
Cache = Pages | SlotStates | StatesAhead | Kept
"""What a layer keeps of earlier tokens: keys and values, or states, of which it returns those after each of several new
tokens; `Kept` where layers read those of others."""
Auxiliary = dict[str, Num[Array, "..."]]
"""What a layer returns with its output, such as the load-balance loss of a router; stacked over layers."""


Mixer = Callable[..., tuple[Float[Array, "B T D"], Any]]
"""A module that mixes the tokens of a row; its projections are attributes, named as the parameters are.

Called as `mixer(x, rope, view, cache=None, dropout_keys=None)` with normed inputs `[B T D]`, a `View` and a `Cache` of
its own kind; returns the mixed tokens, and the updated cache where one is given.
"""
FeedForward = Callable[..., tuple[Float[Array, "B T D"], Auxiliary]]
"""A module that transforms each token alone; its projections are attributes, named as the parameters are.

Called as `ffn(x, dropout_keys=None, real=None, replayed=None)`; returns the output and the auxiliary terms. `x` are
normed inputs, or the residual stream where the ffn norms it itself (`NORM_THEMSELVES`); `real [B T]` says which tokens
are not padding, of which the output does not matter, None where all may be real; `replayed [B T k]` are the experts
that a mixture uses for each token, -1 where it chooses, None where it always does.
"""


class Factor(nnx.Module):
    """A number that multiplies what a layer returns, as its folder has it: it does not train."""

    def __init__(self):
        self.factor = nnx.Param(jnp.ones((), jnp.float32), axes=())

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return x * jax.lax.stop_gradient(self.factor[...])


class Block(nnx.Module):
    """One decoder layer: a mixer and an ffn, with their norms and residual connections.

    A parameter has one shape in all layers that have it; layers of several mixers differ in which they have.
    """

    mixer: Mixer
    ffn: FeedForward

    def __init__(self, config: DecoderConfig, mixer: str, rngs: nnx.Rngs):
        norm = partial(Norm, config.d_model, "embed", eps=config.norm_eps, offset=config.norm_offset)
        self.mixer = MIXERS[mixer](config, rngs)
        wide = mixer in WIDE
        make = partial(GatedFFN, width=2 * config.ffn, start="wide_") if wide else FEED_FORWARDS[config.feed_forward]
        self.ffn = make(config, rngs)
        self.pre_attn_norm = norm()
        self.pre_mlp_norm = None if config.feed_forward in NORM_THEMSELVES else norm()
        self.post_attn_norm = norm() if config.post_norms else None
        self.post_mlp_norm = norm() if config.post_norms else None
        self.own_input = InputGate(config, rngs) if config.layer_inputs else None
        self.post_input_norm = norm() if config.layer_inputs else None
        self.output = Factor() if config.gemma4 is not None else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: RopeTables,
        view: View,
        cache: Cache | None = None,
        dropout_keys: TokenKeys | None = None,
        layer_input: Float[Array, "B T Dp"] | None = None,
        experts: Int[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None, Auxiliary]:
        """The residual stream after the layer, its cache where one is given, and the ffn's auxiliary terms.

        Args:
            x: the residual stream.
            rope: cos and sin of the tokens' positions, for this layer's kind.
            view: which tokens see each other, within this layer's window.
            cache: the mixer's pages of earlier tokens, only with a `CachedView`.
            dropout_keys: a key for each token, by which adapters drop inputs.
            layer_input: the layer's own inputs, where layers have some.
            experts: those that a mixture uses for each token, -1 where it chooses; None where it always does.
        """
        y, cache = self.mixer(self.pre_attn_norm(x), rope, view, cache, dropout_keys)
        x = x + (y if self.post_attn_norm is None else self.post_attn_norm(y))
        x = checkpoint_name(x, "x")
        normed = x if self.pre_mlp_norm is None else self.pre_mlp_norm(x)
        if isinstance(view, ByKind):
            real = view.views[0].ids > 0
        elif isinstance(view, StepView):
            real = jnp.broadcast_to(view.live[:, None], x.shape[:2])
        else:
            real = None if isinstance(view, SlotsView) else view.ids > 0
        y, auxiliary = self.ffn(normed, dropout_keys, real, experts)
        x = x + (y if self.post_mlp_norm is None else self.post_mlp_norm(y))
        if self.own_input is not None and self.post_input_norm is not None:
            assert layer_input is not None, "layers with inputs of their own get them"
            x = x + self.post_input_norm(self.own_input(x, layer_input, dropout_keys))
        x = x if self.output is None else self.output(x)
        return constrain(x, "rows", "time", None), cache, auxiliary

    def projections(self) -> dict[str, Projection]:
        """The projections of the layer by name, the mixer's first."""
        parts = [self.mixer, self.ffn, *([] if self.own_input is None else [self.own_input])]
        fields = {name: module for part in parts for name, module in vars(part).items()}
        return {name: module for name, module in fields.items() if isinstance(module, Projection)}

    def banks(self) -> dict[str, Bank]:
        """The matrices of experts by name; none where there are no experts."""
        return {name: module for name, module in vars(self.ffn).items() if isinstance(module, Bank)}

    def matrices(self) -> dict[str, Projection | Bank]:
        """The projections and the matrices of experts by name."""
        return self.projections() | self.banks()


MIXERS: Mapping[str, Callable[[DecoderConfig, nnx.Rngs], Mixer]] = {
    "attention": Attention,
    **{mixer: partial(Attention, mixer=mixer) for mixer in (GLOBAL, *SHARED)},
    DELTANET: GatedDeltaNet,
}
"""`LayerKind.mixer` -> the class of the mixer."""
FEED_FORWARDS: Mapping[str, Callable[[DecoderConfig, nnx.Rngs], FeedForward]] = {
    "gated": GatedFFN,
    EXPERTS: MixtureOfExperts,
    DENSE_AND_EXPERTS: DenseAndExperts,
}
"""`DecoderConfig.feed_forward` -> the class of the ffn."""
NORM_THEMSELVES = (DENSE_AND_EXPERTS,)
"""Feed-forward parts that are given the residual stream, and norm it."""


class DraftHead(nnx.Module):
    """The head that drafts the token after the next one: multi-token prediction (MTP). The table of embeddings and that
    of logits are the model's.

    DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2), with the weights and the order of Qwen 3.5
    (https://huggingface.co/Qwen, vLLM's `qwen3_5_mtp.py`): the embedding of token t + 1 and the backbone's state after
    token t, each normed, are joined in this order, projected to the model's width, and go through one layer of full
    attention and a final norm. The backbone's head makes logits of token t + 2 of the result. The state is that after
    the backbone's final norm; the head's own result stands in for it where a further token is drafted.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        norm = partial(Norm, config.d_model, "embed", eps=config.norm_eps, offset=config.norm_offset)
        shape = (2 * config.d_model, config.d_model)
        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.join = Projection("BTM,MD->BTD", shape, (None, "embed"), rngs, contracted=1)
        self.layer = Block(config, config.mixer, rngs)

    def __call__(
        self,
        embedded: Float[Array, "B C D"],
        hidden: Float[Array, "B C D"],
        rope: RopeTables,
        view: Segments | CachedView,
        cache: Pages | None = None,
    ) -> tuple[Float[Array, "B C D"], Cache | None]:
        """States from which the tokens after the embedded ones are drafted, and the pages with these, where there are
        some.

        Args:
            embedded: token t + 1 of each place t.
            hidden: the backbone's state after token t, or what this has returned for token t.
            rope: cos and sin of the places t.
            view: where the places t are written and what they see.
        """
        joined = self.join(jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1))
        x, pages, _ = self.layer(joined, rope, view, cache)
        return self.norm(x), pages
