"""The decoder: one text for Llama, Gemma and Qwen. What differs between them is in `DecoderConfig`.

Tokens -> embeddings -> a scan over stacked blocks -> final norm -> hidden states `[B T D]`. The logits are the business
of `token_logprobs.py`, which never holds them all. Packed rows are the normal form: positions restart and attention
stays within a segment.

Axes: B rows, T time, V vocabulary, D model, F ffn, N query heads, K kv heads, H head dim, L layers.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as kept
from jaxtyping import Array, Float, Int

from tunix.config import DType
from tunix.mesh import constrain
from tunix.models.config import DecoderConfig
from tunix.models.layers import (
    Norm,
    Projection,
    Segments,
    TokenKeys,
    attention,
    fold_tokens,
    rms_norm,
    rope_tables,
    rotate,
    weight,
)
from tunix.models.quantization.fake_quant import Simulated
from tunix.models.quantization.formats import Quantization, in_compute

KEPT = ("x", "q", "k", "v", "mixed", "gate", "up")
"""What a layer keeps for its backward pass: the products' results. Norms, rope, softmax and activations are made again;
that is faster than storing them, and no scores `[B N T T]` are held."""

Adapt = Callable[["Block", nnx.Rngs], "Block"]


class Block(nnx.Module):
    """One layer: attention and a gated ffn, each behind a norm and added to the residual."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c, bias = config, config.qkv_bias
        d, n, k, h, f = c.d_model, c.num_heads, c.num_kv_heads, c.head_dim, c.ffn
        self.config = config
        self.q = Projection("BTD,DNH->BTNH", (d, n, h), ("embed", "heads", "head"), rngs, contracted=1, bias=bias)
        self.k = Projection("BTD,DKH->BTKH", (d, k, h), ("embed", "kv_heads", "head"), rngs, contracted=1, bias=bias)
        self.v = Projection("BTD,DKH->BTKH", (d, k, h), ("embed", "kv_heads", "head"), rngs, contracted=1, bias=bias)
        self.o = Projection("BTNH,NHD->BTD", (n, h, d), ("heads", "head", "embed"), rngs, contracted=2)
        self.gate = Projection("BTD,DF->BTF", (d, f), ("embed", "ffn"), rngs, contracted=1)
        self.up = Projection("BTD,DF->BTF", (d, f), ("embed", "ffn"), rngs, contracted=1)
        self.down = Projection("BTF,FD->BTD", (f, d), ("ffn", "embed"), rngs, contracted=1)
        norm = {"eps": c.norm_eps, "offset": c.norm_offset}
        self.pre_attn_norm = Norm(d, "embed", **norm)
        self.pre_mlp_norm = Norm(d, "embed", **norm)
        self.post_attn_norm = Norm(d, "embed", **norm) if c.post_norms else None
        self.post_mlp_norm = Norm(d, "embed", **norm) if c.post_norms else None
        self.q_norm = Norm(h, "head", **norm) if c.qk_norm else None
        self.k_norm = Norm(h, "head", **norm) if c.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Segments,
        rope: tuple[jax.Array, jax.Array],
        window: Int[Array, ""] | None,
        drawn: TokenKeys | None = None,
    ) -> Float[Array, "B T D"]:
        c = self.config
        q, k, v = self.heads(x, rope, drawn)
        mixed = attention(q, k, v, segments, window=window, scale=c.scale, softcap=c.attention_softcap)
        return self.rest(x, mixed, drawn)

    def projections(self) -> dict[str, Projection]:
        """The matrices of the layer by name."""
        return {name: module for name, module in vars(self).items() if isinstance(module, Projection)}

    def heads(
        self, x: Float[Array, "B T D"], rope: tuple[jax.Array, jax.Array], drawn: TokenKeys | None = None
    ) -> tuple[jax.Array, ...]:
        """Rotated queries `[B T N H]`, rotated keys and values `[B T K H]` of the residual stream."""
        x = self.pre_attn_norm(x)
        q, k, v = self.q(x, drawn), self.k(x, drawn), self.v(x, drawn)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        return kept(q, "q"), kept(k, "k"), kept(v, "v")

    def rest(
        self, x: Float[Array, "B T D"], mixed: Float[Array, "B T N H"], drawn: TokenKeys | None = None
    ) -> Float[Array, "B T D"]:
        """The residual stream after the layer, from the values that attention has mixed."""
        y = self.o(kept(mixed, "mixed"), drawn)
        x = x + (y if self.post_attn_norm is None else self.post_attn_norm(y))
        x = kept(x, "x")
        y = self.feed_forward(self.pre_mlp_norm(x), drawn)
        x = x + (y if self.post_mlp_norm is None else self.post_mlp_norm(y))
        return constrain(x, "rows", None, None)

    def feed_forward(self, x: jax.Array, drawn: TokenKeys | None = None) -> jax.Array:
        """The gated ffn's output `[B T D]` for normed inputs."""
        gate, up = kept(self.gate(x, drawn), "gate"), kept(self.up(x, drawn), "up")
        gate = jax.nn.silu(gate) if self.config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down(gate * up, drawn)


class Table(nnx.Module):
    """A `[V D]` table: the embedding, or an untied head."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        # A tied table is also the head, whose logits want unit scale; Gemma multiplies sqrt(D) back on the way in.
        self.w = weight(rngs, (config.vocab_size, config.d_model), ("vocab", "embed"), std=config.d_model**-0.5)


class ValueHead(nnx.Module):
    """One number per state, `x w`, of a critic or a reward model; zero at first, so that a new one claims nothing."""

    def __init__(self, config: DecoderConfig):
        self.w = nnx.Param(jnp.zeros((config.d_model,), jnp.float32), axes=("embed",))


def embedded(config: DecoderConfig, table: jax.Array, tokens: Int[Array, "B T"], dtype: DType) -> Float[Array, "B T D"]:
    """The residual stream before the first layer."""
    x = table[tokens].astype(dtype)
    return x * jnp.asarray(config.d_model**0.5, dtype) if config.scale_embeddings else x


class Decoder(nnx.Module):
    """The whole model with its layers stacked `[L ...]`."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        *,
        adapt: Adapt | None = None,
        quantization: Quantization | None = None,
        simulated: Mapping[str, Simulated] | None = None,
        remat: bool = False,
        critic: bool = False,
        speaks: bool = True,
    ):
        """Args:
        adapt: turns each block into its adapted form before it is stacked (`lora.adapt`).
        quantization: how the layers' matrices are rounded, if they are; norms and tables never are.
        simulated: how some of them compute as if they were rounded, by name (QAT).
        remat: keep only each layer's input, and recompute the layer in the backward pass.
        critic: has a value head.
        speaks: has the table of logits, where it is not the embedding's.
        """
        self.config, self.remat = config, remat
        self.embed = Table(config, rngs)
        self.head = Table(config, rngs) if speaks and not config.tied else None
        self.norm = Norm(config.d_model, "embed", eps=config.norm_eps, offset=config.norm_offset)
        self.value = ValueHead(config) if critic else None

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            block = Block(config, rngs)
            block = block if adapt is None else adapt(block, rngs)
            projections = block.projections()
            for name, how in (simulated or {}).items():
                projections[name].simulate(name, how)
            if quantization is not None:
                for name, projection in projections.items():
                    projection.quantize(name, quantization)
            return block

        self.layers = stack(rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segments: Segments,
        *,
        dtype: DType,
        noise: Float[Array, "B T D"] | None = None,
        drawn: TokenKeys | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm, in `dtype`.

        Args:
            noise: added to the embeddings (NEFTune).
            drawn: a key for each token, by which adapters drop inputs; None drops nothing.
        """
        c = self.config
        x = embedded(c, self.embed.w[...], tokens, dtype)
        if noise is not None:
            x = x + noise.astype(dtype)
        x = constrain(x, "rows", None, None)
        choose = self._layer_kinds(segments.positions)
        graph, stacked = nnx.split(self.layers)
        projections = self.layers.projections()

        def cast(path: tuple, w: jax.Array) -> jax.Array:
            module, name = path[0].key, path[-1].key
            w = projections[module].on_grid(w) if module in projections and name == "w" else w
            return in_compute(name, w, dtype)

        def layer(x: jax.Array, inputs: tuple) -> tuple[jax.Array, None]:
            weights, local, number = inputs
            # Cast layer by layer, so that float32 masters never exist a second time as a whole bf16 model.
            block = nnx.merge(graph, jax.tree_util.tree_map_with_path(cast, weights))
            mine = None if drawn is None else fold_tokens(drawn, number)
            rope, window = choose(local)
            return block(x, segments, rope, window, mine), None

        names = () if self.remat else KEPT
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))
        local = jnp.asarray(c.local_layers or (False,) * c.num_layers)
        numbers = None if drawn is None else jnp.arange(c.num_layers)
        x, _ = jax.lax.scan(layer, x, (nnx.to_pure_dict(stacked), local, numbers))
        # Rounded as all weights are, so that a model in the compute dtype is the same one: a reference, or an export.
        norm = in_compute("norm/w", self.norm.w[...], dtype)
        return rms_norm(x, norm, eps=c.norm_eps, offset=c.norm_offset)

    def _layer_kinds(self, positions: jax.Array) -> Callable[[jax.Array], tuple]:
        """A function from a layer's `local` flag to its rope tables and window: one block text serves both kinds."""
        c = self.config
        everywhere = rope_tables(positions, c.rope, c.head_dim)
        if c.window is None or not any(c.local_layers):
            return lambda local: (everywhere, None)
        nearby = everywhere if c.rope_local is None else rope_tables(positions, c.rope_local, c.head_dim)
        whole = jnp.int32(positions.shape[1])

        def choose(local: jax.Array) -> tuple:
            rope = jax.tree.map(lambda near, far: jnp.where(local, near, far), nearby, everywhere)
            return rope, jnp.where(local, jnp.int32(c.window), whole)

        return choose
