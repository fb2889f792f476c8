"""The site: files of the repository become its pages, and are built without a warning or another host."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from docs import repository
from docs.repository import ROOT, notebook_text, outside_pages, relinked, site_path


def test_a_file_has_one_place_in_the_site():
    assert site_path("README.md") == "index.md"
    assert site_path("docs/guide/data.md") == "guide/data.md"
    assert site_path("tunix/algorithms/grpo/README.md") == "algorithms/grpo.md"
    assert site_path("notebooks/05_qlora.ipynb") == "notebooks/05_qlora.md"
    assert site_path("tunix/types.py") == "source/tunix/types.py.md"
    assert site_path("benchmarks/peers/README.md") == "source/benchmarks/peers/README.md"


def test_links_are_rewritten_from_file_to_page():
    text = "[a](../../../docs/recipe.md#rows) [b](../sft/README.md) [c](https://x.y) [d](#here) [e](../../types.py)"
    found = relinked(text, "tunix/algorithms/grpo/README.md")
    assert found == "[a](../recipe.md#rows) [b](sft.md) [c](https://x.y) [d](#here) [e](../source/tunix/types.py.md)"


def test_links_that_lead_nowhere_and_code_stay():
    for text in ("[a](nowhere.md)", "`x[0](README.md)`", "```python\nx[0](README.md)\n```\n"):
        assert relinked(text, "README.md") == text
    assert relinked("`x` [a](README.md)", "README.md") == "`x` [a](index.md)"


def test_pages_outside_of_docs_are_found():
    pages = outside_pages({"docs/performance.md": "[how](../benchmarks/peers/README.md)"})
    assert pages["benchmarks/peers/README.md"].startswith("# ")
    assert {"README.md", "CHANGELOG.md", "tunix/algorithms/sft/README.md", "tunix/protocols.py"} <= pages.keys()
    assert "class Client(" in pages["tunix/protocols.py"]
    assert not any(path.startswith("docs/") for path in pages)


def test_what_is_linked_has_a_page_and_so_has_what_that_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    monkeypatch.setattr(repository, "SITE_PATHS", {})
    (tmp_path / "a.md").write_text("[b](b.py) [gone](gone.md) [out](../out.md)")
    (tmp_path / "b.py").write_text("b = 1\n")
    pages = outside_pages({"docs/first.md": "[a](../a.md)"})
    assert pages.keys() == {"a.md", "b.py"}
    assert pages["b.py"].endswith("# `b.py`\n\n````python\nb = 1\n````\n")


def test_a_notebook_shows_the_richest_form_of_each_output():
    drawing = '<?xml version="1.0"?>\n<svg>\n\n<g/>\n</svg>\n'
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["one\n", "two\n"]},
        {"output_type": "display_data", "data": {"text/plain": "<SVG>", "image/svg+xml": drawing}},
        {"output_type": "display_data", "data": {"text/plain": "<M>", "text/markdown": ["| a |\n", "|---|"]}},
        {"output_type": "execute_result", "data": {"text/plain": "<P>", "image/png": "iVBO\n"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": "x = 1", "outputs": outputs},
    ]
    assert notebook_text({"cells": cells}).split("\n\n") == [
        "# Title",
        "```python\nx = 1\n```",
        "```{.text .output}\none\ntwo\n```",
        '<div class="output"><svg>\n<g/>\n</svg></div>',
        "| a |\n|---|",
        '<img class="output" alt="what the code above draws" src="data:image/png;base64,iVBO">\n',
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Its tools are installed into an environment of their own, from an index that pip can reach."""
    place = tmp_path_factory.mktemp("site")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    subprocess.run([str(place / "venv/bin/python"), "-m", "pip", "install", "--quiet", *tools], check=True)
    command = [str(place / "venv/bin/mkdocs"), "build", "--strict", "--site-dir", str(place / "built")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place / "built"


@pytest.mark.slow
def test_the_site_is_built_without_warnings(site: Path):
    landing, grpo = ((site / name).read_text() for name in ("index.html", "algorithms/grpo.html"))
    assert "Supervised fine-tuning" in landing
    assert grpo.count("<math") > 40
    assert "arithmatex" not in grpo
    assert '<span class="equation"><math' in grpo  # wide ones within a line scroll
    assert "forward_backward" in (site / "api/protocols.html").read_text()
    assert "<svg" in (site / "notebooks/01_first_run.html").read_text()


@pytest.mark.slow
def test_a_page_fetches_nothing_from_another_host(site: Path):
    pages = list(site.glob("**/*.html"))
    assert len(pages) > 40
    for page in pages:
        fetched = re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(https?:[^\"> ]+)", page.read_text())
        assert not fetched, page
