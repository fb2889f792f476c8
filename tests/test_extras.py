"""The extras for GPUs can be installed on every Python, with what their comments promise. Asks the package index."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOKAMAX = {"3.11": "0.0.12", "3.12": "0.0.17", "3.13": "0.0.17"}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]
pytestmark = pytest.mark.slow


def resolved(extra: str, python: str, folder: Path) -> dict[str, str]:
    """The version of each package that pip would install, by a dry run for that Python."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--target", "none"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    report = folder / "report.json"
    done = subprocess.run(
        [*command, "--report", str(report), f"tunix[{extra}] @ {ROOT.as_uri()}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    packages = (package["metadata"] for package in json.loads(report.read_text())["install"])
    return {re.sub(r"[-_.]+", "-", x["name"]).lower(): x["version"] for x in packages}


@pytest.mark.parametrize("python", TOKAMAX)
@pytest.mark.parametrize(("extra", "cuda"), [("gpu", 13), ("gpu-cuda12", 12)])
def test_an_extra_brings_one_cuda_and_a_tokamax_that_was_tried(extra: str, cuda: int, python: str, tmp_path: Path):
    packages = resolved(extra, python, tmp_path)
    assert packages["tokamax"] == TOKAMAX[python]
    plugins = {name for name in packages if re.fullmatch(r"jax-cuda\d+-plugin", name)}
    assert plugins == {f"jax-cuda{cuda}-plugin"}
    assert packages[f"jax-cuda{cuda}-plugin"] == packages["jaxlib"]
