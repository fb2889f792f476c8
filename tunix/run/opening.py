"""How a run begins: `tunix run` and `tunix.train`, and their first line, for people: which model trains on which rows,
on what, and where the run is.

The line is there within a second, before JAX is imported or weights are read: it says what the recipe, a config.json
and local files say, and leaves out the rest. Loads without jax.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tunix.data.config import EPISODES
from tunix.data.sources import open_rows
from tunix.errors import UserError
from tunix.models.config import DecoderConfig, trains
from tunix.models.families.table import count_weights, from_recipe, read_config
from tunix.recipe.notes import hardware_note
from tunix.recipe.recipe import Recipe, recipe_file
from tunix.trainer.metrics import require_trackers
from tunix.util.accelerators import accelerated, cpu_devices
from tunix.util.ports import refuse_taken

if TYPE_CHECKING:
    from tunix.run.train import RunResult

NAMES = {
    "llama": "Llama",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "qwen2": "Qwen 2",
    "qwen3": "Qwen 3",
    "qwen3_5": "Qwen 3.5",
    "qwen3_5_moe": "Qwen 3.5 MoE",
    "qwen3_moe": "Qwen 3 MoE",
    "gpt_oss": "gpt-oss",
    "mixtral": "Mixtral",
}
"""Family -> the name that people use; of others the family's own."""
SMALL_FILES, FEW_FILES = 32 * 2**20, 100
"""Bytes and files of local rows that are counted before a run starts, in some tenths of a second."""


def begin(
    recipe: str | Path,
    overrides: Iterable[str],
    *,
    tiny: bool,
    fresh: bool,
    minutes: int | None,
    verbose: bool,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    require_fit: Callable[[Recipe, bool], None] | None,
) -> None:
    """As `train`, as a process of its own, one of several where the last arguments or a scheduler say so.

    Args:
        coordinator: address of process 0, e.g. `10.0.0.1:8476`.
        processes: the number of processes.
        process: the number of this one, from 0.
        require_fit: refuses the recipe where it does not fit the accelerators here, before JAX takes them.
    """
    if process == 0 and coordinator:
        refuse_taken(coordinator)
    # Of several processes the first one speaks. JAX alone knows every scheduler's way to say which one this is.
    numbers = (process, os.environ.get("JAX_PROCESS_ID"), os.environ.get("SLURM_PROCID"))
    alone = all(number is None for number in numbers)
    trained, line = opened(recipe, overrides, tiny, alone)
    if alone or all(str(number) in ("None", "0") for number in numbers):
        print(line, file=sys.stderr, flush=True)
    if not verbose:
        # XLA's C++ prints warnings to the terminal on its own account; errors stay. It is read when JAX is imported.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if require_fit is not None:
        require_fit(trained, fresh)
    from tunix.distributed.meeting import join, place_of  # these load jax, without which all of the above is done
    from tunix.run.train import run
    from tunix.util.startup import begin_pathways

    # Under Pathways one process drives all devices, and there is no other to meet.
    if not begin_pathways() and (place := place_of(coordinator, processes, process)):
        join(place)
    run(trained, fresh=fresh, minutes=minutes, verbose=verbose)


def train(
    recipe: Recipe | str | Path,
    overrides: Iterable[str] = (),
    *,
    tiny: bool = False,
    fresh: bool = False,
    minutes: int | None = None,
    verbose: bool = False,
) -> "RunResult":
    """Trains a recipe, or resumes it where its run folder holds the same one.

    Args:
        recipe: a recipe, a YAML file, or the name of a shipped one such as `sft_qwen`.
        overrides: as on the command line, such as `optimizer.learning_rate=1e-4`; only for a file or a name.
        tiny: uses a random model of a few thousand weights, generated rows and a few steps.
        fresh: starts again; an existing run folder is moved aside.
        minutes: after which it stops with a checkpoint, such as before a notebook's time is up; called again it goes on
            from there. None for no limit.
        verbose: also displays how it is computed, which is otherwise in the run's log.txt alone.

    Raises:
        UserError: a mistake that the user can fix; none of their files was changed.
        Interrupted: after SIGINT or SIGTERM, or when the time is up, with a checkpoint.
    """
    from rich.console import Console

    from tunix.distributed import processes
    from tunix.run.train import run

    recipe, line = opened(recipe, overrides, tiny, alone=processes.number() == 1)
    if processes.lead():  # where displays print theirs, before the run has one
        print(line, file=sys.stdout if Console().is_jupyter else sys.stderr, flush=True)
    return run(recipe, fresh=fresh, minutes=minutes, verbose=verbose)


def opened(recipe: Recipe | str | Path, overrides: Iterable[str], tiny: bool, alone: bool) -> tuple[Recipe, str]:
    """The recipe that a run trains, and the first line about it; a note on the next one where it is made for an
    accelerator that is not here. `recipe` may be a YAML file, or the name of a shipped one, with overrides as on the
    command line; `alone`: whether one process trains it.

    Raises:
        UserError: the recipe is wrong, or a local file that it names, or a tracker lacks its package or key.
    """
    overrides = list(overrides)
    if isinstance(recipe, Recipe) and overrides:
        raise UserError("overrides belong to a file or a name: give them to Recipe.load, or the file to tunix.train")
    if isinstance(recipe, Recipe):
        trained, note = recipe.tiny() if tiny else recipe, None
    else:
        trained = Recipe.load(recipe, overrides, tiny)
        note = None if tiny else hardware_note(recipe_file(recipe), overrides)
    for stage in (trained.stages or (trained,)) if alone else ():  # of several processes only the first needs keys
        require_trackers(stage.logging)
    return trained, opening(trained, tiny, alone=alone) + (f"\nnote: {note}" if note else "")


def opening(recipe: Recipe, tiny: bool = False, *, alone: bool = True) -> str:
    """The first line: `Gemma, 0.8M weights, all trained on 4,000 rows; 1 CPU; runs/quickstart`.

    Args:
        recipe: of several stages the first one is described.
        tiny: whether it was shrunk, so that the line says what is toy.
        alone: whether one process trains it; how many devices several have together is not known yet.

    Raises:
        UserError: a local file of rows or the model's config.json is missing or broken.
    """
    model, adapter = recipe.model, recipe.adapter
    config: DecoderConfig | None = None  # where it would have to be fetched
    if model.path is None:
        config = from_recipe(model)
        label = NAMES.get(config.family, config.family)
    else:
        file, label = Path(model.path).expanduser() / "config.json", Path(model.path).name
        if file.is_file() or (file := cached_config(model.path)):
            config = read_config(file.parent, recipe.data.pictures is not None, model.mtp)
    # How many weights there are, and how many of them train.
    if config is None:
        weights = "all weights trained" if adapter is None else f"an adapter of rank {adapter.rank} trained"
    else:
        trained, total = weight_counts(recipe, config)
        weights = f"{people_count(total)} weights, {'an adapter' if trained is None else 'all'} trained"
        if trained is not None and trained != total:
            weights = f"{people_count(trained)} of {people_count(total)} weights trained"
    # The number of the rows where it is quick to count them; else where they come from.
    data, sources = recipe.data, recipe.data.sources
    train = " + ".join(source.name for source in sources) if sources else str(data.train)
    path = Path(train).expanduser()
    inside = path.rglob("*") if path.is_dir() else [path]
    files = [file for file in itertools.islice(inside, FEW_FILES) if file.is_file()]
    quick = 0 < len(files) < FEW_FILES and sum(file.stat().st_size for file in files) <= SMALL_FILES
    generated = train.startswith(("tunix.data.sorting:", "tunix.data.tiny:"))
    rows = (
        f"{len(open_rows(train, data.split, data.columns.values())):,} rows"
        if not sources and (quick or generated)
        else train
    )
    if train == EPISODES and recipe.rollout.environment:
        rows = f"episodes of {recipe.rollout.environment.name}"
    parts = [f"{label}, {weights} on {rows}"]
    if alone and not accelerated():
        parts.append("1 CPU" if cpu_devices() == 1 else f"{cpu_devices()} CPU devices")
    line = "; ".join([*parts, recipe.output])
    return f"toy ({', '.join(recipe.replaced) or 'sizes'}): {line}" if tiny else line


def cached_config(path: str) -> Path | None:
    """The config.json of a hub id that was downloaded before; None of one that was not, and of any other path."""
    if path.count("/") != 1 or Path(path).expanduser().exists():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(file) if isinstance(file, str) else None


def weight_counts(recipe: Recipe, config: DecoderConfig) -> tuple[int | None, int]:
    """The number of the weights that train (None where a folder's adapter says it), and of all of the model's."""
    adapter, counts = recipe.adapter, count_weights(config)
    if not recipe.algorithm.has_lm_head:
        counts = {name: count for name, count in counts.items() if name != "head/w"} | {"value/w": config.d_model}
    total = sum(counts.values())
    if adapter is None:
        return sum(count for name, count in counts.items() if trains(name, True, config.mtp)), total
    return (adapter.count_weights(config) if adapter.source is None else None), total


def people_count(number: int) -> str:
    """A number of weights as people say it: 829_000 -> `0.8M`, 999_885_952 -> `1.0B`, 596_049_920 -> `596M`."""
    units = ((0.95e9, 1e9, "B"), (1e5, 1e6, "M"), (0, 1e3, "k"))
    unit, letter = next((unit, letter) for least, unit, letter in units if number >= least)
    return f"{number / unit:.1f}{letter}" if number < 100 * unit else f"{number / unit:.0f}{letter}"
