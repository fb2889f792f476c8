"""`tunix init`: a recipe for each task from a tiny model and a few rows, which `tunix check` and `--tiny` take."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_runs import model_folder, write_rows
from tunix.cli import main
from tunix.plan.arithmetic import estimated
from tunix.recipe.recipe import Recipe
from tunix.util import chips

TURN = [{"role": "user", "content": "Say a"}, {"role": "assistant", "content": "a"}]
ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "messages": ("sft", [{"messages": TURN}] * 16),
    "texts": ("sft", [{"text": "a" * (10 + i)} for i in range(100)]),
    "instructions": ("sft", [{"instruction": "Say a", "output": "a"}] * 16),
    "pairs": ("dpo", [{"prompt": "Say a", "chosen": "a", "rejected": "b"}] * 16),
    "labels": ("kto", [{"prompt": "Say a", "completion": "ab"[i % 2], "label": i % 2 == 0} for i in range(16)]),
    "answers": ("grpo", [{"prompt": f"1 + {i}?", "answer": str(1 + i)} for i in range(16)]),
    "solutions": ("grpo", [{"prompt": f"1 + {i}?", "answer": f"It is\n#### {1 + i}"} for i in range(16)]),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line of a call that is refused, behind those that say what is done."""
    assert main(list(words)) == 2
    *_, line = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize("shape", ROWS)
def test_a_recipe_for_each_shape_of_rows(shape: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It passes `tunix check`, names the task, and says why each value is what it is."""
    name, rows = ROWS[shape]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert main(["init", "model", "rows.jsonl"]) == 0
    assert f"{name}_model.yaml is written: {name}, " in capsys.readouterr().out
    recipe = Recipe.load(f"{name}_model.yaml")
    assert (recipe.algorithm.name, recipe.adapter) == (name, None)
    assert main(["check", f"{name}_model.yaml"]) == 0
    assert main(["check", f"{name}_model.yaml", "--tiny"]) == 0
    text = Path(f"{name}_model.yaml").read_text()
    assert "# the rows have " in text
    assert "# usual for " in text
    assert main(["init", "model", "rows.jsonl"]) == 2
    assert Path(f"{name}_model.yaml").read_text() == text


def test_lengths_and_memory(model: Path, tmp_path: Path):
    """Texts of 10 to 109 bytes, each between BOS and EOS: 12 to 111 tokens, of which the 50 shortest have at most 61,
    so that the one after has 62, and 99 have at most 110: 128 is the next multiple of 64. 8 x 8 of 100 rows: batches of
    8, 13 in an epoch, 38 in three."""
    write_rows(tmp_path / "rows.jsonl", ROWS["texts"][1])
    assert main(["init", "model", "rows.jsonl", "--out", "r.yaml"]) == 0
    recipe, text = Recipe.load("r.yaml"), Path("r.yaml").read_text()
    assert (recipe.data.max_length, recipe.batch_size, recipe.epochs) == (128, 8, 3)
    assert "half up to 62 tokens, 99% up to 110, the longest 111\n" in text
    assert "# 38 steps\n" in text
    needed = estimated(recipe)
    assert needed is not None
    assert f"# Memory: up to {needed / 2**30:.2f} GiB, of " in text


def test_what_fits(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """On a chip with room for an adapter and not for all weights, and on one with room for neither."""
    write_rows(tmp_path / "rows.jsonl", ROWS["messages"][1])
    assert main(["init", "model", "rows.jsonl", "--on", "h200:1", "--out", "all.yaml"]) == 0
    whole = Recipe.load("all.yaml")
    assert (whole.adapter, whole.model.dtype) == (None, "bfloat16")
    some = whole.model_copy(update={"adapter": Recipe.build({**whole.sections(), "adapter": {"rank": 16}}).adapter})
    most, least = estimated(whole), estimated(some)
    assert most is not None
    assert least is not None
    assert least < most
    monkeypatch.setattr(chips, "limit_of", lambda _: int((most + least) / 2))
    monkeypatch.setattr(sys.modules["tunix.commands.init"], "limit_of", chips.limit_of)
    assert main(["init", "model", "rows.jsonl", "--on", "h200:1", "--out", "some.yaml"]) == 0
    adapter = Recipe.load("some.yaml").adapter
    assert adapter is not None
    assert adapter.rank == 16
    assert "# all weights would take up to " in Path("some.yaml").read_text()
    monkeypatch.setattr(sys.modules["tunix.commands.init"], "limit_of", lambda _: 1)
    line = said(capsys, "init", "model", "rows.jsonl", "--on", "h200:1", "--out", "none.yaml")
    assert line.startswith("model does not fit: LoRA on one sequence at a time takes up to ")
    assert not Path("none.yaml").exists()


def test_rows_that_fit_several_tasks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_rows(tmp_path / "rows.jsonl", [{"question": "1 + 1?", "answer": "2"}] * 16)
    assert said(capsys, "init", "model", "rows.jsonl") == (
        "rows.jsonl has the columns 'question', 'answer', which fit sft and grpo: say which by --algorithm"
    )
    for name in ("sft", "grpo"):
        assert main(["init", "model", "rows.jsonl", "--algorithm", name]) == 0
        assert Recipe.load(f"{name}_model.yaml").algorithm.name == name
    assert "fits no dpo: it has the columns 'question', 'answer'; dpo wants chosen and rejected" in said(
        capsys, "init", "model", "rows.jsonl", "--algorithm", "dpo", "--out", "x.yaml"
    )
    # On a terminal it asks, until the answer is one of them.
    answers = iter(["ppo", "sft"])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert main(["init", "model", "rows.jsonl", "--out", "asked.yaml"]) == 0
    assert Recipe.load("asked.yaml").algorithm.name == "sft"


def test_rows_that_fit_no_task(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(tmp_path / "rows.jsonl", [{"name": "a", "age": 3}])
    assert said(capsys, "init", "model", "rows.jsonl") == (
        "rows.jsonl fits no task: it has the columns 'name', 'age'; sft wants messages, prompt and completion, text, "
        "or input_ids; dpo wants chosen and rejected; reward wants chosen and rejected; kto wants prompt, completion "
        "and a label of true or false; grpo wants prompt and answer"
    )
    assert "there is no such file" in said(capsys, "init", "model", "none.jsonl")
    write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    assert "its sizes are not known here" in said(capsys, "init", "nobody/nothing", "rows.jsonl")


def test_rows_that_a_data_set_holds_out(model: Path, tmp_path: Path):
    """The test rows of a folder that has them; one file has none, and the recipe says where others are named."""
    (tmp_path / "both").mkdir()
    for name in ("train", "test"):
        write_rows(tmp_path / f"both/{name}.jsonl", ROWS["messages"][1])
    assert main(["init", "model", "both", "--out", "both.yaml"]) == 0
    assert Recipe.load("both.yaml").data.eval_split == "test"
    assert main(["check", "both.yaml"]) == 0
    assert main(["init", "model", "both/train.jsonl", "--out", "single.yaml"]) == 0
    assert Recipe.load("single.yaml").data.eval_split is None
    assert "# `eval: FILE` beside it" in Path("single.yaml").read_text()
    assert "# `eval: FILE` beside it" not in Path("both.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["messages", "pairs", "labels", "answers"])
def test_it_runs_with_tiny(shape: str, model: Path, tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", ROWS[shape][1])
    assert main(["init", "model", "rows.jsonl", "--out", "r.yaml"]) == 0
    assert main(["run", "r.yaml", "--tiny", "steps=2", "epochs=null"]) == 0
    assert [json.loads(line)["step"] for line in Path("runs/r-tiny/metrics.jsonl").read_text().splitlines()] == [1, 2]
