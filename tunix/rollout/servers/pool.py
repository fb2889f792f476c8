"""Requests spread over servers: each goes to the one that has the fewest, and elsewhere where that one fails.

A request is answered once: it is asked again only after the server that had it is known to have failed, its connection
closed, and an answer that names another request is dropped (`protocol.answered`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tunix.errors import UserError
from tunix.rollout.servers.server import Server
from tunix.rollout.servers.types import Answer, Ask, Failed, Gone, Late, Refused, Unfit

TRIES = 4
"""Failures of one request in a row after which the server that had it last is drained."""
PAUSE = 0.25
"""Seconds before a failed request is asked again; doubled each time."""

_log = logging.getLogger(__name__)


class Pool:
    """The servers of a run."""

    def __init__(self, servers: Sequence[Server]):
        """All of them are asked, of which there is at least one."""
        self.servers = servers
        self.again = 0
        """Requests that were asked again so far."""
        self._told: set[str] = set()

    @property
    def living(self) -> list[Server]:
        """The servers that are asked."""
        return [server for server in self.servers if server.reason is None]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks after the servers' health meanwhile."""
        tasks = [asyncio.ensure_future(server.watch()) for server in self.living]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def ask(self, ask: Ask) -> Answer:
        """The answer to a request, of whichever server gives it.

        Raises:
            UserError: no server is left, or one refuses the request.
        """
        failures = 0
        while True:
            server = self._next()
            try:
                return await self._of(server, ask)
            except Gone:
                failures = 0
            except Failed as error:
                failures += 1
                await self._failed(server, error, failures)
            except Refused as error:
                if server.model != server.base and server.model in str(error):
                    # It was started anew, and has lost the adapter.
                    self.drain(server, str(error))
                else:
                    raise UserError(f"rollout.servers: {server.url}: {error}") from None
            except Unfit as error:
                raise UserError(f"rollout.servers: {server.url}: {error}") from None
            self.again += 1

    def drain(self, server: Server, reason: str) -> None:
        """Asks a server no more, and tells the user."""
        server.drain(reason)
        if server.url not in self._told:
            self._told.add(server.url)
            left = f"{len(self.living)} of {len(self.servers)} are left" if self.living else "none is left"
            _log.warning(f"{server.url} is asked no more: {server.reason}; {left}")

    def readmit(self, server: Server) -> None:
        """Asks a server again."""
        server.readmit()
        if server.url in self._told:
            self._told.remove(server.url)
            _log.warning(f"{server.url} is asked again")

    def none_left(self) -> UserError:
        """The error where there is no server to ask."""
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
        return UserError(
            f"rollout.servers: no server is left ({reasons}). What was trained before is saved: start them again, and "
            "run the same command"
        )

    def _next(self) -> Server:
        for server in self.servers:
            if server.reason is not None:
                self.drain(server, server.reason)  # by its own watch, of which the user has not been told
        if not self.living:
            raise self.none_left()
        return min(self.living, key=lambda server: server.load)

    async def _of(self, server: Server, ask: Ask) -> Answer:
        server.load += 1
        try:
            async with server.room:
                if server.reason is not None:
                    raise Gone(server.reason)
                return await server.complete(ask)
        finally:
            server.load -= 1

    async def _failed(self, server: Server, error: Failed, failures: int) -> None:
        """Drains a server that is late, not well, or has failed too often; else waits a little."""
        if isinstance(error, Late):
            self.drain(server, str(error))
        elif (unwell := await server.well()) is not None:
            self.drain(server, f"{error}; {unwell}")
        elif failures >= TRIES:
            self.drain(server, f"{error}, {failures} times in a row")
        else:
            await asyncio.sleep(PAUSE * 2 ** (failures - 1))
