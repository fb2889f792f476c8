"""Asks for the plan of a recipe: starts a worker, waits for its lines until a deadline. Loads without jax."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe

DEADLINE = 600.0
"""Seconds that a plan may take."""
ELSEWHERE = {"JAX_PLATFORMS": "cpu"}
"""Environment of a worker that plans for devices that are not here."""
HERE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment of a worker that plans for the devices at hand: it takes no memory that it does not need."""


@dataclass
class Plan:
    """What the worker answered."""

    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """One for each stage, as `verdict.Verdict.report` makes them."""
    changes: dict[int, str | None] = field(default_factory=dict)
    """Stage -> the smallest change that fits, or None where none was found; only for stages that do not fit."""
    tried: list[str] = field(default_factory=list)
    """Changes that were tried."""
    late: bool = False
    """Whether the deadline ended it."""

    @property
    def fits(self) -> bool:
        """Whether all stages were examined and fit."""
        return bool(self.verdicts) and all(one["fits"] for one in self.verdicts)


def ask(
    recipe: Recipe,
    topology: str | None,
    deadline: float = DEADLINE,
    remedies: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The plan of a recipe, all of its stages included.

    Args:
        topology: such as `h100:8`; None for the devices at hand.
        deadline: seconds after which the worker is stopped.
        remedies: whether changes are tried where it does not fit.
        tell: receives what is being done, in a few words.

    Raises:
        UserError: the topology or the model is not known, a compiler is not installed, or it broke down.
    """
    request = {"recipe": recipe.sections(), "name": "recipe", "topology": topology, "remedies": remedies}
    worker = subprocess.Popen(
        [sys.executable, "-m", "tunix.plan.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(HERE if topology is None else ELSEWHERE)},
    )
    plan, noise = Plan(), list[str]()
    stop = threading.Timer(deadline, worker.kill)
    stop.start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    reader = threading.Thread(target=noise.extend, args=(worker.stderr,), daemon=True)
    reader.start()
    try:
        worker.stdin.write(json.dumps(request))
        worker.stdin.close()
        for line in map(json.loads, worker.stdout):
            if "error" in line:
                raise UserError(line["error"])
            if "verdict" in line:
                plan.verdicts.append(line["verdict"])
            if "change" in line:
                plan.changes[line["stage"]] = line["change"]
            if "begun" in line:
                tell("tracing the programs")
            if "trying" in line:
                plan.tried.append(line["trying"])
                tell(f"it does not fit; trying {line['trying']}")
            if "compiling" in line:
                tell(f"compiling {line['compiling']}")
        code = worker.wait()
    finally:
        plan.late = not stop.is_alive()
        stop.cancel()
        worker.kill()
    reader.join(timeout=1.0)
    if code and not plan.late:
        raise UserError(f"the plan's process ended with {code}: {''.join(noise[-3:]).strip()[-600:]}")
    return plan
