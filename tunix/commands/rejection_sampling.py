"""Best-of-n and rejection sampling: of the scored completions of each prompt, those to train on, as rows for SFT.

What is trained must be what was sampled. Rows of `prompt` and `completion` (strings, or messages where the prompt was
sent as a chat) are written where each of them, rendered as `tunix run` renders it, is token for token the prompt and
the completion that were drawn. Where one is not (it was cut off, is spelled with other tokens, or was asked with ids),
all rows are `input_ids` with `labels`, which say the same without rendering.
"""

import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix.data.accounting import Kept
from tunix.data.examples import to_example
from tunix.data.shapes import Rendering
from tunix.errors import UserError
from tunix.inference.model import InferenceModel

UNTRAINED = -100
"""The label of a token that is no target."""


@dataclass(frozen=True)
class Question:
    """A row that was asked."""

    row: Mapping[str, Any]
    """Its columns."""
    tokens: np.ndarray
    """`[T]` of the prompt."""


@dataclass(frozen=True)
class Chosen:
    """Rows to train on, and how they came about."""

    rows: list[dict[str, Any]]
    """In the order of the prompts, the best completion of each first."""
    prompts: int
    """Prompts of which some completion was taken."""
    failed: int
    """Prompts of which no completion has a score."""
    longest: int
    """Tokens of the longest row."""
    respelled: int
    """Rows whose text would not be trained as the tokens that were drawn; above 0, all rows are ids."""


def ranked(rewards: List[float | None], most: int | None, threshold: float | None) -> list[int]:
    """The places of the completions that are taken, the best first; of equals the first.

    Args:
        rewards: of one prompt's completions; None where there is no score.
        most: how many are taken at most; None for all.
        threshold: the least reward that is taken; None for any.
    """
    scored = [(value, i) for i, value in enumerate(rewards) if value is not None]
    passing = [(-value, i) for value, i in scored if threshold is None or value >= threshold]
    return [i for _, i in sorted(passing)][:most]


def choose(
    speaker: InferenceModel,
    questions: List[Question],
    groups: Iterable[List[Mapping[str, Any]]],
    most: int | None,
    threshold: float | None,
) -> Chosen:
    """The rows to train on.

    Args:
        groups: the written completions of each question: `tokens`, `text`, `reward`.
        most: as `ranked`'s.
        threshold: as `ranked`'s.
    """
    taken: list[tuple[Question, Mapping[str, Any]]] = []
    failed = prompts = 0
    for question, group in zip(questions, groups, strict=True):
        places = ranked([one["reward"] for one in group], most, threshold)
        taken += [(question, group[place]) for place in places]
        prompts += bool(places)
        failed += all(one["reward"] is None for one in group)
    texts = [_as_text(speaker, *one) for one in taken]
    respelled = sum(text is None for text in texts)
    shapes = [_as_ids(*one) for one in taken] if respelled else [text for text in texts if text is not None]
    told = ("reward", "row", "sample")
    rows = [{**shape, **{name: one[name] for name in told}} for shape, (_, one) in zip(shapes, taken, strict=True)]
    longest = max((len(question.tokens) + len(one["tokens"]) for question, one in taken), default=0)
    return Chosen(rows, prompts, failed, longest, respelled)


def _as_ids(question: Question, one: Mapping[str, Any]) -> dict[str, Any]:
    prompt = question.tokens.tolist()
    return {"input_ids": [*prompt, *one["tokens"]], "labels": [UNTRAINED] * len(prompt) + list(one["tokens"])}


def _as_text(speaker: InferenceModel, question: Question, one: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row as text; None where rendering it would train something else than what was drawn."""
    if speaker.tokenizer is None or (prompt := speaker.said(question.row)) is None:
        return None
    text = one["text"]
    row = {"prompt": prompt, "completion": text if isinstance(prompt, str) else [_assistant(text)]}
    row |= {name: question.row[name] for name in ("tools",) if question.row.get(name) is not None}
    how = Rendering("prompt_completion", max_length=sys.maxsize, vocab_size=speaker.source.decoder.vocab_size)
    try:
        example = to_example(row, speaker.tokenizer, how)
    except UserError:  # the template refuses this answer: as ids it can be trained
        return None
    begin, drawn = len(question.tokens), [*question.tokens.tolist(), *one["tokens"]]
    if not isinstance(example, Kept):
        return None
    sequence = example.sequences[0]
    # A template may close a turn with a token that nobody draws or trains.
    same = sequence.tokens[: len(drawn)].tolist() == drawn
    return row if same and np.flatnonzero(sequence.loss_mask).tolist() == [*range(begin, len(drawn))] else None


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
