"""Recipes with mistakes of any kind: what comes out is a recipe, or messages of a length that can be read."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tunix.config import Config
from tunix.errors import LONGEST_LINE, UserError
from tunix.recipe.algorithms import ALGORITHMS
from tunix.recipe.recipe import Recipe
from tunix.recipe.sections import Sections
from tunix.util.yaml_io import ALIKE, read_mapping

RECIPES = {file.stem: read_mapping(file) for file in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))}
BASE = {"model": {"path": "google/gemma-3-1b-it"}, "data": {"train": "rows.jsonl"}, "output": "runs/x"}
LONG = "x" * 5000
VALUES = [
    *(None, True, False, 0, -1, 1, 2, 10**30, 0.5, -0.5, 1e308, float("inf"), float("nan"), b"x", (1, 2)),
    *("", "x", LONG, LONG + ".jsonl", LONG + ".py:f", "a/" * 3000, "word " * 1000, "line\n" * 1000, "half \ud800"),
    *("zero\0byte", "~nobody/x", "a:b", "file.py:X", "tunix.nothing:X", "gs://x", "s3://" + LONG, "1e5", "auto"),
    *(
        [],
        ["x"],
        [LONG],
        [[]],
        [{}],
        [None],
        [1, 2],
        [LONG] * 50,
        list(range(1000)),
        [{"module": ["x"], "weights": {}}],
    ),
    *({}, {"x": 1}, {"name": "x"}, {LONG: 1}, {1: 2}, {None: 1}, {"name": []}, {"name": {}}, {"name": LONG}),
    {f"k{i}": i for i in range(200)},
]
KEYS = {
    **{name: [name] for name in Sections.model_fields},
    **{
        name: [field.alias or key for key, field in kind.model_fields.items()]
        for name, section in Sections.model_fields.items()
        for kind in (section.annotation, *getattr(section.annotation, "__args__", ()))
        if isinstance(kind, type) and issubclass(kind, Config)
    },
    "algorithm": sorted({key for config, _ in ALGORITHMS.values() for key in config.model_fields}),
}


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values below a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutated(rng: random.Random) -> dict[str, Any]:
    """A shipped recipe of which a value is another, a key another key, or left out; or with one more key."""
    tree = {"output": "runs/x", **copy.deepcopy(rng.choice(list(RECIPES.values())))}
    for _ in range(rng.choice([1, 1, 2])):
        *path, key = rng.choice(list(places(tree)))
        place: Any = tree
        for part in path:
            place = place[part]
        match rng.randrange(8):
            case 0 if isinstance(place, dict):
                place[rng.choice(["x", LONG, 1, None, "nme", ""])] = place.pop(key)
            case 1:
                del place[key]
            case 2 | 3 | 4:
                name = rng.choice(list(KEYS))
                if not isinstance(tree.get(name), dict):
                    tree[name] = {}
                tree[name][rng.choice(KEYS[name])] = rng.choice(VALUES)
            case 5:
                stages = [{}, {rng.choice(["algorithm", "data", "model", "eval"]): rng.choice(VALUES)}]
                tree["stages"] = rng.choice([rng.choice(VALUES), stages])
            case _:
                place[key] = rng.choice(VALUES)
    return tree


def test_a_mistake_of_any_kind_is_a_message_and_no_traceback():
    rng = random.Random(0)
    outcomes = {"recipe": 0, "messages": 0}
    for _ in range(300):
        try:
            recipe = Recipe.build(mutated(rng))
            recipe.tiny().to_yaml()
            outcomes["recipe"] += 1
        except UserError as error:
            lines = str(error).splitlines()
            assert max(map(len, lines)) <= LONGEST_LINE
            assert len(lines) <= 4 * ALIKE, lines  # two mistakes, in two stages at most
            outcomes["messages"] += 1
    assert min(outcomes.values()) > 10


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("algorithm", {"name": "dpo", "loss": ["sigmoid"]}, r'algorithm.loss: \["sigmoid"\] is neither .* a mapping'),
        ("algorithm", {"name": "dpo", "loss": {"simpo": 1}}, "algorithm.loss.simpo: 'simpo' is not one of"),
        ("algorithm", {"name": "dpo", "loss": {"sigmoid": [1]}}, r"algorithm.loss.sigmoid: \[1\]"),
        (
            "quantization",
            {"rules": [{"module": "q_proj", "weights": {}}]},
            r"quantization.rules.0.weights: \{\} is not",
        ),
        (
            "quantization",
            {"rules": [{"module": "q_proj", "weights": ["int8"]}]},
            "quantization.rules.0.weights: .* is not",
        ),
        (
            "model",
            {"path": LONG},
            r"model.path: 'x+\.\.\.x+' is no path: a name in it has 5000 bytes, and may have 255",
        ),
        ("data", {"train": LONG + ".jsonl"}, "data.train: .* is no path: a name in it has 5006 bytes"),
        ("data", {"train": "a/" * 3000}, "data.train: .* is no path: it has 6000 bytes, and may have 4095"),
        ("data", {"train": "zero\0byte"}, r"data.train: 'zero\\x00byte' is no path: it has a zero byte"),
        ("model", {"path": "~nobody-of-this-name/m"}, "model.path: .* there is no such user's folder; ~/ is that of"),
        ("algorithm", {"name": LONG + ".py:A"}, "algorithm: x+.*: there is no file x+"),
    ],
)
def test_values_that_were_tracebacks_are_named(section: str, value: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        Recipe.build({**BASE, section: value}).tiny()


def test_the_middle_of_long_words_and_lines_is_left_out():
    """240 characters of a word and 600 of a line, of which three are dots: 118 and 298 at each end."""
    assert str(UserError(f"steps: '{'x' * 300}' is not a number")) == (
        f"steps: '{'x' * 117}...{'x' * 117}' is not a number"
    )
    words = "ab " * 400
    assert str(UserError(f"{words}\nsecond")) == f"{words[:298]}...{words[-298:]}\nsecond"
    assert str(UserError(f"{'y' * 240} {'ab ' * 100}")) == f"{'y' * 240} {'ab ' * 100}"  # short enough
    nested = UserError(f"file: {UserError('z' * 999)}")
    assert str(nested) == f"file: {'z' * 118}...{'z' * 118}"


def test_of_many_alike_mistakes_the_first_are_named_and_the_others_counted():
    with pytest.raises(UserError) as caught:
        Recipe.build({**BASE, "adapter": {"also": list(range(1000))}, "eval": {f"k{i}": i for i in range(50)}})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines if "also.3" in line] == [" adapter.also.3"]
    assert lines[-2:] == ["recipe: eval: and 40 more like it", "recipe: adapter.also: and 990 more like it"]
    assert len(lines) == 22
