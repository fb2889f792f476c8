"""Guesses by look-up: what is found again, in whose book, and that nothing but the time depends on it."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.rollout.engine.test_engine import MIXED, MODEL, text_of
from tests.rollout.engine.test_engine_parity import prompts, random_params, small_engine
from tests.rollout.engine.test_states import CONFIG as STATES
from tests.trainers import RICH
from tunix.models.model import Model
from tunix.rollout.engine.lookup import GRAM, NO_TOKEN, DraftCaches, draft_tokens
from tunix.rollout.engine.slots import Slots
from tunix.types import Completion, Request, Sampling


def looked_up(caches: DraftCaches, slot: int, tokens: list[int]) -> list[int]:
    """What may follow these tokens, the last GRAM of a slot's."""
    tables = caches.tables(np.array([slot]))
    found = draft_tokens(tables, jnp.array([tokens[:-1]], jnp.int32), jnp.array(tokens[-1:], jnp.int32))
    return found[0].tolist()


def test_what_followed_the_same_tokens_is_guessed():
    caches = DraftCaches(slots=3, max_length=64, speculate=3)
    caches.open(0, ("prompt",), np.array([5, 6, 7, 8, 9]))
    assert looked_up(caches, 0, [5, 6]) == [7, 8, 9]
    assert looked_up(caches, 0, [6, 7]) == [8, 9, NO_TOKEN]
    assert looked_up(caches, 0, [8, 9]) == [NO_TOKEN] * 3
    assert caches.tables(np.array([0])).recent.tolist() == [[9]]
    # Tokens come in any pieces, and complete what was begun; the last time counts.
    caches.write(np.array([0]), np.array([[4, 3, 0]]), np.array([2]))
    assert looked_up(caches, 0, [6, 7]) == [8, 9, 4]
    assert looked_up(caches, 0, [8, 9]) == [4, 3, NO_TOKEN]
    caches.write(np.array([0]), np.array([[5, 6, 1]]), np.array([3]))
    assert looked_up(caches, 0, [5, 6]) == [1, NO_TOKEN, NO_TOKEN]
    assert looked_up(caches, 0, [9, 4]) == [3, 5, 6]


def test_a_prompts_requests_share_a_book_and_others_have_their_own():
    caches = DraftCaches(slots=3, max_length=64, speculate=2)
    caches.open(0, ("a",), np.array([1, 2, 3]))
    caches.open(1, ("b",), np.array([1, 2, 4]))
    caches.open(2, ("a",), np.array([1, 2, 3]))
    caches.write(np.array([0, 1]), np.array([[7, 8, 9], [6, 0, 0]]), np.array([3, 1]))
    assert looked_up(caches, 2, [7, 8]) == [9, NO_TOKEN]
    assert looked_up(caches, 2, [1, 2]) == [3, 7]
    assert looked_up(caches, 1, [1, 2]) == [4, 6]
    assert caches.tables(np.array([2, 0])).recent.tolist() == [[3], [9]]
    # A book is kept as long as somebody reads it, and is empty when it is given away.
    caches.close(0)
    assert looked_up(caches, 2, [7, 8]) == [9, NO_TOKEN]
    caches.close(2)
    caches.open(0, ("c",), np.array([0] * GRAM))
    assert looked_up(caches, 0, [1, 2]) == [NO_TOKEN, NO_TOKEN]


@pytest.fixture(scope="module")
def params():
    return random_params(MODEL)


def repeating(params):
    """Weights under which a token decides about the next one, so that texts come back and guesses are right."""
    return {name: x * 0.05 if name.startswith("layers/") and name.endswith("/w") else x for name, x in params.items()}


@pytest.mark.parametrize("model", [MODEL, *slow([Model(STATES), Model(RICH)])], ids=["plain", "states", "rich"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_guesses_change_no_sample(model, ahead):
    """Neither tokens nor log-probs, alternatives, turns and ends; with every setting, replies, and few pages."""
    weights = repeating(random_params(model))

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        return np.array([4, 9, 5], np.int32) if len(so_far.turns) < 2 else None

    texts = Request(MIXED[0].prompt, Sampling(max_tokens=40, stop_strings=("#", "A")), 7, len(MIXED))
    asked = [*MIXED, texts]
    plain = small_engine(model, weights, decode=text_of).run(asked, reply)
    guessing = small_engine(model, weights, decode=text_of, speculate=3, ahead=ahead).run(asked, reply)
    for one, other in zip(plain, guessing, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.finish, one.turns) == (other.finish, other.turns)
        if one.top is not None:
            assert other.top is not None
            np.testing.assert_array_equal(one.top[0], other.top[0])


@pytest.mark.slow
def test_no_guess_stands_behind_a_stop_id(params, monkeypatch):
    """Of one greedy prompt, a request that runs on is ahead of one that stops: the book knows what follows the stop."""
    weights, (prompt,) = repeating(params), prompts(MODEL.config.vocab_size, (5,))
    plain = small_engine(MODEL, weights, slots=1)
    (text,) = plain.run([Request(prompt, Sampling(max_tokens=30, temperature=0.0), 7)])
    stop = int(text.tokens[12])
    ends = Sampling(max_tokens=30, temperature=0.0, stop_ids=(stop,))
    settings = [Sampling(max_tokens=40, temperature=0.0), Sampling(max_tokens=6, temperature=0.0), ends]
    asked = [Request(prompt, x, 7, number) for number, x in enumerate(settings)]
    # The third request enters when the second one has ended; a step of it has guesses from the first one's text.
    found = small_engine(MODEL, weights, slots=2, steps=16, speculate=3).run(asked)[2]
    first = text.tokens.tolist().index(stop)
    assert (found.tokens.tolist(), found.finish) == (text.tokens[: first + 1].tolist(), "stop")


@pytest.mark.slow
def test_right_guesses_save_steps(params, monkeypatch):
    """A greedy text that runs in a circle is guessed from its second round on, four tokens a step."""
    dispatches: list[int] = []
    take = Slots.take
    monkeypatch.setattr(Slots, "take", lambda self, *given: dispatches.append(1) or take(self, *given))
    asked = [Request(prompts(MODEL.config.vocab_size, (5,))[0], Sampling(max_tokens=55, temperature=0.0), 7)]
    weights, tokens, taken = repeating(params), [], []
    for number in (0, 3):
        dispatches.clear()
        # A dispatch is four steps of one token, or a step of up to four.
        engine = small_engine(MODEL, weights, slots=1, steps=4, speculate=number)
        tokens.append(engine.run(asked)[0].tokens.tolist())
        taken.append(len(dispatches))
    assert tokens[0] == tokens[1]
    first = len(set(tokens[0]))
    assert first < 20, "the text comes back"
    assert taken[0] == 14
    # The first round one by one, an n-gram until it is known again, then four at a time.
    assert taken[1] <= first + GRAM + -(-(55 - first) // 4)


@pytest.mark.slow
def test_frequencies_with_guesses_are_those_of_the_model(params):
    """Chi-square of the third sampled token over many seeds: expected counts by the model's own distribution."""
    prompt = prompts(MODEL.config.vocab_size, (6,))[0]
    number = 3000
    asked = [Request(prompt, Sampling(max_tokens=3, top_k=3), 5, index) for index in range(number)]
    found = small_engine(MODEL, params, slots=64, speculate=2, steps=3).run(asked)
    counts = Counter(tuple(completion.tokens.tolist()) for completion in found)
    chances = {tuple(c.tokens.tolist()): float(np.exp(c.logprobs.sum())) for c in found}
    # 27 sequences; those that nobody sampled are one cell.
    rest = 1.0 - sum(chances.values())
    cells = [(counts[tokens], number * chance) for tokens, chance in chances.items()]
    cells.append((0, max(number * rest, 1e-9)))
    chi_square = sum((seen - expected) ** 2 / expected for seen, expected in cells if expected >= 5)
    # 26 degrees of freedom: above 54 once in a thousand.
    assert chi_square < 54.05
