"""Which shape a row has and how it is to be read: the columns of each shape, and the settings of a recipe.

What is read of a row is the algorithm's choice (`TrainOn`); of the shapes that serve it, `detect_format` finds the one
whose columns a row has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tunix.data.columns import Row, listed, near
from tunix.data.config import DataConfig
from tunix.errors import UserError, nearest
from tunix.types import LOSS_WEIGHTS

Format = Literal["messages", "prompt_completion", "text", "tokens", "pairs"]
TrainOn = Literal["completion", "all", "prompt", "row", "pairs", "labels"]
Overflow = Literal["truncate", "drop", "error", "keep"]
Shapes = Mapping[Format, tuple[str, ...]]
"""The columns of each shape; where a row has several, the first one is meant."""

COMPLETIONS: Shapes = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
PROMPTS: Shapes = {
    "prompt_completion": ("prompt",),
    "messages": ("messages",),
    "tokens": ("prompt_ids",),
}
"""Of rows whose completions a policy writes; further columns are the rewards'."""
PAIRS: Shapes = {
    "tokens": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "pairs": ("chosen", "rejected"),
}
"""`pairs` may have a `prompt`; without one it is what both sides begin with."""
LABELS: Shapes = {
    "tokens": ("prompt_ids", "completion_ids", "label"),
    "prompt_completion": ("prompt", "completion", "label"),
}
SHAPES: Mapping[TrainOn, Shapes] = {
    "completion": COMPLETIONS,
    "all": COMPLETIONS,
    "prompt": PROMPTS,
    "row": PROMPTS,
    "pairs": PAIRS,
    "labels": LABELS,
}
_READ: Mapping[TrainOn, str] = {
    "completion": "completions",
    "all": "texts",
    "prompt": "prompts",
    "row": "prompts",
    "pairs": "pairs",
    "labels": "labelled completions",
}
"""What is read of a row, in a person's words."""

CUT: tuple[TrainOn, ...] = ("completion", "all")
"""What can be cut into pieces: a sequence that nothing is compared with, and that nobody goes on from."""

OPTIONAL = ("labels", "loss_mask", "loss_weights", "weight", "tools", "margin")
FIXED = ("prompt", "margin")
"""Columns of pairs that may be left out, but then by every row; of token ids it is `loss_weights`."""

SPOKEN = ("messages", "prompt and completion", "prompt", "text", "chosen and rejected", "prompt, completion and label")
"""The shapes that are named to a person first: the most usual."""


@dataclass(frozen=True)
class Rendering:
    """How rows become sequences."""

    format: Format
    """Shape of every row."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column -> theirs."""
    max_length: int = 1024
    """Tokens of a sequence at most; of each side of a pair."""
    on_overflow: Overflow = "truncate"
    """What happens to a longer one; `keep` leaves it to `cutting`."""
    train_on: TrainOn = "completion"
    """`all` trains every token after the first, prompts included; `prompt` reads prompts only, and trains nothing;
    `row` renders nothing: an environment makes its prompts of the columns; `pairs` reads two completions that are
    compared; `labels` completions with a verdict."""
    prompt_length: int = 0
    """Tokens of a prompt at most, where only prompts are read; a longer one loses its beginning."""
    chat: bool = False
    """A prompt (and completion) that is a string becomes a chat of a user (and an assistant)."""
    system: str | None = None
    """Its system message."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    vocab_size: int | None = None
    """Rows of the model's embedding, where known: a larger id is refused instead of being read as another one."""
    fixed: tuple[str, ...] = ()
    """Those of `FIXED` that the first row has, and therefore every one."""
    completion_length: int | None = None
    """Of pairs: tokens of a side after what both have in common at most; None for what `max_length` leaves."""


def rendering(config: DataConfig, first: Row, where: str, train_on: TrainOn = "completion") -> Rendering:
    """The settings of a recipe's `data` section, with the shape read off the first row where it says `auto`.

    Raises:
        UserError: an unknown name in `data.columns`, or a row of no known shape.
    """
    shapes = SHAPES[train_on]
    names = _names()
    for name in config.columns:
        if name not in names and shapes is not PROMPTS:  # a reward may name its columns as it likes
            known = f"{', '.join(names)}.{nearest(name, names)}"
            raise UserError(f"data.columns maps {name!r}, which is none of our columns: {known}")
    shape = "tokens" if train_on == "row" else config.format
    if shape == "auto":
        shape = detect_format(first, config.columns, where, shapes)
    elif shape not in shapes:
        raise UserError(f"data.format is {shape!r}, but {_READ[train_on]} are read from {', '.join(shapes)}")
    return Rendering(
        format=shape,
        columns=config.columns,
        max_length=config.max_length,
        on_overflow="keep" if config.cuts and train_on in CUT else config.on_overflow,
        completion_length=config.completion_length if train_on == "pairs" else None,
        train_on=train_on,
        prompt_length=config.longest_prompt,
        chat=config.chat,
        system=config.system,
        template_kwargs=config.template_kwargs,
        fixed=tuple(name for name in _fixed(train_on, shape) if first.get(config.columns.get(name, name)) is not None),
    )


def _fixed(train_on: TrainOn, shape: Format) -> tuple[str, ...]:
    """Columns that every row has or none."""
    if train_on == "completion" and shape == "tokens":
        return (LOSS_WEIGHTS,)
    return FIXED if train_on == "pairs" else ()


def detect_format(
    row: Row,
    columns: Mapping[str, str],
    where: str = "row 1",
    shapes: Shapes = COMPLETIONS,
) -> Format:
    """The shape that a row's columns tell.

    Args:
        row: usually the first.
        columns: our column -> theirs.
        where: how the row is called in a message.
        shapes: those that could be meant, and their columns.

    Raises:
        UserError: no shape fits; names the wanted and the present columns.
    """
    for shape, wanted in shapes.items():
        if all(columns.get(name, name) in row for name in wanted):
            return shape
    wanted = [columns.get(name, name) for group in shapes.values() for name in group]
    strange = [name for name in row if name not in (*wanted, *_names())]
    hints = [f"{ours!r} for {theirs!r}" for theirs in strange for ours in near(theirs, wanted)]
    raise UserError(
        f"{where} has the columns {listed(row)}; wanted are {', or '.join(_spoken(shapes))}. Name yours in "
        f"data.columns, as in {_example(shapes)}." + (f" Is it {', '.join(hints)}?" if hints else "")
    )


def _names() -> list[str]:
    """All of our columns."""
    return sorted({name for shapes in SHAPES.values() for group in shapes.values() for name in group} | set(OPTIONAL))


def _spoken(shapes: Shapes) -> list[str]:
    """The columns of each shape, the most usual shapes first."""
    groups = [" and ".join([", ".join(group[:-1]), group[-1]] if group[1:] else group) for group in shapes.values()]
    return sorted(groups, key=lambda group: SPOKEN.index(group) if group in SPOKEN else len(SPOKEN))


def _example(shapes: Shapes) -> str:
    """A value of `data.columns` that such rows could need."""
    return "{chosen: better, rejected: worse}" if shapes is PAIRS else "{prompt: question, completion: answer}"
