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
    rows = []
    for index in range(ROWS):
        problems = [_problem(index), _problem(index + 1)][: 2 if index % 3 == 0 else 1]
        turns = [turn for problem in problems for turn in _chat(problem["question"], problem["right"])]
        rows.append({"messages": turns, **problems[-1]["judged"]})
    return rows


def prompt_completion() -> list[dict[str, Any]]:
    """Questions and their answers, with the further columns that rewards and environments read."""
    return [
        {"prompt": x["question"], "completion": x["right"], "question": x["question"], **x["judged"]}
        for x in map(_problem, range(ROWS))
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
        question = [*({"type": "image"} for _ in colours), {"type": "text", "text": "Which colours do you see?"}]
        answer = " and ".join(colours) if colours else "none"
        images = [Image.new("RGB", (20 + index, 30), COLOURS[name]) for name in colours]
        rows.append({"messages": _chat(question, answer), "images": images, "answer": answer})
    return rows


def text() -> list[dict[str, Any]]:
    """Questions and answers as running text."""
    return [{"text": f"{x['question']} {x['right']}"} for x in map(_problem, range(ROWS))]


def tokens() -> list[dict[str, Any]]:
    """Rows that are already tokenized: the bytes of the text as ids; the question's labels are -100, so untrained."""
    rows = []
    for index, problem in enumerate(map(_problem, range(ROWS))):
        prompt, right, wrong = (list(problem[name].encode()) for name in ("question", "right", "wrong"))
        row = {
            "input_ids": prompt + right,
            "labels": [-100] * len(prompt) + right,
            "prompt_ids": prompt,
            "chosen_ids": right,
            "rejected_ids": wrong,
            "margin": problem["margin"],
            "completion_ids": right if index % 2 else wrong,
            "label": bool(index % 2),
        }
        rows.append(row)
    return rows


def pairs() -> list[dict[str, Any]]:
    """Questions with a correct and a wrong answer; the margin is how far the wrong one is off."""
    return [
        {"prompt": x["question"], "chosen": x["right"], "rejected": x["wrong"], "margin": x["margin"]}
        for x in map(_problem, range(ROWS))
    ]


def conversations() -> list[dict[str, Any]]:
    """Pairs in UltraFeedback's form: two whole conversations, and the question in a separate column."""
    return [{**row, **{side: _chat(row["prompt"], row[side]) for side in ("chosen", "rejected")}} for row in pairs()]


def labels() -> list[dict[str, Any]]:
    """Questions with an answer and a label whether it is correct; every second one is."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if index % 2 else "rejected"], "label": bool(index % 2)}
        for index, row in enumerate(pairs())
    ]


def chat_labels() -> list[dict[str, Any]]:
    """Labelled completions whose prompt and completion are lists of messages."""
    rows = []
    for row in labels():
        question, answer = _chat(row["prompt"], row["completion"])
        rows.append({**row, "prompt": [question], "completion": [answer]})
    return rows


def _problem(index: int) -> dict[str, Any]:
    """The `index`-th question with a right and a wrong answer, and how far that is off; `judged` has the columns that
    the shipped rewards read: the `answer`, a JSON `schema`, and `tests` of a program."""
    left, right, margin = index % 8, index // 8 % 8, 1.0 + index % 3  # all pairs of 0..7
    total = left + right
    return {
        "question": f"What is {left} plus {right}?",
        "right": f"{left} plus {right} is {total}.",
        "wrong": f"{left} plus {right} is {total + margin:g}.",
        "margin": margin,
        "judged": {
            "answer": str(total),
            "schema": {"const": total},
            "tests": f"assert add({left}, {right}) == {total}",
        },
    }


def _chat(question: Any, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
