"""The sequences of a step one by one, as its batches hold them: for a step that failed, and for `tunix replay`."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tunix.algorithms.base import Update


def sequences_of(update: Update) -> Iterator[dict[str, Any]]:
    """Each sequence of each batch: where it is, its weight and reward, tokens, which of them are trained, and all that
    the loss reads of it, by name.

    A number that is not finite becomes a string, since JSON has none. A prompt that is stored once for several
    completions is part of each, and of a trie of transcripts each token is listed once.
    """
    for number, batch in enumerate(update.batches):
        segments, owners = np.asarray(batch.segment_ids), np.asarray(batch.sequence_ids)
        arrays = {"tokens": batch.tokens, "trained": np.asarray(batch.loss_mask).astype(int), **batch.per_token}
        for sequence in np.unique(owners[segments > 0]).tolist():
            inside = shown = (segments > 0) & (owners == sequence)
            if batch.parents is not None:
                seen = np.isin(segments, np.asarray(batch.parents)[inside]) & inside.any(axis=1, keepdims=True)
                shown = inside | (seen & ~np.asarray(batch.loss_mask))
            at = np.nonzero(shown)
            if batch.places is not None:  # branches lie between the tokens of what they continue
                at = tuple(x[np.argsort(np.asarray(batch.places)[at])] for x in at)
            values = {"weight": batch.weights[sequence]}
            if update.rewards:
                values["reward"] = update.rewards[number][sequence]
            values |= {name: x[sequence] for name, x in batch.per_sequence.items()}
            row = {name: finite_or_text(float(x)) for name, x in values.items()}
            lists = {name: list(map(finite_or_text, np.asarray(x)[at].tolist())) for name, x in arrays.items()}
            yield {"update": number, "sequence": sequence, **row, **lists}


def finite_or_text(value: float | int) -> float | int | str:
    """The number, or its name (`nan`, `inf`) where JSON has none."""
    return value if math.isfinite(value) else str(value)
