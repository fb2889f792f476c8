"""Where texts begin, meet and end: BOS and EOS that they bring, and tokenizers that put a space before every text.

The small vocabularies are written out, so that the ids of each text follow by hand.
"""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.shapes import rendering
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer
from tunix.data.types import Kept
from tunix.errors import UserError
from tunix.rollout.environments.base import rendered

KINDS = ("prepend", "always", "first", "unigram", "byte level")
"""Ways of putting a space before a text: Llama 2's tokenizer.json, Mixtral's two, T5's, and GPT-2's option."""


def spaced(kind: str) -> Tokenizer:
    """A tokenizer that puts a space before every text, with BOS `<s>` and EOS `</s>`, that merges "▁4", "▁a", "42"."""
    space = "Ġ" if kind == "byte level" else "▁"
    pieces = ["<unk>", "<s>", "</s>", *"abcf0123456789=+().", space, "Ċ" if kind == "byte level" else "\n"]
    vocab = {piece: i for i, piece in enumerate([*pieces, f"{space}4", f"{space}a", "42"])}
    if kind == "unigram":
        backend = Backend(models.Unigram([(piece, -len(vocab) + len(piece)) for piece in vocab], unk_id=0))
    else:
        backend = Backend(models.BPE(vocab=vocab, merges=[(space, "4"), (space, "a"), ("4", "2")], unk_token="<unk>"))
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    elif kind == "byte level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.ByteLevel()
    else:
        scheme = "first" if kind == "first" else "always"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    )


def sides(row, tokenizer, train_on="completion", **settings):
    """The tokens of a row's sequences, and those that are trained, as they are written in the vocabulary."""
    how = rendering(DataConfig(train="given", **settings), row, "row 1", RowKind(train_on))
    example = to_example(row, tokenizer, how, "row 7")
    assert isinstance(example, Kept), example
    spell = tokenizer.hf.convert_ids_to_tokens
    return [(spell(one.tokens.tolist()), spell(one.tokens[one.loss_mask].tolist())) for one in example.sequences]


# --- Completions after a space before every text ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "completion", "trained"),
    [
        ("2+2=", "4", ["4"]),
        ("f(", "a)", ["a", ")"]),
        ("2+2=", " 4", ["▁4"]),
        ("2+2= ", "4", ["4"]),  # the space is the prompt's: a sampler is given it, and goes on after it
        ("=4", "2", ["2"]),  # nor does a merge cross the border
        ("1\n", "42", ["42"]),
    ],
)
def test_a_completion_continues_its_prompt(kind, prompt, completion, trained):
    tokenizer = spaced(kind)
    trained = [*(token.replace("▁", "Ġ" if kind == "byte level" else "▁") for token in trained), "</s>"]
    rows = {
        "completion": {"prompt": prompt, "completion": completion},
        "labels": {"prompt": prompt, "completion": completion, "label": True},
        "pairs": {"prompt": prompt, "chosen": completion, "rejected": "0"},
    }
    before = tokenizer.hf.convert_ids_to_tokens(tokenizer.encode(prompt, bos=True))
    for train_on, row in rows.items():
        assert sides(row, tokenizer, train_on)[0] == (before + trained, trained)
    named = {"question": prompt, "answer": completion}
    assert sides(named, tokenizer, columns={"prompt": "question", "completion": "answer"})[0][1] == trained
    # What is trained is the row's text, and so is what inspect shows of it.
    ids = tokenizer.encode_after(tokenizer.encode(prompt, bos=True), completion)
    assert tokenizer.decode([*tokenizer.encode(prompt), *ids]) in (prompt + completion, f" {prompt}{completion}")
    assert tokenizer.decode(ids, previous=tokenizer.encode(prompt)) == completion


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_joined_text(kind):
    """For 500 texts cut in two: wherever no token of the whole crosses the cut."""
    tokenizer, draw = spaced(kind), random.Random(0)
    crossed = 0
    for _ in range(500):
        letters = [draw.choice([*"a4=2 \n", "</s>", "b"]) for _ in range(8)]
        prompt, completion = "".join(letters[:4]), "".join(letters[4:])
        whole, offsets = tokenizer.encode_with_offsets(prompt + completion)
        before = tokenizer.encode(prompt)
        number = int((offsets[:, 0] < len(prompt)).sum())
        if whole[:number] == before and offsets[number - 1, 1] <= len(prompt):
            assert [*before, *tokenizer.encode_after(before, completion)] == whole, (prompt, completion)
        else:
            crossed += 1
    assert crossed < 250


def test_a_tokenizer_without_a_space_encodes_a_completion_as_any_text():
    tokenizer = bytes_tokenizer()
    assert tokenizer.encode_after(tokenizer.encode("a "), " b") == tokenizer.encode(" b")


def test_nothing_but_bos_before_it_is_the_beginning_of_a_text():
    tokenizer = spaced("first")
    assert sides({"prompt": "", "completion": "a"}, tokenizer) == [(["<s>", "▁a", "</s>"], ["▁a", "</s>"])]
    # After another special token Mixtral's newer tokenizer puts no space, and Llama 2's does.
    for kind, expected in (("first", "a"), ("prepend", "▁a")):
        assert sides({"prompt": "b</s>", "completion": "a"}, spaced(kind))[0][1] == [expected, "</s>"]


def test_answers_of_an_environment_continue_the_turn():
    tokenizer = spaced("always")
    start = rendered("2+2=", tokenizer, {})
    action = np.array(tokenizer.encode_after(start.tolist(), "4"))
    observation = rendered("\n", tokenizer, {}, "2+2=", action)
    assert tokenizer.hf.convert_ids_to_tokens(action.tolist()) == ["4"]
    assert tokenizer.hf.convert_ids_to_tokens(observation.tolist()) == ["\n"]


# --- BOS and EOS ------------------------------------------------------------------------------------------------------

BYTES = bytes_tokenizer()
CHAT = "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"


def texts(row, tokenizer=BYTES, train_on="completion", **settings):
    """The text of each of a row's sequences, and of what is trained of it."""
    return [
        ("".join(all_of_it), "".join(trained)) for all_of_it, trained in sides(row, tokenizer, train_on, **settings)
    ]


@pytest.mark.parametrize("text", ["<bos>Plain.<eos>", "Plain.", "<bos>Plain.", "Plain.<eos>"])
def test_a_text_has_one_bos_and_one_eos(text):
    assert texts({"text": text}) == [("<bos>Plain.<eos>", "Plain.<eos>")]


def test_a_text_that_was_rendered_with_the_template_is_that_of_its_messages():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    for template in ("gemma", "gemma4", "llama3", "chatml"):
        tokenizer = bytes_tokenizer(template)
        text = tokenizer.hf.apply_chat_template(messages, tokenize=False)
        every = {"tokenizer": tokenizer, "train_on": "all"}
        assert sides({"text": text}, **every) == sides({"messages": messages}, **every)
    # A text whose EOS is followed by more is the author's.
    assert texts({"text": "a<eos>b"}) == [("<bos>a<eos>b<eos>", "a<eos>b<eos>")]


@pytest.mark.parametrize("end", ["", "<eos>", "<end_of_turn>", "<end_of_turn>Ċ"])
def test_prompts_bring_bos_and_completions_their_end(end):
    completion = "Yes." + end.replace("Ċ", "\n")
    whole = CHAT.replace("\n", "Ċ") + "Yes." + (end or "<eos>")
    expected = (whole, "Yes." + (end or "<eos>"))
    assert texts({"prompt": CHAT, "completion": completion}) == [expected]
    assert texts({"prompt": CHAT, "completion": completion, "label": False}, train_on="labels") == [expected]
    other = (CHAT.replace("\n", "Ċ") + "No.<eos>", "No.<eos>")
    assert texts({"prompt": CHAT, "chosen": completion, "rejected": "No."}, train_on="pairs") == [expected, other]
    whole_texts = {"chosen": CHAT + completion, "rejected": CHAT + "No."}
    assert texts(whole_texts, train_on="pairs") == [expected, other]
    assert texts({"prompt": CHAT}, train_on="prompt")[0][0] == CHAT.replace("\n", "Ċ")
    assert BYTES.decode(rendered(CHAT, BYTES, {})) == CHAT


@pytest.mark.parametrize("end", ["", "<eos>"])
def test_transcripts_end_once(end):
    human = "\n\nHuman: a\n\nAssistant:"
    (chosen, trained), _ = texts({"chosen": f"{human} b{end}", "rejected": f"{human} c"}, train_on="pairs")
    assert chosen == f"<bos>{human} b<eos>".replace("\n", "Ċ").replace(" ", "Ġ")
    assert trained == "Ġb<eos>"
    # The last turn is the human's: its end is not trained.
    asked = f"{human} b\n\nHuman: d{end}"
    assert texts({"chosen": asked, "rejected": f"{human} c"}, train_on="pairs")[0][1] == "Ġb"


# --- Halves of characters ---------------------------------------------------------------------------------------------

HALF = "Hi \ud83d"


@pytest.mark.parametrize(
    ("row", "train_on", "column"),
    [
        ({"prompt": HALF, "completion": "a"}, "completion", "prompt"),
        ({"prompt": "a", "completion": HALF}, "completion", "completion"),
        ({"text": HALF}, "completion", "text"),
        ({"messages": [{"role": "user", "content": HALF}]}, "completion", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "completion", "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": HALF}]}, "completion", "tools"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{HALF: 1}]}, "prompt", "tools"),
        ({"prompt": HALF}, "prompt", "prompt"),
        ({"prompt": HALF, "chosen": "a", "rejected": "b"}, "pairs", "prompt"),
        ({"chosen": "a", "rejected": HALF}, "pairs", "rejected"),
        ({"prompt": "a", "completion": HALF, "label": True}, "labels", "completion"),
    ],
)
def test_half_of_a_character_is_refused_by_row_and_column(row, train_on, column):
    with pytest.raises(UserError, match=rf"^row 7: {column}: character 4 of a text is '\\ud83d', half of a character"):
        sides(row, BYTES, train_on)


def test_half_of_a_character_elsewhere():
    for text in (HALF, "\udc00"):
        with pytest.raises(UserError, match="half of a character"):
            BYTES.encode(text)
        with pytest.raises(UserError, match="half of a character"):
            BYTES.encode_after([9], text)
    # A column that is not rendered, and both halves together.
    assert texts({"text": "🙂", "source": HALF}) == [("<bos>ðŁĻĤ<eos>", "ðŁĻĤ<eos>")]
