"""What goes wrong with rows of pairs and labels, at the command line: a counted drop, or one message with the row."""

from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow
from tests.tiny_runs import metrics, train, write_recipe, write_rows
from tunix.cli import main

PAIR = {"prompt": "aa>", "chosen": "AA", "rejected": "bb"}
LABELLED = {"prompt": "aa>", "completion": "AA", "label": True}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "dpo", **changes: Any) -> str:
    """A recipe of one step, and its rows."""
    write_rows(folder / "train.jsonl", rows)
    usual = {"algorithm": {"name": name}, "steps": 1, "data.shuffle": False}
    return str(write_recipe(folder / "r.yaml", {**usual, **{key.replace("__", "."): x for key, x in changes.items()}}))


def refused(words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with one message and nothing is left behind."""
    assert main(words) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in said), told
    assert "Traceback" not in told
    assert not Path("run/checkpoints").exists() or not list(Path("run/checkpoints").iterdir())


def without(row: dict[str, Any], column: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != column}


@pytest.mark.parametrize("name", ["dpo", *slow(["reward"])])
def test_rows_that_teach_nothing_are_counted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of nine rows six are left out, each for a reason that `inspect` names."""
    rows = [
        PAIR,
        {**PAIR, "rejected": "AA"},
        {**PAIR, "chosen": ""},
        {**PAIR, "rejected": ""},
        {**PAIR, "prompt": "a" * 60},
        {**PAIR, "chosen": "A" * 60, "rejected": "A" * 50},
        {**PAIR, "rejected": "b" * 60},
        PAIR,
        {**PAIR, "rejected": "AA"},
    ]
    recipe = write(tmp_path, rows, name, batch_size=3)
    assert main(["inspect", recipe]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "rows 9 kept 3 truncated 1 cut at 48 tokens dropped 6" in told
    assert "2 an empty completion 2 chosen and rejected are equal 1 chosen and rejected are equal within max" in told
    assert "1 nothing to train on within max_length" in told
    train(recipe)
    row = metrics("run")[-1]
    assert (row["data/kept"], row["data/truncated"], row["data/dropped"]) == (3, 1, 6)


def test_nothing_but_equal_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write(tmp_path, [{**PAIR, "rejected": "AA"}] * 3)
    refused(["run", recipe], ["nothing in it can be trained on: 3 x chosen and rejected are equal"], capsys)
    recipe = write(tmp_path, [{"chosen": "AA", "rejected": "bb"}] * 3)
    refused(["run", recipe], ["3 x chosen and rejected have no prompt in common"], capsys)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (without(PAIR, "rejected"), ["row 2 of train.jsonl", "no column 'rejected'", "'prompt', 'chosen'"]),
        ({**PAIR, "chosen": None}, ["row 2 of train.jsonl", "the column 'chosen' is null"]),
        (without(PAIR, "prompt"), ["row 2 of train.jsonl", "no column 'prompt'"]),
        ({**PAIR, "chosen": ["AA"]}, ["row 2 of train.jsonl", "both strings or both lists"]),
        ({**PAIR, "weight": "much"}, ["row 2 of train.jsonl", "weight is 'much'"]),
    ],
    ids=["no side", "a null side", "no prompt", "a list", "weight"],
)
def test_a_pair_that_is_none_is_named(
    row: dict[str, Any], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = write(tmp_path, [PAIR, row])
    refused(["run", recipe], said, capsys)
    refused(["inspect", recipe], said, capsys)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**LABELLED, "label": "yes"}, ["row 2 of train.jsonl", "label is 'yes', not true or false"]),
        ({**LABELLED, "label": 0.5}, ["row 2 of train.jsonl", "label is 0.5, not true or false"]),
        ({**LABELLED, "label": None}, ["row 2 of train.jsonl", "the column 'label' is null"]),
        (without(LABELLED, "label"), ["row 2 of train.jsonl", "no column 'label'"]),
    ],
    ids=["a word", "a fraction", "null", "none"],
)
def test_a_label_that_is_none_is_named(
    row: dict[str, Any], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = write(tmp_path, [LABELLED, row], "kto")
    refused(["run", recipe], said, capsys)
    refused(["inspect", recipe], said, capsys)


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("dpo", LABELLED, ["row 1 of train.jsonl", "wanted are chosen and rejected, or prompt_ids, chosen_ids and"]),
        ("dpo", {"prompt": "a", "choosen": "b", "rejected": "c"}, ["'choosen'", "Is it 'chosen' for 'choosen'?"]),
        ("kto", PAIR, ["row 1 of train.jsonl", "wanted are prompt, completion and label"]),
        ("sft", PAIR, ["row 1 of train.jsonl", "wanted are messages, or prompt and completion"]),
        ("kto", {**LABELLED, "label": 3}, ["row 1 of train.jsonl", "label is 3, not true or false"]),
    ],
    ids=["labels", "a mistyped side", "pairs", "pairs to sft", "three"],
)
def test_rows_of_another_kind_are_told_before_weights_are_made(
    name: str, row: dict[str, Any], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    refused(["run", write(tmp_path, [row], name)], said, capsys)


def test_settings_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write(tmp_path, [PAIR])
    refused(["run", recipe, "data.format=messages"], ["data.format is 'messages'", "pairs are read from"], capsys)
    refused(["run", recipe, "data.format=pair"], ["data.format", "'pair'", "pairs"], capsys)
    refused(["run", recipe, "data.columns={choosen: better}"], ["data.columns", "Did you mean 'chosen'?"], capsys)
    overflow = ["data.max_length=5", "data.on_overflow=error"]
    refused(["run", recipe, *overflow], ["row 1 of", "has 7 tokens on a side, more than data.max_length 5"], capsys)
