"""Names the Pythons that tunix needs before anything is installed; hatchling calls it (pyproject.toml).

pip before 23.2 (Python 3.10 brings 23.0) resolves the dependencies before it looks at `requires-python`, and then names
a dependency of which the old Python has no version. This file has to be readable by the Pythons that it refuses.
"""

from __future__ import annotations

import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RequiredPython(BuildHookInterface):
    """Stops the build of a wheel under a Python that `requires-python` leaves out."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Exits with a sentence, or lets the build go on.

        Args:
            version: the kind of wheel, e.g. `editable`.
            build_data: what hatchling would let a hook change.
        """
        used = ".".join(map(str, sys.version_info[:3]))
        if used not in self.metadata.core.python_constraint:
            sys.exit(
                f"tunix needs Python 3.11, 3.12 or 3.13; {sys.executable} is Python {used}. With one of them: "
                "python3.11 -m venv .venv && .venv/bin/pip install ."
            )
