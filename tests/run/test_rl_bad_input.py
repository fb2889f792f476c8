"""What goes wrong with rewards, environments and prompts: a counted failure and the run goes on, or one clear message.

Mistakes in a recipe's text are told before any weight is made; those of a reward or an environment of the user's own
when they happen, with all that was trained before on file.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow
from tests.run.test_oversample_run import write_world
from tests.tiny_rl import write_policy, write_prompts
from tests.tiny_runs import lines, losses, metrics, train
from tunix.cli import main

ODD = '''
import os, time


def odd(prompt, completion):
    """Does what the prompt says."""
    if prompt == "raise": raise ZeroDivisionError("no digits")
    if prompt == "hang": time.sleep(3600)
    if prompt == "die": os._exit(3)
    return {"nan": float("nan"), "string": "1.0"}.get(prompt, len(completion) / 10)


def short(prompts, completions):
    """Forgets some of them."""
    return [0.5 for prompt in prompts if prompt != "short"]


def never(completion):
    raise RuntimeError("the judge is on holiday")


def equal(completion):
    return 0.25


def once(completion, calls=open("calls", "a")):
    """Well for the sixteen samples of the first step, and then no more."""
    calls.write(".")
    calls.flush()
    if os.path.getsize("calls") > 16: raise RuntimeError("the judge has gone")
    return len(completion) / 10


def wants(completion, solution):
    return 1.0
'''


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path):
    (tmp_path / "odd.py").write_text(ODD)


def last(run: str = "run") -> dict[str, Any]:
    return metrics(run)[-1]


# --- Told before anything starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.completion_length=0"], ["data.completion_length", "is not a number above 0"]),
        (["rollout.top_p=0.9"], ["rollout", "top_p: 0.9 leaves any number of ids", "set top_k as well, such as 64"]),
        (["rollout.min_p=0.1"], ["rollout", "min_p: 0.1 leaves any number of ids", "set top_k as well, such as 64"]),
        (["rollout.replay={cache: true}"], ["rollout", "replay.cache: of no effect without cache_dtype"]),
        (["rollout.top_k=65"], ["rollout.top_k", "65", "64"]),
        (["rollout.temperature=0"], ["rollout.temperature", "is not a number above 0"]),
        (["algorithm.preset=dappo"], ["algorithm.preset", "dappo", "dapo"]),
        (["algorithm.group_size=1"], ["group_size", "a group of one has nothing to be compared with"]),
        (["algorithm.group_size=0"], ["algorithm.group_size", "is not a number above 0"]),
        (["algorithm.updates=5"], ["algorithm.updates", "5 parts of 4 prompts"]),
        (["reward=null"], ["reward", "grpo learns from rewards", "name some"]),
        (["reward.functions=[exact_mach]"], ["exact_mach", "Did you mean 'exact_match'?"]),
        (["reward.functions=[odd.py:even]"], ["odd.py", "even"]),
        (["reward.functions=[gone.py:odd]"], ["gone.py"]),
        (["reward.functions=[odd.py:wants]"], ["the reward wants", "'solution'", "'completion'"]),
        (["reward.functions=[exact_match]"], ["exact_match", "'answer'", "columns"]),
        (["reward.deadline=0"], ["reward.deadline", "is not a number above 0"]),
        (["reward=null", "rollout.environment={name: gessing}"], ["gessing", "Did you mean 'guessing'?"]),
        (
            ["reward=null", "rollout.environment={name: guessing, options: {tries: 3}}"],
            ["guessing", "'tries'", "guesses"],
        ),
        (
            ["data.on_overflow=error", "data.completion_length=28"],
            ["row 1 of train.jsonl", "data.prompt_length 4", "on_overflow"],
        ),
        (["rollout.mesh={tensor: 4}"], ["rollout.mesh: tensor 4 does not divide 2 kv heads; tensor 2 would"]),
        (["rollout.slots=12"], ["rollout.slots: 12 slots are not split evenly over 8 copies", "8 or 16 would be"]),
        (["rollout.oversample=0.9"], ["rollout.oversample", "is not a number not below 1"]),
        (
            ["reward=null", "rollout.environment={name: world.py:Elsewhere}", "rollout.oversample=1.2"],
            ["rollout.oversample: the environment Elsewhere is not replayable", "take another environment"],
        ),
        (
            ["rollout.stop_after_failures=4"],
            ["rollout", "stop_after_failures: 4 counts episodes of an environment, and none is set"],
        ),
        (["rollout.mismatch_tolerance=-1"], ["rollout.mismatch_tolerance", "is not a number above 0"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and "=" in value[0] else "",
)
def test_mistakes_are_told_at_the_start(
    words: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_world(tmp_path)
    write_policy(tmp_path)
    assert main(["run", "r.yaml", *words]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in said), told
    assert "Traceback" not in told
    assert not Path("run/checkpoints").exists() or not list(Path("run/checkpoints").iterdir())


# --- Rewards --------------------------------------------------------------------------------------------------------


def test_failures_are_counted_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of eight prompts six fail, each in its own way; what is learned is learned from the other two."""
    write_prompts(tmp_path, "raise", "hang", "die", "nan", "string", "short", "fine", "well")
    write_policy(
        tmp_path,
        reward__functions=["odd.py:odd", "odd.py:short"],
        reward__deadline=0.5,
        algorithm={"name": "grpo", "group_size": 2},
        batch_size=8,
        steps=1,
        logging__samples={"groups": 8},
        data__shuffle=False,
    )
    train("r.yaml")
    row = last()
    assert row["reward/failed"] == 0.75
    why = {sample["prompt"]: sample for sample in lines(tmp_path / "run/samples.jsonl")}
    reasons = {
        "raise": "odd raised ZeroDivisionError: no digits",
        "hang": "odd took longer than 0.5 s",
        "die": "odd ",
        "nan": "odd returned NaN",
        "string": "odd returned ",
        "short": "short returned 0 scores for 1 completion",
    }
    for prompt, reason in reasons.items():
        (told,) = why[prompt]["failures"].values()
        assert told.startswith(reason), told
        assert None in why[prompt]["rewards"].values()
    for prompt in ("fine", "well"):
        assert not why[prompt]["failures"]
        assert why[prompt]["rewards"]["short"] == 0.5
    samples = [x for x in lines(tmp_path / "run/samples.jsonl") if x["prompt"] in ("fine", "well")]
    assert row["reward/mean"] == pytest.approx(sum(x["rewards"]["odd"] for x in samples) / 4 + 0.5)
    assert "12 rewards failed and are left out, for instance odd raised ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reward_that_always_fails_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_policy(tmp_path, reward__functions=["odd.py:never"])
    assert main(["run", "r.yaml"]) == 2
    told = capsys.readouterr().err
    assert "none of the 16 samples of a step could be scored, the first because never raised RuntimeError: the" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_what_was_trained_before_a_reward_broke_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_policy(tmp_path, reward__functions=["odd.py:once"])
    assert main(["run", "r.yaml"]) == 2
    assert "the judge has gone" in capsys.readouterr().err
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["1"]
    Path("odd.py").write_text(ODD.replace("> 16", "> 1600"))
    train("r.yaml")
    assert "going on from step 1" in capsys.readouterr().err
    assert [row["step"] for row in metrics("run")] == [1, 2, 3]


@pytest.mark.slow
def test_equal_rewards_and_a_stop_that_never_comes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_policy(tmp_path, reward__functions=["odd.py:equal"], rollout__stop=["THE END"], steps=2)
    train("r.yaml")
    told = capsys.readouterr().err
    assert "step 1: no signal: all rewards are equal (mean 0.25), so there is nothing to learn from" in told
    assert "(2 times so far)" in told
    rows = metrics("run")
    for row in rows:
        assert (row["reward/signal"], row["reward/std"], row["train/grad_norm"]) == (0, 0, 0)
    assert rows[0]["rollout/length"] > 9  # a random model seldom draws its stop token in 12
    assert rows[0]["rollout/truncated"] > 0.5


# --- Prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", slow(["truncate", "drop"]))
def test_prompts_that_are_too_long(overflow: str, tmp_path: Path):
    """Twenty tokens are left for a prompt: BOS and 19 bytes."""
    write_prompts(tmp_path, "a" * 40, "b" * 19, "c" * 20, "d" * 3, "e" * 3, "f" * 3, "g" * 3)
    write_policy(tmp_path, data__on_overflow=overflow, steps=1, data__shuffle=False)
    train("r.yaml")
    row = last()
    if overflow == "truncate":
        assert (row["data/kept"], row["data/truncated"], row["data/dropped"]) == (4, 2, 0)
    else:
        assert (row["data/kept"], row["data/truncated"], row["data/dropped"]) == (4, 0, 2)


# --- Environments ---------------------------------------------------------------------------------------------------

ENVIRONMENT = """
import string
from tunix.rollout.environments.base import Environment, Step


class Odd(Environment):
    stop_strings = tuple(string.ascii_letters + string.digits)

    def reset(self, row, rng):
        return row["prompt"]

    def step(self, action, tokens):
        if action[-1:].isdigit(): raise KeyError("digits")
        return Step("more", reward=1.0, done=action[-1:].isupper())


class Endless(Odd):
    stop_strings = tuple(map(chr, range(128)))

    def step(self, action, tokens):
        return Step("more", reward=1.0)
"""


@pytest.mark.slow
def test_episodes_that_break_or_never_end_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Capitals end it with a reward, digits break it, and small letters would go on for ever; one turn is allowed."""
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    write_policy(tmp_path, reward=None, rollout__environment={"name": "env.py:Odd", "turns": 1}, steps=1)
    train("r.yaml")
    samples = lines(tmp_path / "run/samples.jsonl")
    kinds = {"done": 0, "endless": 0, "broken": 0, "cut": 0}
    for sample in samples:
        (reward,), reason = sample["rewards"].values(), sample["failures"].get("environment")
        end = sample["completion"][-1:]
        if reason == "the environment Odd had not ended after 1 turns":
            assert not end.isupper()
            assert not end.isdigit()
            kinds["endless"] += 1
        elif reason == "the environment Odd raised KeyError: 'digits' (env.py, line 13)":
            assert end.isdigit()
            kinds["broken"] += 1
        else:
            assert reason is None
            assert reward == 1.0
            kinds["done" if end.isupper() else "cut"] += 1
    assert kinds["endless"]
    assert kinds["done"] + kinds["cut"]
    failed = kinds["endless"] + kinds["broken"]
    assert last()["reward/failed"] == failed / 16
    assert f"{failed} rewards failed and are left out, for instance the environment Odd" in capsys.readouterr().err


@pytest.mark.slow  # two runs, and many processes
def test_episodes_that_end_their_process_are_lost_alone(tmp_path: Path):
    """Digits end the process, where other episodes wait: the run is the one in which they raise an error instead."""
    changes = {"reward": None, "steps": 2}
    for name, breaks in (("raises", 'raise KeyError("digits")'), ("exits", "__import__('os')._exit(3)")):
        (tmp_path / f"{name}.py").write_text(ENVIRONMENT.replace('raise KeyError("digits")', breaks))
        environment = {"name": f"{name}.py:Odd", "turns": 2, "workers": 2}
        write_policy(tmp_path, f"{name}.yaml", **changes, output=name, rollout__environment=environment)
        train(f"{name}.yaml")
    raised, exited = (lines(tmp_path / name / "samples.jsonl") for name in ("raises", "exits"))
    reasons = [sample["failures"].get("environment", "") for sample in exited]
    assert "the environment Odd ended its process (exit code 3)" in reasons
    assert [(one["completion"], one["rewards"]) for one in exited] == [
        (one["completion"], one["rewards"]) for one in raised
    ]
    assert len(losses("exits")) == 2
    assert losses("exits") == pytest.approx(losses("raises"), rel=1e-5)  # eight devices add in any order


@pytest.mark.slow
def test_an_environment_that_never_ends_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    write_policy(tmp_path, reward=None, rollout__environment={"name": "env.py:Endless", "turns": 1}, steps=1)
    assert main(["run", "r.yaml"]) == 2
    told = capsys.readouterr().err
    assert "none of the 16 samples of a step could be scored" in told
    assert "the environment Endless had not ended after 1 turns" in told


BREAKS = """
import os
from tunix.rollout.environments.base import Environment, Step


class Breaks(Environment):
    stop_strings = tuple(map(chr, range(128)))

    def reset(self, row, rng):
        return row["prompt"]

    def step(self, action, tokens):
        with open("calls", "a") as file:
            file.write(".")
        if os.path.getsize("calls") > 32: raise RuntimeError("out of order")
        return Step(reward=1.0 if action.isalnum() else 0.0, done=True)
"""


@pytest.mark.slow
def test_failures_in_a_row_end_a_run_that_goes_on_when_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Sixteen episodes of one turn are a step: it breaks with the third."""
    (tmp_path / "env.py").write_text(BREAKS)
    environment = {"name": "env.py:Breaks"}
    write_policy(tmp_path, reward=None, steps=4, rollout__environment=environment, rollout__stop_after_failures=3)
    assert main(["run", "r.yaml"]) == 2
    told = capsys.readouterr().err
    assert (
        "rollout.stop_after_failures: 3 episodes in a row have failed, the last because the environment Breaks" in told
    )
    assert "raised RuntimeError: out of order" in told
    assert "Traceback" not in told
    (tmp_path / "env.py").write_text(BREAKS.replace("> 32", "> 3200"))
    train("r.yaml")
    assert [row["step"] for row in metrics("run")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_an_environments_prompt_that_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    write_prompts(tmp_path, "a" * 5, "b" * 60)
    write_policy(tmp_path, reward=None, rollout__environment={"name": "env.py:Odd", "turns": 1}, batch_size=2)
    assert main(["run", "r.yaml"]) == 2
    told = capsys.readouterr().err
    assert "61 tokens" in told
    assert "data.max_length" in told


@pytest.mark.slow
def test_a_row_that_an_environment_cannot_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"question": x}) + "\n" for x in "ab"))
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    write_policy(tmp_path, reward=None, rollout__environment={"name": "env.py:Odd"}, batch_size=2)
    assert main(["run", "r.yaml"]) == 2
    assert "the environment Odd does not start: it raised KeyError: 'prompt'" in capsys.readouterr().err
