"""`tunix.rollouts`: the steps of an on-policy algorithm over given rows, for custom training loops."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from functools import partial
from typing import Any

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack, row_length
from tunix.data.pipeline import Prompts
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.rewards.base import ADDED, Reward
from tunix.rollout.rewards.scorer import Scorer


def rollouts(
    algorithm: Algorithm,
    rows: str | Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer | None,
    rewards: List[Callable[..., Any] | Reward],
    *,
    batch_size: int,
    max_length: int,
    chat: bool = False,
    epochs: int | None = None,
    seed: int = 0,
    mismatch_tolerance: float = 0.25,
) -> RolloutStream:
    """The steps for `algorithm.update(client, data)`: each has prompts, and samples and scores their completions.

    >>> algorithm = tunix.GRPO(tunix.GRPO.Config(group_size=8), tunix.Sampling(max_tokens=64, stop_ids=stops))
    >>> for data in tunix.rollouts(algorithm, rows, tokenizer, [my_reward], batch_size=16, max_length=256):
    ...     update = algorithm.update(client, data)

    Args:
        algorithm: has the sampling settings, and how many sequences share a row.
        rows: a file or a list, with the columns `prompt` (or `messages`, `prompt_ids`) and those that rewards read.
        tokenizer: renders prompts and decodes completions; None where both are token ids.
        rewards: functions of the completion's text and of columns, as in a recipe, e.g.
            `def right(completion: str, answer: str) -> float`. They run in threads of this process.
        batch_size: prompts of a step.
        max_length: tokens of a prompt with its completion at most; a longer prompt loses its beginning.
        chat: prompts that are strings become a user's message in the tokenizer's template.
        epochs: how often all rows are read; None never ends.
        seed: for the order of the rows and for sampling.
        mismatch_tolerance: largest difference between the trainer's and the sampler's log-prob of a token with which
            training goes on; 1e-3 suits float32.

    Raises:
        UserError: a row cannot be read, or a column that a reward requires is missing.
    """
    table: Rows = open_rows(rows)
    config = DataConfig(train="rows", max_length=max_length, completion_length=algorithm.sampling.max_tokens, chat=chat)
    scorer = Scorer(rewards)
    scorer.check([*table[0], *ADDED])
    number = algorithm.sequences_per_example
    return RolloutStream(
        RolloutStep(
            collector=Collector(tokenizer, algorithm.sampling, scorer),
            stream=Prompts(Examples(table, tokenizer, config, RowKind.PROMPT), seed, epochs),
            size=batch_size,
            seed=seed,
            packed=partial(
                pack,
                max_length=row_length(number, max_length + algorithm.extra_tokens, None),
                sequences_per_example=number,
            ),
            tolerance=mismatch_tolerance,
        )
    )
