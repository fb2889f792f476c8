r"""Rewards for questions with one right answer: the completion's answer is compared with the row's.

`number` reads the last number, `gsm8k` the number after the last `####`, `math` the last `\boxed{...}`. Equal numbers
are equal however they are written (`1,000.0` is `1000`); anything else is compared as mathematics, by Math-Verify
(https://github.com/huggingface/Math-Verify) with sympy.
"""

import re
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(
    r"(?<![\w.])\$?[-+]?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d{1,3}\b)?", re.IGNORECASE
)
_BOX = re.compile(r"\\f?boxed\s*\{")


def number(completion: str, answer: Any) -> float:
    """1 where the last number of the completion equals the last number of the answer, else 0.

    Args:
        completion: what the model wrote; thousands' commas, a currency's dollar and a sign are understood, and a
            fraction such as 3/4 is a number.
        answer: a number, or a text that ends with it.

    Raises:
        ValueError: the answer holds no number.
    """
    return float(last_number(completion) == _required(answer))


def gsm8k(completion: str, answer: Any) -> float:
    """1 where the number after the completion's last `####` equals the answer's, else 0.

    The format of Cobbe et al. 2021 (arXiv 2110.14168): a solution whose last line is `#### 42`. A completion without
    `####` scores 0.

    Args:
        completion: what the model wrote.
        answer: the data's solution with its `#### 42`, or the number alone.

    Raises:
        ValueError: the answer holds no number.
    """
    _, mark, rest = completion.rpartition("####")
    lines = rest.strip().splitlines()
    return float(bool(mark and lines) and last_number(lines[0]) == _required(str(answer).rpartition("####")[2]))


def math(completion: str, answer: Any) -> float:
    r"""1 where the last `\boxed{...}` of the completion is mathematically equal to the answer, else 0.

    Equal texts and equal numbers are recognised directly; else both are parsed as LaTeX and compared symbolically
    (`\frac{1}{2}` is 0.5, `x(x+1)` is `x^2+x`, sets and intervals by their elements). A completion without a box
    scores 0.

    Args:
        completion: what the model wrote.
        answer: LaTeX, with or without `\boxed`, or a number; of a whole solution the last box is read.

    Raises:
        ValueError: the answer is empty.
    """
    given = last_box(completion)
    gold = str(answer).strip()
    gold = last_box(gold) or gold.strip("$ ")
    if not gold:
        raise ValueError("the answer is empty")
    if given is None:
        return 0.0
    if "".join(given.split()) == "".join(gold.split()):
        return 1.0
    numbers = _whole_number(given), _whole_number(gold)
    return float(_equal(gold, given) if None in numbers else numbers[0] == numbers[1])


def last_number(text: str) -> Fraction | None:
    """The last number in a text, e.g. 1000 of `it costs $1,000.00.`, or None."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    value = _value(numbers[-1].group())
    if len(numbers) > 1 and text[numbers[-2].end() : numbers[-1].start()].strip(" ") == "/" and value:
        return _value(numbers[-2].group()) / value
    return value


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` of a text, braces balanced; None where there is no complete one."""
    content = None
    for match in _BOX.finditer(text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0) * (text[end - 1] != "\\")
            end += 1
        if not depth:
            content = text[match.end() : end - 1].strip()
    return content


def _required(answer: Any) -> Fraction:
    value = last_number(str(answer))
    if value is None:
        raise ValueError(f"the answer {str(answer)!r:.80} holds no number")
    return value


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace("$", ""))


def _whole_number(text: str) -> Fraction | None:
    """The value of a text that is a number and nothing else; None for any other."""
    text = text.strip("$ ").replace("\\!", "").replace("{,}", ",")
    match = _NUMBER.fullmatch(text)
    return _value(text) if match else None


def _equal(gold: str, given: str) -> bool:
    """Symbolic equality of two LaTeX expressions."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit: our deadline is one
    latex = [LatexExtractionConfig()]  # its reader of plain expressions would evaluate them as Python
    wanted, found = (
        parse(f"${text}$", latex, parsing_timeout=None)  # pyright: ignore[reportArgumentType]: it takes None
        for text in (gold, given)
    )
    return bool(verify(wanted, found, timeout_seconds=None))
