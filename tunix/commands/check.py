"""`tunix check`: validates a recipe and all that it names, without jax, and prints it.

Sections -> rows of `data` (files, columns, broken lines) -> rewards and environment -> model folders and adapter ->
run folder. All that is wrong is reported together. What is printed is a recipe again: what its file and the overrides
say, with what follows from it as comments. `tunix recipes` lists the headers of the recipes that tunix brings.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunix.config import ModelConfig, RowKind
from tunix.data.config import DataConfig, RowsConfig, SourceConfig
from tunix.data.curriculum import curriculum_of
from tunix.data.mixing import kind_of, rows_read
from tunix.data.pictures import needed_pillow
from tunix.data.shapes import SHAPES, column, rendering
from tunix.data.sources import Rows
from tunix.data.templates import template_text
from tunix.errors import UserError
from tunix.models.config import DecoderConfig
from tunix.models.families.table import from_recipe, read_config
from tunix.recipe.notes import hardware_note, read_header, total_steps, update_notes
from tunix.recipe.recipe import Recipe, included_recipes, recipe_file, resolved_stages, written_sections
from tunix.recipe.tiny import is_download, local_folder
from tunix.rollout.environments.adapters import LM_EVAL, evaluation_rows, require_package, training_rows
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import Player, read_environment
from tunix.rollout.rewards.base import ADDED, read_reward
from tunix.rollout.rewards.config import RewardConfig
from tunix.rollout.rewards.rubric import read_rubric
from tunix.run.folder import refuse_foreign_checkpoints, refuse_no_run, refuse_other_run
from tunix.trainer.metrics import require_trackers
from tunix.util.object_store import url_of
from tunix.util.yaml_io import write_yaml

READ = 10_000
"""Rows of each source that are read: a broken line among them is named. It takes a fraction of a second."""


@dataclass
class _Report:
    wrong: list[str] = field(default_factory=list)
    """Mistakes, one sentence each."""
    facts: list[str] = field(default_factory=list)
    """What follows from the recipe."""
    notes: list[str] = field(default_factory=list)
    """What may surprise."""

    @contextmanager
    def noting(self, key: str) -> Iterator[None]:
        """Notes a mistake that ends the block, with its key."""
        try:
            yield
        except UserError as error:
            text = str(error)
            self.wrong.append(text if text.startswith(key.partition(".")[0]) else f"{key}: {text}")


def check(recipe: str | Path, overrides: Collection[str] = (), *, tiny: bool = False, everything: bool = False) -> str:
    """The recipe as YAML, with comments, if it and what it names are valid.

    Args:
        recipe: its file, or the name of one that tunix brings.
        overrides: as on the command line.
        tiny: as it runs with `--tiny`.
        everything: every value in the text, those that were filled in too.

    Raises:
        UserError: everything that is wrong, one line each.
    """
    path = recipe_file(recipe)
    asked = Recipe.load(path, overrides)
    checked = Recipe.load(path, overrides, tiny) if tiny else asked
    report, runs = _Report(), checked.stages or (checked,)
    for run in runs:
        _examine(run, checked.model, report)
    with report.noting("output"):  # what `tunix run` would refuse; nothing is written
        folder = Path(checked.output).expanduser()
        for parent in (folder, *folder.parents):
            if parent.exists() and not parent.is_dir():
                raise UserError(f"output: {parent} is a file, and {folder} has to be a folder")
        refuse_no_run(folder)
        refuse_other_run(checked, folder)
        if not any(url_of(run.checkpoint.folder or "") for run in runs):
            refuse_foreign_checkpoints(checked)
    if report.wrong:
        raise UserError("\n".join(f"{path}: {line}" for line in dict.fromkeys(report.wrong)))
    # The sections that the file and the overrides set, and what `--tiny` changes: they build an equal recipe.
    written = written_sections(path, overrides)
    before, after = asked.sections(), checked.sections()
    if everything:
        said = after
    elif not tiny:
        output = written.pop("output")
        said = {**written, "output": output}
    elif checked.stages:
        stages = zip(resolved_stages(written, str(path)), before["stages"], after["stages"], strict=True)
        said = {"output": checked.output, "stages": [_changed(stage, was, now) for stage, was, now in stages]}
    else:
        said = _changed(written, before, after)
    if not tiny and (note := hardware_note(path, overrides)):
        report.notes.append(note)
    lines = [*dict.fromkeys(report.facts), *(f"toy, {what}" for what in checked.replaced)]
    lines += [f"note: {note}" for note in report.notes]
    if not everything:
        lines.append("all other values are the defaults: --all prints them")
    return write_yaml(said) + "".join(f"# {line}\n" for line in [*lines, f"ok: {recipe}"])


def _changed(written: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `after` whose key is written, or that are not those of before."""
    kept: dict[str, Any] = {}
    for key, value in after.items():
        inner, other = written.get(key), before.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            value = _changed(inner if isinstance(inner, Mapping) else {}, other, value)
            if value or key in written:
                kept[key] = value
        elif key in written or value != other:
            kept[key] = value
    return kept


def _examine(recipe: Recipe, model: ModelConfig, report: _Report) -> None:
    """Looks at what a run or a stage names; `model` is the section of the first stage, which names the weights."""
    data, kind = recipe.data, recipe.algorithm.reads
    environment, rewards, adapter = recipe.rollout.environment, recipe.reward, recipe.adapter
    kind = RowKind.ROW if kind == RowKind.PROMPT and environment is not None else kind
    train = _check_rows(recipe, "data.train", data.train, kind, report)
    if held_out := data.eval or (data.train if data.eval_split else None):
        _check_rows(recipe, "data.eval", held_out, kind, report)
    if train is not None and recipe.epochs is not None and not data.divides_rows:
        number = rows_read(train, data, recipe.epochs)
        total = total_steps(number, recipe.batch_size, 1)
        epochs = f"{recipe.epochs} epochs" if recipe.epochs > 1 else "1 epoch"
        rows = f"{number // recipe.epochs:,} rows" + " of a mixture" * bool(data.sources)
        report.facts.append(f"steps: {total:,} ({epochs} of {rows}, {recipe.batch_size} at a time)")
        report.notes += update_notes(recipe, number // recipe.epochs, total)
        if recipe.logging.profile and (beyond := recipe.logging.profile.beyond(total)):
            report.wrong.append(beyond)
    if train is not None and data.curriculum is not None:
        with report.noting("data.curriculum"):
            curriculum_of(data, train, recipe.seed, 0)
    if data.chat_template is not None:
        with report.noting("data.chat_template"):
            template_text(str(data.chat_template))
    if data.pictures:
        with report.noting("data.pictures"):
            needed_pillow()
    with report.noting("logging"):
        require_trackers(recipe.logging)
    # The environments and the rewards of the run, of its data sets and of each task; rewards' arguments are columns of
    # the rows.
    _check_environment("rollout.environment", environment, report)
    parts = {} if train is None else {x.section.name: x for x in train.parts if x.section} or {"": train}
    apart = {source.name for source in data.sources if source.reward is not None}
    _check_rewards("reward", rewards, [part for name, part in parts.items() if name not in apart], data, report)
    for number, source in enumerate(data.sources):
        _check_environment(f"data.train.{number}.environment", source.environment, report)
        scored = [parts[source.name]] if source.name in parts else []
        _check_rewards(f"data.train.{number}.reward", source.reward, scored, data, report)
    for number, written in enumerate(recipe.eval.tasks):
        key, task = f"eval.tasks.{number}.", written.in_run(environment, rewards)
        if task.harness_task:
            with report.noting(f"{key}data"):
                require_package(str(task.data), "lm-eval", LM_EVAL, "lm-eval")
            continue
        rollout = recipe.rollout.model_copy(update={"environment": task.environment})
        run = recipe.model_copy(update={"data": task.data_in_run(data), "rollout": rollout})
        kind = RowKind.PROMPT if task.environment is None else RowKind.ROW
        rows = _check_rows(run, f"{key}data", run.data.eval or run.data.train, kind, report)
        _check_environment(f"{key}environment", task.environment, report)
        _check_rewards(f"{key}reward", task.reward, [] if rows is None else [rows], run.data, report)
    # The config.json of local folders, and the adapter's targets in the model; no weights are read.
    decoder = from_recipe(model) if model.init == "random" else _decoder("model.path", str(model.path), recipe, report)
    if decoder is not None and adapter is not None and adapter.source is None:
        with report.noting("adapter.targets"):
            adapter.targeted_in(decoder)
    for key, teacher in () if recipe.teacher is None else recipe.teacher.each.items():
        if teacher.path and not (teacher.is_policy or teacher.is_served or teacher.is_stored):
            _decoder(f"{key}.path", teacher.path, recipe, report)
    if rewards is not None and rewards.model:
        _decoder("reward.model", rewards.model, recipe, report)
    if rewards is not None and (judge := rewards.judge) is not None:
        with report.noting("reward.judge.rubric"):
            read_rubric(judge.rubric, judge.scale)
        if not judge.is_server and judge.model != "base":
            _decoder("reward.judge.model", judge.model, recipe, report)


def _check_environment(key: str, config: EnvironmentConfig | None, report: _Report) -> None:
    """Loads an environment; one whose package knows its name is made too, in a worker, which looks up what it asks."""
    if config is None:
        return
    with report.noting(key):
        if config.agent is not None:
            config.agent.words()
        elif config.package in ("reasoning_gym", "textarena", "gymnasium", "verifiers"):
            Player(config, None).close()
        else:
            read_environment(config)


def _check_rewards(
    key: str, rewards: RewardConfig | None, parts: Sequence[Rows], data: DataConfig, report: _Report
) -> None:
    """Loads the functions of a section, whose arguments are columns of the rows that they score."""
    for number, function in enumerate(rewards.functions if rewards else ()):
        with report.noting(f"{key}.functions.{number}"):
            reward = read_reward(function, rewards.deadline if rewards else 0.0)
            for part in parts:
                columns = data.of(part.section).columns if part.section else data.columns
                reward.arguments([*part.columns, *columns, *ADDED])


def _check_rows(
    recipe: Recipe, key: str, spec: str | Sequence[RowsConfig], kind: RowKind, report: _Report
) -> Rows | None:
    """Opens the rows of a key and reads the first of them, each of which has to be whole and to have the columns of the
    first one's shape; None where they are elsewhere or broken."""
    paths = [spec] if isinstance(spec, str) else [rows.path for rows in spec]
    if downloads := [path for path in paths if is_download(path)]:
        there = "are" if len(downloads) > 1 else "is"
        report.facts.append(
            f"{key}: {', '.join(downloads)} {there} on the hub: its rows were not looked at (`tunix inspect` does)"
        )
        return None
    with report.noting(key):
        data, opened = recipe.data, training_rows if key == "data.train" else evaluation_rows
        rows = opened(data, recipe.rollout.environment, recipe.seed)
        assert rows is not None
        total = sum(source.weight for source in data.sources)
        for part in rows.parts or (rows,):
            section, count = part.section, min(len(part), READ)
            config, reads = data.of(section) if section else data, kind_of(section, data, kind)
            shape = rendering(config, part[0], f"{key}: row 1 of {part.name}", reads).format
            for index in range(count):
                row = part[index]
                for name in () if reads == RowKind.ROW else SHAPES[reads][shape]:
                    try:
                        column(row, name, config.columns)
                    except UserError as error:
                        raise UserError(f"{key}: row {index + 1} of {part.name}: {error}") from error
            read = "all of them read" if count == len(part) else f"the first {count:,} of them read"
            share = f", {section.weight:g} of {total:g} that are read" if isinstance(section, SourceConfig) else ""
            name = f"{key}, {section.name}" if section else key
            report.facts.append(f"{name}: {len(part):,} rows, {read}{share}")
        return rows
    return None


def _decoder(key: str, path: str, recipe: Recipe, report: _Report) -> DecoderConfig | None:
    """The structure of a local model; None for one of the hub or of an object store, and for one that is not there, has
    no config.json or weights, or is of an unknown family, which is noted."""
    folder = Path(path).expanduser()
    if url_of(path) or not (folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1):
        report.facts.append(f"{key}: {path} is no folder here: a run downloads it, or takes it from the cache")
        return None
    with report.noting(key):
        if not folder.is_dir():
            raise UserError(f"{key}: there is no folder {path} (looked from {Path.cwd()})")
        place = local_folder(path)
        if place is None and (folder / "recipe.yaml").is_file():
            raise UserError(f"{key}: the run {path} has exported nothing yet: finish it first")
        if place is None and (folder / "adapter_config.json").is_file():
            return None  # an adapter on a base of the hub
        place = place or folder
        trains = key == "model.path"
        pictures, mtp = recipe.data.pictures is not None and trains, recipe.model.mtp if trains else None
        decoder = read_config(place, pictures, mtp)
        if not any(place.glob("*.safetensors")):
            raise UserError(f"{key}: {place} holds no .safetensors file, the only weights that are read")
        report.facts.append(f"{key}: {decoder.family}, {decoder.num_layers} layers of {decoder.d_model}, from {place}")
        return decoder
    return None


def recipe_lines(width: int | None = None) -> Iterator[str]:
    """Yields the lines that `tunix recipes` prints; those of a terminal are cut to its width."""
    files = included_recipes()
    headers = {name: read_header(file) for name, file in files.items()}
    longest = max(map(len, headers), default=0)
    titles = {
        True: "measured, on a laptop:",
        False: "for accelerators, not yet measured; each runs on a laptop with --tiny:",
    }
    for measured, title in titles.items():
        names = [name for name, header in headers.items() if header.measured == measured]
        if not names:
            continue
        yield title
        # The quickstart before the others: it is where to begin.
        for name in sorted(names, key=lambda name: (name != "quickstart", name)):
            line = f"  {name:<{longest}}  {headers[name].summary}"
            yield line if width is None or len(line) <= width else f"{line[: width - 3].rstrip()}..."
        yield ""
    yield "tunix run NAME trains one, tunix run NAME --tiny tries it, and these are the files to start from:"
    yield from sorted({str(file.parent) for file in files.values()})
