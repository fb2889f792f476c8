"""A sequence of weight 0 reaches neither the value nor the gradient of any loss, whatever stands at it.

A NaN would: 0 x NaN is NaN, and a mask behind the loss does not silence the gradient in front of it. Rollouts, pairs
and labelled rows are those of the losses' own tests, with one sequence (or pair) of weight 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import preference_batches
from tests.algorithms.dpo.test_dpo_loss import FAMILY as FORMS
from tests.algorithms.dpo.test_dpo_loss import loss_of as dpo
from tests.algorithms.dpo.test_dpo_loss import many as pairs
from tests.algorithms.grpo.test_grpo_loss import FAMILY, rollouts
from tests.algorithms.grpo.test_grpo_loss import loss_of as grpo
from tests.algorithms.kto.test_kto import LOSS as KTO
from tests.algorithms.kto.test_kto import many as labelled
from tests.algorithms.ppo.test_ppo_loss import ppo
from tests.algorithms.ppo.test_ppo_loss import rollouts as valued
from tests.algorithms.reward.test_reward_loss import SCORES, algorithm
from tests.algorithms.reward.test_reward_loss import inputs as scored
from tests.policy_batches import batch_of, inputs_of, reduced
from tunix.algorithms.distill.loss import distill_loss, sampled_loss
from tunix.algorithms.sft.loss import sft_loss
from tunix.trainer.step import loss_sums, reduce
from tunix.types import Compared, LossInputs, LossOutputs, Term

BAD = [float("nan"), float("inf"), -float("inf")]


def careless(inputs: LossInputs) -> LossOutputs:
    """What a user may write: products and quotients of everything, and no thought of masks."""
    named = inputs.batch.per_token
    ratio = jnp.exp(inputs.logprobs - named["old_logprobs"])
    assert inputs.entropy is not None
    out = LossOutputs({"policy": Term(-ratio * named["advantages"], "sequences")})
    return out.add("entropy", -0.01 * inputs.entropy * named["advantages"] ** 2)


def spoiled(inputs: LossInputs, value: float, left_out: np.ndarray) -> LossInputs:
    """The same with `value` at all that belongs to the sequences that are left out, `[S]` bool."""
    place = jnp.asarray(left_out)[jnp.asarray(inputs.batch.sequence_ids)]

    def bad(x):
        return None if x is None else jnp.where(place, value, x)

    batch = replace(
        inputs.batch,
        per_token={name: bad(x) for name, x in inputs.batch.per_token.items()},
        per_sequence={name: jnp.where(left_out, value, x) for name, x in inputs.batch.per_sequence.items()},
    )
    return replace(
        inputs,
        batch=batch,
        logprobs=bad(inputs.logprobs),
        entropy=bad(inputs.entropy),
        values=bad(inputs.values),
        reference_logprobs=bad(inputs.reference_logprobs),
        compared=jax.tree.map(bad, inputs.compared),
    )


def assert_inert(losses: Mapping[str, Callable], inputs: LossInputs, over: str = "logprobs") -> None:
    """Bad values at what is left out change nothing, to the last bit, and its own gradient is 0."""
    inputs = jax.tree.map(jnp.asarray, inputs)
    left_out = np.asarray(inputs.batch.weights) == 0
    assert left_out.any()

    def found(loss: Callable, inputs: LossInputs):
        def total(x: jax.Array):
            sums = loss_sums(loss, replace(inputs, **{over: x}))
            return sums["train/loss"], sums

        return jax.grad(total, has_aux=True)(getattr(inputs, over))

    # One program for all of them, which share most of it.
    every = jax.jit(lambda inputs: {name: found(loss, inputs) for name, loss in losses.items()})
    clean, *dirty = (jax.device_get(every(x)) for x in (inputs, *(spoiled(inputs, bad, left_out) for bad in BAD)))
    for name, (slopes, sums) in clean.items():
        assert all(np.isfinite(x).all() for x in (slopes, *jax.tree.leaves(sums))), name
        assert slopes.any(), name
        assert not slopes[left_out[inputs.batch.sequence_ids]].any(), name
        for other in dirty:
            jax.tree.map(partial(np.testing.assert_array_equal, err_msg=name), other[name], (slopes, sums))


def test_in_every_member_of_the_family_and_in_ones_own():
    losses = {"careless": careless, **{name: grpo(**settings) for name, settings in FAMILY.items()}}
    assert_inert(losses, inputs_of(batch_of(rollouts()), entropy=True))


def test_in_ppo():
    inputs = inputs_of(batch_of(valued()), entropy=True, values=True)
    coefficients = jnp.full(inputs.batch.weights.shape, 0.1)
    inputs = replace(inputs, batch=replace(inputs.batch, per_sequence={"kl_coefficient": coefficients}))
    policy = {
        "own": ppo(kl=0.1, kl_in="loss", entropy_bonus=0.01).loss,
        "adapted": ppo(kl=0.1, kl_in="loss", kl_target=3.0).loss,
        "shared": ppo(critic="shared").loss,
    }
    assert_inert(policy, inputs)
    assert_inert({"own": ppo().value_loss, "shared": ppo(critic="shared").loss}, inputs, "values")


def test_in_every_form_of_dpo():
    batch = preference_batches.batch_of(pairs())
    assert_inert({name: dpo(**settings) for name, settings in FORMS.items()}, preference_batches.inputs_of(batch))
    assert_inert({"asked before": dpo()}, preference_batches.inputs_of(batch, asked_before=True))


def test_in_kto():
    assert_inert(
        {"kto": KTO}, preference_batches.inputs_of(preference_batches.batch_of(labelled(), sequences_per_example=1))
    )


def test_in_distillation_and_supervised_training():
    inputs = inputs_of(batch_of(rollouts()), entropy=True)
    compared = Compared(*(jnp.abs(inputs.logprobs) * k for k in (1.0, -2.0, 0.5)))
    named = {**inputs.batch.per_token, "teacher_logprobs": inputs.batch.per_token["reference_logprobs"]}
    losses = {
        "given text": lambda x: distill_loss(x.compared, x.logprobs, temperature=2.0, sft_weight=0.5),
        "own text": lambda x: sampled_loss(
            x.logprobs, x.batch.per_token["old_logprobs"], x.batch.per_token["teacher_logprobs"], x.batch, "sequences"
        ),
        "supervised": lambda x: sft_loss(x.logprobs, "sequences"),
    }
    assert_inert(losses, replace(inputs, batch=replace(inputs.batch, per_token=named), compared=compared))


def test_in_reward_models():
    given = scored(SCORES, weights=(1.0, 0.0), margins=(0.5, 0.25))
    assert_inert({"reward": algorithm(centring=0.1).loss}, given, "values")


def test_of_a_pair_both_sides_count_where_one_does():
    """Pairs are weighted by their chosen side, whose loss reads the other: it stays as it is."""
    sides = pairs()
    lone = [*sides[:3], replace(sides[3], weight=0.0), *sides[4:]]
    inputs = [preference_batches.inputs_of(preference_batches.batch_of(x)) for x in (sides, lone)]
    (whole, other) = (reduced(dpo(), x) for x in inputs)
    assert other["train/loss"] == whole["train/loss"]


@pytest.mark.parametrize("over", ["tokens", "sequences", "pairs", 10.0])
def test_a_batch_in_which_nothing_counts_is_0_and_not_a_quotient(over):
    taken = [replace(one, weight=0.0) for one in rollouts()]
    batch = batch_of(taken)
    batch = replace(batch, counts={**batch.counts, "pairs": np.float32(0)})
    values = jnp.full(3 if over == "pairs" else batch.tokens.shape, 2.0)
    value, slope = jax.value_and_grad(lambda x: reduce(Term(x, over), batch))(values)
    assert value == 0
    assert not slope.any()
