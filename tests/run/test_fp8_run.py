"""Runs whose layers multiply 8-bit floats, from recipe to run folder; and what the setting is refused with."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.quantization.test_fp8 import device
from tests.tiny_rl import write_policy
from tests.tiny_runs import metrics, train, write_recipe
from tunix.cli import main
from tunix.recipe.recipe import Recipe
from tunix.run import setup

FP8 = {"compute": "fp8"}


@pytest.mark.slow
def test_a_policy_learns_within_bfloat16s_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    train(str(write_policy(tmp_path, model__dtype="bfloat16", model__quantization=FP8)))
    rows = [row for row in metrics("run") if "train/loss" in row]
    assert len(rows) == 3
    assert all(row["mismatch/max"] < 0.25 for row in rows), rows
    assert all(np.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows)
    assert [row["compile/count"] for row in rows] == [0, 0, 0]
    assert (
        "products of the layers: e4m3 x e4m3, for gradients e5m2 x e4m3, for those of weights bfloat16"
        in (tmp_path / "run" / "log.txt").read_text()
    )


def test_a_chip_without_it_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    old = device("NVIDIA A100-SXM4-40GB", compute_capability="8.0")
    check, read = setup.check_multiplies_fp8, list[str]()
    monkeypatch.setattr(setup, "check_multiplies_fp8", lambda _, dtype: check(old, dtype))
    monkeypatch.setattr("tunix.run.client.weights", lambda *_, **__: read.append("weights"))
    write_recipe(tmp_path / "r.yaml", {"model.quantization": FP8})
    assert main(["run", "r.yaml"]) == 2
    said = capsys.readouterr().err
    assert "model.quantization: compute fp8: NVIDIA A100-SXM4-40GB has no products of 8-bit floats" in said
    assert not read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization": {"rules": [{"module": ".*", "weights": "int8"}]}},
            "compute fp8 and quantization: qat round the same matrices",
        ),
        ({"adapter": {"kind": "qlora"}}, "compute fp8: `adapter.kind: qlora` keeps its base in tiles"),
        (
            {"rollout.engine": "vllm", "rollout.servers": ["http://host:8000"]},
            "compute fp8: servers multiply these weights in their own dtype",
        ),
    ],
)
def test_what_it_means_nothing_with_is_named(
    changes: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_recipe(tmp_path / "r.yaml", {"model.quantization": FP8, **changes})
    assert main(["check", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_other_words_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_recipe(tmp_path / "r.yaml", {"model.quantization": {"compute": "int8"}})
    assert main(["check", str(path)]) == 2
    assert "model.quantization.compute: 'int8' is not" in capsys.readouterr().err
    path = write_recipe(tmp_path / "r.yaml", {"model.quantization": FP8})
    assert Recipe.load(str(path)).model.quantization is not None
