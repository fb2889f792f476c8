"""The gated delta rule against transformers' own functions and against itself: packed, branched, in chunks and steps.

Axes: B rows, T time, Hk key heads, Jv value heads of a key head, Dk width of a key, Dv width of a value.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from tests.marks import slow
from tunix.models.deltanet import Begins, Chunks, Gates, chunked, convolved, convolved_after, recurrent, unit

pytestmark = pytest.mark.models

HK, JV, DK, DV = 2, 2, 8, 12


def drawn(length: int, rows: int = 1, seed: int = 0) -> tuple[jax.Array, ...]:
    """q, k, v, decay and beta `[B T ...]`."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(rows, length, HK, DK)) for _ in range(2))
    v = rng.normal(size=(rows, length, HK, JV, DV))
    decay = -np.exp(rng.normal(-1.0, 1.5, (rows, length, HK, JV)))
    beta = 1 / (1 + np.exp(-rng.normal(size=(rows, length, HK, JV))))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, beta))


@partial(jax.jit, static_argnames="size")
def mixed(inputs: tuple[jax.Array, ...], ids: np.ndarray, size: int, parents: np.ndarray | None = None) -> jax.Array:
    """What tokens of packed rows read, with chunks of `size`."""
    over = -inputs[0].shape[1] % size
    inputs = tuple(jnp.pad(x, ((0, 0), (0, over), *((0, 0),) * (x.ndim - 2))) for x in inputs)
    ids, parents = (None if x is None else jnp.pad(jnp.asarray(x), ((0, 0), (0, over))) for x in (ids, parents))
    q, k, v, decay, beta = inputs
    found, _ = chunked(unit(q) * DK**-0.5, unit(k), v, Gates(decay, beta), Chunks.packed(ids, parents, size))
    return found[:, : found.shape[1] - over]


@jax.jit
def stepped(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """What tokens of one sequence read, token by token, and the state after them."""
    q, k, *rest = inputs

    def step(state: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return recurrent(*one, state)[::-1]

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (unit(q) * DK**-0.5, unit(k), *rest))
    state, found = jax.lax.scan(step, jnp.zeros((1, HK, JV, DK, DV)), tokens)
    return jnp.moveaxis(found, 0, 1), state


def alone(inputs: tuple[jax.Array, ...]) -> jax.Array:
    """What tokens of one sequence read, token by token. One program serves all lengths: the tokens that are added read
    what came before them, and change nothing of it."""
    length = inputs[0].shape[1]
    padded = tuple(jnp.pad(x, ((0, 0), (0, 64 - length), *((0, 0),) * (x.ndim - 2))) for x in inputs)
    return stepped(padded)[0][:, :length]


def at(inputs: tuple[jax.Array, ...], index: list[int]) -> tuple[jax.Array, ...]:
    return tuple(x[:, np.array(index)] for x in inputs)


@pytest.mark.parametrize("size", [1, 16, *slow([4, 64])])
def test_chunks_and_steps_are_those_of_transformers(size):
    inputs = drawn(23)
    q, k, v, decay, beta = (torch.from_numpy(np.array(x)) for x in inputs)
    flat = {"g": decay.flatten(2), "beta": beta.flatten(2), "use_qk_l2norm_in_kernel": True}
    for function in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        expected = function(q, k, v.flatten(2, 3), **flat)[0].reshape(1, 23, HK, JV, DV).numpy()
        np.testing.assert_allclose(mixed(inputs, np.ones((1, 23), int), size), expected, atol=2e-6)
        np.testing.assert_allclose(alone(inputs), expected, atol=2e-6)


@pytest.mark.parametrize(
    "lengths", [(3, 4, 5), (7, 8, 9), (2, 31), *slow([((1, 1, 2),), ((8, 8),), ((15, 1, 17),), ((16, 16, 3),)])]
)
def test_packed_segments_equal_separate_ones_around_the_chunk(lengths):
    """Chunks of 8: segments that end before, at and behind a chunk's end, several in one chunk, one over several."""
    inputs, ids = drawn(sum(lengths) + 3), np.repeat(range(1, len(lengths) + 1), lengths)
    ids = np.pad(ids, (0, 3))[None]  # and padding
    found = mixed(inputs, ids, 8)
    for segment in range(1, len(lengths) + 1):
        index = np.flatnonzero(ids[0] == segment).tolist()
        np.testing.assert_allclose(found[:, index], alone(at(inputs, index)), atol=2e-6, err_msg=str(segment))


@pytest.mark.parametrize("lengths", [(7, 8), *slow([((3, 4, 5),), ((16, 16, 3),)])])
def test_gradients_of_packed_segments_equal_separate_ones(lengths):
    inputs, ids = drawn(sum(lengths)), np.repeat(range(1, len(lengths) + 1), lengths)[None]
    wanted = jnp.asarray(np.random.default_rng(1).normal(size=(1, sum(lengths), HK, JV, DV)), jnp.float32)
    together = jax.grad(lambda inputs: jnp.sum(wanted * mixed(inputs, ids, 8)))(inputs)
    for segment in range(1, len(lengths) + 1):
        index = np.flatnonzero(ids[0] == segment).tolist()
        apart = jax.grad(lambda own, index=index: jnp.sum(wanted[:, index] * alone(own)))(at(inputs, index))
        for one, other in zip(at(together, index), apart, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


# The segments of a row, each as (its length, the index of the segment it continues).
TREES = {
    "branches within a chunk": [(2, 0), (1, 0), (2, 0), (1, 0)],
    "a prompt over chunks": [(13, 0), (2, 0), (9, 0), (1, 0)],
    "branches over chunks": [(3, 0), (17, 0), (8, 0), (12, 0)],
    "two prompts": [(5, 0), (4, 0), (6, 0), (9, 3), (3, 3), (11, 3)],
    "a prompt that ends with a chunk": [(8, 0), (8, 0), (8, 0)],
    "between sequences": [(6, 0), (5, 1), (9, 1), (8, 1), (4, 4)],
}


QUICK = ("branches within a chunk", "a prompt that ends with a chunk", "between sequences")


@pytest.mark.parametrize("name", [*QUICK, *slow(name for name in TREES if name not in QUICK)])
def test_branches_equal_their_whole_sequences(name):
    tree = TREES[name]
    lengths, parents = [length for length, _ in tree], [parent + 1 for _, parent in tree]
    ids, above = np.repeat(range(1, len(tree) + 1), lengths)[None], np.repeat(parents, lengths)[None]
    inputs = drawn(ids.shape[1])
    taps = jnp.asarray(np.random.default_rng(2).normal(size=(HK, DK, 4)), jnp.float32)
    found, smooth = mixed(inputs, ids, 8, above), convolved(inputs[0], taps, jnp.asarray(ids), jnp.asarray(above))
    assert any(segment != parent for segment, parent in enumerate(parents, 1))
    for segment, parent in enumerate(parents, 1):
        own = np.flatnonzero(ids[0] == segment).tolist()
        path = own if parent == segment else np.flatnonzero(ids[0] == parent).tolist() + own
        whole = at(inputs, path)
        np.testing.assert_allclose(found[:, own], alone(whole)[:, -len(own) :], atol=2e-6, err_msg=str(segment))
        single = convolved(whole[0], taps, jnp.ones((1, len(path)), int))[:, -len(own) :]
        np.testing.assert_allclose(smooth[:, own], single, atol=1e-6)


# The pieces of a row, each as (its length, its segment, the segment it continues); segment 1 goes on after branches.
TRIES = {
    "within a chunk": [(3, 1, 1), (1, 2, 1), (2, 1, 1), (1, 3, 1)],
    "over chunks": [(9, 1, 1), (5, 2, 1), (12, 1, 1), (10, 3, 1), (3, 4, 1), (2, 1, 1), (7, 5, 5)],
    "at the ends of chunks": [(8, 1, 1), (8, 2, 1), (8, 1, 1), (8, 3, 1), (8, 1, 1)],
    "single tokens": [(1, 1, 1), (1, 2, 1), (1, 1, 1), (1, 3, 1), (1, 1, 1), (9, 4, 1), (1, 1, 1)],
    "after another row's trunk": [(6, 5, 5), (4, 1, 1), (5, 2, 1), (3, 1, 1), (9, 3, 1), (4, 1, 1)],
}


@pytest.mark.parametrize("name", TRIES)
def test_branches_leave_a_trunk_in_its_middle(name):
    lengths, segments, parents = zip(*TRIES[name], strict=True)
    ids, above = np.repeat(segments, lengths)[None], np.repeat(parents, lengths)[None]
    inputs = drawn(ids.shape[1])
    taps = jnp.asarray(np.random.default_rng(2).normal(size=(HK, DK, 4)), jnp.float32)
    found, smooth = mixed(inputs, ids, 8, above), convolved(inputs[0], taps, jnp.asarray(ids), jnp.asarray(above))
    for segment in set(segments):
        own = np.flatnonzero(ids[0] == segment)
        trunk = np.flatnonzero((ids[0] == above[0, own[0]]) & (np.arange(ids.shape[1]) < own[0])).tolist()
        path, own = [*trunk, *own.tolist()], own.tolist()
        whole = at(inputs, path)
        np.testing.assert_allclose(found[:, own], alone(whole)[:, -len(own) :], atol=2e-6, err_msg=str(segment))
        single = convolved(whole[0], taps, jnp.ones((1, len(path)), int))[:, -len(own) :]
        np.testing.assert_allclose(smooth[:, own], single, atol=1e-6)


def test_gradients_of_branches_are_the_sums_over_their_sequences():
    lengths, parents = [5, 4, 9, 3], [1, 1, 1, 1]
    ids, above = np.repeat([1, 2, 3, 4], lengths)[None], np.repeat(parents, lengths)[None]
    inputs = drawn(ids.shape[1])
    wanted = jnp.asarray(np.random.default_rng(1).normal(size=(1, ids.shape[1], HK, JV, DV)), jnp.float32)

    def apart(inputs: tuple[jax.Array, ...]) -> jax.Array:
        prompt = np.flatnonzero(ids[0] == 1).tolist()
        total = jnp.sum(wanted[:, prompt] * alone(at(inputs, prompt)))
        for segment in (2, 3, 4):
            own = np.flatnonzero(ids[0] == segment).tolist()
            total += jnp.sum(wanted[:, own] * alone(at(inputs, prompt + own))[:, -len(own) :])
        return total

    together = jax.grad(lambda inputs: jnp.sum(wanted * mixed(inputs, ids, 8, above)))(inputs)
    for one, other in zip(together, jax.grad(apart)(inputs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_pieces_go_on_from_states():
    """Two sequences of 13 and 6 tokens, of which 7 and 0 came before: each begins with a chunk of 4 of its own."""
    first, second = drawn(13, seed=3), drawn(6, seed=4)
    _, state = stepped(at(first, list(range(7))))
    parts = [at(first, list(range(7, 13))), second]
    inputs = [
        jnp.concatenate([jnp.pad(x, ((0, 0), (0, 2), *((0, 0),) * (x.ndim - 2))) for x in each], 1)
        for each in zip(*parts, strict=True)
    ]
    ids = jnp.asarray([[1] * 6 + [0] * 2 + [2] * 6 + [0] * 2])
    q, k, v, decay, beta = inputs
    gates = Gates(*(jnp.where(ids[..., None, None] > 0, x, 0.0) for x in (decay, beta)))
    states = jnp.zeros((1, 4, HK, JV, DK, DV)).at[:, 0].set(state)
    begins = Begins(jnp.asarray([[True, False, True, False]]), states)
    found, after = chunked(unit(q) * DK**-0.5, unit(k), v, gates, Chunks.aligned(ids, 4), begins)
    assert after is not None
    np.testing.assert_allclose(found[:, :6], alone(first)[:, 7:], atol=2e-6)
    np.testing.assert_allclose(found[:, 8:14], alone(second), atol=2e-6)
    for sequence, chunk in ((first, 1), (second, 3)):
        np.testing.assert_allclose(after[:, chunk], stepped(sequence)[1], atol=2e-6)


def test_equal_keys_without_decay_stay_finite_and_right():
    """64 equal keys with beta 1: powers of the matrix of overlaps would reach 10^18."""
    q, k, v, _, _ = drawn(64)
    inputs = (q, jnp.broadcast_to(k[:, :1], k.shape), v, jnp.zeros((1, 64, HK, JV)), jnp.ones((1, 64, HK, JV)))
    np.testing.assert_allclose(mixed(inputs, np.ones((1, 64), int), 64), alone(inputs), atol=1e-5)


def test_a_state_that_is_forgotten_at_once_leaves_finite_gradients():
    q, k, v, decay, beta = drawn(20)
    inputs = (q, k, v, decay - 200.0, beta)
    gradients = jax.grad(lambda x: jnp.sum(mixed(x, np.repeat([1, 2], [9, 11])[None], 8) ** 2))(inputs)
    assert all(bool(jnp.all(jnp.isfinite(one))) for one in gradients)


def test_a_convolution_goes_on_after_earlier_inputs():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, HK, DK)), jnp.float32)
    taps = jnp.asarray(np.random.default_rng(1).normal(size=(HK, DK, 4)), jnp.float32)
    whole = convolved(x, taps, jnp.ones((1, 9), int))
    # The fourth token by hand: its own tap is the last one.
    np.testing.assert_allclose(whole[0, 3], sum(x[0, 3 - lag] * taps[..., 3 - lag] for lag in range(4)), atol=1e-6)
    np.testing.assert_allclose(convolved_after(x[:, 5:], taps, x[:, 2:5]), whole[:, 5:], atol=1e-6)
