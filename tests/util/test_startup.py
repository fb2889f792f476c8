"""What JAX is told before it takes a device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunix.util.startup import THRESHOLD

CODE = "import os; from tunix.util.startup import prepare_jax; prepare_jax(); print(os.environ[{!r}])"


@pytest.mark.parametrize(("given", "expected"), [(None, "0.92"), ("0.5", "0.5")])
def test_the_share_of_a_gpus_memory_is_set_unless_somebody_has_said_another(given: str | None, expected: str):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    environment = {key: value for key, value in os.environ.items() if key != name} | ({name: given} if given else {})
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(name)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


COMPILES = """
from collections import Counter
import jax, jax.numpy as jnp
from tunix.util.startup import prepare_jax
prepare_jax()
seen = Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.rpartition("/")[2]]))
print(float(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))[0, 0]))
print(seen["compile_requests_use_cache"] - seen["cache_hits"])
"""
"""Prints a number, and how many programs of it were not in the shared folder."""


def compiling(folder: Path) -> subprocess.Popen:
    """A process that keeps its programs in a folder."""
    environment = {key: value for key, value in os.environ.items() if key != THRESHOLD}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_NUM_CPU_DEVICES": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", COMPILES], env=environment, stdout=pipe, stderr=pipe, text=True)


def finished(process: subprocess.Popen) -> tuple[float, int, str]:
    """The number, how many programs were compiled, and what was said besides."""
    told, said = process.communicate()
    assert process.returncode == 0, said
    value, number = told.split()
    return float(value), int(number), said


@pytest.mark.slow
def test_processes_share_a_folder_of_programs_and_survive_a_broken_one(tmp_path: Path):
    folder = tmp_path / "compiled"
    (value, _, _), (other, _, _) = [finished(one) for one in [compiling(folder), compiling(folder)]]
    assert value == other
    assert list(folder.glob("*-cache"))
    # However quickly they compiled, all programs were kept.
    assert finished(compiling(folder))[:2] == (value, 0)
    # As a reader finds an entry that is being written, or one whose writer was killed.
    entries = list(folder.glob("*-cache"))
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    again, compiled, said = finished(compiling(folder))
    assert (again, compiled) == (value, len(entries))
    assert "Error reading persistent compilation cache entry" in said
