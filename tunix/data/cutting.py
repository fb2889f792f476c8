"""Cuts texts longer than a row into pieces, with `packing: split` or `wrapped`, so that no token is lost.

    max_length 4      texts  a0 a1 a2 a3 a4 a5   b0 b1 b2 b3
    split             rows   a0 a1 a2 a3 | b0 b1 b2 b3 | a4 a5    only long texts are cut; pieces are packed like texts
    wrapped           rows   a0 a1 a2 a3 | a4 a5, b0 b1 | b2 b3   rows are filled in order, each to its end

A piece is a separate sequence: its positions begin at 0, it sees nothing but itself, and its first token, which nothing
in it predicts, is not trained. A piece in which nothing is trained is left out. Each batch starts a new row, and
continues the text where the batch before it stopped. `Whole` is the case without cutting.

Axes: T time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunix.config import RowKind
from tunix.data.accounting import CUT_AWAY, Accounting, Dropped, Kept
from tunix.data.config import DataConfig


@dataclass(frozen=True)
class Taken:
    """The result of taking the next piece of a row."""

    piece: Kept | None
    """The piece; None where nothing in it is trained."""
    account: Accounting
    """The counts that it adds."""
    finished: bool
    """Whether nothing of the row is left."""


class Whole:
    """Takes every row uncut; the base class of `Cutter`."""

    def new_batch(self) -> None:
        """Called at the start of each batch."""

    def gives(self, example: Kept | Dropped) -> bool:
        """Whether the rest of the row contains something to train on."""
        return isinstance(example, Kept)

    def take(self, example: Kept | Dropped) -> Taken:
        """Takes the next piece of the row."""
        return Taken(example if isinstance(example, Kept) else None, Accounting.of(example), True)

    def get_state(self) -> dict[str, Any]:
        """The position within the current row, as values that JSON can store."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned."""


class Cutter(Whole):
    """Cuts rows into pieces of at most `length` tokens; `wrapped` cuts where a row of the batch is full."""

    def __init__(self, length: int, wrapped: bool) -> None:
        """Starts at the beginning of a row and of a batch.

        Args:
            length: T, e.g. 1024.
            wrapped: whether pieces fill the rows of the batch in order.
        """
        self._length, self._wrapped = length, wrapped
        self._room = length
        self._begin = self._pieces = 0

    def new_batch(self) -> None:
        """Starts the rows of a new batch; the text continues where it was cut."""
        self._room = self._length

    def gives(self, example: Kept | Dropped) -> bool:
        """Whether the rest of the row contains a trained token."""
        return isinstance(example, Kept) and bool(example.sequences[0].loss_mask[self._begin + 1 :].any())

    def take(self, example: Kept | Dropped) -> Taken:
        """Takes the next piece of the row, or the whole rest where nothing of it is trained."""
        if isinstance(example, Dropped):
            return super().take(example)
        (whole,) = example.sequences
        total, begin = len(whole.tokens), self._begin
        if self._room < 2:  # no target fits after a first token
            self._room = self._length
        size = self._room if self._wrapped else self._length
        end = min(begin + size, total) if self.gives(example) else total
        mask = whole.loss_mask[begin:end].copy()
        mask[:1] = False
        trained, finished = bool(mask.any()), end == total
        account = self._account(trained, finished)
        self._room -= end - begin if trained and self._wrapped else 0
        self._pieces += trained
        self._begin = end
        if finished:
            self._begin = self._pieces = 0
        per_token = {name: values[begin:end] for name, values in whole.per_token.items()}
        cut = replace(whole, tokens=whole.tokens[begin:end], loss_mask=mask, per_token=per_token)
        return Taken(replace(example, sequences=(cut,)) if trained else None, account, finished)

    def get_state(self) -> dict[str, Any]:
        """How far the row has been cut, and into how many pieces."""
        return {"begin": self._begin, "pieces": self._pieces}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues within a row."""
        self._begin, self._pieces = state["begin"], state["pieces"]

    def _account(self, trained: bool, finished: bool) -> Accounting:
        """The counts of a piece: a row counts with its first piece, or at its end where it has none."""
        if trained:
            first = int(not self._pieces)
            return Accounting(rows=first, kept=first, pieces=1)
        if finished and not self._pieces:
            return Accounting(rows=1, dropped={CUT_AWAY: 1}, untrained=1)
        return Accounting(untrained=1)


def cutter(config: DataConfig, train_on: RowKind) -> Whole:
    """The cutter for a recipe's rows; only texts and completions are cut."""
    cuts = config.cuts and train_on.is_text
    return Cutter(config.max_length, config.packing == "wrapped") if cuts else Whole()


def grouped(examples: Iterable[Kept | Dropped], cut: Whole, size: int) -> Iterator[tuple[list[Kept], Accounting]]:
    """Batches of `size` sequences (the last may have fewer, or none) in the order of the examples, each with its
    accounting."""
    group: list[Kept] = []
    account = Accounting()
    cut.new_batch()
    for example in examples:
        finished = False
        while not finished:
            if len(group) == size and cut.gives(example):
                yield group, account
                group, account = [], Accounting()
                cut.new_batch()
            taken = cut.take(example)
            finished = taken.finished
            account += taken.account
            group += [taken.piece] if taken.piece else []
    yield group, account
