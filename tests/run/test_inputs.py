"""Which rows a recipe trains on, and which it holds out."""

import json
from pathlib import Path

import jax
import pytest

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.run.describe import stage_lines
from tunix.run.inputs import Inputs, open_inputs
from tunix.run.setup import Setup, algorithm_of

SIZES = {"d_model": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "ffn": 32}
MODEL = {"init": "random", "family": "qwen3", "tokenizer": "bytes", "dtype": "float32", "sizes": SIZES}
NOTE = "; it is trained on these too, so that eval/* do not show what it makes of new ones"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four rows for training and three for tests, in a folder and in files of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "alone").mkdir()
    for split, number in (("train", 4), ("test", 3)):
        rows = [{"prompt": f"{split} {i}?", "completion": " yes"} for i in range(number)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"data/{split}.jsonl").write_text(text)
        (tmp_path / f"{split}_copy.jsonl").write_text(text)
    (tmp_path / "alone/train.jsonl").write_text((tmp_path / "data/train.jsonl").read_text())
    return tmp_path


def loaded(data: dict[str, str]) -> Recipe:
    recipe = {"model": MODEL, "data": {"max_length": 64, **data}, "batch_size": 1, "steps": 1, "output": "runs/case"}
    Path("recipe.yaml").write_text(json.dumps(recipe))
    return Recipe.load(Path("recipe.yaml"), [])


def inputs(data: dict[str, str]) -> Inputs:
    return open_inputs(loaded(data), Path("runs/none"))


def last_line(data: dict[str, str]) -> str:
    """What a run says of itself at the end of its first lines."""
    recipe, opened = loaded(data), inputs(data)
    setup = Setup.on(jax.devices()[:1], recipe, opened.source, algorithm_of(recipe), None)
    return [*stage_lines(setup, opened, 1)][-1]


@pytest.mark.parametrize(
    ("data", "expected", "line"),
    [
        ({"train": "data", "eval": "data"}, "test", "3 rows of data, split test"),
        ({"train": "data", "eval_split": "test"}, "test", "3 rows of data, split test"),
        ({"train": "data/train.jsonl", "eval": "data"}, "test", "3 rows of data, split test"),
        ({"train": "data/test.jsonl", "eval": "alone"}, "train", "4 rows of alone, split train"),
        ({"train": "data", "eval": "test_copy.jsonl"}, "test", "3 rows of test_copy.jsonl"),
        # The rows that are trained on, by name.
        ({"train": "data", "eval": "data", "eval_split": "train"}, "train", f"4 rows of data, split train{NOTE}"),
        ({"train": "data", "eval_split": "train"}, "train", f"4 rows of data, split train{NOTE}"),
        ({"train": "test_copy.jsonl", "eval": "test_copy.jsonl"}, "test", f"3 rows of test_copy.jsonl{NOTE}"),
        ({"train": "data", "eval": "./data/train.jsonl"}, "train", f"4 rows of ./data/train.jsonl{NOTE}"),
        ({"train": "data", "eval": "train_copy.jsonl"}, "train", f"4 rows of train_copy.jsonl{NOTE}"),
    ],
)
def test_held_out_rows_are_those_that_are_not_trained_on(data: dict[str, str], expected: str, line: str, folder: Path):
    opened = inputs(data)
    assert opened.held_out is not None
    number = {"train": 4, "test": 3}[expected]
    prompts = [opened.held_out[i]["prompt"] for i in range(len(opened.held_out))]
    assert prompts == [f"{expected} {i}?" for i in range(number)]
    assert last_line(data) == f"held out: {line}"


def test_a_split_that_is_trained_on_is_not_held_out_unless_it_is_named(folder: Path):
    for data in ({"train": "alone", "eval": "alone"}, {"train": "data", "split": "test", "eval": "data"}):
        with pytest.raises(UserError, match=r"data\.eval: .* has no rows to hold out: its split .* is trained on\."):
            inputs(data)
    assert not last_line({"train": "data"}).startswith("held out")
