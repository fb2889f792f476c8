"""Runs that learn from rewards, from recipe to run folder; and the gate between trainer and sampler.

The plain run samples at temperature 0.7, so that whatever equals it has mirrored the temperature too.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.tiny_rl import write_policy
from tests.tiny_runs import ADAPTER, lines, losses, metrics, model_folder, train
from tunix.cli import main
from tunix.models.model import Params
from tunix.rollout.engine.engine import Engine
from tunix.types import Completion, Request

PLAIN = {"rollout__temperature": 0.7, "algorithm": {"name": "grpo", "group_size": 4, "updates": 2, "kl": 0.05}}


def steps(run: str | Path) -> list[dict[str, Any]]:
    """The rows of the updates, without those of an evaluation alone."""
    return [row for row in metrics(run) if "train/loss" in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with an evaluation at both ends."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(str(write_policy(folder, **PLAIN, data__eval="held.jsonl", eval__every=2, eval__samples=1)))
    return folder / "run"


@pytest.mark.slow
def test_a_run_folder_tells_what_happened(plain: Path):
    rows = steps(plain)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch/max"] < 1e-4
        assert 0 <= row["mismatch/mean"] <= row["mismatch/max"]
        assert row["rollout/length"] <= 12
        assert row["reward/letters"] == row["reward/mean"]
        assert all(value is not None and math.isfinite(value) for value in row.values())
        # Two updates: the loss is the mean of theirs, and the sum of its terms.
        assert row["train/loss"] == pytest.approx(row["loss/policy"] + row["loss/kl"], abs=1e-6)
    assert rows[-1]["kl/reference"] > 1e-6
    assert [row["step"] for row in metrics(plain) if "eval/reward" in row] == [0, 2, 3]
    samples = [row for row in lines(plain / "samples.jsonl") if "rewards" in row]
    assert [row["step"] for row in samples] == [1] * 16 + [2] * 16 + [3] * 16
    for step, row in enumerate(rows):
        mine = samples[16 * step : 16 * step + 16]
        rewards = np.array([sample["rewards"]["letters"] for sample in mine]).reshape(4, 4)
        assert row["reward/mean"] == pytest.approx(rewards.mean())
        expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
        np.testing.assert_allclose([sample["advantage"] for sample in mine], expected.ravel(), atol=1e-5)
    AutoModelForCausalLM.from_pretrained(plain / "export")


def test_nothing_compiles_after_the_first_step(plain: Path):
    assert [row["compile/count"] for row in steps(plain)] == [0, 0, 0]


@pytest.mark.slow  # tests/trainer/test_step.py has meshes and micro-batches without a run around them
def test_mesh_passes_and_recomputing_do_not_change_the_losses(plain: Path, tmp_path: Path):
    write_policy(tmp_path, **PLAIN)
    train("r.yaml", "mesh={data: 2, fsdp: 2, tensor: 2}", "micro_batch_size=4", "algorithm.old_logprobs=recompute")
    np.testing.assert_allclose(losses("run"), losses(plain), atol=1e-4)
    for one, other in zip(steps("run"), steps(plain), strict=True):
        assert one["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-6)
        assert one["mismatch/max"] < 1e-4


CUT = {"rollout__temperature": 0.8, "rollout__top_k": 20, "rollout__top_p": 0.9, "rollout__min_p": 0.01}


@pytest.mark.slow
def test_truncated_sampling_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Log-probs, the reference's and the entropy are over the ids that each token was drawn from, at every update."""
    monkeypatch.chdir(tmp_path)
    algorithm = {**PLAIN["algorithm"], "entropy_bonus": 1e-3}
    train(str(write_policy(tmp_path, **CUT, algorithm=algorithm)))
    for row in steps("run"):
        assert row["mismatch/max"] < 1e-5
        assert row["compile/count"] == 0
        assert 0 < row["policy/entropy"] < math.log(20)
    # The start is the reference: over the same ids they agree.
    assert steps("run")[0]["kl/reference"] < 0.05
    monkeypatch.setattr(Completion, "candidates", None)
    train(str(write_policy(tmp_path, **CUT, algorithm=algorithm, output="not", rollout__mismatch_tolerance=9.0)))
    assert min(row["mismatch/max"] for row in steps("not")) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "ppo", "group_size": 4}},
        {"algorithm": {"name": "grpo", "group_size": 4, "old_logprobs": "recompute", "updates": 2}},
        {"algorithm": {"name": "dpo", "online": True, "group_size": 4}},
        {"rollout__max_staleness": 2, "rollout__oversample": 1.5, "rollout__mesh": {"devices": 4}},
        {"rollout__speculate": 3},
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_truncated_sampling_is_replayed_in_every_way_to_sample(changes, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(str(write_policy(tmp_path, **CUT, **changes)))
    assert max(row["mismatch/max"] for row in steps("run")) < 1e-5


# --- The gate -------------------------------------------------------------------------------------------------------


def stopped(capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a run that the gate stopped in its first step, which left nothing behind to go on from."""
    assert main(["run", "r.yaml"]) == 2
    assert not list(Path("run/checkpoints").glob("[0-9]*"))
    assert not Path("run/export").exists()
    return capsys.readouterr().err


def test_a_sampler_with_other_weights_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = Engine.publish

    def publish(self: Engine, params: Params, version: int) -> None:
        name = next(name for name in params if name.endswith("down/w"))
        real(self, {**params, name: params[name] * 1.05}, version)

    monkeypatch.setattr(Engine, "publish", publish)
    write_policy(tmp_path, **PLAIN)
    told = stopped(capsys)
    assert "rollout.mismatch_tolerance: at token" in told
    assert "more than 0.001" in told


@pytest.mark.slow
def test_a_sampler_with_another_temperature_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = Engine.run

    def run(self: Engine, requests: list[Request], *rest: Any) -> Any:
        return real(self, [replace(x, sampling=replace(x.sampling, temperature=1.0)) for x in requests], *rest)

    monkeypatch.setattr(Engine, "run", run)
    write_policy(tmp_path, **PLAIN)
    assert "rollout.mismatch_tolerance: at token" in stopped(capsys)


@pytest.mark.slow  # tests/models/test_exact.py has both without a run around them
def test_bfloat16_passes_with_its_own_tolerance(tmp_path: Path):
    write_policy(tmp_path, **PLAIN, model__dtype="bfloat16", steps=2)
    train("r.yaml")
    for row in steps("run"):
        assert 0 <= row["mismatch/mean"] < 0.01
        assert row["mismatch/max"] < 0.25


@pytest.mark.slow  # tests/rollout/engine/test_engine_parity.py has one without a run around it
def test_adapters_are_sampled_unmerged_and_start_at_the_reference(tmp_path: Path):
    """A new adapter adds nothing, so the policy is its base; one update later it is not."""
    model_folder(tmp_path / "base")
    algorithm = {**PLAIN["algorithm"], "updates": 1}  # pyright: ignore
    model = {"path": "base", "dtype": "float32"}
    write_policy(
        tmp_path, rollout__temperature=0.7, algorithm=algorithm, model=model, adapter={"rank": 4, "alpha": 8}, steps=2
    )
    train("r.yaml")
    first, second = steps("run")
    assert first["kl/reference"] < 1e-9
    assert second["kl/reference"] > 1e-6
    assert max(first["mismatch/max"], second["mismatch/max"]) < 1e-4
    assert {path.name for path in Path("run/export").iterdir()} == ADAPTER


# --- PPO ------------------------------------------------------------------------------------------------------------


def test_ppo_with_a_critic_of_its_own(tmp_path: Path):
    algorithm = {"name": "ppo", "critic_warmup": 1, "kl": 0.05, "kl_target": 3.0, "updates": 2}
    write_policy(tmp_path, algorithm=algorithm, batch_size=16, optimizer__learning_rate=1e-3)
    train("r.yaml")
    warm, *rows = (row for row in metrics("run") if row["step"])
    assert "train/loss" not in warm
    assert warm["critic/loss"] > 0
    for row in (warm, *rows):
        assert set(row) >= {"value/mean", "value/error", "value/explained_variance", "kl/coefficient"}
    assert rows[0]["kl/completion"] == pytest.approx(0, abs=1e-4)  # the policy has not moved yet
    assert all(row["mismatch/max"] < 1e-4 for row in rows)
    assert rows[0]["compile/count"] == rows[1]["compile/count"]  # the policy's step is compiled behind the warm-up
    # The value head is no part of the policy's export.
    AutoModelForCausalLM.from_pretrained("run/export")


@pytest.mark.slow  # the critic of its own stays
def test_ppo_on_a_shared_trunk(tmp_path: Path):
    algorithm = {"name": "ppo", "critic": "shared", "entropy_bonus": 0.01}
    write_policy(tmp_path, algorithm=algorithm, batch_size=16, steps=2)
    train("r.yaml")
    for row in steps("run"):
        terms = row["loss/policy"] + row["loss/value"] + row["loss/entropy"]
        assert row["train/loss"] == pytest.approx(terms, abs=1e-6)
        assert row["mismatch/max"] < 1e-4
    AutoModelForCausalLM.from_pretrained("run/export")
