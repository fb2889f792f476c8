"""Asynchronous runs: sampling ahead within a bound, and to the bit again after a kill."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fake_vllm import FakeVLLM, served
from tests.marks import slow
from tests.run.test_kill import Run, no_process_left
from tests.tiny_rl import REWARDS, write_policy
from tests.tiny_runs import lines, metrics, model_folder, train
from tunix.cli import main

APART = {"rollout__mesh": {"devices": 4}, "mesh": {"fsdp": 4}}
IGNORED = ("time/", "perf/", "compile/", "rollout/trainer_waits", "rollout/sampler_waits")


def ahead(k: int, how: str | None = None) -> dict[str, Any]:
    return {"rollout__max_staleness": k, "steps": 8, **({"rollout__in_flight": how} if how else {})}


def numbers(run: str | Path) -> list[dict[str, Any]]:
    """The metrics apart from those of time."""
    return [{k: v for k, v in row.items() if not k.startswith(IGNORED)} for row in metrics(run)]


@pytest.mark.slow  # tests/trainer/test_resharding.py hands over without a run
def test_devices_of_its_own_change_nothing(tmp_path: Path):
    """As with all devices for both, where the mesh of training is the same."""
    write_policy(tmp_path, mesh={"fsdp": 4}, rollout__mesh={"devices": 4})
    train("r.yaml", "output=apart")
    train("r.yaml", "output=more", "rollout.mesh.devices=4", "rollout.mesh.tensor=2")
    for ours, theirs in zip(numbers("apart"), numbers("more"), strict=True):
        for name in ours:
            assert theirs[name] == pytest.approx(ours[name], abs=1e-5, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(("k", "how"), [(1, None), *slow([(1, "continue"), (4, "continue"), (4, "finish")])])
def test_the_next_steps_are_sampled_meanwhile_within_the_bound(tmp_path: Path, k: int, how: str | None):
    write_policy(tmp_path, **APART, **ahead(k, how))
    train("r.yaml")
    ages = [row["rollout/staleness/max"] for row in metrics("run") if "rollout/staleness/max" in row]
    assert len(ages) == 7  # the first step's completions are sampled in turn
    assert all(0 <= age <= k for age in ages)
    assert max(ages) > 0, "nothing was sampled ahead"
    waits = [row[f"rollout/{who}_waits"] for row in metrics("run") if row["step"] > 1 for who in ("trainer", "sampler")]
    assert len(waits) == 14
    assert all(0 <= share <= 1 for share in waits)
    calls = lines(tmp_path / "run/replay.jsonl")[1:]
    assert {row["step"] for row in calls} == set(range(1, 8))
    assert all(row["step"] - row["weights"] <= k for row in calls if "weights" in row)
    assert all(row["compile/count"] == 0 for row in metrics("run") if row["step"] > 1)


@pytest.mark.slow  # the one before samples ahead too; tests/rollout/test_ahead.py has the order of all
def test_of_one_process_and_device_it_needs_no_other(tmp_path: Path):
    write_policy(tmp_path, **ahead(1))
    with no_process_left() as runs:
        runs.append(Run(tmp_path))
        assert runs[0].wait() == 0, runs[0].log
        first = runs[0]
        (tmp_path / "run").rename(tmp_path / "first")
        (tmp_path / "run").mkdir()
        (tmp_path / "first/replay.jsonl").rename(tmp_path / "run/replay.jsonl")
        (tmp_path / "run/recipe.yaml").write_text((tmp_path / "first/recipe.yaml").read_text())
        runs.append(Run(tmp_path))
        assert runs[1].wait() == 0, runs[1].log
    assert numbers(tmp_path / "first") == numbers(tmp_path / "run")
    assert first.steps == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "how", "more"), [(1, "finish", 1.0), (2, "continue", 1.0), (2, "finish", 1.5), (3, "continue", 1.5)]
)
def test_killed_again_and_again_it_does_what_is_recorded(tmp_path: Path, k: int, how: str, more: float):
    """It ends as a run that nobody disturbs would, if that had the same record: the record of the whole run."""
    changes = {
        **ahead(k, how),
        "rollout__oversample": more,
        "steps": 14,
        "checkpoint": {"every": 3, "keep": 2},
        "data__eval": "held.jsonl",
    }
    changes["eval"] = {"every": 5, "rows": 4}
    write_policy(tmp_path, **changes)
    with no_process_left() as runs:
        for step in (4, 8, 11):
            runs.append(Run(tmp_path))
            runs[-1].until(lambda step=step: runs[-1].steps >= step)
            runs[-1].kill()
        runs.append(Run(tmp_path))
        assert runs[-1].wait() == 0, runs[-1].log
    does_what_is_recorded(tmp_path)


def does_what_is_recorded(folder: Path) -> None:
    """Another run, with the record of the first and nothing else, has its metrics and its weights, to the bit."""
    again = folder / "again"
    (again / "run").mkdir(parents=True)
    for name in ("r.yaml", "rewards.py", "train.jsonl", "held.jsonl", "run/replay.jsonl", "run/recipe.yaml"):
        (again / name).write_text((folder / name).read_text())
    with no_process_left() as runs:
        runs.append(Run(again))
        assert runs[0].wait() == 0, runs[0].log
    for ours, theirs in itertools.zip_longest(numbers(folder / "run"), numbers(again / "run")):
        assert ours == theirs
    assert (folder / "run/replay.jsonl").read_text() == (again / "run/replay.jsonl").read_text()
    assert {x.name: x.read_bytes() for x in (folder / "run/export").iterdir()} == {
        x.name: x.read_bytes() for x in (again / "run/export").iterdir()
    }


SLEEPY = (
    REWARDS
    + """

def sleepy(completion):
    import time
    time.sleep(0.1)
    return 0.0
"""
)
"""A step of four prompts is on its way for most of the time."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "how", "more"), [(1, "finish", 1.0), (2, "continue", 1.0), (2, "finish", 1.5), (3, "continue", 1.5)]
)
def test_stopped_again_and_again_it_gives_up_what_is_being_sampled_and_goes_on(
    tmp_path: Path, k: int, how: str, more: float
):
    """SIGTERM: a checkpoint of the present step, and exit code 130. All steps are learned from once, as is recorded."""
    changes = {**ahead(k, how), "rollout__oversample": more, "steps": 12, "checkpoint": {"every": 5, "keep": 2}}
    changes |= {"data__eval": "held.jsonl", "eval": {"every": 5, "rows": 4}}
    (tmp_path / "rewards.py").write_text(SLEEPY)
    write_policy(tmp_path, **changes, reward__functions=["rewards.py:letters", "rewards.py:sleepy"])
    given_up = 0
    with no_process_left() as runs:
        for step in (3, 6, 9):
            runs.append(Run(tmp_path))
            runs[-1].until(lambda step=step: runs[-1].steps >= step)
            runs[-1].process.terminate()
            assert runs[-1].wait() == 130, runs[-1].log
            given_up += given_up_step(tmp_path / "run")
        runs.append(Run(tmp_path))
        assert runs[-1].wait() == 0, runs[-1].log
    assert given_up, "it was never in the middle of a step"
    assert sorted({row["step"] for row in metrics(tmp_path / "run")} - {0}) == list(range(1, 13))
    does_what_is_recorded(tmp_path)


def given_up_step(run: Path) -> bool:
    """Whether the record has a step that the last checkpoint does not have."""
    last = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    record = json.loads((run / f"checkpoints/{last}/record/metadata").read_text())["data"]["ahead"]
    assert record["step"] == last
    return max(row["step"] for row in lines(run / "replay.jsonl")[1:]) not in map(int, record["steps"])


@pytest.mark.slow
def test_a_run_whose_servers_do_not_answer_saves_and_ends_at_once_and_goes_on(tmp_path: Path):
    """However long they take: they answer nothing until it has ended."""
    fake = FakeVLLM(model_folder(tmp_path / "llama"))
    with served(fake) as url, no_process_left() as runs:
        model = {"path": str(tmp_path / "llama"), "dtype": "float32"}
        on = {"rollout__engine": "vllm", "rollout__servers": [url]}
        write_policy(tmp_path, **on, **ahead(1), model=model, checkpoint={"every": 2})
        runs.append(Run(tmp_path))
        runs[0].until(lambda: runs[0].steps >= 3)
        fake.manners.silent.set()
        runs[0].until(lambda: fake.unanswered > 0)
        time.sleep(3)  # the learner has nothing left to learn from
        runs[0].process.terminate()
        assert runs[0].process.wait(60) == 130, runs[0].log
        assert f"stopped at step {runs[0].steps} of 8, with a checkpoint" in runs[0].log
        assert fake.manners.silent.is_set()
        assert given_up_step(tmp_path / "run")
        fake.manners.silent.clear()
        fake.restart(tmp_path / "llama")
        runs.append(Run(tmp_path))
        assert runs[1].wait() == 0, runs[1].log
        assert sorted({row["step"] for row in metrics(tmp_path / "run")}) == list(range(1, 9))
        assert all(row["rollout/staleness/max"] <= 1 for row in metrics(tmp_path / "run") if row["step"] > 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": {"fsdp": 8}, **ahead(1)}, "would wait for each other on 8 shared devices; give sampling some"),
        ({**APART, "rollout__in_flight": "finish"}, "in_flight: finish changes nothing without max_staleness"),
        ({**APART, **ahead(1), "rollout__oversample": 1.5}, "1.5 carries completions over to the next step, where"),
        ({**APART, **ahead(2), "rollout__oversample": 2.5}, "2.5 may carry over more groups than a step takes"),
        (
            {**APART, **ahead(1), "algorithm": {"name": "grpo", "group_size": 4, "old_logprobs": "recompute"}},
            "recompute starts the ratio at the present weights",
        ),
        (
            {
                **APART,
                **ahead(1),
                "reward": None,
                "algorithm": {"name": "distill", "on_policy": True},
                "teacher": {"path": "teacher", "dtype": "float32"},
            },
            "distill compares the student at its own, present completions",
        ),
        ({"rollout__mesh": {"devices": 8}}, "of 8 device(s) of a process 8 would only sample"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(tmp_path: Path, capsys, changes: dict[str, Any], says: str):
    write_policy(tmp_path, **changes)
    if "teacher" in changes:
        model_folder(tmp_path / "teacher")
    assert main(["run", "r.yaml"]) == 2
    assert says in capsys.readouterr().err
