"""Gemma 4's text models (https://ai.google.dev/gemma/docs/core): five local layers to a global one, and the last
one global.

Global layers have wider heads than local ones, fewer kv heads, and rotate a quarter of each head; in the large models
their values are made of their keys. Queries and keys are normed, and values without a weight, so that attention has no
scale. In E2B and E4B each layer has inputs of its own (`blocks.py`), and the last layers read the keys and values of
earlier ones; in 26B-A4B each has experts beside its ffn (`models/moe.py`). Of a multimodal folder the text part is
read; an export is always a `gemma4_text` folder. Sizes are those of
https://github.com/google/tunix/blob/main/tunix/models/gemma4/config.py, contexts those of the model cards.

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
from functools import partial
from typing import Any

from tunix.models.config import DENSE_AND_EXPERTS, GLOBAL, SHARED, WIDE, DecoderConfig, Experts, Gemma4, Rope
from tunix.models.families import base, gemma
from tunix.models.families.gemma3 import GEMMA3_DEFAULTS
from tunix.models.families.hf_config import Fields, write_rope


def spare(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor would make keys or values in a layer that reads those of another."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight", name)
    return match is not None and int(match[1]) in config.layers_with(tuple(SHARED))


def _attention(source: str, start: str, wider: str) -> dict[str, base.Tensor]:
    """The tensors of attention in layers with this mixer, and in those that read their keys and values.

    Args:
        start: begins our names.
        wider: ends the letters of the axes.
    """
    readers, k, h = (source, *(mixer for mixer, one in SHARED.items() if one == source)), f"K{wider}", f"H{wider}"
    alone = {
        f"{start}k/w": ("self_attn.k_proj.weight", f"({k} {h}) D", f"D {k} {h}"),
        f"{start}v/w": ("self_attn.v_proj.weight", f"({k} {h}) D", f"D {k} {h}"),
        f"{start}k_norm/w": ("self_attn.k_norm.weight", h, h),
    }
    both = {
        f"{start}q/w": ("self_attn.q_proj.weight", f"(N {h}) D", f"D N {h}"),
        f"{start}o/w": ("self_attn.o_proj.weight", f"D (N {h})", f"N {h} D"),
        f"{start}q_norm/w": ("self_attn.q_norm.weight", h, h),
    }
    return {**base.in_layers(alone, source), **base.in_layers(both, readers)}


ROPE = Rope(theta=1_000_000.0, kind="proportional", share=0.25)
"""The rope of global layers where a folder does not state any."""


def read_gemma4(fields: Fields) -> DecoderConfig:
    """A `gemma4_text` config.json, or the text part of a multimodal `gemma4` or `gemma4_unified` one."""
    fields.only("hidden_activation", gemma.GELU)
    fields.only("attention_bias", False)
    # Between the tokens of a picture, which is no text, attention may go both ways.
    fields.only("use_bidirectional_attention", None, "vision")
    shape = base.sizes(fields, GEMMA4_DEFAULTS)
    stated = (
        fields.local_layers(shape["num_layers"], gemma.every(6, shape["num_layers"])) or (False,) * shape["num_layers"]
    )
    if not any(stated[:-1]):
        fields.refuse("layer_types", "names no local layer; this family has both kinds.")
    local = (*stated[:-1], False)  # the last one never is, whatever the folder says
    # How many layers at the end read the keys and values of others, of which there has to be one of each kind.
    shared = fields.integer("num_kv_shared_layers", 0, least=0)
    if len(set(local[: max(len(local) - shared, 0)])) < 2:
        fields.refuse("num_kv_shared_layers", "leaves no local or no global layer with keys and values.")
    wide = fields.flag("use_double_wide_mlp", False) and shared > 0
    # The width of inputs of each layer's own, 0 where there are none, and how many ids have them.
    width = fields.integer("hidden_size_per_layer_input", 256, least=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    experts: dict[str, Any] = {}
    if not fields.flag("enable_moe_block", False):
        fields.read |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
    elif wide:
        fields.refuse("use_double_wide_mlp", "is not supported in layers with experts (enable_moe_block).")
    else:
        number, active = fields.integer("num_experts"), fields.integer("top_k_experts")
        if active > number:
            fields.refuse("top_k_experts", f"is more than the {number} experts that there are.")
        experts["experts"] = Experts(number, active, shared=shape["ffn"])
        experts |= {"ffn": fields.integer("moe_intermediate_size"), "feed_forward": DENSE_AND_EXPERTS}
    rope = ROPE
    if fields.get("rope_parameters") is not None:
        # A folder that has ropes but none for global layers rotates their whole heads.
        rope = fields.rope(ROPE.theta, shape["max_positions"], layer_type="full_attention", share=1.0)
        if rope.share != 1 and rope.kind != "proportional":
            fields.refuse("rope_parameters", "rotates a part of each head, which only a proportional rope does here.")
    # The heads of global layers are in `global_head_dim` and `num_global_key_value_heads` or, as transformers 5 writes
    # them, in `per_layer_config`.
    kv_heads, keys_are_values = shape["num_kv_heads"], fields.flag("attention_k_eq_v", False)
    head_dim, few = fields.integer("global_head_dim", 512), fields.integer("num_global_key_value_heads", kv_heads)
    global_kv_heads = few if keys_are_values else kv_heads
    if "per_layer_config" in fields.raw:
        each, wanted = fields.mapping("per_layer_config"), {n for n, here in enumerate(local) if not here}
        stated = {tuple(sorted(one.items())) for one in each.values() if isinstance(one, dict)}
        numbers = {int(n) for n in each if n.isdecimal()}  # transformers pads them: 05
        if numbers != wanted or len(each) != len(wanted) or len(stated) != 1:
            layers = ", ".join(map(str, sorted(wanted)))
            fields.refuse("per_layer_config", f"must be the same for the global layers ({layers}) alone.")
        inner = Fields(dict(stated.pop()), fields.file, "per_layer_config.")
        global_kv_heads = inner.integer("num_key_value_heads", kv_heads)
        head_dim = inner.integer("head_dim", shape["head_dim"])
        inner.finish()
        if global_kv_heads != kv_heads and not keys_are_values:
            fields.refuse(
                "per_layer_config", "has other kv heads in global layers, which attention_k_eq_v alone gives."
            )
    return base.decoder(
        fields,
        _GEMMA4,
        shape,
        tied=True,
        rope=rope,
        rope_local=fields.rope(10_000.0, shape["max_positions"], layer_type="sliding_attention"),
        gemma4=Gemma4(
            global_kv_heads,
            head_dim,
            keys_are_values=keys_are_values,
            shared_layers=shared,
            shared_wide=wide,
            layer_inputs=width,
            layer_vocab=rows if width and rows != shape["vocab_size"] else None,
        ),
        logit_softcap=fields.optional("final_logit_softcapping"),
        window=fields.integer("sliding_window", 512),
        local_layers=local,
        **experts,
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `gemma4_text` folder."""
    gemma4 = config.gemma4
    assert gemma4 is not None, "the family has it"
    whole = {**write_rope(config.rope), "partial_rotary_factor": config.rope.share}
    experts: dict[str, Any] = {"enable_moe_block": config.experts is not None}
    if config.experts is not None:
        experts |= {"num_experts": config.experts.number, "top_k_experts": config.experts.active}
        experts |= {"moe_intermediate_size": config.ffn, "intermediate_size": config.experts.shared}
    return base.written(config, old_rope=False) | {
        "model_type": "gemma4_text",
        "hidden_activation": gemma.GELU,
        "attention_bias": False,
        **experts,
        "layer_types": base.layer_types(config),
        "sliding_window": config.window,
        "rope_parameters": {"full_attention": whole, "sliding_attention": write_rope(config.rope_local or Rope())},
        "global_head_dim": gemma4.global_head_dim,
        "num_global_key_value_heads": gemma4.global_kv_heads,
        "attention_k_eq_v": gemma4.keys_are_values,
        "final_logit_softcapping": config.logit_softcap,
        "hidden_size_per_layer_input": gemma4.layer_inputs,
        "vocab_size_per_layer_input": gemma4.layer_vocab or config.vocab_size,
        "num_kv_shared_layers": gemma4.shared_layers,
        "use_double_wide_mlp": gemma4.shared_wide,
    }


def five_to_one(layers: int) -> tuple[bool, ...]:
    """The published pattern of local layers: five, then a global one; the last one is global."""
    return (*gemma.every(6, layers)[:-1], False)


GEMMA4_DEFAULTS = {**GEMMA3_DEFAULTS, "vocab_size": 262_144, "num_hidden_layers": 30}
"""What a folder may leave out (transformers' Gemma4TextConfig)."""


_GEMMA4 = DecoderConfig(
    family="gemma4",
    activation="gelu_tanh",
    norm_eps=1e-6,
    tied=True,
    rope=ROPE,
    rope_local=Rope(),
    window=1024,
    logit_softcap=30.0,
    scale_embeddings=True,
    post_norms=True,
    qk_norm=True,
    query_scale=1.0,
    **{**base.SMALL, "vocab_size": 262_144, "max_positions": 262_144},
)
_MATFORMER = replace(_GEMMA4, max_positions=131_072, window=512)
"""What E2B and E4B have in common."""


def _large(d_model: int, ffn: int, layers: int, heads: int, kv_heads: int, global_kv_heads: int) -> DecoderConfig:
    gemma4 = Gemma4(global_kv_heads, 512, keys_are_values=True)
    return base.sized(_GEMMA4, d_model, ffn, layers, heads, kv_heads, 256, local=five_to_one, gemma4=gemma4)


_USUAL = tuple(mixer for mixer in ("attention", GLOBAL, *SHARED) if mixer not in WIDE)
TENSORS: Mapping[str, base.Tensor] = {
    **{name: tensor for name, tensor in base.SHARED.items() if not name.startswith("layers/")},
    **_attention("attention", "", ""),
    **_attention(GLOBAL, "global_", "w"),
    **{f"layers/{name}/w": replace(base.SHARED[f"layers/{name}/w"], mixer=_USUAL) for name in ("gate", "up", "down")},
    **base.in_layers(
        {
            "wide_gate/w": ("mlp.gate_proj.weight", "Fw D", "D Fw"),
            "wide_up/w": ("mlp.up_proj.weight", "Fw D", "D Fw"),
            "wide_down/w": ("mlp.down_proj.weight", "D Fw", "Fw D"),
        },
        WIDE,
    ),
    **gemma.FOUR_NORMS,
    "inputs/embed/w": base.Tensor("model.embed_tokens_per_layer.weight", "Vl Da", "Vl Da"),
    "inputs/context/w": base.Tensor("model.per_layer_model_projection.weight", "(L Dp) D", "D L Dp"),
    "inputs/norm/w": base.Tensor("model.per_layer_projection_norm.weight", "Dp", "Dp"),
    **base.in_layers(
        {
            "input_gate/w": ("per_layer_input_gate.weight", "Dp D", "D Dp"),
            "input_out/w": ("per_layer_projection.weight", "D Dp", "Dp D"),
            "post_input_norm/w": ("post_per_layer_input_norm.weight", "D", "D"),
            "router/w": ("router.proj.weight", "E D", "D E"),
            "router/norm/w": ("router.scale", "D", "D"),
            "router/factor": ("router.per_expert_scale", "E", "E"),
            "gates/w": ("experts.{expert}.gate_proj.weight", "Fe D", "E D Fe"),
            "ups/w": ("experts.{expert}.up_proj.weight", "Fe D", "E D Fe"),
            "downs/w": ("experts.{expert}.down_proj.weight", "D Fe", "E Fe D"),
            "dense_norm/w": ("post_feedforward_layernorm_1.weight", "D", "D"),
            "pre_experts_norm/w": ("pre_feedforward_layernorm_2.weight", "D", "D"),
            "experts_norm/w": ("post_feedforward_layernorm_2.weight", "D", "D"),
            "output/factor": ("layer_scalar", "1", ""),
        }
    ),
}
"""Our parameter name -> the tensor."""

GEMMA4 = base.FamilyText(
    model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
    hub="gemma-?4",
    template="gemma4",
    architecture="Gemma4ForCausalLM",
    classifier=None,
    read=read_gemma4,
    write=write,
    tensors=TENSORS,
    presets={
        "gemma4-e2b": base.sized(
            *(_MATFORMER, 1536, 6144, 35, 8, 1, 256),
            local=partial(gemma.every, 5),
            gemma4=Gemma4(1, 512, shared_layers=20, shared_wide=True, layer_inputs=256),
        ),
        "gemma4-e4b": base.sized(
            *(_MATFORMER, 2560, 10_240, 42, 8, 2, 256),
            local=five_to_one,
            gemma4=Gemma4(2, 512, shared_layers=18, layer_inputs=256),
        ),
        "gemma4-12b": _large(3840, 15_360, 48, 16, 8, 1),
        "gemma4-26b-a4b": replace(
            _large(2816, 704, 30, 16, 8, 2), experts=Experts(128, 8, shared=2112), feed_forward=DENSE_AND_EXPERTS
        ),
        "gemma4-31b": _large(5376, 21_504, 60, 32, 16, 4),
    },
    small=base.sized(
        *(_GEMMA4, 64, 192, 6, 4, 2, 32),
        local=five_to_one,
        gemma4=Gemma4(1, 64, keys_are_values=True),
        vocab_size=512,
        max_positions=2048,
        window=256,
    ),
    local=five_to_one,
    stacked=base.STACKED,
    writes_stacked=True,
    spare=spare,
    multimodal=(
        *("vision_config", "audio_config", "vision_soft_tokens_per_image", "eoa_token_index"),
        *(f"{name}_token_id" for name in ("boi", "eoi", "image", "video", "boa", "eoa", "audio")),
    ),
    prefixes=(
        ("model.language_model.", "model."),
        ("model.vision_tower.", None),
        ("model.embed_vision.", None),
        ("model.audio_tower.", None),
        ("model.embed_audio.", None),
    ),
)
