"""`tunix eval`: measures a model on held-out rows: loss, reward, accuracy, pass@k, pairs.

A run defines its rows, rewards, environment and rendering, so that `tunix eval RUN` repeats its evaluation; options of
the command line take precedence. Rows that are strings are plain or chats as for `tunix generate`, by one rule for a
run, its export and any other model (`InferenceModel.plain_reason`), and what they are is printed. The options
(`EvalOptions`) and the recipe of a run become a `Setting`; each task is measured; a table is printed, with the standard
error of each number over the rows, and `--out` receives the rows.

Axes: P prompts, G group, T time.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, Num

from tunix.algorithms.episodes import rewards_of, total_rewards
from tunix.commands.sampling import Bar, ProgressSampler, open_collector
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.packing import as_scored
from tunix.data.pipeline import prompt_of
from tunix.data.shapes import rendering
from tunix.data.sources import Rows, held_out_rows, open_held_out
from tunix.data.types import Accounting, Kept
from tunix.errors import UserError
from tunix.hf.source import require_lm_head
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.mesh import row_shards
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Collector
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.config import RewardConfig
from tunix.rollout.types import Scored
from tunix.trainer.logprobs import Scorer
from tunix.trainer.metrics import perplexity
from tunix.trainer.microbatches import Microbatcher
from tunix.types import Sampling, Sequence
from tunix.util.atomic_io import refuse_out, write_text_atomic


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error."""

    value: float
    error: float | None
    """Standard error over the rows; None where there is only one row."""
    count: int
    """Number of rows in the estimate."""


def mean_of(values_P: Num[np.ndarray, "P"]) -> Estimate:
    """The mean `m = sum x / P` with its standard error `sqrt(sum (x - m)^2 / (P - 1) / P)`."""
    number = len(values_P)
    error = float(np.std(values_P, ddof=1) / math.sqrt(number)) if number > 1 else None
    return Estimate(float(np.mean(values_P)), error, number)


def ratio_of(sums_P: Float[np.ndarray, "P"], counts_P: Num[np.ndarray, "P"]) -> Estimate:
    """The mean over the tokens of rows, `r = sum s / sum c`, with its standard error.

    The tokens of a row are not independent, so the error is over rows (the linearised error of a ratio, Cochran
    1977, Sampling Techniques, 6.3): `sqrt(P / (P - 1) sum (s - r c)^2) / sum c`.
    """
    number, total = len(sums_P), float(counts_P.sum())
    ratio = float(sums_P.sum()) / total
    spread = float(((sums_P - ratio * counts_P) ** 2).sum())
    error = math.sqrt(number / (number - 1) * spread) / total if number > 1 else None
    return Estimate(ratio, error, number)


def means_of(values_PG: Num[np.ndarray, "P G"]) -> Float[np.ndarray, "scored"]:
    """The mean of each prompt's samples that are not NaN; prompts that have none are left out."""
    valid = ~np.isnan(values_PG)
    scored = valid.any(axis=1)
    return np.where(valid, values_PG, 0.0).sum(axis=1)[scored] / valid.sum(axis=1)[scored]


def pass_at_k(n_P: Int[np.ndarray, "P"], correct_P: Int[np.ndarray, "P"], k: int) -> Float[np.ndarray, "P"]:
    """The unbiased estimate that at least one of k samples of a problem is correct: `1 - C(n - c, k) / C(n, k)`.

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1. Computed as a product, since the binomials overflow:
    `C(n - c, k) / C(n, k)` is the product over i from n - c + 1 to n of `1 - k / i`.

    Args:
        n_P: samples of each problem, at least k.
        correct_P: how many of them are correct.
        k: samples of which one has to be correct.
    """
    assert (n_P >= k).all(), "a problem has fewer samples than k"
    missed = [
        0.0 if n - c < k else float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
        for n, c in zip(n_P.tolist(), correct_P.tolist(), strict=True)
    ]
    return 1.0 - np.array(missed)


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
            scored = scorer.scores("values" if values else "logprobs", params, part, size=TOGETHER)
            yield from zip(part, scored, strict=True)
            tokens += sum(len(one.tokens) for one in part)
            bar.show(first + len(part), tokens)


Task = Literal["loss", "reward", "accuracy", "pass", "pairs"]
SAMPLING_TASKS: tuple[Task, ...] = ("reward", "accuracy", "pass")
"""Tasks for which the model samples answers."""
LONGEST = 256
"""Default maximum tokens of an answer, if the model has room for them."""
SAMPLES = 8
"""Default number of answers to each row for pass@k."""


@dataclass(frozen=True)
class EvalOptions:
    """The options of `tunix eval`; None for those that are not given."""

    data: str | None = None
    """Rows, named as in a recipe: a file, a folder, a hub id or a function."""
    split: str | None = None
    """Split of the rows, e.g. `test`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column in tunix -> column of the rows, e.g. `{"prompt": "question"}`."""
    rows: int | None = None
    """Maximum number of rows, from the start."""
    task: Task | None = None
    """Task to measure; None for the one that fits the run, the rewards or the rows."""
    rewards: RewardConfig | None = None
    """How answers are scored."""
    threshold: float | None = None
    """Minimum reward of a right answer; None for 1."""
    n: int | None = None
    """Number of answers to each row."""
    ks: tuple[int, ...] = ()
    """Values of k for pass@k, e.g. `(1, 8)`."""
    max_tokens: int | None = None
    """Maximum tokens of an answer."""
    temperature: float | None = None
    """Sampling temperature. None: greedy; for pass@k the run's, or 1."""
    stop: tuple[str, ...] = ()
    """Stop strings in addition to the run's."""
    seed: int = 0
    """Seed of the sampling."""


@dataclass(frozen=True)
class Setting:
    """Everything that an evaluation needs: model, rows, tasks, rewards and sampling."""

    inference: InferenceModel
    table: Table
    tasks: tuple[Task, ...]
    train_on: RowKind
    """The tokens that the loss is averaged over."""
    rewards: RewardConfig | None
    play: Player | None
    sampling: Sampling
    n: int
    """Number of answers to each row."""


def evaluate(options: InferenceOptions, eval_options: EvalOptions, out: Path | None = None) -> dict[str, float]:
    """Evaluates a model, prints the numbers, and writes `out`.

    Args:
        options: the model, or a run.
        eval_options: the rows and tasks.
        out: .json (numbers and rows) or .jsonl (rows); None to print only.

    Returns:
        The numbers by name.

    Raises:
        UserError: the model, the rows or the rewards are not accessible, or do not fit together.
    """
    if out is not None:
        refuse_out(out)
        if out.suffix not in (".json", ".jsonl"):
            raise UserError(f"--out {out}: end its name in .json for numbers and rows, or in .jsonl for the rows alone")
    setting = prepare(options, eval_options)
    with nullcontext() if setting.play is None else closing(setting.play):
        results: dict[Task, EvalResult] = {task: _measured(setting, task, eval_options) for task in setting.tasks}
    metrics = {name: value for one in results.values() for name, value in one.metrics.items()}
    if out is not None:
        _write(out, setting, results, metrics)
    print(_shown(setting, results))
    return {name: one.value for name, one in metrics.items()}


def prepare(options: InferenceOptions, eval_options: EvalOptions) -> Setting:
    """Combines the options with the recipe of a run, over which they take precedence.

    Raises:
        UserError: the model or the rows are not accessible, or do not fit together.
    """
    recipe = _recipe(options.model)
    rows = _rows(options.model, recipe, eval_options)
    rewards = eval_options.rewards or (recipe.reward if recipe else None)
    environment = recipe.rollout.environment if recipe else None
    read = algorithm_class(recipe.algorithm.name)(recipe.algorithm).train_on if recipe else None
    tasks: tuple[Task, ...] = ("loss", "reward") if rewards or environment else ("loss",)
    if eval_options.task:
        tasks = (eval_options.task,)
    elif eval_options.rewards is not None or read == RowKind.PROMPT:
        tasks = ("reward",)
    elif read == RowKind.PAIRS or (read is None and {"chosen", "chosen_ids"} & {*rows[0]}):
        tasks = ("pairs",)
    n = eval_options.n or (max(eval_options.ks, default=SAMPLES) if "pass" in tasks else 1)
    inference, config, sampling = _reading(options, recipe, eval_options, tasks, rows.name)
    if tasks != ("pairs",):
        require_lm_head(inference.source, options.model)
    play = Player(environment, inference.tokenizer, config.template_kwargs) if environment else None
    if play is not None:
        sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *play.stop_strings))
    _check(eval_options, tasks, n, sampling, bool(rewards or (play and play.scores)))
    limit = eval_options.rows or (recipe.eval.rows if recipe and eval_options.data is None else None)
    train_on = RowKind.ALL if read == RowKind.ALL else RowKind.COMPLETION
    if {*tasks} & {*SAMPLING_TASKS}:
        sampling = inference.with_stop_ids(sampling)
    return Setting(inference, Table(rows, config, limit), tasks, train_on, rewards, play, sampling, n)


def has_held_out_rows(model: str) -> bool:
    """Whether a model is a run with held-out completions."""
    recipe = _recipe(model)
    return recipe is not None and recipe.algorithm.reads.is_text and bool(recipe.data.eval or recipe.data.eval_split)


def _recipe(model: str) -> Recipe | None:
    """The recipe of a run, or of its last stage; None where the model is no run."""
    folder = Path(model).expanduser()
    if not (folder / "recipe.yaml").is_file():
        return None
    recipe = Recipe.load(folder / "recipe.yaml", [f"output={json.dumps(str(folder))}"])
    return recipe.stages[-1] if recipe.stages else recipe


def _rows(model: str, recipe: Recipe | None, eval_options: EvalOptions) -> Rows:
    """Opens the given rows, or the run's held-out ones."""
    if eval_options.data is not None:
        return open_held_out(eval_options.data, eval_options.split)
    if recipe is None:
        raise UserError(
            f"{model} is no run, which would bring its own rows: name some, `tunix eval {model} rows.jsonl`"
        )
    rows = held_out_rows(recipe.data.model_copy(update={"eval_split": eval_options.split or recipe.data.eval_split}))
    if rows is None:
        raise UserError(f"{model} has no held-out rows (data.eval): name some, `tunix eval {model} FILE`")
    return rows


def _reading(
    options: InferenceOptions, recipe: Recipe | None, eval_options: EvalOptions, tasks: tuple[Task, ...], name: str
) -> tuple[InferenceModel, DataConfig, Sampling]:
    """The model, how rows are rendered, and how answers are sampled, without the model's stop ids."""
    if recipe is None:
        inference = InferenceModel(options)
        tokens, temperature, stop = eval_options.max_tokens or min(LONGEST, inference.limit // 2), 1.0, ()
        if tokens >= inference.limit:
            raise UserError(f"--max-tokens {tokens} leaves no room for a prompt: the model ends at {inference.limit}")
        config = inference.data(inference.limit, name).model_copy(update={"completion_length": tokens})
    else:
        config, temperature, stop = recipe.data, recipe.rollout.temperature, recipe.rollout.stop
        tokens = eval_options.max_tokens or config.longest_completion
        inference = InferenceModel(
            replace(options, length=config.max_length + max(tokens - config.longest_completion, 0))
        )
        if eval_options.data is not None or options.raw or options.system is not None:  # its own rows tell it
            config = config.model_copy(update={"chat": inference.plain_reason is None, "system": inference.system})
    config = config.model_copy(update={"columns": {**config.columns, **eval_options.columns}})
    if "pass" not in tasks:
        temperature = 0.0
    if eval_options.temperature is not None:
        temperature = eval_options.temperature
    return inference, config, Sampling(tokens, temperature, stop_strings=(*stop, *eval_options.stop))


def _check(eval_options: EvalOptions, tasks: tuple[Task, ...], n: int, sampling: Sampling, scored: bool) -> None:
    """Refuses options without effect, and answers that cannot be scored.

    Raises:
        UserError: names the option and the remedy.
    """
    task = " and ".join(tasks)
    fitting: dict[str, tuple[Any, tuple[Task, ...]]] = {
        "--reward": (eval_options.rewards, SAMPLING_TASKS),
        "--n": (eval_options.n, SAMPLING_TASKS),
        "--threshold": (eval_options.threshold, ("accuracy", "pass")),
        "--k": (eval_options.ks or None, ("pass",)),
    }
    for option, (value, tasks_of_it) in fitting.items():
        if value is not None and not {*tasks} & {*tasks_of_it}:
            raise UserError(f"{option} changes nothing for {task}: it goes with --task {' or '.join(tasks_of_it)}")
    if {*tasks} & {*SAMPLING_TASKS} and not scored:
        raise UserError(f"--task {task}: nothing scores the answers; add --reward, for instance exact_match")
    if n > 1 and sampling.temperature == 0:
        raise UserError(f"--n {n}: greedy answers to one row are all alike; set --temperature")
    if eval_options.ks and max(eval_options.ks) > n:
        raise UserError(f"--k {max(eval_options.ks)} is more than the {n} answers of --n")


def _measured(setting: Setting, task: Task, eval_options: EvalOptions) -> EvalResult:
    """Measures one task."""
    if task == "loss":
        return loss(setting.inference, setting.table, setting.train_on)
    if task == "pairs":
        return pairs(setting.inference, setting.table)
    config = setting.table.config
    columns = [*setting.table.rows[0], *config.columns]
    with open_collector(
        setting.inference, setting.sampling, setting.rewards, columns, config, setting.play
    ) as collector:
        scored = answers(setting.inference, setting.table, collector, setting.n, eval_options.seed)
    threshold = 1.0 if eval_options.threshold is None else eval_options.threshold
    if task == "reward":
        return scored.reward()
    if task == "accuracy":
        return scored.accuracy(threshold)
    return scored.passes(threshold, eval_options.ks or tuple(sorted({1, setting.n})))


def _shown(setting: Setting, results: Mapping[Task, EvalResult]) -> str:
    """The printed table: one line for each number, with its standard error over the rows."""
    rows = setting.table.rows
    split = "" if rows.split is None else f", split {rows.split}"
    lines = [f"{setting.inference.options.model} on {rows.name}{split}{_strings(setting)}"]
    width = max(len(name) for result in results.values() for name in result.metrics)
    for task, result in results.items():
        for name, number in result.metrics.items():
            error = "" if number.error is None else f" ± {number.error:.4f}"
            lines.append(f"  {name:<{width}}  {number.value:10.4f}{error:<10}  {number.count} rows")
        mode = f"temperature {setting.sampling.temperature:g}" if setting.sampling.temperature else "greedy"
        notes = [f"{mode}, {result.notes[0]}" if task in SAMPLING_TASKS else result.notes[0], *result.notes[1:]]
        lines += [f"  ({note})" for note in notes]
    return "\n".join(lines)


def _strings(setting: Setting) -> str:
    """How prompts and completions that are strings were read, where the model has a chat template to read them by."""
    config, row = setting.table.config, setting.table.rows[0]
    columns = [config.columns.get(name, name) for name in ("prompt", "completion", "chosen")]
    if not setting.inference.has_template or not any(isinstance(row.get(column), str) for column in columns):
        return ""
    if config.chat:
        return "; strings are messages of the chat template (--raw: as they stand)"
    return "; strings stand as they are, not in the chat template"


def _write(out: Path, setting: Setting, results: Mapping[Task, EvalResult], metrics: Mapping[str, Estimate]) -> None:
    """Writes numbers and rows as JSON, or the rows alone as JSON lines."""
    rows = [{"task": task, **row} for task, one in results.items() for row in one.rows]
    if out.suffix == ".jsonl":
        write_text_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
        return
    numbers = {name: {key: _finite(x) for key, x in asdict(number).items()} for name, number in metrics.items()}
    report = {
        "model": setting.inference.options.model,
        "data": setting.table.rows.name,
        "split": setting.table.rows.split,
        "metrics": numbers,
        "rows": rows,
    }
    write_text_atomic(out, json.dumps(report, indent=1) + "\n")


def _finite(value: float | int | None) -> float | int | None:
    """The value, or None for an infinity or nan, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
