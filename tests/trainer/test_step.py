"""The compiled step: what a loss is divided by, and everything that must not change the result."""

from dataclasses import replace
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.trainers import PLAIN, RICH, sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import LOSS_WEIGHTS, OBSERVED, MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.lora.config import AdapterConfig
from tunix.mesh import build_mesh, compiler_options
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.perf import Compilations
from tunix.trainer.step import reduce
from tunix.types import Batch, Loss, LossOutputs, Sequence, Term
from tunix.util.exact import jit

SFT_LOSS = SFT(SFTConfig()).objective


def gradients(client, batch: Batch, loss=SFT_LOSS) -> tuple[float, dict[str, np.ndarray]]:
    """The batch's loss and its gradients."""
    metrics = client.forward_backward(batch, loss)
    found, client.learner.gradients = client.learner.gradients, None
    return float(metrics["train/loss"]), jax.device_get(found)


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float = 2e-5) -> None:
    """Equal within `tolerance` of each array's own size."""
    assert one.keys() == other.keys()
    for name, right in other.items():
        size = np.abs(right).max()
        np.testing.assert_allclose(one[name], right, atol=tolerance * max(size, 1e-6), rtol=0, err_msg=name)


def test_products_of_float32_go_to_the_faster_library_and_those_of_bfloat16_stay_where_the_samplers_are():
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])

    def ynnpack(options: dict, dtype: str) -> bool:
        x = jnp.ones((128, 128), dtype)
        product = jax.jit(lambda a, b: a @ b, compiler_options=options)
        return "__ynn_fusion" in product.lower(x, x).compile().as_text()

    assert ynnpack({}, "float32")
    assert not ynnpack(compiler_options(mesh, "float32"), "float32")
    assert ynnpack({}, "bfloat16")
    assert ynnpack(compiler_options(mesh, "bfloat16"), "bfloat16")


def test_the_matrices_of_all_layers_are_never_held_in_float32():
    options = compiler_options(build_mesh(MeshConfig(), jax.devices()[:1]), "bfloat16")
    layers, dim, rows = 16, 256, 8
    shape = jax.ShapeDtypeStruct

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    def temporaries(options: dict) -> int:
        step = jit(jax.grad(loss), options=options)
        compiled = step.lower(shape((layers, dim, dim), jnp.bfloat16), shape((rows, dim), jnp.bfloat16)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    of_all = 4 * layers * dim**2
    if version("jaxlib").startswith("0.10."):  # later ones do not hold them anyway
        assert temporaries({}) > of_all
    assert temporaries(options) < of_all / 4


def test_the_norm_of_bfloat16_gradients_is_that_of_float32():
    """Of weights stored in bfloat16 the gradients have that type; each leaf's norm would have three digits, and so
    would their sum."""
    client = trainer(PLAIN, param_dtype="bfloat16", dtype="bfloat16")
    batch = pack(sequences(4), 4, 64, packing=True)
    _, found = gradients(client, batch)
    assert {x.dtype for x in found.values()} == {jnp.dtype(jnp.bfloat16)}
    exact = np.sqrt(sum(np.sum(np.square(x.astype(np.float64))) for x in found.values()))
    assert float(client.step(batch, SFT_LOSS)["train/grad_norm"]) == pytest.approx(exact, rel=1e-5)


def two_sequences(weights: tuple[float, float, float] | None = None) -> Batch:
    """A: 4 tokens, 2 of them trained, weight 1. B: 3 tokens, 1 trained, weight 3. One packed row of 8.

    Args:
        weights: by which the trained tokens count; another number stands where nothing is trained.
    """
    own = [{}, {}] if weights is None else [{LOSS_WEIGHTS: np.array([9.0, 9.0, *weights[:2]])}]
    own = own if weights is None else [*own, {LOSS_WEIGHTS: np.array([9.0, weights[2], 9.0])}]
    a = Sequence(np.array([5, 6, 7, 8], np.int32), np.array([False, False, True, True]), 1.0, own[0])
    b = Sequence(np.array([9, 1, 2], np.int32), np.array([False, True, False]), 3.0, own[1])
    return pack([a, b], 2, 8, packing=True)


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        # nll of A's trained tokens 1 and 2, of B's 4.
        ("tokens", (1 * 1 + 1 * 2 + 3 * 4) / (1 * 2 + 3 * 1)),  # 15 / 5 = 3
        ("sequences", (1 * (1 + 2) / 2 + 3 * 4 / 1) / (1 + 3)),  # 13.5 / 4 = 3.375
        (10.0, (1 * (1 + 2) / 10 + 3 * 4 / 10) / (1 + 3)),  # Dr. GRPO's constant: 1.5 / 4 = 0.375
    ],
)
def test_terms_are_divided_as_written_by_hand(over, expected):
    assert reduced_by_hand(two_sequences(), over) == pytest.approx(expected)
    assert reduced_by_hand(two_sequences((1.0, 1.0, 1.0)), over) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        # A's tokens count 1/2 and 1/4, B's 2: numerators 1/2 * 1 + 1/4 * 2 = 1 and 2 * 4 = 8, lengths 3/4 and 2.
        ("tokens", (1 * 1 + 3 * 8) / (1 * 0.75 + 3 * 2)),
        ("sequences", (1 * 1 / 0.75 + 3 * 8 / 2) / (1 + 3)),
        (10.0, (1 * 1 / 10 + 3 * 8 / 10) / (1 + 3)),
    ],
)
def test_a_token_counts_with_its_weight_above_and_below_the_line(over, expected):
    assert reduced_by_hand(two_sequences((0.5, 0.25, 2.0)), over) == pytest.approx(expected)


def reduced_by_hand(batch: Batch, over) -> float:
    """Of values 1 and 2 at A's trained tokens and 4 at B's."""
    values = np.full(batch.tokens.shape, np.inf, np.float32)  # whatever lies outside of the mask must not matter
    order = {(0, 2): 1.0, (0, 3): 2.0, (1, 1): 4.0}
    for (sequence, position), value in order.items():
        mine = (batch.sequence_ids == sequence) & (batch.segment_ids > 0) & (batch.positions == position)
        values[mine] = value
    return float(reduce(Term(jnp.asarray(values), over), jax.tree.map(jnp.asarray, batch)))


@pytest.mark.parametrize(
    ("config", "reduction"),
    [
        pytest.param(RICH, "tokens", id="tokens-rich", marks=pytest.mark.slow),
        pytest.param(PLAIN, "sequences", id="sequences-plain", marks=pytest.mark.slow),
        pytest.param(PLAIN, "tokens", id="tokens-plain"),
        pytest.param(RICH, "sequences", id="sequences-rich", marks=pytest.mark.slow),
    ],
)
def test_packing_and_passes_do_not_change_loss_or_gradients(config, reduction):
    loss = SFT(SFTConfig(reduction=reduction, neftune_alpha=5.0)).objective
    rows = sequences(9)
    whole = gradients(trainer(config, rows=9), pack(rows, 9, 24, packing=False), loss)
    for rows_of_microbatch, packing in ((9, True), (2, True), (1, False), (4, False)):
        value, found = gradients(trainer(config, rows=rows_of_microbatch), pack(rows, 9, 24, packing), loss)
        assert value == pytest.approx(whole[0], rel=1e-5)
        assert_close(found, whole[1])


def test_a_batch_with_room_left_is_the_smaller_batch():
    rows = sequences(5)
    small = gradients(trainer(), pack(rows, 5, 24, packing=True))
    large = gradients(trainer(), pack(rows, 12, 24, packing=True))
    assert large[0] == pytest.approx(small[0], rel=1e-6)
    assert_close(large[1], small[1])


def test_weight_zero_leaves_a_sequence_out_and_doubling_all_weights_changes_nothing():
    rows = sequences(6)
    without = gradients(trainer(), pack(rows[:-1], 6, 24, packing=True))
    silenced = gradients(trainer(), pack([*rows[:-1], replace(rows[-1], weight=0.0)], 6, 24, packing=True))
    assert silenced[0] == pytest.approx(without[0], rel=1e-6)
    assert_close(silenced[1], without[1])
    doubled = gradients(trainer(), pack([replace(r, weight=2 * r.weight) for r in rows[:-1]], 6, 24, packing=True))
    assert doubled[0] == pytest.approx(without[0], rel=1e-6)


def test_untrained_tokens_at_the_end_are_inert_and_prompts_are_not():
    row = sequences(1)[0]
    mask = np.zeros_like(row.loss_mask)
    mask[2] = True
    batch = pack([replace(row, loss_mask=mask)], 1, 24, packing=True)
    after, before = row.tokens.copy(), row.tokens.copy()
    after[3:] = (after[3:] + 1) % 96
    before[1] = (before[1] + 1) % 96
    same = gradients(trainer(), pack([replace(row, tokens=after, loss_mask=mask)], 1, 24, packing=True))[0]
    other = gradients(trainer(), pack([replace(row, tokens=before, loss_mask=mask)], 1, 24, packing=True))[0]
    base = gradients(trainer(), batch)[0]
    assert same == base
    assert other != base


@pytest.mark.parametrize(
    ("config", "mesh"), [(PLAIN, {"fsdp": 4, "tensor": 2}), *slow([(RICH, {"data": 2, "fsdp": 2, "tensor": 2})])]
)
@pytest.mark.models
def test_eight_devices_give_the_losses_of_one(config, mesh):
    one, eight = trainer(config), trainer(config, devices=8, mesh=MeshConfig(**mesh))
    for seed in range(4):
        batch = pack(sequences(8, seed), 8, 24, packing=True)
        alone, together = one.step(batch, SFT_LOSS), eight.step(batch, SFT_LOSS)
        assert float(together["train/loss"]) == pytest.approx(float(alone["train/loss"]), abs=1e-4)
        assert float(together["train/grad_norm"]) == pytest.approx(float(alone["train/grad_norm"]), rel=1e-3)
    table = eight.state.params["embed/w"]
    split = MeshConfig(**mesh).tensor * max(MeshConfig(**mesh).fsdp, 1)
    assert table.addressable_shards[0].data.size == table.size // split
    assert jax.tree.leaves(eight.state.moments)[1].sharding.mesh.size == 8


def test_step_is_forward_backward_then_optim_step():
    fused, apart = trainer(), trainer()
    for seed in range(3):
        batch = pack(sequences(6, seed), 6, 24, packing=True)
        loss = float(fused.step(batch, SFT_LOSS)["train/loss"])
        assert float(apart.forward_backward(batch, SFT_LOSS)["train/loss"]) == pytest.approx(loss, rel=1e-6)
        apart.optim_step()
    assert_close(jax.device_get(apart.state.params), jax.device_get(fused.state.params), 1e-5)
    with pytest.raises(ValueError, match="forward_backward first"):
        apart.optim_step()


def test_gradients_add_up_until_they_are_applied():
    batches = [pack(sequences(4, seed), 4, 24, packing=True) for seed in (0, 1)]
    alone = [gradients(trainer(), batch)[1] for batch in batches]
    client = trainer()
    for batch in batches:
        client.forward_backward(batch, SFT_LOSS)
    assert_close(jax.device_get(client.learner.gradients), {name: alone[0][name] + alone[1][name] for name in alone[0]})


def test_nothing_compiles_after_the_first_step():
    client = trainer()
    client.step(pack(sequences(8, 0), 8, 24, packing=True), SFT_LOSS)
    compilations = Compilations()
    for seed in range(1, 5):  # other numbers of rows, and a batch that is not full
        client.step(pack(sequences(8 - seed, seed), 8, 24, packing=True), SFT_LOSS)
    assert compilations.since_warmup == 0


def test_only_the_adapter_trains_and_the_base_stays_where_it_was():
    client = trainer(adapter=AdapterConfig(rank=4, targets=("q_proj", "down_proj")))
    base = {name: (x.unsafe_buffer_pointer(), np.asarray(x)) for name, x in client.learner.frozen.items()}
    start = jax.device_get(client.state.params)
    assert {name.rsplit("/", 1)[0] for name in start} == {"layers/q", "layers/down"}
    for seed in range(3):
        client.step(pack(sequences(8, seed), 8, 24, packing=True), SFT_LOSS)
    for name, (pointer, values) in base.items():
        assert client.learner.frozen[name].unsafe_buffer_pointer() == pointer
        np.testing.assert_array_equal(client.learner.frozen[name], values)
    assert all(np.any(start[name] != np.asarray(x)) for name, x in client.state.params.items())


def test_the_reference_is_the_base_under_the_adapter():
    rows = sequences(5)
    client, plain = trainer(adapter=AdapterConfig(rank=4)), trainer()
    start = client.logprobs(rows)
    for found, reference in zip(start, client.logprobs(rows, of="reference"), strict=True):
        np.testing.assert_allclose(found, reference, atol=1e-6)  # B is zero: the policy starts at the reference
    client.step(pack(rows, 5, 24, packing=True), SFT_LOSS)
    for before, after, now in zip(start, client.logprobs(rows, of="reference"), client.logprobs(rows), strict=True):
        np.testing.assert_allclose(after, before, atol=1e-6)
        assert np.abs(now - before).max() > 1e-3
    inputs = client.learner._inputs(pack(rows, 5, 24, packing=True), replace(SFT_LOSS, reference=True))
    assert inputs.base, "an adapter has one"
    assert inputs.reference == {}, "a step is given it once"
    with pytest.raises(ValueError, match="no reference"):
        plain.logprobs(rows, of="reference")


def test_logprobs_are_those_of_the_loss_and_of_each_sequence_alone():
    rows = sequences(7)
    client = trainer(RICH)
    found = client.logprobs(rows)
    for row, logprobs in zip(rows, found, strict=True):
        alone = client.logprobs([row])[0]
        np.testing.assert_allclose(logprobs, alone, atol=1e-5)
        assert logprobs[0] == 0
        assert len(logprobs) == len(row.tokens)
    weighted = sum(r.weight * -x[r.loss_mask].sum() for r, x in zip(rows, found, strict=True))
    count = sum(r.weight * r.loss_mask.sum() for r in rows)
    loss = client.evaluate([pack(rows[:4], 4, 24, packing=True), pack(rows[4:], 4, 24, packing=True)], SFT_LOSS)
    assert loss["eval/loss"] == pytest.approx(weighted / count, rel=1e-5)


def test_evaluation_has_no_noise():
    batch = pack(sequences(6), 6, 24, packing=True)
    noisy = SFT(SFTConfig(neftune_alpha=20.0)).objective
    client = trainer()
    assert client.evaluate([batch], noisy) == client.evaluate([batch], SFT_LOSS)
    assert float(client.forward_backward(batch, noisy)["train/loss"]) != client.evaluate([batch], noisy)["eval/loss"]


def test_observed_tokens_have_log_probs_and_a_mean_of_their_own():
    """The loss over observed tokens is SFT's where these are the trained ones; packed or not, in one pass or two."""
    rows = sequences(6)
    observed = [replace(x, loss_mask=~x.loss_mask & (np.arange(len(x.tokens)) > 0)) for x in rows]
    marked = [
        replace(x, per_token={OBSERVED: y.loss_mask.astype(np.float32)}) for x, y in zip(rows, observed, strict=True)
    ]
    loss = Loss(lambda inputs: LossOutputs({"seen": Term(-inputs.logprobs, "observed")}))
    expected = gradients(trainer(), pack(observed, 6, 24, packing=True))
    for packing in (True, False):
        value, found = gradients(trainer(rows=4), pack(marked, 6, 24, packing=packing), loss)
        assert value == pytest.approx(expected[0], rel=1e-5)
        assert_close(found, expected[1])


@pytest.mark.slow
def test_label_smoothing_is_the_cross_entropy_with_a_smoothed_target():
    """As transformers' LabelSmoother, from all logits; an evaluation has none, and softcapped logits are refused."""
    batch, client = pack(sequences(6), 6, 24, packing=True), trainer()
    smoothed = SFT(SFTConfig(label_smoothing=0.2)).objective
    model, kept = client.learner.spec.model, jnp.asarray(batch.weights)[batch.sequence_ids] * batch.loss_mask

    def expected(params):
        hidden = model.forward(params, *map(jnp.asarray, (batch.tokens, batch.positions, batch.segment_ids)))[0]
        log_p = jnp.pad(jax.nn.log_softmax(model.logits(params, hidden))[:, :-1], ((0, 0), (1, 0), (0, 0)))
        taken = jnp.take_along_axis(log_p, jnp.asarray(batch.tokens)[..., None], -1)[..., 0]
        return -jnp.sum(kept * (0.8 * taken + 0.2 * jnp.mean(log_p, -1))) / jnp.sum(kept)

    value, slopes = jax.value_and_grad(expected)(client.learner.params)
    loss, found = gradients(client, batch, smoothed)
    assert loss == pytest.approx(float(value), rel=1e-5)
    assert loss != pytest.approx(gradients(client, batch)[0], rel=1e-3)
    assert_close(found, jax.device_get(slopes))
    assert client.evaluate([batch], smoothed) == client.evaluate([batch], SFT_LOSS)
    with pytest.raises(UserError, match="logits are softcapped"):
        gradients(trainer(replace(PLAIN, logit_softcap=30.0)), batch, smoothed)


@pytest.mark.slow
def test_rematerialised_layers_give_the_same_gradients():
    batch = pack(sequences(6), 6, 24, packing=True)
    assert_close(gradients(trainer(RICH, remat="block"), batch)[1], gradients(trainer(RICH), batch)[1], 1e-5)


@pytest.mark.slow
def test_bf16_computes_near_f32_and_keeps_f32_masters():
    batch = pack(sequences(8), 8, 24, packing=True)
    exact, half = trainer(), trainer(dtype="bfloat16")
    losses = [[float(one.step(batch, SFT_LOSS)["train/loss"]) for one in (exact, half)] for _ in range(5)]
    assert all(x.dtype == jnp.float32 for x in half.state.params.values())
    for right, found in losses:
        assert found == pytest.approx(right, rel=2e-2)
    all_half = trainer(dtype="bfloat16", param_dtype="bfloat16", rows=1)
    all_half.step(batch, SFT_LOSS)
    assert all(x.dtype == jnp.bfloat16 for x in all_half.state.params.values())
    assert {str(x.dtype) for x in jax.tree.leaves(all_half.state.moments)} == {"int32", "float32"}


@pytest.mark.parametrize("name", ["adamw", "muon", *slow(["adafactor", "lion", "sgd"])])
def test_every_optimizer_learns_by_heart(name):
    rate = {"adamw": 1e-2, "adafactor": 1e-2, "lion": 2e-3, "muon": 1e-2, "sgd": 3.0}[name]
    client = trainer(optimizer=OptimizerConfig(name=name, learning_rate=rate, schedule="constant", weight_decay=0.01))
    batch = pack(sequences(4), 4, 24, packing=True)
    losses = [float(client.step(batch, SFT_LOSS)["train/loss"]) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


HUGE = 3e38
"""A weight with which the loss of a sequence, and its gradients, are not finite in float32."""
SKIPS = {
    "adamw": {},
    "muon": {"name": "muon", "clip_norm": None},
    "an adapter": {"moments_dtype": "bfloat16", "b2": 0.99},
}


def skipper(kind: str):
    """A trainer that skips, with a rate that rises so that a schedule that has moved on would be seen."""
    config = OptimizerConfig(learning_rate=1e-2, warmup=5, on_nonfinite="skip", **SKIPS[kind])
    adapter = AdapterConfig(rank=2) if kind == "an adapter" else None
    return trainer(optimizer=config, adapter=adapter, rows=2)


def spoiled(batch: Batch) -> Batch:
    """The batch with a weight with which nothing is finite."""
    return replace(batch, weights=np.where(batch.weights > 0, HUGE, 0.0).astype(np.float32))


@pytest.mark.parametrize("kind", ["adamw", *slow(kind for kind in SKIPS if kind != "adamw")])
def test_an_update_that_is_not_finite_changes_nothing(kind: str):
    """Weights, moments and counts of the optimizer are those before, bit for bit, in a step of several micro-batches;
    the next update is then the one that would have been made without it."""
    first = pack(sequences(6), 6, 24)
    second = replace(first, tokens=(np.asarray(first.tokens) + 1) % 96)
    client, plain = skipper(kind), skipper(kind)
    plain.step(first, SFT_LOSS)
    client.step(first, SFT_LOSS)
    before = jax.device_get((client.state.params, client.state.moments))
    compilations = Compilations()
    compilations.settled()
    metrics = client.step(spoiled(first), SFT_LOSS)
    assert not np.isfinite(metrics["train/loss"])
    assert float(metrics["train/skipped"]) == 1.0
    after = jax.device_get((client.state.params, client.state.moments))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(client.state.step) == 2
    one, other = client.step(second, SFT_LOSS), plain.step(second, SFT_LOSS)
    assert compilations.since_warmup == 0
    assert {name: float(x) for name, x in one.items()} == {name: float(x) for name, x in other.items()}
    assert one["train/skipped"] == 0.0
    # Two of five updates of warm-up are done: the one that was skipped is none of them.
    assert float(one["train/learning_rate"]) == pytest.approx(2 / 5 * 1e-2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(client.state.params), jax.device_get(plain.state.params))


@pytest.mark.slow
def test_gradients_that_were_added_up_are_skipped_as_a_whole():
    """One of two parts is not finite; a loss that is none without gradients that tell counts too."""
    batch = pack(sequences(6), 6, 24)
    client = skipper("adamw")
    before = jax.device_get(client.state.params)
    for spoils in (spoiled, lambda batch: batch):
        client.forward_backward(spoils(batch), SFT_LOSS)
    assert client.optim_step()["train/skipped"] == 1.0
    flat = replace(SFT_LOSS, function=lambda inputs: LossOutputs({"x": Term(0 * inputs.logprobs + jnp.inf)}))
    for result in (client.step(batch, flat), (client.forward_backward(batch, flat), client.optim_step())[1]):
        assert result["train/skipped"] == 1.0
        assert np.isfinite(result["train/grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(client.state.params), before)


@pytest.mark.slow
def test_without_an_accident_skip_trains_as_stop_does():
    batch = pack(sequences(6), 6, 24)
    clients = [trainer(optimizer=OptimizerConfig(learning_rate=1e-2, on_nonfinite=x), rows=2) for x in ("stop", "skip")]
    for client in clients:
        for _ in range(2):
            client.step(batch, SFT_LOSS)
    assert "train/skipped" not in clients[0].step(batch, SFT_LOSS)
    clients[1].step(batch, SFT_LOSS)
    one, other = (jax.device_get(client.state) for client in clients)
    jax.tree.map(np.testing.assert_array_equal, one, other)
