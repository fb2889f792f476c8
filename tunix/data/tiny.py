"""Made rows for `--tiny`, one function for each shape that `data.format` names. The same rows on every call.

Sums of small numbers: short enough for a byte tokenizer, of different lengths, and with a rule that can be learned.
"""

from typing import Any

ROWS = 64


def messages() -> list[dict[str, Any]]:
    """Conversations; every third one asks a second time."""
    return [{"messages": _turns(index)} for index in range(ROWS)]


def prompt_completion() -> list[dict[str, Any]]:
    """A question and its answer."""
    return [{"prompt": question, "completion": answer} for question, answer in map(_sum, range(ROWS))]


def text() -> list[dict[str, Any]]:
    """Question and answer as running text."""
    return [{"text": " ".join(_sum(index))} for index in range(ROWS)]


def tokens() -> list[dict[str, Any]]:
    """Rows that are tokenised already: the bytes of the text, the question's left out of the training by -100."""
    rows = []
    for question, answer in map(_sum, range(ROWS)):
        asked, said = list(question.encode()), list(answer.encode())
        rows.append({"input_ids": asked + said, "labels": [-100] * len(asked) + said})
    return rows


def _sum(index: int) -> tuple[str, str]:
    """The `index`-th question and its answer; the two addends run through all pairs of 0..7."""
    left, right = index % 8, index // 8 % 8
    return f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}."


def _turns(index: int) -> list[dict[str, str]]:
    """One or two questions with their answers, as chat messages."""
    asked = (index, index + 1) if index % 3 == 0 else (index,)
    pairs = [_sum(one) for one in asked]
    return [turn for question, answer in pairs for turn in _turn(question, answer)]


def _turn(question: str, answer: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}
