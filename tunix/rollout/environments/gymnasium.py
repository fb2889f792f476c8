"""Environments of Gymnasium (https://gymnasium.farama.org) that a language model can read and answer.

    rollout:
      environment:
        gymnasium: FrozenLake-v1
        options: {settings: {is_slippery: false, max_episode_steps: 12}, actions: [left, down, right, up]}

Observations are texts (`Text`), or states (`Discrete`) with a text rendering (`ansi`); actions are texts, or numbers
or their names. `gymnasium:my_module:Mine-v0` imports the module that registers it, as `gymnasium.make` does.
"""

import importlib
import re
from typing import Any, ClassVar

import numpy as np

from tunix.errors import UserError, nearest
from tunix.rollout.environments.adapters import SIZE, row_seed
from tunix.rollout.environments.base import Observation, Row, Step
from tunix.rollout.environments.problem import Problem, extracted


class Gymnasium(Problem):
    """An episode until it is terminated or truncated; the reward of each action belongs to its turn."""

    scores: ClassVar[bool] = True

    def __init__(
        self,
        *,
        game: str,
        settings: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        illegal: float = -1.0,
        size: int = SIZE,
        extract: str | None = None,
        rules: str | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        """Makes the environment.

        Args:
            game: its name in Gymnasium's registry, e.g. `FrozenLake-v1`.
            settings: arguments of `gymnasium.make`, e.g. `{"max_episode_steps": 12}`.
            actions: names of the numbers of a `Discrete` action space, in their order.
            illegal: reward of an answer that is no action, which ends the episode.
            size: rows of a run.
            extract: where the action is in the model's text; see `extracted`. None for all of it.
            rules: text before the first observation.
            chat: see `Problem`, as `system`.

        Raises:
            UserError: there is no such environment, it cannot be made, or its spaces are others.
        """
        super().__init__(None, chat, system)
        gymnasium: Any = importlib.import_module("gymnasium")
        discrete, text = gymnasium.spaces.Discrete, gymnasium.spaces.Text
        what = f"the environment gymnasium:{game}"
        settings = {"disable_env_checker": True, **(settings or {})}
        try:
            env = gymnasium.make(game, **settings)
            if isinstance(env.observation_space, discrete) and "ansi" in env.metadata.get("render_modes", ()):
                env = gymnasium.make(game, **{"render_mode": "ansi", **settings})
        except Exception as error:  # of the environment's own code, too
            hint = nearest(game, gymnasium.registry) if isinstance(error, gymnasium.error.UnregisteredEnv) else ""
            raise UserError(f"{what} cannot be made: {' '.join(str(error).split())}{hint}") from error
        seen, taken = env.observation_space, env.action_space
        readable = isinstance(seen, text) or (isinstance(seen, discrete) and env.render_mode == "ansi")
        if not readable or not isinstance(taken, discrete | text):
            raise UserError(
                f"{what} has observations {seen} and actions {taken}: played are Text, or Discrete observations with "
                "the render mode ansi, and Text or Discrete actions; wrap it in one that has these"
            )
        self._env, self._rules, self._illegal, self._extract = env, rules, illegal, extract
        self._actions: dict[str, int] | None = None
        if isinstance(taken, discrete):
            numbers = range(int(taken.start), int(taken.start + taken.n))
            names = [str(number) for number in numbers] if actions is None else actions
            if len(set(map(str.casefold, names))) != len(numbers):
                raise UserError(f"{what} has {len(numbers)} actions; the option actions names {names}")
            self._actions = dict(zip(map(str.casefold, names), numbers, strict=True))
        elif actions is not None:
            raise UserError(f"{what} has actions that are texts, {taken}: leave the option actions out")

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """The rules and the first observation, with the seed of the row's `seed` and `index`."""
        observation, _ = self._env.reset(seed=row_seed(row))
        return super().reset({"prompt": (self._rules or "") + self._read(observation)}, rng)

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """The next observation with the reward of the action, or the end."""
        text = extracted(action, self._extract)
        chosen: Any = text if self._actions is None or text is None else self._actions.get(text.casefold())
        if chosen is None or not self._env.action_space.contains(chosen):
            return Step(reward=self._illegal, done=True)
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        if terminated or truncated:
            return Step(reward=float(reward), done=True)
        return Step(self.message(f"\n{self._read(observation)}"), reward=float(reward))

    def _read(self, observation: Any) -> str:
        """An observation as text, with a mark in brackets where a terminal would show it in colour."""
        text = observation if isinstance(observation, str) else str(self._env.render())
        return re.sub(r"(?:\x1b\[[\d;]*m)+([^\x1b]*)(?:\x1b\[0m)+", r"[\1]", text)
