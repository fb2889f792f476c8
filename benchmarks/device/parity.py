"""Every family's decoder on this device beside numbers of transformers, which `reference.json` holds.

They were made on a CPU by `python -m tests.device_reference`: log-probs of packed rows and gradients of a tiny model
of each family, in float32, and the log-probs that transformers itself computes in bfloat16. Weights are drawn by numpy
from the parameter's name, so that nothing but numbers has to be stored.

Axes: B rows, T time.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.rows import Row, Setting, attempt, check
from tunix.config import DType, MeshConfig
from tunix.mesh import build_mesh
from tunix.models.families.table import from_hf
from tunix.models.model import Model, Params
from tunix.util.exact import jit

REFERENCE = Path(__file__).parent / "reference.json"
LENGTH = 40
SEQUENCES = ((14, 9, 13), (40,))
"""Tokens of the sequences in each row: three that share one, and one that fills it."""
LOGPROBS, GRADIENTS = 1e-4, 1e-3
"""Limits in float32, those of tests/models/test_models_parity.py: absolute, and relative to a gradient's norm."""
TIMES = 2.0
"""How many times transformers' own rounding error ours may be in bfloat16."""


class Inputs(NamedTuple):
    """Packed rows `[B T]`."""

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray


def sequences(vocab: int) -> list[np.ndarray]:
    """Random token ids of each sequence; none is 0, a padding id."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, length).astype(np.int32) for row in SEQUENCES for length in row]


def packed(vocab: int) -> Inputs:
    """The sequences in their rows."""
    tokens, positions, segments = np.zeros((3, len(SEQUENCES), LENGTH), np.int32)
    rest = iter(sequences(vocab))
    for row, lengths in enumerate(SEQUENCES):
        start = 0
        for segment, length in enumerate(lengths, 1):
            here = (row, slice(start, start + length))
            tokens[here], positions[here], segments[here] = next(rest), np.arange(length), segment
            start += length
    return Inputs(tokens, positions, segments)


def weights(model: Model) -> dict[str, np.ndarray]:
    """Random float32 weights: matrices near unit gain, vectors (norms, biases) around 0 or 1, as they start.

    Where attention has no scale, norms of queries have it, as in trained models: a sharp softmax would amplify errors.
    """

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
        if name.endswith("/w") and len(shape) - name.startswith("layers/") == 1:
            usual = 0.3 * noise + (0.0 if model.config.norm_offset else 1.0)
            unscaled = model.config.scale == 1 and name.endswith("q_norm/w")
            return usual * np.float32(shape[-1] ** -0.5) if unscaled else usual
        if name.endswith("/factor"):
            return 0.1 * noise + 1.0
        if name.endswith("/sinks"):
            return noise
        if name.endswith("/b"):
            return 0.3 * noise
        return noise * np.float32(model.config.d_model**-0.5)

    return {name: one(name, shape) for name, shape in model.shapes.items()}


def digest(params: Mapping[str, np.ndarray]) -> str:
    """Tells whether numpy drew the weights that the numbers were stored for."""
    found = hashlib.sha256()
    for name in sorted(params):
        found.update(np.ascontiguousarray(params[name]).tobytes())
    return found.hexdigest()[:16]


def projected(gradients: Mapping[str, Any]) -> dict[str, list[float]]:
    """Two numbers of each gradient: its norm, and its product with a fixed direction of norm 1."""
    found = {}
    for name, gradient in gradients.items():
        flat = np.asarray(gradient, np.float64).ravel()
        direction = np.cos(np.arange(flat.size))
        found[name] = [float(np.linalg.norm(flat)), float(flat @ direction / np.linalg.norm(direction))]
    return found


def _packed_logprobs(model: Model, params: Params, inputs: Inputs) -> jax.Array:
    tokens, positions, segment_ids = (jnp.asarray(x) for x in inputs)
    hidden, _ = model.forward(params, tokens, positions, segment_ids)
    return model.logprobs_of(params, hidden, tokens, positions, segment_ids > 0)[0]


@partial(jit, static_argnums=0)
def _with_gradients(model: Model, params: Params, inputs: Inputs) -> tuple[jax.Array, Params]:
    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        logprobs = _packed_logprobs(model, params, inputs)
        return -jnp.sum(logprobs), logprobs

    (_, logprobs), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return logprobs, gradients


_logprobs = jit(_packed_logprobs, static_argnums=0)


def rows(case: str, setting: Setting) -> Iterator[Row]:
    """The rows of a family in both dtypes, tiny everywhere."""
    stored = json.loads(REFERENCE.read_text())[case]
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        model, name = Model(from_hf(stored["config"], REFERENCE), dtype=dtype), f"{case}, {dtype}"
        yield attempt(name, partial(compared, name, model, stored))


def _size(errors: np.ndarray, mixture: bool) -> float:
    """The usual size of rounding errors: their root mean square, or of a mixture the median.

    Where two experts are nearly tied, rounding chooses another one, for transformers as for tunix, and that token's
    log-prob moves by tenths: what one of 72 such tokens adds is more than all rounding.
    """
    return float(np.median(np.abs(errors)) if mixture else np.sqrt(np.mean(errors**2)))


def compared(name: str, model: Model, stored: Mapping[str, Any]) -> Row:
    """The row of one model and dtype.

    Raises:
        ValueError: numpy does not draw the weights that the numbers were stored for.
    """
    drawn = weights(model)
    if digest(drawn) != stored["weights"]:
        raise ValueError(
            f"numpy {np.__version__} draws other weights than {REFERENCE.name} was made with: make it anew"
        )
    places = model.shardings(build_mesh(MeshConfig(), jax.devices()[:1]))
    params = {name: jax.device_put(np.asarray(x, model.dtype), places[name]) for name, x in drawn.items()}
    inputs = packed(model.config.vocab_size)
    truth, scored = np.array(stored["logprobs"]), inputs.positions > 0
    if model.dtype == "bfloat16":
        ours, theirs = np.asarray(_logprobs(model, params, inputs))[scored], np.array(stored["rounded"])
        mixture = model.config.experts is not None
        error = _size(ours - truth, mixture) / _size(theirs - truth, mixture)
        return check(name, error, TIMES, "rounding error of log-probs, in transformers' own")
    with jax.default_matmul_precision("highest"):
        logprobs, found = _with_gradients(model, params, inputs)
    gradients = projected(found)
    # A factor that does not train (Gemma 4) has a gradient of 0.
    least = np.finfo(np.float64).tiny
    apart = {
        key: np.abs(np.subtract(gradients[key], both)).max() / max(both[0], least)
        for key, both in stored["gradients"].items()
    }
    worst = max(apart, key=apart.__getitem__)
    error = max(float(np.abs(np.asarray(logprobs)[scored] - truth).max()) / LOGPROBS, apart[worst] / GRADIENTS)
    return check(name, error, 1.0, f"log-probs to {LOGPROBS:g}, gradients to {GRADIENTS:g}; farthest {worst}")
