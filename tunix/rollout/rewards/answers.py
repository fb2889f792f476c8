r"""Rewards for questions with one right answer: the completion's answer is compared with the row's.

`number` reads the last number, `gsm8k` the number after the last `####`, `math` the last `\boxed{...}`. Equal numbers
are equal however they are written (`1,000.0` is `1000`, `−5` is `-5`); anything else is compared as mathematics, by
Math-Verify (https://github.com/huggingface/Math-Verify) with sympy. An answer that is null, a list or a truth value is
an error of the row, and nothing equals it.
"""

import re
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import isfinite
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

_PLAIN = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),  # hyphens, dashes of figures, minus signs
        **dict.fromkeys("\u2044\u2215\uff0f", "/"),
        **dict.fromkeys("\uff0e\u066b", "."),
        **dict.fromkeys("\uff0c\u066c", ","),
        **dict.fromkeys("\uff05\ufe6a\u066a", "%"),
        "\uff0b": "+",
    }
    | dict(
        zip("¼½¾⅕⅖⅗⅘⅛⅜⅝⅞", (".25", ".5", ".75", ".2", ".4", ".6", ".8", ".125", ".375", ".625", ".875"), strict=True)
    )
)
"""Unicode's characters in numbers -> ASCII's; Python's `\\d` and `int` know all digits."""

_SPACE = "[\u00a0\u2007\u2008\u2009\u200a\u202f\u205f]"
"""Spaces that do not end a number: no-break and narrow ones."""
_THOUSANDS = rf"(?:[,'\u2019_]|{_SPACE}|\{{,\}}|,?\\[,!:; ])"
_CURRENCY = r"(?:[A-Za-z]{0,3}\\?[$\u00a2-\u00a5\u0e3f\u20a0-\u20cf\uff04\uffe0\uffe1\uffe5][ \u00a0\u202f]?)"
# As after a digit, a minus after a closing bracket, a percent sign or a degree sign stands between two numbers.
_SIGN = r"(?:(?<![)%°])[-+])"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>{_SIGN}?{_CURRENCY}?{_SIGN}?)"
    rf"(?P<digits>(?:\d{{1,3}}(?:{_THOUSANDS}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d{{1,3}}\b)?"
    r"(?P<percent>\s?(?:\\?%|per ?cent\b))?"
)
_TENS = re.compile(
    r"(?<=\d)\s*(?:\u00d7|\*|x|·|\\times|\\cdot)\s*10(?:(?:\^|\*\*)\{?([-+]?\d{1,3})\}?|([⁺⁻]?[⁰¹²³⁴-⁹]{1,3}))(?!\d)"
)
"""`x 10^3`, with any sign of multiplication, after a number."""
_SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_POWER = re.compile(r"\^\s*(?:\{[^{}]*\}|[-+]?\w+)")
"""An exponent, which is no number of the text: `25 m^2` ends with 25."""
_FRACTION = re.compile(r"(?:(?<=\d)\s*(?P<mixed>))?\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_DIGITS = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
_LONGEST = 4000
"""Characters of a number; Python refuses to convert more than 4300 digits."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"(?<!\\)[{}]")
_UNBRACED = re.compile(r"(?:\{[^{}]*\}|[^\s${}])+")


class Number(NamedTuple):
    """A number as a text writes it."""

    value: Fraction
    """Its value without the percent sign, e.g. 50 of `50%`."""
    percent: bool = False
    """Whether a percent sign follows."""

    def equals(self, other: "Number") -> bool:
        """Whether both are equal; `50%` is 50, where the question asks for percent, and 0.5."""
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


def number(completion: str, answer: Any) -> float:
    """1 where the last number of the completion equals the last number of the answer, else 0.

    A line that is `####` and a number, as in GSM8K, takes precedence over all other numbers of its text.

    Args:
        completion: what the model wrote; thousands' separators, currencies, signs and percent are understood, and a
            fraction such as 3/4 is a number.
        answer: a number, or a text that ends with it.

    Raises:
        ValueError: the answer holds no number, or is null, a list or a truth value.
    """
    wanted, written = _required(answer_text(answer)), last_number(completion)
    return float(written is not None and written.equals(wanted))


def gsm8k(completion: str, answer: Any) -> float:
    """1 where the number after the completion's last `####` equals the answer's, else 0.

    The format of Cobbe et al. 2021 (arXiv 2110.14168): a solution whose last line is `#### 42`. A completion without
    `####` scores 0.

    Args:
        completion: what the model wrote.
        answer: the data's solution with its `#### 42`, or the number alone.

    Raises:
        ValueError: the answer holds no number, or is null, a list or a truth value.
    """
    text = answer_text(answer)
    wanted = _marked(text) or _required(text)
    written = _marked(completion)
    return float(written is not None and written.equals(wanted))


def math(completion: str, answer: Any) -> float:
    r"""1 where the last `\boxed{...}` of the completion is mathematically equal to the answer, else 0.

    Equal texts and equal numbers are recognised directly; else both are parsed as LaTeX and compared symbolically
    (`\frac{1}{2}` is 0.5, `x(x+1)` is `x^2+x`, sets and intervals by their elements). A completion without a box
    scores 0.

    Args:
        completion: what the model wrote.
        answer: LaTeX, with or without `\boxed`, or a number; of a whole solution the last box is read, or what follows
            its `####`.

    Raises:
        ValueError: the answer is empty, null, a list or a truth value.
    """
    box = last_box(completion)
    text = answer_text(answer)
    gold = last_box(text) or text.rpartition("####")[2].strip().strip("$ ")
    if not gold:
        raise ValueError("the answer is empty")
    if box is None:
        return 0.0
    if "".join(box.split()) == "".join(gold.split()):
        return 1.0
    written, wanted = whole_number(box.strip("$ ")), whole_number(gold)
    if written is not None and wanted is not None:
        return float(written.equals(wanted))
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit: our deadline is one
    latex = [LatexExtractionConfig()]  # its reader of plain expressions would evaluate them as Python
    of_answer, of_box = (
        parse(f"${text}$", latex, parsing_timeout=None)  # pyright: ignore[reportArgumentType]: it takes None
        for text in (gold, box)
    )
    return float(bool(verify(of_answer, of_box, timeout_seconds=None)))


def answer_text(answer: Any) -> str:
    """A row's answer as text: a text as it is, a number as Python writes it.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(answer, str):
        return answer
    is_whole = isinstance(answer, Integral) and not isinstance(answer, bool)  # and may be too large for a float
    if is_whole or (isinstance(answer, Real | Decimal) and not isinstance(answer, bool) and isfinite(answer)):
        return str(answer)
    if answer is None:
        raise ValueError("the answer is null: give the row one, or leave the row out")
    raise ValueError(
        f"the answer is {answer!r:.80}, neither a text nor a number: give the row one answer, or compare with what it "
        "has in a reward of your own"
    )


def last_number(text: str) -> Number | None:
    """The last number in a text, e.g. 1000 of `it costs $1,000.00.`, or None; that of a line `#### 42` if there is
    one."""
    marked = [line.partition("####")[2].strip(" *.") for line in text.splitlines() if line.lstrip().startswith("####")]
    alone = [value for line in marked if (value := whole_number(line)) is not None]
    return next(reversed(alone or _numbers(text)), None)


def whole_number(text: str) -> Number | None:
    """The value of a text that is a number and nothing else; None for any other."""
    plain = _plain(text)
    match = _NUMBER.fullmatch(plain)
    if match is not None and len(plain) <= _LONGEST:
        return _value(match)
    fraction = re.fullmatch(r"[-+]?\d+(?:\.\d+)?\s*/\s*\d+", plain)
    numbers = _numbers(text) if fraction else []
    return numbers[0] if len(numbers) == 1 else None


def plain_number(text: str) -> Fraction | None:
    """The value of a text that is digits, at most with a sign, a point and an exponent; None for any other."""
    plain = text.translate(_PLAIN)
    return Fraction(plain) if len(plain) <= _LONGEST and _DIGITS.fullmatch(plain) else None


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}` of a text, braces balanced; of `\boxed 5` what stands
    before the next white space. None where there is no complete one."""
    closing, opened = dict[int, int](), list[int]()  # each brace is looked at once, however boxes are nested
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    last = None
    for box in _BOX.finditer(text):
        if box.end() in closing or _UNBRACED.match(text, box.end(), box.end() + 1):
            last = box.end()
    if last is None:
        return None
    if last in closing:
        return text[last + 1 : closing[last]].strip()
    content = cast("re.Match[str]", _UNBRACED.match(text, last)).group()
    end = re.match(r"(?:[)\]]\\|[.,;:!?])*", content[::-1])  # from behind, where it cannot begin at every mark
    return content[: len(content) - len(cast("re.Match[str]", end).group())]


def _required(answer: str) -> Number:
    value = last_number(answer)
    if value is None:
        raise ValueError(f"the answer {answer!r:.80} holds no number")
    return value


def _marked(text: str) -> Number | None:
    """The first number after the last `####` of a text, in the same line; None where there is none."""
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return next(iter(_numbers(lines[0])), None) if mark and lines else None


def _numbers(text: str) -> list[Number]:
    """All numbers of a text, in order: `3/4` is one, and so is `2 1/2`."""
    text = _POWER.sub(" ", _plain(text))
    matches = [match for match in _NUMBER.finditer(text) if len(match.group()) <= _LONGEST]
    between = [text[a.end() : b.start()] for a, b in pairwise(matches)] + ["", ""]
    values, place = [], 0
    while place < len(matches):
        whole, rest = _value(matches[place]), [_value(match) for match in matches[place + 1 : place + 3]]
        mixed = len(rest) == 2 and between[place] == " " and between[place + 1] == "/"
        if mixed and whole.value.denominator == 1 and 0 < rest[0].value < rest[1].value and not rest[0].percent:
            part = rest[0].value / rest[1].value
            values.append(Number(whole.value + (-part if "-" in matches[place]["sign"] else part), rest[1].percent))
            place += 3
        elif rest and between[place].strip() == "/" and rest[0].value:
            values.append(Number(whole.value / rest[0].value, rest[0].percent))
            place += 2
        else:
            values.append(whole)
            place += 1
    return values


def _plain(text: str) -> str:
    """A text whose numbers are written in ASCII, with `3/4` for LaTeX's fractions and `e3` for powers of ten."""
    text = text.translate(_PLAIN)
    text = _FRACTION.sub(lambda x: f"{'' if x['mixed'] is None else ' '}{x[2] or x[4]}/{x[3] or x[5]}", text)
    return _TENS.sub(lambda x: f"e{x[1] or x[2].translate(_SUPERSCRIPTS)}", text)


def _value(match: re.Match[str]) -> Number:
    digits = re.sub(r"[^\d.]", "", match["digits"])
    value = Fraction(digits + (match["exponent"] or ""))
    return Number(-value if "-" in match["sign"] else value, match["percent"] is not None)
