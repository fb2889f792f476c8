"""Several teachers: the sum of their losses by their shares, or the one that a row names, each beside all logits."""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.algorithms.distill.test_distill import GIVEN, TEACHER, alone_kl, dense_kl, taught, viewed
from tests.trainer.test_step import assert_close, gradients
from tests.trainers import PLAIN, sequences, trainer
from tunix.algorithms.distill.config import TeacherConfig
from tunix.data.packing import pack
from tunix.models.divergence import Side, compared
from tunix.trainer.frozen_model import Teacher, Teachers
from tunix.trainer.perf import Compilations
from tunix.trainer.trainer import Trainer
from tunix.types import Divergence, Sequence

SHARES = (0.25, 0.75)


def several(shares: tuple[float, ...] | None, *, length: int = 24, rows: int = 4) -> tuple[Trainer, list[Trainer]]:
    """A student with two teachers of other sizes, and a student of the same weights with each of them alone."""
    alone = [taught(trainer(rows=rows), TEACHER, rows=rows), taught(trainer(rows=rows), PLAIN, rows=rows, seed=8)]
    for client in alone:
        assert isinstance(client.learner.teacher, Teacher)
        client.learner.teacher = replace(client.learner.teacher, length=length)
    client = trainer(rows=rows)
    client.learner.teacher = Teachers(tuple(x.learner.teacher for x in alone if x.learner.teacher), shares)
    return client, alone


def test_two_teachers_are_followed_by_their_shares():
    """Value and gradients are a quarter of those beside the first teacher alone, and three of those beside the second,
    from all logits."""
    batch = pack(sequences(4), 4, 24, packing=True)
    client, alone = several(SHARES)

    def loss(params: Any) -> jax.Array:
        first, second = (dense_kl(x, params, batch) for x in alone)
        return 0.25 * first + 0.75 * second

    value, wanted = jax.jit(jax.value_and_grad(loss))(client.learner.params)
    found = gradients(client, batch, GIVEN)
    assert found[0] == pytest.approx(float(value), rel=1e-5)
    assert_close(found[1], jax.device_get(wanted))
    rows = sequences(3)
    each = zip(*(x.logprobs(rows, "teacher") for x in alone), client.logprobs(rows, "teacher"), strict=True)
    for first, second, mean in each:
        np.testing.assert_allclose(mean, 0.25 * first + 0.75 * second, atol=1e-6)


def test_shares_of_the_forward_kl_are_the_mixture_of_the_teachers_and_of_the_reverse_kl_their_geometric_mean():
    """Of two ids, q_1 = (1/2, 1/2), q_2 = (1/4, 3/4), p = (1/5, 4/5), shares 1/4 and 3/4.

    The mixture is q = (1/8 + 3/16, 1/8 + 9/16) = (5/16, 11/16), and the forward sum -5/16 ln p_1 - 11/16 ln p_2
    + sum_k w_k q_k ln q_k. The geometric mean is m = q_1^(1/4) q_2^(3/4) / Z, and the reverse sum KL(p || m) - ln Z.
    """
    q, p, shares = np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([0.2, 0.8]), np.array(SHARES)

    def summed(kind: Literal["forward_kl", "reverse_kl"]) -> float:
        # Tables of ones on the diagonal, so that states are logits.
        sides = [Side(jnp.log(jnp.asarray(x, jnp.float32))[None, None], jnp.eye(2), None) for x in (p, *q)]
        target, needed = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
        each = [compared(sides[0], side, target, needed, Divergence(kind)).divergence for side in sides[1:]]
        return float(shares @ np.array(each).ravel())

    of_teachers = shares @ (q * np.log(q)).sum(1)
    assert summed("forward_kl") == pytest.approx(of_teachers - 5 / 16 * np.log(0.2) - 11 / 16 * np.log(0.8), abs=1e-6)
    mean = np.exp(shares @ np.log(q))
    beside_mean = (p * np.log(p / (mean / mean.sum()))).sum()
    assert summed("reverse_kl") == pytest.approx(beside_mean - np.log(mean.sum()), abs=1e-6)


def following(numbers: list[int], seed: int = 0) -> list[Sequence]:
    """Sequences that a teacher reads in another way, each the teacher of its number."""
    rows = viewed(len(numbers), seed)
    return [replace(x, teacher=replace(x.teacher, number=n)) for x, n in zip(rows, numbers, strict=True) if x.teacher]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("numbers", [[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
def test_a_row_follows_the_teacher_that_it_names(numbers: list[int], packing: bool):
    """Each sequence beside its own teacher alone, from all logits; where nobody follows the first one, too."""
    rows = following(numbers)
    client, alone = several(None, length=72, rows=2)
    batch = pack(rows, 6, 24, packing)
    tokens = [[x for x in rows if x.teacher and x.teacher.number == n] for n in (0, 1)]
    counts = [sum(x.weight * x.loss_mask.sum() for x in some) for some in tokens]

    def loss(params: Any) -> jax.Array:
        each = zip(alone, tokens, counts, strict=True)
        return sum((n * alone_kl(x, params, some) for x, some, n in each if some), jnp.float32(0)) / sum(counts)

    value, wanted = jax.jit(jax.value_and_grad(loss))(client.learner.params)
    found = gradients(client, batch, GIVEN)
    assert found[0] == pytest.approx(float(value), rel=1e-5)
    assert_close(found[1], jax.device_get(wanted))
    read = client.logprobs(rows, "teacher", 0.8)
    for n, x in enumerate(rows):
        (own,) = alone[numbers[n]].logprobs([x], "teacher", 0.8)
        np.testing.assert_allclose(read[n], own, atol=1e-5)


def test_who_follows_whom_compiles_nothing_after_the_first_step():
    client, _ = several(None, length=72)
    client.step(pack(following([0, 1] * 4), 8, 24, packing=True), GIVEN)
    client.logprobs(following([0, 1] * 4), "teacher", size=8)[0]
    compilations = Compilations()
    for numbers in ([1] * 8, [0, 0, 0, 1], [1, 0, 1, 1, 1, 1]):
        client.step(pack(following(numbers, len(numbers)), 8, 24, packing=True), GIVEN)
        client.logprobs(following(numbers), "teacher", size=8)[0]
    assert compilations.since_warmup == 0


def test_shares_are_weights_over_their_sum():
    """Weights 1 and 3: 1/4 and 3/4. A row's own teacher has no share."""
    two = {"a": {"path": "a"}, "b": {"path": "b", "weight": 3}}
    config = TeacherConfig.model_validate({"by_name": two})
    assert config.shares == SHARES
    assert list(config.each) == ["teacher.by_name.a", "teacher.by_name.b"]
    assert TeacherConfig.model_validate(config.model_dump()) == config
    assert TeacherConfig(path="a").shares == (1.0,)
    two["b"].pop("weight")
    assert TeacherConfig.model_validate({"by_name": two, "column": "of"}).shares is None
