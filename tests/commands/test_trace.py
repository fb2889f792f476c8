"""`tunix trace`: a step's activities as Perfetto reads them."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from tunix.cli import main
from tunix.commands.trace import trace
from tunix.errors import UserError
from tunix.util.atomic_io import PACKED, append_rows

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


def test_trajectories_of_recorded_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In the Agent Trajectory Interchange Format: turns of the model are steps, what the environment wrote between them
    is an observation, the rest of the row is `extra`. Required and allowed fields are those of the pydantic models in
    harbor 0.26.0 (`harbor/models/trajectories`), whose own validator is tried where it is installed."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("model: {path: some/model}\n")
    common = {"step": 3, "group": 1, "prompt": "2+2?", "rewards": {"math": 1.0}, "finish": "stop", "tokens": 5}
    values = {"tokens": ["<a>", "x", "[4]", "4", "."], "trained": [1, 1, 0, 1, 1], "advantages": [1, 1, 0, 2, 2]}
    rows = [
        {**common, "completion": "x[4]4.", "per_token": {**values, "logprobs": [-0.1, -0.2, 0, -0.3, -0.4]}},
        {**common, "completion": [5, 7]},
        {"step": 0, "prompt": [1], "completion": "b", "expected": "c", "finish": "length"},
        {"step": 3, "task": "a/b", "prompt": "p", "completion": "q"},
    ]
    for row in rows:
        append_rows(folder / PACKED, [row], 10**9)
    assert main(["export", str(folder), str(tmp_path / "out"), "--format", "atif"]) == 0
    files = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {"3-1-0", "3-1-1", "0-0", "3-a_b-0"}
    first = files["3-1-0"]
    assert first["steps"] == [
        {"step_id": 1, "source": "user", "message": "2+2?"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "<a>x",
            "metrics": {"completion_tokens": 2, "logprobs": [-0.1, -0.2]},
            "extra": {"advantages": [1, 1]},
            "observation": {"results": [{"content": "[4]"}]},
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "4.",
            "metrics": {"completion_tokens": 2, "logprobs": [-0.3, -0.4]},
            "extra": {"advantages": [2, 2]},
        },
    ]
    assert first["extra"] == {"step": 3, "group": 1, "rewards": {"math": 1.0}, "finish": "stop", "tokens": 5}
    assert files["3-1-1"]["steps"][1]["message"] == "[5, 7]"
    for trajectory in files.values():
        assert (trajectory["schema_version"], trajectory["session_id"]) == ("ATIF-v1.7", "run")
        assert trajectory["agent"].keys() == {"name", "version", "model_name"}
        assert [step["step_id"] for step in trajectory["steps"]] == list(range(1, len(trajectory["steps"]) + 1))
        for step in trajectory["steps"]:
            assert step.keys() - {"metrics", "extra", "observation"} == {"step_id", "source", "message"}
            assert step["source"] == "agent" or not step.keys() & {"metrics", "tool_calls"}
    with suppress(ImportError):
        from harbor.models.trajectories import Trajectory  # pyright: ignore

        for trajectory in files.values():
            Trajectory.model_validate(trajectory)
    assert main(["export", str(folder), str(tmp_path / "out"), "--format", "atif"]) == 2
    assert main(["export", str(folder), str(tmp_path / "new"), "--format", "atif", "--step", "3"]) == 2
    (folder / PACKED).unlink()
    assert main(["export", str(folder), str(tmp_path / "new"), "--format", "atif"]) == 2
    assert "has recorded no samples: logging.samples" in capsys.readouterr().err
