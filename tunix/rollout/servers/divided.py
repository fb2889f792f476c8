"""What the processes of a run tell each other of their servers.

All of them ask all servers, each for its own prompts. The lead alone has servers load weights, between two exchanges:
before, no process has a request on the way; after, all know which servers have the weights.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.distributed import processes
from tunix.rollout.servers.pool import Pool
from tunix.rollout.servers.routing import FIELD, read, written
from tunix.rollout.servers.server import Server
from tunix.rollout.servers.types import Answer, Failed
from tunix.util.coded import array_of, coded


def renewed(pool: Pool, renew: Callable[[], Sequence[Answer | Exception]]) -> list[Answer | Failed]:
    """Each server's answer to the probe when it has loaded the weights, or why there is none.

    All processes call it together, and it returns the same in all.

    Args:
        pool: the servers; one that any process asks no more is so in all, and is looked at again.
        renew: has the servers load the weights, and returns what the probes came to; called in the lead alone.
    """
    _drained_by_any(pool)
    found = processes.told("servers", lambda: [_saved(*one) for one in zip(pool.servers, renew(), strict=True)])
    if not processes.lead():
        for server, saved in zip(pool.servers, found, strict=True):
            _take_over(pool, server, saved)
    return [_answer(saved) for saved in found]


def _drained_by_any(pool: Pool) -> None:
    """Drains the servers that another process asks no more, such as those that it alone does not reach."""
    own = json.dumps([server.reason for server in pool.servers]).encode()
    for each in map(json.loads, processes.exchanged("drained", own)):
        for server, reason in zip(pool.servers, each, strict=True):
            if reason is not None and server.reason is None:
                pool.drain(server, reason)


def _saved(server: Server, answer: Answer | Exception) -> dict[str, Any]:
    """A server after a hand-over, as JSON values."""
    state = {"base": server.base, "model": server.model, "reason": server.reason}
    if isinstance(answer, Exception):
        return {**state, "error": str(answer)}
    # The probe asks for no alternatives.
    said = {"tokens": coded(answer.tokens), "logprobs": coded(answer.logprobs), "stopped": answer.stopped}
    return {**state, **said, FIELD: None if answer.experts is None else written(answer.experts)}


def _answer(saved: Mapping[str, Any]) -> Answer | Failed:
    if "error" in saved:
        return Failed(saved["error"])
    experts = None if saved[FIELD] is None else read(saved[FIELD]).astype(np.int16)
    return Answer(array_of(saved["tokens"]), array_of(saved["logprobs"]), saved["stopped"], experts=experts)


def _take_over(pool: Pool, server: Server, saved: Mapping[str, Any]) -> None:
    """Makes of a server what it is in the lead."""
    server.base, server.model = saved["base"], saved["model"]
    if server.reason is not None and saved["reason"] is None:
        pool.readmit(server)
    elif saved["reason"] is not None:
        server.readmit()
        server.drain(saved["reason"])
