"""What an asynchronous run's sampler did when: which weights answered which call, and where a call was paused.

A line of `replay.jsonl` is written when a call begins, and one when it is paused or has ended. A run that is started
again replays what is recorded, whatever its clock says, and so ends where the first one would have.
"""

import json
from dataclasses import dataclass
from pathlib import Path

FILE = "replay.jsonl"


@dataclass
class Call:
    """One call of the sampler."""

    weights: int
    """Steps that had been learned when its weights were published, e.g. 7."""
    paused: int | None = None
    """Dispatches after which it was paused; None where it was not, as far as is known."""
    ended: bool = False
    """Whether it is known that it was not paused."""
    replayed: bool = False
    """Whether it has begun again."""


class Journal:
    """The calls of a run by (step, number within the step), in a file."""

    def __init__(self, path: Path, about: str):
        """Reads what an earlier start of the same run has recorded.

        Args:
            path: the file.
            about: a digest of the recipe; what another one has recorded is dropped.
        """
        self._path, self._calls = path, dict[tuple[int, int], Call]()
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if not rows or rows[0] != {"recipe": about}:
            path.write_text(json.dumps({"recipe": about}) + "\n")
            return
        for row in rows[1:]:
            key = row["step"], row["call"]
            if "weights" in row:
                self._calls[key] = Call(row["weights"])
            else:
                self._calls[key].paused, self._calls[key].ended = row["paused"], row["paused"] is None
        if not lines[-1].endswith("\n"):  # killed while it was written
            path.write_text("".join(lines[:-1]))

    def recorded(self, step: int, call: int) -> Call | None:
        """A call that is to be replayed; None where it is not recorded."""
        return self._calls.get((step, call))

    def keep(self, steps: range) -> None:
        """Leaves out the calls of other steps: their completions are known, or are not wanted."""
        self._calls = {key: call for key, call in self._calls.items() if key[0] in steps}

    def needs_before(self, learned: int) -> bool:
        """Whether a call that is still to be replayed wants weights of fewer steps."""
        return any(call.weights < learned and not call.replayed for call in self._calls.values())

    def begun(self, step: int, call: int, weights: int) -> None:
        """Records that a call begins with some weights."""
        if (known := self.recorded(step, call)) is not None:
            assert known.weights == weights, (known, weights)
            known.replayed = True
            return
        self._calls[step, call] = Call(weights, replayed=True)
        self._write({"step": step, "call": call, "weights": weights})

    def paused(self, step: int, call: int, dispatches: int) -> None:
        """Records that a call is paused after so many dispatches."""
        if self._calls[step, call].paused is None:
            self._calls[step, call].paused = dispatches
            self._write({"step": step, "call": call, "paused": dispatches})

    def ended(self, step: int, call: int) -> None:
        """Records that a call was not paused, if so: one that was killed may have been, had it gone on."""
        known = self._calls[step, call]
        if known.paused is None and not known.ended:
            known.ended = True
            self._write({"step": step, "call": call, "paused": None})

    def _write(self, row: dict[str, int | None]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
