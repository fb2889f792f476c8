"""Every command on run folders that a crash, an editor, another program or another version has left: it does its work
or says in one line what is wrong, it waits for nothing, and what lies elsewhere stays as it is.

Bytes that are drawn are in test_run_folders.py; what a kill leaves is in tests/run/test_kill.py.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.marks import slow
from tests.tiny_runs import EVAL, files, train, write_recipe
from tunix.cli import main

LONGEST = 60
"""Seconds of a command."""
USER = "their own words\n"
STATE = "checkpoints/4/state"
RECORD = "checkpoints/4/record/metadata"
EVALUATION = "checkpoints/4/metrics/metrics"
SPANS = [
    {
        "step": step,
        "spans": [["rollout", "MainThread", 1.0 * step, step + 0.5], ["update", "main", step + 0.5, 1.0 + step]],
    }
    for step in range(1, 5)
]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with its recipe and rows beside it, and a folder of somebody else."""
    here = tmp_path_factory.mktemp("whole")
    write_recipe(here / "r.yaml", {**EVAL, "checkpoint.every": 2, "output": "run"})
    (here / "elsewhere").mkdir()
    (here / "elsewhere/mine.txt").write_text(USER)
    before = os.getcwd()
    os.chdir(here)
    try:
        train("r.yaml")
    finally:
        os.chdir(before)
    (here / "run/spans.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SPANS))
    return here


@pytest.fixture
def here(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        old = path.read_bytes() if path.is_file() else b""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(change(old))

    return damage


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)

    return damage


def folder(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text(USER)


def elsewhere(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "elsewhere").is_dir()) / "elsewhere"


DEEP = b"[" * 100_000 + b"]" * 100_000  # Python 3.13 reads some thousands
DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": content(lambda old: old[: len(old) // 2]),
    "empty": content(lambda _: b""),
    "zeros": content(lambda old: bytes(len(old) or 9)),
    "no text": content(lambda _: b"\xff\xfe{\n"),
    "still written": content(lambda old: old + b'{"step": 4, "tr'),
    "foreign": content(lambda _: b'{"hello": ["world"]}\n'),
    "a list": content(lambda _: b"[1, 2]\n"),
    "a number": content(lambda _: b"7\n"),
    "nested": content(lambda _: b'{"step": 1, "a": ' + DEEP + b"}\n"),
    "huge": content(
        lambda _: b'{"step": 1' + b"0" * 400 + b', "train/loss": 1e999, "spans": [["a", "b", 1e999, 2]]}\n'
    ),
    "digits": content(lambda _: b'{"step": 1, "a": ' + b"9" * 5000 + b"}\n"),
    "a step that is text": content(lambda _: b'{"step": "one", "spans": []}\n'),
    "other types": content(
        lambda _: (
            b'{"step": 1, "train/loss": "low", "eval/loss": {}, "spans": [["a", 1]], "prompt": 1, "completion": 2}\n'
        )
    ),
    "other values": content(
        lambda _: b'{"step": 1, "train/loss": null, "eval/loss": null, "spans": [], "prompt": [], "completion": null}\n'
    ),
    "of lists": content(
        lambda _: (
            b'{"step": 1, "spans": 3, "prompt": "a", "completion": "b", "per_token": {"tokens": 3}, "rewards": 1}\n'
        )
    ),
    "missing": instead(lambda _: None),
    "a folder": instead(folder),
    "a link": instead(lambda path: path.symlink_to(elsewhere(path) / "mine.txt")),
    "a link to a folder": instead(lambda path: path.symlink_to(elsewhere(path))),
    "a link to itself": instead(lambda path: path.symlink_to(path)),
    "a link to nothing": instead(lambda path: path.symlink_to(elsewhere(path) / "nothing")),
    "a pipe": instead(os.mkfifo),
}
READS = {
    "inspect run/recipe.yaml": ["recipe.yaml"],
    "report run --out page.html": [
        *("recipe.yaml", "metrics.jsonl", "samples.jsonl", "spans.jsonl", "judge.jsonl", "log.txt"),
    ],
    "trace run 2 --out chart.json": ["spans.jsonl"],
    "trace run": ["recipe.yaml", "profile", "profile/a.xplane.pb"],
    "export run out --format atif": ["recipe.yaml", "samples.jsonl"],
    "run r.yaml": [
        *("recipe.yaml", "metrics.jsonl", "samples.jsonl", "spans.jsonl", "log.txt", ".lock", "curves.svg"),
        *(RECORD, EVALUATION, "tokenizer/tokenizer.json", "tokenizer/generation_config.json"),
    ],
    "run r.yaml steps=6": [
        *("metrics.jsonl", "samples.jsonl", RECORD, EVALUATION, f"{STATE}/manifest.ocdbt", f"{STATE}/_METADATA"),
    ],
    "replay run 4": ["recipe.yaml", "metrics.jsonl", RECORD.replace("4", "2"), "tokenizer/tokenizer.json"],
    "eval run": [
        *("recipe.yaml", "export/config.json", "export/model.safetensors", "export/tokenizer.json"),
        *("export/generation_config.json", "export/tokenizer_config.json"),
    ],
    "export run out": ["recipe.yaml", "metrics.jsonl", RECORD],
}
QUICK = ("inspect", "report", "trace", "export run out --format atif")


def waits(number: int, frame: object) -> None:
    raise AssertionError(f"it waits for more than {LONGEST} seconds")


def ends(words: str, here: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """A command ends well or with one line, which is returned, and changes nothing that is not the run's."""
    capfd.readouterr()
    signal.signal(signal.SIGALRM, waits)
    signal.alarm(LONGEST)
    try:
        code = main(words.split())
    except SystemExit as left:
        code = left.code
    finally:
        signal.alarm(0)
    said = capfd.readouterr().err
    assert code in ((0, 1, 2) if words.startswith("replay") else (0, 2)), said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code == 2), said
    assert "Traceback" not in said
    assert files(here / "elsewhere") == {"mine.txt": USER.encode()}
    assert (here / "train.jsonl").stat().st_size > 1000
    return errors[0] if errors else ""


CASES = [(words, name) for words, names in READS.items() for name in names]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("words", "name"),
    [*(x for x in CASES if x[0].startswith(QUICK)), *slow(x for x in CASES if not x[0].startswith(QUICK))],
)
def test_a_damaged_file(
    words: str, name: str, damage: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    if (name, damage) == ("recipe.yaml", "a pipe") and words.startswith("inspect"):
        pytest.skip("a recipe may come through one: tunix inspect <(command)")
    monkeypatch.chdir(here)
    path = here / "run" / name
    mine = path / "mine.txt"
    DAMAGES[damage](path)
    ends(words, here, capfd)
    if damage == "a folder":
        assert mine.read_text() == USER


FINDS: dict[str, tuple[str, str, str, str]] = {
    "a record of no position": (
        "run r.yaml",
        RECORD,
        "foreign",
        "run/checkpoints/4 is damaged, .*: 'algorithm'. Delete",
    ),
    "a record that is a list": ("run r.yaml", RECORD, "a list", "4: the checkpoint cannot be read: .*no JSON object"),
    "a nested record": ("run r.yaml", RECORD, "nested", "run/checkpoints/4: the checkpoint cannot be read"),
    "metrics of another program": (
        "run r.yaml",
        "metrics.jsonl",
        "foreign",
        "metrics.jsonl is damaged, .* is no row of it",
    ),
    "metrics without a number": ("run r.yaml", "metrics.jsonl", "a step that is text", "is no row of it: move it away"),
    "texts for metrics": ("run r.yaml steps=6", "metrics.jsonl", "other types", ""),
    "metrics that are null": ("run r.yaml", "metrics.jsonl", "other values", ""),
    "a folder for metrics": ("run r.yaml", "metrics.jsonl", "a folder", "metrics.jsonl is not a file: move it away"),
    "samples that are a loop": ("run r.yaml", "samples.jsonl", "a link to itself", ""),
    "spans that are a list": ("run r.yaml", "spans.jsonl", "a list", "spans.jsonl is damaged"),
    "a link for the log": ("run r.yaml", "log.txt", "a link", "log.txt could not be written: Too many .*Move it away"),
    "a link to nothing for metrics": ("run r.yaml steps=6", "metrics.jsonl", "a link to nothing", "Move it away"),
    "a link to nothing for the lock": ("run r.yaml", ".lock", "a link to nothing", "run cannot be written: Too many"),
    "a pipe for the log": ("run r.yaml", "log.txt", "a pipe", "log.txt could not be written: No such device"),
    "a loop for a replayed tokenizer": (
        "replay run 4",
        "tokenizer/tokenizer.json",
        "a link to itself",
        "no vocabulary: tokenizer",
    ),
    "a pipe for the lock": ("run r.yaml", ".lock", "a pipe", ""),
    "stops that are a list": (
        "run r.yaml",
        "tokenizer/generation_config.json",
        "a list",
        "generation_config.json is not JSON: it holds list, and has to be an object",
    ),
    "a folder for replayed metrics": ("replay run 4", "metrics.jsonl", "a folder", "metrics.jsonl is not a file"),
    "a replayed record": (
        "replay run 4",
        RECORD.replace("4", "2"),
        "foreign",
        "run/checkpoints/2 is damaged, .*'data'",
    ),
    "nested stops": ("eval run", "export/generation_config.json", "nested", "generation_config.json is not JSON: max"),
    "a card of null": ("export run out", "metrics.jsonl", "other values", ""),
}


@pytest.mark.parametrize(("words", "name", "damage", "message"), FINDS.values(), ids=FINDS)
def test_a_file_that_was_a_traceback_or_a_wait(
    words: str,
    name: str,
    damage: str,
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(here)
    DAMAGES[damage](here / "run" / name)
    said = ends(words, here, capfd)
    assert re.search(message, said), said
    assert bool(said) == bool(message)


def test_what_is_not_the_runs_stays(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Names that look like those of unfinished files and checkpoints, and links by such names; the run goes on."""
    monkeypatch.chdir(here)
    run, mine = here / "run", here / "elsewhere"
    (run / "notes.tmp-backup").write_text(USER)
    (run / "checkpoints/\u00b2").mkdir()
    (run / "checkpoints/\u0663").mkdir()
    (run / "checkpoints/9.tmp").symlink_to(mine)
    (run / "checkpoints/8.tmp").write_text("")
    (run / "old.tmp-0123abcd").symlink_to(mine)
    (run / "new.tmp-0123abcd").mkdir()
    assert ends("run r.yaml steps=6", here, capfd) == ""
    assert (run / "notes.tmp-backup").read_text() == USER
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["2", "4", "6", "\u00b2", "\u0663"]
    assert not [*run.glob("*.tmp-0123abcd")]


SHAPES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file for the checkpoints": (
        lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").write_text(USER)),
        "checkpoints cannot be used: File exists",
    ),
    "a file for a checkpoint": (
        lambda run: (run / "checkpoints/7").write_text(USER),
        "7: the checkpoint cannot be read",
    ),
    "a file for the export": (lambda run: (shutil.rmtree(run / "export"), (run / "export").write_text(USER)), ""),
    "a file for the run": (
        lambda run: (shutil.rmtree(run), run.write_text(USER)),
        "run cannot be written: it is a file",
    ),
    "an empty one": (lambda run: (shutil.rmtree(run), run.mkdir()), ""),
    "another's": (
        lambda run: (run / "recipe.yaml").unlink(),
        "run is not empty and holds no run: set output to another",
    ),
    "a recipe of an older version": (
        lambda run: (run / "recipe.yaml").write_text("lora: {rank: 4}\n" + (run / "recipe.yaml").read_text()),
        "recipe.yaml: lora: unknown key",
    ),
    "a list for its checkpoints": (
        lambda run: (run / "recipe.yaml").write_text("checkpoint: [a]\nmodel: {}\n"),
        "run/recipe.yaml: model: path is missing",
    ),
}


@pytest.mark.parametrize(("change", "message"), SHAPES.values(), ids=SHAPES)
def test_a_folder_of_another_shape(
    change: Callable[[Path], object],
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(here)
    change(here / "run")
    said = ends("run r.yaml", here, capfd)
    assert re.search(message, said), said
    assert bool(said) == bool(message)
    for command in (
        "report run --out page.html",
        "trace run 2 --out chart.json",
        "replay run 9",
        "eval run",
        "trace run",
    ):
        ends(command, here, capfd)
