"""Samples of a run: greedy answers to held-out prompts before and after training, displayed and in `samples.jsonl`.

Axes: B rows, T time, S sequences.
"""

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunix.data.seen import within
from tunix.data.tokenizer import Tokenizer
from tunix.distributed import processes
from tunix.protocols import Client
from tunix.trainer.progress import Display
from tunix.types import Batch, Begun, Pictures, Sampling, Sequence
from tunix.util.json_lines import append_rows

SHOWN = 240
"""Characters of a prompt or an answer that are displayed, of a longer one its beginning and its end."""


@dataclass(frozen=True)
class Samples:
    """Prompts of a run, and the file and display that receive their answers."""

    prompts: List[np.ndarray]
    """Token ids up to the first trained token."""
    expected: List[Any]
    """The completion of each prompt in the data: text, or ids where there is no tokenizer."""
    pictures: list[Pictures | None]
    """Those of each prompt; None without any."""
    client: Client
    tokenizer: Tokenizer | None
    sampling: Sampling
    path: Path
    """`samples.jsonl` of the run folder."""
    display: Display

    def take(self, step: int) -> None:
        """Answers all prompts with the current weights; writes and displays the answers."""
        if not self.prompts:
            return
        self.client.publish()
        # No more than one process writes them down.
        rows = processes.told("samples", lambda: self._answered(step))
        append_rows(self.path, rows)
        for row in rows:
            self._show(row)

    def _answered(self, step: int) -> list[dict[str, Any]]:
        """The rows of all prompts."""
        begun = [Begun(0, index, pictures=one) for index, one in enumerate(self.pictures)]
        answers = self.client.sample(self.prompts, 1, self.sampling, seed=0, begun=begun)
        return [
            {
                "step": step,
                "prompt": self._text(prompt),
                "completion": self._text(answer.tokens),
                "expected": expected,
                "finish": answer.finish,
            }
            for prompt, expected, (answer,) in zip(self.prompts, self.expected, answers, strict=True)
        ]

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rollouts of a step to the file, without displaying them."""
        if listed := [{"step": step, **row} for row in rows]:
            append_rows(self.path, listed)

    def _text(self, tokens: np.ndarray) -> Any:
        return readable_tokens(tokens, self.tokenizer)

    def _show(self, row: dict[str, Any]) -> None:
        """Displays a row in three lines, shortened; the file has all of it."""
        self.display.say(f"  step {row['step']}  {_shortened(' '.join(str(row['prompt']).split()))}")
        self.display.say(f"      answers: {_shortened(repr(str(row['completion']).strip()))}")
        self.display.say(f"     expected: {_shortened(repr(str(row['expected']).strip()))}")


def _shortened(text: str) -> str:
    """The beginning and the end of a text that is longer than `SHOWN` characters."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN * 2 // 3]} ... {text[-SHOWN // 3 :]}"


def readable_tokens(tokens: np.ndarray, tokenizer: Tokenizer | None) -> Any:
    """Text without special tokens, or the ids where there is no tokenizer."""
    return tokenizer.decode(tokens, skip_special=True) if tokenizer else tokens.tolist()


def prompts_of(
    sequences: Iterable[Sequence], number: int
) -> tuple[list[np.ndarray], list[np.ndarray], list[Pictures | None]]:
    """Prompts, completions and pictures of the first desirable sequences, each split before its first trained token.

    Args:
        sequences: given sequences; of pairs only the chosen ones.
        number: maximum number of prompts.

    Returns:
        Prompts, their completions and the prompts' pictures. Sequences that are trained from their first token on have
        no prompt and are left out, and so are those with an undesirable label.
    """
    desirable = (sequence for sequence in sequences if sequence.per_sequence.get("label", 1.0))
    starts = ((sequence, int(np.argmax(sequence.loss_mask))) for sequence in desirable)
    split = list(itertools.islice(((sequence, start) for sequence, start in starts if start > 1), number))
    sides = ([one.tokens[:start] for one, start in split], [one.tokens[start:] for one, start in split])
    return *sides, [one.pictures and within(one.pictures, 0, start) for one, start in split]


def unigram_entropy(batches: List[Batch]) -> float:
    """The entropy in nats of the trained tokens' frequencies: the loss of predicting tokens by frequency alone."""
    trained = np.concatenate([np.asarray(batch.tokens)[np.asarray(batch.loss_mask)] for batch in batches])
    shares = np.unique(trained, return_counts=True)[1] / trained.size
    return float(-(shares * np.log(shares)).sum())
