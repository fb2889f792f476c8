"""The inputs that a recipe names: the model's structure, its tokenizer, and the rows."""

from dataclasses import dataclass
from pathlib import Path

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.hf.source import TOKENIZER, Source, of_recipe
from tunix.recipe.recipe import Recipe
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
    """
    data = recipe.data
    train = open_rows(data.train, data.split)
    held_out = None
    if data.eval or data.eval_split:
        held_out = open_rows(data.eval or data.train, data.eval_split)
    return Inputs(of_recipe(recipe.model, data.chat_template, folder / TOKENIZER, train), train, held_out)


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
