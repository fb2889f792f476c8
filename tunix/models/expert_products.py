"""Products of tokens with the matrices of their experts: what a mixture of experts multiplies.

Pairs of a token and one of its experts are sorted by expert (`Routes`), so that each matrix multiplies consecutive
rows. `to_experts` takes tokens to rows of their pairs, `from_experts` takes rows to sums of tokens; each is the other
one's transpose, and so its gradient. Accelerators have kernels for them (`grouped_products.py`). On a CPU the
experts take turns: one product each, of as many rows as it has, rounded up. The rows of the next expert that it thereby
computes are overwritten in their turn, so that nothing is padded or masked; only the gradient of the matrices, a sum
over rows, leaves foreign rows out. Tokens are gathered where they are multiplied: to write all rows into new memory
first costs a CPU as much as a third of their product.

Axes: E experts, k chosen experts of a token; D inputs and F outputs of a product, n tokens, r rows: those of all pairs
in their order, and on a CPU some spare ones; t tiles of inputs.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from tunix.mesh import platform
from tunix.models.grouped_products import grouped_gradients, grouped_products
from tunix.models.quantization.formats import dequantize, in_own_digits, rounded_matrix, rounded_to_fp8
from tunix.util.loops import loop


class RoundedBank(NamedTuple):
    """A matrix of each expert, rounded (`quantization/formats.py`); dequantized one at a time as experts take turns."""

    values: Shaped[Array, "E D F"]
    scales: Float[Array, "E t F"]
    like: Shaped[Array, "0"]
    """Nothing, of the dtype that matrices are dequantized to."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(E, D, F)`."""
        return self.values.shape

    def matrix(self, number: jax.Array) -> Float[Array, "D F"]:
        """An expert's matrix."""
        return dequantize(self.values[number], self.scales[number]).astype(self.like.dtype)

    def whole(self, x: jax.Array) -> Float[Array, "E D F"]:
        """All of them, for what multiplies `x` with all at once: as much memory as if they were not rounded, until the
        layer is computed."""
        # Tied to x: a sampling loop would otherwise dequantize all layers before it starts, and hold them.
        values, _ = jax.lax.optimization_barrier((self.values, jax.lax.stop_gradient(x)))
        return jax.vmap(dequantize)(values, self.scales).astype(self.like.dtype)


class Fp8Bank(NamedTuple):
    """A matrix of each expert, multiplied in 8-bit floats as `layers.project_in_fp8` does."""

    matrices: Shaped[Array, "E D F"]
    """As they train, or their values in e4m3."""
    scales: Float[Array, "E 1 F"] | None
    """The scales of those values, which have no gradient; None where the matrices train."""

    def products(self, x: Float[Array, "_ _"], by_token: bool, transposed: bool, where: "Routes") -> jax.Array:
        """As `_products`, in the dtype of `x`."""
        values, scales = self
        if scales is None:
            values, scales = jax.vmap(partial(rounded_matrix, contracted=1))(values)
        ends = jnp.cumsum(where.sizes)
        expert = jnp.searchsorted(ends[:-1], jnp.arange(len(where.pairs)), side="right")
        outputs, pulled = taken(scales[:, 0], expert), x
        if transposed:
            pulled, by_token = in_own_digits(taken(x, where.tokens) if by_token else x) * outputs, False
        rounded, scale = rounded_to_fp8(pulled, jnp.float8_e5m2 if transposed else jnp.float8_e4m3fn, (1,))
        scale = taken(scale, where.tokens) if by_token else scale
        y = _products(rounded, by_token, values, transposed, where) * scale
        return (y if transposed else y * outputs).astype(x.dtype)


LEAST, MOST = 8, 32
"""Bounds of what numbers of rows are rounded up to on a CPU; between them, an eighth of the mean of an expert."""
STEPS = 16
"""How many numbers of rows there are at most: experts with more rows than the largest take several turns."""


class Routes(NamedTuple):
    """Which rows belong to which expert."""

    pairs: Int[Array, "r"]
    """The pairs sorted by expert, token by token: token 3's second expert of two is 7. Those that are not computed come
    last, and spare ones are 0."""
    places: Int[Array, "n k"]
    """The row of each pair."""
    computed: Bool[Array, "n k"]
    """Whether a pair is computed: others add nothing."""
    sizes: Int[Array, "E"]
    """How many rows each expert has."""

    @property
    def tokens(self) -> Int[Array, "r"]:
        """The token of each row."""
        return self.pairs // self.places.shape[1]

    @property
    def blocks(self) -> tuple[int, ...]:
        """The numbers of rows that a CPU multiplies at once. An expert has no more than one of each token: larger ones
        are compiled for nothing, which for the few slots of a sampler would be most of the time."""
        mean = self.places.size // len(self.sizes)
        step = min(max(mean // 8, LEAST), MOST) // LEAST * LEAST
        return tuple(step * (number + 1) for number in range(min(STEPS, -(-len(self.places) // step))))


def routes(experts: Int[Array, "n k"], number: int, computed: Bool[Array, "n k"]) -> Routes:
    """Sorts pairs by expert, and those of one expert by token.

    Args:
        experts: the number of each pair's expert, from 0 to `number` - 1 where the pair is computed.
        number: how many experts there are.
        computed: whether a pair is computed.
    """
    groups = jnp.where(computed, experts, number).reshape(-1)
    order = jnp.argsort(groups, stable=True)
    places = jnp.argsort(order).reshape(experts.shape)
    ends = jnp.searchsorted(groups[order], jnp.arange(number), side="right")
    result = Routes(order, places, computed, jnp.diff(ends, prepend=0).astype(jnp.int32))
    spare = result.blocks[-1] if platform() == "cpu" else 0
    return result._replace(pairs=jnp.pad(order, (0, spare)))


@jax.custom_vjp
def in_rows(values: Float[Array, "n k"], where: Routes) -> Float[Array, "r"]:
    """A number of each pair for its row. No two pairs share a row, so that the gradient is gathered, not scattered."""
    return values.reshape(-1)[where.pairs]


in_rows.defvjp(
    lambda values, where: (in_rows(values, where), where),
    lambda where, d: (jnp.where(where.computed, d[where.places], 0), None),
)


Matrices = Float[Array, "E D F"] | RoundedBank | Fp8Bank
"""Those that are stored rounded are frozen, and have no gradient."""


@jax.custom_vjp
def to_experts(x: Float[Array, "n D"], matrices: Matrices, where: Routes) -> Float[Array, "r F"]:
    """Each pair's token times its expert's matrix; rows of pairs that are not computed hold anything.

    Gradients in the dtypes of what they are of; sums over rows are in float32.
    """
    return _products(x, True, matrices, False, where)


def _backward(by_token: bool, saved: tuple, d: Float[Array, "_ F"]) -> tuple[jax.Array, Matrices | None, None]:
    """The gradients of `to_experts`, or of `from_experts`, whose gradient `d` and not its inputs are by token."""
    x, matrices, where = saved
    d_x = _products(d, not by_token, matrices, True, where)
    d_x = sums(d_x, where.places, where.computed) if by_token else d_x
    if x is None:
        return d_x, None, None
    if isinstance(matrices, Fp8Bank):  # sums over tokens, whose scales cannot be taken out of them
        return d_x, Fp8Bank(_gradients((x, d), (by_token, not by_token), matrices.matrices, where), None), None
    return d_x, _gradients((x, d), (by_token, not by_token), matrices, where), None


def _saved(x: jax.Array, matrices: Matrices, where: Routes) -> tuple:
    """What the backward pass reads: not the rows of matrices that are stored rounded."""
    frozen = isinstance(matrices, RoundedBank) or (isinstance(matrices, Fp8Bank) and matrices.scales is not None)
    return None if frozen else x, matrices, where


to_experts.defvjp(
    lambda x, matrices, where: (to_experts(x, matrices, where), _saved(x, matrices, where)), partial(_backward, True)
)


@jax.custom_vjp
def from_experts(rows: Float[Array, "r D"], matrices: Matrices, where: Routes) -> Float[Array, "n F"]:
    """For each token the sum of its pairs' rows times their experts' matrices. Gradients as those of `to_experts`."""
    return sums(_products(rows, False, matrices, False, where), where.places, where.computed)


from_experts.defvjp(
    lambda rows, matrices, where: (from_experts(rows, matrices, where), _saved(rows, matrices, where)),
    partial(_backward, False),
)


def sums(rows: Float[Array, "r F"], places: Int[Array, "n a"], counted: Bool[Array, "n a"]) -> Float[Array, "n F"]:
    """The sum of each token's rows, computed in float32.

    Args:
        places: its rows.
        counted: which of them are added.
    """
    # Gathers one by one are fused with the sum; one of all would be written out, and take 6 times as long.
    pairs = zip(places.T, counted.T, strict=True)
    addends = [jnp.where(there[:, None], taken(rows, at), 0).astype(jnp.float32) for at, there in pairs]
    return sum(addends[1:], addends[0]).astype(rows.dtype)


def taken(x: Num[Array, "n D"], index: Int[Array, "*a"]) -> Num[Array, "*a D"]:
    """Rows by their numbers, all of which are there."""
    return x.at[index].get(mode="promise_in_bounds")


def _products(
    x: Float[Array, "_ _"],
    by_token: bool,
    matrices: Float[Array, "E _ _"] | RoundedBank | Fp8Bank,
    transposed: bool,
    where: Routes,
) -> Float[Array, "r _"]:
    """Each expert's rows times its matrix, or times its transposed matrix.

    Args:
        x: what the rows are, or the tokens that they are gathered from (`by_token`).
        matrices: on a CPU, rounded ones are dequantized when it is their expert's turn, and there if it has rows. Of
            8-bit floats the products are float32.
    """
    if isinstance(matrices, Fp8Bank):
        return matrices.products(x, by_token, transposed, where)
    if platform() != "cpu":
        matrices = matrices.whole(x) if isinstance(matrices, RoundedBank) else matrices
        rows = taken(x, where.tokens) if by_token else x
        return grouped_products(rows, matrices, where.sizes, transposed=transposed)
    rows = _rows_of(x, by_token, where)

    def expert(number: jax.Array, start: jax.Array, end: jax.Array, y: jax.Array) -> jax.Array:
        def block(size: int, at: jax.Array, y: jax.Array) -> jax.Array:
            matrix = matrices.matrix(number) if isinstance(matrices, RoundedBank) else matrices[number]
            matrix = matrix.T if transposed else matrix
            product = jnp.matmul(rows(at, size), matrix, preferred_element_type=y.dtype)
            return jax.lax.dynamic_update_slice_in_dim(y, product, at, axis=0)

        return _over_blocks(block, where.blocks, start, end, y)

    outputs, kind = matrices.shape[1 if transposed else 2], jnp.float32 if x.dtype.itemsize == 1 else x.dtype
    return _over_experts(expert, where, jnp.zeros((len(where.pairs), outputs), kind))


def _gradients(
    sides: tuple[jax.Array, jax.Array], by_token: tuple[bool, bool], matrices: Float[Array, "E D F"], where: Routes
) -> Float[Array, "E D F"]:
    """Each matrix's gradient: its rows, transposed, times the gradients of their products.

    Args:
        sides: the rows and the gradients, or the tokens that they are gathered from (`by_token`).
    """
    if platform() != "cpu":
        rows, d = (taken(x, where.tokens) if here else x for x, here in zip(sides, by_token, strict=True))
        return grouped_gradients(rows, d, matrices, where.sizes)
    rows, d = (_rows_of(x, here, where) for x, here in zip(sides, by_token, strict=True))

    def expert(number: jax.Array, start: jax.Array, end: jax.Array, gradients: jax.Array) -> jax.Array:
        def block(size: int, at: jax.Array, summed: jax.Array) -> jax.Array:
            real = at + jnp.arange(size) < end
            some = jnp.where(real[:, None], rows(at, size), 0)
            return summed + jnp.einsum("rD,rF->DF", some, d(at, size), preferred_element_type=jnp.float32)

        summed = _over_blocks(block, where.blocks, start, end, jnp.zeros(matrices.shape[1:], jnp.float32))
        return jax.lax.dynamic_update_index_in_dim(gradients, summed.astype(gradients.dtype), number, axis=0)

    return _over_experts(expert, where, jnp.zeros_like(matrices))


def _rows_of(x: jax.Array, by_token: bool, where: Routes) -> Callable[[jax.Array, int], jax.Array]:
    """A function from a place and a number of rows to these rows."""
    tokens, part = where.tokens, jax.lax.dynamic_slice_in_dim
    return lambda at, size: taken(x, part(tokens, at, size)) if by_token else part(x, at, size)


def _over_experts(
    expert: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array], where: Routes, so_far: jax.Array
) -> jax.Array:
    """`expert(number, start, end, so_far)` for each expert that has rows: those from `start` to `end`."""
    ends = jnp.cumsum(where.sizes)
    # Few tokens, as a sampler has them, use few experts: a turn in which nothing is multiplied takes time too.
    busy = jnp.argsort(where.sizes == 0, stable=True)

    def take_turn(turn: jax.Array, so_far: jax.Array) -> jax.Array:
        number = busy[turn]
        return expert(number, ends[number] - where.sizes[number], ends[number], so_far)

    most = min(len(where.sizes), where.places.size)
    return loop(jnp.sum(where.sizes > 0, dtype=jnp.int32), take_turn, so_far, usual=most)


def _over_blocks(
    block: Callable[[int, jax.Array, jax.Array], jax.Array],
    sizes: tuple[int, ...],
    start: jax.Array,
    end: jax.Array,
    so_far: jax.Array,
) -> jax.Array:
    """`block(size, at, so_far)` for the rows from `start` to `end`: by the largest size while that is needed, then once
    by the least that holds the rest."""

    def turn(size: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at, so_far = state
        return at + size, block(size, at, so_far)

    def more(than: int, state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return end - state[0] > than

    state = start, so_far
    for size, less in zip(reversed(sizes), (*reversed(sizes[:-1]), 0), strict=True):
        # A loop where a condition would do: the compiler copies what a condition's branches change.
        state = jax.lax.while_loop(partial(more, less), partial(turn, size), state)
    return state[1]
