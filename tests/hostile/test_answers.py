r"""What a model may write to break the functions that read its answer: each ends soon, and with a number or None.

The worker processes of rewards end a call at its deadline, and the sample is left out. An answer that costs a deadline
each time it is written would be one that nobody learns to leave off.
"""

import time
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.hostile.attack import attack, numbers
from tunix.rollout.rewards.answers import gsm8k, last_box, last_number, number, plain_number, whole_number
from tunix.rollout.rewards.shipped import exact_match

REPEATED = {
    **{text: text for text in ("1", "1,", "1 ", "1/", "-", "$", "^", "^{", ".", "1e", "x 10^", "1\\,", "1'000", "½")},
    **{
        text: text
        for text in (r"\frac", r"\frac{1}{", r"\boxed{", r"\boxed", r"\boxed 1", r"\boxed{}", "####", "{", "}")
    },
    "dots that end nothing": r"\boxed a" + "." * 200 + "a",
    "marked lines": "#### 1\n",
    "spaces": "1" + " " * 200,
}


def seconds(function: Any, text: str) -> float:
    start = time.process_time()
    function(text)
    return time.process_time() - start


@pytest.mark.parametrize("text", REPEATED.values(), ids=REPEATED)
def test_a_repeated_text_is_read_in_time_that_grows_with_its_length(text: str):
    r"""Sixteen times the characters take 16 times as long, and would take 256 times where the time grew with their
    square: 20 thousand characters of `\boxed{` took a minute. Below 0.2 s nothing is compared."""
    for read in (last_number, last_box, whole_number, plain_number):
        short, long = (text * (length // len(text)) for length in (2_000, 32_000))
        seconds(read, short)
        assert seconds(read, long) < max(0.2, 64 * min(seconds(read, short) for _ in range(3)))


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{\boxed{1}", "1"),
        (r"\boxed{\boxed{1}}", "1"),
        (r"\boxed{1}\boxed{2", "1"),
        (r"\boxed{\}}", r"\}"),
        (r"}}\boxed{1}", "1"),
        (r"\boxed{{a}{b}} {", "{a}{b}"),
        (r"\boxed 5\).", "5"),
        (r"\boxed{1} and \boxed $", "1"),
        (r"\boxed{1} \boxed", "1"),
        (r"\boxed \boxed", r"\boxed"),
        (r"\boxed $1$", None),
        (r"\boxed{ \fbox{a} b }", "a"),
        (r"\boxed3{x}y!?", "3{x}y"),
    ],
)
def test_the_last_whole_box_is_read(text: str, box: str | None):
    assert last_box(text) == box


PIECES = [
    *(
        r"\boxed{",
        r"\fbox",
        "}",
        "{",
        r"\frac",
        "{1}",
        "{0}",
        "12",
        "####",
        "\n",
        " ",
        "/",
        "0",
        "e9",
        "e999",
        "^",
        "10",
    ),
    *(
        "**10",
        r"\times 10^{999}",
        "⁺⁹",
        "¼",
        "٣",
        "٣٤",
        "²",
        "½",
        "$",
        "%",
        "-",
        "\u2212",
        ",",
        "000",
        "'",
        r"\,",
        r"\sqrt{",
    ),
    *(
        "__import__('os').mkdir('exploded')",
        ".",
        "..",
        "9" * 4500,
        "(",
        ")",
        r"\text{",
        "nan",
        "inf",
        "\ud800",
        "\0",
        "\U0001d7d8",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=12).map("".join)
ANSWERS = TEXTS | st.integers() | st.floats() | st.none() | st.booleans() | st.lists(st.integers(), max_size=1)


def scores(case: tuple[str, Any]) -> None:
    completion, answer = case
    for reward in (number, gsm8k, exact_match):
        try:
            assert reward(completion, answer) in (0.0, 1.0)
        except ValueError as error:  # the row's, whatever the completion says
            if "answer" not in str(error):
                raise
    box = last_box(completion)
    assert box is None or box in completion
    if (value := last_number(completion)) is not None:
        assert value.equals(value)


@numbers
def test_no_answer_is_an_error(number: int):
    attack(scores, st.tuples(TEXTS, ANSWERS), number)
