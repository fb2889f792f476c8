"""Generated rows for `--tiny`, in place of those of the hub: a function for each shape that `data.format` names; every
call returns the same rows.

Sums of small numbers: short enough for a byte tokenizer, of different lengths, and with a rule that can be learned.
Chats and prompts have the columns that the shipped rewards and environments read.
"""

from typing import Any

from tunix.data.pictures import needed_pillow

ROWS = 64
PICTURES = 2
"""Pictures of a row at most."""
PICTURE_TOKENS = 8
"""Tokens of a picture at most, where pictures keep their proportions."""
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 40), "blue": (30, 40, 220), "white": (250, 250, 250)}


def messages() -> list[dict[str, Any]]:
    """Conversations; every third one has a second question. Rewards score the last answer."""
    return [{"messages": _turns(index), **_judged(index + (index % 3 == 0))} for index in range(ROWS)]


def prompt_completion() -> list[dict[str, Any]]:
    """Questions and their answers, with the further columns that rewards and environments read."""
    return [
        {"prompt": question, "completion": answer, "question": question, **_judged(index)}
        for index, (question, answer) in enumerate(map(_sum, range(ROWS)))
    ]


def pictures() -> list[dict[str, Any]]:
    """Pictures of one colour, and its name; every fourth conversation has none, and every fifth has two."""
    needed_pillow()
    from PIL import Image

    names = sorted(COLOURS)
    rows = []
    for index in range(ROWS):
        number = 0 if index % 4 == 3 else PICTURES if index % 5 == 4 else 1
        colours = [names[(index + 3 * more) % len(names)] for more in range(number)]
        asked = [*({"type": "image"} for _ in colours), {"type": "text", "text": "Which colours do you see?"}]
        answer = " and ".join(colours) if colours else "none"
        images = [Image.new("RGB", (20 + index, 30), COLOURS[name]) for name in colours]
        turns = [{"role": "user", "content": asked}, _said("assistant", answer)]
        rows.append({"messages": turns, "images": images, "answer": answer})
    return rows


def text() -> list[dict[str, Any]]:
    """Questions and answers as running text."""
    return [{"text": " ".join(_sum(index))} for index in range(ROWS)]


def tokens() -> list[dict[str, Any]]:
    """Rows that are already tokenized: the bytes of the text as ids; the question's labels are -100, so untrained."""
    rows = []
    for index in range(ROWS):
        question, answer = _sum(index)
        prompt, right, wrong = list(question.encode()), list(answer.encode()), list(_wrong(index).encode())
        row = {
            "input_ids": prompt + right,
            "labels": [-100] * len(prompt) + right,
            "prompt_ids": prompt,
            "chosen_ids": right,
            "rejected_ids": wrong,
            "margin": _margin(index),
            "completion_ids": right if index % 2 else wrong,
            "label": bool(index % 2),
        }
        rows.append(row)
    return rows


def pairs() -> list[dict[str, Any]]:
    """Questions with a correct and a wrong answer; the margin is how far the wrong one is off."""
    return [
        {"prompt": _sum(index)[0], "chosen": _sum(index)[1], "rejected": _wrong(index), "margin": _margin(index)}
        for index in range(ROWS)
    ]


def conversations() -> list[dict[str, Any]]:
    """Pairs in UltraFeedback's form: two whole conversations, and the question in a separate column."""
    return [
        {**row, **{side: list(_turn(row["prompt"], row[side])) for side in ("chosen", "rejected")}} for row in pairs()
    ]


def labels() -> list[dict[str, Any]]:
    """Questions with an answer and a label whether it is correct; every second one is."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if index % 2 else "rejected"], "label": bool(index % 2)}
        for index, row in enumerate(pairs())
    ]


def chat_labels() -> list[dict[str, Any]]:
    """Labelled completions whose prompt and completion are lists of messages."""
    return [
        {**row, "prompt": [_said("user", row["prompt"])], "completion": [_said("assistant", row["completion"])]}
        for row in labels()
    ]


def _judged(index: int) -> dict[str, Any]:
    """The columns that the shipped rewards read: the `answer`, a JSON `schema`, and `tests` of a program."""
    left, right = _addends(index)
    answer = str(left + right)
    return {"answer": answer, "schema": {"const": left + right}, "tests": f"assert add({left}, {right}) == {answer}"}


def _addends(index: int) -> tuple[int, int]:
    """The addends of the `index`-th question; they run through all pairs of 0..7."""
    return index % 8, index // 8 % 8


def _sum(index: int) -> tuple[str, str]:
    """The `index`-th question and its answer."""
    left, right = _addends(index)
    return f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}."


def _margin(index: int) -> float:
    """By how much the wrong answer to the `index`-th question is too large."""
    return 1.0 + index % 3


def _wrong(index: int) -> str:
    """A wrong answer to the `index`-th question."""
    left, right = _addends(index)
    return f"{left} plus {right} is {left + right + _margin(index):g}."


def _turns(index: int) -> list[dict[str, str]]:
    """One or two questions with their answers, as chat messages."""
    asked = (index, index + 1) if index % 3 == 0 else (index,)
    return [turn for number in asked for turn in _turn(*_sum(number))]


def _turn(question: str, answer: str) -> tuple[dict[str, str], dict[str, str]]:
    return _said("user", question), _said("assistant", answer)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
