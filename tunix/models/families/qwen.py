"""Qwen 2.5 (https://arxiv.org/abs/2412.15115) and Qwen 3 (https://arxiv.org/abs/2505.09388).

Qwen 2 and 2.5 have biases on q, k and v; Qwen 3 has none and norms each head's query and key instead. Both can make the
layers from `max_window_layers` on local, although no published size does. Sizes are those of the config.json files
under https://huggingface.co/Qwen (Qwen2.5-*-Instruct and Qwen3-*).

Qwen 3 with a mixture of experts has its attention, and experts in every layer. A folder has each expert's matrices as
tensors of their own, and `norm_topk_prob` says whether the weights of the chosen experts are divided by their sum.
Layers without experts (`mlp_only_layers`, `decoder_sparse_step`), which no published size has, are refused.

Axes: D model width, F ffn width, E experts.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from tunix.models.config import EXPERTS, DecoderConfig, Experts, Rope
from tunix.models.families import base
from tunix.models.families.hf_config import Fields

THETA = 1_000_000.0


def read(like: DecoderConfig, fields: Fields) -> DecoderConfig:
    """A `qwen2` or `qwen3` config.json."""
    if like.family == "qwen2":
        fields.only("use_mrope", False, None)
    else:
        fields.only("attention_bias", False)
    head_dim = 128 if like.family == "qwen3" else None
    shape = base.sizes(fields, {"head_dim": head_dim, "max_position_embeddings": 32_768})
    layers = shape["num_layers"]
    # `sliding_window` means nothing unless `use_sliding_window` is set.
    used = fields.flag("use_sliding_window", False)
    first, size = fields.get("max_window_layers", 28), fields.get("sliding_window", 4096)
    if not isinstance(first, int):
        fields.refuse("max_window_layers", "must be an integer.")
    used = used and size is not None
    local = fields.local_layers(layers, tuple(used and layer >= first for layer in range(layers)))
    if local and not used:
        fields.refuse("layer_types", "names sliding_attention, but use_sliding_window is off or sliding_window null.")
    return base.decoder(
        fields,
        like,
        shape,
        rope=fields.rope(10_000.0, shape["max_positions"]),
        window=fields.integer("sliding_window", 4096) if local else None,
        local_layers=local,
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `qwen2` or `qwen3` folder."""
    bias = {"attention_bias": False} if config.family == "qwen3" else {}
    return base.written(config) | {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": config.num_layers,
        "layer_types": base.layer_types(config),
        **bias,
    }


_QWEN2 = DecoderConfig("qwen2", **base.SMALL, activation="silu", norm_eps=1e-6, tied=True, rope=Rope(), qkv_bias=True)
_QWEN3 = replace(_QWEN2, family="qwen3", qkv_bias=False, qk_norm=True)
_QWEN2_LARGE = replace(_QWEN2, vocab_size=152_064, tied=False, max_positions=32_768, rope=Rope(theta=THETA))
_QWEN2_TIED = replace(_QWEN2_LARGE, vocab_size=151_936, tied=True)
_QWEN3_LARGE = replace(_QWEN3, vocab_size=151_936, tied=False, max_positions=40_960, rope=Rope(theta=THETA))

QWEN2 = base.FamilyText(
    model_types=("qwen2",),
    hub="qwen",
    template="chatml",
    architecture="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    read=partial(read, _QWEN2),
    write=write,
    tensors={**base.SHARED, **base.TWO_NORMS, **base.QKV_BIASES},
    presets={
        "qwen2.5-0.5b": base.sized(_QWEN2_TIED, 896, 4864, 24, 14, 2, 64),
        "qwen2.5-1.5b": base.sized(_QWEN2_TIED, 1536, 8960, 28, 12, 2, 128),
        "qwen2.5-3b": base.sized(_QWEN2_TIED, 2048, 11_008, 36, 16, 2, 128),
        "qwen2.5-7b": base.sized(_QWEN2_LARGE, 3584, 18_944, 28, 28, 4, 128),
        "qwen2.5-14b": base.sized(_QWEN2_LARGE, 5120, 13_824, 48, 40, 8, 128),
        "qwen2.5-32b": base.sized(_QWEN2_LARGE, 5120, 27_648, 64, 40, 8, 128),
        "qwen2.5-72b": base.sized(_QWEN2_LARGE, 8192, 29_568, 80, 64, 8, 128),
    },
    small=_QWEN2,
)

QWEN3 = base.FamilyText(
    model_types=("qwen3",),
    hub="qwen-?3",
    template="chatml",
    architecture="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    read=partial(read, _QWEN3),
    write=write,
    tensors={**base.SHARED, **base.TWO_NORMS, **base.QK_NORMS},
    presets={
        "qwen3-0.6b": base.sized(_QWEN3_LARGE, 1024, 3072, 28, 16, 8, 128, tied=True),
        "qwen3-1.7b": base.sized(_QWEN3_LARGE, 2048, 6144, 28, 16, 8, 128, tied=True),
        "qwen3-4b": base.sized(_QWEN3_LARGE, 2560, 9728, 36, 32, 8, 128, tied=True),
        "qwen3-8b": base.sized(_QWEN3_LARGE, 4096, 12_288, 36, 32, 8, 128),
        "qwen3-14b": base.sized(_QWEN3_LARGE, 5120, 17_408, 40, 40, 8, 128),
        "qwen3-32b": base.sized(_QWEN3_LARGE, 5120, 25_600, 64, 64, 8, 128),
    },
    small=_QWEN3,
)


BANKS = base.in_layers(
    {
        "router/w": ("mlp.gate.weight", "E D", "D E"),
        "gates/w": ("mlp.experts.{expert}.gate_proj.weight", "F D", "E D F"),
        "ups/w": ("mlp.experts.{expert}.up_proj.weight", "F D", "E D F"),
        "downs/w": ("mlp.experts.{expert}.down_proj.weight", "D F", "E F D"),
    }
)
"""The tensors of the router and the experts."""


def read_qwen3_moe(fields: Fields) -> DecoderConfig:
    """A `qwen3_moe` config.json."""
    fields.only("attention_bias", False)
    fields.only("use_sliding_window", False)
    fields.only("mlp_only_layers", [], None)
    fields.only("decoder_sparse_step", 1)
    fields.read |= {"max_window_layers", "sliding_window"}  # of windows, which no published size uses
    shape = base.sizes(fields, {"max_position_embeddings": 32_768})
    return base.decoder(
        fields,
        _MOE,
        shape,
        rope=fields.rope(10_000.0, shape["max_positions"]),
        experts=fields.experts(renormalise=fields.flag("norm_topk_prob", False)),
        ffn=fields.integer("moe_intermediate_size", 768),
    )


def write_moe(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `qwen3_moe` folder.

    `intermediate_size`, the width of layers without experts, is that of the experts which a token uses together, as in
    the published sizes: nothing has it.
    """
    assert config.experts is not None, "the family has them"
    return base.written(config) | {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "intermediate_size": config.experts.active * config.ffn,
        "moe_intermediate_size": config.ffn,
        "num_experts": config.experts.number,
        "num_experts_per_tok": config.experts.active,
        "norm_topk_prob": config.experts.renormalise,
    }


_MOE = replace(_QWEN3_LARGE, family="qwen3_moe", experts=Experts(128, 8), feed_forward=EXPERTS)

QWEN3_MOE = base.FamilyText(
    model_types=("qwen3_moe",),
    hub=r"qwen-?3-.*\d+b-a\d+b",
    template="chatml",
    architecture="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    read=read_qwen3_moe,
    write=write_moe,
    tensors={**base.SHARED, **base.TWO_NORMS, **base.QK_NORMS, **BANKS},
    presets={
        "qwen3-30b-a3b": base.sized(_MOE, 2048, 768, 48, 32, 4, 128),
        "qwen3-235b-a22b": base.sized(_MOE, 4096, 1536, 94, 64, 4, 128),
    },
    small=replace(_MOE, experts=Experts(8, 2), **base.SMALL),
)
