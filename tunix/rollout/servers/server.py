"""One server: its HTTP calls, and whether it is still asked; and the servers of a run, over which requests are spread.

Every call has a deadline. A call that comes to nothing raises `Failed`; one that the server refuses, `Refused`. Each
request goes to the server that has the fewest, and elsewhere where that one fails. It is answered once: it is asked
again only after the server that had it is known to have failed, its connection closed, and an answer that names another
request is dropped (`protocol.answered`).
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from tunix.errors import UserError
from tunix.rollout.servers.protocol import Answer, Ask, Failed, Gone, Late, Refused, Stray, Unfit, answered
from tunix.util.faults import planned

if TYPE_CHECKING:
    import httpx  # where it is used: runs that sample here need no HTTP

HEALTH_EVERY = 5.0
"""Seconds between two looks at a server that has requests."""
HEALTH_DEADLINE = 10.0
"""Seconds in which a server has to say that it is well."""
MOST = 512
"""Requests that a server has at a time, at most: more would only wait there."""


class Server:
    """A server of the completions protocol at one address."""

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str] | None = None):
        """Connects to nothing yet; a request has to be answered, and weights loaded, in `timeout` seconds. `headers`
        are sent with every call."""
        self.url, self.timeout, self._headers = url, timeout, headers or {}
        self.base = ""
        """The name under which it serves the model."""
        self.model = ""
        """The name of what answers requests: the model, or an adapter of it."""
        self.load = 0
        """Requests that it has."""
        self.room = asyncio.Semaphore(MOST)
        self.reason: str | None = None
        """Why it is asked no more; None while it is."""
        self._gone = asyncio.Event()
        self._clients = [_client(url, MOST)]
        """The connections of completions; the last ones are used for new ones."""
        # Connections of their own: one that is used again might still bring the answer to something else.
        self._calls = _client(url, 0)

    def drain(self, reason: str) -> None:
        """Asks it no more: what it has not answered is asked elsewhere."""
        self.reason = self.reason or reason
        self._gone.set()

    def readmit(self) -> None:
        """Asks it again."""
        self.reason = None
        self._gone.clear()

    async def complete(self, ask: Ask) -> Answer:
        """Answers a request.

        Raises:
            Failed: it did not, for a reason that may pass.
            Gone: it is asked no more.
            Refused: it refuses what is asked.
            Unfit: its answer lacks what a trainer has to know.
        """
        body = {**ask.settings, "model": self.model, "prompt": list(ask.prompt), "request_id": ask.identity}
        call = asyncio.ensure_future(self.call("/v1/completions", body, ask.identity))
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Gone(self.reason)
            return answered(call.result(), ask)
        except Stray:
            # What else comes on that connection is not known to be an answer to what was asked there.
            self._clients.append(_client(self.url, MOST))
            raise
        finally:
            call.cancel()
            gone.cancel()

    async def well(self) -> str | None:
        """None where it says that it is well, else what is wrong."""
        try:
            await self.call("/health")
        except (Failed, Refused) as error:
            return str(error)
        return None

    async def watch(self) -> None:
        """Drains it once it is not well twice in a row."""
        before: str | None = None
        while self.reason is None:
            await asyncio.sleep(HEALTH_EVERY)
            now = await self.well()
            if before is not None and now is not None:
                self.drain(now)
            before = now

    async def call(self, path: str, body: Mapping[str, Any] | None = None, identity: str | None = None) -> Any:
        """What it answers to a POST, or to a GET where there is no body, read as JSON where it is that; a call for a
        completion has an identity.

        Raises:
            Failed: it did not, for a reason that may pass.
            Refused: it refuses what is asked.
        """
        import httpx

        client = self._calls if identity is None else self._clients[-1]
        method, deadline = ("GET", HEALTH_DEADLINE) if body is None else ("POST", self.timeout)
        headers = {**self._headers, **({"X-Request-Id": identity} if identity else {})}
        fault = planned("server") if identity else None
        try:
            async with asyncio.timeout(deadline):
                if fault == "hang":
                    await asyncio.sleep(2 * deadline)
                elif fault:
                    raise httpx.ConnectError("as planned")
                response = await client.request(method, path, json=body, headers=headers)
        except TimeoutError:
            raise Late(f"it did not answer {path} in {deadline:g} s") from None
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Failed(f"{path}: {type(error).__name__} {error}".strip()) from error
        status, text = response.status_code, response.text
        if status >= 500 or status in (408, 425, 429):
            failed = Failed(f"it answered {path} with {status}: {_said(response)}")
            # A number of seconds, or until a date (RFC 9110, 10.2.3); anything else asks for nothing.
            after = response.headers.get("retry-after", "")
            with suppress(ValueError):
                until = float(after) if after.isdecimal() else parsedate_to_datetime(after).timestamp() - time.time()
                failed.after = max(0.0, until)
            raise failed
        if status >= 300:
            raise Refused(f"it refuses {path} with {status}: {_said(response)}")
        if not text or "json" not in response.headers.get("content-type", ""):
            return text
        try:
            return response.json()
        except ValueError:
            raise Failed(f"it answered {path} with no JSON: {text[:80]!r}") from None


def _client(url: str, kept: int) -> "httpx.AsyncClient":
    """Connections to an address, so many of which are used again."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=None, follow_redirects=False, trust_env=False)


def _said(response: "httpx.Response") -> str:
    """The message of an error, in one line."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


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
        self._told: set[str] = set()

    @property
    def living(self) -> list[Server]:
        """The servers that are asked."""
        return [server for server in self.servers if server.reason is None]

    async def ask(self, ask: Ask) -> Answer:
        """The answer to a request, of whichever server gives it.

        Raises:
            UserError: no server is left, or one refuses the request.
        """
        failures = 0
        while True:
            for other in self.servers:
                if other.reason is not None:
                    self.drain(other, other.reason)  # by its own watch, of which the user has not been told
            if not self.living:
                raise self.none_left()
            server = min(self.living, key=lambda server: server.load)
            try:
                server.load += 1
                try:
                    async with server.room:
                        if server.reason is not None:
                            raise Gone(server.reason)
                        return await server.complete(ask)
                finally:
                    server.load -= 1
            except Gone:
                failures = 0
            except Failed as error:
                failures += 1
                if isinstance(error, Late):
                    self.drain(server, str(error))
                elif (unwell := await server.well()) is not None:
                    self.drain(server, f"{error}; {unwell}")
                elif failures >= TRIES:
                    self.drain(server, f"{error}, {failures} times in a row")
                else:
                    await asyncio.sleep(PAUSE * 2 ** (failures - 1))
            except (Refused, Unfit) as error:
                if isinstance(error, Unfit) or server.model == server.base or server.model not in str(error):
                    raise UserError(f"rollout.servers: {server.url}: {error}") from None
                self.drain(server, str(error))  # it was started anew, and has lost the adapter

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
