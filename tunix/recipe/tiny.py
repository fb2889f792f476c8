"""`--tiny`: shrinks the sections of a recipe so that any laptop runs it in seconds and without a download.

The model becomes a two-layer random one of the same family, with a byte tokenizer, or with that of the recipe's folder
where this is local. Rows, reward models and teachers that would be downloaded are replaced: rows by generated ones of
the same format (`tunix/data/tiny.py`). Local files, functions, columns, templates and rewards stay, numbers that cost
time are capped, and whatever the command line sets takes precedence. `replaced` says what is toy.
"""

import copy
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tunix.algorithms.distill.config import POLICY, STORED
from tunix.config import TINY_BATCH, TINY_COMPLETION, TINY_GROUP, AlgorithmConfig, ModelConfig, RowKind
from tunix.data.config import EPISODES, DataConfig
from tunix.data.sources import SUFFIXES, open_rows
from tunix.data.tiny import PICTURE_TOKENS, PICTURES, ROWS
from tunix.data.tokenizer import VOCABULARY_FILES
from tunix.errors import UserError
from tunix.hf.run_export import exported
from tunix.models.families.table import FAMILIES, family_of_type, from_recipe, preset, read_json
from tunix.recipe.sections import Sections
from tunix.rollout.config import HARNESS, RolloutConfig
from tunix.rollout.environments.config import MixtureConfig
from tunix.util.object_store import url_of
from tunix.util.plugins import is_reference

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
LONGEST = 2048
"""Maximum tokens of a sequence of the user's rows, as many as the tiny models have positions."""
BYTES_PER_TOKEN = 4
"""A limit of the recipe in tokens is as many bytes, where bytes are the tokens."""
LOOKED_AT = 64
"""Rows of a file by whose lengths the limits are chosen, so that nine tenths of them fit."""
PROMPT = 352
"""Maximum tokens of a prompt where a policy writes the completions: a system message is long in bytes."""
EVAL_ROWS = 64
SLOTS = TINY_BATCH * TINY_GROUP
"""Completions of a step. More slots, for an evaluation, would need one more program, which takes seconds to compile."""
LARGEST_VOCABULARY = 300_000
"""Ids of a local tokenizer that is kept: with 64 numbers for each, some 80 MB in float32."""
GENERATED = "tunix.data.tiny:"
_NAMES = {
    "messages": "chats",
    "prompt_completion": "questions with answers",
    "pictures": "chats about pictures",
    "text": "texts",
    "tokens": "rows of token ids",
    "pairs": "pairs of answers",
    "conversations": "pairs of chats",
    "labels": "labelled answers",
    "chat_labels": "labelled chats",
}
"""Functions of `tunix/data/tiny.py` -> their rows in words."""
_STAND_IN, _JUDGE = {"name": "length", "label": "model"}, {"name": "length", "label": "judge"}
_STANDS_IN = {"reward model": _STAND_IN, "judge": _JUDGE}
"""The reward function in place of a reward model, and of a judge."""
_DESCRIBES_ROWS = ("split", "eval", "eval_split", "format", "columns")
"""Keys of `data` that describe the rows, and are replaced with them."""
_WHOLE_MODEL = frozenset({"model", "model.path", "model.preset", "model.init"})
"""Keys that name a model: set by the command line, it stays whole."""

# The usual format of data sets on the hub.
_DEFAULT_FORMAT: dict[RowKind, str] = {
    RowKind.COMPLETION: "messages",
    RowKind.ALL: "messages",
    RowKind.PROMPT: "prompt_completion",
    RowKind.PAIRS: "pairs",
    RowKind.LABELS: "prompt_completion",
}


def shrunk(
    sections: Mapping[str, Any], config: AlgorithmConfig, toy: Mapping[str, Any] | None, said: Collection[str] = ()
) -> dict[str, Any]:
    """The sections of one run with capped numbers, and with replaced data where it would be downloaded; the model and
    the output stay.

    Args:
        sections: plain values of all keys, from `Recipe.sections`.
        config: the parsed `sections["algorithm"]`.
        toy: from `toy_model`.
        said: keys that the command line sets, e.g. `{"data.max_length"}`.
    """
    steps, batch_size = min(sections["steps"] or STEPS, STEPS), min(sections["batch_size"], TINY_BATCH)
    tiny: dict[str, Any] = {
        **sections,
        "mesh": "auto",  # a laptop does not have the recipe's devices
        "batch_size": batch_size,
        "checkpoint": {**sections["checkpoint"], "folder": None},  # a laptop needs no store
        "steps": None if "epochs" in said and "steps" not in said else steps,
        "epochs": None,
    }
    tiny["algorithm"] = config.tiny(batch_size)
    sequences = type(config).model_validate(tiny["algorithm"]).sequences_per_update(batch_size)
    if sections["micro_batch_size"]:
        tiny["micro_batch_size"] = min(sections["micro_batch_size"], sequences)
    sampled = config.reads == RowKind.PROMPT or sections["reward"] is not None or bool(sections["eval"]["tasks"])
    data = tiny["data"] = _tiny_data(sections["data"], config.reads, sampled, toy, said)
    generated = isinstance(data["train"], str) and data["train"].startswith(GENERATED)
    if data["eval"] or data["eval_split"]:
        tiny["eval"] = {**sections["eval"], "rows": min(sections["eval"]["rows"], EVAL_ROWS)}
    tasks = [{**task, "n": min(task["n"], TINY_BATCH)} for task in sections["eval"]["tasks"]]
    rows = (task for task in tasks if task["data"] and not task["data"].startswith(HARNESS))
    for task in (task for task in rows if is_download(task["data"])):
        task |= {"data": f"{GENERATED}{_DEFAULT_FORMAT[RowKind.PROMPT]}", "columns": {}}
        if reward := task["reward"]:
            task["reward"] = {**reward, "functions": [{**function, "columns": {}} for function in reward["functions"]]}
    tiny["eval"] = {**tiny["eval"], "tasks": tasks}
    profile = sections["logging"]["profile"]
    if tiny["steps"] and profile and profile["steps"][1] > steps and "logging.profile.steps" not in said:
        tiny["logging"] = {**sections["logging"], "profile": None}
    # A warm-up in steps has to end before the run does; below 1 it is a share of the steps.
    if (warmup := sections["optimizer"]["warmup"]) >= 1:
        tiny["optimizer"] = {**sections["optimizer"], "warmup": min(warmup, steps // 2)}
    # Sampled in this process, since no server has the tiny model.
    timeout = RolloutConfig.model_fields["timeout"].default
    local = {"engine": "tunix", "servers": [], "weights_folder": None, "timeout": timeout}
    tiny["rollout"] = {**sections["rollout"], **local}
    if sampled:
        tiny["rollout"]["slots"] = min(sections["rollout"]["slots"] or SLOTS, SLOTS)
    if toy and (adapter := sections["adapter"]):
        # Ranks that the tiny matrices allow, and no adapter to load.
        delta = FAMILIES[toy["family"]].small.delta
        most = RANK if delta is None else min(RANK, delta.value_heads)
        ranks = {pattern: min(rank, most) for pattern, rank in adapter.get("ranks", {}).items()}
        tiny["adapter"] = {**adapter, "from": None, "rank": min(adapter.get("rank", most), most), "ranks": ranks}
    if teacher := sections["teacher"]:
        named, column = teacher["by_name"], teacher["column"]
        each = {f"teacher.by_name.{name}": x for name, x in named.items()} or {"teacher": teacher}
        tinier = [_tiny_teacher(x, _is_said(f"{key}.path", said), toy, generated) for key, x in each.items()]
        tiny["teacher"] = tinier[0]
        if named:  # generated rows name none: all are followed
            column = None if generated else column
            tiny["teacher"] = {"by_name": dict(zip(named, tinier, strict=True)), "column": column}
    if reward := sections["reward"]:
        # Generated rows have none of the columns that the recipe names.
        functions = [{**function, "columns": {}} if generated else function for function in reward["functions"]]
        tiny["reward"] = {**reward, "functions": functions}
        # The built-in `length` in place of a reward model that would be a download, and of a judge: a toy base writes
        # no verdicts, and a server need not be there.
        replaced_by = {"options": {"target": TINY_COMPLETION // 2, "width": TINY_COMPLETION}, "columns": {}}
        if reward["model"] and local_folder(reward["model"]) is None and not _is_said("reward.model", said):
            functions.append({**_STAND_IN, **replaced_by})
            tiny["reward"] |= {"model": None}
        if reward["judge"] and not _is_said("reward.judge", said):
            functions.append({**_JUDGE, **replaced_by, "weight": reward["judge"]["weight"]})
            tiny["reward"] |= {"judge": None}
    about_rows = tuple(f"data.{key}" for key in _DESCRIBES_ROWS) if generated else ()
    for key in said:
        if not key.startswith(("model", "reward", *about_rows)):
            _restore(tiny, sections, key.split("."))
    return tiny


def _restore(tiny: dict[str, Any], sections: Mapping[str, Any], parts: list[str]) -> None:
    """Sets a key to the recipe's value, with the section around it where there is none any more."""
    first, *rest = parts
    if first not in sections:
        return
    if not rest or not isinstance(tiny.get(first), Mapping) or not isinstance(sections[first], Mapping):
        tiny[first] = copy.deepcopy(sections[first])
        return
    inner = tiny[first] = dict(tiny[first])
    _restore(inner, sections[first], rest)


def toy_model(model: ModelConfig, data: DataConfig, said: Collection[str] = ()) -> dict[str, Any] | None:
    """The `model` section of a two-layer random model of the same family and precisions; None where the command line
    names a model, which stays.

    Args:
        model: the recipe's section.
        data: the recipe's rows, whose token ids the vocabulary has to have where they hold ids.
        said: as in `shrunk`.

    Raises:
        UserError: the family does not follow from the section.
    """
    if not _WHOLE_MODEL.isdisjoint(said):
        return None
    path, folder = Path(str(model.path)).expanduser(), local_folder(str(model.path))
    # From the section's keys, its preset, the folder's config.json or the hub id.
    family = model.family or (preset(model.preset).family if model.preset else None)
    if family is None and folder is not None:
        family = family_of_type(read_json(folder / "config.json").get("model_type"))
    if family is None:  # of the families whose names are in a hub id such as `google/gemma-3-1b-it`, the longest name
        matches = {name: re.search(text.hub, str(model.path).lower()) for name, text in FAMILIES.items()}
        lengths = {name: len(match[0]) for name, match in matches.items() if match}
        family = max(lengths, key=lengths.__getitem__, default=None)
    if family is None:
        raise UserError(f"model.family: {model.path!r} does not tell it; set it to one of {', '.join(FAMILIES)}")
    # The tokenizer is that of a local folder, where it is not too large for a laptop, or else `bytes`.
    place, vocab_size = None, None if folder is None else _vocab_size(folder)
    if model.init != "random":
        places = [path, folder] if path.is_dir() else [folder]
        place = next((x for x in places if x and any((x / file).is_file() for file in VOCABULARY_FILES)), None)
    elif model.tokenizer not in (None, "bytes", "bpe") and Path(str(model.tokenizer)).expanduser().is_dir():
        place, vocab_size = Path(str(model.tokenizer)), from_recipe(model).vocab_size
    tokenizer, sizes = "bytes", dict(SIZES)
    if place is not None and vocab_size is not None and vocab_size <= LARGEST_VOCABULARY:
        tokenizer, sizes["vocab_size"] = str(place), vocab_size
    elif (_is_said("data.train", said) or not is_download(str(data.first.train))) and _holds_ids(data.first):
        published = (size.vocab_size for size in FAMILIES[family].presets.values())
        sizes["vocab_size"] = max(published, default=SIZES["vocab_size"])
    sizes |= {name: size for name, size in model.sizes.items() if _is_said(f"model.sizes.{name}", said)}
    tokenizer = model.tokenizer if _is_said("model.tokenizer", said) else tokenizer
    source = {"init": "random", "family": family, "sizes": sizes, "tokenizer": tokenizer}
    return {**model.model_dump(mode="json"), "path": None, "preset": None, "mtp": None, **source}


def replaced(recipe: Sections) -> tuple[str, ...]:
    """What of one run is toy, a phrase each, such as `rows: 64 generated chats`; empty where nothing is.

    Raises:
        UserError: a file of rows is broken.
    """
    model, data = recipe.model, recipe.data.first
    train = str(data.train)
    lines: list[str] = []
    if is_toy := model.init == "random" and {**model.sizes, "vocab_size": SIZES["vocab_size"]} == SIZES:
        tokenizer = "" if model.tokenizer == "bytes" else f" with the tokenizer of {model.tokenizer}"
        lines.append(f"model: a random {model.family} of two layers{tokenizer}")
    lines += [f"{x.name}: generated questions" for x in recipe.eval.tasks if (x.data or "").startswith(GENERATED)]
    if train.startswith(GENERATED):
        lines.append(f"rows: {ROWS} generated {_NAMES[train.removeprefix(GENERATED)]}")
    elif is_toy and (data.eval, data.eval_split) == (train, data.split):
        lines.append("held-out rows: those of data.train")
    for key, teacher in () if recipe.teacher is None else recipe.teacher.each.items():
        if teacher.path is None:
            lines.append(f"{key}: a random {teacher.family} of two layers")
    functions = recipe.reward.functions if recipe.reward else ()
    stands_in = [{"name": function.name, "label": function.label} for function in functions]
    lines += [f"{who}: the length of the answers" for who, x in _STANDS_IN.items() if x in stands_in]
    if is_toy and model.tokenizer == "bytes":
        reads = recipe.algorithm.reads
        limit = data.longest_prompt if reads == RowKind.PROMPT else data.max_length
        sizes = [_size(row, data, reads) for row in _first_rows(data)]
        if number := sum(size > limit for size in sizes):
            lines.append(f"lengths: {number} of the first {len(sizes)} rows have more than {limit:,} bytes and are cut")
    return tuple(lines)


def _tiny_data(
    data: Mapping[str, Any], reads: RowKind, sampled: bool, toy: Mapping[str, Any] | None, said: Collection[str]
) -> dict[str, Any]:
    """The `data` section with shorter sequences, and with generated rows in place of those of the hub.

    Where one of `train` and `eval` stays, the other is replaced by the same rows, which have its columns. Where
    completions are `sampled`, for training or evaluation, prompt and completion have limits.
    """
    config = MixtureConfig.model_validate(data)
    if config.sources or config.held_out:
        single = [spec for spec in (config.train, config.eval) if isinstance(spec, str)]
        for spec in [*(rows.path for rows in (*config.sources, *config.held_out)), *single]:
            if is_download(spec):
                raise UserError(
                    f"data: {spec} would be downloaded, and --tiny makes rows for a single data set alone, not for one "
                    "of a list: name local rows, as in `--tiny data.train=rows.jsonl`"
                )
        return {**data, **_limits(config.first, reads, sampled, toy, said)}
    assert isinstance(config.train, str)
    assert config.eval is None or isinstance(config.eval, str)
    train_stays = _is_said("data.train", said) or not is_download(config.train)
    eval_stays = config.eval is not None and (_is_said("data.eval", said) or not is_download(config.eval))
    if train_stays or eval_stays:
        tiny = dict(data)
        if not train_stays:
            tiny |= {"train": config.eval, "split": config.eval_split or config.split}
        elif config.eval is not None and not eval_stays:
            tiny |= {"eval": config.train, "eval_split": config.split}
        if config.picture_tokens:
            tiny["picture_tokens"] = min(config.picture_tokens, PICTURE_TOKENS)
        return tiny | _limits(DataConfig.model_validate(tiny), reads, sampled, toy, said)
    # As `data.format` says, or in the usual format of what the algorithm reads.
    shape = function = _DEFAULT_FORMAT[reads] if config.format == "auto" else config.format
    if shape == "pairs" and not config.chat:
        function = "conversations"
    elif shape == "prompt_completion" and reads == RowKind.LABELS:
        function = "labels" if config.chat else "chat_labels"
    tiny = {**data, "max_length": min(config.max_length, LENGTH)}
    if config.pictures:
        shape, function, tiny["pictures"] = "messages", "pictures", max(config.pictures, PICTURES)
        tiny |= {"picture_tokens": PICTURE_TOKENS} if config.picture_tokens else {}
    rows = GENERATED + function
    held_out = rows if data["eval"] or data["eval_split"] else None
    about_rows = {"train": rows, "eval": held_out, "split": "train", "eval_split": None, "format": shape, "columns": {}}
    tiny |= _lengths(config, reads, sampled, min(config.max_length, LENGTH), PROMPT, said)
    return {**tiny, **about_rows}


def _limits(
    config: DataConfig, reads: RowKind, sampled: bool, toy: Mapping[str, Any] | None, said: Collection[str]
) -> dict[str, Any]:
    """Limits of rows that stay, into which most of them fit; longer ones are cut."""
    if str(config.train).startswith("tunix."):  # made for small models
        return _lengths(config, reads, sampled, min(config.max_length, LENGTH), PROMPT, said)
    if toy is None:
        return _lengths(config, reads, sampled, config.max_length, config.longest_prompt, said)
    limit = config.max_length
    sizes = sorted(_size(row, config, reads) for row in _first_rows(config))
    # A tenth may be longer: a few long rows would make every step slow.
    longest = sizes[len(sizes) * 9 // 10] if sizes else LONGEST
    longest += sum(len(text) + 32 for text in (config.system,) if text) + 256 * (config.pictures or 0)
    # Some room for rows that were not looked at, and for a template's markers.
    room = min(max(-(-(longest + longest // 4) // 64) * 64, LENGTH), LONGEST)
    reads_bytes = toy["tokenizer"] == "bytes"
    if reads_bytes and not _holds_ids(config):
        limits = {key: getattr(config, key) for key in ("max_length", "prompt_length", "completion_length")}
        wider = {
            key: size and size * (1 if _is_said(f"data.{key}", said) else BYTES_PER_TOKEN)
            for key, size in limits.items()
        }
        config = config.model_copy(update=wider)
    prompt = min(room, LONGEST - TINY_COMPLETION)
    lengths = _lengths(config, reads, sampled, min(config.max_length, room), prompt, said)
    if reads_bytes or lengths["max_length"] < limit:
        # The limits are not the recipe's any more: what is longer is no mistake of the rows.
        lengths["on_overflow"] = "truncate"
    return lengths


def _lengths(
    config: DataConfig, reads: RowKind, sampled: bool, longest: int, prompt: int, said: Collection[str]
) -> dict[str, Any]:
    """The limits of sequences, prompts and completions, where given sequences have at most `longest` tokens."""
    if not sampled:
        # A part of the row where the limit of the row is a smaller one than the recipe's.
        most = longest // 2 if longest < config.max_length else longest
        capped = config.completion_length and min(config.completion_length, most)
        return {"max_length": longest, "completion_length": capped}
    prompt = config.longest_prompt if _is_said("data.prompt_length", said) else min(config.longest_prompt, prompt)
    completion = config.longest_completion
    completion = completion if _is_said("data.completion_length", said) else min(completion, TINY_COMPLETION)
    total = min(config.max_length, prompt + completion)
    if reads != RowKind.PROMPT:  # given rows train, and answers to their prompts are judged
        total = min(config.max_length, max(total, longest))
    return {"max_length": total, "prompt_length": prompt, "completion_length": completion}


def _tiny_teacher(
    teacher: Mapping[str, Any], said: bool, toy: Mapping[str, Any] | None, generated: bool
) -> dict[str, Any]:
    """A teacher's section beside a tiny model (None where it is the recipe's), unless the command line has said it."""
    tiny = {**teacher, "mesh": None}
    if generated and teacher["prompt"]:  # generated rows have none of the columns that it names
        tiny["prompt"] = "{prompt}\n{prompt}"
    folder = local_folder(str(teacher["path"]))
    fits = toy is None or (folder is not None and _vocab_size(folder) == toy["sizes"]["vocab_size"])
    if toy and teacher["path"] not in (POLICY, STORED) and not (fits or said):
        # A random model, wider than the tiny one, on the same devices.
        sizes = {**TEACHER, "vocab_size": toy["sizes"]["vocab_size"]}
        random = {"path": None, "family": toy["family"], "sizes": sizes, "align": "tokens"}
        tiny |= {**random, **dict.fromkeys(("chat_template", "max_length", "served", "key_variable"))}
    return tiny


def _is_said(key: str, said: Collection[str]) -> bool:
    """Whether the command line sets a key, or a section around it."""
    return any(key == other or key.startswith(f"{other}.") for other in said)


def is_download(spec: str) -> bool:
    """Whether rows are those of a data set on the hub or in an object store, and no file, folder or function."""
    if spec == EPISODES:
        return False
    if url_of(spec):
        return True
    path = Path(spec).expanduser()
    looks_local = spec.startswith((".", "/", "~")) or spec.count("/") > 1 or spec.endswith(SUFFIXES)
    return not (path.exists() or is_reference(spec) or looks_local)


def _first_rows(data: DataConfig, number: int = LOOKED_AT) -> list[Mapping[str, Any]]:
    """The first training rows of a file or folder; none of a function, which is called by the run alone."""
    if not Path(str(data.train)).expanduser().exists():
        return []
    rows = open_rows(str(data.train), data.split, data.columns.values())
    return [rows[index] for index in range(min(number, len(rows)))]


def _holds_ids(data: DataConfig) -> bool:
    columns = {data.columns.get(name, name) for name in ("input_ids", "prompt_ids")}
    return data.format == "tokens" or (
        data.format == "auto" and any(columns & row.keys() for row in _first_rows(data, 1))
    )


def _size(row: Mapping[str, Any], data: DataConfig, reads: RowKind) -> int:
    """About how many bytes, or ids, the longest sequence of a row has."""

    def of(*names: str) -> int:
        return sum(_length(row.get(data.columns.get(name, name))) for name in names)

    if reads == RowKind.ROW:
        return _length(row)
    if reads == RowKind.PAIRS:
        sides = max(of("chosen"), of("rejected")), max(of("chosen_ids"), of("rejected_ids"))
        return of("prompt", "prompt_ids") + max(sides)
    if reads == RowKind.PROMPT:
        return max(of("prompt"), of("prompt_ids"), of("messages"))
    return of("messages", "text", "input_ids", "prompt", "completion", "prompt_ids", "completion_ids")


def _length(value: Any) -> int:
    """Bytes of the texts in a value and number of its ids, with some for the markers of each message."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, Mapping):
        return 16 + sum(map(_length, value.values()))
    if isinstance(value, list | tuple):
        return len(value) if all(isinstance(item, int) for item in value) else sum(map(_length, value))
    return 0


def local_folder(path: str) -> Path | None:
    """The folder with a local model's config.json: itself, a run's export, or an adapter's base; None for others."""
    folder = Path(path).expanduser()
    if (folder / "recipe.yaml").is_file():
        try:
            folder = exported(folder)
        except UserError:  # the run has not ended
            return None
    if (folder / "config.json").is_file():
        return folder
    adapter = folder / "adapter_config.json"
    base = read_json(adapter).get("base_model_name_or_path") if adapter.is_file() else None
    return local_folder(base) if isinstance(base, str) and Path(base).expanduser() != folder else None


def _vocab_size(folder: Path) -> int | None:
    """Rows of a folder's embedding, by its config.json."""
    raw = read_json(folder / "config.json")
    text = raw.get("text_config")
    size = (text if isinstance(text, Mapping) else raw).get("vocab_size", raw.get("vocab_size"))
    return size if isinstance(size, int) else None
