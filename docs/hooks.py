"""What the build of the site does besides mkdocs: pages from outside of docs/, links, and equations.

Equations become MathML, which browsers draw by themselves: the site needs no script of another host for them.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from repository import outside_pages, relinked, site_path

_ORIGINS: dict[str, str] = {}
"""Page of the site -> its file in the repository, for those outside of docs/."""
WIDE = 60
"""Characters of LaTeX from which an equation within a line may be wider than a phone."""
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages whose files lie outside of docs/."""
    inside = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for path, text in outside_pages(inside).items():
        _ORIGINS[site_path(path)] = path
        files.append(File.generated(config, site_path(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files become links between pages."""
    return relinked(markdown, _ORIGINS.get(page.file.src_uri, f"docs/{page.file.src_uri}"))


def on_page_content(text: str, **_: Any) -> str:
    """LaTeX becomes MathML."""
    return _EQUATION.sub(_mathml, text)


def _mathml(equation: re.Match[str]) -> str:
    """An equation as browsers draw it; a wide one scrolls by itself."""
    source = html.unescape(equation[2]).strip()
    for pattern, replacement in _BEFORE:
        source = re.sub(pattern, replacement, source)
    block = equation[1] == "div"
    drawn = convert(source, display="block" if block else "inline")
    for pattern, replacement in _AFTER:
        drawn = re.sub(pattern, replacement, drawn)
    if block:
        return f'<div class="equation">{drawn}</div>'
    return f'<span class="equation">{drawn}</span>' if len(source) > WIDE else drawn


_BEFORE = (
    (r"\\texttt\{([^}]*)\}", lambda text: text[0].replace(r"\_", "_")),
    (r"\\lvert", r"\\left|"),
    (r"\\rvert", r"\\right|"),
    (r"\\big(?=[][()])", ""),
)
"""What the converter would take by the letter, or set with the space of a relation around it."""
_AFTER = (
    (r"<msup>(<mi>\w</mi>)<mi>&#x02032;</mi></msup>", r"\1<mo>&#x02032;</mo>"),
    (r"<mi>(log|exp)</mi>(?=<mo)", r'<mo form="prefix" lspace="0.17em" rspace="0">\1</mo>'),
    (r"<mi>(log|exp)</mi>", r'<mo form="prefix" lspace="0.17em" rspace="0.17em">\1</mo>'),
)
"""Primes at their size, and functions by name with the space that TeX sets around them."""
