"""What `tunix eval` measures: the loss of given completions, the model's own answers, and pairs.

Each takes a speaker and the rows, renders them as training does, and gives numbers with their standard errors and an
object for each row. `evaluate.py` chooses among them, prints and writes.

Axes: T time.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tunix.algorithms.advantages import weighted_sum
from tunix.algorithms.episodes import rewards_of
from tunix.commands.progress import Bar, Drawing
from tunix.config import RowKind
from tunix.data.accounting import Accounting, Kept
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.pipeline import prompt_of
from tunix.data.scored import as_scored
from tunix.data.shapes import rendering
from tunix.data.sources import Rows
from tunix.errors import UserError
from tunix.inference.model import InferenceModel
from tunix.mesh import row_shards
from tunix.rollout.collect import Collector, Scored
from tunix.trainer.logprobs import Scorer
from tunix.trainer.metrics import perplexity
from tunix.trainer.microbatches import Microbatcher
from tunix.types import Sequence
from tunix.util.statistics import Estimate, mean_of, means_of, pass_at_k, ratio_of

ROWS_PER_PASS, TOGETHER = 8, 64
"""Rows of a compiled pass, and sequences that are given to the device at a time."""


@dataclass(frozen=True)
class Table:
    """The rows, and how they are read."""

    rows: Rows
    config: DataConfig
    limit: int | None = None
    """Rows from the start; None for all."""

    def examples(self, speaker: InferenceModel, train_on: RowKind) -> "Examples":
        """What becomes of the rows.

        Raises:
            UserError: nothing of them is left.
        """
        size = speaker.source.decoder.vocab_size
        how = replace(rendering(self.config, self.rows[0], f"row 1 of {self.rows.name}", train_on), vocab_size=size)
        number = min(self.limit or sys.maxsize, len(self.rows))
        made = [
            to_example(self.rows[i], speaker.tokenizer, how, f"row {i + 1} of {self.rows.name}") for i in range(number)
        ]
        kept = [(i, one) for i, one in enumerate(made) if isinstance(one, Kept) and one.sequences[0].weight > 0]
        found = Examples([i for i, _ in kept], [one for _, one in kept], sum(map(Accounting.of, made), Accounting()))
        if not kept:
            raise UserError(f"{self.rows.name}: none of {number} rows can be evaluated{found.told}")
        return found


@dataclass(frozen=True)
class Examples:
    """Rows that can be evaluated."""

    places: list[int]
    """Of each, its number in the file, from 0."""
    kept: list[Kept]
    accounting: Accounting

    @property
    def told(self) -> str:
        """What was lost on the way, e.g. `; 2 x longer than max_length`."""
        lost = {**self.accounting.dropped, "cut off at max_length": self.accounting.truncated}
        return "".join(f"; {count} x {reason}" for reason, count in lost.items() if count)


@dataclass(frozen=True)
class Found:
    """What was measured."""

    metrics: Mapping[str, Estimate]
    rows: list[dict[str, Any]]
    """An object for each row."""
    notes: list[str] = field(default_factory=list)
    """What a person should know about the numbers."""


def loss(speaker: InferenceModel, table: Table, train_on: RowKind = RowKind.COMPLETION) -> Found:
    """The mean of `-log p` over the trained tokens, each weighted as its row, and the perplexity."""
    examples = table.examples(speaker, train_on)
    sequences = [kept.sequences[0] for kept in examples.kept]
    found = [-x[one.loss_mask].astype(np.float64) for one, x in _scored(speaker, sequences)]
    weights = np.array([one.weight for one in sequences])
    mean = ratio_of(weights * [x.sum() for x in found], weights * [x.size for x in found])
    reached = perplexity(mean.value)
    error = None if mean.error is None else reached * mean.error
    rows = [
        {"row": place, "loss": float(x.mean()), "tokens": x.size}
        for place, x in zip(examples.places, found, strict=True)
    ]
    metrics = {"loss": mean, "perplexity": Estimate(reached, error, mean.count)}
    return Found(metrics, rows, [f"{sum(x.size for x in found)} trained tokens{examples.told}"])


def pairs(speaker: InferenceModel, table: Table) -> Found:
    """How often and by how much the chosen side is above the rejected one: by a reward model's score, else by log-prob.

    Both sides of a pair follow the same prompt, so that `log p(chosen) - log p(rejected)` is that of the completions.
    """
    examples = table.examples(speaker, RowKind.PAIRS)
    sides = [side for kept in examples.kept for side in kept.sequences]
    judging = speaker.source.has_scalar_head
    if judging:
        scores = [float(x[-1]) for _, x in _scored(speaker, [as_scored(side) for side in sides], values=True)]
    else:
        scored = list(_scored(speaker, sides))
        scores = [float(x[one.loss_mask].sum(dtype=np.float64)) for one, x in scored]
    metrics = _compared(np.array(scores), "")
    if not judging:
        sizes = [int(side.loss_mask.sum()) for side in sides]
        metrics |= _compared(np.array(scores) / sizes, "_per_token")
    rows = [
        {"row": place, "chosen": chosen, "rejected": rejected}
        for place, chosen, rejected in zip(examples.places, scores[::2], scores[1::2], strict=True)
    ]
    return Found(metrics, rows, [f"by {'score' if judging else 'log-prob'}{examples.told}"])


def _compared(scores: np.ndarray, suffix: str) -> dict[str, Estimate]:
    margins = scores[::2] - scores[1::2]
    return {f"pairs/accuracy{suffix}": mean_of(np.heaviside(margins, 0.5)), f"pairs/margin{suffix}": mean_of(margins)}


@dataclass(frozen=True)
class Answers:
    """The model's own answers and what they are worth."""

    examples: Examples
    groups: list[list[Scored]]
    weights: Mapping[str, float]
    """Of each reward in the sum."""

    def reward(self) -> Found:
        """The mean reward, and that of each where there are several."""
        named = rewards_of(self.groups)
        metrics = {"reward": mean_of(means_of(self._totals))}
        if len(named) > 1:
            metrics |= {
                f"reward/{name}": mean_of(means_of(values))
                for name, values in named.items()
                if not np.isnan(values).all()
            }
        return Found(metrics, self._rows(), self._notes())

    def accuracy(self, threshold: float) -> Found:
        """The share of answers that are worth at least `threshold`."""
        right = np.where(np.isnan(self._totals), np.nan, self._totals >= threshold)
        return Found({"accuracy": mean_of(means_of(right))}, self._rows(), self._notes())

    def passes(self, threshold: float, ks: List[int]) -> Found:
        """pass@k for each k. A problem that has fewer scored answers than k is left out of it.

        Raises:
            UserError: that is true of all problems.
        """
        scored = (~np.isnan(self._totals)).sum(axis=1)
        right = (self._totals >= threshold).sum(axis=1)
        notes, metrics = self._notes(), {}
        for k in ks:
            enough = scored >= k
            if not enough.any():
                raise UserError(f"--k {k}: no row has so many answers with a score; {'; '.join(notes)}")
            metrics[f"pass@{k}"] = mean_of(pass_at_k(scored[enough], right[enough], k))
            if not enough.all():
                notes.append(f"pass@{k} leaves {int((~enough).sum())} rows out, which have fewer scores")
        return Found(metrics, self._rows(), notes)

    @property
    def _totals(self) -> np.ndarray:
        return weighted_sum(rewards_of(self.groups), self.weights)

    def _notes(self) -> list[str]:
        answers = [one for group in self.groups for one in group]
        cut = sum(one.truncated for one in answers)
        failed = [reason for one in answers for reason in list(one.failures.values())[:1]]
        told = f"{len(answers)} answers, {cut} cut off{self.examples.told}"
        return [told] + ([f"{len(failed)} have no score and count nowhere; the first: {failed[0]}"] if failed else [])

    def _rows(self) -> list[dict[str, Any]]:
        totals = self._totals
        return [
            {"row": place, "answers": [_answer(one, totals[i, j]) for j, one in enumerate(group)]}
            for i, (place, group) in enumerate(zip(self.examples.places, self.groups, strict=True))
        ]


def answers(speaker: InferenceModel, table: Table, collector: Collector, n: int, seed: int) -> Answers:
    """Asks every row `n` times.

    Raises:
        UserError: not one answer has a score.
    """
    examples = table.examples(speaker, RowKind.PROMPT if collector.play is None else RowKind.ROW)
    prompts = [prompt_of(kept) for kept in examples.kept]
    engine = speaker.engine
    with closing(Bar("eval", n * len(prompts))) as bar:
        groups = collector.collect(Drawing(engine, bar), prompts, n, seed)
    found = Answers(examples, groups, collector.weights)
    failures = [one.failures for group in groups for one in group]
    if all(failures):
        reason = next(iter(failures[0].values()))
        raise UserError(f"none of {len(failures)} answers could be scored, the first because {reason}")
    return found


def _answer(scored: Scored, total: float) -> dict[str, Any]:
    """An answer as --out has it; null where there is no score."""
    values = {name: None if math.isnan(x) else x for name, x in {"": total, **scored.rewards}.items()}
    failures = {"failures": dict(scored.failures)} if scored.failures else {}
    tokens = scored.completion.tokens.tolist()
    shown = {"text": scored.text} if scored.text else {}
    return {"tokens": tokens, **shown, "reward": values.pop(""), "rewards": values, **failures}


def _scored(
    speaker: InferenceModel, sequences: List[Sequence], values: bool = False
) -> Iterator[tuple[Sequence, np.ndarray]]:
    """Each sequence with the `[T]` log-probs (or values) of its tokens, in shapes that compile once."""
    model, params, mesh = speaker.weights()
    length = -(-max(len(one.tokens) for one in sequences) // 64) * 64
    rows = -(-ROWS_PER_PASS // row_shards(mesh)) * row_shards(mesh)
    scorer = Scorer(model, Microbatcher(rows, mesh), length)
    tokens = 0
    with closing(Bar("eval", len(sequences))) as bar:
        for first in range(0, len(sequences), TOGETHER):
            part = sequences[first : first + TOGETHER]
            compute = scorer.values if values else scorer.logprobs
            yield from zip(part, compute(params, part, size=TOGETHER), strict=True)
            tokens += sum(len(one.tokens) for one in part)
            bar.show(first + len(part), tokens)
