"""Packs sequences into a batch: rows of `T` tokens that hold several sequences each, none split, with little padding.

First fit decreasing: the longest first, each into the first row with room, in numpy. Where rows are split over devices,
they are then as many as those need, and the longest goes into the emptiest: no device has much more to attend to and to
predict than another. A sequence is packed as one piece, and each transcript of an episode as one in the same row; but
sequences that are compared with each other share a row, and their common beginning is a piece of its own, the parent of
theirs.

    row      p0 p1 p2 | p3 c0 c1 c2 | p3 r0 r1 | next pair ...
    segment   1  1  1 |  2  2  2  2 |  3  3  3 |
    parent    1  1  1 |  1  1  1  1 |  1  1  1 |

A branch repeats the last token that both share: its state predicts the first token that differs.

Transcripts of an episode may be a trie: others branch off some of them, the trunks, which go on after them.

    row      p0 p1 p2 | p3 a0 a1 | p3 b0 b1 b2 | b3 c0 | b3 d0 d1 |
    segment   1  1  1 |  2  2  2 |  1  1  1  1 |  3  3 |  1  1  1 |
    parent    1  1  1 |  1  1  1 |  1  1  1  1 |  1  1 |  1  1  1 |

A sequence for a model with a scalar head has one extra position after its last token, where the score is read.

Axes: B rows, T time, S sequences.
"""

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tunix.config import LOSS_WEIGHTS, OBSERVED
from tunix.data.config import Packing
from tunix.types import Batch, Pictures, Sequence

LABEL = "label"
"""Name of the per-sequence value that is 1 for a desirable completion and 0 for an undesirable one."""


def row_length(number: int, longest: int, completion: int | None) -> int:
    """T, the tokens of a row that has room for sequences that share a prompt, whatever their lengths.

    Args:
        number: how many sequences, e.g. 2.
        longest: most tokens of a sequence.
        completion: most tokens of a sequence after the prompt; None where only `longest` is a limit.
    """
    # The prompt is stored once, except its last token, which predicts the first token of each completion.
    branch = longest if completion is None else min(completion + 1, longest)
    return longest + (number - 1) * branch


def pack(
    sequences: List[Sequence],
    size: int,
    max_length: int,
    packing: Packing = True,
    sequences_per_example: int = 1,
    together: int = 1,
    multiple: int = 1,
    pictures: int = 0,
    trie: bool = False,
) -> Batch:
    """Packs up to `size` sequences into rows of `max_length` tokens.

    Args:
        sequences: each at most `max_length` long; all name the same per-token and per-sequence values.
        size: S, the length of the per-sequence arrays. Where there are fewer sequences, the rest has weight 0.
        max_length: T, e.g. 1024.
        packing: False gives each unit a separate row, and nothing is shared; `wrapped` fills the rows in the order of
            the sequences.
        sequences_per_example: number of consecutive sequences that are compared, e.g. 2 for pairs. They form a unit:
            they share a row, which must have room for them, and their common beginning as far as it is not trained.
        together: number of consecutive sequences that form a unit without being compared (`sequences_per_example` is
            1), e.g. the completions of one prompt.
        multiple: the number of rows is one of it, e.g. 8 for eight devices; rows that are `wrapped` or not packed may
            be empty at the end, all others are filled evenly.
        pictures: pictures of a row at most, where the sequences have some; 0 where none has.
        trie: whether transcripts of an episode share what they begin with, which is computed once; where sequences of a
            unit have several, they share nothing with each other.

    Returns:
        A batch of numpy arrays; `sequence_ids` are indices into `sequences`; a shared beginning has that of the unit's
        first sequence. The first token of a sequence is never trained, whatever its mask says. With two per example,
        `counts` has `pairs`; with labelled sequences, it has `desirable`.

    Raises:
        ValueError: too many sequences, an empty or too long one, values that differ in name, or nothing to train.
    """
    lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    unit = max(sequences_per_example, together)
    first = sequences[0] if sequences else None
    if first is None or len(sequences) > size:
        raise ValueError(f"{len(sequences)} sequences do not fill a batch of 1 to {size}")
    if len(sequences) % unit or size % unit:
        raise ValueError(
            f"{len(sequences)} sequences of a batch of {size} do not make units of {unit}; one that is to be left "
            "out keeps its place, with weight 0"
        )
    if lengths.min() < 1:
        raise ValueError(f"sequence {int(np.argmin(lengths))} has no token")
    most = max(0 if sequence.pictures is None else sequence.pictures.number for sequence in sequences)
    if most > pictures:
        raise ValueError(f"a sequence has {most} pictures; rows have room for {pictures}")
    for i, sequence in enumerate(sequences):
        if (
            sequence.per_token.keys() != first.per_token.keys()
            or sequence.per_sequence.keys() != first.per_sequence.keys()
        ):
            raise ValueError(f"sequence {i} names other values than the first of its batch")
        for name, values in {"loss_mask": sequence.loss_mask, **sequence.per_token}.items():
            if len(values) != len(sequence.tokens):
                raise ValueError(f"{name} of sequence {i} has {len(values)} values for {len(sequence.tokens)} tokens")
    # Of each piece, unit by unit: its sequence, first and end place there, the place of position 0, unit, the piece
    # that it goes on with and the one that it also sees, itself where there is none.
    pieces: list[tuple[int, int, int, int, int, int, int]] = []
    for number, start in enumerate(range(0, len(sequences), unit)):
        # The last common token is repeated in each branch.
        group = sequences[start : start + unit]
        shares = packing and unit > 1 and not any(sequence.restarts for sequence in group)
        shared = shared_tokens(group) - 1 if shares else 0
        parent = len(pieces)
        if shared > 0:
            pieces.append((start, 0, shared, 0, number, parent, parent))
        for i, sequence in enumerate(group, start=start):
            offset = len(pieces)
            for begin, end, zero, this, sees in branched(sequence, trie and bool(packing)):
                sees = parent if shared > 0 else offset + sees
                pieces.append((i, max(begin, shared), end, zero, number, offset + this, sees))
    owner_of, begin_of, end_of, zero_of, unit_of, first_of, parent_of = np.array(pieces, np.int64).T
    # The pictures of each piece, which has whole ones: text that all share follows them.
    pictures_of: list[Pictures] = []
    if pictures:
        for i, begin, end, *_ in pieces:
            whole = sequences[i].pictures
            assert whole is not None, "a sequence without pictures says so"
            pictures_of.append(whole.within(begin, end))
    seen = np.array([x.number for x in pictures_of]) if pictures else np.zeros_like(owner_of)
    sizes = end_of - begin_of
    row_of, start_of, segment_of = _placed(sizes, unit_of, max_length, packing, multiple, seen, pictures)
    segment_of = segment_of[first_of]
    rows = -(-(int(row_of.max()) + 1) // multiple) * multiple
    piece = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(piece)) - (np.cumsum(sizes) - sizes)[piece]
    owner, place = owner_of[piece], within + begin_of[piece]
    position = place - zero_of[piece]
    source = place + (np.cumsum(lengths) - lengths)[owner]
    target = (row_of * max_length + start_of)[piece] + within

    def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
        """Values of all pieces' tokens, one piece after the other, from one array for each sequence."""
        return np.concatenate([*arrays])[source]

    def in_rows(values: np.ndarray, dtype: type) -> np.ndarray:
        """Values of all pieces' tokens in rows `[B T]`, with zeros elsewhere."""
        placed = np.zeros((rows, max_length), dtype)
        placed.reshape(-1)[target] = values
        return placed

    mask = joined(sequence.loss_mask for sequence in sequences).astype(bool) & (position > 0)
    if not mask.any():
        raise ValueError("no token of the batch is trained")
    weights = np.zeros(size)
    weights[: len(sequences)] = [sequence.weight for sequence in sequences]
    # Trained tokens of each sequence, each counted by its loss weight where there are any.
    loss_weights = None
    if LOSS_WEIGHTS in first.per_token:
        loss_weights = joined(sequence.per_token[LOSS_WEIGHTS] for sequence in sequences)[mask]
    trained = np.bincount(owner[mask], loss_weights, minlength=size)
    # The denominators of losses; see `Batch.counts`.
    counts = {"tokens": weights @ trained, "sequences": weights.sum()}
    if sequences_per_example == 2:
        counts["pairs"] = weights[::2].sum()
    if OBSERVED in first.per_token:
        observed = joined(sequence.per_token[OBSERVED] for sequence in sequences)
        counts["observed"] = weights @ np.bincount(owner, observed, minlength=size)
    if LABEL in first.per_sequence:
        counts["desirable"] = weights[: len(sequences)] @ [sequence.per_sequence[LABEL] for sequence in sequences]
    views = [sequence.teacher for sequence in sequences if sequence.teacher is not None]
    if views and len(views) < len(sequences):
        raise ValueError(f"a teacher reads {len(views)} of {len(sequences)} sequences in another way: all, or none")
    per_sequence = {name: np.zeros(size, np.float32) for name in first.per_sequence}
    for name, padded in per_sequence.items():
        padded[: len(sequences)] = [sequence.per_sequence[name] for sequence in sequences]

    def replayed(values: List[np.ndarray | None]) -> np.ndarray | None:
        """What a sampler recorded of each sequence's tokens in rows, -1 where nothing is known; None if that is so of
        all."""
        known = next((x for x in values if x is not None), None)
        if known is None:
            return None
        unknown = (np.full((length, *known.shape[1:]), -1, known.dtype) for length in lengths)
        placed = np.full((rows * max_length, *known.shape[1:]), -1, known.dtype)
        placed[target] = joined(y if x is None else x for x, y in zip(values, unknown, strict=True))
        return placed.reshape(rows, max_length, *known.shape[1:])

    # The rows' pictures, each row's in the order of the pieces, and their places.
    packed_pictures = None
    if pictures:
        pixels = np.zeros((rows, pictures, *pictures_of[0].pixels.shape[1:]), np.uint8)
        grids, used = np.zeros((rows, pictures, 2), np.int32), np.zeros(rows, np.int64)
        places: list[np.ndarray] = []
        for row, seen_by in zip(row_of, pictures_of, strict=True):
            room, at = np.s_[row, used[row] : used[row] + seen_by.number], np.asarray(seen_by.places)
            places.append(np.where(at > 0, at + np.prod(grids[row], axis=-1).sum(), 0))
            pixels[room], grids[room] = seen_by.pixels, seen_by.grids
            used[row] += seen_by.number
        rope = None
        if pictures_of[0].rope is not None:
            every = np.concatenate([x.rope for x in pictures_of if x.rope is not None])
            rope = np.stack([in_rows(axis, np.int32) for axis in every.T], axis=-1)
        packed_pictures = Pictures(pixels, grids, in_rows(np.concatenate(places), np.int32), rope)
    return Batch(
        tokens=in_rows(joined(sequence.tokens for sequence in sequences), np.int32),
        positions=in_rows(position, np.int32),
        segment_ids=in_rows(segment_of[piece], np.int32),
        loss_mask=in_rows(mask, np.bool_),
        sequence_ids=in_rows(owner, np.int32),
        weights=weights.astype(np.float32),
        lengths=np.where(trained > 0, trained, 1).astype(np.float32),
        counts={name: np.asarray(count, np.float32) for name, count in counts.items()},
        per_token={
            name: in_rows(joined(sequence.per_token[name] for sequence in sequences), np.float32)
            for name in first.per_token
        },
        per_sequence=per_sequence,
        parents=in_rows(segment_of[parent_of][piece], np.int32) if (unit > 1 or trie) and packing else None,
        interleaved=trie and bool(packing),
        places=in_rows(place, np.int32),
        pictures=packed_pictures,
        experts=replayed([x.experts for x in sequences]),
        candidates=replayed([x.candidates for x in sequences]),
        stored=replayed([x.stored for x in sequences]),
        teacher=tuple(views) or None,
    )


def branched(sequence: Sequence, trie: bool) -> list[tuple[int, int, int, int, int]]:
    """The pieces of a sequence's transcripts, in their order in a row.

    Of a trie, some transcripts are trunks, and each other branches off the trunk with which it shares most: where they
    differ, or before, so that no token is left out which is trained or observed there, nor parted from the one before
    it. Trunks share nothing. Each further one is that which saves most tokens, as long as one does: where a history
    begins anew, or is shortened, what follows has another trunk.

    Args:
        sequence: has `restarts`.
        trie: whether its transcripts share what they begin with; else each is one piece.

    Returns:
        Of each: its first place in the sequence and its end, the place of position 0, the piece that it goes on with
        and the one that it also sees, itself where there is none.
    """
    bounds = list(pairwise((0, *sequence.restarts, len(sequence.tokens))))
    if not trie or len(bounds) == 1:
        return [(zero, end, zero, i, i) for i, (zero, end) in enumerate(bounds)]
    read = sequence.loss_mask.astype(bool) | (sequence.per_token.get(OBSERVED, 0.0) > 0)
    # Where each transcript leaves each trunk, `[trunk, transcript]`; 0 if they share nothing. The last shared token is
    # repeated.
    leaves = np.zeros((len(bounds), len(bounds)), np.int64)
    for trunk, (begin, trunk_end) in enumerate(bounds):
        unread = np.maximum.accumulate(np.where(read[begin:trunk_end], 0, np.arange(trunk_end - begin)))
        for i, (zero, end) in enumerate(bounds):
            most = min(end - zero, trunk_end - begin) if i != trunk else 0
            differ = sequence.tokens[zero : zero + most] != sequence.tokens[begin : begin + most]
            shared = int(np.argmax(np.append(differ | read[zero : zero + most], True)))
            leaves[trunk, i] = unread[shared - 1] if shared else 0

    def saved(trunks: list[int]) -> int:
        """The tokens that are left out with these trunks."""
        return int(np.delete(leaves[trunks].max(axis=0, initial=0), trunks).sum())

    every, trunks = range(len(bounds)), list[int]()
    while True:
        more = max(every, key=lambda i: saved([*trunks, i]))
        if saved([*trunks, more]) <= saved(trunks):
            break
        trunks.append(more)
    leaves[np.setdiff1d(every, trunks)] = leaves[:, trunks] = 0
    # What shares nothing with a trunk is one, without branches.
    trunk_of = np.where(leaves.any(axis=0), leaves.argmax(axis=0), every)
    pieces: list[tuple[int, int, int, int, int]] = []
    for trunk in dict.fromkeys(trunk_of.tolist()):
        (begin, end), first, done = bounds[trunk], len(pieces), 0
        branches = [(int(leaves[trunk, i]), *bounds[i]) for i in np.flatnonzero(trunk_of == trunk) if i != trunk]
        for place, zero, stop in sorted(branches):
            if place > done:
                pieces.append((begin + done, begin + place, begin, first, first))
                done = place
            pieces.append((zero + place, stop, zero, len(pieces), first))
        pieces.append((begin + done, end, begin, first, first))
    return pieces


def shared_tokens(group: List[Sequence]) -> int:
    """Number of tokens at the beginning that all sequences of a group share and none trains."""
    most = min(len(sequence.tokens) for sequence in group)
    first = group[0].tokens[:most]
    differ = np.zeros(most, bool)
    for sequence in group:
        differ |= (sequence.tokens[:most] != first) | sequence.loss_mask[:most].astype(bool)
    return int(np.argmax(differ)) if differ.any() else most


def _placed(
    sizes: np.ndarray,
    unit_of: np.ndarray,
    max_length: int,
    packing: Packing,
    multiple: int,
    seen: np.ndarray,
    pictures: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the pieces are placed, `[pieces]` each: the row, the first position in it, and the segment id (from 1).

    `sizes`, `unit_of` and `seen` are `[pieces]` too: the tokens of each, its unit, ascending, and its pictures.
    Raises a ValueError where a unit does not fit into a row.
    """
    lengths, seen = (np.bincount(unit_of, weights=x).astype(np.int64) for x in (sizes, seen))
    if lengths.max() > max_length:
        raise ValueError(f"sequences that share a row have {lengths.max()} tokens; 1 to {max_length} fit in a row")
    if seen.max() > pictures:
        raise ValueError(f"sequences that share a row have {seen.max()} pictures; rows have room for {pictures}")
    units, number, wrapped = len(lengths), np.bincount(unit_of), packing == "wrapped"
    order = np.arange(units) if wrapped else np.argsort(-lengths, kind="stable")

    def placed(rows: int, evenly: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Row, first position and first segment id (from 1) of each unit, `[units]` each: first fit (next fit where
        rows are wrapped), or each into the emptiest row; None where one then has no room."""
        room, unused, used = (np.full(rows, x) for x in (max_length, pictures, 1))
        row_of, start_of, segment_of = (np.empty_like(lengths) for _ in range(3))
        opened = 0
        for i in order:
            if evenly:
                row = int(np.argmax(room))
            else:
                # Rows that are not open yet have full room, so the first that fits always exists.
                first = max(opened - 1, 0) if wrapped else 0
                fits = room[first : opened + 1] >= lengths[i]
                if pictures:
                    fits &= unused[first : opened + 1] >= seen[i]
                row = first + int(np.argmax(fits))
                opened = max(opened, row + 1)
            row_of[i], start_of[i], segment_of[i] = row, max_length - room[row], used[row]
            room[row] -= lengths[i]
            unused[row] -= seen[i]
            used[row] += number[i]
        return None if min(room.min(), unused.min()) < 0 else (row_of, start_of, segment_of)

    if packing:
        places = placed(units, evenly=False)
        assert places is not None, "every unit fits into a row of its own"
        if multiple > 1 and not wrapped:
            rows = -(-(int(places[0].max()) + 1) // multiple) * multiple
            places = placed(rows, evenly=True) or places
        row_of, start_of, segment_of = places
    else:
        row_of, start_of, segment_of = np.arange(units), np.zeros_like(lengths), np.ones_like(lengths)
    first = np.cumsum(number) - number
    before = np.cumsum(sizes) - sizes
    start = start_of[unit_of] + before - before[first][unit_of]
    segment = segment_of[unit_of] + np.arange(len(sizes)) - first[unit_of]
    return row_of[unit_of], start, segment


def with_spare(tokens: np.ndarray) -> Sequence:
    """`[T + 1]` tokens with a placeholder at the end, for the state after the last one: it is trained, never read."""
    longer = np.append(tokens, 0).astype(np.int32)
    return Sequence(longer, np.arange(len(longer)) == len(tokens))


def as_scored(sequence: Sequence) -> Sequence:
    """A given sequence up to its last trained token, followed by the placeholder where its score is read.

    What a template writes after the stop token is cut off: a sampled completion, which is scored as it was sampled,
    does not have it either.
    """
    end = int(np.flatnonzero(sequence.loss_mask)[-1]) + 1
    return replace(with_spare(sequence.tokens[:end]), weight=sequence.weight, per_sequence=sequence.per_sequence)
