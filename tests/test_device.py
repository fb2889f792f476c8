"""The command that measures a device: deadlines, failures, the two files, and the whole of it on this CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.device import __main__ as command
from benchmarks.device import torch_loop
from benchmarks.device.__main__ import Late, Stopped, lines
from benchmarks.device.checks import KINDS
from benchmarks.device.parts import PARTS
from benchmarks.device.report import Report
from benchmarks.device.rows import Machine, Row, Setting, Work, attempt, check
from benchmarks.device.speeds import STEPS, summary
from benchmarks.shapes import SHAPES
from tests.marks import QUICKLY
from tunix.models.attention.attend import IMPLEMENTATIONS
from tunix.models.families.table import FAMILIES

ROOT = Path(__file__).parents[1]
CARD = Machine("NVIDIA X1 80GB", "gpu", 1, 80 * 2**30, 1e12, 1e9, {"jax": "0.11.2"})
BEGUN = datetime(2026, 11, 23, 6, tzinfo=UTC)
# A program of 2 TFLOP and 1 GB takes 2 s by the products of CARD and 1 s by its memory; one of 4 GB alone takes 4 s.
SFT = Row("SFT", seconds=4.0, turns=3, tokens=8192, flops=1e12, memory=3 * 2**30, work=(Work(2e12, 1e9),))
BOTH = replace(SFT, name="both", work=(Work(2e12, 1e9), Work(0.0, 4e9)))
# Programs in the place of a part's.
FOUND = json.dumps({"machine": asdict(CARD)})
FINE = f"print({json.dumps({'row': asdict(Row('fine', difference=0.0, limit=1.0))})!r})"
ASLEEP = "import time; time.sleep(600)"


def report(*rows: tuple[str, Row], machine: Machine = CARD) -> Report:
    return Report(machine, False, 8.0, BEGUN, list(rows))


def test_a_part_is_ended_with_all_that_it_started():
    code = """
import json, subprocess, sys
print("noise")
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"pid": other.pid}), flush=True)
other.wait()
"""
    part = lines([sys.executable, "-c", code], 600.0)
    started = Path(f"/proc/{next(part)['pid']}/stat")
    assert started.exists()
    part.close()
    while started.exists() and started.read_text().split()[2] != "Z":
        time.sleep(0.01)  # the signal is on its way


def test_a_part_that_hangs_is_late():
    with pytest.raises(Late, match="stopped after 1 s"):
        list(lines([sys.executable, "-c", ASLEEP], 1.0))


def test_a_part_that_fails_says_why():
    code = "import sys; print('{\"row\": 1}'); sys.exit('jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: 9 GB\\nbye')"
    part = lines([sys.executable, "-c", code], 600.0)
    assert next(part) == {"row": 1}
    with pytest.raises(Stopped, match=r"ended with 1: jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: 9 GB$"):
        next(part)


def test_a_part_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = f"{FINE}; raise MemoryError('no room')"
    programs = {"machine": f"print({FOUND!r})", "peaks": broken, "kernels": FINE}
    monkeypatch.setattr(command, "process_of", lambda name, *_: [sys.executable, "-c", programs[name]])
    monkeypatch.setattr(sys, "argv", ["device", "--out", str(tmp_path), "--parts", "peaks", "kernels"])
    with pytest.raises(SystemExit, match="1 of 18 rows failed: peaks"):
        command.main()
    (file,) = tmp_path.glob("*.json")
    rows = [(row["part"], row["status"], row["message"]) for row in json.loads(file.read_text())["rows"]]
    error = "ended with 1: MemoryError: no room"
    assert rows == [*[("kernels", "ok", "")] * 16, ("peaks", "ok", ""), ("peaks", "failed", error)]


def test_checks_run_at_once_and_before_what_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each check of kernels waits until all have begun; what is timed finds them ended."""
    begun = f"import pathlib, sys, time; here = pathlib.Path({str(tmp_path)!r})"
    waits = f"{begun}; (here / sys.argv[1]).touch()\nwhile len(list(here.iterdir())) < 16: time.sleep(0.01)\n{FINE}"
    ended = f"{begun}; assert len(list(here.iterdir())) == 16\n{FINE}"
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(
        command,
        "process_of",
        lambda name, case, *_: [sys.executable, "-c", waits if name == "kernels" else ended, case],
    )
    monkeypatch.setattr(Report, "write", lambda *_: None)
    found = report()
    command.run(found, tmp_path, ["peaks", "kernels"], Setting(True, "cpu"), time.monotonic() + 60.0)
    assert [(part, row.status) for part, row in found.ordered] == [*[("kernels", "ok")] * 16, ("peaks", "ok")]


def test_a_part_is_late_by_its_own_deadline_and_skipped_by_that_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(PARTS, "resume", PARTS["resume"]._replace(seconds=0.6))
    monkeypatch.setattr(command, "LEAST", 0.2)
    monkeypatch.setattr(command, "process_of", lambda *_: [sys.executable, "-c", ASLEEP])
    found = report()
    command.run(found, tmp_path, ["lora", "resume", "grpo"], Setting(True, "cpu"), time.monotonic() + 2.0)
    assert [(row.name, row.status) for _, row in found.rows] == [
        ("resume", "late"),
        ("lora", "skipped"),
        ("grpo", "skipped"),
    ]
    assert found.rows[1][1].message.endswith("s, when the minutes were over")
    assert found.rows[2][1].message == "no time was left"
    assert len(json.loads((tmp_path / f"{found.name}.json").read_text())["rows"]) == 3


def test_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(command, "process_of", lambda *_: [sys.executable, "-c", "raise RuntimeError('no GPU')"])
    monkeypatch.setattr(sys, "argv", ["device", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="error: no device answers: ended with 1: RuntimeError: no GPU"):
        command.main()
    assert not (tmp_path / "out").exists()


def test_rows_of_checks():
    assert [check("a", x, 0.5).status for x in (0.5, 0.6, float("nan"))] == ["ok", "failed", "failed"]

    def broken() -> Row:
        raise MemoryError("no room\nfor it")

    assert attempt("b", broken) == Row("b", "failed", "MemoryError: no room")


def test_predictions_are_rooflines():
    found = report()
    assert (found.predicted(SFT), found.predicted(BOTH)) == (2.0, 6.0)
    assert found.mfu(SFT) == 0.25
    assert found.predicted(Row("a check")) is None


def test_a_device_without_published_peaks_is_measured():
    unknown = replace(CARD, kind="cpu", flops=None, bandwidth=None)
    assert report(machine=unknown).peaks is None
    assert report(("sft", SFT), machine=unknown).predicted(SFT) is None
    product = Row("product", seconds=2.0, flops=1e12, work=(Work(1e12, 0.0),))
    copied = Row("copy", seconds=0.5, work=(Work(0.0, 1e9),))
    found = report(("peaks", product), ("peaks", copied), machine=unknown)
    assert found.peaks == (0.5e12, 2e9)
    assert found.predicted(SFT) == 4.0


def test_the_files(tmp_path: Path):
    broken = Row("grpo", "failed", "ended with -9: a | b")
    found = report(("sft", SFT), ("grpo", broken), ("parity", check("llama", 0.5, 1.0, "to 1e-4")))
    found.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"nvidia-x1-80gb-2026-11-23.{end}" for end in ("json", "md")
    ]
    stored = json.loads((tmp_path / "nvidia-x1-80gb-2026-11-23.json").read_text())
    assert stored["rows"][1] | {"predicted_seconds": 2.0, "mfu": 0.25, "status": "ok"} == stored["rows"][1]
    assert [row["message"] for row in stored["rows"]] == ["to 1e-4", "", "ended with -9: a | b"]
    page = (tmp_path / "nvidia-x1-80gb-2026-11-23.md").read_text()
    assert "| SFT | 4.00 s | 2.00 s | 2,048 | 0.25 | 25.0% | 3 | 3 turns |" in page
    assert "| grpo | failed |  |  |  |  |  | ended with -9: a \\| b |" in page
    assert "| parity: llama | ok | 0.5 | 1 | to 1e-4 |" in page


def test_a_profile_counts_kernels():
    """3 ms of kernels in 4 ms, on two streams; what the host does is not among them."""

    def event(name: str, start: float, duration: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, start_ns=start * 1e6, duration_ns=duration * 1e6)

    streams = [
        ("Stream #1", [event("gemm", 1, 1), event("copy", 3, 0.5), event("gemm", 4, 1)]),
        ("Stream #2", [event("copy", 3, 0.5)]),
        ("Framework", [event("host", 0, 9)]),
    ]
    found = summary(streams)
    assert found is not None
    assert (found.launches, found.busy) == (4, pytest.approx(0.75))
    assert [(name, pytest.approx(ms * 1e-3), n) for name, ms, n in (("gemm", 2, 2), ("copy", 1, 2))] == list(
        found.kernels
    )
    assert summary([("Framework", [event("host", 0, 9)])]) is None
    profiled = replace(SFT, profile=found)
    assert Row.of(json.loads(json.dumps(asdict(profiled)))) == profiled
    assert "4 launches a turn, busy 75% of the time." in report(("sft", profiled)).page()
    assert "| gemm | 2.000 | 2 |" in report(("sft", profiled)).page()


def test_a_packed_row_has_texts_of_their_own():
    whole, packed = (
        replace(SHAPES["small"], rows=1, length=64, dtype="float32", documents=number).batch() for number in (1, 8)
    )
    assert whole.tokens.tolist() == packed.tokens.tolist()
    assert packed.segment_ids.tolist() == [np.repeat(np.arange(1, 9), 8).tolist()]
    assert packed.positions.tolist() == [[*range(8)] * 8]


@pytest.mark.parametrize("case", PARTS["torch"].cases)
def test_without_a_card_torch_is_left_out(case: str):
    (row,) = torch_loop.rows(case, Setting(True, "cpu"))
    assert (row.status, row.seconds) == ("skipped", None)


def test_the_cases_are_all_that_there_are():
    names = {implementation.name for implementation in IMPLEMENTATIONS} - {"einsum"}
    assert set(PARTS["kernels"].cases) == {f"{name}, {kind}" for name in names for kind in KINDS}
    (case,) = PARTS["attention"].cases
    assert {*case.split(", ")} == {*names, "cudnn"}
    assert set(PARTS["mismatch"].cases) == FAMILIES.keys()
    assert {case for part in PARTS.values() if part.function == "step" for case in part.cases} == STEPS.keys()


def test_every_part_is_on_the_page():
    page = (ROOT / "docs/devices/README.md").read_text()
    assert set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))) == PARTS.keys()


def test_what_travels_is_what_tunix_asks_for():
    asked = re.findall(r'^    "([\w-]+>=[\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    ours, _, theirs = (ROOT / "benchmarks/device/requirements.txt").read_text().partition("# What tokamax imports.")
    assert {line for line in ours.splitlines() if not line.startswith("#")} < set(asked)
    assert "absl-py" in theirs


@pytest.mark.slow
def test_the_wheels_are_all_that_it_takes(tmp_path: Path):
    """In an empty environment of Python 3.12 and JAX, which cannot reach an index."""
    python = shutil.which("python3.12")
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip("there is no Python 3.12")
    subprocess.run(["make", "device-wheels", f"WHEELS={tmp_path}/wheels"], cwd=ROOT, check=True)
    subprocess.run([python, "-m", "venv", tmp_path / "empty"], check=True)
    pip = [tmp_path / "empty/bin/python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "jax==0.11.2"], check=True)
    wheels = sorted((tmp_path / "wheels").glob("*.whl"))
    subprocess.run([*pip, "--no-index", "--no-deps", *wheels], check=True)
    words = ["-m", "benchmarks.device", "--small", "--minutes", "20", "--out", str(tmp_path / "out")]
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    parts = ["--parts", "kernels", "resume", "sft", "grpo", "torch"]
    subprocess.run([tmp_path / "empty/bin/python", *words, *parts], cwd=ROOT, env=env, check=True)
    (file,) = (tmp_path / "out").glob("cpu-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["part"] for row in rows if row["status"] == "ok"} == {"kernels", "resume", "sft", "grpo"}
    stands_in = (
        "import sys; from types import ModuleType; from benchmarks.device.parts import XPROF; "
        "sys.modules.update((name, ModuleType(name)) for name in XPROF); import tokamax"
    )
    subprocess.run([tmp_path / "empty/bin/python", "-c", stands_in], cwd=ROOT, check=True)


@pytest.mark.slow
def test_the_command_on_this_cpu(tmp_path: Path):
    """Everything that fits four minutes, without what does not travel."""
    absent = (
        "import sys; sys.modules.update(dict.fromkeys(['transformers', 'tokenizers', 'datasets', 'torch', 'wandb']))"
    )
    (tmp_path / "sitecustomize.py").write_text(absent)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = [sys.executable, "-m", "benchmarks.device", "--minutes", "4", "--out", str(tmp_path / "out")]
    env = {**os.environ, "XLA_FLAGS": QUICKLY, "PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    (file,) = (tmp_path / "out").glob("cpu-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert list(dict.fromkeys(row["part"] for row in rows)) == list(PARTS)
    assert {row["status"] for row in rows} <= {"ok", "late", "skipped"}, done.stdout
    by_part = {row["part"]: row for row in rows if row["status"] == "ok"}
    assert by_part.keys() >= {"peaks", "kernels", "sft"}, done.stdout
    for row in rows:
        if row["seconds"] is not None and row["part"] != "peaks":
            assert row["predicted_seconds"] > 0
            assert 0 < row["mfu"] < 1
    table = file.with_suffix(".md").read_text().splitlines()
    assert len([line for line in table if line.startswith("| ")]) == 2 + len(rows)
    assert (done.returncode != 0) == any(row["status"] == "late" for row in rows), done.stderr


@pytest.mark.slow
def test_a_kernel_that_forgets_the_window_is_found(monkeypatch: pytest.MonkeyPatch):
    from benchmarks.device.checks import kernel
    from tunix.models.attention import attend, chunked

    def forgetful(q, k, v, view, **settings):
        return chunked.forward(q, k, v, view._replace(window=None), **settings)

    right = attend.BY_NAME["chunked"]
    wrong = right._replace(forward=forgetful)
    assert [kernel(right, kind, "float32", 128).status for kind in ("packed", "windowed")] == ["ok", "ok"]
    monkeypatch.setitem(attend.BY_NAME, "chunked", wrong)
    assert [kernel(wrong, kind, "float32", 128).status for kind in ("packed", "windowed")] == ["ok", "failed"]


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed():
    from benchmarks.device import resume

    (row,) = resume.rows("killed", Setting(small=True, platform="cpu"))
    assert (row.status, row.difference) == ("ok", 0), row.message
    assert resume.differing({"a": b"1", "b": b"2"}, {"a": b"1", "b": b"3", "c": b""}) == ["b", "c"]
