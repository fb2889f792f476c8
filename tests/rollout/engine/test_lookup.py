"""Guesses by look-up: what is found again, and in whose book."""

import jax.numpy as jnp
import numpy as np

from tunix.rollout.engine.lookup import GRAM, NONE, Library, guesses


def looked_up(library: Library, slot: int, tokens: list[int]) -> list[int]:
    """What may follow these tokens, the last GRAM of a slot's."""
    books = library.books(np.array([slot]))
    found = guesses(books, jnp.array([tokens[:-1]], jnp.int32), jnp.array(tokens[-1:], jnp.int32))
    return found[0].tolist()


def test_what_followed_the_same_tokens_is_guessed():
    library = Library(slots=3, length=64, guesses=3)
    library.open(0, ("prompt",), np.array([5, 6, 7, 8, 9]))
    assert looked_up(library, 0, [5, 6]) == [7, 8, 9]
    assert looked_up(library, 0, [6, 7]) == [8, 9, NONE]
    assert looked_up(library, 0, [8, 9]) == [NONE] * 3
    assert library.books(np.array([0])).recent.tolist() == [[9]]
    # Tokens come in any pieces, and complete what was begun; the last time counts.
    library.write(np.array([0]), np.array([[4, 3, 0]]), np.array([2]))
    assert looked_up(library, 0, [6, 7]) == [8, 9, 4]
    assert looked_up(library, 0, [8, 9]) == [4, 3, NONE]
    library.write(np.array([0]), np.array([[5, 6, 1]]), np.array([3]))
    assert looked_up(library, 0, [5, 6]) == [1, NONE, NONE]
    assert looked_up(library, 0, [9, 4]) == [3, 5, 6]


def test_a_prompts_requests_share_a_book_and_others_have_their_own():
    library = Library(slots=3, length=64, guesses=2)
    library.open(0, ("a",), np.array([1, 2, 3]))
    library.open(1, ("b",), np.array([1, 2, 4]))
    library.open(2, ("a",), np.array([1, 2, 3]))
    library.write(np.array([0, 1]), np.array([[7, 8, 9], [6, 0, 0]]), np.array([3, 1]))
    assert looked_up(library, 2, [7, 8]) == [9, NONE]
    assert looked_up(library, 2, [1, 2]) == [3, 7]
    assert looked_up(library, 1, [1, 2]) == [4, 6]
    assert library.books(np.array([2, 0])).recent.tolist() == [[3], [9]]
    # A book is kept as long as somebody reads it, and is empty when it is given away.
    library.close(0, ("a",))
    assert looked_up(library, 2, [7, 8]) == [9, NONE]
    library.close(2, ("a",))
    library.open(0, ("c",), np.array([0] * GRAM))
    assert looked_up(library, 0, [1, 2]) == [NONE, NONE]
