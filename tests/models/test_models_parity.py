"""Every family against transformers on random tiny models: logits, gradients, packing, and the way back.

The table is in `tiny_models.py`. Tolerances are those of a whole float32 model: 1e-4 on logits, 1e-3 relative on the
gradients of the mean loss, for each tensor.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.marks import slow
from tests.paged import slots_of_row
from tests.tiny_models import (
    CASES,
    EACH,
    HEAVY,
    by_hf_name,
    gradients_by_hf_name,
    load,
    loss_and_gradients,
    our_logits,
    reference_folder,
    rows_of,
    saved_buffers,
    tokens,
)
from tunix.hf.model_folder import save_folder
from tunix.models.attention.attend import attend, attend_cached
from tunix.models.attention.inputs import Segments
from tunix.models.families.table import read_config
from tunix.models.model import Model

pytestmark = pytest.mark.models

LONG = (
    *("qwen3_5_moe-three-of-four-tied", "qwen3_5-three-to-one", "gemma4-shared-keys", "qwen3_5-alone-key-heads"),
    *("gemma4-inputs-of-layers", "gemma4-last-layer-global-untied", "qwen3_moe-one-of-four-tied"),
    "mixtral-all-of-three-tied",
)
"""Cases that take long to compile, each of a family that has another here."""
DENSE = tuple(name for name in EACH if name not in ("qwen3_moe-seven-of-three", "gemma4-keys-are-values"))
"""What takes little time to compile."""
CHUNKED = ("llama-multiquery-linear-wide-heads", "gemma2-windows-caps", "gemma3-dual-rope")
"""Attention of each kind; to it other families add what comes before and after."""


def but(*those: str) -> pytest.MarkDecorator:
    """All cases, of which these are slow."""
    return pytest.mark.parametrize("name", [*(name for name in CASES if name not in those), *slow(those)])


parity, light = but(*LONG), but(*LONG, *HEAVY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(folder, transformers' model) by case, made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (folder, reference_folder(CASES[name], folder))
        return made[name]

    return get


def reference_logits(model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.float().numpy()


@parity
def test_logits_and_gradients_equal_transformers(name, folders):
    folder, reference = folders(name)
    model, params = load(folder)
    ids = tokens()
    rows = rows_of(*([row] for row in ids))
    error = np.abs(our_logits(model, params, rows) - reference_logits(reference, ids)).max()
    assert error < 1e-4

    reference.zero_grad()
    labels = torch.from_numpy(ids).long()
    reference(labels, labels=labels).loss.backward()
    theirs = gradients_by_hf_name(reference)
    counted = ids.shape[0] * (ids.shape[1] - 1)
    ours = {key: g / counted for key, g in by_hf_name(model, loss_and_gradients(model, params, rows)[1]).items()}
    constant = saved_buffers(reference)
    assert set(ours) == {*theirs, *constant}
    assert not any(np.any(ours.pop(key)) for key in constant)
    relative = {key: np.linalg.norm(ours[key] - theirs[key]) / np.linalg.norm(theirs[key]) for key in ours}
    assert max(relative.values()) < 1e-3, max(relative, key=relative.__getitem__)


@pytest.mark.parametrize("name", [*CHUNKED, *slow(name for name in CASES if name not in CHUNKED)])
def test_attention_by_chunks_has_the_gradients_of_the_einsums(name, folders):
    """The einsums' are compared with transformers above."""
    model, params = load(folders(name)[0])
    rows = rows_of(*([row] for row in tokens()))
    chunks, plain = (
        loss_and_gradients(replace(model, attention=attention), params, rows)[1] for attention in ("chunked", "auto")
    )
    for key in params:
        scale = np.abs(plain[key]).max()
        np.testing.assert_allclose(chunks[key], plain[key], rtol=1e-4, atol=1e-5 * scale, err_msg=key)


@light
def test_packed_rows_equal_separate_rows(name, folders):
    folder, _ = folders(name)
    model, params = load(folder)
    sequences = [tokens(seed, 1, length)[0] for seed, length in enumerate((14, 9, 13))]
    together, packed = loss_and_gradients(model, params, rows_of(sequences))
    apart, separate = loss_and_gradients(model, params, rows_of(*([sequence] for sequence in sequences)))
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    for key in params:
        scale = np.abs(separate[key]).max()
        np.testing.assert_allclose(packed[key], separate[key], atol=1e-4 * scale, err_msg=key)


@light
def test_export_is_bit_exact_and_transformers_loads_it(name, folders, tmp_path):
    folder, reference = folders(name)
    model, params = load(folder)
    save_folder(tmp_path / "out", model.config, params, source=folder, dtype="float32")

    theirs, ours = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert read_config(tmp_path / "out") == model.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert again.dtype == torch.float32
    np.testing.assert_array_equal(reference_logits(again, tokens()), reference_logits(reference, tokens()))


@pytest.mark.parametrize("name", [*DENSE, *slow(name for name in CASES if name not in DENSE)])
def test_bfloat16_stays_near_float32(name, folders):
    folder, reference = folders(name)
    model, params = load(folder, "bfloat16")
    assert {array.dtype for array in params.values()} == {jnp.dtype("bfloat16")}
    ids = tokens()
    rough, exact = our_logits(model, params, rows_of(*([row] for row in ids))), reference_logits(reference, ids)
    assert rough.dtype == jnp.float32
    # bf16 keeps 8 bits: a few rounding errors of 2^-8 per layer on logits of about unit scale.
    assert np.sqrt(np.mean((rough - exact) ** 2)) < 0.1 * np.sqrt(np.mean(exact**2))


def test_the_query_scale_is_multiplied_in_float32():
    """Gemma 2 27B: 1/12 in bfloat16 is 171/2048, 0.195 % more. In float32 each product is q / 12, rounded once."""
    q, k = jnp.asarray(4 * np.random.default_rng(0).normal(size=(2, 1, 8, 2, 16)), jnp.bfloat16)
    once = jnp.asarray(np.asarray(q, np.float64) / 12, jnp.bfloat16)
    here = jnp.arange(8)[None]
    segments = Segments(jnp.ones((1, 8), jnp.int32), here)

    def trained(q: jax.Array, scale: float) -> jax.Array:
        return attend(q, k, k, segments, scale=scale)

    def sampled(q: jax.Array, scale: float) -> jax.Array:
        new = k.swapaxes(0, 1)
        return attend_cached(q.swapaxes(0, 1), new, new, *slots_of_row(k[0], k[0]), scale=scale)[0]

    for mixed in (trained, sampled):
        compiled = jax.jit(mixed, static_argnums=1)
        np.testing.assert_array_equal(compiled(q, 1 / 12), compiled(once, 1.0))


def test_remat_changes_nothing(folders):
    folder, _ = folders("gemma3-dual-rope")
    model, params = load(folder)
    rows = rows_of(*([row] for row in tokens()))
    _, plain = loss_and_gradients(model, params, rows)
    _, recomputed = loss_and_gradients(Model(model.config, dtype="float32", remat="block"), params, rows)
    for key in params:
        np.testing.assert_allclose(recomputed[key], plain[key], rtol=1e-4, atol=1e-4, err_msg=key)
