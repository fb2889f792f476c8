"""How sequences are packed into rows: the length of a row, what shares it, and the rows of a micro-batch."""

from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.data.packing import row_length
from tunix.data.pipeline import PLAIN, Layout
from tunix.models.config import DecoderConfig
from tunix.recipe.recipe import Recipe
from tunix.trainer.microbatches import Microbatcher, answers_per_row, rows_per_microbatch


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
    limits = (data.max_length, data.longest_completion, recipe.micro_batch_size)
    return answers_per_row(mesh, decoder, algorithm.group, number, *limits)


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
