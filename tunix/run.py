"""A recipe becomes a run folder: started, resumed by itself, finished, exported.

The folder holds `recipe.yaml` (resolved), `metrics.jsonl`, `samples.jsonl`, `checkpoints/` and at the end `curves.svg`
and `export/`: a Hugging Face folder, or a PEFT adapter where an adapter was trained on a published base. A recipe with
stages has one such folder per stage, each starting from the export of the one before.
"""

import fcntl
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax

from tunix.assemble import assemble, build_trainer
from tunix.catalogue import algorithm_class
from tunix.config import MeshConfig
from tunix.curves import write_curves
from tunix.errors import UserError
from tunix.files import refuse_taken, write_text_atomic
from tunix.loop import Loop
from tunix.mesh import build_mesh
from tunix.models.schemes import check_packs
from tunix.recipe import Recipe
from tunix.recorder import Recorder
from tunix.samples import unigram_entropy
from tunix.source import TOKENIZER, of_recipe
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.client import Trainer
from tunix.trainer.metrics import forget_after, open_sinks, perplexity, read_rows
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
    """Nats: the held-out loss of knowing nothing but how common each token is; None where that is not measured."""

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
    with terminable(), claimed(recipe, fresh) as folder:
        if not recipe.stages:
            return _run(recipe, folder)
        return _run_stages(recipe.stages)


def export(run: Path, out: Path, *, adapter: bool = False, packed: bool = False, step: int | None = None) -> None:
    """Writes a run's weights as a Hugging Face folder, or its adapter as a PEFT folder.

    The run may be going on meanwhile, or have been made on other devices; its rows need not be there any more.

    Args:
        run: the run folder.
        out: the folder to write; it must not exist.
        adapter: the adapter alone; else it is merged into the base.
        packed: rounded weights in few bits; else each is the number on its grid.
        step: of which checkpoint; the newest by default.

    Raises:
        UserError: there is no such run, checkpoint or adapter, or `out` exists.
    """
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no recipe.yaml")
    # As it lies here: a later stage looks for the one before it beside itself, wherever the run was made.
    recipe = Recipe.load(run / "recipe.yaml", [f"output={json.dumps(str(run))}"])
    if recipe.stages:
        recipe = recipe.stages[-1]
        run = Path(recipe.output)
    if adapter and recipe.adapter is None:
        raise UserError(f"{run} trained all weights: there is no adapter to export; leave --adapter out")
    if packed:
        if recipe.quantization is None:
            raise UserError(f"{run} trained no rounded weights (`quantization` in its recipe); leave --packed out")
        check_packs(recipe.quantization)
    refuse_taken(out)
    with ExitStack() as stack:
        display = stack.enter_context(closing(Display("export", 0, 0)))
        checkpoints = stack.enter_context(closing(Checkpoints(run / "checkpoints", recipe.checkpoint, read_only=True)))
        wanted = step or checkpoints.latest()
        if wanted is None or wanted not in checkpoints.steps():
            asked = f" of step {step}" if step else ""
            raise UserError(f"{run} has no checkpoint{asked}; it has {checkpoints.steps()}")
        source = of_recipe(recipe.model, recipe.data.chat_template, run / TOKENIZER, rows=None)
        algorithm = algorithm_class(recipe.algorithm.name)(recipe.algorithm)
        trainer = build_trainer(recipe, source, build_mesh(MeshConfig()), wanted, algorithm)
        trainer.state, _ = checkpoints.restore(wanted, trainer.state)
        trainer.export(out, adapter=adapter, packed=packed)
        _tell_merging(trainer, display)
        display.say(f"step {wanted} of {run} is in {out}")


@contextmanager
def claimed(recipe: Recipe, fresh: bool) -> Iterator[Path]:
    """The run folder, made or recognised as this recipe's own, and kept from other processes meanwhile.

    Raises:
        UserError: it holds something else, another process works in it, or it cannot be written.
    """
    folder = Path(recipe.output).expanduser()
    kept = folder / "recipe.yaml"
    if not kept.is_file() and _foreign(folder):
        raise UserError(f"{folder} is not empty and holds no run: set output to another folder")
    if fresh and kept.is_file():
        with locked(folder):
            moved_aside(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror}") from error
    with locked(folder):
        # Without a checkpoint there is nothing to lose: a recipe that was mended may take the folder over.
        if kept.is_file() and _trained(folder) and (differing := recipe.difference(Recipe.load(kept))):
            raise UserError(
                f"{folder} holds the run of another recipe: {', '.join(differing)} differ. Give this one another "
                "output=..., or start again with --fresh (the old run is moved aside)."
            )
        write_text_atomic(kept, recipe.to_yaml())
        yield folder


def _foreign(folder: Path) -> bool:
    """Whether a folder holds what no start of a run has left there."""
    ours = (".lock", "recipe.yaml")
    return folder.is_dir() and not all(file.name.startswith(ours) for file in folder.iterdir())


def _trained(folder: Path) -> bool:
    """Whether a run, or one of its stages, has a checkpoint or an export."""
    places = [folder, *(path.parent for path in folder.glob("*/recipe.yaml"))]
    steps = [step for place in places for step in place.glob("checkpoints/*") if step.name.isdigit()]
    return bool(steps) or any((place / "export").exists() for place in places)


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
        UserError: another process works in it, or the folder cannot be written.
    """
    with _lock_file(folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder}: another tunix process is running there; wait for it, or set another output"
            ) from error
        yield


def _lock_file(folder: Path) -> IO[str]:
    try:
        return (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror}") from error


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends like Ctrl-C, with everything put in order, also where no update is going on."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def keep_compilations() -> None:
    """Compiled programs are kept in the user's cache folder, for this machine: a second start is faster."""
    # The ignored rule: jax gives its config these names when it is imported, so pyright cannot know them.
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/tunix/compiled").expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _run_stages(stages: tuple[Recipe, ...]) -> RunResult:
    """All stages in their order; those that are finished only say so."""
    folders = [Path(stage.output).expanduser() for stage in stages]
    results: list[RunResult] = []
    for stage, folder, after in zip(stages, folders, [*folders[1:], None], strict=True):
        folder.mkdir(exist_ok=True)
        write_text_atomic(folder / "recipe.yaml", stage.to_yaml())
        results.append(_run(stage, folder, after))
    # One picture of all of them, beside the stages' own.
    write_curves(folders[0].parent, [(one.folder.name, one.metrics) for one in results])
    return results[-1]


def _run(recipe: Recipe, folder: Path, after: Path | None = None) -> RunResult:
    """One stage, from wherever it was to its end.

    Args:
        after: the folder of the stage that starts from this one's export, if there is one.
    """
    with ExitStack() as stack:
        checkpoints = stack.enter_context(closing(Checkpoints(folder / "checkpoints", recipe.checkpoint)))
        start = checkpoints.latest()
        display = stack.enter_context(closing(Display(folder.name, recipe.steps or 0, start or 0)))
        if start is None and (folder / "export").exists():
            display.say(f"{folder} is finished and its checkpoints are gone: it can only start again, with --fresh")
            return _result(folder, None)
        _prepare(folder, start)
        job = assemble(recipe, folder, display)
        stack.callback(job.close)
        display.total(job.total)
        sinks = open_sinks(folder, recipe.logging, recipe.sections(), start)
        decoder = job.trainer.machinery.model.config
        recorder = Recorder(sinks, display, recipe.logging, decoder, recipe.adapter)
        stack.enter_context(closing(recorder))
        loop = Loop(job, checkpoints, recorder, start)
        if loop.finished:
            display.say(f"finished already, at step {loop.step}; a higher steps=... goes on from there")
        else:
            _reopen(folder, after, display, loop.step)
            loop.run()
            display.say(f"done in {readable(recorder.seconds)} s: {folder}")
        if not (folder / "export").exists():
            job.trainer.export(folder / "export", adapter=job.exports_adapter)
            _tell_merging(job.trainer, display)
    algorithm = job.algorithm
    # Else the loss is no likelihood of what was said.
    speaks = algorithm.train_on in ("completion", "all") and algorithm.held_out_objective.divergence is None
    held_out = job.evaluation.batches if speaks else []
    result = _result(folder, unigram_entropy(held_out) if held_out else None)
    picture = write_curves(folder, [(folder.name, result.metrics)])
    display.say(_summary(result, recipe, picture))
    return result


def _tell_merging(trainer: Trainer, display: Display) -> None:
    """Says what became of a quantized base that an adapter was merged into."""
    model = trainer.machinery.model
    if trainer.merging is not None and model.quantization is not None:
        display.say(
            f"the {model.quantization.base} base was dequantized, and the adapter added to it: writing that as "
            f"{model.dtype} moves the matrices by {trainer.merging:.2%} (root mean square)"
        )


def _result(folder: Path, entropy: float | None) -> RunResult:
    """What the files of a finished run say."""
    return RunResult(folder, read_rows(folder / "metrics.jsonl"), read_rows(folder / "samples.jsonl"), entropy)


def _prepare(folder: Path, start: int | None) -> None:
    """Leaves of earlier starts what belongs to the checkpoint that the run goes on from."""
    for path in folder.glob("*.tmp-*"):  # what a kill left half written; nobody else writes here
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    forget_after(folder / "samples.jsonl", start)
    if start is None and (folder / TOKENIZER).is_dir():
        shutil.rmtree(folder / TOKENIZER)  # made from rows that may have been mended since


def _reopen(folder: Path, after: Path | None, display: Display, step: int) -> None:
    """Before training goes on, lays the export of fewer steps aside.

    Raises:
        UserError: another stage has started from it.
    """
    if step:
        display.say(f"going on from step {step}")
    if not (folder / "export").exists():
        return
    if after is not None and _trained(after):
        raise UserError(
            f"{folder} was asked for more steps, but {after} has started from its weights already: start again with "
            "--fresh or another output"
        )
    moved_aside(folder / "export")


def _summary(result: RunResult, recipe: Recipe, picture: Path | None) -> str:
    """The last words of a run: what was reached, where it is, how to go on.

    Args:
        picture: of its curves, where there were numbers to draw.
    """
    lines: list[str] = []
    rewards = [row["eval/reward"] for row in result.metrics if "eval/reward" in row]
    if rewards:
        lines.append(f"held-out reward {rewards[0]:.3f} -> {rewards[-1]:.3f} (greedy answers)")
    told = [row["eval/rewards/accuracy"] for row in result.metrics if "eval/rewards/accuracy" in row]
    if told:
        sides = (
            "completions on their label's side" if recipe.algorithm.reads == "labels" else "pairs in the right order"
        )
        lines.append(f"held-out {sides} {told[0]:.3f} -> {told[-1]:.3f}")
    apart = [row["eval/distill/divergence"] for row in result.metrics if "eval/distill/divergence" in row]
    if apart:
        lines.append(f"held-out distance to the teacher {apart[0]:.3f} -> {apart[-1]:.3f} nats per token")
    losses = [row["eval/loss"] for row in result.metrics if "eval/loss" in row]
    if losses and result.unigram_entropy is not None:
        first, last = losses[0], losses[-1]
        lines.append(f"held-out loss {first:.3f} -> {last:.3f} nats per token (perplexity {perplexity(last):.3g})")
        lines.append(f"knowing only how common each token is would give {result.unigram_entropy:.3f}")
    lines += [f"curves: {picture}"] if picture else []
    lines.append(f"weights: {result.export}")
    model = f'"model={{path: {result.folder}, dtype: {recipe.model.dtype}}}"'
    lines.append(f"go on from there: tunix run {result.folder}/recipe.yaml {model} output={result.folder}-next")
    return "\n".join(lines)
