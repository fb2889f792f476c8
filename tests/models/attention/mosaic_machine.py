"""Hopper's kernels on a CPU: jax's interpreter runs the warpgroups of a program as threads; and what it lacks."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as gpu
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from tunix.models.attention import mosaic_backward
from tunix.models.attention.mosaic_backward import BLOCK, WARPGROUPS


def interpret(monkeypatch: pytest.MonkeyPatch, *, races: bool) -> None:
    """Has the kernels run here, for float32 and heads of at most 64 numbers; jax 0.10 detects no races."""
    staging = (gpu.SMEM((WARPGROUPS, BLOCK, BLOCK), jnp.float32),) * 2
    others = {"load": load, "iota": iota, "wgmma": multiply, "STAGING": staging}
    for name, other in {**others, "INTERPRETER": InterpretGPUParams(detect_races=races)}.items():
        monkeypatch.setattr(mosaic_backward, name, other)


def load(ref: Any, index: Any, *, layout: Any) -> jax.Array:
    """Without a layout, of which jax 0.10 knows nothing here."""
    numbers = ref[index] if index else ref[...]
    # The interpreter holds a copy by the third warpgroup for a race with reads that no fence precedes; a GPU does not
    # begin to write before all reads that were waited for are done.
    gpu.commit_smem()
    return numbers


def iota(dtype: Any, shape: tuple[int, ...], axis: int, *, layout: Any) -> jax.Array:
    return jax.lax.broadcasted_iota(dtype, shape, axis)


def multiply(total: Any, left: Any, right: Any, staged_left: Any, staged_right: Any) -> None:
    """By operands in shared memory that are not transposed: no others are interpreted."""
    staged_left[...] = numbers_of(left)
    staged_right[...] = numbers_of(right)
    gpu.commit_smem()
    gpu.wgmma(total, staged_left, staged_right)


def numbers_of(operand: Any) -> jax.Array:
    if isinstance(operand, jax.Array):
        return operand
    transforms = getattr(operand, "transforms", ())
    if transforms and type(transforms[-1]).__name__ == "TransposeTransform":
        return type(operand)(operand.ref, transforms[:-1])[...].T
    return operand[...]
