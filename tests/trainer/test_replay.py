"""Routing replay in training: the policy uses the given experts, its router learns through them, and others choose."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.marks import slow
from tests.trainers import PLAIN, sequences, trainer
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.models.config import Experts
from tunix.models.families.table import small
from tunix.models.moe import MixtureOfExperts
from tunix.types import Loss, LossInputs, LossOutputs, Sequence, Term

pytestmark = pytest.mark.models

CONFIG = replace(
    small("qwen3_moe"), vocab_size=96, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn=8,
    experts=Experts(6, 2),
)  # fmt: skip


def given_to(sequence: Sequence, seed: int) -> Sequence:
    """The sequence with two different experts for each token and layer, as a sampler might have recorded them."""
    rng = np.random.default_rng(seed)
    shape = len(sequence.tokens), CONFIG.num_layers
    ranks = np.argsort(rng.random((*shape, 6)), axis=-1)
    return replace(sequence, experts=ranks[..., :2].astype(np.int16))


def likelihood(inputs: LossInputs) -> LossOutputs:
    return LossOutputs({"nll": Term(-inputs.logprobs)})


def above_reference(inputs: LossInputs) -> LossOutputs:
    assert inputs.reference_logprobs is not None
    return LossOutputs({"nll": Term(-inputs.logprobs)}, metrics={"reference": inputs.reference_logprobs})


@pytest.mark.parametrize("renormalise", [True, *slow([False])])
def test_given_experts_are_mixed_by_their_own_scores_and_the_router_learns_through_them(renormalise):
    moe = MixtureOfExperts(replace(CONFIG, experts=Experts(6, 2, renormalise)), nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 5, 16))
    given = jnp.array([[[0, 1], [5, 2], [-1, -1], [3, 4], [2, 0]]])
    graph, state = nnx.split(moe)

    def by_hand(state, x):
        one = nnx.merge(graph, state)
        scores = jax.nn.softmax(x @ one.router.w[...])
        own = jnp.argsort(-scores, axis=-1)[..., :2]
        used = jax.nn.one_hot(jnp.where(given < 0, own, given), 6).sum(-2)
        weights = scores * used
        weights = weights / weights.sum(-1, keepdims=True) if renormalise else weights
        gate = jnp.einsum("btd,edf->btef", x, one.gates.w[...])
        up = jnp.einsum("btd,edf->btef", x, one.ups.w[...])
        return jnp.einsum("btef,efd,bte->btd", jax.nn.silu(gate) * up, one.downs.w[...], weights)

    aim = jax.random.normal(jax.random.key(2), x.shape)
    mixed = jax.jit(lambda s, given: nnx.merge(graph, s)(x, replayed=given)[0])
    ours = jax.jit(jax.value_and_grad(lambda s: jnp.sum(aim * mixed(s, given))))(state)
    theirs = jax.jit(jax.value_and_grad(lambda s: jnp.sum(aim * by_hand(s, x))))(state)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert float(jnp.abs(ours[1]["router"]["w"][...]).max()) > 1e-3
    unlike = float(jnp.abs(mixed(state, jnp.full_like(given, -1)) - mixed(state, given)).max())
    assert unlike > 1e-2, "the router would have chosen these anyway"


def test_rows_carry_the_experts_of_their_tokens():
    one, two, three = sequences(3)
    one, two = given_to(one, 1), given_to(two, 2)
    batch = pack([one, two, three], 3, 64, packing=True)
    assert batch.experts is not None
    assert batch.experts.shape == (*batch.tokens.shape, 2, 2)
    for number, sequence in enumerate((one, two, three)):
        here = (np.asarray(batch.segment_ids) > 0) & (np.asarray(batch.sequence_ids) == number)
        found = np.asarray(batch.experts)[here]
        assert np.all(found == -1) if sequence.experts is None else np.array_equal(found, sequence.experts)
    assert np.all(np.asarray(batch.experts)[np.asarray(batch.segment_ids) == 0] == -1)
    assert pack([three], 3, 64, packing=True).experts is None


def test_log_probs_and_updates_of_the_policy_replay_and_those_of_its_reference_do_not():
    client = trainer(CONFIG, reference=True, router_aux_loss_coef=0.0)
    plain = sequences(4)
    routed = [given_to(one, seed) for seed, one in enumerate(plain)]
    own, replayed = list(client.logprobs(plain)), list(client.logprobs(routed))
    assert max(np.abs(a - b).max() for a, b in zip(own, replayed, strict=True)) > 1e-3
    of = list(client.logprobs(routed, of="reference"))
    for one, other in zip(own, of, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    loss = Loss(above_reference, reference=True)
    metrics = client.step(pack(routed, 4, 24, packing=True), loss)
    counted = [(x.loss_mask, x.weight) for x in plain]

    def mean(values: list[np.ndarray]) -> float:
        total = sum(weight * mask.sum() for mask, weight in counted)
        return sum(w * x[mask].sum() for x, (mask, w) in zip(values, counted, strict=True)) / total

    np.testing.assert_allclose(float(metrics["train/loss"]), -mean(replayed), rtol=1e-5)
    np.testing.assert_allclose(float(metrics["reference"]), mean(own), rtol=1e-5)


def test_entropy_and_reference_are_over_the_set_or_the_whole():
    """Of tokens that were drawn from three ids: the set's log-probs stay, and others are those of all ids, in the step
    as in a pass of its own."""
    client = trainer(PLAIN, reference=True)
    plain = sequences(4)
    rng = np.random.default_rng(0)
    cut = [
        replace(
            x, candidates=np.concatenate([x.tokens[:, None], rng.integers(0, 96, (len(x.tokens), 2))], 1).astype("i4")
        )
        for x in plain
    ]
    among, of_all = list(client.logprobs(cut)), list(client.logprobs(plain))

    def look(inputs: LossInputs) -> LossOutputs:
        assert inputs.reference_logprobs is not None
        assert inputs.entropy is not None
        whole = inputs.logprobs if inputs.whole_logprobs is None else inputs.whole_logprobs
        seen = {"among": inputs.logprobs, "whole": whole, "reference": inputs.reference_logprobs}
        return LossOutputs({"none": Term(0 * inputs.logprobs)}, metrics={**seen, "entropy": inputs.entropy})

    def mean(values: list[np.ndarray]) -> float:
        total = sum(x.weight * x.loss_mask.sum() for x in plain)
        return sum(x.weight * y[x.loss_mask].sum() for x, y in zip(plain, values, strict=True)) / total

    def step(rows: list[Sequence], whole: bool = False, packing: bool = True):
        return client.step(pack(rows, 4, 24, packing), Loss(look, entropy=True, reference=True, whole=whole))

    of_set, of_whole, without = step(cut), step(cut, whole=True), step(plain)
    assert mean(among) - mean(of_all) > 1
    for found, expected in (of_set, among), (of_whole, of_all):
        np.testing.assert_allclose([float(found["whole"]), float(found["reference"])], mean(expected), rtol=1e-5)
        np.testing.assert_allclose(float(found["among"]), mean(among), rtol=1e-5)
    np.testing.assert_allclose(float(of_whole["entropy"]), float(without["entropy"]), rtol=1e-5)
    assert float(of_set["entropy"]) < np.log(3) < float(of_whole["entropy"])
    alone = step(cut, whole=True, packing=False)
    for name in ("among", "whole", "reference", "entropy"):
        np.testing.assert_allclose(float(alone[name]), float(of_whole[name]), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8}, {"expert": 2, "fsdp": 4}, {"tensor": 2, "expert": 2, "fsdp": 2}, {"context": 2, "fsdp": 4}]
)
@pytest.mark.parametrize("remat", ["none", "block"])
def test_meshes_and_remat_change_nothing(mesh, remat):
    routed = [given_to(one, seed) for seed, one in enumerate(sequences(8))]
    alone = trainer(CONFIG, rows=8)
    many = trainer(CONFIG, rows=8, devices=8, mesh=MeshConfig(**mesh), remat=remat)
    for one, other in zip(alone.logprobs(routed), many.logprobs(routed), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    batch = pack(routed, 8, 24, packing=True, multiple=8)
    found = [client.step(batch, Loss(likelihood))["train/grad_norm"] for client in (alone, many)]
    np.testing.assert_allclose(float(found[0]), float(found[1]), rtol=1e-4)
