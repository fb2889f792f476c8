"""What a run shows: on terminals of 80 and 120 columns, in a pipe, in a notebook, and in its log."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import warnings
from collections.abc import Sequence
from logging import getLogger
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from rich.cells import cell_len

from notebooks.execute import execute
from tunix.trainer.progress import Display, duration, live_line, sparkline

ROOT = Path(__file__).parents[2]
NUMBERS = ["reward 0.5742", "loss -0.0069", "2.96k tokens/s"]
RISING = [0.1 * i for i in range(30)]
STEPS = 12


@pytest.mark.parametrize("width", range(20, 161))
@pytest.mark.parametrize("title", ["1_grpo", "sft_llama_70b_of_the_third_week", "名前名前名前"])
def test_step_total_and_time_are_never_cut(width: int, title: str):
    line = live_line(width, title, ["36/90", "0:02:10 left"], NUMBERS, RISING, 0.4)
    assert "36/90  0:02:10 left" in line
    assert cell_len(line) <= width


def test_a_line_of_80_columns():
    line = live_line(80, "1_grpo", ["36/90", "0:02:10 left"], NUMBERS, RISING, 0.4)
    # 27 + 15 + 14 + 16 = 72 columns, and two before the curve.
    assert line == f"1_grpo  36/90  0:02:10 left  reward 0.5742  loss -0.0069  2.96k tokens/s  {sparkline(RISING, 6)}"
    assert cell_len(line) == 80


def test_a_line_of_120_columns():
    line = live_line(120, "1_grpo", ["36/90", "0:02:10 left"], NUMBERS, RISING, 0.5)
    # 72 columns, 2 + 15 of the curve (30 values in pairs), and two before the bar.
    bar = "━" * 14 + "─" * 15
    curve = sparkline(RISING, 16)
    assert len(curve) == 15
    assert line == (f"1_grpo  {bar}  36/90  0:02:10 left  reward 0.5742  loss -0.0069  2.96k tokens/s  {curve}")


def test_what_is_left_out_first():
    """The curve goes before the speed, the speed before the loss, the loss before the reward, all before the title."""
    shown = [
        [
            word in live_line(width, "grpo", ["1/9", "0:00:09 left"], NUMBERS, RISING, None)
            for word in ("grpo", "reward", "loss", "tokens/s", "█")
        ]
        for width in range(18, 100)
    ]
    assert all(row == sorted(row, reverse=True) for row in shown)
    assert shown[0] == [False] * 5
    assert shown[-1] == [True] * 5


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-:--:--"), (0.4, "0:00:00"), (59.6, "0:01:00"), (86_399.0, "23:59:59"), (90_061.0, "25:01:01")],
)
def test_durations(seconds: float | None, words: str):
    assert duration(seconds) == words


PROGRAM = f"""
import time
from tunix.trainer import progress
progress.LINES_EVERY = 0.0
display = progress.Display("1_grpo", {STEPS}, 0)
display.say("grpo: 20,000 rows")
display.detail("attention: einsum")
for step in range(1, {STEPS} + 1):
    values = {{"reward/mean": step / {STEPS}, "train/loss": -0.0069, "perf/tokens_per_second": 2960.0}}
    display.update(step, values)
    time.sleep(0.12 if display._live is not None else 0.0)
display.stop()
display.say("done")
display.close()
"""


def on_terminal(width: int) -> str:
    """All that the program writes to a terminal of this width."""
    lead, follow = pty.openpty()
    fcntl.ioctl(follow, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=follow, stdout=follow, stderr=follow, env=environment
    )
    os.close(follow)
    written = b""
    try:
        while part := os.read(lead, 65536):
            written += part
    except OSError:  # the terminal has ended with its program
        pass
    os.close(lead)
    assert process.wait() == 0, written
    return written.decode()


CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_a_live_line_that_fits(width: int):
    written = on_terminal(width)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", written))]
    live = [line for line in lines if line.endswith(" left") or " left  " in line]
    assert live
    assert all(re.search(rf"\b\d+/{STEPS}  [\d-]+:[\d-]+:[\d-]+ left", line) for line in live)
    assert max(map(cell_len, lines)) <= width
    if width == 120:
        assert any("━" in line for line in live)
    assert any("▁" in line for line in live)
    assert any(re.search(r"\d+:\d\d:\d\d left", line) for line in live)
    # What stays: the lines that were said, the last state without a time, and the cursor.
    curve = sparkline([i / 12 for i in range(1, 13)])
    assert [line for line in lines if line][-2:] == [
        f"1_grpo  {STEPS}/{STEPS}  reward 1.0000  loss -0.0069  2.96k tokens/s  {curve}",
        "done",
    ]
    assert "attention" not in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_a_pipe_gets_plain_lines():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True)
    assert not done.stdout
    lines = done.stderr.decode().splitlines()
    assert lines[0] == "grpo: 20,000 rows"
    assert lines[1] == f"step 1/{STEPS}  reward 0.0833  loss -0.0069  2.96k tokens/s"
    assert lines[-2].startswith(f"step {STEPS}/{STEPS}  ▁")
    assert lines[-1] == "done"
    assert len(lines) == STEPS + 2
    assert "\x1b" not in done.stderr.decode()


def test_a_notebook_shows_one_output_that_lives_and_plain_lines(tmp_path: Path):
    (tmp_path / "curves.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'></svg>")
    shown = PROGRAM.replace("display.close()", "display.picture(Path('curves.svg'))\ndisplay.close()")
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n{shown}"
    notebook = new_notebook(cells=[new_code_cell(code)])
    execute(notebook, tmp_path, timeout=120)
    outputs: Sequence[nbformat.NotebookNode] = notebook.cells[0].outputs
    assert {output.get("name") for output in outputs if output.output_type == "stream"} == {"stdout"}
    assert "".join(output.text for output in outputs if output.output_type == "stream") == "grpo: 20,000 rows\ndone\n"
    live, picture = (output for output in outputs if output.output_type == "display_data")
    assert live.metadata == {"tunix": "live"}
    assert live.data["text/plain"].startswith(f"1_grpo  {STEPS}/{STEPS}  reward 1.0000")
    assert picture.data["image/svg+xml"].startswith("<svg")


def test_the_log_has_everything_and_the_screen_has_no_details(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    display = Display("run", 3, 0, log=tmp_path / "log.txt")
    display.say("two\nlines")
    display.detail("attention: einsum")
    Display("run", 3, 0, log=tmp_path / "log.txt", verbose=True).detail("remat: block")
    assert capsys.readouterr().err == "two\nlines\nremat: block\n"
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[21:] for line in logged] == ["two", "lines", "attention: einsum", "remat: block"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  .*", line) for line in logged)


def test_what_libraries_say_goes_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    display, log = Display("run", 3, 0, log=tmp_path / "log.txt"), tmp_path / "log.txt"
    mine, theirs = str(tmp_path / "reward.py"), str(Path(pytest.__file__))
    with warnings.catch_warnings(record=True) as recorded, display.collecting_warnings():
        warnings.simplefilter("always")
        getLogger("absl").warning("a library's worry")
        getLogger("tunix.rollout").warning("a server is gone")
        warnings.warn_explicit("theirs", UserWarning, theirs, 1)
        warnings.warn_explicit("mine", UserWarning, mine, 1)
    shown = capsys.readouterr().err
    assert "a library's worry" not in shown
    assert "theirs" not in shown
    assert "a server is gone\n" in shown
    assert [str(warning.message) for warning in recorded] == ["mine"]
    assert [line[21:] for line in log.read_text().splitlines()] == [
        "absl: a library's worry",
        "a server is gone",
        f"UserWarning: theirs ({theirs}:1)",
    ]


def test_the_time_left_follows_the_mean_step(monkeypatch: pytest.MonkeyPatch):
    """Also of steps that take minutes, of which no window of seconds holds two."""
    clock = [0.0]
    monkeypatch.setattr("tunix.trainer.progress.time.monotonic", lambda: clock[0])
    display = Display("run", 10, 4)
    assert "4/10  -:--:-- left" in display._state(80)
    for step, now in ((5, 500.0), (6, 560.0), (7, 640.0)):
        clock[0] = now
        display.update(step, {})
    # 140 seconds for two steps after the first, which compiled.
    assert "7/10  0:03:30 left" in display._state(80)
    clock[0] += 30.0
    assert "7/10  0:03:00 left" in display._state(80)
