"""Rewards at work: what comes back from good, bad, hanging and dying functions, and that it comes back in order."""

import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.scorings import scores_with
from tunix.errors import UserError
from tunix.rollout.rewards.base import Failure, Reward, Score
from tunix.rollout.rewards.config import RewardConfig, RewardFunction
from tunix.rollout.rewards.scorer import Scorer, Scoring

FUNCTIONS = '''
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path


def misbehave(what):
    """A score for what a completion asks for."""
    if what == "exit": os._exit(3)
    if what == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        while True: pass
    if what == "raise": raise ZeroDivisionError("no\\n  digits")
    if what == "memory": raise MemoryError
    if what == "leave": sys.exit("bye")
    return {"nan": float("nan"), "inf": float("-inf"), "string": "1.0", "none": None, "list": [1.0], "true": True,
            "false": False, "int": 3, "quarter": 0.25}[what]


def one(completion):
    return misbehave(completion)


def many(completions):
    return [misbehave(what) for what in completions]


async def waiting(completion, other=None):
    if completion == "never": await asyncio.sleep(3600)
    if completion == "blocks": time.sleep(3600)
    if completion == "timeout": raise TimeoutError("of its own")
    await asyncio.sleep(0.01)
    return len(completion)


async def waiting_for_all(completions, prompts):
    await asyncio.sleep(0.01)
    return [len(p) - len(c) for p, c in zip(prompts, completions, strict=True)]


def filtered(completions):
    return [float(c) for c in completions if c.isdigit()]


def text(completions):
    return "0.5"


def columns(prompt, completion, answer, bonus=10, *, scale=1):
    return (completion == answer) * scale + bonus


def everything(completion, **columns):
    return len(columns) + columns["answer"] / 100


def sees_jax(completion):
    return "jax" in sys.modules or "numpy" in sys.modules


def wait_for(completion):
    while not Path(completion).exists(): time.sleep(0.01)
    print("a reward's own words")
    return 1.0


def spawn_and_hang(completion):
    child = subprocess.Popen(["sleep", "3600"])
    Path(completion).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(3600)


def leave_a_child(completion):
    child = os.fork()
    if not child:
        time.sleep(3600)
    Path(completion).write_text(str(child))
    os._exit(3)


def number_of(completions):
    return [float("nan") if c == "nan" else i + len(completions) / 10 for i, c in enumerate(completions)]


three = 3
'''


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def mine(name: str, **settings: object) -> RewardFunction:
    return RewardFunction.model_validate({"name": f"mine.py:{name}", **settings})


def scores_of(name: str, completions: list[str], deadline: float = 10.0, workers: int = 2) -> list[Score]:
    with Scorer([mine(name)], deadline, workers) as scorer:
        return scores_with(scorer, ["p"] * len(completions), completions)[name]


def gone(pid: int) -> bool:
    """Whether a process ends, within ten seconds; one that nobody waits for stays as a zombie."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


TROUBLE = {
    "exit": "ended its process (exit code 3)",
    "crash": "ended its process (signal 11)",
    "hang": "took longer than 2 s",
    "raise": "raised ZeroDivisionError: no digits (mine.py, line 12)",
    "memory": "raised MemoryError (mine.py, line 13)",
    "leave": "raised SystemExit: bye (mine.py, line 14)",
    "nan": "returned NaN",
    "inf": "returned infinity",
    "string": "returned a string, not a number",
    "none": "returned None, not a number",
    "list": "returned a list, not a number",
}
FINE = {"true": 1.0, "false": 0.0, "int": 3.0, "quarter": 0.25}


@pytest.mark.parametrize("name", ["one", "many"])
def test_only_the_guilty_sample_fails(functions: Path, name: str):
    """Good samples stand between the bad ones; those keep their scores, and every failure says its own reason.

    For `many` the first call of all dies, and the samples are then scored one by one.
    """
    asked = [what for bad in TROUBLE for what in (bad, "quarter")] + list(FINE)
    expected = [value for reason in TROUBLE.values() for value in (Failure(f"{name} {reason}"), 0.25)] + list(
        FINE.values()
    )
    assert scores_of(name, asked, deadline=2.0) == expected


def test_a_batch_with_a_bad_value_is_called_once(functions: Path):
    """`number_of` adds a tenth of the number of completions, which would be one if they were scored again."""
    assert scores_of("number_of", ["a", "nan", "c"]) == [0.3, Failure("number_of returned NaN"), 2.3]


def test_a_score_too_few_is_found_sample_by_sample(functions: Path):
    """`filtered` leaves out what is no digit: [1, 3] for three, and of one alone nothing."""
    assert scores_of("filtered", ["1", "x", "3"]) == [
        1.0,
        Failure("filtered returned 0 scores for 1 completion"),
        3.0,
    ]


def test_a_string_is_no_list_of_scores(functions: Path):
    assert scores_of("text", ["a"]) == [Failure("text returned a string, not a list of numbers")]


def test_no_samples_no_scores(functions: Path):
    assert scores_of("many", []) == []
    assert scores_of("one", []) == []


def test_async_samples_have_a_deadline_each(functions: Path):
    asked = ["ab", "never", "abc", "timeout"]
    raised = Failure("waiting raised TimeoutError: of its own (mine.py, line 30)")
    expected = [2.0, Failure("waiting took longer than 1 s"), 3.0, raised]
    assert scores_of("waiting", asked, deadline=1.0) == expected


def test_an_async_function_that_blocks_is_ended_like_any_other(functions: Path):
    """It holds up the samples beside it, which are scored again."""
    assert scores_of("waiting", ["ab", "blocks"], deadline=0.5) == [2.0, Failure("waiting took longer than 0.5 s")]


def test_async_of_the_whole_batch(functions: Path):
    with Scorer([mine("waiting_for_all")]) as scorer:
        assert scores_with(scorer, ["abc", "a"], ["a", "ab"]) == {"waiting_for_all": [2.0, -1.0]}


def test_the_number_of_workers_changes_nothing(functions: Path):
    completions = [str(i) for i in range(70)]  # more than an async call takes at a time
    expected = {"waiting": [1.0] * 10 + [2.0] * 60, "filtered": [float(i) for i in range(70)]}
    for workers in (1, 3):
        with Scorer([mine("waiting"), mine("filtered")], workers=workers) as scorer:
            assert scores_with(scorer, [""] * 70, completions) == expected


def test_columns_options_and_other_names(functions: Path):
    """match * scale + bonus, and `a` matches: 4 + 10 and 0 + 10 by the default; with the column 4 + 1 and 0 + 2."""
    renamed = mine("columns", options={"scale": 4}, columns={"answer": "solution"})
    with Scorer([renamed]) as scorer:
        texts = ["p", "p"], ["a", "b"]
        assert scores_with(scorer, *texts, {"solution": ["a", "a"]}) == {"columns": [14.0, 10.0]}
        assert scores_with(scorer, *texts, {"solution": ["a", "a"], "bonus": [1, 2]}) == {"columns": [5.0, 2.0]}


def test_keywords_take_all_columns(functions: Path):
    """Three columns, and the answers 7 and 8: 3.07 and 3.08. Arrays are sent as the lists that they are."""
    columns = {"answer": [7, np.int64(8)], "image": [np.zeros((2, 2))] * 2, "completion": ["not", "this"], "z": [1, 2]}
    with Scorer([mine("everything")]) as scorer:
        assert scores_with(scorer, ["p", "p"], ["a", "b"], columns) == {"everything": [3.07, 3.08]}


def test_weights_and_labels(functions: Path):
    with Scorer([mine("one", weight=0.5), mine("one", label="again"), mine("many")]) as scorer:
        assert scorer.weights == {"one": 0.5, "again": 1.0, "many": 1.0}


def test_a_worker_starts_without_the_heavy_imports(functions: Path):
    assert scores_of("sees_jax", ["a"]) == [0.0]


def test_scoring_overlaps_with_other_work(functions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The reward waits for a file that is written only after `add` has returned. What it prints is no output."""
    with Scorer([mine("wait_for")]) as scorer:
        scoring = Scoring(scorer, {"": []})
        scoring.add(0, "p", str(tmp_path / "flag"), {})
        (tmp_path / "flag").touch()
        assert scoring.result() == {"wait_for": {0: 1.0}}
    out, err = capfd.readouterr()
    assert "own words" not in out
    assert "own words" in err


def pids_in(path: Path) -> list[int]:
    """The processes that a reward says it has started, once it says so."""
    for _ in range(6000):
        if path.exists() and (text := path.read_text()):
            return [int(pid) for pid in text.split()]
        time.sleep(0.01)
    raise AssertionError(f"nothing was written to {path.name} within a minute")


def test_what_a_hanging_reward_started_ends_with_it(functions: Path, tmp_path: Path):
    assert scores_of("spawn_and_hang", ["pids"], deadline=3.0) == [Failure("spawn_and_hang took longer than 3 s")]
    assert all(gone(pid) for pid in pids_in(tmp_path / "pids"))


def test_a_child_left_behind_hides_no_death(functions: Path, tmp_path: Path):
    """A forked child has the socket too, which then stays open when the worker dies."""
    assert scores_of("leave_a_child", ["pids"]) == [Failure("leave_a_child ended its process (exit code 3)")]
    assert all(gone(pid) for pid in pids_in(tmp_path / "pids"))


def test_closing_does_not_wait_for_a_hanging_reward(functions: Path, tmp_path: Path):
    scorer = Scorer([mine("spawn_and_hang")], deadline=3600.0)
    Scoring(scorer, {"": []}).add(0, "p", "pids", {})
    pids = pids_in(tmp_path / "pids")
    scorer.close()
    assert all(gone(pid) for pid in pids)


def test_workers_end_with_a_trainer_that_is_killed(functions: Path, tmp_path: Path):
    script = (
        "from tunix.rollout.rewards.config import RewardFunction\n"
        "from tunix.rollout.rewards.scorer import Scorer, Scoring\n"
        "scorer = Scorer([RewardFunction(name='mine.py:spawn_and_hang')], deadline=3600.0)\n"
        "scoring = Scoring(scorer, {'': []})\n"
        "scoring.add(0, 'p', 'pids', {})\n"
        "scoring.result()"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    pids = pids_in(tmp_path / "pids")
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert all(gone(pid) for pid in pids)


def test_functions_of_a_notebook_run_here():
    """A closure, a lambda and an async one: no other process could import them."""
    seen: list[int] = []

    def here(completion: str, answer: str) -> float:
        seen.append(os.getpid())
        return 1 / len(completion) if completion != answer else 2.0

    async def later(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.01)
        return [np.float32(0.5) for _ in completions]

    with Scorer([here, later]) as scorer:
        scores = scores_with(scorer, ["p"] * 3, ["ab", "", "x"], {"answer": ["no", "no", "x"]})
    good, failed, equal = scores["here"]
    assert (good, equal) == (0.5, 2.0)
    assert isinstance(failed, Failure)
    assert failed.reason.startswith("here raised ZeroDivisionError: division by zero (")
    assert failed.reason.endswith(f"test_rewards.py, line {here.__code__.co_firstlineno + 2})")
    assert scores["later"] == [0.5, 0.5, 0.5]
    assert seen == [os.getpid()] * 3


def test_a_notebook_function_that_hangs_is_left_behind():
    go_on = []

    def hang(completion: str) -> float:
        while completion == "hang" and not go_on:
            time.sleep(0.01)
        return 1.0

    with Scorer([hang], deadline=0.3) as scorer:
        assert scores_with(scorer, ["p"] * 3, ["a", "hang", "b"]) == {
            "hang": [1.0, Failure("hang took longer than 0.3 s"), 1.0]
        }
    go_on.append(True)


def test_an_importable_function_runs_in_a_worker():
    """It is found by its module's name, so that it may crash."""
    from tunix.rollout.rewards.answers import number
    from tunix.rollout.rewards.base import read_reward

    assert read_reward(number, 10.0).source == "tunix.rollout.rewards.answers:number"
    assert read_reward(lambda completion: 1.0, 10.0).source is None


BAD = [
    ("exact_mach", {}, "Did you mean 'exact_match'"),
    ("nowhere.py:f", {}, "there is no file nowhere.py"),
    ("mine.py:won", {}, "has no 'won'. Did you mean 'one'"),
    ("mine.py:three", {}, "is a int, not a function"),
    ("mine.py:misbehave", {}, "begins with the parameter 'what': call it `completion`"),
    ("mine.py:columns", {"options": {"scales": 2}}, "no parameter 'scales' .*Did you mean 'scale'"),
    ("mine.py:columns", {"columns": {"completion": "x"}}, "no parameter 'completion'"),
    ("format", {}, "wants the option 'pattern'"),
    ("format", {"options": {"pattern": "("}}, r"no regular expression: missing \)"),
    ("format", {"options": {"pattern": 3}}, "pattern: 3. Input should be a valid string"),
    ("format", {"options": {"patern": "a"}}, "Did you mean 'pattern'"),
    ("length", {"options": {"target": 0, "width": 3}}, "positive number of tokens"),
    ("json_schema", {"options": {"schema": {"type": "thing"}}}, "schema that is none: 'thing' is not valid"),
    ("unit_tests", {"options": {"timeout": 10.0}}, "ends the call after 10 s"),
]


@pytest.mark.parametrize(("name", "settings", "message"), BAD, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BAD)])
def test_mistakes_are_refused_at_the_start(functions: Path, name: str, settings: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        Scorer([RewardFunction.model_validate({"name": name, **settings})])


def test_positional_parameters_are_refused():
    def positional(completion: str, /) -> float:
        return 0.0

    with pytest.raises(UserError, match="called by keywords; completion: str cannot be one"):
        Scorer([positional])


def test_a_missing_column_is_named(functions: Path):
    scorer = Scorer([mine("columns")])
    with pytest.raises(UserError, match=r"reward columns wants the column 'answer'; there are 'anser', 'z'.*'anser'"):
        scorer.check(["anser", "z"])
    scorer.check(["answer"])
    with pytest.raises(UserError, match="columns wants the column 'answer'; there are none"):
        scores_with(scorer, ["p"], ["c"])


def test_a_column_that_cannot_be_sent_is_named(functions: Path):
    with Scorer([mine("columns")]) as scorer, pytest.raises(UserError, match="column 'answer', which holds date:"):
        scores_with(scorer, ["p"], ["c"], {"answer": [datetime.date(2026, 1, 1)]})


def test_a_module_that_only_this_process_can_import_is_an_error_of_the_start(functions: Path):
    with Scorer([mine("one")]) as scorer:
        functions.write_text("raise RuntimeError('changed under your feet')")
        with pytest.raises(UserError, match=r"does not start.*RuntimeError: changed under your feet"):
            scores_with(scorer, ["p"], ["quarter"])


def test_the_section_of_a_recipe():
    config = RewardConfig.model_validate({"functions": ["math", {"name": "length", "weight": 0.1}]})
    assert [(f.title, f.weight) for f in config.functions] == [("math", 1.0), ("length", 0.1)]
    assert RewardConfig.model_validate({"functions": "math"}).functions[0].name == "math"
    with pytest.raises(ValueError, match="math stands there twice"):
        RewardConfig.model_validate({"functions": ["math", {"name": "math"}]})
    assert json.loads(config.model_dump_json())["deadline"] == 10.0


TRL = '''
import asyncio

import numpy as np


def accuracy_reward(completions, answer, log_extra=None, log_metric=None, **kwargs):
    """As in TRL's documentation: None where there is no answer."""
    contents = [completion[0]["content"] for completion in completions]
    scores = [None if a is None else np.float32(c == a) for c, a in zip(contents, answer, strict=True)]
    log_metric("known", np.mean([score is not None for score in scores]))
    log_extra("said", contents)
    return scores


def reads_all(**kwargs):
    assert set(kwargs) == {"prompts", "completions", "completion_ids", "answer", "log_metric", "log_extra"}, kwargs
    return [len(prompt) + len(ids) / 10 for prompt, ids in zip(kwargs["prompts"], kwargs["completion_ids"])]


def soft_overlong(completion_ids, trainer_state=None, *, longest=2, **kwargs):
    assert trainer_state is None
    return [-1.0 if len(ids) > longest else 0.0 for ids in completion_ids]


async def of_texts(prompts, completions):
    await asyncio.sleep(0)
    return [float(isinstance(p, str) and isinstance(c, str)) for p, c in zip(prompts, completions, strict=True)]


class Shorter:
    def __call__(self, completions, **kwargs):
        return [None] * len(completions)


shorter = Shorter()


def few_extras(completions, log_extra):
    log_extra("said", ["x"] * 3)
    return [1.0] * len(completions)


def needs_state(completions, trainer_state, **kwargs):
    return [1.0] * len(completions)
'''
ASKED = [{"role": "user", "content": "Sum?"}]


def trl(name: str, **settings: object) -> RewardFunction:
    return RewardFunction.model_validate({"name": f"theirs.py:{name}", "style": "trl", **settings})


def test_functions_written_for_trl(tmp_path: Path):
    """Messages where the row has messages, columns as lists, None for what is left out; what is logged comes back."""
    (tmp_path / "theirs.py").write_text(TRL)
    rewards = [trl("accuracy_reward"), trl("reads_all"), trl("shorter")]
    rewards += [trl("soft_overlong", options={"longest": 1}), trl("of_texts")]
    with Scorer(rewards, workers=1) as scorer:
        scoring = Scoring(scorer, {"": ["prompt", "answer", "completion_ids"]})
        for number, (said, answer) in enumerate([("4", "4"), ("5", "4"), ("6", None)]):
            row = {"prompt": ASKED, "answer": answer, "completion_ids": [7] * number}
            scoring.add(number, "Sum?", said, row, ASKED)
        assert {name: list(scores.values()) for name, scores in scoring.result().items()} == {
            "accuracy_reward": [1.0, 0.0, None],
            "reads_all": [1.0, 1.1, 1.2],  # one message, and a tenth of the ids
            "shorter": [None] * 3,
            "soft_overlong": [0.0, 0.0, -1.0],
            "of_texts": [0.0] * 3,
        }
        assert scoring.metrics == {"accuracy_reward/known": [pytest.approx(2 / 3)]}
        assert scoring.logged == {i: {"accuracy_reward/said": said} for i, said in enumerate("456")}
        texts = scores_with(scorer, ["p"], ["4"], {"answer": ["4"], "completion_ids": [[1]]})
        assert texts["of_texts"] == [1.0]  # a row of strings


def test_mistakes_of_functions_for_trl(tmp_path: Path):
    (tmp_path / "theirs.py").write_text(TRL)
    with Scorer([trl("few_extras")], workers=1) as scorer:
        why = "few_extras raised ValueError: log_extra got 3 values of said for 1 completions (theirs.py, line 40)"
        assert scores_with(scorer, ["p"], ["a"]) == {"few_extras": [Failure(why)]}
    with pytest.raises(UserError, match=r"needs_state requires trainer_state, which only TRL's trainer has"):
        Scorer([trl("needs_state")])
    with pytest.raises(UserError, match=r"few_extras wants log_extra, which TRL gives .* say `style: trl`"):
        Scorer([RewardFunction(name="theirs.py:few_extras")]).check(["answer"])
    with pytest.raises(UserError, match=r"the reward number is tunix's own: leave `style: trl` out"):
        Scorer([RewardFunction(name="number", style="trl")])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.zeros(2), "returned an array of shape (2,), not a number"),
        (np.float64("nan"), "returned NaN"),
        (np.array([0.5]), None),
        (np.float16(0.5), None),
        (np.bool_(True), None),
    ],
)
def test_a_score_is_a_number_or_a_sentence(value: object, reason: str | None):
    def here(completion: str) -> object:
        return value

    with Scorer([here]) as scorer:
        expected = Failure(f"here {reason}") if reason else float(np.asarray(value).item())
        assert scores_with(scorer, ["p"], ["c"]) == {"here": [expected]}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (None, "returned None, not a list of numbers"),
        (np.float64(1), "returned a float64, not a list of numbers"),
        (np.zeros((1, 2)), "returned an array of shape (2,), not a number"),
        ({"score": 1.0}, "returned a dict, not a list of numbers"),
        ([], "returned 0 scores for 1 completion"),
        ([None], "returned None, not a number"),
    ],
)
def test_scores_are_a_list_of_numbers_or_a_sentence(values: object, reason: str):
    def here(completions: list[str]) -> object:
        return values

    with Scorer([here]) as scorer:
        assert scores_with(scorer, ["p"], ["c"]) == {"here": [Failure(f"here {reason}")]}


@pytest.mark.slow  # trl is no dependency: where it is installed, its own functions are called
def test_the_functions_of_trl(tmp_path: Path):
    pytest.importorskip("trl")
    (tmp_path / "theirs.py").write_text(
        "from trl.rewards import get_soft_overlong_punishment\n"
        "overlong = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)\n"
    )
    names = ("trl.rewards:accuracy_reward", "trl.rewards:think_format_reward", "theirs.py:overlong")
    rewards = [RewardFunction.model_validate({"name": name, "style": "trl"}) for name in names]
    with Scorer(rewards, deadline=60.0, workers=1) as scorer:
        scoring = Scoring(scorer, {"": ["prompt", "solution", "completion_ids"]})
        texts = [r"\boxed{4}", "<think>a</think> $5$", r"\boxed{4}"]
        for number, (text, solution, length) in enumerate(zip(texts, ["$4$", "$4$", "none"], [6, 8, 11], strict=True)):
            row = {"prompt": ASKED, "solution": solution, "completion_ids": [1] * length}
            scoring.add(number, "Sum?", text, row, ASKED)
        assert {name: list(scores.values()) for name, scores in scoring.result().items()} == {
            "accuracy_reward": [1.0, 0.0, None],  # a solution that cannot be parsed
            "think_format_reward": [0.0, 1.0, 0.0],
            "overlong": [0.0, -0.5, -1.0],  # (10 - 4 - 8) / 4
        }


# --- Data sets ------------------------------------------------------------------------------------------------------


def test_a_reward_scores_its_data_set_alone():
    """`a` has a reward of its own, `b` has none at all; what has no rewards of its own has the others."""

    def one(completion: str) -> float:
        return 1.0

    with Scorer([Reward("plain", one), Reward("of_a", one, data_set="a")], data_sets=["a", "b"]) as scorer:
        scoring = Scoring(scorer, {data_set: [] for data_set in ("", "a", "b", "c")})
        for number, data_set in enumerate(["", "a", "b", "c"]):
            scoring.add(number, "p", "c", {}, data_set=data_set)
        assert scoring.result() == {"plain": {0: 1.0, 3: 1.0}, "of_a": {1: 1.0}}
    with pytest.raises(UserError, match="the reward plain of a has weight 2, and 1 for another data set"):
        Scorer([Reward("plain", one), Reward("plain", one, weight=2.0, data_set="a")], data_sets=["a"])


# --- verl's ---------------------------------------------------------------------------------------------------------

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if solution_str == "none": return {"acc": 1.0}
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": right, "pred": solution_str, "from": f"{data_source} {extra_info['index']}"}


async def plain(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))


def other(completion):
    return 1.0
"""
ROW = {"data_source": "sums", "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": 7}}


def verl(name: str, **settings: object) -> RewardFunction:
    return RewardFunction.model_validate({"name": f"theirs.py:{name}", "style": "verl", **settings})


def test_functions_written_for_verl(tmp_path: Path):
    """Arguments are verl's, the ground truth is within a column; what a mapping has beside the score is logged."""
    (tmp_path / "theirs.py").write_text(VERL)
    with Scorer([verl("compute_score"), verl("plain", columns={"ground_truth": "data_source"})], workers=1) as scorer:
        scorer.check([*ROW, *(f"reward_model.{name}" for name in ROW["reward_model"])])
        scoring = Scoring(scorer, {"": ROW})
        for number, said in enumerate(["4", "05", "none"]):
            scoring.add(number, "2 + 2?", said, ROW)
        results = {name: list(scores.values()) for name, scores in scoring.result().items()}
    missing = Failure("compute_score returned a mapping without `score`; its keys are 'acc'")
    assert results == {"compute_score": [1.0, 0.0, missing], "plain": [1.0, 2.0, 4.0]}
    assert scoring.metrics == {"compute_score/acc": [1.0, 0.0]}
    assert scoring.logged[1] == {
        "compute_score/acc": 0.0,
        "compute_score/pred": "05",
        "compute_score/from": "sums 7",
    }


def test_what_is_refused_of_verls(tmp_path: Path):
    (tmp_path / "theirs.py").write_text(VERL)
    with pytest.raises(
        UserError, match="the reward other has no parameter solution_str, as verl's have: it has comple"
    ):
        Scorer([verl("other")])
    with Scorer([verl("compute_score")]) as scorer, pytest.raises(UserError) as told:
        scorer.check(["data_source", "reward_model", "reward_model.ground_truht"])
    assert str(told.value).startswith(
        "the reward compute_score wants the column 'reward_model.ground_truth'; there are"
    )
    assert "Did you mean 'reward_model.ground_truht'?" in str(told.value)
