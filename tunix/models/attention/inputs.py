"""What attention reads besides q, k and v: which tokens see each other, and the spec that selects an implementation.

Keys are in the same packed rows as their queries; `pages.py` has what prefill and decoding read of earlier tokens. A
kernel's file imports from here, `attend.py` from it.

Axes: B rows, T time, Q queries of a block, N query heads, K kv heads, J query heads of a kv head, H head dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix.config import CacheType

HIDDEN = -1e30
"""Added to the scores of pairs that do not see each other; their softmax weight is exactly 0 in float32."""

Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B keys K H"]
"""Keys, or values."""
Mixed = tuple[Queries, Float[Array, "B T N"]]
"""Each query's mean of the values it sees, and the log-sum-exp of its scores in float32: with it two such results over
different keys are merged, and a backward pass makes the weights again."""
Gradients = tuple[Queries, Keys, Keys]
"""Gradients by q, k and v, in their dtypes."""


@dataclass(frozen=True)
class HeadsSpec:
    """The heads of some layers, and the device that computes them: known while a program is traced."""

    heads: int
    """N, query heads."""
    kv_heads: int
    """K; each serves N / K query heads."""
    head_dim: int
    """H, e.g. 128."""
    dtype: str
    """Dtype of the queries, e.g. bfloat16."""
    softcap: float | None
    """Scores become `softcap * tanh(scores / softcap)`; None leaves them."""
    platform: str
    """cpu, gpu or tpu."""
    capability: float | None
    """Compute capability of an NVIDIA GPU, e.g. 9.0; None of another device."""


@dataclass(frozen=True)
class AttentionSpec(HeadsSpec):
    """The properties of one call of `attend`."""

    queries: int
    """Queries in a row, padding included, e.g. 4096; of those that are split over devices, a part's."""
    keys: int
    """Keys in a row, e.g. 4096."""
    branched: bool
    """Whether segments also see their parent's tokens (`Segments.parents`)."""
    pictures: bool
    """Whether tokens of a picture also see later ones of it (`Segments.pictures`)."""
    window: int | None
    """Positions that a query sees, itself included; None for all."""


class Tokens(NamedTuple):
    """The ids that say which tokens of packed rows see each other, as in `Segments`."""

    ids: Int[Array, "..."]
    positions: Int[Array, "..."]
    parents: Int[Array, "..."] | None
    pictures: Int[Array, "..."] | None

    def see(self, keys: "Tokens", columns: Int[Array, "..."], window: int | None) -> Bool[Array, "..."]:
        """Whether these tokens see others; all arrays broadcast.

        Args:
            keys: the others.
            columns: by how many columns each of these comes after each of the others in its row.
            window: positions that a token sees, itself included; None for all.
        """
        seen = self.ids == keys.ids
        if self.parents is not None:
            seen |= self.parents == keys.ids
        now = columns >= 0
        if self.pictures is not None and keys.pictures is not None:
            now = now | ((self.pictures == keys.pictures) & (keys.pictures > 0))
        seen &= now
        if window is None:
            return seen
        # Between a segment and its parent there may be others, so columns do not give the distance.
        distance = columns if self.parents is None else self.positions - keys.positions
        return seen & (distance < window)


class Segments(NamedTuple):
    """Which tokens of a packed row see each other: a token sees its segment up to itself, within the window; a token
    of a picture also sees the later ones of its picture.

    Its arrays are of the keys. Queries may be a part of the row, from `first` on.
    """

    ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    parents: Int[Array, "B T"] | None = None
    """See `types.Batch`."""
    window: int | None = None
    """Positions that a query sees, itself included; None for all of its segment."""
    attention: str = "auto"
    """The implementation that computes it, e.g. "chunked"; "auto" for the best one (`attend.implementation`)."""
    first: Int[Array, ""] | int = 0
    """Index of the first query among the keys: not 0 on a device that has a later part of the rows."""
    pictures: Int[Array, "B T"] | None = None
    """The number of the picture in its row whose token it is, from 1, and 0 for text; a picture's tokens follow each
    other. None where there are no pictures."""
    ahead: int = 0
    """The most tokens after itself that a token sees: those of a picture less one, where there are pictures."""
    interleaved: bool = False
    """See `types.Batch`."""

    def seen(self, start: int, stop: int) -> Bool[Array, "B Q T"]:
        """Whether the queries `start` to `stop` see the keys before `end(stop)`."""
        end = self.end(stop)
        queries, keys = (
            jax.tree.map(lambda x, part=part: x[part], self.tokens)
            for part in (np.s_[:, start:stop, None], np.s_[:, None, :end])
        )
        columns = jnp.arange(start, stop)[:, None] - jnp.arange(end)[None]
        return queries.see(keys, columns, self.window)

    @property
    def tokens(self) -> Tokens:
        """What it says of each token."""
        return Tokens(self.ids, self.positions, self.parents, self.pictures)

    def end(self, stop: int) -> int:
        """One after the last key that a query before `stop` sees."""
        return min(stop + self.ahead, self.ids.shape[1])


LANES = 128
"""Tokens of which kernels make blocks: `attend` fills rows up to a multiple of it for them."""


class ByKind(NamedTuple):
    """The views of all kinds of layers and which one applies, for a scan over layers of several kinds."""

    views: tuple[Segments, ...]
    """The view of each kind; their windows are known while the program is traced."""
    kind: Int[Array, ""]
    """Index into `views`."""
    layers: tuple[int, ...]
    """How many layers there are of each kind."""


def inner_products(mixed: Queries, d_mixed: Queries) -> Float[Array, "B T N"]:
    """What the gradient of a softmax takes off the gradient of each weight: `d_scores = weights (d_weights - this)`.

    The sum of weights times their gradients over the keys is that of `mixed` times its gradient over the head.
    """
    return jnp.sum(mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32), -1)


def merged(left: Mixed, right: Mixed) -> Mixed:
    """Attention over two sets of keys from that over each; a log-sum-exp of -inf says that there are none."""
    lse = jnp.logaddexp(left[1], right[1])
    shares = (jnp.exp(part - lse)[..., None] for _, part in (left, right))
    first, second = (jnp.where(share > 0, share * x, 0.0) for share, (x, _) in zip(shares, (left, right), strict=True))
    return (first + second).astype(left[0].dtype), lse


def past_sinks(result: Mixed, sinks: Float[Array, "N"] | None) -> Mixed:
    """What remains of a result when its weights are shared with the sinks, whose scores are in the log-sum-exp then."""
    if sinks is None:
        return result
    mixed, lse = result
    return mixed * jax.nn.sigmoid(lse - sinks)[..., None].astype(mixed.dtype), jnp.logaddexp(lse, sinks)


def scaled(q: Queries, scale: float) -> Queries:
    """Queries times `scale`, multiplied in float32: Gemma 2 27B's 144^-0.5 in bfloat16 is 0.195 % too large."""
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


def grouped(q: Queries, kv_heads: int) -> Float[Array, "B K J T H"]:
    """Queries by their kv head, heads before tokens: plain batched products, which every backend does best."""
    rows, length, _, dim = q.shape
    return q.reshape(rows, length, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)


def ungrouped(mixed: Float[Array, "B K J T H"]) -> Queries:
    """The inverse of `grouped`."""
    rows, _, _, length, dim = mixed.shape
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, -1, dim)


def because(chosen: str, faster: Iterable[tuple[str, str | None]]) -> str:
    """The implementation that was chosen, and why no faster one: `einsum (splash: it needs a TPU)`.

    Args:
        faster: names, and what each lacks; a reason that several have is said once.
    """
    reasons: dict[str, str] = {}
    for name, reason in faster:
        if reason:
            reasons.setdefault(reason, name)
    return chosen + (f" ({'; '.join(f'{name}: {reason}' for reason, name in reasons.items())})" if reasons else "")


@dataclass(frozen=True)
class DecodeSpec(HeadsSpec):
    """The properties of a cache and of the queries that read it, on each device; of layers with one shape of heads."""

    cache: CacheType
    """What keys and values are kept in."""
    page: int
    """Pt, e.g. 128."""
    windows: tuple[int | None, ...]
    """The window of each kind of these layers; None for all of a sequence."""
    sinks: bool = False
    """Whether sinks take part in the softmax."""
