"""Cases of a test that others stand for in `make test`; `make test-slow` runs them too. And how to compile quickly."""

from collections.abc import Iterable
from typing import Any

import pytest

QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
"""XLA_FLAGS of programs that run once or twice: the compiler need not try hard. Its older emitters take half the time
of those that users' runs have, one part of a module less than 32."""


def slow(cases: Iterable[Any]) -> list[Any]:
    """The cases, each marked."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]
