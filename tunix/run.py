"""A recipe becomes a run folder: started, resumed by itself, finished, exported.

The folder holds `recipe.yaml` (resolved), `metrics.jsonl`, `samples.jsonl`, `checkpoints/` and at the end `export/`: a
Hugging Face folder, or a PEFT adapter where an adapter was trained on a published base. A recipe with stages has one
such folder per stage, each starting from the export of the one before.
"""

import fcntl
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tunix.assemble import assemble
from tunix.config import AdapterConfig
from tunix.errors import UserError
from tunix.files import write_text_atomic
from tunix.loop import Job, Loop
from tunix.recipe import Recipe
from tunix.recorder import Recorder
from tunix.samples import drop_after, unigram_entropy
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.metrics import open_sinks, read_rows, write_rows
from tunix.trainer.progress import Display, readable


@dataclass(frozen=True)
class RunResult:
    """What a finished run left behind."""

    folder: Path
    """The run folder; of the last stage where there are stages."""
    metrics: list[dict[str, Any]]
    """The rows of metrics.jsonl."""
    samples: list[dict[str, Any]]
    """The rows of samples.jsonl."""
    unigram_entropy: float | None
    """Nats: the held-out loss of knowing nothing but how common each token is; None without held-out rows."""

    @property
    def export(self) -> Path:
        """The exported weights: a Hugging Face folder, or a PEFT adapter."""
        return self.folder / "export"


def run(recipe: Recipe, *, fresh: bool = False) -> RunResult:
    """Trains a recipe, or goes on with it where its folder holds the same one.

    Args:
        fresh: start again; what the folder holds is moved aside.

    Raises:
        UserError: something that the user can mend; nothing of theirs was touched.
        Interrupted: after SIGINT or SIGTERM, with a checkpoint.
    """
    keep_compilations()
    folder = claim(recipe, fresh)
    with locked(folder):
        if not recipe.stages:
            return _run(recipe, folder)
        results = [_run(stage, claim(stage, fresh=False)) for stage in recipe.stages]
    return results[-1]


def export(run: Path, out: Path, *, adapter: bool = False, step: int | None = None) -> None:
    """Writes a run's weights as a Hugging Face folder, or its adapter as a PEFT folder.

    Args:
        run: the run folder.
        out: the folder to write; it must not exist.
        adapter: the adapter alone; else it is merged into the base.
        step: of which checkpoint; the newest by default.

    Raises:
        UserError: there is no such run, checkpoint or adapter, or `out` exists.
    """
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no recipe.yaml")
    recipe = Recipe.load(run / "recipe.yaml")
    if recipe.stages:
        recipe = recipe.stages[-1]
        run = run / Path(recipe.output).name
    if adapter and recipe.adapter is None:
        raise UserError(f"{run} trained all weights: there is no adapter to export; leave --adapter out")
    display = Display("export", 0, 0)
    checkpoints = Checkpoints(run / "checkpoints", recipe.checkpoint)
    wanted = step or checkpoints.latest()
    if wanted is None or wanted not in checkpoints.steps():
        raise UserError(f"{run} has no checkpoint{f' of step {step}' if step else ''}; it has {checkpoints.steps()}")
    job = assemble(recipe, run, display)
    job.trainer.state, _ = checkpoints.restore(wanted, job.trainer.state)
    job.trainer.export(out, adapter=adapter)
    job.batches.close()
    display.say(f"step {wanted} of {run} is in {out}")


def claim(recipe: Recipe, fresh: bool) -> Path:
    """The run folder, made or recognised as this recipe's own.

    Raises:
        UserError: it holds something else.
    """
    folder = Path(recipe.output).expanduser()
    if folder.exists() and fresh:
        moved_aside(folder)
    kept = folder / "recipe.yaml"
    if kept.is_file():
        if differing := recipe.difference(Recipe.load(kept)):
            raise UserError(
                f"{folder} holds the run of another recipe: {', '.join(differing)} differ. Give this one another "
                "output=..., or start again with --fresh (the old run is moved aside)."
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no run: set output to another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(kept, recipe.to_yaml())
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror}") from error
    return folder


def moved_aside(folder: Path) -> Path:
    """Renames a folder to the first free `folder.old-N`, so that nothing is lost."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return folder.rename(aside)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second process off the folder; the lock ends with this process, however it ends.

    Raises:
        UserError: another process works in it.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: another tunix process is running there") from error
        yield


def keep_compilations() -> None:
    """Compiled programs are kept in the user's cache folder, for this machine: a second start is faster."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/tunix/compiled").expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _run(recipe: Recipe, folder: Path) -> RunResult:
    """One stage, from wherever it was to its end."""
    checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint)
    start = checkpoints.latest() or 0
    display = Display(folder.name, recipe.steps or 0, start)
    samples = folder / "samples.jsonl"
    write_rows(samples, drop_after(samples, start))
    job = assemble(recipe, folder, display)
    display.total(job.total)
    sinks = open_sinks(folder, recipe.logging, recipe.sections(), start)
    decoder = job.trainer.machinery.model.config
    recorder = Recorder(sinks, display, recipe.logging, decoder, frozen=recipe.adapter is not None)
    loop = Loop(job, checkpoints, recorder)
    try:
        if start:
            loop.restore(start)
        loop.run()
        checkpoints.close()
    finally:
        recorder.close()
        job.batches.close()
        display.close()
    if not (folder / "export").exists():
        job.trainer.export(folder / "export", adapter=_exports_adapter(recipe))
    result = RunResult(
        folder,
        read_rows(folder / "metrics.jsonl"),
        read_rows(samples),
        unigram_entropy(job.evaluation) if job.evaluation else None,
    )
    display.say(_summary(result, recipe, job))
    return result


def _exports_adapter(recipe: Recipe) -> bool:
    """An adapter is exported alone where its base can be found again."""
    return recipe.adapter is not None and recipe.model.path is not None


def _summary(result: RunResult, recipe: Recipe, job: Job) -> str:
    """The last words of a run: what was reached, where it is, how to go on."""
    lines = [f"done in {readable(result.metrics[-1]['time/seconds'])} s: {result.folder}"]
    losses = [row["eval/loss"] for row in result.metrics if "eval/loss" in row]
    if losses:
        lines.append(f"held-out loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token (perplexity {math.exp(losses[-1]):.3g})")
        lines.append(f"knowing only how common each token is would give {result.unigram_entropy:.3f}")
    lines.append(f"weights: {result.export}")
    model = f'"model={{path: {result.folder}, dtype: {recipe.model.dtype}}}"'
    lines.append(f"go on from there: tunix run {result.folder}/recipe.yaml {model} output={result.folder}-next")
    return "\n".join(lines)
