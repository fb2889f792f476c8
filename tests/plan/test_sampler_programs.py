"""Every shipped recipe's sampler, with the recipe's own model, workload and sizes, compiles a dozen programs at most,
and one that only copies pages.

The programs are those that warm-up calls (`rollout/engine/engine.py`), made from shapes: nothing is compiled.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.plan.test_kernels_compiled import installed
from tunix.plan.subject import Sampled, Subject, subject_of
from tunix.recipe.recipe import Recipe
from tunix.rollout.engine.engine import warmup_calls
from tunix.util import chips

pytestmark = pytest.mark.models

BESIDES = 2
"""The empty slots, and the copy of the weights."""
MOST = 9 + BESIDES
PATHS = {path.stem: path for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))}
HARDWARE = json.loads((Path(__file__).parents[2] / "docs/hardware.json").read_text())
"""The topologies that recipes have been planned for, by name; one for a laptop has none."""


@functools.cache
def stages(name: str) -> list[Recipe]:
    """The stages of a recipe, all with the model of the first, which the later ones would continue."""
    recipe = Recipe.load(PATHS[name])
    return [one.model_copy(update={"model": recipe.stages[0].model}) for one in recipe.stages] or [recipe]


def gpus_of(name: str) -> str:
    """The GPUs of a recipe's hardware line."""
    return next((where for where in HARDWARE.get(name, ()) if where.startswith("h100")), "h100:1")


def number(subject: Subject, sampled: Sampled) -> int:
    """Programs of a sampler."""
    return len(list(warmup_calls(subject.policy.spec.model, sampled.weights, sampled.sizes))) + BESIDES


def counted(name: str, devices: list, memory: float) -> list[int]:
    """Programs of the sampler in each stage that draws completions."""
    subjects = [subject_of(stage, devices, memory) for stage in stages(name)]
    return [number(one, one.sampled) for one in subjects if one.sampled is not None]


def count_on(topologies: dict[str, str]) -> None:
    """Prints what recipes count on devices that are not here; called in a process of its own."""
    chips.prepare()
    for name, there in topologies.items():
        print(name, *counted(name, chips.devices_of(there), chips.limit_of(there)))


@pytest.mark.parametrize("name", [name for name in PATHS if any(x.algorithm.learns_from_rewards for x in stages(name))])
def test_a_sampler_has_a_dozen_programs_where_pages_are_gathered(name: str):
    """A device with room for as many slots and pages as help has most of them."""
    found = counted(name, jax.devices(), 1e12)
    assert found
    assert max(found) <= MOST


@pytest.mark.slow
def test_every_sampler_has_a_dozen_programs_on_the_gpus_that_it_is_for():
    topologies = {name: gpus_of(name) for name in PATHS if name != "sft_llama_70b"}
    if not installed("h100:1"):
        pytest.skip("the compiler of h100:1 is not installed")
    mine = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {key: value for key, value in os.environ.items() if key not in mine}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"from tests.plan.test_sampler_programs import count_on; count_on({topologies})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == list(topologies)
    assert max(int(one) for row in rows for one in row[1:]) <= MOST
