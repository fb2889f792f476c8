"""Pairs and labelled completions become tokens and masks: by hand, marked in the text, or as transformers renders them.

In a marked text ⟦ ⟧ stand around what is trained.
"""

import json

import numpy as np
import pytest

from tests.data import rendered_as
from tests.data.test_chat import QWEN3, SPACE, chatml, made, marks
from tunix.config import RowKind
from tunix.data import tiny
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.packing import pack
from tunix.data.pipeline import Layout
from tunix.data.shapes import PAIRS, detect_format, rendering
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import (
    COMPLETION_TOO_LONG,
    CUT_AWAY,
    CUT_EQUAL,
    EMPTY,
    EQUAL,
    NO_COMMON_PROMPT,
    NOTHING_TRAINED,
    TOO_LONG,
    Accounting,
    Dropped,
    Kept,
)
from tunix.errors import UserError

TOKENIZER = bytes_tokenizer()
BOS, EOS = 2, 1
A, B, C = (5 + ord(letter) for letter in "abc")


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def how(row, train_on="pairs", **settings):
    """The rendering that this first row decides."""
    return rendering(DataConfig(train="given", **settings), row, "row 1", RowKind(train_on))


def example(row, tokenizer=TOKENIZER, train_on="pairs", **settings):
    return to_example(row, tokenizer, how(row, train_on, **settings), "row 7")


def kept(row, tokenizer=TOKENIZER, train_on="pairs", **settings):
    """The sequences' tokens and masks."""
    found = example(row, tokenizer, train_on, **settings)
    assert isinstance(found, Kept), found
    return [(one.tokens.tolist(), one.loss_mask.astype(int).tolist()) for one in found.sequences]


def marked(row, tokenizer=TOKENIZER, train_on="pairs", **settings):
    """The sequences' texts with marks."""
    found = example(row, tokenizer, train_on, **settings)
    assert isinstance(found, Kept), found
    return [marks(one.tokens, one.loss_mask, tokenizer) for one in found.sequences]


# --- Pairs ----------------------------------------------------------------------------------------------------------


def test_strings_are_tokenized_apart_and_closed_by_eos():
    row = {"prompt": "ab", "chosen": "c", "rejected": "ca"}
    assert kept(row) == [
        ([BOS, A, B, C, EOS], [0, 0, 0, 1, 1]),
        ([BOS, A, B, C, A, EOS], [0, 0, 0, 1, 1, 1]),
    ]
    named = {"question": "ab", "better": "c", "worse": "ca"}
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    assert kept(named, columns=columns) == kept(row)


def test_given_ids_stay_as_they_are():
    row = {"prompt_ids": [9, 8], "chosen_ids": [7, 0], "rejected_ids": [6]}
    assert kept(row, None) == [([9, 8, 7, 0], [0, 0, 1, 1]), ([9, 8, 6], [0, 0, 1])]
    # Without a prompt the first token is predicted by nothing.
    assert kept({**row, "prompt_ids": [], "rejected_ids": [7, 8]}, None) == [([7, 0], [0, 1]), ([7, 8], [0, 1])]
    assert example({**row, "prompt_ids": []}, None) == Dropped(NOTHING_TRAINED)


@pytest.mark.parametrize("template", ["gemma", "gemma4", "llama3", "chatml"])
def test_chats_are_the_templates_own(template):
    tokenizer = bytes_tokenizer(template)
    conversations = [[user("hi"), said(answer)] for answer in ("yes", "no")]
    expected = [tokenizer.hf.apply_chat_template(one, tokenize=True, return_dict=False) for one in conversations]
    rows = [
        {"prompt": [user("hi")], "chosen": [said("yes")], "rejected": [said("no")]},
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"chosen": conversations[0], "rejected": conversations[1]},
        {"prompt": "another text", "chosen": conversations[0], "rejected": conversations[1]},
        {"prompt": [user("hi")], "chosen": conversations[0], "rejected": conversations[1]},
        {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
    ]
    stop = {"gemma": "<end_of_turn>", "gemma4": "<turn|>", "llama3": "<|eot_id|>", "chatml": "<|im_end|>"}[template]
    for row in rows:
        chosen, rejected = example(row, tokenizer, chat=True).sequences
        assert [chosen.tokens.tolist(), rejected.tokens.tolist()] == expected
        assert tokenizer.decode(chosen.tokens[chosen.loss_mask]) == f"yes{stop}"
        assert tokenizer.decode(rejected.tokens[rejected.loss_mask]) == f"no{stop}"
        start = int(np.argmax(chosen.loss_mask))
        assert start == int(np.argmax(rejected.loss_mask))
        assert chosen.tokens[:start].tolist() == rejected.tokens[:start].tolist()


def test_system_message_and_tools_reach_the_template():
    row = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    chosen, _ = marked(row, chatml(QWEN3), chat=True, system="be")
    assert chosen.startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")


def test_the_messages_in_common_are_the_prompt():
    shared = [user("a"), said("b"), user("c")]
    row = {"chosen": [*shared, said("d")], "rejected": [*shared, said("e")]}
    turn = "<start_of_turn>{}\n{}<end_of_turn>\n".format
    before = "<bos>" + turn("user", "a") + turn("model", "b") + turn("user", "c")
    assert marked(row) == [f"{before}<start_of_turn>model\n⟦{answer}<end_of_turn>⟧\n" for answer in ("d", "e")]
    # They part at the first answer: all that the assistant says from there on is trained, and no question.
    row = {"chosen": [user("a"), said("b"), user("c"), said("d")], "rejected": [user("a"), said("e")]}
    after = turn("user", "c") + "<start_of_turn>model\n⟦d<end_of_turn>⟧\n"
    assert marked(row) == [
        "<bos>" + turn("user", "a") + "<start_of_turn>model\n⟦b<end_of_turn>⟧\n" + after,
        "<bos>" + turn("user", "a") + "<start_of_turn>model\n⟦e<end_of_turn>⟧\n",
    ]
    # One goes on where the other ends: the last answer of the shorter is compared, not taken for the prompt.
    row = {"chosen": [user("a"), said("b")], "rejected": [user("a"), said("b"), user("c"), said("d")]}
    assert marked(row)[0] == "<bos>" + turn("user", "a") + "<start_of_turn>model\n⟦b<end_of_turn>⟧\n"


def test_a_template_that_writes_the_past_anew_has_right_masks():
    """Qwen 3 shows a thought of the last answer only, so that the sides differ before their completions do."""
    thought = said("<think>\nm\n</think>\n\nok")
    row = {"prompt": [user("hi"), thought], "chosen": [said("x")], "rejected": [user("x"), said("x")]}
    chosen, rejected = marked(row, chatml(QWEN3))
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chosen.startswith(start + "<think>\nm\n</think>\n\nok<|im_end|>\n")
    assert rejected.startswith(start + "ok<|im_end|>\n")
    assert [side.count("⟦") for side in (chosen, rejected)] == [1, 1]
    assert chosen.endswith("x<|im_end|>⟧\n")
    assert rejected.endswith("x<|im_end|>⟧\n")


def test_transcripts_are_trained_behind_the_last_turn_in_common():
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    row = {"chosen": start + " d", "rejected": start + " e"}
    assert marked(row) == [f"<bos>{start}⟦ d<eos>⟧", f"<bos>{start}⟦ e<eos>⟧"]
    # What a person says later is not trained, nor the end of a text in which the person has the last word.
    early = "\n\nHuman: a\n\nAssistant:"
    row = {"chosen": f"{early} b\n\nHuman: c\n\nAssistant: d", "rejected": f"{early} e\n\nHuman: f"}
    assert marked(row) == [
        f"<bos>{early}⟦ b⟧\n\nHuman: c\n\nAssistant:⟦ d<eos>⟧",
        f"<bos>{early}⟦ e⟧\n\nHuman: f<eos>",
    ]
    # Answers that begin alike are answers from their first letter on.
    row = {"chosen": start + " dd", "rejected": start + " de"}
    assert marked(row) == [f"<bos>{start}⟦ dd<eos>⟧", f"<bos>{start}⟦ de<eos>⟧"]


def test_no_merge_is_split():
    tokenizer = made(None, ["<s>", "</s>"], eos="</s>", bos="<s>", merges=[(":", SPACE), ("o", "k")])
    # ": " is one token that begins before the completion: the model is never asked for it behind "Assistant:".
    start = "\n\nHuman: a\n\nAssistant"
    row = {"chosen": f"{start}: b", "rejected": f"{start}:c"}
    assert marked(row, tokenizer) == [f"<s>{start}: ⟦b</s>⟧", f"<s>{start}:⟦c</s>⟧"]
    # "ok" is one token, so "o" is not in common.
    row = {"chosen": "aok", "rejected": "ao"}
    assert marked(row, tokenizer) == ["<s>a⟦ok</s>⟧", "<s>a⟦o</s>⟧"]
    chosen, rejected = kept(row, tokenizer)
    assert len(chosen[0]) == len(rejected[0]) == 4


def test_texts_are_trained_from_the_first_token_that_differs():
    assert kept({"chosen": "abc", "rejected": "aba"}) == [
        ([BOS, A, B, C, EOS], [0, 0, 0, 1, 1]),
        ([BOS, A, B, A, EOS], [0, 0, 0, 1, 1]),
    ]
    assert example({"chosen": "abc", "rejected": "bbc"}) == Dropped(NO_COMMON_PROMPT)
    assert example({"chosen": "ab", "rejected": "abc"}) == Dropped(EMPTY)


def test_weight_and_margin():
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0.5, "margin": -2}
    found = example(row)
    assert [(one.weight, one.per_sequence) for one in found.sequences] == [(0.5, {"margin": -2.0})] * 2
    # A first row without the columns says that there are none.
    found = to_example({**row, "chosen": "ab", "rejected": "ac"}, TOKENIZER, how({"chosen": "", "rejected": ""}))
    assert isinstance(found, Kept)
    assert found.sequences[0].tokens.tolist() == [BOS, A, B, EOS]
    assert found.sequences[0].per_sequence == {}
    with pytest.raises(UserError, match="row 7: the column 'margin' is null"):
        to_example({**row, "margin": None}, TOKENIZER, how(row), "row 7")
    for value in (float("nan"), float("inf"), True, "1"):
        with pytest.raises(UserError, match=f"row 7: margin is {value!r}, not a finite number"):
            to_example({**row, "margin": value}, TOKENIZER, how(row), "row 7")


def test_what_the_first_row_has_every_row_has():
    settings = how({"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(UserError, match="row 7: there is no column 'prompt'; it has 'chosen', 'rejected'"):
        to_example({"chosen": "b", "rejected": "c"}, TOKENIZER, settings, "row 7")


# --- What is left out -------------------------------------------------------------------------------------------------


def test_equal_and_empty_sides_are_dropped():
    assert example({"prompt": "a", "chosen": "b", "rejected": "b"}) == Dropped(EQUAL)
    assert example({"chosen": [user("a"), said("b")], "rejected": [user("a"), said("b")]}) == Dropped(EQUAL)
    assert example({"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [6]}, None) == Dropped(EQUAL)
    for chosen, rejected in (("", "b"), ("b", ""), ("", "")):
        assert example({"prompt": "a", "chosen": chosen, "rejected": rejected}) == Dropped(EMPTY)
        assert example({"prompt": "a", "chosen": chosen, "rejected": rejected}, chat=True) == Dropped(EMPTY)
    assert example({"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": []}, None) == Dropped(EMPTY)
    # EOS alone says nothing either.
    assert example({"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [EOS]}) == Dropped(EMPTY)
    assert example({"chosen": [said("a")], "rejected": [said("b")]}) == Dropped(NO_COMMON_PROMPT)
    start = "\n\nHuman: a\n\nAssistant: "
    assert example({"chosen": start + "b", "rejected": "\n\nHuman: c\n\nAssistant: b"}) == Dropped(NO_COMMON_PROMPT)


def test_each_side_has_its_own_limit():
    row = {"prompt": "ab", "chosen": "cccc", "rejected": "a"}  # 8 and 5 tokens; the prompt has 3
    whole = example(row, max_length=8, on_overflow="error")
    assert isinstance(whole, Kept)
    assert not whole.truncated
    cut = example(row, max_length=6)
    assert isinstance(cut, Kept)
    assert cut.truncated
    assert [one.tokens.tolist() for one in cut.sequences] == [[BOS, A, B, C, C, C], [BOS, A, B, A, EOS]]
    assert example(row, max_length=6, on_overflow="drop") == Dropped(TOO_LONG)
    with pytest.raises(UserError, match=r"row 7 has 8 tokens on a side, more than data\.max_length 6: .*on_overflow"):
        example(row, max_length=6, on_overflow="error")
    assert example(row, max_length=3) == Dropped(CUT_AWAY)
    row = {"prompt": "ab", "chosen": "cca", "rejected": "ccb"}
    assert example(row, max_length=5) == Dropped(CUT_EQUAL)
    assert isinstance(example(row, max_length=6), Kept)


def test_completions_have_a_limit_of_their_own_and_rows_are_that_much_shorter():
    row = {"prompt": "ab", "chosen": "cccc", "rejected": "a"}  # 8 and 5 tokens; after the prompt's 3 come 5 and 2
    assert not kept_whole(row, max_length=8, completion_length=4)
    assert kept_whole(row, max_length=8, completion_length=5)
    cut = example(row, max_length=8, completion_length=4)
    assert isinstance(cut, Kept)
    assert [one.tokens.tolist() for one in cut.sequences] == [[BOS, A, B, C, C, C, C], [BOS, A, B, A, EOS]]
    assert example(row, max_length=8, completion_length=4, on_overflow="drop") == Dropped(COMPLETION_TOO_LONG)
    with pytest.raises(UserError, match=r"row 7 has 8 tokens on a side, more than data\.completion_length 7"):
        example(row, max_length=9, completion_length=4, on_overflow="error")
    # Both sides full: 8 tokens, of which 4 are the prompt's. One row holds 3 + 5 + 5 = 8 + 4 + 1 of them.
    full = example({"prompt": "aba", "chosen": "ccc", "rejected": "bbb"}, max_length=8, completion_length=4)
    assert isinstance(full, Kept)
    layout, config = Layout(sequences_per_example=2), DataConfig(train="given", max_length=8, completion_length=4)
    assert layout.length(config) == 13
    assert (pack(full.sequences, 2, 13, sequences_per_example=2).segment_ids > 0).all()
    # Without the limit, and where nothing is shared, two whole sides have room.
    assert layout.length(DataConfig(train="given", max_length=8)) == 16
    assert layout.length(DataConfig(train="given", max_length=8, completion_length=4, packing=False)) == 16


def kept_whole(row, **settings):
    """Whether nothing of it is cut off."""
    found = example(row, **settings)
    assert isinstance(found, Kept)
    return not found.truncated


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": None}, "the column 'rejected' is null"),
        ({"prompt": "a", "chosen": "b"}, "there is no column 'rejected'; it has 'prompt', 'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejectd": "c"}, "no column 'rejected'.*Did you mean 'rejectd'"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, "the column 'prompt' is null"),
        ({"prompt": "a", "chosen": "b", "rejected": [said("c")]}, "chosen and rejected are both strings or both lists"),
        ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, "both strings or both lists"),
        ({"prompt": "a", "chosen": 1, "rejected": 2}, "messages is 1, not a list"),
        ({"prompt": "a", "chosen": [{"role": "bot", "content": "b"}], "rejected": [said("c")]}, "the role 'bot'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": -1}, "weight is -1, not a finite number"),
    ],
)
def test_bad_rows_are_named(row, message):
    settings = how({"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(UserError, match=f"^row 7: .*{message}"):
        to_example(row, TOKENIZER, settings, "row 7")


def test_ids_and_tokenizers():
    row = {"prompt_ids": [1], "chosen_ids": [2, 600], "rejected_ids": [3]}
    with pytest.raises(UserError, match="row 7: token id 600 is beyond the model's vocabulary of 500"):
        to_example(row, None, rendered_as("tokens", train_on=RowKind.PAIRS, vocab_size=500), "row 7")
    with pytest.raises(UserError, match="row 7: rejected_ids holds -1, which is no token id"):
        example({**row, "rejected_ids": [-1]}, None)
    with pytest.raises(UserError, match="no tokenizer: add one, or give prompt_ids, chosen_ids and rejected_ids"):
        example({"prompt": "a", "chosen": "b", "rejected": "c"}, None)
    with pytest.raises(UserError, match=r"data\.chat is true, but .*add the column 'prompt'"):
        example({"chosen": "ab", "rejected": "ac"}, chat=True)


def test_shapes_of_pairs():
    assert detect_format({"prompt": "", "chosen": "", "rejected": ""}, {}, shapes=PAIRS) == "pairs"
    ids = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    assert detect_format({**ids, "chosen": "", "rejected": ""}, {}, shapes=PAIRS) == "tokens"
    with pytest.raises(
        UserError,
        match=r"row 1 has the columns 'prompt', 'choosen', 'rejected'; wanted are chosen and rejected, or prompt_ids, "
        r"chosen_ids and rejected_ids\. .*Is it 'chosen' for 'choosen'\?",
    ):
        how({"prompt": "", "choosen": "", "rejected": ""})
    with pytest.raises(UserError, match=r"data\.format is 'messages', but pairs are read from tokens, pairs"):
        how({"chosen": "", "rejected": ""}, format="messages")
    with pytest.raises(UserError, match=r"data\.format is 'pairs', but completions are read from tokens, messages"):
        how({"chosen": "", "rejected": ""}, "completion", format="pairs")
    with pytest.raises(UserError, match=r"data\.columns maps 'choosen', which is none .*Did you mean 'chosen'"):
        how({"chosen": "", "rejected": ""}, columns={"choosen": "x"})


# --- Labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "label"), [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), (np.bool_(True), 1.0)])
def test_labels(value, label):
    found = example({"prompt": "a", "completion": "b", "label": value}, train_on="labels")
    assert isinstance(found, Kept)
    (sequence,) = found.sequences
    assert sequence.per_sequence == {"label": label}
    assert (sequence.tokens.tolist(), sequence.loss_mask.tolist()) == ([BOS, A, B, EOS], [False, False, True, True])


def test_labelled_messages_and_ids():
    row = {"prompt": [user("a")], "completion": [said("b")], "label": True}
    expected = TOKENIZER.hf.apply_chat_template([user("a"), said("b")], tokenize=True, return_dict=False)
    assert kept(row, train_on="labels")[0][0] == expected
    assert kept({"prompt": "a", "completion": "b", "label": 0}, train_on="labels", chat=True)[0][0] == expected
    row = {"prompt_ids": [9, 8], "completion_ids": [7], "label": 1}
    assert kept(row, None, "labels") == [([9, 8, 7], [0, 0, 1])]
    assert example({**row, "completion_ids": []}, None, "labels") == Dropped(EMPTY)
    assert example({"prompt": "a", "completion": "", "label": 1}, train_on="labels") == Dropped(EMPTY)
    assert example({**row, "prompt_ids": []}, None, "labels") == Dropped(NOTHING_TRAINED)


@pytest.mark.parametrize("value", ["yes", 0.5, 1.0, 2, -1, "1", [True]])
def test_other_labels_are_refused(value):
    row = {"prompt": "a", "completion": "b", "verdict": value}
    with pytest.raises(UserError) as caught:
        example(row, train_on="labels", columns={"label": "verdict"})
    assert str(caught.value) == f"row 7: verdict is {value!r}, not true or false (the numbers 1 and 0 will do)"


def test_rows_without_a_label_are_named():
    settings = how({"prompt": "a", "completion": "b", "label": True}, "labels")
    with pytest.raises(UserError, match="row 7: the column 'label' is null"):
        to_example({"prompt": "a", "completion": "b", "label": None}, TOKENIZER, settings, "row 7")
    with pytest.raises(UserError, match="wanted are prompt, completion and label, or prompt_ids, completion_ids and"):
        how({"prompt": "a", "completion": "b"}, "labels")


# --- Made rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["gemma", "gemma4", "llama3", "chatml"])
@pytest.mark.parametrize(
    ("function", "train_on"),
    [
        *((name, "pairs") for name in ("pairs", "conversations", "tokens")),
        *((name, "labels") for name in ("labels", "chat_labels", "tokens")),
    ],
)
def test_made_rows_are_whole_pairs_and_labels(function, train_on, template):
    rows, tokenizer = vars(tiny)[function](), bytes_tokenizer(template)
    assert json.loads(json.dumps(rows)) == rows
    found = [example(row, tokenizer, train_on, max_length=128) for row in rows]
    assert sum(map(Accounting.of, found), Accounting()) == Accounting(rows=64, kept=64)
    values = {value for one in found for value in one.sequences[0].per_sequence.values()}
    assert values == ({1.0, 2.0, 3.0} if train_on == "pairs" else {0.0, 1.0})
