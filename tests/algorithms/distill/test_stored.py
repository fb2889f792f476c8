"""Log-probs of a teacher that were stored: the same divergence as beside the teacher, without one."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.models.divergence import Side, Stored, compared
from tunix.types import Divergence

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("number", [5, 20])
def test_stored_log_probs_are_the_teachers_likeliest_ids_and_a_bucket(kind: Kind, number: int):
    """Value and gradient are those beside the teacher with `top_k`. An id may be stored twice, as the batch's own
    token is."""
    rng = np.random.default_rng(0)
    hidden, table, theirs, other = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 7, 8), (40, 8), (3, 7, 6), (40, 6))
    )
    theirs = 0.5 * theirs
    targets = jnp.asarray(rng.integers(0, 40, (3, 7)))
    needed = jnp.asarray(rng.random((3, 7)) < 0.7)
    log_q = jax.nn.log_softmax(theirs @ other.T)
    logprobs, ids = jax.lax.top_k(log_q, number)
    assert float((1 - jnp.exp(logprobs).sum(-1)).min()) > 1e-3
    ids, logprobs = (jnp.concatenate([x[..., :1], x], axis=-1) for x in (ids, logprobs))
    settings = Divergence(kind, 0.3, number)

    def value(hidden, table, teacher):
        found = compared(Side(hidden, table, 20.0), teacher, targets, needed, settings)
        return found.divergence.sum(), found

    each = [
        jax.jit(jax.value_and_grad(lambda h, t, x=x: value(h, t, x), argnums=(0, 1), has_aux=True))(hidden, table)
        for x in (Side(theirs, other, None), Stored(ids, logprobs))
    ]
    (dense, dense_gradients), (stored, stored_gradients) = each
    np.testing.assert_allclose(dense[1].divergence, stored[1].divergence, atol=2e-6)
    np.testing.assert_array_equal(dense[1].agreement, stored[1].agreement)
    for one, two in zip(dense_gradients, stored_gradients, strict=True):
        np.testing.assert_allclose(one, two, atol=5e-6)


def test_by_hand():
    """p = (1/2, 1/4, 1/4) and id 0 with 1/4 stored: the others have 3/4 beside 1/2, and KL(q || p) is
    1/4 ln 1/2 + 3/4 ln 3/2."""
    student = Side(jnp.log(jnp.array([[[0.5, 0.25, 0.25]]])), jnp.eye(3), None)
    teacher = Stored(jnp.zeros((1, 1, 1), int), jnp.log(jnp.full((1, 1, 1), 0.25)))
    one = jnp.zeros((1, 1), int)
    found = compared(student, teacher, one, one == 0, Divergence())
    assert float(found.divergence[0, 0]) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5), abs=1e-6)
    assert float(found.teacher_logprobs[0, 0]) == pytest.approx(np.log(0.25))


def test_what_is_left_of_one_is_no_less_than_its_rounding():
    """Stored q = (1, ...) of three ids beside p = (1/2, 1/4, 1/4): KL(p || q) = 1/2 ln 1/2 + 1/2 ln(1/2 / 1e-6)."""
    student = Side(jnp.log(jnp.array([[[0.5, 0.25, 0.25]]])), jnp.eye(3), None)
    one = jnp.zeros((1, 1), int)
    found = compared(student, Stored(one[..., None], jnp.zeros((1, 1, 1))), one, one == 0, Divergence("reverse_kl"))
    assert float(found.divergence[0, 0]) == pytest.approx(0.5 * np.log(0.5) + 0.5 * np.log(0.5e6), rel=1e-6)
