"""The pages are true: their recipes and their Python run as they stand, their commands parse, links lead somewhere.

A page is README.md, a file of docs/, or the README of an algorithm. Its blocks are taken in order, in one folder and
one namespace, as a reader would type them. A block that opens with `# name` is that file, and so is a `json` block with
a title, as eight equal rows. A `py` block is shown and not run: it needs what a test has not. The one thing that is
replaced is the hub id: tests have no network, so a folder stands there.
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import tunix
from tests.package_text import package_text
from tunix.cli import COMMANDS
from tunix.models.families.table import FAMILIES
from tunix.recipe.algorithms import algorithm_config
from tunix.recipe.recipe import Recipe
from tunix.util.yaml_io import parse_yaml

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("tunix/algorithms/*/README.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
HUB_ID = "Qwen/Qwen3-0.6B"
HUB = re.compile(r"Qwen/Qwen3-[0-9.]+B")
"""That, or a teacher's."""
MESSAGE = re.compile(r"^> `(.+)`$", re.MULTILINE)
"""A message that a page quotes, with `…` for what a run fills in."""
REQUIRED = {"model": {"path": HUB_ID}, "data": {"train": "rows.jsonl"}}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    """E.g. `python`; empty where the fence names none."""
    text: str
    """What stands between the fences."""
    title: str | None
    """The file that it is, e.g. `rows.jsonl`; None where it is none."""


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, in order."""
    found = re.findall(r"^```(\w*)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [Block(language, text, title or _named(text)) for language, title, text in found if language in languages]


def _named(text: str) -> str | None:
    """The file that a block is, where its first line says so."""
    name = re.match(r"# ([\w.]+\.(?:py|yaml))\n", text)
    return name[1] if name else None


WORLDS = tuple(
    f"docs/guide/{name}.md" for name in ("reasoning-gym", "textarena", "gymnasium", "serving", "tinker", "harnesses")
)
"""Pages whose Python needs the package of an extra: tests/worlds runs it."""
PYTHON = [page for page in PAGES if any(block.title is None for block in blocks(page, "python"))]
RUN = [page for page in PYTHON if page not in WORLDS]
RECIPES = [(page, block.title) for page in PAGES for block in blocks(page, "yaml") if block.title]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 folder in place of the hub's."""
    words = ["steps=1", "eval.samples=0", f"output={tmp_path_factory.mktemp('small')}/run"]
    export = tunix.train("sft_qwen", words, tiny=True).export
    assert export is not None
    return export


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader of one page is: a folder with the recipes, from which Python imports."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(page: str, folder: Path, model: str = HUB_ID) -> None:
    """Makes the files of a page.

    Args:
        model: what stands in place of the hub id.
    """
    for block in blocks(page, "json", "python", "yaml"):
        if block.language == "json":
            json.loads(block.text)
        if block.title:
            text = block.text * 8 if block.language == "json" else HUB.sub(model, block.text)
            (folder / block.title).write_text(text, encoding="utf-8")


@pytest.mark.filterwarnings("ignore:.*base layer.*:UserWarning")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.models if page == "README.md" else pytest.mark.slow) for page in RUN]
)
def test_the_python_of_a_page_runs(page: str, folder: Path, request: pytest.FixtureRequest):
    python = blocks(page, "python")
    model = str(request.getfixturevalue("small")) if any(HUB_ID in block.text for block in python) else HUB_ID
    write(page, folder, model)
    namespace: dict[str, Any] = {}
    for block in python:
        if block.title is None:
            exec(compile(block.text.replace(HUB_ID, model), page, "exec"), namespace)
    assert namespace.keys() > {"__builtins__"}


def test_every_fence_is_read():
    """A page whose blocks are not found would pass every other test."""
    assert {"README.md", "docs/guide/export.md", "docs/guide/extending.md", "docs/guide/runs.md"} <= set(RUN)
    assert {block.title for block in blocks("README.md", "json")} == {"rows.jsonl", "sums.jsonl", "pairs.jsonl"}
    fences = sum(text.count("\n```") for text in PAGES.values())
    languages = ("", "json", "py", "python", "sh", "yaml")
    assert fences == 2 * sum(len(blocks(page, *languages)) for page in PAGES)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_the_yaml_of_a_page_is_a_recipe_or_its_sections(page: str, folder: Path):
    write(page, folder)
    for block in blocks(page, "yaml"):
        sections = parse_yaml(block.text, page)
        if "model" in sections and {"data", "stages"} & sections.keys():
            assert Recipe.build({"output": "runs/page", **sections}, page).to_yaml()
        else:
            assert [section(name, values) for name, values in sections.items()]


def section(name: str, values: Any) -> Any:
    """One section of a recipe, checked as it is in a recipe; what every recipe has to say may be left out."""
    values = {**REQUIRED[name], **values} if name in REQUIRED else values
    kind: Any = algorithm_config(values) if name == "algorithm" else Recipe.model_fields[name].annotation
    return TypeAdapter(kind).validate_python(values)


@pytest.mark.parametrize("page", PAGES)
def test_the_sections_within_a_page_s_sentences_are_ours(page: str, folder: Path):
    write(page, folder)
    write("README.md", folder)
    named = "|".join(Recipe.model_fields)
    for name, values in re.findall(rf"`({named}): (\{{(?:(?!\.\.\.)[^`])+\}})`", PAGES[page]):
        if name != "algorithm" or "name:" in values or "preset:" in values:
            assert section(name, parse_yaml(values, page)) is not None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")])
def test_the_commands_of_a_page_parse(page: str):
    lines = [shlex.split(line, comments=True) for block in blocks(page, "sh") for line in block.text.splitlines()]
    called = [words for program, *words in filter(None, lines) if program == "tunix"]
    for words in called:
        assert COMMANDS[words[0]].parsed(words[0], words[1:])
    assert called or page in ("docs/kernels.md", "docs/devices/README.md")  # whose commands are a benchmark's


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), RECIPES)
def test_a_recipe_of_a_page_trains(page: str, name: str, folder: Path, small: Path):
    for rows in ("docs/guide/preferences.md", "README.md", page):  # a page may use the rows that another one shows
        write(rows, folder, str(small))
    shorter = ["data.completion_length=32"] if "completion_length" in (folder / name).read_text() else []
    result = tunix.train(folder / name, ["data.max_length=128", "batch_size=4", *shorter])
    steps = {row["step"]: row["train/loss"] for row in result.metrics if "train/loss" in row}
    assert list(steps) == list(range(1, len(steps) + 1)) != []
    assert all(map(math.isfinite, steps.values()))
    assert any(result.export.iterdir())


@pytest.mark.slow  # tests/algorithms/test_subclass.py trains by the same class
def test_the_readme_s_rewards_and_its_grpo_run(folder: Path, small: Path):
    write("README.md", folder, str(small))
    result = tunix.train("by_reward.yaml", ["algorithm.name=my_grpo.py:MyGRPO"])
    assert [row["step"] for row in result.metrics] == [1, 2]  # one epoch of eight rows, four at a time
    for row in result.metrics:
        assert 0 <= row["reward/short"] <= 1
        assert row["reward/failed"] == 0
        assert row["loss/entropy"] == pytest.approx(-0.001 * row["policy/entropy"], rel=1e-5)
    assert (result.folder / "curves.svg").is_file()


@pytest.mark.slow
def test_the_readme_s_preferences_run(folder: Path, small: Path):
    write("README.md", folder, str(small))
    result = tunix.train("by_preference.yaml", ["batch_size=4"])
    assert [row["step"] for row in result.metrics] == [1, 2]  # one epoch of eight rows, four at a time
    # The margin of two equal models is 0 in bfloat16 too: -log sigmoid(0) = ln 2.
    assert result.metrics[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert {"rewards/accuracy", "rewards/margin"} <= result.metrics[0].keys()


def test_every_command_has_its_line():
    assert all(re.search(rf"^\| `tunix {name}[ `]", PAGES["docs/guide/commands.md"], re.M) for name in COMMANDS)


def test_every_recipe_is_in_the_table():
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert f"| [{path.stem}](../../recipes/{path.name}) |" in PAGES["docs/guide/recipes.md"]


def test_every_model_type_is_in_the_table_of_models():
    rows = re.findall(r"^\|[^|`]+\|([^|]+)\|", PAGES["docs/guide/models.md"], re.MULTILINE)
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(named) == sorted(kind for family in FAMILIES.values() for kind in family.model_types)


def test_the_readme_is_the_map_and_leads_to_every_page():
    assert len(PAGES["README.md"].splitlines()) < 200
    missing = [page for page in PAGES if page.startswith("docs/guide/") and f"({page}" not in PAGES["README.md"]]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]) if not link.startswith(("http", "#"))]
    broken = [link for link in links if not ((ROOT / page).parent / link.partition("#")[0]).exists()]
    assert not broken
    assert not re.search(r"\bQ[A-Z]{4,}\b|SCREEN", PAGES[page]), "a number was never filled in"


def test_every_entry_of_the_log_has_its_verdict_in_the_index():
    entries = [
        f"log/{Path(page).name}#{re.sub(r'[^a-z0-9_ -]', '', heading.lower()).replace(' ', '-')}"
        for page in PAGES
        if page.startswith("docs/log/")
        for heading in re.findall(r"^## (.+)$", PAGES[page], re.MULTILINE)
    ]
    assert len(entries) > 90
    assert sorted(re.findall(r"\]\((log/[^)]+#[^)]+)\)", PAGES["docs/log.md"])) == sorted(entries)


@pytest.mark.parametrize("name", ["step", "step_rl"])
def test_a_drawing_of_a_step_names_files_that_are_there(name: str):
    shown = " ".join(re.findall(r">([^<]+)<", (ROOT / f"docs/{name}.svg").read_text(encoding="utf-8")))
    files = re.findall(r"\b(?:[a-z_]+/)+(?:[a-z_]+\.py)?", shown)
    assert len(files) >= 10
    assert [file for file in files if not (ROOT / "tunix" / file).exists()] == []


OPENING = ("json", "yaml", "sh")
ALGORITHMS = sorted(page for page in PAGES if page.startswith("tunix/algorithms/"))


@pytest.mark.parametrize("page", ALGORITHMS)
def test_an_algorithm_s_page_opens_with_a_recipe_that_loads_and_becomes_tiny(page: str, folder: Path):
    """And the rows that it reads are shown beside it, and the commands that run it."""
    write(page, folder)
    opening = PAGES[page].partition("\n## ")[0]
    rows, recipe, commands = (re.search(rf"^```{language}.*?^```$", opening, re.M | re.S) for language in OPENING)
    assert rows is not None
    assert recipe is not None
    assert commands is not None
    name = Path(page).parent.name
    assert commands[0].splitlines()[1].split()[:4] == ["tunix", "run", f"{name}.yaml", "--tiny"]
    whole = Recipe.load(folder / f"{name}.yaml")
    assert whole.algorithm.name == name
    assert Path(whole.data.train).name in rows[0]
    assert Recipe.load(folder / f"{name}.yaml", tiny=True).model.init == "random"


@pytest.mark.parametrize("page", [page for page in PAGES if MESSAGE.search(PAGES[page])])
def test_a_quoted_message_is_still_printed(page: str):
    gone = [
        (message, part)
        for message in MESSAGE.findall(PAGES[page])
        for part in map(str.strip, message.split("…"))
        if part and part not in package_text()
    ]
    assert not gone


def test_a_changed_message_would_be_found():
    assert len(MESSAGE.findall(PAGES["docs/guide/troubleshooting.md"])) > 20
    assert "nothing in it can be trained on: " in package_text()
    assert "nothing of it can be trained on: " not in package_text()


def test_times_are_those_of_the_recipes():
    """The table of recipes has the time of each one's header, and the choice of an algorithm that of the table."""
    times = dict(re.findall(r"^\| \[(\w+)\]\([^|]*\|[^|]*\|[^|]*\| ([^|]*) \|", PAGES["docs/guide/recipes.md"], re.M))
    assert times.keys() == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    for name, time in times.items():
        header = re.search(r"^# Time +(.*\n(?:#            .*\n)*)", (ROOT / f"recipes/{name}.yaml").read_text(), re.M)
        assert header is not None
        assert time in " ".join(header[1].replace("#", "").split()), name
    chosen = re.findall(r"\| \[(\w+)\]\([^|]*\.yaml\) \| ([^|]*) \|$", PAGES["docs/guide/choosing.md"], re.M)
    assert len(chosen) >= 10
    assert [(name, time) for name, time in chosen if not time.startswith(times[name])] == []


def test_what_was_measured_comes_first():
    measured, _, planned = PAGES["docs/guide/recipes.md"].partition("\n## Planned")
    assert re.findall(r"^\| \[(\w+)\]", measured, re.M) == ["quickstart", "sft_pydoc", "dpo_pydoc"]
    assert "GiB" not in measured
    assert planned.count("GiB") == planned.count(".yaml)")
