"""One row becomes one example: a sequence, a pair of them, or a reason why not, and all of it is counted.

The shapes: `messages`; `prompt` and `completion` (strings, or lists of messages); `text`; and `input_ids` with
`labels`, `loss_mask` or `loss_weights`, to which nothing is added. Pairs have `chosen` and `rejected`, labelled
completions a `label`, and both may come as ids too. Where a policy writes the completions (`train_on: prompt`) only the
prompt of a row is read.
`shapes.rendering` reads the shape off a row, `to_example` renders it (`rendered`, `pairs`), cuts or refuses what is too
long, and `Accounting` adds up: kept plus dropped is the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List

import numpy as np

from tunix.data.accounting import (
    COMPLETION_TOO_LONG,
    CUT_AWAY,
    CUT_EQUAL,
    EMPTY,
    EQUAL,
    NO_PROMPT,
    NOTHING_TRAINED,
    PROMPT_TOO_LONG,
    TOO_LONG,
    Dropped,
    Kept,
)
from tunix.data.columns import Row, as_label, as_margin, as_weight, column
from tunix.data.packing import shared_tokens
from tunix.data.pairs import render_pair
from tunix.data.rendered import Rendered, given_weights, render_row
from tunix.data.shapes import Rendering
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.types import LOSS_WEIGHTS, Sequence


def to_example(row: Row, tokenizer: Tokenizer | None, how: Rendering, where: str = "the row") -> Kept | Dropped:
    """Renders a row, cuts it to length, and checks that something of it is trained.

    Args:
        row: the columns of one example.
        tokenizer: None serves rows of token ids only.
        how: shape and limits.
        where: how the row is called in a message, for instance `row 3 of train.jsonl`.

    Raises:
        UserError: a missing or malformed column, or an over-long row where that is an error; begins with `where`.
    """
    if how.train_on == "row":
        nothing = np.zeros(0, np.int32)
        return Kept((Sequence(nothing, nothing.astype(bool)),), row=_renamed(row, how))
    try:
        sides = render_pair(row, tokenizer, how) if how.train_on == "pairs" else (render_row(row, tokenizer, how),)
        weight, values = as_weight(column(row, "weight", how.columns, None)), _values(row, how)
        per_token = {} if isinstance(sides, Dropped) else _token_values(row, len(sides[0][0]), how)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if isinstance(sides, Dropped):
        return sides
    for tokens, _ in sides:
        if how.vocab_size is not None and len(tokens) and tokens.max() >= how.vocab_size:
            raise UserError(f"{where}: token id {tokens.max()} is beyond the model's vocabulary of {how.vocab_size}")
    if how.train_on == "prompt":
        return _prompt(sides[0][0], weight, row, how, where)
    return _fault(sides, tokenizer, how) or _fitted(sides, weight, per_token, values, how, where)


def _prompt(tokens: np.ndarray, weight: float, row: Row, how: Rendering, where: str) -> Kept | Dropped:
    """A prompt alone. The end of one that is too long is kept, since it asks the question."""
    if not len(tokens):
        return Dropped(NO_PROMPT)
    limit = how.prompt_length
    if too_long := _too_long([tokens], limit, "prompt_length", how, where):
        if how.on_overflow == "drop":
            return Dropped(PROMPT_TOO_LONG)
        tokens = tokens[-limit:]
    return Kept((Sequence(tokens, np.zeros(len(tokens), bool), weight),), too_long, _renamed(row, how))


def _fault(sides: List[Rendered], tokenizer: Tokenizer | None, how: Rendering) -> Dropped | None:
    """Why a whole row cannot be used, if it cannot. The first token of a sequence is predicted by nothing."""
    if how.train_on in ("pairs", "labels") and any(_is_empty(side, tokenizer) for side in sides):
        return Dropped(EMPTY)
    for _, mask in sides:
        mask[:1] = False
    if not all(mask.any() for _, mask in sides):
        return Dropped(NOTHING_TRAINED)
    return Dropped(EQUAL) if _equal([tokens for tokens, _ in sides]) else None


def _fitted(
    sides: List[Rendered],
    weight: float,
    per_token: Mapping[str, np.ndarray],
    values: Mapping[str, float],
    how: Rendering,
    where: str,
) -> Kept | Dropped:
    """The row within its limit."""
    limit, key = _limit(sides, how)
    too_long = _too_long([tokens for tokens, _ in sides], limit, key, how, where)
    if too_long and how.on_overflow == "drop":
        return Dropped(TOO_LONG if key == "max_length" else COMPLETION_TOO_LONG)
    end = None if how.on_overflow == "keep" else limit
    own = {name: x[:end] for name, x in per_token.items()}
    cut = tuple(Sequence(tokens[:end], mask[:end], weight, own, values) for tokens, mask in sides)
    if not all(sequence.loss_mask.any() for sequence in cut):
        return Dropped(CUT_AWAY)
    return Dropped(CUT_EQUAL) if _equal([sequence.tokens for sequence in cut]) else Kept(cut, too_long)


def _limit(sides: List[Rendered], how: Rendering) -> tuple[int, str]:
    """Tokens of a side at most, and the key of the recipe that says so."""
    if how.completion_length is None:
        return how.max_length, "max_length"
    after_shared = shared_tokens([Sequence(*side) for side in sides]) + how.completion_length
    return min((how.max_length, "max_length"), (after_shared, "completion_length"))


def _too_long(sides: List[np.ndarray], limit: int, key: str, how: Rendering, where: str) -> bool:
    """Whether any side of a row is above the limit; an error where the recipe says so."""
    if how.on_overflow == "keep":
        return False
    most = max(map(len, sides))
    if most > limit and how.on_overflow == "error":
        raise UserError(
            f"{where} has {most} tokens{' on a side' if len(sides) > 1 else ''}, more than data.{key} {limit}: "
            "raise it, or set data.on_overflow to truncate or drop"
        )
    return most > limit


def _is_empty(side: Rendered, tokenizer: Tokenizer | None) -> bool:
    """Whether a completion says nothing: no token but those that end it."""
    tokens, mask = side
    stops = () if tokenizer is None else tokenizer.stop_ids
    said = [token for token in tokens[mask].tolist() if token not in stops]
    return not said


def _equal(tokens: List[np.ndarray]) -> bool:
    """Whether the sides of a pair are the same."""
    return len(tokens) == 2 and np.array_equal(tokens[0], tokens[1])


def _values(row: Row, how: Rendering) -> dict[str, float]:
    """What a loss reads of the row besides its tokens."""
    if how.train_on == "labels":
        return {"label": as_label(column(row, "label", how.columns), how.columns.get("label", "label"))}
    if "margin" in how.fixed:
        return {"margin": as_margin(column(row, "margin", how.columns), how.columns.get("margin", "margin"))}
    return {}


def _token_values(row: Row, number: int, how: Rendering) -> dict[str, np.ndarray]:
    """What the framework reads of each token besides its id."""
    weights = given_weights(row, number, how)
    return {} if weights is None else {LOSS_WEIGHTS: weights}


def _renamed(row: Row, how: Rendering) -> Row:
    """The row with our names for the columns that `data.columns` maps."""
    return {**row, **{ours: row[theirs] for ours, theirs in how.columns.items() if theirs in row}}
