"""Servers of tools by the Model Context Protocol, over stdio: processes that the package `mcp` talks to.

A server starts in a worker where it is first asked, and ends with it, whatever happens: it has the worker's mark
(`workers/process.py`), and its input closes. One that ends, or does not answer before the environment's deadline, fails
the episode that asked, and starts anew for the next. Loads without the package.
"""

import asyncio
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Hashable, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

from tunix.rollout.environments.base import EpisodeError
from tunix.rollout.workers.process import MARK


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's servers and async tools, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
    return loop


class Server:
    """A server and its tools; starts when it is first asked, and again after it was lost."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str]) -> None:
        """Starts nothing yet; see `MCPConfig`."""
        self.name = f"the MCP server {' '.join(command)!r}"
        """In messages."""
        self._command, self._env = command, env
        self._client: Any = None
        self._running: list[Future[None]] = []
        weakref.finalize(self, _cancel, self._running)

    def schemas(self, seconds: float) -> Mapping[str, dict[str, Any]]:
        """The server's tools by name, as chat templates show them; it is asked once in a process.

        Raises:
            EpisodeError: it ended, or did not start and answer within so many seconds.
        """
        key = self._command, tuple(self._env.items())
        if key not in _SCHEMAS:
            _SCHEMAS[key] = {
                tool.name: {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.input_schema,
                    },
                }
                for tool in self._ask(_tools, seconds)
            }
        return _SCHEMAS[key]

    def call(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """The text of a tool's result; parts that are no text are named in their places.

        Raises:
            EpisodeError: the server ended, or did not answer within so many seconds.
            Exception: it refused the call.
        """
        result = self._ask(lambda client: client.call_tool(tool, dict(arguments)), seconds)
        parts = [part.text if part.type == "text" else f"[{part.type}, which is not shown]" for part in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        return ("error: " if result.is_error else "") + "\n".join(parts)

    def _ask(self, question: Callable[[Any], Coroutine[Any, Any, Any]], seconds: float) -> Any:
        """The answer of the client, which is connected first where it is not."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        until, loop = time.monotonic() + seconds, background_loop()
        try:
            if self._client is None:
                connected = Future[Any]()
                self._running.append(asyncio.run_coroutine_threadsafe(_run(self._command, self._env, connected), loop))
                self._client = connected.result(seconds)
            return asyncio.run_coroutine_threadsafe(question(self._client), loop).result(until - time.monotonic())
        except TimeoutError:
            what = f"did not answer within {seconds:g} s"
        except Exception as error:
            is_closed = isinstance(error, MCPError) and getattr(error, "code", None) == CONNECTION_CLOSED
            if self._client is not None and not is_closed:
                raise
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            what = f"does not start: {error}" if self._client is None else "ended"
        _cancel(self._running)
        self._client = None
        raise EpisodeError(f"called {self.name}, which {what}")


_SCHEMAS: dict[Hashable, dict[str, dict[str, Any]]] = {}
"""The tools of each command that this process has asked."""


async def _run(command: tuple[str, ...], env: Mapping[str, str], connected: Future[Any]) -> None:
    """Runs a server until this is cancelled; its client is the result of `connected`."""
    from mcp import Client, StdioServerParameters

    env = {MARK: os.environ.get(MARK, ""), **env}
    try:
        async with Client(StdioServerParameters(command=command[0], args=[*command[1:]], env=env)) as client:
            connected.set_result(client)
            await asyncio.Event().wait()
    except Exception as error:
        if not connected.done():
            connected.set_exception(error)


async def _tools(client: Any) -> list[Any]:
    """All pages of a server's tools."""
    page = await client.list_tools()
    tools = [*page.tools]
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _cancel(running: list[Future[None]]) -> None:
    """Has servers end in the background: one that hangs is killed after some seconds."""
    while running:
        running.pop().cancel()
