"""The first line of a run: what it says of a recipe, by hand, and its counts against the models themselves."""

import itertools
import math
from typing import Any

import pytest

from tests.tiny_runs import write_recipe
from tunix.config import ModelConfig
from tunix.hf.source import adapted
from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig, is_adapter
from tunix.models.families.table import FAMILIES, count_weights, presets, small
from tunix.models.model import Model
from tunix.recipe.recipe import Recipe
from tunix.run.opening import NAMES, opened, opening, people_count

MODELS = {**{family: small(family) for family in FAMILIES}, **presets()}
EXPERTS = ("qwen3_5_moe", "qwen3_moe", "gpt_oss", "mixtral")


@pytest.fixture(autouse=True)
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_weights_of_every_size_are_those_of_the_model(config: DecoderConfig):
    shapes = Model(config).shapes
    assert count_weights(config) == {name: math.prod(shape) for name, shape in shapes.items()}


CHANGES = [{"dora": True}, {"ranks": {"q_proj": 3}}, {"also": ["embed_tokens", "lm_head"]}]


@pytest.mark.parametrize(
    ("family", "changes"),
    [*itertools.product(FAMILIES, [{}]), *itertools.product(["gemma4", "qwen3_moe"], CHANGES)],
    ids=str,
)
def test_the_weights_of_an_adapter_are_those_that_train(family: str, changes: dict[str, Any]):
    if family in EXPERTS:
        targets = ["q_proj", "o_proj", "experts.*"] if "dora" not in changes else ["q_proj"]
        changes = {"targets": targets, **changes}
    config, adapter = small(family), AdapterConfig.model_validate({"rank": 2, **changes})
    shapes = adapted(config, ModelConfig(init="random", family=config.family), adapter).shapes
    trained = {name for name in shapes if is_adapter(name)} | {*adapter.tables_in(config)}
    assert adapter.count_weights(config) == sum(math.prod(shapes[name]) for name in trained)


def test_every_family_has_a_name():
    assert NAMES.keys() == FAMILIES.keys()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (829_000, "0.8M"),
        (94_500, "94.5k"),
        (268_098_176, "268M"),
        (596_049_920, "596M"),
        (999_885_952, "1.0B"),
        (70_553_706_496, "70.6B"),
        (235_093_634_560, "235B"),
    ],
)
def test_numbers_are_said_as_people_say_them(number: int, words: str):
    assert people_count(number) == words


def test_the_quickstart_is_described():
    # 320 x 128 + 4 layers of (128 x 32 x (2 x 4 + 2 x 2) + 3 x 128 x 384 + 2 x 128) + 128 = 829,568.
    line = "Gemma, 0.8M weights, all trained on 4,000 rows; 1 CPU; runs/quickstart"
    assert opening(Recipe.load("quickstart")) == line


def described(tmp_path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> str:
    monkeypatch.chdir(tmp_path)
    return opening(Recipe.load(write_recipe(tmp_path / "r.yaml", changes)))


# 2 layers of 32 x 8 x (2 x 4 + 2 x 2) + 3 x 32 x 64 + 2 x 32, 272 x 32 + 32: 27,296 weights. Rank 4 adds to each layer
# 4 x (32 + 32) x 2 + 4 x (32 + 16) x 2 + 4 x (32 + 64) x 3 = 2,048.
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "Llama, 27.3k weights, all trained on 32 rows; 1 CPU; run"),
        ({"adapter": {"rank": 4}}, "Llama, 4.1k of 27.3k weights trained on 32 rows; 1 CPU; run"),
        ({"data.train": "some/rows"}, "Llama, 27.3k weights, all trained on some/rows; 1 CPU; run"),
        (
            {"model": {"path": "google/gemma-3-1b-it"}},
            "gemma-3-1b-it, all weights trained on 32 rows; 1 CPU; run",
        ),
        (
            {"model": {"path": "google/gemma-3-1b-it"}, "adapter": {"rank": 4}},
            "gemma-3-1b-it, an adapter of rank 4 trained on 32 rows; 1 CPU; run",
        ),
    ],
    ids=str,
)
def test_a_recipe_is_described(changes: dict[str, Any], line: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    assert described(tmp_path, monkeypatch, changes) == line


def test_devices_are_left_out_where_jax_has_to_be_asked(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tunix.run.opening.accelerated", lambda: True)
    assert described(tmp_path, monkeypatch, {}) == "Llama, 27.3k weights, all trained on 32 rows; run"


def test_a_toy_run_says_what_is_toy():
    recipe, line = opened("sft_gemma", (), tiny=True, alone=True)
    assert line.startswith("toy (model: a random gemma3 of two layers, rows: 64 generated chats): Gemma 3, ")
    assert line == opening(recipe, tiny=True)


def test_a_recipe_for_an_accelerator_says_so_on_a_laptop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tunix.recipe.notes.accelerated", lambda: False)
    first, note = opened("sft_gemma", (), tiny=False, alone=True)[1].split("\n")
    assert "gemma-3-1b-it" in first
    assert note.startswith("note: ")
    assert "\n" not in opened("quickstart", (), tiny=False, alone=True)[1]
