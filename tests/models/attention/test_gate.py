"""A kernel has to give the einsums' numbers on a device; what it is off by is measured once."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers import RICH
from tunix.config import MeshConfig, ModelConfig
from tunix.errors import UserError
from tunix.mesh import build_mesh
from tunix.models import kernel_gates
from tunix.models.attention import attend as table
from tunix.models.attention import chunked
from tunix.models.attention.attend import Implementation, spec_of
from tunix.models.attention.inputs import Segments
from tunix.run.kernels import attention_of

pytestmark = pytest.mark.models

MODEL = ModelConfig(init="random", family="llama", dtype="float32")


def spec(*, branched: bool = False, window: int | None = None):
    q, k = (jax.ShapeDtypeStruct((1, 8, heads, 8), jnp.float32) for heads in (2, 1))
    ids = jnp.zeros((1, 8), jnp.int32)
    return spec_of(q, k, Segments(ids, ids, ids if branched else None, window), 20.0)


def kernel(forget: str | None = None) -> Implementation:
    """Chunks under another name, which forget a part of what they are told."""

    def told(compute, q, k, v, view, *more, **settings):
        if forget == "base":  # of the logarithm, in both directions alike
            if more:
                (mixed, lse), pull = more
                return compute(q, k, v, view, (mixed, lse * np.log(2)), pull, **settings)
            mixed, lse = compute(q, k, v, view, **settings)
            return mixed, lse / np.log(2)
        view = view._replace(**{forget: jnp.ones_like(view.ids) if forget == "ids" else None}) if forget else view
        return compute(q, k, v, view, *more, **settings)

    forward, backward = (partial(told, one) for one in (chunked.forward, chunked.backward))
    return Implementation("kernel", lambda _: None, forward, backward, kernel=True)


@pytest.mark.parametrize(
    ("forget", "call"),
    [
        ("ids", spec()),
        ("window", spec(window=40)),
        ("parents", spec(branched=True)),
        ("base", spec()),
    ],
)
def test_what_forgets_a_part_of_the_mask_is_far_off(forget, call):
    assert kernel_gates.measured(kernel(), call) < 1e-5
    assert kernel_gates.measured(kernel(forget), call) > 10 * kernel_gates.LIMIT


def test_a_difference_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setitem(table.BY_NAME, "kernel", kernel("ids"))
    file = tmp_path / "cache/attention.json"
    monkeypatch.setattr(kernel_gates, "MEASURED", file)
    first = kernel_gates.difference("kernel", spec())
    monkeypatch.setattr(kernel_gates, "measured", lambda *_: pytest.fail("it is known"))
    assert kernel_gates.difference("kernel", replace(spec(), queries=4096, keys=4096)) == first > kernel_gates.LIMIT
    file.write_text("{")
    monkeypatch.setattr(kernel_gates, "measured", lambda *_: 0.5)
    assert kernel_gates.difference("kernel", spec()) == 0.5


def test_a_kernel_that_is_off_is_replaced_and_reported(monkeypatch):
    monkeypatch.setattr(table, "IMPLEMENTATIONS", (kernel(), *table.IMPLEMENTATIONS))
    monkeypatch.setitem(table.BY_NAME, "kernel", kernel())
    of = partial(attention_of, RICH, mesh=build_mesh(MeshConfig(fsdp=1), jax.devices()[:1]), length=64, branched=False)
    monkeypatch.setattr("tunix.run.kernels.difference", lambda name, spec: 0.001)
    assert of(MODEL) == (MODEL, "attention: kernel")
    monkeypatch.setattr("tunix.run.kernels.difference", lambda name, spec: 0.3)
    model, line = of(MODEL)
    assert model.attention == "chunked"
    assert line == "attention: chunked (kernel is off the einsums by 0.3 of their size on this device, more than 0.01)"
    with pytest.raises(UserError, match=r"model\.attention: kernel is off .* Leave it at auto, which takes chunked"):
        of(MODEL.model_copy(update={"attention": "kernel"}))
    assert of(MODEL.model_copy(update={"attention": "einsum"}))[1] == "attention: einsum"


def test_the_next_kernel_replaces_one_that_is_off(monkeypatch):
    kernels = tuple(kernel()._replace(name=name) for name in ("first", "second"))
    monkeypatch.setattr(table, "IMPLEMENTATIONS", (*kernels, *table.IMPLEMENTATIONS))
    mesh = build_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    for off, name in (({"first": 0.3, "second": 0.0}, "second"), ({"first": 0.3, "second": 0.3}, "chunked")):
        monkeypatch.setattr("tunix.run.kernels.difference", lambda name, spec, off=off: off[name])
        model, line = attention_of(RICH, MODEL, mesh, 64, branched=False)
        assert model.attention == name
        assert line.startswith(f"attention: {name} (first is off")
