"""SDPO: the policy sees another attempt that succeeded, or feedback, and is the teacher of what it wrote without."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.algorithms.test_on_policy import Fake
from tunix.algorithms.distill.algorithm import Distill
from tunix.algorithms.distill.config import PROMPTS, DistillConfig
from tunix.algorithms.on_policy import Experience
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts, prompt_of
from tunix.data.sources import Rows
from tunix.data.teacher import TeacherReader
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import Kept
from tunix.models.divergence import Side, compared
from tunix.rollout.collect import Collector, RolloutStep
from tunix.rollout.types import Scored
from tunix.types import Completion, Divergence, Sampling

TOKENIZER, SAMPLING = bytes_tokenizer("llama3"), Sampling(max_tokens=8)
ASKED = "<bos><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


def test_the_preset_is_the_papers_loss():
    """KL(policy(. | x) || stopgrad policy(. | x, f)): of two ids p = (1/2, 1/2), and q = (1/4, 3/4) where f is seen,
    1/2 ln 2 + 1/2 ln 2/3 = ln(4/3) / 2. Its gradient, sum_v p_v d(log p_v) log(p_v / q_v), is by the logits
    (1/2)(ln 2 - KL) = ln(3) / 4 for the first and -ln(3) / 4 for the second: nothing goes through the teacher."""
    config = DistillConfig(preset="sdpo")
    assert (config.on_policy, config.divergence, config.success, config.group_size) == (True, "reverse_kl", 1.0, 8)
    assert config.learns_from_rewards
    needs = Distill(config, SAMPLING).needs
    assert needs.divergence == Divergence("reverse_kl")
    one = jnp.ones((1, 1), jnp.int32)

    def loss(student: jax.Array) -> jax.Array:
        sides = (Side(jnp.log(x)[None, None], jnp.eye(2), None) for x in (student, jnp.array([0.25, 0.75])))
        return compared(*sides, one, one > 0, needs.divergence or Divergence()).divergence.sum()

    value, gradient = jax.value_and_grad(loss)(jnp.array([0.5, 0.5]))
    assert float(value) == pytest.approx(np.log(4 / 3) / 2, abs=1e-6)
    # The logits are ln x, so that d/dx is twice d/dlogit at 1/2.
    assert gradient.tolist() == pytest.approx([np.log(3) / 2, -np.log(3) / 2], abs=1e-6)


class Weighing(Collector):
    """Has a reward that nothing computes."""

    @property
    def weights(self) -> dict[str, float]:
        return {"right": 1.0}


def group(scores: list[float], feedback: str = "", length: int = 400) -> tuple[list[Scored], RolloutStep]:
    """Completions `a`, `b`, ... of one prompt with these scores, and their step."""
    rows = Rows("rows", [{"messages": [{"role": "user", "content": "Why?"}]}])
    settings = (rows, TOKENIZER, DataConfig(train="rows", max_length=200, completion_length=8), RowKind.PROMPT, None)
    plain = Examples(*settings)[0]
    assert isinstance(plain, Kept)
    taught = Examples(*settings, TeacherReader(TOKENIZER, length, "policy", PROMPTS["sdpo"])).taught
    step = RolloutStep(
        collector=Weighing(TOKENIZER, SAMPLING, None),
        stream=Prompts(Examples(*settings), seed=0, epochs=None),
        size=1,
        seed=0,
        packed=partial(pack, max_length=400),
        tolerance=1e-3,
        taught=taught,
    )
    episodes = list[Scored]()
    for i, score in enumerate(scores):
        text = "abcdefgh"[i]
        tokens = np.array(TOKENIZER.encode(text), np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        completion = Completion(tokens, zeros, "stop", zeros.astype(np.int32), SAMPLING, ((0, len(tokens)),))
        logged = {"right/feedback": f"{feedback} {text}"} if feedback else {}
        episodes.append(Scored(prompt_of(plain), completion, text, {"right": float(score)}, logged=logged))
    return episodes, step


def asked(episodes: list[Scored], step: RolloutStep) -> list[str | None]:
    """What the teacher of each completion is asked, without the chat's markers."""
    (views,) = Distill(DistillConfig(preset="sdpo"), SAMPLING).shown([episodes], step)
    begin, end = ASKED.split("{}")
    texts = [None if view is None else TOKENIZER.decode(view.tokens) for view in views]
    assert all(text is None or (text.startswith(begin) and text.endswith(end)) for text in texts)
    return [None if text is None else text[len(begin) : -len(end)] for text in texts]


SOLVED = "Why?\nCorrect solution:\n\n{}\n\n\n\nCorrectly solve the original question."
TOLD = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{}\n\n"


def test_each_is_shown_the_first_other_attempt_that_succeeded():
    """In the text of the authors' code: a failed one sees `b`, `b` itself sees `d`."""
    assert asked(*group([0, 1, 0.5, 1])) == [SOLVED.format(x) for x in "bdbb"]
    # The only success has no other to learn from, and without one nobody has.
    assert asked(*group([0, 1])) == [SOLVED.format("b"), None]
    assert asked(*group([0, 0.9])) == [None, None]
    assert asked(*group([float("nan"), 1])) == [SOLVED.format("b"), None]


def test_feedback_is_shown_of_an_attempt_that_failed():
    """Beside a solution where there is one, `Feedback` being the question's suffix in the paper's text."""
    failed = "Why?" + TOLD + "\n\nCorrectly solve the original question."
    assert asked(*group([0, 0], "bad")) == [failed.format("bad a"), failed.format("bad b")]
    both = "Why?\nCorrect solution:\n\nb\n\n" + TOLD.format("no a") + "\n\nCorrectly solve the original question."
    assert asked(*group([0, 1], "no")) == [both, None]


def test_what_has_no_room_is_left_out():
    """A teacher with room for the question alone: the completion is not trained, and counted."""
    assert asked(*group([0, 1], length=60)) == [None, None]


@pytest.mark.parametrize(("scores", "taught"), [([0, 1, 1, 0], 1.0), ([0, 1, 0, 0], 0.75), ([0, 0, 0, 0], 0.0)])
def test_what_nobody_teaches_has_no_weight(scores: list[float], taught: float):
    episodes, step = group(scores)
    algorithm = Distill(DistillConfig(preset="sdpo", group_size=4), SAMPLING)
    update = algorithm.prepare(Fake(), Experience([episodes], step))
    assert update.metrics["distill/taught"] == taught
    assert update.metrics["reward/mean"] == pytest.approx(np.mean(scores))
    if not taught:
        assert update.batches == ()  # nothing to learn from
        return
    (batch,) = update.batches
    assert batch.weights[:4].sum() == 4 * taught
    assert batch.teacher is not None
    assert [TOKENIZER.decode(x.tokens)[-1] for x in batch.teacher] == list("abcd")
    for i, view in enumerate(batch.teacher):
        mine = np.asarray(batch.tokens)[(np.asarray(batch.sequence_ids) == i) & (np.asarray(batch.segment_ids) > 0)]
        trained = np.flatnonzero(view.places)
        np.testing.assert_array_equal(view.tokens[view.places[trained]], mine[trained])
