"""`tunix recipes`: the recipes that tunix brings, a line each from their headers, the measured ones first."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tunix.recipe.notes import read_header


def recipe_lines(files: Mapping[str, Path], width: int | None = None) -> Iterator[str]:
    """Yields the lines that `tunix recipes` prints.

    Args:
        files: the recipes by name.
        width: of a terminal, where longer lines are cut; None for whole lines.
    """
    headers = {name: read_header(file) for name, file in files.items()}
    longest = max(map(len, headers), default=0)
    groups = (
        ("measured, on a laptop:", [name for name, header in headers.items() if header.measured]),
        (
            "for accelerators, not yet measured; each runs on a laptop with --tiny:",
            [name for name, header in headers.items() if not header.measured],
        ),
    )
    for title, names in groups:
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
