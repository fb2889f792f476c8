"""How tunix is installed: from a clone, under a Python that it supports, and nothing is imported before it is needed.

The package index holds another project under the name `tunix`, so no text may send a reader there.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from hatch_build import RequiredPython
from tests.marks import QUICKLY
from tunix.errors import install_command
from tunix.trainer.metrics import EXTRAS

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "tunix").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = "3.11, 3.12 or 3.13"
FROM_INDEX = re.compile(
    r"(?:pip3?|pipx|uv|uvx)\s+(?:(?:install|add|tool|pip)\s+)*(?:-\S+\s+)*['\"]?tunix(?![\w./-])|(?<![\w./\\-])tunix\\?\[[a-z]"
)
"""A command or a requirement that takes `tunix` from the index; a path such as `/tunix[tpu]` does not."""
WHERE_USED = {
    *("wandb", "datasets", "transformers", "tensorboardX", "math_verify", "sympy", "jsonschema", "PIL", "pyarrow"),
    *("pathwaysutils", "tokamax", "flatbuffers", "etils", "fsspec", "huggingface_hub", "tokenizers"),
}
"""Packages that are imported by the functions that need them, never with a module."""
UNUSED = {"torch", "wandb", "datasets", "tensorboard", "tensorboardX", "pandas", "pyarrow", "sympy", "tensorflow"}
"""Packages that a supervised run on its own rows does not load."""


def top_level(tree: ast.Module) -> set[str]:
    """The packages that a module imports when it is imported itself; blocks for type checkers are left out."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return names


def tracked() -> list[Path]:
    """The files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_text_sends_a_reader_to_the_index():
    files = [path for path in tracked() if path != Path(__file__)]
    assert len(files) > 300
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if FROM_INDEX.search(line)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install 'tunix[serve]'", True),
        ("pip install tunix", True),
        ("python -m pip install --upgrade tunix", True),
        ("uv add tunix", True),
        ("uv pip install tunix[gpu]", True),
        ('"tunix[gcs,tpu]",', True),
        (r"match=r\"'tunix\[s3\]'\"", True),
        ("pip install '.[serve]'", False),
        ("pip install --no-cache-dir '/tunix[tpu,gcs]'", False),
        ("pip install google-tunix", False),
        ("`pip install '.[serve]'` in a clone of tunix", False),
        ("uvx tunix-like", False),
        ("tunix run quickstart", False),
    ],
)
def test_what_is_taken_for_the_index(text: str, wrong: bool):
    assert bool(FROM_INDEX.search(text)) == wrong


def test_every_extra_that_a_message_names_exists():
    extras = PROJECT["optional-dependencies"].keys()
    text = "\n".join(path.read_text() for path in PACKAGE)
    named = {extra for match in re.findall(r"\.\[([a-z0-9,-]+)\]'`?", text) for extra in match.split(",")}
    named |= set(re.findall(r"install_command\([\"']([a-z0-9-]+)[\"']\)", text))
    named |= EXTRAS.keys()
    assert named >= {"serve", "gpu", "tensorboard", "stablehlo", "pictures", "pathways"}
    assert named <= extras
    assert install_command("serve") == "`pip install '.[serve]'` in a clone of tunix"


def test_math_verify_is_asked_for_without_an_extra():
    """The extra holds antlr at one version; math-verify 0.9 itself asks for any that its parser reads."""
    assert [line for line in PROJECT["dependencies"] if line.startswith("math-verify")] == ["math-verify>=0.9"]


def test_the_pythons_are_the_same_everywhere():
    supported = SpecifierSet(PROJECT["requires-python"])
    assert [f"3.{minor}" for minor in range(20) if f"3.{minor}" in supported] == ["3.11", "3.12", "3.13"]
    for file in ("Makefile", "README.md", "hatch_build.py", "docs/guide/quickstart.md"):
        assert VERSIONS in (ROOT / file).read_text(), file


def test_a_build_under_another_python_says_which_it_needs(tmp_path: Path):
    def hook(constraint: str) -> RequiredPython:
        metadata = SimpleNamespace(core=SimpleNamespace(python_constraint=SpecifierSet(constraint)))
        return RequiredPython(str(tmp_path), {}, None, metadata, str(tmp_path), "wheel")  # pyright: ignore

    hook(">=3.11").initialize("standard", {})
    with pytest.raises(SystemExit, match=rf"^tunix needs Python {VERSIONS}; {sys.executable} is Python 3\.1\d"):
        hook("<3").initialize("standard", {})


class Clone:
    """A folder in which `make` finds only the programs that a test puts there."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir(parents=True)
        for file in ("Makefile", "pyproject.toml"):
            shutil.copyfile(ROOT / file, folder / file)
        for name in ("sh", "mkdir", "rm", "touch"):
            (self.programs / name).symlink_to(str(shutil.which(name)))

    def python(self, name: str, version: str, *, venv: str = "exit 0", modules: bool = True) -> Path:
        """Writes a program that answers as a Python of this version does.

        Args:
            venv: what `-m venv` does, in sh; the folder is `$3`.
            modules: whether venv and ensurepip are among its modules.
        """
        path = self.folder / name if "/" in name else self.programs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        real = f"import sys; sys.version_info = {tuple(map(int, version.split('.')))}; "
        real += "" if modules else "sys.modules['ensurepip'] = None; "
        path.write_text(
            f'#!/bin/sh\ncase "$1" in\n-m) {venv};;\n--version) echo Python {version};;\n'
            f'-c) exec {sys.executable} -c "{real}sys.executable = \'$0\'; exec(sys.argv[1])" "$2";;\nesac\n'
        )
        path.chmod(0o755)
        return path

    def make(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.programs), "HOME": str(self.folder)}
        command = [str(shutil.which("make")), ".venv/installed", *words]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    return Clone(tmp_path / "clone")


def test_make_names_the_pythons_that_it_found(clone: Clone):
    clone.python("python3", "3.9.18")
    clone.python("python3.11", "3.11.2", modules=False)
    done = clone.make()
    assert done.returncode == 2
    assert f"tunix needs Python {VERSIONS} with its venv module, and none was found" in done.stderr
    assert "  python3 is Python 3.9.18\n" in done.stderr
    assert "  python3.11 is Python 3.11.2\n" in done.stderr
    assert not (clone.folder / ".venv").exists()


def test_make_refuses_a_python_that_is_named(clone: Clone):
    old = clone.python("old/python", "3.10.13")
    done = clone.make(f"PYTHON={old}")
    assert done.returncode == 2
    assert f"tunix needs Python {VERSIONS}; {old} is Python 3.10\n" in done.stderr
    bare = clone.python("bare/python", "3.12.1", modules=False)
    done = clone.make(f"PYTHON={bare}")
    assert done.returncode == 2
    assert f"{bare} cannot make a virtual environment: it lacks the module venv or ensurepip" in done.stderr
    assert not (clone.folder / ".venv").exists()


def test_a_venv_that_could_not_be_made_is_not_left_behind(clone: Clone):
    clone.python("python3.11", "3.11.2", venv='mkdir -p "$3/bin"; exit 1')
    assert clone.make().returncode == 2
    assert not (clone.folder / ".venv").exists()
    (clone.folder / ".venv").mkdir()
    (clone.folder / ".venv/mine").touch()
    assert clone.make().returncode == 2
    assert (clone.folder / ".venv/mine").exists()  # it was there before


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0", None])
def test_a_venv_of_another_python_is_named(clone: Clone, version: str | None):
    """None: its Python has been removed since."""
    (clone.folder / ".venv/bin").mkdir(parents=True)
    (clone.folder / ".venv/bin/pip").touch()
    if version:
        clone.python(".venv/bin/python", version)
    done = clone.make()
    assert done.returncode == 2
    assert ".venv cannot be used. Remove it and call make again, which makes another: rm -r .venv" in done.stderr
    assert ("tunix needs Python" in done.stderr) == (version is not None)
    assert not (clone.folder / ".venv/installed").exists()


def test_packages_are_imported_where_they_are_used():
    early = {str(path.relative_to(ROOT)): top_level(ast.parse(path.read_text())) & WHERE_USED for path in PACKAGE}
    assert {path: names for path, names in early.items() if names} == {}
    assert not [path for path in PACKAGE if re.search(r"^\s*(import|from) torch\b", path.read_text(), re.MULTILINE)]


def test_an_early_import_would_be_seen():
    code = "try:\n    import wandb.sdk\nexcept ImportError: pass\nclass A:\n    from PIL import Image\n"
    late = "if TYPE_CHECKING:\n    import datasets\ndef f():\n    import sympy\n"
    assert top_level(ast.parse(code + late)) == {"wandb", "PIL"}


@pytest.mark.slow
def test_a_run_loads_nothing_that_it_does_not_use(tmp_path: Path):
    code = (
        "import sys; from tunix.cli import main; main(sys.argv[1:]); "
        f"print('LOADED', *sorted({{name.partition('.')[0] for name in sys.modules}} & {UNUSED}))"
    )
    words = ["run", "sft_gemma", "--tiny", "steps=1", f"output={tmp_path / 'run'}"]
    env = {**os.environ, "XLA_FLAGS": QUICKLY}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "LOADED"
