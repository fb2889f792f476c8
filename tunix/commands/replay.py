"""`tunix replay`: a step of a run computed again, compared with what was recorded, and taken apart by sequence.

The run's own parts are built in a temporary folder and go on from the last checkpoint before the step; the run folder
is only read. Asynchronous runs and servers are refused: what they sample depends on when.

Axes: S sequences.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tunix.algorithms.base import Update
from tunix.errors import NonFinite, UserError
from tunix.hf.source import TOKENIZER
from tunix.recipe.recipe import recipe_of_run
from tunix.run.build import assemble
from tunix.run.folder import checkpoint_folder
from tunix.run.loop import Job
from tunix.run.recorder import Recorder
from tunix.run.sequences import sequences_of
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.config import LoggingConfig
from tunix.trainer.progress import Display
from tunix.trainer.trainer import Trainer
from tunix.types import Loss, LossOutputs, Term
from tunix.util.atomic_io import read_rows
from tunix.util.startup import prepare_jax

OTHERS = ("time/", "perf/", "compile/", "eval/")
"""Prefixes of metrics that no other process has, or that are no part of a step."""
COLUMNS = ("sequence", "loss", "log-prob", "advantage", "reward", "log ratio", "length")
WIDTHS = (9, 12, 11, 12, 12, 12, 10)


def replay(run: Path, step: int) -> bool:
    """Computes a step of a run again and prints what came of it; whether all metrics are those that were recorded.

    Raises:
        UserError: the folder holds no such step, no checkpoint before it, or the step cannot be repeated exactly.
    """
    recipe = recipe_of_run(run)
    if recipe is None:
        raise UserError(f"{run} is no run: there is no recipe.yaml in it")
    folder, metrics = Path(recipe.output).expanduser(), Path(recipe.output).expanduser() / "metrics.jsonl"
    judge = recipe.reward and recipe.reward.judge
    for key, varies in {
        "rollout.max_staleness": recipe.rollout.max_staleness > 0,
        "rollout.engine": recipe.rollout.engine != "tunix",
        "reward.judge": judge is not None and judge.is_server,
        "teacher.path": recipe.teacher is not None and recipe.teacher.is_served,
    }.items():
        if varies:
            raise UserError(
                f"{folder}: {key}: what is sampled or scored depends on when: no step of it can be repeated"
            )
    try:
        rows = {row["step"]: row for row in read_rows(metrics) if row["step"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{metrics} is damaged: {error}") from error
    if step > max(rows, default=0) and not (folder / f"nonfinite-{step}.jsonl").exists():
        raise UserError(f"{folder}: there is no step {step}: the run has done {max(rows, default=0)} so far")
    prepare_jax()
    with closing(Checkpoints(checkpoint_folder(recipe, folder), recipe.checkpoint, read_only=True)) as checkpoints:
        steps = checkpoints.steps()
        start = max((number for number in steps if number < step), default=None)
        if start is None and step > (recipe.checkpoint.every or 0):
            kept = f"the first that is kept is that of step {steps[0]}" if steps else "there is none"
            raise UserError(f"{folder}: no checkpoint is early enough for step {step}: {kept} (checkpoint.keep)")
        with tempfile.TemporaryDirectory(prefix="tunix-replay-") as scratch:
            if (folder / TOKENIZER).is_dir():
                shutil.copytree(folder / TOKENIZER, Path(scratch) / TOKENIZER)
            with closing(Display(folder.name, step, start or 0)) as display:
                job = assemble(recipe, Path(scratch), display)
                with closing(job):
                    return _repeated(job, checkpoints, display, start, step, rows.get(step))


def _repeated(
    job: Job, checkpoints: Checkpoints, display: Display, start: int | None, step: int, recorded: dict[str, Any] | None
) -> bool:
    """Goes on from a checkpoint (None: the first weights) to a step, and prints it; whether it is as `recorded`."""
    client, row = job.client, Kept({})
    assert isinstance(client, Trainer)
    if start is not None:
        record = checkpoints.restore(start, client)
        job.stream.set_state(record["data"])
        job.algorithm.set_state(record["algorithm"])
    for _ in range(start or 0, step - 1):
        job.algorithm.update(client, next(job.stream))
    item, before = next(job.stream), jax.tree.map(jax.numpy.copy, client.state)
    update = job.algorithm.update(client, item)
    recorder = Recorder([row], display, LoggingConfig(), job.work)
    print(f"step {step}, from {'the first weights' if start is None else f'the checkpoint of step {start}'}")
    differing: list[str] = []
    try:
        recorder.push(step, update, item.accounting)
        recorder.flush()
    except NonFinite as error:
        print(str(error).partition(". ")[0])
    if recorded is None:
        print("nothing was recorded of this step to compare it with")
    else:
        ours, theirs = ({k: v for k, v in x.items() if not k.startswith(OTHERS)} for x in (row.values, recorded))
        differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        print(f"{len(theirs) - len(differing)} of {len(theirs)} metrics are equal to the last bit")
        for name in differing:
            print(f"differs: {name}: {ours.get(name)}, recorded {theirs.get(name)}")
    client.state = before  # the weights that the step began with
    print("\n" + "".join(f"{name:>{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=True)))
    lines = terms_of(client, job.algorithm.objective, update)
    for line in sorted(lines, key=lambda line: -line[1] if math.isfinite(line[1]) else -math.inf):
        cells = [line[0], *("-" if x is None else f"{x:.5g}" for x in line[1:])]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)))
    return not differing


@dataclass
class Kept:
    """Keeps the last row of metrics, as `metrics.jsonl` would have it."""

    values: dict[str, Any]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.values = {"step": step, **{name: x if math.isfinite(x) else None for name, x in values.items()}}

    def close(self) -> None:
        """Does nothing."""


def terms_of(client: Trainer, loss: Loss, update: Update) -> Iterator[tuple[Any, ...]]:
    """Of each sequence of a step, with the client's present weights, the values of `COLUMNS`; None where there is none.

    The loss is its part of the update's, so that all of them add up to it (without an auxiliary loss of routers); that
    of a pair is its first sequence's. The others are means over its trained tokens; the log ratio is to the
    sampler's, or to those before the updates.
    """
    probe = Loss(
        lambda inputs: LossOutputs({"logprob": Term(inputs.logprobs, "sequences")}), temperature=loss.temperature
    )
    computed: list[list[np.ndarray]] = []
    for row in sequences_of(update):
        if row["update"] == len({id(batch) for batch in update.batches}):
            return  # the same batches again, in a later epoch
        batch, sequence = update.batches[row["update"]], row["sequence"]
        if row["update"] == len(computed):
            computed.append([client.learner.shares(batch, x) for x in (loss, *([probe] if loss.logprobs else []))])
        weight, trained = float(batch.weights[sequence]), np.array(row["trained"]) > 0
        names = {"advantages", "sampler_logprobs", "old_logprobs"} & row.keys() if trained.any() else ()
        means = {name: float(np.mean(np.array(row[name], float)[trained])) for name in names}
        logprob = None
        if loss.logprobs and weight:
            logprob = float(computed[-1][1][sequence] * batch.counts["sequences"] / weight)
        old = means.get("sampler_logprobs", means.get("old_logprobs"))
        yield (
            str(sequence) if len(update.batches) == 1 else f"{row['update']}.{sequence}",
            float(computed[-1][0][sequence]),
            logprob,
            means.get("advantages"),
            float(row["reward"]) if "reward" in row else None,
            None if logprob is None or old is None else logprob - old,
            float(batch.lengths[sequence]),
        )
