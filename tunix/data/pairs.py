"""The two sides of a preference pair as tokens and masks, whatever shape the row has.

With a `prompt`, strings and messages are rendered as prompt and completion are. Without one the prompt is what both
sides begin with:

  messages      the messages that they share (UltraFeedback). Its `prompt` is a string beside them, and not read.
  transcripts   "\\n\\nHuman: ...\\n\\nAssistant: ..." (Anthropic HH): up to the last "Assistant:" that both share. From
                there on what the assistant says is trained, and no other turn.
  other texts   the tokens that they share.

Each side is tokenized as a whole, so that no merge is split: a token that begins before the completion is not trained,
and where it merges differently with either completion, the two prompts differ by it. Masks are right all the same.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tunix.data.accounting import NO_COMMON_PROMPT, Dropped
from tunix.data.chat import common_prefix
from tunix.data.columns import Row, as_messages, as_string, column
from tunix.data.rendered import Rendered, given_ids, joined, needed, render_completion, render_messages
from tunix.data.shapes import Rendering
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError

Pair = tuple[Rendered, Rendered]
"""Chosen, and rejected."""
Messages = list[dict[str, Any]]

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
"""How a turn of a transcript begins."""
_ROLES = {"Human": "user", "Assistant": "assistant"}


def render_pair(row: Row, tokenizer: Tokenizer | None, how: Rendering) -> Pair | Dropped:
    """Tokens and mask of both sides, before any limit.

    Raises:
        UserError: a missing or malformed column.
    """
    if how.format == "tokens":
        prompt, chosen, rejected = (given_ids(row, name, how) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
        return joined(prompt, chosen), joined(prompt, rejected)
    tokenizer = needed(tokenizer, how)
    chosen, rejected = column(row, "chosen", how.columns), column(row, "rejected", how.columns)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError("chosen and rejected are both strings or both lists of messages, not one of each")
    prompt = column(row, "prompt", how.columns) if "prompt" in how.fixed else None
    if isinstance(chosen, str):
        return _strings(prompt, chosen, as_string(rejected, "rejected"), row, tokenizer, how)
    return _messages(prompt, as_messages(chosen), as_messages(rejected), row, tokenizer, how)


def _messages(
    prompt: Any, chosen: Messages, rejected: Messages, row: Row, tokenizer: Tokenizer, how: Rendering
) -> Pair | Dropped:
    """Sides that follow a prompt of messages, or that are whole conversations with a common beginning."""
    before = [] if prompt is None or isinstance(prompt, str) else as_messages(prompt)
    if before and not (chosen[: len(before)] == before == rejected[: len(before)]):
        chosen, rejected = [*before, *chosen], [*before, *rejected]
    elif not before:
        before = _shared(chosen, rejected)
    if not before:
        return Dropped(NO_COMMON_PROMPT)
    sides = (render_messages(side, row, tokenizer, how, trained_from=len(before)) for side in (chosen, rejected))
    return next(sides), next(sides)


def _shared(chosen: Messages, rejected: Messages) -> Messages:
    """The messages that both begin with; at least the last one of each side is left to be compared."""
    most = min(len(chosen), len(rejected)) - 1
    differ = (i for i in range(most) if chosen[i] != rejected[i])
    return chosen[: next(differ, most)]


def _strings(prompt: Any, chosen: str, rejected: str, row: Row, tokenizer: Tokenizer, how: Rendering) -> Pair | Dropped:
    """Completions of a prompt, transcripts, or texts with a common beginning."""
    if prompt is not None:
        sides = (render_completion(prompt, side, row, tokenizer, how) for side in (chosen, rejected))
        return next(sides), next(sides)
    if _TURN.match(chosen) and _TURN.match(rejected):
        if how.chat:
            return _messages(None, _turns(chosen, how), _turns(rejected, how), row, tokenizer, how)
        return _transcripts(chosen, rejected, tokenizer)
    if how.chat:
        raise UserError(
            "data.chat is true, but chosen and rejected are strings without a prompt, and no transcripts of Human: and "
            "Assistant: either; add the column 'prompt'"
        )
    return _texts(chosen, rejected, tokenizer)


def _turns(text: str, how: Rendering) -> Messages:
    """A transcript as messages."""
    _, *parts = _TURN.split(text)
    said = zip(parts[::2], parts[1::2], strict=True)
    system = [{"role": "system", "content": how.system}] if how.system else []
    return [*system, *({"role": _ROLES[who], "content": words.strip()} for who, words in said)]


def _transcripts(chosen: str, rejected: str, tokenizer: Tokenizer) -> Pair | Dropped:
    """Two texts, trained where the assistant speaks after the last turn of its that both have begun."""
    common = common_prefix(chosen, rejected)
    starts = [turn.end() for turn in _TURN.finditer(chosen, 0, common) if turn[1] == "Assistant"]
    if not starts:
        return Dropped(NO_COMMON_PROMPT)
    return _transcript(chosen, starts[-1], tokenizer), _transcript(rejected, starts[-1], tokenizer)


def _transcript(text: str, start: int, tokenizer: Tokenizer) -> Rendered:
    """One text between BOS and EOS; EOS is trained where the assistant has the last word."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    turns = list(_TURN.finditer(text))
    mask = np.zeros(len(ids), bool)
    for turn, after in zip(turns, [*(turn.start() for turn in turns[1:]), len(text)], strict=True):
        if turn[1] == "Assistant" and turn.end() >= start:
            mask |= (offsets[:, 0] >= turn.end()) & (offsets[:, 0] < after)
    bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
    tokens = np.asarray([*bos, *ids, tokenizer.eos_id], np.int32)
    return tokens, np.asarray([*(False for _ in bos), *mask, turns[-1][1] == "Assistant"])


def _texts(chosen: str, rejected: str, tokenizer: Tokenizer) -> Pair | Dropped:
    """Two texts between BOS and EOS, trained from the first token that differs."""
    bos = int(tokenizer.adds_bos)
    first, second = ([*tokenizer.encode(text, bos=tokenizer.adds_bos), tokenizer.eos_id] for text in (chosen, rejected))
    most = min(len(first), len(second)) - 1
    start = next((i for i in range(most) if first[i] != second[i]), most)
    if start <= bos:
        return Dropped(NO_COMMON_PROMPT)
    return joined(first[:start], first[start:]), joined(second[:start], second[start:])
