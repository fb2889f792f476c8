"""The engine with pictures in prompts: what it samples is what the trainer's forward pass and transformers say.

A picture of 9 soft tokens is computed in one piece of 16 tokens, whatever comes before it; the window is 6.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.marks import slow
from tests.models.test_vision import SOFT, load, made, sequence, whole
from tests.tiny_models import one_device
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.hf.model_folder import load_params
from tunix.mesh import build_mesh
from tunix.models.model import Model, Params
from tunix.rollout.engine.engine import Engine
from tunix.trainer.perf import Compilations
from tunix.trainer.step import hidden_of
from tunix.types import Batch, Completion, Request, Sampling, Sequence, Workload

pytestmark = pytest.mark.models

__all__ = ["made"]

PROMPTS = (sequence(3, 40, 6, 21), sequence(4, 11), sequence(5, 14, 3), sequence(6, 33, 12, 22))


def engine(model: Model, params: Params, mesh: jax.sharding.Mesh | None = None, **sizes) -> Engine:
    sizes = {"slots": 4, "max_length": 64, "piece": 16, "page": 8, "steps": 4, **sizes}
    found = Engine(model, mesh or one_device(), **sizes)
    found.publish(params, 1)
    return found


def requests(prompts: tuple[Sequence, ...], n: int, sampling: Sampling) -> list[Request]:
    repeated = [prompt for prompt in prompts for _ in range(n)]
    return [Request(x.tokens, sampling, 7, i, pictures=x.pictures) for i, x in enumerate(repeated)]


def sample(engine: Engine, prompts: tuple[Sequence, ...], n: int, sampling: Sampling) -> list[list[Completion]]:
    completions = engine.run(requests(prompts, n, sampling))
    return [completions[i : i + n] for i in range(0, len(completions), n)]


@partial(jax.jit, static_argnums=0)
def forward(model: Model, params: Params, batch: Batch) -> jax.Array:
    read = batch.tokens, batch.positions, batch.loss_mask
    return model.logprobs_of(params, hidden_of(model, params, batch), *read)[0]


def full_logprobs(model: Model, params: Params, prompt: Sequence, one: Completion) -> np.ndarray:
    """What the trainer computes of the completion's tokens."""
    number = len(one.tokens)
    both = Sequence(
        np.concatenate([prompt.tokens, one.tokens]),
        np.concatenate([np.zeros(len(prompt.tokens), bool), np.ones(number, bool)]),
        pictures=prompt.pictures.followed(number),
    )
    batch = jax.tree.map(jnp.asarray, pack([both], 1, 64, pictures=max(2, prompt.pictures.number)))
    return np.asarray(forward(model, params, batch))[0, len(prompt.tokens) : len(both.tokens)]


def assert_trainers_logprobs(model: Model, params: Params, prompts: tuple[Sequence, ...], groups) -> None:
    for prompt, group in zip(prompts, groups, strict=True):
        for one in group:
            np.testing.assert_allclose(one.logprobs, full_logprobs(model, params, prompt, one), atol=1e-5)


@pytest.mark.parametrize("piece", [*slow([16]), 64])
def test_logprobs_are_those_of_the_trainer_whatever_the_pieces(made, piece):
    """Prompts with two pictures, with one and without, several completions of each, in few slots."""
    model, params = load(made[0])
    found = sample(engine(model, params, piece=piece), PROMPTS, 2, Sampling(max_tokens=8))
    assert_trainers_logprobs(model, params, PROMPTS, found)
    assert any(len({tuple(one.tokens) for one in group}) > 1 for group in found)


def test_greedy_tokens_are_those_of_transformers(made):
    model, params = load(made[0])
    found = sample(engine(model, params), PROMPTS, 1, Sampling(max_tokens=8, temperature=0.0))
    for prompt, (ours,) in zip(PROMPTS, found, strict=True):
        ids = torch.from_numpy(prompt.tokens).long()[None]
        seen = {"pixel_values": whole(prompt.pictures.pixels)} if prompt.pictures.number else {}
        how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        theirs = made[1].generate(input_ids=ids, token_type_ids=(ids == SOFT).long(), **seen, **how)
        assert ours.tokens.tolist() == theirs[0, len(prompt.tokens) :].tolist()


def test_prompts_of_equal_tokens_and_other_pictures_are_not_shared(made):
    model, params = load(made[0])
    one = PROMPTS[2]
    other = replace(one, pictures=replace(one.pictures, pixels=255 - one.pictures.pixels))
    found = sample(engine(model, params), (one, other, one), 2, Sampling(max_tokens=6))
    assert_trainers_logprobs(model, params, (one, other, one), found)
    assert np.abs(found[0][0].logprobs[0] - found[1][0].logprobs[0]) > 1e-3


def test_a_request_that_lost_its_pages_sees_its_pictures_again(made):
    """There is room for two of four: those that came last leave, and are computed again."""
    model, params = load(made[0])
    tight = engine(model, params, max_length=56, room=90_000.0)
    assert tight.sizes.pages[-1] < 4 * 7, "pages are short"
    found = sample(tight, PROMPTS, 1, Sampling(max_tokens=14))
    assert_trainers_logprobs(model, params, PROMPTS, found)


def assert_nothing_compiles_after_warm_up(model: Model, params: Params, prompts: tuple[Sequence, ...]) -> None:
    warmed = engine(model, params, steps=3)  # no other test has compiled for it
    warmed.warm(Workload(8, 40, 56))
    compilations = Compilations()
    sample(warmed, prompts, 2, Sampling(max_tokens=8))
    assert compilations.since_warmup == 0


def test_nothing_compiles_after_warm_up(made):
    assert_nothing_compiles_after_warm_up(*load(made[0]), PROMPTS)


def assert_spread_samples_alike(model: Model, params: Params, folder: Path, prompts: tuple[Sequence, ...]) -> None:
    """Eight devices sample what one does."""
    greedy = Sampling(max_tokens=8, temperature=0.0)
    alone = sample(engine(model, params), prompts, 2, greedy)
    mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2), devices=jax.devices()[:8])
    params = load_params(model, folder, dict.fromkeys(model.shapes, "float32"), mesh)
    spread = sample(engine(model, params, mesh, slots=8), prompts, 2, greedy)
    for ours, theirs in zip(alone, spread, strict=True):
        assert [one.tokens.tolist() for one in ours] == [one.tokens.tolist() for one in theirs]


@pytest.mark.slow
def test_eight_devices_sample_what_one_does(made):
    assert_spread_samples_alike(*load(made[0]), made[0], PROMPTS)


def refused(made, prompt: Sequence, message: str, pictures: bool = True) -> None:
    model, params = load(made[0])
    if not pictures:
        model = Model(replace(model.config, vision=None))
        params = {name: x for name, x in params.items() if name in model.shapes}
    with pytest.raises(UserError, match=message):
        sample(engine(model, params), (prompt,), 1, Sampling(max_tokens=2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pixels": np.zeros((1, 49, 4, 4, 3), np.uint8)}, r"they need \(36, 4, 4, 3\) patches, rows, columns"),
        ({"places": np.zeros(3, np.int32)}, "a place for each token"),
        ({"grids": np.full((1, 2), 2, np.int32)}, r"pictures of \[4\] tokens; the model's have 9"),
        (
            {"pixels": np.zeros((2, 36, 4, 4, 3), np.uint8), "grids": np.full((2, 2), 3, np.int32)},
            r"9 tokens for 2 pictures of \[9 9\]",
        ),
    ],
)
def test_pictures_that_do_not_fit_are_refused(made, changed, message):
    one = PROMPTS[2]
    refused(made, replace(one, pictures=replace(one.pictures, **changed)), message)


def test_a_model_without_a_tower_is_given_no_pictures(made):
    refused(made, PROMPTS[2], "loaded without the tower", pictures=False)
