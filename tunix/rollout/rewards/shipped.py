"""The rewards that come with the house, as plain functions, and the table of them.

Each reads the column `answer` of the row unless it says otherwise; a recipe's `columns` renames it, `options` sets the
arguments after the star. A completion is its text without special tokens.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunix.errors import UserError
from tunix.reference import check_options
from tunix.rollout.rewards.answers import gsm8k, math, number
from tunix.rollout.rewards.code import unit_tests


def exact_match(completion: str, answer: Any, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 where the completion is the answer, else 0.

    Args:
        completion: what the model wrote.
        answer: what it should have written; a number is compared as its text.
        strip: whether white space around both is ignored.
        ignore_case: whether capitals are.
    """
    texts = [completion, str(answer)]
    texts = [text.strip() for text in texts] if strip else texts
    texts = [text.casefold() for text in texts] if ignore_case else texts
    return float(texts[0] == texts[1])


def format_match(completion: str, *, pattern: str) -> float:
    r"""1 where the whole completion fits a regular expression, else 0.

    Args:
        completion: what the model wrote; white space around it is ignored.
        pattern: Python's syntax, `.` matching line ends too, e.g. `<think>.*</think>\s*<answer>.*</answer>`.
    """
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def length(completion: str, completion_tokens: int, *, target: int, width: int) -> float:
    """`max(0, 1 - |tokens - target| / width)`: 1 at the target, falling to 0 on both sides of it.

    Args:
        completion: what the model wrote; only its length in tokens counts.
        completion_tokens: number of tokens that the model drew, which the rollout gives as a column.
        target: tokens that earn 1.
        width: tokens beyond or short of the target that earn 0.
    """
    del completion
    return max(0.0, 1.0 - abs(completion_tokens - target) / width)


def json_schema(completion: str, schema: Mapping[str, Any] | str) -> float:
    """1 where the completion is JSON that its schema allows, else 0.

    Args:
        completion: JSON, or text with one fenced block of it.
        schema: a JSON Schema (https://json-schema.org), as a mapping or as JSON: a column of the row, or an option.
            A `$ref` to another document is refused: nothing is fetched.
    """
    from jsonschema import validators
    from referencing import Registry

    rules = json.loads(schema) if isinstance(schema, str) else dict(schema)
    kind = validators.validator_for(rules, default=validators.Draft202012Validator)
    kind.check_schema(rules)
    blocks = re.findall(r"```(?:json)?\s*\n(.*?)```", completion, re.DOTALL)
    try:
        value = json.loads(blocks[-1] if blocks else completion)
    except (ValueError, RecursionError):
        return 0.0
    return float(kind(rules, registry=Registry()).is_valid(value))


@dataclass(frozen=True)
class Shipped:
    """A reward of the table and what it asks for."""

    function: Callable[..., Any]
    """The reward itself."""
    modules: tuple[str, ...] = ()
    """Heavy packages that it imports when it is called; a worker imports them when it starts."""
    rules: Callable[[str, Mapping[str, Any], float], None] | None = None
    """(name, options, deadline) -> a UserError where the options' values make no sense."""

    def check(self, name: str, options: Mapping[str, Any], deadline: float) -> None:
        """Refuses options that are missing or of the wrong type.

        Raises:
            UserError: names the reward, the option and the remedy.
        """
        check_options(f"the reward {name}", self.function, options, hidden=("prompt", "completion"))
        if self.rules is not None:
            self.rules(name, options, deadline)


def _pattern_rules(name: str, options: Mapping[str, Any], deadline: float) -> None:
    del deadline
    try:
        re.compile(options["pattern"])
    except re.error as error:
        raise UserError(
            f"the reward {name} has the pattern {options['pattern']!r}, which is no regular expression: {error}"
        ) from error


def _length_rules(name: str, options: Mapping[str, Any], deadline: float) -> None:
    del deadline
    for option in ("target", "width"):
        if options[option] <= 0:
            raise UserError(f"the reward {name} has {option}: {options[option]}; it is a positive number of tokens")


def _schema_rules(name: str, options: Mapping[str, Any], deadline: float) -> None:
    del deadline
    from jsonschema import SchemaError, validators

    if "schema" not in options:
        return
    try:
        schema = options["schema"]
        schema = json.loads(schema) if isinstance(schema, str) else schema
        validators.validator_for(schema, default=validators.Draft202012Validator).check_schema(schema)
    except (ValueError, SchemaError) as error:
        reason = error.message if isinstance(error, SchemaError) else str(error)
        raise UserError(f"the reward {name} has a schema that is none: {reason}") from error


def _test_rules(name: str, options: Mapping[str, Any], deadline: float) -> None:
    timeout = options.get("timeout", inspect.signature(unit_tests).parameters["timeout"].default)
    if not 0 < timeout < deadline:
        raise UserError(
            f"the reward {name} gives a program {timeout:g} s, but reward.deadline ends the call after {deadline:g} s: "
            "set its option `timeout` lower, or the deadline higher"
        )


SHIPPED: dict[str, Shipped] = {
    "exact_match": Shipped(exact_match),
    "number": Shipped(number),
    "math": Shipped(math, ("math_verify",)),
    "gsm8k": Shipped(gsm8k),
    "format": Shipped(format_match, (), _pattern_rules),
    "length": Shipped(length, (), _length_rules),
    "json_schema": Shipped(json_schema, ("jsonschema",), _schema_rules),
    "unit_tests": Shipped(unit_tests, (), _test_rules),
}
