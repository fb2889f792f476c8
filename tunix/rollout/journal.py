"""What an asynchronous run's sampler did when: which weights answered which call, and where a call was paused.

A line of `replay.jsonl` is written when a call begins, and one when it is paused or has ended. A run that is started
again replays what is recorded, whatever its clock says, and so ends where the first one would have.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tunix.util.atomic_io import append_rows, read_rows, write_lines_atomic

FILE = "replay.jsonl"
"""In the run folder."""


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
        self._path, self._calls, head = path, dict[tuple[int, int], Call](), {"recipe": about}
        first, *rows = read_rows(path) or [head]
        rows = rows if first == head else []
        # Written anew, without a last line that a kill cut short.
        write_lines_atomic(path, (json.dumps(row) + "\n" for row in (head, *rows)))
        for row in rows:
            key = row["step"], row["call"]
            if "weights" in row:
                self._calls[key] = Call(row["weights"])
            else:
                self._calls[key].paused, self._calls[key].ended = row["paused"], row["paused"] is None

    def recorded(self, step: int, call: int) -> Call | None:
        """A call that is to be replayed; None where it is not recorded."""
        return self._calls.get((step, call))

    def keep(self, steps: range) -> None:
        """Leaves out the calls of other steps: their completions are known, or are not wanted."""
        self._calls = {key: call for key, call in self._calls.items() if key[0] in steps}

    def forget_before(self, learned: int) -> None:
        """Deletes the records of those steps that have taken weights of fewer learned ones. Nobody has these any more:
        such a step was given up, and is sampled anew."""
        gone = {step for (step, _), call in self._calls.items() if call.weights < learned}
        if gone:
            self._calls = {key: call for key, call in self._calls.items() if key[0] not in gone}
            rows = [row for row in read_rows(self._path) if row.get("step") not in gone]
            write_lines_atomic(self._path, (json.dumps(row) + "\n" for row in rows))

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
        append_rows(self._path, [{"step": step, "call": call, "weights": weights}])

    def paused(self, step: int, call: int, dispatches: int) -> None:
        """Records that a call is paused after so many dispatches."""
        if self._calls[step, call].paused is None:
            self._calls[step, call].paused = dispatches
            append_rows(self._path, [{"step": step, "call": call, "paused": dispatches}])

    def ended(self, step: int, call: int) -> None:
        """Records that a call was not paused, if so: one that was killed may have been, had it gone on."""
        known = self._calls[step, call]
        if known.paused is None and not known.ended:
            known.ended = True
            append_rows(self._path, [{"step": step, "call": call, "paused": None}])
