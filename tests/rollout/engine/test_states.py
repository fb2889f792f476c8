"""The engine with layers that hold states: what it samples is what the full forward pass, in chunks, says.

Prompts are computed in pieces of 16 whose segments begin with chunks of their own; states go on, are copied to those
with the same prompt, and are computed again where they have gone too far.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.marks import slow
from tests.rollout.engine.test_engine_parity import (
    assert_logprobs_of_full_forward,
    full_logprobs,
    prompts,
    random_params,
    small_engine,
)
from tunix.config import MeshConfig
from tunix.lora.adapt import adapt
from tunix.lora.config import AdapterConfig
from tunix.mesh import build_mesh
from tunix.models.config import DeltaNet
from tunix.models.families.table import small
from tunix.models.model import Model
from tunix.types import Request, Sampling

pytestmark = pytest.mark.models

CONFIG = replace(
    small("qwen3_5"), vocab_size=97, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn=48, norm_eps=1e-2,
    delta=DeltaNet(2, 4, 8, 8),
)  # fmt: skip
"""With an eps of 1e-3 weights that differ by 1e-7 of themselves move a log-prob by 1e-5, and under an adapter three
times as large as that below by 1.5e-3: 1e-5 and 1e-4 would tell nothing."""
EOS = 2


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG)


@pytest.fixture(scope="module")
def params(model):
    return random_params(model)


def test_logprobs_in_pieces_and_steps_are_those_in_chunks(model, params):
    """The trainer's sums are others than the sampler's: below 1e-5 in float32."""
    assert_logprobs_of_full_forward(model, params, small_engine(model, params), temperature=0.8, atol=1e-5)


@pytest.mark.parametrize("slots", [*slow([2]), 8])
def test_completions_of_one_prompt_begin_with_copies_of_its_state(model, params, slots):
    """With 8 slots all five of a prompt enter at once and one computes it, with 2 later ones compute it again."""
    engine = small_engine(model, params, slots=slots)
    given = prompts(97, (21, 3))
    found = engine.sample(given, 5, Sampling(max_tokens=9), seed=1)
    for prompt, group in zip(given, found, strict=True):
        assert len({tuple(one.tokens) for one in group}) > 1
        for one in group:
            expected = full_logprobs(model, params, prompt, one)[len(prompt) :]
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("stop", [{}, {"stop_strings": ("b",)}], ids=["at the end", "at a stop string"])
@pytest.mark.parametrize("length", [7, 1, 0])
def test_observations_go_on_from_the_state_or_from_the_start(model, params, stop, length):
    """Behind a stop string a slot has sampled on, and its state with it; without an observation its hidden state is
    lost: both are computed again from the first token."""
    engine = small_engine(model, params, decode=lambda ids: "".join("ab"[int(one) % 2] for one in ids))
    observation = np.arange(3, 3 + length, dtype=np.int32)
    asked: list[int] = []

    def reply(number: int, completion) -> np.ndarray | None:
        asked.append(number)
        return observation if asked.count(number) < 3 else None

    given = prompts(97, (21, 3, 9))
    sampling = Sampling(max_tokens=30, stop_ids=(EOS, 5, 8, 11, 14, 17, 20, 23), **stop)
    completions = engine.run([Request(prompt, sampling, 4, 0) for prompt in given], reply)
    assert len(asked) > len(given), "the first turns did not end"
    for prompt, one in zip(given, completions, strict=True):
        expected = full_logprobs(model, params, prompt, one)[len(prompt) :]
        sampled = one.logprobs != 0
        np.testing.assert_allclose(one.logprobs[sampled], expected[sampled], atol=1e-5)


def test_few_pages_make_room_and_states_are_computed_again(model, params):
    engine = small_engine(model, params, slots=4, room=70_000.0)
    assert engine.sizes.pages[0] < 4 * 8, "there is room for all"
    given = prompts(97, (21, 17, 30, 9))
    for prompt, (one,) in zip(given, engine.sample(given, 1, Sampling(max_tokens=30), seed=2), strict=True):
        np.testing.assert_allclose(one.logprobs, full_logprobs(model, params, prompt, one)[len(prompt) :], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "shape"), [(2, MeshConfig(tensor=2)), (8, MeshConfig(data=2, fsdp=2, tensor=2))], ids=repr
)
def test_a_mesh_samples_the_same(model, devices, shape):
    mesh = build_mesh(shape, jax.devices()[:devices])
    params = random_params(model, mesh)
    engine = small_engine(model, params, mesh=mesh, slots=4)
    local = {name: jax.numpy.asarray(np.asarray(x)) for name, x in params.items()}
    assert_logprobs_of_full_forward(model, local, engine, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_on_all_matrices_is_sampled():
    config = AdapterConfig(rank=2)
    model = Model(CONFIG, adapt=adapt(config, CONFIG))
    rng = np.random.default_rng(0)
    params = {
        name: jax.numpy.asarray(0.1 * rng.normal(size=x.shape), x.dtype) if name.endswith("_lora_b") else x
        for name, x in random_params(model).items()
    }
    assert {name for name in params if name.endswith("_lora_a")} == {
        f"layers/{name}/w_lora_a"
        for name in ("q", "k", "v", "o", "qkv", "z", "beta", "decay", "out", "gate", "up", "down")
    }
    assert_logprobs_of_full_forward(model, params, small_engine(model, params))


@pytest.mark.slow
def test_a_bfloat16_model_stays_near(params):
    model = Model(CONFIG, dtype="bfloat16")
    rounded = {name: x.astype("bfloat16") for name, x in params.items()}
    assert_logprobs_of_full_forward(model, rounded, small_engine(model, rounded), atol=0.1)


def test_short_pieces_are_refused(model, params):
    with pytest.raises(ValueError, match="a piece of 2 tokens is shorter than the convolutions of 4"):
        small_engine(model, params, piece=2)
