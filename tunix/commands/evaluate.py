"""`tunix eval`: how good a model is, on held-out rows: loss, reward, accuracy, pass@k, pairs.

A run brings its own rows, rewards, environment and way of rendering, so that `tunix eval RUN` repeats its evaluation;
what is said on the command line goes before. Any other model is asked as `tunix generate` asks it. What is wanted
(`Wanted`) and what a run brings become `Setting`; `eval_tasks.py` measures; a table is printed, with the standard error
of each number over the rows, and `--out` gets the rows.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tunix.commands.eval_tasks import Found, Table, answers, loss, pairs
from tunix.commands.reward_flags import judged
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.sources import Rows, open_rows
from tunix.errors import UserError
from tunix.hf.source import must_speak
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Player
from tunix.rollout.rewards.config import RewardConfig
from tunix.types import Sampling
from tunix.util.atomic_io import refuse_out, write_text_atomic
from tunix.util.statistics import Estimate

Task = Literal["loss", "reward", "accuracy", "pass", "pairs"]
ASKING: tuple[Task, ...] = ("reward", "accuracy", "pass")
"""Tasks for which the model answers."""
LONGEST = 256
"""Tokens of an answer, where nothing else is said and the model has room for them."""
SAMPLES = 8
"""Answers to each row for pass@k, where nothing else is said."""


@dataclass(frozen=True)
class Wanted:
    """What the command line says; None where it says nothing."""

    data: str | None = None
    """Rows, as a recipe names them."""
    split: str | None = None
    """Of them."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column -> theirs."""
    rows: int | None = None
    """How many, from the start."""
    task: Task | None = None
    """None for what the run, the rewards or the rows are for."""
    rewards: RewardConfig | None = None
    """What answers are worth."""
    threshold: float | None = None
    """The least reward of a right answer; 1 where nothing is said."""
    n: int | None = None
    """Answers to each row."""
    ks: tuple[int, ...] = ()
    """Of pass@k."""
    max_tokens: int | None = None
    """Of an answer."""
    temperature: float | None = None
    """Null: greedy; for pass@k the run's, or 1."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the run's."""
    seed: int = 0
    """Of the draws."""


@dataclass(frozen=True)
class Setting:
    """What is evaluated, on what, and how."""

    speaker: InferenceModel
    table: Table
    tasks: tuple[Task, ...]
    train_on: RowKind
    """What the loss is over."""
    rewards: RewardConfig | None
    play: Player | None
    sampling: Sampling
    n: int
    """Answers to each row."""


def evaluate(asked: InferenceOptions, wanted: Wanted, out: Path | None = None) -> dict[str, float]:
    """Measures, prints, and writes `out`.

    Args:
        asked: the model, or a run.
        wanted: what and on what.
        out: .json (numbers and rows) or .jsonl (rows); None for the table alone.

    Returns:
        The numbers by name.

    Raises:
        UserError: the model, the rows or the rewards are not to be had, or do not go together.
    """
    if out is not None:
        refuse_out(out)
        if out.suffix not in (".json", ".jsonl"):
            raise UserError(f"--out {out}: end its name in .json for numbers and rows, or in .jsonl for the rows alone")
    setting = prepared(asked, wanted)
    found: dict[Task, Found] = {task: _measured(setting, task, wanted) for task in setting.tasks}
    metrics = {name: value for one in found.values() for name, value in one.metrics.items()}
    if out is not None:
        _write(out, setting, found, metrics)
    print(_shown(setting, found))
    return {name: one.value for name, one in metrics.items()}


def prepared(asked: InferenceOptions, wanted: Wanted) -> Setting:
    """What the command line says, and what the run brings where it says nothing.

    Raises:
        UserError: the model or the rows are not to be had, or they do not go together.
    """
    recipe = _recipe(asked.model)
    rows = _rows(asked.model, recipe, wanted)
    rewards = wanted.rewards or (recipe.reward if recipe else None)
    environment = recipe.rollout.environment if recipe else None
    read = algorithm_class(recipe.algorithm.name)(recipe.algorithm).train_on if recipe else None
    tasks = (wanted.task,) if wanted.task else _tasks(read, wanted, bool(rewards or environment), rows)
    n = wanted.n or (max(wanted.ks, default=SAMPLES) if "pass" in tasks else 1)
    speaker, config, sampling = _reading(asked, recipe, wanted, tasks, rows.name)
    if tasks != ("pairs",):
        must_speak(speaker.source, asked.model)
    play = Player(environment, speaker.tokenizer, config.template_kwargs) if environment else None
    if play is not None:
        sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *play.stop_strings))
    _check(wanted, tasks, n, sampling, bool(rewards or (play and play.scores)))
    limit = wanted.rows or (recipe.eval.rows if recipe and wanted.data is None else None)
    over = RowKind.ALL if read == RowKind.ALL else RowKind.COMPLETION
    stopping = speaker.stopping(sampling) if {*tasks} & {*ASKING} else sampling
    return Setting(speaker, Table(rows, config, limit), tasks, over, rewards, play, stopping, n)


def brings_rows(model: str) -> bool:
    """Whether a model is a run that has held-out completions."""
    recipe = _recipe(model)
    return recipe is not None and recipe.algorithm.reads.is_text and bool(recipe.data.eval or recipe.data.eval_split)


def _recipe(model: str) -> Recipe | None:
    """That of a run, of its last stage; None where the model is no run."""
    folder = Path(model).expanduser()
    if not (folder / "recipe.yaml").is_file():
        return None
    recipe = Recipe.load(folder / "recipe.yaml", [f"output={json.dumps(str(folder))}"])
    return recipe.stages[-1] if recipe.stages else recipe


def _rows(model: str, recipe: Recipe | None, wanted: Wanted) -> Rows:
    """Those that were named, or the run's held-out ones."""
    if wanted.data is not None:
        return open_rows(wanted.data, wanted.split)
    if recipe is None:
        raise UserError(
            f"{model} is no run, which would bring its own rows: name some, `tunix eval {model} rows.jsonl`"
        )
    if not (recipe.data.eval or recipe.data.eval_split):
        raise UserError(f"{model} has no held-out rows (data.eval): name some, `tunix eval {model} FILE`")
    return open_rows(recipe.data.eval or recipe.data.train, wanted.split or recipe.data.eval_split)


def _tasks(read: RowKind | None, wanted: Wanted, judged: bool, rows: Rows) -> tuple[Task, ...]:
    """What is measured where nothing is said.

    Args:
        read: what the run's algorithm reads of a row; None for a model that is no run.
        judged: whether something says what answers are worth.
    """
    if wanted.rewards is not None or read == RowKind.PROMPT:
        return ("reward",)
    if read == RowKind.PAIRS or (read is None and {"chosen", "chosen_ids"} & {*rows[0]}):
        return ("pairs",)
    return ("loss", "reward") if judged else ("loss",)


def _reading(
    asked: InferenceOptions, recipe: Recipe | None, wanted: Wanted, tasks: tuple[Task, ...], name: str
) -> tuple[InferenceModel, DataConfig, Sampling]:
    """The model, how rows are read, and how answers are drawn; stop ids are not yet among it."""
    sampled = "pass" in tasks
    if recipe is None:
        speaker = InferenceModel(asked)
        tokens, usual, stop = wanted.max_tokens or min(LONGEST, speaker.limit // 2), 1.0, ()
        if tokens >= speaker.limit:
            raise UserError(f"--max-tokens {tokens} leaves no room for a prompt: the model ends at {speaker.limit}")
        config = speaker.data(speaker.limit, name).model_copy(update={"completion_length": tokens})
    else:
        config, usual, stop = recipe.data, recipe.rollout.temperature, recipe.rollout.stop
        tokens = wanted.max_tokens or config.longest_completion
        speaker = InferenceModel(replace(asked, length=config.max_length + max(tokens - config.longest_completion, 0)))
    config = config.model_copy(update={"columns": {**config.columns, **wanted.columns}})
    default = usual if sampled else 0.0
    temperature = default if wanted.temperature is None else wanted.temperature
    return speaker, config, Sampling(tokens, temperature, stop_strings=(*stop, *wanted.stop))


def _check(wanted: Wanted, tasks: tuple[Task, ...], n: int, sampling: Sampling, judged: bool) -> None:
    """Refuses what would change nothing, and answers that nothing judges.

    Raises:
        UserError: names the option and the remedy.
    """
    task = " and ".join(tasks)
    fitting: dict[str, tuple[Any, tuple[Task, ...]]] = {
        "--reward": (wanted.rewards, ASKING),
        "--n": (wanted.n, ASKING),
        "--threshold": (wanted.threshold, ("accuracy", "pass")),
        "--k": (wanted.ks or None, ("pass",)),
    }
    for option, (value, tasks_of_it) in fitting.items():
        if value is not None and not {*tasks} & {*tasks_of_it}:
            raise UserError(f"{option} changes nothing for {task}: it goes with --task {' or '.join(tasks_of_it)}")
    if {*tasks} & {*ASKING} and not judged:
        raise UserError(f"--task {task}: nothing says what an answer is worth; say --reward, for instance exact_match")
    if n > 1 and sampling.temperature == 0:
        raise UserError(f"--n {n}: greedy answers to one row are all alike; set --temperature")
    if wanted.ks and max(wanted.ks) > n:
        raise UserError(f"--k {max(wanted.ks)} is more than the {n} answers of --n")


def _measured(setting: Setting, task: Task, wanted: Wanted) -> Found:
    """One task."""
    if task == "loss":
        return loss(setting.speaker, setting.table, setting.train_on)
    if task == "pairs":
        return pairs(setting.speaker, setting.table)
    config = setting.table.config
    columns = [*setting.table.rows[0], *config.columns]
    with judged(setting.speaker, setting.sampling, setting.rewards, columns, config, setting.play) as collector:
        found = answers(setting.speaker, setting.table, collector, setting.n, wanted.seed)
    threshold = 1.0 if wanted.threshold is None else wanted.threshold
    if task == "reward":
        return found.reward()
    if task == "accuracy":
        return found.accuracy(threshold)
    return found.passes(threshold, wanted.ks or tuple(sorted({1, setting.n})))


def _shown(setting: Setting, found: Mapping[Task, Found]) -> str:
    """The table: a number in a line, with its standard error over the rows."""
    lines = [f"{setting.speaker.asked.model} on {setting.table.rows.name}"]
    width = max(len(name) for one in found.values() for name in one.metrics)
    for task, one in found.items():
        for name, number in one.metrics.items():
            error = "" if number.error is None else f" ± {number.error:.4f}"
            lines.append(f"  {name:<{width}}  {number.value:10.4f}{error:<10}  {number.count} rows")
        how = f"temperature {setting.sampling.temperature:g}" if setting.sampling.temperature else "greedy"
        notes = [f"{how}, {one.notes[0]}" if task in ASKING else one.notes[0], *one.notes[1:]]
        lines += [f"  ({note})" for note in notes]
    return "\n".join(lines)


def _write(out: Path, setting: Setting, found: Mapping[Task, Found], metrics: Mapping[str, Estimate]) -> None:
    """Numbers and rows as JSON, or the rows alone as JSON lines."""
    rows = [{"task": task, **row} for task, one in found.items() for row in one.rows]
    if out.suffix == ".jsonl":
        write_text_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
        return
    numbers = {name: {key: _finite(x) for key, x in asdict(number).items()} for name, number in metrics.items()}
    told = {"model": setting.speaker.asked.model, "data": setting.table.rows.name, "metrics": numbers, "rows": rows}
    write_text_atomic(out, json.dumps(told, indent=1) + "\n")


def _finite(value: float | int | None) -> float | int | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
