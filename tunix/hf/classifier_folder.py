"""A reward model's folder: transformers' sequence classifier with a single label.

transformers scores the rightmost token that is not padding. So the padding id must be one that no sequence ends with:
where a folder pads with its end-of-text token, as many do, the score would be that of the token before it. `padding`
chooses another id, and `write_padding` sets it in the tokenizer's files too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tunix.errors import UserError
from tunix.models.config import DecoderConfig
from tunix.models.families.table import FAMILIES, read_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
LABEL = "reward"


class Padding(NamedTuple):
    """The token that fills up the shorter sequences of a batch."""

    id: int | None
    """Its id, e.g. 0; None where no token is suitable: transformers then scores one sequence at a time."""
    token: str | None = None
    """Its text, e.g. `<pad>`, where the tokenizer's files contain it."""


def require_classifier(config: DecoderConfig) -> None:
    """Refuses a reward model of a family that transformers could not load.

    Raises:
        UserError: transformers has no sequence classifier for the family.
    """
    if FAMILIES[config.family].classifier is None:
        raise UserError(
            f"model.path: transformers has no sequence classifier for {config.family}, so that nothing could load a "
            "reward model of it: train one of another family"
        )


def classifier_fields(config: DecoderConfig, padding: Padding) -> dict[str, Any]:
    """The fields of config.json that make a folder a classifier instead of a language model."""
    return {
        "architectures": [FAMILIES[config.family].classifier],
        "id2label": {"0": LABEL},
        "label2id": {LABEL: 0},
        "pad_token_id": padding.id,
    }


def padding(config: DecoderConfig, files: Path | None) -> Padding:
    """The padding of a reward model: the first that no sequence ends with of the folder's padding id, the tokenizer's
    padding token, any added token with `pad` in its name, and BOS.

    Args:
        config: has the special ids of the folder's config.json.
        files: folder of the tokenizer's files, or None.
    """
    stops = dict(config.stops)
    eos = stops.get("eos_token_id")
    ends = set(eos if isinstance(eos, tuple) else (eos,))
    added = _added_tokens(files)
    padded = added.get(str(_text(_tokenizer_config(files).get("pad_token"))))
    named = [number for token, number in added.items() if "pad" in token.lower()]
    candidates = (stops.get("pad_token_id"), padded, *named, stops.get("bos_token_id"))
    chosen = next((x for x in candidates if isinstance(x, int) and x >= 0 and x not in ends), None)
    return Padding(chosen, next((token for token, number in added.items() if number == chosen), None))


def write_padding(folder: Path, padding: Padding) -> None:
    """Sets the padding token of the tokenizer in `folder`, if there is one."""
    raw = _tokenizer_config(folder)
    if raw and padding.token is not None:
        changed = {**raw, "pad_token": padding.token}
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _tokenizer_config(files: Path | None) -> dict[str, Any]:
    known = files is not None and (files / TOKENIZER_CONFIG).is_file()
    return read_json(files / TOKENIZER_CONFIG) if files is not None and known else {}


def _added_tokens(files: Path | None) -> dict[str, int]:
    """Special and added tokens of a tokenizer.json -> ids."""
    if files is None or not (files / TOKENIZER).is_file():
        return {}
    return {token["content"]: token["id"] for token in read_json(files / TOKENIZER).get("added_tokens", [])}


def _text(token: str | Mapping[str, Any] | None) -> str | None:
    """The text of a token, which older folders write as an object and newer ones as text."""
    return token["content"] if isinstance(token, Mapping) else token
