"""`tunix trace`: a step's activities as Perfetto reads them."""

import json
from pathlib import Path

import pytest

from tunix.cli import main
from tunix.commands.trace import trace
from tunix.errors import UserError

STEPS = [
    {"step": 1, "spans": [["rollout", "MainThread", 100.0, 101.0], ["update", "MainThread", 101.0, 101.5]]},
    {"step": 2, "spans": [["rollout", "rollouts", 101.2, 102.0], ["update", "MainThread", 102.0, 102.5]]},
    {"step": 3, "spans": [["rollout", "rollouts", 102.1, 103.0], ["update", "MainThread", 103.0, 103.5]]},
    {"step": 4, "spans": [["rollout", "rollouts", 103.1, 104.0], ["update", "MainThread", 104.0, 104.5]]},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/spans.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STEPS))
    return tmp_path / "run"


def test_a_step_and_what_happened_while_it_was_learned_from(run: Path):
    """Step 2 was learned from between 102.0 and 102.5, while step 3 was sampled from 102.1 on; its own completions were
    sampled from 101.2 on, which is the chart's 0."""
    events = json.loads(trace(run, 2).read_text())["traceEvents"]
    assert [one["args"]["name"] for one in events if one["ph"] == "M"] == ["MainThread", "rollouts"]
    shown = [
        (one["name"], one["args"]["step"], one["tid"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"
    ]
    assert shown == [
        ("rollout", 2, 1, 0, 800_000),
        ("update", 2, 0, 800_000, 500_000),
        ("rollout", 3, 1, 900_000, 900_000),
    ]


def test_the_command_says_where_it_is(run: Path, capsys):
    assert main(["trace", str(run), "3", "--out", "chart.json"]) == 0
    assert capsys.readouterr().out == "chart.json: open it at https://ui.perfetto.dev\n"
    assert Path("chart.json").exists()
    assert main(["trace", str(run), "3", "--out", "chart.json"]) == 2


def test_a_step_that_was_not_recorded(run: Path):
    with pytest.raises(UserError, match="has nothing of step 7: it has recorded steps 1 to 4"):
        trace(run, 7)
    (run / "spans.jsonl").unlink()
    with pytest.raises(UserError, match="only runs on completions record any"):
        trace(run, 1)
