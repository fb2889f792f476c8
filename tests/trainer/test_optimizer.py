"""Update rules, schedules and moments beside torch's, transformers' and what is written by hand."""

from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.optimization import Adafactor

from tests.trainers import PLAIN, StateClient, trainer
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.lora.config import AdapterConfig
from tunix.recipe.recipe import Recipe
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.config import CheckpointConfig, OptimizerConfig
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.trainer.perf import adapter_weights, training_flops
from tunix.trainer.step import TrainState
from tunix.types import Sequence

MATRIX = {"layers/up/w": ("layers", "embed", "ffn")}


def moments_of(state) -> dict[str, jax.Array]:
    """What is kept of each parameter, by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def test_moments_of_bfloat16_weights_still_move():
    """g = 1 once, then 0: v is 0.001 and falls by 0.999 each time, m is 0.1 and falls by 0.9."""
    tx = build_optimizer(OptimizerConfig(), 100, MATRIX)
    params = {"layers/up/w": jnp.ones((1, 2, 2), jnp.bfloat16)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(11):
        gradient = jnp.full((1, 2, 2), 0.5 if step == 0 else 0.0, jnp.bfloat16)  # of norm 1: not clipped
        _, state = update({"layers/up/w": gradient}, state, params)
    kept = moments_of(state)
    assert {str(x.dtype) for x in kept.values()} == {"int32", "float32"}
    (v,) = (x for path, x in kept.items() if "nu/" in path)
    (m,) = (x for path, x in kept.items() if "mu/" in path)
    np.testing.assert_allclose(v, 0.25 * 0.001 * 0.999**10, rtol=1e-5)
    np.testing.assert_allclose(m, 0.5 * 0.1 * 0.9**10, rtol=1e-5)


def test_muon_takes_each_experts_matrix_for_itself():
    axes = MATRIX | {"layers/ups/w": ("layers", "expert", "embed", "ffn")}
    many = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8, 6)), jnp.float32)

    def moved(name: str, gradient: jax.Array) -> jax.Array:
        tx = build_optimizer(OptimizerConfig(name="muon"), 10, {name: axes[name]})
        params = {name: jnp.ones_like(gradient)}
        return tx.update({name: gradient}, tx.init(params), params)[0][name]

    alone = jnp.stack([moved("layers/up/w", many[:, expert]) for expert in range(3)], axis=1)
    assert np.any(alone)
    np.testing.assert_allclose(moved("layers/ups/w", many), alone, rtol=1e-5, atol=1e-9)


def test_what_is_no_matrix_moves_under_muon_as_under_adamw():
    axes = {**MATRIX, "embed/w": ("vocab", "embed"), "layers/norm/w": ("layers", "embed")}
    generator = np.random.default_rng(0)
    params = {"layers/up/w": jnp.ones((2, 3, 4)), "embed/w": jnp.ones((5, 3)), "layers/norm/w": jnp.ones((2, 3))}
    gradients = [jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape)), params) for _ in range(3)]

    def moved(name: str) -> dict[str, jax.Array]:
        config = OptimizerConfig(name=name, schedule="constant", weight_decay=0.1, clip_norm=None)
        tx, state, updates = build_optimizer(config, 10, axes), None, {}
        for gradient in gradients:
            updates, state = tx.update(gradient, tx.init(params) if state is None else state, params)
        return updates

    muon, adamw = moved("muon"), moved("adamw")
    assert not np.allclose(muon["layers/up/w"], adamw["layers/up/w"], rtol=0.1)
    for name in ("embed/w", "layers/norm/w"):
        np.testing.assert_array_equal(muon[name], adamw[name])


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_moments_are_kept_in_what_the_recipe_says(name):
    """And nothing else is: counters stay whole numbers, Muon's coefficients what they are."""
    config = OptimizerConfig(name=name, b2=None if name == "lion" else 0.99, moments_dtype="bfloat16")
    axes = MATRIX | {"embed/w": ("vocab", "embed")}
    tx = build_optimizer(config, 100, axes)
    params = {"layers/up/w": jnp.ones((2, 3, 4)), "embed/w": jnp.ones((5, 3))}
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    kept = moments_of(state)
    assert all(x.dtype == jnp.bfloat16 for path, x in kept.items() if path.endswith("/w"))
    assert sum(path.endswith("/w") for path in kept) == {"adamw": 4, "lion": 2, "muon": 3}[name]
    assert not any(x.dtype == jnp.bfloat16 for path, x in kept.items() if not path.endswith("/w"))
    assert all(x.dtype == jnp.float32 for x in updates.values())


def test_rounded_moments_are_computed_with_in_float32():
    """After a gradient of 1, m is stored as bfloat16(0.1) and v as bfloat16(0.01); the next step, with none, takes
    0.9 m and 0.99 v in float32 and corrects them by 1 - 0.9^2 and 1 - 0.99^2."""
    config = OptimizerConfig(
        learning_rate=1.0, b1=0.9, b2=0.99, eps=1e-12, schedule="constant", clip_norm=None, moments_dtype="bfloat16"
    )
    tx, params = build_optimizer(config, 100, MATRIX), {"layers/up/w": jnp.zeros((1, 1, 1))}
    _, state = tx.update({"layers/up/w": jnp.ones((1, 1, 1))}, tx.init(params), params)
    updates, _ = tx.update({"layers/up/w": jnp.zeros((1, 1, 1))}, state, params)
    m, v = (float(jnp.asarray(x, jnp.bfloat16)) for x in (0.1, 0.01))
    expected = -(0.9 * m / (1 - 0.9**2)) / (0.99 * v / (1 - 0.99**2)) ** 0.5
    np.testing.assert_allclose(updates["layers/up/w"], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd", "muon"])
def test_matrices_decay_and_norms_and_biases_do_not(name):
    """Without a gradient a weight of 1 loses rate x decay = 0.5 x 0.1."""
    axes = MATRIX | {"layers/norm/w": ("layers", "embed"), "layers/up/b": ("layers", "ffn")}
    plain = {"lion": {"b2": None}, "sgd": {"b1": 0.0, "b2": None}, "adafactor": {"b1": None, "b2": None}}.get(name, {})
    config = OptimizerConfig(name=name, learning_rate=0.5, schedule="constant", weight_decay=0.1, **plain)
    params = {of: jnp.ones((1, *(2 for _ in rest))) for of, (_, *rest) in axes.items()}
    tx = build_optimizer(config, 100, axes)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["layers/up/w"], -0.05, rtol=1e-6)
    assert not np.any(updates["layers/norm/w"])
    assert not np.any(updates["layers/up/b"])


def test_moments_live_where_their_weights_do():
    """Each of 8 devices has an eighth of m and of v in float32, of a matrix in bfloat16."""
    client = trainer(devices=8, mesh=MeshConfig(fsdp=8), param_dtype="bfloat16")
    table = client.state.params["embed/w"]
    found = [x for path, x in moments_of(client.state.moments).items() if path.endswith("embed/w")]
    assert len(found) == 2
    for moment in found:
        assert moment.dtype == jnp.float32
        assert moment.sharding == table.sharding
        assert moment.addressable_shards[0].data.nbytes == 4 * table.size / 8


def test_adafactor_takes_each_layer_by_itself():
    """As transformers' Adafactor on each layer's matrix alone; one layer's gradient is a thousand times the others'."""
    layers, rows, columns, rate = 3, 128, 160, 0.1
    generator = np.random.default_rng(0)
    start = generator.standard_normal((layers, rows, columns)).astype(np.float32)
    gradients = generator.standard_normal((4, layers, rows, columns)).astype(np.float32)
    gradients[2:, 1] *= 1000.0
    config = OptimizerConfig(name="adafactor", learning_rate=rate, schedule="constant", clip_norm=None)
    tx = build_optimizer(config, 10, MATRIX)
    params = {"layers/up/w": jnp.asarray(start)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update({"layers/up/w": gradient}, state, params)
        params = {"layers/up/w": params["layers/up/w"] + updates["layers/up/w"]}

    theirs = [torch.nn.Parameter(torch.tensor(layer)) for layer in start]
    optimizer = Adafactor(theirs, lr=rate, relative_step=False, scale_parameter=False, eps=(1e-30, 1e-3))
    for gradient in gradients:
        for weight, own in zip(theirs, gradient, strict=True):
            weight.grad = torch.tensor(own)
        optimizer.step()
    expected = np.stack([weight.detach().numpy() for weight in theirs])
    np.testing.assert_allclose(params["layers/up/w"], expected, atol=2e-5)
    # Row and column means of each layer, and no mean square of each weight.
    sizes = sorted(x.size for path, x in moments_of(state).items() if path.endswith("up/w"))
    assert sizes == [layers, layers * rows, layers * columns]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [5, 0.25])
def test_a_warm_up_from_zero_is_that_of_hugging_face(schedule, warmup):
    steps, rate = 20, 3e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    theirs = transformers.get_scheduler(
        f"{schedule}_with_warmup" if schedule == "constant" else schedule, optimizer, 5, 20
    )
    config = OptimizerConfig(learning_rate=rate, schedule=schedule, warmup=warmup, warmup_from_zero=True)
    ours, usual = (
        build_schedule(one, steps) for one in (config, config.model_copy(update={"warmup_from_zero": False}))
    )
    for step in range(steps):
        assert float(ours(step)) == pytest.approx(theirs.get_last_lr()[0], abs=1e-10), step
        # Ours is one update ahead until the rate is reached, and the same from there on.
        assert float(usual(step)) == pytest.approx(rate * (step + 1) / 5 if step < 5 else float(ours(step)), abs=1e-10)
        optimizer.step()
        theirs.step()
    assert float(ours(0)) == 0


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"warmup_from_zero": True}, "warmup_from_zero changes nothing without a warm-up: set warmup"),
        ({"moments_dtype": "bfloat16"}, r"0\.999 \(b2\) of a bfloat16 number rounds back.*set b2 to 0\.99 or less"),
        ({"name": "lion", "b2": 0.998, "moments_dtype": "bfloat16"}, r"0\.998 \(b2\)"),
        ({"name": "sgd", "b1": 0.999, "moments_dtype": "bfloat16"}, r"0\.999 \(b1\)"),
        ({"name": "adafactor", "moments_dtype": "bfloat16"}, "changes nothing for adafactor, whose statistics stay"),
        ({"name": "sgd", "moments_dtype": "bfloat16"}, "changes nothing for sgd, which keeps none without momentum"),
        ({"moments_dtype": "float16"}, r"moments_dtype: 'float16' is not one of 'float32', 'bfloat16'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(section, told):
    whole = {"model": {"path": "m"}, "data": {"train": "t"}, "output": "o"}
    with pytest.raises(UserError, match=told):
        Recipe.build({**whole, "optimizer": section})


def test_the_largest_decay_of_bfloat16_is_the_last_that_moves():
    """1 - 2**-8 takes half of a number's distance to the next off, 0.999 takes a quarter of it at most."""
    numbers = jnp.arange(1.0, 2.0, 2.0**-7).astype(jnp.bfloat16)
    near = (numbers.astype(jnp.float32) * (1 - 2**-8)).astype(jnp.bfloat16)
    nearer = (numbers.astype(jnp.float32) * 0.999).astype(jnp.bfloat16)
    assert np.all(near < numbers)
    assert np.array_equal(nearer, numbers)


def test_flops_of_an_adapter_by_hand():
    """PLAIN: d 32, 4 heads and 2 of keys of 8, ffn 64, 2 layers, 96 words; one sequence of 3 tokens."""
    batch = pack([Sequence(np.arange(3, dtype=np.int32), np.ones(3, bool))], 1, 8, packing=True)
    pairs = 12 * 2 * 4 * 8 * (1 + 2 + 3)
    # q 32 x 32, k and v 32 x 16, o 32 x 32, three of 32 x 64, in 2 layers; the head 96 x 32.
    base = 2 * (1024 + 512 + 512 + 1024 + 3 * 2048) + 96 * 32
    assert training_flops(PLAIN, batch, None) == 6 * base * 3 + pairs
    plain = AdapterConfig(rank=4, ranks={"down_proj": 2})
    # r (inputs + outputs): q and o 64, k and v 48, gate and up 96 of rank 4, down of rank 2.
    mine = 2 * (4 * (64 + 48 + 48 + 64 + 96 + 96) + 2 * 96)
    assert adapter_weights(PLAIN, plain) == mine
    assert training_flops(PLAIN, batch, plain) == (4 * base + 6 * mine) * 3 + pairs
    # PiSSA multiplies by what it began as, too; a head that trains costs its gradient.
    whole = plain.model_copy(update={"start": "pissa", "also": ("lm_head",)})
    assert training_flops(PLAIN, batch, whole) == (4 * base + 10 * mine + 2 * 96 * 32) * 3 + pairs


def test_a_checkpoint_of_other_moments_is_told(tmp_path, capsys):
    """Runs from before `moments_dtype` kept those of bfloat16 weights in bfloat16; the other way digits would go."""
    params = {"layers/up/w": jnp.ones((1, 2, 2), jnp.bfloat16)}

    def state(dtype: str) -> TrainState:
        tx = build_optimizer(OptimizerConfig(b2=0.99, moments_dtype=dtype), 100, MATRIX)
        _, moments = tx.update(params, tx.init(params), params)
        return TrainState(params, jax.tree.map(jnp.asarray, moments), jnp.int32(1))

    half, whole = state("bfloat16"), state("float32")
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        checkpoints.save(1, StateClient(half), {}, {})
        checkpoints.save(2, StateClient(whole), {}, {})
        checkpoints.wait()
        client = StateClient(whole)
        checkpoints.restore(1, client.load)
        found = client.state
        told = capsys.readouterr().err
        assert (
            "1/state holds moments in bfloat16, and this run keeps them in float32: they are the same numbers" in told
        )
        for name, x in moments_of(found.moments).items():
            np.testing.assert_array_equal(x, np.asarray(moments_of(half.moments)[name]).astype(x.dtype))
        checkpoints.restore(2, StateClient(whole).load)
        assert not capsys.readouterr().err
        with pytest.raises(
            UserError, match=r"2/state holds moments in float32.*in bfloat16: set optimizer\.moments_dtype"
        ):
            checkpoints.restore(2, StateClient(half).load)
