"""Over eight devices none ever holds a whole large tensor: read from every program that a run compiles."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.programs import parsed
from tests.tiny_runs import RECIPE, model_folder, write_recipe

LAYERS, WIDTH, FFN, VOCAB = 8, 64, 512, 2048
STACKED = 4 * LAYERS * WIDTH * FFN
"""Bytes in float32 of one matrix of all layers; the embedding has half of them, the logits of a row less."""
SIZES = {"d_model": WIDTH, "ffn": FFN, "num_layers": LAYERS, "vocab_size": VOCAB}
CASES: dict[str, dict[str, Any]] = {
    "a folder": {"model": {"path": "folder", "dtype": "bfloat16", "param_dtype": "float32"}},
    "random weights": {"model": {**RECIPE["model"], "sizes": {**RECIPE["model"]["sizes"], **SIZES}}},
    "an adapter": {"model": {"path": "folder", "dtype": "float32"}, "adapter": {"kind": "lora", "rank": 4}},
}


def largest(program: Path) -> int:
    """Bytes of the largest array that any instruction of a device's program gives."""
    computations = parsed(program.read_text()).computations.values()
    kinds = [one for home in computations for one in home.values() if not one.kind.startswith("(")]
    return max((one.size for one in kinds), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_device_holds_a_whole_large_tensor(case: str, tmp_path: Path):
    """In loading, random values, moments, the step, saving, restoring and the export.

    In the step alone each has the table of the head, and its rows' share of that table's gradient, which is summed
    once: `tensor` splits both.
    """
    sizes = {"hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    model_folder(tmp_path / "folder", **sizes)
    # Recomputed, a layer's activations are smaller than the matrices that are looked for.
    write_recipe(tmp_path / "recipe.yaml", {**CASES[case], "mesh": {"fsdp": 8}, "model.remat": "block"})
    dump = tmp_path / "programs"
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text",
    }
    for steps in ("steps=2", "steps=3"):  # the second restores what the first saved
        command = [sys.executable, "-m", "tunix.cli", "run", "recipe.yaml", "output=run", steps]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=600)
    assert list((tmp_path / "run/export").glob("*.safetensors"))
    programs = {path: largest(path) for path in dump.glob("*after_optimizations.txt")}
    assert len(programs) > 10
    step = [size for path, size in programs.items() if "jit_step" in path.name]
    assert 0 < max(step) <= STACKED // 2
    others = {path.name: size for path, size in programs.items() if "jit_step" not in path.name}
    # A shard, or twice that: random bits of 64.
    assert {name: size for name, size in others.items() if size > STACKED // 4} == {}
