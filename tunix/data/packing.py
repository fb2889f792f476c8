"""Sequences become a batch: rows of `T` tokens that hold several sequences each, none split, few places empty.

First fit decreasing: the longest first, each into the first row with room. Rows are laid out with numpy alone.

Axes: R rows (as many as are needed), T time, S sequences of a batch.
"""

from collections.abc import Sequence as List

import numpy as np

from tunix.types import Batch, Sequence


def pack(sequences: List[Sequence], size: int, max_length: int, packing: bool = True) -> Batch:
    """Packs up to `size` sequences into rows of `max_length` tokens.

    Args:
        sequences: each at most `max_length` long; all name the same per-token and per-sequence values.
        size: S, the length of the per-sequence arrays. Where there are fewer sequences, the rest has weight 0.
        max_length: T.
        packing: False gives each sequence a row of its own.

    Returns:
        A batch of numpy arrays; `sequence_ids` are places in `sequences`. The first token of a sequence is never
        trained, whatever its mask says.

    Raises:
        ValueError: too many, an empty or too long sequence, values that differ in name, or nothing that is trained.
    """
    lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    _check(sequences, lengths, size, max_length)
    if packing:
        order, row_of, start_of, segment_of = _first_fit(lengths, max_length)
    else:
        order, row_of = np.arange(len(lengths)), np.arange(len(lengths))
        start_of, segment_of = np.zeros_like(order), np.ones_like(order)
    shape = (int(row_of.max()) + 1, max_length)
    sizes = lengths[order]
    ends = np.cumsum(sizes)
    positions = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    target = np.repeat(row_of[order] * max_length + start_of[order], sizes) + positions

    def laid(values: np.ndarray, dtype: type) -> np.ndarray:
        out = np.zeros(shape, dtype)
        out.reshape(-1)[target] = values
        return out

    def joined(arrays: List[np.ndarray]) -> np.ndarray:
        return np.concatenate([arrays[int(i)] for i in order])

    mask = joined([sequence.loss_mask for sequence in sequences]).astype(bool) & (positions > 0)
    owners = np.repeat(order, sizes)
    weights = np.zeros(size)
    weights[: len(sequences)] = [sequence.weight for sequence in sequences]
    trained = np.bincount(owners[mask], minlength=size)
    counts = {"tokens": weights @ trained, "sequences": weights.sum()}
    if not mask.any():
        raise ValueError("no token of the batch is trained")
    first = sequences[0]
    return Batch(
        tokens=laid(joined([sequence.tokens for sequence in sequences]), np.int32),
        positions=laid(positions, np.int32),
        segment_ids=laid(np.repeat(segment_of[order], sizes), np.int32),
        loss_mask=laid(mask, np.bool_),
        sequence_ids=laid(owners, np.int32),
        weights=weights.astype(np.float32),
        lengths=np.maximum(trained, 1).astype(np.float32),
        counts={name: np.asarray(count, np.float32) for name, count in counts.items()},
        per_token={
            name: laid(joined([sequence.per_token[name] for sequence in sequences]), np.float32)
            for name in first.per_token
        },
        per_sequence={
            name: _padded([sequence.per_sequence[name] for sequence in sequences], size) for name in first.per_sequence
        },
    )


def waste(batch: Batch) -> float:
    """Share of the batch's places that hold no token."""
    return float(np.mean(np.asarray(batch.segment_ids) == 0))


def _check(sequences: List[Sequence], lengths: np.ndarray, size: int, max_length: int) -> None:
    """Refuses what cannot be packed."""
    if not 0 < len(sequences) <= size:
        raise ValueError(f"{len(sequences)} sequences do not fill a batch of 1 to {size}")
    if lengths.min() < 1 or lengths.max() > max_length:
        raise ValueError(f"sequences have {lengths.min()} to {lengths.max()} tokens; 1 to {max_length} fit in a row")
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


def _first_fit(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """First fit decreasing.

    Returns:
        Of S each: the order of placement, and by sequence its row, its first place there, and its segment (from 1).
    """
    order = np.argsort(-lengths, kind="stable")
    room = np.full(len(lengths), max_length)
    used = np.zeros(len(lengths), np.int64)
    row_of, start_of, segment_of = np.empty_like(order), np.empty_like(order), np.empty_like(order)
    rows = 0
    for i in order:
        # Rows that are not open yet have full room, so the first that fits always exists.
        row = int(np.argmax(room[: rows + 1] >= lengths[i]))
        rows = max(rows, row + 1)
        used[row] += 1
        row_of[i], start_of[i], segment_of[i] = row, max_length - room[row], used[row]
        room[row] -= lengths[i]
    return order, row_of, start_of, segment_of


def _padded(values: List[float], size: int) -> np.ndarray:
    out = np.zeros(size, np.float32)
    out[: len(values)] = values
    return out
