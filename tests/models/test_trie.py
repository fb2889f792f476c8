"""Transcripts of an episode in a trie: states and gradients are those of transcripts that share nothing."""

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.data.test_packing import sequence
from tests.marks import slow
from tests.rollout.engine.test_engine_parity import random_params
from tests.tiny_models import CASES, load, one_device, reference_folder
from tests.trainers import PLAIN, RICH
from tunix.data.packing import pack
from tunix.models.model import Model
from tunix.trainer.logprobs import Scorer, Scores
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.step import forward_of
from tunix.types import Batch, Sequence

pytestmark = pytest.mark.models


def episodes(vocab: int) -> list[Sequence]:
    """Two of five turns each, of which the next transcript shows the last tokens, and one of a single transcript. The
    first begins anew after three turns."""
    rng, made = np.random.default_rng(3), []
    for turns in (5, 1, 5):
        history, transcripts, trained = rng.integers(3, vocab, 11).tolist(), [], []
        for number in range(turns):
            if number == 3 and not made:
                history = rng.integers(3, vocab, 9).tolist()
            turn = rng.integers(3, vocab, 7).tolist()
            transcripts.append([*history, *turn])
            trained.append(np.arange(len(history) + 7) >= len(history))
            history += [*turn[4:], 1, 2]
        starts = np.cumsum([len(x) for x in transcripts])[:-1]
        whole = np.concatenate(transcripts)
        one = sequence(whole, np.concatenate(trained), place=range(len(whole)))
        made.append(replace(one, restarts=tuple(int(x) for x in starts)))
    return made


def test_scores_are_those_of_transcripts_that_share_nothing():
    """Where a token is trained; the others have 0."""
    model, sequences = replace(Model(RICH), has_scalar_head=True), episodes(Model(RICH).config.vocab_size)
    params = random_params(model)
    params["value/w"] = jnp.asarray(np.random.default_rng(1).normal(size=model.config.d_model), jnp.float32)
    apart, shared = (Scorer(model, Microbatcher(1, one_device(), trie=trie), 220) for trie in (False, True))
    rows, fewer = (np.count_nonzero(x.packed(sequences, 4).segment_ids) for x in (apart, shared))
    assert 3 * fewer < 2 * rows
    for kind in get_args(Scores):
        expected, found = (x.scores(kind, params, sequences, 4) for x in (apart, shared))
        for x, right, score in zip(sequences, expected, found, strict=True):
            np.testing.assert_allclose(score, np.where(x.loss_mask, right, 0), atol=1e-5)
            assert np.abs(right[x.loss_mask]).min() > 0


def states(model: Model, params: Any, batch: Batch) -> jax.Array:
    """`[trained D]` those that predict the trained tokens, in the order of the sequences."""
    row, column = np.nonzero(batch.loss_mask)
    order = np.lexsort((batch.per_token["place"][row, column], batch.sequence_ids[row, column]))
    hidden, _ = forward_of(model, params, batch)
    return hidden[row[order], column[order] - 1]


@pytest.mark.parametrize(
    ("model", "attention"),
    [
        (Model(RICH), "einsum"),
        ("qwen3_5-wide-values-tied", "auto"),
        *slow(
            [
                (Model(PLAIN), "chunked"),
                (Model(RICH), "chunked"),
                ("gemma3-dual-rope", "chunked"),
                ("qwen3_moe-seven-of-three", "einsum"),
                ("gpt_oss-five-of-two", "einsum"),
            ]
        ),
    ],
)
def test_states_and_gradients_are_those_of_transcripts_that_share_nothing(model, attention, tmp_path):
    if isinstance(model, str):
        reference_folder(CASES[model], tmp_path)
        model, params = load(tmp_path)
    else:
        params = random_params(model)
    model = replace(model, attention=attention)
    sequences = episodes(model.config.vocab_size)
    trie, apart = (pack(sequences, 3, 220, trie=trie) for trie in (True, False))
    assert 2 * np.count_nonzero(trie.segment_ids) < np.count_nonzero(apart.segment_ids) * 1.3
    pull = np.random.default_rng(0).normal(size=(sum(x.loss_mask.sum() for x in sequences), model.config.d_model))

    def sums(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        found = states(model, params, batch)
        return jnp.sum(found * jnp.asarray(pull, jnp.float32)), found

    compute = jax.value_and_grad(sums, has_aux=True)
    (_, found), gradients = jax.jit(lambda params: compute(params, trie))(params)
    (_, right), expected = jax.jit(lambda params: compute(params, apart))(params)
    np.testing.assert_allclose(found, right, atol=1e-5 * float(jnp.abs(right).max()))
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, atol=1e-4 * np.abs(gradient).max(), err_msg=name)
