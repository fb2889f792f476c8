"""Numpy arrays as JSON values, bit for bit: in a run's position, and between its processes.

Axes: T time.
"""

import base64
from collections.abc import Mapping

import numpy as np


def coded(array: np.ndarray) -> dict[str, str]:
    """A `[T]` array as JSON values: its dtype and its bytes."""
    return {"dtype": array.dtype.str, "bytes": base64.b64encode(array.tobytes()).decode()}


def array_of(saved: Mapping[str, str]) -> np.ndarray:
    """The inverse of `coded`."""
    return np.frombuffer(base64.b64decode(saved["bytes"]), np.dtype(saved["dtype"])).copy()
