"""The experts of Gemma 4 26B-A4B: fields of config.json and tensors. They are beside the dense ffn in every layer
(`models/dense_and_experts.py`).

Axes: D model width, E experts, Fe ffn width of an expert.
"""

from typing import Any

from tunix.models.config import DENSE_AND_EXPERTS, DecoderConfig, Experts
from tunix.models.families.base import in_layers
from tunix.models.families.hf_config import Fields

FIELDS = ("num_experts", "top_k_experts", "moe_intermediate_size")
"""What means nothing where no layer has experts."""
EXPERT_TENSORS = in_layers(
    {
        "router/w": ("router.proj.weight", "E D", "D E"),
        "router/norm/w": ("router.scale", "D", "D"),
        "router/factor": ("router.per_expert_scale", "E", "E"),
        "gates/w": ("experts.{expert}.gate_proj.weight", "Fe D", "E D Fe"),
        "ups/w": ("experts.{expert}.up_proj.weight", "Fe D", "E D Fe"),
        "downs/w": ("experts.{expert}.down_proj.weight", "D Fe", "E Fe D"),
        "dense_norm/w": ("post_feedforward_layernorm_1.weight", "D", "D"),
        "pre_experts_norm/w": ("pre_feedforward_layernorm_2.weight", "D", "D"),
        "experts_norm/w": ("post_feedforward_layernorm_2.weight", "D", "D"),
    }
)
STACKED = {".gate_up_proj": (".gate_proj.weight", ".up_proj.weight"), ".down_proj": (".down_proj.weight",)}
"""How a folder holds the matrices of all experts of a layer."""


def read_experts(fields: Fields, dense: int, wide: bool) -> dict[str, Any]:
    """The settings of layers with experts, as DecoderConfig names them; none where there are none.

    Args:
        dense: width of the dense ffn.
        wide: whether it is twice as wide in some layers.
    """
    if not fields.flag("enable_moe_block", False):
        fields.read |= set(FIELDS)
        return {}
    if wide:
        fields.refuse("use_double_wide_mlp", "is not supported in layers with experts (enable_moe_block).")
    experts = Experts(fields.integer("num_experts"), fields.integer("top_k_experts"), shared=dense)
    if experts.active > experts.number:
        fields.refuse("top_k_experts", f"is more than the {experts.number} experts that there are.")
    return {
        "ffn": fields.integer("moe_intermediate_size"),
        "experts": experts,
        "feed_forward": DENSE_AND_EXPERTS,
    }


def write_experts(config: DecoderConfig) -> dict[str, Any]:
    """The fields of config.json for layers with experts, or for layers without."""
    experts = config.experts
    if experts is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": experts.number,
        "top_k_experts": experts.active,
        "moe_intermediate_size": config.ffn,
        "intermediate_size": experts.shared,
    }
