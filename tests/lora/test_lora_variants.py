"""DoRA, PiSSA, LoRA+, dropout and tables beside an adapter: each by hand, in training, in the engine, on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.marks import slow
from tests.trainers import PLAIN, RICH, sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.lora.adapt import merge
from tunix.lora.config import AdapterConfig
from tunix.models.layers import Adapter, Projection, dropped
from tunix.recipe.recipe import Recipe
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.optimizer import build_optimizer
from tunix.types import Sampling, Sequence

pytestmark = pytest.mark.models

SFT_LOSS = SFT(SFTConfig()).objective
EVERYTHING = AdapterConfig(rank=2, ranks={"mlp.*": 3}, dora=True, start="pissa", also=("embed_tokens", "lm_head"))


def projection(adapter: Adapter, **weights: list) -> Projection:
    """Of two inputs and two outputs, W = [[3, 0], [4, 2]]."""
    made = Projection("BTD,DF->BTF", (2, 2), ("embed", "ffn"), nnx.Rngs(0), contracted=1)
    made.w[...] = jnp.array([[3.0, 0.0], [4.0, 2.0]])
    for name, value in weights.items():
        setattr(made, name, nnx.Param(jnp.array(value)))
    made.adapter = adapter
    return made


def test_dora_by_hand():
    weights = {"w_lora_a": [[1.0], [0.0]], "w_lora_b": [[0.0, 2.0]], "w_lora_m": [5.0, 2.0]}

    def outputs(m, b):
        layer = projection(Adapter(0.5, 0, magnitude=True), **{**weights, "w_lora_m": m, "w_lora_b": b})
        return layer(jnp.ones((1, 1, 2)))[0, 0]

    m, b = jnp.array([5.0, 2.0]), jnp.array([[0.0, 2.0]])
    # W + A B / 2 = [[3, 1], [4, 2]]; its columns have the lengths 5 and sqrt(5); x = (1, 1) gives 7 and 3 before.
    np.testing.assert_allclose(outputs(m, b), [7.0, 2 * 3 / 5**0.5], rtol=1e-6)
    by_m, by_b = jax.jacobian(outputs, (0, 1))(m, b)
    np.testing.assert_allclose(by_m, [[7 / 5, 0], [0, 3 / 5**0.5]], rtol=1e-6)
    # The length has no gradient: dy / dB is m / |column| times x A / 2 = 1 / 2.
    np.testing.assert_allclose(by_b[:, 0], [[0.5, 0], [0, 1 / 5**0.5]], rtol=1e-6)


def test_pissa_by_hand():
    """`y = x W + s (x A B - x A0 B0)`: only A and B move."""
    start = {"w_lora_a": [[2.0], [0.0]], "w_lora_b": [[1.0, 0.0]], "w_lora_a0": [[2.0], [0.0]]}

    def outputs(a, a0):
        layer = projection(
            Adapter(3.0, 0, anchored=True), **{**start, "w_lora_a": a, "w_lora_a0": a0, "w_lora_b0": [[-1.0, 0.0]]}
        )
        return layer(jnp.ones((1, 1, 2)))[0, 0]

    a = jnp.array([[2.0], [0.0]])
    np.testing.assert_allclose(outputs(a, a), [7, 2])  # x W
    np.testing.assert_allclose(outputs(a + 1, a), [7 + 3 * 2 * 1, 2])  # x dA = 1 + 1, times B and s = 3
    by_a, by_start = jax.jacobian(outputs, (0, 1))(a, a)
    np.testing.assert_allclose(by_a[0, :, 0], [3, 3])  # s x B
    assert not np.any(by_start)


def test_pissa_starts_at_the_largest_singular_vectors():
    settings = AdapterConfig(rank=3, alpha=6.0, start="pissa", targets=("k_proj",))
    client = trainer(adapter=settings)
    w, p = np.asarray(client.learner.frozen["layers/k/w"]), jax.device_get(client.state.params)
    for layer in range(PLAIN.num_layers):
        u, s, v = np.linalg.svd(w[layer].reshape(PLAIN.d_model, -1))
        a, b = p["layers/k/w_lora_a"][layer], p["layers/k/w_lora_b"][layer].reshape(3, -1)
        np.testing.assert_allclose(2.0 * a @ b, (u[:, :3] * s[:3]) @ v[:3], atol=1e-5)  # s = 6 / 3
        # Each takes the root of its singular value, over the scale: |A_i|^2 = |B_i|^2 = S_i / 2.
        np.testing.assert_allclose((a**2).sum(0), s[:3] / 2, rtol=1e-4)
        np.testing.assert_allclose((b**2).sum(1), s[:3] / 2, rtol=1e-4)


def test_lora_plus_by_hand():
    names = {"layers/q/w_lora_a": ("layers", "embed", "rank"), "layers/q/w_lora_b": ("layers", "rank", "heads", "head")}
    config = OptimizerConfig(name="sgd", learning_rate=0.1, schedule="constant", lora_plus=16.0, clip_norm=None)
    tx = build_optimizer(config, 10, names)
    ones = {name: jnp.ones(2) for name in names}
    updates, _ = tx.update(ones, tx.init(ones), ones)
    np.testing.assert_allclose(updates["layers/q/w_lora_a"], -0.1)  # the rate
    np.testing.assert_allclose(updates["layers/q/w_lora_b"], -1.6)  # 16 times it


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    keys = jax.random.split(jax.random.key(0), (4, 50))
    found = np.asarray(dropped(jnp.ones((4, 50, 100)), keys, Adapter(1.0, 2, dropout=0.25)))
    assert set(np.unique(found)) == {np.float32(0), np.float32(4 / 3)}
    # 20000 draws: their share has a standard deviation of sqrt(.25 .75 / 20000) = .003.
    assert np.mean(found == 0) == pytest.approx(0.25, abs=0.012)
    assert np.any(found != np.asarray(dropped(jnp.ones((4, 50, 100)), keys, Adapter(1.0, 3, dropout=0.25))))


@pytest.mark.slow
def test_dropout_is_the_same_however_a_batch_is_cut():
    batch = pack(sequences(8), 8, 24, packing=True)
    whole, parts = (dropping(rows=rows) for rows in (8, 2))
    losses = [float(client.step(batch, SFT_LOSS)["train/loss"]) for client in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    padded = pack(sequences(8), 8, 24, packing=False)
    assert float(dropping(rows=8).step(padded, SFT_LOSS)["train/loss"]) == pytest.approx(losses[0], abs=1e-5)
    assert float(dropping(rows=8).evaluate([padded], SFT_LOSS)["eval/loss"]) != pytest.approx(losses[0], abs=1e-3)


@pytest.mark.slow
def test_dropout_is_the_same_on_a_mesh():
    batch = pack(sequences(8), 8, 24, packing=True)
    spread = dropping(devices=8, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    alone = float(dropping(rows=8).step(batch, SFT_LOSS)["train/loss"])
    assert float(spread.step(batch, SFT_LOSS)["train/loss"]) == pytest.approx(alone, abs=1e-5)


def dropping(**how):
    """A trainer whose adapters drop half of what they read, some way from the start."""
    client = trainer(adapter=AdapterConfig(rank=4, dropout=0.5), **how)
    client.state = moved(client.state)
    return client


def moved(state):
    """Away from the start, where B is 0 and hides what dropout does."""
    params = {
        name: x if name.endswith("0") else x + 0.3 * jax.random.normal(jax.random.key(i), x.shape)
        for i, (name, x) in enumerate(sorted(state.params.items()))
    }
    return type(state)(params, state.moments, state.step)


@pytest.mark.parametrize("config", slow([PLAIN, RICH]), ids=["untied", "tied"])
def test_all_at_once_trains_samples_and_merges(config):
    """The engine reads the same log-probs as the trainer, the merged weights too, and the base is left alone."""
    client = trainer(config, adapter=EVERYTHING)
    rows = sequences(6)
    start = client.logprobs(rows)
    for found, reference in zip(start, client.logprobs(rows, of="reference"), strict=True):
        np.testing.assert_allclose(found, reference, atol=2e-5)  # the first step is the base's
    before = jax.device_get(client.state.params)
    for _ in range(2):
        client.step(pack(rows, 6, 24, packing=True), SFT_LOSS)
        client.publish()
    after = jax.device_get(client.state.params)
    still = {name for name in before if np.array_equal(before[name], after[name])}
    assert still == {name for name in before if name.endswith("0")}  # what PiSSA began as, and nothing else
    assert set(EVERYTHING.tables_in(config)) <= set(after)
    for found, reference in zip(start, client.logprobs(rows, of="reference"), strict=True):
        np.testing.assert_allclose(found, reference, atol=2e-5)
    drawn = client.sample([row.tokens[:4] for row in rows[:3]], 1, Sampling(max_tokens=6), seed=0)
    asked = [np.concatenate([row.tokens[:4], one.tokens]) for row, (one,) in zip(rows[:3], drawn, strict=True)]
    trained = client.logprobs([Sequence(x, np.ones(len(x), bool)) for x in asked])
    for logprobs, (one,) in zip(trained, drawn, strict=True):
        np.testing.assert_allclose(logprobs[4:], one.logprobs, atol=1e-5)
    merged = merge(client.learner.params, EVERYTHING)
    plain = trainer(config)
    plain.state = type(plain.state)(merged, plain.state.moments, plain.state.step)
    for found, expected in zip(plain.logprobs(rows), client.logprobs(rows), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow  # tests/lora/test_qlora.py trains an adapter on eight devices
def test_eight_devices_train_all_at_once_as_one_does():
    one, eight = (
        trainer(adapter=EVERYTHING),
        trainer(adapter=EVERYTHING, devices=8, mesh=MeshConfig(data=2, fsdp=2, tensor=2)),
    )
    for seed in range(3):
        batch = pack(sequences(8, seed), 8, 24, packing=True)
        alone, together = one.step(batch, SFT_LOSS), eight.step(batch, SFT_LOSS)
        assert float(together["train/loss"]) == pytest.approx(float(alone["train/loss"]), abs=1e-4)
    # Magnitudes live where their outputs do: q's four heads on two devices.
    m = eight.state.params["layers/q/w_lora_m"]
    assert m.addressable_shards[0].data.size == m.size // 2


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"adapter": {"dropout": 0.1}, "algorithm": {"name": "grpo"}},
            r"adapter\.dropout: 0\.1 would have the trainer",
        ),
        ({"optimizer": {"lora_plus": 16}}, r"optimizer\.lora_plus: changes nothing without an adapter"),
    ],
)
def test_recipes_in_which_a_variant_means_nothing_are_refused(sections, told):
    whole = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"functions": ["length"]}, "output": "o"}
    if "algorithm" not in sections:
        del whole["reward"]
    with pytest.raises(UserError, match=told):
        Recipe.build({**whole, **sections})


def test_a_tiny_model_takes_no_rank_that_its_matrices_lack():
    whole = {"model": {"path": "org/gemma-2-2b"}, "data": {"train": "t.jsonl"}, "output": "o"}
    recipe = Recipe.build({**whole, "adapter": {"rank": 256, "ranks": {"q_proj": 64, "mlp.*": 8}}})
    tiny = recipe.tiny().adapter
    assert tiny is not None
    # Its keys and values have 2 heads of 16.
    assert (tiny.rank, tiny.ranks) == (32, {"q_proj": 32, "mlp.*": 8})


def test_a_reward_model_has_no_head_to_train():
    whole = {"model": {"path": "m"}, "data": {"train": "t"}, "output": "o", "algorithm": {"name": "reward"}}
    with pytest.raises(UserError, match=r"adapter\.also: lm_head trains nothing"):
        Recipe.build({**whole, "adapter": {"also": ["lm_head"]}})
