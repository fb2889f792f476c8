"""A task that a small model learns by reinforcement within a minute: to sort six distinct letters.

`gnrvus>` is answered by `gnrsuv`. Every problem belongs to one split, by a hash of its letters: a few with answers for
supervised training, many for reinforcement learning, some for model selection (`validation`), and some that are used
for no decision at all (`held_out`).
"""

import random
import string
import zlib

Row = dict[str, str]

LETTERS = 6
SHARES = {"demonstrations": 6, "problems": 8, "validation": 1, "held_out": 1}
"""Each split's share of the hash's values, in sixteenths."""
SIZES = {"demonstrations": 4000, "problems": 20_000, "validation": 256, "held_out": 512}


def demonstrations() -> list[Row]:
    """Problems with their answers, for supervised training."""
    return _rows("demonstrations")


def problems() -> list[Row]:
    """Problems for reinforcement learning."""
    return _rows("problems")


def validation() -> list[Row]:
    """Problems for early stopping and model selection."""
    return _rows("validation")


def held_out() -> list[Row]:
    """Problems that are used for no decision."""
    return _rows("held_out")


def _rows(split: str) -> list[Row]:
    """The first problems of a split, in an order that is the same everywhere."""
    rows: list[Row] = []
    # Distinct problems, practically without end: 26 letters give 166 million.
    rng, seen = random.Random(0), set()
    while len(rows) < SIZES[split]:
        letters = "".join(rng.sample(string.ascii_lowercase, LETTERS))
        if letters not in seen:
            seen.add(letters)
            if _split(letters) == split:
                rows.append({"prompt": f"{letters}>", "completion": "".join(sorted(letters))})
    return rows


def _split(letters: str) -> str:
    """The split that a problem belongs to."""
    place = zlib.crc32(letters.encode()) % sum(SHARES.values())
    for name, share in SHARES.items():
        if place < share:
            return name
        place -= share
    raise AssertionError(place)
