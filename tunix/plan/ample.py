"""Whether a run fits its devices so easily that nothing need be compiled to see it, by arithmetic."""

from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.models.attention.attend import SHORT
from tunix.models.config import DecoderConfig
from tunix.plan.structure import structure
from tunix.recipe.recipe import Recipe
from tunix.run.opening import weight_counts
from tunix.trainer.microbatches import TOKENS_ELSEWHERE
from tunix.trainer.remat import activations

SHARE = 0.5
"""The part of a device's memory that the estimate may take."""
STATE = 20
"""Bytes of a weight that trains, with two moments, the gradients of a micro-batch and their sum, all in float32."""
ITEMSIZE = {"float32": 4, "bfloat16": 2}


def ample(recipe: Recipe, memory: float) -> bool:
    """Whether all stages of a recipe take at most SHARE of one device, by an estimate that is above what they need.

    False too where that is not known: a model of no known sizes, an adapter from a folder, an algorithm of the
    user's, a critic, a teacher, a reward model, pictures.

    Args:
        memory: bytes that JAX may take of the smallest device.
    """
    try:
        config = structure(recipe.model, recipe.data.pictures is not None).decoder
    except UserError:
        return False
    if config.vision is not None:
        return False
    stages = recipe.stages or (recipe,)
    return all(_bytes(stage, recipe.model, config) <= SHARE * memory for stage in stages)


def _bytes(recipe: Recipe, model: ModelConfig, config: DecoderConfig) -> float:
    """An upper estimate of a run's memory on one device; infinity where it is not known."""
    trained, total = weight_counts(recipe, config)
    name, judge = recipe.algorithm.name, recipe.reward.model if recipe.reward else None
    remat = "block" if model.remat == "auto" else model.remat
    if trained is None or recipe.teacher or judge or name == "ppo" or ":" in name or remat == "offload":
        return float("inf")
    item = ITEMSIZE[model.dtype]
    stored = ITEMSIZE[model.param_dtype or model.dtype]
    # A pair is packed into one row.
    length = recipe.data.max_length * (2 if name in ("dpo", "reward") else 1)
    tokens = max(TOKENS_ELSEWHERE, (recipe.micro_batch_size or 1) * length)
    needed = activations(config, remat, item, tokens, min(length, SHORT))
    # Beside a weight that trains there may be a reference's and the sampler's copy, beside a frozen one the latter.
    frozen = total - trained if recipe.adapter is None else total
    return (STATE + 2 * item) * trained + (stored + item) * frozen + sum(needed)
