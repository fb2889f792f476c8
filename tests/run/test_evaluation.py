"""Where an evaluation ends a run, and what a task measures."""

import math
from collections.abc import Mapping

import numpy as np
import pytest

from tests.run.test_fake_client import FakeClient
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.data.types import Prompt
from tunix.errors import UserError
from tunix.rollout.collect import Collector
from tunix.rollout.config import EvalTask
from tunix.rollout.rewards.base import Reward
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.evaluation import Evaluation, TaskEvaluation
from tunix.trainer.progress import evaluated
from tunix.types import Completion, Sampling


@pytest.mark.parametrize(
    ("values", "metric"),
    [
        ({"eval/loss": 2.1, "eval/reward": 0.8}, None),
        ({"eval/loss": 2.0, "eval/reward": 0.8}, "eval/loss"),
        ({"eval/loss": 2.1, "eval/reward": 0.9}, "eval/reward"),
        ({"eval/lossy/pass@8": 0.4}, None),
        ({"eval/lossy/pass@8": 0.5}, "eval/lossy/pass@8"),
        ({}, None),
    ],
)
def test_a_loss_falls_to_its_target_and_everything_else_rises_to_it(values: dict[str, float], metric: str | None):
    until = {"eval/loss": 2.0, "eval/reward": 0.9, "eval/lossy/pass@8": 0.5}
    assert Evaluation(SFT(SFTConfig()), until=until).reached(values) == metric


FAILS = 9
"""The id that no reward can score."""


class Scripted(FakeClient):
    """Answers with ids of a script: `[prompt][sample]` for each temperature."""

    def __init__(self, script: Mapping[float, list[list[int]]]) -> None:
        super().__init__()
        self.script = script

    def run(self, requests, reply=None, on_done=None):
        self.calls.append(f"sample at {requests[0].sampling.temperature:g}, seed {requests[0].seed}")
        script = self.script[requests[0].sampling.temperature]
        ids = [i for group in script for i in group[: len(requests) // len(script)]]
        ones = np.ones(1)
        return [
            Completion(np.array([i], np.int32), -ones, "stop", ones.astype(np.int32), x.sampling, ((0, 1),))
            for i, x in zip(ids, requests, strict=True)
        ]


def score(completion: str, completion_ids: list[int]) -> float:
    if completion_ids[0] == FAILS:
        raise ValueError("cannot say")
    return float(completion_ids[0])


def task(**settings: object) -> TaskEvaluation:
    """Three prompts; an answer's reward is its id."""
    prompts = [Prompt(np.array([5, i], np.int32), "", {}) for i in range(3)]
    scorer = Scorer([Reward("id", score)])
    collector = Collector(None, Sampling(max_tokens=1, temperature=0.7), scorer)
    config = EvalTask.model_validate({"name": "ids", "data": "rows", **settings})
    return TaskEvaluation(config, prompts, collector)


def test_a_task_by_hand():
    """Greedy answers earn 1, 0 and 1: the mean is 2/3, squares 1/9 + 4/9 + 1/9 = 6/9, over 2 and 3.

    Of two others the prompts have 1, 0 and 1 right ones, of 2, 2 and 1 with a score: pass@1 is 1/2, 0 and 1, whose mean
    is 1/2, squares 0 + 1/4 + 1/4, over 2 and 3. pass@2 is 1 and 0 of the first two: squares 1/2, over 1 and 2.
    """
    client = Scripted({0.0: [[1], [0], [1]], 0.7: [[1, 0], [0, 0], [1, FAILS]]})
    metrics, rows = task(pass_at=[1, 2]).measure(client)
    assert metrics == {
        "eval/ids/reward": pytest.approx(2 / 3),
        "eval/ids/pass@1": 0.5,
        "eval/ids/pass@2": 0.5,
        "eval/ids/reward_se": pytest.approx(1 / 3),
        "eval/ids/pass@1_se": pytest.approx(math.sqrt(1 / 12)),
        "eval/ids/pass@2_se": 0.5,
        "eval/ids/failed": pytest.approx(1 / 9),
    }
    assert client.calls == ["sample at 0, seed 0", "sample at 0.7, seed 0"]
    kept = [(row["task"], row["temperature"], row["group"], row["completion"], row["rewards"]["id"]) for row in rows]
    assert kept[:4] == [
        ("ids", 0.0, 0, [1], 1),
        ("ids", 0.0, 1, [0], 0),
        ("ids", 0.0, 2, [1], 1),
        ("ids", 0.7, 0, [1], 1),
    ]
    assert (len(kept), rows[-1]["rewards"]) == (9, {"id": None})
    assert "cannot say" in rows[-1]["failures"]["id"]
    assert evaluated(metrics) == (
        "eval/ids/reward 0.6667 ± 0.3333  eval/ids/pass@1 0.5000 ± 0.2887  eval/ids/pass@2 0.5000 ± 0.5000  "
        "eval/ids/failed 0.1111"
    )


def test_one_temperature_is_that_of_all_answers():
    """The reward is that of one answer each. Of 2 and 0, 1 and 1, 3 and 2 at least 2 are 1, 0 and 2."""
    client = Scripted({0.3: [[2, 0], [1, 1], [3, 2]]})
    metrics, rows = task(pass_at=[2], temperature=0.3, success=2.0).measure(client)
    assert (metrics["eval/ids/reward"], metrics["eval/ids/pass@2"]) == (2.0, pytest.approx(2 / 3))
    assert (len(client.calls), len(rows), metrics["eval/ids/failed"]) == (2, 9, 0)
    assert "failed" not in evaluated(metrics)
    # One answer may serve for both.
    client = Scripted({0.0: [[2], [1], [3]]})
    metrics, rows = task(pass_at=[1], success=2.0).measure(client)
    assert (metrics["eval/ids/reward"], metrics["eval/ids/pass@1"]) == (2.0, pytest.approx(2 / 3))
    assert (len(client.calls), len(rows)) == (1, 3)


def test_a_k_that_no_prompt_has_answers_for_is_left_out():
    metrics, _ = task(pass_at=[1, 2], temperature=1).measure(Scripted({1.0: [[1, FAILS], [0, FAILS], [FAILS, FAILS]]}))
    assert metrics["eval/ids/pass@1"] == 0.5
    assert "eval/ids/pass@2" not in metrics


def test_a_task_without_any_score_stops_the_run():
    with pytest.raises(
        UserError,
        match=r"eval.tasks, ids: reward: none of the 3 samples of a step could be scored, the first because id raised",
    ):
        task().measure(Scripted({0.0: [[FAILS], [FAILS], [FAILS]]}))
