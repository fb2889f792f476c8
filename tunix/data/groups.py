"""Reads rows in Grain's order, renders each, and collects the kept ones into groups; can be resumed exactly.

Grain shuffles the row numbers; `Groups` reads rows in that order and tracks its position, also within a row that is cut
into pieces, and the accounting of all rows up to there.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import grain

from tunix.config import RowKind
from tunix.data.accounting import Accounting, Dropped, Kept
from tunix.data.config import DataConfig
from tunix.data.cutting import Whole
from tunix.data.divided import Divided
from tunix.data.examples import to_example
from tunix.data.shapes import Rendering, rendering
from tunix.data.sources import Rows
from tunix.data.tokenizer import Tokenizer
from tunix.distributed import processes
from tunix.errors import UserError

T = TypeVar("T")
_streams = itertools.count()
"""Numbers of the streams of a run, which all processes open in the same order."""


def order_of(rows: Rows, config: DataConfig, seed: int, epochs: int | None) -> "grain.MapDataset[int]":
    """The row numbers of all epochs, each shuffled differently."""
    order: grain.MapDataset[int] = grain.MapDataset.range(len(rows)).seed(seed % 2**32)
    return (order.shuffle() if config.shuffle else order).repeat(epochs)


def reasons(accounting: Accounting) -> str:
    """The reasons why rows were dropped with their counts, for a message."""
    counts = ", ".join(f"{count} x {reason}" for reason, count in accounting.dropped.items())
    return counts or "all have weight 0"


@dataclass(frozen=True)
class Renderer:
    """A function from a row number to the row's example."""

    rows: Rows
    tokenizer: Tokenizer | None
    settings: Rendering

    @classmethod
    def of(
        cls, rows: Rows, tokenizer: Tokenizer | None, config: DataConfig, train_on: RowKind, vocab_size: int | None
    ) -> "Renderer":
        """The renderer for a recipe's `data` section; the first row determines the shape of all."""
        settings = rendering(config, rows[0], f"row 1 of {rows.name}", train_on)
        return cls(rows, tokenizer, replace(settings, vocab_size=vocab_size))

    def __call__(self, i: int) -> Kept | Dropped:
        where = f"row {i + 1} of {self.rows.name}"
        return to_example(self.rows[i], self.tokenizer, self.settings, where, self.rows.folder)


class Groups(Generic[T]):
    """Iterates over groups of exactly `batch_size` kept rows in Grain's order; Grain's thread reads ahead."""

    def __init__(
        self,
        renderer: Renderer,
        order: grain.MapDataset[int],
        batch_size: int,
        made: Callable[[list[Kept], Accounting], T],
        cut: Whole,
        divided: bool = False,
    ) -> None:
        """Starts at the first place.

        Args:
            renderer: renders a row.
            order: the row of each place.
            batch_size: kept rows of a group.
            made: turns a group, and the accounting up to there, into an item.
            cut: cuts rows into pieces.
            divided: whether all processes of the run render rows together, and go through them in the same order.
        """
        self._renderer = renderer
        several = divided and processes.number() > 1
        self._divided = Divided(self._render, len(order), f"rows/{next(_streams)}") if several else None
        self._cut = cut
        self._order = order
        self._batch_size = batch_size
        self._made = made
        self._next = 0
        self._accounting = Accounting()
        self._ahead: Kept | Dropped | None = None

    def __iter__(self) -> "Groups[T]":
        return self

    def __next__(self) -> T:
        group: list[Kept] = []
        self._cut.new_batch()
        # A full group still takes the dropped rows that follow it, so that the last batch's account is complete.
        while (example := self._peek()) is not None and (len(group) < self._batch_size or not self._cut.gives(example)):
            if piece := self._take(example):
                group.append(piece)
        if not group:
            raise StopIteration
        return self._made(group, self._accounting)

    def get_state(self) -> dict[str, Any]:
        """The next position in the order and within its row, and the accounting up to there."""
        return {"next_index": self._next, "accounting": self._accounting.to_dict(), **self._cut.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned."""
        self._next = state["next_index"]
        self._accounting = Accounting.from_dict(state["accounting"])
        self._cut.set_state(state)
        self._ahead = None
        if self._divided is not None:
            self._divided.begin_anew()

    def stop(self) -> None:
        """Ends waiting for other processes: this stream is closed, or goes on elsewhere."""
        if self._divided is not None:
            self._divided.stop()

    def _peek(self) -> Kept | Dropped | None:
        """The next row's example, not yet taken; None at the end."""
        if self._ahead is None and self._next < len(self._order):
            self._ahead = (self._divided or self._render)(self._next)
        return self._ahead

    def _render(self, place: int) -> Kept | Dropped:
        number = self._order[place]
        assert number is not None, "a range has no gaps"
        return self._renderer(number)

    def _take(self, example: Kept | Dropped) -> Kept | None:
        """Counts an example, or a piece of it, and moves on.

        Raises:
            UserError: a whole epoch had nothing to train on.
        """
        taken = self._cut.take(example)
        self._accounting += taken.account
        if taken.finished:
            self._next += 1
            self._ahead = None
        if not self._accounting.kept and self._accounting.rows >= len(self._renderer.rows):
            name = self._renderer.rows.name
            last = f"; of the last one, {example.detail}" if isinstance(example, Dropped) and example.detail else ""
            raise UserError(f"{name}: nothing in it can be trained on: {reasons(self._accounting)}{last}")
        return taken.piece
