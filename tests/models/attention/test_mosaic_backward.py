"""The backward kernels for Hopper, interpreted: gradients beside the einsums', and which blocks are visited."""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.attention.mosaic_machine import interpret
from tunix.models.attention import einsum, mosaic
from tunix.models.attention.inputs import Gradients, Mixed, Segments, past_sinks
from tunix.models.attention.mosaic_backward import BLOCK, TILE, ranges

pytestmark = pytest.mark.models

T, N, K, H = 256, 2, 1, 16


def packed(*lengths: int, parents: tuple[int, ...] | None = None) -> Segments:
    """A row of these documents; `parents` are the numbers of their prompts, or their own."""
    numbers = tuple(range(1, len(lengths) + 1))
    ids, above = np.repeat(numbers, lengths)[None].astype(np.int32), parents or numbers
    offsets = [0 if above[n - 1] == n else lengths[above[n - 1] - 1] for n in numbers]
    positions = np.concatenate([offset + np.arange(length) for offset, length in zip(offsets, lengths, strict=True)])
    of_tokens = None if parents is None else jnp.asarray(np.repeat(parents, lengths)[None].astype(np.int32))
    return Segments(jnp.asarray(ids), jnp.asarray(positions[None].astype(np.int32)), of_tokens)


def random(heads: int = N) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (1, T, n, H)) for key, n in zip(keys, (heads, K, K, heads), strict=True)]


DOCUMENTS = packed(100, 60, 96)
GROUP = packed(90, 40, 60, 66, parents=(1, 1, 1, 4))
CASES = [
    (DOCUMENTS, None, None, False),
    (DOCUMENTS, 11, None, False),
    (DOCUMENTS, None, 2.0, True),
    (GROUP, None, None, False),
    (GROUP, 40, 2.0, True),
]
RACES = not version("jax").startswith("0.10.")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, races=RACES)


def by_einsums(inputs: list[jax.Array], view: Segments, sinks: bool = False, **settings) -> tuple[Mixed, Gradients]:
    q, k, v, pull = inputs
    with jax.default_matmul_precision("highest"):
        result = past_sinks(einsum.forward(q, k, v, view, **settings), jnp.linspace(-1, 3, N) if sinks else None)
        return result, einsum.backward(q, k, v, view, result, pull, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("view", "window", "softcap", "sinks"), CASES)
def test_gradients_are_those_of_the_einsums(view, window, softcap, sinks):
    view, settings, (q, k, v, pull) = view._replace(window=window), {"scale": 0.4, "softcap": softcap}, random()
    result, expected = by_einsums([q, k, v, pull], view, sinks, **settings)
    found = mosaic.backward(q, k, v, view, result, pull, **settings)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_parts_of_the_queries_add_their_shares():
    """As devices do that split rows: each part meets the keys of whole rows."""
    settings, inputs = {"scale": 0.4, "softcap": None}, random()
    (mixed, lse), expected = by_einsums(inputs, DOCUMENTS, **settings)
    q, k, v, pull = inputs
    parts = []
    for first in range(0, T, TILE):
        mine, view = np.s_[:, first : first + TILE], DOCUMENTS._replace(first=jnp.int32(first))
        parts.append(mosaic.backward(q[mine], k, v, view, (mixed[mine], lse[mine]), pull[mine], **settings))
    d_q, d_k, d_v = zip(*parts, strict=True)
    for one, other in zip((jnp.concatenate(d_q, 1), sum(d_k), sum(d_v)), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_other_documents_are_not_read():
    """A block of the first document would turn what is computed of the others into nan, whatever masks it."""
    view, settings, inputs = packed(TILE, 60, 68), {"scale": 0.4, "softcap": None}, random(heads=1)
    result, expected = by_einsums(inputs, view, **settings)
    q, k, v, pull = (x.at[:, :TILE].set(jnp.nan) for x in inputs)
    found = mosaic.backward(q, k, v, view, result, pull, **settings)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[:, TILE:], other[:, TILE:], rtol=1e-5, atol=1e-5)
        assert jnp.isnan(one[:, :TILE]).any()


def visits(view: Segments) -> list[list[int]]:
    """For each interval of keys: the blocks that the kernels visit by queries and by keys, and those without a mask."""
    length, counts = view.ids.shape[1], []
    for one in mosaic.intervals(view, length):
        stop = one.stop if one.some is None else jnp.where(one.some, one.stop, one.start)
        limits = ranges(one.start, stop, length)
        whole = (jnp.maximum(jnp.minimum(x[..., 1], x[..., 3]) - x[..., 2], 0) for x in limits)
        counts.append([int(x.sum()) for x in (*(x[..., 1] - x[..., 0] for x in limits), *whole)])
    return counts


def test_blocks_visited():
    """Blocks of 64 by tiles of 128: tile i of a document sees 2 (i + 1) blocks, the last two of them in part."""
    # Of 16,384 tokens: 2 (1 + ... + 128); of eight documents of 2,048, 2 (1 + ... + 16) each: 0.13 of it.
    assert visits(packed(16384)) == [[16512, 16512, 16512 - 256, 16512 - 256]]
    assert visits(packed(*[2048] * 8)) == [[8 * 272, 8 * 272, 8 * 240, 8 * 240]]
    # A window of 512: tile i begins 511 columns before, within block 2i - 8: ten blocks, of which the first tiles have
    # 2, 4, 6, 8. A block is seen whole by a tile's last query from 127 columns on: 2i - 6 to 2i, six blocks.
    assert visits(packed(16384)._replace(window=512)) == [[20 + 124 * 10, 20 + 124 * 10, 12 + 124 * 6, 12 + 124 * 6]]
    # Borders at 100 and 160: tile 0 sees blocks 0 and 1, tile 1 blocks 1 to 3. Queries 0 to 159 see keys of the first
    # tile, 128 to 255 those of the second: blocks 0 to 2 and 2 to 3. No tile sees a block whole.
    assert visits(DOCUMENTS) == [[2 + 3, 3 + 2, 0, 0]]
    # Of a prompt of 90 tokens, two blocks, that queries 90 to 189 see, in blocks 1 and 2: the keys of the second tile
    # are seen by none, and still visit a block. Their own segments: as before, with borders at 90, 130 and 190.
    own, prompt = visits(GROUP)
    assert own == [2 + 3, 3 + 2, 0, 0]
    assert prompt == [2 + 2, 2 + 1, 0, 0]


@pytest.mark.parametrize("view", [DOCUMENTS, GROUP, packed(7, 70, 3, 176)._replace(window=40)])
def test_what_is_not_visited_is_not_seen(view):
    length, seen = view.ids.shape[1], np.zeros((T, T), bool)
    for one in mosaic.intervals(view, length):
        stop = one.stop if one.some is None else jnp.where(one.some, one.stop, one.start)
        by_queries, by_keys = (np.asarray(x[0]) for x in ranges(one.start, stop, length))
        pairs = (jnp.arange(T) >= one.start[0, :, None]) & (jnp.arange(T) < stop[0, :, None])
        visited, turned = np.zeros((T, T), bool), np.zeros((T, T), bool)
        for tile, (begin, end, from_all, to_all) in enumerate(by_queries):
            visited[tile * TILE : (tile + 1) * TILE, begin * BLOCK : end * BLOCK] = True
            assert pairs[tile * TILE : (tile + 1) * TILE, from_all * BLOCK : to_all * BLOCK].all()
        for tile, (begin, end, from_all, to_all) in enumerate(by_keys):
            turned[begin * BLOCK : end * BLOCK, tile * TILE : (tile + 1) * TILE] = True
            assert pairs[from_all * BLOCK : to_all * BLOCK, tile * TILE : (tile + 1) * TILE].all()
        assert not (pairs & ~visited).any()
        assert not (pairs & ~turned).any()
        seen |= np.asarray(pairs)
    np.testing.assert_array_equal(seen, view.seen(0, T)[0])
