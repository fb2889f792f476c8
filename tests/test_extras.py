"""The extras for GPUs and for environments of other packages can be installed on every Python, with what their comments
promise. Asks the package index."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tunix.rollout.environments.adapters import ADAPTERS, LM_EVAL

ROOT = Path(__file__).parents[1]
TOKAMAX = {"3.11": "0.0.12", "3.12": "0.0.17", "3.13": "0.0.17"}
WORLDS = ("reasoning-gym", "textarena", "gymnasium", "trl", "verifiers", "openenv", "mcp", "tinker", "lm-eval")
"""Each extra has the name of its package."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]
pytestmark = pytest.mark.slow


def interpreter(version: str) -> str:
    """A Python of a version on this machine, with pip: markers such as `python_version` are those of what runs pip."""
    kept = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python3"))
    for python in filter(None, (shutil.which(f"python{version}"), *map(str, kept))):
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version} with pip here")


def resolved(extra: str, python: str, folder: Path, *, wheels: bool = True) -> dict[str, str]:
    """The version of each package that pip would install, by a dry run with that Python: from wheels for a machine
    with a GPU, or for this one, which builds what has no wheel."""
    command = [interpreter(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    if wheels:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        command += ["--target", "none", "--only-binary=:all:", *platforms]
    report = folder / "report.json"
    done = subprocess.run(
        [*command, "--report", str(report), f"tunix[{extra}] @ {ROOT.as_uri()}"], capture_output=True, text=True
    )
    if done.returncode and extra == "gpu":
        runtime = "nvidia-cuda-cupti>=13"
        if subprocess.run([*command, "--no-deps", runtime], capture_output=True, check=False).returncode:
            pytest.skip(f"this index has no {runtime}, which jax[cuda13] brings")
    assert done.returncode == 0, done.stderr[-2000:]
    packages = (package["metadata"] for package in json.loads(report.read_text())["install"])
    return {re.sub(r"[-_.]+", "-", x["name"]).lower(): x["version"] for x in packages}


@pytest.mark.parametrize("python", TOKAMAX)
@pytest.mark.parametrize(("extra", "cuda"), [("gpu", 13), ("gpu-cuda12", 12), ("plan-gpu", 13)])
def test_an_extra_brings_one_cuda_and_a_tokamax_that_was_tried(extra: str, cuda: int, python: str, tmp_path: Path):
    packages = resolved(extra, python, tmp_path)
    assert packages["tokamax"] == TOKAMAX[python]
    plugins = {name for name in packages if re.fullmatch(r"jax-cuda\d+-plugin", name)}
    assert plugins == {f"jax-cuda{cuda}-plugin"}
    assert packages[f"jax-cuda{cuda}-plugin"] == packages["jaxlib"]


@pytest.mark.parametrize("python", ["3.11", "3.13"])
@pytest.mark.parametrize("extra", WORLDS)
def test_the_extra_of_a_world_brings_a_version_that_was_tried(extra: str, python: str, tmp_path: Path):
    version = resolved(extra, python, tmp_path, wheels=False)[extra]
    tried = [adapter.tried for adapter in ADAPTERS.values() if adapter.extra == extra]
    tried += [LM_EVAL] if extra == "lm-eval" else []
    assert all(SpecifierSet(versions).contains(version) for versions in tried)
