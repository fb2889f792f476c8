"""Servers that speak OpenAI's protocol, such as vLLM's or a provider's: a judge, or a teacher that scores tokens.

Calls run in an event loop in a thread of their own, so many at a time at most. One that comes to nothing for a reason
that may pass (429, 5xx, a connection that breaks) is repeated, after what the server asks for and longer from time to
time, until the deadline.
"""

import asyncio
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from tunix.data.chat import Message
from tunix.errors import Failure, UserError, nearest
from tunix.rollout.rewards.config import JudgeConfig
from tunix.rollout.servers.handover import cards
from tunix.rollout.servers.protocol import Failed, Refused
from tunix.rollout.servers.server import PAUSE, Server

LONGEST_PAUSE = 8.0
"""Seconds between two attempts at most, where the server asks for no more."""


class Endpoint:
    """A server that is asked from outside of an event loop."""

    def __init__(
        self,
        url: str,
        section: str,
        *,
        key: str,
        served: str | None,
        key_variable: str | None,
        deadline: float,
        concurrency: int,
    ):
        """Looks whether it is there, and which model it serves.

        Args:
            url: with its path, e.g. http://host:8000/v1.
            section: of the recipe, e.g. reward.judge, for messages.
            key: of `url` there.
            served: name of the model to ask for; None for the only one.
            key_variable: environment variable with its key; None for no key.
            deadline: seconds in which a call has to be answered, further attempts included.
            concurrency: calls at a time.

        Raises:
            UserError: it does not answer, serves another model or several, or there is no key for it.
        """
        headers = {}
        if key_variable is not None:
            if not os.environ.get(key_variable):
                raise UserError(f"{section}.key_variable: {key_variable} is not set in the environment: export it")
            headers["Authorization"] = f"Bearer {os.environ[key_variable]}"
        self.url, self._section, self._where, self._deadline = url, section, f"{section}.{key}: {url}", deadline
        self._numbers, self._name = itertools.count(), section.rpartition(".")[2]
        self._server, self._room = Server(url, deadline, headers), asyncio.Semaphore(concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._closed = False
        self._thread.start()
        try:
            self.served = asyncio.run_coroutine_threadsafe(self._model(served), self._loop).result()
        except BaseException:
            self.close()
            raise

    def begin(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> Future[list[Any]]:
        """Asks each of these; the answers as read from JSON, or a `Failure` for one that has none.

        Raises:
            CancelledError: it is closed.
        """

        async def together() -> list[Any]:
            return await asyncio.gather(*(self._asked(path, body) for body in bodies))

        if self._closed:
            raise CancelledError
        return asyncio.run_coroutine_threadsafe(together(), self._loop)

    def close(self) -> None:
        """Gives up what is being asked, and ends the thread."""

        async def cancelled() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(cancelled(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _model(self, served: str | None) -> str:
        """The name of the model to ask for."""
        try:
            names = [str(card["id"]) for card in await cards(self._server, "/models")]
        except Refused as error:
            if served is not None:  # some list nothing
                return served
            raise UserError(f"{self._where}: {error}; name its model in {self._section}.served") from None
        except (Failed, KeyError, TypeError) as error:
            raise UserError(f"{self._where} cannot be asked: {error}. Start it, or correct the address") from None
        if served is None:
            if len(names) != 1:
                listed = ", ".join(names[:8]) or "none"
                raise UserError(
                    f"{self._where} lists {len(names)} models ({listed}): name it in {self._section}.served"
                )
            return names[0]
        if served not in names:
            hint = nearest(served, names)
            raise UserError(
                f"{self._section}.served: {self.url} has no model {served!r}, but {', '.join(names[:8])}.{hint}"
            )
        return served

    async def _asked(self, path: str, body: Mapping[str, Any]) -> Any:
        last, pause = "", PAUSE
        async with self._room:
            try:
                async with asyncio.timeout(self._deadline):
                    while True:
                        try:
                            identity = f"tunix-{self._name}-{next(self._numbers)}"
                            return await self._server.call(path, body, identity)
                        except Failed as error:
                            last = f" (the last time {error})"
                            await asyncio.sleep(max(pause, error.after))
                            pause = min(2 * pause, LONGEST_PAUSE)
            except Refused as error:
                return Failure(f"{self._name} is refused: {error}")
            except TimeoutError:
                return Failure(f"{self._name} did not answer in {self._deadline:g} s{last}")


class ChatServer(Endpoint):
    """A judge that is asked for replies."""

    def __init__(self, config: JudgeConfig):
        """As an `Endpoint`, by the recipe's `reward.judge`."""
        self._config = config
        super().__init__(
            config.model,
            "reward.judge",
            key="model",
            served=config.served,
            key_variable=config.key_variable,
            deadline=config.deadline,
            concurrency=config.concurrency,
        )

    def __call__(self, conversations: Sequence[Sequence[Message]]) -> list[str | Failure]:
        """The reply to each conversation, or why there is none."""
        settings = {"model": self.served, "temperature": 0, "max_tokens": self._config.max_tokens}
        bodies = [{**settings, "messages": list(messages), **self._config.options} for messages in conversations]
        present = [{name: value for name, value in body.items() if value is not None} for body in bodies]
        return [_reply(answer) for answer in self.begin("/chat/completions", present).result()]


def _reply(answer: Any) -> str | Failure:
    if isinstance(answer, Failure):
        return answer
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return Failure(f"judge answered with no message: {answer!s:.100}")
    return content if isinstance(content, str) else ""
