"""Cases of a test that others stand for in `make test`; `make test-slow` runs them too. And how to compile quickly."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pytest

OLDER_EMITTERS = ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []
"""They compile in half the time of those that users' runs have. Later versions know them no more, and end the process
at a flag that they do not know."""
QUICKLY = " ".join(["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1", *OLDER_EMITTERS])
"""XLA_FLAGS of programs that run once or twice: the compiler need not try hard. One part of a module takes less than
32."""


def slow(cases: Iterable[Any]) -> list[Any]:
    """The cases, each marked; a tuple is the values of several arguments."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]
