"""Runs a property on drawn cases: a few, the same each time, in the fast tier, and 10^5 new ones in the slow tier."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from tests.marks import slow

numbers = pytest.mark.parametrize("number", [25, *slow([100_000])])
"""Of a property that takes a millisecond or less."""


def attack(check: Callable[[Any], None], cases: SearchStrategy[Any], number: int) -> None:
    """Calls `check` with that many cases; a case that fails is made small and shown."""
    every = settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=number < 10_000,
        suppress_health_check=list(HealthCheck),
    )
    every(given(cases)(lambda case: check(case)))()
