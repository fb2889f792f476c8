"""Draws the curves of a run as `curves.svg`, from the rows of `metrics.jsonl` and without a plotting library.

Rows -> `Curve`s (stages one after the other) -> panels of related curves -> SVG. Grey text on a transparent background
and two mid-tone colours are readable on light and on dark pages.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from tunix.util.atomic_io import write_text_atomic

Stage = tuple[str, List[Mapping[str, Any]]]
"""A stage's name and the rows of its metrics.jsonl."""
Point = tuple[float, float]

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/mean", "eval/reward")),
    ("accuracy of the rewards", ("rewards/accuracy", "eval/rewards/accuracy")),
    ("margin of the rewards", ("rewards/margin", "eval/rewards/margin")),
    ("loss", ("train/loss", "eval/loss")),
    ("entropy of the policy, nats per token", ("policy/entropy",)),
    ("tokens of an answer", ("rollout/length",)),
)
"""The panels: title, and the metrics that share its axes; training first, held-out rows second."""
COLOURS, GREY = ("#4a90d9", "#e0862f"), "#808080"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 190, 62, 16, 30, 26
"""Size of a panel and its margins, in pixels."""
LETTER = 7
"""Upper bound of the average width of a letter in pixels, in any common font."""
MOST = 400
"""Maximum number of points of a curve; a longer one is drawn through the means of neighbours."""


@dataclass(frozen=True)
class Curve:
    """One metric over the steps of a run."""

    name: str
    """Name of the metric, e.g. `eval/reward`."""
    parts: tuple[tuple[Point, ...], ...]
    """(step, value) points of each stage that logged it, with steps counted across stages. The meaning of a loss
    differs between stages, so no line connects them."""

    @property
    def points(self) -> list[Point]:
        """The points of all parts."""
        return [point for part in self.parts for point in part]


def write_curves(folder: Path, stages: List[Stage]) -> Path | None:
    """Writes `curves.svg` of the stages' metrics to a folder; returns its path, or None without metrics."""
    picture = svg(folder.name, stages)
    if picture is None:
        return None
    path = folder / "curves.svg"
    write_text_atomic(path, picture)
    return path


def svg(title: str, stages: List[Stage]) -> str | None:
    """The picture as SVG text, or None where no metric was logged twice."""
    panels = [
        (name, [curve for metric in metrics if (curve := curve_of(metric, stages)).parts]) for name, metrics in PANELS
    ]
    drawn = [(name, curves) for name, curves in panels if any(len(curve.points) > 1 for curve in curves)]
    if not drawn:
        return None
    last = max(curve.points[-1][0] for _, curves in drawn for curve in curves)
    boundaries = [*zip(_starts(stages), (name for name, _ in stages), strict=True)] if len(stages) > 1 else []
    height = HEIGHT * len(drawn) + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">',
            f"<title>{escape(title)}</title>",
            *(line for i, (name, curves) in enumerate(drawn) for line in _panel(i, name, curves, last, boundaries)),
            "</svg>\n",
        ]
    )


def _starts(stages: List[Stage]) -> list[float]:
    """The number of steps done before each stage."""
    lengths = [float(max((row["step"] for row in rows), default=0)) for _, rows in stages]
    return [0.0, *itertools.accumulate(lengths)][:-1]


def curve_of(name: str, stages: List[Stage]) -> Curve:
    """A metric's points over all stages; steps without a finite value are left out, and of more than `MOST` points the
    means of neighbours are taken."""
    parts: list[tuple[Point, ...]] = []
    for start, (_, rows) in zip(_starts(stages), stages, strict=True):
        values = [(start + row["step"], row.get(name)) for row in rows]
        points = [(float(step), float(x)) for step, x in values if isinstance(x, int | float) and math.isfinite(x)]
        size = math.ceil(len(points) / MOST) or 1
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        parts += [tuple((fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups)] if points else []
    return Curve(name, tuple(parts))


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers in a range, spaced by 1, 2 or 5 times a power of ten; roughly `about` of them."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * float(step), 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _panel(
    index: int, title: str, curves: List[Curve], last: float, boundaries: Iterable[tuple[float, str]]
) -> Iterator[str]:
    """The lines of one panel, `index` panels below the top."""
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or max(abs(high), 1.0) * 0.1  # a flat curve is centred
    low, high = low - margin, high + margin
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(step: float) -> float:
        return LEFT + (right - LEFT) * step / max(last, 1)

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * (value - low) / (high - low)

    yield f'<g transform="translate(0 {index * HEIGHT})">'
    yield f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>'
    for value in ticks(low, high):
        yield f'<path d="M{LEFT} {y(value):.1f}H{right}" stroke="{GREY}" stroke-opacity="0.25"/>'
        yield f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    for step in (tick for tick in ticks(0.0, max(last, 1.0), 8) if tick == int(tick)):
        yield f'<text x="{x(step):.1f}" y="{bottom + 17}" text-anchor="middle">{step:g}</text>'
    for start, name in boundaries:
        yield f'<path d="M{x(start):.1f} {TOP}V{bottom}" stroke="{GREY}" stroke-dasharray="3 3" stroke-opacity="0.7"/>'
        if index == 0:
            yield f'<text x="{x(start) + 4:.1f}" y="{TOP + 10}" font-size="11">{escape(name)}</text>'
    legend = right
    for curve in reversed(curves):
        held_out = curve.name.startswith("eval/")
        colour = COLOURS[held_out]
        for part in curve.parts:
            path = " ".join(f"{x(step):.2f},{y(value):.2f}" for step, value in part)
            style = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"'
            yield f'<polyline points="{path}" {style}/>'
            if held_out or len(part) == 1:  # dots, since what is held out is measured seldom
                for step, value in part if len(part) <= 60 else part[-1:]:
                    yield f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.4" fill="{colour}"/>'
        label = f"{curve.name} {curve.points[-1][1]:.3g}"
        yield f'<text x="{legend}" y="18" text-anchor="end" fill="{colour}">{escape(label)}</text>'
        legend -= LETTER * (len(label) + 2)
    yield "</g>"
