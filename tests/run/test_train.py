"""What `tunix.train` makes of its arguments; nothing is trained here."""

from pathlib import Path

import pytest

import tunix
from tests.tiny_runs import files, write_recipe
from tunix.errors import Interrupted, UserError
from tunix.recipe.recipe import Recipe
from tunix.run import train as module
from tunix.run.train import RunResult

SECTIONS = {"model": {"init": "random", "family": "llama", "tokenizer": "bytes"}, "data": {"train": "rows.jsonl"}}


@pytest.fixture
def ran(monkeypatch) -> list[Recipe]:
    """The recipes that would have been trained."""
    recipes: list[Recipe] = []

    def record(recipe: Recipe, folder: Path, root: Path, *, deadline: float | None, verbose: bool) -> RunResult:
        recipes.append(recipe)
        return RunResult(folder, [], [], None)

    monkeypatch.setattr(module, "_run", record)
    return recipes


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return Recipe.build({**SECTIONS, "steps": 500, "output": str(tmp_path / "run")})


def test_a_recipe_is_trained_as_it_is(recipe, ran):
    assert tunix.train(recipe).folder == Path(recipe.output)
    assert ran == [recipe]


def test_overrides_of_a_recipe_are_refused(recipe, ran):
    with pytest.raises(UserError, match=r"overrides belong to a file or a name: give them to Recipe\.load"):
        tunix.train(recipe, ["steps=3"])
    assert ran == []
    assert not Path(recipe.output).exists()


def test_a_recipe_is_made_tiny(recipe, ran):
    tunix.train(recipe, tiny=True)
    assert ran == [recipe.tiny()] != [recipe]


@pytest.mark.parametrize("tiny", [False, True])
def test_a_file_is_loaded_with_its_overrides(recipe, ran, tmp_path, tiny):
    file, overrides = tmp_path / "mine.yaml", ["steps=3", "seed=7"]
    file.write_text(recipe.to_yaml())
    tunix.train(file, overrides, tiny=tiny)
    assert ran == [Recipe.load(file, overrides, tiny)]
    assert (ran[0].steps, ran[0].seed, ran[0].batch_size) == (3, 7, 8 if tiny else recipe.batch_size)


def test_a_name_is_a_recipe_of_ours(ran, tmp_path):
    tunix.train("sft_qwen", [f"output={tmp_path}/run", "steps=3"])
    assert ran == [Recipe.load("sft_qwen", [f"output={tmp_path}/run", "steps=3"])]


@pytest.mark.slow
def test_a_run_whose_time_is_up_stops_with_a_checkpoint_and_goes_on(tmp_path):
    recipe, whole = (
        Recipe.load(write_recipe(tmp_path / "recipe.yaml"), [f"output={name}", "checkpoint.every=1"])
        for name in ("run", "whole")
    )
    expected = tunix.train(whole)
    with pytest.raises(Interrupted, match="stopped at step 0 of 4, before the first update"):
        tunix.train(recipe, minutes=0)
    result = tunix.train(recipe, minutes=60)
    assert files(result.export) == files(expected.export)
