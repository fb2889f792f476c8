"""The comparison with other libraries: turns, failures and the table, with workers that compute nothing."""

import json
import shutil

import pytest

from benchmarks.peers import report, run
from benchmarks.peers.cases import CASES
from benchmarks.peers.run import Figure, Peer

WORKER = """
from turns import start
case, turn = start()
tokens = 0
for piece in range(9):
    turn(tokens=tokens)
    print("noise of a library")
    with open(case["order"], "a") as file:
        file.write({name!r})
    tokens = 10
    {then}
"""


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """Two that work, and one that fails in its second piece."""
    shutil.copy(run.WORKERS / "turns.py", tmp_path)
    for name, then in (("a", ""), ("b", ""), ("c", "assert piece < 1, 'out of luck'")):
        (tmp_path / f"{name}.py").write_text(WORKER.format(name=name, then=then))
    made = {name: Peer(name.upper(), None, f"{name}.py", ()) for name in "abc"}
    made["d"] = Peer("D", None, "none.py", (), (("sft", "does not train"),))
    made["e"] = Peer("E", "nowhere", "none.py", ())
    monkeypatch.setattr(run, "WORKERS", tmp_path)
    monkeypatch.setattr(run, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(run, "PEERS", made)
    monkeypatch.setattr(report, "PEERS", made)
    return made


def test_libraries_take_turns_and_failures_are_shown(tmp_path, peers):
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"order": str(tmp_path / "order")}))
    found = run.measure("sft-small", case, list(peers), rounds=3, warm=1)
    # Each is warmed up by one piece, then they alternate; c's second piece is its last.
    assert (tmp_path / "order").read_text() == "abc" + "abc" + "abab"
    assert [len(one.seconds) for one in found.values()] == [3, 3, 0, 0, 0]
    assert found["a"].tokens == 10
    assert "out of luck" in found["c"].note
    assert found["d"].note == "does not train"
    assert found["e"].note == "not installed: make peers"
    lines = report.table({"sft-small": found}).splitlines()
    assert lines[2].endswith("| failed |")  # who was asked for nothing has no column
    assert lines[-1].startswith(f"* C, {CASES['sft-small'].title}: ended with code 1")


def test_the_table_has_medians_in_its_place(tmp_path, peers, monkeypatch):
    monkeypatch.setattr(report, "described", lambda figures, rounds: f"{rounds} turns")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    row = {"a": Figure((0.1, 0.3, 0.2)), "b": Figure((0.25,))}
    # 100 tokens in 0.5, 0.4 and 2 seconds: 200, 250 and 50 a second.
    tokens = {"a": Figure((0.5, 0.4, 2.0), 100), "b": Figure((1.0,), 100)}
    report.write({"sft-small": row, "ragged": tokens}, 3, page)
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n3 turns\n\n| case | A | B |")
    assert text.endswith(f"\n{report.END}\nafter\n")
    assert f"| {CASES['sft-small'].title} | **200 ms (100 to 300)** | 250 ms (250 to 250) |" in text
    assert f"| {CASES['ragged'].title} | **200 tok/s (50 to 250)** | 100 tok/s (100 to 100) |" in text
