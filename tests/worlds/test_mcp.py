"""Servers of tools by the package `mcp`: their tools shown and called, what misbehaves named, no process left."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tool_games, tool_runs
from tests.rollout.rewards.test_rewards import gone
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import Failure

pytestmark = pytest.mark.worlds

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "tests/worlds/vault_server.py")]
SERVER: dict[str, Any] = {"command": COMMAND, "env": {"PYTHONPATH": str(ROOT)}}
CHATML = bytes_tokenizer("chatml")


@contextmanager
def playing(**section: Any) -> Iterator[Player]:
    config = EnvironmentConfig.model_validate({"mcp": SERVER, "workers": 1, "deadline": 40, **section})
    play = Player(config, CHATML)
    try:
        yield play
    finally:
        play.close()


def said(episode: Any, name: str, **arguments: Any) -> str | None:
    """The answer to a call."""
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><|im_end|>"
    answer = episode.turn(np.asarray(CHATML.encode(text), np.int32))
    if answer is None:
        return None
    return CHATML.decode(answer).removeprefix("\n<|im_start|>tool\n").partition("<|im_end|>")[0]


def test_tools_are_shown_and_called():
    with playing() as play:
        (episode,) = play([{"prompt": "go"}], 0).episodes
        shown = CHATML.decode(episode.prompt)
        assert '"name": "look", "description": "Says the digit of a key.", "parameters": {"type": "object"' in shown
        assert said(episode, "look", key="ab") == tool_games.digit("ab")
        assert said(episode, "count", upto=3) == "0\n1\n2"
        assert said(episode, "fail") == "error: Error executing tool fail"
        wrong = said(episode, "count", upto="x")
        assert wrong is not None
        assert wrong.startswith("error: ")
        assert episode.failure is None


def test_a_server_that_never_answers_fails_its_episode():
    with playing(deadline=5) as play:
        (episode,) = play([{"prompt": "go"}], 0).episodes
        assert said(episode, "hang") is None
        assert isinstance(episode.score, Failure)
        assert "the environment Tools called the MCP server " in episode.score.reason
        assert episode.score.reason.endswith("which did not answer within 4 s")


def test_a_server_that_ends_fails_its_episode_and_starts_again():
    with playing(deadline=40) as play:
        first, second = play([{"prompt": "go"}] * 2, 0).episodes
        assert said(first, "die") is None
        assert isinstance(first.score, Failure)
        assert first.score.reason.endswith("vault_server.py', which ended")
        assert said(second, "look", key="ab") == tool_games.digit("ab")


@pytest.mark.parametrize("session", ["worker", "episode"])
def test_no_server_outlives_its_worker(session: str):
    with playing(mcp={**SERVER, "session": session}) as play:
        episodes = play([{"prompt": "go"}] * 2, 0).episodes
        pids = [int(said(episode, "pid") or 0) for episode in episodes]
        assert len(set(pids)) == (1 if session == "worker" else 2)
    assert all(map(gone, pids))
    with playing(mcp={**SERVER, "session": session}) as play:  # a worker that is killed, with a server that hangs
        (episode,) = play([{"prompt": "go"}], 0).episodes
        pid = int(said(episode, "pid") or 0)
        os.kill(pid, signal.SIGSTOP)
        play._workers[0]._host.kill()
        assert gone(pid)


def test_a_server_that_does_not_start():
    command = [sys.executable, "-c", "import sys; sys.exit('no vault')"]
    with (
        pytest.raises(
            UserError, match=r"the environment Tools cannot be made: it called the MCP server .* which does not start: "
        ),
        playing(mcp={"command": command}),
    ):
        pass


def test_a_name_that_two_tools_have(tmp_path: Path):
    (tmp_path / "my.py").write_text(
        'def look(key: str) -> str:\n    """Looks.\n\n    Args:\n        key: it\n    """\n'
    )
    with (
        pytest.raises(UserError, match=r"the MCP server .* has a tool 'look', and so has another one"),
        playing(tools=["my.py:look"]),
    ):
        pass


def test_a_model_learns_to_call_a_server(tmp_path: Path):
    """And a run that is killed ends like one that is not: this server forgets everything."""
    start = tool_runs.first_stage(tmp_path / "sft")
    environment = {"mcp": SERVER, "options": tool_games.SHORT, "turns": 3}
    reward = {"functions": ["tests.tool_games:right"]}
    tool_runs.assert_learns(tmp_path / "grpo", start, environment, reward=reward)
    tool_runs.assert_resumes(tmp_path / "killed", start, environment, reward=reward)
