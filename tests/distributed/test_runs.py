"""Runs of several real processes on loopback: what one process computes, they compute, and their folder is the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.marks import slow
from tests.several import several
from tests.tiny_rl import write_policy
from tests.tiny_runs import lines, metrics, model_folder, train, write_recipe, write_rows

IGNORED = ("time/", "perf/", "compile/")
"""Metrics of time, which no two runs share."""
SFT: dict[str, Any] = {"mesh": {"fsdp": 4}, "data.eval": "held.jsonl", "eval": {"every": 2, "samples": 1}}
REWARDS = '''
def letters(completion):
    return sum(c.isascii() and c.isalnum() for c in completion) / max(len(completion), 1)


def rank(completions):
    """A reward that no process can give alone: the place of a completion among all of the step."""
    order = sorted(range(len(completions)), key=lambda i: (completions[i], i))
    return [order.index(i) / len(order) for i in range(len(completions))]
'''


def alone_and_together(folder: Path, number: int, *words: str, recipe: str = "r.yaml") -> tuple[Path, Path]:
    """The run folders of one process and of several, each with four devices in all."""
    runs = []
    for processes in (1, number):
        with several(folder, processes, recipe, f"output=run{processes}", *words) as run:
            run.end_well()
        runs.append(folder / f"run{processes}")
    return runs[0], runs[1]


def assert_same_numbers(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """Losses and all other metrics but those of time."""
    ours, theirs = metrics(one), metrics(other)
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.keys() == yours.keys()
        for name in mine:
            if not name.startswith(IGNORED):
                assert yours[name] == pytest.approx(mine[name], abs=tolerance, rel=tolerance), (name, mine["step"])


def assert_same_samples(one: Path, other: Path) -> None:
    """Texts, tokens, rewards and advantages to the last bit, log-probs to the fourth digit that is written."""
    ours, theirs = lines(one / "samples.jsonl"), lines(other / "samples.jsonl")
    for mine, yours in zip(ours, theirs, strict=True):
        logprobs = [row["per_token"].pop("logprobs") for row in (mine, yours) if "per_token" in row]
        np.testing.assert_allclose(logprobs[:1], logprobs[1:], atol=1.1e-4)
    assert ours == theirs


def assert_same_export(one: Path, other: Path) -> None:
    """Files and weights."""
    assert {file.name for file in (one / "export").iterdir()} == {file.name for file in (other / "export").iterdir()}
    for file in (one / "export").glob("*.safetensors"):
        ours, theirs = load_file(file), load_file(other / "export" / file.name)
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            np.testing.assert_allclose(theirs[name], array, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_given_rows_are_shared_out_and_weights_are_sharded_over_processes(tmp_path: Path):
    write_recipe(tmp_path / "r.yaml", SFT)
    one, two = alone_and_together(tmp_path, 2)
    assert_same_numbers(one, two)
    assert_same_export(one, two)
    assert [row["prompt"] for row in lines(one / "samples.jsonl")] == [
        row["prompt"] for row in lines(two / "samples.jsonl")
    ]


def write_judged(folder: Path, **changes: Any) -> None:
    """A policy whose answers are judged one by one, and all together."""
    (folder / "rewards.py").write_text(REWARDS)
    functions = ["rewards.py:letters", "rewards.py:rank"]
    write_policy(folder, **{"reward__functions": functions, "data__eval": "held.jsonl", "eval": {"rows": 4}, **changes})


@pytest.mark.slow
def test_prompts_are_dealt_and_rewards_of_all_answers_see_all_of_them(tmp_path: Path):
    write_judged(tmp_path)
    one, two = alone_and_together(tmp_path, 2)
    assert_same_numbers(one, two)
    assert_same_export(one, two)
    assert_same_samples(one, two)


PAIRED = [{"prompt": f"{i}>", "chosen": "ABC"[: 1 + i % 3], "rejected": "abc"[: 1 + i % 2]} for i in range(32)]
LABELLED = [{"prompt": f"{i}>", "completion": "ABC"[: 1 + i % 3], "label": bool(i % 2)} for i in range(32)]
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": SFT,
    "dpo": {"algorithm.name": "dpo"},
    "kto": {"algorithm.name": "kto"},
    "reward": {"algorithm.name": "reward"},
    "distill": {"algorithm.name": "distill", "teacher": {"path": "teacher", "dtype": "float32"}},
    "grpo": {},
    "dapo": {"algorithm": {"name": "grpo", "group_size": 4, "dynamic_sampling": True}},
    "ppo": {"algorithm": {"name": "ppo"}, "batch_size": 16},
    "lora": {"adapter": {"rank": 4}},
    "judge": {"reward": {"model": "judge"}},
    "game": {
        "reward": None,
        "rollout.environment": {"name": "guessing"},
        "data.train": "tunix.rollout.environments.guessing:secrets",
        "data.eval": "tunix.rollout.environments.guessing:secrets",
        "batch_size": 8,
    },
    "mixture": {
        "data.train": [
            {"path": "train.jsonl", "weight": 2},
            {"path": "held.jsonl", "name": "ranked", "reward": {"functions": ["rewards.py:rank"]}},
            {
                "path": "tunix.rollout.environments.guessing:secrets",
                "name": "game",
                "environment": {"name": "guessing"},
                "reward": {"functions": []},
            },
        ],
        "data.curriculum": {"by": "success", "success": 0.4, "window": 1},
        "batch_size": 8,
        "algorithm": {"name": "grpo", "group_size": 4, "advantage": "mean"},
    },
    "mixed": {"data.train": [{"path": "train.jsonl", "weight": 2}, {"path": "held.jsonl", "name": "b"}]},
    "precomputed": {"algorithm": {"name": "dpo", "reference": "precompute"}},
    "stages": {"stages": [{"steps": 2}, {"steps": 2, "optimizer": {"learning_rate": 1e-3}}], "steps": None},
    "qlora": {"adapter": {"kind": "qlora", "rank": 4, "tile": 16}},
}
POLICIES = ("grpo", "dapo", "ppo", "lora", "judge", "game", "mixture")


def write_algorithm(folder: Path, name: str) -> None:
    """The recipe of an algorithm, and rows of its kind."""
    if name == "judge":
        write_rows(folder / "train.jsonl", PAIRED)
        train(str(write_recipe(folder / "judge.yaml", {"algorithm.name": "reward", "output": "judged", "steps": 2})))
        (folder / "train.jsonl").unlink()
        (folder / "judged/export").rename(folder / "judge")
    if name in POLICIES:
        write_judged(folder, **{key.replace(".", "__"): value for key, value in ALGORITHMS[name].items()})
        return
    given = {"dpo": PAIRED, "precomputed": PAIRED, "reward": PAIRED, "kto": LABELLED}.get(name)
    if name == "distill":
        model_folder(folder / "teacher", hidden_size=48)
    if given:
        write_rows(folder / "train.jsonl", given)
        write_rows(folder / "held.jsonl", given[:6])
    write_recipe(folder / "r.yaml", ALGORITHMS[name])


@pytest.mark.parametrize("number", slow([2, 4]))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_one_processs_numbers(tmp_path: Path, name: str, number: int):
    write_algorithm(tmp_path, name)
    one, other = alone_and_together(tmp_path, number)
    stages = [path.parent.name for path in sorted(one.glob("*/metrics.jsonl"))]
    assert len(stages) == (2 if name == "stages" else 0)
    for stage in stages or [""]:
        assert_same_numbers(one / stage, other / stage)
        assert_same_export(one / stage, other / stage)


LENGTH = "reward={functions: [{name: length, options: {target: 16, width: 32}}]}"


@pytest.mark.slow
def test_a_critic_of_a_shipped_recipe_learns_the_same_where_rewards_vary(tmp_path: Path):
    """Its own reward is 0 for every answer of a random model. Then returns are the rounding of the KL (1e-8), which
    Adam's first steps and whitening enlarge to a spread of 1: 2e-3 in the loss between one device and four, too."""
    words = ("--tiny", "model.dtype=float32", "steps=4", "optimizer.warmup=2", LENGTH)
    one, two = alone_and_together(tmp_path, 2, *words, recipe="ppo_gemma")
    assert min(row["reward/std"] for row in metrics(one) if "reward/std" in row) > 0.01
    assert_same_numbers(one, two)
