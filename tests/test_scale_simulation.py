"""The simulation of long-tailed rollouts (`benchmarks.scale`) against what can be computed without it."""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scale.arithmetic import (
    Lengths,
    constant,
    expected_longest,
    exponential,
    log_normal,
    most_used_one_by_one,
    most_used_refilled,
    used_beside,
    used_in_turns,
)
from benchmarks.scale.simulation import WARM, simulate, simulate_oversampled, simulated

STEPS = 400


def test_the_longest_of_many_is_what_is_known_of_it():
    """Exponential: 1 + 1/2 + ... + 1/n. One log-normal: its mean. Two: 2 Phi(sigma / sqrt 2) of the mean."""
    assert expected_longest(exponential(), 100) == pytest.approx(sum(1 / i for i in range(1, 101)), rel=1e-5)
    assert expected_longest(log_normal(1.0), 1) == pytest.approx(1, rel=1e-5)
    two = 1 + math.erf(0.7 / 2)
    assert expected_longest(log_normal(0.7), 2) == pytest.approx(two, rel=1e-5)
    # Of one exponential, longer than 2 with probability e^-2, and then by 1 on average.
    assert expected_longest(exponential(), 1, 2.0) == pytest.approx(2 + math.exp(-2), rel=1e-5)


def test_lengths_have_the_mean_and_the_distribution_that_they_say():
    for lengths in (log_normal(0.5), log_normal(1.0), exponential()):
        drawn = lengths.draw(np.random.default_rng(0), (40_000,))
        assert drawn.mean() == pytest.approx(1, abs=0.03), lengths.name
        for x in (0.5, 1.0, 3.0):
            assert np.mean(drawn <= x) == pytest.approx(lengths.cdf(np.array([x]))[0], abs=0.01), lengths.name


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize(("staleness", "learning", "slots", "learner"), [(0, 0.5, 2 / 3, 1 / 3), (1, 1, 1, 1)])
def test_constant_lengths_leave_nothing_idle_but_turns(
    staleness: int, learning: float, slots: float, learner: float, refill: bool
):
    """In turns a step takes 1 + 1/2; beside each other sampling and learning take 1 each, at once."""
    used = simulated(constant(), 8, learning, staleness, 20, refill=refill)
    assert used[:3] == pytest.approx((slots, learner, learner / learning))


def test_four_steps_by_hand():
    """Two slots, lengths 1 and 3, learning takes 2: a step takes 5 in turns, of whose 10 slot times 4 are used."""
    number = WARM + 4
    drawn, learning = np.tile([1.0, 3.0], (number, 1)), np.full(number, 2.0)
    assert simulate(drawn, learning, 2, 0)[:3] == pytest.approx((0.4, 0.4, 0.2))
    # Beside each other a step takes 3, the longer of both: 4 of 6 slot times, and 2 of 3 of the learner.
    assert simulate(drawn, learning, 2, 1)[:3] == pytest.approx((4 / 6, 2 / 3, 1 / 3))


@pytest.mark.parametrize("lengths", [exponential(), log_normal(0.5), log_normal(1.0)], ids=lambda one: one.name)
@pytest.mark.parametrize("slots", [16, 64])
def test_turns_and_one_step_ahead_are_as_the_arithmetic_says(lengths: Lengths, slots: int):
    for learning in (1.0, 4.0):
        for staleness, computed in ((0, used_in_turns), (1, used_beside)):
            used = simulated(lengths, slots, learning, staleness, STEPS)
            assert used.steps == pytest.approx(computed(lengths, slots, learning), rel=0.04)
            # A step's answers take a slot for 1 on average, and its learning the learner for `learning`.
            assert used.slots == pytest.approx(used.steps, rel=0.04)
            assert used.learner == pytest.approx(used.steps * learning)


@pytest.mark.parametrize("staleness", [1, 4, 8])
def test_more_steps_ahead_stay_within_their_bounds(staleness: int):
    lengths, slots = log_normal(1.0), 64
    for learning in (1.0, 4.0):
        one_by_one = simulated(lengths, slots, learning, staleness, STEPS)
        refilled = simulated(lengths, slots, learning, staleness, STEPS, refill=True)
        assert one_by_one.steps <= 1.04 * most_used_one_by_one(lengths, slots, learning)
        assert one_by_one.steps <= 1.001 * refilled.steps
        assert refilled.steps <= 1.04 * most_used_refilled(lengths, slots, learning, staleness)


def test_oversampling_uses_more_of_the_slots():
    lengths, slots = log_normal(1.0), 64
    turns = simulated(lengths, slots, 1.0, 0, STEPS)
    more = simulate_oversampled(lengths, slots, 1.0, STEPS)
    assert 1.2 * turns.slots < more.slots < 1
    # Six of eight groups are trained on in a step, so two are always a step later: 2/6 of a step for each.
    assert more.late == pytest.approx(2 / 6, abs=0.01)
    # Nothing is begun beyond what is trained on: the same as in turns.
    plain = simulate_oversampled(lengths, slots, 1.0, STEPS, oversample=1.0)
    assert plain.slots == pytest.approx(used_in_turns(lengths, slots, 1.0), rel=0.04)


def test_the_page_has_the_arithmetic_of_today():
    """The table of docs/scale.md: cases in its head, such as `512, 0.5`, and what is computed of them below."""
    page = (Path(__file__).parents[1] / "docs/scale.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = {name: cells for name, *cells in lines}
    for case, *stated in zip(
        *(rows[name] for name in ("slots, sigma", "`E[M]`", "in turns, computed", "one ahead, computed")), strict=True
    ):
        slots, sigma = case.split(", ")
        each = log_normal(float(sigma)), int(slots)
        computed = (expected_longest(*each), used_in_turns(*each, 1.0), used_beside(*each, 1.0))
        assert stated == [f"{number:.3f}" for number in computed], case
