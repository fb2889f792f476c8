"""The table, on the screen and in `docs/performance.md`."""

import datetime
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.peers.cases import CASES
from benchmarks.peers.run import PEERS, ROOT, Figure, versions
from benchmarks.train import SIDE

PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- table: python -m benchmarks.peers -->", "<!-- end of the table -->"

Figures = Mapping[str, Mapping[str, Figure]]
"""Case -> peer -> its measurements."""


def cell(figure: Figure) -> str:
    """The median of the turns in milliseconds or tokens a second, followed by their range."""
    if not figure.seconds:
        return "failed" if figure.note and figure.note.startswith("ended") else "-"
    values = np.array(figure.seconds)
    shown = figure.tokens / values if figure.tokens else 1e3 * values
    unit = "tok/s" if figure.tokens else "ms"
    return f"{np.median(shown):.0f} {unit} ({shown.min():.0f} to {shown.max():.0f})"


def table(figures: Figures) -> str:
    """Markdown: a row for each case, a column for each peer, the best of a row in bold, and why there are gaps."""
    peers = columns(figures)
    lines = ["| case | " + " | ".join(PEERS[key].title for key in peers) + " |", "|---" * (len(peers) + 1) + "|"]
    notes = []
    for name, row in figures.items():
        known = {key: float(np.median(one.seconds)) / max(one.tokens, 1) for key, one in row.items() if one.seconds}
        best = min(known, key=known.__getitem__) if known else None
        cells = [f"**{cell(row[key])}**" if key == best else cell(row[key]) for key in peers]
        lines.append(f"| {CASES[name].title} | {' | '.join(cells)} |")
        failed = {key: one.note for key, one in row.items() if one.note and cell(one) == "failed"}
        notes += [
            f"* {PEERS[key].title}, {CASES[name].title}: {' '.join(note.split())}" for key, note in failed.items()
        ]
    return "\n".join([*lines, "", *notes] if notes else lines)


def columns(figures: Figures) -> list[str]:
    """The peers that were asked to do some of the work."""
    return [key for key in PEERS if any(cell(row[key]) != "-" for row in figures.values() if key in row)]


def described(figures: Figures, rounds: int) -> str:
    """A paragraph with date, machine and versions."""
    listed = "; ".join(f"{PEERS[key].title}: {versions(PEERS[key])}" for key in columns(figures))
    return (
        f"{datetime.date.today()}, two cores of {processor()}, {peak():.0f} GFLOP/s in float32, Python "
        f"{platform.python_version()}, median of {rounds} turns (lowest and highest). {listed}."
    )


def processor() -> str:
    """Model of this processor, and its widest vector instructions."""
    info = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    widths = [kind for kind in ("avx512f", "avx2") if kind in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.machine())} ({', '.join(widths[:1]) or 'no AVX'})"


def peak() -> float:
    """The best product of two square matrices, GFLOP/s."""
    import time

    import jax
    import jax.numpy as jnp

    square = jnp.ones((SIDE, SIDE))
    product = jax.jit(lambda a: a @ a)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        product(square).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * SIDE**3 / best / 1e9


def write(figures: Figures, rounds: int, page: Path = PAGE) -> None:
    """Puts the table in its place on the page."""
    text = page.read_text("utf-8")
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    page.write_text(f"{before}{BEGIN}\n{described(figures, rounds)}\n\n{table(figures)}\n{END}{after}", "utf-8")


def kept(file: Path) -> dict[str, dict[str, Figure]]:
    """The measurements of earlier calls, so that the table can be made in parts."""
    found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return {name: {key: Figure(**one) for key, one in row.items()} for name, row in found.items()}


def keep(figures: Figures, file: Path) -> None:
    """Saves the measurements with all turns, not medians alone."""
    plain = {name: {key: vars(one) for key, one in row.items()} for name, row in figures.items()}
    file.write_text(json.dumps(plain, indent=1), "utf-8")
