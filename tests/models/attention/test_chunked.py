"""Blocks of queries and keys beside the einsums: values and gradients, and what is skipped."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tunix.models.attention import chunked, einsum
from tunix.models.attention.inputs import Segments

pytestmark = pytest.mark.models

B, T, N, K, H = 2, 75, 4, 2, 8
BLOCK = 16  # 75 tokens: five blocks, the last one partly filled


def rows(parents: bool) -> Segments:
    """Two rows of several documents and padding; with parents, triples of a prompt and its two completions."""
    lengths = [[20, 7, 30, 9], [40, 3, 3, 3, 3, 3]]
    ids, positions, above = (np.zeros((B, T), np.int32) for _ in range(3))
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents, 1):
            here = np.s_[row, start : start + length]
            prompt = (number - 1) // 3 * 3 + 1
            offset = 0 if prompt == number or not parents else documents[prompt - 1]
            ids[here], positions[here], above[here] = number, offset + np.arange(length), prompt
            start += length
    return Segments(*map(jnp.asarray, (ids, positions)), jnp.asarray(above) if parents else None)


def trie(rows: int, length: int) -> Segments:
    """Rows of a trunk that branches leave in its middle, and of a document; the second row begins with the document."""
    unit = (length - 20) // 11
    # Segment, parent and tokens of each piece.
    pieces = [(1, 1, 2), (2, 1, 1), (1, 1, 2), (3, 1, 2), (4, 1, 1), (1, 1, 1), (5, 5, 2)]
    ids, positions, above = (np.zeros((rows, length), np.int32) for _ in range(3))
    for row in range(rows):
        start, trunk = 0, 0
        for number, parent, size in [*pieces[-row:], *pieces[:-row]] if row else pieces:
            size, begin = size * unit + number, trunk if parent == 1 else 0
            span = np.s_[row, start : start + size]
            ids[span], above[span], positions[span] = number, parent, begin + np.arange(size)
            start, trunk = start + size, trunk + size * (number == 1)
    return Segments(*map(jnp.asarray, (ids, positions, above)), interleaved=True)


def inputs(dtype: str = "float32") -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    return tuple(jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))


def results(module, view: Segments, dtype: str, softcap: float | None) -> tuple[jax.Array, ...]:
    """Attention and its log-sum-exp, and the gradients of its sum with random weights."""
    q, k, v, pull = inputs(dtype)
    settings = {"scale": 0.4, "softcap": softcap}
    result = module.forward(q, k, v, view, **settings)
    return *result, *module.backward(q, k, v, view, result, pull, **settings)


@pytest.mark.parametrize("parents", [False, True], ids=["documents", "shared prompts"])
@pytest.mark.parametrize("window", [None, 11, *slow([1, 40])])
@pytest.mark.parametrize(("softcap", "dtype"), [(None, "float32"), *slow([(2.0, "float32"), (2.0, "bfloat16")])])
def test_values_and_gradients_are_those_of_the_einsums(monkeypatch, parents, window, softcap, dtype):
    monkeypatch.setattr(chunked, "BLOCK", BLOCK)
    view = rows(parents)._replace(window=window)
    found, expected = (jax.jit(partial(results, one, view, dtype, softcap))() for one in (chunked, einsum))
    for one, other in zip(found, expected, strict=True):
        real = np.asarray(view.ids > 0)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-2, "atol": 3e-2}
        np.testing.assert_allclose(np.float32(one)[real], np.float32(other)[real], **tolerance)


@pytest.mark.parametrize("window", [None, 11])
def test_branches_leave_a_trunk_in_its_middle(monkeypatch, window):
    monkeypatch.setattr(chunked, "BLOCK", BLOCK)
    view = trie(B, T)._replace(window=window)
    found, expected = (jax.jit(partial(results, one, view, "float32", None))() for one in (chunked, einsum))
    real = np.asarray(view.ids > 0)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[real], other[real], rtol=1e-5, atol=1e-5)
    seen = np.asarray(view.seen(0, T))[0]
    leaf, trunk = (np.flatnonzero(np.asarray(view.ids)[0] == number) for number in (3, 1))
    if window is None:  # the trunk's first two pieces, and none of what follows
        assert seen[leaf[0]][trunk].tolist() == [True] * int(view.positions[0, leaf[0]]) + [False] * (
            len(trunk) - int(view.positions[0, leaf[0]])
        )


def pictured(view: Segments, length: int = 6) -> Segments:
    """Pictures of this many tokens, one from the third token on in each document that is long enough."""
    pictures = np.zeros((B, T), np.int32)
    for row, ids in enumerate(np.asarray(view.ids)):
        for number in range(1, ids.max() + 1):
            places = np.flatnonzero(ids == number)
            if len(places) > length + 2:
                pictures[row, places[2 : 2 + length]] = number
    return view._replace(pictures=jnp.asarray(pictures), ahead=length - 1)


@pytest.mark.parametrize("parents", [False, True], ids=["documents", "shared prompts"])
@pytest.mark.parametrize(("window", "length"), [(None, 18), (4, 6), *slow([(None, 6), (11, 18), (1, 6)])])
def test_tokens_of_a_picture_see_all_of_it(monkeypatch, parents, window, length):
    """By chunks and by einsums, and by the definition: within the window, what is before or of the same picture."""
    monkeypatch.setattr(chunked, "BLOCK", BLOCK)
    monkeypatch.setattr(einsum, "BLOCK_Q", BLOCK)
    monkeypatch.setattr(einsum, "MOST_BLOCKS", 5)
    view = pictured(rows(parents), length)._replace(window=window)
    ids, positions, pictures = map(np.asarray, (view.ids, view.positions, view.pictures))
    assert (pictures > 0).any()
    above = ids if view.parents is None else np.asarray(view.parents)
    place = np.arange(T)
    defined = (ids[:, :, None] == ids[:, None]) | (above[:, :, None] == ids[:, None])
    same = (pictures[:, :, None] == pictures[:, None]) & (pictures[:, :, None] > 0)
    defined &= (place[:, None] >= place[None]) | same
    if window is not None:
        defined &= positions[:, :, None] - positions[:, None] < window
    np.testing.assert_array_equal(np.asarray(view.seen(0, T))[ids > 0], defined[ids > 0])
    found, expected = (jax.jit(partial(results, one, view, "float32", None))() for one in (chunked, einsum))
    plain = view._replace(ahead=T)  # with all keys in every block
    whole = jax.jit(partial(results, einsum, plain, "float32", None))()
    for one, other, all_keys in zip(found, expected, whole, strict=True):
        np.testing.assert_allclose(np.asarray(one)[ids > 0], np.asarray(other)[ids > 0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(all_keys)[ids > 0], np.asarray(other)[ids > 0], rtol=1e-5, atol=1e-5)


def test_a_block_meets_what_its_queries_may_see(monkeypatch):
    """Blocks of 16: row 0 has documents at 0, 20, 27 and 57; row 1 one of 40 and five of 3, then padding."""

    def met(view: Segments) -> list[list[int]]:
        q, k, v, _ = inputs()
        blocks = chunked._cut(q, k, v, view, BLOCK)
        order, counts = chunked.met(blocks, view, BLOCK)
        return [sorted(map(int, row[:count])) for row, count in zip(order, counts, strict=True)]

    both = rows(parents=False)
    assert met(both) == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [3, 4]]
    assert met(both._replace(window=2)) == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert met(both._replace(window=1)) == [[0], [1], [2], [3], [4]]
    # The third document's prompt is the first, and the fourth has none but itself.
    assert met(rows(parents=True)) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4]]


def test_memory_grows_with_a_row_and_not_with_its_square():
    """Of the forward and the backward pass together, at 4 and 8 blocks of one document."""

    def memory(length: int) -> int:
        heads = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def both(q, k, v, ids, positions):
            view, settings = Segments(ids, positions), {"scale": 0.5, "softcap": None}
            result = chunked.forward(q, k, v, view, **settings)
            return chunked.backward(q, k, v, view, result, result[0], **settings)

        compiled = jax.jit(both).lower(heads, heads, heads, tokens, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = memory(2048), memory(4096)
    assert many < 1.5 * few
    assert many < 4096 * 4096
