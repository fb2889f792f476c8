"""How a multimodal folder's pictures are read: its preprocessor_config.json, and the tokens that stand for them."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunix.data.picture_reader import AnyShapeReader, PictureReader, SquareReader
from tunix.data.templates import PICTURE_MARKERS
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.models.config import FRAMES, DecoderConfig, VisionConfig
from tunix.models.families.table import FAMILIES, read_json

SETTINGS = "preprocessor_config.json"
"""The file of a multimodal folder that says how pictures are resized."""
PROCESSOR = "processor_config.json"
"""The file in which transformers 5 writes the same settings, inside of `image_processor`."""
HALF = [0.5, 0.5, 0.5]
BILINEAR, BICUBIC = 2, 3
"""PIL's numbers of the resamplings that the processors of Gemma 3 and of Qwen use."""
LEAST_PIXELS, MOST_PIXELS = 65_536, 16_777_216
"""Between which published Qwen folders bring the pixels of a picture."""


def with_reader(
    decoder: DecoderConfig, tokenizer: Tokenizer | None, folder: Path | None, most: int, tokens: int | None = None
) -> tuple[DecoderConfig, Tokenizer]:
    """The structure with the ids of its tokens of pictures, and a tokenizer that reads pictures.

    Args:
        decoder: has a tower.
        tokenizer: knows the tokens of pictures.
        folder: the model's folder, whose config.json says the ids; None for a random model, whose tokenizer does.
        most: pictures of a row at most.
        tokens: of a picture at most; None for what the structure says.

    Raises:
        UserError: the tokenizer does not know the tokens, or the folder resizes pictures in a way that is not handled.
    """
    vision = decoder.vision
    assert vision is not None, "a model with a tower"
    if tokenizer is None:
        raise UserError("data.pictures: the model has no tokenizer, whose tokens mark pictures")
    if tokens is not None and not vision.any_shape:
        raise UserError(
            f"data.picture_tokens: all pictures of {decoder.family} have {vision.tokens} tokens; leave it out"
        )
    vision = replace(vision, tokens=tokens or vision.tokens)
    if folder is None:
        vision = replace(vision, **_ids(tokenizer, PICTURE_MARKERS[FAMILIES[decoder.family].template]))
    ids = (vision.begin_id, vision.soft_id, vision.end_id)
    names = [tokenizer.hf.convert_ids_to_tokens(one) for one in ids]
    if wrong := [one for one, name in zip(ids, names, strict=True) if name is None or not tokenizer.is_added(one)]:
        raise UserError(f"data.pictures: {tokenizer.name} has no special token of id {wrong[0]}, which marks pictures")
    own: dict[str, Any] = dict(zip(("begin", "soft", "end"), map(str, names), strict=True))
    own |= {name: getattr(vision, name) for name in ("soft_id", "tokens", "patch", "pool")} | {"most": most}
    reader = _any_shape(own, folder, vision) if vision.any_shape else _squares(own, folder, vision)
    return replace(decoder, vision=vision), tokenizer.seeing(reader)


def _ids(tokenizer: Tokenizer, markers: Mapping[str, str]) -> dict[str, int]:
    """The ids of the tokens of pictures, as `VisionConfig` names them, from the tokens before, after and for each."""
    if missing := [token for token in markers.values() if not tokenizer.has_token(token)]:
        raise UserError(
            f"data.pictures: {tokenizer.name} has no token {', '.join(missing)}: take a multimodal model's tokenizer, "
            "or `tokenizer: bytes`"
        )
    vocabulary = tokenizer.hf.get_added_vocab()
    names = ("begin_id", "end_id", "soft_id")
    return {ours: vocabulary[token] for ours, token in zip(names, markers.values(), strict=True)}


def _squares(own: dict[str, Any], folder: Path | None, vision: VisionConfig) -> PictureReader:
    """The reader of pictures that all become squares of one size; `own` are what all readers have."""
    side = vision.side
    wanted = {"size": ({"height": side, "width": side},), "do_pan_and_scan": (None, False)}
    raw = {} if folder is None else _settings(folder, wanted)
    return SquareReader(**own, resample=int(raw.get("resample", BILINEAR)))


def _any_shape(own: dict[str, Any], folder: Path | None, vision: VisionConfig) -> PictureReader:
    """The reader of pictures that keep their proportions; `own` are what all readers have."""
    wanted = {"patch_size": (vision.patch,), "merge_size": (vision.pool,), "temporal_patch_size": (FRAMES,)}
    raw = {} if folder is None else _settings(folder, wanted)
    size = raw.get("size") or {}
    least = raw.get("min_pixels") or size.get("shortest_edge") or LEAST_PIXELS
    most = raw.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS
    square = (vision.pool * vision.patch) ** 2
    # Sides are rounded up where a picture is enlarged: this leaves room for it.
    least = min(least, max(math.isqrt(vision.tokens) - 1, 1) ** 2 * square)
    own |= {"least_pixels": least, "most_pixels": min(most, vision.tokens * square)}
    own["resample"] = int(raw.get("resample", BICUBIC))
    return AnyShapeReader(**own)


def _settings(folder: Path, wanted: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
    """The settings that a folder has; empty where it has none.

    Args:
        folder: the model's.
        wanted: fields and the values of them that are handled, the usual one first.

    Raises:
        UserError: it asks for something that is not handled.
    """
    file = next((folder / name for name in (SETTINGS, PROCESSOR) if (folder / name).is_file()), None)
    if file is None:
        return {}
    raw: Mapping[str, Any] = read_json(file)
    raw = raw.get("image_processor", raw)
    always = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), (True, None))
    for name, values in {**wanted, "image_mean": (HALF,), "image_std": (HALF,), **always}.items():
        if name in raw and raw[name] not in values:
            raise UserError(f"{file}: {name} = {raw[name]!r} is not supported; only {values[0]!r} is.")
    if abs(raw.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise UserError(f"{file}: rescale_factor = {raw['rescale_factor']!r} is not supported; only 1 / 255 is.")
    return raw


def write_settings(folder: Path, vision: VisionConfig, sources: list[Path]) -> None:
    """Writes the files that say how pictures are read into a new folder.

    Args:
        folder: the new folder.
        vision: its tower.
        sources: folders whose files are copied, the first one that has each; without any they are made anew.
    """
    for name in (SETTINGS, PROCESSOR):
        if found := next((source / name for source in sources if (source / name).is_file()), None):
            shutil.copyfile(found, folder / name)
    if not (folder / SETTINGS).exists() and not (folder / PROCESSOR).exists():
        settings, about = _of_any_shape(vision) if vision.any_shape else _of_squares(vision)
        usual = {"image_mean": HALF, "image_std": HALF, "rescale_factor": 1 / 255}
        usual |= dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
        for name, values in ((SETTINGS, {**settings, **usual}), (PROCESSOR, about)):
            (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _of_squares(vision: VisionConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of both files for Gemma 3."""
    about = {"processor_class": "Gemma3Processor"}
    size = {"height": vision.side, "width": vision.side}
    settings = {"image_processor_type": "Gemma3ImageProcessor", **about, "size": size, "resample": BILINEAR}
    return settings, {**about, "image_seq_length": vision.tokens}


def _of_any_shape(vision: VisionConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of both files for Qwen."""
    about = {"processor_class": "Qwen3VLProcessor"}
    size = {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS}
    sizes = {"patch_size": vision.patch, "merge_size": vision.pool, "temporal_patch_size": FRAMES}
    settings = {"image_processor_type": "Qwen2VLImageProcessor", **about, "size": size, **sizes, "resample": BICUBIC}
    return settings, about
