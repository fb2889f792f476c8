"""The parity gate: a kernel computes attention only on devices where it gives the einsums' numbers.

Kernels depend on a device, its compiler and a library, and are seldom tested together as they are met. So the first
start on a device computes a small packed row by the kernel and by the einsums, with gradients, for each kind of layer.

Axes: B rows, T time, N query heads, K kv heads, H head dim.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tunix.models.attention.attend import BY_NAME, Implementation
from tunix.models.attention.inputs import AttentionSpec, Segments
from tunix.util.atomic_io import write_text_atomic
from tunix.util.exact import jit

LIMIT = 1e-2
"""The largest difference of a result or a gradient, relative to its size: four roundings to bfloat16. A query that sees
another document, or a wrong window, is off by half of it and more."""
LENGTH = 512
"""Tokens of the row."""
DOCUMENTS = (200, 90, 110, 60)
"""Tokens of its documents; of shared prompts the first is the prompt of the next two. The rest is padding."""
MEASURED = Path("~/.cache/tunix/attention.json")
"""The differences that were found, by device, versions, kernel and spec."""


def difference(name: str, spec: AttentionSpec, found: Path = MEASURED) -> float:
    """How far a kernel is from the einsums on this device, relative to their size; remembered for later starts.

    Args:
        name: the implementation, e.g. "splash".
        spec: the call that it is for; the row here is a short one.
        found: the file of what was found before.
    """
    spec = replace(spec, queries=LENGTH, keys=LENGTH)
    return remembered([name, spec], lambda: measured(BY_NAME[name], spec), found)


def remembered(call: list, measure: Callable[[], float], found: Path = MEASURED) -> float:
    """What was measured of a kernel's call on such a device before; else it is measured."""
    versions = [version("jax"), version("jaxlib"), _version("tokamax"), _version("libtpu")]
    text = str([jax.local_devices()[0].device_kind, *versions, *call])
    key, path = hashlib.sha256(text.encode()).hexdigest()[:16], found.expanduser()
    known = _known(path)
    if key not in known:
        known[key] = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(known, indent=1))
    return known[key]


def measured(one: Implementation, spec: AttentionSpec) -> float:
    """The largest relative difference of attention, its log-sum-exp and its gradients from float32 einsums."""
    view, inputs = row(spec), random_inputs(spec)

    def results(one: Implementation, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, pull = inputs
        settings = {"scale": spec.head_dim**-0.5, "softcap": spec.softcap}
        result = one.forward(q, k, v, view, **settings)
        return *result, *one.backward(q, k, v, view, result, pull, **settings)

    with jax.set_mesh(Mesh(jax.local_devices()[:1], ("alone",))):
        mine = _computed(lambda *x: results(one, *x), inputs)
        with jax.default_matmul_precision("highest"):
            exact = _computed(lambda *x: results(BY_NAME["einsum"], *x), tuple(x.astype(np.float32) for x in inputs))
    real = np.asarray(view.ids > 0)
    return max(off(x[real], y[real]) for x, y in zip(mine, exact, strict=True))


def row(spec: AttentionSpec) -> Segments:
    """A packed row of DOCUMENTS and padding."""
    ids, positions, parents = (np.zeros((1, LENGTH), np.int32) for _ in range(3))
    start = 0
    for number, length in enumerate(DOCUMENTS, 1):
        here, shared = np.s_[0, start : start + length], spec.branched and number in (2, 3)
        ids[here], parents[here] = number, 1 if shared else number
        positions[here] = np.arange(length) + (DOCUMENTS[0] if shared else 0)
        start += length
    above = jnp.asarray(parents) if spec.branched else None
    return Segments(jnp.asarray(ids), jnp.asarray(positions), above, window=spec.window)


def random_inputs(spec: AttentionSpec) -> tuple[jax.Array, ...]:
    """q, k, v and the gradient by the result, in the dtype of the spec."""
    keys, heads = jax.random.split(jax.random.key(0), 4), (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads)
    shapes = ((1, LENGTH, number, spec.head_dim) for number in heads)
    return tuple(jax.random.normal(key, shape).astype(spec.dtype) for key, shape in zip(keys, shapes, strict=True))


def _known(path: Path) -> dict[str, float]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # None yet, or not ours: both are measured anew.
        return {}


def _computed(function: Callable, inputs: tuple[jax.Array, ...]) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in jit(function)(*inputs)]


def off(found: np.ndarray, right: np.ndarray) -> float:
    """The root mean square of a difference, relative to that of what is right; infinite where one is not a number."""
    apart = float(np.sqrt(np.mean((found - right) ** 2)) / np.sqrt(np.mean(right**2)))
    return apart if np.isfinite(apart) else float("inf")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
