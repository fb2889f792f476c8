"""The families by name, and the ways to a `DecoderConfig`: a folder's config.json, a preset, or a few sizes.

Loads without jax, so that a recipe is checked at once.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tunix.config import ModelConfig, MtpUse
from tunix.errors import UserError, nearest
from tunix.models.config import DENSE_AND_EXPERTS, DecoderConfig
from tunix.models.families.base import SMALL, FamilyText, Tensor
from tunix.models.families.gemma import GEMMA, GEMMA2
from tunix.models.families.gemma3 import GEMMA3
from tunix.models.families.gemma4 import GEMMA4
from tunix.models.families.gpt_oss import GPT_OSS
from tunix.models.families.hf_config import Fields
from tunix.models.families.llama import LLAMA, MIXTRAL
from tunix.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from tunix.models.families.qwen35 import QWEN35, QWEN35_MOE
from tunix.models.quantization.schemes import SECTION, check_section
from tunix.util.atomic_io import refuse_foreign

SIZE_NAMES = (*SMALL, "window")
"""What `sizes` in a recipe may replace; `window` only where layers are local."""


def read_config(folder: Path, pictures: bool = False, mtp: MtpUse | None = None) -> DecoderConfig:
    """The model that a folder's config.json describes, whatever its weights are (`hf.source` checks).

    Args:
        folder: has config.json.
        pictures: as in `from_hf`.
        mtp: likewise.

    Raises:
        UserError: config.json is missing or broken, the model type is not supported, or a field is not handled.
    """
    return from_hf(read_json(folder / "config.json"), folder / "config.json", pictures, mtp)


def family_of(raw: Mapping[str, Any], file: Path) -> str:
    """The family of a parsed config.json.

    Raises:
        UserError: the model type is not supported.
    """
    model_type = raw.get("model_type")
    family = family_of_type(model_type)
    if family is None:
        supported = ", ".join(kind for family in FAMILIES.values() for kind in family.model_types)
        raise UserError(f"{file}: model_type = {model_type!r} is not supported; tunix has {supported}.")
    return family


def family_of_type(model_type: Any) -> str | None:
    """The family of a `model_type` of config.json, or None."""
    return next((name for name, family in FAMILIES.items() if model_type in family.model_types), None)


def from_hf(raw: Mapping[str, Any], file: Path, pictures: bool = False, mtp: MtpUse | None = None) -> DecoderConfig:
    """The config of a parsed config.json.

    Args:
        raw: what the file holds.
        file: named in errors.
        pictures: whether the tower that sees pictures belongs to the model; else only the text part is read.
        mtp: what happens to the head that drafts tokens; None where it does not belong to the model.
    """
    fields = Fields(raw, file)
    family = FAMILIES[family_of(raw, file)]
    if raw.get(SECTION) is not None:
        check_section(fields.mapping(SECTION), file, family.packed)
    if family.multimodal and "text_config" in raw:
        text = Fields(fields.mapping("text_config"), file, "text_config.")
        config = family.read(text)
        text.finish()
        fields.only("tie_word_embeddings", config.tied)
        fields.read |= set(family.multimodal)
        # Chat folders of Gemma 3 name the end of a turn outside the text part only: [1, 106] there, 1 inside.
        config = replace(config, stops=tuple({**dict(config.stops), **dict(fields.stops())}.items()))
    else:
        config = family.read(fields)
    if pictures:
        if family.vision is None or "vision_config" not in raw:
            sees = ", ".join(f"{name} folders with a vision_config" for name, text in FAMILIES.items() if text.vision)
            raise UserError(
                f"{file}: model_type = {raw.get('model_type')!r} is read as a text model, which sees no "
                f"pictures: leave data.pictures out, or take a model that does ({sees})."
            )
        config = replace(config, vision=family.vision.read(fields))
    fields.finish()
    if mtp:
        text = raw.get("text_config", raw)
        layers, dedicated = text.get("mtp_num_hidden_layers", 1), text.get("mtp_use_dedicated_embeddings", False)
        if not family.mtp:
            raise without_mtp(file, f"model_type = {raw.get('model_type')!r} has no head that is read here")
        if layers != 1 or dedicated:
            what = "mtp_use_dedicated_embeddings" if dedicated else "mtp_num_hidden_layers"
            raise without_mtp(
                file, f"{what} = {text.get(what)}, and heads of one layer with the model's tables are read"
            )
        config = replace(config, mtp=mtp)
    _check(config, str(file))
    return config


def without_mtp(file: Path, reason: str) -> UserError:
    """The error for a folder without a head that drafts tokens, where one is asked for."""
    return UserError(
        f"model.mtp (--mtp): {file}: {reason}: leave it out, or take a Qwen 3.5 folder with its mtp.* weights"
    )


def with_vision(config: DecoderConfig, published: bool) -> DecoderConfig:
    """A random model's config with a tower: the published one, or a tiny one.

    Raises:
        UserError: the family has none.
    """
    vision = FAMILIES[config.family].vision
    if vision is None:
        sees = ", ".join(name for name, one in FAMILIES.items() if one.vision)
        raise UserError(
            f"{config.family} sees no pictures: leave data.pictures out, or take a family that does ({sees})."
        )
    return replace(config, vision=vision.published if published else vision.small)


def tensors_of(config: DecoderConfig) -> Mapping[str, Tensor]:
    """The tensors of a model by our parameters' names, those of its tower and of its head that drafts included where
    it has them."""
    family = FAMILIES[config.family]
    tower = family.vision.tensors if config.vision and family.vision else {}
    return {**family.tensors, **tower, **(family.mtp if config.mtp else {})}


def count_weights(config: DecoderConfig) -> dict[str, int]:
    """How many weights a model has under each of our names, those of all layers together; without a scalar head."""
    sizes, counts, experts = FAMILIES[config.family].axes(config), {}, config.experts
    # Tensors of the family that this model has not, although it has their layers and all of their axes.
    unused = {"value/w"}
    unused |= {"head/w"} if config.tied else set()
    if experts is not None and not experts.shared:
        unused |= {f"layers/{name}/w" for name in ("gate", "up", "down")}
    if config.feed_forward != DENSE_AND_EXPERTS:
        unused |= {f"layers/{name}/w" for name in ("dense_norm", "experts_norm", "pre_experts_norm", "router/norm")}
    unused |= set() if config.layer_inputs else {"layers/post_input_norm/w"}
    unused |= {"layers/global_v/w"} if config.gemma4 and config.gemma4.keys_are_values else set()
    for name, tensor in tensors_of(config).items():
        layers = len(config.layers_with(tensor.mixer)) if tensor.layered else 1
        count = layers * math.prod(sizes[axis] for axis in tensor.ours.split())
        if count and name not in unused:
            counts[name] = count
    return counts


class Sides(NamedTuple):
    """The sides of a matrix, of experts those of a single one's, and how many layers have one."""

    layers: int
    inputs: int
    outputs: int


@cache  # every step counts its operations by them
def matrices(config: DecoderConfig) -> Mapping[str, Sides]:
    """The sides of the matrices of a model's layers, by our names such as `up`."""
    sizes, counts, sides = FAMILIES[config.family].axes(config), count_weights(config), dict[str, Sides]()
    for name, tensor in tensors_of(config).items():
        match = re.fullmatch("layers/(.*)/w", name)
        if match and name in counts and len(tensor.groups) == 2:
            axes = [sizes[axis] for axis in tensor.single.ours.split()]
            inputs, outputs = math.prod(axes[: tensor.contracted]), math.prod(axes[tensor.contracted :])
            sides[match[1]] = Sides(len(config.layers_with(tensor.mixer)), inputs, outputs)
    return sides


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json from which transformers builds the same model (without its dtype)."""
    family = FAMILIES[config.family]
    text = family.write(config)
    if config.vision is None or family.vision is None:
        return {"architectures": [family.architecture], **text}
    return {
        "architectures": [family.vision.architecture],
        **{name: text[name] for name, _ in config.stops},
        "model_type": family.model_types[-1],
        "tie_word_embeddings": config.tied,
        "text_config": text,
        **family.vision.write(config, config.vision),
    }


def preset(name: str) -> DecoderConfig:
    """A published size by name, such as `gemma3-1b`.

    Raises:
        UserError: there is none of this name.
    """
    known = presets()
    if name not in known:
        raise UserError(f"preset {name!r} is not known.{nearest(name, known)} There are {', '.join(known)}.")
    return known[name]


def presets() -> dict[str, DecoderConfig]:
    """The published sizes of all families by name."""
    return {name: size for family in FAMILIES.values() for name, size in family.presets.items()}


def small(family: str) -> DecoderConfig:
    """A family's tiny shape, the start of `init: random` where only the family and sizes are given.

    Raises:
        UserError: there is no such family.
    """
    if family not in FAMILIES:
        raise UserError(f"family {family!r} is not known.{nearest(family, FAMILIES)} There are {', '.join(FAMILIES)}.")
    return FAMILIES[family].small


def from_recipe(model: ModelConfig) -> DecoderConfig:
    """The structure of a model with random weights: a preset, or a family's tiny shape, with a recipe's sizes.

    Raises:
        UserError: there is no such preset or family, or the sizes do not fit.
    """
    shape = preset(model.preset) if model.preset else small(str(model.family))
    return with_sizes(shape, dict(model.sizes))


def with_sizes(config: DecoderConfig, sizes: Mapping[str, int]) -> DecoderConfig:
    """The config with some sizes replaced, and the sizes that follow from them adjusted.

    Local layers keep the family's pattern, and head_dim stays d_model / num_heads where it was and is not given. Heads
    of global layers stay as many times as wide.

    Raises:
        UserError: a size is unknown or not positive, or they do not fit each other.
    """
    for name, size in sizes.items():
        if name not in SIZE_NAMES:
            raise UserError(f"sizes.{name} is not a size of a model.{nearest(name, SIZE_NAMES)}")
        if size <= 0:
            raise UserError(f"sizes.{name} = {size} must be positive.")
    if "window" in sizes and config.window is None:
        raise UserError(f"sizes.window = {sizes['window']} means nothing for {config.family}: no layer is local.")
    new = replace(config, **sizes)
    if "head_dim" not in sizes and config.head_dim * config.num_heads == config.d_model:
        new = replace(new, head_dim=new.d_model // new.num_heads)
    family = FAMILIES[config.family]
    if config.local_layers and "num_layers" in sizes:
        new = replace(new, local_layers=family.local(new.num_layers))
    if config.linear_layers and "num_layers" in sizes:
        new = replace(new, linear_layers=family.linear(new.num_layers))
    if gemma4 := config.gemma4:
        shared = gemma4.shared_layers
        if shared and "num_layers" in sizes:
            # As large a part as before may read the keys and values of others, where those before have all kinds.
            most, local = shared * new.num_layers // config.num_layers, new.local_layers or (False,) * new.num_layers
            shared = next((n for n in range(most, 0, -1) if set(local[: len(local) - n]) == set(local)), 0)
        width = gemma4.global_head_dim * new.head_dim // config.head_dim
        kv_heads = min(gemma4.global_kv_heads, new.num_kv_heads)
        gemma4 = replace(gemma4, global_head_dim=width, global_kv_heads=kv_heads, shared_layers=shared)
        new = replace(new, gemma4=gemma4)
    _check(new, "sizes")
    return new


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: the file is missing, is a link out of its folder, or holds no JSON object.
    """
    refuse_foreign(file.parent, file.name)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} is missing: {file.parent} is not a folder in Hugging Face's format.") from None
    except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
        raise UserError(f"{file} is not valid JSON ({error}).") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file} holds {type(raw).__name__}, not a JSON object.")
    return raw


def _check(config: DecoderConfig, where: str) -> None:
    """Refuses shapes that cannot be computed, or that transformers would refuse after an export."""
    c, heads = config, [(config.num_kv_heads, config.head_dim)]
    if c.gemma4 is not None:
        heads.append((c.gemma4.global_kv_heads, c.gemma4.global_head_dim))
    for kv_heads, head_dim in heads:
        if c.num_heads % kv_heads:
            raise UserError(f"{where}: num_heads = {c.num_heads} is not a multiple of num_kv_heads = {kv_heads}.")
        if head_dim < 2 or head_dim % 2:
            raise UserError(f"{where}: head_dim = {head_dim} must be even: rope turns pairs of dimensions.")
    if FAMILIES[c.family].whole_heads and c.d_model % c.num_heads:
        raise UserError(
            f"{where}: d_model = {c.d_model} is not a multiple of num_heads = {c.num_heads}; "
            f"transformers would refuse to load the exported {c.family} folder."
        )


FAMILIES: dict[str, FamilyText] = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35_MOE,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "mixtral": MIXTRAL,
}
"""What `model.family` may be in a recipe -> the family. A new one is one file in this folder, and one line here."""
