"""Layers of several mixers in one decoder: on a mesh, in the optimizer, and in what is counted, by hand.

Axes: B rows, T time.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.tiny_models import CASES, Rows, load, loss_and_gradients, one_device, reference_folder, rows_of, tokens
from tests.trainers import PLAIN, trainer
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.lora.config import AdapterConfig
from tunix.mesh import build_mesh
from tunix.models.config import DeltaNet
from tunix.models.model import Model
from tunix.models.scan import Others, over_layers
from tunix.rollout.engine.shapes import Sizes, page_bytes, state_bytes, within
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.optimizer import build_optimizer, decays
from tunix.trainer.perf import adapter_weights, matmul_weights, training_flops
from tunix.trainer.remat import LAYER, Held, step_bytes
from tunix.types import Sequence

pytestmark = pytest.mark.models

MIXED = replace(
    PLAIN,
    family="qwen3_5",
    num_layers=4,
    linear_layers=(True, True, True, False),
    delta=DeltaNet(2, 4, 8, 16),
    output_gate=True,
)
"""PLAIN (d 32, 4 heads and 2 of keys of 8, ffn 64, 96 words) with three DeltaNets: 2 key heads of 8, 4 value heads of
16."""
LINEAR = (2 * (2 * 8 + 2 * 16), 4 * 16)
"""Outputs of `qkv`: of 2 key heads a query and a key of 8 and two values of 16; and of `z`."""


@pytest.mark.parametrize(
    "shape",
    [MeshConfig(data=2, fsdp=2, tensor=2), *slow([MeshConfig(fsdp=4, context=2), MeshConfig(fsdp=2, tensor=4)])],
    ids=repr,
)
def test_eight_devices_give_the_loss_and_gradients_of_one(shape, tmp_path):
    """Two key heads are not divided by a tensor axis of four; rows are padded to as many as there are shards."""
    reference_folder(CASES["qwen3_5-wide-values-tied"], tmp_path)
    sequences = [tokens(seed, 1, length)[0] for seed, length in enumerate((14, 9, 13, 40, 31))]
    rows = rows_of(sequences[:3], sequences[3:4], sequences[4:])
    rows = Rows(*(jnp.pad(x, ((0, 1), (0, 0))) for x in rows))
    model, params = load(tmp_path)
    loss, gradients = loss_and_gradients(model, params, rows)
    mesh = build_mesh(shape, jax.devices()[:8])
    _, spread = load(tmp_path, mesh=mesh)
    with jax.set_mesh(mesh):
        there, found = loss_and_gradients(model, spread, rows)
    np.testing.assert_allclose(there, loss, rtol=1e-5)
    for name, right in gradients.items():
        np.testing.assert_allclose(found[name], right, atol=1e-4 * np.abs(right).max(), err_msg=name)


def test_terms_are_stacked_over_the_layers_that_have_them():
    """A period of three: `a` of its first and last layer, `b` of the second; two periods of weights 1 to 6."""
    names = [("a",), ("b",), ("a",)]
    weights = {("all", "w"): jnp.arange(1.0, 7.0)}

    def layer(place: int, x: jax.Array, own: dict, others: Others) -> tuple[jax.Array, dict[str, jax.Array]]:
        return x, dict.fromkeys(names[place], own["all", "w"])

    _, terms = over_layers(layer, lambda _, w: w, jnp.zeros((1, 1, 1)), weights, Others(), "none", [[*weights]] * 3)
    assert {name: term.tolist() for name, term in terms.items()} == {"a": [1.0, 3, 4, 6], "b": [2.0, 5]}


@pytest.mark.parametrize("name", [*slow(["adafactor"]), "muon"])
def test_stacks_of_several_lengths_are_each_updated_as_alone(name):
    axes = {"layers/up/w": ("layers", "embed", "ffn"), "layers/qkv/w": ("layers", "embed", "heads")}
    rng = np.random.default_rng(0)
    params = {
        key: jnp.asarray(rng.normal(size=(n, 130, 140)), jnp.float32) for key, n in zip(axes, (4, 3), strict=True)
    }
    gradients = {key: jnp.asarray(rng.normal(size=x.shape), jnp.float32) for key, x in params.items()}
    config = OptimizerConfig(name=name, learning_rate=0.1, schedule="constant", clip_norm=None)

    def updated(names: list[str]) -> dict[str, jax.Array]:
        own = {key: params[key] for key in names}
        tx = build_optimizer(config, 10, {key: axes[key] for key in names})
        return tx.update({key: gradients[key] for key in names}, tx.init(own), own)[0]

    together = updated([*axes])
    for key in axes:
        np.testing.assert_allclose(together[key], updated([key])[key], atol=1e-6)


def test_taps_and_rates_are_no_matrices_and_rates_do_not_decay():
    model, config = Model(MIXED), OptimizerConfig(name="muon")
    params = {name: jnp.ones(shape) for name, shape in model.shapes.items()}
    kept = jax.tree_util.tree_flatten_with_path(build_optimizer(config, 10, model.axes).init(params))[0]
    second = {name for name in params for path, _ in kept if f".nu['{name}']" in jax.tree_util.keystr(path)}
    assert {"layers/conv/w", "layers/rate/a_log", "layers/rate/bias", "layers/out_norm/w"} <= second  # Adam's
    assert not second & {"layers/qkv/w", "layers/z/w", "layers/out/w", "layers/beta/w", "layers/q/w", "layers/up/w"}
    exempt = {name for name in params if not decays(name)}
    norms = {"norm/w", *(f"layers/{name}_norm/w" for name in ("out", "pre_attn", "pre_mlp"))}
    assert exempt == {"layers/rate/a_log", "layers/rate/bias", *norms}


def test_flops_by_hand():
    channels, values = LINEAR
    # Of a DeltaNet qkv, z and out, and two gates of 4 heads; of attention q with gates, k, v and o; the ffn of all.
    delta, attention = 32 * (channels + 2 * values + 2 * 4), 32 * (2 * 32 + 16 + 16 + 32)
    base = 3 * delta + attention + 4 * 3 * 32 * 64 + 96 * 32
    assert matmul_weights(MIXED) == base
    batch = pack([Sequence(np.arange(3, dtype=np.int32), np.ones(3, bool))], 1, 8, packing=True)
    # One layer's pairs, and in three layers three products with a state of 8 x 16 in each of 4 heads for each token.
    mixing = 12 * 4 * 8 * (1 + 2 + 3) + 3 * 3 * 6 * 4 * 8 * 16 * 3
    assert training_flops(MIXED, batch, None) == 6 * base * 3 + mixing
    adapter = AdapterConfig(rank=2, targets=("in_proj_qkv", "q_proj", "up_proj"))
    assert adapter_weights(MIXED, adapter) == 2 * (3 * (32 + channels) + (32 + 64) + 4 * (32 + 64))


def test_memory_of_a_step_by_hand():
    spec = trainer(rows=1).learner.spec
    spec = replace(spec, model=replace(spec.model, config=MIXED, dtype="bfloat16"), length=65_536)
    channels, values = LINEAR
    # Numbers of 2 bytes for a token; pairs of a chunk of 64, what is solved for and a state of 8 x 16 are float32.
    delta = 2 * 32 + channels + (64 + values) + 64 + 2 * 4 * (3 * 64 + 4 * (8 + 16) + 8 * 16 / 64)
    attention = 2 * 32 + 32 + 16 + 16 + 2 * 64 + 32 + 2 * 4
    kept = 3 * (2 * 32 + channels + (64 + values) + 64) + attention
    bytes_each = 2 * 65_536
    assert step_bytes(spec, Held(0, 10), "none") == bytes_each * (kept + LAYER * max(delta, attention)) + 10


def test_slots_have_room_for_their_states():
    """Of a slot in three layers: 4 heads of 8 x 16 in float32, and 3 inputs of the convolution, counted as float32."""
    state = 3 * 4 * (4 * 8 * 16 + 3 * LINEAR[0])
    assert state_bytes(MIXED, one_device()) == state
    assert state_bytes(PLAIN, one_device()) == 0
    bare = Sizes(1, 1000, 256, 16, 32, 0, 0, (None,), (), 1, "bfloat16")
    (page,) = page_bytes(MIXED, one_device(), bare)
    assert page == 2 * 2 * 8 * 16 * 2  # one layer has pages
    # Both are there twice during a dispatch; a slot gets half of the longest.
    room = 10.0 * (2 * state + 63 * page)
    assert within(bare, MIXED, one_device(), None, room).slots == 10
    assert within(bare, replace(PLAIN, num_layers=1), one_device(), None, room).slots > 10  # without states
