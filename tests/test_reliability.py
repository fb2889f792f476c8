"""docs/reliability.md: the test of each promise is there, in the tier that the page says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|]+) \| \[`([^`:]+)::(\w+)`\]\(\.\./([^)]+)\) \| (\w+) \| ([^|]+) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)


def test_every_line_is_read():
    assert len(ROWS) > 50
    assert len(ROWS) == len([line for line in PAGE.splitlines() if line.startswith("| ") and "| promise |" not in line])


@pytest.mark.parametrize(("promise", "file", "name", "link", "tier", "day"), ROWS)
def test_a_promise_has_its_test(promise: str, file: str, name: str, link: str, tier: str, day: str):
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert link == f"tests/{file}", promise
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d|not since it was written", day)
    decorators = re.search(rf"((?:^[@) ].*\n)*)^def {name}\(", text, re.MULTILINE)
    assert decorators is not None, f"{file} has no {name}"
    marks = re.findall(r"^(?:pytestmark = |@)pytest\.mark\.(slow|models)\b", decorators[1] + whole(text), re.MULTILINE)
    assert tier == ("slow" if "slow" in marks else "models" if "models" in marks else "fast")


def whole(text: str) -> str:
    """The marks of all tests of a file."""
    return "".join(re.findall(r"^pytestmark = .*\n", text, re.MULTILINE))
