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
from collections.abc import Mapping
from collections.abc import Sequence as List
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, Num

from tunix.algorithms.episodes import rewards_of, total_rewards
from tunix.commands.sampling import Bar, ProgressSampler, open_collector, reward_config, score_fields
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import as_scored
from tunix.data.pipeline import prompt_of
from tunix.data.sources import Rows, held_out_rows, open_held_out
from tunix.data.types import Accounting, Kept
from tunix.errors import UserError
from tunix.hf.source import require_lm_head
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.inference.scoring import token_scores
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.recipe import recipe_of_run
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.config import RewardConfig
from tunix.trainer.metrics import perplexity
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


def ratio_of(sums_P: Num[np.ndarray, "P"], counts_P: Num[np.ndarray, "P"]) -> Estimate:
    """The mean over the tokens of rows, `r = sum s / sum c`, with its standard error.

    The tokens of a row are not independent, so the error is over rows (the linearised error of a ratio, Cochran
    1977, Sampling Techniques, 6.3): `sqrt(P / (P - 1) sum (s - r c)^2) / sum c`.
    """
    number, total = len(sums_P), float(counts_P.sum())
    ratio = float(sums_P.sum()) / total
    spread = float(((sums_P - ratio * counts_P) ** 2).sum())
    error = math.sqrt(number / (number - 1) * spread) / total if number > 1 else None
    return Estimate(ratio, error, number)


def mean_of(values_P: Num[np.ndarray, "P"]) -> Estimate:
    """The mean `m = sum x / P` with its standard error `sqrt(sum (x - m)^2 / (P - 1) / P)`."""
    return ratio_of(values_P, np.ones(len(values_P)))


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


Task = Literal["loss", "reward", "accuracy", "pass", "pairs"]
SAMPLING_TASKS: tuple[Task, ...] = ("reward", "accuracy", "pass")
"""Tasks for which the model samples answers."""
LONGEST = 256
"""Default maximum tokens of an answer, if the model has room for them."""
SAMPLES = 8
"""Default number of answers to each row for pass@k."""


@dataclass(frozen=True)
class EvalOptions:
    """The options of `tunix eval` by their names, which its help explains; None for those that are not given."""

    data: str | None = None
    split: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column in tunix -> column of the rows, e.g. `{"prompt": "question"}`."""
    rows: int | None = None
    task: Task | None = None
    """Task to measure; None for the one that fits the run, the rewards or the rows."""
    reward: List[str] = ()
    """What scores answers (`sampling.reward_config`)."""
    reward_model: str | None = None
    deadline: float = 10.0
    threshold: float | None = None
    n: int | None = None
    k: List[int] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    """Sampling temperature. None: greedy; for pass@k the run's, or 1."""
    stop: List[str] = ()
    """Stop strings in addition to the run's."""
    seed: int = 0


@dataclass(frozen=True)
class EvalResult:
    """The numbers of one task, and an object for each row."""

    metrics: Mapping[str, Estimate]
    rows: list[dict[str, Any]]
    """Results by row, e.g. `{"row": 0, "loss": 1.2, "tokens": 7}`."""
    notes: list[str]
    """Remarks that are printed below the numbers."""


@dataclass(frozen=True)
class Setting:
    """Everything that an evaluation needs: model, rows, tasks, rewards and sampling."""

    inference: InferenceModel
    options: EvalOptions
    """With what the run or the tasks say where an option is not given: `rows` and `n`."""
    rewards: RewardConfig | None
    rows: Rows
    config: DataConfig
    """How the rows are rendered."""
    tasks: tuple[Task, ...]
    train_on: RowKind
    """The tokens that the loss is averaged over."""
    play: Player | None
    sampling: Sampling

    def examples(self, kind: RowKind) -> tuple[list[int], list[Kept], str]:
        """The numbers of the rows that are kept, from 0; these rows, rendered; and what became of the others, e.g.
        `; 2 x longer than max_length`. Raises UserError where every row is dropped."""
        source = self.inference.source
        examples = Examples(self.rows, source.tokenizer, self.config, kind, source.decoder.vocab_size)
        made = list(examples.first(self.options.rows))
        account = sum(map(Accounting.of, made), Accounting())
        lost = {**account.dropped, "cut off at max_length": account.truncated, **account.notes}
        note = "".join(f"; {count} x {reason}" for reason, count in lost.items() if count)
        kept = {i: x for i, x in enumerate(made) if isinstance(x, Kept) and x.sequences[0].weight > 0}
        if not kept:
            raise UserError(f"{self.rows.name}: none of {len(made)} rows can be evaluated{note}")
        return list(kept), list(kept.values()), note


def evaluate(model: InferenceOptions, options: EvalOptions, out: Path | None = None) -> None:
    """Evaluates a model or a run, prints the numbers, and writes `out`: .json (numbers and rows) or .jsonl (rows).

    Raises:
        UserError: the model, the rows or the rewards are not accessible, or do not fit together.
    """
    if out is not None:
        refuse_out(out)
        if out.suffix not in (".json", ".jsonl"):
            raise UserError(f"--out {out}: end its name in .json for numbers and rows, or in .jsonl for the rows alone")
    setting = prepare(model, options)
    results: dict[Task, EvalResult] = {}
    with nullcontext() if setting.play is None else closing(setting.play):
        for task in setting.tasks:
            if task == "loss":
                results[task] = loss(setting)
            elif task == "pairs":
                results[task] = pairs(setting)
            else:
                results[task] = answers(setting, task)
    if out is not None:
        rows = [{"task": task, **row} for task, result in results.items() for row in result.rows]
        numbers = {
            name: {key: x if x is None or math.isfinite(x) else None for key, x in asdict(number).items()}
            for result in results.values()
            for name, number in result.metrics.items()  # JSON has neither infinity nor nan
        }
        about = {"model": model.model, "data": setting.rows.name, "split": setting.rows.split}
        by_row = "".join(json.dumps(row) + "\n" for row in rows)
        report = json.dumps({**about, "metrics": numbers, "rows": rows}, indent=1) + "\n"
        write_text_atomic(out, by_row if out.suffix == ".jsonl" else report)
    print(_table(setting, results))


def prepare(model: InferenceOptions, options: EvalOptions) -> Setting:
    """Combines the options with the recipe of a run, over which they take precedence.

    Raises:
        UserError: the model or the rows are not accessible, or do not fit together; an option has no effect, or answers
            cannot be scored.
    """
    name, recipe = model.model, recipe_of_run(model.model)
    asked = reward_config(options.reward, options.reward_model, options.deadline)
    if recipe is not None and options.data is None and any(x.reward or x.environment for x in recipe.data.sources):
        raise UserError(
            f"{name} has rewards or environments for each of its data sets: name one, `tunix eval {name} FILE`"
        )
    if options.data is not None:
        rows = open_held_out(options.data, options.split, recipe.data.columns.values() if recipe else ())
    elif recipe is None:
        raise UserError(f"{name} is no run, which would bring its own rows: name some, `tunix eval {name} rows.jsonl`")
    else:
        split = options.split or recipe.data.eval_split
        rows = held_out_rows(recipe.data.model_copy(update={"eval_split": split}))
        if rows is None:
            raise UserError(f"{name} has no held-out rows (data.eval): name some, `tunix eval {name} FILE`")
    rewards = asked or (recipe.reward if recipe else None)
    environment = recipe.rollout.environment if recipe else None
    read = algorithm_class(recipe.algorithm.name)(recipe.algorithm).train_on if recipe else None
    tasks: tuple[Task, ...] = ("loss", "reward") if rewards or environment else ("loss",)
    if options.task:
        tasks = (options.task,)
    elif asked is not None or read == RowKind.PROMPT:
        tasks = ("reward",)
    elif read == RowKind.PAIRS or (read is None and {"chosen", "chosen_ids"} & {*rows[0]}):
        tasks = ("pairs",)
    n = options.n or (max(options.k, default=SAMPLES) if "pass" in tasks else 1)
    # The model, how rows are rendered, and how answers are sampled.
    if recipe is None:
        inference = InferenceModel(model)
        tokens, temperature, stop = options.max_tokens or min(LONGEST, inference.limit // 2), 1.0, ()
        if tokens >= inference.limit:
            raise UserError(f"--max-tokens {tokens} leaves no room for a prompt: the model ends at {inference.limit}")
        config = inference.data(inference.limit, rows.name).model_copy(update={"completion_length": tokens})
    else:
        config, temperature, stop = recipe.data, recipe.rollout.temperature, recipe.rollout.stop
        tokens = options.max_tokens or config.longest_completion
        length = config.max_length + max(tokens - config.longest_completion, 0)
        inference = InferenceModel(replace(model, length=length))
        if options.data is not None or model.raw or model.system is not None:  # its own rows tell it
            config = config.model_copy(update={"chat": inference.plain_reason is None, "system": inference.system})
    config = config.model_copy(update={"columns": {**config.columns, **options.columns}})
    if "pass" not in tasks:
        temperature = 0.0
    if options.temperature is not None:
        temperature = options.temperature
    if tasks != ("pairs",):
        require_lm_head(inference.source, name)
    play = Player(environment, inference.tokenizer, config.template_kwargs) if environment else None
    # Options without effect, and answers that cannot be scored, are refused.
    samples, said = bool({*tasks} & {*SAMPLING_TASKS}), " and ".join(tasks)
    fitting: dict[str, tuple[Any, tuple[Task, ...]]] = {
        "--reward": (asked, SAMPLING_TASKS),
        "--n": (options.n, SAMPLING_TASKS),
        "--threshold": (options.threshold, ("accuracy", "pass")),
        "--k": (options.k or None, ("pass",)),
    }
    for option, (value, tasks_of_it) in fitting.items():
        if value is not None and not {*tasks} & {*tasks_of_it}:
            raise UserError(f"{option} changes nothing for {said}: it goes with --task {' or '.join(tasks_of_it)}")
    if samples and not (rewards or (play and play.scores)):
        raise UserError(f"--task {said}: nothing scores the answers; add --reward, for instance exact_match")
    if n > 1 and temperature == 0:
        raise UserError(f"--n {n}: greedy answers to one row are all alike; set --temperature")
    if options.k and max(options.k) > n:
        raise UserError(f"--k {max(options.k)} is more than the {n} answers of --n")
    sampling = Sampling(tokens, temperature, stop_strings=(*stop, *options.stop, *(play.stop_strings if play else ())))
    limit = options.rows or (recipe.eval.rows if recipe and options.data is None else None)
    return Setting(
        inference,
        replace(options, rows=limit, n=n),
        rewards,
        rows,
        config,
        tasks,
        RowKind.ALL if read == RowKind.ALL else RowKind.COMPLETION,
        play,
        inference.with_stop_ids(sampling) if samples else sampling,
    )


def loss(setting: Setting) -> EvalResult:
    """The mean of `-log p` over the trained tokens, weighted by row, and the perplexity."""
    places, kept, note = setting.examples(setting.train_on)
    sequences = [example.sequences[0] for example in kept]
    logprobs = _token_scores(setting.inference, sequences, "logprobs")
    losses = [-x[s.loss_mask].astype(np.float64) for s, x in zip(sequences, logprobs, strict=True)]
    weights = np.array([sequence.weight for sequence in sequences])
    mean = ratio_of(weights * [x.sum() for x in losses], weights * [x.size for x in losses])
    value = perplexity(mean.value)
    error = None if mean.error is None else value * mean.error
    rows = [{"row": i, "loss": float(x.mean()), "tokens": x.size} for i, x in zip(places, losses, strict=True)]
    metrics = {"loss": mean, "perplexity": Estimate(value, error, mean.count)}
    return EvalResult(metrics, rows, [f"{sum(x.size for x in losses)} trained tokens{note}"])


def pairs(setting: Setting) -> EvalResult:
    """Accuracy and margin of the chosen side over the rejected one, by a reward model's score or else by log-prob.

    Both sides of a pair follow the same prompt, so that `log p(chosen) - log p(rejected)` is that of the completions.
    """
    places, kept, note = setting.examples(RowKind.PAIRS)
    sides = [side for example in kept for side in example.sequences]
    by_score = setting.inference.source.has_scalar_head
    if by_score:
        scored = _token_scores(setting.inference, [as_scored(side) for side in sides], "values")
        scores = {"": np.array([float(x[-1]) for x in scored])}
    else:
        scored = _token_scores(setting.inference, sides, "logprobs")
        sums = np.array([x[s.loss_mask].sum(dtype=np.float64) for s, x in zip(sides, scored, strict=True)])
        scores = {"": sums, "_per_token": sums / [int(side.loss_mask.sum()) for side in sides]}
    metrics = {}
    for suffix, values in scores.items():
        margins = values[::2] - values[1::2]
        metrics[f"pairs/accuracy{suffix}"] = mean_of(np.heaviside(margins, 0.5))
        metrics[f"pairs/margin{suffix}"] = mean_of(margins)
    rows = [
        {"row": place, "chosen": chosen, "rejected": rejected}
        for place, chosen, rejected in zip(places, scores[""][::2].tolist(), scores[""][1::2].tolist(), strict=True)
    ]
    return EvalResult(metrics, rows, [f"by {'score' if by_score else 'log-prob'}{note}"])


def _token_scores(
    inference: InferenceModel, sequences: List[Sequence], what: Literal["logprobs", "values"]
) -> list[np.ndarray]:
    """The `[T]` log-probs (or values) of each sequence's tokens."""
    with closing(Bar("eval", len(sequences))) as bar:
        return token_scores(*inference.weights(), sequences, what, progress=bar.show)


def answers(setting: Setting, task: Task) -> EvalResult:
    """Samples and scores the model's answers to each row, and measures one of `SAMPLING_TASKS`.

    Raises:
        UserError: not one answer has a score, or no row has enough for a k.
    """
    inference, options = setting.inference, setting.options
    assert options.n is not None, "`prepare` says it"
    places, kept, note = setting.examples(RowKind.PROMPT if setting.play is None else RowKind.ROW)
    prompts = [prompt_of(example) for example in kept]
    columns = [*setting.rows[0], *setting.config.columns]
    with open_collector(
        inference, setting.sampling, setting.rewards, columns, setting.config, setting.play
    ) as collector:
        engine = inference.engine
        with closing(Bar("eval", options.n * len(prompts))) as bar:
            groups = collector.collect(ProgressSampler(engine, bar), prompts, options.n, options.seed)
        totals_PG = total_rewards(groups, collector.weights)
    scored = [answer for group in groups for answer in group]
    failed = [reason for answer in scored if (reason := answer.unscored)]
    if len(failed) == len(scored):
        raise UserError(f"none of {len(failed)} answers could be scored, the first because {failed[0]}")
    notes = [f"{len(scored)} answers, {sum(answer.truncated for answer in scored)} cut off{note}"]
    notes += [f"{len(failed)} have no score and count nowhere; the first: {failed[0]}"] if failed else []
    threshold = 1.0 if options.threshold is None else options.threshold
    metrics: dict[str, Estimate] = {}
    if task == "reward":
        metrics["reward"] = mean_of(means_of(totals_PG))
        named = rewards_of(groups)
        for name, values_PG in named.items():
            if len(named) > 1 and not np.isnan(values_PG).all():
                metrics[f"reward/{name}"] = mean_of(means_of(values_PG))
    elif task == "accuracy":
        metrics["accuracy"] = mean_of(means_of(np.where(np.isnan(totals_PG), np.nan, totals_PG >= threshold)))
    else:
        scored_P = (~np.isnan(totals_PG)).sum(axis=1)
        right_P = (totals_PG >= threshold).sum(axis=1)
        for k in options.k or sorted({1, options.n}):
            enough = scored_P >= k
            if not enough.any():
                raise UserError(f"--k {k}: no row has so many answers with a score; {'; '.join(notes)}")
            metrics[f"pass@{k}"] = mean_of(pass_at_k(scored_P[enough], right_P[enough], k))
            if not enough.all():
                notes.append(f"pass@{k} leaves {int((~enough).sum())} rows out, which have fewer scores")
    rows = [{"row": place, "answers": []} for place in places]
    for row, group, totals in zip(rows, groups, totals_PG.tolist(), strict=True):
        for answer, total in zip(group, totals, strict=True):
            text = {"text": answer.text} if answer.text else {}
            row["answers"].append({"tokens": answer.completion.tokens.tolist(), **text, **score_fields(answer, total)})
    return EvalResult(metrics, rows, notes)


def _table(setting: Setting, results: Mapping[Task, EvalResult]) -> str:
    """The printed table: one line for each number, with its standard error over the rows."""
    rows, config, inference = setting.rows, setting.config, setting.inference
    split = "" if rows.split is None else f", split {rows.split}"
    # How prompts and completions that are strings were read, where the model has a chat template to read them by.
    columns = [config.columns.get(name, name) for name in ("prompt", "completion", "chosen")]
    strings = ""
    if inference.has_template and any(isinstance(rows[0].get(column), str) for column in columns):
        strings = "; strings stand as they are, not in the chat template"
        if config.chat:
            strings = "; strings are messages of the chat template (--raw: as they stand)"
    lines = [f"{inference.options.model} on {rows.name}{split}{strings}"]
    width = max(len(name) for result in results.values() for name in result.metrics)
    for task, result in results.items():
        for name, number in result.metrics.items():
            error = "" if number.error is None else f" ± {number.error:.4f}"
            lines.append(f"  {name:<{width}}  {number.value:10.4f}{error:<10}  {number.count} rows")
        mode = f"temperature {setting.sampling.temperature:g}" if setting.sampling.temperature else "greedy"
        notes = [f"{mode}, {result.notes[0]}" if task in SAMPLING_TASKS else result.notes[0], *result.notes[1:]]
        lines += [f"  ({note})" for note in notes]
    return "\n".join(lines)
