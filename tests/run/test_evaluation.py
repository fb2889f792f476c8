"""Where an evaluation ends a run."""

import pytest

from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.run.evaluation import Evaluation


@pytest.mark.parametrize(
    ("values", "metric"),
    [
        ({"eval/loss": 2.1, "eval/reward": 0.8}, None),
        ({"eval/loss": 2.0, "eval/reward": 0.8}, "eval/loss"),
        ({"eval/loss": 2.1, "eval/reward": 0.9}, "eval/reward"),
        ({}, None),
    ],
)
def test_a_loss_falls_to_its_target_and_everything_else_rises_to_it(values: dict[str, float], metric: str | None):
    evaluation = Evaluation(SFT(SFTConfig()), until={"eval/loss": 2.0, "eval/reward": 0.9})
    assert evaluation.reached(values) == metric
