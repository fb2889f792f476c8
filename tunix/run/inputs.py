"""The inputs that a recipe names: the model's structure, its tokenizer, and the rows."""

import json
from dataclasses import dataclass
from pathlib import Path

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.distributed import processes
from tunix.hf.source import TOKENIZER, Source, of_recipe
from tunix.recipe.recipe import Recipe
from tunix.trainer.digest import digest
from tunix.types import Sampling

LOOKED_AT = 16
"""Rows that the processes of a run compare."""


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
    return Inputs(of_recipe(recipe.model, data, folder / TOKENIZER, train), train, held_out)


def compare_views(inputs: Inputs) -> None:
    """Checks that all processes of the run see the same rows, model and tokenizer.

    Raises:
        UserError: one of them sees others, or did not answer.
    """
    if processes.number() == 1:
        return
    about = {"data.train": _view(inputs.train), "model": _view_of_model(inputs.source)}
    if inputs.held_out is not None:
        about["data.eval"] = _view(inputs.held_out)
    processes.agree(about)


def _view(rows: Rows) -> str:
    """The number of rows, and a digest of some of them."""
    chosen = {len(rows) * i // LOOKED_AT for i in range(LOOKED_AT)} | {len(rows) - 1}
    texts = (json.dumps(rows[i], sort_keys=True, default=lambda x: type(x).__name__) for i in sorted(chosen))
    return f"{len(rows)} rows (digest {digest(texts)[:12]})"


def _view_of_model(source: Source) -> str:
    """The model's structure, its files and the tokens of its vocabulary."""
    folders = [folder for folder in (source.folder, source.merged) if folder is not None]
    files = (
        f"{file.name} {file.stat().st_size}" for folder in folders for file in sorted(folder.glob("*.safetensors"))
    )
    tokens = sorted(source.tokenizer.hf.get_vocab().items()) if source.tokenizer is not None else ()
    return f"{source.decoder.family} (digest {digest([str(source.decoder), *files, *map(str, tokens)])[:12]})"


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
