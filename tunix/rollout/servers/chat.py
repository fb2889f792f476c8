"""A judge on a server: any that speaks OpenAI's /chat/completions, such as vLLM's or a provider's.

Calls run in an event loop in a thread of their own, so many at a time at most. One that comes to nothing for a reason
that may pass (429, 5xx, a connection that breaks) is repeated, after what the server asks for and longer from time to
time, until the deadline.
"""

import asyncio
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from tunix.data.chat import Message
from tunix.errors import Failure, UserError, nearest
from tunix.rollout.rewards.config import JudgeConfig
from tunix.rollout.servers.handover import cards
from tunix.rollout.servers.protocol import Failed, Refused
from tunix.rollout.servers.server import PAUSE, Server

LONGEST_PAUSE = 8.0
"""Seconds between two attempts at most, where the server asks for no more."""


class ChatServer:
    """A server that is asked for replies."""

    def __init__(self, config: JudgeConfig):
        """Looks whether it is there, and which model it serves.

        Raises:
            UserError: it does not answer, serves another model or several, or there is no key for it.
        """
        headers = {}
        if (variable := config.key_variable) is not None:
            if not os.environ.get(variable):
                raise UserError(f"reward.judge.key_variable: {variable} is not set in the environment: export it")
            headers["Authorization"] = f"Bearer {os.environ[variable]}"
        self._config, self._numbers = config, itertools.count()
        self._server, self._room = Server(config.model, config.deadline, headers), asyncio.Semaphore(config.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._closed = False
        self._thread.start()
        try:
            self.served = self._wait(self._model())
        except BaseException:
            self.close()
            raise

    def __call__(self, conversations: Sequence[Sequence[Message]]) -> list[str | Failure]:
        """The reply to each conversation, or why there is none."""

        async def together() -> list[str | Failure]:
            return await asyncio.gather(*map(self._reply, conversations))

        if self._closed:
            raise CancelledError
        return self._wait(together())

    def close(self) -> None:
        """Gives up what is being asked, and ends the thread."""

        async def cancelled() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if not self._closed:
            self._closed = True
            self._wait(cancelled())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _wait(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _model(self) -> str:
        """The name of the model to ask for."""
        config, where = self._config, f"reward.judge.model: {self._config.model}"
        try:
            names = [str(card["id"]) for card in await cards(self._server, "/models")]
        except Refused as error:
            if config.served is not None:  # some list nothing
                return config.served
            raise UserError(f"{where}: {error}; name its model in reward.judge.served") from None
        except (Failed, KeyError, TypeError) as error:
            raise UserError(f"{where} cannot be asked: {error}. Start it, or correct the address") from None
        if config.served is None:
            if len(names) != 1:
                listed = ", ".join(names[:8]) or "none"
                raise UserError(f"{where} lists {len(names)} models ({listed}): name it in reward.judge.served")
            return names[0]
        if config.served not in names:
            hint = nearest(config.served, names)
            raise UserError(
                f"reward.judge.served: {config.model} has no model {config.served!r}, but {', '.join(names[:8])}.{hint}"
            )
        return config.served

    async def _reply(self, messages: Sequence[Message]) -> str | Failure:
        config, last, pause = self._config, "", PAUSE
        settings: Mapping[str, Any] = {
            "model": self.served,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": config.max_tokens,
            **config.options,
        }
        body = {name: value for name, value in settings.items() if value is not None}
        async with self._room:
            try:
                async with asyncio.timeout(config.deadline):
                    while True:
                        answer: Any = None
                        try:
                            identity = f"tunix-judge-{next(self._numbers)}"
                            answer = await self._server.call("/chat/completions", body, identity)
                            content = answer["choices"][0]["message"]["content"]
                            return content if isinstance(content, str) else ""
                        except (KeyError, IndexError, TypeError):
                            return Failure(f"judge answered with no message: {answer!s:.100}")
                        except Failed as error:
                            last = f" (the last time {error})"
                            await asyncio.sleep(max(pause, error.after))
                            pause = min(2 * pause, LONGEST_PAUSE)
            except Refused as error:
                return Failure(f"judge is refused: {error}")
            except TimeoutError:
                return Failure(f"judge did not answer in {config.deadline:g} s{last}")
