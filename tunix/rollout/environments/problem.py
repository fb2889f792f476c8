"""A problem with one answer: the row's prompt, one turn of the model, and a score by the reward functions."""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tunix.data.chat import Message
from tunix.errors import UserError, nearest
from tunix.rollout.environments.base import Environment, Observation, Row, Step


class Problem(Environment):
    """A single turn, scored by reward functions."""

    scores: ClassVar[bool] = False

    def __init__(self, template: str | None = None, chat: bool = False, system: str | None = None) -> None:
        """Sets how a row becomes a prompt.

        Args:
            template: text with the row's columns in braces, e.g. `Question: {question}`; None takes its `prompt`.
            chat: whether a text becomes the user's message in the tokenizer's chat template.
            system: system message before it; needs `chat`, or prompts that are messages.
        """
        self._template, self._chat, self._system = template, chat, system

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """The row's prompt: a text, messages, or token ids (`prompt_ids`).

        Raises:
            UserError: the row lacks a column, or there is a system message but no conversation.
        """
        if self._template is not None:
            prompt: Any = _filled(self._template, row)
        elif "prompt_ids" in row:
            prompt = np.asarray(row["prompt_ids"], np.int32)
        else:
            prompt = _column(row, "prompt")
        if isinstance(prompt, str):
            prompt = self.message(prompt)
        if self._system is None:
            return prompt
        if isinstance(prompt, str | np.ndarray):
            raise UserError("a system message wants a conversation: set the environment's option chat: true")
        messages: Sequence[Message] = prompt
        return [{"role": "system", "content": self._system}, *messages]

    def message(self, text: str) -> Observation:
        """A text as the user's message where the environment is a conversation, else as it is."""
        return [{"role": "user", "content": text}] if self._chat else text

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """Ends the episode: there is one turn."""
        return Step(done=True)


def extracted(text: str, pattern: str | None) -> str | None:
    """The answer in a model's text, without blanks around it; None where there is none.

    Args:
        text: of the whole turn.
        pattern: None for all of it; a word for what the last pair of these tags holds, as `answer` for
            `<answer>42</answer>`; else a regular expression, whose last match or, where it has one, its group counts.

    Raises:
        UserError: it is no regular expression.
    """
    if pattern is None:
        return text.strip()
    if pattern.isidentifier():
        pattern = f"<{pattern}>(.*?)</{pattern}>"
    try:
        matches = list(re.finditer(pattern, text, re.DOTALL))
    except re.error as error:
        raise UserError(f"extract: {pattern} is no regular expression: {error}") from error
    return (matches[-1].group(min(1, matches[-1].re.groups)) or "").strip() if matches else None


def _filled(template: str, row: Row) -> str:
    """The template with the row's values; braces hold column names only, nothing that could be executed."""
    values: dict[str, str] = {}
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is not None:
            if form or conversion or not name.isidentifier():
                raise UserError(f"the template holds {{{name}}}: a column's name stands alone; write {{{{ for a brace")
            values[name] = str(_column(row, name))
    return template.format_map(values)


def _column(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise UserError(
            f"the row has no {name!r}; it has {', '.join(map(repr, row))}.{nearest(name, row)} Name yours in "
            "data.columns or in the environment's template"
        )
    return row[name]
