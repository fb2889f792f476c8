"""Sequences become a batch: rows of `T` tokens that hold several sequences each, none split, few places empty.

First fit decreasing: the longest first, each into the first row with room. Numpy alone lays them out, in pieces. A
sequence is one piece; but sequences that are compared with each other lie in one row, and what they begin with alike is
a piece of its own, the parent of theirs.

    row      p0 p1 p2 | p3 c0 c1 c2 | p3 r0 r1 | next pair ...
    segment   1  1  1 |  2  2  2  2 |  3  3  3 |
    parent    1  1  1 |  1  1  1  1 |  1  1  1 |

A branch repeats the last token that both share: the state there predicts the first one that differs.

Axes: R rows (as many as are needed), T time, S sequences of a batch, U units that lie in one row, K pieces, L
tokens of all pieces.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tunix.types import LOSS_WEIGHTS, Batch, Sequence

LABEL = "label"
"""The per-sequence value that is 1 for a desirable completion and 0 for another."""


Packing = Literal[True, False, "wrapped", "split"]
"""See `DataConfig.packing`."""


def row_length(number: int, longest: int, completion: int | None) -> int:
    """T: tokens of a row in which sequences that share a prompt have room, whatever their lengths.

    Args:
        number: of the sequences.
        longest: tokens of each at most.
        completion: tokens of each after the prompt at most; None where only `longest` bounds them.
    """
    # The prompt stands once, but for its last token, which predicts the first one of each.
    own = longest if completion is None else min(completion + 1, longest)
    return longest + (number - 1) * own


def pack(
    sequences: List[Sequence],
    size: int,
    max_length: int,
    packing: Packing = True,
    members: int = 1,
    together: int = 1,
) -> Batch:
    """Packs up to `size` sequences into rows of `max_length` tokens.

    Args:
        sequences: each at most `max_length` long; all name the same per-token and per-sequence values.
        size: S, the length of the per-sequence arrays. Where there are fewer sequences, the rest has weight 0.
        max_length: T.
        packing: False gives each unit a row of its own, and nothing is shared; `wrapped` fills the rows in the order of
            the sequences.
        members: so many sequences that follow each other are compared. They are a unit: they share a row, which has to
            have room for them, and the beginning that they have in common as far as it is not trained.
        together: so many are a unit likewise where they are not compared (`members` is 1): answers to one prompt.

    Returns:
        A batch of numpy arrays; `sequence_ids` are places in `sequences`, of a shared beginning the unit's first. The
        first token of a sequence is never trained, whatever its mask says. Of two members, `counts` has the pairs; of
        labelled sequences, those that are desirable.

    Raises:
        ValueError: too many, an empty or too long sequence, values that differ in name, or nothing that is trained.
    """
    lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    unit = max(members, together)
    _check(sequences, lengths, size, unit)
    pieces = _pieces(sequences, lengths, unit, share=bool(packing))
    row_of, start_of, segment_of = _placed(pieces, max_length, packing)
    tokens = _tokens(pieces, row_of * max_length + start_of, lengths, (int(row_of.max()) + 1, max_length))
    mask = tokens.joined([sequence.loss_mask for sequence in sequences]).astype(bool) & (tokens.position > 0)
    if not mask.any():
        raise ValueError("no token of the batch is trained")
    weights = np.zeros(size)
    weights[: len(sequences)] = [sequence.weight for sequence in sequences]
    trained = _trained(sequences, tokens, mask, size)
    first = sequences[0]
    return Batch(
        tokens=tokens.in_rows(tokens.joined([sequence.tokens for sequence in sequences]), np.int32),
        positions=tokens.in_rows(tokens.position, np.int32),
        segment_ids=tokens.in_rows(segment_of[tokens.piece], np.int32),
        loss_mask=tokens.in_rows(mask, np.bool_),
        sequence_ids=tokens.in_rows(tokens.owner, np.int32),
        weights=weights.astype(np.float32),
        lengths=np.where(trained > 0, trained, 1).astype(np.float32),
        counts=_counts(sequences, weights, trained, members),
        per_token={
            name: tokens.in_rows(tokens.joined([sequence.per_token[name] for sequence in sequences]), np.float32)
            for name in first.per_token
        },
        per_sequence={
            name: _padded([sequence.per_sequence[name] for sequence in sequences], size) for name in first.per_sequence
        },
        parents=tokens.in_rows(segment_of[pieces.parent][tokens.piece], np.int32) if unit > 1 and packing else None,
    )


def _trained(sequences: List[Sequence], tokens: "_Tokens", mask: np.ndarray, size: int) -> np.ndarray:
    """`[S]` trained tokens of each, by their own weights where they have some."""
    own = None
    if LOSS_WEIGHTS in sequences[0].per_token:
        own = tokens.joined([sequence.per_token[LOSS_WEIGHTS] for sequence in sequences])[mask]
    return np.bincount(tokens.owner[mask], own, minlength=size)


def _counts(sequences: List[Sequence], weights: np.ndarray, trained: np.ndarray, members: int) -> dict[str, np.ndarray]:
    """What losses are divided by; see `Batch.counts`."""
    counts = {"tokens": weights @ trained, "sequences": weights.sum()}
    if members == 2:
        counts["pairs"] = weights[::2].sum()
    if LABEL in sequences[0].per_sequence:
        counts["desirable"] = weights[: len(sequences)] @ [sequence.per_sequence[LABEL] for sequence in sequences]
    return {name: np.asarray(count, np.float32) for name, count in counts.items()}


def waste(batch: Batch) -> float:
    """Share of the batch's places that hold no token."""
    return float(np.mean(np.asarray(batch.segment_ids) == 0))


@dataclass(frozen=True)
class _Pieces:
    """Stretches of sequences, unit by unit; arrays `[K]`."""

    owner: np.ndarray
    """The sequence."""
    begin: np.ndarray
    """First token of it."""
    end: np.ndarray
    """Behind the last."""
    unit: np.ndarray
    """Never falling."""
    parent: np.ndarray
    """The piece that is seen too; itself where there is none."""


@dataclass(frozen=True)
class _Tokens:
    """The tokens of all pieces, one behind the other; arrays `[L]`."""

    piece: np.ndarray
    """The piece that it belongs to, 0 to K - 1."""
    owner: np.ndarray
    """The sequence."""
    position: np.ndarray
    """Within it."""
    source: np.ndarray
    """Among the tokens of all sequences."""
    target: np.ndarray
    """Among the places of all rows."""
    shape: tuple[int, int]
    """R and T."""

    def joined(self, arrays: List[np.ndarray]) -> np.ndarray:
        """`[L]` of an array of each sequence's tokens."""
        return np.concatenate(arrays)[self.source]

    def in_rows(self, values: np.ndarray, dtype: type) -> np.ndarray:
        """`[R T]` of `[L]`, zeros elsewhere."""
        rows = np.zeros(self.shape, dtype)
        rows.reshape(-1)[self.target] = values
        return rows


def _tokens(pieces: _Pieces, place: np.ndarray, lengths: np.ndarray, shape: tuple[int, int]) -> _Tokens:
    """Every token of pieces whose first ones have a place (`[K]`) in the rows."""
    sizes = pieces.end - pieces.begin
    piece = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(piece)) - (np.cumsum(sizes) - sizes)[piece]
    owner, position = pieces.owner[piece], within + pieces.begin[piece]
    source = position + (np.cumsum(lengths) - lengths)[owner]
    return _Tokens(piece, owner, position, source, place[piece] + within, shape)


def _pieces(sequences: List[Sequence], lengths: np.ndarray, members: int, share: bool) -> _Pieces:
    number = np.arange(len(sequences))
    if members == 1:
        return _Pieces(number, np.zeros_like(number), lengths, number, number)
    rows: list[tuple[int, int, int, int, int]] = []
    for unit, first in enumerate(range(0, len(sequences), members)):
        group = range(first, first + members)
        # The last token in common is left to the branches.
        shared = max(shared_tokens([sequences[i] for i in group]) - 1, 0) if share else 0
        parent = len(rows)
        if shared:
            rows.append((first, 0, shared, unit, parent))
        rows += [(i, shared, lengths[i], unit, parent if shared else parent + i - first) for i in group]
    return _Pieces(*np.array(rows, np.int64).T)


def shared_tokens(group: List[Sequence]) -> int:
    """Tokens at the beginning that are alike and not trained in any of a group."""
    most = min(len(sequence.tokens) for sequence in group)
    first = group[0].tokens[:most]
    differ = np.zeros(most, bool)
    for sequence in group:
        differ |= (sequence.tokens[:most] != first) | sequence.loss_mask[:most].astype(bool)
    return int(np.argmax(differ)) if differ.any() else most


def _placed(pieces: _Pieces, max_length: int, packing: Packing) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the pieces go, `[K]` each: the row, the first place in it, the segment of the row (from 1).

    Raises:
        ValueError: a unit is empty or does not fit into a row.
    """
    sizes = pieces.end - pieces.begin
    units = np.bincount(pieces.unit, weights=sizes).astype(np.int64)
    if units.max() > max_length:
        raise ValueError(f"sequences that share a row have {units.max()} tokens; 1 to {max_length} fit in a row")
    number = np.bincount(pieces.unit)
    if packing:
        order = np.arange(len(units)) if packing == "wrapped" else np.argsort(-units, kind="stable")
        row_of, start_of, segment_of = _fit(units, number, max_length, order, back=packing != "wrapped")
    else:
        row_of, start_of, segment_of = np.arange(len(units)), np.zeros_like(units), np.ones_like(units)
    first = np.cumsum(number) - number
    before = np.cumsum(sizes) - sizes
    start = start_of[pieces.unit] + before - before[first][pieces.unit]
    segment = segment_of[pieces.unit] + np.arange(len(sizes)) - first[pieces.unit]
    return row_of[pieces.unit], start, segment


def _check(sequences: List[Sequence], lengths: np.ndarray, size: int, members: int) -> None:
    """Refuses what cannot be packed."""
    if not 0 < len(sequences) <= size:
        raise ValueError(f"{len(sequences)} sequences do not fill a batch of 1 to {size}")
    if len(sequences) % members or size % members:
        raise ValueError(
            f"{len(sequences)} sequences of a batch of {size} do not make units of {members}; one that is to be left "
            "out keeps its place, with weight 0"
        )
    if lengths.min() < 1:
        raise ValueError(f"sequence {int(np.argmin(lengths))} has no token")
    first = sequences[0]
    for i, sequence in enumerate(sequences):
        if (
            sequence.per_token.keys() != first.per_token.keys()
            or sequence.per_sequence.keys() != first.per_sequence.keys()
        ):
            raise ValueError(f"sequence {i} names other values than the first of its batch")
        for name, values in {"loss_mask": sequence.loss_mask, **sequence.per_token}.items():
            if len(values) != len(sequence.tokens):
                raise ValueError(f"{name} of sequence {i} has {len(values)} values for {len(sequence.tokens)} tokens")


def _fit(
    lengths: np.ndarray, pieces: np.ndarray, max_length: int, order: np.ndarray, back: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First fit: each unit into the first row with room; or next fit: into the last one or a new one.

    Args:
        lengths: `[U]` tokens of each unit.
        pieces: `[U]` segments that it takes.
        order: of the units.
        back: whether rows before the last are looked at.

    Returns:
        `[U]` each: its row, its first place there, and its first segment (from 1).
    """
    room = np.full(len(lengths), max_length)
    used = np.ones(len(lengths), np.int64)
    row_of, start_of, segment_of = (np.empty_like(lengths) for _ in range(3))
    rows = 0
    for i in order:
        first = 0 if back else max(rows - 1, 0)
        # Rows that are not open yet have full room, so the first that fits always exists.
        row = first + int(np.argmax(room[first : rows + 1] >= lengths[i]))
        rows = max(rows, row + 1)
        row_of[i], start_of[i], segment_of[i] = row, max_length - room[row], used[row]
        used[row] += pieces[i]
        room[row] -= lengths[i]
    return row_of, start_of, segment_of


def _padded(values: List[float], size: int) -> np.ndarray:
    out = np.zeros(size, np.float32)
    out[: len(values)] = values
    return out
