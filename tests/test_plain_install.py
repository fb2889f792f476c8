"""What `pip install .` alone is enough for: every recipe, `--tiny`, by its name, in an empty folder and offline.

The environment is made anew, which takes 1.5 GB and a package index that pip can reach.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import QUICKLY

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
PICTURES = [name for name in RECIPES if name.endswith("pictures")]
EXTRAS = ("torch", "peft", "tensorboardX", "pathwaysutils", "matplotlib", "beartype")
"""What the extras bring and nothing else may need."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds tunix and what it asks for."""
    place = tmp_path_factory.mktemp("plain") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    subprocess.run([str(place / "bin/python"), "-m", "pip", "install", "--quiet", str(ROOT)], check=True)
    return place / "bin"


def offline() -> dict[str, str]:
    """The user's environment: nothing of this process's, and no network; compiled in a hurry."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHON"))}
    return {**kept, "XLA_FLAGS": QUICKLY, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def test_the_extras_are_not_there(plain: Path):
    code = f"import importlib.util as u; print([name for name in {EXTRAS} if u.find_spec(name)])"
    done = subprocess.run([str(plain / "python"), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def run_tiny(recipe: str, plain: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(plain / "tunix"), "run", recipe, "--tiny", "output=run"]
    return subprocess.run(command, cwd=folder, env=offline(), capture_output=True, text=True)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in PICTURES])
def test_a_recipe_runs_tiny_without_extras(recipe: str, plain: Path, tmp_path: Path):
    done = run_tiny(recipe, plain, tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("run/**/export/config.json")) or list(tmp_path.glob("run/**/adapter_config.json"))


@pytest.mark.parametrize("recipe", PICTURES)
def test_a_recipe_with_pictures_says_what_to_install(recipe: str, plain: Path, tmp_path: Path):
    done = run_tiny(recipe, plain, tmp_path)
    assert done.returncode == 2
    assert "pictures need Pillow: `pip install '.[pictures]'" in done.stderr
    assert "Traceback" not in done.stderr
