"""`tunix launch` on the command line: what it prints, writes, keeps and submits."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunix.cli import main
from tunix.commands import plan as planning
from tunix.commands.plan import Plan
from tunix.errors import UserError

RECIPE = """\
model: {init: random, family: llama, tokenizer: bytes}
data: {train: org/rows}
output: /runs/small
"""
GPU = ["launch", "r.yaml", "--target", "slurm", "--topology", "h100:16"]
TPU = ["launch", "r.yaml", "--target", "gke-tpu", "--topology", "v5e:4x4", "--image", "i", "--mount", "runs:/runs"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe; schedulers' commands are not to be found."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def stand_in(folder: Path, name: str, body: str) -> None:
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}")
    (folder / "bin" / name).chmod(0o755)


@pytest.mark.parametrize(("words", "name"), [(GPU, "small.sbatch"), (TPU, "small.yaml")])
def test_a_job_is_written_and_kept(words: list[str], name: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*words, "--no-plan"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{name}: ")
    assert f"{name}`" in said
    text = (folder / name).read_text()
    assert main([*words, "--no-plan"]) == 0  # the same file again
    assert main([*words, "--no-plan", "seed=1"]) == 2
    assert f"--out {name}: it exists, and differs; --overwrite replaces it" in capsys.readouterr().err
    assert (folder / name).read_text() == text
    assert main([*words, "--no-plan", "seed=1", "--overwrite"]) == 0
    assert "seed: 1" in (folder / name).read_text()
    assert {path.name for path in folder.iterdir()} == {"r.yaml", "bin", name}


def test_a_dry_run_prints_the_file_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*GPU, "--no-plan", "--out", "a.sbatch"]) == 0
    capsys.readouterr()
    assert main([*GPU, "--no-plan", "--dry-run"]) == 0
    assert capsys.readouterr().out == (folder / "a.sbatch").read_text()
    assert not (folder / "small.sbatch").exists()
    assert main([*TPU, "--no-plan", "--dry-run", "output=runs/x", "checkpoint.folder=gs://bucket/x"]) == 0
    printed = capsys.readouterr()
    assert [one["kind"] for one in yaml.safe_load_all(printed.out)] == ["ConfigMap", "JobSet"]
    assert printed.err.startswith("warning: output: runs/x is on the pod's own disk")


@pytest.mark.parametrize(
    ("words", "name", "tool", "called"),
    [(GPU, "small.sbatch", "sbatch", "small.sbatch"), (TPU, "small.yaml", "kubectl", "apply -f small.yaml")],
)
def test_a_job_is_submitted_where_that_is_asked_for(
    words: list[str], name: str, tool: str, called: str, folder: Path, capfd: pytest.CaptureFixture[str]
):
    assert main([*words, "--no-plan", "--submit"]) == 2
    assert f"--submit: there is no {tool} on this machine" in capfd.readouterr().err
    assert not (folder / name).exists()
    stand_in(folder, tool, 'echo "submitted $*"\n')
    assert main([*words, "--no-plan", "--submit"]) == 0
    assert capfd.readouterr().out == f"submitted {called}\n"
    stand_in(folder, tool, 'echo "one line" >&2\necho "error: no such partition" >&2\nexit 1\n')
    assert main([*words, "--no-plan", "--submit"]) == 2
    assert f"`{tool} {called}` was refused: error: no such partition. The file stays" in capfd.readouterr().err
    assert (folder / name).exists()


def test_a_dry_run_is_not_submitted(capsys: pytest.CaptureFixture[str]):
    assert main([*GPU, "--no-plan", "--dry-run", "--submit"]) == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_the_tiny_form_of_a_recipe_is_a_job_too(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*GPU, "--no-plan", "--tiny"]) == 0
    assert capsys.readouterr().out.startswith("small-tiny.sbatch: 2 host(s) with 8 x h100 each")
    assert "output: /runs/small-tiny" in (folder / "small-tiny.sbatch").read_text()


def test_what_does_not_fit_is_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[Any] = []
    verdict = {"fits": False, "devices": "h100:16", "number": 16, "needed": 90 * 2**30, "limit": 74 * 2**30}
    needs = {"sampling": ("decode", 90 * 2**30), "training": ("step", 60 * 2**30)}
    programs = [{"name": name, "total": total, "place": place, "refused": ""} for place, (name, total) in needs.items()]
    found = Plan([{**verdict, "programs": programs, "places": {place: {} for place in needs}}], {0: "rollout.slots=64"})

    def ask(_: Any, topology: str, *__: Any, **___: Any) -> Plan:
        asked.append(topology)
        return found

    monkeypatch.setattr(planning, "ask", ask)
    assert main(GPU) == 2
    said = capsys.readouterr().err
    assert "/runs/small on h100:16: does not fit: 90.0 GiB of 74.0 GiB during `decode` on each sampling device" in said
    assert "60.0 GiB during `step` on each training device" in said
    assert "It fits with: rollout.slots=64" in said
    assert "`tunix launch --no-plan` writes the job all the same" in said
    assert not (folder / "small.sbatch").exists()
    # Where nothing can be found out, a line says so, and the job is written.
    monkeypatch.setattr(planning, "ask", lambda *_, **__: (_ for _ in ()).throw(UserError("no compiler")))
    assert main(GPU) == 0
    assert "h100:16: not planned: no compiler" in capsys.readouterr().err
    assert asked == ["h100:16"]
    assert main([*TPU, "--slices", "2"]) == 0
    assert "not planned: several slices" in capsys.readouterr().err


def test_a_target_has_to_be_one_of_four(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "r.yaml", "--target", "slum"]) == 2
    assert "slurm" in capsys.readouterr().err
    assert main(["launch", "r.yaml"]) == 2
    assert "--target" in capsys.readouterr().err


def test_the_command_needs_no_jax():
    code = "import sys; sys.modules['jax'] = None; from tunix.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [*GPU, "--no-plan", "--dry-run"]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
