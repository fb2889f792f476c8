"""What a user gets who installs a wheel: all of the package, the recipes, the licence; and how they call a recipe."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe, included_recipes

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # No isolation: the build backend is among the test requirements, so nothing is downloaded.
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("tunix-*.whl")
    return built


def test_the_wheel_holds_the_package_the_recipes_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "tunix").rglob("*.py")}
    recipes = {f"tunix/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert len(recipes) >= 5
    assert package | recipes <= names
    others = {name for name in names - package - recipes if not name.endswith(".md")}
    assert others == {"tunix/py.typed", "tunix/util/h100.textproto", "tunix/commands/report.html"}
    assert len(licences) == 1


def test_the_wheel_runs_a_recipe_by_its_name(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import tunix; print(tunix.__file__); print(tunix.Recipe.load('quickstart').output)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    place, output = done.stdout.split()
    assert Path(place) == tmp_path / "site" / "tunix" / "__init__.py"
    assert output == "runs/quickstart"


def test_a_bare_name_is_a_recipe_that_tunix_brings():
    assert sorted(included_recipes()) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert Recipe.load("quickstart") == Recipe.load(ROOT / "recipes" / "quickstart.yaml")


def test_a_file_of_that_name_comes_first(tmp_path: Path):
    (tmp_path / "quickstart").write_text("model: {path: a/llama}\ndata: {train: a/b}\n")
    assert Recipe.load("quickstart").model.path == "a/llama"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quickstat", "no such file. Did you mean 'quickstart', which tunix brings"),
        ("quickstart.yaml", r"quickstart.yaml: no such file"),
        ("recipes/quickstart.yaml", r"recipes/quickstart.yaml: no such file"),
    ],
)
def test_a_name_that_is_nothing(name: str, words: str):
    with pytest.raises(UserError, match=words):
        Recipe.load(name)


def test_nothing_is_said_about_a_torch_that_is_not_needed():
    code = "import sys; sys.modules['torch'] = None; from tunix.data.tokenizer import bytes_tokenizer as t; t('gemma')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout + done.stderr == ""


def test_continuous_integration_runs_what_a_person_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().endswith("\nmake lint\nmake test\nmake test-models\nmake test-newest\n")
    makefile = (ROOT / "Makefile").read_text()
    assert all(
        f"\n{target}: " in makefile
        for target in ("quickstart", "test", "test-models", "test-slow", "test-newest", "lint")
    )


def test_the_developers_tools_have_one_version_each():
    # A hook of another version than `make lint` would change what the other calls clean: hooks run what .venv holds.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(re.fullmatch(r"[a-z-]+(\[nodejs\])?==[\d.]+", tool) for tool in extras["dev"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [one["repo"] for one in hooks] == ["local"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks[0]["hooks"])
