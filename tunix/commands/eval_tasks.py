"""The tasks of `tunix eval`: the loss of given completions, scores of sampled answers, and comparisons of pairs.

Each takes a model and the rows, renders them as training does, and returns numbers with their standard errors and an
object for each row. `evaluate.py` selects the tasks, prints and writes the results.

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

from tunix.algorithms.episodes import rewards_of, total_rewards
from tunix.commands.progress import Bar, ProgressSampler
from tunix.config import RowKind
from tunix.data.accounting import Accounting, Kept
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.packing import as_scored
from tunix.data.pipeline import prompt_of
from tunix.data.shapes import rendering
from tunix.data.sources import Rows
from tunix.errors import UserError
from tunix.inference.model import InferenceModel
from tunix.mesh import row_shards
from tunix.rollout.collect import Collector
from tunix.rollout.types import Scored
from tunix.trainer.logprobs import Scorer
from tunix.trainer.metrics import perplexity
from tunix.trainer.microbatches import Microbatcher
from tunix.types import Sequence
from tunix.util.statistics import Estimate, mean_of, means_of, pass_at_k, ratio_of

ROWS_PER_PASS, TOGETHER = 8, 64
"""Rows of a micro-batch, and sequences in a call on the device."""


@dataclass(frozen=True)
class Table:
    """The rows to evaluate, and how they are rendered."""

    rows: Rows
    config: DataConfig
    limit: int | None = None
    """Maximum number of rows, from the start; None for all."""

    def examples(self, inference: InferenceModel, train_on: RowKind) -> "Examples":
        """Renders the rows.

        Raises:
            UserError: every row is dropped.
        """
        size = inference.source.decoder.vocab_size
        settings = replace(
            rendering(self.config, self.rows[0], f"row 1 of {self.rows.name}", train_on), vocab_size=size
        )
        number = min(self.limit or sys.maxsize, len(self.rows))
        made = [
            to_example(self.rows[i], inference.tokenizer, settings, f"row {i + 1} of {self.rows.name}")
            for i in range(number)
        ]
        kept = [(i, one) for i, one in enumerate(made) if isinstance(one, Kept) and one.sequences[0].weight > 0]
        examples = Examples([i for i, _ in kept], [one for _, one in kept], sum(map(Accounting.of, made), Accounting()))
        if not kept:
            raise UserError(f"{self.rows.name}: none of {number} rows can be evaluated{examples.note}")
        return examples


@dataclass(frozen=True)
class Examples:
    """Rendered rows, without dropped ones."""

    places: list[int]
    """The number of each row in the file, from 0."""
    kept: list[Kept]
    accounting: Accounting

    @property
    def note(self) -> str:
        """Text about dropped and shortened rows, e.g. `; 2 x longer than max_length`; empty without any."""
        counted = self.accounting
        lost = {**counted.dropped, "cut off at max_length": counted.truncated, **counted.notes}
        return "".join(f"; {count} x {reason}" for reason, count in lost.items() if count)


@dataclass(frozen=True)
class EvalResult:
    """The numbers of one task, and an object for each row."""

    metrics: Mapping[str, Estimate]
    rows: list[dict[str, Any]]
    """Results by row, e.g. `{"row": 0, "loss": 1.2, "tokens": 7}`."""
    notes: list[str] = field(default_factory=list)
    """Remarks that are printed below the numbers."""


def loss(inference: InferenceModel, table: Table, train_on: RowKind = RowKind.COMPLETION) -> EvalResult:
    """The mean of `-log p` over the trained tokens, weighted by row, and the perplexity."""
    examples = table.examples(inference, train_on)
    sequences = [kept.sequences[0] for kept in examples.kept]
    losses = [-x[one.loss_mask].astype(np.float64) for one, x in _scored(inference, sequences)]
    weights = np.array([one.weight for one in sequences])
    mean = ratio_of(weights * [x.sum() for x in losses], weights * [x.size for x in losses])
    value = perplexity(mean.value)
    error = None if mean.error is None else value * mean.error
    rows = [
        {"row": place, "loss": float(x.mean()), "tokens": x.size}
        for place, x in zip(examples.places, losses, strict=True)
    ]
    metrics = {"loss": mean, "perplexity": Estimate(value, error, mean.count)}
    return EvalResult(metrics, rows, [f"{sum(x.size for x in losses)} trained tokens{examples.note}"])


def pairs(inference: InferenceModel, table: Table) -> EvalResult:
    """Accuracy and margin of the chosen side over the rejected one, by a reward model's score or else by log-prob.

    Both sides of a pair follow the same prompt, so that `log p(chosen) - log p(rejected)` is that of the completions.
    """
    examples = table.examples(inference, RowKind.PAIRS)
    sides = [side for kept in examples.kept for side in kept.sequences]
    by_score = inference.source.has_scalar_head
    if by_score:
        scores = [float(x[-1]) for _, x in _scored(inference, [as_scored(side) for side in sides], values=True)]
    else:
        scored = list(_scored(inference, sides))
        scores = [float(x[one.loss_mask].sum(dtype=np.float64)) for one, x in scored]
    metrics = _compared(np.array(scores), "")
    if not by_score:
        sizes = [int(side.loss_mask.sum()) for side in sides]
        metrics |= _compared(np.array(scores) / sizes, "_per_token")
    rows = [
        {"row": place, "chosen": chosen, "rejected": rejected}
        for place, chosen, rejected in zip(examples.places, scores[::2], scores[1::2], strict=True)
    ]
    return EvalResult(metrics, rows, [f"by {'score' if by_score else 'log-prob'}{examples.note}"])


def _compared(scores: np.ndarray, suffix: str) -> dict[str, Estimate]:
    margins = scores[::2] - scores[1::2]
    return {f"pairs/accuracy{suffix}": mean_of(np.heaviside(margins, 0.5)), f"pairs/margin{suffix}": mean_of(margins)}


@dataclass(frozen=True)
class ScoredAnswers:
    """The model's answers to all rows, with their rewards."""

    examples: Examples
    groups: list[list[Scored]]
    weights: Mapping[str, float]
    """Weight of each reward in the sum, by name."""

    def reward(self) -> EvalResult:
        """The mean total reward, and the mean of each reward where there are several."""
        named = rewards_of(self.groups)
        metrics = {"reward": mean_of(means_of(self._totals))}
        if len(named) > 1:
            metrics |= {
                f"reward/{name}": mean_of(means_of(values))
                for name, values in named.items()
                if not np.isnan(values).all()
            }
        return EvalResult(metrics, self._rows(), self._notes())

    def accuracy(self, threshold: float) -> EvalResult:
        """The share of answers with a reward of at least `threshold`."""
        right = np.where(np.isnan(self._totals), np.nan, self._totals >= threshold)
        return EvalResult({"accuracy": mean_of(means_of(right))}, self._rows(), self._notes())

    def passes(self, threshold: float, ks: List[int]) -> EvalResult:
        """pass@k for each k, over the rows that have at least k scored answers.

        Raises:
            UserError: no row has that many.
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
        return EvalResult(metrics, self._rows(), notes)

    @property
    def _totals(self) -> np.ndarray:
        return total_rewards(self.groups, self.weights)

    def _notes(self) -> list[str]:
        answers = [one for group in self.groups for one in group]
        cut = sum(one.truncated for one in answers)
        failed = [reason for one in answers if (reason := one.unscored)]
        counts = f"{len(answers)} answers, {cut} cut off{self.examples.note}"
        return [counts] + ([f"{len(failed)} have no score and count nowhere; the first: {failed[0]}"] if failed else [])

    def _rows(self) -> list[dict[str, Any]]:
        totals = self._totals
        return [
            {"row": place, "answers": [_answer(one, totals[i, j]) for j, one in enumerate(group)]}
            for i, (place, group) in enumerate(zip(self.examples.places, self.groups, strict=True))
        ]


def answers(inference: InferenceModel, table: Table, collector: Collector, n: int, seed: int) -> ScoredAnswers:
    """Samples and scores `n` answers to each row.

    Raises:
        UserError: not one answer has a score.
    """
    examples = table.examples(inference, RowKind.PROMPT if collector.play is None else RowKind.ROW)
    prompts = [prompt_of(kept) for kept in examples.kept]
    engine = inference.engine
    with closing(Bar("eval", n * len(prompts))) as bar:
        groups = collector.collect(ProgressSampler(engine, bar), prompts, n, seed)
    scored = ScoredAnswers(examples, groups, collector.weights)
    reasons = [one.unscored for group in groups for one in group]
    if all(reasons):
        raise UserError(f"none of {len(reasons)} answers could be scored, the first because {reasons[0]}")
    return scored


def _answer(scored: Scored, total: float) -> dict[str, Any]:
    """An answer as an object of `--out`; null where there is no score."""
    values = {name: None if math.isnan(x) else x for name, x in {"": total, **scored.rewards}.items()}
    failures = {"failures": dict(scored.failures)} if scored.failures else {}
    tokens = scored.completion.tokens.tolist()
    shown = {"text": scored.text} if scored.text else {}
    return {"tokens": tokens, **shown, "reward": values.pop(""), "rewards": values, **failures}


def _scored(
    inference: InferenceModel, sequences: List[Sequence], values: bool = False
) -> Iterator[tuple[Sequence, np.ndarray]]:
    """Yields each sequence with the `[T]` log-probs (or values) of its tokens, in shapes that compile once."""
    model, params, mesh = inference.weights()
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
