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
    for index in range(ROWS):
        question, answer = _sum(index)
        asked, said, wrong = list(question.encode()), list(answer.encode()), list(_wrong(index).encode())
        given = {"input_ids": asked + said, "labels": [-100] * len(asked) + said, "prompt_ids": asked}
        compared = {"chosen_ids": said, "rejected_ids": wrong, "margin": _margin(index)}
        rows.append({**given, **compared, "completion_ids": said if index % 2 else wrong, "label": bool(index % 2)})
    return rows


def pairs() -> list[dict[str, Any]]:
    """A question, its answer, and a wrong one; how wrong it is tells the margin."""
    return [
        {"prompt": _sum(index)[0], "chosen": _sum(index)[1], "rejected": _wrong(index), "margin": _margin(index)}
        for index in range(ROWS)
    ]


def chat_pairs() -> list[dict[str, Any]]:
    """The same as messages, prompt and answers apart."""
    return [
        {
            "prompt": [_said("user", row["prompt"])],
            **{side: [_said("assistant", row[side])] for side in ("chosen", "rejected")},
            "margin": row["margin"],
        }
        for row in pairs()
    ]


def conversations() -> list[dict[str, Any]]:
    """The same as UltraFeedback has it: two whole conversations, and the question beside them."""
    return [
        {**row, **{side: list(_turn(row["prompt"], row[side])) for side in ("chosen", "rejected")}} for row in pairs()
    ]


def transcripts() -> list[dict[str, Any]]:
    """The same as Anthropic's HH has it: two whole texts."""
    return [
        {
            **{side: f"\n\nHuman: {row['prompt']}\n\nAssistant: {row[side]}" for side in ("chosen", "rejected")},
            "margin": row["margin"],
        }
        for row in pairs()
    ]


def labels() -> list[dict[str, Any]]:
    """Questions with an answer and whether it is right; every second one is."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if index % 2 else "rejected"], "label": bool(index % 2)}
        for index, row in enumerate(pairs())
    ]


def chat_labels() -> list[dict[str, Any]]:
    """The same as messages."""
    return [
        {**row, "prompt": [_said("user", row["prompt"])], "completion": [_said("assistant", row["completion"])]}
        for row in labels()
    ]


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
    pairs = [_sum(one) for one in asked]
    return [turn for question, answer in pairs for turn in _turn(question, answer)]


def _turn(question: str, answer: str) -> tuple[dict[str, str], dict[str, str]]:
    return _said("user", question), _said("assistant", answer)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
