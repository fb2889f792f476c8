"""A server of tools over stdio, by the package `mcp`: the vault of tests/tool_games.py, and tools that misbehave."""

import os
import time

from mcp.server.mcpserver import MCPServer

from tests import tool_games

server = MCPServer("vault")


@server.tool()
def look(key: str) -> str:
    """Says the digit of a key."""
    return tool_games.digit(key)


@server.tool()
def count(upto: int) -> list[int]:
    """Counts."""
    return list(range(upto))


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no such vault")


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(3600)
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def pid() -> int:
    """The process's number."""
    return os.getpid()


server.run()
