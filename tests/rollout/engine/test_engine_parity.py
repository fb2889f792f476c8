"""The engine against references: greedy tokens of transformers' generate, and log-probs of our own full forward.

Pieces, pages, steps and slots are small here, so that prompts are cut, windows leave pages behind and slots are
refilled although sequences are short.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.marks import slow
from tests.tiny_models import CASES, load, one_device, quick_jit, reference_folder, row_logprobs
from tests.trainers import PLAIN, RICH
from tunix.config import MeshConfig
from tunix.lora.adapt import adapt
from tunix.lora.config import AdapterConfig
from tunix.mesh import build_mesh
from tunix.models.attention.decoding import BY_NAME
from tunix.models.config import is_adapter
from tunix.models.model import Model
from tunix.rollout.engine import engine as engine_file
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.shapes import page_bytes
from tunix.types import Completion, Sampling

pytestmark = pytest.mark.models

LENGTHS = (3, 17, 37, 9)
"""Of the prompts: within a piece of 16, two, three."""
EOS = 2
GREEDY = ("qwen2-biases-grouped", "gemma3-dual-rope", "qwen3_5-wide-values-tied", "qwen3_moe-seven-of-three")
"""A case of each kind of cache and mixer."""
SHARED_KEYS = "gemma4-shared-keys-wide-ffn"
SINKS = replace(RICH, sinks=True)
"""A sink starts at 0, and takes its share there."""


def prompts(vocab: int, lengths=LENGTHS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, length).astype(np.int32) for length in lengths]


def small_engine(model, params, *, mesh=None, slots=3, max_length=64, piece=16, page=8, steps=5, **options):
    sizes = {"slots": slots, "max_length": max_length, "piece": piece, "page": page, "steps": steps}
    engine = Engine(model, mesh or one_device(), **sizes, **options)
    engine.publish(params, 1)
    return engine


def random_params(model, mesh=None):
    return model.init(jax.random.key(0), dict.fromkeys(model.shapes, model.dtype), mesh or one_device())


@partial(quick_jit, static_argnums=(0, 1))
def full_forward(model, temperature, params, tokens, positions, segments):
    return row_logprobs(model, params, tokens, positions, segments, segments > 0, temperature=temperature)


def full_logprobs(model, params, prompt: np.ndarray, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of prompt and completion by one forward pass without a cache, `[T]`."""
    positions = np.arange(64, dtype=np.int32)[None]
    tokens = np.zeros_like(positions)
    length = len(prompt) + len(completion.tokens)
    tokens[0, :length] = np.concatenate([prompt, completion.tokens])
    segments = (positions < length).astype(np.int32)
    return np.asarray(full_forward(model, temperature, params, tokens, positions, segments))[0, :length]


def assert_logprobs_of_full_forward(model, params, engine, temperature=1.0, atol=1e-4, **settings):
    sampling = Sampling(max_tokens=22, temperature=temperature, **settings)
    given = prompts(model.config.vocab_size)
    for prompt, (completion,) in zip(given, engine.sample(given, 1, sampling, seed=3), strict=True):
        assert len(completion.tokens) == 22
        expected = full_logprobs(model, params, prompt, completion, temperature)[len(prompt) :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=atol)


@pytest.mark.parametrize("name", [*GREEDY, *slow(name for name in CASES if name not in GREEDY)])
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    reference = reference_folder(CASES[name], tmp_path)
    model, params = load(tmp_path)
    engine = small_engine(model, params, slots=4)
    found = engine.sample(prompts(97), 1, Sampling(max_tokens=20, temperature=0.0, stop_ids=(EOS,)), seed=0)
    for prompt, (completion,) in zip(prompts(97), found, strict=True):
        ids = torch.from_numpy(prompt)[None].long()
        theirs = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        np.testing.assert_array_equal(completion.tokens, theirs[0, len(prompt) :].numpy())


@pytest.mark.parametrize("config", [PLAIN, *slow([RICH, SINKS])], ids=["plain", "rich", "sinks"])
def test_cached_logprobs_are_those_of_the_full_forward(config):
    """At every position behind prompts (in pieces); RICH's window of 5 leaves six pages of 8 behind."""
    model = Model(config)
    params = random_params(model)
    assert_logprobs_of_full_forward(model, params, small_engine(model, params), temperature=0.8)


def test_pages_that_a_piece_reads_are_not_given_to_those_that_share_its_prompt():
    """The last piece of the long prompt sees pages of the window before it, and leaves them; both of its completions
    begin with copies, which took these pages and were written before they were read."""
    model = Model(RICH)
    params = random_params(model)
    given = prompts(model.config.vocab_size, (9, 37))
    found = small_engine(model, params, slots=4).sample(given, 2, Sampling(max_tokens=6), seed=1)
    for prompt, group in zip(given, found, strict=True):
        for one in group:
            expected = full_logprobs(model, params, prompt, one)[len(prompt) :]
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)


def test_every_completion_follows_its_own_prompt():
    """Five completions of each prompt in two slots: some compute it, some follow that, the rest find its pages kept.
    Prompts of 1 token, of one piece, of three pieces and of whole pages; with few pages, requests leave their slots,
    those whose prompt is not computed yet too."""
    model = Model(PLAIN)
    params = random_params(model)
    given = prompts(model.config.vocab_size, (1, 9, 37, 32))
    sampling = Sampling(max_tokens=24, temperature=0.8)
    ample = small_engine(model, params, slots=2)
    each = page_bytes(model.config, ample.mesh, ample.sizes)
    few = small_engine(model, params, slots=6, room=2.0 * 12 * sum(each), ahead=1)
    assert list(few.sizes.pages) == [12] * len(few.sizes.pages)  # and six slots want up to eight each
    for engine in (ample, few):
        for prompt, group in zip(given, engine.sample(given, 5, sampling, seed=3), strict=True):
            for completion in group:
                expected = full_logprobs(model, params, prompt, completion, 0.8)[len(prompt) :]
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.slow
def test_a_bfloat16_model_has_a_bfloat16_cache_and_stays_near():
    model = Model(RICH, dtype="bfloat16")
    params = random_params(model)
    engine = small_engine(model, params)
    assert engine.sizes.cache_dtype == "bfloat16"
    # Logits are capped to 5 here and keep 8 bits: a rounding step is 2^-6 of a nat, and a few of them meet.
    assert_logprobs_of_full_forward(model, params, engine, atol=0.1)


def test_an_adapter_is_sampled_unmerged_and_its_base_copied_once():
    config = AdapterConfig(rank=4)
    model = Model(PLAIN, adapt=adapt(config, PLAIN))
    params = random_params(model)
    rng = np.random.default_rng(0)
    # B starts as zeros, which would hide the adapter.
    params = {
        name: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) if name.endswith("_lora_b") else x
        for name, x in params.items()
    }
    engine = small_engine(model, params)
    assert_logprobs_of_full_forward(model, params, engine)
    before = engine.hold().weights
    moved = {name: x + 0.1 if is_adapter(name) else x for name, x in params.items()}
    engine.publish(moved, 2)
    assert engine.hold().weights.layers[0]["q/w"] is before.layers[0]["q/w"]
    # Frozen tables are not copied at all.
    assert engine.hold().weights.top["embed/w"] is params["embed/w"]
    assert_logprobs_of_full_forward(model, moved, engine)


def test_the_sampler_keeps_its_weights_when_the_trainer_takes_over_the_buffers():
    model = Model(PLAIN)
    params = random_params(model)
    engine = small_engine(model, params)
    sampling = Sampling(max_tokens=4)
    before = engine.sample(prompts(96), 1, sampling, seed=0)
    for x in params.values():
        x.delete()
    after = engine.sample(prompts(96), 1, sampling, seed=0)
    for (a,), (b,) in zip(before, after, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


@pytest.mark.parametrize(
    ("devices", "shape"), [*slow([(2, MeshConfig(tensor=2))]), (8, MeshConfig(data=2, fsdp=2, tensor=2))], ids=repr
)
def test_a_mesh_gives_the_same_logprobs(devices, shape):
    mesh = build_mesh(shape, jax.devices()[:devices])
    model = Model(PLAIN)
    params = random_params(model, mesh)
    engine = small_engine(model, params, mesh=mesh, slots=4)
    home = engine.hold().weights.layers[0]["gate/w"].sharding
    assert home.shard_shape((32, 64)) == (32 // mesh.shape["fsdp"], 32)
    local = {name: jnp.asarray(np.asarray(x)) for name, x in params.items()}
    assert_logprobs_of_full_forward(model, local, engine)


@pytest.mark.parametrize(("speculate", "config"), [(2, RICH), *slow([(0, RICH), (0, SINKS)])])
def test_a_kernel_that_reads_pages_in_their_places_samples_the_same(monkeypatch, speculate, config):
    """The kernel for GPUs, interpreted: with windows, soft caps and shared kv heads, and pages of 16."""
    monkeypatch.setattr(engine_file, "reader_here", lambda spec, mesh: BY_NAME["triton"])
    model = Model(config)
    params = random_params(model)
    engine = small_engine(model, params, page=16, speculate=speculate)
    assert engine.sizes.in_place
    assert_logprobs_of_full_forward(model, params, engine)


@pytest.mark.parametrize(("cache", "most"), [("int8", 0.05), *slow([("fp8", 0.4)])])
def test_a_cache_of_8_bits_stays_near(cache, most):
    """Heads of 8 numbers average little: 0.03 and 0.24 were measured, eight times as much for 2^-4 as for 2^-7."""
    model = Model(PLAIN)
    params = random_params(model)
    engine = small_engine(model, params, cache_dtype=cache)
    assert engine.sizes.cache_dtype == cache
    assert_logprobs_of_full_forward(model, params, engine, atol=most)
    # Prompts read their own tokens as they are kept: longer pieces, in which more of them are, change little.
    sampling = Sampling(max_tokens=8)
    whole = small_engine(model, params, cache_dtype=cache, piece=64).sample(prompts(PLAIN.vocab_size), 1, sampling, 0)
    for (one,), (other,) in zip(engine.sample(prompts(PLAIN.vocab_size), 1, sampling, 0), whole, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("gemma3-dual-rope", "int8"),
        *slow([(name, cache) for name in (*GREEDY, SHARED_KEYS) for cache in ("int8", "fp8")]),
    ],
)
def test_a_cache_of_8_bits_is_replayed(name, cache, tmp_path):
    """The trainer's forward pass rounds keys and values as the cache does: log-probs are the sampler's, but where a
    number in the middle between two falls to the other one."""
    reference_folder(CASES[name], tmp_path)
    model, params = load(tmp_path)
    asked = prompts(model.config.vocab_size)
    sampled = small_engine(model, params, cache_dtype=cache).sample(asked, 1, Sampling(max_tokens=22), seed=3)

    def apart(model):
        pairs = zip(asked, sampled, strict=True)
        return np.concatenate([x.logprobs - full_logprobs(model, params, y, x)[len(y) :] for y, (x,) in pairs])

    replayed, plain = np.abs(apart(replace(model, cache_dtype=cache))), np.abs(apart(model))
    assert np.median(replayed) < 1e-5 < 1e-3 < np.median(plain)
    assert replayed.max() < 0.1 * plain.max()


def test_gradients_pass_through_a_replayed_cache():
    model, tokens = Model(PLAIN), jnp.arange(3, 35)[None]
    params, at = random_params(model), (jnp.arange(32)[None], jnp.ones((1, 32), jnp.int32))

    def gradients(model):
        return jax.grad(lambda params: row_logprobs(model, params, tokens, *at, at[1] > 0).sum())(params)

    plain, through = gradients(model), gradients(replace(model, cache_dtype="int8"))
    for name in ("layers/v/w", "layers/k/w"):
        assert np.vdot(through[name], plain[name]) > 0.99 * np.linalg.norm(through[name]) * np.linalg.norm(plain[name])
        assert np.linalg.norm(through[name]) > 0.9 * np.linalg.norm(plain[name])
