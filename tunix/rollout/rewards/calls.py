"""One call of a reward function, in this process or in a worker, whose module this is (`workers.process.serve`).

An outcome is a number, or a text that says what went wrong and ends a sentence that begins with the reward's name; of
functions in TRL's style also None, by which they leave a sample out. Nothing heavy is imported here.
"""

import asyncio
import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsFloat

from tunix.rollout.workers.process import too_slow
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


def prepare(rewards: Sequence[Mapping[str, Any]]) -> Callable[[Any], Answer]:
    """Loads the functions and their heavy modules; returns what answers `(number of the reward, arguments, number of
    samples, deadline)`. The arguments, by name, have a value for each sample; the deadline, in seconds, is that of each
    sample of an async function: any other call is ended by the worker's owner.

    Args:
        rewards: of each the `function`, or where it is loaded from, its `options` and `modules`; whether it is
            `batched`: one call for all of the samples, or one each; `logs`: `log_metric` and `log_extra`, as far as a
            function in TRL's style takes them, None for any other; and `details`: whether it may return a mapping with
            `score` and what is logged beside it, as verl's may.
    """
    for module in dict.fromkeys(module for reward in rewards for module in reward["modules"]):
        importlib.import_module(module)
    functions = [
        partial(load_object(x["function"]) if isinstance(x["function"], str) else x["function"], **x["options"])
        for x in rewards
    ]

    def answer(request: Any) -> Answer:
        number, arguments, count, deadline = request
        function, reward = functions[number], rewards[number]
        metrics: dict[str, list[float]] = {}
        columns: dict[str, list[Any]] = {}

        def log_extra(column: str, values: Any) -> None:
            listed = [value if isinstance(value, str | int | float | None) else str(value) for value in values]
            if len(listed) != count:
                raise ValueError(f"log_extra got {len(listed)} values of {column} for {count} completions")
            columns[column] = listed

        def outcome_of(i: int, value: Any) -> Outcome:
            """The outcome of sample `i`; the rest of a mapping is logged."""
            if not (reward["details"] and isinstance(value, Mapping)):
                return as_outcome(value)
            if "score" not in value:
                return f"returned a mapping without `score`; its keys are {', '.join(map(repr, value)) or 'none'}"
            for name, detail in value.items():
                if name != "score":
                    plain = detail.item() if hasattr(detail, "item") and tuple(detail.shape) == () else detail
                    column = columns.setdefault(str(name), [None] * count)
                    column[i] = plain if isinstance(plain, str | int | float | None) else str(plain)
                    if isinstance(plain, int | float) and math.isfinite(plain):
                        metrics.setdefault(str(name), []).append(float(plain))
            return as_outcome(value["score"])

        async def awaited(i: int, call: Callable[[], Any]) -> Outcome:
            limit = asyncio.timeout(deadline)
            try:
                async with limit:
                    return outcome_of(i, await call())
            except Exception as error:
                return too_slow(deadline) if limit.expired() else raised(error)

        async def together() -> list[Outcome]:
            return await asyncio.gather(*map(awaited, itertools.count(), calls))

        try:
            if not reward["batched"]:
                calls = [
                    partial(function, **{name: column[i] for name, column in arguments.items()}) for i in range(count)
                ]
                if inspect.iscoroutinefunction(function):
                    return Answer(asyncio.run(together()), metrics, columns)
                return Answer([outcome_of(i, _settled(call())) for i, call in enumerate(calls)], metrics, columns)
            loggers = {
                "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
                "log_extra": log_extra,
            }
            lists = {name: list(column) for name, column in arguments.items()}
            values = _settled(function(**lists, **{name: loggers[name] for name in reward["logs"] or ()}))
            scalar = hasattr(values, "item") and tuple(values.shape) == ()
            if isinstance(values, str | bytes | Mapping) or scalar or not hasattr(values, "__iter__"):
                kind = {str: "a string", type(None): "None"}.get(type(values), f"a {type(values).__name__}")
                return Answer(f"returned {kind}, not a list of numbers", metrics, columns)
            scores = list(values)
            if len(scores) != count:
                wrong = f"returned {len(scores)} scores for {count} completion{'s' * (count != 1)}"
                return Answer(wrong, metrics, columns)
            skips = reward["logs"] is not None
            return Answer([None if skips and x is None else as_outcome(x) for x in scores], metrics, columns)
        except BaseException as error:  # sys.exit in a reward ends that call, not the worker
            return Answer(raised(error), {}, {})

    return answer


def _settled(value: Any) -> Any:
    """The result of an awaitable; any other value as it is."""
    return asyncio.run(asyncio.wait_for(value, None)) if inspect.isawaitable(value) else value


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
