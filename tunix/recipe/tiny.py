"""`--tiny`: shrinks the sections of a recipe so that any laptop runs it in seconds and without a download.

The model becomes a two-layer random one of the same family with a byte tokenizer, the data a few generated rows of the
same format (`tunix/data/tiny.py`), and numbers that cost time are capped. Rows that a function of tunix generates are
kept, since they need no download either. Everything else stays as in the recipe.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunix.config import (
    TINY_BATCH,
    TINY_COMPLETION,
    TINY_GROUP,
    AlgorithmConfig,
    ModelConfig,
    RowKind,
)
from tunix.data.config import DataConfig
from tunix.data.tiny import PICTURE_TOKENS, PICTURES
from tunix.errors import UserError
from tunix.models.families.table import FAMILIES, family_of_name, family_of_type, preset, read_json
from tunix.rollout.config import RolloutConfig

SIZES = {
    "vocab_size": 320,
    "d_model": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
}
TEACHER = {**SIZES, "d_model": 96, "ffn": 192}
RANK = SIZES["num_kv_heads"] * SIZES["head_dim"]
"""Maximum rank of an adapter: the width of the narrowest matrix, but for those of a DeltaNet's gates."""
STEPS, LENGTH = 20, 128
PROMPT = 352
"""Maximum tokens of a prompt where a policy writes the completions: a system message is long in bytes."""
EVAL_ROWS = 64
SLOTS = TINY_BATCH * TINY_GROUP
"""Completions of a step. More slots, for an evaluation, would need one more program, which takes seconds to compile."""
_CAPPED = (
    r"(stages\.\d+\.)?(steps|checkpoint\.folder|batch_size|micro_batch_size|output|optimizer\.warmup|eval\.rows|rollout\.slots"
    r"|data\.(max|prompt|completion)_length|algorithm\.(%s))=|mesh\."
)

# The column that identifies each format of rows, as `data.format` names it.
_COLUMNS = (
    ("messages", "messages"),
    ("chosen", "pairs"),
    ("prompt", "prompt_completion"),
    ("text", "text"),
    ("input_ids", "tokens"),
    ("prompt_ids", "tokens"),
)
# The usual format of data sets on the hub.
_DEFAULT_FORMAT: dict[RowKind, str] = {
    RowKind.COMPLETION: "messages",
    RowKind.ALL: "messages",
    RowKind.PROMPT: "prompt_completion",
    RowKind.PAIRS: "pairs",
    RowKind.LABELS: "prompt_completion",
}


def tiny_overrides(overrides: Iterable[str], algorithms: Iterable[AlgorithmConfig]) -> list[str]:
    """The overrides of capped keys, which take precedence over the caps.

    Args:
        algorithms: the sections of the recipe, or of each of its stages.
    """
    keys = sorted({re.escape(key) for algorithm in algorithms for key in algorithm.tiny_caps})
    # Without keys, a pattern that matches nothing takes their place.
    capped = re.compile(_CAPPED % ("|".join(keys) or "(?!)"))
    return [override for override in overrides if capped.match(override)]


def shrunk(sections: Mapping[str, Any], config: AlgorithmConfig, family: str) -> dict[str, Any]:
    """The sections of one run with capped numbers and replaced data; the model and the output stay.

    Args:
        sections: plain values of all keys, from `Recipe.sections`.
        config: the parsed `sections["algorithm"]`.
        family: of the tiny model, and of its teacher if there is one.
    """
    steps, batch_size = min(sections["steps"] or STEPS, STEPS), min(sections["batch_size"], TINY_BATCH)
    micro, optimizer, rollout = sections["micro_batch_size"], sections["optimizer"], sections["rollout"]
    # A warm-up in steps has to end before the run does; below 1 it is a share of the steps.
    warmup = min(optimizer["warmup"], steps // 2) if optimizer["warmup"] >= 1 else optimizer["warmup"]
    algorithm = config.tiny(batch_size)
    reads, generated = config.reads, _generated(sections["data"])
    sampled = reads == RowKind.PROMPT or sections["reward"] is not None
    rows = sections["eval"]["rows"]
    held_out = sections["data"]["eval"] or sections["data"]["eval_split"]
    return {
        **sections,
        "adapter": sections["adapter"] and _tiny_adapter(sections["adapter"], family),
        "data": _tiny_data(sections["data"], reads, sampled, generated),
        "algorithm": algorithm,
        "teacher": sections["teacher"] and _tiny_teacher(sections["teacher"], family),
        "reward": _without_model(sections["reward"]) if generated else _without_columns(sections["reward"]),
        "rollout": _tiny_rollout(rollout, sampled),
        "eval": {**sections["eval"], "rows": min(rows, EVAL_ROWS) if held_out else rows},
        "optimizer": {**optimizer, "warmup": warmup},
        "mesh": "auto",  # a laptop does not have the recipe's devices
        "batch_size": batch_size,
        "micro_batch_size": _capped(micro, type(config).model_validate(algorithm).sequences_per_update(batch_size)),
        "checkpoint": {**sections["checkpoint"], "folder": None},  # a laptop needs no store
        "steps": steps,
        "epochs": None,
    }


def tiny_model(model: ModelConfig) -> dict[str, Any]:
    """The `model` section of a two-layer random model of the same family and precisions.

    Raises:
        UserError: the family does not follow from the section.
    """
    source = {"init": "random", "family": _family(model), "sizes": SIZES, "tokenizer": "bytes"}
    return {**model.model_dump(mode="json"), "path": None, "preset": None, **source}


def _tiny_teacher(teacher: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The `teacher` section of a small random model, wider than the tiny one, on the same devices."""
    return {**teacher, "path": None, "init": "random", "family": family, "sizes": TEACHER, "mesh": None}


def _tiny_adapter(adapter: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The `adapter` section with ranks that the tiny matrices allow, and without an adapter to load."""
    delta = FAMILIES[family].small.delta
    most = RANK if delta is None else min(RANK, delta.value_heads)
    ranks = {pattern: min(rank, most) for pattern, rank in adapter.get("ranks", {}).items()}
    return {**adapter, "from": None, "rank": min(adapter.get("rank", most), most), "ranks": ranks}


def _tiny_rollout(rollout: Mapping[str, Any], sampled: bool) -> dict[str, Any]:
    """The `rollout` section with few slots where completions are sampled, in this process: no server has the tiny
    model."""
    here = {**rollout, "engine": "tunix", "servers": [], "weights_folder": None}
    here["timeout"] = RolloutConfig.model_fields["timeout"].default
    return {**here, "slots": min(rollout["slots"] or SLOTS, SLOTS)} if sampled else here


def _tiny_data(data: Mapping[str, Any], reads: RowKind, sampled: bool, generated: bool) -> dict[str, Any]:
    """The `data` section with generated rows of the same format in place of the recipe's.

    Args:
        data: the section.
        reads: the part of a row that the algorithm reads.
        sampled: whether completions are sampled, for training or evaluation, so that prompt and completion have limits.
        generated: whether a function of tunix generates the rows, which are kept then.
    """
    config = DataConfig.model_validate(data)
    tiny = {**data, "max_length": min(config.max_length, LENGTH)}
    if sampled:
        prompt, completion = min(config.longest_prompt, PROMPT), min(config.longest_completion, TINY_COMPLETION)
        total = min(config.max_length, prompt + completion)
        tiny |= {"max_length": total, "prompt_length": prompt, "completion_length": completion}
    elif config.completion_length:
        tiny |= {"completion_length": min(config.completion_length, tiny["max_length"] // 2)}
    if generated:
        return tiny
    shape, function = _shape(config, reads)
    if config.pictures:
        shape, function, tiny["pictures"] = "messages", "pictures", max(config.pictures, PICTURES)
        tiny |= {"picture_tokens": PICTURE_TOKENS} if config.picture_tokens else {}
    rows = f"tunix.data.tiny:{function}"
    held_out = rows if data["eval"] or data["eval_split"] else None
    replaced = {"train": rows, "eval": held_out, "split": "train", "eval_split": None, "format": shape, "columns": {}}
    return {**tiny, **replaced}


def _generated(data: Mapping[str, Any]) -> bool:
    """Whether functions of tunix generate all rows."""
    return all(str(spec).startswith("tunix.") for spec in (data["train"], data["eval"]) if spec is not None)


def _without_columns(reward: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `reward` section for generated rows, whose columns are named like the functions' arguments."""
    if (section := _without_model(reward)) is None:
        return None
    return {**section, "functions": [{**function, "columns": {}} for function in section["functions"]]}


def _without_model(reward: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `reward` section with the built-in `length` in place of a reward model, which would be a download."""
    if reward is None or reward["model"] is None:
        return None if reward is None else dict(reward)
    options = {"target": TINY_COMPLETION // 2, "width": TINY_COMPLETION}
    stand_in = {"name": "length", "label": "model", "weight": reward["model_weight"], "options": options, "columns": {}}
    rest = {"model": None, "model_weight": 1.0, "model_length": None}
    return {**reward, **rest, "functions": [*reward["functions"], stand_in]}


def _capped(number: int | None, cap: int) -> int | None:
    return min(number, cap) if number else None


def _shape(data: DataConfig, reads: RowKind) -> tuple[str, str]:
    """The format of the recipe's rows, and the function that generates such rows.

    It follows from `data.format`, from the first row of a local .jsonl, or else from what the algorithm reads."""
    row = _first(data)
    shown = next(
        (shape for column, shape in _COLUMNS if data.columns.get(column, column) in row), _DEFAULT_FORMAT[reads]
    )
    shape = shown if data.format == "auto" else data.format
    given = {name: row.get(data.columns.get(name, name)) for name in ("prompt", "completion", "chosen")}
    if shape == "pairs":
        return shape, _pairs(given["prompt"], given["chosen"], data.chat)
    if shape == "prompt_completion" and reads == RowKind.LABELS:
        return shape, "labels" if data.chat or isinstance(given["completion"], str) else "chat_labels"
    return shape, shape


def _pairs(prompt: Any, chosen: Any, chat: bool) -> str:
    """The function that generates pairs like a given one.

    Args:
        prompt: the pair's prompt, None where it is unknown.
        chosen: the pair's chosen completion, None where it is unknown.
        chat: whether strings are sent as chats.
    """
    if isinstance(chosen, str):
        return "transcripts" if prompt is None else "pairs"
    if chosen is None and chat:
        return "pairs"
    return "chat_pairs" if isinstance(prompt, list) else "conversations"


def _first(data: DataConfig) -> Mapping[str, Any]:
    """The first row of a local .jsonl; empty for any other source, which is not opened."""
    path = Path(data.train)
    if path.suffix != ".jsonl" or not path.is_file():
        return {}
    with path.open(encoding="utf-8") as lines:
        try:
            return json.loads(next(lines, "{}"))
        except ValueError as error:
            raise UserError(f"{path}:1: not a line of JSON: {error}") from error


def _family(model: ModelConfig) -> str:
    """The family of a `model` section, from its keys, its preset, the folder's config.json or the hub id."""
    if model.family or model.preset:
        return model.family or preset(str(model.preset)).family
    config = Path(str(model.path)).expanduser() / "config.json"
    typed = family_of_type(read_json(config).get("model_type")) if config.is_file() else None
    family = typed or family_of_name(str(model.path))
    if family is None:
        raise UserError(f"model.family: {model.path!r} does not tell it; set it to one of {', '.join(FAMILIES)}")
    return family
