"""Rows become batches in Grain's order: seeded, different in every epoch, prefetched, and resumable to the bit.

A thread takes groups of `batch_size` kept rows (`groups.py`) and packs them. The position that `get_state` tells is
that of the last batch handed out, however far the thread has read ahead. The accounting travels with the position, so
that it is right after a resume too. `Prompts` is the same stream where a policy writes the completions: prompts by any
number, none of them packed.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grain
import numpy as np

from tunix.data.accounting import Accounting, Dropped, Kept
from tunix.data.config import DataConfig
from tunix.data.cutting import cutter, grouped
from tunix.data.groups import Groups, Renderer, order_of, reasons
from tunix.data.packing import pack, row_length
from tunix.data.rendered import prompt_text
from tunix.data.shapes import TrainOn
from tunix.data.sources import Rows
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.types import Batch, Sequence

T = TypeVar("T")

_READ_AHEAD, _PROMPTS_AHEAD = 2, 256
"""Batches, and prompts, that wait for the trainer."""


@dataclass(frozen=True)
class Packed:
    """A batch and what became of the rows so far."""

    batch: Batch
    """Numpy arrays; what an update of given sequences is made from."""
    accounting: Accounting
    """Of all rows read up to and including this batch, in all epochs; of all held-out rows."""
    sequences: tuple[Sequence, ...]
    """What was packed, for algorithms that make something else of it too."""


def _as_it_is(sequence: Sequence) -> Sequence:
    return sequence


@dataclass(frozen=True)
class Layout:
    """How an algorithm wants its sequences laid in rows; see the members of `Algorithm` of the same names."""

    members: int = 1
    """Sequences of a kept row, which share a row of the batch: 2 for pairs."""
    spare_tokens: int = 0
    """Tokens by which `prepared` makes a sequence longer than `data.max_length`."""
    prepared: Callable[[Sequence], Sequence] = _as_it_is
    """The last word on a sequence before it is packed."""

    def length(self, config: DataConfig) -> int:
        """T: tokens of a row, in which the longest sequences of an example have room."""
        completion = config.completion_length if config.packing else None
        return row_length(self.members, config.max_length, completion) + self.members * self.spare_tokens

    def packed(self, group: List[Kept], size: int, config: DataConfig, accounting: Accounting) -> Packed:
        """A batch of kept rows.

        Args:
            group: at least one of positive weight.
            size: kept rows that the batch has room for.
            config: the recipe's `data` section.
            accounting: up to here.
        """
        sequences = tuple(self.prepared(sequence) for kept in group for sequence in kept.sequences)
        length = self.length(config)
        return Packed(pack(sequences, self.members * size, length, config.packing, self.members), accounting, sequences)


PLAIN = Layout()
"""Each sequence for itself."""


class Stream(Generic[T]):
    """An endless or counted stream of groups of kept rows, with a position that can be saved."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer | None,
        config: DataConfig,
        batch_size: int,
        seed: int,
        epochs: int | None,
        train_on: TrainOn,
        vocab_size: int | None,
        made: Callable[[list[Kept], Accounting], T],
        read_ahead: int,
    ) -> None:
        """Sets up the stream; nothing is read but the first row.

        Args:
            made: turns a group of kept rows, and the account up to there, into what is handed out.
            read_ahead: how many of those wait for the trainer.
        """
        renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
        order = order_of(rows, config, seed, epochs)
        groups = Groups(renderer, order, batch_size, made, cutter(config, train_on))
        # Held in a list that the finalizer empties: Grain's iterator has to be gone before the interpreter is, or its
        # __del__ trips over modules that are no more; and its thread must not outlive this object.
        self._held = [grain.experimental.ThreadPrefetchDatasetIterator(groups, read_ahead)]
        self._close = weakref.finalize(self, _release, self._held)

    def get_state(self) -> dict[str, Any]:
        """The position after the last group handed out; JSON holds it."""
        return self._groups().get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position: what follows is what followed then.

        Raises:
            UserError: the data has another number of rows than it had then.
        """
        self._groups().set_state(dict(state))

    def close(self) -> None:
        """Stops the thread. The stream ends here."""
        self._close()

    def _groups(self) -> "grain.experimental.ThreadPrefetchDatasetIterator[T]":
        assert self._held, "the stream was closed"
        return self._held[0]


class Batches(Stream[Packed]):
    """Packed batches of given sequences."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer | None,
        config: DataConfig,
        batch_size: int,
        seed: int,
        epochs: int | None = None,
        train_on: TrainOn = "completion",
        vocab_size: int | None = None,
        layout: Layout = PLAIN,
    ) -> None:
        """Sets up the stream; nothing is read but the first row.

        Args:
            rows: from `open_rows`.
            tokenizer: None serves rows of token ids only.
            config: the recipe's `data` section.
            batch_size: kept rows of a batch, sequences or pairs; the last one of counted epochs may have fewer.
            seed: of the order; every epoch has its own.
            epochs: None goes on forever.
            train_on: see `Rendering`.
            vocab_size: see `Rendering`.
            layout: how the algorithm wants them.
        """

        def packed(group: list[Kept], accounting: Accounting) -> Packed:
            if not any(_counts(kept) for kept in group):
                raise UserError(f"{rows.name}: a whole batch of {len(group)} rows has weight 0; leave such rows out")
            return layout.packed(group, batch_size, config, accounting)

        made = (packed, _READ_AHEAD)
        super().__init__(rows, tokenizer, config, batch_size, seed, epochs, train_on, vocab_size, *made)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Packed:
        return next(self._groups())


@dataclass(frozen=True)
class Prompt:
    """What a policy is asked to go on from."""

    tokens: np.ndarray
    """`[T]` int32."""
    text: str
    """What a reward reads: the prompt as the row has it, without the template; empty for token ids."""
    row: Mapping[str, Any]
    """The row's columns under our names: what else rewards and environments read."""


class Prompts(Stream[tuple[Kept, Accounting]]):
    """Prompts one after the other, in the same seeded, resumable order."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer | None,
        config: DataConfig,
        seed: int,
        epochs: int | None = None,
        vocab_size: int | None = None,
        train_on: TrainOn = "prompt",
    ) -> None:
        """See `Batches`; `train_on: row` leaves prompts to an environment."""
        made = (lambda group, accounting: (group[0], accounting), _PROMPTS_AHEAD)
        super().__init__(rows, tokenizer, config, 1, seed, epochs, train_on, vocab_size, *made)
        self.accounting = Accounting()
        """Of the prompts handed out."""

    def take(self, number: int) -> list[Prompt]:
        """The next prompts; fewer where the last epoch gives out."""
        prompts: list[Prompt] = []
        while len(prompts) < number and (found := next(self._groups(), None)):
            kept, self.accounting = found
            prompts.append(prompt_of(kept))
        return prompts


def prompt_of(kept: Kept) -> Prompt:
    """The prompt that a row became."""
    (prompt,) = kept.sequences
    return Prompt(prompt.tokens, prompt_text(kept.row), kept.row)


def _counts(kept: Kept) -> bool:
    """Whether the row has any weight."""
    return any(sequence.weight > 0 for sequence in kept.sequences)


def _release(held: "list[grain.experimental.ThreadPrefetchDatasetIterator[Any]]") -> None:
    """Stops Grain's thread and lets go of its iterator."""
    held.pop().close()


def eval_batches(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    batch_size: int,
    limit: int,
    train_on: TrainOn = "completion",
    vocab_size: int | None = None,
    layout: Layout = PLAIN,
) -> list[Packed]:
    """The first `limit` rows in file order, packed; the last batch may have fewer. Rows of weight 0 are left out.

    Raises:
        UserError: none of these rows can be evaluated.
    """
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    examples = [renderer(i) for i in range(min(limit, len(rows)))]
    silent = [example for example in examples if isinstance(example, Kept) and not _counts(example)]
    heard = (example for example in examples if isinstance(example, Dropped) or _counts(example))
    groups = list(grouped(heard, cutter(config, train_on), batch_size))
    total = sum([*(account for _, account in groups), *map(Accounting.of, silent)], Accounting())
    if not groups[0][0]:
        raise UserError(f"{rows.name}: none of its first {len(examples)} rows can be evaluated: {reasons(total)}")
    return [layout.packed(group, batch_size, config, total) for group, _ in groups if group]


def eval_prompts(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    limit: int,
    vocab_size: int | None = None,
    train_on: TrainOn = "prompt",
) -> list[Prompt]:
    """The prompts of the first `limit` rows in file order.

    Raises:
        UserError: none of these rows has one.
    """
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    examples = [renderer(i) for i in range(min(limit, len(rows)))]
    if prompts := [prompt_of(example) for example in examples if isinstance(example, Kept)]:
        return prompts
    total = sum(map(Accounting.of, examples), Accounting())
    raise UserError(f"{rows.name}: none of its first {len(examples)} rows can be asked: {reasons(total)}")


def account(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    train_on: TrainOn = "completion",
    vocab_size: int | None = None,
) -> Accounting:
    """What becomes of every row in one pass over the data, before any is cut into pieces."""
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    return sum((Accounting.of(renderer(i)) for i in range(len(rows))), Accounting())


def sequences_of(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    train_on: TrainOn,
    vocab_size: int | None = None,
    limit: int | None = None,
) -> Iterator[Sequence]:
    """Every sequence that rows become, in file order.

    Args:
        limit: the first so many rows; None for all.
    """
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    for i in range(min(limit or len(rows), len(rows))):
        if isinstance(example := renderer(i), Kept):
            yield from example.sequences


def total_steps(n_rows: int, batch_size: int, epochs: int) -> int:
    """Batches of `epochs` passes over `n_rows` kept rows; epochs run into each other, so only the last is short."""
    return math.ceil(n_rows * epochs / batch_size)


def cut_steps(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    batch_size: int,
    seed: int,
    epochs: int,
    train_on: TrainOn = "completion",
    vocab_size: int | None = None,
) -> int:
    """Batches of `epochs` passes where rows are cut into pieces: their number is that of the lengths and the order, so
    every row is rendered once for each epoch. The arguments are those of `Batches`."""
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    order = order_of(rows, config, seed, epochs)
    return sum(Groups(renderer, order, batch_size, lambda *_: 1, cutter(config, train_on)))
