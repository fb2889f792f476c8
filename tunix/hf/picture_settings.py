"""How a multimodal folder's pictures are read: its preprocessor_config.json, and the tokens that stand for them."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunix.data.pictures import PictureReader
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
ALWAYS = ("do_resize", "do_rescale", "do_normalize")
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
        markers = PICTURE_MARKERS[FAMILIES[decoder.family].template].values()
        if missing := [token for token in markers if not tokenizer.has_token(token)]:
            raise UserError(
                f"data.pictures: {tokenizer.name} has no token {', '.join(missing)}: take a multimodal model's "
                "tokenizer, or `tokenizer: bytes`"
            )
        vocabulary = tokenizer.hf.get_added_vocab()
        begin_id, end_id, soft_id = (vocabulary[token] for token in markers)
        vision = replace(vision, begin_id=begin_id, end_id=end_id, soft_id=soft_id)
    ids = (vision.begin_id, vision.soft_id, vision.end_id)
    names = [tokenizer.hf.convert_ids_to_tokens(i) for i in ids]
    if wrong := [i for i, name in zip(ids, names, strict=True) if name is None or not tokenizer.is_added(i)]:
        raise UserError(f"data.pictures: {tokenizer.name} has no special token of id {wrong[0]}, which marks pictures")
    # Fields of the folder's file and the values of them that are handled, the usual one first.
    handled: dict[str, tuple[Any, ...]]
    if vision.any_shape:
        handled = {"patch_size": (vision.patch,), "merge_size": (vision.pool,), "temporal_patch_size": (FRAMES,)}
    else:
        handled = {"size": ({"height": vision.side, "width": vision.side},), "do_pan_and_scan": (None, False)}
    handled |= {"image_mean": (HALF,), "image_std": (HALF,), **dict.fromkeys(ALWAYS, (True, None))}
    files = [] if folder is None else [folder / SETTINGS, folder / PROCESSOR]
    raw: Mapping[str, Any] = {}
    if file := next((file for file in files if file.is_file()), None):
        raw = read_json(file)
        raw = raw.get("image_processor", raw)
        for name, values in handled.items():
            if name in raw and raw[name] not in values:
                raise UserError(f"{file}: {name} = {raw[name]!r} is not supported; only {values[0]!r} is.")
        if abs(raw.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
            raise UserError(f"{file}: rescale_factor = {raw['rescale_factor']!r} is not supported; only 1 / 255 is.")
    resample, pixel_range = BILINEAR, None
    if vision.any_shape:
        size = raw.get("size") or {}
        least_pixels = raw.get("min_pixels") or size.get("shortest_edge") or LEAST_PIXELS
        most_pixels = raw.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS
        square = (vision.pool * vision.patch) ** 2
        # Sides are rounded up where a picture is enlarged: this leaves room for it.
        least_pixels = min(least_pixels, max(math.isqrt(vision.tokens) - 1, 1) ** 2 * square)
        resample, pixel_range = BICUBIC, (least_pixels, min(most_pixels, vision.tokens * square))
    begin, soft, end = map(str, names)
    reader = PictureReader(
        begin=begin,
        soft=soft,
        end=end,
        soft_id=vision.soft_id,
        tokens=vision.tokens,
        patch=vision.patch,
        pool=vision.pool,
        most=most,
        resample=int(raw.get("resample", resample)),
        pixel_range=pixel_range,
    )
    return replace(decoder, vision=vision), tokenizer.seeing(reader)


def write_settings(folder: Path, vision: VisionConfig, sources: list[Path]) -> None:
    """Writes the files that say how pictures are read into a new folder.

    Args:
        folder: the new folder.
        vision: its tower.
        sources: folders whose files are copied, the first one that has each; without any they are made anew.
    """
    for name in (SETTINGS, PROCESSOR):
        if file := next((source / name for source in sources if (source / name).is_file()), None):
            shutil.copyfile(file, folder / name)
    if not (folder / SETTINGS).exists() and not (folder / PROCESSOR).exists():
        about: dict[str, Any] = {"processor_class": "Qwen3VLProcessor" if vision.any_shape else "Gemma3Processor"}
        if vision.any_shape:
            settings = {
                "image_processor_type": "Qwen2VLImageProcessor",
                **about,
                "size": {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS},
                "patch_size": vision.patch,
                "merge_size": vision.pool,
                "temporal_patch_size": FRAMES,
                "resample": BICUBIC,
            }
        else:
            size = {"height": vision.side, "width": vision.side}
            settings = {"image_processor_type": "Gemma3ImageProcessor", **about, "size": size, "resample": BILINEAR}
            about["image_seq_length"] = vision.tokens
        usual = {"image_mean": HALF, "image_std": HALF, "rescale_factor": 1 / 255}
        usual |= dict.fromkeys(ALWAYS, True)
        for name, values in ((SETTINGS, {**settings, **usual}), (PROCESSOR, about)):
            (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
