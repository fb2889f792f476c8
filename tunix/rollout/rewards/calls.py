"""One call of a reward function, in this process or in a worker.

An outcome is a number, or a text that says what went wrong and ends a sentence that begins with the reward's name.
Nothing heavy is imported here.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from tunix.rollout.workers.messages import too_slow
from tunix.util.plugins import user_line

Outcome = float | str


def perform(
    function: Callable[..., Any], batched: bool, arguments: Mapping[str, Sequence[Any]], count: int, deadline: float
) -> list[Outcome] | str:
    """Calls a reward for some samples.

    Args:
        function: with its options bound.
        batched: one call for all of the samples, or one each.
        arguments: by name, a value for each sample.
        count: number of samples.
        deadline: seconds that each sample of an async function has; any other call is ended by the worker's owner.

    Returns:
        An outcome for each sample, or one text where the call failed as a whole.
    """
    try:
        if batched:
            return _outcomes(_settled(function(**{name: list(column) for name, column in arguments.items()})), count)
        rows = [{name: column[i] for name, column in arguments.items()} for i in range(count)]
        if inspect.iscoroutinefunction(function):
            return asyncio.run(_together(function, rows, deadline))
        return [as_outcome(_settled(function(**row))) for row in rows]
    except BaseException as error:  # sys.exit in a reward ends that call, not the worker
        return raised(error)


def as_outcome(value: Any) -> Outcome:
    """A finite number as a float (True is 1), or what is wrong with the value."""
    if hasattr(value, "item"):  # a scalar of numpy, jax or torch
        value = value.item()
    if isinstance(value, str):
        return "returned a string, not a number"
    if not isinstance(value, SupportsFloat):
        return f"returned {'None' if value is None else f'a {type(value).__name__}'}, not a number"
    number = float(value)
    return number if math.isfinite(number) else f"returned {'NaN' if math.isnan(number) else 'infinity'}"


def raised(error: BaseException) -> str:
    """An exception as one line, e.g. `raised ValueError: no digits (judge.py, line 12)`."""
    text, line = " ".join(str(error).split()), user_line(error)
    return f"raised {type(error).__name__}" + (f": {text:.300}" if text else "") + (f" ({line})" if line else "")


def _outcomes(values: Any, count: int) -> list[Outcome] | str:
    """The outcomes of the samples, from what a batched reward returned."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        kind = "a string" if isinstance(values, str) else f"a {type(values).__name__}"
        return f"returned {kind}, not a list of numbers"
    scores = list(values)
    if len(scores) != count:
        return f"returned {len(scores)} scores for {count} completion{'s' * (count != 1)}"
    return [as_outcome(score) for score in scores]


def _settled(value: Any) -> Any:
    """The result of an awaitable; any other value as it is."""

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited()) if inspect.isawaitable(value) else value


async def _together(function: Callable[..., Any], rows: Sequence[Mapping[str, Any]], deadline: float) -> list[Outcome]:
    """Runs all samples concurrently, each with its own deadline."""

    async def outcome(row: Mapping[str, Any]) -> Outcome:
        limit = asyncio.timeout(deadline)
        try:
            async with limit:
                return as_outcome(await function(**row))
        except Exception as error:
            return too_slow(deadline) if limit.expired() else raised(error)

    return await asyncio.gather(*(outcome(row) for row in rows))
