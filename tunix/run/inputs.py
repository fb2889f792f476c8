"""The inputs of a run: its model's structure and tokenizer, its rows, and what steps and evaluations make of them."""

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tunix.algorithms.distill.algorithm import Distill
from tunix.algorithms.on_policy import OnPolicy
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.curriculum import curriculum_of
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Batches, Prompts, pictures_of_row
from tunix.data.sources import Rows
from tunix.data.teacher import StoredTeacher, TeacherChoice, TeacherReader
from tunix.data.tokenizer import Tokenizer
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.hf.source import TOKENIZER, Source, of_recipe
from tunix.recipe.recipe import Recipe
from tunix.rollout.asynchronous import FILE, AsyncRollouts, Holding, Journal
from tunix.rollout.backlog import Backlog
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.environments.adapters import evaluation_rows, training_rows
from tunix.run.setup import Setup, layout
from tunix.trainer.digest import digest
from tunix.trainer.trainer import Trainer

MEASURED = 4
"""Micro-batches that the completions fill, at full length, whose log-probs are computed at a time while others are
sampled: of fewer, a larger share would be padding in the last one."""


@dataclass(frozen=True)
class Inputs:
    """The rows of a run, and the source of its model and tokenizer."""

    source: Source
    train: Rows
    held_out: Rows | None
    teacher: TeacherReader | TeacherChoice | StoredTeacher | None = None
    """Renders rows for a teacher that reads them in another way than the student, or for the one that a row names, or
    reads what one has said of them; None without one."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that renders the rows; None where rows hold token ids."""
        return self.source.tokenizer

    def examples(self, rows: Rows, data: DataConfig, kind: RowKind, taught: bool = False) -> Examples:
        """Rows as they are rendered, of which a kind is read; `taught` are those of which a teacher reads them too."""
        teacher = self.teacher if taught else None
        return Examples(rows, self.tokenizer, data, kind, self.source.decoder.vocab_size, teacher)


def open_inputs(recipe: Recipe, folder: Path) -> Inputs:
    """Opens the model's structure, the tokenizer and the rows of a recipe; a tokenizer that is trained on the rows is
    stored in `folder`, that of the run.

    Raises:
        UserError: something of it is not there, or the held-out split would be the one that is trained on.
    """
    data, environment = recipe.data, recipe.rollout.environment
    train = training_rows(data, environment, recipe.seed)
    held_out = evaluation_rows(data, environment, recipe.seed)
    if held_out is not None and held_out.split and not data.eval_split and held_out.shares_rows_with(train):
        raise UserError(
            f"data.eval: {data.eval} has no rows to hold out: its split {held_out.split!r} is trained on. Name other "
            f"rows; or, to measure on these, set data.eval_split: {held_out.split}"
        )
    return Inputs(of_recipe(recipe.model, data, folder / TOKENIZER, train), train, held_out)


def compare_views(inputs: Inputs) -> None:
    """Checks that all processes of the run see the same rows, model and tokenizer.

    Raises:
        UserError: one of them sees others, or did not answer.
    """
    if processes.number() == 1:
        return
    source = inputs.source
    folders = [folder for folder in (source.folder, source.merged) if folder is not None]
    files = (
        f"{file.name} {file.stat().st_size}" for folder in folders for file in sorted(folder.glob("*.safetensors"))
    )
    tokens = sorted(source.tokenizer.hf.get_vocab().items()) if source.tokenizer is not None else ()
    # The model's structure, its files and the tokens of its vocabulary.
    model = digest([str(source.decoder), *files, *map(str, tokens)])[:12]
    rows = {"data.train": inputs.train} | ({} if inputs.held_out is None else {"data.eval": inputs.held_out})
    about = {key: f"{len(some)} rows (digest {some.digest[:12]})" for key, some in rows.items()}
    about["model"] = f"{source.decoder.family} (digest {model})"
    processes.agree(about)


def open_stream(setup: Setup, inputs: Inputs, collector: Collector, total: int) -> Batches | RolloutStream:
    """The stream of the inputs of `total` steps: batches of the rows, or rollouts of their prompts."""
    recipe, algorithm, microbatcher = setup.recipe, setup.algorithm, setup.microbatcher
    data = recipe.data
    kind = recipe.row_kind
    shows = isinstance(algorithm, Distill) and algorithm.config.success is not None
    taught = inputs.examples(inputs.train, data, kind, taught=True)
    examples = inputs.examples(inputs.train, data, kind) if shows else taught
    if not setup.samples:
        packed = layout(algorithm, microbatcher.multiple)
        return Batches(examples, recipe.batch_size, recipe.seed, recipe.epochs, packed)
    curriculum = curriculum_of(data, examples.rows, recipe.seed, total * recipe.batch_size)
    stream = Prompts(examples, recipe.seed, recipe.epochs, curriculum)
    spare, together = recipe.rollout.spare(recipe.batch_size), setup.answers_together
    return RolloutStream(
        RolloutStep(
            collector=collector,
            stream=stream,
            backlog=Backlog(stream, collector.sampling) if spare else None,
            spare=spare,
            mixed=recipe.rollout.max_staleness > 0,
            size=recipe.batch_size,
            seed=recipe.seed,
            packed=partial(
                pack,
                max_length=setup.sampled_row_length(max(algorithm.sequences_per_example, together)),
                packing=bool(data.packing),
                sequences_per_example=algorithm.sequences_per_example,
                together=together,
                multiple=microbatcher.multiple,
                pictures=pictures_of_row(data, microbatcher.unit),
                trie=microbatcher.trie,
            ),
            taught=taught.taught,
            tolerance=setup.tolerance,
            measured_together=MEASURED * microbatcher.rows * microbatcher.unit,
        )
    )


def check_staleness(setup: Setup) -> None:
    """Refuses to sample the next steps meanwhile where it cannot be done; nothing happens where a recipe does not ask
    for it.

    Raises:
        UserError: with the reason.
    """
    recipe, algorithm, mesh = setup.recipe, setup.algorithm, setup.mesh
    if not recipe.rollout.max_staleness:
        return
    begin = f"rollout.max_staleness: {recipe.rollout.max_staleness}"
    if algorithm.needs.fresh is not None:
        raise UserError(f"{begin}: {algorithm.needs.fresh}")
    servers = recipe.rollout.engine != "tunix"
    if servers and recipe.rollout.in_flight == "continue":
        raise UserError(
            "rollout.in_flight: continue needs tunix's own engine in this process, which can be paused at any token; "
            "with servers completions finish under the weights that they began with: leave it out"
        )
    if processes.number() > 1 and not servers:
        raise UserError(
            f"{begin} needs one process or servers (rollout.engine: vllm), and there are {processes.number()} "
            "processes, whose engines would each be at another place when weights are handed over: leave it out"
        )
    if servers and mesh.size > 1 and recipe.reward is not None and recipe.reward.model is not None:
        raise UserError(
            f"{begin}: a reward model would share {mesh.size} devices with training, and each would wait for the "
            "other: sample with tunix's own engine on rollout.mesh.devices, which the reward model then uses too"
        )
    if not servers and setup.sampling_mesh is None and mesh.size > 1:
        raise UserError(
            f"{begin}: programs of training and of sampling would wait for each other on {mesh.size} shared devices; "
            "give sampling some of its own, e.g. rollout.mesh.devices=1"
        )


def asynchronous(
    setup: Setup, stream: Batches | RolloutStream, client: Trainer, folder: Path, total: int, stop: threading.Event
) -> AsyncRollouts:
    """The stream of a run whose next steps are sampled meanwhile, in place of `stream`, whose rollouts come one step
    after the other. A file in the run folder has the completions that no update has learned from yet."""
    recipe, algorithm = setup.recipe, setup.algorithm
    assert isinstance(recipe, Recipe)
    assert isinstance(stream, RolloutStream)
    assert isinstance(algorithm, OnPolicy)
    assert isinstance(client.sampler, Holding)
    return AsyncRollouts(
        stream,
        client,
        client.sampler,
        algorithm.gather,
        Journal(folder / FILE, recipe.identity),
        max_staleness=recipe.rollout.max_staleness,
        in_flight=recipe.rollout.in_flight,
        total=total,
        stop=stop,
    )
