"""Programs under test: what passes, what fails, and what a program cannot do to the machine that judges it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scorings import scores_with
from tunix.rollout.rewards import jail
from tunix.rollout.rewards.code import read_tests, run_tests, unit_tests
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.rewards.scorer import Scorer

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's locks are Linux's")


def works(program: str, seconds: float = 5.0, memory_mb: int = 512) -> bool:
    """Whether a program runs to its end in the jail."""
    return run_tests(program, ["assert done"], seconds, memory_mb) == 1


def can(program: str, **limits: float) -> bool:
    """Whether a program does what it tries; that it starts at all is seen beside it."""
    wrapped = "done = False\ntry:\n" + "".join(f"    {line}\n" for line in program.splitlines())
    return works(wrapped + "    done = True\nexcept Exception: pass", **limits)  # pyright: ignore[reportArgumentType]


ADD = "def add(a, b):\n    return a + b\n"


def test_the_last_fenced_block_is_the_program():
    text = f"First\n```python\nx = 1\n```\nthen\n```py\n{ADD}```\nDone."
    for completion in (text, f"```\n{ADD}", ADD):  # the second is cut off before the closing fence
        assert unit_tests(completion, "assert add(1, 2) == 3\nassert 'x' not in globals()") == 1


def test_tests_are_texts_lists_or_json():
    assert read_tests("assert 1") == ["assert 1"]
    assert read_tests(["assert 1", "assert 2"]) == ["assert 1", "assert 2"]
    assert read_tests('["assert 1", "assert 2"]') == ["assert 1", "assert 2"]
    with pytest.raises(ValueError, match="there are no tests"):
        read_tests(" ")
    for nothing in (None, "null"):
        with pytest.raises(ValueError, match="the tests are null: give the row some"):
            read_tests(nothing)
    # As Python each would be an expression, which every program passes.
    for other in ('{"inputs": [1], "outputs": [2]}', {"inputs": [1]}, '"assert 1"', "5", [None], [["assert 1"]]):
        with pytest.raises(ValueError, match=r"the tests are .*, not Python source, or a list of such"):
            read_tests(other)


@pytest.mark.parametrize(
    ("tests", "partial", "score"),
    [
        ("assert add(1, 2) == 3", False, 1.0),
        ("assert add(1, 2) == 4", False, 0.0),
        (["assert add(1, 2) == 3", "assert add(1, 2) == 4", "undefined"], False, 0.0),
        (["assert add(1, 2) == 3", "assert add(1, 2) == 4", "add('a', 'b')", "undefined"], True, 0.5),
        ("def test_sum():\n    assert add(1, 2) == 4", False, 0.0),
        ("def test_sum():\n    assert add(1, 2) == 3", False, 1.0),
    ],
)
def test_scores(tests: object, partial: bool, score: float):
    assert unit_tests(ADD, tests, partial=partial) == score


def test_humaneval_and_unittest():
    check = "def check(candidate):\n    assert candidate(1, 2) == {}"
    assert unit_tests(ADD, check.format(3), "add") == 1.0
    assert unit_tests(ADD, check.format(4), "add") == 0.0
    case = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), {})"
    assert unit_tests(ADD, case.format(3)) == 1.0
    assert unit_tests(ADD, case.format(4)) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "print('ran')",
        "import sys; sys.stdout.write('ran\\n' * 9)",
        "import os\nfor d in range(64):\n    try: os.write(d, b'ran\\nran\\n')\n    except OSError: pass\n",
        "def add(a, b):\n    import os; os._exit(0)",
        "syntax error(",
        "while True: pass",
        "",
    ],
)
def test_a_program_that_does_not_solve_it_earns_nothing(program: str):
    assert run_tests(program, ["assert add(1, 2) == 3"], 1.0, 512) == 0


def test_tests_that_passed_before_the_time_was_over_count():
    assert run_tests(ADD, ["add(1, 2)", "while True: pass", "add(1, 2)"], 1.0, 512) == 1


def test_what_a_program_may_do():
    assert can("import math, collections, threading, tempfile, decimal, random\nassert random.random() < 1")
    assert can("open('notes', 'w').write('x')\nassert open('notes').read() == 'x'")
    assert can("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()")
    assert can("import asyncio\nasyncio.run(asyncio.sleep(0))")


@needs_linux
def test_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not can(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
        assert not can("import socket\nsocket.socket(socket.AF_UNIX)")
        server.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            server.accept()


@needs_linux
def test_no_processes():
    """A fork bomb has no first child, and no other program starts, whichever way it is asked for."""
    assert not can("import os\nos.fork()")
    assert not can("import os\nos.posix_spawn('/bin/true', ['true'], {})")
    assert not can("import os\nos.execv('/bin/true', ['true'])")
    assert not can("import subprocess\nsubprocess.run(['true'])")
    assert not can("import os\nassert os.system('true') == 0")
    assert not can("import ctypes\nassert ctypes.CDLL(None).fork() >= 0")


@needs_linux
def test_no_signals_to_others():
    assert not can(f"import os\nos.kill({os.getpid()}, 0)")


@needs_linux
def test_files_stay_as_they_are(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    os.chmod(secret, 0o666)
    assert not can(f"open({str(secret)!r}).read()")
    assert not can(f"open({str(secret)!r}, 'w')")
    assert not can(f"import os\nos.remove({str(secret)!r})")
    assert not can(f"import os\nos.chmod({str(secret)!r}, 0)")
    assert not can(f"import os\nos.symlink({str(secret)!r}, 'link')\nopen('link').read()")
    assert not can(f"open({str(tmp_path / 'new')!r}, 'w')")
    assert not can("open('/etc/passwd').read()")
    assert not can("open('/proc/self/mem').read()")
    assert secret.read_text() == "mine"
    assert oct(secret.stat().st_mode)[-3:] == "666"


def test_memory_and_file_size_end():
    assert can("bytearray(100 << 20)", memory_mb=512)
    assert not works("done = len(bytearray(800 << 20)) > 0", memory_mb=512)
    assert not works("done = open('big', 'wb').write(bytes(64 << 20)) > 0")


@needs_linux
def test_limits_cannot_be_raised():
    assert can("import resource\nresource.getrlimit(resource.RLIMIT_AS)")
    assert not can("import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))")
    assert not can("import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))")


def test_nothing_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert can("import os\nassert 'HF_TOKEN' not in os.environ")


def test_the_temporary_folder_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert can("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')")
    assert list(tmp_path.iterdir()) == []


def test_the_filter_for_both_architectures():
    """Instructions are eight bytes; jumps stay inside; a call is refused by the number of its own architecture."""
    import struct

    for machine, socket_number in (("x86_64", 41), ("aarch64", 198)):
        code = jail.filter_code(*jail.ARCHITECTURES[machine])
        instructions = list(struct.iter_unpack("=HBBI", code))
        assert all(i + 1 + max(j, k) < len(instructions) for i, (op, j, k, _) in enumerate(instructions) if op & 7 == 5)
        assert instructions[-1] == (0x06, 0, 0, 0x7FFF0000)
        at = instructions.index((0x15, 0, 1, socket_number))
        assert instructions[at + 1] == (0x06, 0, 0, 0x50001)


HOOKED = """
import sys
sys.path.insert(0, {folder!r})
import jail
sys.addaudithook(jail.hook({inside!r}))
{program}
"""


@pytest.mark.parametrize(
    ("program", "allowed"),
    [
        ("import socket; socket.socket()", False),
        ("import os; os.fork()", False),
        ("import os; os.system('true')", False),
        ("open('../outside', 'w')", False),
        ("import os; os.remove('../kept')", False),
        ("import os; open('a', 'w').close(); os.rename('a', '../b')", False),
        ("open('a', 'w').close(); import os; os.rename('a', 'b'); os.remove('b')", True),
        ("open('../kept').read()", True),
    ],
)
def test_the_hook_where_the_kernel_has_no_locks(tmp_path: Path, program: str, allowed: bool):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "kept").touch()
    script = HOOKED.format(folder=str(Path(jail.__file__).parent), inside=str(inside), program=program)
    result = subprocess.run([sys.executable, "-c", script], cwd=inside, capture_output=True, text=True)
    assert (result.returncode == 0) == allowed, result.stderr
    assert allowed or "PermissionError" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside", "kept"]


def test_as_a_reward_in_a_worker():
    """A program that never ends has failed its tests, by its own time limit, long before the call's deadline."""
    reward = RewardFunction(name="unit_tests", options={"timeout": 1.0, "tests": "assert add(1, 2) == 3"})
    with Scorer([reward], workers=1) as scorer:
        scores = scores_with(scorer, ["p"] * 2, [ADD, "while True: pass"])
    assert scores == {"unit_tests": [1.0, 0.0]}
