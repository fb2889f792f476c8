"""Long runs of small steps hold what short ones hold: memory, file handles, threads, programs and checkpoints.

python -m tests.run.test_long_run sft 20000        prints what was measured, the time of a step included
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from tests.tiny_rl import write_policy
from tests.tiny_runs import metrics, write_recipe

RARELY = {"checkpoint.every": 500, "checkpoint.keep": 2}


class Seen(NamedTuple):
    """A running process, as /proc shows it."""

    step: int
    kilobytes: int
    handles: int
    threads: int


def watched(words: list[str], folder: Path) -> list[Seen]:
    """Runs a command to its end, and looks at it four times a second."""
    measured: list[Seen] = []
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(words, cwd=folder, stdout=said, stderr=said, env={**os.environ, "XLA_FLAGS": ""})
    place, log = Path("/proc") / str(process.pid), folder / "run/metrics.jsonl"
    while process.poll() is None:
        time.sleep(0.25)
        step = last_step(log)
        try:
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            handles = len(list((place / "fd").iterdir()))
        except FileNotFoundError:  # it has just ended
            continue
        if step and "VmRSS" in status:
            measured.append(Seen(step, int(status["VmRSS"].split()[0]), handles, int(status["Threads"])))
    assert process.returncode == 0, (folder / "said.txt").read_text()[-2000:]
    return measured


def last_step(log: Path) -> int:
    """The step of the last whole line of metrics.jsonl; 0 before there is one."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 10_000))
        *whole, _ = file.read().split(b"\n")
    return json.loads(whole[-1])["step"] if len(whole) > 1 else 0


def parts(measured: list[Seen], steps: int) -> tuple[list[Seen], list[Seen]]:
    """What was seen in the fifth of the steps after warm-up, and in the last fifth."""
    early = [x for x in measured if 0.2 * steps <= x.step < 0.4 * steps]
    late = [x for x in measured if 0.8 * steps <= x.step < steps]
    return early, late


def write(kind: str, folder: Path, steps: int) -> Path:
    """The recipe of a long run in `folder`."""
    changes: dict[str, Any] = {**RARELY, "steps": steps}
    if kind == "grpo":
        return write_policy(folder, **changes)
    return write_recipe(folder / "r.yaml", {**changes, "epochs": None})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("kind", "steps"), [("sft", 20_000), ("grpo", 5_000)])
def test_a_long_run_holds_what_it_held_after_its_warm_up(kind: str, steps: int, tmp_path: Path):
    words = [sys.executable, "-m", "tunix.cli", "run", str(write(kind, tmp_path, steps))]
    early, late = parts(watched(words, tmp_path), steps)
    assert len(early) > 3
    assert len(late) > 3
    assert median(x.kilobytes for x in late) <= 1.01 * median(x.kilobytes for x in early)
    # A checkpoint is written beside the steps: between two of them no handle and no thread is left.
    assert min(x.handles for x in late) <= min(x.handles for x in early)
    assert min(x.threads for x in late) <= min(x.threads for x in early)
    rows = metrics(tmp_path / "run")
    assert {row["compile/count"] for row in rows if "compile/count" in row} == {0.0}
    kept = [sum(x.stat().st_size for x in place.rglob("*")) for place in (tmp_path / "run/checkpoints").iterdir()]
    assert len(kept) == 2
    assert max(kept) <= 1.01 * min(kept)


def main(kind: str, steps: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tunix.cli", "run", str(write(kind, Path(folder), steps))]
        measured = watched(words, Path(folder))
        rows = metrics(Path(folder) / "run")
        for name, seen in zip(("after warm-up", "at the end"), parts(measured, steps), strict=True):
            steps_of = {x.step for x in seen}
            times = [row["perf/step_seconds"] for row in rows if min(steps_of) <= row["step"] <= max(steps_of)]
            size, handles, threads = (list(x) for x in zip(*(x[1:] for x in seen), strict=True))
            held = f"{median(size) / 1024:.1f} MiB, {min(handles)} handles, {min(threads)} threads"
            print(f"{name}: {held}, {1e3 * median(times):.2f} ms a step")
        compiled = max(row.get("compile/count", 0) for row in rows)
        sizes = {x.name: x.stat().st_size for x in (Path(folder) / "run").iterdir() if x.is_file()}
        print(f"compiled after warm-up: {compiled:.0f}; bytes of files: {sizes}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
