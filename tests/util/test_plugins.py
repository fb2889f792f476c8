"""docs/recipe.md says what the models say, about every key of every algorithm."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tunix.config import AlgorithmConfig, Config
from tunix.recipe.algorithms import ALGORITHMS
from tunix.recipe.recipe import Recipe

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(reference: ModuleType):
    page = (DOCS / "recipe.md").read_text(encoding="utf-8")
    assert page == reference.text(), "run: python docs/make_reference.py"


def test_every_section_and_every_algorithm_has_its_table(reference: ModuleType):
    described = set(reference.SECTIONS.values())
    inside = {
        kind
        for field in Recipe.model_fields.values()
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
        if isinstance(kind, type) and issubclass(kind, Config)
    }
    assert inside - {Recipe, AlgorithmConfig} <= described
    assert {config for config, _ in ALGORITHMS.values()} <= described


def test_every_link_has_its_heading(reference: ModuleType):
    page = reference.text()
    headings = {reference.anchor(title.strip("`")) for title in re.findall(r"^## (.*)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", page)) <= headings
