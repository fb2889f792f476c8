"""Checkpoints: the whole train state and the run's own record, one atomic unit on disk, written while training goes on.

Orbax writes to a temporary folder and renames it; a process that dies in between leaves the previous step intact. The
arrays restore onto any mesh, bit for bit. The record (data position, counters) is JSON beside them.
"""

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from tunix.errors import UserError
from tunix.trainer.config import CheckpointConfig
from tunix.trainer.step import TrainState

BEST = "eval/loss"
"""The metric that the best checkpoint has the lowest of."""


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>/`."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, read_only: bool = False):
        """Looks at what is there.

        Args:
            read_only: touches nothing: the run that owns the folder may be writing to it.
        """
        last = keep.LatestN(config.keep)
        best = keep.BestN(get_metric_fn=_rank, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                # Orbax writes metrics, without which a restarted run forgets its best, only where it has a best_fn.
                best_fn=_rank,
                preservation_policy=keep.AnyPreservationPolicy([last, best] if config.best else [last]),
                cleanup_tmp_directories=not read_only,
                create=not read_only,
                enable_async_checkpointing=True,
            ),
        )

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, record: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts writing; returns once the arrays may be donated.

        Args:
            record: JSON values: whatever else the run needs to go on.
            metrics: of an evaluation at this step, if there was one; the best one is kept.

        Raises:
            UserError: an earlier save failed, for instance on a full disk.
        """
        parts = ocp.args.Composite(state=ocp.args.StandardSave(flatten(state)), record=ocp.args.JsonSave(dict(record)))
        with self._explained():
            saved = self._manager.save(step, args=parts, metrics={BEST: metrics.get(BEST)})
        assert saved, f"Orbax passed over step {step}"

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """State and record of a step, placed as `like` is.

        Raises:
            UserError: the checkpoint does not hold this state (another model, optimizer or adapter), would lose digits
                in it, or is damaged.
        """
        target = jax.tree.map(abstract, flatten(like))
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(target), record=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=parts)
            stored = self._manager.item_metadata(step)["state"].tree
            restored = unflatten(found["state"], like), found["record"]
        except Exception as error:  # a damaged file reaches us as a bare Exception of tensorstore's
            raise UserError(
                f"{self.folder / str(step)}: the checkpoint cannot be read: {_first_line(error)}. Delete that "
                "folder to go on from the one before, or start anew with --fresh."
            ) from error
        _compare_types(self.folder / str(step), stored, target)
        return restored

    def wait(self) -> None:
        """Until what was started is on disk.

        Raises:
            UserError: it could not be written.
        """
        with self._explained():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the manager's threads."""
        with self._explained():
            self._manager.close()

    def _explained(self) -> "_WriteErrors":
        return _WriteErrors(self.folder)


def _compare_types(where: Path, stored: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Orbax casts without a word. What becomes wider loses nothing and is noted: a run from before
    `optimizer.moments_dtype`, whose moments were of the weights' type.

    Raises:
        UserError: digits would be lost.
    """
    for part, held in target.items():
        pairs = {(stored[part][name].dtype, x.dtype) for name, x in held.items()}
        for before, now in (pair for pair in pairs if pair[0] != pair[1]):
            said = f"{where} holds {part} in {before}, and this run keeps them in {now}"
            if before.itemsize > now.itemsize:
                remedy = "set optimizer.moments_dtype and model.param_dtype as they were, or start with --fresh"
                raise UserError(f"{said}: {remedy}")
            print(f"note: {said}: they are the same numbers", file=sys.stderr)


def _rank(metrics: Mapping[str, float | None]) -> float:
    """What the best checkpoint has the lowest of; the newest of those without an evaluation counts as their best."""
    value = metrics[BEST]
    return math.inf if value is None else value


class _WriteErrors:
    """Turns whatever the writer's threads raise into one message; the last complete checkpoint is still there."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise UserError(
                f"{self.folder}: a checkpoint could not be written ({_first_line(error)}). Earlier "
                "checkpoints are intact: make room and run the same command to go on from the last one."
            ) from error


def _first_line(error: Exception) -> str:
    """The beginning of an error's text, which may go on for pages; its kind where it has none."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) < 300 else f"{text[:120]} ... {text[-160:]}"  # the cause stands at the end


def _quiet(record: logging.LogRecord) -> bool:
    """Keeps out the tracebacks that Orbax and its abandoned tasks log for a failed write: it is told as one error."""
    return "/orbax/" not in record.pathname and "exception was never retrieved" not in record.getMessage()


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_quiet)


def save_state(path: Path, state: TrainState) -> None:
    """Writes one train state as the new folder `path`, atomically."""
    with ocp.StandardCheckpointer() as writer:
        writer.save(path.absolute(), flatten(state))


def load_state(path: Path, like: TrainState) -> TrainState:
    """What `save_state` wrote, placed as `like` is."""
    with ocp.StandardCheckpointer() as reader:
        return unflatten(reader.restore(path.absolute(), jax.tree.map(abstract, flatten(like))), like)


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def flatten(state: TrainState) -> dict[str, dict[str, jax.Array]]:
    """Plain dicts: optax's classes do not belong on disk."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.moments)
    moments = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    own = {"params": dict(state.params), "moments": moments, "step": {"step": state.step}}
    critic = {} if state.critic is None else flatten(state.critic)
    return own | {f"critic_{name}": value for name, value in critic.items()}


def unflatten(found: Mapping[str, dict[str, jax.Array]], like: TrainState) -> TrainState:
    """The inverse of `flatten`, in the structure of `like`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like.moments)
    moments = [found["moments"][jax.tree_util.keystr(path, simple=True, separator="/")] for path, _ in leaves]
    critic = None
    if like.critic is not None:
        theirs = {name.removeprefix("critic_"): x for name, x in found.items() if name.startswith("critic_")}
        critic = unflatten(theirs, like.critic)
    return TrainState(found["params"], jax.tree.unflatten(structure, moments), found["step"]["step"], critic)
