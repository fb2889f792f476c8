"""The picture of a run's curves: well-formed SVG, points where they belong by hand, round ticks."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tunix.run.curves import COLOURS, MOST, curve_of, svg, ticks, write_curves
from tunix.trainer.progress import LEVELS, evaluated, sparkline, summary

SPACE = "{http://www.w3.org/2000/svg}"
SFT = [
    {"step": 0, "eval/loss": 4.0, "eval/reward": 0.0},
    {"step": 1, "train/loss": 3.0},
    {"step": 2, "train/loss": 2.0},
]
RL = [
    {"step": 1, "reward/mean": 0.0, "train/loss": 0.1, "policy/entropy": None},
    {"step": 2, "reward/mean": 1.0, "train/loss": -0.1, "policy/entropy": 1.0},
    {"step": 4, "reward/mean": 0.5, "train/loss": float("nan"), "policy/entropy": 2.0},
]


def test_stages_stand_one_behind_the_other():
    stages = [("0_sft", SFT), ("1_grpo", RL)]
    assert curve_of("train/loss", stages).parts == (((1.0, 3.0), (2.0, 2.0)), ((3.0, 0.1), (4.0, -0.1)))
    assert curve_of("policy/entropy", stages).points == [(4.0, 1.0), (6.0, 2.0)]
    assert curve_of("rollout/length", stages).parts == ()


def test_the_picture_is_drawn_to_scale():
    text = svg("a run", [("run", RL)])
    assert text is not None
    root = ET.fromstring(text)
    titles = [node.text for node in root.iter(f"{SPACE}text") if node.get("font-weight")]
    assert titles == ["reward", "loss", "entropy of the policy, nats per token"]
    line = next(root.iter(f"{SPACE}polyline"))
    assert line.get("stroke") == COLOURS[0]
    xs, ys = zip(*(map(float, point.split(",")) for point in str(line.get("points")).split()), strict=True)
    # From 62 px to 704 px over four steps; the middle value is halfway between the other two; up is smaller.
    assert xs == pytest.approx((62 + 642 / 4, 62 + 642 / 2, 704), abs=0.01)
    assert ys[0] - ys[2] == pytest.approx(ys[2] - ys[1], abs=0.01)
    assert ys[1] < ys[2] < ys[0]
    assert not [node for node in root.iter(f"{SPACE}path") if node.get("stroke-dasharray")]


def test_preferences_have_panels_and_labels_do_not_overlap():
    names = ("rewards/accuracy", "rewards/margin", "train/loss")
    rows = [
        {"step": 1, **dict.fromkeys(names, 0.5), "eval/rewards/accuracy": 0.25},
        {"step": 2, **dict.fromkeys(names, 0.75)},
    ]
    text = svg("pairs", [("run", rows)])
    assert text is not None
    found = list(ET.fromstring(text).iter(f"{SPACE}text"))
    assert [node.text for node in found if node.get("font-weight")] == [
        "accuracy of the rewards",
        "margin of the rewards",
        "loss",
    ]
    ends = {node.text: float(str(node.get("x"))) for node in found if node.get("fill") in COLOURS}
    # "eval/rewards/accuracy 0.25" has 26 letters; the other one ends two letters before it begins, 7 pixels each.
    assert ends["eval/rewards/accuracy 0.25"] - ends["rewards/accuracy 0.75"] == 7 * (26 + 2)


def test_names_cannot_break_the_picture(tmp_path: Path):
    path = write_curves(tmp_path, [("<a&b>", SFT), ("c", RL)])
    assert path == tmp_path / "curves.svg"
    root = ET.fromstring(path.read_text())
    assert "<a&b>" in [node.text for node in root.iter(f"{SPACE}text")]
    assert len([node for node in root.iter(f"{SPACE}path") if node.get("stroke-dasharray")]) == 2 * 3


def test_nothing_measured_is_no_picture(tmp_path: Path):
    assert write_curves(tmp_path, [("run", [])]) is None
    assert write_curves(tmp_path, [("run", [{"step": 1, "train/loss": 2.0}])]) is None
    assert not list(tmp_path.iterdir())


def test_a_flat_curve_is_drawn():
    text = svg("flat", [("run", [{"step": step, "reward/mean": 0.0} for step in (1, 2)])])
    assert text is not None
    ET.fromstring(text)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.5, 1]),  # a quarter is rounded up to 0.5
        (0.0, 8.0, [0, 2, 4, 6, 8]),
        (-0.013, 0.012, [-0.01, 0, 0.01]),
        (2.1, 2.9, [2.2, 2.4, 2.6, 2.8]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]):
    assert ticks(low, high) == pytest.approx(expected)


def test_long_curves_are_means_of_neighbours():
    rows = [{"step": step, "train/loss": float(step % 2)} for step in range(2 * MOST)]
    assert curve_of("train/loss", [("run", rows)]).points == [(2 * i + 0.5, 0.5) for i in range(MOST)]
    points = [(float(row["step"]), row["train/loss"]) for row in rows[:MOST]]
    assert curve_of("train/loss", [("run", rows[:MOST])]).points == points


def test_a_curve_in_one_line():
    assert sparkline([]) == sparkline([0.5]) == sparkline([0.5, 0.5]) == ""
    assert sparkline([0.0, 7.0, 3.0]) == LEVELS[0] + LEVELS[7] + LEVELS[3]
    # Eight numbers in four letters: the means 0.5, 2.5, 4.5, 6.5 are 0, 7/3, 14/3 and 7 levels up.
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], width=4) == LEVELS[0] + LEVELS[2] + LEVELS[5] + LEVELS[7]
    assert sparkline([float("nan"), 0.0, 1.0]) == LEVELS[0] + LEVELS[7]


def test_a_person_sees_what_matters_of_a_step_and_of_an_evaluation():
    values = {"rewards/accuracy": 0.75, "rewards/chosen": -1.0, "train/loss": 0.5, "perf/step_seconds": 2.0}
    assert summary(values) == ["accuracy 0.7500", "loss 0.5000"]
    found = {"eval/logprobs/chosen": -9.0, "eval/rewards/accuracy": 0.75, "eval/rewards/chosen": 1.0, "eval/loss": 0.5}
    assert evaluated(found) == "eval/loss 0.5000  eval/rewards/accuracy 0.7500"
    assert evaluated({"eval/reward": 1.0, "eval/loss": 2.0}) == "eval/loss 2.0000  eval/reward 1.0000"
