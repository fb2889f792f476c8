"""The inputs that a recipe names: the model's structure, its tokenizer, and the rows; and how sequences are packed: the
length of a packed row, what shares it, and the rows of a micro-batch.
"""

from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.data.packing import row_length
from tunix.data.pipeline import PLAIN, Layout
from tunix.data.sources import Rows, held_out_rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.hf.source import TOKENIZER, Source, of_recipe
from tunix.models.config import DecoderConfig
from tunix.recipe.recipe import Recipe
from tunix.trainer.digest import digest
from tunix.trainer.microbatches import Microbatcher, answers_per_row, rows_per_microbatch
from tunix.types import Sampling


@dataclass(frozen=True)
class Inputs:
    """The rows of a run, and the source of its model and tokenizer."""

    source: Source
    train: Rows
    held_out: Rows | None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that renders the rows; None where rows hold token ids."""
        return self.source.tokenizer


def open_inputs(recipe: Recipe, folder: Path) -> Inputs:
    """Opens the model's structure, the tokenizer and the rows of a recipe.

    Args:
        folder: the run folder, where a tokenizer that is trained on the rows is stored.

    Raises:
        UserError: something of it is not there, or the held-out split would be the one that is trained on.
    """
    data = recipe.data
    train, held_out = open_rows(data.train, data.split), held_out_rows(data)
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
    about = {"data.train": _view(inputs.train), "model": f"{source.decoder.family} (digest {model})"}
    if inputs.held_out is not None:
        about["data.eval"] = _view(inputs.held_out)
    processes.agree(about)


def held_out_line(inputs: Inputs) -> str | None:
    """One line about the rows that the run is measured on; None without any."""
    rows = inputs.held_out
    if rows is None:
        return None
    split = "" if rows.split is None else f", split {rows.split}"
    shared = "; it is trained on these too, so that eval/* do not show what it makes of new ones"
    return f"held out: {len(rows):,} rows of {rows.name}{split}{shared if rows.shares_rows_with(inputs.train) else ''}"


def _view(rows: Rows) -> str:
    """The number of rows, and their digest."""
    return f"{len(rows)} rows (digest {rows.digest[:12]})"


def row_kind_of(recipe: Recipe, algorithm: Algorithm) -> RowKind:
    """The part of a row that is read: all columns where an environment renders the prompts, else the algorithm's."""
    in_environment = algorithm.train_on == RowKind.PROMPT and recipe.rollout.environment is not None
    return RowKind.ROW if in_environment else algorithm.train_on


def sampling_of(recipe: Recipe, inputs: Inputs, stops: tuple[str, ...] = ()) -> Sampling:
    """The sampling settings of the policy's completions, which the algorithm receives too.

    Args:
        stops: stop strings of an environment, which end a turn.
    """
    rollout = recipe.rollout
    return Sampling(
        max_tokens=recipe.data.longest_completion,
        temperature=rollout.temperature,
        stop_ids=inputs.source.stop_ids,
        stop_strings=(*rollout.stop, *stops),
    )


def layout(algorithm: Algorithm, multiple: int = 1) -> Layout:
    """How the algorithm's given sequences are packed into rows, whose number is a multiple of `multiple`."""
    return Layout(algorithm.sequences_per_example, algorithm.extra_tokens, algorithm.prepare_sequence, multiple)


def answers_together(recipe: Recipe, mesh: Mesh, decoder: DecoderConfig, algorithm: Algorithm) -> int:
    """The number of completions that share a row and their prompt; see `answers_per_row`.

    One where an environment starts each episode with a different prompt, and without packing.
    """
    if recipe.rollout.environment is not None or not recipe.data.packing:
        return 1
    data, number = recipe.data, recipe.sequences_per_update
    longest, completion, micro = data.max_length, data.longest_completion, recipe.micro_batch_size
    return answers_per_row(mesh, decoder, algorithm.group, number, longest, completion, micro)


def sampled_row_length(recipe: Recipe, number: int) -> int:
    """T of rows that hold `number` sampled sequences of one prompt."""
    # An environment's turns are part of the completion, which may fill everything after the prompt; without packing
    # nothing is shared.
    shared = recipe.rollout.environment is None and recipe.data.packing
    completion = recipe.data.longest_completion if shared else None
    return row_length(number, recipe.data.max_length, completion)


def microbatcher_of(
    recipe: Recipe, mesh: Mesh, decoder: DecoderConfig, algorithm: Algorithm | None
) -> tuple[int, Microbatcher]:
    """`(T, microbatcher)`: the length of training rows, and how they are split into micro-batches."""
    data, micro = recipe.data, recipe.micro_batch_size
    packed = PLAIN if algorithm is None else layout(algorithm)
    together = 1 if algorithm is None else answers_together(recipe, mesh, decoder, algorithm)
    length = max(packed.length(data), sampled_row_length(recipe, together))
    unit = max(packed.sequences_per_example, together)
    micro = None if micro is None else max(micro // together, 1)
    rows = rows_per_microbatch(mesh, recipe.sequences_per_update // unit, micro, length, bool(data.packing))
    return length, Microbatcher(rows, mesh, unit, data.pictures or 0)
