"""Environments of OpenEnv (https://github.com/huggingface/OpenEnv), each episode a session of a server over WebSocket.

    {openenv: "http://host:8000", options: {observation: prompt, action: answer}}

`/schema` of the server says which fields its actions and observations have. A session is opened by `reset` and closed
at the end of the episode, also of one that has failed; where the worker is killed its sockets close, upon which the
server ends the session. A connection that was lost is not made again: another session knows nothing of the episode.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import numpy as np

from tunix.errors import UserError, nearest
from tunix.rollout.environments.adapters import SIZE, row_seed
from tunix.rollout.environments.base import Environment, EpisodeError, Observation, Row, Step


class OpenEnv(Environment):
    """A session of an OpenEnv server."""

    replayable: ClassVar[bool] = False

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        reset: dict[str, Any] | None = None,
        columns: list[str] | None = None,
        chat: bool = False,
        size: int = SIZE,
    ) -> None:
        """Asks the server for its schema; no session is opened.

        Args:
            url: the server's address, e.g. `http://host:8000`.
            action: the action's field that is the text of a turn. None: the only one that is required; a turn that is
                a JSON object is the whole action in any case.
            observation: the observation's field that the model reads, a text as it is, anything else as JSON. None: the
                only field that is a text.
            reset: arguments of the server's `reset`, the same for all episodes.
            columns: columns of the row that are arguments of `reset`, too. In rows of its own, `seed` and `index`, the
                argument `seed` follows from both.
            chat: whether observations are messages of a user, for a model with a chat template; else plain text.
            size: rows that it makes where the recipe names none.

        Raises:
            UserError: no such server, or a field that is not in its schema.
        """
        from openenv.core.generic_client import GenericEnvClient

        schema = _schema(url)
        self._connect = GenericEnvClient
        self._url, self._chat, self._reset, self._columns = url, chat, reset or {}, columns or []
        self._client: Any = None
        self._socket: Any = None
        chosen = dict[str, str]()
        for option, name in (("observation", observation), ("action", action)):
            fields = {key: x for key, x in schema[option]["properties"].items() if key not in ADDED}
            meant = [key for key, field in fields.items() if field.get("type") == "string"]
            meant = schema[option].get("required", []) if option == "action" else meant
            if name not in fields and (name is not None or len(meant) != 1):
                wrong = f"{name!r} is none of them" if name else "is not set, and no single field is meant by that"
                raise UserError(
                    f"rollout.environment.options.{option}: the {option} of {url} has the fields "
                    f"{', '.join(fields) or 'none'}; the option {wrong}.{nearest(name or '', fields)}"
                )
            chosen[option] = name or meant[0]
        self._shown, self._acted = chosen["observation"], chosen["action"]

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """Opens a session and resets it.

        Raises:
            UserError: nothing answers, the server refuses another session, or its `reset` fails.
        """
        if missing := [name for name in self._columns if name not in row]:
            raise UserError(
                f"rollout.environment.options.columns: {missing[0]!r} is no column of the rows, which have "
                f"{', '.join(row)}.{nearest(missing[0], row)}"
            )
        arguments = {**self._reset, **{name: row[name] for name in self._columns}}
        if {"seed", "index"} <= row.keys():
            arguments = {"seed": row_seed(row), **arguments}
        seconds = self.patience
        self._client = self._connect(self._url, connect_timeout_s=seconds, message_timeout_s=seconds).sync()
        try:
            result = self._client.reset(**arguments)
        except Exception as error:
            full = "CAPACITY_REACHED" in str(error)
            remedy = "raise its max_concurrent_envs: an episode is a session" if full else "start it, or mend it"
            raise UserError(
                f"the environment server {self._url} starts no session ({_said(error)}): {remedy}"
            ) from error
        self._socket = self._client.async_client._ws
        return self._read(result.observation)

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """Sends an action; one that the server's schema refuses is answered with the reason, for the model to read.

        Raises:
            EpisodeError: the server does not answer, or its `step` raised.
        """
        try:
            turn = json.loads(action)
        except ValueError:
            turn = None
        if not isinstance(turn, dict):
            turn = {self._acted: action.strip()}
        # The client would connect again by itself, to a session that is another.
        if self._client.async_client._ws is not self._socket or self._socket.close_code is not None:
            raise EpisodeError(f"lost its session at {self._url}")
        try:
            result = self._client.step(turn)
        except Exception as error:
            if "VALIDATION_ERROR" in str(error):
                return Step(self._read({self._shown: f"not a valid action: {json.dumps(turn)}\n"}))
            raise EpisodeError(f"lost its session at {self._url}, or broke it: {_said(error)}") from error
        return Step(self._read(result.observation), result.reward, bool(result.done))

    def close(self) -> None:
        """Closes the session."""
        if self._client is not None:
            self._client.close()

    def _read(self, observation: Mapping[str, Any]) -> Observation:
        if self._shown not in observation:
            raise EpisodeError(f"answered without {self._shown!r}, with {', '.join(observation) or 'no field'}")
        value = observation[self._shown]
        text = value if isinstance(value, str) else json.dumps(value)
        return [{"role": "user", "content": text}] if self._chat else text


ADDED = ("metadata", "reward", "done")
"""Fields that every action or observation has."""


@cache
def _schema(url: str) -> Mapping[str, Any]:
    """JSON schemas of the server's actions and of the observations of its `reset`.

    Raises:
        UserError: nothing answers as such a server does.
    """
    where = f"rollout.environment: openenv: {url}"
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UserError(f"{where} is no address of a server; write http://host:8000")
    try:
        schema = httpx.get(f"{url.rstrip('/')}/schema", timeout=5.0).raise_for_status().json()
        names = {"action": "action", "observation": "reset_observation"}
        return {option: {"properties": {}, **schema[name]} for option, name in names.items()}
    except httpx.HTTPError as error:
        raise UserError(
            f"{where}: no environment server answers ({_said(error)}): start it, or mend the address"
        ) from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where} answers, but not as a server of OpenEnv 0.10") from None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
