"""What pages and notebooks store of a screen is what runs print today.

The quickstart's page is compared with a short run of the same recipe, line by line, numbers left out. A notebook's
outputs are compared with the text of the package, since a run in a notebook takes minutes; `make test-slow` runs them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import nbformat
import pytest

from notebooks.execute import NOTEBOOKS, ROOT
from tests.marks import QUICKLY
from tests.package_text import package_text
from tests.test_notebooks import small
from tunix.recipe.recipe import Recipe
from tunix.run.opening import opened

QUICKSTART = ROOT / "docs/guide/quickstart.md"


def shape(line: str) -> str:
    """A printed line without what differs between two runs: numbers, their units, answers, curves and folders.

    >>> shape("step 36/90  ▁▂█  reward 0.5684  loss -0.0004  5.55k tokens/s")
    'step #/# reward # loss # # tokens/s'
    >>> shape("      answers: 'elotuv'")
    'answers: …'
    """
    line = re.sub(r"[▁▂▃▄▅▆▇█]+", "", line)
    line = re.sub(r"\S*runs?/[\w./-]*|/\S+/\S+", "PATH", line)
    line = re.sub(r"(answers|expected): .*", r"\1: …", line)
    line = re.sub(r"\S+ is (\S+: the run has reached)", r"METRIC is \1", line)
    line = re.sub(r"\b[a-z]{6}>", "PROBLEM", line)
    line = re.sub(r"-?\d[\d,]*(\.\d+)?(e-?\d+)?[kMGB]?\b", "#", line)
    return " ".join(line.split())


def stored_screen() -> list[str]:
    """The lines of the quickstart's page, without its marks for what was left out."""
    section = QUICKSTART.read_text().partition("## What the screen shows\n")[2].partition("\n## ")[0]
    *_, block = re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return [line for line in block.splitlines() if line != "..."]


@pytest.mark.slow
def test_the_quickstart_s_page_shows_what_is_printed(tmp_path: Path):
    """A short run of the same recipe, smaller, which ends its first stage early as the page's does.

    The page leaves lines out, so that it need not have all.
    """
    namespace: dict[str, list[str]] = {}
    exec(small(f'"output={tmp_path / "runs/quickstart"}"', "", sft=4), namespace)
    # Random weights are above 6.3, and four steps at this rate below it.
    ends = "stages.0.eval.until={eval/loss: 6.3}"
    command = [sys.executable, "-m", "tunix.cli", "run", "recipes/quickstart.yaml", *namespace["overrides"], ends]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": QUICKLY}
    done = subprocess.run([*command, "--no-plan"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = {shape(line) for line in done.stderr.splitlines()}
    stored = {shape(line) for line in stored_screen()}
    assert len(stored) > 10
    assert sorted(stored - printed) == [], "no longer printed: update docs/guide/quickstart.md"


def test_a_line_that_is_no_longer_printed_would_be_found():
    assert shape("done in 37.9 s: runs/quickstart/0_sft") == shape("done in 2 s: /a/runs/quickstart/0_sft")
    assert shape("done in 37.9 s: runs/a") != shape("finished after 37.9 s: runs/a")
    assert shape("step 0: eval/loss 6.5801  eval/reward 0.0000") == "step #: eval/loss # eval/reward #"


def phrases(line: str) -> list[str]:
    """The runs of two words and more in a printed line: what the package has as text, between the values."""
    return re.findall(r"\b[a-z][a-z-]+(?: [a-z][a-z-]+)+\b", re.sub(r"\S*[/=]\S*|\w+\.\S+|'.*'", "|", line))


def known(phrase: str) -> bool:
    """Whether the package has a phrase, or one of three words and more in two parts: `compiling {what}`."""
    words = phrase.split(" ")
    parts = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words) if len(words) > 2 else 1)]
    return phrase in package_text() or any(
        first in package_text() and second in package_text() for first, second in parts
    )


def stale(lines: Iterable[str]) -> set[str]:
    """The phrases of stored lines that the package no longer has."""
    return {phrase for line in lines for phrase in phrases(line) if not known(phrase)}


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=lambda path: path.stem)
def test_what_a_notebook_stores_of_a_run_is_text_of_the_package(path: Path):
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    runs = [output.text for output in outputs if re.search(r"^done: ", output.get("text", ""), re.M)]
    lines = {line for text in runs for line in text.splitlines()}
    assert lines
    assert not stale(lines), f"printed otherwise now: make notebooks ARGS={path.stem[:2]}"


def test_what_the_quickstart_s_page_shows_is_text_of_the_package():
    assert not stale(stored_screen()), "printed otherwise now: update docs/guide/quickstart.md"


def test_a_stale_phrase_would_be_found():
    assert phrases("gemma: 829k weights train; 4k rows, 400 steps; 1 x cpu") == ["weights train"]
    assert phrases("all weights trained on tunix.data.pydoc:pairs; 1 CPU") == ["all weights trained on"]
    assert stale(["held-out loss 6.580 -> 0.621 nats per token (perplexity 1.86)", "compiling the sampler"]) == set()
    assert stale(["held-out loss 6.580 -> 0.621 nits per word"]) == {"nits per word"}


def test_a_notebook_s_run_begins_as_runs_do_today():
    """But for the devices, of which there are others here."""
    cells = nbformat.read(NOTEBOOKS["01"], as_version=4).cells
    text = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", ()))
    _, line = opened(ROOT / "recipes/quickstart.yaml", ["output=runs/first_run"], tiny=False, alone=True)
    what, _, where = line.split("; ")
    assert re.search(rf"^{re.escape(what)}; \d+ CPU.*; {re.escape(where)}$", text, re.M), "make notebooks ARGS=01"


def test_a_notebook_s_recipe_is_the_recipe_of_today():
    """01 prints the resolved recipe: a new key, or another default, makes its stored text old."""
    (cell,) = (cell for cell in nbformat.read(NOTEBOOKS["01"], as_version=4).cells if cell.id == "recipe")
    today = Recipe.load(ROOT / "recipes/quickstart.yaml", ["output=runs/first_run"]).to_yaml()
    assert cell.outputs[0].text == today + "\n", "make notebooks ARGS=01"
