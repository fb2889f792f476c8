"""Games of guessing a number, for the first stage of a tiny model that then learns to win them."""

from typing import Any

import numpy as np

from tunix.data.tokenizer import Tokenizer, bytes_tokenizer
from tunix.rollout.environments.base import Episode
from tunix.rollout.environments.guessing import HIGHER, Guessing


def demonstrations(
    count: int = 4096, seed: int = 0, highest: int = 31, guesses: int = 5, tokenizer: Tokenizer | None = None
) -> list[dict[str, Any]]:
    """Games for a first stage of SFT: rows of `input_ids` and a `loss_mask` that trains the guesses only.

    In every other game guesses are random, in the rest they agree with the answers so far, so that a model learns the
    rules and the idea, and still has most of the strategy to find.

    Args:
        count: games, won or lost.
        seed: for the secrets and the guesses.
        highest: see `Guessing`.
        guesses: see `Guessing`.
        tokenizer: encodes the games; None takes the bytes tokenizer, a recipe's `model: {tokenizer: bytes}`.
    """
    rng = np.random.default_rng(seed)
    known = tokenizer or bytes_tokenizer()
    return [_game(i % 2 == 1, rng, Guessing(highest, guesses), known) for i in range(count)]


def _game(sensible: bool, rng: np.random.Generator, game: Guessing, tokenizer: Tokenizer) -> dict[str, Any]:
    """One game as tokens and mask, concatenated as the sampler does it."""
    episode = Episode(game, {}, rng, tokenizer, turns=1000)
    tokens, mask = list(episode.prompt), [0] * len(episode.prompt)
    low, high = 1, game.highest
    while not episode.done:
        guess = int(rng.integers(low, high + 1)) if sensible else int(rng.integers(1, game.highest + 1))
        action = tokenizer.encode(f"{guess}\n")
        observed = episode.turn(np.asarray(action, np.int32))
        seen = [] if observed is None else list(observed)
        tokens += [*action, *seen]
        mask += [1] * len(action) + [0] * len(seen)
        if tokenizer.decode(seen) == HIGHER:
            low = max(low, guess + 1)
        elif seen:
            high = min(high, guess - 1)
    return {"input_ids": [int(token) for token in tokens], "loss_mask": mask}
