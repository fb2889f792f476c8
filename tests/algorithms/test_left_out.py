"""Rewards that leave a completion out: they are no part of its sum, but one that failed makes the sum unknown."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tunix.algorithms.advantages import gdpo
from tunix.algorithms.episodes import (
    are_scored,
    as_sequence,
    report,
    require_scores,
    rewards_of,
    row,
    total_rewards,
)
from tunix.algorithms.ppo.algorithm import token_rewards
from tunix.data.types import Prompt
from tunix.errors import UserError
from tunix.rollout.backlog import episode_of, saved_episode
from tunix.rollout.types import Scored
from tunix.types import Completion, Sampling

NAN = math.nan
WEIGHTS = {"a": 1.0, "b": 2.0}
SAMPLING = Sampling(max_tokens=2)


def episode(a: float, b: float, failures: Mapping[str, str] = MappingProxyType({})) -> Scored:
    prompt = Prompt(np.array([7], np.int32), "p", {})
    logprobs = np.array([-0.5, -0.5], np.float32)
    completion = Completion(np.array([8, 9], np.int32), logprobs, "length", np.zeros(2, np.int32), SAMPLING, ((0, 2),))
    return Scored(prompt, completion, "c", {"a": a, "b": b}, failures, logged={"a/said": "c"})


GROUPS = [[episode(1.0, 3.0), episode(NAN, 3.0), episode(NAN, NAN), episode(NAN, 3.0, {"a": "a returned NaN"})]]


def test_what_is_left_out_is_no_part_of_the_sum():
    """1 + 2 x 3; 2 x 3 alone; nothing; and unknown."""
    np.testing.assert_array_equal(total_rewards(GROUPS, WEIGHTS), [[7.0, 6.0, NAN, NAN]])
    np.testing.assert_array_equal(are_scored(GROUPS), [[True, True, False, False]])
    assert [as_sequence(x).weight for x in GROUPS[0]] == [1.0, 1.0, 0.0, 0.0]
    assert [token_rewards(x, WEIGHTS, 0.0).tolist() for x in GROUPS[0]] == [[0, 0, 7], [0, 0, 6], [0] * 3, [0] * 3]
    assert [x.unscored for x in GROUPS[0]] == [None, None, "a and b returned None for it", "a returned NaN"]
    require_scores(GROUPS)
    with pytest.raises(UserError, match="none of the 1 samples of a step could be scored, the first because a and b r"):
        require_scores([GROUPS[0][2:3]])


def test_metrics_and_notes_say_what_was_left_out():
    numbers, notes = report(GROUPS, WEIGHTS, np.array([True]))
    assert (numbers["reward/mean"], numbers["reward/failed"]) == (6.5, 0.5)
    assert (numbers["reward/a"], numbers["reward/b"]) == (1.0, 3.0)
    assert "reward/a" not in report([GROUPS[0][1:3]], WEIGHTS, np.array([True]))[0]  # nothing that it scored
    assert notes == (
        "1 rewards failed and are left out, for instance a returned NaN",
        "1 samples have no score and are left out: a and b returned None for it",
    )
    assert row(0, GROUPS[0][1])["rewards"] == {"a": None, "b": 3.0}
    assert row(0, GROUPS[0][1])["logged"] == {"a/said": "c"}
    saved: Any = saved_episode(GROUPS[0][1])
    assert episode_of(saved, GROUPS[0][1].prompt, SAMPLING).logged == {"a/said": "c"}


def test_gdpo_compares_a_reward_among_those_that_it_scored():
    """a: 0 and 2, of mean 1 and deviation 1, so -1, 1 and nothing; b: 1, 1, 4 of mean 2 and deviation root 2."""
    groups = [[episode(0.0, 1.0), episode(2.0, 1.0), episode(NAN, 4.0), episode(NAN, NAN)]]
    found = gdpo(rewards_of(groups), {"a": 1.0, "b": 1.0}, eps=0.0, scored_PG=are_scored(groups))
    parts = np.array([-1.0 - 1 / math.sqrt(2), 1.0 - 1 / math.sqrt(2), 2 / math.sqrt(2)])
    np.testing.assert_allclose(found, [[*(parts / np.sqrt((parts**2).mean())), 0.0]], atol=1e-12)
