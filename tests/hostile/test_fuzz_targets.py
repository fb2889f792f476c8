"""What the fuzzer checks holds of the bytes that it begins with; without atheris it says what to install."""

import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.hostile import fuzz


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_a_target_holds_of_its_first_bytes(name: str, tmp_path: Path):
    target = fuzz.TARGETS[name]
    check, seeds = target.make(tmp_path)
    count = 0
    for seed in islice(seeds, 0, 200, 5):
        check(seed)
        count += 1
    assert count
    check(b"")
    assert all(isinstance(word, str) for word in target.words())


def test_an_error_of_another_kind_is_a_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`--case` does again what ended the fuzzer."""
    monkeypatch.setattr("tests.hostile.test_recipes.loads", lambda content: content.decode("ascii"))
    (tmp_path / "case").write_bytes(b"\xff")
    monkeypatch.setattr(sys, "argv", ["fuzz", "recipe", "--case", str(tmp_path / "case")])
    with pytest.raises(UnicodeDecodeError):
        fuzz.main()


def test_without_atheris_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "atheris", None)
    monkeypatch.setattr(sys, "argv", ["fuzz", "recipe", "--seconds", "1"])
    with pytest.raises(SystemExit, match="`pip install atheris`"):
        fuzz.main()
