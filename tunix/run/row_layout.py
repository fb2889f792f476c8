"""How a recipe's sequences lie in rows: how long a row is, what shares it, and how many rows make a compiled pass."""

from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.data.packing import row_length
from tunix.data.pipeline import PLAIN, Layout
from tunix.models.config import DecoderConfig
from tunix.recipe.recipe import Recipe
from tunix.trainer.microbatches import Cut, answers_per_row, rows_per_pass


def layout(algorithm: Algorithm) -> Layout:
    """How the algorithm's given sequences lie in rows."""
    return Layout(algorithm.members, algorithm.spare_tokens, algorithm.prepared)


def answers_together(recipe: Recipe, mesh: Mesh, decoder: DecoderConfig, algorithm: Algorithm) -> int:
    """Completions of a prompt that share a row, and the prompt there; see `answers_per_row`.

    One, where an environment begins each in its own way, and where every sequence is to have a row of its own.
    """
    if recipe.rollout.environment is not None or not recipe.data.packing:
        return 1
    data, number = recipe.data, recipe.sequences_per_update
    limits = (data.max_length, data.longest_completion, recipe.micro_batch_size)
    return answers_per_row(mesh, decoder, algorithm.group, number, *limits)


def drawn_length(recipe: Recipe, number: int) -> int:
    """T of rows that hold so many sequences of one prompt, which the policy writes."""
    # What an environment says belongs to the completion, and may fill all that the prompt leaves; and without packing
    # nothing is shared.
    shared = recipe.rollout.environment is None and recipe.data.packing
    completion = recipe.data.longest_completion if shared else None
    return row_length(number, recipe.data.max_length, completion)


def cut_of(recipe: Recipe, mesh: Mesh, decoder: DecoderConfig, algorithm: Algorithm | None) -> tuple[int, Cut]:
    """T of the rows that training meets, and how many of them make a pass."""
    data, micro = recipe.data, recipe.micro_batch_size
    how = PLAIN if algorithm is None else layout(algorithm)
    together = 1 if algorithm is None else answers_together(recipe, mesh, decoder, algorithm)
    length = max(how.length(data), drawn_length(recipe, together))
    unit = max(how.members, together)
    micro = None if micro is None else max(micro // together, 1)
    rows = rows_per_pass(mesh, recipe.sequences_per_update // unit, micro, length, bool(data.packing))
    return length, Cut(rows, mesh, unit)
