"""Tests of the data."""

from typing import Any

from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.shapes import Format, Rendering


def rendered_as(
    shape: Format,
    train_on: RowKind = RowKind.COMPLETION,
    fixed: tuple[str, ...] = (),
    vocab_size: int | None = None,
    **data: Any,
) -> Rendering:
    """Rows of a shape, by keys of a `data` section."""
    return Rendering(shape, DataConfig(train="given", **data), train_on, vocab_size, fixed)
