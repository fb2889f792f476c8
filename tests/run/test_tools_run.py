"""A tiny model learns to call a function that alone knows the answer; killed, its run ends like an undisturbed one."""

from pathlib import Path

import pytest

from tests import tool_games, tool_runs

pytestmark = pytest.mark.slow


def test_a_model_learns_to_call_a_function(tmp_path: Path):
    start = tool_runs.first_stage(tmp_path / "sft")
    environment = {"tools": ["tests.tool_games:look"], "options": tool_games.SHORT, "turns": 3}
    reward = {"functions": ["tests.tool_games:right"]}
    tool_runs.assert_learns(tmp_path / "grpo", start, environment, reward=reward)
    tool_runs.assert_resumes(tmp_path / "killed", start, environment, reward=reward)
