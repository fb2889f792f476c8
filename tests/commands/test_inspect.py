"""`tunix inspect` shows what is trained on, in colour or in brackets, and an accounting that adds up."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from tunix.cli import main
from tunix.commands.inspect import show
from tunix.recipe.recipe import Recipe

ROWS = [
    {"prompt": "Two?", "completion": "2."},
    {"prompt": "Nothing :train: [bold]?", "completion": "", "weight": 0.5},
    {"prompt": "A long one?", "completion": "word " * 20},
    {"prompt": "p" * 60, "completion": "beyond the end"},
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = "{init: random, family: gemma, sizes: {vocab_size: 320}, tokenizer: bytes}"
    path = tmp_path / "r.yaml"
    path.write_text(f"model: {model}\ndata: {{train: rows.jsonl, max_length: 48}}\n")
    return path


def test_trained_spans_stand_in_brackets_and_text_stays_as_it_is(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(recipe), "--rows", "4"]) == 0
    out = capsys.readouterr().out
    # <bos>, four bytes, two bytes, <eos>; the completion and its <eos> are trained.
    assert "row 1: 8 tokens, 3 trained\n<bos>Two?[[2.<eos>]]\n" in out
    assert "weight 0.5\n<bos>Nothing :train: [bold]?[[<eos>]]\n" in out
    assert "row 3: 48 tokens, 36 trained, cut at 48\n" in out
    assert "row 4: dropped, nothing to train on within max_length\n" in out


def test_the_accounting_adds_up(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(recipe), "--rows", "1"]) == 0
    out = capsys.readouterr().out
    counts = {name: int(count) for name, count in re.findall(r"^ +([a-z ]*[a-z]) +(\d+)", out, re.MULTILINE)}
    assert counts["rows"] == len(ROWS) == counts["kept"] + counts["dropped"]
    assert (counts["truncated"], counts["dropped"]) == (1, 1)
    assert re.search(r"^ +1  nothing to train on within max_length$", out, re.MULTILINE)
    # Lengths: 1 + 4 + 2 + 1, 1 + 23 + 0 + 1, and 48 after the cut. Trained: 3, 1, and 48 - 1 - 11.
    assert counts["tokens"] == 8 + 25 + 48
    assert counts["trained"] == 3 + 1 + 36
    # 48 fills a row, 25 + 8 share the other: 15 of 96 places stay empty.
    assert counts["packed rows"] == 2
    assert "15.6% empty" in out


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_on_a_terminal_only(recipe: Path, no_color: bool):
    file = io.StringIO()
    show(
        Recipe.load(recipe),
        1,
        Console(file=file, force_terminal=True, color_system="standard", no_color=no_color, highlight=False),
    )
    out = file.getvalue()
    assert ("[[2.<eos>]]" in out) is no_color
    assert ("\x1b[1;32m2.<eos>" in out) is not no_color


def test_rows_of_ids_need_no_tokenizer(recipe: Path, capsys: pytest.CaptureFixture[str]):
    (recipe.parent / "rows.jsonl").write_text('{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}\n')
    assert main(["inspect", str(recipe), "model.tokenizer=null"]) == 0
    assert "5 [[6 7]]" in capsys.readouterr().out


def test_stages_are_shown_one_by_one(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(recipe), "--rows", "1", "stages=[{}, {data: {max_length: 9}}]"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("stage")] == [
        "stage runs/r/0_sft",
        "stage runs/r/1_sft",
    ]
    assert "cut at 9 tokens" in out


def test_a_bad_row_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]):
    with (recipe.parent / "rows.jsonl").open("a") as rows:
        rows.write('{"prompt": "a"}\n')
    assert main(["inspect", str(recipe)]) == 2
    assert "row 5 of rows.jsonl" in capsys.readouterr().err


PAIRS = [
    {"prompt": "Two?", "chosen": "2.", "rejected": "three", "margin": 1.5},
    {"prompt": "Three?", "chosen": "3.", "rejected": "3.", "margin": 1},
    {"prompt": "Four?", "chosen": "4.", "rejected": "", "margin": 1},
    {"prompt": "Five?", "chosen": "5.", "rejected": "word " * 20, "margin": 0, "weight": 2},
]


def write(recipe: Path, rows: list, algorithm: str) -> list[str]:
    """The command that shows rows as an algorithm reads them."""
    (recipe.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["inspect", str(recipe), "--rows", "4", f"algorithm.name={algorithm}"]


def test_pairs_stand_side_by_side(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert main(write(recipe, PAIRS, "dpo")) == 0
    out = capsys.readouterr().out
    assert "row 1: chosen: 8 tokens, 3 trained, margin 1.5\n<bos>Two?[[2.<eos>]]\n" in out
    assert "row 1: rejected: 11 tokens, 6 trained, margin 1.5\n<bos>Two?[[three<eos>]]\n" in out
    assert "row 2: dropped, chosen and rejected are equal\n" in out
    assert "row 3: dropped, an empty completion\n" in out
    assert "row 4: chosen: 9 tokens, 3 trained, weight 2, margin 0\n" in out
    assert "row 4: rejected: 48 tokens, 42 trained, cut at 48, weight 2, margin 0\n" in out
    counts = {name: int(count) for name, count in re.findall(r"^ +([a-z ]*[a-z]) +(\d+)", out, re.MULTILINE)}
    assert (counts["rows"], counts["kept"], counts["truncated"], counts["dropped"]) == (4, 2, 1, 2)
    assert re.search(r"^ +1  chosen and rejected are equal$", out, re.MULTILINE)
    assert re.search(r"^ +1  an empty completion$", out, re.MULTILINE)
    assert (counts["tokens"], counts["trained"]) == (8 + 11 + 9 + 48, 3 + 6 + 3 + 42)
    # A row has room for two sides of 48. Shared: all of a prompt but its last token. 4 + 4 + 7 and 5 + 4 + 43 places.
    assert counts["packed rows"] == 1
    assert "of 96 tokens, 30.2% empty" in out


def test_what_a_reward_model_is_shown(recipe: Path, capsys: pytest.CaptureFixture[str]):
    """The texts as they are read; the spare tokens where the scores stand are places of the packed rows."""
    assert main(write(recipe, PAIRS[:1], "reward")) == 0
    out = capsys.readouterr().out
    assert "<bos>Two?[[2.<eos>]]\n" in out
    # 8 + 1 and 11 + 1 tokens share all of the prompt but its last: 4 + 5 + 8 of 98 places.
    assert "of 98 tokens, 82.7% empty" in out


def test_labels_are_shown(recipe: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"prompt": "Two?", "completion": "2.", "label": True}, {"prompt": "Two?", "completion": "3.", "label": 0}]
    assert main(write(recipe, rows, "kto")) == 0
    out = capsys.readouterr().out
    assert "row 1: 8 tokens, 3 trained, label 1\n<bos>Two?[[2.<eos>]]\n" in out
    assert "row 2: 8 tokens, 3 trained, label 0\n<bos>Two?[[3.<eos>]]\n" in out


def test_prompts_are_shown_alone(recipe: Path, capsys: pytest.CaptureFixture[str]):
    """What a policy goes on from: nothing of it is trained, and nothing is packed."""
    rows = [{"prompt": "Two?", "answer": 2}, {"prompt": "x" * 60, "answer": 3}]
    words = [*write(recipe, rows, "grpo"), "data.prompt_length=24", "reward={functions: [exact_match]}"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "row 1: 5 tokens, 0 trained\n<bos>Two?\n" in out
    assert f"row 2: 24 tokens, 0 trained, cut at 24\n{'x' * 24}\n" in out
    assert "cut at 24 tokens" in out
    assert "packed" not in out


def episodes(recipe: Path, rows: list, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is printed of the episodes of rows, before their accounting."""
    assert main([*write(recipe, rows, "grpo"), *words]) == 0
    return capsys.readouterr().out.partition("\nAll ")[0]


def test_an_episode_of_the_row_s_answer(recipe: Path, capsys: pytest.CaptureFixture[str]):
    """Rendered by the template, ended by its end of a turn, scored by the environment and by reward functions."""
    rows = [{"prompt": "Two?", "answer": 2}, {"prompt": "Three?", "answer": "3"}]
    calculator = "rollout={environment: {name: calculator, options: {chat: true}}}"
    short = "reward={functions: [{name: length, options: {target: 2, width: 2}}]}"
    template = "data.chat_template=gemma"
    out = episodes(recipe, rows, capsys, calculator, short, template, "data.max_length=96")
    assert out.startswith('row 1: for the environment\n{"prompt": "Two?", "answer": 2}\nrow 1: ')
    assert "<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n[[2<end_of_turn>]]\n" in out
    assert "reward: length 1, environment 1; ended after 1 turn\n" in out
    assert "[[3<end_of_turn>]]" in out


def test_typed_turns(recipe: Path, capsys: pytest.CaptureFixture[str]):
    """16 is too low for 20, and a stop string of the game ends a turn without a stop token; 24 is too high."""
    words = ["rollout={environment: guessing}", "--actions", "16", "24\n"]
    rows = [{"secret": 20}, {"secret": 24}, {"secret": 16}, {"secret": 1}]
    out = episodes(recipe, rows, capsys, *words)
    assert "<bos>1-31\n[[16<eos>]]higher\n[[24\n]]lower\n" in out
    assert "reward: environment 0 (0, 0 by turn); not ended after 2 turns: type more, --actions\n" in out
    assert "<bos>1-31\n[[16<eos>]]higher\n[[24\n]]\nreward: environment 1 (0, 1 by turn); ended after 2 turns\n" in out
    assert "<bos>1-31\n[[16<eos>]]\nreward: environment 1; ended after 1 turn\n" in out
    assert "row 4: 24 tokens, 6 trained" in out
    # Without an answer and without typed turns something stands for it; three episodes, unless --rows says more.
    out = episodes(recipe, rows, capsys, words[0], "--rows", "1")
    assert "[[an answer<eos>]]\nreward: environment 0; ended after 1 turn\n" in out
    assert main(["inspect", str(recipe), "algorithm.name=grpo", words[0]]) == 0
    assert len(re.findall("for the environment", capsys.readouterr().out)) == 3


def test_an_episode_that_is_cut_off_and_one_that_fails(recipe: Path, capsys: pytest.CaptureFixture[str]):
    (recipe.parent / "broken.py").write_text(
        "from tunix.rollout.environments.base import Environment\n\n\n"
        "class Broken(Environment):\n"
        "    def reset(self, row, rng):\n        return row['prompt']\n\n"
        "    def step(self, action, tokens):\n        raise RuntimeError('out of order')\n"
    )
    rows = [{"prompt": "Two?", "answer": "2" * 40}]
    out = episodes(recipe, rows, capsys, "rollout={environment: broken.py:Broken}", "--actions", "2")
    assert "reward: none; failed; the environment Broken raised RuntimeError: out of order" in out
    out = episodes(recipe, rows, capsys, "rollout={environment: calculator}")
    assert f"[[{'2' * 24}]]\nreward: environment 0; cut off at 24 tokens, data.completion_length\n" in out


def test_episodes_fit_into_eighty_columns(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [{"prompt": "How much is it? " * 10, "answer": 2}]
    out = episodes(recipe, rows, capsys, "rollout={environment: calculator}", "data.max_length=256")
    assert max(map(len, out.splitlines())) <= 80


def test_actions_want_an_environment(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(recipe), "--actions", "a"]) == 2
    assert "--actions 'a': the recipe has no rollout.environment" in capsys.readouterr().err
