"""Saves and loads a train state as a folder: written by Orbax in the background, restored exactly onto any mesh."""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tunix.distributed.processes import first_line
from tunix.errors import UserError
from tunix.models.model import Params
from tunix.trainer.step import TrainState
from tunix.util.object_store import path_of


class Unreadable(UserError):
    """The error for a folder that does not hold this state, or is damaged."""


class Writing(ocp.StandardCheckpointer):
    """A save in progress (`protocols.Saving`)."""

    def result(self) -> None:
        """Waits until everything is on disk; raises any error of the write."""
        try:
            self.wait_until_finished()
        finally:
            self.close()


def load_state(path: Path, like: TrainState) -> TrainState:
    """Reads what `Trainer.save` wrote, sharded like `like`.

    Raises:
        Unreadable: the folder holds another model's state, or is damaged.
        UserError: a narrower type would lose precision.
    """
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), flatten(like))
    with ocp.StandardCheckpointer() as reader:
        try:
            arrays = reader.restore(path_of(path), target)
            stored = reader.metadata(path_of(path)).item_metadata.tree
            state = unflatten(arrays, like)
        except Exception as error:  # tensorstore raises a bare Exception for a damaged file
            raise Unreadable(f"{path} cannot be read: {first_line(error)}") from error
    # Orbax casts silently. A wider type loses nothing and is only noted: it comes from a run before
    # `optimizer.moments_dtype`, whose moments had the type of the weights.
    for part, arrays in target.items():
        pairs = {(stored[part][name].dtype, x.dtype) for name, x in arrays.items()}
        for before, now in (pair for pair in pairs if pair[0] != pair[1]):
            change = f"{path} holds {part} in {before}, and this run keeps them in {now}"
            if before.itemsize > now.itemsize:
                remedy = "set optimizer.moments_dtype and model.param_dtype as they were, or start with --fresh"
                raise UserError(f"{change}: {remedy}")
            print(f"note: {change}: they are the same numbers", file=sys.stderr)
    return state


def load_params(path: Path, target: Mapping[str, jax.ShapeDtypeStruct]) -> Params:
    """Reads the trained parameters alone from what `Trainer.save` wrote, in the dtypes and sharding of `target`.

    Raises:
        Unreadable: the folder holds another model's parameters, or is damaged.
    """
    tree = {"params": dict(target)}
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
    with ocp.PyTreeCheckpointer() as reader:
        try:
            wanted = ocp.args.PyTreeRestore(item=tree, restore_args=restore_args, partial_restore=True)
            return reader.restore(path_of(path), wanted)["params"]
        except Exception as error:  # tensorstore raises a bare Exception for a damaged file
            raise Unreadable(f"{path} cannot be read: {first_line(error)}") from error


def flatten(state: TrainState) -> dict[str, dict[str, jax.Array]]:
    """A train state as plain dicts of arrays, since optax's classes do not belong on disk."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.moments)
    moments = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    parts = {"params": dict(state.params), "moments": moments, "step": {"step": state.step}}
    critic = {} if state.critic is None else flatten(state.critic)
    return parts | {f"critic_{name}": value for name, value in critic.items()}


def unflatten(arrays: Mapping[str, dict[str, jax.Array]], like: TrainState) -> TrainState:
    """The inverse of `flatten`, in the structure of `like`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like.moments)
    moments = [arrays["moments"][jax.tree_util.keystr(path, simple=True, separator="/")] for path, _ in leaves]
    critic = None
    if like.critic is not None:
        of_critic = {name.removeprefix("critic_"): x for name, x in arrays.items() if name.startswith("critic_")}
        critic = unflatten(of_critic, like.critic)
    return TrainState(arrays["params"], jax.tree.unflatten(structure, moments), arrays["step"]["step"], critic)


def _show_unraisable(shown: Callable[[Any], None], unraisable: Any) -> None:
    """Keeps out the tracebacks of tensorstore's threads, which report to an event loop that a failed write has ended;
    all else goes to `shown`, the hook before."""
    if str(unraisable.exc_value) != "Event loop is closed":
        shown(unraisable)


# Tracebacks that Orbax and its abandoned tasks log for a failed write are kept out: it is reported as one error.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(
        lambda record: "/orbax/" not in record.pathname and "exception was never retrieved" not in record.getMessage()
    )
sys.unraisablehook = partial(_show_unraisable, sys.unraisablehook)
