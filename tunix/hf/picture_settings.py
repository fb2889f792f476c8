"""How a multimodal folder's pictures are read: its preprocessor_config.json, and the tokens that stand for them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunix.data.pictures import BILINEAR, SETTINGS, PictureReader
from tunix.data.templates import PICTURE_MARKERS
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.models.config import DecoderConfig, VisionConfig
from tunix.models.families.table import read_json

PROCESSOR = "processor_config.json"
"""The file in which transformers 5 writes the same settings, inside of `image_processor`."""
HALF = [0.5, 0.5, 0.5]


def with_reader(
    decoder: DecoderConfig, tokenizer: Tokenizer | None, folder: Path | None, most: int
) -> tuple[DecoderConfig, Tokenizer]:
    """The structure with the ids of its tokens of pictures, and a tokenizer that reads pictures.

    Args:
        decoder: has a tower.
        tokenizer: knows the tokens of pictures.
        folder: the model's folder, whose config.json says the ids; None for a random model, whose tokenizer does.
        most: pictures of a row at most.

    Raises:
        UserError: the tokenizer does not know the tokens, or the folder resizes pictures in a way that is not handled.
    """
    vision = decoder.vision
    assert vision is not None, "a model with a tower"
    if tokenizer is None:
        raise UserError("data.pictures: the model has no tokenizer, whose tokens mark pictures")
    if folder is None:
        vision = replace(vision, **_ids(tokenizer))
    ids = (vision.begin_id, vision.soft_id, vision.end_id)
    names = [tokenizer.hf.convert_ids_to_tokens(one) for one in ids]
    if wrong := [one for one, name in zip(ids, names, strict=True) if name is None or not tokenizer.is_added(one)]:
        raise UserError(f"data.pictures: {tokenizer.name} has no special token of id {wrong[0]}, which marks pictures")
    begin, soft, end = map(str, names)
    resample = BILINEAR if folder is None else _resampling(folder, vision)
    reader = PictureReader(begin, soft, end, vision.soft_id, vision.tokens, vision.image_size, most, resample)
    return replace(decoder, vision=vision), replace(tokenizer, pictures=reader)


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the tokens of pictures, as `VisionConfig` names them."""
    names = {"begin_id": "boi_token", "end_id": "eoi_token", "soft_id": "image_token"}
    missing = [PICTURE_MARKERS[name] for name in names.values() if not tokenizer.has_token(PICTURE_MARKERS[name])]
    if missing:
        raise UserError(
            f"data.pictures: {tokenizer.name} has no token {', '.join(missing)}: take a multimodal model's tokenizer, "
            "or `tokenizer: bytes`"
        )
    vocabulary = tokenizer.hf.get_added_vocab()
    return {ours: vocabulary[PICTURE_MARKERS[name]] for ours, name in names.items()}


def _resampling(folder: Path, vision: VisionConfig) -> int:
    """PIL's number of the resampling that a folder asks for.

    Raises:
        UserError: it asks for something else that is not handled.
    """
    file = next((folder / name for name in (SETTINGS, PROCESSOR) if (folder / name).is_file()), None)
    if file is None:
        return BILINEAR
    raw: Mapping[str, Any] = read_json(file)
    raw = raw.get("image_processor", raw)
    side = vision.image_size
    wanted = {
        "size": ({"height": side, "width": side},),
        "image_mean": (HALF,),
        "image_std": (HALF,),
        "do_pan_and_scan": (None, False),
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), (True, None)),
    }
    for name, values in wanted.items():
        if name in raw and raw[name] not in values:
            raise UserError(f"{file}: {name} = {raw[name]!r} is not supported; only {values[0]!r} is.")
    if abs(raw.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise UserError(f"{file}: rescale_factor = {raw['rescale_factor']!r} is not supported; only 1 / 255 is.")
    return int(raw.get("resample", BILINEAR))


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
        side = vision.image_size
        settings = {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": side, "width": side},
            "resample": BILINEAR,
            "image_mean": HALF,
            "image_std": HALF,
            "rescale_factor": 1 / 255,
            **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
        }
        about = {"processor_class": "Gemma3Processor", "image_seq_length": vision.tokens}
        for name, values in ((SETTINGS, settings), (PROCESSOR, about)):
            (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
