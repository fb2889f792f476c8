"""Tokens on their way to the devices of their experts and back, against what each device should have."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.mesh import build_mesh
from tunix.models import moe
from tunix.models.families.table import small
from tunix.models.kernel_gates import exchange_difference
from tunix.models.moe import AXIS, combine, destinations, dispatch
from tunix.run import kernels

pytestmark = pytest.mark.models

DEVICES, OWN, TOKENS, WIDTH = 4, 2, 5, 3
ROWS = jax.P(AXIS)


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    starts: jax.Array,
    sent: jax.Array,
    places: jax.Array,
    received: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """jax's function as its documentation describes it, for CPUs, for which XLA has none."""
    me = jax.lax.axis_index(axis_name)
    operands, starts, sent, places = (jax.lax.all_gather(x, axis_name) for x in (operand, starts, sent, places))
    for device in range(DEVICES):
        rows = jnp.arange(len(output)) - places[device, me]
        mine = (rows >= 0) & (rows < jnp.minimum(sent[device, me], received[device]))
        output = jnp.where(mine[:, None], operands[device][jnp.clip(starts[device, me] + rows, 0)], output)
    return output


def on_devices(function: Any, *arrays: jax.Array) -> Any:
    """The results on each of the devices of the axis, one after the other."""
    mesh = build_mesh(MeshConfig(data=1, fsdp=1, expert=DEVICES), jax.devices()[:DEVICES])
    mapped = jax.shard_map(function, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    return jax.device_get(jax.jit(mapped)(*arrays))


def batch() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, their three experts of eight, and which are real; nobody goes to the third device's from the first."""
    random = np.random.default_rng(0)
    x = jnp.arange(1.0, 1 + DEVICES * TOKENS * WIDTH).reshape(-1, WIDTH)
    experts = np.asarray([random.permutation(DEVICES * OWN)[:3] for _ in x])
    experts[:TOKENS] = np.where(experts[:TOKENS] // OWN == 2, 0, experts[:TOKENS])
    return x, jnp.asarray(experts, jnp.int32), jnp.asarray(random.random(len(x)) < 0.8)


@pytest.fixture(params=["blocks", "rows"])
def sent_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, and as on accelerators."""
    if request.param == "rows":
        monkeypatch.setattr(moe, "platform", lambda: "tpu")
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)


@pytest.mark.usefixtures("sent_as")
def test_a_token_comes_once_to_each_device_that_has_one_of_its_experts():
    x, experts, real = batch()

    def arrived(x: jax.Array, experts: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        where = destinations(experts, real, OWN)
        return dispatch(x, where)[None], where.arrived[None]

    blocks, there = on_devices(arrived, x, experts, real)
    goes = np.asarray([[bool(real[t]) and d in experts[t] // OWN for t in range(len(x))] for d in range(DEVICES)])
    assert 0 < goes.sum() < goes.size
    for device in range(DEVICES):
        for source in range(DEVICES):
            own = slice(source * TOKENS, (source + 1) * TOKENS)
            expected = np.asarray(x)[own][goes[device, own]]
            np.testing.assert_array_equal(blocks[device, source][there[device, source]], expected)
            assert there[device, source].sum() == len(expected)


@pytest.mark.usefixtures("sent_as")
def test_parts_come_home_and_gradients_go_the_same_ways_back():
    """Device d multiplies by d + 1 what it was sent, and leaves NaN in the other rows, which must not spread."""
    x, experts, real = batch()
    aim = jnp.cos(jnp.arange(x.size)).reshape(x.shape)

    def weighed(x: jax.Array, experts: jax.Array, real: jax.Array, aim: jax.Array) -> jax.Array:
        where = destinations(experts, real, OWN)
        came = dispatch(x, where)
        parts = (jax.lax.axis_index(AXIS) + 1.0) * jnp.where(where.arrived[..., None], came, jnp.nan)
        return jnp.sum(aim * combine(parts, where))

    def with_gradient(*rows: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(weighed)(*rows)
        return value[None], gradient

    def of_tokens(x: jax.Array) -> jax.Array:
        goes = jnp.any(experts[..., None] // OWN == jnp.arange(DEVICES), axis=1) & real[:, None]
        return jnp.sum(aim * x * (goes @ jnp.arange(1.0, 1 + DEVICES))[:, None], axis=1).reshape(DEVICES, -1).sum(1)

    found, gradient = on_devices(with_gradient, x, experts, real, aim)
    np.testing.assert_allclose(found, of_tokens(x), rtol=1e-5)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: of_tokens(x).sum())(x), rtol=1e-5)


SPLIT = MeshConfig(data=2, fsdp=1, expert=DEVICES)


@pytest.mark.usefixtures("sent_as")
def test_devices_that_send_what_they_should_pass():
    assert exchange_difference(build_mesh(SPLIT)) < 1e-6


def test_devices_that_mix_up_rows_or_results_are_refused(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(kernels, "exchange_difference", lambda mesh: asked.append(mesh) or exchange_difference(mesh))
    mixture, mesh = small("qwen3_moe"), build_mesh(SPLIT)
    kernels.check_exchange(mixture, mesh)
    monkeypatch.setattr(kernels, "_platform", lambda mesh: "tpu")
    kernels.check_exchange(replace(mixture, experts=None), mesh)
    kernels.check_exchange(mixture, build_mesh(MeshConfig()))
    assert not asked, "a CPU sends whole blocks, and elsewhere there is nothing to send"
    kernels.check_exchange(mixture, mesh)
    assert asked == [mesh]
    exchanged = moe._sent
    monkeypatch.setattr(moe, "_sent", lambda *x: jnp.roll(exchanged(*x), 1, axis=0))
    with pytest.raises(UserError, match="mesh: expert 4: what these devices send each other comes back off by"):
        kernels.check_exchange(mixture, mesh)
