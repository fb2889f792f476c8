"""Prefill and decode as they are exported, token by token against the whole model."""

import jax
import numpy as np
import pytest

from tests.tiny_models import CASES, load, one_device, our_logits, reference_folder, rows_of
from tunix.interop.stablehlo import Programs, Shapes, flat, unflat
from tunix.models.kv_cache import unstack
from tunix.util.exact import jit

pytestmark = pytest.mark.models

LENGTHS, STEPS = (35, 7, 32), 5
"""Prompts that end behind, before and with a chunk of 32 tokens."""


SLOW = ("gemma3-dual-rope", "gemma4-shared-keys", "gemma4-inputs-of-layers")


@pytest.mark.parametrize(
    "case", ["qwen3_5-alone-key-heads", *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_logits_are_those_of_the_whole_model(case, tmp_path):
    reference_folder(CASES[case], tmp_path / "here")
    model, params = load(tmp_path / "here")
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 97, length + STEPS, dtype=np.int32) for length in LENGTHS]
    expected = np.asarray(our_logits(model, params, rows_of(*([row] for row in rows))))
    # What is behind a prompt means nothing.
    tokens, lengths = rng.integers(0, 97, (3, 64), dtype=np.int32), np.asarray(LENGTHS, np.int32)
    for row, (whole, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        tokens[row, :length] = whole[:length]
    with jax.set_mesh(one_device()):
        weights = flat(jit(unstack, static_argnums=0)(model, params))
        assert flat(unflat(weights, model.config.num_layers)).keys() == weights.keys()
        programs = Programs(model, Shapes(batch=3, prompt=64, length=96))
        logits, cache = jit(programs.prefill)(weights, tokens, lengths)
        decode = jit(programs.decode)
        for step in range(STEPS):
            for row, (found, length) in enumerate(zip(np.asarray(logits), LENGTHS, strict=True)):
                np.testing.assert_allclose(found, expected[row][length - 1 + step], atol=1e-5)
            new = np.asarray([row[length + step] for row, length in zip(rows, LENGTHS, strict=True)], np.int32)
            logits, cache = decode(weights, cache, new, lengths + np.int32(step))
