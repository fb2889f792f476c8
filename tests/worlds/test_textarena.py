"""TextArena: games by hand, what is refused, and two seats that learn, each from its own outcome."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worlds.tiny_games import RL, mean, random_play, run, run_page
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.base import EpisodeError, Step
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import Player
from tunix.rollout.environments.textarena import TextArena

pytestmark = pytest.mark.worlds
RNG = np.random.default_rng(0)
NONE = np.zeros(0, np.int32)
ROW = {"seed": 0, "index": 1}


def play(environment: TextArena, *actions: str) -> list[Step]:
    return [environment.step(action, NONE) for action in actions]


def test_two_seats_take_turns_in_one_transcript():
    environment = TextArena(game="TicTacToe-v0")
    start = environment.reset(ROW, RNG)
    assert isinstance(start, str)
    assert start.count("You are Player") == 2
    assert start.count("Current Board") == 1
    assert start.endswith("\n[Player 0] ")
    steps = play(environment, "[4]", "0", "[1]", "[2]", "[7]")  # without brackets TextArena adds them
    assert [step.seat for step in steps] == [0, 1, 0, 1, 0]
    assert str(steps[0].observation).startswith("\n[GAME] Player 0 placed their symbol (O) in cell 4.")
    assert str(steps[0].observation).endswith("\n[Player 1] ")
    assert "[4]" not in str(steps[0].observation).split("Available")[0]  # what the model wrote is there already
    assert steps[-1].done
    assert steps[-1].outcomes == {0: 1, 1: -1}


def test_an_illegal_move_is_told_and_the_second_loses():
    environment = TextArena(game="TicTacToe-v0")
    environment.reset(ROW, RNG)
    first, second = play(environment, "[9]", "[9]")
    assert "attempted an invalid move" in str(first.observation)
    assert str(first.observation).endswith("\n[Player 0] ")
    assert (second.done, second.seat, second.outcomes) == (True, 0, {0: -1, 1: 1})


def test_one_player_and_rules_of_the_recipe():
    environment = TextArena(game="GuessTheNumber-v0", settings={"max_number": 4}, rules="1-4", chat=True)
    assert environment.reset(ROW, RNG) == [{"role": "user", "content": "1-4\n[Player] "}]
    steps = []
    for guess in "1234":
        steps += play(environment, guess)
        if steps[-1].done:
            break
    assert steps[-1].outcomes == {0: 1}


def test_games_in_one_process_do_not_share_their_dice():
    rolls = []
    for together in (False, True):
        first, other = TextArena(game="PigDice-v0"), TextArena(game="PigDice-v0")
        first.reset(ROW, RNG)
        other.reset({"seed": 5, "index": 5}, RNG)
        said = []
        for _ in range(6):
            if together:
                play(other, "[roll]")
            said += [step.observation for step in play(first, "[roll]")]
        rolls.append(said)
    assert rolls[0] == rolls[1]


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("TicTacToe", "is not known. Did you mean 'TicTacToe-v0'?"),
        ("KuhnPoker-v0", "has secrets"),  # cards that are dealt
        ("Stratego-v0", "has secrets"),  # a move that the other is not told
        ("NewRecruit-v0", "has secrets"),  # by role
        ("Debate-v0", "it needs a language model"),
        ("ThreePlayerTicTacToe-v0", "cannot be played by one player or two seats: ThreePlayerTicTacToe only works"),
    ],
)
def test_what_cannot_be_played_is_told_before_a_run(game: str, message: str):
    with pytest.raises(UserError) as told:
        Player(EnvironmentConfig(name=f"textarena:{game}", workers=1), bytes_tokenizer())
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_a_game_that_asks_for_the_network_is_refused(monkeypatch: pytest.MonkeyPatch):
    import socket

    from textarena.envs.Nim.env import NimEnv

    def reset(*_: Any, **__: Any) -> None:
        socket.create_connection(("example.com", 80))

    monkeypatch.setattr(NimEnv, "reset", reset)
    with pytest.raises(UserError, match=r"it asks for example.com: games that need the network are not played"):
        TextArena(game="Nim-v0", settings={"piles": [1]})


def test_hidden_moves_fail_where_they_are_made():
    environment = TextArena(game="IteratedPrisonersDilemma-v0", settings={"communication_turns": 1})
    environment.reset(ROW, RNG)
    play(environment, "hello", "hello")
    with pytest.raises(EpisodeError, match="hides a move"):
        play(environment, "[defect]")


def test_its_page_runs():
    run_page("textarena")


def test_both_seats_learn_from_their_own_outcomes(tmp_path: Path):
    """Nim with one pile of two: who begins can always win, and by random moves wins half of the games."""
    options: dict[str, Any] = {"settings": {"piles": [2]}, "rules": "Nim"}
    model = random_play(
        tmp_path,
        lambda: TextArena(game="Nim-v0", **options),
        lambda rng: f"0 {rng.integers(1, 3)}",
        length=256,
    )
    rows = run(
        tmp_path / "rl",
        model=model,
        data={"max_length": 288, "completion_length": 224},
        rollout={"environment": {"textarena": "Nim-v0", "options": options}, "stop": ["\n"]},
        **{**RL, "batch_size": 2},
        steps=20,
    )
    assert mean(rows[:2], "reward/seat0") < 0.75
    assert mean(rows[-4:], "reward/mean") > 0.9  # of seat 0: it wins before the other is asked
    assert mean(rows[:2], "reward/seat1") > -0.5
