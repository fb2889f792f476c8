"""Renders the two sides of a preference pair as tokens and masks, for every shape of row.

With a `prompt`, strings and messages are rendered as prompt and completion are. Without one, the prompt is the
beginning that both sides have in common:

  messages      the messages that both share (UltraFeedback). A `prompt` that is a string is not read then.
  transcripts   "\\n\\nHuman: ...\\n\\nAssistant: ..." (Anthropic HH): up to the last "Assistant:" that both share. From
                there on the assistant's turns are trained, and no others.
  other texts   the tokens that both share.

Each side of the last two is tokenized as a whole, so that no merge is split: a token that begins before the completion
is not trained, and where it merges differently with the two completions, the prompts differ by it. The masks are
correct in any case.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tunix.data.accounting import NO_COMMON_PROMPT, Dropped
from tunix.data.chat import Rendered
from tunix.data.columns import Row, as_messages, as_string, column
from tunix.data.rendered import joined, needed, render_completion, render_messages
from tunix.data.shapes import Rendering
from tunix.data.token_rows import given_ids
from tunix.data.tokenizer import Tokenizer
from tunix.data.turns import common_prefix
from tunix.errors import UserError

Pair = tuple[Rendered, Rendered]
"""The chosen side, then the rejected side."""
Messages = list[dict[str, Any]]

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
"""The beginning of a turn in a transcript."""
_ROLES = {"Human": "user", "Assistant": "assistant"}


def render_pair(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> Pair | Dropped:
    """Tokens and mask of both sides before any limit; Dropped where they have no common prompt.

    Raises:
        UserError: a missing or malformed column.
    """
    if settings.format == "tokens":
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        prompt, chosen, rejected = given_ids(row, names, tokenizer, settings)
        return joined(prompt, chosen), joined(prompt, rejected)
    tokenizer = needed(tokenizer, settings)
    chosen, rejected = column(row, "chosen", settings.columns), column(row, "rejected", settings.columns)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError("chosen and rejected are both strings or both lists of messages, not one of each")
    prompt = column(row, "prompt", settings.columns) if "prompt" in settings.fixed else None
    if isinstance(chosen, str):
        return _strings(prompt, chosen, as_string(rejected, "rejected"), row, tokenizer, settings)
    return _messages(prompt, as_messages(chosen), as_messages(rejected), row, tokenizer, settings)


def _messages(
    prompt: Any, chosen: Messages, rejected: Messages, row: Row, tokenizer: Tokenizer, settings: Rendering
) -> Pair | Dropped:
    """The pair of two lists of messages, which follow a prompt or are whole conversations with a common beginning."""
    before = [] if prompt is None or isinstance(prompt, str) else as_messages(prompt)
    if before and not (chosen[: len(before)] == before == rejected[: len(before)]):
        chosen, rejected = [*before, *chosen], [*before, *rejected]
    elif not before:
        before = _shared(chosen, rejected)
    if not before:
        return Dropped(NO_COMMON_PROMPT)
    sides = (render_messages(side, row, tokenizer, settings, trained_from=len(before)) for side in (chosen, rejected))
    return next(sides), next(sides)


def _shared(chosen: Messages, rejected: Messages) -> Messages:
    """The messages that both sides begin with, except the last one of each side, which is compared."""
    most = min(len(chosen), len(rejected)) - 1
    differ = (i for i in range(most) if chosen[i] != rejected[i])
    return chosen[: next(differ, most)]


def _strings(
    prompt: Any, chosen: str, rejected: str, row: Row, tokenizer: Tokenizer, settings: Rendering
) -> Pair | Dropped:
    """The pair of two strings: completions of a prompt, transcripts, or texts with a common beginning."""
    if prompt is not None:
        sides = (render_completion(prompt, side, row, tokenizer, settings) for side in (chosen, rejected))
        return next(sides), next(sides)
    if _TURN.match(chosen) and _TURN.match(rejected):
        if settings.chat:
            return _messages(None, _turns(chosen, settings), _turns(rejected, settings), row, tokenizer, settings)
        return _transcripts(chosen, rejected, tokenizer)
    if settings.chat:
        raise UserError(
            "data.chat is true, but chosen and rejected are strings without a prompt, and no transcripts of Human: and "
            "Assistant: either; add the column 'prompt'"
        )
    return _texts(chosen, rejected, tokenizer)


def _turns(text: str, settings: Rendering) -> Messages:
    """The messages of a transcript."""
    _, *parts = _TURN.split(text)
    said = zip(parts[::2], parts[1::2], strict=True)
    system = [{"role": "system", "content": settings.system}] if settings.system else []
    return [*system, *({"role": _ROLES[who], "content": words.strip()} for who, words in said)]


def _transcripts(chosen: str, rejected: str, tokenizer: Tokenizer) -> Pair | Dropped:
    """The pair of two transcripts, trained on the assistant's turns from the last one whose beginning both share."""
    common = common_prefix(chosen, rejected)
    starts = [turn.end() for turn in _TURN.finditer(chosen, 0, common) if turn[1] == "Assistant"]
    if not starts:
        return Dropped(NO_COMMON_PROMPT)
    return _transcript(chosen, starts[-1], tokenizer), _transcript(rejected, starts[-1], tokenizer)


def _transcript(text: str, start: int, tokenizer: Tokenizer) -> Rendered:
    """A transcript between BOS and EOS; EOS is trained where the last turn is the assistant's."""
    offsets = tokenizer.encode_with_offsets(text)[1]
    turns = list(_TURN.finditer(text))
    mask = np.zeros(len(offsets), bool)
    for turn, after in zip(turns, [*(turn.start() for turn in turns[1:]), len(text)], strict=True):
        if turn[1] == "Assistant" and turn.end() >= start:
            mask |= (offsets[:, 0] >= turn.end()) & (offsets[:, 0] < after)
    ids = tokenizer.encode(text, bos=tokenizer.adds_bos)
    before, tokens = len(ids) - len(mask), tokenizer.ended(ids)
    ending = [turns[-1][1] == "Assistant"] * (len(tokens) - len(ids))
    return Rendered(np.asarray(tokens, np.int32), np.asarray([*[False] * before, *mask, *ending]))


def _texts(chosen: str, rejected: str, tokenizer: Tokenizer) -> Pair | Dropped:
    """The pair of two texts between BOS and EOS, trained from the first token that differs."""
    bos = int(tokenizer.adds_bos)
    first, second = (tokenizer.ended(tokenizer.encode(text, bos=tokenizer.adds_bos)) for text in (chosen, rejected))
    most = min(len(first), len(second)) - 1
    start = next((i for i in range(most) if first[i] != second[i]), most)
    if start <= bos:
        return Dropped(NO_COMMON_PROMPT)
    return joined(first[:start], first[start:]), joined(second[:start], second[start:])
