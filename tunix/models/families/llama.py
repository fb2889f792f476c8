"""Llama 3 (Dubey et al. 2024, https://arxiv.org/abs/2407.21783) and Mixtral (https://arxiv.org/abs/2401.04088).

Llama is the plainest architecture here; from 3.1 on its rope is stretched (`llama3`). Sizes are those of the
config.json files under https://huggingface.co/meta-llama (Meta-Llama-3-8B, Llama-3.1-8B, Llama-3.1-70B,
Llama-3.2-1B, Llama-3.2-3B).

Mixtral has Llama's attention, and experts in every layer. Its tensors call an expert's gate, up and down matrices w1,
w3 and w2. The weights of the chosen experts are always divided by their sum. Sizes are those of
https://huggingface.co/mistralai/Mixtral-8x7B-Instruct-v0.1, config.json.

Axes: D model width, F ffn width, E experts.
"""

from dataclasses import replace
from typing import Any

from tunix.models.config import EXPERTS, DecoderConfig, Experts, Rope
from tunix.models.families import base
from tunix.models.families.hf_config import Fields


def read(fields: Fields) -> DecoderConfig:
    """A `llama` config.json. Llama 1 and 2, and models derived from them, read the same way."""
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    shape = base.sizes(fields, {"max_position_embeddings": 2048})
    return base.decoder(fields, _3, shape, rope=fields.rope(10_000.0, shape["max_positions"]))


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `llama` folder."""
    return base.written(config) | {"attention_bias": False, "mlp_bias": False}


_3 = DecoderConfig(
    family="llama",
    activation="silu",
    norm_eps=1e-5,
    tied=False,
    rope=Rope(theta=500_000.0),
    **{**base.SMALL, "vocab_size": 128_256, "max_positions": 8192},
)
_31 = replace(_3, max_positions=131_072, rope=Rope(theta=500_000.0, kind="llama3", factor=8.0))
_32 = replace(_31, tied=True, rope=replace(_31.rope, factor=32.0))

LLAMA = base.FamilyText(
    model_types=("llama",),
    hub="llama",
    template="llama3",
    architecture="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    read=read,
    write=write,
    tensors={**base.SHARED, **base.TWO_NORMS},
    presets={
        "llama3-8b": base.sized(_3, 4096, 14_336, 32, 32, 8, 128),
        "llama3.1-8b": base.sized(_31, 4096, 14_336, 32, 32, 8, 128),
        "llama3.1-70b": base.sized(_31, 8192, 28_672, 80, 64, 8, 128),
        "llama3.2-1b": base.sized(_32, 2048, 8192, 16, 32, 8, 64),
        "llama3.2-3b": base.sized(_32, 3072, 8192, 28, 24, 8, 128),
    },
    small=replace(_3, tied=True, rope=Rope(theta=10_000.0), **base.SMALL),
    whole_heads=True,
)

NUMBER, ACTIVE = 8, 2


def read_mixtral(fields: Fields) -> DecoderConfig:
    """A `mixtral` config.json."""
    fields.only("sliding_window", None)
    fields.only("router_jitter_noise", 0, 0.0)
    shape = base.sizes(fields, {"max_position_embeddings": 131_072})
    return base.decoder(
        fields,
        _MIXTRAL,
        shape,
        eps=1e-5,
        rope=fields.rope(1_000_000.0, shape["max_positions"]),
        experts=fields.experts(NUMBER, ACTIVE),
    )


def write_mixtral(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `mixtral` folder."""
    assert config.experts is not None, "the family has them"
    return base.written(config) | {
        "sliding_window": None,
        "num_local_experts": config.experts.number,
        "num_experts_per_tok": config.experts.active,
    }


_MIXTRAL = replace(
    _3,
    family="mixtral",
    vocab_size=32_000,
    max_positions=32_768,
    rope=Rope(theta=1_000_000.0),
    experts=Experts(NUMBER, ACTIVE),
    feed_forward=EXPERTS,
)

MIXTRAL = base.FamilyText(
    model_types=("mixtral",),
    hub="mixtral",
    template="chatml",
    architecture="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    read=read_mixtral,
    write=write_mixtral,
    tensors={
        **base.SHARED,
        **base.TWO_NORMS,
        **base.in_layers(
            {
                "router/w": ("block_sparse_moe.gate.weight", "E D", "D E"),
                "gates/w": ("block_sparse_moe.experts.{expert}.w1.weight", "F D", "E D F"),
                "ups/w": ("block_sparse_moe.experts.{expert}.w3.weight", "F D", "E D F"),
                "downs/w": ("block_sparse_moe.experts.{expert}.w2.weight", "D F", "E F D"),
            }
        ),
    },
    presets={"mixtral-8x7b": base.sized(_MIXTRAL, 4096, 14_336, 32, 32, 8, 128)},
    small=replace(_MIXTRAL, **base.SMALL),
)
