"""`eval.tasks`: what a recipe may say of them, and what is refused."""

from typing import Any

import pytest

from tests.recipe.test_recipe import build
from tunix.data.config import DataConfig
from tunix.errors import UserError
from tunix.rollout.config import EvalTask
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.rewards.config import RewardConfig

ROWS = {"data": "sums.jsonl", "reward": {"functions": ["number"]}}
GAME = EnvironmentConfig(name="textarena:Chess-v0")
NUMBER = RewardConfig(functions=("number",))


def test_a_list_is_that_of_the_tasks():
    tasks = [{"name": "sums", **ROWS, "pass_at": [1, 8]}, {"name": "games", "environment": "textarena:Chess-v0"}]
    recipe = build(eval=tasks)
    assert recipe == build(eval={"tasks": tasks})
    assert (recipe.eval.every, [task.n for task in recipe.eval.tasks]) == (50, [64, 64])
    assert recipe.eval.tasks[1].environment == GAME
    assert type(recipe).build(recipe.sections()) == recipe
    assert recipe.difference(build()) == []  # a run may be resumed with other tasks


def test_rows_and_rewards_of_the_run_stand_in():
    run = DataConfig(train="a.jsonl", eval="b.jsonl", eval_split="dev", columns={"prompt": "q"}, chat=True)
    task = EvalTask(name="x", pass_at=(1,))
    inherited = task.in_run(None, NUMBER)
    assert (inherited.environment, inherited.reward) == (None, NUMBER)
    assert inherited.data_in_run(run) == run
    # The run's game brings its episodes, with the run's rewards; one of the task's own is scored by itself.
    played = task.in_run(GAME, NUMBER).data_in_run(run)
    assert (played.eval, played.eval_split, played.columns, played.chat) == ("environment", None, {}, True)
    alone = EvalTask(name="x", environment=GAME).in_run(None, NUMBER)
    assert (alone.environment, alone.reward) == (GAME, None)
    other = EvalTask(name="x", data="c.jsonl", columns={"prompt": "z"}, reward=NUMBER).in_run(GAME, None)
    assert other.environment is None
    assert (other.data_in_run(run).eval, other.data_in_run(run).columns) == ("c.jsonl", {"prompt": "z"})


def test_a_task_of_a_harness():
    """It needs no rewards; its metrics are its file's, and may end the run."""
    task = {"name": "arc", "data": "lm-eval:tasks/arc.yaml", "n": 8}
    recipe = build(eval={"tasks": [task], "until": {"eval/arc/acc_norm": 0.5}})
    assert (recipe.eval.tasks[0].harness_task, recipe.eval.tasks[0].metrics) == ("tasks/arc.yaml", [])
    assert type(recipe).build(recipe.sections()) == recipe
    assert EvalTask(name="x", data="arc.yaml").harness_task is None
    tiny = build(eval=[task], data={"train": "a/b"}).tiny()
    assert tiny.eval.tasks[0].harness_task == "tasks/arc.yaml"


GOOD = {"name": "sums", **ROWS}
BAD: list[tuple[Any, list[str]]] = [
    ([{**GOOD, "nam": 1}], ["eval.tasks.0.nam: unknown key", "Did you mean 'name'?"]),
    ([{**GOOD, "environment": {"name": "guessing", "opions": {}}}], ["opions", "Did you mean 'options'?"]),
    ([{**GOOD, "name": "a b"}], ["eval.tasks.0: name: 'a b' names no task"]),
    ([{**GOOD, "name": "reward"}], ["'reward' names no task", "the evaluation of data.eval has"]),
    ([GOOD, GOOD], ["eval.tasks: two tasks are called 'sums'"]),
    ([{**GOOD, "n": 0}], ["eval.tasks.0.n: 0 is not a number above 0"]),
    ([{**GOOD, "pass_at": [0]}], ["eval.tasks.0.pass_at.0: 0 is not a number above 0"]),
    ([{**GOOD, "pass_at": [4], "temperature": 0}], ["pass_at 4: greedy answers to a prompt are all alike"]),
    ([{**GOOD, "success": 0.5}], ["success changes nothing without pass_at"]),
    ([{"name": "x", "columns": {"prompt": "q"}}], ["columns changes nothing without data"]),
    (
        [{"name": "x", "data": "lm-eval:a.yaml", "temperature": 1}],
        ["temperature changes nothing for a task of lm-eval"],
    ),
    ([{**GOOD, "data": "lm-eval:a.yaml"}], ["reward changes nothing for a task of lm-eval, whose file says"]),
    (
        {"tasks": [{"name": "x", "data": "lm-eval:a.yaml"}], "until": {"eval/y/acc": 1}},
        ["'eval/y/acc' is no metric of an evaluation"],
    ),
    ([{"name": "x", "data": "sums.jsonl"}], ["eval.tasks.0: nothing scores the answers of x"]),
    ([{"name": "x", "environment": "guessing"}], ["eval.tasks.0: x has no rows: name some"]),
    ({"tasks": [GOOD], "rows": 8}, ["eval.rows: changes nothing without held-out rows"]),
    ({"tasks": [GOOD], "until": {"eval/loss": 1}}, ["eval.until: eval/loss: changes nothing without held-out rows"]),
    (
        {"tasks": [{**GOOD, "pass_at": [8]}], "until": {"eval/sums/pass@4": 0.5}},
        ["'eval/sums/pass@4' is no metric", "eval/sums/pass@8. Did you mean 'eval/sums/pass@8'?"],
    ),
]


@pytest.mark.parametrize(("section", "fragments"), BAD)
def test_what_is_refused(section: Any, fragments: list[str]):
    with pytest.raises(UserError) as error:
        build(eval=section)
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_reward_model_answers_no_tasks():
    with pytest.raises(UserError, match=r"eval.tasks: prompts to answer, but reward trains a model that gives scores"):
        build(algorithm={"name": "reward"}, eval=[GOOD])


def test_sections_that_tasks_use_are_no_mistake():
    """Fine-tuning whose answers are judged by tasks alone."""
    data = {"train": "a.jsonl", "max_length": 64, "completion_length": 16}
    recipe = build(data=data, rollout={"temperature": 0.7}, eval=[GOOD])
    assert recipe.data.completion_length == 16
    assert build(data=data, reward={"functions": ["number"]}, eval=[{"name": "x", "data": "sums.jsonl"}]).reward


def test_tiny_tasks_need_no_download():
    columns = {"name": "number", "columns": {"answer": "solution"}}
    hub = {"name": "hub", "data": "a/b", "columns": {"prompt": "q"}, "reward": {"functions": [columns]}}
    tiny = build(eval=[hub, {**GOOD, "data": "./sums.jsonl", "n": 4}], data={"train": "a/b"}).tiny()
    first, second = tiny.eval.tasks
    assert (first.data, first.columns, first.n) == ("tunix.data.tiny:prompt_completion", {}, 8)
    assert first.reward
    assert first.reward.functions[0].columns == {}
    assert (second.data, second.n) == ("./sums.jsonl", 4)
    assert "hub: generated questions" in tiny.replaced
