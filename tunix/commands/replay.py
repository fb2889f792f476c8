"""`tunix replay`: a step of a run computed again, compared with what was recorded, and taken apart by sequence.

The run's own parts are built in a temporary folder and go on from the last checkpoint before the step; the run folder
is only read. Asynchronous runs and servers are refused: what they sample depends on when.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
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
from tunix.run.recorder import Recorder
from tunix.run.sequences import sequences_of
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.config import LoggingConfig
from tunix.trainer.metrics import JsonLines, Sink
from tunix.trainer.progress import Display
from tunix.trainer.trainer import Trainer
from tunix.types import Loss, LossOutputs, Term
from tunix.util.atomic_io import read_rows, reading, refuse_foreign
from tunix.util.startup import prepare_jax

OTHERS = ("time/", "perf/", "compile/", "eval/")
"""Prefixes of metrics that each process has of its own, or that are no part of a step."""
COLUMNS = {"sequence": 9, "loss": 12, "log-prob": 11, "advantage": 12, "reward": 12, "log ratio": 12, "length": 10}
"""Names and widths, 78 characters in all."""


def replay(run: Path, step: int) -> bool:
    """Computes a step of a run again and prints what came of it; whether all metrics are those that were recorded.

    Raises:
        UserError: the folder holds no such step, no checkpoint before it, or the step cannot be repeated exactly.
    """
    recipe = recipe_of_run(run)
    if recipe is None:
        raise UserError(f"{run} is no run: there is no recipe.yaml in it")
    folder, rewards, teacher = Path(recipe.output).expanduser(), recipe.reward, recipe.teacher
    for key, varies in {
        "rollout.max_staleness": recipe.rollout.max_staleness > 0,
        "rollout.engine": recipe.rollout.engine != "tunix",
        "reward.judge": rewards is not None and rewards.judge is not None and rewards.judge.is_server,
        "teacher.path": teacher is not None and teacher.is_served,
    }.items():
        if varies:
            raise UserError(
                f"{folder}: {key}: what is sampled or scored depends on when: no step of it can be repeated"
            )
    rows = {row["step"]: row for row in read_rows(folder / "metrics.jsonl", "step")}
    if step > (done := max(rows, default=0)) and not (folder / f"nonfinite-{step}.jsonl").exists():
        raise UserError(f"{folder}: there is no step {step}: the run has done {done} so far")
    prepare_jax()
    with ExitStack() as stack:
        place = checkpoint_folder(recipe, folder)
        checkpoints = stack.enter_context(closing(Checkpoints(place, recipe.checkpoint, read_only=True)))
        steps = checkpoints.steps()
        start = max((number for number in steps if number < step), default=0)
        if not start and step > (recipe.checkpoint.every or 0):
            kept = f"the first that is kept is that of step {steps[0]}" if steps else "there is none"
            raise UserError(f"{folder}: no checkpoint is early enough for step {step}: {kept} (checkpoint.keep)")
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tunix-replay-")))
        if (folder / TOKENIZER).is_dir():
            for file in (folder / TOKENIZER).iterdir():
                refuse_foreign(folder / TOKENIZER, file.name)
            shutil.copytree(folder / TOKENIZER, scratch / TOKENIZER, ignore_dangling_symlinks=True)
        display = stack.enter_context(closing(Display(folder.name, step, start)))
        job = stack.enter_context(closing(assemble(recipe, scratch, display)))
        client, algorithm = job.client, job.algorithm
        assert isinstance(client, Trainer)
        if start:
            record = checkpoints.restore(start, client.load)
            with reading(f"{place}/{start}"):
                job.stream.set_state(record["data"])
                algorithm.set_state(record["algorithm"])
        for _ in range(start, step - 1):
            algorithm.update(client, next(job.stream))
        item, before = next(job.stream), jax.tree.map(jax.numpy.copy, client.state)
        update = algorithm.update(client, item)
        print(f"step {step}, from {f'the checkpoint of step {start}' if start else 'the first weights'}")
        sinks: list[Sink] = [JsonLines(scratch / "metrics.jsonl", None)]
        recorder = Recorder(sinks, display, LoggingConfig(), job.work, recipe.optimizer.on_nonfinite)
        recorder.push(step, update, item.accounting)
        try:
            recorder.flush()
        except NonFinite as error:
            print(str(error).partition(". ")[0])
        (computed,) = read_rows(scratch / "metrics.jsonl") or [{}]
        again, known = (
            {name: x for name, x in row.items() if not name.startswith(OTHERS)}
            for row in (computed, rows.get(step, {}))
        )
        differing = sorted(name for name in again.keys() | known.keys() if again.get(name) != known.get(name))
        if known:
            print(f"{len(known) - len(differing)} of {len(known)} metrics are equal to the last bit")
            for name in differing:
                print(f"differs: {name}: {again.get(name)}, recorded {known.get(name)}")
        else:
            print("nothing was recorded of this step to compare it with")
        client.state = before  # the weights that the step began with
        print("\n" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
        lines = terms_of(client, algorithm.objective, update)
        for name, *values in sorted(lines, key=lambda line: -line[1] if math.isfinite(line[1]) else -math.inf):
            cells = [name, *("-" if x is None else f"{x:.5g}" for x in values)]
            print("".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)))
        return not (known and differing)


def terms_of(client: Trainer, loss: Loss, update: Update) -> Iterator[tuple[Any, ...]]:
    """Yields the values of `COLUMNS` for each sequence of a step, by the client's present weights; None for no value.

    The loss is its part of the update's, so that all of them add up to it (without an auxiliary loss of routers); that
    of a pair is its first sequence's. The others are means over its trained tokens; the log ratio is to the
    sampler's, or to those before the updates.
    """
    probe = replace(loss, function=lambda inputs: LossOutputs({"x": Term(inputs.logprobs, "sequences")}))
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
        shares, logprob = [x[sequence] for x in computed[-1]], None
        if loss.logprobs and weight:
            logprob = float(shares[1] * batch.counts["sequences"] / weight)
        old = means.get("sampler_logprobs", means.get("old_logprobs"))
        ratio = None if logprob is None or old is None else logprob - old
        name = str(sequence) if len(update.batches) == 1 else f"{row['update']}.{sequence}"
        reward = float(row["reward"]) if "reward" in row else None
        yield name, float(shares[0]), logprob, means.get("advantages"), reward, ratio, float(batch.lengths[sequence])
