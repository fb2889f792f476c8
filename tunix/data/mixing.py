"""The deterministic interleave of several data sets in exact ratios. Loads without jax or Grain."""

import sys
from collections.abc import Sequence

from tunix.config import RowKind
from tunix.data.config import DataConfig, RowsConfig, whole_weights
from tunix.data.sources import Rows


def kind_of(section: RowsConfig | None, data: DataConfig, kind: RowKind) -> RowKind:
    """What is read of the rows of a data set: all columns where an environment of its own makes the prompts, also of
    held-out rows that have the name of such a data set."""
    named = [section, *(source for source in data.sources if source.name == section.name)] if section else []
    return RowKind.ROW if kind == RowKind.PROMPT and any(x.in_environment for x in named if x) else kind


def rows_read(rows: Rows, config: DataConfig, epochs: int) -> int:
    """How many rows a run of so many epochs reads; of several data sets, until the first has been read so often."""
    if not rows.parts:
        return len(rows) * epochs
    weights = whole_weights([source.weight for source in config.sources])
    return len(Interleaved([len(part) * epochs for part in rows.parts], weights))


class Interleaved:
    """Which of several data sets gives the item at each place of their mixture, and which item of its.

    Each place goes to the data set that is furthest behind its share. After `sum(weights)` places every one of them has
    given as many items as its weight says, and the pattern begins anew: weights [2, 1] give 0 1 0, 0 1 0, ...
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[int]):
        """Ends where the first data set has no more items.

        Args:
            sizes: items of each data set.
            weights: whole numbers in the ratios of the mixture.
        """
        period, taken = sum(weights), [0] * len(weights)
        self._weights, self._pattern = weights, list[tuple[int, int]]()
        for place in range(period):
            # (place + 1) w / period items are due of a data set of weight w.
            owing = [(place + 1) * weight - period * count for weight, count in zip(weights, taken, strict=True)]
            first = owing.index(max(owing))
            self._pattern.append((first, taken[first]))
            taken[first] += 1
        # The place of the first item that is missing.
        ends = (
            size // weight * period + self._pattern.index((number, size % weight))
            for number, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        )
        self._size = min([sys.maxsize, *ends])

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, int]:
        turn, place = divmod(index, len(self._pattern))
        number, item = self._pattern[place]
        return number, turn * self._weights[number] + item
