"""How the keys and values of a layer lie in its pages, and the grid on which they are rounded.

Which order of the axes is fast is a matter of what reads it (`decoding.py`): on a CPU a batched product, on NVIDIA's
GPUs and on TPUs a kernel that takes pages where they are. Everything else goes through the methods here.

Whatever the sampler reads of a token, of its own piece, of earlier ones or while it decodes, is what the cache holds of
it: `rounded` comes first. So neither pieces nor pages change a result.

Axes: B rows, C tokens at a time, K kv heads, H head dim, Pg pages, Pt tokens of a page.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.config import CacheType
from tunix.mesh import Axes, shards

STORED: dict[CacheType, Any] = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
}
"""The dtype of the numbers of a cache."""
LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest numbers that 8 bits hold; int8 is scaled up to it, fp8 is cut off there."""
SCALE_BYTES = 4
"""Bytes of the scale that int8 has for each token and kv head, of its key and of its value."""


class Tokens(NamedTuple):
    """Keys and values of some tokens, as a cache holds them."""

    keys: Array
    """`[... K H]`."""
    values: Array
    """`[... K H]`."""
    scales: Float[Array, "... K 2"] | None = None
    """What the keys and the values are multiplied by; None where nothing is."""

    def exact(self, dtype: jax.typing.DTypeLike) -> tuple[Array, Array]:
        """Keys and values as numbers of this dtype."""
        if self.scales is None:
            return self.keys.astype(dtype), self.values.astype(dtype)
        return (
            scaled_up(self.keys, self.scales[..., 0, None], dtype),
            scaled_up(self.values, self.scales[..., 1, None], dtype),
        )


def scaled_up(x: Array, scale: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Integers times their scale, multiplied in float32."""
    return (x.astype(jnp.float32) * scale).astype(dtype)


def rounded(k: Float[Array, "*at K H"], v: Float[Array, "*at K H"], kind: CacheType) -> Tokens:
    """Keys and values as a cache of this type holds them."""
    dtype = STORED[kind]
    if kind == "fp8":
        most = LARGEST[kind]
        return Tokens(*(jnp.clip(x.astype(jnp.float32), -most, most).astype(dtype) for x in (k, v)))
    if kind != "int8":
        return Tokens(k.astype(dtype), v.astype(dtype))

    def scale(x: Array) -> Array:
        largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)
        return jnp.where(largest > 0, largest / LARGEST[kind], 1.0)

    def number(x: Array) -> Array:
        return jnp.round(x.astype(jnp.float32) / scale(x)[..., None]).astype(dtype)

    return Tokens(number(k), number(v), jnp.stack([scale(k), scale(v)], axis=-1))


class _Apart(NamedTuple):
    """Keys apart from values."""

    keys: Array
    values: Float[Array, "Pg K Pt H"]
    scales: Float[Array, "Pg K 2 Pt"] | None = None
    """For int8, what each token's key and value are multiplied by."""


class Columns(_Apart):
    """The keys' head dim stands before their tokens, `[Pg K H Pt]`, as a batched product on a CPU wants it."""

    TURNED: ClassVar[bool] = True
    AXES: ClassVar[tuple[Axes, ...]] = (("rows", "kv_heads", None, None),) * 3

    @classmethod
    def empty(cls, number: int, kv_heads: int, head_dim: int, size: int, kind: CacheType) -> "Columns":
        """So many pages (Pg) of zeros, of `size` tokens (Pt) each."""
        shape, dtype = (number, kv_heads, size, head_dim), STORED[kind]
        keys = (number, kv_heads, head_dim, size) if cls.TURNED else shape
        scales = jnp.zeros((number, kv_heads, 2, size), jnp.float32) if kind == "int8" else None
        return cls(jnp.zeros(keys, dtype), jnp.zeros(shape, dtype), scales)

    @property
    def size(self) -> int:
        """Pt."""
        return self.values.shape[2]

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.values.shape[1]

    @property
    def kind(self) -> CacheType:
        """What it holds."""
        return _kind_of(self.values)

    def read(self, dtype: jax.typing.DTypeLike) -> tuple[Float[Array, "Pg K H Pt"], Float[Array, "Pg K Pt H"]]:
        """Keys and values of all pages, as numbers of this dtype."""
        keys, values = self.keys if self.TURNED else self.keys.swapaxes(-1, -2), self.values
        if self.scales is None:
            return keys.astype(dtype), values.astype(dtype)
        scales = self.scales
        return scaled_up(keys, scales[:, :, :1], dtype), scaled_up(values, scales[:, :, 1, :, None], dtype)

    def with_tokens(self, at: Int[Array, "B"], offsets: Int[Array, "B"], new: Tokens) -> "Columns":
        """The pages with one new token `[B ...]` in each of these places, of which those outside are left out."""
        keys = self.keys.at[at, :, :, offsets] if self.TURNED else self.keys.at[at, :, offsets]
        values = self.values.at[at, :, offsets].set(new.values, mode="drop")
        scales = self.scales
        if scales is not None:
            scales = scales.at[at, :, :, offsets].set(new.scales, mode="drop")
        return type(self)(keys.set(new.keys, mode="drop"), values, scales)


class Rows(Columns):
    """Keys and values both `[Pg K Pt H]`: a head's part of a page is one piece of memory."""

    TURNED = False


class _Together(NamedTuple):
    """Keys and values in one array."""

    both: Float[Array, "Pg Pt _ H"]
    """`[Pg Pt 2K H]`: the key and then the value of each kv head."""


class Interleaved(_Together):
    """As `jax.experimental.pallas.ops.tpu.ragged_paged_attention` reads it."""

    AXES: ClassVar[tuple[Axes, ...]] = (("rows", None, "kv_heads", None),)

    @classmethod
    def empty(cls, number: int, kv_heads: int, head_dim: int, size: int, kind: CacheType) -> "Interleaved":
        """So many pages (Pg) of zeros, of `size` tokens (Pt) each."""
        return cls(jnp.zeros((number, size, 2 * kv_heads, head_dim), STORED[kind]))

    @property
    def size(self) -> int:
        """Pt."""
        return self.both.shape[1]

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.both.shape[2] // 2

    @property
    def kind(self) -> CacheType:
        """What it holds."""
        return _kind_of(self.both)

    def read(self, dtype: jax.typing.DTypeLike) -> tuple[Float[Array, "Pg K H Pt"], Float[Array, "Pg K Pt H"]]:
        """Keys and values of all pages, as numbers of this dtype."""
        keys, values = self.both[:, :, 0::2], self.both[:, :, 1::2]
        return keys.transpose(0, 2, 3, 1).astype(dtype), values.transpose(0, 2, 1, 3).astype(dtype)

    def with_tokens(self, at: Int[Array, "B"], offsets: Int[Array, "B"], new: Tokens) -> "Interleaved":
        """The pages with one new token `[B ...]` in each of these places, of which those outside are left out."""
        return Interleaved(self.both.at[at, offsets].set(_joined(new), mode="drop"))


Pages = Columns | Interleaved
"""The cache of one layer: its class says how it lies."""


def page_of(pages: Pages, index: Int[Array, ""]) -> Pages:
    """One page alone, as an array of one."""
    return jax.tree.map(lambda x: x[index][None], pages)


def placed(pages: Pages, place: Callable[[Any, Axes], Any]) -> Any:
    """What a function makes of each array of the pages and its logical axes.

    Heads that the mesh in use does not divide have no axis.
    """
    whole = pages.kv_heads % shards("kv_heads") != 0

    def axes(given: Axes) -> Axes:
        return tuple(None if whole and axis == "kv_heads" else axis for axis in given)

    own = {name: axes for name, axes in zip(pages._fields, pages.AXES, strict=True) if getattr(pages, name) is not None}
    return pages._replace(**{name: place(getattr(pages, name), axes(own[name])) for name in own})


def _joined(new: Tokens) -> Array:
    """Keys and values of tokens as `Interleaved` has them, `[... 2K H]`."""
    both = jnp.stack([new.keys, new.values], axis=-2)
    return both.reshape(*both.shape[:-3], -1, both.shape[-1])


def _kind_of(x: Array) -> CacheType:
    return next(kind for kind, dtype in STORED.items() if x.dtype == dtype)
