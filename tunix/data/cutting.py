"""Texts longer than a row lose nothing: with `packing: split` or `wrapped` they are cut into pieces.

    max_length 4      texts  a0 a1 a2 a3 a4 a5   b0 b1 b2 b3
    split             rows   a0 a1 a2 a3 | b0 b1 b2 b3 | a4 a5    too long a text is cut; pieces are packed like texts
    wrapped           rows   a0 a1 a2 a3 | a4 a5, b0 b1 | b2 b3   rows are filled in order, each to its end

A piece is a sequence of its own: its positions begin at 0, it sees nothing but itself, and its first token, which
nothing in it predicts, is not trained. A piece in which nothing is trained is left out. Each batch begins a new row,
and goes on within the text where the one before it stopped. `Whole` is the other case: rows as they are.

Axes: T time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunix.data.accounting import CUT_AWAY, Accounting, Dropped, Kept
from tunix.data.config import DataConfig
from tunix.data.shapes import CUT, TrainOn


@dataclass(frozen=True)
class Taken:
    """What came of a step along a row."""

    piece: Kept | None
    """What is trained, if anything."""
    account: Accounting
    """What the step adds."""
    finished: bool
    """Whether nothing of the row is left."""


class Whole:
    """Every row as it is."""

    def new_batch(self) -> None:
        """The rows of a batch begin anew."""

    def gives(self, example: Kept | Dropped) -> bool:
        """Whether the row, or what is left of it, has something for a batch."""
        return isinstance(example, Kept)

    def take(self, example: Kept | Dropped) -> Taken:
        """The next piece of the row."""
        return Taken(example if isinstance(example, Kept) else None, Accounting.of(example), True)

    def get_state(self) -> dict[str, Any]:
        """The place within a row; JSON holds it."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""


class Cutter(Whole):
    """Pieces of at most `length` tokens; `wrapped` cuts where a row of the batch is full."""

    def __init__(self, length: int, wrapped: bool) -> None:
        """At the beginning of a row, and of a batch.

        Args:
            length: T.
        """
        self._length, self._wrapped = length, wrapped
        self._room = length
        self._begin = self._pieces = 0

    def new_batch(self) -> None:
        """The rows of a batch begin anew; the text goes on where it was cut."""
        self._room = self._length

    def gives(self, example: Kept | Dropped) -> bool:
        """Whether anything is trained in what is left of the row."""
        return isinstance(example, Kept) and bool(example.sequences[0].loss_mask[self._begin + 1 :].any())

    def take(self, example: Kept | Dropped) -> Taken:
        """The next piece of the row, or the whole rest where nothing of it is trained."""
        if isinstance(example, Dropped):
            return super().take(example)
        (whole,) = example.sequences
        total, begin = len(whole.tokens), self._begin
        if self._room < 2:  # no target fits behind a first token
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
        own = {name: values[begin:end] for name, values in whole.per_token.items()}
        cut = replace(whole, tokens=whole.tokens[begin:end], loss_mask=mask, per_token=own)
        return Taken(replace(example, sequences=(cut,)) if trained else None, account, finished)

    def get_state(self) -> dict[str, Any]:
        """How far the row has been cut, and into how many pieces."""
        return {"begin": self._begin, "pieces": self._pieces}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on within the row."""
        self._begin, self._pieces = state["begin"], state["pieces"]

    def _account(self, trained: bool, finished: bool) -> Accounting:
        """A row counts with its first piece, or at its end where there is none."""
        if trained:
            first = int(not self._pieces)
            return Accounting(rows=first, kept=first, pieces=1)
        if finished and not self._pieces:
            return Accounting(rows=1, dropped={CUT_AWAY: 1}, untrained=1)
        return Accounting(untrained=1)


def cutter(config: DataConfig, train_on: TrainOn) -> Whole:
    """How the rows of a recipe are cut; only texts and completions are."""
    cuts = config.cuts and train_on in CUT
    return Cutter(config.max_length, config.packing == "wrapped") if cuts else Whole()


def grouped(examples: Iterable[Kept | Dropped], cut: Whole, size: int) -> Iterator[tuple[list[Kept], Accounting]]:
    """Batches of `size` sequences (the last may have fewer, or none) in the order of the examples, and the account of
    each."""
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
