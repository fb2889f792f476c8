"""The hardware lines of recipes and of their table are what the compilers said, and they still say it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.plan.test_kernels_compiled import installed
from tunix.recipe.recipe import Recipe

DOCS = Path(__file__).parents[1] / "docs"
ELSEWHERE = {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"}


@pytest.fixture(scope="module")
def hardware() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_hardware", DOCS / "make_hardware.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def known(hardware: ModuleType) -> dict:
    return json.loads(hardware.FOUND.read_text())


def test_every_line_is_that_of_the_file(hardware: ModuleType, known: dict):
    stale = [str(path) for path, text in hardware.files(known).items() if path.read_text() != text]
    assert not stale, "run: python docs/make_hardware.py"


def test_every_recipe_for_an_accelerator_has_been_planned_and_fits(hardware: ModuleType, known: dict):
    recipes = {path.stem for path in (DOCS.parent / "recipes").glob("*.yaml")}
    assert set(known) == recipes - set(hardware.HERE)
    for name, found in known.items():
        assert set(found) == set(hardware.TARGETS.get(name, hardware.ONE))
        assert any(one["fits"] for one in found.values()), name


def verdicts(name: str, home: Path) -> list[dict]:
    """The plan of a recipe for one H100, of each of its stages, made anew."""
    if not installed("h100:1"):
        pytest.skip("the compiler of h100:1 is not installed")
    environment = {key: value for key, value in os.environ.items() if key not in ELSEWHERE}
    # Nothing of an earlier plan.
    environment |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tunix.cli", "plan", name, "--topology", "h100:1", "--json", "--deadline", "1200"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["verdicts"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft_qwen", "dpo_llama_lora", "grpo_gemma"])
def test_the_compiler_still_says_it(name: str, known: dict, tmp_path: Path):
    found = verdicts(name, tmp_path)
    assert len(found) == len(Recipe.load(name).stages or [None])
    needed = max(one["needed"] for one in found) / 2**30
    # Another version of a compiler takes a little more or less.
    assert needed == pytest.approx(known[name]["h100:1"]["needed"], rel=0.03)


@pytest.mark.slow
def test_256_answers_of_16k_tokens_are_sampled_at_a_time_on_80_gb(known: dict, tmp_path: Path):
    (found,) = verdicts("grpo_qwen_16k", tmp_path)
    assert found["fits"]
    assert found["needed"] / 2**30 == pytest.approx(known["grpo_qwen_16k"]["h100:1"]["needed"], rel=0.03)
    (decode,) = (one for one in found["programs"] if one["name"] == "decode")
    assert decode["tokens"] == 256
    # The cache is there once: beside what is held there are little more than the logits.
    assert decode["kinds"]["activations and temporaries"] < 0.1 * decode["kinds"]["caches"]
    assert any("pages are read by triton (ragged: it needs a TPU)" in line for line in found["chosen"])
