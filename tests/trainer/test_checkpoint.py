"""Checkpoints: which ones stay, what a dead process leaves behind, folders of earlier versions."""

from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from tests.trainers import StateClient
from tunix.errors import UserError
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.config import CheckpointConfig
from tunix.trainer.state_files import flatten
from tunix.trainer.step import TrainState


def state(step: int) -> TrainState:
    return TrainState({"w": jnp.full((2,), float(step))}, (), jnp.int32(step))


def restored(checkpoints: Checkpoints, step: int) -> tuple[list[float], int, dict]:
    """Weights, step and record of a checkpoint."""
    client = StateClient(state(0))
    record = checkpoints.restore(step, client.load)
    return client.state.params["w"].tolist(), int(client.state.step), record


def test_the_best_checkpoint_outlives_newer_ones_and_a_restart(tmp_path: Path):
    config = CheckpointConfig(keep=2)
    measured: dict[int, dict[str, float]] = {1: {"eval/loss": 3.0}, 2: {"eval/loss": 1.0}, 3: {}, 4: {"eval/loss": 2.0}}
    for steps, kept in (([1, 2, 3], [2, 3]), ([4, 5, 6], [2, 5, 6])):
        checkpoints = Checkpoints(tmp_path / "checkpoints", config)
        for step in steps:
            checkpoints.save(step, StateClient(state(step)), {"n": step}, measured.get(step, {}))
        checkpoints.wait()
        assert checkpoints.steps() == kept
        assert restored(checkpoints, 2) == ([2.0, 2.0], 2, {"n": 2})
        checkpoints.close()


def test_what_a_dead_process_left_goes_but_not_for_a_reader(tmp_path: Path):
    """Half a checkpoint of ours or of Orbax's, written or being deleted; a complete one and other folders stay."""
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        checkpoints.save(3, StateClient(state(3)), {"n": 3}, {})
    halves = ("4.tmp", "2.tmp", "5.orbax-checkpoint-tmp-17")
    for name in (*halves, "notes"):
        (tmp_path / name / "state").mkdir(parents=True)
    everything = sorted(path.name for path in tmp_path.iterdir())
    with closing(Checkpoints(tmp_path, CheckpointConfig(), read_only=True)) as reader:
        assert reader.steps() == [3]
        assert sorted(path.name for path in tmp_path.iterdir()) == everything == sorted([*halves, "notes", "3"])
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "notes"]
        assert restored(checkpoints, 3) == ([3.0, 3.0], 3, {"n": 3})


def test_a_state_that_was_not_written_is_no_checkpoint(tmp_path: Path):
    class Failing(StateClient):
        def save(self, path: Path):
            path.mkdir()
            return self

        def result(self) -> None:
            raise OSError("no space left on device")

    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        checkpoints.save(1, StateClient(state(1)), {}, {})
        checkpoints.save(2, Failing(state(2)), {}, {})
        with pytest.raises(UserError, match=r"no space left on device.*Earlier checkpoints are intact"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_runs_of_earlier_versions_go_on(tmp_path: Path):
    """They were written by Orbax's own manager, with the best step among the metrics."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["eval/loss"] or 9.0, best_mode="min")
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in ((1, 1.0), (2, 2.0), (3, None)):
            parts = {
                "state": ocp.args.StandardSave(flatten(state(step))),
                "record": ocp.args.JsonSave({"n": step}),
            }
            manager.save(step, args=ocp.args.Composite(**parts), metrics={"eval/loss": loss})
    with closing(Checkpoints(tmp_path, CheckpointConfig(keep=1))) as checkpoints:
        assert (checkpoints.latest(), checkpoints.steps()) == (3, [1, 2, 3])
        assert restored(checkpoints, 3) == ([3.0, 3.0], 3, {"n": 3})
        checkpoints.save(4, StateClient(state(4)), {"n": 4}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4]  # the best and the last
