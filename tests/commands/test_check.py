"""`tunix check` finds what a run would refuse, without jax, and prints a recipe that means the same."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunix.cli import main
from tunix.commands import doctor
from tunix.commands.check import check, recipe_lines
from tunix.errors import UserError
from tunix.recipe.notes import hardware_note, read_header
from tunix.recipe.recipe import Recipe, included_recipes

ROOT = Path(__file__).parents[2]
RANDOM = {"init": "random", "family": "llama", "tokenizer": "bytes"}
PAIR = {"prompt": "a", "completion": "b"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def recipe(**sections: object) -> str:
    """A recipe of 20 rows, with these sections."""
    if not Path("rows.jsonl").exists():
        write("rows.jsonl", [PAIR] * 20)
    Path("r.yaml").write_text(yaml.safe_dump({"model": RANDOM, "data": {"train": "rows.jsonl"}, **sections}))
    return "r.yaml"


def refused(*overrides: str, **sections: object) -> str:
    with pytest.raises(UserError) as caught:
        check(recipe(**sections), overrides)
    return str(caught.value)


def test_a_broken_line_is_named():
    write("rows.jsonl", [PAIR] * 4000)
    with Path("rows.jsonl").open("a") as file:
        file.write('{"prompt": "a", "compl\n')
    assert "rows.jsonl, line 4001 is not JSON" in refused()


@pytest.mark.parametrize(
    ("data", "rows", "message"),
    [
        ({"train": "nowhere.jsonl"}, [PAIR], "nowhere.jsonl: there is no such file"),
        ({"train": "rows.jsonl"}, [{"question": "a"}], "data.train: row 1 of rows.jsonl has the columns 'question'"),
        (
            {"train": "rows.jsonl"},
            [PAIR, PAIR, {"prompt": "a"}],
            "data.train: row 3 of rows.jsonl: there is no column 'completion'",
        ),
        ({"train": "rows.jsonl", "eval": "held.jsonl"}, [PAIR], "held.jsonl: there is no such file"),
        ({"train": "rows.jsonl", "chat_template": "mine.jinja"}, [PAIR], "there is no file mine.jinja"),
        ({"train": "rows.jsonl", "chat_template": "gemna"}, [PAIR], "Did you mean 'gemma'?"),
        ({"train": "own.py:rows"}, [PAIR], "there is no file own.py"),
        ({"train": "rows.jsonl", "columns": {"promt": "x"}}, [PAIR], "data.columns maps 'promt'"),
    ],
)
def test_rows_that_a_run_would_refuse(data: dict[str, Any], rows: list[dict[str, str]], message: str):
    write("rows.jsonl", rows)
    assert message in refused(data=data)


def test_rewards_and_environments_are_loaded():
    Path("judge.py").write_text("def score(completion, solution): return 1.0\n")
    message = refused(
        algorithm={"name": "grpo"},
        reward={"functions": ["judge.py:score", "numbr", "judge.py:scor", {"name": "length", "options": {"goal": 1}}]},
        rollout={"environment": {"name": "guesing"}},
    )
    for words in ("'solution'", "Did you mean 'number'", "Did you mean 'score'", "'goal'", "Did you mean 'guessing'"):
        assert words in message
    assert "reward.functions.0" in message


def test_folders_are_looked_at():
    assert "there is no folder ./base" in refused("model={path: ./base}")
    Path("base").mkdir()
    assert "config.json is missing" in refused("model={path: base}")
    Path("base/config.json").write_text('{"model_type": "mystery"}')
    assert "model_type = 'mystery' is not supported" in refused("model={path: base}")
    Path("full").mkdir()
    Path("full/theirs.txt").write_text("")
    assert "full is not empty and holds no run" in refused("output=full")
    assert "output: " in refused("output=rows.jsonl/run")


def test_all_mistakes_come_at_once():
    assert len(refused("output=r.yaml", "data.train=nowhere.jsonl", "data.chat_template=x.jinja").splitlines()) == 3


def test_what_was_written_is_printed_and_all_else_by_all():
    text = check(recipe(steps=3, seed=1), ["optimizer.b1=0.8"])
    said = yaml.safe_load(text)
    data = {"train": "rows.jsonl"}
    assert said == {
        "model": RANDOM,
        "data": data,
        "steps": 3,
        "seed": 1,
        "optimizer": {"b1": 0.8},
        "output": "runs/r",
    }
    assert "# data.train: 20 rows, all of them read\n" in text
    assert text.endswith("# all other values are the defaults: --all prints them\n# ok: r.yaml\n")
    full = yaml.safe_load(check("r.yaml", ["optimizer.b1=0.8"], everything=True))
    assert full == Recipe.load("r.yaml", ["optimizer.b1=0.8"]).sections()


@pytest.mark.parametrize("name", ["quickstart", "grpo_gemma", "qlora_gemma", "online_dpo_gemma", "distill_gemma"])
@pytest.mark.parametrize("tiny", [False, True])
def test_what_is_printed_is_the_recipe_again(name: str, tiny: bool):
    Path("again.yaml").write_text(check(name, tiny=tiny))
    assert Recipe.load("again.yaml") == Recipe.load(name, tiny=tiny)


def test_short_runs_are_noted():
    # 3 x 20 rows in batches of 64 are one step; in batches of 2 (a tenth) they are 30.
    text = check(recipe(epochs=3, batch_size=64, optimizer={"warmup": 10}))
    assert "# steps: 1 (3 epochs of 20 rows, 64 at a time)\n" in text
    assert "# note: 3 epochs of 20 rows are only 1 step, since batch_size is 64: batch_size=2 makes 30, or set" in text
    assert "# note: optimizer.warmup is 10 steps and the run has 1 step: the learning rate never reaches" in text
    assert "note" not in check(recipe(epochs=3, batch_size=4))


def test_hardware_that_is_not_here_is_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    files = included_recipes()
    note = hardware_note(files["dpo_gemma"])
    assert note is not None
    assert note.startswith("dpo_gemma.yaml is made for one H100 (80 GB): ")
    assert hardware_note(files["dpo_gemma"], ["model.path=tiny"]) is None
    assert hardware_note(files["quickstart"]) is None


def test_every_recipe_has_a_line_and_measured_ones_come_first():
    files = included_recipes()
    lines = list(recipe_lines())
    named = [line.split()[0] for line in lines if line.startswith("  ")]
    assert named[:3] == ["quickstart", "dpo_pydoc", "sft_pydoc"]
    assert sorted(named) == sorted(files)
    assert all(read_header(file).summary.endswith(".") for file in files.values())
    assert all(len(line) <= 80 for line in recipe_lines(80) if line.startswith("  "))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dpo_gema", "Did you mean 'dpo_gemma', which tunix brings ("),
        ("recipes/dpo_gema.yaml", "Did you mean 'dpo_gemma', which tunix brings ("),
        ("rr.yaml", "Did you mean 'r.yaml'?"),
        ("zzzzzz", "no such file, nor the name of a recipe"),
        ("done", "done is the folder of a run; its recipe is done/recipe.yaml"),
    ],
)
def test_the_nearest_recipe_is_named(name: str, message: str):
    recipe()
    Path("done").mkdir()
    Path("done/recipe.yaml").write_text("")
    with pytest.raises(UserError) as caught:
        Recipe.load(name)
    assert message in str(caught.value)


def test_neither_rewards_nor_environments_wake_jax():
    reward = {"functions": [{"name": "exact_match", "columns": {"answer": "completion"}}]}
    path = recipe(algorithm={"name": "grpo"}, reward=reward, rollout={"environment": {}})
    code = f"from tunix.commands.check import check; check({path!r}); import sys; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("python", "other", "said"),
    [
        ((3, 11, 7), {}, ("ok", "were tried together")),
        ((3, 13, 2), {"jax": "0.12.0.1", "flax": "0.12.12", "tokamax": "0.0.17"}, ("ok", "were tried together")),
        (
            (3, 11, 7),
            {"jax": "0.10.9"},
            ("note", "never tried together; nearest to what was: jax 0.10.9 (with 0.10.2)"),
        ),
    ],
)
def test_doctor_says_which_versions_were_never_tried_together(
    python: tuple[int, ...], other: dict[str, str], said: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    """A row of `TRIED` has to have all that is installed of it; of the others the one with the fewest differences."""
    installed = {**doctor.TRIED[0], **other}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or real(name))
    monkeypatch.setattr(sys, "version_info", python)
    assert [(state, text) for state, what, text in doctor._packages() if what == "versions"] == [said]


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    blocked = Path("file")
    blocked.write_text("")
    monkeypatch.setenv("HF_HOME", str(blocked / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == 1
    out = capsys.readouterr().out
    assert "problem hub's cache" in out
    assert "pip install '.[pathways]'" in out
    assert "dpo_pydoc, quickstart, sft_pydoc; the other" in out
