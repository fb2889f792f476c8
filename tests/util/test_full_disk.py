"""A full disk: known by every library's error, one sentence for the user, nothing half written, what is kept named."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.full_disk import full_disk
from tests.marks import slow
from tests.tiny_runs import RECIPE, write_recipe
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.run.folder import explaining_full_disk
from tunix.util.atomic_io import append_rows, atomic_folder, is_full, replacing, write_text_atomic

ROOT = Path(__file__).parents[2]


def chained(inner: Exception) -> Exception:
    try:
        try:
            raise inner
        except Exception as error:
            raise ValueError("a write failed") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_contents_reach_the_disk_before_their_name_does(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So that after a power cut no name is that of an empty file; then the folder, so that the name is not lost."""
    path, flush = tmp_path / "new", os.fsync
    flushed: list[tuple[int, bool]] = []  # number of the file or folder, and whether the name was there

    def fsync(handle: int) -> None:
        flushed.append((os.fstat(handle).st_ino, path.exists()))
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    if kind == "file":
        write_text_atomic(path, "some")
        contents = [path]
    else:
        with atomic_folder(path) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text("some")
        contents = [path, path / "inner", path / "inner" / "file"]
    assert {(x.stat().st_ino, False) for x in contents} == {x for x in flushed if not x[1]}
    assert [x for x in flushed if x[1]] == [(tmp_path.stat().st_ino, True)]


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EFBIG, "File too large"), True),
        (Exception("No space left on device (os error 28)"), True),  # tokenizers and safetensors, in Rust
        (ValueError("RESOURCE_EXHAUSTED: Error writing x: No space left on device [os_error_code='28']"), True),
        (chained(OSError(errno.ENOSPC, "No space left on device")), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (ValueError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (chained(ValueError("a mistake")), False),
    ],
    ids=str,
)
def test_a_full_disk_is_known_by_its_error(error: Exception, full: bool):
    assert is_full(error) == full


def a_file(folder: Path) -> None:
    write_text_atomic(folder / "x", "b" * 100)


def a_stream(folder: Path) -> None:
    with replacing(folder / "x") as file:
        file.write(b"b" * 100)


def lines_of(folder: Path) -> None:
    append_rows(folder / "x", [{"text": "b" * 100}])


def a_tokenizer(folder: Path) -> None:
    with atomic_folder(folder / "x") as inside:
        bytes_tokenizer("llama3").save(inside)


@pytest.mark.parametrize("write", [a_file, a_stream, lines_of, a_tokenizer])
def test_every_writer_says_it_in_a_sentence_with_the_remedy(write: Callable[[Path], None], tmp_path: Path):
    with full_disk(50), pytest.raises(UserError) as raised:
        write(tmp_path)
    said = str(raised.value)
    assert str(tmp_path / "x") in said
    assert "File too large" in said
    assert "Make room and run the same command" in said
    assert "\n" not in said
    if write is not lines_of:  # of an appended file the reader leaves a cut line out
        assert not list(tmp_path.iterdir())


def run_folder(folder: Path, name: str, steps: list[int]) -> None:
    write_recipe(folder / "recipe.yaml") if name == "." else None
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "recipe.yaml").write_text("{}")
    for step in steps:
        (folder / name / "checkpoints" / str(step)).mkdir(parents=True)


@pytest.mark.parametrize(
    ("stages", "kept"),
    [
        ({".": []}, "No checkpoint was written yet."),
        ({".": [5, 10]}, "The checkpoint of step 10 is kept."),
        ({".": [], "0_sft": [20], "1_grpo": []}, "The checkpoint of step 20 of 0_sft is kept."),
        ({"0_sft": [20], "1_grpo": [10, 5]}, "The checkpoint of step 20 of 0_sft, step 10 of 1_grpo is kept."),
    ],
    ids=str,
)
def test_what_is_kept_of_a_run_is_named(stages: dict[str, list[int]], kept: str, tmp_path: Path):
    for name, steps in stages.items():
        run_folder(tmp_path, name, steps)
    with pytest.raises(UserError) as raised, explaining_full_disk(str(tmp_path)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(raised.value) == f"{tmp_path}: the disk is full. Make room and run the same command. {kept}"


def test_other_errors_rise_as_they_are(tmp_path: Path):
    for error in (UserError("a mistake"), RuntimeError("ours"), OSError(errno.EIO, "Input/output error")):
        with pytest.raises(type(error)) as raised, explaining_full_disk(str(tmp_path)):
            raise error
        assert raised.value is error


def test_any_command_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "scores.jsonl")

    monkeypatch.setattr("tunix.commands.doctor.doctor", full)
    assert main(["doctor"]) == 2
    said = "error: scores.jsonl could not be written: No space left on device. Make room and run the same command.\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("x"), "it is a file, and a run is a folder"),
        (lambda path: path.symlink_to(path.parent / "gone" / "deep"), "cannot be written"),
        (lambda path: (path.mkdir(), (path / "mine.txt").write_text("x")), "is not empty and holds no run"),
    ],
    ids=["a file", "a broken link", "not ours"],
)
def test_an_output_that_is_no_place_for_a_run(
    make: Callable[[Path], Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "r.yaml")
    make(tmp_path / RECIPE["output"])
    before = sorted(tmp_path.rglob("*"))
    assert main(["run", "r.yaml"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(("error: run ", "error: output: run "))
    assert says in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a size; skips where that is not permitted."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a file system is not permitted here")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tunix.cli", "run", "r.yaml", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("size", slow(["8k", "64k", "400k", "700k"]))
def test_a_run_on_a_small_disk_ends_in_a_sentence_and_goes_on(
    size: str, tmp_path: Path, small_disk: Callable[[str], Path]
):
    place = small_disk(f"size={size}")
    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"every": 1, "keep": 3}, "output": str(place / "run")})
    done = ran(tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert str(place / "run") in error
    assert "Make room and run the same command" in error
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
    assert ran(tmp_path).returncode == 0
    assert (place / "run/export/model.safetensors").is_file()


@pytest.mark.slow
def test_a_folder_that_is_read_only(tmp_path: Path, small_disk: Callable[[str], Path]):
    place = small_disk("size=1m,ro")
    write_recipe(tmp_path / "r.yaml", {"output": str(place / "run")})
    done = ran(tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: output: {place / 'run'} cannot be written: Read-only file system\n")
