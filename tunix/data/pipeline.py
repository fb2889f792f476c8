"""Turns rows into batches in Grain's order: seeded, different in every epoch, prefetched, and exactly resumable.

Grain shuffles the row numbers. `Groups` reads rows in that order, renders each (where several processes share a run,
each renders its share of a window of rows and all receive the whole window, so that splitting a run changes no batch),
cuts them into pieces where the recipe says so, and collects `batch_size` kept ones; a thread does so ahead of the
trainer and packs them. The position that `get_state` returns is that of the last batch handed out, however far the
thread has read ahead. The accounting is part of the position, so that it is correct after a resume too. `Prompts` is
the same stream where the policy samples the completions: any number of prompts at a time, unpacked.

`packing: split` or `wrapped` cuts texts longer than a row into pieces, so that no token is lost:

    max_length 4      texts  a0 a1 a2 a3 a4 a5   b0 b1 b2 b3
    split             rows   a0 a1 a2 a3 | b0 b1 b2 b3 | a4 a5    only long texts are cut; pieces are packed like texts
    wrapped           rows   a0 a1 a2 a3 | a4 a5, b0 b1 | b2 b3   rows are filled in order, each to its end

A piece is a separate sequence: its positions begin at 0, it sees nothing but itself, and its first token, which nothing
in it predicts, is not trained. A piece in which nothing is trained is left out. Each batch starts a new row, and
continues the text where the batch before it stopped.

Axes: T time.
"""

import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import grain
import numpy as np

from tunix.config import RowKind
from tunix.data.accounting import CUT_AWAY, Accounting, Dropped, Kept, Note
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.packing import pack, row_length
from tunix.data.rendered import prompt_text
from tunix.data.shapes import rendering
from tunix.data.sources import Rows
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Packed, Prompt
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.types import Pictures, Sequence
from tunix.util.coded import array_of, coded

SHARE = 16
"""Rows of a window that each process renders."""
T = TypeVar("T")
_PREFETCHED_BATCHES, _PREFETCHED_PROMPTS = 2, 256
"""How many of them are prepared before the trainer asks for them."""
_streams = itertools.count()
"""Numbers of the streams of a run, which all processes open in the same order."""
Renderer = Callable[[int], Kept | Dropped]
"""A row's number, or its place in an order -> its example."""


@dataclass(frozen=True)
class Taken:
    """The result of taking the next piece of a row."""

    piece: Kept | None
    """The piece; None where nothing in it is trained."""
    account: Accounting
    """The counts that it adds."""
    finished: bool
    """Whether nothing of the row is left."""


class Cutter:
    """Takes rows whole, or cuts them into pieces of at most `length` tokens; `wrapped` cuts where a row of the batch is
    full."""

    def __init__(self, length: int | None = None, wrapped: bool = False) -> None:
        """Starts at the beginning of a row and of a batch.

        Args:
            length: T, e.g. 1024; None takes every row uncut.
            wrapped: whether pieces fill the rows of the batch in order.
        """
        self._length, self._wrapped = length, wrapped
        self._room = length or 0
        self._begin = self._pieces = 0

    def new_batch(self) -> None:
        """Starts the rows of a new batch; the text continues where it was cut."""
        self._room = self._length or 0

    def has_target(self, example: Kept | Dropped) -> bool:
        """Whether the rest of the row contains something to train on."""
        if isinstance(example, Dropped) or self._length is None:
            return isinstance(example, Kept)
        return bool(example.sequences[0].loss_mask[self._begin + 1 :].any())

    def take(self, example: Kept | Dropped) -> Taken:
        """Takes the next piece of the row, or the whole rest where nothing of it is trained."""
        if isinstance(example, Dropped) or self._length is None:
            return Taken(example if isinstance(example, Kept) else None, Accounting.of(example), True)
        (whole,) = example.sequences
        total, begin = len(whole.tokens), self._begin
        if self._room < 2:  # no target fits after a first token
            self._room = self._length
        size = self._room if self._wrapped else self._length
        end = min(begin + size, total) if self.has_target(example) else total
        mask = whole.loss_mask[begin:end].copy()
        mask[:1] = False
        trained, finished = bool(mask.any()), end == total
        # A row counts with its first piece, or at its end where it has none.
        if trained:
            first = int(not self._pieces)
            account = Accounting(rows=first, kept=first, pieces=1)
        elif finished and not self._pieces:
            account = Accounting(rows=1, dropped={CUT_AWAY: 1}, untrained=1)
        else:
            account = Accounting(untrained=1)
        self._room -= end - begin if trained and self._wrapped else 0
        self._pieces += trained
        self._begin = end
        if finished:
            self._begin = self._pieces = 0
        per_token = {name: values[begin:end] for name, values in whole.per_token.items()}
        cut = replace(whole, tokens=whole.tokens[begin:end], loss_mask=mask, per_token=per_token)
        return Taken(replace(example, sequences=(cut,)) if trained else None, account, finished)

    def get_state(self) -> dict[str, Any]:
        """How far the row has been cut, and into how many pieces, as values that JSON can store."""
        return {} if self._length is None else {"begin": self._begin, "pieces": self._pieces}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned."""
        if self._length is not None:
            self._begin, self._pieces = state["begin"], state["pieces"]


def cutter(config: DataConfig, train_on: RowKind) -> Cutter:
    """The cutter for a recipe's rows; only texts and completions are cut."""
    return Cutter(config.max_length if config.cuts and train_on.is_text else None, config.packing == "wrapped")


def grouped(examples: Iterable[Kept | Dropped], cut: Cutter, size: int) -> Iterator[tuple[list[Kept], Accounting]]:
    """Batches of `size` sequences (the last may have fewer, or none) in the order of the examples, each with its
    accounting."""
    group: list[Kept] = []
    account = Accounting()
    cut.new_batch()
    for example in examples:
        finished = False
        while not finished:
            if len(group) == size and cut.has_target(example):
                yield group, account
                group, account = [], Accounting()
                cut.new_batch()
            taken = cut.take(example)
            finished = taken.finished
            account += taken.account
            group += [taken.piece] if taken.piece else []
    yield group, account


class Divided:
    """Rendered rows by their places, which are asked for in their order: each process renders a share of a window."""

    def __init__(self, render: Renderer, places: int, name: str):
        """Renders nothing yet.

        Args:
            render: a place -> its rendered row.
            places: how many there are.
            name: of these rows, the same in all processes, e.g. `rows/0`.
        """
        self._render, self._places = render, places
        self._name, self._restarts = name, itertools.count(1)
        self._restart = 0
        self._window, self._rendered = -1, list[Mapping[str, Any]]()
        self._posted = ""
        self._stopped = threading.Event()

    def __call__(self, place: int) -> Kept | Dropped:
        """The rendered row of a place.

        Raises:
            UserError: the row is no example.
            Stopped: `stop` was called meanwhile.
        """
        size = SHARE * processes.number()
        if (window := place // size) != self._window:
            places = range(window * size, min((window + 1) * size, self._places))
            share = [row_json(self._render, place) for place in places[processes.index() :: processes.number()]]
            key = f"{self._name}/{self._restart}/{window}"
            content = zlib.compress(json.dumps(share).encode(), 1)
            shares = [
                json.loads(zlib.decompress(x)) for x in processes.allgathered_once(key, content, stopped=self._stopped)
            ]
            if self._posted:  # whoever has come to this window has read the one before
                processes.forget(self._posted)
            self._posted = key
            self._rendered = [shares[i % len(shares)][i // len(shares)] for i in range(len(places))]
            self._window = window
        return row_of_json(self._rendered[place % size])

    def stop(self) -> None:
        """Ends a call that waits for other processes."""
        self._stopped.set()

    def restart(self) -> None:
        """Forgets what was rendered; all processes do so together, wherever each of them was."""
        self._restart, self._window = next(self._restarts), -1
        self._stopped.clear()


def row_json(render: Renderer, place: int) -> dict[str, Any]:
    """A rendered row as JSON values, or the mistake in it, which all processes report when they come to it."""
    try:
        example = render(place)
    except UserError as error:
        return {"error": str(error)}
    if isinstance(example, Dropped):
        return {"dropped": [example.reason, example.detail]}
    sequences = []
    for sequence in example.sequences:
        arrays = {} if sequence.pictures is None else vars(sequence.pictures)
        arrays = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
        saved = {
            "tokens": coded(sequence.tokens),
            "mask": coded(sequence.loss_mask),
            "weight": float(sequence.weight),
            "per_token": {name: coded(values) for name, values in sequence.per_token.items()},
            "per_sequence": {name: float(value) for name, value in sequence.per_sequence.items()},
            "pictures": {name: (coded(x), list(x.shape)) for name, x in arrays.items()},
        }
        sequences.append(saved)
    notes = [[note.rule, note.text] for note in example.notes]
    return {"kept": sequences, "truncated": example.truncated, "notes": notes}


def row_of_json(saved: Mapping[str, Any]) -> Kept | Dropped:
    """The inverse of `row_json`, but for the row's columns, which no algorithm on given sequences reads.

    Raises:
        UserError: the row is no example.
    """
    if "error" in saved:
        raise UserError(saved["error"])
    if "dropped" in saved:
        reason, detail = saved["dropped"]
        return Dropped(reason, detail)
    sequences = []
    for values in saved["kept"]:
        arrays = {name: array_of(x).reshape(shape) for name, (x, shape) in values["pictures"].items()}
        pictures = None
        if arrays:
            pictures = Pictures(arrays["pixels"], arrays["grids"], arrays["places"], arrays.get("rope"))
        sequence = Sequence(
            tokens=array_of(values["tokens"]),
            loss_mask=array_of(values["mask"]),
            weight=values["weight"],
            per_token={name: array_of(x) for name, x in values["per_token"].items()},
            per_sequence=values["per_sequence"],
            pictures=pictures,
        )
        sequences.append(sequence)
    notes = tuple(Note(rule, text) for rule, text in saved["notes"])
    return Kept(tuple(sequences), saved["truncated"], notes=notes)


def renderer(
    rows: Rows, tokenizer: Tokenizer | None, config: DataConfig, train_on: RowKind, vocab_size: int | None
) -> Renderer:
    """Renders rows by a recipe's `data` section; the first row determines the shape of all."""
    settings = replace(rendering(config, rows[0], f"row 1 of {rows.name}", train_on), vocab_size=vocab_size)
    return lambda i: to_example(rows[i], tokenizer, settings, f"row {i + 1} of {rows.name}", rows.folder)


def reasons(accounting: Accounting) -> str:
    """The reasons why rows were dropped with their counts, for a message."""
    counts = ", ".join(f"{count} x {reason}" for reason, count in accounting.dropped.items())
    return counts or "all have weight 0"


class Groups(Generic[T]):
    """Iterates over groups of exactly `batch_size` kept rows in Grain's order, in the thread that prefetches them."""

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
        divided: bool = False,
    ) -> None:
        """Starts at the first place, with the arguments of `Batches`; nothing is read but the first row.

        Args:
            made: turns a group of kept rows, and the accounting up to there, into an item.
            divided: whether all processes of the run render rows together, and go through them in the same order.
        """
        self.rows = rows
        self._batch_size, self._made = batch_size, made
        render = renderer(rows, tokenizer, config, train_on, vocab_size)
        order: grain.MapDataset[int] = grain.MapDataset.range(len(rows)).seed(seed % 2**32)
        order = (order.shuffle() if config.shuffle else order).repeat(epochs)
        self._places = len(order)

        def render_place(place: int) -> Kept | Dropped:
            number = order[place]
            assert number is not None, "a range has no gaps"
            return render(number)

        several = divided and processes.number() > 1
        self._divided = Divided(render_place, self._places, f"rows/{next(_streams)}") if several else None
        self._render = self._divided or render_place
        self._cut = cutter(config, train_on)
        self._next = 0
        self._accounting = Accounting()
        self._example: Kept | Dropped | None = None
        """The example of the next place, where it is rendered and not yet taken whole."""

    def __iter__(self) -> "Groups[T]":
        return self

    def __next__(self) -> T:
        group: list[Kept] = []
        self._cut.new_batch()
        while self._next < self._places:
            example = self._example = self._render(self._next) if self._example is None else self._example
            # A full group still takes the dropped rows that follow it, so that the last batch's account is complete.
            if len(group) == self._batch_size and self._cut.has_target(example):
                break
            taken = self._cut.take(example)
            self._accounting += taken.account
            if taken.finished:
                self._next += 1
                self._example = None
            if not self._accounting.kept and self._accounting.rows >= len(self.rows):
                last = f"; of the last one, {example.detail}" if isinstance(example, Dropped) and example.detail else ""
                raise UserError(f"{self.rows.name}: nothing in it can be trained on: {reasons(self._accounting)}{last}")
            if taken.piece:
                group.append(taken.piece)
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
        self._example = None
        if self._divided is not None:
            self._divided.restart()

    def stop(self) -> None:
        """Ends waiting for other processes: this stream is closed, or goes on elsewhere."""
        if self._divided is not None:
            self._divided.stop()


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
        batch = pack(
            sequences,
            number * size,
            length,
            config.packing,
            number,
            multiple=self.multiple,
            pictures=self.pictures(config),
        )
        return Packed(batch, accounting, sequences)


PLAIN = Layout()
"""The default layout: one sequence for each row of the data, unchanged."""


class Stream(Generic[T]):
    """An endless or counted stream of groups of kept rows, with a position that can be saved."""

    def __init__(self, groups: Groups[T], prefetched: int) -> None:
        """Starts the thread.

        Args:
            groups: the items.
            prefetched: how many of them are prepared before they are asked for.
        """
        self._rows, self._stop = groups.rows, groups.stop
        # Kept in a list that the finalizer empties: Grain's iterator has to be deleted before the interpreter exits, or
        # its __del__ fails on modules that are already gone; and its thread must not outlive this object.
        held = self._held = [grain.experimental.ThreadPrefetchDatasetIterator(groups, prefetched)]

        def release() -> None:
            groups.stop()
            held.pop().close()

        self._close = weakref.finalize(self, release)

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

        groups = Groups(
            rows, tokenizer, config, batch_size, seed, epochs, train_on, vocab_size, made=packed, divided=True
        )
        super().__init__(groups, _PREFETCHED_BATCHES)

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

        def single(group: list[Kept], accounting: Accounting) -> tuple[Kept, Accounting]:
            return group[0], accounting

        # Prompts are short, and all processes need all of them soon: each renders them itself.
        groups = Groups(rows, tokenizer, config, 1, seed, epochs, train_on, vocab_size, made=single)
        super().__init__(groups, _PREFETCHED_PROMPTS)
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
    render = renderer(rows, tokenizer, config, train_on, vocab_size)
    examples = [render(i) for i in range(min(limit, len(rows)))]
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
    render = renderer(rows, tokenizer, config, train_on, vocab_size)
    examples = [render(i) for i in range(min(limit, len(rows)))]
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
    render = renderer(rows, tokenizer, config, train_on, vocab_size)
    return sum((Accounting.of(render(i)) for i in range(len(rows))), Accounting())


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
    render = renderer(rows, tokenizer, config, train_on, vocab_size)
    for i in range(min(limit or len(rows), len(rows))):
        if isinstance(example := render(i), Kept):
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
    return sum(Groups(rows, tokenizer, config, batch_size, seed, epochs, train_on, vocab_size, made=lambda *_: 1))
