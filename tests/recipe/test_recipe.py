"""What a recipe file means: numbers as written, overrides, stages, the way back to YAML, `tiny`, what may differ."""

import json
from pathlib import Path

import pytest
import yaml

import tunix
from tunix.data import tiny as rows
from tunix.data.config import DataConfig
from tunix.errors import UserError
from tunix.models.families.table import FAMILIES
from tunix.recipe.algorithms import ALGORITHMS, algorithm_class
from tunix.recipe.recipe import Recipe
from tunix.recipe.tiny import SIZES
from tunix.rollout.config import RolloutConfig
from tunix.rollout.rewards.answers import number
from tunix.rollout.rewards.shipped import json_schema
from tunix.util.yaml_io import overridden, parse_yaml, write_yaml

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
MODEL = {"path": "google/gemma-3-1b-it"}
BASE = {"model": MODEL, "data": {"train": "rows.jsonl"}, "output": "runs/x"}
USER_CLASS = """
from tunix.algorithms.sft.config import SFTConfig

class Parent:
    Config = SFTConfig

class Mine(Parent):
    pass

class OwnKeys(SFTConfig):
    temperature: float = 1.0

class Other:
    Config = OwnKeys
"""


def build(**sections: object) -> Recipe:
    return Recipe.build({**BASE, **sections})


def written(folder: Path, recipe: Recipe) -> Path:
    path = folder / "written.yaml"
    path.write_text(recipe.to_yaml())
    return path


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with an algorithm of the user's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(USER_CLASS)
    return tmp_path


# --- YAML ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("-2e0", -2.0),
        ("1_024", 1024),
        ("-1", -1),
        ("010", "010"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("tunix.data.pydoc:train", "tunix.data.pydoc:train"),
        ("[q_proj, 1e-3]", ["q_proj", 1e-3]),
    ],
)
def test_plain_values_are_what_they_look_like(text: str, value: object):
    parsed = parse_yaml(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "value", ["1e-4", "true", "null", "on", "12", "a: b", "", " x", "2024-01-01", 1e-7, 5e-06, 1e22, None]
)
def test_written_values_read_back_equal(value: object):
    assert parse_yaml(write_yaml({"key": value}), "here") == {"key": value}


def test_another_yaml_reader_sees_the_same():
    sections = build(optimizer={"learning_rate": 5e-6}).sections()
    assert yaml.safe_load(write_yaml(sections)) == sections


def test_merge_keys_and_anchors_work():
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}"
    assert parse_yaml(text, "here")["b"] == {"x": 1, "y": 3}


# --- Overrides ----------------------------------------------------------------------------------------------------


def test_overrides_reach_every_depth_and_leave_the_tree_alone():
    tree = {"optimizer": {"b1": 0.9}, "adapter": None, "stages": [{"steps": 1}, {"steps": 2}]}
    changes = [
        "optimizer.b1=0.8",
        "adapter.rank=4",
        "model.sizes.d_model=64",
        "stages.1.steps=3",
        "seed=7",
        "a={b: [1]}",
    ]
    assert overridden(tree, changes) == {
        "optimizer": {"b1": 0.8},
        "adapter": {"rank": 4},
        "model": {"sizes": {"d_model": 64}},
        "stages": [{"steps": 1}, {"steps": 3}],
        "seed": 7,
        "a": {"b": [1]},
    }
    assert tree == {"optimizer": {"b1": 0.9}, "adapter": None, "stages": [{"steps": 1}, {"steps": 2}]}


def test_an_override_that_every_stage_goes_before_is_refused(tmp_path: Path):
    path = written(tmp_path, Recipe.build(STAGED))  # resolved: each stage has all keys
    with pytest.raises(UserError, match=r"written.yaml: steps: every stage sets its own.*stages\.0\.steps=") as caught:
        Recipe.load(path, ["steps=3", "optimizer.b1=0.5", "output=runs/y"])
    assert len(str(caught.value).splitlines()) == 2
    file = tmp_path / "two.yaml"
    file.write_text("model: {path: a/llama}\ndata: {train: a/b}\nstages: [{steps: 1}, {epochs: 1}]\n")
    assert [stage.steps for stage in Recipe.load(file, ["steps=3"]).stages] == [1, None]


def test_a_value_may_hold_an_equals_sign():
    assert overridden({}, ["output=runs/lr=1e-4"]) == {"output": "runs/lr=1e-4"}


# --- Meaning ------------------------------------------------------------------------------------------------------


def test_the_smallest_recipe_is_one_epoch_of_sft():
    recipe = build()
    assert (recipe.algorithm.name, recipe.steps, recipe.epochs, recipe.stages) == ("sft", None, 1, ())
    assert build(steps=5).epochs is None


def test_output_is_named_after_the_file(tmp_path: Path):
    path = tmp_path / "first.yaml"
    path.write_text("model: {path: a/llama}\ndata: {train: a/b}\n")
    assert tunix.Recipe.load(path).output == "runs/first"


def test_a_recipe_is_a_value():
    assert build() == build()
    assert build(seed=1) != build()
    with pytest.raises(ValueError, match="frozen"):
        build().seed = 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("tiny", [False, True])
def test_every_recipe_loads_and_survives_the_way_back(path: Path, tiny: bool, tmp_path: Path):
    recipe = Recipe.load(path, tiny=tiny)
    again = Recipe.load(written(tmp_path, recipe))
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_tells_a_newcomer_what_it_does(path: Path):
    header = path.read_text().split("\n\nmodel:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for words in (f"tunix run recipes/{path.name}", "--tiny", "Hardware", "Time", "Expect"):
        assert words in header


def test_floats_are_readable():
    assert "learning_rate: 5.0e-06\n" in build(optimizer={"learning_rate": 5e-6}).to_yaml()


def test_ours_have_classes_to_run():
    for name, (config, reference) in ALGORITHMS.items():
        assert config.model_validate({}).name == name
        assert reference.startswith(f"tunix.algorithms.{name}.algorithm:")


# --- An algorithm of one's own ------------------------------------------------------------------------------------


def test_a_class_in_a_file_brings_its_own_keys(mine: Path):
    recipe = build(algorithm={"name": "mine.py:Other", "temperature": 0.5, "train_on": "all"})
    assert recipe.algorithm.model_dump()["temperature"] == 0.5
    assert algorithm_class("mine.py:Other").__name__ == "Other"
    assert Recipe.load(written(mine, recipe)) == recipe


def test_a_subclass_inherits_the_keys_of_its_parent(mine: Path):
    assert build(algorithm={"name": "mine.py:Mine"}).algorithm.name == "mine.py:Mine"


def test_a_changed_file_is_read_again(mine: Path):
    assert "temperature" in build(algorithm={"name": "mine.py:Other"}).algorithm.model_dump()
    (mine / "mine.py").write_text(USER_CLASS.replace("temperature", "heat"))
    assert "heat" in build(algorithm={"name": "mine.py:Other"}).algorithm.model_dump()


# --- Stages -------------------------------------------------------------------------------------------------------

STAGED = {
    **BASE,
    "optimizer": {"learning_rate": 1e-4, "b1": 0.8},
    "epochs": 2,
    "stages": [
        {"steps": 10, "algorithm": {"train_on": "all"}},
        {"data": {"train": "more.jsonl"}, "optimizer": {"learning_rate": 1e-5}, "model": {"dtype": "float32"}},
    ],
}


def test_a_stage_takes_what_stands_above_it_and_starts_from_the_one_before():
    recipe = Recipe.build(STAGED)
    first, second = recipe.stages
    assert (first.output, second.output) == ("runs/x/0_sft", "runs/x/1_sft")
    assert (first.steps, first.epochs, second.steps, second.epochs) == (10, None, None, 2)
    assert (first.data.train, second.data.train) == ("rows.jsonl", "more.jsonl")
    assert (second.optimizer.learning_rate, second.optimizer.b1) == (1e-5, 0.8)
    assert (first.model.path, second.model.path) == (MODEL["path"], "runs/x/0_sft")
    assert second.model.dtype == "float32"
    assert recipe.model == first.model
    assert recipe.output == "runs/x"


def test_stages_survive_the_way_back(tmp_path: Path):
    recipe = Recipe.build(STAGED)
    assert Recipe.load(written(tmp_path, recipe)) == recipe
    changed = Recipe.load(written(tmp_path, recipe), ["stages.0.steps=3"])
    assert changed.stages[0].steps == 3
    assert changed.stages[1] == recipe.stages[1]


def test_a_stage_with_another_algorithm_leaves_the_keys_of_the_first_behind(mine: Path):
    stages = [{}, {"algorithm": {"name": "mine.py:Mine"}}]
    recipe = build(algorithm={"name": "sft", "train_on": "all"}, stages=stages)
    assert recipe.stages[1].algorithm.model_dump()["train_on"] == "completion"
    assert recipe.stages[1].output == "runs/x/1_Mine"


def test_tiny_stages_have_one_tiny_model():
    first, second = Recipe.build(STAGED).tiny().stages
    assert first.model.sizes == SIZES
    assert (second.model.path, second.model.init) == ("runs/x-tiny/0_sft", "pretrained")
    assert (first.steps, second.steps) == (10, 20)


# --- Tiny ---------------------------------------------------------------------------------------------------------


def test_tiny_caps_what_costs_time_and_keeps_the_rest():
    recipe = build(
        adapter={"rank": 4},
        optimizer={"learning_rate": 3e-4, "warmup": 100},
        steps=1000,
        micro_batch_size=16,
        data={"train": "a/b", "eval_split": "test", "columns": {"messages": "turns"}, "on_overflow": "drop"},
        mesh={"tensor": 8},
        seed=5,
    ).tiny()
    assert (recipe.steps, recipe.batch_size, recipe.micro_batch_size, recipe.optimizer.warmup) == (20, 8, 8, 10)
    assert (recipe.model.family, recipe.model.tokenizer, recipe.model.dtype) == ("gemma3", "bytes", "bfloat16")
    assert (recipe.data.train, recipe.data.eval) == ("tunix.data.tiny:messages", "tunix.data.tiny:messages")
    assert (recipe.data.eval_split, recipe.data.columns, recipe.data.max_length) == (None, {}, 128)
    assert (recipe.data.on_overflow, recipe.adapter, recipe.seed) == ("drop", build(adapter={"rank": 4}).adapter, 5)
    assert (recipe.mesh, recipe.output, recipe.optimizer.learning_rate) == ("auto", "runs/x-tiny", 3e-4)


def test_the_sides_of_pairs_have_a_limit_of_their_own():
    data, dpo = {"train": "a/b", "max_length": 1024, "completion_length": 256}, {"name": "dpo"}
    assert build(algorithm=dpo, data=data).data.completion_length == 256
    # Tiny: sequences of 128 tokens, half of them at most the completion's.
    tiny = build(algorithm=dpo, data=data).tiny().data
    assert (tiny.max_length, tiny.completion_length) == (128, 64)
    with pytest.raises(ValueError, match=r"data\.completion_length: changes nothing"):
        build(algorithm={"name": "kto"}, data=data)
    with pytest.raises(ValueError, match=r"data\.prompt_length: changes nothing"):
        build(algorithm=dpo, data={"train": "a/b", "prompt_length": 128})


def test_tiny_shortens_rollouts():
    recipe = build(
        model={"path": "Qwen/Qwen3-0.6B"},
        data={
            "train": "a/b",
            "columns": {"prompt": "question"},
            "chat": True,
            "completion_length": 3000,
            "max_length": 4096,
        },
        algorithm={"name": "ppo", "group_size": 16, "updates": 16, "critic_warmup": 50, "overlong_buffer": 512},
        reward={"functions": [{"name": "number", "columns": {"answer": "solution"}}]},
        rollout={"slots": 256},
        batch_size=64,
        micro_batch_size=64,
        steps=100,
    )
    # Also where a recipe leaves the number to the platform.
    free = recipe.model_copy(update={"rollout": RolloutConfig()}).tiny()
    assert (free.rollout.slots, build(algorithm={"name": "sft"}).tiny().rollout.slots) == (32, None)
    recipe = recipe.tiny()
    told = recipe.algorithm.model_dump()
    # 8 prompts in 8 parts of one, answered 4 times.
    assert (told["group_size"], told["updates"], told["critic_warmup"], told["overlong_buffer"]) == (4, 8, 2, 32)
    assert (recipe.batch_size, recipe.micro_batch_size, recipe.rollout.slots) == (8, 4, 32)
    data = recipe.data
    assert (data.train, data.columns, data.chat) == ("tunix.data.tiny:prompt_completion", {}, True)
    assert (data.prompt_length, data.completion_length, data.max_length) == (352, 32, 384)
    assert recipe.reward is not None
    assert recipe.reward.functions[0].columns == {}


def test_tiny_keeps_rows_that_are_made_on_the_spot():
    stages = {
        "data": {"train": "tunix.data.sorting:problems", "eval": "tunix.data.sorting:held_out", "max_length": 16},
        "algorithm": {"name": "grpo"},
        "reward": {"functions": [{"name": "exact_match", "columns": {"answer": "completion"}}]},
        "eval": {"rows": 512},
        "steps": 70,
    }
    recipe = build(**stages).tiny()
    assert (recipe.data.train, recipe.data.eval) == ("tunix.data.sorting:problems", "tunix.data.sorting:held_out")
    assert (recipe.data.prompt_length, recipe.data.completion_length, recipe.data.max_length) == (8, 8, 16)
    assert recipe.reward is not None
    assert recipe.reward.functions[0].columns == {"answer": "completion"}
    assert (recipe.eval.rows, recipe.steps) == (64, 20)
    assert recipe.replaced == ("model: a random gemma3 of two layers",)


@pytest.mark.parametrize(
    ("algorithm", "data", "made"),
    [
        ("dpo", {}, ("pairs", "conversations")),
        ("dpo", {"chat": True}, ("pairs", "pairs")),
        ("reward", {"format": "tokens"}, ("tokens", "tokens")),
        ("kto", {}, ("prompt_completion", "chat_labels")),
        ("kto", {"chat": True}, ("prompt_completion", "labels")),
        ("sft", {"format": "prompt_completion"}, ("prompt_completion", "prompt_completion")),
    ],
)
def test_tiny_pairs_and_labels_have_the_recipes_shape(algorithm, data, made):
    recipe = build(data={"train": "a/b", **data}, algorithm={"name": algorithm}, batch_size=64).tiny()
    assert (recipe.data.format, recipe.data.train) == (made[0], f"tunix.data.tiny:{made[1]}")
    assert recipe.sequences_per_update == (16 if algorithm in ("dpo", "reward") else 8)


def test_what_the_command_line_says_of_a_stage_is_not_capped_either(tmp_path: Path):
    path = written(tmp_path, Recipe.build(STAGED))
    first, second = Recipe.load(path, ["stages.1.steps=50", "stages.1.epochs=null"], tiny=True).stages
    assert (first.steps, second.steps) == (10, 50)


def test_without_an_environment_nothing_is_observed():
    section = {"name": "grpo", "observation_weight": 0.1}
    with pytest.raises(UserError, match=r"algorithm.observation_weight: changes nothing without an environment"):
        build(algorithm=section, reward={"functions": ["length"]})


def test_penalties_are_over_the_whole_where_that_is_more_than_the_set_and_there_are_some():
    rewards = {"functions": ["length"]}
    section, cut = {"name": "grpo", "penalties_over": "whole", "kl": 0.1}, {"top_k": 20}
    assert build(algorithm=section, reward=rewards, rollout=cut).algorithm.model_dump()["penalties_over"] == "whole"
    for change, rollout, why in (
        ({}, {}, "every set is the whole without rollout.top_k"),
        ({"kl": 0}, cut, "changes nothing without a KL or an entropy bonus"),
        ({"kl_in": "reward"}, cut, "set kl_in: loss"),
        ({"entropy_target": 0.2}, cut, "entropy_target: holds the entropy of what is sampled"),
    ):
        with pytest.raises(UserError, match=why):
            build(algorithm={**section, **change}, reward=rewards, rollout=rollout)


def test_what_the_command_line_says_is_not_capped(tmp_path: Path):
    path = written(tmp_path, build())
    recipe = Recipe.load(path, ["steps=50", "epochs=null", "output=runs/here", "data.max_length=256"], tiny=True)
    assert (recipe.steps, recipe.output, recipe.data.max_length) == (50, "runs/here", 256)


def test_what_the_command_line_says_of_an_algorithms_capped_keys_is_kept(tmp_path: Path):
    """The algorithm names them: PPO's warm-up of the critic is one, SFT has none."""
    section = {"name": "ppo", "group_size": 16, "critic_warmup": 50}
    path = written(tmp_path, build(algorithm=section, reward={"functions": ["length"]}))
    recipe = Recipe.load(path, ["algorithm.critic_warmup=3", "algorithm.lam=0.5"], tiny=True)
    told = recipe.algorithm.model_dump()
    assert (told["critic_warmup"], told["group_size"], told["lam"]) == (3, 4, 0.5)


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ({"path": "google/gemma-7b"}, "gemma"),
        ({"path": "google/gemma-2-2b-it"}, "gemma2"),
        ({"path": "meta-llama/Llama-3.2-1B"}, "llama"),
        ({"path": "Qwen/Qwen2.5-0.5B"}, "qwen2"),
        ({"path": "me/mystery", "family": "qwen3"}, "qwen3"),
        ({"init": "random", "preset": "llama3.2-1b"}, "llama"),
        ({"init": "random", "family": "gemma2", "sizes": {"d_model": 512}}, "gemma2"),
    ],
)
def test_tiny_finds_the_family(model: dict[str, object], family: str):
    assert build(model=model).tiny().model.family == family


def test_tiny_reads_the_family_of_a_folder(tmp_path: Path):
    for family in FAMILIES:
        kind = "gemma3_text" if family == "gemma3" else family
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert build(model={"path": str(tmp_path)}).tiny().model.family == family


def test_made_rows_can_be_judged():
    for shape in ("prompt_completion", "messages"):
        for row in vars(rows)[shape]():
            said = row["completion"] if shape == "prompt_completion" else row["messages"][-1]["content"]
            assert number(said, row["answer"]) == json_schema(row["answer"], row["schema"]) == 1
            assert number("-1", row["answer"]) == json_schema("-1", row["schema"]) == 0


@pytest.mark.parametrize("shape", DataConfig.model_fields["format"].annotation.__args__[1:])
def test_the_made_rows_are_many_and_always_the_same(shape: str):
    made = vars(rows)[shape]()
    assert made == vars(rows)[shape]()
    assert len(made) == 64
    assert len({json.dumps(row) for row in made}) == 64


# --- Resuming -----------------------------------------------------------------------------------------------------


def test_difference_names_what_matters_to_a_resumed_run():
    changed = build(
        optimizer={"learning_rate": 1e-3},
        adapter={},
        data={"train": "rows.jsonl", "max_length": 64, "eval": "held.jsonl"},
        steps=7,
        output="runs/y",
        logging={"every": 5},
        checkpoint={"every": 5},
        mesh={"fsdp": 1},
        micro_batch_size=1,
        eval={"every": 5},
    )
    names = changed.difference(build())
    assert {name.split(".")[0] for name in names} == {"adapter", "data", "optimizer"}
    assert {"data.max_length", "optimizer.learning_rate", "adapter.rank"} <= set(names)
    assert set(build().difference(changed)) == set(names)
    assert build().difference(build(output="runs/y")) == []


def test_difference_looks_into_stages():
    other = {**STAGED, "stages": [STAGED["stages"][0], {**STAGED["stages"][1], "seed": 3, "batch_size": 4, "steps": 9}]}
    assert Recipe.build(other).difference(Recipe.build(STAGED)) == ["stages.1.batch_size", "stages.1.seed"]


def test_every_mistake_is_told_at_once():
    with pytest.raises(UserError) as caught:
        build(optimizer={"learning_rat": 1}, seed=-1, model={"path": "x", "dtype": "half"})
    assert len(str(caught.value).splitlines()) == 3


def test_a_mistake_above_the_stages_is_told_once():
    with pytest.raises(UserError) as caught:
        Recipe.build({**STAGED, "seed": "x", "stages": [{}, {"batch_size": 0}]}, "r.yaml")
    assert str(caught.value).splitlines() == [
        "r.yaml: seed: 'x' is not a whole number",
        "r.yaml: stages.1.batch_size: 0 is not a number above 0",
    ]
