"""What `--tiny` keeps: local rows, columns, tokenizers and rewards, and whatever the command line sets."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.recipe.tiny import is_download

BASE = {"model": {"path": "google/gemma-3-1b-it"}, "data": {"train": "a/b"}, "output": "runs/x"}
GEMMA = "model: a random gemma3 of two layers"
CHATS = "rows: 64 generated chats"


def build(**sections: object) -> Recipe:
    return Recipe.build({**BASE, **sections})


def loaded(folder: Path, *overrides: str, **sections: object) -> Recipe:
    """A recipe from its file, tiny."""
    path = folder / "r.yaml"
    path.write_text(json.dumps({**BASE, **sections}))
    return Recipe.load(path, overrides, tiny=True)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def folder_of(path: Path, vocab_size: int, tokenizer: bool = True, **fields: object) -> Path:
    """A model's folder as far as it is read without its weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size, **fields}))
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    return path


# --- Rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "download"),
    [
        ("HuggingFaceH4/ultrachat_200k", True),
        ("openai/gsm8k:main", True),
        ("squad", True),
        ("gs://bucket/rows.jsonl", True),
        ("missing.jsonl", False),
        ("./missing", False),
        ("a/b/c", False),
        ("my_rows.py:train", False),
        ("tunix.data.sorting:problems", False),
    ],
)
def test_what_would_be_downloaded(spec: str, download: bool):
    assert is_download(spec) == download


def test_local_rows_stay_with_their_columns(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", [{"question": "a", "reply": "b"}])
    held = write(tmp_path / "held.jsonl", [{"question": "c", "reply": "d"}])
    data = {
        "train": rows,
        "eval": held,
        "columns": {"prompt": "question", "completion": "reply"},
        "format": "prompt_completion",
    }
    tiny = build(data=data, algorithm={"name": "sft"}, eval={"rows": 500}).tiny()
    kept = {key: tiny.data.model_dump()[key] for key in data}
    assert kept == data
    assert (tiny.data.max_length, tiny.eval.rows) == (128, 64)
    assert tiny.replaced == (GEMMA,)


def test_a_folder_and_a_function_stay(tmp_path: Path):
    write(tmp_path / "train.jsonl", [{"text": "a"}])
    assert build(data={"train": str(tmp_path)}).tiny().data.train == str(tmp_path)
    # A function is called by the run alone; its rows have room for long ones: 4 bytes a token.
    tiny = build(data={"train": "my_rows.py:train", "split": "own", "max_length": 256}).tiny()
    assert (tiny.data.train, tiny.data.split, tiny.data.max_length) == ("my_rows.py:train", "own", 1024)


def test_rewards_of_local_rows_keep_their_columns(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", [{"question": "a", "solution": "b"}])
    reward = {"functions": [{"name": "number", "columns": {"answer": "solution"}}, "judge.py:score"]}
    data = {"train": rows, "columns": {"prompt": "question"}, "completion_length": 500}
    tiny = build(data=data, algorithm={"name": "grpo"}, reward=reward).tiny()
    assert tiny.reward is not None
    assert [(one.name, one.columns) for one in tiny.reward.functions] == [
        ("number", {"answer": "solution"}),
        ("judge.py:score", {}),
    ]
    assert tiny.data.columns == {"prompt": "question"}
    # The least room for a prompt, and the completion that a laptop samples in a second.
    assert (tiny.data.prompt_length, tiny.data.completion_length) == (128, 32)


def test_local_rows_stand_in_for_those_of_the_hub(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", [{"turns": []}])
    columns = {"messages": "turns"}
    tiny = build(data={"train": rows, "eval": "a/b", "eval_split": "test", "columns": columns}).tiny()
    assert (tiny.data.eval, tiny.data.eval_split, tiny.data.columns) == (rows, "train", columns)
    assert tiny.replaced == (GEMMA, "held-out rows: those of data.train")
    tiny = build(data={"train": "a/b", "eval": rows, "columns": columns}).tiny()
    assert (tiny.data.train, tiny.data.eval, tiny.data.columns) == (rows, rows, columns)


def test_a_template_stays(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", [{"messages": []}])
    data = {"train": rows, "chat_template": "mine.jinja", "template_kwargs": {"mood": "calm"}}
    tiny = build(data=data).tiny()
    assert (tiny.data.chat_template, tiny.data.template_kwargs) == ("mine.jinja", {"mood": "calm"})


# --- Lengths ------------------------------------------------------------------------------------------------------


def text_rows(*lengths: int) -> list[dict[str, str]]:
    return [{"text": "x" * length} for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "limit", "longest", "cut"),
    [
        ((10,) * 20, 1024, 128, 0),
        # 400 + a quarter, in steps of 64.
        ((400,) * 20, 1024, 512, 0),
        # One of twenty is an outlier, and is cut.
        ((400,) * 19 + (3000,), 1024, 512, 1),
        ((9000,) * 20, 4096, 2048, 20),
        # The recipe's 64 tokens are 256 bytes.
        ((400,) * 20, 64, 256, 20),
        # Rows after the first 64 are not looked at.
        ((10,) * 64 + (3000,), 1024, 128, 0),
    ],
)
def test_limits_are_those_of_most_rows(lengths, limit: int, longest: int, cut: int, tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", text_rows(*lengths))
    tiny = build(data={"train": rows, "max_length": limit, "on_overflow": "error"}).tiny()
    assert (tiny.data.max_length, tiny.data.on_overflow) == (longest, "truncate")
    number = min(len(lengths), 64)
    line = f"lengths: {cut} of the first {number} rows have more than {longest:,} bytes and are cut"
    assert tiny.replaced == ((GEMMA, line) if cut else (GEMMA,))


def test_a_limit_of_the_command_line_stays(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", text_rows(400))
    tiny = loaded(tmp_path, "data.max_length=64", "data.on_overflow=drop", data={"train": rows})
    assert (tiny.data.max_length, tiny.data.on_overflow) == (64, "drop")


def test_pairs_have_room_for_their_longer_side(tmp_path: Path):
    row = {"prompt": "p" * 100, "chosen": "c" * 200, "rejected": "r" * 50}
    data = {"train": write(tmp_path / "rows.jsonl", [row]), "completion_length": 512}
    tiny = build(data=data, algorithm={"name": "dpo"}).tiny()
    # 300 + 75 bytes, in steps of 64; half of it may be a side's own.
    assert (tiny.data.max_length, tiny.data.completion_length) == (384, 192)


def test_rows_of_ids_keep_a_vocabulary_that_has_them(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", [{"input_ids": [200_000]}])
    tiny = build(data={"train": rows, "max_length": 64}).tiny()
    assert tiny.model.sizes["vocab_size"] > 200_000
    assert tiny.data.max_length == 64


# --- Models -------------------------------------------------------------------------------------------------------


def test_a_local_folders_tokenizer_stays(tmp_path: Path):
    folder = folder_of(tmp_path / "base", 50_000)
    tiny = build(model={"path": str(folder)}).tiny()
    assert (tiny.model.path, tiny.model.tokenizer) == (None, str(folder))
    assert tiny.model.sizes["vocab_size"] == 50_000
    assert tiny.replaced == (f"model: a random llama of two layers with the tokenizer of {folder}", CHATS)


@pytest.mark.parametrize(("vocab_size", "tokenizer"), [(2_000_000, True), (50_000, False)])
def test_a_vocabulary_that_is_too_large_or_missing_is_that_of_bytes(vocab_size, tokenizer, tmp_path: Path):
    folder = folder_of(tmp_path / "base", vocab_size, tokenizer)
    tiny = build(model={"path": str(folder)}).tiny()
    assert (tiny.model.tokenizer, tiny.model.sizes["vocab_size"]) == ("bytes", 320)


def test_a_run_and_an_adapter_are_local_models_too(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("model: {path: a/llama}\n")
    export = folder_of(run / "export", 500)
    assert build(model={"path": str(run)}).tiny().model.tokenizer == str(export)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(export)}))
    assert build(model={"path": str(adapter)}).tiny().model.tokenizer == str(export)


def test_a_name_that_tells_no_family_is_refused():
    with pytest.raises(UserError, match=r"model\.family: 'me/mystery' does not tell it; set it to one of llama"):
        build(model={"path": "me/mystery"}).tiny()


def test_a_random_models_local_tokenizer_stays(tmp_path: Path):
    folder = folder_of(tmp_path / "tokenizer", 1)
    model = {"init": "random", "family": "llama", "sizes": {"vocab_size": 900}, "tokenizer": str(folder)}
    tiny = build(model=model).tiny()
    assert (tiny.model.tokenizer, tiny.model.sizes["vocab_size"]) == (str(folder), 900)


def test_only_reward_models_of_the_hub_are_replaced(tmp_path: Path):
    judge = folder_of(tmp_path / "judge", 10)
    sections = {"algorithm": {"name": "grpo"}}
    local = build(**sections, reward={"model": str(judge)}).tiny()
    assert local.reward is not None
    assert (local.reward.model, local.reward.functions) == (str(judge), ())
    hub = build(**sections, reward={"model": "me/judge"}).tiny()
    assert hub.reward is not None
    assert hub.reward.model is None
    assert "reward model: the length of the answers" in hub.replaced
    said = loaded(tmp_path, "reward.model=you/judge", **sections, reward={"model": "me/judge"})
    assert said.reward is not None
    assert said.reward.model == "you/judge"


def test_a_local_teacher_of_the_same_vocabulary_stays(tmp_path: Path):
    base, teacher = folder_of(tmp_path / "base", 500), folder_of(tmp_path / "teacher", 500)
    sections: dict[str, Any] = {"algorithm": {"name": "distill"}, "teacher": {"path": str(teacher)}}
    tiny = build(model={"path": str(base)}, **sections).tiny()
    assert tiny.teacher is not None
    assert tiny.teacher.path == str(teacher)
    tiny = build(**sections).tiny()  # the model of the hub becomes one of bytes
    assert tiny.teacher is not None
    assert (tiny.teacher.path, tiny.teacher.sizes["vocab_size"]) == (None, 320)


# --- The command line ---------------------------------------------------------------------------------------------


def test_what_the_command_line_names_stays(tmp_path: Path):
    tiny = loaded(tmp_path, "model.path=me/llama", "data.train=me/rows", "data.split=all", adapter={"rank": 64})
    assert (tiny.model.path, tiny.data.train, tiny.data.split) == ("me/llama", "me/rows", "all")
    assert tiny.adapter is not None
    assert tiny.adapter.rank == 64
    assert tiny.replaced == ()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("epochs=2", "epochs", 2),
        ("steps=100", "steps", 100),
        ("batch_size=64", "batch_size", 64),
        ("mesh.fsdp=2", "mesh.fsdp", 2),
        ("optimizer.warmup=7", "optimizer.warmup", 7),
        ("adapter.rank=48", "adapter.rank", 48),
        ("rollout.slots=128", "rollout.slots", 128),
        ("eval.rows=100", "eval.rows", 100),
        ("data.completion_length=100", "data.completion_length", 100),
        ("data.prompt_length=500", "data.prompt_length", 500),
        ("algorithm.group_size=16", "algorithm.group_size", 16),
        ("model.sizes={ffn: 192}", "model.sizes.ffn", 192),
        ("checkpoint.folder=elsewhere", "checkpoint.folder", "elsewhere"),
        ("output=there", "output", "there"),
    ],
)
def test_what_the_command_line_sets_stays(override: str, key: str, value: object, tmp_path: Path):
    sections: dict[str, Any] = {
        "model": {"init": "random", "family": "llama", "tokenizer": "bytes"},
        "adapter": {"rank": 4},
        "algorithm": {"name": "grpo"},
        "reward": {"functions": ["length"]},
        "data": {"train": "a/b", "eval": "a/c", "max_length": 1024},
    }
    place: Any = loaded(tmp_path, override, **sections).sections()
    for part in key.split("."):
        place = place[part]
    assert place == value


def test_a_key_above_the_stages_stays_where_a_stage_does_not_set_it(tmp_path: Path):
    tiny = loaded(tmp_path, "steps=70", "stages.1.batch_size=16", stages=[{}, {"steps": 60}])
    assert [(stage.steps, stage.batch_size) for stage in tiny.stages] == [(70, 8), (20, 16)]


def test_names_of_columns_go_with_the_rows_that_have_them(tmp_path: Path):
    tiny = loaded(tmp_path, "data.columns={prompt: question}", "data.format=text")
    assert (tiny.data.train, tiny.data.columns) == ("tunix.data.tiny:text", {})


def test_stages_say_together_what_is_toy():
    tiny = build(stages=[{}, {"algorithm": {"name": "dpo"}}]).tiny()
    assert tiny.replaced == (GEMMA, CHATS, "rows: 64 generated pairs of chats")
    assert build().replaced == ()
