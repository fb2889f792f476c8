"""Whole runs whose turns are prompted by what the chat template shows: several transcripts of an episode in a row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run.test_kill import assert_killed_it_ends_alike
from tests.run.test_rl_run import steps
from tests.tiny_rl import write_policy
from tests.tiny_runs import train
from tunix.data import packing
from tunix.types import Sequence

ASKS = '''
from tunix.rollout.environments.base import Environment, Step


class Asks(Environment):
    """Asks twice more; the letters of an answer are its reward."""

    def __init__(self):
        self.turns = 0

    def reset(self, row, rng):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, action, tokens):
        self.turns += 1
        reward = sum(c.isalnum() for c in action) / 9
        if self.turns == 3:
            return Step(reward=reward, done=True)
        return Step([{"role": "user", "content": "?"}], reward=reward)
'''
TEMPLATE = """
{%- for m in messages -%}
  {{- ('<was>' if m.role == 'assistant' else '<u>') + m.content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<a>' -}}{%- endif -%}
"""
"""An earlier answer is shown otherwise than it was begun, so that no turn goes on with the one before."""
HISTORY: dict[str, Any] = {
    "data__max_length": 160,
    "data__completion_length": 24,
    "data__chat_template": "asks.jinja",
    "rollout": {"history": "template", "environment": "asks.py:Asks", "stop": ["e", "a", "7", "\n", "\0", "@", "p"]},
    "reward": None,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "asks.py").write_text(ASKS)
    (folder / "asks.jinja").write_text(TEMPLATE)
    return write_policy(folder, **HISTORY, **changes)


@pytest.mark.slow
def test_transcripts_of_an_episode_are_trained_as_they_were_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    seen: list[Sequence] = []
    saved: list[int] = []
    real = packing.pack

    def pack(sequences, *rest, **options):
        seen.extend(sequences)
        batch, alone = (real(sequences, *rest, **{**options, "trie": trie}) for trie in (options["trie"], False))
        assert batch.interleaved
        saved.append(int(np.sum(alone.segment_ids > 0) - np.sum(batch.segment_ids > 0)))
        return batch

    monkeypatch.setattr("tunix.run.inputs.pack", pack)
    train(str(write(tmp_path)))
    rows = steps("run")
    assert all(row["mismatch/max"] < 1e-4 and row["compile/count"] == 0 for row in rows)
    assert max(row["rollout/turns"] for row in rows) > 1
    assert any(len(x.restarts) == 2 for x in seen)
    assert max(saved) > 0  # what transcripts begin with is computed once


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_killed_it_ends_alike(tmp_path: Path, algorithm: str):
    changes = {"algorithm": {"name": algorithm, "group_size": 4}, "steps": 12, "checkpoint__every": 2}
    assert_killed_it_ends_alike(tmp_path, lambda folder: write(folder, **changes), at=4)
