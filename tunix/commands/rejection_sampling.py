"""Best-of-n and rejection sampling: selects from the scored completions of each prompt, as rows for SFT.

The trained tokens must be the sampled ones. Rows of `prompt` and `completion` (strings, or messages where the prompt
was sent as a chat) are written if each of them, rendered as by `tunix run`, gives exactly the sampled tokens. If one
does not (it was cut off, its text has other tokens, or its prompt was given as ids), all rows are `input_ids` with
`labels`, which need no rendering.
"""

import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix.data.accounting import Kept
from tunix.data.examples import to_example
from tunix.data.shapes import TEMPLATE_KWARGS, Rendering
from tunix.errors import UserError
from tunix.inference.model import InferenceModel

UNTRAINED = -100
"""The label of a token that is no target."""


@dataclass(frozen=True)
class Question:
    """A row with a prompt to answer."""

    row: Mapping[str, Any]
    """The columns of the row."""
    tokens: np.ndarray
    """`[T]` int32 token ids of the prompt."""


@dataclass(frozen=True)
class Chosen:
    """The selected rows to train on, and counts about the selection."""

    rows: list[dict[str, Any]]
    """Rows in the order of the prompts, the best completion of each first."""
    prompts: int
    """Number of prompts with at least one selected completion."""
    failed: int
    """Number of prompts without a scored completion."""
    longest: int
    """Number of tokens in the longest row."""
    respelled: int
    """Number of rows whose text does not give the sampled tokens; above 0, all rows are ids."""


def ranked(rewards: List[float | None], most: int | None, threshold: float | None) -> list[int]:
    """The indices of the selected completions, the best first, of equal ones the first.

    Args:
        rewards: of one prompt's completions; None where there is no score.
        most: maximum number to select; None for all.
        threshold: minimum reward; None for any.
    """
    scored = [(value, i) for i, value in enumerate(rewards) if value is not None]
    passing = [(-value, i) for value, i in scored if threshold is None or value >= threshold]
    return [i for _, i in sorted(passing)][:most]


def choose(
    inference: InferenceModel,
    questions: List[Question],
    groups: Iterable[List[Mapping[str, Any]]],
    most: int | None,
    threshold: float | None,
) -> Chosen:
    """Selects completions and writes them as rows to train on.

    Args:
        groups: the completions of each question as written to the file: `tokens`, `text`, `reward`.
        most: maximum number of completions for each prompt; None for all.
        threshold: minimum reward; None for any.
    """
    taken: list[tuple[Question, Mapping[str, Any]]] = []
    failed = prompts = 0
    for question, group in zip(questions, groups, strict=True):
        places = ranked([one["reward"] for one in group], most, threshold)
        taken += [(question, group[place]) for place in places]
        prompts += bool(places)
        failed += all(one["reward"] is None for one in group)
    texts = [_as_text(inference, question, completion) for question, completion in taken]
    respelled = sum(text is None for text in texts)
    rows, longest = [], 0
    for text, (question, completion) in zip(texts, taken, strict=True):
        prompt, tokens = question.tokens.tolist(), completion["tokens"]
        ids = {"input_ids": [*prompt, *tokens], "labels": [UNTRAINED] * len(prompt) + list(tokens)}
        shape = ids if respelled or text is None else text
        rows.append({**shape, **{name: completion[name] for name in ("reward", "row", "sample")}})
        longest = max(longest, len(ids["input_ids"]))
    return Chosen(rows, prompts, failed, longest, respelled)


def _as_text(inference: InferenceModel, question: Question, completion: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row as text; None where rendering it would not give the sampled tokens."""
    if inference.tokenizer is None or (prompt := inference.training_prompt(question.row)) is None:
        return None
    text = completion["text"]
    turn = {"role": "assistant", "content": text}
    row = {"prompt": prompt, "completion": text if isinstance(prompt, str) else [turn]}
    row |= {name: question.row[name] for name in ("tools", TEMPLATE_KWARGS) if question.row.get(name) is not None}
    rendering = Rendering("prompt_completion", max_length=sys.maxsize, vocab_size=inference.source.decoder.vocab_size)
    try:
        example = to_example(row, inference.tokenizer, rendering)
    except UserError:  # the template refuses this answer, which can still be trained as ids
        return None
    start, sampled = len(question.tokens), [*question.tokens.tolist(), *completion["tokens"]]
    if not isinstance(example, Kept):
        return None
    sequence = example.sequences[0]
    # A template may close a turn with a token that is neither sampled nor trained.
    same = sequence.tokens[: len(sampled)].tolist() == sampled
    return row if same and np.flatnonzero(sequence.loss_mask).tolist() == [*range(start, len(sampled))] else None
