"""Slots that decode: each way to read pages mixes what a plain softmax over the sequence mixes.

Axes: B slots, T time, N query heads, K kv heads, H head dim, Pt tokens of a page.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import static_validate_inputs

from tests.tiny_models import one_device
from tests.trainers import RICH
from tunix.models.attention import decode_triton, decoding, pages
from tunix.models.attention.decoding import BY_NAME, described, lacks_ragged, reader, reader_of, unsaved
from tunix.models.attention.inputs import HIDDEN, DecodeSpec
from tunix.models.attention.pages import (
    NOWHERE,
    Columns,
    Gathered,
    Interleaved,
    PieceView,
    Rows,
    SlotsView,
    Table,
    Visits,
    Writes,
    rounded,
)
from tunix.models.kernel_gates import LIMIT, reader_difference
from tunix.models.kv_cache import decode_specs
from tunix.rollout.engine.page_tables import Reads

pytestmark = pytest.mark.models

HELD = np.array([1, 40, 100, 64, 0])
"""Tokens of each slot; the last one is idle."""
PAGE, COLUMNS = 16, 7
H100 = DecodeSpec(16, 8, 128, "bfloat16", None, "gpu", 9.0, "bfloat16", 128, (None,))
V5P = replace(H100, platform="tpu", capability=None)
INT8 = replace(V5P, cache="int8")


def sequences(heads: int, kv_heads: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A query of each slot `[B N H]`, and keys and values of its tokens `[B T K H]`."""
    random = np.random.default_rng(0)
    q = random.normal(size=(len(HELD), heads, dim))
    k, v = random.normal(size=(2, len(HELD), HELD.max(), kv_heads, dim))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def in_pages(layout, kind: str, k: np.ndarray, v: np.ndarray, window: int | None):
    """The tokens in pages of a pool, in no order, and the table; pages that a window has passed are not held."""
    pool = np.random.default_rng(1).permutation(len(HELD) * COLUMNS + 3).tolist()
    cache = layout.empty(len(pool), k.shape[2], k.shape[3], PAGE, kind)
    table, first = np.full((len(HELD), COLUMNS), -1, np.int32), np.zeros(len(HELD), np.int32)
    for slot, held in enumerate(HELD.tolist()):
        first[slot] = 0 if window is None else max(0, held - window) // PAGE
        for index in range(first[slot], -(-held // PAGE)):
            page = table[slot, index - first[slot]] = pool.pop()
            own = [jnp.asarray(x[slot, index * PAGE : min((index + 1) * PAGE, held)]) for x in (k, v)]
            offsets = jnp.arange(len(own[0]))
            cache = cache.with_tokens(jnp.full_like(offsets, page), offsets, rounded(*own, kind))
    return cache, table, first


def view_of(table: np.ndarray, first: np.ndarray, window: int | None, *, side_by_side: bool) -> SlotsView:
    """What the last token of each slot sees."""
    positions = jnp.asarray(np.maximum(HELD - 1, 0))[:, None]
    own, places = None, table
    if side_by_side:
        reads = Reads.of(table, first, 1, int((table >= 0).sum()), PAGE)
        own, places = Gathered(*map(jnp.asarray, reads[:3])), reads.places
    writes = Writes(jnp.full_like(positions, NOWHERE), positions)
    return SlotsView(writes, positions, Table(jnp.asarray(places), jnp.asarray(first)), own, window)


def mixed(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None, softcap: float | None
) -> np.ndarray:
    """`[B N H]` the plain softmax over each slot's tokens."""
    found = np.zeros_like(q)
    for slot, held in enumerate(HELD.tolist()):
        seen = np.s_[slot, 0 if window is None else max(0, held - window) : held]
        keys, values = (np.repeat(x[seen], q.shape[1] // k.shape[2], axis=1) for x in (k, v))
        scores = np.einsum("NH,TNH->NT", q[slot], keys) * scale
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e30))
        found[slot] = np.einsum("NT,TNH->NH", weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30), values)
    return found


def of_slots(name: str, q: np.ndarray, cache, view: SlotsView, **how) -> np.ndarray:
    """What an implementation mixes."""
    one = BY_NAME[name]
    queries = jnp.asarray(q)[:, None]
    if not one.in_place:
        assert view.gathered is not None
        cache = pages.gathered(cache, view.gathered.sources)
    # JAX's interpreter of TPUs' kernels knows no reshaped reference, which this one has: its reference takes its place.
    function = partial(one.of_slots, **how)
    function = function if name == "ragged" else jax.jit(function)
    return np.asarray(function(queries, cache, view)[0][:, 0])


def reference(*arrays: jax.Array, **settings) -> jax.Array:
    """JAX's reference of its kernel, which is told the same but for the sizes of blocks."""
    static_validate_inputs(*arrays, **settings)
    blocks = ("num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes")
    return ref_ragged_paged_attention(*arrays, **{name: x for name, x in settings.items() if name not in blocks})


CASES = [
    ("gathered", {}),
    ("triton", {}),
    ("ragged", {}),
    ("ragged", {"kind": "fp8"}),
    ("gathered", {"kind": "int8"}),
    ("triton", {"kind": "int8"}),
    ("triton", {"kind": "fp8", "window": 20}),
    ("triton", {"window": 20, "softcap": 3.0, "kv_heads": 1}),
    ("triton", {"heads": 6}),
    ("triton", {"heads": 20, "kv_heads": 1}),
    ("ragged", {"window": 20, "softcap": 3.0}),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name} {case}" for name, case in CASES])
def test_every_way_to_read_pages_mixes_what_a_plain_softmax_does(name, case, monkeypatch):
    monkeypatch.setattr(decode_triton, "PART", 48)
    monkeypatch.setattr(decoding, "ragged_paged_attention", reference)
    kind, window, softcap = case.get("kind", "float32"), case.get("window"), case.get("softcap")
    q, k, v = sequences(case.get("heads", 4), case.get("kv_heads", 2), case.get("dim", 16))
    cache, table, first = in_pages(BY_NAME[name].layout, kind, k, v, window)
    view = view_of(table, first, window, side_by_side=not BY_NAME[name].in_place)
    found = of_slots(name, q, cache, view, scale=0.3, softcap=softcap)
    held = rounded(jnp.asarray(k), jnp.asarray(v), kind).exact(jnp.float32)
    expected = mixed(q, *map(np.asarray, held), 0.3, window, softcap)
    there = HELD > 0
    np.testing.assert_allclose(found[there], expected[there], rtol=1e-5, atol=1e-5)
    assert np.all(np.isfinite(found))


PIECE = [(1, 40, 10), (2, 100, 14), (4, 0, 5), (3, 64, 12)]
"""Slot, earlier tokens and tokens of each segment of a piece; the third has nothing before it, and 7 are padding."""
BLOCK = 16


def piece_view(table: np.ndarray, window: int | None) -> tuple[PieceView, np.ndarray]:
    """The piece, whose segments begin and end within blocks; and the slot of each token, -1 for padding."""
    numbers = [number for _, _, number in PIECE]
    length = 3 * BLOCK
    ids, slots, positions, begins = np.zeros(length, np.int32), np.full(length, -1), *np.zeros((2, length), np.int32)
    visits, ends = [], np.cumsum(numbers)
    for owner, ((slot, held, number), end) in enumerate(zip(PIECE, ends.tolist(), strict=True), start=1):
        here = np.s_[end - number : end]
        ids[here], slots[here], positions[here], begins[here] = owner, slot, held + np.arange(number), held
        for block in range((end - number) // BLOCK, (end - 1) // BLOCK + 1):
            visits += [(block, table[slot, page], page * PAGE, owner) for page in range(-(-held // PAGE))]
    room = np.zeros((4, 1, len(visits) + 3), np.int32)
    room[:, 0, : len(visits)] = np.array(visits).T
    number = jnp.array([len(visits)])
    nowhere = Writes(jnp.full((1, length), NOWHERE), jnp.zeros((1, length), int))
    rows = (jnp.asarray(x)[None] for x in (ids, positions, begins))
    return PieceView(*rows, Visits(*map(jnp.asarray, room), number), nowhere, window), slots


PIECES = [
    (name, case)
    for case in ({}, {"window": 20}, {"softcap": 3.0, "kv_heads": 1}, {"kind": "int8", "heads": 6}, {"kind": "fp8"})
    for name in ("gathered", "triton", "ragged")
    if (name, case.get("kind")) != ("ragged", "int8")  # this layout has no scales
]


@pytest.mark.parametrize(("name", "case"), PIECES, ids=[f"{name} {case}" for name, case in PIECES])
def test_a_piece_mixes_what_a_plain_softmax_over_earlier_tokens_does(name, case, monkeypatch):
    monkeypatch.setattr(pages, "BLOCK_Q", BLOCK)
    monkeypatch.setattr(decode_triton, "TILE", 8 * 16)  # two tiles of a page
    kind, window, softcap = case.get("kind", "float32"), case.get("window"), case.get("softcap")
    _, k, v = sequences(case.get("heads", 4), case.get("kv_heads", 2), 16)
    cache, table, _ = in_pages(BY_NAME[name].layout, kind, k, v, None)
    view, slots = piece_view(table, window)
    q = np.random.default_rng(2).normal(size=(len(slots), case.get("heads", 4), 16)).astype(np.float32)
    read = jax.jit(partial(BY_NAME[name].before_piece, scale=0.3, softcap=softcap))
    found, lse = (np.asarray(x[0]) for x in read(jnp.asarray(q)[None], cache, view))
    held = [np.asarray(x) for x in rounded(jnp.asarray(k), jnp.asarray(v), kind).exact(jnp.float32)]
    for token, slot in enumerate(slots.tolist()):
        begin, position = int(view.begins[0, token]), int(view.positions[0, token])
        seen = np.s_[slot, 0 if window is None else max(0, position - window + 1) : begin]
        if slot < 0 or seen[1].start >= begin:
            assert np.all(found[token] == 0)
            assert np.all(lse[token] == np.float32(HIDDEN))
            continue
        keys, values = (np.repeat(x[seen], q.shape[1] // k.shape[2], axis=1) for x in held)
        scores = np.einsum("NH,TNH->NT", q[token], keys) * 0.3
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        mean = np.einsum("NT,TNH->NH", weights / weights.sum(axis=1, keepdims=True), values)
        np.testing.assert_allclose(found[token], mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse[token], np.log(weights.sum(axis=1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (H100, "triton"),
        (replace(H100, capability=7.5), "gathered"),
        (replace(H100, head_dim=96), "gathered"),
        (replace(H100, cache="fp8", capability=8.0), "gathered"),
        (V5P, "ragged"),
        (replace(V5P, head_dim=64), "gathered"),
        (replace(V5P, cache="int8"), "gathered"),
        (replace(V5P, sinks=True), "gathered"),
        (replace(H100, sinks=True), "triton"),
        (replace(V5P, kv_heads=3), "gathered"),
        (replace(V5P, platform="cpu"), "gathered"),
    ],
)
def test_a_kernel_reads_what_it_can(spec: DecodeSpec, name: str):
    assert reader([spec]).name == name


def test_a_model_with_sinks_says_so_to_its_readers():
    for sinks in (True, False):
        specs = decode_specs(replace(RICH, sinks=sinks), one_device(), "float32", "float32", PAGE)
        assert {spec.sinks for spec in specs} == {sinks}


def test_layers_whose_heads_differ_are_read_by_one_implementation():
    wide = replace(V5P, head_dim=96)
    assert reader([V5P, replace(V5P, head_dim=256)]).name == "ragged"
    assert reader([V5P, wide]).name == "gathered"
    assert described([V5P, wide], "gathered").startswith("gathered (ragged: a head dim of 96 is no multiple of 128")


def test_the_triton_kernel_masks_what_fills_up_a_tile():
    """The interpreter drops what lies outside of an array; on a GPU it would be the next head's result."""
    cache, table, first = in_pages(BY_NAME["triton"].layout, "float32", *sequences(4, 2, 16)[1:], None)
    view = view_of(table, first, None, side_by_side=False)
    run = partial(decode_triton.of_slots, scale=0.3, softcap=None)
    traced = jax.make_jaxpr(run)(jnp.zeros((len(HELD), 1, 4, 16)), cache, view)
    (kernel,) = (one.params["jaxpr"] for one in traced.jaxpr.eqns if one.primitive.name == "pallas_call")
    # Queries are read by one mask, and the three results written by three.
    moves = [one for one in kernel.eqns if one.primitive.name in ("masked_load", "masked_swap", "swap")]
    assert [one.primitive.name for one in moves] == ["masked_load"] + ["masked_swap"] * 3
    assert all(any(x.aval.dtype == bool for x in one.invars) for one in moves)


def test_the_line_says_who_reads_and_why_nobody_faster():
    assert described([V5P], "ragged") == "ragged"
    assert described([H100], "triton") == "triton (ragged: it needs a TPU)"
    wide = replace(H100, head_dim=96)
    assert described([wide], "gathered").endswith("triton: a head dim of 96 is no power of two of at least 16)")
    assert described([H100], "gathered").endswith("triton: it gives other numbers on this device)")


def test_a_layout_is_read_by_one_implementation_alone():
    for layout, name in ((Columns, "gathered"), (Rows, "triton"), (Interleaved, "ragged")):
        assert reader_of(layout.empty(1, 1, 8, 8, "float32")).name == name


def test_a_cache_of_8_bits_that_would_be_gathered_is_refused_but_on_a_cpu():
    assert unsaved([replace(V5P, cache="int8")]) == f"ragged cannot read it in its place: {lacks_ragged(INT8)}"
    assert unsaved([replace(V5P, cache="int8", platform="cpu")]) is None
    assert unsaved([replace(V5P, cache="fp8")]) is None
    assert unsaved([replace(H100, cache="int8")]) is None
    assert unsaved([replace(V5P, head_dim=64)]) is None


@pytest.mark.parametrize(
    ("forget", "sinks", "below"),
    [
        ("", True, True),
        ("window", False, False),
        ("lse", True, False),
        ("lse", False, True),
        ("window of pieces", False, False),
        ("lse of pieces", False, False),
    ],
)
def test_a_kernel_is_compared_before_it_is_used(forget: str, sinks: bool, below: bool):
    one, few = BY_NAME["triton"], replace(H100, heads=2, kv_heads=1, head_dim=16, platform="cpu")
    spec = replace(few, windows=(200,), sinks=sinks)

    def of_slots(q, cache, view, **how):
        mixed, lse = one.of_slots(q, cache, replace(view, window=None) if forget == "window" else view, **how)
        return mixed, 0 * lse if forget == "lse" else lse

    def before_piece(q, cache, view, **how):
        window = None if forget == "window of pieces" else view.window
        mixed, lse = one.before_piece(q, cache, replace(view, window=window), **how)
        return mixed, 0 * lse if forget == "lse of pieces" else lse

    apart = reader_difference(one._replace(of_slots=of_slots, before_piece=before_piece), spec)
    assert (apart < LIMIT) == below
