"""`tunix replay`: a step computed again is the recorded one to the bit, and its sequences add up to its loss."""

import json
import shutil
from pathlib import Path

import pytest

from tests.run.test_bad_input import assert_says, refused
from tests.run.test_nonfinite import write
from tests.tiny_rl import write_policy
from tests.tiny_runs import files, metrics, train
from tunix.cli import main


def table(printed: str) -> list[list[str]]:
    """The cells of the sequences' lines."""
    return [line.split() for line in printed.partition("length\n")[2].splitlines()]


@pytest.mark.slow
def test_a_step_on_given_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """With noise, from the checkpoint before the last but one; then the step that ended the run, and refusals."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 18)
    noise = ["algorithm.name=sft", "algorithm.neftune_alpha=5"]
    assert main(["run", "r.yaml", *noise]) == 2
    before = files(tmp_path / "run")
    capsys.readouterr()
    assert main(["replay", "run", "4"]) == 0
    printed = capsys.readouterr().out
    told = {row["step"]: row for row in metrics("run")}
    assert printed.startswith("step 4, from the checkpoint of step 2\n")
    assert "metrics are equal to the last bit" in printed
    assert "differs" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    cells = table(printed)
    assert sorted(row[0] for row in cells) == ["0", "1", "2", "3"]
    losses = [float(row[1]) for row in cells]
    assert losses == sorted(losses, reverse=True)
    # The mean over all tokens: what sequences add to it adds up to it. Each number has five digits.
    assert sum(losses) == pytest.approx(told[4]["train/loss"], rel=1e-4)
    # A sequence's part is that of its tokens: minus its mean log-prob times its length over all lengths.
    tokens = sum(float(row[6]) for row in cells)
    for row in cells:
        assert float(row[1]) == pytest.approx(-float(row[2]) * float(row[6]) / tokens, rel=1e-3)
        assert row[3:6] == ["-", "-", "-"]
    assert main(["replay", "run", "5"]) == 0
    printed = capsys.readouterr().out
    assert "step 5: train/loss is inf\nnothing was recorded of this step to compare it with" in printed
    # The mean over tokens by their weights is that of the heavy row: minus its mean log-prob, and 0 of the others.
    worst, *others = table(printed)
    assert worst[0] == "2"
    assert float(worst[1]) == pytest.approx(-float(worst[2]), rel=1e-3)
    assert all(abs(float(row[1])) < 1e-30 for row in others)
    assert files(tmp_path / "run") == before

    # A row that says something else is told.
    rows = [{**row, "train/loss": 1.0} if row["step"] == 4 else row for row in metrics("run")]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit, match="1"):
        main(["replay", "run", "4"])
    assert f"differs: train/loss: {told[4]['train/loss']}, recorded 1.0" in capsys.readouterr().out

    assert_says(refused(["replay", "run", "6"], capsys), ["run: there is no step 6: the run has done 4 so far"])
    shutil.rmtree("run/checkpoints/2")
    assert_says(refused(["replay", "run", "4"], capsys), ["no checkpoint is early enough for step 4", "of step 4"])
    (tmp_path / "run/metrics.jsonl").write_text("[1]\n")
    assert_says(refused(["replay", "run", "4"], capsys), ["run/metrics.jsonl is damaged"])
    (tmp_path / "empty").mkdir()
    assert_says(refused(["replay", "empty", "1"], capsys), ["empty is no run: there is no recipe.yaml in it"])


@pytest.mark.slow
def test_a_step_on_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Two updates of a step, with the weights that it began with; the first step is from the first weights."""
    monkeypatch.chdir(tmp_path)
    algorithm = {"name": "grpo", "group_size": 4, "updates": 2, "kl": 0.01}
    train(str(write_policy(tmp_path, algorithm=algorithm, steps=2, checkpoint={"every": 1})))
    capsys.readouterr()
    for step, start in ((1, "the first weights"), (2, "the checkpoint of step 1")):
        assert main(["replay", "run", str(step)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"step {step}, from {start}\n")
        cells = table(printed)
        assert sorted(row[0] for row in cells) == sorted(f"{i}.{j}" for i in range(2) for j in range(8))
        rewards = [float(row[4]) for row in cells]
        told = metrics("run")[step - (0 if metrics("run")[0]["step"] == 0 else 1)]
        assert sum(rewards) / 16 == pytest.approx(told["reward/mean"], rel=1e-4)
        # The sampler and the trainer are one model.
        assert max(abs(float(row[5])) for row in cells) < 1e-3
    write_policy(tmp_path, rollout__max_staleness=1)
    shutil.copy("r.yaml", "run/recipe.yaml")
    assert_says(
        refused(["replay", "run", "2"], capsys), ["rollout.max_staleness: what is sampled or scored depends on"]
    )
