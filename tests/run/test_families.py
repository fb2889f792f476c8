"""Runs of families whose layers are not all alike: killed, on several devices, and through a rounded base.

They take the paths of any other run; what is theirs alone is what a layer holds, reads and has no part of.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run.test_kill import Run, assert_killed_it_ends_alike, no_process_left
from tests.tiny_runs import EVAL, RECIPE, losses, metrics, write_recipe
from tests.tiny_runs import train as train_here

SIZES = {**RECIPE["model"]["sizes"], "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"init": "random", "family": "qwen3_5", "sizes": {**SIZES, "num_layers": 4}},
    # The last five of twelve layers read the keys and values of others, and all have inputs of their own.
    "gemma4": {"init": "random", "preset": "gemma4-e4b", "sizes": {**SIZES, "num_layers": 12}},
}
MIXTURES: dict[str, dict[str, Any]] = {
    # Local and global layers, sinks, and experts that adapters and rounding leave as they are.
    "gpt_oss": {"init": "random", "family": "gpt_oss", "sizes": {**SIZES, "window": 8}},
    "mixtral": {"init": "random", "family": "mixtral", "sizes": {**SIZES, "ffn": 16}},
    "qwen3_5_moe": {"init": "random", "family": "qwen3_5_moe", "sizes": {**SIZES, "num_layers": 4, "ffn": 16}},
    # 128 experts beside an ffn.
    "gemma4_moe": {"init": "random", "preset": "gemma4-26b-a4b", "sizes": {**SIZES, "num_layers": 6, "ffn": 16}},
}
MESHES = ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "context": 2})
every_family = pytest.mark.parametrize("family", MODELS)
pytestmark = pytest.mark.slow


def write(folder: Path, family: str, **changes: Any) -> None:
    model = {**(MODELS | MIXTURES)[family], "tokenizer": "bytes", "dtype": "float32"}
    write_recipe(folder / "r.yaml", {"model": model, "steps": 8, "checkpoint": {"every": 2}, **EVAL, **changes})


@pytest.mark.parametrize("family", [*MODELS, *MIXTURES])
def test_killed_it_ends_like_the_uninterrupted_run(family: str, tmp_path: Path):
    changes = {"steps": 60, "checkpoint.every": 10, "eval.every": 30}
    assert_killed_it_ends_alike(tmp_path, lambda folder: write(folder, family, **changes), at=15)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        *((family, mesh) for family in (*MODELS, "gpt_oss") for mesh in MESHES),
        *((family, {"fsdp": 2, "expert": 2, "tensor": 2}) for family in MIXTURES),
    ],
)
def test_eight_devices_have_the_losses_of_one(family: str, mesh: dict[str, int], tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    for name, sizes in (("one", {"fsdp": 1}), ("eight", mesh)):
        # Adam divides gradients near 0 by themselves, which makes their rounding a step. And the norms of DeltaNets'
        # narrow heads divide by what is near 0, which makes gradients of 100, so that the rate is small.
        slowly = {"name": "sgd", "learning_rate": 0.001}
        # With seed 0 two experts of a token of gpt_oss score alike to the last bit: a rounding chooses.
        write(tmp_path, family, mesh=sizes, output=name, optimizer=slowly, seed=1 if family == "gpt_oss" else 0)
        if name == "one":
            with no_process_left() as runs:
                runs.append(Run(tmp_path))
                assert runs[0].wait() == 0, runs[0].log
        else:
            train_here("r.yaml")
    np.testing.assert_allclose(losses("eight"), losses("one"), rtol=1e-5)


@every_family
def test_a_rounded_base_samples_what_it_trains(family: str, tmp_path: Path, monkeypatch: Any):
    """The run's gate compares the log-probs of sampler and trainer in every step."""
    monkeypatch.chdir(tmp_path)
    adapter = {"kind": "qlora", "base": "int8", "rank": 4, "alpha": 8, "targets": "all-linear"}
    (tmp_path / "reward.py").write_text("def few(completions, **_):\n    return [-len(x) / 9 for x in completions]\n")
    changes = {"data.eval": None, "eval": {}, "reward": {"functions": ["reward.py:few"]}}
    algorithm = {"name": "grpo", "group_size": 4}
    write(tmp_path, family, adapter=adapter, algorithm=algorithm, **{"data.completion_length": 16, **changes})
    train_here("r.yaml")
    found = [row for row in metrics("run") if row["step"]]
    # Of a DeltaNet's steps and chunks single tokens are up to 2e-4 apart.
    assert max(row["mismatch/max"] for row in found) < (1e-3 if family == "qwen3_5" else 1e-4)
    assert any(row["train/grad_norm"] > 0 for row in found)
