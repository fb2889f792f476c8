"""`--tiny`: the sections of a recipe, cut down to what any laptop runs in seconds and without a download.

The model becomes a two-layer random one of the same family with a byte tokenizer, the data a few made rows of the same
shape (`tunix/data/tiny.py`), and the numbers that cost time are capped. Everything else stays the recipe's own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix.config import FAMILIES, DataConfig, Family, MeshConfig, ModelConfig, family_of_name
from tunix.errors import UserError
from tunix.models.families import MODEL_TYPES, preset, read_json

SIZES = {
    "vocab_size": 320,
    "d_model": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
}
STEPS, BATCH, LENGTH = 20, 8, 128
CAPPED = ("steps=", "batch_size=", "micro_batch_size=", "output=", "data.max_length=", "optimizer.warmup=", "mesh.")
"""How overrides begin that win over the caps: what the user says for this very run is kept."""

# The columns that tell the shape of a row, as `data.format` names it.
_SHAPES = (("messages", "messages"), ("prompt", "prompt_completion"), ("text", "text"), ("input_ids", "tokens"))


def shrunk(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of one run with its numbers capped and its data replaced; the model and the output are not touched.

    Args:
        sections: plain values of every key, as `Recipe.sections` gives them.
    """
    steps, batch_size = min(sections["steps"] or STEPS, STEPS), min(sections["batch_size"], BATCH)
    micro, optimizer = sections["micro_batch_size"], sections["optimizer"]
    # A warm-up in steps has to end before the run does; below 1 it is a share and fits by itself.
    warmup = min(optimizer["warmup"], steps // 2) if optimizer["warmup"] >= 1 else optimizer["warmup"]
    return {
        **sections,
        "data": _tiny_data(sections["data"]),
        "optimizer": {**optimizer, "warmup": warmup},
        "mesh": MeshConfig().model_dump(),  # a laptop has not the recipe's devices
        "batch_size": batch_size,
        "micro_batch_size": min(micro, batch_size) if micro else None,
        "steps": steps,
        "epochs": None,
    }


def tiny_model(model: ModelConfig) -> dict[str, Any]:
    """The `model` section of a two-layer random model of the same family; the precisions stay.

    Raises:
        UserError: the family cannot be told.
    """
    source = {"init": "random", "family": _family(model), "sizes": SIZES, "tokenizer": "bytes"}
    return {**model.model_dump(mode="json"), "path": None, "preset": None, **source}


def _tiny_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """The `data` section with made rows of the same shape instead of the recipe's."""
    shape = _shape(DataConfig.model_validate(data))
    rows = f"tunix.data.tiny:{shape}"
    return {
        **data,
        "train": rows,
        "eval": rows if data["eval"] or data["eval_split"] else None,
        "split": "train",
        "eval_split": None,
        "format": shape,
        "columns": {},
        "max_length": min(data["max_length"], LENGTH),
    }


def _shape(data: DataConfig) -> str:
    """The shape of the recipe's rows: as it says, as the first row of a local .jsonl shows, else `messages`."""
    if data.format != "auto":
        return data.format
    path = Path(data.train)
    if path.suffix != ".jsonl" or not path.is_file():
        return "messages"
    with path.open(encoding="utf-8") as lines:
        try:
            row = json.loads(next(lines, "{}"))
        except ValueError as error:
            raise UserError(f"{path}:1: not a line of JSON: {error}") from error
    return next((shape for column, shape in _SHAPES if data.columns.get(column, column) in row), "messages")


def _family(model: ModelConfig) -> Family:
    """The family that the section, its preset, the folder's config.json or the hub id tells."""
    if model.family or model.preset:
        return model.family or preset(str(model.preset)).family
    config = Path(str(model.path)).expanduser() / "config.json"
    told = MODEL_TYPES.get(str(read_json(config).get("model_type"))) if config.is_file() else None
    family = told or family_of_name(str(model.path))
    if family is None:
        raise UserError(f"model.family: {model.path!r} does not tell it; set it to one of {', '.join(FAMILIES)}")
    return family
