"""reasoning-gym: three tasks by hand, mistakes, difficulty, and a run that learns and is resumed to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import learning
from benchmarks.peers.run import PEERS
from tests.run.test_kill import Run, assert_same_end
from tests.tiny_runs import metrics
from tests.worlds.tiny_games import RL, mean, run_page, write
from tunix.data.config import DataConfig
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.adapters import training_rows
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.reasoning_gym import ReasoningGym
from tunix.rollout.environments.remote import Player

pytestmark = pytest.mark.worlds
RNG = np.random.default_rng(0)
NONE = np.zeros(0, np.int32)


def reward(environment: ReasoningGym, answer: str) -> float:
    step = environment.step(answer, NONE)
    assert step.done
    assert step.reward is not None
    return float(step.reward)


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "prime_factorization"])
def test_a_row_is_an_item_of_the_package_and_its_verifier_the_reward(task: str):
    import reasoning_gym

    item = reasoning_gym.create_dataset(task, seed=7, size=50)[3]
    environment = ReasoningGym(tasks=task)
    assert environment.reset({"seed": 7, "index": 3}, RNG) == item["question"]
    assert reward(environment, f" {item['answer']}\n") == 1
    assert reward(environment, "nonsense") < 1  # on which the verifier of prime_factorization raises


def test_the_answer_is_where_the_recipe_says():
    for extract, text in (("answer", "<answer>{}</answer>"), (r"= (-?\d+)", "1 = 2, so = {} it is")):
        environment = ReasoningGym(tasks="chain_sum", extract=extract)
        environment.reset({"seed": 0, "index": 0}, RNG)
        right = environment._item["answer"]
        assert reward(environment, text.format(right)) == 1
        assert reward(environment, right) == 0


def test_several_tasks_are_the_package_s_composite():
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    config = {"chain_sum": {"max_terms": 3}}
    specs = [DatasetSpec("chain_sum", 1, config["chain_sum"]), DatasetSpec("spell_backward", 2, {})]
    composite = reasoning_gym.create_dataset("composite", seed=1, size=100, datasets=specs)
    environment = ReasoningGym(tasks={"chain_sum": 1, "spell_backward": 2}, config=config, size=100)
    questions = [environment.reset({"seed": 1, "index": i}, RNG) for i in range(40)]
    assert questions == [composite[i]["question"] for i in range(40)]
    share = np.mean([str(question).startswith("Spell") for question in questions])
    assert 0.4 < share < 0.9


def test_a_level_sets_the_difficulty_but_not_what_the_recipe_writes():
    levels = ReasoningGym.levels("chain_sum")
    assert levels[0] == {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert levels[3] == {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 4}
    assert len(levels) == 11
    environment = ReasoningGym(tasks="chain_sum", config={"chain_sum": {"max_digits": 1}})
    terms = []
    for i in range(20):
        environment.reset({"seed": 0, "index": i, "level": 3}, RNG)
        terms.append(environment._item["metadata"]["num_terms"])
        assert environment._item["metadata"]["num_digits"] == 1
    assert set(terms) == {2, 3, 4, 5}
    environment.reset({"seed": 0, "index": 0, "level": 99}, RNG)  # the last one


def test_rows_are_numbered_and_episodes_live_in_workers():
    config = EnvironmentConfig.model_validate(
        {"name": "reasoning_gym", "options": {"tasks": {"chain_sum": 1, "spell_backward": 2}, "size": 50}}
    )
    rows = training_rows(DataConfig(train="environment"), config, 3)
    assert (len(rows), rows[49]) == (50, {"seed": 3, "index": 49})
    leveled = config.model_copy(update={"options": {"size": 5, "levels": 2}})
    levels = [training_rows(DataConfig(train="environment"), leveled, 3)[i] for i in (0, 1, 4)]
    assert levels == [{"seed": 3, "index": i, "level": i % 2} for i in (0, 1, 4)]
    player = Player(config, bytes_tokenizer())
    try:
        first, again = (player([rows[i] for i in range(8)], 0) for _ in range(2))
        assert [x.start for x in first.episodes] == [x.start for x in again.episodes]
    finally:
        player.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "chain_sums"}, "no task 'chain_sums' among its 105. Did you mean 'chain_sum'?"),
        ({"tasks": {"chain_sum": 0}}, "each has a weight above 0"),
        ({"tasks": []}, "each has a weight above 0"),
        ({"tasks": "chain_sum", "config": {"chain_summ": {}}}, "Did you mean 'chain_sum'?"),
        ({"tasks": "chain_sum", "config": {"chain_sum": {"max_term": 3}}}, "Did you mean 'max_terms'?"),
        ({"tasks": "chain_sum", "config": {"chain_sum": {"seed": 3}}}, "has no setting 'seed'"),
        ({"tasks": "chain_sum", "config": {"chain_sum": {"max_terms": 1}}}, "max_terms must be >= min_terms"),
        ({"tasks": "chain_sum", "size": "many"}, "size: 'many'"),
        ({}, "wants the option 'tasks'"),
    ],
)
def test_mistakes_are_told_before_a_run(options: dict[str, Any], message: str):
    with pytest.raises(UserError) as told:
        Player(EnvironmentConfig(name="reasoning_gym", options=options), bytes_tokenizer())
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_a_row_without_numbers_is_told():
    environment = ReasoningGym(tasks="chain_sum")
    with pytest.raises(UserError, match=r"index is None in a row with seed"):
        environment.reset({"seed": 0}, RNG)


def test_its_page_runs():
    run_page("reasoning-gym")


def test_a_tiny_model_learns_from_nothing_and_a_killed_run_ends_alike(tmp_path: Path):
    """Mostly three letters backward: untrained under 0.1 of the letters are right, twenty steps later over 0.2."""
    options = {
        "tasks": {"spell_backward": 3, "chain_sum": 1},
        "config": {
            "spell_backward": {"min_word_len": 3, "max_word_len": 3},
            "chain_sum": {"max_terms": 2, "max_digits": 1},
        },
    }
    sections = {
        **RL,
        "data": {"max_length": 80, "completion_length": 4},
        "rollout": {"environment": {"name": "reasoning_gym", "options": options}},
        "steps": 20,
        "checkpoint": {"every": 4, "keep": 2},
    }
    whole = Run(write(tmp_path / "whole", **sections))
    assert whole.wait() == 0, whole.log
    rows = metrics(whole.run)
    assert mean(rows[:2], "reward/mean") < 0.15
    assert mean(rows[-4:], "reward/mean") > 0.2
    killed = Run(write(tmp_path / "killed", **sections))
    killed.until(lambda: killed.steps >= 9)
    killed.kill()
    resumed = Run(tmp_path / "killed")
    assert resumed.wait() == 0, resumed.log
    assert_same_end(tmp_path / "killed" / "run", whole.run)


@pytest.mark.parametrize("library", learning.LIBRARIES)
def test_another_library_trains_on_a_task_by_its_verifier(library: str, tmp_path: Path, monkeypatch):
    """`python -m benchmarks.learning --peers`, for a step of two problems from weights that know nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not Path(PEERS[library].python).exists():
        pytest.skip("make peers")
    for name, value in {
        "ROWS": 8,
        "HELD_OUT": 4,
        "STEPS": 1,
        "EVERY": 1,
        "PROMPTS": 2,
        "GROUP": 2,
        "UPDATES": 1,
    }.items():
        monkeypatch.setattr(learning, name, value)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    weights = tmp_path / "spell_backward-start-0/export"
    config = LlamaConfig(vocab_size=320, hidden_size=32, intermediate_size=64, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(weights)
    bytes_tokenizer("llama3").save(weights)
    learning.train_peer("spell_backward", library, 0, tmp_path)
    rows = metrics(tmp_path / f"spell_backward-{library}-0")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(0 <= row["eval/reward"] < 0.5 for row in rows)
