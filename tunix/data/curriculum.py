"""Curricula: which prompts a run takes, by how often their completions succeed, by their level, or in sorted order.

A curriculum passes prompts over in the order of the data, or sorts that order beforehand. Whether it takes a prompt
follows from the seed, the position and its state alone; the state changes when a step's completions are scored, and is
saved with the position. So a run that is killed and resumed takes the same prompts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix.data.config import CurriculumConfig, DataConfig
from tunix.data.shapes import is_finite
from tunix.data.sources import Rows
from tunix.data.types import Kept, Prompt
from tunix.errors import UserError, nearest
from tunix.util.nested import dotted

if TYPE_CHECKING:  # checking a recipe does not wait for it
    import grain

LEVEL = "level"
"""The column with the difficulty of a row, a number, that `by: level` reads."""
EXTREME = 0.1
"""Prompts whose success rate is within this of 1 or 0 are counted as easy or hard in the metrics."""


class Curriculum:
    """Decides which prompts are taken, and learns from what came of them."""

    def __init__(self, config: CurriculumConfig, seed: int) -> None:
        """Has taken nothing yet; samples follow from the run's seed and a prompt's place in the order."""
        self.config, self._seed = config, seed
        self.state: dict[str, Any] = {"by": config.by, "offered": 0, "taken": 0}
        """All that it remembers, as JSON values."""

    def order(self, order: "grain.MapDataset") -> "grain.MapDataset":
        """The numbers of rows in the order in which they are offered, from that of the data."""
        return order

    def takes(self, kept: Kept, place: int) -> bool:
        """Whether the run takes a row whose turn has come, at a place in the order."""
        chance = self.chance(kept)
        takes = chance >= 1 or np.random.default_rng([self._seed, place]).random() < chance
        self.state["offered"] += 1
        self.state["taken"] += int(takes)
        return bool(takes)

    def chance(self, kept: Kept) -> float:
        """The probability with which a row is taken, from 0 to 1."""
        return 1.0

    def learn(self, prompt: Prompt, rate: float) -> None:
        """Takes note of the share of a prompt's completions that succeed."""

    def metrics(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """What is logged of a step that takes these prompts, by name."""
        return {}


class BySuccess(Curriculum):
    """Takes a prompt of success rate p with probability floor + (1 - floor) 4 p (1 - p), and a new one always.

    p (1 - p) is the variance of a reward of 0 or 1, and with it the signal of a group: "learnability" in Rutherford et
    al. 2024 (https://arxiv.org/abs/2408.15099) and Foster and Foerster 2025 (https://arxiv.org/abs/2502.12272). Here p
    is the mean over a prompt's first `window` groups, and from then on moves by 1 / window of the difference.
    """

    def __init__(self, config: CurriculumConfig, seed: int) -> None:
        """Knows no prompt yet."""
        super().__init__(config, seed)
        self.state["rates"] = {}  # number of a row -> [success rate, groups]; keys are texts, as JSON has them

    def chance(self, kept: Kept) -> float:
        """1 for a prompt that was never taken."""
        rate, _ = self.state["rates"].get(str(kept.number), (0.5, 0))
        return self.config.floor + (1 - self.config.floor) * 4 * rate * (1 - rate)

    def learn(self, prompt: Prompt, rate: float) -> None:
        """Moves the prompt's rate."""
        before, groups = self.state["rates"].get(str(prompt.number), (0.0, 0))
        groups = min(groups + 1, self.config.window)
        self.state["rates"][str(prompt.number)] = [before + (rate - before) / groups, groups]

    def metrics(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """How many prompts are known, shares of easy and hard ones among them, their mean rate, the share taken."""
        rates = np.array([rate for rate, _ in self.state["rates"].values()])
        taken = self.state["taken"] / max(self.state["offered"], 1)
        numbers = {"curriculum/known": float(len(rates)), "curriculum/taken": taken}
        shares = {"success": rates, "easy": rates >= 1 - EXTREME, "hard": rates <= EXTREME} if len(rates) else {}
        return numbers | {f"curriculum/{name}": float(share.mean()) for name, share in shares.items()}


class ByLevel(Curriculum):
    """Takes the rows of one level, those below it with probability `floor`, and none above; the level rises when the
    mean success rate of its latest `window` groups is at least `raise_at`."""

    def __init__(self, config: CurriculumConfig, seed: int, levels: Sequence[float]) -> None:
        """Starts at the lowest of the levels that the rows have, in ascending order."""
        super().__init__(config, seed)
        self._levels = levels
        self.state |= {LEVEL: levels[0], "rates": []}

    def chance(self, kept: Kept) -> float:
        """1 at the level, 0 above."""
        level = kept.row[LEVEL]
        return 1.0 if level == self.state[LEVEL] else self.config.floor if level < self.state[LEVEL] else 0.0

    def learn(self, prompt: Prompt, rate: float) -> None:
        """Adds to the rates of the level, which may rise."""
        if prompt.row[LEVEL] != self.state[LEVEL]:
            return
        rates = self.state["rates"] = [*self.state["rates"], rate][-self.config.window :]
        above = [level for level in self._levels if level > self.state[LEVEL]]
        if len(rates) == self.config.window and sum(rates) / len(rates) >= self.config.raise_at and above:
            self.state |= {LEVEL: above[0], "rates": []}

    def metrics(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """The level, and the mean success rate of its latest groups."""
        rates = self.state["rates"]
        success = {"curriculum/success": sum(rates) / len(rates)} if rates else {}
        return {"curriculum/level": float(self.state[LEVEL]), **success}


class ByColumn(Curriculum):
    """Takes the prompts that the run would take anyway, sorted by a column; equal ones in the order of the data."""

    def __init__(self, config: CurriculumConfig, seed: int, values: np.ndarray, prompts: int) -> None:
        """Sorts the first `prompts` places of the order, as many as the run takes, by the rows' `[rows]` values."""
        super().__init__(config, seed)
        self._values = values
        self.state["prompts"] = prompts

    def order(self, order: "grain.MapDataset") -> "grain.MapDataset":
        """Ascending; what comes after, where rows were dropped, in the order of the data."""
        import grain

        numbers = np.array([order[place] for place in range(min(self.state["prompts"], len(order)))], np.int64)
        numbers = numbers[np.argsort(self._values[numbers], kind="stable")]
        size = len(numbers)
        return grain.MapDataset.range(len(order)).map(
            lambda place: int(numbers[place]) if place < size else order[place]
        )

    def metrics(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """The mean of the column over the step's prompts."""
        name = f"curriculum/{self.config.by}"
        return {name: float(np.mean([self._values[prompt.number] for prompt in prompts]))} if prompts else {}


def curriculum_of(data: DataConfig, rows: Rows, seed: int, prompts: int) -> Curriculum | None:
    """The curriculum that a recipe asks for; None where it asks for none.

    Args:
        data: the recipe's section.
        rows: what is trained on; all are read for a column.
        seed: the run's.
        prompts: how many the whole run takes.

    Raises:
        UserError: a row lacks the column, or has no number in it.
    """
    config = data.curriculum
    if config is None or config.by == "success":
        return config and BySuccess(config, seed)
    name = data.columns.get(config.by, config.by)
    values = np.zeros(len(rows))
    for number in range(len(rows)):
        row = rows[number]
        if not is_finite(value := row.get(name)):
            where = f"row {number + 1} of {rows.name}"
            hint = "" if name in row else nearest(name, [*dotted(row), "success"])
            what = f"has {value!r:.80} in" if name in row else f"has the columns {', '.join(row)}, not"
            raise UserError(f"data.curriculum: {where} {what} {name!r}, whose numbers order the prompts.{hint}")
        values[number] = value
    if config.by == LEVEL:
        return ByLevel(config, seed, sorted(set(values.tolist())))
    return ByColumn(config, seed, values, prompts)
