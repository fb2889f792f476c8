"""Cases of a test that others stand for in `make test`; `make test-slow` runs them too."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(cases: Iterable[Any]) -> list[Any]:
    """The cases, each marked."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]
