"""The tensors of Gemma 4's folders, and our names for them.

Global layers have tensors of the names that local layers use, in other shapes: for them, our names begin with
`global_`. So do those of an ffn twice as wide, with `wide_`. Where layers have experts, `gate`, `up` and `down` are
those of the dense ffn beside them.

Axes: V vocabulary, D model width, N query heads, L layers, Kw kv heads of global layers, Hw head dim of global layers,
Dp width of inputs of layers, Da width of all of them, Vl ids that have inputs of layers, F ffn width, Fw wider ffn
width, E experts, Fe ffn width of an expert.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from tunix.models.config import GLOBAL, SHARED, WIDE, DecoderConfig
from tunix.models.families.base import SHARED as SHARED_TENSORS
from tunix.models.families.base import Tensor, axis_sizes, in_layers
from tunix.models.families.gemma import FOUR_NORMS
from tunix.models.families.gemma4_experts import EXPERT_TENSORS


def axes(config: DecoderConfig) -> dict[str, int]:
    """The size of each axis of the family's weights."""
    own, experts = config.global_heads, config.experts
    assert own is not None, "the family has them"
    return {
        **axis_sizes(config),
        "Kw": own.kv_heads,
        "Hw": own.head_dim,
        "Vl": config.layer_vocab or config.vocab_size,
        "Dp": config.layer_inputs,
        "Da": config.num_layers * config.layer_inputs,
        "L": config.num_layers,
        "Fw": 2 * config.ffn,
        "Fe": config.ffn,
        "F": config.ffn if experts is None else experts.shared,
        "E": 0 if experts is None else experts.number,
    }


def spare(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor would make keys or values in a layer that reads those of another."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight", name)
    return found is not None and int(found[1]) in config.layers_with(tuple(SHARED))


def _attention(source: str, start: str, wider: str) -> dict[str, Tensor]:
    """The tensors of attention in layers with this mixer, and in those that read their keys and values.

    Args:
        start: begins our names.
        wider: ends the letters of the axes.
    """
    every, k, h = (source, *(mixer for mixer, one in SHARED.items() if one == source)), f"K{wider}", f"H{wider}"
    alone = {
        "k/w": ("self_attn.k_proj.weight", f"({k} {h}) D", f"D {k} {h}"),
        "v/w": ("self_attn.v_proj.weight", f"({k} {h}) D", f"D {k} {h}"),
        "k_norm/w": ("self_attn.k_norm.weight", h, h),
    }
    both = {
        "q/w": ("self_attn.q_proj.weight", f"(N {h}) D", f"D N {h}"),
        "o/w": ("self_attn.o_proj.weight", f"D (N {h})", f"N {h} D"),
        "q_norm/w": ("self_attn.q_norm.weight", h, h),
    }
    found = {**in_layers(alone, source), **in_layers(both, every)}
    return {name.replace("layers/", f"layers/{start}"): tensor for name, tensor in found.items()}


_USUAL = tuple(mixer for mixer in ("attention", GLOBAL, *SHARED) if mixer not in WIDE)
_TABLES = {name: one for name, one in SHARED_TENSORS.items() if not name.startswith("layers/")}
_FFN = {
    f"layers/{name}/w": replace(SHARED_TENSORS[f"layers/{name}/w"], mixer=_USUAL) for name in ("gate", "up", "down")
}
_WIDE = in_layers(
    {
        "wide_gate/w": ("mlp.gate_proj.weight", "Fw D", "D Fw"),
        "wide_up/w": ("mlp.up_proj.weight", "Fw D", "D Fw"),
        "wide_down/w": ("mlp.down_proj.weight", "D Fw", "Fw D"),
    },
    WIDE,
)
_INPUTS = {
    "inputs/embed/w": Tensor("model.embed_tokens_per_layer.weight", "Vl Da", "Vl Da"),
    "inputs/context/w": Tensor("model.per_layer_model_projection.weight", "(L Dp) D", "D L Dp"),
    "inputs/norm/w": Tensor("model.per_layer_projection_norm.weight", "Dp", "Dp"),
    **in_layers(
        {
            "input_gate/w": ("per_layer_input_gate.weight", "Dp D", "D Dp"),
            "input_out/w": ("per_layer_projection.weight", "D Dp", "Dp D"),
            "post_input_norm/w": ("post_per_layer_input_norm.weight", "D", "D"),
        }
    ),
}
TENSORS: Mapping[str, Tensor] = {
    **_TABLES,
    **_attention("attention", "", ""),
    **_attention(GLOBAL, "global_", "w"),
    **_FFN,
    **_WIDE,
    **FOUR_NORMS,
    **_INPUTS,
    **EXPERT_TENSORS,
    "layers/output/factor": Tensor("model.layers.{layer}.layer_scalar", "1", ""),
}
"""Our parameter name -> the tensor."""
