"""What MaxText computes: the settings by which it computes a model that is here, and the models that it has none for.

Read from MaxText 0.2.5: `layers/attentions.py` and `layers/embeddings.py` for ropes, `models/gemma*.py` for scores and
norms, `configs/models` for what a model's name stands for. Every size and number that a config.json states is set, so
that a name gives the kind of model alone.
"""

from collections.abc import Iterator, Mapping

from tunix.models.config import DecoderConfig, Rope
from tunix.models.families.table import FAMILIES

NAMES = {
    "llama": "llama3-8b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-4b",
    "qwen2": "qwen2.5-1.5b",
    "qwen3": "qwen3-0.6b",
}
"""Our families -> a model of MaxText's of the same kind."""
STRETCHED = "llama3.1-8b"
"""Models of this name turn Llama's queries and keys by pairs of neighbours, and stretch the rope by `LLAMA31`."""
WIDE_SCORES = "gemma3-27b"
"""Gemma 3 under this name divides scores by the root of D / N instead of the root of H."""
LLAMA31 = Rope(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
"""Numbers that MaxText has in its code."""
GEMMAS_EPS = 1e-6
"""MaxText's Gemma has it in its code for the norms of its layers."""


def neighbours(config: DecoderConfig) -> bool:
    """Whether MaxText turns dimensions 2i and 2i + 1 together, and not i and H/2 + i as everywhere else."""
    return config.family == "llama" and config.rope.kind == "llama3"


def differences(config: DecoderConfig) -> Iterator[str]:
    """What MaxText would compute in another way, whatever its settings are."""
    family, none = config.family, (False,) * config.num_layers
    if (config.local_layers or none) != (FAMILIES[family].local(config.num_layers) or none):
        yield f"layer_types differ from the pattern of MaxText's {family}, which its code fixes"
    if family == "gemma2" and config.num_layers % 2:
        yield (
            f"num_hidden_layers = {config.num_layers} is odd, and MaxText's gemma2 pairs a local with a global layer"
        )
    if family in ("gemma2", "gemma3") and config.norm_eps != GEMMAS_EPS:
        yield f"rms_norm_eps = {config.norm_eps}, and MaxText's {family} has {GEMMAS_EPS} in its code"
    if family == "gemma3" and config.scale not in (config.head_dim**-0.5, _wide_scale(config)):
        yield (
            f"query_pre_attn_scalar is neither head_dim = {config.head_dim} nor hidden_size // num_attention_heads, "
            "and MaxText's gemma3 has no other"
        )
    yield from _ropes(config)


def _ropes(config: DecoderConfig) -> Iterator[str]:
    rope, local = config.rope, config.rope_local
    if rope.kind not in ("default", "linear") and not neighbours(config):
        yield f"a rope of the type {rope.kind} is not one that we know MaxText's {config.family} to compute"
    numbers = (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_length)
    fixed = (LLAMA31.factor, LLAMA31.low_freq_factor, LLAMA31.high_freq_factor, LLAMA31.original_length)
    if neighbours(config) and numbers != fixed:
        yield (
            "rope_parameters has the factors {:g}, {:g} and {:g} and the length {}, and MaxText has Llama 3.1's in its "
            "code: {:g}, {:g}, {:g} and {}".format(*numbers, *fixed)
        )
    if local is not None and local.kind != "default":
        yield f"the rope of its local layers is stretched, which that of MaxText's {config.family} is not"
    for one in (rope, local):
        if one is not None and one.theta % 1:
            yield f"rope_theta = {one.theta} is no whole number, which MaxText's has to be"


def settings_of(config: DecoderConfig, rows: int, scanned: bool) -> Mapping[str, str | int | float | bool]:
    """MaxText's settings for a model.

    Args:
        config: of the model, without `differences`.
        rows: of MaxText's embedding.
        scanned: whether layers are stacked.
    """
    in_one = 2 if config.family == "gemma2" else 1
    local = {} if config.window is None else {"sliding_window_size": config.window}
    if config.rope_local is not None:
        local["local_rope_max_timescale"] = int(config.rope_local.theta)
    return {
        "model_name": _name(config),
        "override_model_config": True,
        "scan_layers": scanned,
        "base_num_decoder_layers": config.num_layers // in_one,
        "base_emb_dim": config.d_model,
        "base_num_query_heads": config.num_heads,
        "base_num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "base_mlp_dim": config.ffn,
        "vocab_size": rows,
        # It divides logits by sqrt(D) where the head is the embedding, unless told otherwise: right for Gemma, whose
        # embedding is multiplied by that.
        "logits_via_embedding": config.tied,
        "normalize_embedding_logits": config.scale_embeddings,
        "normalization_layer_epsilon": config.norm_eps,
        "rope_max_timescale": int(config.rope.theta),
        "rope_linear_scaling_factor": config.rope.factor if config.rope.kind == "linear" else 1.0,
        "attn_logits_soft_cap": config.attention_softcap or 0.0,
        "final_logits_soft_cap": config.logit_softcap or 0.0,
        **local,
    }


def _name(config: DecoderConfig) -> str:
    if neighbours(config):
        return STRETCHED
    if config.family == "gemma3" and config.scale != config.head_dim**-0.5:
        return WIDE_SCORES
    return NAMES[config.family]


def _wide_scale(config: DecoderConfig) -> float:
    return (config.d_model // config.num_heads) ** -0.5
