"""Games of TextArena (https://github.com/LeonGuertler/TextArena), for one player or for two seats in one transcript.

    rollout:
      environment: {textarena: TicTacToe-v0}

The same weights play both seats, as in SPIRAL (https://arxiv.org/abs/2506.24119). The transcript is what TextArena
shows its players: what the game tells either, each text once, then `[Player 1]`, whose turn it is. A turn is credited
by the outcome of its seat. Whoever reads it sees what both seats are told, so that games with secrets are refused.
"""

import contextlib
import functools
import importlib
import io
import json
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn
from unittest import mock

import numpy as np

from tunix.errors import UserError, nearest
from tunix.rollout.environments.adapters import SIZE, row_seed
from tunix.rollout.environments.base import EpisodeError, Observation, Row, Step
from tunix.rollout.environments.problem import Problem

SECRET = ("NewRecruit",)
"""Games whose secrets follow from the role alone, which no comparison of deals can show."""


class Table:
    """A game that has been dealt, with random numbers of its own: the package's are those of the whole process."""

    def __init__(self, game: str, settings: dict[str, Any], seats: int, seed: int) -> None:
        """Deals; raises whatever the game does, and `UserError` where it asks for the network."""
        textarena: Any = importlib.import_module("textarena")
        random.seed(seed)
        np.random.seed(seed)
        self._random, self._numpy = random.getstate(), np.random.get_state()
        with self.alone():
            self.game = inner = textarena.make(game, **settings)
            self.game.reset(num_players=seats, seed=seed)
            while isinstance(inner, textarena.Wrapper):  # observations are taken from within, actions go through them
                inner = inner.env
        self.state: Any = inner.state

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it the game has its random numbers, and neither the network, keys of model servers nor our output."""

        def refuse(host: Any, *_: Any, **__: Any) -> NoReturn:
            raise UserError(f"it asks for {host!s}: games that need the network are not played")

        keys = {name: "" for name in os.environ if name.endswith("_API_KEY")}
        before = random.getstate(), np.random.get_state()
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        try:
            with (
                mock.patch.object(socket, "getaddrinfo", refuse),
                mock.patch.dict(os.environ, keys),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                yield
        finally:
            self._random, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])

    def heard(self, mover: int | None = None) -> tuple[list[Any], list[Any], bool]:
        """What was said since the last call, last what the next seat was told; what of it was not told to all; and
        whether all were told of the move of `mover`, whose text is left out."""
        state = self.state
        queues = {seat: [m for m in queue if m[0] != mover] for seat, queue in state.observations.items()}
        announced = all(seat == mover or len(queues[seat]) < len(queue) for seat, queue in state.observations.items())
        for queue in state.observations.values():
            queue.clear()
        current = queues.pop(state.current_player_id)
        others = [m for queue in queues.values() for m in (Counter(queue) - Counter(current)).elements()]
        alone = [m for queue in queues.values() for m in (Counter(current) - Counter(queue)).elements()]
        return [*others, *current], [*others, *alone], announced


@functools.lru_cache
def seats_of(game: str, settings: str) -> int:
    """How many play a game, 1 or 2.

    Raises:
        UserError: it is not known, wants other players, the network, a model or a package, or has secrets.
    """
    known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    what, arguments = f"the game {game} of textarena", json.loads(settings)
    if game not in known:
        raise UserError(f"{what} is not known.{nearest(game, known)}")
    reasons: list[str] = []
    for seats in (1, 2):
        try:
            table = Table(game, arguments, seats, 0)
        except Exception as error:  # of the game, whatever it is
            text = str(error).strip() or type(error).__name__
            reasons.append("it needs a language model" if "API key" in text else " ".join(text.strip("* ").split()))
            continue
        if seats == 1 and type(table.state).__name__ != "SinglePlayerState":
            continue  # of several players, though it would start with one
        if seats == 1:
            return 1
        deals = [str(Table(game, arguments, 2, seed).heard()[1]) for seed in range(4)]
        mover = table.state.current_player_id
        table.heard()
        with table.alone():
            table.game.step("[0]")
        if len(set(deals)) > 1 or not table.heard(mover)[2] or game.partition("-")[0] in SECRET:
            raise UserError(
                f"{what} has secrets, such as cards or moves at the same time, and both seats would read those of both "
                "in one transcript: choose another game"
            )
        return 2
    raise UserError(f"{what} cannot be played by one player or two seats: {reasons[-1]:.200}")


class TextArena(Problem):
    """A game to its end; illegal moves are told and scored as TextArena does it."""

    scores: ClassVar[bool] = True

    def __init__(
        self,
        *,
        game: str,
        settings: dict[str, Any] | None = None,
        size: int = SIZE,
        rules: str | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        """Looks whether a game can be played.

        Args:
            game: its name in TextArena's registry, e.g. `TicTacToe-v0`.
            settings: arguments of the game, e.g. `{"max_number": 10}`.
            size: rows of a run.
            rules: text in place of the game's own instructions.
            chat: see `Problem`, as `system`.

        Raises:
            UserError: see `seats_of`.
        """
        super().__init__(None, chat, system)
        self._game, self._settings, self._rules = game, settings or {}, rules
        self._seats = seats_of(game, json.dumps(self._settings))

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """What the game says at the start, dealt by the row's `seed` and `index`."""
        self._table = Table(self._game, self._settings, self._seats, row_seed(row))
        messages, _, _ = self._table.heard()
        if self._rules is not None:
            messages = [m for m in messages if m[2].name != "PROMPT"]
        start = (self._rules or "") + self._said(messages)
        return super().reset({"prompt": start.lstrip("\n")}, rng)

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """What the game says after a move, or the outcome of each seat.

        Raises:
            EpisodeError: the other seat was not told of the move, or the game gives no outcome.
        """
        table, seat = self._table, self._table.state.current_player_id
        with table.alone():
            done, _ = table.game.step(action)
            outcomes = (table.game.close()[0] if done else None) or {}
        messages, _, announced = table.heard(seat)
        if not (announced or done):
            raise EpisodeError("hides a move from the other seat")
        if done and not outcomes:
            raise EpisodeError("ended the game without an outcome")
        if done:
            return Step(done=True, seat=seat, outcomes=outcomes)
        return Step(self.message(self._said(messages)), seat=seat)

    def _said(self, messages: list[Any]) -> str:
        """Messages as TextArena shows them, and whose turn it is."""
        roles, seat = self._table.state.role_mapping, self._table.state.current_player_id
        texts = [f"[{roles.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in messages]
        return "".join(f"\n{text}" for text in [*texts, f"[{roles.get(seat, f'Player {seat}')}] "])
