"""Inputs of each layer's own: embeddings that a token has for each layer, beside the stream that passes through all.

For each layer, a token's row of a second table and a projection of its usual embedding are added up. The layer gates
them by its output, and adds what it makes of them to the stream (Gemma 4 E2B and E4B, after Gemma 3n). The table may
have more rows than there are ids, or fewer: an id beyond it has the projection alone.

Axes: B rows, T time, D model width, L layers, Dp width of inputs of layers, Da width of all of them, Vl ids that
have inputs of layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.mesh import constrain
from tunix.models.config import DecoderConfig
from tunix.models.layers import Norm, Projection, TokenKeys, project, rms_norm, weight

NAMES = ("inputs/embed/w", "inputs/context/w", "inputs/norm/w")
"""The parameters of `LayerInputs` in a model, in the order in which `layer_inputs` takes them."""


class Matrix(nnx.Module):
    """A weight alone, of any shape."""

    def __init__(self, w: nnx.Param):
        self.w = w


class LayerInputs(nnx.Module):
    """The weights that make the inputs of all layers."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        v, d = config.layer_vocab or config.vocab_size, config.d_model
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
    own = table[tokens] if len(table) >= config.vocab_size else table.at[tokens].get(mode="fill", fill_value=0)
    own = own.reshape(*tokens.shape, *context.shape[1:])
    own = own.astype(x.dtype) * jnp.asarray(config.layer_inputs**0.5, x.dtype)
    projected = project("BTD,DLF->BTLF", x, context) * config.d_model**-0.5
    projected = rms_norm(projected, norm, eps=config.norm_eps, offset=config.norm_offset)
    mixed = jnp.moveaxis((projected + own) * 2**-0.5, 2, 0)
    return constrain(mixed, None, "rows", "time", None)


class InputGate(nnx.Module):
    """`out(act(gate x) * given)`: what a layer makes of its own input and the stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, width = config.d_model, config.layer_inputs
        self.input_gate = Projection("BTD,DF->BTF", (d, width), ("embed", "ffn"), rngs, contracted=1)
        self.input_out = Projection("BTF,FD->BTD", (width, d), ("ffn", "embed"), rngs, contracted=1)

    def __call__(
        self, x: Float[Array, "B T D"], given: Float[Array, "B T Dp"], dropout_keys: TokenKeys | None = None
    ) -> Float[Array, "B T D"]:
        gate = jax.nn.gelu(self.input_gate(x, dropout_keys), approximate=True)
        return self.input_out(gate * given, dropout_keys)
