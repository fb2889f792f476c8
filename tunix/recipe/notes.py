"""What a recipe means for this machine and these rows and may surprise: few updates, hardware that is not here.

Each is a note of a line, said by `tunix check` and when a run starts. Loads without jax.
"""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tunix.recipe.sections import Sections
from tunix.util.accelerators import accelerated

_LABEL = re.compile(r"#\s+([A-Z][a-z]+(?: it| also)?)\s{2,}(\S.*)")
"""A line of a recipe's header such as `# Hardware   a laptop`."""


@dataclass(frozen=True)
class Header:
    """What the comments at the top of a recipe say."""

    summary: str = ""
    """The first sentence, e.g. `Fine-tunes all weights of Gemma 3 1B on conversations.`"""
    hardware: str = ""
    """What it needs, e.g. `a laptop: two CPU cores, under 2 GB of memory.`; empty where nothing is said."""
    time: str = ""
    """How long it takes, e.g. `131 s were measured`."""

    @property
    def measured(self) -> bool:
        """Whether its time was measured, and not estimated."""
        return ("measured" in self.time and "estimate" not in self.time) or bool(re.match(r"\d+ s ", self.time))


def read_header(path: Path) -> Header:
    """The header of a recipe's file; empty where the file has none or cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return Header()
    paragraph: list[str] = []
    labels: dict[str, str] = {}
    label = None
    for line in lines:
        if not line.startswith("#"):
            break
        text = line.lstrip("#").strip()
        if named := _LABEL.match(line):
            label = named[1]
            labels[label] = named[2]
        elif label and line.startswith("#    "):
            labels[label] += f" {text}"
        elif not labels and not text.startswith("tunix "):
            paragraph.append(text)
    summary = re.split(r"(?<=[\w)`])\. ", " ".join(filter(None, paragraph)), maxsplit=1)[0].rstrip(".:")
    return Header(summary and f"{summary}.", labels.get("Hardware", ""), labels.get("Time", ""))


def hardware_note(path: Path, overrides: Collection[str] = ()) -> str | None:
    """A note where a recipe is made for an accelerator and this machine has none.

    Args:
        path: the recipe's file.
        overrides: those of the command line; another model has other needs, of which the header says nothing.
    """
    needs = read_header(path).hardware
    if not needs or "laptop" in needs or accelerated() or any(override.startswith("model") for override in overrides):
        return None
    return (
        f"{path.name} is made for {needs.partition(',')[0].rstrip('.')}, and this machine has no GPU or TPU: a step "
        "takes minutes here, if memory suffices at all; --tiny tries the recipe in seconds"
    )


def total_steps(n_rows: int, batch_size: int, epochs: int) -> int:
    """Number of batches in `epochs` epochs of `n_rows` kept rows; only the last batch of all epochs can be short."""
    return math.ceil(n_rows * epochs / batch_size)


def update_notes(recipe: Sections, rows: int, total: int) -> Iterator[str]:
    """Notes about runs whose length follows from the rows and is shorter than it looks.

    Args:
        recipe: of a single run or a stage.
        rows: number of training rows.
        total: steps of the run.
    """
    epochs, batch_size = recipe.epochs, recipe.batch_size
    if epochs is None:
        return
    what = f"{total} step" + "s" * (total != 1)
    if total == 1 or total < epochs:
        passes = f"{epochs} epochs of {rows:,} rows are" if epochs > 1 else f"an epoch of {rows:,} rows is"
        smaller = max(1, rows // 10)
        remedy = "set steps, or more epochs"
        if smaller < batch_size:
            remedy = f"batch_size={smaller} makes {total_steps(rows, smaller, epochs)}, or set steps"
        yield f"{passes} only {what}, since batch_size is {batch_size}: {remedy}"
    warmup = recipe.optimizer.warmup
    if warmup >= 1 and warmup >= total:
        yield (
            f"optimizer.warmup is {warmup:g} steps and the run has {what}: the learning rate never reaches "
            f"{recipe.optimizer.learning_rate:g}; below 1 it is a share of the steps"
        )
