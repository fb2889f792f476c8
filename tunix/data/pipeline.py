"""Turns rows into batches in Grain's order: seeded, different in every epoch, prefetched, and exactly resumable.

A thread collects groups of `batch_size` kept rows (`groups.py`) and packs them. The position that `get_state` returns
is that of the last batch handed out, however far the thread has read ahead. The accounting is part of the position, so
that it is correct after a resume too. `Prompts` is the same stream where the policy samples the completions: any number
of prompts at a time, unpacked.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grain

from tunix.config import RowKind
from tunix.data.accounting import Accounting, Dropped, Kept
from tunix.data.config import DataConfig
from tunix.data.cutting import cutter, grouped
from tunix.data.groups import Groups, Renderer, order_of, reasons
from tunix.data.packing import pack, row_length
from tunix.data.rendered import prompt_text
from tunix.data.sources import Rows
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Packed, Prompt
from tunix.errors import UserError
from tunix.types import Sequence

T = TypeVar("T")

_READ_AHEAD, _PROMPTS_AHEAD = 2, 256
"""Batches, and prompts, that are prepared ahead of the trainer."""


def _as_it_is(sequence: Sequence) -> Sequence:
    return sequence


def pictures_of_row(config: DataConfig, together: int) -> int:
    """Pi, the pictures of a row, where so many sequences share a prompt: unpacked, each brings those of the prompt."""
    return (config.pictures or 0) * (1 if config.packing else together)


@dataclass(frozen=True)
class Layout:
    """How an algorithm's sequences are packed into rows; see the attributes of `Algorithm` of the same names."""

    sequences_per_example: int = 1
    """Sequences of a kept row, which share a row of the batch, e.g. 2 for pairs."""
    extra_tokens: int = 0
    """Tokens by which `prepare_sequence` makes a sequence longer than `data.max_length`, e.g. 1."""
    prepare_sequence: Callable[[Sequence], Sequence] = _as_it_is
    """Hook before packing: returns the sequence to pack."""
    multiple: int = 1
    """The number of rows is one of it, e.g. 8 for eight devices; see `pack`."""

    def length(self, config: DataConfig) -> int:
        """T, the tokens of a row that has room for the longest sequences of an example."""
        completion = config.completion_length if config.packing else None
        return (
            row_length(self.sequences_per_example, config.max_length, completion)
            + self.sequences_per_example * self.extra_tokens
        )

    def pictures(self, config: DataConfig) -> int:
        """Pi, the pictures of a row."""
        return pictures_of_row(config, self.sequences_per_example)

    def packed(self, group: List[Kept], size: int, config: DataConfig, accounting: Accounting) -> Packed:
        """Packs kept rows into a batch.

        Args:
            group: the kept rows, at least one of positive weight.
            size: kept rows that the batch has room for.
            config: the recipe's `data` section.
            accounting: the counts up to and including these rows.
        """
        sequences = tuple(self.prepare_sequence(sequence) for kept in group for sequence in kept.sequences)
        number, length = self.sequences_per_example, self.length(config)
        how = {"multiple": self.multiple, "pictures": self.pictures(config)}
        batch = pack(sequences, number * size, length, config.packing, number, **how)
        return Packed(batch, accounting, sequences)


PLAIN = Layout()
"""The default layout: one sequence for each row of the data, unchanged."""


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
        train_on: RowKind,
        vocab_size: int | None,
        made: Callable[[list[Kept], Accounting], T],
        read_ahead: int,
    ) -> None:
        """Sets up the stream; nothing is read but the first row.

        Args:
            rows: from `open_rows`.
            tokenizer: None where rows are token ids.
            config: the recipe's `data` section.
            batch_size: kept rows of a group.
            seed: seed of the order; each epoch has its own.
            epochs: None continues without end.
            train_on: see `Rendering`.
            vocab_size: see `Rendering`.
            made: turns a group of kept rows, and the accounting up to there, into an item of the stream.
            read_ahead: how many items are prepared ahead.
        """
        self._rows = rows
        renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
        order = order_of(rows, config, seed, epochs)
        # Prompts are short, and all processes need all of them soon.
        divided = train_on not in (RowKind.PROMPT, RowKind.ROW)
        groups = Groups(renderer, order, batch_size, made, cutter(config, train_on), divided)
        self._stop = groups.stop
        # Kept in a list that the finalizer empties: Grain's iterator has to be deleted before the interpreter exits, or
        # its __del__ fails on modules that are already gone; and its thread must not outlive this object.
        self._held = [grain.experimental.ThreadPrefetchDatasetIterator(groups, read_ahead)]
        self._close = weakref.finalize(self, _release, self._held, groups.stop)

    def mark(self) -> Callable[[], dict[str, Any]]:
        """What returns the position of now, whenever it is called."""
        state = self.get_state()
        return lambda: state

    def get_state(self) -> dict[str, Any]:
        """The position after the last group handed out, and in which rows, as values that JSON can store."""
        return {**self._groups().get_state(), "rows": len(self._rows), "digest": self._rows.digest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position with the same items that followed it.

        Raises:
            UserError: the data has other rows than it had then.
        """
        rows, saved = self._rows, state.get("digest", "none")
        again = "give it the same data, or start over with --fresh"
        if state["rows"] != len(rows):
            raise UserError(
                f"{rows.name} has {len(rows)} rows, but had {state['rows']} when the checkpoint was written: {again}"
            )
        if saved != rows.digest:
            raise UserError(
                f"{rows.name} has as many rows as when the checkpoint was written, but others (digest "
                f"{rows.digest[:12]}, then {saved[:12]}): {again}"
            )
        self._stop()
        self._groups().set_state(dict(state))

    def close(self) -> None:
        """Stops the thread and ends the stream."""
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
        train_on: RowKind = RowKind.COMPLETION,
        vocab_size: int | None = None,
        layout: Layout = PLAIN,
    ) -> None:
        """Sets up the stream; nothing is read but the first row.

        Args:
            rows: from `open_rows`.
            tokenizer: None where rows are token ids.
            config: the recipe's `data` section.
            batch_size: kept rows of a batch, sequences or pairs; the last one of counted epochs may have fewer.
            seed: seed of the order; each epoch has its own.
            epochs: None continues without end.
            train_on: see `Rendering`.
            vocab_size: see `Rendering`.
            layout: how the algorithm's sequences are packed into rows.
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


class Prompts(Stream[tuple[Kept, Accounting]]):
    """A stream of prompts, in the same seeded, resumable order as `Batches`."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer | None,
        config: DataConfig,
        seed: int,
        epochs: int | None = None,
        vocab_size: int | None = None,
        train_on: RowKind = RowKind.PROMPT,
    ) -> None:
        """Sets up the stream with the arguments of `Batches`; with `RowKind.ROW` an environment makes the prompts."""
        made = (lambda group, accounting: (group[0], accounting), _PROMPTS_AHEAD)
        super().__init__(rows, tokenizer, config, 1, seed, epochs, train_on, vocab_size, *made)
        self.accounting = Accounting()
        """Counts of the rows read so far, up to the last prompt handed out."""

    def take(self, number: int) -> list[Prompt]:
        """The next `number` prompts; fewer where the last epoch is exhausted."""
        prompts: list[Prompt] = []
        while len(prompts) < number and (item := next(self._groups(), None)):
            kept, self.accounting = item
            prompts.append(prompt_of(kept))
        return prompts


def prompt_of(kept: Kept) -> Prompt:
    """The prompt of a kept row."""
    (prompt,) = kept.sequences
    return Prompt(prompt.tokens, prompt_text(kept.row), kept.row, prompt.pictures)


def _counts(kept: Kept) -> bool:
    """Whether a kept row has a positive weight."""
    return any(sequence.weight > 0 for sequence in kept.sequences)


def _release(held: "list[grain.experimental.ThreadPrefetchDatasetIterator[Any]]", stop: Callable[[], None]) -> None:
    """Stops Grain's thread and deletes its iterator."""
    stop()
    held.pop().close()


def eval_batches(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    batch_size: int,
    limit: int,
    train_on: RowKind = RowKind.COMPLETION,
    vocab_size: int | None = None,
    layout: Layout = PLAIN,
) -> list[Packed]:
    """The first `limit` rows in file order, packed; the last batch may have fewer. Rows of weight 0 are left out.

    Raises:
        UserError: none of these rows can be evaluated.
    """
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    examples = [renderer(i) for i in range(min(limit, len(rows)))]
    weightless = [example for example in examples if isinstance(example, Kept) and not _counts(example)]
    weighted = (example for example in examples if isinstance(example, Dropped) or _counts(example))
    groups = list(grouped(weighted, cutter(config, train_on), batch_size))
    total = sum([*(account for _, account in groups), *map(Accounting.of, weightless)], Accounting())
    if not groups[0][0]:
        raise UserError(f"{rows.name}: none of its first {len(examples)} rows can be evaluated: {reasons(total)}")
    return [layout.packed(group, batch_size, config, total) for group, _ in groups if group]


def eval_prompts(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    limit: int,
    vocab_size: int | None = None,
    train_on: RowKind = RowKind.PROMPT,
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
    raise UserError(f"{rows.name}: none of its first {len(examples)} rows has a prompt: {reasons(total)}")


def account(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    train_on: RowKind = RowKind.COMPLETION,
    vocab_size: int | None = None,
) -> Accounting:
    """Counts over all rows of the data, before any is cut into pieces."""
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    return sum((Accounting.of(renderer(i)) for i in range(len(rows))), Accounting())


def sequences_of(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    train_on: RowKind,
    vocab_size: int | None = None,
    limit: int | None = None,
) -> Iterator[Sequence]:
    """The sequences of all kept rows, in file order.

    Args:
        rows: from `open_rows`.
        tokenizer: None where rows are token ids.
        config: the recipe's `data` section.
        train_on: see `Rendering`.
        vocab_size: see `Rendering`.
        limit: how many rows are read; None for all.
    """
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    for i in range(min(limit or len(rows), len(rows))):
        if isinstance(example := renderer(i), Kept):
            yield from example.sequences


def cut_steps(
    rows: Rows,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    batch_size: int,
    seed: int,
    epochs: int,
    train_on: RowKind = RowKind.COMPLETION,
    vocab_size: int | None = None,
) -> int:
    """Number of batches in `epochs` epochs where rows are cut into pieces. It depends on the lengths and the order, so
    every row is rendered once for each epoch. The arguments are those of `Batches`."""
    renderer = Renderer.of(rows, tokenizer, config, train_on, vocab_size)
    order = order_of(rows, config, seed, epochs)
    return sum(Groups(renderer, order, batch_size, lambda *_: 1, cutter(config, train_on)))
