"""Drafts of the model's own head: they change no sample, and are those that torch makes of whole sequences."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.mtp import DENSE, MIXTURE, few, folder_with_head, load_seeing, load_with_head, seeing_folder_with_head
from tests.rollout.engine.test_engine_parity import prompts, small_engine
from tests.rollout.engine.test_engine_pictures import engine as seeing_engine
from tests.rollout.engine.test_engine_pictures import sample
from tests.rollout.engine.test_engine_qwen_pictures import PROMPTS
from tunix.config import MeshConfig
from tunix.mesh import build_mesh
from tunix.models.config import MTP
from tunix.models.model import Model, Params
from tunix.types import Completion, Request, Sampling, Sequence

pytestmark = pytest.mark.models
VOCAB = 8
"""So few ids that a random head is right now and then."""
MOST = 24


@pytest.fixture(scope="module", params=[DENSE, MIXTURE])
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    reference = folder_with_head(folder, request.param, vocab_size=VOCAB)
    return reference, *load_with_head(folder)


def without_head(params: Params) -> Params:
    return {name: x for name, x in params.items() if not name.startswith(MTP)}


def observed(number: int, so_far: Completion) -> np.ndarray | None:
    """A reply of two tokens after the first turn."""
    return np.array([4, 6], np.int32) if len(so_far.turns) < 2 else None


REQUESTS = [
    Request(prompt, Sampling(max_tokens=MOST, temperature=temperature, stop_ids=(5,)), 7, index)
    for index, (prompt, temperature) in enumerate(
        (prompt, temperature) for prompt in prompts(VOCAB, (3, 17, 37, 16, 8, 1)) for temperature in (0.0, 1.0)
    )
]
"""Prompts within a piece of 16, of two and of three, of whole pages of 8, and of a single token; each of them twice."""


@pytest.mark.parametrize("speculate", [1, 3])
def test_drafts_change_no_sample_and_are_those_of_a_pass_over_the_whole(tiny, speculate):
    """Greedy and sampled, with replies: what is accepted in all turns says that the head has kept the right keys and
    values of prompts in pieces, of prompts that are shared, of tokens that were accepted, and of replies."""
    reference, model, params = tiny
    without = small_engine(Model(replace(model.config, mtp=None)), without_head(params), slots=4)
    engine = small_engine(model, params, slots=4, speculate=speculate)
    expected, drafted = without.run(REQUESTS, observed), engine.run(REQUESTS, observed)
    for one, other in zip(expected, drafted, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.finish, one.turns) == (other.finish, other.turns)
    assert any(len(one.turns) == 2 for one in expected)
    sampled = sum(int(one.drawn.sum()) for one in expected)
    passes = sum(reference.passes(x.prompt, one, speculate) for x, one in zip(REQUESTS, expected, strict=True))
    assert engine.usage is not None
    assert engine.usage.drafted == speculate * passes
    assert engine.usage.accepted == sampled - passes
    assert sampled - passes > sampled // 20


def test_a_head_that_predicts_what_the_model_does_saves_passes(tiny):
    """Of a model whose layers add nothing the state is the normed embedding of its last token, and so is that of a head
    whose projection passes the embedding on and whose layer adds nothing: greedily every draft is accepted. 24 tokens
    take 6 passes of 1 + 3 tokens."""
    _, model, params = tiny
    closed = ("layers/o/w", "layers/out/w", "layers/down/w", "layers/downs/w")
    closed += ("mtp/layer/o/w", "mtp/layer/down/w", "mtp/layer/downs/w")
    weights = {name: 0 * x if name in closed else x for name, x in params.items()}
    width = model.config.d_model
    weights["mtp/join/w"] = jnp.concatenate([jnp.eye(width), jnp.zeros((width, width))])
    weights |= {"mtp/embed_norm/w": 0 * params["norm/w"], "mtp/norm/w": params["norm/w"]}
    requests = [Request(prompt, Sampling(max_tokens=MOST, temperature=0.0), 7) for prompt in prompts(VOCAB, (3, 17, 8))]
    engine = small_engine(model, weights, slots=4, speculate=3)
    drafted = engine.run(requests)
    plain = small_engine(Model(replace(model.config, mtp=None)), without_head(weights), slots=4)
    for one, other in zip(plain.run(requests), drafted, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert engine.usage is not None
    assert plain.usage is not None
    assert (engine.usage.drafted, engine.usage.accepted) == (3 * 3 * 6, 3 * 3 * 6)
    assert plain.usage.accepted == plain.usage.drafted == 0


@pytest.mark.slow
@pytest.mark.parametrize(("case", "sizes"), [(DENSE, {"data": 2}), (MIXTURE, {"expert": 2})])
def test_eight_devices_draft_what_one_does(case, sizes, tmp_path):
    """A mixture's head has its experts over the devices too."""
    different: dict[str, Any] = {"num_experts": 4} if case == MIXTURE else {}
    folder_with_head(tmp_path, case, vocab_size=VOCAB, **different)
    model, params = load_with_head(tmp_path)
    alone = small_engine(model, params, slots=8, speculate=2)
    expected = alone.run(REQUESTS, observed)
    mesh = build_mesh(MeshConfig(fsdp=2, tensor=2, **sizes), jax.devices()[:8])
    spread = small_engine(model, load_with_head(tmp_path, mesh)[1], mesh=mesh, slots=8, speculate=2)
    for completion, other in zip(expected, spread.run(REQUESTS, observed), strict=True):
        np.testing.assert_array_equal(completion.tokens, other.tokens)
    assert alone.usage is not None
    assert spread.usage is not None
    assert (alone.usage.drafted, alone.usage.accepted) == (spread.usage.drafted, spread.usage.accepted)


@pytest.mark.parametrize("piece", [*slow([64]), 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_behind_pictures_are_those_of_a_pass_over_the_whole(temperature, piece, tmp_path):
    """Prompts of up to 40 tokens with one to four pictures and without, two completions of each, in few slots: what is
    accepted says that the head has read the pictures, and that rope turns what it keeps to the right places."""
    reference = seeing_folder_with_head(tmp_path)
    model, params = load_seeing(tmp_path)
    sequences = tuple(replace(prompt, tokens=few(prompt.tokens)) for prompt in PROMPTS)
    sampling = Sampling(max_tokens=24, temperature=temperature)
    engine = seeing_engine(model, params, piece=piece, speculate=2)
    drafted = sample(engine, sequences, 2, sampling)
    plain = seeing_engine(Model(replace(model.config, mtp=None)), without_head(params), piece=piece)
    expected = sample(plain, sequences, 2, sampling)
    for several, others in zip(expected, drafted, strict=True):
        for completion, other in zip(several, others, strict=True):
            np.testing.assert_array_equal(completion.tokens, other.tokens)
            np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-5)

    def check(answers: list[list[Completion]], asked: tuple[Sequence, ...]) -> None:
        """The last run's drafts, and those accepted, are as many as torch has."""
        passes, sampled = 0, 0
        for reference.prompt, several in zip(asked, answers, strict=True):
            passes += sum(reference.passes(reference.prompt.tokens, completion, 2) for completion in several)
            sampled += sum(len(completion.tokens) for completion in several)
        assert engine.usage is not None
        assert (engine.usage.drafted, engine.usage.accepted) == (2 * passes, sampled - passes)

    check(drafted, sequences)
    for prompt in sequences:  # each for itself, where one miscount does not make up for another
        check(sample(engine, (prompt,), 4, replace(sampling, temperature=1.0)), (prompt,))
