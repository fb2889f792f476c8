"""What the newest versions of Python, jax and tokamax have to show beside the kernels' own tests (`make test-newest`).

Nothing here needs torch: every family by stored numbers of transformers, a run of every algorithm, and programs that
are compiled for accelerators that are not here.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device.parity import REFERENCE, compared
from tests.plan.test_kernels_compiled import compiled_for
from tests.run.test_preference_run import labelled, pairs
from tests.tiny_rl import write_policy, write_prompts
from tests.tiny_runs import metrics, train, write_recipe, write_rows
from tunix.models.families.table import from_hf
from tunix.models.model import Model

pytestmark = [pytest.mark.slow, pytest.mark.newest]
STORED = json.loads(REFERENCE.read_text())


@pytest.mark.parametrize("family", STORED)
def test_a_family_has_the_stored_numbers(family: str):
    row = compared(family, Model(from_hf(STORED[family]["config"], REFERENCE)), STORED[family])
    assert row.status == "ok", row.message


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward"])
def test_an_algorithm_trains_on_rows(name: str, tmp_path: Path):
    rows = {"dpo": pairs, "reward": pairs, "kto": labelled}
    if name in rows:
        write_rows(tmp_path / "train.jsonl", rows[name](32))
        write_rows(tmp_path / "held.jsonl", rows[name](6))
    train(str(write_recipe(tmp_path / "r.yaml", {"algorithm.name": name, "steps": 2})))
    assert trained() == 2


@pytest.mark.parametrize("algorithm", [{"name": "grpo", "group_size": 4}, {"name": "ppo"}], ids=lambda x: x["name"])
def test_an_algorithm_trains_on_what_it_samples(algorithm: dict[str, Any], tmp_path: Path):
    write_prompts(tmp_path, "ab", "cd", "ef", "gh")
    train(str(write_policy(tmp_path, algorithm=algorithm, steps=2)))
    assert trained() == 2


def test_a_model_is_distilled_from_another(tmp_path: Path):
    train(str(write_recipe(tmp_path / "teacher.yaml", {"steps": 1, "output": "teacher"})))
    changes = {"algorithm.name": "distill", "teacher.path": str(Path("teacher/export").resolve()), "steps": 2}
    train(str(write_recipe(tmp_path / "r.yaml", changes)))
    assert trained() == 2


def trained() -> int:
    """How many steps have a finite gradient that is not 0."""
    norms = [row["train/grad_norm"] for row in metrics("run") if row["step"]]
    assert all(math.isfinite(norm) and norm > 0 for norm in norms), norms
    return len(norms)


@pytest.mark.parametrize("topology", ["h100:1", "v5p:1x1x1"])
def test_a_mixture_compiles_with_its_kernels(topology: str):
    """Widths that no 128 divides: Triton's kernels on an H100, beside attention's Mosaic kernels of 16 bits."""
    kernels = compiled_for(topology, topology, "experts")["kernels"]
    expected = ("xla.gpu.triton", "mosaic") if topology == "h100:1" else ("tpu_custom_call",)
    assert all(any(name in kernel for kernel in kernels) for name in expected), kernels
