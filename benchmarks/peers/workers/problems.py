"""A task of reasoning-gym for the workers of `benchmarks.learning`: its problems, its verifier, and what is measured.

Nothing but the standard library and reasoning-gym, because every library's own environment runs it.
"""

import json
import sys
import time
from typing import Any

HELD_OUT = 2**31
"""Added to the seed of held-out problems, as a recipe's `data.eval: environment` does."""


class Problems:
    """The case that the command line names; its metrics are written when the last step is measured."""

    def __init__(self) -> None:
        with open(sys.argv[1], encoding="utf-8") as file:
            self.case: dict[str, Any] = json.load(file)
        sys.path.extend(self.case["packages"])
        from reasoning_gym import create_dataset

        case = self.case
        seeds = {"train": (case["seed"], case["rows"]), "held_out": (case["seed"] + HELD_OUT, case["held_out"])}
        self._data = {
            kind: create_dataset(case["task"], seed=seed, size=size, **case["config"])
            for kind, (seed, size) in seeds.items()
        }
        self._items = {item["question"]: item for data in self._data.values() for item in data}
        self._rows: list[dict[str, float]] = []
        self._began = time.perf_counter()

    def questions(self, kind: str) -> "list[str]":
        """The questions of `train` or `held_out`."""
        return [item["question"] for item in self._data[kind]]

    def scores(self, questions: "list[str]", answers: "list[str]") -> "list[float]":
        """The verifier's score of each answer; 0 for one that it cannot read."""
        return [self._score(answer, self._items[x]) for x, answer in zip(questions, answers, strict=True)]

    def _score(self, answer: str, item: "dict[str, Any]") -> float:
        try:
            return float(self._data["train"].score_answer(answer, item))
        except Exception:  # of `int("four")`
            return 0.0

    def measured(self, step: int, answers: "list[str]") -> None:
        """Keeps the mean score of greedy answers to the held-out problems; writes all of them after the last step."""
        scores = self.scores(self.questions("held_out"), answers)
        seconds = time.perf_counter() - self._began
        self._rows.append({"step": step, "time/seconds": seconds, "eval/reward": sum(scores) / len(scores)})
        print(self._rows[-1], flush=True)
        if step == self.case["steps"]:
            with open(self.case["metrics"], "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in self._rows)
