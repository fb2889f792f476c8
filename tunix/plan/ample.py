"""Whether a run fits its devices so easily that nothing need be compiled to see it, by arithmetic."""

from tunix.config import ModelConfig
from tunix.models.attention.attend import SHORT
from tunix.models.config import DecoderConfig
from tunix.recipe.recipe import Recipe
from tunix.run.opening import model_of, weight_counts
from tunix.trainer.microbatches import TOKENS_ELSEWHERE
from tunix.trainer.remat import activations

SHARE = 0.5
"""The part of a device's memory that the estimate may take."""
TRAINED, FROZEN = 28, 8
"""Bytes of a weight at most: itself, two moments, the gradients of a micro-batch and their sum, the reference and the
sampler's copy, all in float32; of a frozen one itself and a copy."""
ITEM = 4
"""Bytes of a number of the computation at most."""


def ample(recipe: Recipe, memory: float) -> bool:
    """Whether all stages of a recipe take at most SHARE of one device, by an estimate that is above what they need.

    False too where that is not known: a model that has to be fetched, an adapter from a folder, an algorithm of the
    user's, a critic, a teacher, a reward model, pictures.

    Args:
        memory: bytes of the smallest device.
    """
    config, _ = model_of(recipe)
    if config is None or config.vision is not None:
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
    # A pair is packed into one row.
    length = 2 * recipe.data.max_length
    tokens = max(TOKENS_ELSEWHERE, (recipe.micro_batch_size or 1) * length)
    needed = activations(config, remat, ITEM, tokens, min(length, SHORT))
    return TRAINED * trained + FROZEN * total + sum(needed)
