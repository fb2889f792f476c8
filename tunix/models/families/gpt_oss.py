"""gpt-oss (https://arxiv.org/abs/2508.10925): layers of experts that alternate between a window and all of a sequence.

Each head has a sink, a learned score that takes part in its softmax and mixes no value. All projections have biases,
the router and the experts too, and the experts join their gates with clamped factors (`Clamp`). A folder has the
matrices of all experts of a layer in one tensor, inputs before outputs, where gate and up take turns; published ones
have them in MXFP4 (`hf/packed_weights.py`). Sizes are those of https://huggingface.co/openai/gpt-oss-20b, config.json.

Axes: V vocabulary, D model width, F ffn width, N query heads, K kv heads, H head dim, E experts.
"""

from dataclasses import replace
from typing import Any

from tunix.models.config import EXPERTS, Clamp, DecoderConfig, Experts, Rope
from tunix.models.families import base, gemma
from tunix.models.families.hf_config import Fields

NUMBER, ACTIVE, WINDOW = 128, 4, 128
"""What a config.json leaves out."""


def read_gpt_oss(fields: Fields) -> DecoderConfig:
    """A `gpt_oss` config.json."""
    fields.get("initial_context_length")  # which the rope says again
    shape = base.sizes(fields, {"head_dim": 64, "max_position_embeddings": 131_072})
    biased, experts = fields.flag("attention_bias", True), fields.experts(NUMBER, ACTIVE)
    fields.only("experts_per_token", experts.active)
    clamp = Clamp(fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702))
    return base.decoder(
        fields,
        _LARGE,
        shape,
        eps=1e-5,
        rope=fields.rope(150_000.0, shape["max_positions"]),
        qkv_bias=biased,
        o_bias=biased,
        experts=replace(experts, biases=True, clamp=clamp),
        **gemma.windows(fields, gemma.alternating(shape["num_layers"]), WINDOW),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `gpt_oss` folder."""
    assert config.experts is not None, "the family has them"
    assert config.experts.clamp is not None, "and joins their gates so"
    return base.written(config) | {
        "attention_bias": config.qkv_bias,
        "sliding_window": config.window or WINDOW,
        "layer_types": base.layer_types(config),
        "num_local_experts": config.experts.number,
        "num_experts_per_tok": config.experts.active,
        "swiglu_limit": config.experts.clamp.limit,
        "swiglu_alpha": config.experts.clamp.slope,
    }


_LARGE = DecoderConfig(
    family="gpt_oss",
    activation="silu",
    norm_eps=1e-5,
    tied=False,
    rope=Rope(theta=150_000.0, kind="yarn", factor=32.0, original_length=4096, truncate=False),
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    window=WINDOW,
    experts=Experts(32, ACTIVE, biases=True, clamp=Clamp()),
    feed_forward=EXPERTS,
    **{**base.SMALL, "vocab_size": 201_088, "max_positions": 131_072},
)

GPT_OSS = base.FamilyText(
    model_types=("gpt_oss",),
    hub="gpt-?oss",
    template="chatml",
    architecture="GptOssForCausalLM",
    classifier="GptOssForSequenceClassification",
    read=read_gpt_oss,
    write=write,
    tensors={
        **base.SHARED,
        **base.TWO_NORMS,
        **base.QKV_BIASES,
        **base.in_layers(
            {
                "sinks": ("self_attn.sinks", "N", "N"),
                "o/b": ("self_attn.o_proj.bias", "D", "D"),
                "router/w": ("mlp.router.weight", "E D", "D E"),
                "router/b": ("mlp.router.bias", "E", "E"),
                "gates/w": ("mlp.experts.{expert}.gate_proj.weight", "D F", "E D F"),
                "gates/b": ("mlp.experts.{expert}.gate_proj.bias", "F", "E F"),
                "ups/w": ("mlp.experts.{expert}.up_proj.weight", "D F", "E D F"),
                "ups/b": ("mlp.experts.{expert}.up_proj.bias", "F", "E F"),
                "downs/w": ("mlp.experts.{expert}.down_proj.weight", "F D", "E F D"),
                "downs/b": ("mlp.experts.down_proj_bias", "E D", "E D"),
            }
        ),
    },
    stacked={**base.STACKED, ".gate_up_proj_bias": (".gate_proj.bias", ".up_proj.bias")},
    alternate=True,
    writes_stacked=True,
    packed=("mxfp4",),
    presets={"gpt-oss-20b": base.sized(_LARGE, 2880, 2880, 24, 64, 8, 64, local=gemma.alternating)},
    small=replace(
        _LARGE, local_layers=gemma.alternating(2), experts=Experts(8, 2, biases=True, clamp=Clamp()), **base.SMALL
    ),
    local=gemma.alternating,
)
