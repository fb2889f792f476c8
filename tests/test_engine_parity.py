"""The engine against references: greedy tokens of transformers' generate, and log-probs of our own full forward.

Chunks, steps and slots are small here, so that prompts are cut, rings of local layers wrap, caches grow and slots are
refilled although sequences are short.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import CASES, load, one_device, quick_jit, reference_folder
from trainers import PLAIN, RICH

from tunix.config import AdapterConfig
from tunix.lora.adapt import adapt
from tunix.models.model import Model
from tunix.rollout.engine import Engine
from tunix.types import Sampling

LENGTHS = (3, 17, 37, 9)
"""Of the prompts: within a chunk of 16, two, three."""
EOS = 2


def prompts(vocab: int, lengths=LENGTHS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, length).astype(np.int32) for length in lengths]


def small_engine(model, params, *, mesh=None, slots=3, length=64, chunk=16, steps=5, **options):
    engine = Engine(model, mesh or one_device(), slots=slots, length=length, chunk=chunk, steps=steps, **options)
    engine.load(params, 1)
    return engine


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    reference = reference_folder(CASES[name], tmp_path)
    model, params = load(tmp_path)
    engine = small_engine(model, params)
    found = engine.sample(prompts(97), 1, Sampling(max_tokens=20, temperature=0.0, stop_ids=(EOS,)), seed=0)
    for prompt, (completion,) in zip(prompts(97), found, strict=True):
        ids = torch.from_numpy(prompt)[None].long()
        theirs = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        np.testing.assert_array_equal(completion.tokens, theirs[0, len(prompt) :].numpy())
