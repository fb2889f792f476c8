"""The pictures of a part of a sequence, and of one that goes on, and where rope turns their tokens to.

Axes: T time, Pi pictures.
"""

import numpy as np

from tunix.types import Pictures


def within(pictures: Pictures, begin: int, end: int) -> Pictures:
    """The pictures of the tokens `begin` to `end` of a sequence, none of which is cut, numbered from the first one."""
    at, counts = np.asarray(pictures.places)[begin:end], np.prod(pictures.grids, axis=-1)
    seen, ends = at[at > 0], np.cumsum(counts)
    first = np.searchsorted(ends, seen[0]) if len(seen) else 0
    last = np.searchsorted(ends, seen[-1]) + 1 if len(seen) else 0
    assert len(seen) == counts[first:last].sum(), "pictures are whole"
    places = np.where(at > 0, at - counts[:first].sum(), 0).astype(np.int32)
    rope = None if pictures.rope is None else pictures.rope[begin:end]
    return Pictures(pictures.pixels[first:last], pictures.grids[first:last], places, rope)


def followed(pictures: Pictures | None, number: int) -> Pictures | None:
    """The pictures of a sequence that goes on with so many tokens of text, whatever their ids are; None without any."""
    if pictures is None:
        return None
    rope = pictures.rope
    if rope is not None:
        after = np.max(rope[-1]) + np.arange(1, number + 1, dtype=np.int32)
        rope = np.concatenate([rope, np.repeat(after[:, None], 3, axis=1)])
    return Pictures(pictures.pixels, pictures.grids, np.pad(np.asarray(pictures.places), (0, number)), rope)


def rope_positions(places: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """`[T 3]` int32: where the multimodal rope of Qwen turns each token to (M-RoPE, https://arxiv.org/abs/2409.12191).

    Text counts on in all three. A picture's tokens all have the time of the first one, and its row and column beside
    it; what follows counts on after the larger of its sides.

    Args:
        places: `[T]` as in `Pictures`.
        grids: `[Pi 2]` as in `Pictures`.
    """
    turned = np.zeros((len(places), 3), np.int32)
    at, seen, now = 0, 0, 0
    for rows, columns in np.asarray(grids).tolist():
        first, number = int(np.flatnonzero(places == seen + 1)[0]), rows * columns
        turned[at:first] = now + np.arange(first - at)[:, None]
        now += first - at
        turned[first : first + number] = now
        turned[first : first + number, 1:] += np.indices((rows, columns)).reshape(2, -1).T
        at, seen, now = first + number, seen + number, now + max(rows, columns)
    turned[at:] = now + np.arange(len(places) - at)[:, None]
    return turned
