"""`optimizer.on_nonfinite`: a row whose loss is not finite ends a run, is skipped, or is gone back from.

The row weighs 5e37: 5 nats x 4 tokens x 5e37 are more than a float32 holds.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run.test_bad_input import assert_says, refused
from tests.run.test_kill import Run, assert_same_end, lasting, no_process_left
from tests.tiny_rl import write_policy
from tests.tiny_runs import lines, metrics, rows, train, write_recipe, write_rows
from tunix.cli import main
from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.run.client import client
from tunix.trainer.config import MOST_SKIPS
from tunix.util.faults import VARIABLE

HEAVY = {**rows(1)[0], "weight": 5e37}


def write(folder: Path, *heavy: int, steps: int = 8, **settings: Any) -> None:
    """A run of batches of 4 in the order of the file, checkpoints after every other step; which rows are heavy."""
    write_rows(folder / "train.jsonl", [HEAVY if i in heavy else one for i, one in enumerate(rows(4 * steps + 8))])
    write_rows(folder / "held.jsonl", rows(6, seed=3))
    checkpoint = {"every": 2, "keep": 2}
    changes = {"batch_size": 4, "steps": steps, "data.shuffle": False, "checkpoint": checkpoint}
    write_recipe(folder / "r.yaml", {**changes, **{f"optimizer.{key}": x for key, x in settings.items()}})


def test_stop_saves_the_sequences_and_skip_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 18)  # the third row of step 5
    message = refused(["run", "r.yaml"], capsys)
    assert_says(message, ["step 5: train/loss is inf", "sequences are in nonfinite-5.jsonl", "optimizer.on_nonfinite"])
    assert sorted(os.listdir("run/checkpoints")) == ["2", "4"]
    saved = lines(tmp_path / "run/nonfinite-5.jsonl")
    assert [(row["step"], row["sequence"], row["weight"]) for row in saved] == [
        (5, 0, 1.0),
        (5, 1, 1.0),
        (5, 2, pytest.approx(5e37)),
        (5, 3, 1.0),
    ]
    # A byte is the token 6 later, after the beginning of the text: 4 letters `a`, 3 capitals that are trained, the end.
    assert saved[2]["tokens"][1:8] == [byte + 6 for byte in b"aaaaAAA"]
    assert saved[2]["trained"] == [0] * 5 + [1] * 4
    # The key may change on the way: nothing before has depended on it.
    train("r.yaml", "optimizer.on_nonfinite=skip")
    told = metrics("run")
    assert [row["step"] for row in told] == [*range(1, 9)]
    assert [row.get("train/skipped") for row in told] == [None] * 4 + [1.0, 0.0, 0.0, 0.0]
    assert told[4]["train/loss"] is None
    assert "step 5: train/loss is inf: the update was skipped" in (tmp_path / "run/log.txt").read_text()
    assert main(["report", "run", "--out", "report.html"]) == 0


@pytest.mark.slow
def test_too_many_skips_in_a_row_end_a_run_also_where_it_was_resumed_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    bad = range(3, 3 + MOST_SKIPS)
    write(tmp_path, *(4 * (step - 1) for step in bad), steps=14, on_nonfinite="skip")
    train("r.yaml", "steps=6")
    message = refused(["run", "r.yaml"], capsys)
    assert_says(message, [f"step {bad[-1]}: train/loss is inf, and so in {MOST_SKIPS} steps in a row"])
    assert metrics("run")[-1]["step"] == bad[-1] - 1


def test_rollback_goes_on_from_the_checkpoint_with_the_rows_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Step 5 fails on rows 16 to 19: step 5 is then done on rows 20 to 23, as where these rows are not there."""
    for name, heavy in (("spoiled", [18]), ("clean", [])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write(tmp_path / name, *heavy, on_nonfinite="rollback")
        if not heavy:
            left = [row for i, row in enumerate(lines(Path("train.jsonl"))) if not 16 <= i < 20]
            write_rows(Path("train.jsonl"), left)
        train("r.yaml")
    spoiled, clean = (tmp_path / name / "run" for name in ("spoiled", "clean"))
    # All but the number of rows that were read.
    same = [
        [{k: v for k, v in row.items() if not k.startswith("data/")} for row in lasting(run)]
        for run in (spoiled, clean)
    ]
    assert same[0] == same[1]
    assert [row["data/kept"] for row in lasting(spoiled)] == [4, 8, 12, 16, 24, 28, 32, 36]
    log = (spoiled / "log.txt").read_text()
    assert "step 5: train/loss is inf: back to the checkpoint of step 4, and on with the rows that follow (1 of" in log


@pytest.mark.slow
def test_there_is_an_end_to_going_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 0, on_nonfinite="rollback")
    assert_says(refused(["run", "r.yaml"], capsys), ["step 1: train/loss is inf", "no checkpoint yet to go back to"])
    write(tmp_path, 8, 12, 16, 20, on_nonfinite="rollback")
    assert_says(refused(["run", "r.yaml", "--fresh"], capsys), ["step 3:", "has gone back 3 times already"])


@pytest.mark.slow
def test_of_completions_nothing_is_sampled_from_weights_that_are_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The second step of two is one of an accident, which is noticed before the next one samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "gradient:nan@2")
    write_policy(tmp_path, checkpoint={"every": 1})
    message = refused(["run", "r.yaml"], capsys)
    assert_says(message, ["step 2: train/loss is", "nonfinite-2.jsonl"])
    saved = lines(tmp_path / "run/nonfinite-2.jsonl")
    # Four groups of four, each with its prompt; advantages of a group have mean 0.
    assert len(saved) == 16
    assert (
        len(
            {
                tuple(t for t, trained in zip(row["tokens"], row["trained"], strict=True) if not trained)
                for row in saved[:4]
            }
        )
        == 1
    )
    for group in (saved[:4], saved[12:]):
        rewards = np.array([row["reward"] for row in group])
        advantages = [row["advantages"][-1] for row in group]
        np.testing.assert_allclose(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-4), atol=1e-3)
    assert metrics("run")[-1]["step"] == 1
    train("r.yaml", "optimizer.on_nonfinite=skip")
    assert [row["train/skipped"] for row in metrics("run")[1:]] == [1.0, 0.0]


def test_refusals(tmp_path: Path):
    rollback = {"optimizer.on_nonfinite": "rollback"}
    write_recipe(tmp_path / "r.yaml", {**rollback, "checkpoint": {"every": None}})
    with pytest.raises(UserError, match=r"on_nonfinite: rollback goes back to a checkpoint, and there are none"):
        Recipe.load(tmp_path / "r.yaml")
    write_policy(tmp_path, optimizer__on_nonfinite="rollback", rollout__max_staleness=1)
    with pytest.raises(UserError, match=r"rollback goes back to a checkpoint, and what rollout\.max_staleness"):
        Recipe.load(tmp_path / "r.yaml")
    with pytest.raises(UserError, match="rollback is for runs"):
        client({"init": "random", "family": "llama"}, optimizer={"on_nonfinite": "rollback"})


@pytest.mark.slow
@pytest.mark.parametrize("way", ["skip", "rollback"])
def test_killed_after_it_a_run_ends_like_the_uninterrupted_one(way: str, tmp_path: Path):
    """Killed right after the accident, and asked to stop right before it."""
    with no_process_left() as runs:
        for name in ("whole", "killed"):
            (tmp_path / name).mkdir()
            # Slowly: a loss that falls to 1 would be finite with that weight.
            write(tmp_path / name, 18, 30, steps=12, on_nonfinite=way, learning_rate=1e-5)
            runs.append(Run(tmp_path / name))
            if name == "killed":
                runs[-1].until(lambda: runs[-1].steps >= 3)
                runs[-1].process.send_signal(signal.SIGTERM)
                assert runs[-1].wait() == 130, runs[-1].log
                runs.append(Run(tmp_path / name))
                runs[-1].until(lambda: "is inf" in runs[-1].log)
                runs[-1].kill()
                runs.append(Run(tmp_path / name))
            assert runs[-1].wait() == 0, runs[-1].log
    assert_same_end(tmp_path / "killed/run", tmp_path / "whole/run")
    record = json.loads((tmp_path / "whole/run/checkpoints/12/record/metadata").read_text())
    assert record["rollbacks"] == (2 if way == "rollback" else 0)
