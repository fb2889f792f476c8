"""Attention's kernels beside the einsums in float32, and the trainer's log-probs beside the sampler's.

Axes: B rows, T time, N query heads, K kv heads, H head dim.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import numerics
from benchmarks.device.rows import Row, Setting, attempt, check
from tunix.config import DType
from tunix.models.attention.attend import BY_NAME, Implementation, attend, spec_of
from tunix.models.attention.inputs import Segments
from tunix.models.families.table import small
from tunix.util.exact import jit

HEADS, KV_HEADS, DIM = 4, 2, 128
DOCUMENTS = (0.3, 0.2, 0.1, 0.35)
"""Their share of a row; the rest is padding."""
WITHIN = {"float32": (1e-5, 2e-5), "bfloat16": (1e-2, 3e-2)}
"""Relative and absolute tolerance of a value or gradient, those of tests/models/attention."""
MEAN = 1e-2
"""Nats by which trainer and sampler may differ in bfloat16, in the mean; 6e-4 at most was found on a CPU
(docs/guide/devices.md)."""


class Kind(NamedTuple):
    """One kind of attention."""

    shared: bool = False
    """Whether the second and third document see the first, their prompt."""
    windowed: bool = False
    """Whether a query sees an eighth of the row at most."""
    softcap: float | None = None


KINDS = {
    "packed": Kind(),
    "windowed": Kind(windowed=True),
    "soft-capped": Kind(softcap=2.0),
    "shared prompts": Kind(shared=True),
}


def documents(kind: Kind, length: int) -> Segments:
    """`[1 T]` of several documents and padding."""
    ids, positions, parents = np.zeros((3, 1, length), np.int32)
    start, prompt = 0, int(DOCUMENTS[0] * length)
    for number, share in enumerate(DOCUMENTS, 1):
        here, size = np.s_[0, start : start + int(share * length)], int(share * length)
        branch = kind.shared and number in (2, 3)
        ids[here], parents[here] = number, 1 if branch else number
        positions[here] = np.arange(size) + (prompt if branch else 0)
        start += size
    return Segments(jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(parents) if kind.shared else None)


def kernels(case: str, setting: Setting) -> Iterator[Row]:
    """The rows of an implementation and a kind in both dtypes.

    Args:
        case: e.g. `mosaic, packed`.
        setting: how it runs.
    """
    dtypes: tuple[DType, ...] = ("bfloat16", "float32")
    name, kind = case.split(", ")
    for dtype in dtypes:
        compared = partial(kernel, BY_NAME[name], kind, dtype, 1024 if setting.small else 2048)
        yield attempt(f"{case}, {dtype}", compared)


def kernel(implementation: Implementation, kind: str, dtype: DType, length: int) -> Row:
    """The row of one implementation: its largest difference from float32 einsums, in parts of what is tolerated."""
    settings, heads = KINDS[kind], (HEADS, KV_HEADS, KV_HEADS, HEADS)
    view = documents(settings, length)._replace(window=length // 8 if settings.windowed else None)
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = (jax.random.normal(key, (1, length, n, DIM)) for key, n in zip(keys, heads, strict=True))
    inputs = [x.astype(dtype) for x in drawn]
    name = f"{implementation.name}, {kind}, {dtype}"
    if reason := implementation.lacks(spec_of(inputs[0], inputs[1], view, settings.softcap)):
        return Row(name, "skipped", reason)

    def computed(attention: str, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(q, k, v, view._replace(attention=attention), scale=DIM**-0.5, softcap=settings.softcap)

        def both(q: jax.Array, k: jax.Array, v: jax.Array, pull: jax.Array) -> tuple[jax.Array, ...]:
            values, back = jax.vjp(mixed, q, k, v)
            return values, *back(pull)

        with jax.default_matmul_precision("highest" if inputs[0].dtype == "float32" else "default"):
            return jit(both)(*inputs)

    found, expected = computed(implementation.name, *inputs), computed("einsum", *(x.astype("float32") for x in inputs))
    relative, absolute = WITHIN[dtype]
    real, worst = np.asarray(view.ids > 0), 0.0
    for ours, truth in zip(found, expected, strict=True):
        mine, true = np.asarray(ours, np.float32)[real], np.asarray(truth, np.float32)[real]
        worst = max(worst, float(np.max(np.abs(mine - true) / (absolute + relative * np.abs(true)))))
    return check(name, worst, 1.0, f"values and gradients to {relative:g} and {absolute:g}, {length} tokens")


def trainer_and_sampler(case: str, setting: Setting) -> Iterator[Row]:
    """The row of a family in bfloat16, small everywhere."""
    yield attempt(case, partial(apart, case))


def apart(family: str) -> Row:
    """The mean difference of the log-probs; infinite where those of the reference are not equal to the bit, unless it
    is a mixture, whose reference chooses its own experts."""
    found, mixture = numerics.distances(family), small(family).experts is not None
    said = f"largest {found['max']:.1e}, of scoring {found['scorer']:.1e}, from the reference {found['reference']:.1e}"
    return check(family, found["mean"] if mixture or found["reference"] == 0 else math.inf, MEAN, said)
