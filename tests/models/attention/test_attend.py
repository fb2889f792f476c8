"""The one call for attention: who computes it, what its spec says, and layers of several kinds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.attention.test_chunked import inputs, rows
from tests.paged import slots_of_row
from tests.tiny_models import one_device
from tests.trainers import PLAIN, RICH
from tunix.models.attention import attend as table
from tunix.models.attention import einsum
from tunix.models.attention.attend import Implementation, attend, attend_cached, implementation, spec_of
from tunix.models.attention.inputs import AttentionSpec, ByKind, Segments
from tunix.models.config import DecoderConfig, LayerKind
from tunix.models.kv_cache import unstack
from tunix.models.model import Model
from tunix.rollout.engine.page_tables import PageTables
from tunix.rollout.engine.pieces import Piece
from tunix.rollout.engine.programs import initial_state, prefill
from tunix.rollout.engine.shapes import Sizes

pytestmark = pytest.mark.models

ROWS = (jnp.arange(3, 11)[None], jnp.arange(8)[None], jnp.ones((1, 8), jnp.int32))
FIVE_TO_ONE = tuple((layer + 1) % 6 != 0 for layer in range(48))


def test_training_and_prompts_make_one_call(monkeypatch):
    """A kernel for shorter rows stands above the einsums, and is asked first."""
    asked: dict[str, set[AttentionSpec]] = {"kernel": set(), "einsum": set()}

    def recorded(name: str, compute, q, k, v, view, **settings):
        asked[name].add(spec_of(q, k, view, settings["softcap"]))
        return compute(q, k, v, view, **settings)

    def entry(name: str, lacks) -> Implementation:
        return Implementation(name, lacks, partial(recorded, name, einsum.forward), einsum.backward)

    short = entry("kernel", lambda spec: None if spec.queries < 8 else "it computes short rows")
    monkeypatch.setattr(table, "IMPLEMENTATIONS", (short, entry("einsum", lambda _: None)))
    model = Model(RICH)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in model.shapes.items()}
    jax.eval_shape(model.forward, params, *ROWS)
    assert {(spec.queries, spec.keys, spec.window) for spec in asked["einsum"]} == {(8, 8, 5), (8, 8, None)}
    sizes = Sizes(2, 32, 4, 8, 4, 0, 0, (5, None), (4, 8), 1, "float32")

    asked["einsum"].clear()
    weights = jax.eval_shape(partial(unstack, model), params)
    state = initial_state.eval_shape(model, sizes)
    prefill.lower(model, weights, state, Piece(PageTables(sizes), 4).inputs)
    assert not asked["einsum"]
    assert {(spec.queries, spec.keys, spec.window) for spec in asked["kernel"]} == {(4, 4, 5), (4, 4, None)}
    (spec,) = (spec for spec in asked["kernel"] if spec.window)
    whole = (spec.heads, spec.kv_heads, spec.head_dim, spec.dtype, spec.softcap, spec.branched, spec.platform)
    assert whole == (4, 1, 16, "float32", 20.0, False, "cpu")


@pytest.mark.parametrize("parents", [False, True], ids=["documents", "shared prompts"])
def test_a_kernel_is_given_whole_blocks(parents, monkeypatch):
    lengths: list[int] = []

    def kernel(compute, q, *rest, **settings):
        lengths.append(q.shape[1])
        return compute(q, *rest, **settings)

    forward, backward = (partial(kernel, one) for one in (einsum.forward, einsum.backward))
    monkeypatch.setitem(
        table.BY_NAME, "kernel", Implementation("kernel", lambda _: None, forward, backward, kernel=True)
    )
    q, k, v, pull = inputs("float32")
    view = rows(parents)

    def result(name: str):
        def mixed(q, k, v):
            return attend(q, k, v, view._replace(attention=name, window=11), scale=0.4)

        def with_gradients(q, k, v, pull):
            found, back = jax.vjp(mixed, q, k, v)
            return found, *back(pull)

        return jax.jit(with_gradients)(q, k, v, pull)

    for one, other in zip(result("kernel"), result("einsum"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert q.shape[1] % 128
    assert set(lengths) == {-(-q.shape[1] // 128) * 128}


def test_the_implementation_that_is_wanted_or_why_not(monkeypatch):
    q = jnp.zeros((1, 8, 2, 4))
    spec = spec_of(q, q, Segments(ROWS[2], ROWS[1]), None)
    assert implementation(spec).name == "einsum"
    assert implementation(replace(spec, keys=4096)).name == "chunked"
    assert implementation(spec, "chunked").name == "chunked"
    flash = Implementation("flash", lambda spec: "it needs a TPU", einsum.forward, einsum.backward)
    monkeypatch.setitem(table.BY_NAME, "flash", flash)
    with pytest.raises(ValueError, match="attention: flash cannot be used here: it needs a TPU"):
        attend(q, q, q, Segments(ROWS[2], ROWS[1], attention="flash"), scale=1.0)


def test_a_view_by_kind_is_the_view_of_that_kind():
    """With its gradients; the window is 2 in one kind, and there is none in the other."""
    q, k, v = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 8, 2, 4)), jnp.float32)
    views = tuple(Segments(ROWS[2], ROWS[1], window=window) for window in (2, None))

    def total(view):
        return jax.jit(jax.value_and_grad(lambda q: jnp.sum(attend(q, k, v, view, scale=0.5) ** 2)))(q)

    found = [total(ByKind(views, jnp.int32(kind), (1, 1))) for kind in range(2)]
    for one, view in zip(found, views, strict=True):
        expected = total(view)
        np.testing.assert_allclose(one[0], expected[0], rtol=1e-6)
        np.testing.assert_allclose(one[1], expected[1], rtol=1e-5, atol=1e-6)
    assert float(found[0][0]) != pytest.approx(float(found[1][0]))


def test_each_layer_has_its_kind():
    assert RICH.rope_local is not None
    heads = {"head_dim": RICH.head_dim, "kv_heads": RICH.num_kv_heads}
    near, far = LayerKind(RICH.rope_local, 5, **heads), LayerKind(RICH.rope, **heads)
    assert RICH.kinds == (near, far, near)
    assert RICH.distinct_kinds == (near, far)
    assert replace(RICH, rope_local=None).kinds[0] == LayerKind(RICH.rope, 5, **heads)
    assert PLAIN.kinds == (LayerKind(PLAIN.rope, head_dim=PLAIN.head_dim, kv_heads=PLAIN.num_kv_heads),) * 2


@pytest.mark.parametrize(
    ("config", "local"),
    [
        (PLAIN, lambda depth: ()),
        (RICH, lambda depth: FIVE_TO_ONE[:depth]),
        (replace(RICH, rope_local=None), lambda depth: tuple(layer >= depth // 2 for layer in range(depth))),
    ],
    ids=["one kind", "five to one", "global, then local"],
)
def test_a_deeper_model_is_not_a_longer_program(config: DecoderConfig, local):
    """What XLA is given has as many lines at 48 layers as at 12: compile time is flat in depth."""

    def lines(depth: int) -> int:
        model = Model(replace(config, num_layers=depth, local_layers=local(depth)))
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in model.shapes.items()}
        gradient = jax.grad(lambda params: model.forward(params, *ROWS)[0].sum())
        return len(jax.jit(gradient).lower(params).as_text().splitlines())

    assert lines(48) == lines(12)


def test_a_kind_more_is_attention_more_and_no_layer(monkeypatch):
    """The projections of a layer stand in the program once, however many kinds of layers there are."""
    model, mixed = (Model(replace(RICH, local_layers=local)) for local in ((), (True, False, True)))

    def products(model: Model) -> int:
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in model.shapes.items()}
        return jax.jit(model.forward).lower(params, *ROWS).as_text().count("stablehlo.dot_general")

    # q, k, v, o, gate, up and down; scores and values of each kind.
    assert products(model) == 7 + 2
    assert products(mixed) == 7 + 2 * 2
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), one_device())
    assert not np.allclose(model.forward(params, *ROWS)[0], mixed.forward(params, *ROWS)[0])


@pytest.mark.parametrize("name", ["einsum", "chunked"])
def test_a_sink_takes_its_share_of_the_softmax(name: str):
    """Beside a softmax with one score more, and its gradients by q, k, v and the sinks."""
    q, k, v = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 8, 2, 4)), jnp.float32)
    sinks = jnp.asarray([0.3, -1.0])
    view = Segments(jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2]]), ROWS[1], window=3, attention=name)

    def plain(q, k, v, sinks):
        scores = jnp.einsum("BQNH,BTNH->BNQT", q, k) * 0.5
        scores = jnp.where(view.seen(0, 8)[:, None], scores, -jnp.inf)
        more = jnp.broadcast_to(sinks[None, :, None, None], (1, 2, 8, 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, more], -1), axis=-1)[..., :-1]
        return jnp.einsum("BNQT,BTNH->BQNH", weights, v)

    def ours(q, k, v, sinks):
        return attend(q, k, v, view, scale=0.5, sinks=sinks)

    def with_gradients(function):
        def squares(*inputs):
            result = function(*inputs)
            return jnp.sum(result**2), result

        return jax.jit(jax.value_and_grad(squares, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, sinks)

    for one, other in zip(*map(jax.tree.leaves, map(with_gradients, (ours, plain))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_sink_takes_the_same_share_with_a_cache():
    q, k, v = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 8, 2, 4)), jnp.float32)
    sinks = jnp.asarray([0.3, -1.0])
    rows = attend(q, k, v, Segments(ROWS[2], ROWS[1]), scale=0.5, sinks=sinks)
    new = (x.swapaxes(0, 1) for x in (q, k, v))
    cached, _ = attend_cached(*new, *slots_of_row(k[0], v[0]), scale=0.5, sinks=sinks)
    np.testing.assert_allclose(cached.swapaxes(0, 1), rows, rtol=1e-5, atol=1e-6)
