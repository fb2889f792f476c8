"""Runs on rewards of a mixture in bfloat16: the trainer replays the experts of the sampler, and a run continues."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_ahead_run import does_what_is_recorded
from tests.run.test_kill import Run, assert_killed_it_ends_alike, no_process_left
from tests.tiny_rl import write_policy
from tests.tiny_runs import RECIPE, metrics, train
from tunix.rollout.engine import request

SIZES = {**RECIPE["model"]["sizes"], "head_dim": 16, "ffn": 16}
MIXTURE: dict[str, Any] = {
    "model": {"init": "random", "family": "qwen3_moe", "sizes": SIZES, "tokenizer": "bytes", "dtype": "bfloat16"},
}
pytestmark = pytest.mark.slow


def largest(run: str, metric: str) -> float:
    return max(row[metric] for row in metrics(run) if "train/loss" in row)


def test_replay_brings_trainer_and_sampler_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a cache of 8 bits: without it they would round alike, and choose the same experts anyway."""
    monkeypatch.chdir(tmp_path)
    changes = {**MIXTURE, "rollout__cache_dtype": "int8"}
    train(str(write_policy(tmp_path, "with.yaml", **changes, output="with")))
    assert all(row["train/grad_norm"] > 0 for row in metrics("with") if "train/loss" in row)
    monkeypatch.setattr(request, "of_sequence", lambda *_: None)
    # Near ties fall to other experts: few tokens, and by so much that a run would stop.
    train(str(write_policy(tmp_path, "without.yaml", **changes, rollout__mismatch_tolerance=9.0, output="without")))
    assert largest("with", "mismatch/mean") < largest("without", "mismatch/mean")
    assert largest("with", "mismatch/max") < 0.2 * largest("without", "mismatch/max")


def test_killed_it_ends_like_the_uninterrupted_run(tmp_path: Path):
    changes = {**MIXTURE, "steps": 24, "checkpoint__every": 4}
    assert_killed_it_ends_alike(tmp_path, lambda folder: write_policy(folder, **changes), at=6)


def test_killed_while_it_samples_ahead_it_does_what_is_recorded(tmp_path: Path):
    write_policy(tmp_path, **MIXTURE, rollout__max_staleness=1, steps=14, checkpoint__every=4)
    with no_process_left() as runs:
        runs.append(Run(tmp_path))
        runs[0].until(lambda: runs[0].steps >= 6)
        runs[0].process.send_signal(signal.SIGKILL)
        runs[0].wait()
        runs.append(Run(tmp_path))
        assert runs[-1].wait() == 0, runs[-1].log
    does_what_is_recorded(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_eight_devices_with_an_axis_of_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    model = {**MIXTURE["model"], "family": family}
    train(str(write_policy(tmp_path, model=model, mesh={"fsdp": 4, "expert": 2})))
    assert all(row["train/grad_norm"] > 0 for row in metrics("run") if "train/loss" in row)
