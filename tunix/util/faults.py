"""Faults that a test plans, to see what a run then does: `TUNIX_FAULTS=worker:die@3,checkpoint:truncate@4`.

Each is `POINT:KIND@NUMBER`. The number is what the point counts: updates, checkpoints and the steps that a tracker is
handed by their numbers, so that a run that is started again meets the same fault; reads of rows, calls of workers,
requests to servers and compiled updates as they come in a process. Without the variable nothing is read, counted or
slower.
"""

import os
from collections import Counter

from tunix.errors import UserError

VARIABLE = "TUNIX_FAULTS"
POINTS: dict[str, tuple[str, ...]] = {
    "data": ("shorten",),
    "gradient": ("nan",),
    "worker": ("die", "hang"),
    "checkpoint": ("truncate",),
    "disk": ("slow",),
    "compile": ("fail",),
    "tracker": ("down", "hang", "refuse"),
    "server": ("break", "hang"),
}
"""What can happen where."""
SLOW = 3.0
"""Seconds that a slow disk takes longer."""
_passed: Counter[str] = Counter()


def planned(point: str, number: int | None = None) -> str | None:
    """What happens at a point now, e.g. `nan`; None, nearly always.

    Args:
        point: one of `POINTS`.
        number: of what is done there; None to count the passages of this process.

    Raises:
        UserError: the plan cannot be read.
    """
    if not (plan := os.environ.get(VARIABLE)):
        return None
    _passed[point] += 1
    for part in plan.split(","):
        name, _, rest = part.partition(":")
        kind, _, at = rest.partition("@")
        if kind not in POINTS.get(name, ()) or not at.isdecimal():
            known = ", ".join(f"{name}:{kind}@N" for name, kinds in POINTS.items() for kind in kinds)
            raise UserError(f"{VARIABLE}: {part!r} is no fault; there are {known}")
        if name == point and int(at) == (_passed[point] if number is None else number):
            return kind
    return None
