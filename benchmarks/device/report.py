"""What was found as one JSON file and one Markdown page, written anew after each case of a part.

Predictions are rooflines: the FLOPs and bytes of a program over the device's published peaks or, where none are known,
over those that were measured.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.device.parts import PARTS
from benchmarks.device.rows import Machine, Row
from tunix.util.atomic_io import write_text_atomic

GIGA = 2**30


@dataclass
class Report:
    """What one call of the command found, by part."""

    machine: Machine
    small: bool
    """Whether shapes were small."""
    minutes: float
    """The time that was given."""
    begun: datetime = field(default_factory=lambda: datetime.now(UTC))
    rows: list[tuple[str, Row]] = field(default_factory=list)
    """(part, row), as they came."""
    took: dict[str, float] = field(default_factory=dict)
    """Seconds of each case that has ended."""

    @property
    def ordered(self) -> list[tuple[str, Row]]:
        """The rows in the order of the parts."""
        order = list(PARTS)
        return sorted(self.rows, key=lambda found: order.index(found[0]))

    @property
    def name(self) -> str:
        """Of its files: the device and the day, e.g. `nvidia-h200-2026-11-23`."""
        kind = re.sub(r"[^a-z0-9]+", "-", self.machine.kind.lower()).strip("-")
        return f"{kind}-{self.begun:%Y-%m-%d}"

    @property
    def peaks(self) -> tuple[float, float] | None:
        """FLOPs and bytes a second by which rows are predicted; None where nobody knows them."""
        measured = [row for part, row in self.rows if part == "peaks" and row.seconds]
        flops = [row.flops / row.seconds for row in measured if row.flops and row.seconds]
        moved = [row.work[0].bytes / row.seconds for row in measured if not row.flops and row.seconds]
        both = self.machine.flops or next(iter(flops), None), self.machine.bandwidth or next(iter(moved), None)
        return None if both[0] is None or both[1] is None else (both[0], both[1])

    def predicted(self, row: Row) -> float | None:
        """The least seconds of a row."""
        return sum(one.seconds(*self.peaks) for one in row.work) if self.peaks and row.work else None

    def mfu(self, row: Row) -> float | None:
        """The share of the peak that the model's own FLOPs are."""
        return row.flops / row.seconds / self.peaks[0] if self.peaks and row.flops and row.seconds else None

    def write(self, folder: Path) -> None:
        """Replaces both files.

        Raises:
            UserError: the disk refuses.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(folder / f"{self.name}.json", json.dumps(self.record(), indent=1) + "\n")
        write_text_atomic(folder / f"{self.name}.md", self.page())

    def record(self) -> dict:
        """The content of the JSON file."""
        rows = [
            {"part": part, **asdict(row), "predicted_seconds": self.predicted(row), "mfu": self.mfu(row)}
            for part, row in self.ordered
        ]
        about = {"begun": self.begun.isoformat(timespec="seconds"), "minutes": self.minutes, "small": self.small}
        peaks = dict(zip(("flops", "bandwidth"), self.peaks, strict=True)) if self.peaks else None
        return {**about, "machine": asdict(self.machine), "peaks": peaks, "took": self.took, "rows": rows}

    def page(self) -> str:
        """The content of the Markdown file."""
        one = self.machine
        versions = ", ".join(f"{name} {number}" for name, number in one.versions.items())
        memory = f", {one.memory / GIGA:.0f} GiB for JAX" if one.memory else ""
        lines = [
            f"# {one.kind}, {self.begun:%Y-%m-%d}",
            "",
            f"`python -m benchmarks.device --minutes {self.minutes:g}`"
            f"{' with small shapes, which say nothing about a large model' if self.small else ''}; "
            f"{one.number} x {one.kind}{memory}; {versions}. Medians of the turns. {self._by()}",
            "",
            *self._speeds(),
            "",
            *self._checks(),
            *self._profiles(),
        ]
        return "\n".join(lines) + "\n"

    def _by(self) -> str:
        """A sentence about the peaks."""
        if self.peaks is None:
            return "No peaks are known, so nothing is predicted."
        told = ["published" if known else "measured" for known in (self.machine.flops, self.machine.bandwidth)]
        flops, bandwidth = self.peaks
        return (
            f"Predictions are rooflines by {flops / 1e12:.3g} TFLOP/s ({told[0]}) and {bandwidth / 1e9:.4g} GB/s "
            f"({told[1]}); a program's bytes are those that its instructions move."
        )

    def _speeds(self) -> Iterator[str]:
        yield "| what | time | predicted | tokens/s | TFLOP/s | MFU | peak GiB (compiler's) | notes |"
        yield "|---|---|---|---|---|---|---|---|"
        for part, row in self.ordered:
            if PARTS[part].measures:
                yield f"| {' | '.join(_cell(x) for x in self._speed(row))} |"

    def _speed(self, row: Row) -> list[str]:
        if row.seconds is None:
            return [row.name, row.status, "", "", "", "", "", row.message]
        least, mfu = self.predicted(row), self.mfu(row)
        planned = f" ({row.planned_memory / GIGA:.3g})" if row.planned_memory else ""
        moved = sum(one.bytes for one in row.work) / row.seconds / 1e9
        rate = f"{row.flops / row.seconds / 1e12:.3g}" if row.flops else f"{moved:.4g} GB/s"
        return [
            row.name,
            _time(row.seconds),
            _time(least) if least else "",
            f"{row.tokens / row.seconds:,.0f}" if row.tokens else "",
            rate,
            f"{mfu:.1%}" if mfu else "",
            f"{(row.memory or 0) / GIGA:.3g}{planned}",
            f"{row.message}{'; ' if row.message else ''}{row.turns} turns",
        ]

    def _checks(self) -> Iterator[str]:
        yield "| check | result | found | limit | notes |"
        yield "|---|---|---|---|---|"
        for part, row in self.ordered:
            if not PARTS[part].measures:
                numbers = ["" if x is None else f"{x:.2g}" for x in (row.difference, row.limit)]
                cells = [f"{part}: {row.name}", row.status, *numbers, row.message]
                yield f"| {' | '.join(_cell(x) for x in cells)} |"

    def _profiles(self) -> Iterator[str]:
        """Where the device's time went in a turn of each row that was profiled."""
        for _, row in self.ordered:
            if row.profile is not None:
                yield from ("", f"## {row.name}", "")
                yield f"{row.profile.launches:,.0f} launches a turn, busy {row.profile.busy:.0%} of the time."
                yield from ("", "| kernel | ms | launches |", "|---|---|---|")
                for name, seconds, launches in row.profile.kernels:
                    yield f"| {_cell(name[:100])} | {seconds * 1e3:.3f} | {launches:,.0f} |"


def _cell(text: str) -> str:
    """Text that ends no cell of a table and opens no tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
