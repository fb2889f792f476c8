"""The process that reward functions run in: it loads them, and calls the one that a request names."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tunix.rollout.rewards.calls import perform
from tunix.rollout.workers.serving import serve_requests
from tunix.util.plugins import load_object


def serve(descriptor: int) -> None:
    """Answers requests on the inherited socket until its other end closes."""
    serve_requests(descriptor, _prepare)


def _prepare(rewards: Sequence[dict[str, Any]]) -> Callable[[Any], Any]:
    """Loads the functions; returns what performs a call of one."""
    functions = [_load(reward) for reward in rewards]

    def answer(request: Any) -> Any:
        i, arguments, count, deadline = request
        return perform(functions[i], rewards[i]["batched"], arguments, count, deadline, rewards[i]["logs"])

    return answer


def _load(reward: dict[str, Any]) -> Callable[..., Any]:
    """Loads a function and its heavy modules, and binds its options."""
    for module in reward["modules"]:
        importlib.import_module(module)
    return functools.partial(load_object(reward["source"]), **reward["options"])
