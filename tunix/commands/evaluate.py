"""`tunix eval`: measures a model on held-out rows: loss, reward, accuracy, pass@k, pairs.

A run defines its rows, rewards, environment and rendering, so that `tunix eval RUN` repeats its evaluation; options of
the command line take precedence, and an environment of another package brings its episodes as rows. Rows that are
strings are plain or chats as for `tunix generate`, by one rule for a run, its export and any other model
(`InferenceModel.plain_reason`), and what they are is printed. The options (`EvalOptions`) and the recipe of a run
become a `Setting`; each task is measured; a table is printed, with the standard error of each number over the rows, and
`--out` receives the rows.

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

from tunix.algorithms.episodes import rewards_of, total_rewards
from tunix.commands.sampling import (
    Bar,
    ProgressSampler,
    environment_config,
    open_collector,
    reward_config,
    score_fields,
)
from tunix.config import RowKind
from tunix.data.config import EPISODES, DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import as_scored
from tunix.data.pipeline import prompt_of
from tunix.data.sources import Rows, open_held_out
from tunix.data.types import Accounting, Kept
from tunix.errors import UserError
from tunix.hf.source import require_lm_head
from tunix.inference.load import token_scores
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.recipe.recipe import recipe_of_run
from tunix.rollout.environments.adapters import LM_EVAL, evaluation_rows, require_package
from tunix.rollout.rewards.config import RewardConfig
from tunix.run.collector import Play, player_of
from tunix.run.estimates import Estimate, mean_of, means_of, passes, ratio_of
from tunix.trainer.metrics import perplexity
from tunix.types import Sampling, Sequence
from tunix.util.atomic_io import refuse_out, write_text_atomic

Task = Literal["loss", "reward", "accuracy", "pass", "pairs"]
SAMPLING_TASKS: tuple[Task, ...] = ("reward", "accuracy", "pass")
"""Tasks for which the model samples answers."""
LONGEST = 256
"""Default maximum tokens of an answer, if the model has room for them."""
SAMPLES = 8
"""Default number of answers to each row for pass@k."""
EPISODES_MEASURED = 64
"""Default number of rows where an environment makes its own."""


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
    environment: str | None = None
    """What answers the model: a name, or an entry of a recipe; None for that of a run."""
    options: str | None = None
    """Arguments of its constructor, a mapping in YAML."""
    threshold: float | None = None
    n: int | None = None
    k: List[int] = ()
    pass_at: List[int] = ()
    """Values of k for pass@k, measured in addition; `k` are those of pass@k alone."""
    max_tokens: int | None = None
    temperature: float | None = None
    """Sampling temperature. None: greedy; for pass@k the run's, or 1."""
    stop: List[str] = ()
    """Stop strings in addition to the run's."""
    seed: int = 0
    harness: str | None = None
    """What measures `tasks` in place of all this: `lm-eval`."""
    tasks: List[str] = ()
    """Tasks of the harness: files, or its own names."""


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
    """With what the run or the tasks say where an option is not given: `rows` and `k`."""
    rewards: RewardConfig | None
    rows: Rows
    config: DataConfig
    """How the rows are rendered."""
    tasks: tuple[Task, ...]
    train_on: RowKind
    """The tokens that the loss is averaged over."""
    play: Play | None
    sampling: Sampling
    samplings: Mapping[Task, tuple[float, int]]
    """Temperature of the answers and their number for each row, by task, e.g. `{"pass": (1.0, 8)}`."""

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
    results: dict[str, EvalResult] = {}
    if options.harness is not None or options.tasks:
        head, results["harness"] = harness(model, options)
        about = {"model": model.model, "tasks": list(options.tasks)}
    else:
        setting = prepare(model, options)
        rows, config = setting.rows, setting.config
        about = {"model": model.model, "data": rows.name, "split": rows.split}
        head = f"{model.model} on {rows.name}" + ("" if rows.split is None else f", split {rows.split}")
        # How prompts and completions that are strings were read, where there is a chat template to read them by.
        columns = [config.columns.get(name, name) for name in ("prompt", "completion", "chosen")]
        texts = any(isinstance(rows[0].get(column), str) for column in columns)
        if setting.play is None and setting.inference.has_template and texts:
            plain = "; strings stand as they are, not in the chat template"
            head += "; strings are messages of the chat template (--raw: as they stand)" if config.chat else plain
        with nullcontext() if setting.play is None else closing(setting.play):
            for task in setting.tasks:
                if task == "loss":
                    results[task] = loss(setting)
                elif task == "pairs":
                    results[task] = pairs(setting)
                else:
                    results[task] = answers(setting, task)
        head += setting.inference.engine.drafts if setting.samplings else ""
    if out is not None:
        listed = [{"task": task, **row} for task, result in results.items() for row in result.rows]
        numbers = {
            name: {key: x if x is None or math.isfinite(x) else None for key, x in asdict(number).items()}
            for result in results.values()
            for name, number in result.metrics.items()  # JSON has neither infinity nor nan
        }
        by_row = "".join(json.dumps(row) + "\n" for row in listed)
        report = json.dumps({**about, "metrics": numbers, "rows": listed}, indent=1) + "\n"
        write_text_atomic(out, by_row if out.suffix == ".jsonl" else report)
    lines, width = [head], max(len(name) for result in results.values() for name in result.metrics)
    for result in results.values():
        for name, number in result.metrics.items():
            error = "" if number.error is None else f" ± {number.error:.4f}"
            lines.append(f"  {name:<{width}}  {number.value:10.4f}{error:<10}  {number.count} rows")
        lines += [f"  ({note})" for note in result.notes]
    print("\n".join(lines))


def harness(model: InferenceOptions, options: EvalOptions) -> tuple[str, EvalResult]:
    """What a harness says of its tasks, after a line about model and prompts.

    Raises:
        UserError: the harness is not installed in a version that was tried, a task cannot be read, or an option has no
            effect.
    """
    if options.harness != "lm-eval" or not options.tasks:
        raise UserError("--harness lm-eval and --tasks FILE ... go together: the harness, and what it measures")
    default = EvalOptions()
    for name in vars(options).keys() - {"harness", "tasks", "rows", "seed"}:
        if getattr(options, name) != getattr(default, name):
            option = "DATA" if name == "data" else f"--{name.replace('_', '-')}"
            raise UserError(f"{option} changes nothing with --harness, whose tasks say what is measured: leave it out")
    require_package("--harness lm-eval", "lm-eval", LM_EVAL, "lm-eval")
    from tunix.run.lm_eval import loaded, measure

    inference = InferenceModel(model)
    require_lm_head(inference.source, model.model)
    chat = inference.plain_reason is None
    metrics, rows = measure(loaded(inference, chat=chat), options.tasks, options.rows, chat=chat)
    prompts = "are messages of the chat template (--raw: as they stand)"
    if not chat:
        prompts = f"stand as they are: {inference.plain_reason}"
    return f"{model.model} by lm-eval; prompts {prompts}", EvalResult(metrics, rows, [])


def prepare(model: InferenceOptions, options: EvalOptions) -> Setting:
    """Combines the options with the recipe of a run, over which they take precedence.

    Raises:
        UserError: the model or the rows are not accessible, or do not fit together; an option has no effect, or answers
            cannot be scored.
    """
    name, recipe = model.model, recipe_of_run(model.model)
    asked = reward_config(options.reward, options.reward_model, options.deadline)
    environment, rewards = (recipe.rollout.environment, asked or recipe.reward) if recipe else (None, asked)
    if options.environment is not None:  # the run's rewards are made for its own
        environment, rewards = environment_config(options.environment, options.options), asked
    elif options.options is not None:
        raise UserError(f"--options {options.options}: changes nothing without --environment, whose they are")
    makes_rows = options.data is None and options.environment is not None and environment and environment.package
    sources = recipe.data.sources if recipe is not None and options.data is None and not makes_rows else ()
    if any(source.reward or source.environment for source in sources):
        raise UserError(
            f"{name} has rewards or environments for each of its data sets: name one, `tunix eval {name} FILE`"
        )
    if options.data is not None:
        rows = open_held_out(options.data, options.split, recipe.data.columns.values() if recipe else ())
    elif makes_rows:
        data = DataConfig(train=EPISODES, eval=EPISODES)
        rows = evaluation_rows(data, environment, recipe.seed if recipe else options.seed)
    elif recipe is None:
        raise UserError(f"{name} is no run, which would bring its own rows: name some, `tunix eval {name} rows.jsonl`")
    else:
        split = options.split or recipe.data.eval_split
        data = recipe.data.model_copy(update={"eval_split": split})
        rows = evaluation_rows(data, recipe.rollout.environment, recipe.seed)
    if rows is None:
        raise UserError(f"{name} has no held-out rows (data.eval): name some, `tunix eval {name} FILE`")
    read = recipe.algorithm.reads if recipe else None
    tasks: tuple[Task, ...] = ("loss", "reward") if rewards or environment else ("loss",)
    if options.task:
        tasks = (options.task,)
    elif asked is not None or options.environment is not None or read == RowKind.PROMPT:
        tasks = ("reward",)
    elif read == RowKind.PAIRS or (read is None and {"chosen", "chosen_ids"} & {*rows[0]}):
        tasks = ("pairs",)
    if options.pass_at:
        if options.k:
            raise UserError(f"--k {options.k[0]} and --pass-at {options.pass_at[0]}: leave one of them out")
        tasks, options = tuple(dict.fromkeys((*tasks, "pass"))), replace(options, k=options.pass_at)
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
    # Greedy but for pass@k, unless a temperature is given; where that is measured, the others are of one answer each.
    default = {"pass": (temperature, n)}
    samplings: dict[Task, tuple[float, int]] = {
        task: default.get(task, (0.0, 1 if "pass" in tasks else n)) for task in tasks if task in SAMPLING_TASKS
    }
    if options.temperature is not None:
        samplings = {task: (options.temperature, number) for task, (_, number) in samplings.items()}
    if tasks != ("pairs",):
        require_lm_head(inference.source, name)
    play = player_of(environment, inference.source, config, temperature)
    # Options without effect, and answers that cannot be scored, are refused.
    samples, said = bool({*tasks} & {*SAMPLING_TASKS}), " and ".join(tasks)
    fitting: dict[str, tuple[Any, tuple[Task, ...]]] = {
        "--reward": (asked, SAMPLING_TASKS),
        "--environment": (options.environment, SAMPLING_TASKS),
        "--n": (options.n, SAMPLING_TASKS),
        "--threshold": (options.threshold, ("accuracy", "pass")),
        "--k": (options.k or None, ("pass",)),
    }
    for option, (value, tasks_of_it) in fitting.items():
        if value is not None and not {*tasks} & {*tasks_of_it}:
            raise UserError(f"{option} changes nothing for {said}: it goes with --task {' or '.join(tasks_of_it)}")
    if samples and not (rewards or (play and play.scores)):
        raise UserError(f"--task {said}: nothing scores the answers; add --reward, for instance exact_match")
    if n > 1 and (0.0, n) in samplings.values():
        raise UserError(
            f"--n {n}: greedy answers to one row are all alike; set --temperature (--rows is the number of rows)"
        )
    if options.k and max(options.k) > n:
        raise UserError(f"--k {max(options.k)} is more than the {n} answers of --n")
    sampling = Sampling(tokens, stop_strings=(*stop, *options.stop, *(play.stop_strings if play else ())))
    limit = EPISODES_MEASURED if makes_rows else recipe.eval.rows if recipe and options.data is None else None
    return Setting(
        inference,
        replace(options, rows=options.rows or limit),
        rewards,
        rows,
        config,
        tasks,
        RowKind.ALL if read == RowKind.ALL else RowKind.COMPLETION,
        play,
        inference.with_stop_ids(sampling) if samples else sampling,
        samplings,
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
    temperature, n = setting.samplings[task]
    places, kept, note = setting.examples(RowKind.PROMPT if setting.play is None else RowKind.ROW)
    prompts = [prompt_of(example) for example in kept]
    columns = [*setting.rows[0], *setting.config.columns]
    sampling = replace(setting.sampling, temperature=temperature)
    with open_collector(inference, sampling, setting.rewards, columns, setting.config, setting.play) as collector:
        engine = inference.engine
        with closing(Bar("eval", n * len(prompts))) as bar:
            groups = collector.collect(ProgressSampler(engine, bar), prompts, n, options.seed)
        totals_PG = total_rewards(groups, collector.weights)
    scored = [answer for group in groups for answer in group]
    failed = [reason for answer in scored if (reason := answer.unscored)]
    if len(failed) == len(scored):
        raise UserError(f"none of {len(failed)} answers could be scored, the first because {failed[0]}")
    sampled = f"temperature {temperature:g}" if temperature else "greedy"
    notes = [f"{sampled}, {len(scored)} answers, {sum(answer.truncated for answer in scored)} cut off{note}"]
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
        ks = options.k or sorted({1, n})
        metrics = passes(totals_PG, threshold, ks)
        for k in ks:
            if f"pass@{k}" not in metrics:
                raise UserError(f"--k {k}: no row has so many answers with a score; {'; '.join(notes)}")
            if left_out := len(totals_PG) - metrics[f"pass@{k}"].count:
                notes.append(f"pass@{k} leaves {left_out} rows out, which have fewer scores")
    rows = [{"row": place, "answers": []} for place in places]
    for row, group, totals in zip(rows, groups, totals_PG.tolist(), strict=True):
        if setting.play is not None:
            row["prompt"] = group[0].prompt.text or group[0].prompt.tokens.tolist()
        for answer, total in zip(group, totals, strict=True):
            text = {"text": answer.text} if answer.text else {}
            row["answers"].append({"tokens": answer.completion.tokens.tolist(), **text, **score_fields(answer, total)})
    return EvalResult(metrics, rows, notes)
