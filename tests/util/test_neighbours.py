"""What a user's file imports: its neighbours and the current folder's modules, now and later; others see neither."""

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.scorings import scores_with
from tunix.errors import UserError
from tunix.rollout.rewards.base import Failure
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.rewards.scorer import Scorer
from tunix.util.plugins import load_object

ROOT = Path(__file__).parents[2]
SHADOWS = ("json", "types", "socket", "datasets", "numpy")
"""Neighbours with the names of modules that tunix and its workers import; each raises where it is imported."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a folder of rewards; what it leaves in this process is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rewards/judge.py", JUDGE)
    write(tmp_path / "rewards/near_helpers.py", HELPERS)
    write(tmp_path / "rewards/near_later.py", "def value(): return 0.5\n")
    write(tmp_path / "near_shared.py", "FACTOR = 2.0\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("near_", "tunix_user_")):
            del sys.modules[name]


JUDGE = """
import json
import near_helpers
from near_shared import FACTOR

def score(completion, answer):
    import near_later
    return near_later.value() * FACTOR * near_helpers.same(completion, answer) + json.loads("0.0")

def bad(completion):
    return near_helpers.fails()
"""
HELPERS = """
import types

class Kind: pass

def same(left, right): return left == right

def fails():
    raise ValueError("no digits")
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))


def test_a_reward_imports_its_neighbours_and_the_current_folder_also_later(project: Path):
    score = load_object("rewards/judge.py:score")
    assert score("a", "a") == 1.0
    assert score("a", "b") == 0.0
    assert str(project) not in sys.path
    assert str(project / "rewards") not in sys.path


def test_workers_import_them_too_and_name_the_users_line(project: Path):
    for name in SHADOWS:
        for folder in (project, project / "rewards"):
            write(folder / f"{name}.py", 'raise RuntimeError("the neighbour hides a module")\n')
    functions = [RewardFunction(name=f"rewards/judge.py:{name}") for name in ("score", "bad")]
    with Scorer(functions, deadline=5.0, workers=1) as scorer:
        scores = scores_with(scorer, ["p", "p"], ["a", "b"], {"answer": ["a", "a"]})
    assert scores["score"] == [1.0, 0.0]
    assert scores["bad"] == [Failure("bad raised ValueError: no digits (rewards/near_helpers.py, line 9)")] * 2


def test_a_module_of_the_current_folder_may_be_named(project: Path):
    write(project / "near_rows.py", "from near_shared import FACTOR\ndef rows(): return [{'text': FACTOR}]\n")
    assert load_object("near_rows:rows")() == [{"text": 2.0}]


def test_a_file_is_loaded_once_by_either_name(project: Path):
    write(project / "rewards/near_player.py", "from near_helpers import Kind\nclass Player(Kind): pass\n")
    player, kind = load_object("rewards/near_player.py:Player"), load_object("rewards/near_helpers.py:Kind")
    assert issubclass(player, kind)
    write(project / "rewards/near_second.py", "from near_player import Player\n")
    assert load_object("rewards/near_second.py:Player") is player


def test_a_changed_neighbour_is_read_again(project: Path):
    assert load_object("rewards/judge.py:score")("a", "a") == 1.0
    later = project / "rewards/near_later.py"
    write(later, "def value(): return 1.5\n")
    os.utime(later, ns=(1, 1))
    assert load_object("rewards/judge.py:score")("a", "a") == 3.0


def test_imports_that_are_not_the_users_see_no_neighbour(project: Path):
    load_object("rewards/judge.py:score")
    write(project / "rewards/near_optional.py", "")
    with pytest.raises(ModuleNotFoundError):  # this file is in none of the folders
        importlib.import_module("near_optional")


def test_two_neighbours_of_one_name_are_refused(project: Path):
    load_object("rewards/judge.py:score")
    write(project / "other/near_helpers.py", "def same(left, right): return True\n")
    write(project / "other/second.py", "import near_helpers\ndef score(completion): return 1.0\n")
    with pytest.raises(UserError, match=r"second\.py imports near_helpers, which is .*other/near_helpers\.py, but"):
        load_object("other/second.py:score")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\nraise ValueError('no')\n", r"importing r\.py failed at r\.py, line 3 with ValueError: no"),
        ("import near_shared\nnear_shared.SIZE\n", r"failed at r\.py, line 2 with AttributeError"),
        ("def score(completion:\n", r"failed at r\.py, line 1 with SyntaxError"),
        ("import sys\nsys.exit('bye')\n", r"failed at r\.py, line 2 with SystemExit: bye"),
        ("import json\njson.loads('x')\n", r"failed at r\.py, line 2 with JSONDecodeError"),
        ("import near_nowhere\n", r"failed at r\.py, line 1 with ModuleNotFoundError"),
    ],
)
def test_what_fails_in_a_file_is_told_with_its_line(text: str, message: str, project: Path):
    (project / "r.py").write_text(text)
    with pytest.raises(UserError, match=message):
        load_object("r.py:score")


def test_a_neighbour_that_a_package_hides_is_named(project: Path):
    write(project / "rewards/yaml.py", "def mine(): return 1\n")
    write(project / "rewards/near_third.py", "from yaml import mine\n")
    with pytest.raises(UserError, match=r"rewards/yaml\.py has the name of an installed module"):
        load_object("rewards/near_third.py:mine")


def test_the_command_line_finds_them(project: Path):
    """`python -P` is how the console script starts: the current folder is not on Python's path."""
    for name in SHADOWS:
        write(project / f"{name}.py", 'raise RuntimeError("the neighbour hides a module")\n')
    script = "from tunix.util.plugins import load_object; print(load_object('rewards/judge.py:score')('a', 'a'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(done.stdout) == 1.0


def test_a_file_that_changes_within_a_second_is_read_anew(project: Path, monkeypatch: pytest.MonkeyPatch):
    """So does its neighbour, which is as long as before; Python's `__pycache__` would not tell, and is not written."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    second = 1_700_000_000
    for number in range(2):
        write(project / "rewards/near_number.py", f"NUMBER = {number}\n")
        write(project / "rewards/reads.py", f"import near_number\nVALUE = (near_number.NUMBER, {number})\n")
        for name in ("near_number", "reads"):
            os.utime(project / f"rewards/{name}.py", ns=(0, second * 10**9 + number))
        assert load_object("rewards/reads.py:VALUE") == (number, number)
    assert not [*project.rglob("__pycache__")]
