"""Scores programs by unit tests, in a process that can do nothing else (`jail.py` has its restrictions).

The program runs first; the tests are sent only when it is done, with a random word, which the process returns once for
each test that passed. A program that exits, prints or waits gains nothing by it.
"""

import contextlib
import json
import os
import re
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunix.rollout.workers.process import kill_group

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_JAIL = Path(__file__).with_name("jail.py")
_MOST = 1 << 20
"""Bytes that are read of a program's answer at most: one word a test."""


def unit_tests(
    completion: str,
    tests: Any,
    entry_point: str | None = None,
    *,
    timeout: float = 6.0,
    memory_mb: int = 1024,
    partial: bool = False,
) -> float:
    """1 where the completion's Python program passes all of its tests, else 0.

    The program has no network, starts no process, writes only to a temporary folder, and is killed when its time is
    over: a program that is too slow or too large has failed its tests, and scores 0. The tests run inside the program's
    process, so a program that is written to forge their result, with knowledge of this file, can.

    Args:
        completion: Python, or text whose last fenced block is taken.
        tests: Python source with assertions, or a list of such (or JSON of a list). Functions in it that are called
            `test...` are called without arguments, classes of unittest are run.
        entry_point: name of the function to call the tests' `check(candidate)` with, as in HumanEval (Chen et al. 2021,
            arXiv 2107.03374).
        timeout: seconds for the program and all its tests.
        memory_mb: megabytes of address space.
        partial: score the share of the tests that pass instead of all or nothing.

    Raises:
        ValueError: there are no tests.
    """
    sources = read_tests(tests)
    if entry_point:
        sources = [f"{source}\ncheck({entry_point})\n" for source in sources]
    program = [completion, *_FENCE.findall(completion)][-1]
    passed = run_tests(program, sources, timeout, memory_mb)
    return passed / len(sources) if partial else float(passed == len(sources))


def read_tests(tests: Any) -> list[str]:
    """The sources of the tests: a text is one test, unless it is a JSON list of tests.

    Raises:
        ValueError: there are none, or they are something else, such as a mapping of inputs and outputs: as Python it
            would be an expression that any program passes.
    """
    listed = tests
    if isinstance(tests, str):
        try:
            listed = json.loads(tests)
        except ValueError:
            listed = [tests]
    if tests is None or listed is None:
        raise ValueError("the tests are null: give the row some, or leave the row out")
    if not isinstance(listed, list | tuple) or not all(isinstance(source, str) for source in listed):
        raise ValueError(f"the tests are {listed!r:.80}, not Python source, or a list of such")
    if not any(source.strip() for source in listed):
        raise ValueError("there are no tests")
    return list(listed)


def run_tests(program: str, tests: Sequence[str], timeout: float, memory_mb: int) -> int:
    """The number of tests that pass after the program ran, within `timeout` seconds."""
    limit = time.monotonic() + timeout
    word = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="tunix_tests_")
    limits = {"memory": memory_mb << 20, "seconds": timeout, "folder": folder}
    process = subprocess.Popen(
        [sys.executable, "-I", str(_JAIL), json.dumps(limits)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    written = b""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            for message, end in ((program, b"ran\n"), ({"word": word, "tests": list(tests)}, None)):
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
                written = b""
                while len(written) < _MOST and selector.select(max(0.0, limit - time.monotonic())):
                    piece = os.read(process.stdout.fileno(), 1 << 16)
                    written += piece
                    if not piece or (end and written.endswith(end)):
                        break
                if end and not written.endswith(end):
                    return 0
        return min(written.split(b"\n").count(word.encode()), len(tests))
    except BrokenPipeError:  # it has ended before it was asked
        return 0
    finally:
        kill_group(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what it did not read is lost with it
                pipe.close()
        shutil.rmtree(folder, ignore_errors=True)
