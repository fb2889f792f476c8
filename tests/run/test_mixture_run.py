"""Runs on mixtures and with curricula: each data set has rewards and an environment of its own, metrics and samples
say which is which, and a run that is killed goes on to the bit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.tiny_rl import write_policy
from tests.tiny_runs import lines, losses, metrics, train, write_recipe, write_rows
from tunix.cli import main

MIXED: dict[str, Any] = {
    "data__train": [
        {"path": "sums.jsonl", "weight": 2},
        {
            "path": "verl.parquet",
            "columns": {"index": "extra_info.index"},
            "reward": {"functions": [{"name": "theirs.py:compute_score", "style": "verl"}]},
        },
        {
            "path": "tunix.rollout.environments.guessing:secrets",
            "name": "game",
            "reward": {"functions": []},
            "environment": {"name": "guessing", "options": {"guesses": 2}},
        },
    ],
    "algorithm": {"name": "grpo", "group_size": 4, "advantage": "mean"},
}
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["index"] == int(ground_truth)
    right = sum(c.isascii() and c.isalnum() for c in solution_str) / 12
    return {"score": right, "truth": ground_truth}
"""


def write(folder: Path, **changes: Any) -> None:
    (folder / "theirs.py").write_text(VERL)
    write_rows(folder / "sums.jsonl", [{"prompt": f"{i} + 1?", "level": i // 3} for i in range(9)])
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(6)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "verl.parquet")
    write_policy(folder, **{"data__chat_template": "llama3", **MIXED, **changes})


def assert_same_but_for_times(run: str, other: str, keys: Sequence[str]) -> None:
    for one, two in zip(metrics(run), metrics(other), strict=True):
        assert {key: one.get(key) for key in keys} == {key: two.get(key) for key in keys}
    samples = [Path(name, "samples.jsonl").read_bytes() for name in (run, other)]
    assert samples[0] == samples[1]


@pytest.mark.slow
def test_a_mixture_of_rewards_and_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path, steps=4, checkpoint={"every": 2})
    train("r.yaml")
    rows = [row for row in metrics("run") if row["step"]]
    # Weights 2 : 1 : 1, four prompts a step.
    assert [[row[f"data/kept/{name}"] for name in ("sums", "verl", "game")] for row in rows] == [
        [2 * n, n, n] for n in range(1, 5)
    ]
    assert all(f"reward/source/{name}" in rows[0] for name in ("sums", "verl", "game"))
    samples = lines(Path("run/samples.jsonl"))
    scored = {"sums": "letters", "verl": "compute_score", "game": "environment"}
    for row in samples:
        assert [name for name, x in row["rewards"].items() if x is not None] == [scored[row["source"]]]
        assert ("logged" in row) == (row["source"] == "verl")
        assert not row["failures"]
    assert {row["source"] for row in samples} == {"sums", "verl", "game"}
    # The same run, stopped after two steps.
    train("r.yaml", "output=other", "steps=2")
    train("r.yaml", "output=other")
    assert losses("other") == losses("run")
    assert_same_but_for_times("other", "run", ["reward/mean", "reward/source/game", "train/loss", "data/kept/verl"])
    assert main(["inspect", "r.yaml", "--rows", "1"]) == 0
    printed = capsys.readouterr().out
    assert "verl: 1 of 4 rows that are read" in printed
    assert "All rows of verl.parquet:" in printed
    assert main(["check", "r.yaml"]) == 0
    assert "# data.train, sums: 9 rows, all of them read, 2 of 4 that are read" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("by", ["success", "level"])
def test_a_curriculum_goes_on_to_the_bit(tmp_path: Path, by: str):
    """A success is an answer of which a third are letters, so that some prompts are passed over from the second epoch
    on; the level rises with every group."""
    settings = {"by": by, "success": 0.3, "window": 1, **({"raise_at": 0.01} if by == "level" else {})}
    write(tmp_path, data__train="sums.jsonl", data__curriculum=settings, steps=6, checkpoint={"every": 2})
    train("r.yaml")
    rows = [row for row in metrics("run") if row["step"]]
    if by == "success":
        assert rows[-1]["curriculum/known"] == 9
        assert rows[-1]["curriculum/taken"] < 1
    else:
        assert rows[0]["curriculum/level"] == 0
        assert rows[-1]["curriculum/level"] > 0
    train("r.yaml", "output=other", "steps=4")
    train("r.yaml", "output=other")
    names = [key for key in rows[-1] if key.startswith("curriculum/")]
    assert_same_but_for_times("other", "run", [*names, "reward/mean", "train/loss", "data/kept"])


@pytest.mark.slow
def test_given_completions_of_two_data_sets_are_measured_by_themselves(tmp_path: Path):
    rows = [{"path": "train.jsonl", "name": "a", "weight": 3}, {"path": "held.jsonl", "name": "b"}]
    held_out = [{"path": "held.jsonl", "name": "b"}, {"path": "train.jsonl", "name": "a"}]
    write_recipe(tmp_path / "r.yaml", {"data.train": rows, "data.eval": held_out, "eval": {"every": 2, "rows": 6}})
    train("r.yaml")
    last = metrics("run")[-1]
    assert (last["data/kept/a"], last["data/kept/b"]) == (24, 8)
    assert last["eval/loss/source/a"] != last["eval/loss/source/b"]
    low, high = sorted((last["eval/loss/source/a"], last["eval/loss/source/b"]))
    assert low < last["eval/loss"] < high


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": None}, "data.train.0.reward: nothing scores the completions of sums: name rewards here, or in"),
        (
            {"rollout__max_staleness": 1, "rollout__in_flight": "continue"},
            "rollout.in_flight: continue: the episodes of game are not paused for new weights",
        ),
        ({"data__eval": "sums.jsonl", "reward": None}, "data.eval: nothing scores its completions: make it a list"),
        ({"data__curriculum": {"by": "words"}}, "data.curriculum: {by: words} would sort several data sets into one"),
        ({"data__train.1.weight": 0}, "data.train.1.weight: 0 is not a number above 0"),
        ({"data__train.1.colums": {}}, "data.train.1.colums: unknown key. Did you mean 'columns'?"),
        (
            {"data__train.1.columns": {"answer": "reward_model.ground_truht"}},
            "Did you mean 'reward_model.ground_truth'?",
        ),
        ({"data__train.1.columns": {"prompt": "qestion"}}, "verl.parquet has the columns 'data_source', 'prompt'"),
        (
            {"data__train.1.reward": {"functions": ["number"]}},
            "data.train.1.reward.functions.0: the reward number wants the column 'answer'",
        ),
        ({"data__train.2.environment": {"name": "gessing"}}, "Did you mean 'guessing'?"),
        (
            {"data__train": "sums.jsonl", "data__curriculum": {"by": "levl"}},
            "not 'levl', whose numbers order the prompts. Did you mean 'level'?",
        ),
        (
            {"data__train": "sums.jsonl", "data__curriculum": {"by": "success"}, "rollout__oversample": 1.5},
            "rollout.oversample: data.curriculum: {by: success} chooses prompts by what came of all before",
        ),
        ({"data__train": "sums.jsonl", "data__turns": "last"}, "data.turns: last is about conversations"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    merged: dict[str, Any] = json.loads(json.dumps(MIXED))
    for key, value in changes.items():
        if key.startswith("data__train."):
            _, number, name = key.split(".")
            merged["data__train"][int(number)][name] = value
        else:
            merged[key] = value
    write(tmp_path, **merged)
    assert main(["check", "r.yaml"]) == 2
    assert message in capsys.readouterr().err
