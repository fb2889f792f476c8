"""Guesses of the next tokens by look-up, for speculative decoding: what followed the same few tokens before.

Saxena, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding), with the answers of a prompt's
other requests beside the prompt itself. A book has, for each n-gram of the tokens of one prompt's requests, the tokens
that followed it last. The host writes books as dispatches are read; the device looks its guesses up (`guesses`).

A guess only proposes. The token that a request samples at an index follows from the model and from (seed, request,
index); a guess that equals it saves a step, and any other is dropped. So tokens are distributed as the model says, and
what is in a book, or still on its way, changes none of them. A guess x is right with the model's probability of x: no
way to accept single guesses does better (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative
Decoding", https://arxiv.org/abs/2211.17192).

Axes: Sl slots, Bk books, En entries of a book, Gs guesses, T time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

GRAM = 2
"""Tokens of an n-gram, the new one among them: fewer are found more often, and more are right more often."""
LARGEST = 1 << 13
"""Entries of a book at most; n-grams with the same hash share one."""
NONE = -1
"""A guess that there is none: no token equals it."""
FACTOR, MIX = 0x9E3779B1, 15
"""Knuth's multiplicative hash (The Art of Computer Programming, volume 3, 6.4): 2^32 over the golden ratio, odd."""


class Books(NamedTuple):
    """What a dispatch reads of the books."""

    entries: jax.Array | np.ndarray
    """`[Bk En Gs]` int32 the tokens after each n-gram, by its hash; NONE where nothing is known."""
    own: jax.Array | np.ndarray
    """`[Sl]` int32 the book of each slot."""
    recent: jax.Array | np.ndarray
    """`[Sl GRAM-1]` int32 the last tokens of each slot, as the host knows them; NONE where there are fewer."""


def guesses(books: Books, recent: Int[Array, "Sl n"], tokens: Int[Array, "Sl"]) -> Int[Array, "Sl Gs"]:
    """What may follow the new tokens of slots whose last tokens before them are `recent`."""
    gram = jnp.concatenate([recent, tokens[:, None]], axis=1)
    return jnp.asarray(books.entries)[books.own, _hash(gram.astype(jnp.uint32), books.entries.shape[1])]


def _hash(grams: jax.Array | np.ndarray, size: int) -> jax.Array | np.ndarray:
    """The entry of each n-gram `[... GRAM]` uint32 in a book of so many entries, a power of two."""
    mixed = grams[..., 0]
    for place in range(1, grams.shape[-1]):
        mixed = (mixed * np.uint32(FACTOR)) ^ (mixed >> np.uint32(MIX)) ^ grams[..., place]
    mixed = mixed * np.uint32(FACTOR)
    return (mixed ^ (mixed >> np.uint32(MIX))) & np.uint32(size - 1)


class Library:
    """The books as the host writes them."""

    def __init__(self, slots: int, length: int, guesses: int):
        """Empty books, one for each slot at most.

        Args:
            slots: of the engine.
            length: tokens of prompt and completion at most.
            guesses: Gs, e.g. 4.
        """
        size = min(LARGEST, 1 << max(4, (2 * length - 1).bit_length()))
        self._entries = np.full((slots, size, guesses), NONE, np.int32)
        self._own = np.zeros(slots, np.int32)
        # Tokens whose continuation is not complete, and the n-gram before them.
        self._tail = np.full((slots, GRAM - 1 + guesses), NONE, np.int32)
        self._keys: dict[int, tuple] = {}
        self._book: dict[tuple, int] = {}
        self._free = list(range(slots))[::-1]

    def open(self, slot: int, key: tuple, tokens: np.ndarray) -> None:
        """Gives a slot the book of a prompt, and writes the slot's tokens `[T]` into it.

        Args:
            slot: has no book.
            key: equal for requests that share a book.
            tokens: the prompt, and what has been sampled after it.
        """
        if key not in self._book:
            self._book[key] = self._free.pop()
            self._entries[self._book[key]] = NONE
        self._keys[slot] = key
        self._own[slot], self._tail[slot] = self._book[key], NONE
        self.write(np.array([slot]), np.asarray(tokens)[None], np.array([len(tokens)]))

    def close(self, slot: int) -> None:
        """Takes a slot's book back; what is in it goes when its last reader has gone."""
        key = self._keys.pop(slot)
        if key not in self._keys.values():
            self._free.append(self._book.pop(key))

    def write(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Notes new tokens.

        Args:
            slots: `[Sl]`.
            tokens: `[Sl T]`.
            counts: `[Sl]` how many of them there are; the rest means nothing.
        """
        guesses, width = self._entries.shape[2], self._tail.shape[1]
        # Right behind each other, from the left; what is behind a slot's last token is NONE.
        known = np.where(np.arange(tokens.shape[1]) < counts[:, None], tokens, NONE)
        every = np.concatenate([self._tail[slots], known, np.full((len(slots), guesses), NONE)], axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(every, GRAM + guesses, axis=1)
        grams, after = windows[..., :GRAM], windows[..., GRAM:]
        row, at = np.nonzero(np.all(grams >= 0, axis=-1) & (after[..., 0] >= 0))
        places = _hash(grams[row, at].astype(np.uint32), self._entries.shape[1])
        self._entries[self._own[slots[row]], places] = after[row, at]
        columns = counts[:, None] + np.arange(width)
        self._tail[slots] = np.take_along_axis(every, columns, axis=1)

    def books(self, slots: np.ndarray) -> Books:
        """What a dispatch of these slots reads: copies, which stay as they are while it runs."""
        return Books(self._entries.copy(), self._own[slots], self._tail[slots, 1 - GRAM :])
