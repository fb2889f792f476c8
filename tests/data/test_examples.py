"""Rows of every shape become the tokens and masks that are written out by hand, or a message that names the row."""

import numpy as np
import pytest

from tests.data import rendered_as
from tunix.config import RowKind
from tunix.data.chat import render_chat
from tunix.data.config import DataConfig
from tunix.data.examples import prompt_text, to_example
from tunix.data.pipeline import Cutter
from tunix.data.shapes import Rendering, detect_format, rendering
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import CUT_AWAY, NOTHING_TRAINED, TOO_LONG, Accounting, Dropped, Kept
from tunix.errors import UserError
from tunix.types import Sequence

TOKENIZER = bytes_tokenizer()
BOS, EOS = 2, 1
A, B, C = (5 + ord(letter) for letter in "abc")
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def kept(row, how, tokenizer=TOKENIZER):
    example = to_example(row, tokenizer, how, "row 7")
    assert isinstance(example, Kept), example
    return example.sequences[0].tokens.tolist(), example.sequences[0].loss_mask.astype(int).tolist()


def test_strings():
    assert kept({"prompt": "ab", "completion": "c"}, rendered_as("prompt_completion")) == (
        [BOS, A, B, C, EOS],
        [0, 0, 0, 1, 1],
    )
    assert kept({"text": "abc"}, rendered_as("text")) == ([BOS, A, B, C, EOS], [0, 1, 1, 1, 1])
    every = rendered_as("prompt_completion", train_on=RowKind.ALL)
    assert kept({"prompt": "ab", "completion": "c"}, every) == ([BOS, A, B, C, EOS], [0, 1, 1, 1, 1])
    # Qwen's tokenizers put no BOS; then the completion's first token is the sequence's first where the prompt is empty.
    chatml = bytes_tokenizer("chatml")
    assert kept({"prompt": "", "completion": "ab"}, rendered_as("prompt_completion"), chatml) == (
        [A, B, EOS],
        [0, 1, 1],
    )


def test_messages():
    tokens, mask = render_chat(CHAT, TOKENIZER)
    assert kept({"messages": CHAT}, rendered_as("messages")) == (tokens.tolist(), mask.astype(int).tolist())
    # <end_of_turn> after the b, but not the newline behind it.
    assert [TOKENIZER.decode([i]) for i in tokens[mask]] == ["b", "<end_of_turn>"]
    filled = [{**message, "tool_calls": None} for message in CHAT]  # as Arrow fills it
    assert kept({"messages": filled}, rendered_as("messages"))[0] == tokens.tolist()
    tokens, mask = render_chat([*CHAT, *CHAT], TOKENIZER)
    half = len(tokens) // 2
    split = {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]}
    assert kept(split, rendered_as("prompt_completion"))[0] == tokens.tolist()
    assert kept(split, rendered_as("prompt_completion"))[1] == [0] * (half + 1) + mask[half + 1 :].astype(int).tolist()
    everything = kept({"messages": CHAT}, rendered_as("messages", train_on=RowKind.ALL))[1]
    assert everything == [0] + [1] * (len(everything) - 1)


def test_given_tokens_need_no_tokenizer_and_stay_as_they_are():
    how = rendered_as("tokens")
    assert kept({"input_ids": [9, 0, 1, 9]}, how, None) == ([9, 0, 1, 9], [0, 1, 1, 1])
    assert kept({"input_ids": [9, 8, 7], "labels": [-100, -100, 7]}, how, None) == ([9, 8, 7], [0, 0, 1])
    assert kept({"input_ids": [9, 8, 7], "labels": [9, 8, -100]}, how, None) == ([9, 8, 7], [0, 1, 0])
    assert kept({"input_ids": np.array([9, 8, 7]), "loss_mask": [True, False, True]}, how, None) == (
        [9, 8, 7],
        [0, 0, 1],
    )
    assert kept({"input_ids": [9, 8], "labels": None, "loss_mask": [0, 1]}, how, None) == ([9, 8], [0, 1])


def test_columns_and_weight():
    how = rendered_as("prompt_completion", columns={"prompt": "question", "completion": "answer", "weight": "w"})
    example = to_example({"question": "a", "answer": "b", "w": 0.25}, TOKENIZER, how)
    assert isinstance(example, Kept)
    assert example.sequences[0].weight == 0.25
    for value in (None, 1, 1.0):
        example = to_example({"text": "a", "weight": value}, TOKENIZER, rendered_as("text"))
        assert isinstance(example, Kept)
        assert example.sequences[0].weight == 1.0


def test_overflow_and_nothing_to_train():
    row = {"prompt": "ab", "completion": "ccc"}  # 7 tokens, the last 4 trained
    cut = to_example(row, TOKENIZER, rendered_as("prompt_completion", max_length=5))
    assert isinstance(cut, Kept)
    assert cut.truncated
    assert cut.sequences[0].tokens.tolist() == [BOS, A, B, C, C]
    whole = to_example(row, TOKENIZER, rendered_as("prompt_completion", max_length=7, on_overflow="error"))
    assert isinstance(whole, Kept)
    assert not whole.truncated
    assert to_example(row, TOKENIZER, rendered_as("prompt_completion", max_length=3)) == Dropped(CUT_AWAY)
    assert to_example(row, TOKENIZER, rendered_as("prompt_completion", max_length=6, on_overflow="drop")) == Dropped(
        TOO_LONG
    )
    assert to_example({"messages": CHAT[:1]}, TOKENIZER, rendered_as("messages")) == Dropped(NOTHING_TRAINED)
    assert to_example({"input_ids": [3]}, None, rendered_as("tokens")) == Dropped(NOTHING_TRAINED)
    assert to_example({"input_ids": []}, None, rendered_as("tokens")) == Dropped(NOTHING_TRAINED)
    with pytest.raises(UserError, match=r"row 7 has 7 tokens, more than data\.max_length 6: .*on_overflow"):
        to_example(row, TOKENIZER, rendered_as("prompt_completion", max_length=6, on_overflow="error"), "row 7")


def test_format_is_read_off_the_columns():
    assert detect_format({"messages": [], "prompt": ""}, {}) == "messages"
    assert detect_format({"prompt": "", "completion": "", "text": ""}, {}) == "prompt_completion"
    assert detect_format({"q": "", "a": ""}, {"prompt": "q", "completion": "a"}) == "prompt_completion"
    assert detect_format({"text": "", "prompt": ""}, {}) == "text"
    assert detect_format({"input_ids": [], "messages": []}, {}) == "tokens"
    with pytest.raises(
        UserError, match=r"row 1 of x has the columns 'mesages', 'id'; wanted are .*Is it 'messages' for 'mesages'\?"
    ):
        detect_format({"mesages": [], "id": 1}, {}, "row 1 of x")
    with pytest.raises(UserError, match=r"maps 'promt', which is none of our columns: .*Did you mean 'prompt'"):
        rendering(DataConfig(train="x", columns={"promt": "q"}), {"text": ""}, "row 1")
    config = DataConfig(train="x", format="text", max_length=9, on_overflow="drop", columns={"text": "body"})
    assert rendering(config, {"body": ""}, "row 1", RowKind.ALL) == Rendering("text", config, RowKind.ALL)


@pytest.mark.parametrize(
    ("row", "shape", "message"),
    [
        ({"txt": "a"}, "text", "there is no column 'text'; it has 'txt'. Did you mean 'txt'"),
        ({"text": None}, "text", "the column 'text' is null"),
        ({"text": 3}, "text", "text is 3, not a string"),
        ({"prompt": "a"}, "prompt_completion", "no column 'completion'; it has 'prompt'"),
        ({"prompt": "a", "completion": CHAT}, "prompt_completion", "both strings or both lists"),
        ({"prompt": 1, "completion": 2}, "prompt_completion", "messages is 1, not a list"),
        ({"messages": "a"}, "messages", "messages is 'a', not a list"),
        (
            {"messages": [{"role": "usr", "content": ""}]},
            "messages",
            "message 1 has the role 'usr'.*Did you mean 'user'",
        ),
        ({"messages": CHAT, "tools": "{"}, "messages", "tools is '{', not a list of tools"),
        ({"input_ids": "ab"}, "tokens", "input_ids is 'ab', not a list of whole numbers"),
        ({"input_ids": [[1], [2, 3]]}, "tokens", "not a list of whole numbers"),
        ({"input_ids": [1.5]}, "tokens", "not a list of whole numbers"),
        ({"input_ids": [1, -1]}, "tokens", "input_ids holds -1"),
        ({"input_ids": [1, 2**40]}, "tokens", "beyond any vocabulary"),
        ({"input_ids": [1, 600]}, "tokens", "token id 600 is beyond the model's vocabulary of 500"),
        ({"input_ids": [1, 2], "labels": [1]}, "tokens", "labels has 1 values for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [2, 1]}, "tokens", r"labels\[0\] is 2, but input_ids\[0\] is 1: .*unshifted"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "tokens", "loss_mask holds 0 and 1, not 2"),
        ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [0, 1]}, "tokens", "labels and loss_mask"),
        ({"text": "a", "weight": -1}, "text", "weight is -1, not a finite number"),
        ({"text": "a", "weight": float("nan")}, "text", "weight is nan"),
        ({"text": "a", "weight": True}, "text", "weight is True"),
        ({"text": "a", "weight": "1"}, "text", "weight is '1'"),
    ],
)
def test_bad_rows_are_named(row, shape, message):
    with pytest.raises(UserError, match=f"^row 7: .*{message}"):
        to_example(row, TOKENIZER, rendered_as(shape, vocab_size=500), "row 7")


def test_without_a_tokenizer_only_ids():
    with pytest.raises(UserError, match="row 7: it has prompt and completion, but the model's folder has no tokenizer"):
        to_example({"prompt": "a", "completion": "b"}, None, rendered_as("prompt_completion"), "row 7")


def test_accounting_adds_up():
    examples = [Dropped("x"), Dropped("y"), Dropped("x")]
    total = sum(map(Accounting.of, examples), Accounting(2, 2, 1))
    assert total == Accounting(rows=5, kept=2, truncated=1, dropped={"x": 2, "y": 1})
    with pytest.raises(AssertionError):
        Accounting(rows=2, kept=1)


def test_tokens_have_weights_by_every_row_or_none():
    """A weight of 0 is not trained, nor is the first token; what is too long is cut with its weights."""
    row = {"input_ids": [9, 8, 7, 6], "loss_weights": [1, 0.5, 0, 2]}
    how = rendering(DataConfig(train="x", max_length=3), row, "row 1")
    (found,) = to_example(row, None, how).sequences
    assert (found.tokens.tolist(), found.loss_mask.tolist()) == ([9, 8, 7], [False, True, False])
    assert found.per_token["loss_weights"].tolist() == [1.0, 0.5, 0.0]
    plain = rendering(DataConfig(train="x"), {"input_ids": [1, 2]}, "row 1")
    for one, other, said in (
        ({"input_ids": [1, 2]}, how, "there is no column 'loss_weights'"),
        ({**row, "loss_weights": [1, 2]}, how, "loss_weights has 2 values for 4 input_ids"),
        ({**row, "loss_weights": [1, -1, 0, 0]}, how, r"loss_weights\[1\] is -1, not a finite number of at least 0"),
        ({**row, "loss_weights": [1, float("nan"), 0, 0]}, how, r"loss_weights\[1\] is nan"),
        ({**row, "loss_weights": "all"}, how, "not a list of numbers"),
        ({**row, "loss_mask": [0, 1, 1, 1]}, how, "a weight of 0 says what is not trained"),
        (row, plain, "which the first row has not"),
    ):
        with pytest.raises(UserError, match=f"row 7: .*{said}"):
            to_example(one, None, other, "row 7")


def test_pieces_keep_their_tokens_weights():
    row = {"input_ids": [9, 8, 7, 6, 5], "loss_weights": [0, 1, 2, 3, 4]}
    example = Kept((Sequence(np.arange(5), np.arange(5) > 0, per_token={"loss_weights": np.arange(5.0)}),), row=row)
    cut = Cutter(DataConfig(train="x", max_length=3, packing="split"), RowKind.COMPLETION)
    pieces = [cut.take(example)[0] for _ in range(2)]
    assert [piece and piece.sequences[0].per_token["loss_weights"].tolist() for piece in pieces] == [[0, 1, 2], [3, 4]]


TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]


@pytest.mark.parametrize(
    ("row", "train_on", "advice"),
    [
        ({"conversations": TURNS}, "completion", "'conversations' holds ShareGPT's turns .* in a column messages"),
        (
            {"conversations": TURNS},
            "prompt",
            "'conversations' holds ShareGPT's turns .*human is user, gpt is assistant",
        ),
        ({"messages": TURNS}, "completion", "'messages' holds ShareGPT's turns"),
        ({"prompt": "a", "chosen": TURNS[1], "rejected": TURNS[1]}, "pairs", "'chosen' holds ShareGPT's turns"),
        ({"conversations": CHAT}, "completion", r"Set data\.columns: \{messages: conversations\}\.$"),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "completion",
            "join instruction and input .*completion: output",
        ),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "prompt",
            "join instruction and input into a column prompt, for",
        ),
        (
            {"instruction": "a", "output": "b"},
            "completion",
            r"Set data\.columns: \{prompt: instruction, completion: outp",
        ),
        (
            {"question": "a", "answer": "b"},
            "completion",
            r"Set data\.columns: \{prompt: question, completion: answer\}\.$",
        ),
        ({"question": "a", "answer": "b"}, "prompt", r"Set data\.columns: \{prompt: question\}\.$"),
        ({"prompt": "a", "response": "b"}, "completion", r"Set data\.columns: \{completion: response\}\.$"),
        ({"query": "a", "response": "b", "label": 1}, "labels", r"\{prompt: query, completion: response\}\.$"),
        ({"question": "a", "answer": "b"}, "pairs", "as in {chosen: better, rejected: worse}"),
    ],
)
def test_rows_of_other_tools_are_told_what_to_do(row, train_on, advice):
    with pytest.raises(UserError, match=f"^row 1.*{advice}") as refused:
        rendering(DataConfig(train="x"), row, "row 1", RowKind(train_on))
    assert "Is it" not in str(refused.value)


def test_messages_under_another_name_may_be_sharegpt_too():
    with pytest.raises(UserError, match=r"^row 1: 'turns' holds ShareGPT's turns"):
        rendering(DataConfig(train="x", columns={"messages": "turns"}), {"turns": TURNS}, "row 1")


ASKED = "It's 2 + 2?"
PARTS = [{"type": "text", "text": "It's 2"}, {"type": "image", "text": None}, {"type": "text", "text": " + 2?"}]
"""`ASKED` around a picture, with the null that Arrow fills in."""


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": ASKED}, ASKED),
        ({"prompt": [{"role": "user", "content": ASKED}]}, ASKED),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]}, ASKED),
        ({"prompt": [{"role": "user", "content": PARTS}]}, ASKED),
        ({"messages": [{"role": "user", "content": PARTS}, CHAT[1]]}, ASKED),  # the answer is no prompt
        ({"prompt": None, "messages": [{"role": "user", "content": ASKED}]}, ASKED),  # null: another row has it
        ({"prompt": [{"role": "system", "content": PARTS}]}, ASKED),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, ""),
        (
            {
                "messages": [
                    {"role": "user", "content": "Sum?"},
                    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
                    {"role": "tool", "content": "4"},
                ]
            },
            "4",
        ),
        ({"prompt_ids": [1, 2]}, ""),
    ],
)
def test_what_rewards_read_of_a_prompt(row: dict[str, object], text: str):
    """The string, or the text of the last message before the assistant's turn."""
    assert prompt_text(row) == text
