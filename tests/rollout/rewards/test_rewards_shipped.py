r"""The shipped rewards on completions as models write them; every expected score is plain from the texts."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from tests.scorings import scores_with
from tunix.errors import UserError
from tunix.rollout.rewards.answers import gsm8k, last_box, math, number
from tunix.rollout.rewards.base import Failure, read_reward
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.rewards.shipped import cosine, exact_match, format_match, json_schema, length, repetition


@pytest.mark.parametrize(
    ("completion", "answer", "settings", "score"),
    [
        ("gnrsuv\n", "gnrsuv", {}, 1.0),
        ("gnrsuv x", "gnrsuv", {}, 0.0),
        ("the answer is gnrsuv", "gnrsuv", {}, 0.0),
        (" a", "a", {"strip": False}, 0.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
        ("12", 12, {}, 1.0),
        ("12", 12.0, {}, 1.0),  # whole numbers, of which Arrow made floats because of a null among them
        ("\u221212", -12, {}, 1.0),
        ("12", 12.5, {}, 0.0),
        ("12 apples", 12, {}, 0.0),
        (" 12", 12, {"strip": False}, 0.0),
        ("12.0", "12", {}, 0.0),  # texts are compared as texts
        ("None", "None", {}, 1.0),
    ],
)
def test_exact_match(completion: str, answer: object, settings: dict[str, bool], score: float):
    assert exact_match(completion, answer, **settings) == score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("3 apples and 4 pears make 7.", "7", 1.0),
        ("3 apples and 4 pears make 7.", 3, 0.0),
        ("it costs $1,000.00", 1000, 1.0),
        ("1,000,000", "1000000", 1.0),
        ("numbers 1,2,3", 3, 1.0),
        ("-5", "5", 0.0),
        ("that is -5", "-5", 1.0),
        ("8-3=5", "5", 1.0),
        ("8-3", "3", 1.0),  # a minus between two numbers is no sign
        ("0.5", "1/2", 1.0),
        ("3/4", "0.75", 1.0),
        ("5/0", "0", 1.0),  # no fraction: the last number is 0
        (".25", "0.250", 1.0),
        ("1.5e3", "1500", 1.0),
        ("x2 is v7", "7", 0.0),  # digits of a name
        ("none", "7", 0.0),
        ("0.1", "0.10000000000000001", 0.0),  # exact, not floating point
        # Signs: the minus of mathematics, of full width, hyphens and dashes. Of two numbers it stands between them.
        ("The answer is \u22125.", -5, 1.0),
        ("The answer is \u22125.", 5, 0.0),
        ("So it is -5", "\u22125", 1.0),
        ("it is \u20135", -5, 1.0),
        ("it is \u20125", -5, 1.0),
        ("it is \uff0d\uff15", -5, 1.0),
        ("pages 10\u201320", 20, 1.0),
        ("10%-20%", "20%", 1.0),
        ("(8)-3", 3, 1.0),
        ("-€5", 5, 0.0),
        ("\u2212US$1,234.50", -1234.5, 1.0),
        (r"-\$5", -5, 1.0),
        # Thousands
        ("It is 10\u202f000.", 10000, 1.0),
        ("It is 10\u00a0000.", 10000, 1.0),
        ("10\u2009000\u2009000", 10_000_000, 1.0),
        ("1'234", 1234, 1.0),
        ("1\u2019234.5", 1234.5, 1.0),
        ("1_234", 1234, 1.0),
        (r"\$1{,}234", 1234, 1.0),
        (r"10\,000", 10000, 1.0),
        ("\uff11\uff0c\uff12\uff13\uff14", 1234, 1.0),
        ("10 000", 10000, 0.0),  # an ordinary space ends a number
        # Currencies and percent
        ("1\u202f000 €", 1000, 1.0),
        ("US$ 5", 5, 1.0),
        ("50%", 50, 1.0),
        ("50\u00a0%", 0.5, 1.0),
        ("0.5", r"50\%", 1.0),
        ("50 percent", "50%", 1.0),
        ("50%", "0.5%", 0.0),
        ("5%", 50, 0.0),
        # Powers and fractions
        ("1.5 \u00d7 10^3", 1500, 1.0),
        (r"1.5 \times 10^{-3}", 0.0015, 1.0),
        ("1.5 \u00d7 10³", 1500, 1.0),
        ("25 m^2", 25, 1.0),
        ("25 m²", 25, 1.0),
        ("2 1/2", 2.5, 1.0),
        ("-2 1/2", -2.5, 1.0),
        ("2½", 2.5, 1.0),
        (r"-\frac{3}{4}", -0.75, 1.0),
        (r"2\frac12", 2.5, 1.0),
        # GSM8K's mark
        ("#### 42\nIt took 3 steps.", 42, 1.0),
        ("#### Step 3\nSo it is 42.", 42, 1.0),  # a heading
        ("It is 1234", "There are 3.\n#### 1,234", 1.0),
        # Numbers as rows have them
        ("7", np.int64(7), 1.0),
        ("0.1", np.float64(0.1), 1.0),
        ("7", Decimal("7.0"), 1.0),
        ("7", 10**400 + 7, 0.0),
        ("7" * 5000, 7, 0.0),  # more digits than Python converts
    ],
)
def test_number(completion: str, answer: object, score: float):
    assert number(completion, answer) == score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so 6*7=42\n#### 42", "He has <<6*7=42>>42.\n#### 42", 1.0),
        ("#### 1,234\n", "#### 1234", 1.0),
        ("#### $42.00 dollars", "42", 1.0),
        ("42", "#### 42", 0.0),  # the mark is part of the format
        ("#### 41\nno:\n#### 42", "#### 42", 1.0),
        ("#### \n", "#### 42", 0.0),
        ("#### 41\nwell, 42", "#### 42", 0.0),  # only the line of the mark counts
        ("#### 42 of 100", "#### 42", 1.0),  # the number after the mark, not the last of its line
        ("#### **\u22125**", "#### -5", 1.0),
        ("#### $1,234", "It is.\n#### 1\u202f234", 1.0),
    ],
)
def test_gsm8k(completion: str, answer: str, score: float):
    assert gsm8k(completion, answer) == score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"Thus \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{\frac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.3333}", r"\frac{1}{3}", 0.0),
        (r"\boxed{x(x+1)}", "x^2+x", 1.0),
        (r"\boxed{x(x-1)}", "x^2+x", 0.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{(1,2)}", "(2,1)", 0.0),
        (r"\boxed{[0,1)}", "[0,1)", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{3} or rather \boxed{4}", "4", 1.0),
        (r"\boxed{4", "4", 0.0),
        ("4", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        (r"\boxed{\text{even}}", r"\text{even}", 1.0),
        (r"\boxed{4}", r"We see that \boxed{4}", 1.0),  # a whole solution as the answer
        (r"\boxed 5", 5, 1.0),
        (r"so $\boxed 5$.", "5", 1.0),
        (r"\fbox{5}", "5", 1.0),
        (r"\boxed{4} or $\boxed 5$", "5", 1.0),
        (r"\boxed{\text{B}}", "B", 1.0),
        (r"\boxed{\textbf{(B)}}", "B", 1.0),
        (r"\boxed{C}", r"\text{B}", 0.0),
        ("\\boxed{\u22125}", -5, 1.0),
        (r"\boxed{10\,000}", "10000", 1.0),
        (r"\boxed{2^3}", "2", 0.0),
        (r"\boxed{72}", "There are 3.\n#### 72", 1.0),
        (r"\boxed{__import__('os')._exit(1)}", "4", 0.0),  # never evaluated
    ],
)
def test_math(completion: str, answer: str, score: float):
    assert math(completion, answer) == score


def test_boxes_are_balanced():
    assert last_box(r"\boxed{\frac{a}{b}} and \boxed{\{c\}} and \boxed{open") == r"\{c\}"
    assert last_box("no box") is None
    assert last_box(r"\boxed{1} and \boxed{2") == "1"
    assert last_box(r"\(\boxed\frac{1}{2}\)") == r"\frac{1}{2}"
    assert last_box(r"\boxedx") is None
    assert last_box(r"\boxed{\boxed{3}}") == "3"


@pytest.mark.parametrize("answer", [None, True, np.bool_(True), [5], {"a": 5}, float("nan")])
@pytest.mark.parametrize("reward", [exact_match, number, gsm8k, math])
def test_answers_that_are_no_text_and_no_number(reward: Callable[[str, object], float], answer: object):
    """The completion is what Python writes for each of them, and more: nothing equals them."""
    with pytest.raises(ValueError, match="the answer is null: give" if answer is None else "neither a text nor a num"):
        reward(str(answer), answer)
    with pytest.raises(ValueError, match="the answer is"):
        reward(f"\\boxed{{{answer}}}\n#### 5", answer)


@pytest.mark.parametrize("name", ["exact_match", "number", "gsm8k", "math"])
def test_a_null_answer_is_a_failure_and_no_zero(name: str):
    with Scorer([RewardFunction(name=name)], workers=1) as scorer:
        scores = scores_with(scorer, ["p"] * 2, ["None", "5\n#### 5"], {"answer": [None, 5]})[name]
    why = f"{name} raised ValueError: the answer is null: give the row one, or leave the row out"
    assert scores == [Failure(why), 0.0 if name in ("exact_match", "math") else 1.0]


def test_a_schema_that_is_none_is_an_error_of_the_row():
    with Scorer([RewardFunction(name="json_schema")], workers=1) as scorer:
        scores = scores_with(scorer, ["p"] * 3, ["5"] * 3, {"schema": [None, "[5]", {"type": "number"}]})["json_schema"]
    why = "json_schema raised ValueError: the schema is {}, not a mapping or JSON of one"
    assert scores == [Failure(why.format("null")), Failure(why.format("[5]")), 1.0]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a\nb</think>\n<answer>7</answer>\n", 1.0),
        ("well: <think>a</think><answer>7</answer>", 0.0),
        ("<think>a</think>", 0.0),
    ],
)
def test_format(completion: str, score: float):
    assert format_match(completion, pattern=r"<think>.*</think>\s*<answer>.*</answer>") == score


@pytest.mark.parametrize(("tokens", "score"), [(100, 1.0), (90, 0.5), (110, 0.5), (95, 0.75), (80, 0.0), (500, 0.0)])
def test_length(tokens: int, score: float):
    """Target 100, width 20: 1 - |tokens - 100| / 20."""
    assert length("whatever", tokens, target=100, width=20) == score


@pytest.mark.parametrize(
    ("ids", "n", "score"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 2, 1, 2, 1], 2, -0.5),  # 12 21 12 21: two of four are new
        ([7, 7, 7, 7, 7], 2, -0.75),
        ([7, 7, 7], 4, 0.0),  # no 4-gram
        ([], 1, 0.0),
    ],
)
def test_repetition(ids: list[int], n: int, score: float):
    assert repetition("whatever", ids, n=n) == score
    assert repetition("whatever", ids, n=n, penalty=2.0) == 2 * score


@pytest.mark.parametrize(
    ("completion", "tokens", "score"),
    [
        # The paper's numbers at limit 100: right from 2 to 1, wrong from -10 to 0, in the middle halfway.
        ("7", 0, 2.0),
        ("7", 50, 1.5),
        ("7", 25, 1.5 + 0.5 * 0.5**0.5),  # cos(pi / 4) = sqrt(1 / 2)
        ("8", 0, -10.0),
        ("8", 50, -5.0),
        ("7", 100, -10.0),  # reached the limit, right or wrong
        ("8", 101, -10.0),
    ],
)
def test_cosine(completion: str, tokens: int, score: float):
    assert cosine(completion, "7", tokens, limit=100) == pytest.approx(score)
    assert cosine(f"It is {completion}.", 7, tokens, limit=100, grader="number") == pytest.approx(score)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"name": "cosine", "options": {"limit": 0}}, "limit: 0; it is a positive number of tokens"),
        (
            {"name": "cosine", "options": {"limit": 9, "grader": "format"}},
            "the grader 'format', which is none of exact",
        ),
        ({"name": "cosine"}, "limit"),
        ({"name": "repetition", "options": {"n": 0}}, "n: 0; it is a positive number"),
    ],
)
def test_options_that_make_no_sense_are_refused(reward: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        read_reward(RewardFunction(**reward), deadline=1.0)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ('{"n": 1}', 1.0),
        ('Sure!\n```json\n{"n": 1}\n```\nThere.', 1.0),
        ('{"n": "1"}', 0.0),
        ("{}", 0.0),
        ('{"n": 1, "m": 2}', 0.0),
        ('{"n": 1', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_schema(completion: str, score: float):
    assert json_schema(completion, SCHEMA) == score


def test_json_schema_as_a_column_of_json_fetches_nothing():
    with Scorer([RewardFunction(name="json_schema")]) as scorer:
        schemas = ['{"type": "integer"}', '{"$ref": "http://localhost:1/x.json"}']
        scores = scores_with(scorer, ["p"] * 2, ["1", "1"], {"schema": schemas})["json_schema"]
    assert scores[0] == 1.0
    assert isinstance(scores[1], Failure)
    assert "Unresolvable" in scores[1].reason
