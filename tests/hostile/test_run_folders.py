"""Run folders of which bytes or values are others, as a crash, an editor or another version leaves them."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.commands.test_report import data_of, sample, write_run
from tests.hostile.attack import attack
from tests.hostile.test_folders import CHANGES, changed
from tests.marks import slow
from tunix.commands.report import page
from tunix.errors import UserError

FILES = ("recipe.yaml", "metrics.jsonl", "samples.jsonl", "spans.jsonl", "judge.jsonl", "log.txt")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.jsonl", '{"step": 1, "a": 1}\n{}\n'),  # no step in the last row
        ("metrics.jsonl", '{"step": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n"),
        (
            "samples.jsonl",
            json.dumps(sample(1, 0, 1, rewards={"a": 1}))[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
        ),
        ("metrics.jsonl", '{"step": 1, "a": 1e308}\n' * 800),  # a mean that no float holds
        ("judge.jsonl", '{"verdict": ' + "[" * 900 + "]" * 900 + "}\n"),
    ],
    ids=["no step", "nested", "nested sample", "too large", "nested verdict"],
)
def test_a_file_that_was_a_traceback(file: str, text: str, tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / file).write_text(text)
    with pytest.raises(UserError, match="is damaged, or of another version of tunix"):
        page([run])


def reports(run: Path) -> None:
    """A run has its page, or is refused."""
    with suppress(UserError):
        assert data_of(page([run]))["runs"]


@pytest.mark.parametrize("number", [25, *slow([20_000])])
def test_no_damage_is_a_traceback(number: int, tmp_path: Path):
    run = write_run(tmp_path / "run")
    whole = {name: (run / name).read_bytes() for name in FILES}
    rows = {name: [json.loads(line) for line in whole[name].splitlines()] for name in FILES if name.endswith(".jsonl")}

    def reads(case: tuple[str, list, list[tuple[int, int]], int | None]) -> None:
        name, changes, bits, end = case
        if changes and name in rows:
            written = changed({"": rows[name]}, changes).get("")
            listed = written if isinstance(written, list) else [written]
            (run / name).write_text("".join(json.dumps(row) + "\n" for row in listed))
        else:
            content = bytearray(whole[name])
            for place, byte in bits:
                content[place % len(content)] = byte
            (run / name).write_bytes(content[: None if end is None else end % len(content)])
        try:
            reports(run)
        finally:
            (run / name).write_bytes(whole[name])

    flips = st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 255)), max_size=4)
    cases = st.tuples(st.sampled_from(FILES), CHANGES | st.just([]), flips, st.none() | st.integers(0, 10**5))
    attack(reads, cases, number)
