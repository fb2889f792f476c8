"""Rewards by name, as `tunix generate` and `tunix eval` are given them on the command line.

    exact_match                                      a shipped one, or file.py:function, or module:function
    "length target=40 width=20"                      with options
    "{name: number, columns: {answer: solution}}"    an entry of a recipe, where more is to be said

They are read like a recipe's, and run in the same worker processes under the same deadline.
"""

import shlex
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunix.config import RewardConfig, RewardFunction
from tunix.errors import UserError
from tunix.reading import parse_yaml, problems
from tunix.rollout.collect import ADDED
from tunix.rollout.rewards.scorer import Scorer


def reward_config(specs: List[str], deadline: float) -> RewardConfig:
    """The `reward` section that the words of the command line stand for.

    Args:
        specs: one for each --reward, as above.
        deadline: seconds of a call.

    Raises:
        UserError: one of them cannot be read.
    """
    keys = {f"functions.{i}": list(RewardFunction.model_fields) for i in range(len(specs))}
    try:
        return RewardConfig.model_validate({"functions": [_entry(spec) for spec in specs], "deadline": deadline})
    except ValidationError as error:
        raise UserError("\n".join(f"--reward: {line}" for line in problems(error, keys))) from error


def checked_scorer(config: RewardConfig, columns: List[str]) -> Scorer:
    """The rewards, ready to be called with rows that have these columns.

    Raises:
        UserError: there is no such reward, its options mean nothing, or a column that it reads is not there.
    """
    scorer = Scorer(config.functions, config.deadline, config.workers)
    scorer.check([*columns, *ADDED])
    return scorer


def fingerprint(config: RewardConfig) -> dict[str, Any]:
    """What scores follow from besides the completions: the settings, and the text of the user's own files."""
    places = [function.name.rpartition(":")[0] for function in config.functions]
    texts = {place: Path(place).read_text(encoding="utf-8") for place in places if place.endswith(".py")}
    return {"functions": [function.model_dump(mode="json") for function in config.functions], "files": texts}


def _entry(spec: str) -> Any:
    """One --reward as an entry of a recipe."""
    where = f"--reward {spec!r}"
    if spec.lstrip().startswith("{"):
        return parse_yaml(spec, where)
    try:
        name, *options = shlex.split(spec) or [""]
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if not name:
        raise UserError(f"{where}: it names no reward; say for instance --reward exact_match")
    return {"name": name, "options": dict(_option(option, where) for option in options)}


def _option(text: str, where: str) -> tuple[str, Any]:
    """`target=40`; the value is read as in a recipe."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UserError(f"{where}: {text!r} is no option; write key=value, as in target=40")
    return key, parse_yaml(value, f"{where}, option {key}")
