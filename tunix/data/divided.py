"""The rows of a stream, rendered by all processes of its run: each reads and renders its share of a window of them, and
all receive the whole window. So every process has the same batches, and splitting a run changes none of them.

Axes: T time.
"""

import itertools
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tunix.data.accounting import Dropped, Kept, Note
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.types import Pictures, Sequence
from tunix.util.coded import array_of, coded

SHARE = 16
"""Rows of a window that each process renders."""


class Divided:
    """Rendered rows by their places, which are asked for in their order."""

    def __init__(self, render: Callable[[int], Kept | Dropped], places: int, name: str):
        """Renders nothing yet.

        Args:
            render: a place -> its rendered row.
            places: how many there are.
            name: of these rows, the same in all processes, e.g. `rows/0`.
        """
        self._render, self._places = render, places
        self._name, self._begins = name, itertools.count(1)
        self._beginning = 0
        self._window, self._rendered = -1, list[Mapping[str, Any]]()
        self._posted: list[str] = []
        self._stopped = threading.Event()

    def __call__(self, place: int) -> Kept | Dropped:
        """The rendered row of a place.

        Raises:
            UserError: the row is no example.
            Stopped: `stop` was called meanwhile.
        """
        size = SHARE * processes.number()
        if place // size != self._window:
            self._rendered = self._fetched(place // size, size)
            self._window = place // size
        return _read(self._rendered[place % size])

    def stop(self) -> None:
        """Ends a call that waits for other processes."""
        self._stopped.set()

    def begin_anew(self) -> None:
        """Forgets what was rendered; all processes do so together, wherever each of them was."""
        self._beginning, self._window = next(self._begins), -1
        self._stopped.clear()

    def _fetched(self, window: int, size: int) -> list[Mapping[str, Any]]:
        """The rows of a window as JSON values, this process's share of them rendered here."""
        places = range(window * size, min((window + 1) * size, self._places))
        own = [_tried(self._render, place) for place in places[processes.index() :: processes.number()]]
        key = f"{self._name}/{self._beginning}/{window}"
        given = processes.shared(key, zlib.compress(json.dumps(own).encode(), 1), stopped=self._stopped)
        # Whoever has come to this window has read the one before.
        for old in self._posted:
            processes.forget(old)
        self._posted = [key]
        parts = [json.loads(zlib.decompress(part)) for part in given]
        return [parts[i % len(parts)][i // len(parts)] for i in range(len(places))]


def _tried(render: Callable[[int], Kept | Dropped], place: int) -> dict[str, Any]:
    """A rendered row as JSON values, or the mistake in it, which all processes report when they come to it."""
    try:
        found = render(place)
    except UserError as error:
        return {"error": str(error)}
    if isinstance(found, Dropped):
        return {"dropped": [found.reason, found.detail]}
    notes = [[note.rule, note.text] for note in found.notes]
    return {"kept": [_saved(sequence) for sequence in found.sequences], "truncated": found.truncated, "notes": notes}


def _saved(sequence: Sequence) -> dict[str, Any]:
    per_token = {name: coded(values) for name, values in sequence.per_token.items()}
    per_sequence = {name: float(value) for name, value in sequence.per_sequence.items()}
    numbers = {"weight": float(sequence.weight), "per_sequence": per_sequence}
    if (seen := sequence.pictures) is not None:
        arrays = {name: np.asarray(x) for name, x in vars(seen).items() if x is not None}
        numbers["pictures"] = {name: (coded(x), list(x.shape)) for name, x in arrays.items()}
    return {"tokens": coded(sequence.tokens), "mask": coded(sequence.loss_mask), "per_token": per_token, **numbers}


def _read(saved: Mapping[str, Any]) -> Kept | Dropped:
    """The inverse of `_tried`, but for the row's columns, which no algorithm on given sequences reads.

    Raises:
        UserError: the row is no example.
    """
    if "error" in saved:
        raise UserError(saved["error"])
    if "dropped" in saved:
        return Dropped(*saved["dropped"])
    notes = tuple(Note(*note) for note in saved["notes"])
    return Kept(tuple(map(_sequence, saved["kept"])), saved["truncated"], notes=notes)


def _sequence(saved: Mapping[str, Any]) -> Sequence:
    per_token = {name: array_of(values) for name, values in saved["per_token"].items()}
    pictures = None
    if "pictures" in saved:
        pictures = Pictures(**{name: array_of(x).reshape(shape) for name, (x, shape) in saved["pictures"].items()})
    given = (array_of(saved["tokens"]), array_of(saved["mask"]), saved["weight"], per_token, saved["per_sequence"])
    return Sequence(*given, pictures)
