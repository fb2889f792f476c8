"""Rows become batches in Grain's order: seeded, different in every epoch, prefetched, and resumable to the bit.

Grain shuffles the row numbers; a thread reads rows in that order, renders them, gathers `batch_size` kept ones and
packs them. The position that `get_state` tells belongs to the last batch handed out, however far the thread has read
ahead. The accounting travels with the position, so that it is right after a resume too.
"""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import grain

from tunix.config import DataConfig
from tunix.data.examples import Accounting, Dropped, Kept, Rendering, TrainOn, rendering, to_sequence
from tunix.data.packing import pack
from tunix.data.sources import Rows
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.types import Batch, Sequence

_READ_AHEAD = 2
"""Batches that wait for the trainer."""


@dataclass(frozen=True)
class Packed:
    """A batch and what became of the rows so far."""

    batch: Batch
    """Numpy arrays."""
    accounting: Accounting
    """Of all rows read up to and including this batch, in all epochs."""


class Batches:
    """An endless or counted stream of packed batches with a position that can be saved."""

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
    ) -> None:
        """Sets up the stream; nothing is read but the first row.

        Args:
            rows: from `open_rows`.
            tokenizer: None serves rows of token ids only.
            config: the recipe's `data` section.
            batch_size: kept sequences of a batch; the last one of counted epochs may have fewer.
            seed: of the order; every epoch has its own.
            epochs: None goes on forever.
            train_on: see `Rendering`.
            vocab_size: see `Rendering`.
        """
        how = _rendering(rows, config, train_on, vocab_size)
        order: grain.MapDataset[int] = grain.MapDataset.range(len(rows)).seed(seed % 2**32)
        if config.shuffle:
            order = order.shuffle()
        groups = _Groups(_Renderer(rows, tokenizer, how), order.repeat(epochs), batch_size, config)
        # Held in a list that the finalizer empties: Grain's iterator has to be gone before the interpreter is, or its
        # __del__ trips over modules that are no more; and its thread must not outlive this object.
        self._held = [grain.experimental.ThreadPrefetchDatasetIterator(groups, _READ_AHEAD)]
        self._close = weakref.finalize(self, _release, self._held)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Packed:
        return next(self._groups())

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch handed out; JSON holds it."""
        return self._groups().get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position: the batches that follow are those that followed then.

        Raises:
            UserError: the data has another number of rows than it had then.
        """
        self._groups().set_state(dict(state))

    def close(self) -> None:
        """Stops the thread. The stream ends here."""
        self._close()

    def _groups(self) -> grain.experimental.ThreadPrefetchDatasetIterator[Packed]:
        assert self._held, "the stream was closed"
        return self._held[0]


def _release(held: list[grain.experimental.ThreadPrefetchDatasetIterator[Packed]]) -> None:
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
) -> list[Batch]:
    """The first `limit` rows in file order, packed; the last batch may have fewer sequences.

    Raises:
        UserError: none of these rows can be evaluated.
    """
    renderer = _Renderer(rows, tokenizer, _rendering(rows, config, train_on, vocab_size))
    examples = [renderer(i) for i in range(min(limit, len(rows)))]
    kept = [example.sequence for example in examples if isinstance(example, Kept) and example.sequence.weight > 0]
    if not kept:
        total = sum(map(Accounting.of, examples), Accounting())
        raise UserError(f"{rows.name}: none of its first {len(examples)} rows can be evaluated: {_reasons(total)}")
    groups = [kept[i : i + batch_size] for i in range(0, len(kept), batch_size)]
    return [pack(group, batch_size, config.max_length, config.packing) for group in groups]


def account(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    train_on: TrainOn = "completion",
    vocab_size: int | None = None,
) -> Accounting:
    """What becomes of every row in one pass over the data."""
    renderer = _Renderer(rows, tokenizer, _rendering(rows, config, train_on, vocab_size))
    return sum((Accounting.of(renderer(i)) for i in range(len(rows))), Accounting())


def total_steps(n_rows: int, batch_size: int, epochs: int) -> int:
    """Batches of `epochs` passes over `n_rows` kept rows; epochs run into each other, so only the last is short."""
    return math.ceil(n_rows * epochs / batch_size)


def _rendering(rows: Rows, config: DataConfig, train_on: TrainOn, vocab_size: int | None) -> Rendering:
    return replace(rendering(config, rows[0], f"row 1 of {rows.name}", train_on), vocab_size=vocab_size)


def _reasons(accounting: Accounting) -> str:
    counts = ", ".join(f"{count} x {reason}" for reason, count in accounting.dropped.items())
    return counts or "all have weight 0"


@dataclass(frozen=True)
class _Renderer:
    """Row number -> what becomes of the row."""

    rows: Rows
    tokenizer: Tokenizer | None
    how: Rendering

    def __call__(self, i: int) -> Kept | Dropped:
        return to_sequence(self.rows[i], self.tokenizer, self.how, f"row {i + 1} of {self.rows.name}")


class _Groups:
    """Batches of exactly `batch_size` kept rows, taken along Grain's order; Grain's thread runs it ahead."""

    def __init__(self, renderer: _Renderer, order: grain.MapDataset[int], batch_size: int, config: DataConfig) -> None:
        self._renderer = renderer
        self._order = order
        self._batch_size = batch_size
        self._config = config
        self._next = 0
        self._accounting = Accounting()
        self._ahead: Kept | Dropped | None = None

    def __iter__(self) -> "_Groups":
        return self

    def __next__(self) -> Packed:
        group: list[Sequence] = []
        # A full group still takes the dropped rows that follow it, so that the last batch's account is complete.
        while (example := self._peek()) is not None and (len(group) < self._batch_size or isinstance(example, Dropped)):
            self._take(example)
            if isinstance(example, Kept):
                group.append(example.sequence)
        if not group:
            raise StopIteration
        if not any(sequence.weight > 0 for sequence in group):
            raise UserError(f"{self._name}: a whole batch of {len(group)} rows has weight 0; leave such rows out")
        batch = pack(group, self._batch_size, self._config.max_length, self._config.packing)
        return Packed(batch, self._accounting)

    def get_state(self) -> dict[str, Any]:
        """The next place in the order, the account up to there, and the number of rows that both hold for."""
        size = len(self._renderer.rows)
        return {"next_index": self._next, "rows": size, "accounting": self._accounting.to_dict()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a place that `get_state` told."""
        size = len(self._renderer.rows)
        if state["rows"] != size:
            raise UserError(
                f"{self._name} has {size} rows, but had {state['rows']} when the checkpoint was written: "
                "give it the same data, or start anew with --fresh"
            )
        self._next = state["next_index"]
        self._accounting = Accounting.from_dict(state["accounting"])
        self._ahead = None

    @property
    def _name(self) -> str:
        return self._renderer.rows.name

    def _peek(self) -> Kept | Dropped | None:
        """The next row's example, not yet taken; None at the end."""
        if self._ahead is None and self._next < len(self._order):
            number = self._order[self._next]
            assert number is not None, "a range has no gaps"
            self._ahead = self._renderer(number)
        return self._ahead

    def _take(self, example: Kept | Dropped) -> None:
        """Counts the example and moves on, unless a whole epoch has come to nothing."""
        self._accounting += Accounting.of(example)
        self._next += 1
        self._ahead = None
        if not self._accounting.kept and self._accounting.rows >= len(self._renderer.rows):
            raise UserError(f"{self._name}: nothing in it can be trained on: {_reasons(self._accounting)}")
