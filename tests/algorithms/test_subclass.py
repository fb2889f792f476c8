"""An algorithm of one's own: the three lines of the README, from a recipe and in process, an advantage, and a loss.

All runs share one shape of model and batch. The reward is the length of the answer, which a random model already
varies in, so that there is something to learn from.
"""

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_runs import lines, metrics, train, write_recipe
from tunix.algorithms.base import Update
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.recipe.recipe import Recipe
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.build import assemble
from tunix.trainer.progress import Display
from tunix.types import LossInputs, LossOutputs, Term

THREE_LINES = '''
import numpy as np

from tunix.algorithms.grpo.algorithm import GRPO


class MyGRPO(GRPO):
    def advantages(self, rewards_PG):            # numpy, [P G] -> [P G]
        return rewards_PG - np.nanmedian(rewards_PG, axis=1, keepdims=True)

    def loss(self, inputs):                      # jax, LossInputs -> LossOutputs
        out = super().loss(inputs)
        return out.add("entropy", -0.001 * inputs.entropy)


def patchy(completion):
    """The README's class has to live with rewards that fail, here for a fifth of the answers."""
    if len(completion.encode()) % 5 == 0:
        raise ValueError("not today")
    return len(completion) / 12
'''
POLICY = {
    "data.max_length": 32,
    "data.completion_length": 12,
    "batch_size": 3,
    "steps": 2,
    "algorithm": {"name": "grpo", "group_size": 4},
    "reward.functions": [{"name": "length", "options": {"target": 3, "width": 20}}],
    "logging.samples.groups": 3,
}


def recipe(folder: Path, **algorithm: Any) -> Path:
    """A short run of 3 prompts x 4 answers."""
    return write_recipe(folder / "r.yaml", {**POLICY, "algorithm": {**POLICY["algorithm"], **algorithm}})


def in_process(recipe: Recipe, kind: type[GRPO], reward: Any = None) -> list[Update]:
    """The run's steps by hand, as a notebook takes them: the client and the data are the recipe's, the class is not."""
    with (
        closing(Display("by hand", 0, 0)) as display,
        closing(assemble(recipe, Path(recipe.output), display)) as job,
        closing(Scorer([reward or recipe.reward.functions[0]])) as scorer,  # pyright: ignore
    ):
        algorithm = kind(recipe.algorithm, job.algorithm.sampling)
        steps = itertools.islice(job.stream, recipe.steps)  # pyright: ignore
        judged = (replace(data, collector=replace(data.collector, scorer=scorer)) for data in steps)
        return [algorithm.update(job.client, data) for data in judged]


def number(update: Update, name: str) -> float:
    return float(update.metrics[name])


@pytest.mark.slow
def test_three_lines_from_a_recipe_and_in_process(tmp_path: Path):
    (tmp_path / "my_file.py").write_text(THREE_LINES)
    train(str(recipe(tmp_path, name="my_file.py:MyGRPO")), "reward.functions=[my_file.py:patchy]")
    of_run = [row for row in metrics("run") if row["step"]]
    for row in of_run:
        # A mean over the trained tokens times -0.01, and the loss is the sum of its terms.
        assert row["loss/entropy"] == pytest.approx(-0.001 * row["policy/entropy"], rel=1e-5)
        assert row["train/loss"] == pytest.approx(row["loss/policy"] + row["loss/entropy"], abs=1e-7)
        assert row["mismatch/max"] < 1e-3
    # A random model of 272 tokens is close to uniform: log(272) = 5.606 nats, and no more.
    assert 4.5 < of_run[0]["policy/entropy"] < 5.606
    failed = 0
    for step in (1, 2):
        rows = [row for row in lines(Path("run/samples.jsonl")) if row["step"] == step]
        rewards_PG = np.array([row["rewards"]["patchy"] for row in rows], float).reshape(3, 4)  # None is NaN
        failed += np.isnan(rewards_PG).sum()
        expected = np.nan_to_num(rewards_PG - np.nanmedian(rewards_PG, axis=1, keepdims=True))
        np.testing.assert_allclose([row["advantage"] for row in rows], expected.ravel(), atol=1e-6)
        assert np.ptp(expected) > 0
    assert failed > 1
    told: dict[str, Any] = {}
    exec(THREE_LINES, told)
    updates = in_process(Recipe.load(recipe(tmp_path), ["output=by_hand"]), told["MyGRPO"], told["patchy"])
    for name in ("train/loss", "loss/entropy", "reward/mean", "train/grad_norm"):
        assert [number(update, name) for update in updates] == [row[name] for row in of_run]


class Middle(GRPO):
    """Against the middle of the best and the worst."""

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        return rewards_PG - (rewards_PG.max(1, keepdims=True) + rewards_PG.min(1, keepdims=True)) / 2


def vowels(completion: str) -> float:
    """The share of ASCII letters; a function of this file, as of a notebook's cell."""
    return sum(letter.isascii() and letter.isalpha() for letter in completion) / max(len(completion), 1)


@pytest.mark.slow  # three lines from a recipe, and a loss of its own, stay
def test_an_advantage_and_a_reward_of_ones_own(tmp_path: Path):
    (update, _) = in_process(Recipe.load(recipe(tmp_path)), Middle, vowels)
    samples = [row for row in update.samples if row["group"] < 3]
    rewards = np.array([row["rewards"]["vowels"] for row in samples]).reshape(3, 4)
    texts = [row["completion"] for row in samples]
    assert rewards.ravel().tolist() == [vowels(text) if isinstance(text, str) else 0 for text in texts]
    expected = rewards - (rewards.max(1, keepdims=True) + rewards.min(1, keepdims=True)) / 2
    np.testing.assert_allclose([row["advantage"] for row in samples], expected.ravel(), atol=1e-6)
    assert "loss/entropy" not in update.metrics


class Reinforce(GRPO):
    """`-A log p` and nothing else: it does not think of the sampler's mismatch, which is measured all the same."""

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs({"reinforce": Term(-jnp.asarray(inputs.batch.per_token["advantages"]) * inputs.logprobs)})


@pytest.mark.slow
def test_a_loss_of_ones_own_is_gated_too(tmp_path: Path):
    loaded = Recipe.load(recipe(tmp_path))
    own, clipped = in_process(loaded, Reinforce), in_process(loaded, GRPO)
    assert 0 < number(own[0], "mismatch/max") < 1e-3
    # -A log p and -r A have one gradient while the ratio is 1, and different values.
    assert number(own[0], "train/grad_norm") == pytest.approx(number(clipped[0], "train/grad_norm"), rel=1e-4)
    assert abs(number(own[0], "train/loss") - number(clipped[0], "train/loss")) > 1e-3
    assert number(own[0], "reward/mean") == number(clipped[0], "reward/mean")
