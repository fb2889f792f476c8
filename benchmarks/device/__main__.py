"""`python -m benchmarks.device`: is tunix right on this device, and how fast?

Needs a checkout, JAX, and the packages of requirements.txt (`make device-wheels` packs them). The checks run first, as
many at once as there are cores; then what is timed, one after the other in the order of its worth. Each case of a part
is a process with a deadline; one that fails is a row with its message, and the others go on; one for which no time is
left is skipped, and named. The files are written anew after each.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from benchmarks.device.parts import PARTS
from benchmarks.device.report import Report
from benchmarks.device.rows import Machine, Row, Setting

ROOT = Path(__file__).parents[2]
START = 120.0
"""Seconds within which a device has to answer."""
MINUTES = 8.0
"""The time for which the parts' deadlines are set; with more, each has more."""
LEAST = 15.0
"""Seconds that have to be left for a part to be begun."""


_running: set[subprocess.Popen[str]] = set()
_writing = threading.Lock()


class Stopped(Exception):
    """A part's process did not end well; the message says how."""


class Late(Stopped):
    """It was stopped at its deadline."""


def process_of(*arguments: str) -> list[str]:
    """The command of a part's process."""
    return [sys.executable, "-m", "benchmarks.device.parts", *arguments]


def lines(command: list[str], seconds: float) -> Generator[dict[str, Any], None, None]:
    """What a process writes, one JSON object a line.

    Raises:
        Late: it took longer than `seconds`, and was stopped with all that it had started.
        Stopped: it failed; with its last words.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        assert process.stdout is not None
        _running.add(process)
        written: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, written), daemon=True)
        reader.start()
        try:
            while (line := written.get(timeout=max(end - time.monotonic(), 0.0))) is not None:
                if line.startswith("{") and line.endswith("}\n"):
                    yield json.loads(line)
            process.wait(timeout=max(end - time.monotonic(), 1.0))
        except (queue.Empty, subprocess.TimeoutExpired):
            raise Late(f"stopped after {seconds:.0f} s") from None
        finally:
            _end(process)
            _running.discard(process)
        if process.returncode:
            raise Stopped(_last_words(process.returncode, log))


def _read(source: TextIO, written: "queue.Queue[str | None]") -> None:
    for line in source:
        written.put(line)
    written.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    """Kills a process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _last_words(code: int, log: TextIO) -> str:
    log.seek(0)
    said = [line.strip() for line in log.read().splitlines() if line.strip()]
    errors = [line for line in said if "Error" in line or "RESOURCE_EXHAUSTED" in line]
    return f"ended with {code}: {(errors or said or ['without a word'])[-1][:300]}"


def run(report: Report, folder: Path, names: list[str], setting: Setting, end: float) -> None:
    """Runs the parts, and writes the files after each case.

    Args:
        report: gets the rows.
        folder: of the two files.
        names: of the parts.
        setting: how they run.
        end: when the minutes are over, by `time.monotonic`.
    """
    cases = [(name, case) for name in names for case in PARTS[name].cases]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        checks = [pool.submit(_case, report, folder, *x, setting, end) for x in cases if not PARTS[x[0]].measures]
        try:
            for check in checks:
                check.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _end(process)
            raise
    for name, case in cases:
        if PARTS[name].measures:
            _case(report, folder, name, case, setting, end)


def _case(report: Report, folder: Path, name: str, case: str, setting: Setting, end: float) -> None:
    """Appends the rows of a case, and one that says why it was stopped, if it was; then writes the files."""
    start, part = time.monotonic(), PARTS[name]
    most = part.seconds * max(1.0, report.minutes / MINUTES)
    called = name if len(part.cases) == 1 else f"{name} {case}"
    if end - start < LEAST:
        _found(report, name, Row(called, "skipped", "no time was left"))
    else:
        seconds = min(most, end - start)
        say(f"{called}: at most {seconds:.0f} s")
        command = process_of(name, case, "--platform", setting.platform, *(["--small"] if setting.small else []))
        try:
            for line in lines(command, seconds):
                _found(report, name, Row.of(line["row"]))
        except Late as error:
            over = seconds < most
            said = f"{error}, when the minutes were over" if over else str(error)
            _found(report, name, Row(called, "skipped" if over else "late", said))
        except Stopped as error:
            _found(report, name, Row(called, "failed", str(error)))
    with _writing:
        report.took[called] = round(time.monotonic() - start, 1)
        report.write(folder)


def _found(report: Report, part: str, row: Row) -> None:
    """Appends a row and shows it."""
    with _writing:
        report.rows.append((part, row))
    numbers = f"{row.seconds * 1e3:.4g} ms" if row.seconds is not None else ""
    if row.difference is not None:
        numbers = f"{row.difference:.2g} of {row.limit:.2g}"
    say(f"  {row.status:7} {row.name}: {'; '.join(filter(None, [numbers, row.message]))}")


_BEGUN = time.monotonic()


def say(text: str) -> None:
    """A line of progress, after the seconds since the start."""
    print(f"{time.monotonic() - _BEGUN:5.0f} s  {text}", flush=True)


def main() -> None:
    """Runs everything; exits with 1 where a check or a part failed, or no device answered."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for everything")
    parser.add_argument("--small", action="store_true", help="small shapes, which a CPU gets anyway")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="which of them; those that are timed in this order",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/devices", help="folder of the two files")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception, so that a part's process ends too
    end = time.monotonic() + 60 * arguments.minutes
    try:
        (found,) = [line["machine"] for line in lines(process_of("machine"), min(START, 60 * arguments.minutes))]
    except Stopped as error:
        raise SystemExit(f"error: no device answers: {error}") from None
    machine = Machine(**found)
    setting = Setting(arguments.small or machine.platform == "cpu", machine.platform)
    say(f"{machine.number} x {machine.kind}, jax {machine.versions['jax']}")
    report = Report(machine, setting.small, arguments.minutes)
    run(report, arguments.out, arguments.parts, setting, end)
    say(f"{arguments.out / report.name}.json and .md")
    failed = [row.name for _, row in report.rows if row.status in ("failed", "late")]
    raise SystemExit(f"{len(failed)} of {len(report.rows)} rows failed: {', '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
