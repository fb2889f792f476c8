"""How files of the repository become pages of the site, and links between them links between pages.

A page that belongs beside its code stays there: the READMEs of the algorithms, the notebooks, the changelog. The site
takes them in under another address (`site_path`), so that every link is rewritten from where its file lies to where its
page lies (`relinked`). A link to a file that is no page, such as `tunix/types.py`, leads to a page that shows the file.
Nothing here needs mkdocs; `hooks.py` hands it over.
"""

import json
import os.path
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[1]
ALGORITHMS = sorted(path.parent.name for path in (ROOT / "tunix/algorithms").glob("*/README.md"))
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
SITE_PATHS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    **{f"tunix/algorithms/{name}/README.md": f"algorithms/{name}.md" for name in ALGORITHMS},
    **{f"notebooks/{name}.ipynb": f"notebooks/{name}.md" for name in NOTEBOOKS},
}
"""Files outside of docs/ that are pages of their own."""

_FENCE = re.compile(r"(^```.*?^```\s*?$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
_HIDDEN = "---\nsearch: {exclude: true}\n---\n"


def site_path(path: str) -> str:
    """Where the site has a file of the repository, as a source path of mkdocs: `docs/recipe.md` -> `recipe.md`."""
    return SITE_PATHS.get(path) or (path[5:] if path.startswith("docs/") else f"source/{path.removesuffix('.md')}.md")


def page_text(path: str) -> str:
    """The Markdown of a file that lies outside of docs/."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        return notebook_text(json.loads(text))
    if path.endswith(".md"):
        return text
    fence = "`" * 4
    return f"{_HIDDEN}# `{path}`\n\n{fence}{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text}{fence}\n"


def links(text: str, path: str) -> Iterator[str]:
    """The files of the repository that a page links to.

    Args:
        path: the page's own file.
    """
    for part in _FENCE.split(text)[::2]:
        for target, _ in _LINK.findall(part):
            yield normpath(join(dirname(path), target))


def outside_pages(inside: dict[str, str]) -> dict[str, str]:
    """File -> Markdown of each page whose file lies outside of docs/: those of `SITE_PATHS`, and whatever is linked.

    Args:
        inside: file -> Markdown of the pages in docs/.
    """
    pages = {path: page_text(path) for path in SITE_PATHS}
    waiting = [*inside.items(), *pages.items()]
    while waiting:
        path, text = waiting.pop()
        for target in links(text, path):
            if not target.startswith(("docs/", "..")) and target not in pages and (ROOT / target).is_file():
                pages[target] = page_text(target)
                if target.endswith(".md"):
                    waiting.append((target, pages[target]))
    return pages


def relinked(text: str, path: str) -> str:
    """A page with its links as the site needs them. A link that leads nowhere stays, so that the build refuses it.

    Args:
        path: the page's own file.
    """
    here = dirname(site_path(path))

    def rewritten(link: re.Match[str]) -> str:
        target = normpath(join(dirname(path), link[1]))
        if target.startswith("..") or not os.path.isfile(ROOT / target):
            return link[0]
        return relpath(site_path(target), here or ".") + (link[2] or "")

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts)


def notebook_text(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its text, its code, and the outputs that are stored in it."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = _joined(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += filter(None, map(_output_text, cell.get("outputs", ())))
    return "\n\n".join(parts) + "\n"


def _output_text(output: dict[str, Any]) -> str:
    """One output as Markdown; the richest form that it has."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    for kind, shown in _SHOWN.items():
        if kind in data:
            return shown(_joined(data[kind]))
    return ""


def _joined(text: str | list[str]) -> str:
    """Notebooks hold texts whole or as lists of lines."""
    return text if isinstance(text, str) else "".join(text)


def _image(kind: str) -> Callable[[str], str]:
    return lambda base64: (
        f'<img class="output" alt="what the code above draws" src="data:{kind};base64,{base64.strip()}">'
    )


def _svg(text: str) -> str:
    """A drawing within the page; a blank line would end it as far as Markdown is concerned."""
    lines = filter(str.strip, text[text.index("<svg") :].splitlines())
    return '<div class="output">' + "\n".join(lines) + "</div>"


_SHOWN: dict[str, Callable[[str], str]] = {
    "image/svg+xml": _svg,
    "image/png": _image("image/png"),
    "text/markdown": str.strip,
    "text/plain": lambda text: f"```{{.text .output}}\n{text.rstrip()}\n```" if text.strip() else "",
}
"""How each kind of output is shown, the richest first."""
