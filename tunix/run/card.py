"""The README.md of an export: what was trained, on which rows, what was measured, and with which versions.

The lines between `---` at its top are what the hub reads (https://huggingface.co/docs/hub/model-cards).
"""

import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tunix import __version__
from tunix.recipe.sections import Sections
from tunix.util.atomic_io import read_rows

PACKAGES = ("jax", "flax", "optax", "transformers")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SECRET = re.compile(r"api_?key|secret|password|authorization|access_?token", re.IGNORECASE)
"""Keys of options whose values are not published."""


def model_card(recipe: Sections, base: str, adapter: bool, step: int | None = None) -> str:
    """A run's model card.

    Left out are values of environment variables that a recipe sets and of options that are called a secret, and where
    the run wrote its files. Addresses with a password are in no recipe.

    Args:
        recipe: the run's, or the stage's; what was measured is read in its output folder.
        base: the model that training started from, a hub id or a path; empty for random weights.
        adapter: whether the adapter alone is exported.
        step: the exported checkpoint's; None for the last.
    """
    metrics = Path(recipe.output).expanduser() / "metrics.jsonl"
    rows = [row for row in read_rows(metrics, "step") if step is None or row["step"] <= step]
    first = {key: value for row in reversed(rows) for key, value in row.items() if isinstance(value, int | float)}
    last = {key: value for row in rows for key, value in row.items() if isinstance(value, int | float)}
    counts = [(key[5:], f"{last[key]:,.0f}") for key in last if key.startswith("data/")]
    measured = [(key, f"{first[key]:.4g}", f"{last[key]:.4g}") for key in last if key.startswith("eval/")]

    algorithm = {"name": recipe.algorithm.name}
    chosen = recipe.model_dump(
        mode="json", exclude_defaults=True, exclude={"output", "stages", "checkpoint", "logging"}
    )
    chosen["algorithm"] = algorithm | chosen.get("algorithm", {})
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    header |= {"base_model": base} if HUB_ID.fullmatch(base) else {}
    header |= {"tags": ["tunix", recipe.algorithm.name]}
    start = Path(base).name if Path(base).is_absolute() else base or "random weights"
    what = "An adapter for" if adapter else "A model trained from"
    steps = f", {last['step']} steps" if rows else ""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
    paragraphs = [
        f"---\n{_yaml(header)}---",
        f"# {start}, {recipe.algorithm.name}",
        f"{what} {start}, on {recipe.data.train}{steps}.",
        *_table("Rows", ("read so far", "number"), counts),
        *_table("Held-out rows", ("metric", "first", "last"), measured),
        f"## Recipe\n\nWhat differs from the defaults of tunix {__version__}:\n\n```yaml\n{_yaml(_public(chosen))}```",
        f"## Versions\n\ntunix {__version__}, {versions}",
    ]
    return "\n\n".join(paragraphs) + "\n"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)


def _public(value: Any, hidden: bool = False) -> Any:
    """A recipe's values without secrets; `hidden` are those of a mapping of environment variables."""
    if isinstance(value, dict):
        return {key: _public(item, hidden or key == "env" or bool(SECRET.search(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item, hidden) for item in value]
    return "..." if hidden else value


def _table(title: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A heading with a table below it; nothing without rows."""
    lines = [heads, ("---",) * len(heads), *rows]
    return [f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)] if len(lines) > 2 else []
