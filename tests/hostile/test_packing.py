"""Rows of any lengths and masks: what is packed is what came, each token once and trained where it was."""

from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.hostile.attack import attack, numbers
from tunix.data import packing
from tunix.data.config import Packing
from tunix.data.packing import pack
from tunix.types import Batch, Sequence

LONGEST = 24
ROW = st.integers(1, LONGEST).flatmap(lambda n: st.lists(st.booleans(), min_size=n, max_size=n))
CASES = st.tuples(
    st.lists(ROW, min_size=1, max_size=20),
    st.sampled_from([True, False, "wrapped"]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
)


def sequences_of(masks: list[list[bool]]) -> list[Sequence]:
    """Every token of all sequences has an id of its own."""
    ends = np.cumsum([len(mask) for mask in masks])
    return [
        Sequence(
            np.arange(end - len(mask), end, dtype=np.int32) + 1,
            np.array(mask),
            per_token={"x": np.arange(end - len(mask), end, dtype=np.float32)},
            per_sequence={"advantage": float(end)},
        )
        for mask, end in zip(masks, ends, strict=True)
    ]


def unchecked() -> Any:
    """The module without checks of annotations: those of functions within functions are compiled at each call, which is
    half of the time."""
    spec = spec_from_file_location("unchecked", packing.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packs(pack: Callable[..., Batch], case: tuple[list[list[bool]], Packing, int, int, bool]) -> None:
    masks, kind, together, multiple, room = case
    masks = masks[: max(len(masks) // together, 1) * together]
    masks += masks[:1] * (-len(masks) % together)
    sequences = sequences_of(masks)
    size = len(masks) + room * together
    try:
        batch = pack(sequences, size, LONGEST * together, kind, together=together, multiple=multiple)
    except ValueError as error:
        if "no token of the batch is trained" not in str(error):
            raise
        assert not any(any(mask[1:]) for mask in masks)
        return
    real: Any = batch.segment_ids > 0
    assert sorted(batch.tokens[real]) == sorted(np.concatenate([x.tokens for x in sequences]))
    trained = [x.tokens[1:][x.loss_mask[1:]] for x in sequences]  # a first token has nothing before it
    assert sorted(batch.tokens[batch.loss_mask]) == sorted(np.concatenate(trained))
    assert not batch.loss_mask[~real].any()
    for i, sequence in enumerate(sequences):
        place = real & (batch.sequence_ids == i)
        assert len(set(np.nonzero(place)[0])) == 1, "in one row"
        assert len(set(batch.segment_ids[place])) == 1
        assert batch.tokens[place].tolist() == sequence.tokens.tolist()
        assert batch.positions[place].tolist() == list(range(len(sequence.tokens)))
        assert batch.per_token["x"][place].tolist() == sequence.per_token["x"].tolist()
        assert batch.per_sequence["advantage"][i] == sequence.per_sequence["advantage"]
        assert batch.lengths[i] == max(len(trained[i]), 1)
    assert batch.tokens.shape[0] % multiple == 0
    assert batch.weights.sum() == len(sequences)


@numbers
def test_every_sequence_is_packed_once(number: int):
    attack(partial(packs, pack if number < 1000 else unchecked().pack), CASES, number)
