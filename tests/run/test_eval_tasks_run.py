"""Tasks of `eval` in runs: measured and kept, the same after a resume and by `tunix eval`, and refused in time."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.tiny_rl import REWARDS, write_policy
from tests.tiny_runs import lines, metrics, train, write_recipe, write_rows
from tunix.cli import main
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Collector
from tunix.rollout.environments.adapters import ADAPTERS, Adapter
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.collector import task_of
from tunix.run.evaluation import TaskEvaluation
from tunix.run.inputs import open_inputs
from tunix.run.setup import Setup, algorithm_of

LETTERS = '''
from tunix.rollout.environments.base import Environment, Step


class Letters(Environment):
    """Two turns; each is worth half of its share of letters."""

    def reset(self, row, rng):
        self.turn = 0
        return row["prompt"]

    def step(self, action, tokens):
        self.turn += 1
        share = sum(c.isascii() and c.isalnum() for c in action) / max(len(action), 1)
        return Step("go on:" if self.turn == 1 else None, reward=share / 2, done=self.turn == 2)
'''
TASKS: list[dict[str, Any]] = [
    {"name": "turns", "environment": "letters.py:Letters", "data": "few.jsonl", "pass_at": [1, 2], "success": 0.2},
    {"name": "plain", "data": "few.jsonl", "n": 2, "temperature": 1.0},
]


def evaluations(run: str) -> dict[int, dict[str, float]]:
    """The metrics of each evaluation's tasks, by step."""
    named = {row["step"]: {key: x for key, x in row.items() if key.startswith("eval/")} for row in metrics(run)}
    return {step: row for step, row in named.items() if row}


@pytest.mark.slow  # three runs, and the command after them
def test_tasks_are_measured_resumed_and_measured_again(tmp_path: Path):
    """The run's rewards and rows that an environment answers; a run in two parts says and keeps the same."""
    Path("letters.py").write_text(LETTERS)
    write_rows(tmp_path / "few.jsonl", [{"prompt": word} for word in ("abc>", "hgf>", "xyz>")])
    changes = {"eval": {"every": 2, "tasks": TASKS}, "steps": 4, "checkpoint": {"every": 2}}
    recipe = write_policy(tmp_path, **changes)
    train(str(recipe), "output=whole")
    train(str(recipe), "output=parts", "steps=2")
    train(str(recipe), "output=parts")
    whole = evaluations("whole")
    assert list(whole) == [0, 2, 4]
    assert evaluations("parts") == whole
    assert whole[4]["eval/turns/reward"] != whole[0]["eval/turns/reward"]
    names = ["turns/reward", "turns/pass@1", "turns/pass@2", "plain/reward"]
    assert {f"eval/{name}{end}" for name in names for end in ("", "_se")} < set(whole[4])
    runs = {run: lines(Path(run) / "samples.jsonl") for run in ("whole", "parts")}
    samples = {run: [row for row in rows if "task" in row] for run, rows in runs.items()}
    assert samples["parts"] == samples["whole"]
    # Three greedy and six sampled answers, and two of the other task, at three evaluations.
    assert [row["task"] for row in samples["whole"]] == [*["turns"] * 9, *["plain"] * 2] * 3
    rewards = [row["rewards"]["environment"] for row in samples["whole"] if row["step"] == 4 and not row["temperature"]]
    assert sum(rewards) / 3 == pytest.approx(whole[4]["eval/turns/reward"])
    # The exported weights, asked the same.
    words = ["few.jsonl", "--environment", "letters.py:Letters", "--threshold", "0.2", "--pass-at", "1,2"]
    assert main(["eval", "whole", *words, "--out", "out.json"]) == 0
    found = {name: (x["value"], x["error"]) for name, x in json.loads(Path("out.json").read_text())["metrics"].items()}
    assert found == {
        name: (pytest.approx(whole[4][f"eval/turns/{name}"]), pytest.approx(whole[4][f"eval/turns/{name}_se"]))
        for name in ("reward", "pass@1", "pass@2")
    }


@pytest.mark.slow
def test_a_task_ends_a_run_of_given_answers(tmp_path: Path):
    """SFT, whose answers a task alone judges: any answer will do."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    task = {"name": "any", "data": "held.jsonl", "reward": {"functions": ["rewards.py:letters"]}, "n": 4}
    task |= {"pass_at": [2], "success": 0.0}
    changes = {"data.completion_length": 12, "rollout.temperature": 0.7}
    changes["eval"] = {"tasks": [task], "until": {"eval/any/pass@2": 1.0}}
    train(str(write_recipe(tmp_path / "r.yaml", changes)))
    said = Path("run/log.txt").read_text()
    assert "eval/any/pass@2 is 1.0000: the run has reached eval.until" in said
    assert "any: pass@2 1.000 -> 1.000" in said
    assert list(evaluations("run")) == [0]
    assert {row["temperature"] for row in lines(Path("run/samples.jsonl"))} == {0.0, 0.7}


def test_prompts_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Episodes of an environment that makes its own, of a seed that is not trained on; a file; those of the run."""
    monkeypatch.setitem(ADAPTERS, "reasoning_gym", Adapter("tunix.rollout.environments.guessing:Guessing"))
    write_rows(tmp_path / "few.jsonl", [{"question": word, "answer": 1} for word in ("abc>", "hgf>")])
    tasks = [
        {"name": "made", "environment": "reasoning_gym", "n": 3},
        {"name": "few", "data": "few.jsonl", "columns": {"prompt": "question"}},
        {"name": "held", "n": 4},
    ]
    recipe = Recipe.load(write_policy(tmp_path, eval=tasks, data__eval="held.jsonl", seed=7))
    inputs = open_inputs(recipe, tmp_path)
    setup = Setup.on(jax.devices()[:1], recipe, inputs.source, algorithm_of(recipe), None)
    collector = Collector(None, setup.algorithm.sampling, Scorer([lambda completion, prompt: 1.0]))
    tasks = [task_of(i, setup, inputs, collector, tmp_path, Future()) for i in range(3)]
    made, few, held = [task.prompts for task in tasks if isinstance(task, TaskEvaluation)]
    assert [prompt.row for prompt in made] == [{"seed": 2**31 + 7, "index": i} for i in range(3)]
    assert [prompt.text for prompt in few] == ["abc>", "hgf>"]
    rows = lines(tmp_path / "held.jsonl")
    assert [prompt.text for prompt in held] == [row["prompt"] for row in rows[:4]]


BAD = [
    ({"environment": "gessing", "data": "few.jsonl"}, ["eval.tasks.0.environment", "Did you mean 'guessing'?"]),
    ({"data": "gone.jsonl"}, ["eval.tasks.0.data", "gone.jsonl: there is no such file"]),
    (
        {"reward": {"functions": ["number"]}, "data": "few.jsonl"},
        ["eval.tasks.0.reward.functions.0", "the reward number wants the column 'answer'"],
    ),
    ({"environment": "guessing", "data": "environment"}, ["eval.tasks.0.data", "makes no rows of its own"]),
]


@pytest.mark.parametrize(("task", "fragments"), BAD)
def test_what_check_says(
    task: dict[str, Any], fragments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_rows(tmp_path / "few.jsonl", [{"prompt": "abc>"}])
    recipe = write_policy(tmp_path, eval=[{"name": "bad", **task}])
    assert main(["check", str(recipe)]) == 2
    message = capsys.readouterr().err
    assert all(fragment in message for fragment in fragments), message
    assert len(message.splitlines()) == 1


def test_what_a_run_says_before_it_reads_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Whether an environment gives rewards shows when it is made."""
    write_rows(tmp_path / "few.jsonl", [{"prompt": "abc>"}])
    recipe = write_policy(tmp_path, eval=[{"name": "bad", "environment": "problem", "data": "few.jsonl"}])
    assert main(["run", str(recipe)]) == 2
    out, message = capsys.readouterr()
    assert "eval.tasks.0 (bad): nothing scores the answers: its environment gives no rewards" in message
    assert "compiling" not in out
