"""Qwen 3 with a mixture of experts (https://arxiv.org/abs/2505.09388): Qwen 3's attention, and experts in every layer.

A folder has each expert's matrices as tensors of their own, and `norm_topk_prob` says whether the weights of the chosen
experts are divided by their sum. Layers without experts (`mlp_only_layers`, `decoder_sparse_step`), which no published
size has, are refused. Sizes are those of the config.json files of https://huggingface.co/Qwen/Qwen3-30B-A3B and
https://huggingface.co/Qwen/Qwen3-235B-A22B.

Axes: D model width, F ffn width, E experts.
"""

from dataclasses import replace
from typing import Any

from tunix.models.config import EXPERTS, DecoderConfig, Experts, Rope
from tunix.models.families.base import (
    QK_NORMS,
    SHARED,
    SMALL,
    TWO_NORMS,
    FamilyText,
    in_layers,
    sizes,
    written,
)
from tunix.models.families.hf_config import Fields

UNUSED = ("max_window_layers", "sliding_window")
"""Fields of windows, which no published size uses."""
BANKS = in_layers(
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
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("use_sliding_window", False)
    fields.only("mlp_only_layers", [], None)
    fields.only("decoder_sparse_step", 1)
    fields.read |= set(UNUSED)
    shape = sizes(fields, head_dim=None, max_position_embeddings=32_768)
    return DecoderConfig(
        family="qwen3_moe",
        activation="silu",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", False),
        rope=fields.rope(10_000.0, shape["max_positions"]),
        qk_norm=True,
        experts=fields.experts(renormalise=fields.flag("norm_topk_prob", False)),
        feed_forward=EXPERTS,
        stops=fields.stops(),
        **{**shape, "ffn": fields.integer("moe_intermediate_size", 768)},
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `qwen3_moe` folder.

    `intermediate_size`, the width of layers without experts, is that of the experts which a token uses together, as in
    the published sizes: nothing has it.
    """
    assert config.experts is not None, "the family has them"
    return written(config) | {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
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


def _qwen3_moe(d_model: int, ffn: int, layers: int, heads: int) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3_moe",
        vocab_size=151_936,
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=128,
        ffn=ffn,
        activation="silu",
        norm_eps=1e-6,
        tied=False,
        max_positions=40_960,
        rope=Rope(theta=1_000_000.0),
        qk_norm=True,
        experts=Experts(128, 8),
        feed_forward=EXPERTS,
    )


QWEN3_MOE = FamilyText(
    model_types=("qwen3_moe",),
    hub=r"qwen-?3-.*\d+b-a\d+b",
    template="chatml",
    architecture="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    read=read_qwen3_moe,
    write=write,
    tensors={
        **SHARED,
        **TWO_NORMS,
        **QK_NORMS,
        **BANKS,
    },
    presets={
        "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
        "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64),
    },
    small=replace(_qwen3_moe(64, 64, 2, 4), experts=Experts(8, 2), **SMALL),
)
