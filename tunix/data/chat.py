"""Renders a conversation as tokens and a mask of trained tokens, using the tokenizer's own chat template only.

The template renders the whole conversation once, and that text is tokenized once, so the tokens are those of
`apply_chat_template` by construction. Which characters belong to an assistant's turn follows from the lengths of
further renderings, never from a search for markers: a turn starts where the prompt that inference would send ends, and
its content ends where a rendering with one more character at its end differs from the full one.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunix.data.templates import MARKERS, TEMPLATE_NAMES, TEMPLATES
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError, nearest

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")

_PROBE = "\ue000"
"""A private-use character, which no template treats specially."""


def render_chat(
    messages: Sequence[Message], tokenizer: Tokenizer, trained_from: int = 0, **template_kwargs: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a conversation and the mask of those in the assistant's turns.

    A token that begins before the assistant's turn (its text merged with the prompt's end) is not trained: inference
    never produces it. The stop token that ends the turn is.

    Args:
        messages: `role` and `content` (a string, or text parts); `tool_calls` and others as the template reads them.
        tokenizer: its chat template is the only authority on the format.
        trained_from: index of the first message that may be trained; the ones before are context.
        template_kwargs: variables of the template (`tools`, `enable_thinking`, ...).

    Returns:
        `[T]` int32 token ids and `[T]` bool mask.

    Raises:
        UserError: there is no template, a message is malformed, or the template refuses the conversation.
    """
    check_messages(messages)
    text = _render(messages, tokenizer, template_kwargs)
    ids, offsets = tokenizer.encode_with_offsets(text)
    mask = np.zeros(len(ids), bool)
    for k, message in enumerate(messages):
        if message["role"] == "assistant" and k >= trained_from:
            start = _turn_start(text, messages, k, tokenizer, template_kwargs)
            end = max(start, _turn_end(text, messages, k, tokenizer, template_kwargs))
            mask |= (offsets[:, 0] >= start) & (offsets[:, 0] < end)
            mask[_stop(text, ids, offsets, end, tokenizer)] = True
    return np.asarray(ids, np.int32), mask


def render_prompt(messages: Sequence[Message], tokenizer: Tokenizer, **template_kwargs: Any) -> np.ndarray:
    """Tokens of a conversation that the assistant is to continue, `[T]` int32.

    Raises:
        UserError: as `render_chat`.
    """
    check_messages(messages)
    text = _render(messages, tokenizer, template_kwargs, add_generation_prompt=True)
    return np.asarray(tokenizer.encode(text), np.int32)


def render_continuation(
    messages: Sequence[Message],
    answers: Sequence[Message],
    tokenizer: Tokenizer,
    stopped: bool,
    **template_kwargs: Any,
) -> np.ndarray:
    """Tokens that follow an assistant's turn, `[T]` int32: its end, the answers to it, the start of its next turn.

    They are taken from the template's rendering after a placeholder turn: the sampled turn itself keeps the tokens that
    were sampled.

    Args:
        messages: the conversation that the assistant's turn answered.
        answers: messages that answer the turn, usually of role `user` or `tool`.
        tokenizer: its chat template is the only authority on the format.
        stopped: whether the turn's tokens end with a stop token, which is then not repeated.
        template_kwargs: variables of the template.

    Raises:
        UserError: as `render_chat`.
    """
    check_messages([*messages, *answers])
    chats = [[*messages, {"role": "assistant", "content": "x" + end}, *answers] for end in ("", _PROBE)]
    text, probed = (_render(chat, tokenizer, template_kwargs, add_generation_prompt=True) for chat in chats)
    ids = tokenizer.encode(text[common_prefix(text, probed) :])
    first = next((i for i, token in enumerate(ids) if tokenizer.is_added(token)), None)
    if stopped and first is not None and ids[first] in tokenizer.stop_ids:
        ids = ids[first + 1 :]
    return np.asarray(ids, np.int32)


def with_template(tokenizer: Tokenizer, spec: str) -> Tokenizer:
    """The tokenizer with the chat template that `data.chat_template` names.

    Args:
        tokenizer: its own template is replaced.
        spec: `gemma`, `gemma4`, `llama3`, `chatml`, or a .jinja file.

    Raises:
        UserError: there is no such name or file, or the tokenizer lacks the format's marker tokens.
    """
    if spec in TEMPLATES:
        missing = [marker for marker in MARKERS[spec] if not tokenizer.has_token(marker)]
        if missing:
            raise UserError(
                f"data.chat_template is {spec!r}, but {tokenizer.name} has no token {', '.join(missing)}: "
                "choose the format of the model's family, or a .jinja file that uses the tokens it has"
            )
        return tokenizer.replace_template(TEMPLATES[spec])
    path = Path(spec).expanduser()
    if path.suffix != ".jinja":
        hint = nearest(spec, TEMPLATE_NAMES)
        raise UserError(
            f"data.chat_template is {spec!r}, not one of {', '.join(TEMPLATE_NAMES)} or a .jinja file.{hint}"
        )
    if not path.is_file():
        raise UserError(f"data.chat_template: there is no file {path}")
    return tokenizer.replace_template(path.read_text(encoding="utf-8"))


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Id of the special token that a turn of the assistant ends with, after white space at most; None where the chat
    template writes none, and for a tokenizer without a template."""
    if tokenizer.chat_template is None:
        return None
    try:
        text = _render([{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}], tokenizer, {})
    except UserError:  # it refuses a conversation of two turns
        return None
    _, probe, tail = text.rpartition(_PROBE)
    ids = tokenizer.encode(tail.lstrip()) if probe else []
    return ids[0] if ids and tokenizer.is_added(ids[0]) else None


def check_messages(messages: Any) -> None:
    """Refuses a value that is not a list of valid messages, which templates would render as nonsense.

    Raises:
        UserError: the message says which message is wrong and why.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError(f"messages is {messages!r:.80}, not a list of at least one message")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise UserError(f"message {i} is {message!r:.80}, not an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            hint = " Did you mean 'assistant'?" if role in ("model", "gpt", "bot") else nearest(str(role), ROLES)
            raise UserError(f"message {i} has the role {role!r}, not one of {', '.join(ROLES)}.{hint}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise UserError(f"message {i} ({role}) has no content; its keys are {', '.join(message)}")


def _render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    """The template's text; an error inside of the template is raised as a UserError."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise UserError(
            f"{tokenizer.name} has no chat template: set data.chat_template to gemma, gemma4, llama3, chatml or a "
            ".jinja file, or give rows of prompt and completion strings, or text"
        )
    try:
        return tokenizer.apply_template(messages, add_generation_prompt, **template_kwargs)
    except (TemplateError, TypeError, ValueError) as error:  # a template may add a string to a list of parts
        raise UserError(f"the chat template of {tokenizer.name} refuses the conversation: {error}") from error


def _turn_start(
    text: str, messages: Sequence[Message], k: int, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]
) -> int:
    """The character in `text` where the assistant's message `k` starts: the length of the prompt before it.

    Where `text` does not begin with that prompt (the template rewrites history, or adds a thinking block to the prompt
    that the finished conversation lacks), it is the start of the message's content.
    """
    try:
        prompt = _render(messages[:k], tokenizer, template_kwargs, add_generation_prompt=True)
    except UserError:  # some templates refuse a conversation without a user's message
        prompt = None
    if prompt is not None and text.startswith(prompt):
        return len(prompt)
    probed = _replaced(messages, k, _with_content(messages[k], before=_PROBE))
    return common_prefix(text, _render(probed, tokenizer, template_kwargs))


def _turn_end(
    text: str, messages: Sequence[Message], k: int, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]
) -> int:
    """The character in `text` where message `k` ends, before its stop token; for tool calls possibly after it."""
    message = messages[k]
    if not message.get("tool_calls"):
        probed = _replaced(messages, k, _with_content(message, after=_PROBE))
        return common_prefix(text, _render(probed, tokenizer, template_kwargs))
    # Tool calls come after the content: the conversation up to this turn bounds them, if `text` begins with it.
    until = _render(messages[: k + 1], tokenizer, template_kwargs)
    if text.startswith(until):
        ids, offsets = tokenizer.encode_with_offsets(until)
        added = [i for i in range(len(ids)) if tokenizer.is_added(ids[i])]
        return int(offsets[added[-1], 0]) if added else len(until)
    longer = {**message, "tool_calls": [*message["tool_calls"], message["tool_calls"][-1]]}
    return common_prefix(text, _render(_replaced(messages, k, longer), tokenizer, template_kwargs))


def _stop(text: str, ids: list[int], offsets: np.ndarray, end: int, tokenizer: Tokenizer) -> slice:
    """The slice of tokens from `end` through the turn's stop token; empty where none follows.

    Any special token that follows directly ends the turn. After white space (Llama 2 writes a space before `</s>`) it
    has to be a known stop token, since the next turn's opening marker is special too.
    """
    first = last = int(np.searchsorted(offsets[:, 0], end))
    while last < len(ids) and not tokenizer.is_added(ids[last]) and text[slice(*offsets[last])].isspace():
        last += 1
    stops = last < len(ids) and (ids[last] in tokenizer.stop_ids or (last == first and tokenizer.is_added(ids[last])))
    return slice(first, last + 1 if stops else first)


def _with_content(message: Message, before: str = "", after: str = "") -> Message:
    """The message with text added before and after its content, in its first and last text part where it has parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": before + (content or "") + after}
    parts = copy.deepcopy(list(content))
    texts = [part for part in parts if part.get("type") == "text"]
    if not texts:
        raise UserError("an assistant's content holds no text part; only text is trained")
    texts[0]["text"] = before + texts[0]["text"]
    texts[-1]["text"] = texts[-1]["text"] + after
    return {**message, "content": parts}


def _replaced(messages: Sequence[Message], k: int, message: Message) -> list[Message]:
    return [*messages[:k], message, *messages[k + 1 :]]


def common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix of two texts, by bisection: comparing slices runs in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
