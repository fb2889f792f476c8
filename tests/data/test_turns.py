"""`data.turns`: which of the assistant's turns are trained, each as the template shows it when it is the last."""

from typing import Any

import pytest

from tests.data import rendered_as
from tests.data.test_chat import QWEN3, made
from tests.data.test_chat_markup import HARMONY
from tunix.data.config import DataConfig
from tunix.data.examples import Examples, to_example
from tunix.data.pipeline import Batches
from tunix.data.sources import open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import LATER_TURNS, THOUGHTS, Accounting, Dropped, Kept
from tunix.errors import UserError

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
FORGETS = made(QWEN3, MARKS, eos="<|im_end|>")
"""Leaves out the thoughts of turns before the last question."""
KEEPS = made(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    MARKS,
    eos="<|im_end|>",
)
FORGETS_ROLES = made(QWEN3.replace("{%- else -%}", "{%- elif m.role != 'developer' -%}"), MARKS, eos="<|im_end|>")
"""Knows no developer."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CHAT = [user("2?"), says("<think>\neasy\n</think>\n\nTwo."), user("3?"), says("<think>\nsame\n</think>\n\nThree.")]
FIRST = "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\neasy\n</think>\n\nTwo.<|im_end|>⟧\n"
LAST = (
    "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>user\n3?<|im_end|>\n"
    "<|im_start|>assistant\n⟦<think>\nsame\n</think>\n\nThree.<|im_end|>⟧\n"
)


def marked(tokenizer: Tokenizer, example: Kept | Dropped) -> list[str]:
    """The text of each sequence with ⟦ ⟧ around what is trained."""
    assert isinstance(example, Kept), example
    texts = []
    for sequence in example.sequences:
        text, before = "", False
        for token, trained in zip(sequence.tokens.tolist(), sequence.loss_mask.tolist(), strict=True):
            text += ("⟦" if trained and not before else "⟧" if before and not trained else "") + tokenizer.decode(
                [token]
            )
            before = trained
        texts.append(text + "⟧" * before)
    return texts


def example(turns: str | None, tokenizer: Tokenizer = FORGETS, row: Any = None, **data: Any) -> Kept | Dropped:
    shape = "messages" if row is None or "messages" in row else "prompt_completion"
    settings = rendered_as(shape, turns=turns, **{"max_length": 512, **data})
    return to_example(row or {"messages": CHAT}, tokenizer, settings)


def test_each_turn_as_it_was_shown():
    assert marked(FORGETS, example("each")) == [FIRST, LAST]
    assert marked(FORGETS, example("last")) == [LAST]
    whole = example(None)
    assert isinstance(whole, Kept)
    assert [note.rule for note in whole.notes] == [THOUGHTS], "what the template makes of earlier turns is trained"


def test_all_turns_are_refused_where_the_template_shows_them_in_another_way():
    with pytest.raises(UserError) as told:
        example("all")
    assert str(told.value).startswith(
        "the row: message 2 (assistant): the chat template shows this turn, or what comes"
    )
    assert str(told.value).endswith("set data.turns to each or last")
    row = {"messages": [user("2?"), says("Two."), user("3?"), says("Three.")]}
    (together,) = marked(KEEPS, example("all", KEEPS, row))
    assert together.count("⟦") == 2
    assert marked(KEEPS, example(None, KEEPS, row)) == [together]


def test_turns_that_are_context_and_those_of_a_prompt_are_not_trained():
    row = {"messages": [user("2?"), says("Two.", weight=0), user("3?"), says("Three."), user("4?")]}
    (only,) = marked(KEEPS, example("each", KEEPS, row))
    assert only.endswith("⟦Three.<|im_end|>⟧\n")
    parted = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    assert marked(FORGETS, example("each", row=parted)) == [LAST]


def test_turns_that_have_no_room_are_left_out_and_noted():
    first = example("each")
    assert isinstance(first, Kept)
    limit = len(first.sequences[0].tokens)
    for overflow in ("truncate", "drop"):
        short = example("each", max_length=limit, on_overflow=overflow)
        assert marked(FORGETS, short) == [FIRST]
        assert isinstance(short, Kept)
        assert (LATER_TURNS, "1 of 2") in [(note.rule, note.text) for note in short.notes]
    assert isinstance(example("each", max_length=8, on_overflow="drop"), Dropped)


def test_a_batch_counts_turns():
    """Three rows of two turns in batches of four sequences: 4 + 2, and a position within a row."""
    config = DataConfig(train="rows", turns="each", max_length=256, shuffle=False)
    examples = Examples(open_rows([{"messages": CHAT}] * 3), FORGETS, config)
    batches = Batches(examples, 4, seed=0, epochs=1)
    first = next(batches)
    state = batches.get_state()
    (second,) = list(batches)
    batches.close()
    assert [len(x.sequences) for x in (first, second)] == [4, 2]
    assert second.accounting == Accounting(rows=3, kept=3, pieces=6, notes={THOUGHTS: 3})
    resumed = Batches(examples, 4, seed=0, epochs=1)
    resumed.set_state(state)
    (again,) = list(resumed)
    resumed.close()
    assert again.batch.tokens.tolist() == second.batch.tokens.tolist()
    three = Batches(examples, 3, seed=0, epochs=1)  # a batch ends within a row
    assert [len(x.sequences) for x in three] == [3, 3]
    three.close()


def test_what_is_refused():
    with pytest.raises(UserError, match=r"data\.turns: each is about messages, and row 1 of the given rows has text"):
        Examples(open_rows([{"text": "a"}]), FORGETS, DataConfig(train="rows", turns="each"))
    with pytest.raises(ValueError, match="turns: each makes sequences of turns, and packing 'split' pieces of rows"):
        DataConfig(train="rows", turns="each", packing="split")


def test_harmony_s_developer_and_thinking():
    """gpt-oss: thoughts of turns that are over are forgotten, and their end is another token than that of the last."""
    specials = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"]
    tokenizer = made(HARMONY, specials, eos="<|return|>")
    chat = [{"role": "developer", "content": "Be brief."}, user("2?"), says("Two.", thinking="easy")]
    row = {"messages": [*chat, user("3?"), says("Three.", thinking="same")]}
    start = "<|start|>developer<|message|>Be brief.<|end|><|start|>user<|message|>2?<|end|><|start|>assistant"
    assert marked(tokenizer, example("each", tokenizer, row)) == [
        start + "⟦<|channel|>analysis<|message|>easy<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Two.<|return|>⟧",
        start + "<|channel|>final<|message|>Two.<|end|><|start|>user<|message|>3?<|end|><|start|>assistant"
        "⟦<|channel|>analysis<|message|>same<|end|><|start|>assistant<|channel|>final<|message|>Three.<|return|>⟧",
    ]
    with pytest.raises(UserError, match=r"the row: message 3 \(assistant\): the chat template shows this turn"):
        example("all", tokenizer, row)
    refused = example("each", FORGETS_ROLES, row)
    assert isinstance(refused, Dropped)
    assert refused.detail.startswith("message 1 (developer): the chat template does not write its content, 'Be brief.'")
