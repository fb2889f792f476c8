"""The rewards that come with tunix, as plain functions, the table of them, and the check of their options.

The argument `answer` is the row's column of that name, which a recipe's `columns` can change; `options` sets the
arguments after the star. A completion is its text without special tokens.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import cos, pi
from typing import Any

from tunix.errors import UserError
from tunix.rollout.rewards.answers import answer_text, gsm8k, math, number, plain_number
from tunix.rollout.rewards.code import unit_tests
from tunix.util.plugins import check_options


def exact_match(completion: str, answer: Any, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 where the completion is the answer, else 0.

    Args:
        completion: what the model wrote.
        answer: what it should have written; a number is compared as a number, so that `12` is 12.0.
        strip: whether white space around both is ignored.
        ignore_case: whether the case of letters is ignored.

    Raises:
        ValueError: the answer is null, a list or a truth value.
    """
    texts = [completion, answer_text(answer)]
    texts = [text.strip() for text in texts] if strip else texts
    if not isinstance(answer, str) and (written := plain_number(texts[0])) is not None:
        return float(written == plain_number(texts[1]))
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
        completion_tokens: number of tokens that the model sampled, a column that the rollout adds.
        target: tokens that score 1.
        width: tokens beyond or short of the target that score 0.
    """
    del completion
    return max(0.0, 1.0 - abs(completion_tokens - target) / width)


def repetition(completion: str, completion_ids: Sequence[int], *, n: int = 40, penalty: float = 1.0) -> float:
    """`-penalty (1 - distinct / all)` of the completion's n-grams of tokens: 0 where none is repeated.

    Yeo et al. 2025, https://arxiv.org/abs/2502.03373, penalise the tokens of a repeated n-gram one by one; here it is
    one number for the completion, the share that is repeated. Use it together with a reward for right answers.

    Args:
        completion: what the model wrote; only its tokens count.
        completion_ids: its token ids, a column that the rollout adds.
        n: tokens of an n-gram; short n-grams are repeated in good answers too.
        penalty: the largest penalty, where nearly all n-grams are repeated.
    """
    del completion
    grams = [tuple(completion_ids[i : i + n]) for i in range(len(completion_ids) - n + 1)]
    return -penalty * (1.0 - len(set(grams)) / len(grams)) if grams else 0.0


def cosine(
    completion: str,
    answer: Any,
    completion_tokens: int,
    *,
    limit: int,
    grader: str = "exact_match",
    correct_short: float = 2.0,
    correct_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
    exceeded: float = -10.0,
) -> float:
    """Right answers score higher the shorter they are, wrong ones lower, along half a cosine.

    `long + (short - long) (1 + cos(pi t / limit)) / 2`. Yeo et al. 2025, https://arxiv.org/abs/2502.03373, sec. 4.2;
    the defaults are the paper's.

    Args:
        completion: what the model wrote.
        answer: what `grader` compares it with.
        completion_tokens: t, the number of tokens that the model sampled, a column that the rollout adds.
        limit: tokens that a completion may have at most, usually data.completion_length.
        grader: the reward that is above 0 for right answers: exact_match, number, math or gsm8k.
        correct_short: score of a right answer of length 0.
        correct_long: score of a right answer at the limit.
        wrong_short: score of a wrong answer of length 0.
        wrong_long: score of a wrong answer at the limit.
        exceeded: score of an answer that has reached the limit, right or wrong.
    """
    if completion_tokens >= limit:
        return exceeded
    right = SHIPPED[grader](completion, answer) > 0
    short, long = (correct_short, correct_long) if right else (wrong_short, wrong_long)
    return long + (short - long) * (1.0 + cos(pi * completion_tokens / limit)) / 2.0


def json_schema(completion: str, schema: Mapping[str, Any] | str) -> float:
    """1 where the completion is JSON that conforms to its schema, else 0.

    Args:
        completion: JSON, or text with a fenced block of it.
        schema: a JSON Schema (https://json-schema.org), as a mapping or as JSON: a column of the row, or an option.
            A `$ref` to another document is refused: nothing is fetched.
    """
    from jsonschema import validators
    from referencing import Registry

    rules = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(rules, Mapping):
        raise ValueError(f"the schema is {'null' if rules is None else repr(rules)[:80]}, not a mapping or JSON of one")
    rules = dict(rules)
    kind = validators.validator_for(rules, default=validators.Draft202012Validator)
    kind.check_schema(rules)
    blocks = re.findall(r"```(?:json)?\s*\n(.*?)```", completion, re.DOTALL)
    try:
        value = json.loads(blocks[-1] if blocks else completion)
    except (ValueError, RecursionError):
        return 0.0
    return float(kind(rules, registry=Registry()).is_valid(value))


SHIPPED: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "number": number,
    "math": math,
    "gsm8k": gsm8k,
    "format": format_match,
    "length": length,
    "repetition": repetition,
    "cosine": cosine,
    "json_schema": json_schema,
    "unit_tests": unit_tests,
}
GRADERS = ("exact_match", "number", "math", "gsm8k")
"""Rewards that `cosine` can use to tell right answers from wrong ones."""
MODULES = {"math": ("math_verify",), "json_schema": ("jsonschema",)}
"""Heavy packages that a function imports when it is called; a worker imports them when it starts."""
POSITIVE = {
    "length": dict.fromkeys(("target", "width"), "a positive number of tokens"),
    "repetition": dict.fromkeys(("n", "penalty"), "a positive number"),
    "cosine": {"limit": "a positive number of tokens"},
}
"""Options that are above 0 -> what they are."""


def check_shipped(reward: str, name: str, options: Mapping[str, Any], deadline: float) -> None:
    """Refuses options of a shipped reward, which has another name in messages, that are missing, of the wrong type or
    invalid, such as a time limit beyond a call's deadline in seconds.

    Raises:
        UserError: names the reward, the option and the remedy.
    """
    what = f"the reward {name}"
    check_options(what, SHIPPED[reward], options, hidden=("prompt", "completion"))
    for option, meaning in POSITIVE.get(reward, {}).items():
        if options.get(option, 1) <= 0:
            raise UserError(f"{what} has {option}: {options[option]}; it is {meaning}")
    if reward == "format":
        try:
            re.compile(options["pattern"])
        except re.error as error:
            pattern = options["pattern"]
            raise UserError(f"{what} has the pattern {pattern!r}, which is no regular expression: {error}") from error
    elif reward == "cosine" and (grader := options.get("grader", "exact_match")) not in GRADERS:
        raise UserError(f"{what} has the grader {grader!r}, which is none of {', '.join(GRADERS)}")
    elif reward == "json_schema" and "schema" in options:
        from jsonschema import SchemaError, validators

        try:
            schema = options["schema"]
            schema = json.loads(schema) if isinstance(schema, str) else schema
            validators.validator_for(schema, default=validators.Draft202012Validator).check_schema(schema)
        except (ValueError, SchemaError) as error:
            reason = error.message if isinstance(error, SchemaError) else str(error)
            raise UserError(f"{what} has a schema that is none: {reason}") from error
    elif reward == "unit_tests":
        timeout = options.get("timeout", inspect.signature(unit_tests).parameters["timeout"].default)
        if not 0 < timeout < deadline:
            raise UserError(
                f"{what} gives a program {timeout:g} s, but reward.deadline ends the call after {deadline:g} s: "
                "set its option `timeout` lower, or the deadline higher"
            )
