"""One call of a reward function, in this process or in a worker; `serve` is the process that reward functions run in.

An outcome is a number, or a text that says what went wrong and ends a sentence that begins with the reward's name; of
functions in TRL's style also None, by which they leave a sample out. Nothing heavy is imported here.
"""

import asyncio
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

from tunix.rollout.workers.messages import serve_requests, too_slow
from tunix.util.plugins import load_object, user_line

Outcome = float | str | None


class Answer(NamedTuple):
    """What came of a call; JSON has it as a list."""

    outcomes: list[Outcome] | str
    """An outcome for each sample, or one text where the call failed as a whole."""
    metrics: dict[str, list[float]]
    """What a function in TRL's style gave to `log_metric`, by name."""
    columns: dict[str, list[Any]]
    """What it gave to `log_extra`: a value for each sample, by name."""


def perform(
    function: Callable[..., Any],
    batched: bool,
    arguments: Mapping[str, Sequence[Any]],
    count: int,
    deadline: float,
    logs: Sequence[str] | None = None,
) -> Answer:
    """Calls a reward for some samples.

    Args:
        function: with its options bound.
        batched: one call for all of the samples, or one each.
        arguments: by name, a value for each sample.
        count: number of samples.
        deadline: seconds that each sample of an async function has; any other call is ended by the worker's owner.
        logs: `log_metric` and `log_extra`, as far as a function in TRL's style takes them; None for any other.
    """
    try:
        if batched:
            metrics: dict[str, list[float]] = {}
            columns: dict[str, list[Any]] = {}

            def log_metric(name: str, value: Any) -> None:
                metrics.setdefault(name, []).append(float(value))

            def log_extra(column: str, values: Any) -> None:
                listed = [value if isinstance(value, str | int | float | None) else str(value) for value in values]
                if len(listed) != count:
                    raise ValueError(f"log_extra got {len(listed)} values of {column} for {count} completions")
                columns[column] = listed

            loggers = {"log_metric": log_metric, "log_extra": log_extra}
            lists = {name: list(column) for name, column in arguments.items()}
            scores = _settled(function(**lists, **{name: loggers[name] for name in logs or ()}))
            return Answer(_outcomes(scores, count, skips=logs is not None), metrics, columns)
        rows = [{name: column[i] for name, column in arguments.items()} for i in range(count)]
        if inspect.iscoroutinefunction(function):
            return Answer(asyncio.run(_together(function, rows, deadline)), {}, {})
        return Answer([as_outcome(_settled(function(**row))) for row in rows], {}, {})
    except BaseException as error:  # sys.exit in a reward ends that call, not the worker
        return Answer(raised(error), {}, {})


def as_outcome(value: Any) -> Outcome:
    """A finite number as a float (True is 1), or what is wrong with the value."""
    if hasattr(value, "item"):  # a scalar of numpy, jax or torch
        if (shape := tuple(value.shape)) not in ((), (1,)):
            return f"returned an array of shape {shape}, not a number"
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


def _outcomes(values: Any, count: int, skips: bool) -> list[Outcome] | str:
    """The outcomes of the samples, from what a batched reward returned.

    Args:
        skips: whether None leaves a sample out.
    """
    scalar = hasattr(values, "item") and tuple(values.shape) == ()
    if isinstance(values, str | bytes | Mapping) or scalar or not hasattr(values, "__iter__"):
        kind = {str: "a string", type(None): "None"}.get(type(values), f"a {type(values).__name__}")
        return f"returned {kind}, not a list of numbers"
    scores = list(values)
    if len(scores) != count:
        return f"returned {len(scores)} scores for {count} completion{'s' * (count != 1)}"
    return [None if skips and score is None else as_outcome(score) for score in scores]


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


def serve(descriptor: int) -> None:
    """Answers requests on the inherited socket until its other end closes."""
    serve_requests(descriptor, _prepare)


def _prepare(rewards: Sequence[dict[str, Any]]) -> Callable[[Any], Any]:
    """Loads the functions and their heavy modules, and binds their options; returns what answers requests."""
    for module in dict.fromkeys(module for reward in rewards for module in reward["modules"]):
        importlib.import_module(module)
    return answering([functools.partial(load_object(x["source"]), **x["options"]) for x in rewards], rewards)


def answering(functions: Sequence[Callable[..., Any]], rewards: Sequence[Mapping[str, Any]]) -> Callable[[Any], Answer]:
    """What performs a call `(number of the reward, arguments, count, deadline)`; see `perform`.

    Args:
        functions: with their options bound.
        rewards: of each whether it is `batched`, and which `logs` it takes.
    """

    def answer(request: Any) -> Answer:
        i, arguments, count, deadline = request
        return perform(functions[i], rewards[i]["batched"], arguments, count, deadline, rewards[i]["logs"])

    return answer
