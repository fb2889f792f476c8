"""Steps that begin more groups than they train on, with several processes: each races its own share of the prompts.

The sampler is that of tests/rollout/test_oversample.py: tokens and lengths are a function of the request alone.
"""

import json
import string
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pretended import pretended
from tests.distributed.test_mistakes import until_step
from tests.distributed.test_runs import assert_same_export, assert_same_numbers, write_judged
from tests.rollout.test_oversample import DISPATCH, GROUP, SAMPLING, Sampler, drawn, names, step, stream
from tests.several import several
from tests.tiny_runs import metrics
from tunix.algorithms.episodes import flat
from tunix.distributed import processes
from tunix.distributed.meeting import LOST
from tunix.rollout.backlog import saved_episode

Steps = list[tuple[list[dict[str, Any]], str]]
"""Of each step its episodes, and the position after it."""


def taken(saved: str | None = None, most: int = 99, sampled: list[int] | None = None) -> Steps:
    """What this process trains on, from a position on."""
    found: Steps = []
    sampler = Sampler()
    with closing(stream()) as steps:
        if saved is not None:
            steps.set_state(json.loads(saved))
            sampler.version = json.loads(saved)["version"]
        while len(found) < most and (data := next(steps, None)) is not None:
            episodes = [saved_episode(one) | {"version": one.version} for one in flat(step(data, sampler))]
            found.append((episodes, json.dumps({**steps.get_state(), "version": sampler.version})))
    if sampled is not None:
        sampled.append(sampler.sampled)
    return found


def trained(found: Steps) -> list[list[str]]:
    """The prompt of each episode, by step."""
    return [[one["prompt"]["tokens"]["bytes"] for one in episodes] for episodes, _ in found]


@pytest.mark.parametrize("number", [2, 3, 5])
def test_every_prompt_is_trained_once_and_all_have_the_same(monkeypatch: pytest.MonkeyPatch, number: int):
    """Eleven prompts in steps of three; with five processes two have none of them to take."""
    sampled: list[int] = []
    each, _ = pretended(monkeypatch, number, lambda _: taken(sampled=sampled))
    assert all(found == each[0] for found in each)
    assert [len(episodes) for episodes, _ in each[0]] == [3 * GROUP, 3 * GROUP, 3 * GROUP, 2 * GROUP]
    prompts = [prompt for episodes in trained(each[0]) for prompt in episodes]
    assert all(prompts.count(prompt) == GROUP for prompt in prompts)
    assert len(set(prompts)) == 11
    # No token is sampled twice: what one process has begun another goes on with.
    completions = [one["completion"] for episodes, _ in each[0] for one in episodes]
    assert sum(sampled) == sum(sum(end - start for start, end in one["turns"]) for one in completions)


def test_each_process_takes_what_is_complete_first_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """By hand from the lengths. Three groups of five prompts: the first process takes two of prompts 0, 2 and 4, the
    second one of prompts 1 and 3."""

    def act(index: int) -> tuple[list[int], list[int]]:
        with closing(stream()) as steps:
            data = next(steps)
            assert data.backlog is not None
            spare = data.backlog.take(2)
            data.backlog.put_back(spare)
            ends = []
            for place, prompt in enumerate([*data.prompts, *spare]):
                longest = max(len(drawn(x)) for x in prompt.requests(GROUP, SAMPLING, 5))  # pyright: ignore
                ends.append((-(-longest // DISPATCH), place, int(prompt.tokens[-1])))
            own = sorted(ends[0::2])[:2] + sorted(ends[1::2])[:1]
            expected = [name for _, place, name in sorted(own, key=lambda end: end[1])]
            return names(step(data, Sampler())), expected

    each, _ = pretended(monkeypatch, 2, act)
    for found, expected in each:
        assert found == expected


def test_a_resumed_run_goes_on_to_the_bit_and_with_another_number_trains_each_prompt_once(
    monkeypatch: pytest.MonkeyPatch,
):
    (whole, _), _ = pretended(monkeypatch, 2, lambda _: taken())
    position = whole[1][1]
    assert any(x and x["finish"] == "paused" for one in json.loads(position)["begun"] for x in one["so_far"])
    (one, other), _ = pretended(monkeypatch, 2, lambda _: taken(position))
    assert one == other == whole[2:]
    monkeypatch.undo()
    assert processes.number() == 1
    prompts = [x for episodes in [*trained(whole[:2]), *trained(taken(position))] for x in episodes]
    assert len(prompts) == 11 * GROUP
    assert all(prompts.count(prompt) == GROUP for prompt in prompts)


def test_a_replacement_is_raced_for_too(monkeypatch: pytest.MonkeyPatch):
    """As DAPO's refills do: one group is asked for, which is a share of the first process alone."""

    def act(_: int) -> tuple[list[int], list[int]]:
        sampler = Sampler()
        with closing(stream()) as steps:
            data = next(steps)
            before = names(step(data, sampler))
            return before, names(data.collect(sampler, data.more(1), GROUP))

    (one, other), _ = pretended(monkeypatch, 2, act)
    assert one == other
    assert len(one[1]) == 1
    assert not set(one[0]) & set(one[1])


@pytest.mark.slow
def test_a_run_whose_process_is_killed_goes_on_exactly(tmp_path: Path):
    """Rewards of single completions and of the whole batch, groups that are replaced, and groups that were begun."""
    over = {"name": "grpo", "group_size": 4, "dynamic_sampling": True, "kl": 0.05}
    rollout = {"oversample": 1.5, "stop": list(string.printable[:75])}
    write_judged(tmp_path, algorithm=over, rollout=rollout, checkpoint={"every": 2, "keep": 9}, steps=6)
    with several(tmp_path, 2, "r.yaml", "output=whole") as whole:
        whole.end_well()
    with several(tmp_path, 2) as run:
        until_step(run, tmp_path / "run", 3)
        run.processes[1].kill()
        assert run.processes[0].wait(90) == LOST
    with several(tmp_path, 2) as again:
        again.end_well()
    assert "going on from step" in again.log(0)
    assert_same_numbers(tmp_path / "whole", tmp_path / "run", tolerance=0.0)
    assert_same_export(tmp_path / "whole", tmp_path / "run")
    assert any(row.get("rollout/stale", 0) > 0 for row in metrics(tmp_path / "run"))
    record = json.loads((tmp_path / "run/checkpoints/2/record/metadata").read_text())
    assert any(x is not None for one in record["data"]["begun"] for x in one["so_far"])
