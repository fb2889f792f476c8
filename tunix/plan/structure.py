"""The structure of a recipe's model without its weights and without a download; and whether a run fits its devices so
easily that nothing need be compiled to see it."""

import re
from pathlib import Path

from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.hf.peft_folder import CONFIG, named_base
from tunix.hf.run_export import exported
from tunix.hf.source import Source, from_scratch
from tunix.models.attention.attend import SHORT
from tunix.models.config import DecoderConfig
from tunix.models.families.table import presets, read_config, with_vision
from tunix.recipe.recipe import Recipe
from tunix.run.opening import weight_counts
from tunix.trainer.microbatches import TOKENS_ELSEWHERE
from tunix.trainer.remat import activations


def structure(config: ModelConfig, pictures: bool = False) -> Source:
    """The source of a recipe's model, with neither weights nor tokenizer.

    Args:
        config: the recipe's `model` section.
        pictures: whether the tower that sees pictures belongs to the model.

    Raises:
        UserError: the model's sizes are not known here.
    """
    if config.path is None:
        return from_scratch(config, pictures)
    return Source(decoder_of(config.path, pictures), None, name=config.path)


def decoder_of(path: str, pictures: bool = False) -> DecoderConfig:
    """The structure of a model: from the config.json of a folder, of a run's export or of a hub id's files in the
    cache, or else from the preset that a hub id names.

    Raises:
        UserError: there is none of these.
    """
    folder = Path(path).expanduser()
    if (folder / "recipe.yaml").is_file():
        folder = exported(folder)
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file() and (base := named_base(folder)):
        return decoder_of(base, pictures)
    if folder.is_dir():
        return read_config(folder, pictures)
    if (cached := _cached(path)) is not None:
        return read_config(cached, pictures)
    if (name := named_preset(path)) is not None:
        return with_vision(presets()[name], published=True) if pictures else presets()[name]
    raise UserError(
        f"{path}: its sizes are not known here, and a plan downloads nothing: give a folder with its config.json, "
        "such as `model.path=folder`"
    )


def named_preset(name: str) -> str | None:
    """The preset that a hub id names: `qwen3-0.6b` for `Qwen/Qwen3-0.6B-Base`; None without one."""
    wanted = _bare(name.rpartition("/")[2])
    named = [one for one in presets() if re.search(rf"{re.escape(_bare(one))}(?![0-9.])", wanted)]
    return max(named, key=len, default=None)


def _bare(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def _cached(name: str) -> Path | None:
    """The folder in the hub's cache with the config.json of a hub id; None where it was never downloaded."""
    import huggingface_hub

    try:
        file = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except huggingface_hub.errors.HFValidationError:  # no hub id
        return None
    return Path(file).parent if isinstance(file, str) else None


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
    name, reward_model = recipe.algorithm.name, recipe.reward.model if recipe.reward else None
    remat = "block" if model.remat == "auto" else model.remat
    if trained is None or recipe.teacher or reward_model or name == "ppo" or ":" in name or remat == "offload":
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
