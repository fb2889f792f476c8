"""`--tiny`: the sections of a recipe, cut down to what any laptop runs in seconds and without a download.

The model becomes a two-layer random one of the same family with a byte tokenizer, the data a few made rows of the same
shape (`tunix/data/tiny.py`), and the numbers that cost time are capped. Rows that tunix itself makes on the spot are
kept: they need no download either. Everything else stays the recipe's own.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix.config import FAMILIES, AlgorithmConfig, Family, MeshConfig, ModelConfig, Reads, family_of_name
from tunix.data.config import DataConfig
from tunix.errors import UserError
from tunix.models.families.table import MODEL_TYPES, preset, read_json

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
"""Of an adapter at most: the narrowest matrix has no more."""
STEPS, BATCH, LENGTH = 20, 8, 128
GROUP, PROMPT, COMPLETION = 4, 352, 32
"""Where a policy writes the completions. A system message is long in bytes, so prompts are given more room."""
EVAL_ROWS = 64
CAPPED = re.compile(
    r"(stages\.\d+\.)?(steps|batch_size|micro_batch_size|output|optimizer\.warmup|eval\.rows|rollout\.slots"
    r"|data\.(max|prompt|completion)_length|algorithm\.(group_size|updates|overlong_buffer|critic_warmup))=|mesh\."
)
"""How overrides begin that win over the caps: what the user says for this very run is kept."""

# The columns that tell the shape of a row, as `data.format` names it.
_COLUMNS = (
    ("messages", "messages"),
    ("chosen", "pairs"),
    ("prompt", "prompt_completion"),
    ("text", "text"),
    ("input_ids", "tokens"),
    ("prompt_ids", "tokens"),
)
# The usual shape of what is on the hub.
_USUAL: dict[Reads, str] = {
    "completions": "messages",
    "prompts": "prompt_completion",
    "pairs": "pairs",
    "labels": "prompt_completion",
}
# Keys of an algorithm on rollouts; others have none of them.
_ROLLOUT_KEYS = {"group_size": GROUP, "updates": BATCH, "critic_warmup": 2}


def shrunk(sections: Mapping[str, Any], config: AlgorithmConfig, family: Family) -> dict[str, Any]:
    """The sections of one run with its numbers capped and its data replaced; the model and the output are not touched.

    Args:
        sections: plain values of every key, as `Recipe.sections` gives them.
        config: of which `sections["algorithm"]` holds the values.
        family: of the tiny model, and of its teacher where there is one.
    """
    steps, batch_size = min(sections["steps"] or STEPS, STEPS), min(sections["batch_size"], BATCH)
    micro, optimizer, rollout = sections["micro_batch_size"], sections["optimizer"], sections["rollout"]
    # A warm-up in steps has to end before the run does; below 1 it is a share and fits by itself.
    warmup = min(optimizer["warmup"], steps // 2) if optimizer["warmup"] >= 1 else optimizer["warmup"]
    algorithm = _tiny_algorithm(sections["algorithm"], batch_size)
    reads, made = config.reads, _made_here(sections["data"])
    drawn = reads == "prompts" or sections["reward"] is not None
    rows = sections["eval"]["rows"]
    held_out = sections["data"]["eval"] or sections["data"]["eval_split"]
    return {
        **sections,
        "adapter": sections["adapter"] and _tiny_adapter(sections["adapter"]),
        "data": _tiny_data(sections["data"], reads, drawn, made),
        "algorithm": algorithm,
        "teacher": sections["teacher"] and _tiny_teacher(sections["teacher"], family),
        "reward": _without_model(sections["reward"]) if made else _own_names(sections["reward"]),
        "rollout": {**rollout, "slots": _capped(rollout["slots"], BATCH * GROUP)},
        "eval": {**sections["eval"], "rows": min(rows, EVAL_ROWS) if held_out else rows},
        "optimizer": {**optimizer, "warmup": warmup},
        "mesh": MeshConfig().model_dump(),  # a laptop has not the recipe's devices
        "batch_size": batch_size,
        "micro_batch_size": _capped(micro, type(config).model_validate(algorithm).sequences_per_update(batch_size)),
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


def _tiny_teacher(teacher: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The `teacher` section of a small random model, wider than the tiny one, on the same devices."""
    return {**teacher, "path": None, "init": "random", "family": family, "sizes": TEACHER, "mesh": None}


def _tiny_adapter(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """The `adapter` section with ranks that the tiny matrices have; one that is given does not fit them."""
    ranks = {pattern: min(rank, RANK) for pattern, rank in adapter.get("ranks", {}).items()}
    return {**adapter, "from": None, "rank": min(adapter.get("rank", RANK), RANK), "ranks": ranks}


def _tiny_algorithm(algorithm: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """The `algorithm` section with fewer and shorter rollouts."""
    tiny = {**algorithm, **({"reference_path": None} if "reference_path" in algorithm else {})}
    for key, cap in {**_ROLLOUT_KEYS, "updates": batch_size}.items():
        if tiny.get(key) is not None:
            tiny[key] = min(tiny[key], cap)
    buffer = tiny.get("overlong_buffer")
    if buffer and buffer >= 1:  # in tokens; below 1 it is a share and fits by itself
        tiny["overlong_buffer"] = min(buffer, COMPLETION)
    return tiny


def _tiny_data(data: Mapping[str, Any], reads: Reads, drawn: bool, made: bool) -> dict[str, Any]:
    """The `data` section with made rows of the same shape instead of the recipe's.

    Args:
        data: the section.
        reads: what the algorithm wants of a row.
        drawn: whether completions are drawn, to train on or to evaluate: prompt and completion have their own lengths.
        made: whether its rows are made on the spot and stay.
    """
    told = DataConfig.model_validate(data)
    tiny = {**data, "max_length": min(told.max_length, LENGTH)}
    if drawn:
        prompt, completion = min(told.longest_prompt, PROMPT), min(told.longest_completion, COMPLETION)
        total = min(told.max_length, prompt + completion)
        tiny |= {"max_length": total, "prompt_length": prompt, "completion_length": completion}
    elif told.completion_length:
        tiny |= {"completion_length": min(told.completion_length, tiny["max_length"] // 2)}
    if made:
        return tiny
    shape, function = _shape(told, reads)
    rows = f"tunix.data.tiny:{function}"
    held_out = rows if data["eval"] or data["eval_split"] else None
    replaced = {"train": rows, "eval": held_out, "split": "train", "eval_split": None, "format": shape, "columns": {}}
    return {**tiny, **replaced}


def _made_here(data: Mapping[str, Any]) -> bool:
    """Whether a function of tunix makes all the rows on the spot."""
    return all(str(spec).startswith("tunix.") for spec in (data["train"], data["eval"]) if spec is not None)


def _own_names(reward: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `reward` section reading made rows, whose columns are called as the functions' own arguments are."""
    if (kept := _without_model(reward)) is None:
        return None
    return {**kept, "functions": [{**function, "columns": {}} for function in kept["functions"]]}


def _without_model(reward: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `reward` section with the shipped `length` in the place of a reward model, which would be a download."""
    if reward is None or reward["model"] is None:
        return None if reward is None else dict(reward)
    options = {"target": COMPLETION // 2, "width": COMPLETION}
    stand_in = {"name": "length", "label": "model", "weight": reward["model_weight"], "options": options, "columns": {}}
    rest = {"model": None, "model_weight": 1.0, "model_length": None}
    return {**reward, **rest, "functions": [*reward["functions"], stand_in]}


def _capped(number: int | None, cap: int) -> int | None:
    return min(number, cap) if number else None


def _shape(data: DataConfig, reads: Reads) -> tuple[str, str]:
    """The shape of the recipe's rows, and the function that makes such rows: as the recipe says, as the first row of a
    local .jsonl shows, else the usual one."""
    row = _first(data)
    shown = next((shape for column, shape in _COLUMNS if data.columns.get(column, column) in row), _USUAL[reads])
    shape = shown if data.format == "auto" else data.format
    given = {name: row.get(data.columns.get(name, name)) for name in ("prompt", "completion", "chosen")}
    if shape == "pairs":
        return shape, _pairs(given["prompt"], given["chosen"], data.chat)
    if shape == "prompt_completion" and reads == "labels":
        return shape, "labels" if data.chat or isinstance(given["completion"], str) else "chat_labels"
    return shape, shape


def _pairs(prompt: Any, chosen: Any, chat: bool) -> str:
    """The function that makes pairs in the manner of one of which two columns are given; None where it is not known."""
    if isinstance(chosen, str):
        return "transcripts" if prompt is None else "pairs"
    if chosen is None and chat:
        return "pairs"
    return "chat_pairs" if isinstance(prompt, list) else "conversations"


def _first(data: DataConfig) -> Mapping[str, Any]:
    """The first row of a local .jsonl; of anything else nothing is known yet."""
    path = Path(data.train)
    if path.suffix != ".jsonl" or not path.is_file():
        return {}
    with path.open(encoding="utf-8") as lines:
        try:
            return json.loads(next(lines, "{}"))
        except ValueError as error:
            raise UserError(f"{path}:1: not a line of JSON: {error}") from error


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
