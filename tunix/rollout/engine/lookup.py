"""Draft tokens by look-up, for speculative decoding: what followed the same few tokens before.

Saxena, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding), with the answers of a prompt's
other requests beside the prompt itself. An n-gram draft cache has, for each n-gram of the tokens of one prompt's
requests, the tokens that followed it last. The host writes the caches as dispatches are read; the device looks its
draft tokens up (`draft_tokens`).

A draft token only proposes. The token that a request samples at an index follows from the model and from (seed,
request, index); a draft token that equals it saves a step, and any other is dropped. So tokens are distributed as the
model says, and what is in a cache, or still on its way, changes none of them. A draft token x is accepted with the
model's probability of x: no way to accept single ones does better (Leviathan, Kalman, Matias, "Fast Inference from
Transformers via Speculative Decoding", https://arxiv.org/abs/2211.17192).

Axes: Sl slots, Bk draft caches, En entries of a draft cache, Gs draft tokens, T time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

GRAM = 2
"""Tokens of an n-gram, the new one among them: fewer are found more often, and more are right more often."""
LARGEST = 1 << 13
"""Entries of a draft cache at most; n-grams with the same hash share one."""
NO_TOKEN = -1
"""No draft token: no token equals it."""
FACTOR, MIX = 0x9E3779B1, 15
"""Knuth's multiplicative hash (The Art of Computer Programming, volume 3, 6.4): 2^32 over the golden ratio, odd."""


class DraftTables(NamedTuple):
    """What a dispatch reads of the draft caches."""

    entries: jax.Array | np.ndarray
    """`[Bk En Gs]` int32 the tokens after each n-gram, by its hash; NO_TOKEN where nothing is known."""
    of_slot: jax.Array | np.ndarray
    """`[Sl]` int32 the draft cache of each slot."""
    recent: jax.Array | np.ndarray
    """`[Sl GRAM-1]` int32 the last tokens of each slot, as the host knows them; NO_TOKEN where there are fewer."""


def draft_tokens(tables: DraftTables, recent: Int[Array, "Sl n"], tokens: Int[Array, "Sl"]) -> Int[Array, "Sl Gs"]:
    """What may follow the new tokens of slots whose last tokens before them are `recent`."""
    gram = jnp.concatenate([recent, tokens[:, None]], axis=1)
    return jnp.asarray(tables.entries)[tables.of_slot, _hash(gram.astype(jnp.uint32), tables.entries.shape[1])]


def _hash(grams: jax.Array | np.ndarray, size: int) -> jax.Array | np.ndarray:
    """The entry of each n-gram `[... GRAM]` uint32 in a draft cache of so many entries, a power of two."""
    mixed = grams[..., 0]
    for place in range(1, grams.shape[-1]):
        mixed = (mixed * np.uint32(FACTOR)) ^ (mixed >> np.uint32(MIX)) ^ grams[..., place]
    mixed = mixed * np.uint32(FACTOR)
    return (mixed ^ (mixed >> np.uint32(MIX))) & np.uint32(size - 1)


class DraftCaches:
    """The draft caches as the host writes them."""

    def __init__(self, slots: int, max_length: int, speculate: int):
        """Empty ones, one for each slot at most, for so many tokens of prompt and completion and `speculate` (Gs)."""
        size = min(LARGEST, 1 << max(4, (2 * max_length - 1).bit_length()))
        self._entries = np.full((slots, size, speculate), NO_TOKEN, np.int32)
        self._of_slot = np.zeros(slots, np.int32)
        # Tokens whose continuation is not complete, and the n-gram before them.
        self._tail = np.full((slots, GRAM - 1 + speculate), NO_TOKEN, np.int32)
        self._keys: dict[int, tuple] = {}
        self._cache: dict[tuple, int] = {}
        self._free = list(range(slots))[::-1]

    def open(self, slot: int, key: tuple, tokens: np.ndarray) -> None:
        """Gives a slot the draft cache of a key, which requests of one prompt share, and writes the slot's tokens `[T]`
        into it: the prompt, and what has been sampled after it."""
        if key not in self._cache:
            self._cache[key] = self._free.pop()
            self._entries[self._cache[key]] = NO_TOKEN
        self._keys[slot] = key
        self._of_slot[slot], self._tail[slot] = self._cache[key], NO_TOKEN
        self.write(np.array([slot]), np.asarray(tokens)[None], np.array([len(tokens)]))

    def close(self, slot: int) -> None:
        """Takes a slot's cache back; what is in it goes when its last reader has gone."""
        key = self._keys.pop(slot)
        if key not in self._keys.values():
            self._free.append(self._cache.pop(key))

    def write(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Notes the first `counts[s]` of the new tokens `[Sl T]` of each slot."""
        speculate, width = self._entries.shape[2], self._tail.shape[1]
        # Right behind each other, from the left; what is behind a slot's last token is NO_TOKEN.
        known = np.where(np.arange(tokens.shape[1]) < counts[:, None], tokens, NO_TOKEN)
        every = np.concatenate([self._tail[slots], known, np.full((len(slots), speculate), NO_TOKEN)], axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(every, GRAM + speculate, axis=1)
        grams, after = windows[..., :GRAM], windows[..., GRAM:]
        row, at = np.nonzero(np.all(grams >= 0, axis=-1) & (after[..., 0] >= 0))
        places = _hash(grams[row, at].astype(np.uint32), self._entries.shape[1])
        self._entries[self._of_slot[slots[row]], places] = after[row, at]
        columns = counts[:, None] + np.arange(width)
        self._tail[slots] = np.take_along_axis(every, columns, axis=1)

    def tables(self, slots: np.ndarray) -> DraftTables:
        """What a dispatch of these slots reads: copies, which stay as they are while it runs."""
        return DraftTables(self._entries.copy(), self._of_slot[slots], self._tail[slots, 1 - GRAM :])
