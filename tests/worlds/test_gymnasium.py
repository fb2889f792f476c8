"""Gymnasium: texts and rendered states by hand, what is refused, and a run that learns its way over the ice."""

from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import yaml

from tests.worlds.tiny_games import MODEL, RL, mean, random_play, run, run_page
from tunix.commands.check import check
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.base import Step
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.gymnasium import Gymnasium
from tunix.rollout.environments.remote import Player

pytestmark = pytest.mark.worlds
RNG = np.random.default_rng(0)
NONE = np.zeros(0, np.int32)
ROW = {"seed": 0, "index": 1}
NAMES = ["left", "down", "right", "up"]
SETTINGS = {"is_slippery": False, "max_episode_steps": 5}


class Repeat(gymnasium.Env[str, str]):
    """Wants the word that it says, three times."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = gymnasium.spaces.Text(10)
    action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._word, self._left = f"w{self.np_random.integers(1000)}", 3
        return self._word, {}

    def step(self, action: str):
        self._left -= 1
        return self._word, float(action == self._word), self._left == 0, False, {}


gymnasium.register("Repeat-v0", Repeat)


def play(environment: Gymnasium, *actions: str) -> list[Step]:
    return [environment.step(action, NONE) for action in actions]


def test_texts_are_read_and_answered():
    environment = Gymnasium(game="tests.worlds.test_gymnasium:Repeat-v0")
    word = environment.reset(ROW, RNG)
    assert word == environment.reset(ROW, RNG) != environment.reset({"seed": 1, "index": 1}, RNG)
    environment.reset(ROW, RNG)
    steps = play(environment, f"{word}\n", "other", str(word))
    assert [(step.observation, step.reward, step.done) for step in steps] == [
        (f"\n{word}", 1.0, False),
        (f"\n{word}", 0.0, False),
        (None, 1.0, True),
    ]


def test_states_are_rendered_and_actions_have_names():
    environment = Gymnasium(game="FrozenLake-v1", settings=SETTINGS, actions=NAMES, rules="Reach G.")
    assert environment.reset(ROW, RNG) == "Reach G.\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    (step,) = play(environment, "Right")
    assert step == Step("\n  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG\n", 0.0)
    assert play(environment, "down") == [Step(reward=0.0, done=True)]  # a hole
    environment.reset(ROW, RNG)
    assert play(environment, *["left"] * 5)[-1].done  # truncated
    numbers = Gymnasium(game="FrozenLake-v1", settings=SETTINGS, illegal=-0.5)
    numbers.reset(ROW, RNG)
    assert play(numbers, "2")[0].reward == 0
    assert play(numbers, "right") == [Step(reward=-0.5, done=True)]


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        ("FrozenLake-v2", {}, "Did you mean 'FrozenLake-v1'?"),
        ("CartPole-v1", {}, "observations Box("),
        ("Blackjack-v1", {}, "observations Tuple(Discrete(32), Discrete(11), Discrete(2)) and actions Discrete(2)"),
        ("FrozenLake-v1", {"actions": ["left"]}, "has 4 actions; the option actions names ['left']"),
        ("FrozenLake-v1", {"settings": {"ice": 1}}, "unexpected keyword argument 'ice'"),
        ("FrozenLake-v1", {"action": ["left"]}, "Did you mean 'actions'?"),
    ],
)
def test_what_cannot_be_played_is_told_before_a_run(game: str, options: dict[str, Any], message: str):
    with pytest.raises(UserError) as told:
        Player(EnvironmentConfig(name=f"gymnasium:{game}", options=options, workers=1), bytes_tokenizer())
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_check_names_what_is_not_known_before_weights_are_read(tmp_path: Path):
    recipe = {"model": MODEL, "algorithm": {"name": "grpo"}, "data": {"max_length": 32, "completion_length": 8}}
    recipe |= {"rollout": {"environment": {"gymnasium": "FrozenLake-v2"}}, "output": str(tmp_path / "run")}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError, match=r"rollout.environment: .* Did you mean 'FrozenLake-v1'"):
        check(tmp_path / "r.yaml")


def test_its_page_runs():
    run_page("gymnasium")


def test_a_tiny_model_finds_its_way(tmp_path: Path):
    """Four fields, one of them a hole: random steps reach the goal in a third of the games."""
    options: dict[str, Any] = {
        "settings": {"desc": ["SF", "HG"], "is_slippery": False, "max_episode_steps": 6},
        "actions": ["l", "d", "r", "u"],
        "rules": "Reach G.",
    }
    model = random_play(
        tmp_path,
        lambda: Gymnasium(game="FrozenLake-v1", **options),
        lambda rng: str(rng.choice(list("ldru"))),
        length=128,
    )
    rows = run(
        tmp_path / "rl",
        model=model,
        data={"max_length": 128, "completion_length": 104},
        rollout={"environment": {"gymnasium": "FrozenLake-v1", "options": options}, "stop": ["\n"]},
        **{**RL, "batch_size": 2},
        steps=20,
    )
    assert mean(rows[:2], "reward/mean") < 0.5
    assert mean(rows[-4:], "reward/mean") > 0.7
