"""Made rows for `--tiny`, one function for each shape that `data.format` names. The same rows on every call.

Sums of small numbers: short enough for a byte tokenizer, of different lengths, and with a rule that can be learned.
Chats and prompts bring what the shipped rewards and environments ask of a row.
"""

from typing import Any

ROWS = 64


def messages() -> list[dict[str, Any]]:
    """Conversations; every third one asks a second time. What is judged is the last answer."""
    return [{"messages": _turns(index), **_judged(index + (index % 3 == 0))} for index in range(ROWS)]


def prompt_completion() -> list[dict[str, Any]]:
    """A question and what is said to it, with the further columns that rewards and environments ask for."""
    return [
        {"prompt": question, "completion": said, "question": question, **_judged(index)}
        for index, (question, said) in enumerate(map(_sum, range(ROWS)))
    ]


def text() -> list[dict[str, Any]]:
    """Question and answer as running text."""
    return [{"text": " ".join(_sum(index))} for index in range(ROWS)]


def tokens() -> list[dict[str, Any]]:
    """Rows that are tokenised already: the bytes of the text, the question's left out of the training by -100."""
    rows = []
    for question, answer in map(_sum, range(ROWS)):
        asked, said = list(question.encode()), list(answer.encode())
        rows.append({"input_ids": asked + said, "labels": [-100] * len(asked) + said, "prompt_ids": asked})
    return rows


def _judged(index: int) -> dict[str, Any]:
    """What the shipped rewards read of a row: the `answer`, a JSON `schema`, and `tests` of a program."""
    left, right = _addends(index)
    answer = str(left + right)
    return {"answer": answer, "schema": {"const": left + right}, "tests": f"assert add({left}, {right}) == {answer}"}


def _addends(index: int) -> tuple[int, int]:
    """The `index`-th pair; they run through all pairs of 0..7."""
    return index % 8, index // 8 % 8


def _sum(index: int) -> tuple[str, str]:
    """The `index`-th question and its answer."""
    left, right = _addends(index)
    return f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}."


def _turns(index: int) -> list[dict[str, str]]:
    """One or two questions with their answers, as chat messages."""
    asked = (index, index + 1) if index % 3 == 0 else (index,)
    pairs = [_sum(one) for one in asked]
    return [turn for question, answer in pairs for turn in _turn(question, answer)]


def _turn(question: str, answer: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}
