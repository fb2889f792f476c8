"""Reads rows of token ids: which ids are a row's tokens, and which of them are trained.

Ids stay as they are, and nothing that speaks of single tokens is passed over: a column with a number for every token is
read, or known to change nothing, or refused by its name. What `attention_mask` leaves out at the ends is padding, which
is cut off with everything that belongs to it. Other padding is known by its ids: it is refused where it would be
trained, or seen by later tokens.

Axes: T time.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tunix.config import LOSS_WEIGHTS, RowKind
from tunix.data.columns import Row, as_integers, as_weights, column
from tunix.data.shapes import MASKS, SHAPES, Rendering
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError

HARMLESS = ("special_tokens_mask",)
"""Columns with a number for every token that say nothing of what is trained or seen."""
_SPEAKS = re.compile("mask|label|weight|loss|target|position|segment|seq|document", re.IGNORECASE)
"""In the name of a column with a number for every token: it would change what is trained or seen."""


def given_tokens(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of `input_ids`, `[T]` int32, and the mask of the trained ones, `[T]` bool, both without padding.

    The mask is that of `labels` (not shifted, -100 is not trained), `loss_mask`, `loss_weights`, or `completion_mask`
    and `assistant_masks`, which both have to be 1; without any of them every token is trained.

    Raises:
        UserError: a column is malformed, says another thing than a second one, or is not read.
    """
    ids = _integers(row, "input_ids", settings)
    refuse_unread(row, settings, [len(ids)], ("attention_mask", "position_ids", "token_type_ids", "labels", *MASKS))
    attended = _attended(row, len(ids), settings)
    _refuse_positions(row, len(ids), attended, settings)
    tokens, mask = ids[attended], _trained(row, ids, attended, settings)
    if _read(row, "attention_mask", settings) is None:
        _refuse_padding(tokens, settings.columns.get("input_ids", "input_ids"), tokenizer, mask)
    return tokens, mask


def given_ids(row: Row, names: tuple[str, ...], tokenizer: Tokenizer | None, settings: Rendering) -> list[np.ndarray]:
    """The ids of columns that are taken whole, `[T]` int32 each: a prompt's, a completion's, or those of a pair.

    Raises:
        UserError: a column is malformed, begins or ends with padding, or has a mask.
    """
    columns = [_integers(row, name, settings) for name in names]
    for name, ids in zip(names, columns, strict=True):
        _refuse_padding(ids, settings.columns.get(name, name), tokenizer)
    lengths = [len(ids) for ids in columns]
    prompt, *after = lengths
    # A row may have input_ids too; the columns of their length belong to them.
    other = {len(row["input_ids"])} if isinstance(row.get("input_ids"), list | np.ndarray) else set()
    numbers = {*lengths, *(prompt + length for length in after)} - other
    refuse_unread(row, settings, sorted(numbers), ())
    return columns


def given_weights(row: Row, settings: Rendering) -> np.ndarray | None:
    """The loss weights of a row's tokens without padding, `[T]` float32; None where the rows have none.

    Raises:
        UserError: the row has weights and the first row has none, or the other way round.
    """
    if LOSS_WEIGHTS in settings.fixed:
        number = len(_integers(row, "input_ids", settings))
        weights = as_weights(column(row, LOSS_WEIGHTS, settings.columns), LOSS_WEIGHTS, number)
        return weights[_attended(row, number, settings)]
    if settings.train_on == RowKind.COMPLETION and _read(row, LOSS_WEIGHTS, settings) is not None:
        raise UserError(
            "it has loss_weights, which the first row has not, or not as input_ids: give them to all or none"
        )
    return None


def refuse_unread(row: Row, settings: Rendering, numbers: list[int], known: tuple[str, ...]) -> None:
    """Refuses a column that has a number for every token, which differ, and is not read.

    Args:
        row: the columns of one example.
        settings: its columns' names.
        numbers: the numbers of tokens that a column may speak of.
        known: our names of the columns of single tokens that are read.

    Raises:
        UserError: there is one; the message names it.
    """
    ids = {name for shapes in SHAPES.values() for name in shapes.get("tokens", ())}
    read = {settings.columns.get(name, name) for name in (*known, *ids, *HARMLESS, LOSS_WEIGHTS)}
    read |= set(settings.columns.values())
    packed = row.get("seq_lengths")
    if isinstance(packed, list | np.ndarray) and len(packed) > 1:
        raise UserError(
            f"seq_lengths says that {len(packed)} sequences share the row, which nothing would keep apart: give each "
            "its own row, tunix packs them itself (data.packing)"
        )
    for name, value in row.items():
        if not isinstance(value, list | tuple | np.ndarray) or len(value) not in numbers:
            continue
        try:
            array = np.asarray(value)
        except ValueError:  # a ragged list
            continue
        if name in read or array.ndim != 1 or array.dtype.kind not in "iubf" or (array == array[:1]).all():
            continue
        if _SPEAKS.search(name) or np.isin(array, (0, 1)).all():
            remedy = (
                f"map it in data.columns, as in {{loss_mask: {name}}}, if it says what is trained, or leave it out"
                if "labels" in known
                else "give only the ids that it keeps, and leave it out"
            )
            raise UserError(f"the column {name!r} has a number for every token and is not read: {remedy}")


def _read(row: Row, name: str, settings: Rendering) -> Any:
    """An optional column; None where it is absent, or where `data.columns` makes it another one of ours."""
    taken = name not in settings.columns and name in settings.columns.values()
    return None if taken else column(row, name, settings.columns, None)


def _integers(row: Row, name: str, settings: Rendering) -> np.ndarray:
    """The token ids of a column, `[T]` int32."""
    theirs = settings.columns.get(name, name)
    ids = as_integers(column(row, name, settings.columns), theirs)
    if len(ids) and ids.min() < 0:
        raise UserError(f"{theirs} holds {ids.min()}, which is no token id")
    return ids


def _values(row: Row, name: str, number: int, settings: Rendering) -> np.ndarray | None:
    """The whole numbers of a column, one for each of `number` tokens, `[T]`; None where the row has none."""
    if (value := _read(row, name, settings)) is None:
        return None
    theirs = settings.columns.get(name, name)
    values = as_integers(value, theirs)
    if len(values) != number:
        raise UserError(f"{theirs} has {len(values)} values for {number} input_ids")
    if (name in MASKS or name == "attention_mask") and not np.isin(values, (0, 1)).all():
        raise UserError(f"{theirs} holds 0 and 1, not {values[~np.isin(values, (0, 1))][0]}")
    return values


def _attended(row: Row, number: int, settings: Rendering) -> slice:
    """The tokens between the padding at both ends, by `attention_mask`; all tokens without one."""
    mask = _values(row, "attention_mask", number, settings)
    if mask is None:
        return slice(0, number)
    kept = np.flatnonzero(mask)
    if len(kept) == 0:
        return slice(0, 0)
    begin, end = int(kept[0]), int(kept[-1]) + 1
    if len(kept) != end - begin:
        inside = begin + int(np.argmin(mask[begin:end]))
        raise UserError(
            f"{settings.columns.get('attention_mask', 'attention_mask')} is 0 at token {inside + 1}, and 1 before and "
            "after it: only padding at the ends is left out; for tokens that are seen and not trained use loss_mask"
        )
    return slice(begin, end)


def _refuse_positions(row: Row, number: int, attended: slice, settings: Rendering) -> None:
    """Refuses positions that are not those of one text, and types of tokens."""
    positions = _values(row, "position_ids", number, settings)
    if positions is not None and (steps := np.diff(positions[attended])).size and (steps != 1).any():
        place = attended.start + int(np.argmax(steps != 1)) + 2
        raise UserError(
            f"position_ids does not count on at token {place}, and nothing reads it: leave the column out. Where "
            "several texts share the row, give each its own: tunix packs them itself (data.packing)"
        )
    types = _values(row, "token_type_ids", number, settings)
    if types is not None and types[attended].any():
        raise UserError("token_type_ids is not all 0, and nothing reads types of tokens: leave the column out")


def _trained(row: Row, ids: np.ndarray, attended: slice, settings: Rendering) -> np.ndarray:
    """The mask of the trained tokens without padding, `[T]` bool."""
    masks: dict[str, np.ndarray] = {}
    for name in ("labels", *MASKS):
        if (values := _values(row, name, len(ids), settings)) is not None:
            if name == "labels":
                _refuse_shifted(values[attended], ids[attended], settings)
            masks[name] = values[attended] != (-100 if name == "labels" else 0)
    weights = given_weights(row, settings)
    if weights is not None:
        if masks:
            raise UserError(f"it has loss_weights and {' and '.join(masks)}: a weight of 0 says what is not trained")
        return weights > 0
    if "completion_mask" in masks and "assistant_masks" in masks:
        masks["completion_mask"] &= masks.pop("assistant_masks")
    if not masks:
        return np.ones(len(ids[attended]), bool)
    (first, mask), *others = masks.items()
    for name, other in others:
        if (differ := mask != other).any():
            place = attended.start + int(np.argmax(differ)) + 1
            raise UserError(f"it has {first} and {name}, which differ at token {place}: leave one of them out")
    return mask


def _refuse_shifted(labels: np.ndarray, ids: np.ndarray, settings: Rendering) -> None:
    """Refuses labels that are neither the ids at the same places nor -100."""
    wrong = np.flatnonzero((labels != -100) & (labels != ids))
    if len(wrong):
        i, name = int(wrong[0]), settings.columns.get("labels", "labels")
        raise UserError(
            f"{name}[{i}] is {labels[i]}, but input_ids[{i}] is {ids[i]}: labels repeat the ids, unshifted, or are -100"
        )


def _refuse_padding(tokens: np.ndarray, name: str, tokenizer: Tokenizer | None, mask: np.ndarray | None = None) -> None:
    """Refuses padding that later tokens would see, or that would be trained, where its id tells it.

    A PAD that is also a BOS or EOS begins or ends a text once.

    Args:
        tokens: `[T]` ids.
        name: of their column.
        tokenizer: says which id is padding; without it, or without a pad_token, nothing is refused.
        mask: `[T]` which tokens are trained; None where ids are taken whole.
    """
    pad = None if tokenizer is None else tokenizer.hf.pad_token_id
    if tokenizer is None or pad is None:
        return
    once = int(pad in (tokenizer.bos_id, *tokenizer.stop_ids))
    other = np.flatnonzero(tokens != pad)
    begin = int(other[0]) if len(other) else len(tokens)
    kept = tokens != pad if mask is None else (tokens != pad) | ~mask
    end = int(np.argmax(kept[::-1])) if len(other) else 0
    for number, where in ((begin, "begins"), (end, "ends")):
        if number > once:
            marked = "" if mask is None else ", or mark it in attention_mask"
            raise UserError(
                f"{name} {where} with {number} x {tokenizer.hf.pad_token} (id {pad}), padding that would be trained or "
                f"seen by later tokens: leave it out, tunix packs rows itself{marked}"
            )
