"""Recipes and overrides as bytes of any kind: a recipe, or a message; and what is written reads back as it was."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.hostile.attack import attack, numbers
from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.util.yaml_io import keys_set, overridden, parse_yaml, without_effect, write_yaml

FINDS: dict[str, tuple[str, str]] = {
    "a tag that the text does not fit": ("seed: !!int x", "recipe:1:7: 'x' cannot be read as int"),
    "a float that is none": ("seed: !!float x", "recipe:1:7: 'x' cannot be read as float"),
    "a switch that is none": ("seed: !!bool maybe", "recipe:1:7: 'maybe' cannot be read as bool"),
    "a day that is none": ("seed: !!timestamp soon", "recipe:1:7: 'soon' cannot be read as timestamp"),
    "a mapping that is a list": ("!!map [a]", "recipe:1:1: expected a mapping node, but found sequence"),
    "a mapping for a key": ("{a: 1}: 2", "recipe:1:1: found unhashable key"),
    "a list for a key": ("? [a]\n: 1", "recipe:1:3: found unhashable key"),
    "a number of 5000 digits": ("seed: " + "9" * 5000, r"recipe:1:7: '9+\.\.\. cannot be read as int"),
    "no letter of Unicode": ('a: "\\U00110000"', r"recipe: not readable as YAML: chr\(\) arg not in range"),
    "no number of C": (
        'a: "\\UFFFFFFFF"',
        "recipe: not readable as YAML: (signed integer is greater|Python int too large|chr)",
    ),
    "a zero byte": ("a: \0", "recipe: not readable as YAML: unacceptable character #x0000"),
    "half a character": ("a: \ud800", "recipe: not readable as YAML: unacceptable character #xd800"),
    "Python's own": ("a: !!python/object/apply:os.mkdir [exploded]", "could not determine a constructor"),
    "twice": ("a: 1\na: 2", "recipe:2:1: key 'a' is given twice; the first is in line 1"),
    "nested": ("[" * 1000, "recipe: not readable as YAML: maximum recursion depth"),
}


@pytest.mark.parametrize(("text", "message"), FINDS.values(), ids=FINDS)
def test_a_text_that_is_no_yaml_is_a_message(text: str, message: str):
    start = time.process_time()
    with pytest.raises(UserError, match=message):
        parse_yaml(text, "recipe")
    assert time.process_time() - start < 5
    assert not os.path.exists("exploded")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.²=1", "'²' names none of the 1 items there"),
        (f"stages.{'9' * 5000}=1", "names none of the 1 items there"),
        ("seed=!!int x", "override 'seed=!!int x':1:1: 'x' cannot be read as int"),
        ("a\udcff=1", "seed|unknown key|an override is written"),
    ],
)
def test_an_override_that_is_none_is_a_message(override: str, message: str):
    with pytest.raises(UserError, match=message):
        Recipe.build(overridden({"stages": [{"algorithm": {"name": "sft"}}]}, [override]))


@pytest.mark.parametrize(
    "text", ["a\x85b", "\u2028", "\u2029x", "\ufeff", "a\nb \n", " \n", "\r", ".inf", "nan", "-.inf", "0_1"]
)
def test_what_is_written_reads_back(text: str):
    """PyYAML writes Unicode's line ends as they are, and reads them as spaces: a stop string would be another one."""
    assert parse_yaml(write_yaml({text: text}), "written") == {text: text}


@pytest.mark.parametrize(("text", "key"), [("?", "null"), ("1: 2", "1"), ("true: {}", "true"), ("a: 1\n1.5: 2", "1.5")])
def test_a_key_that_is_no_text_is_a_message(text: str, key: str, tmp_path: Path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"r\.yaml: {key}: a key is text, as `model:` and `data:` are"):
        Recipe.load(tmp_path / "r.yaml")


def test_an_unknown_key_may_be_any_text():
    """pydantic's paths have parts such as `tuple[str, ...]`, which are left out; a user's own key is not."""
    with pytest.raises(UserError, match=r"x\[y: unknown key; a recipe has"):
        Recipe.build({"x[y": 1})


PIECES = [
    *(
        "model:",
        "data:",
        "{",
        "}",
        "[",
        "]",
        ": ",
        "- ",
        "\n",
        "\n  ",
        "&a ",
        "*a",
        "<<: ",
        "<<: *a",
        "<<: {a: 1}",
        "? ",
    ),
    *(
        "!!python/object/apply:os.mkdir [exploded]",
        "!!timestamp 2001-01-01",
        "!!binary aGk=",
        "!!set {a}",
        "!!omap [a: 1]",
    ),
    *("!!pairs [a: 1]", "!!int x", "!!int 0b1", "!!float 1", "!!bool maybe", "!!null x", "!!str [a]", "!!map [a]"),
    *("!!seq {a: 1}", "? [a]\n: 1", "{a: 1}: 2", "|", "|-\n  x", ">", "'", '"', "\\", '"\\ud800"', '"\\U00110000"'),
    *("%YAML 1.1\n---\n", "---", "...", "\t", "\0", "\ufeff", "2001-01-01", "1e999", "-.inf", ".nan", "0x10", "0o7"),
    *(
        "1_0",
        "9" * 5000,
        "1e5",
        "1_e5",
        "_1",
        "+",
        "-",
        ".",
        "~",
        "null",
        "true",
        "yes",
        "x" * 300,
        "algorithm",
        "name",
    ),
    *("sft", "output: r", "steps", "1", "-1", "#c", "\r", "\x85", "\u2028", "é", "\ud800", "!a", "@", "`", "=", "<<"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
KEYS = [
    *("model", "data", "algorithm.name", "stages", "stages.0.algorithm", "optimizer.learning_rate", "steps", "seed"),
    *(
        "mesh",
        "data.train",
        "logging.wandb",
        "x",
        "stages.0",
        "data.train.0",
        "eval.tasks",
        "stages.٣",
        "stages.²",
        "",
        "..",
    ),
]
OVERRIDES = st.tuples(st.sampled_from(KEYS) | st.text(max_size=6), TEXTS).map("=".join)
BASE = {
    "model": {"path": "google/gemma-3-1b-it"},
    "data": {"train": "r.jsonl"},
    "output": "r",
    "algorithm": {"name": "sft"},
}
STAGES = {**BASE, "stages": [{"algorithm": {"name": "sft"}}]}


def reads(text: str) -> None:
    with suppress(UserError):
        parse_yaml(text, "recipe")


def overrides(case: tuple[dict[str, Any], list[str]]) -> None:
    base, words = case
    try:
        tree = overridden(base, words)
        without_effect(tree, words)
        keys_set(tree, words)
        recipe = Recipe.build(tree)
    except UserError:
        return
    assert Recipe.build(parse_yaml(recipe.to_yaml(), "written")).to_yaml() == recipe.to_yaml()


def loads(content: bytes) -> None:
    Path("r.yaml").write_bytes(content)
    with suppress(UserError):
        Recipe.load(Path("r.yaml"))


def comes_back(tree: dict[str, Any]) -> None:
    assert parse_yaml(write_yaml(tree), "written") == tree


FILES = st.binary(max_size=40) | st.tuples(TEXTS, st.sampled_from(["utf-8", "utf-16", "utf-32"])).map(
    lambda case: case[0].encode(case[1], "surrogatepass")
)
PLAIN = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=20)
TREES = st.dictionaries(
    st.text(max_size=8),
    st.recursive(PLAIN, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3)),
)
PROPERTIES = {
    "texts": (reads, TEXTS),
    "overrides": (overrides, st.tuples(st.sampled_from([BASE, STAGES]), st.lists(OVERRIDES, min_size=1, max_size=3))),
    "files": (loads, FILES),
    "trees": (comes_back, TREES),
}


@numbers
@pytest.mark.parametrize("name", PROPERTIES)
def test_no_bytes_are_a_traceback(name: str, number: int):
    attack(*PROPERTIES[name], number)
    assert not os.path.exists("exploded")
