"""Turns rows into batches in Grain's order: seeded, different in every epoch, prefetched, and exactly resumable.

Grain shuffles the row numbers. `Groups` takes rendered rows in that order (where several processes share a run, each
renders its share of a window of rows and all receive the whole window, so that splitting a run changes no batch), cuts
them into pieces where the recipe says so, and collects `batch_size` kept ones; a thread does so ahead of the trainer
and packs them. The position that `get_state` returns is that of the last batch handed out, however far the thread has
read ahead. The accounting is part of the position, so that it is correct after a resume too. `Prompts` is the same
stream where the policy samples the completions: any number of prompts at a time, unpacked.

`packing: split` or `wrapped` cuts texts longer than a row into pieces, so that no token is lost:

    max_length 4      texts  a0 a1 a2 a3 a4 a5   b0 b1 b2 b3
    split             rows   a0 a1 a2 a3 | b0 b1 b2 b3 | a4 a5    only long texts are cut; pieces are packed like texts
    wrapped           rows   a0 a1 a2 a3 | a4 a5, b0 b1 | b2 b3   rows are filled in order, each to its end

A piece is a separate sequence: its positions begin at 0, it sees nothing but itself, and its first token, which nothing
in it predicts, is not trained. A piece in which nothing is trained is left out. Each batch starts a new row, and
continues the text where the batch before it stopped.

Axes: T time.
"""

import copy
import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Generic, TypeVar

import grain
import numpy as np

from tunix.config import RowKind
from tunix.data.config import DataConfig, whole_weights
from tunix.data.curriculum import Curriculum
from tunix.data.examples import Examples, prompt_text
from tunix.data.mixing import Interleaved
from tunix.data.packing import pack, row_length
from tunix.data.sources import Rows, Table
from tunix.data.types import CUT_AWAY, Accounting, Dropped, Kept, Note, Packed, Prompt
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.types import Pictures, Sequence, TeacherView
from tunix.util.coded import array_of, coded

SHARE = 16
"""Rows of a window that each process renders."""
T = TypeVar("T")
_PREFETCHED_BATCHES, _PREFETCHED_PROMPTS = 2, 256
"""How many of them are prepared before the trainer asks for them."""
_streams = itertools.count()
"""Numbers of the streams of a run, which all processes open in the same order."""


class Cutter:
    """Takes rows whole, or cuts texts and completions into pieces of at most `max_length` tokens; `wrapped` cuts where
    a row of the batch is full."""

    def __init__(self, config: DataConfig, train_on: RowKind) -> None:
        """Starts at the beginning of a row and of a batch."""
        self._length = config.max_length if config.cuts and train_on.is_text else None
        self._each = config.turns == "each" and train_on == RowKind.COMPLETION
        self._wrapped = config.packing == "wrapped"
        self._room = self._length or 0
        self.begin = 0
        """Tokens of the row that are taken, or turns."""
        self.pieces = 0
        """Pieces of it with something to train on."""

    def new_batch(self) -> None:
        """Starts the rows of a new batch; the text continues where it was cut."""
        self._room = self._length or 0

    def has_target(self, example: Kept | Dropped) -> bool:
        """Whether the rest of the row contains something to train on."""
        if isinstance(example, Dropped) or self._length is None:
            return isinstance(example, Kept)
        return bool(example.sequences[0].loss_mask[self.begin + 1 :].any())

    def take(self, example: Kept | Dropped) -> tuple[Kept | None, Accounting, bool]:
        """Takes the next piece of the row, or the whole rest where nothing of it is trained.

        Returns:
            The piece, None where nothing in it is trained; the counts that it adds; whether nothing of the row is left.
        """
        if isinstance(example, Kept) and self._each:
            turn, self.begin = self.begin, self.begin + 1
            finished = self.begin == len(example.sequences)
            self.begin = 0 if finished else self.begin
            account = replace(Accounting() if turn else Accounting.of(example), pieces=1)
            return replace(example, sequences=(example.sequences[turn],)), account, finished
        if isinstance(example, Dropped) or self._length is None:
            return example if isinstance(example, Kept) else None, Accounting.of(example), True
        (whole,) = example.sequences
        total, begin = len(whole.tokens), self.begin
        if self._room < 2:  # no target fits after a first token
            self._room = self._length
        size = self._room if self._wrapped else self._length
        end = min(begin + size, total) if self.has_target(example) else total
        mask = whole.loss_mask[begin:end].copy()
        mask[:1] = False
        trained, finished = bool(mask.any()), end == total
        # A row counts with its first piece, or at its end where it has none.
        if trained and self.pieces:
            account = Accounting(pieces=1)
        elif trained:
            account = replace(Accounting.of(replace(example, notes=())), pieces=1)
        elif finished and not self.pieces:
            account = replace(Accounting.of(Dropped(CUT_AWAY, source=example.source)), untrained=1)
        else:
            account = Accounting(untrained=1)
        self._room -= end - begin if trained and self._wrapped else 0
        self.pieces += trained
        self.begin = end
        if finished:
            self.begin = self.pieces = 0
        per_token = {name: values[begin:end] for name, values in whole.per_token.items()}
        cut = replace(whole, tokens=whole.tokens[begin:end], loss_mask=mask, per_token=per_token)
        return replace(example, sequences=(cut,)) if trained else None, account, finished


class Divided:
    """Rendered rows by their places, which are asked for in their order: each process renders a share of a window."""

    def __init__(self, examples: Table, name: str):
        """Renders nothing yet.

        Args:
            examples: by places, each rendered when it is asked for.
            name: of these rows, the same in all processes, e.g. `rows/0`.
        """
        self._examples = examples
        self._name, self._restarts = name, 0
        self._window, self._rendered = -1, list[Kept | Dropped | UserError]()
        self._stopped = threading.Event()

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, place: int) -> Kept | Dropped:
        """The rendered row of a place.

        Raises:
            UserError: the row is no example.
            Stopped: `stop` was called meanwhile.
        """
        size = SHARE * processes.number()
        if (window := place // size) != self._window:
            places = range(window * size, min((window + 1) * size, len(self)))
            share: list[Kept | Dropped | UserError] = []
            for each in places[processes.index() :: processes.number()]:
                try:
                    share.append(self._examples[each])
                except UserError as error:  # all processes raise it when they come to this row
                    share.append(error)
            with processes.scope(f"{self._name}/{self._restarts}", self._stopped):
                sent = processes.allgathered("window", encoded(share))
            shares = list(map(decoded, sent))
            self._rendered = [shares[i % len(shares)][i // len(shares)] for i in range(len(places))]
            self._window = window
        example = self._rendered[place % size]
        if isinstance(example, UserError):
            raise example
        return example

    def stop(self) -> None:
        """Ends a call that waits for other processes."""
        self._stopped.set()

    def restart(self) -> None:
        """Forgets what was rendered; all processes do so together, wherever each of them was."""
        self._restarts, self._window = self._restarts + 1, -1
        self._stopped.clear()


_SENT: Mapping[str, Any] = {kind.__name__: kind for kind in (Kept, Dropped, Note, Sequence, Pictures, TeacherView)}
"""The records that a rendered row is made of."""


def encoded(rows: List[Kept | Dropped | UserError]) -> bytes:
    """Rendered rows, and the mistakes in others, as compressed JSON; without the rows' columns, which no algorithm on
    given sequences reads."""

    def fields(value: Any) -> Any:
        if isinstance(value, UserError):
            return {"error": str(value)}
        if is_dataclass(value):
            return {**vars(value), "record": type(value).__name__}
        array = np.asarray(value)
        return {"array": coded(array), "shape": array.shape} if array.ndim else array.item()

    bare = [replace(row, row={}) if isinstance(row, Kept) else row for row in rows]
    return zlib.compress(json.dumps(bare, default=fields).encode(), 1)


def decoded(content: bytes) -> list[Kept | Dropped | UserError]:
    """The inverse of `encoded`."""

    def value(fields: dict[str, Any]) -> Any:
        if "error" in fields:
            return UserError(fields["error"])
        if "array" in fields:
            return array_of(fields["array"]).reshape(fields["shape"])
        if "record" not in fields:
            return fields
        kind = _SENT[fields.pop("record")]
        return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()})

    return json.loads(zlib.decompress(content), object_hook=value)


def reasons(accounting: Accounting) -> str:
    """The reasons why rows were dropped with their counts, for a message."""
    counts = ", ".join(f"{count} x {reason}" for reason, count in accounting.dropped.items())
    return counts or "all have weight 0"


class Groups(Generic[T]):
    """Iterates over groups of exactly `size` kept rows (the last may have fewer), each with the accounting up to there,
    in the thread that prefetches them."""

    def __init__(
        self,
        examples: Table,
        cut: Cutter,
        size: int,
        make: Callable[[list[Kept], Accounting], T] = lambda group, accounting: (group, accounting),
        unusable: Mapping[str, Rows] | None = None,
    ) -> None:
        """Starts at the first place.

        Args:
            examples: rendered rows by their places in an order.
            cut: cuts rows into pieces.
            size: kept rows or pieces of a group.
            make: turns a group, and the accounting up to there, into an item.
            unusable: the rows by the name of their data set, of which it is an error if all were read and none kept;
                None for never.
        """
        self._examples, self._cut, self._size = examples, cut, size
        self._make, self._unusable = make, unusable
        self._next = 0
        self.accounting = Accounting()
        """Counts of the rows read so far."""
        self._example: Kept | Dropped | None = None
        """The example of the next place, where it is rendered and not yet taken whole."""

    def __iter__(self) -> "Groups[T]":
        return self

    def __next__(self) -> T:
        group: list[Kept] = []
        self._cut.new_batch()
        while self._next < len(self._examples):
            example = self._example = self._examples[self._next] if self._example is None else self._example
            # A full group still takes the dropped rows that follow it, so that the last batch's account is complete.
            if len(group) == self._size and self._cut.has_target(example):
                break
            piece, account, finished = self._cut.take(example)
            self.accounting += account
            if finished:
                self._next += 1
                self._example = None
            name, account = example.source, self.accounting
            kept, dropped = account.kept_of.get(name, 0), account.dropped_of.get(name, 0)
            if not name:
                kept, dropped = account.kept, account.rows - account.kept
            if self._unusable and not kept and dropped >= len(rows := self._unusable[name]):
                why = f"all {dropped} rows are dropped" if name else reasons(account)
                last = ""
                if isinstance(example, Dropped) and (example.detail or name):
                    last = f"; of the last one, {example.detail or example.reason}"
                raise UserError(f"{rows.name}: nothing in it can be trained on: {why}{last}")
            if piece:
                group.append(piece)
        if not group:
            raise StopIteration
        return self._make(group, self.accounting)

    def get_state(self) -> dict[str, Any]:
        """The next position in the order and within its row, and the accounting up to there."""
        place = {"next_index": self._next, "begin": self._cut.begin, "pieces": self._cut.pieces}
        return {**place, "accounting": asdict(self.accounting)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned."""
        self._next = int(state["next_index"])
        self.accounting = Accounting(**state["accounting"])
        self._cut.begin, self._cut.pieces = int(state.get("begin", 0)), int(state.get("pieces", 0))
        self._example = None
        if isinstance(self._examples, Divided):
            self._examples.restart()

    def stop(self) -> None:
        """Ends waiting for other processes: this stream is closed, or goes on elsewhere."""
        if isinstance(self._examples, Divided):
            self._examples.stop()


class Selection(Interleaved, grain.transforms.DatasetSelectionMap):
    """An interleave as Grain's map of places to data sets."""


def shuffled(
    examples: Examples,
    size: int,
    seed: int,
    epochs: int | None,
    make: Callable[[list[Kept], Accounting], T] = lambda group, accounting: (group, accounting),
    divided: bool = False,
    curriculum: Curriculum | None = None,
) -> Groups[T]:
    """Groups of kept rows in Grain's order, or in file order with `shuffle: false`. Several data sets are interleaved
    in the ratios of their weights until the first has been read `epochs` times; each has an order of its own.

    Args:
        examples: the rows.
        size: kept rows or pieces of a group.
        seed: of the order; each epoch has its own.
        epochs: None continues without end.
        make: see `Groups`.
        divided: whether all processes of the run render rows together, and go through them in the same order.
        curriculum: sorts the order; None for none.
    """
    orders: list[grain.MapDataset] = []
    begin = 0
    for number, part in enumerate(examples.parts or [examples]):
        order: grain.MapDataset = grain.MapDataset.range(begin, begin + len(part)).seed((seed + number) % 2**32)
        orders.append((order.shuffle() if examples.config.shuffle else order).repeat(epochs))
        begin += len(part)
    order = orders[0]
    if examples.parts:
        weights = whole_weights([source.weight for source in examples.config.sources])
        order = grain.MapDataset.select_from_datasets(orders, Selection(list(map(len, orders)), weights))
    rows = (order if curriculum is None else curriculum.order(order)).map(examples.__getitem__)
    source = Divided(rows, f"rows/{next(_streams)}") if divided and processes.number() > 1 else rows
    cut = Cutter(examples.config, examples.train_on)
    return Groups(source, cut, size, make, {part.source: part.rows for part in examples.parts or [examples]})


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
    prepare_sequence: Callable[[Sequence], Sequence] = lambda sequence: sequence
    """Hook before packing: returns the sequence to pack."""
    multiple: int = 1
    """The number of rows is one of it, e.g. 8 for eight devices; see `pack`."""

    def length(self, config: DataConfig) -> int:
        """T, the tokens of a row that has room for the longest sequences of an example."""
        number, completion = self.sequences_per_example, config.completion_length if config.packing else None
        return row_length(number, config.max_length, completion) + number * self.extra_tokens

    def packed(self, group: List[Kept], size: int, config: DataConfig, accounting: Accounting) -> Packed:
        """Packs kept rows into a batch.

        Args:
            group: the kept rows, at least one of positive weight.
            size: kept rows that the batch has room for.
            config: the recipe's `data` section.
            accounting: the counts up to and including these rows.
        """
        number = self.sequences_per_example
        sequences = tuple(self.prepare_sequence(sequence) for kept in group for sequence in kept.sequences)
        batch = pack(
            sequences,
            number * size,
            self.length(config),
            config.packing,
            number,
            multiple=self.multiple,
            pictures=pictures_of_row(config, number),
        )
        return Packed(batch, accounting, sequences)


PLAIN = Layout()
"""The default layout: one sequence for each row of the data, unchanged."""


class Stream(Generic[T]):
    """An endless or counted stream of groups of kept rows, with a position that can be saved."""

    def __init__(self, examples: Examples, groups: Groups[T], prefetched: int) -> None:
        """Starts the thread.

        Args:
            examples: the rows.
            groups: the items made of them.
            prefetched: how many of them are prepared before they are asked for.
        """
        self._rows, self._stop = examples.rows, groups.stop
        # Kept in a list that the finalizer empties: Grain's iterator has to be deleted before the interpreter exits, or
        # its __del__ fails on modules that are already gone; and its thread must not outlive this object.
        held = self._held = [grain.experimental.ThreadPrefetchDatasetIterator(groups, prefetched)]

        def release() -> None:
            groups.stop()
            held.pop().close()

        self._close = weakref.finalize(self, release)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._groups())

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
        self, examples: Examples, batch_size: int, seed: int, epochs: int | None = None, layout: Layout = PLAIN
    ) -> None:
        """Sets up the stream.

        Args:
            examples: the rows.
            batch_size: kept rows of a batch, sequences or pairs; the last one of counted epochs may have fewer.
            seed: seed of the order; each epoch has its own.
            epochs: None continues without end.
            layout: how the algorithm's sequences are packed into rows.
        """

        def packed(group: list[Kept], accounting: Accounting) -> Packed:
            if not any(map(_counts, group)):
                name = examples.rows.name
                raise UserError(f"{name}: a whole batch of {len(group)} rows has weight 0; leave such rows out")
            return layout.packed(group, batch_size, examples.config, accounting)

        groups = shuffled(examples, batch_size, seed, epochs, packed, divided=True)
        super().__init__(examples, groups, _PREFETCHED_BATCHES)


class Prompts(Stream[tuple[list[Kept], Accounting]]):
    """A stream of prompts, in the same seeded, resumable order as `Batches`."""

    def __init__(
        self, examples: Examples, seed: int, epochs: int | None = None, curriculum: Curriculum | None = None
    ) -> None:
        """Sets up the stream with the arguments of `Batches`; of `RowKind.ROW` an environment makes the prompts. A
        curriculum passes some over, or sorts them."""
        # Prompts are short, and all processes need all of them soon: each renders them itself.
        groups = shuffled(examples, 1, seed, epochs, curriculum=curriculum)
        super().__init__(examples, groups, _PREFETCHED_PROMPTS)
        self.curriculum = curriculum
        self.accounting = Accounting()
        """Counts of the rows read so far, up to the last prompt handed out."""

    def take(self, number: int) -> list[Prompt]:
        """The next `number` prompts; fewer where the last epoch is exhausted."""
        prompts: list[Prompt] = []
        while len(prompts) < number and (item := next(self, None)) is not None:
            (kept,), self.accounting = item
            if self.curriculum is None or self.curriculum.takes(kept, self.accounting.rows):
                prompts.append(prompt_of(kept))
        return prompts

    def get_state(self) -> dict[str, Any]:
        """The position after the last prompt, with the state of the curriculum."""
        state = super().get_state()
        return state if self.curriculum is None else {**state, "curriculum": copy.deepcopy(self.curriculum.state)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position; see `Stream.set_state`.

        Raises:
            UserError: the data has other rows, or the run another length than its prompts were sorted for.
        """
        if self.curriculum is not None:
            saved, prompts = state["curriculum"], self.curriculum.state.get("prompts")
            if saved.get("prompts") != prompts:
                raise UserError(
                    f"data.curriculum: {{by: {saved['by']}}} has sorted the {saved['prompts']} prompts of a whole run, "
                    f"which now takes {prompts}: set steps and epochs as they were, or start over with --fresh"
                )
            self.curriculum.state = copy.deepcopy(dict(saved))
        super().set_state(state)


def prompt_of(kept: Kept) -> Prompt:
    """The prompt of a kept row."""
    (prompt,) = kept.sequences
    text, view = prompt_text(kept.row), prompt.teacher
    return Prompt(prompt.tokens, text, kept.row, prompt.pictures, kept.source, kept.number, view)


def _counts(kept: Kept) -> bool:
    """Whether a kept row has a positive weight."""
    return any(sequence.weight > 0 for sequence in kept.sequences)


def eval_batches(examples: Examples, batch_size: int, limit: int, layout: Layout = PLAIN) -> list[Packed]:
    """The first `limit` rows in file order, packed; the last batch may have fewer. Rows of weight 0 are left out.

    Raises:
        UserError: none of these rows can be evaluated.
    """
    read = list(examples.first(limit))
    weightless = [example for example in read if isinstance(example, Kept) and not _counts(example)]
    weighted = [example for example in read if isinstance(example, Dropped) or _counts(example)]
    groups = Groups(weighted, Cutter(examples.config, examples.train_on), batch_size)
    kept = [group for group, _ in groups]
    total = sum(map(Accounting.of, weightless), groups.accounting)
    if not kept:
        name = examples.rows.name
        raise UserError(f"{name}: none of its first {len(read)} rows can be evaluated: {reasons(total)}")
    return [layout.packed(group, batch_size, examples.config, total) for group in kept]
