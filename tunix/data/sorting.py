"""A task that a small model learns by reinforcement within a minute: to sort six distinct letters.

`gnrvus>` is answered by `gnrsuv`. Every problem belongs to one split, by a hash of its letters: a few with answers for
supervised training, many for reinforcement learning, some for model selection (`validation`), and some that are used
for no decision at all (`held_out`).
"""

import random
import string
import zlib
from functools import partial

Row = dict[str, str]

LETTERS = 6
SPLITS = ("demonstrations",) * 6 + ("problems",) * 8 + ("validation", "held_out")
"""The split of each sixteenth of the hash's values."""
SIZES = {"demonstrations": 4000, "problems": 20_000, "validation": 256, "held_out": 512}


def _rows(split: str) -> list[Row]:
    """The first problems of a split, in an order that is the same everywhere."""
    rows: list[Row] = []
    # Distinct problems, practically without end: 26 letters give 166 million.
    rng, seen = random.Random(0), set()
    while len(rows) < SIZES[split]:
        letters = "".join(rng.sample(string.ascii_lowercase, LETTERS))
        if letters not in seen:
            seen.add(letters)
            if SPLITS[zlib.crc32(letters.encode()) % len(SPLITS)] == split:
                rows.append({"prompt": f"{letters}>", "completion": "".join(sorted(letters))})
    return rows


demonstrations = partial(_rows, "demonstrations")
"""Problems with their answers, for supervised training."""
problems = partial(_rows, "problems")
"""Problems for reinforcement learning."""
validation = partial(_rows, "validation")
"""Problems for early stopping and model selection."""
held_out = partial(_rows, "held_out")
"""Problems that are used for no decision."""
