"""`tunix generate` and `tunix chat` from outside: what they write and say, against transformers and against each other.

All tests ask one small random Llama, greedily unless draws are what is tested. A byte is a token, so prompts are short.
"""

import io
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tunix.commands.chat
import tunix.commands.sampling
from tests.tiny_runs import files, lines, model_folder, write_rows
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer
from tunix.inference.model import InferenceModel, InferenceOptions, TextStream
from tunix.types import Sampling

TOKENS = 8
GREEDY = ["--temperature", "0", "--max-tokens", str(TOKENS)]
IDS = [[5, 60, 70], [80, 81, 82, 83, 84], [9], [100, 20, 30, 40, 50, 60, 70]]
TOKENIZER = bytes_tokenizer("llama3")
STOPS = [1, 2, 5]
"""The tokenizer's EOS, what generation_config.json calls so, and the template's end of a turn."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def bare(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "bare"
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*token*", "chat_template*"))
    return folder


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer that has no chat template."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def generated(model: Path, rows: list[dict[str, Any]], *words: str, out: str = "out.jsonl") -> list[dict[str, Any]]:
    """What `tunix generate MODEL --input rows --out OUT WORDS` writes."""
    path = write_rows(Path("rows.jsonl"), rows)
    Path(out).unlink(missing_ok=True)
    assert main(["generate", str(model), "--input", str(path), "--out", out, *words]) == 0
    return lines(Path(out))


def user(text: str, *before: dict[str, str]) -> dict[str, Any]:
    return {"messages": [*before, {"role": "user", "content": text}]}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def greedy_of_transformers(model: Any, ids: list[int], tokens: int = TOKENS) -> tuple[list[int], np.ndarray]:
    """The new tokens and their log-probs."""
    given = torch.tensor([ids])
    found = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=STOPS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = found.sequences[0, len(ids) :]
    logprobs = torch.log_softmax(torch.stack(found.logits)[:, 0].float(), -1)
    return new.tolist(), logprobs[torch.arange(len(new)), new].numpy()


# --- Files ------------------------------------------------------------------------------------------------------------


def test_a_file_of_greedy_answers_is_that_of_transformers(base: Path):
    found = generated(base, [{"input_ids": ids} for ids in IDS], *GREEDY)
    reference = AutoModelForCausalLM.from_pretrained(base)
    assert [list(row) for row in found] == [["row", "sample", "input_ids", "tokens", "text", "logprobs", "finish"]] * 4
    for i, (row, ids) in enumerate(zip(found, IDS, strict=True)):
        tokens, logprobs = greedy_of_transformers(reference, ids)
        assert (row["row"], row["sample"], row["input_ids"], row["tokens"]) == (i, 0, ids, tokens)
        np.testing.assert_allclose(row["logprobs"], logprobs, atol=1e-4)
        assert row["text"] == TOKENIZER.decode(tokens, skip_special=True)
        assert row["finish"] == ("stop" if tokens[-1] in STOPS else "length")


def test_a_prompt_is_a_users_message_unless_it_is_sent_raw(base: Path):
    """The reference is what transformers' own template and encoding make of it."""
    rendered = TOKENIZER.hf.apply_chat_template([said("user", "hi")], add_generation_prompt=True, return_dict=False)
    asked = [{"prompt": "hi"}, {"prompt": [said("user", "hi")]}, user("hi"), {"input_ids": rendered}]
    found = generated(base, asked, *GREEDY)
    assert [row["tokens"] for row in found] == [found[0]["tokens"]] * 4
    assert [{name: row[name] for name in ("prompt", "messages", "input_ids") if name in row} for row in found] == asked

    # BOS is 2; h and i are bytes 104 and 105, after 3 specials and 3 markers.
    raw = generated(base, [{"prompt": "hi"}, {"input_ids": [2, 110, 111]}], *GREEDY, "--raw")
    assert raw[0]["tokens"] == raw[1]["tokens"] != found[0]["tokens"]

    system = generated(base, [{"prompt": "hi"}], *GREEDY, "--system", "be brief")
    told = generated(base, [user("hi", said("system", "be brief"))], *GREEDY)
    assert system[0]["tokens"] == told[0]["tokens"] != found[0]["tokens"]


def test_draws_depend_on_seed_row_and_sample_alone(base: Path):
    rows = [{"input_ids": ids} for ids in IDS]
    words = ["--n", "3", "--max-tokens", "6", "--seed"]
    found = generated(base, rows, *words, "5", out="a.jsonl")
    assert [(row["row"], row["sample"]) for row in found] == [(i, j) for i in range(4) for j in range(3)]
    generated(base, rows, *words, "5", out="b.jsonl")
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()

    def tokens(written: list[dict[str, Any]]) -> list[list[int]]:
        return [row["tokens"] for row in written]

    assert tokens(generated(base, rows[:2], *words, "5", "--slots", "1")) == tokens(found[:6])
    assert tokens(generated(base, rows, *words, "6")) != tokens(found)
    assert len({tuple(row) for row in tokens(found[:3])}) == 3, "samples of one prompt are drawn apart"


def test_the_flags_reach_the_sampler(base: Path):
    """Each of them, at its narrowest, leaves one token to draw: what is drawn is the greedy answer, with log-prob 0."""
    rows = [{"input_ids": ids} for ids in IDS]
    greedy = [row["tokens"] for row in generated(base, rows, *GREEDY)]
    for words in (["--top-k", "1"], ["--top-p", "1e-6"], ["--min-p", "1"]):
        found = generated(base, rows, "--max-tokens", str(TOKENS), *words)
        assert [row["tokens"] for row in found] == greedy, words
        assert all(value == 0 for row in found for value in row["logprobs"]), words


def test_a_stop_string_ends_an_answer_and_is_left_out(base: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"input_ids": ids} for ids in IDS]
    whole = generated(base, rows, *GREEDY)
    # The fourth and fifth letters of the first answer that has five plain ones.
    row = next(row for row in whole if len(row["text"]) == TOKENS and row["text"].isascii())
    stop = row["text"][3:5]
    at = row["text"].index(stop)
    cut = generated(base, rows, *GREEDY, "--stop", "never said", "--stop", stop)[row["row"]]
    assert cut["text"] == row["text"][:at]
    assert cut["tokens"] == row["tokens"][: at + 2]
    assert cut["finish"] == "stop"


@pytest.mark.models
def test_an_adapter_is_merged(base: Path, tmp_path: Path):
    from peft import LoraConfig, PeftModel, get_peft_model  # takes seconds

    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:  # which is zero at first
            torch.nn.init.normal_(weight)
    adapted.save_pretrained(tmp_path / "adapter")
    found = generated(base, [{"input_ids": ids} for ids in IDS], *GREEDY, "--adapter", "adapter")
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert [row["tokens"] for row in found] == [greedy_of_transformers(reference, ids)[0] for ids in IDS]


@pytest.mark.slow  # tests/lora/test_multi_lora.py compares such a batch with each alone
def test_adapters_are_compared_on_one_base(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each answers as it does alone: those that share a batch, of several ranks, and one with a table of its own."""
    from peft import LoraConfig, get_peft_model  # takes seconds

    kinds = {
        "one": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
        "tabled": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "two": {"r": 2, "target_modules": ["up_proj"], "use_dora": True},
    }
    for seed, (name, kind) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base)
        laid = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **kind))
        with torch.no_grad():
            for key, weight in laid.named_parameters():
                if "modules_to_save" in key:
                    weight.mul_(1.5)
        laid.save_pretrained(tmp_path / name)
    rows = [{"input_ids": ids} for ids in IDS]
    alone = {name: generated(base, rows, *GREEDY, "--adapter", name) for name in kinds}
    words = [word for name in alone for word in ("--adapter", name)]
    found = generated(base, rows, *GREEDY, *words)
    assert [(line["row"], line["adapter"]) for line in found] == [(i, name) for i in range(len(IDS)) for name in alone]
    for line in found:
        own = alone[line["adapter"]][line["row"]]
        assert line["tokens"] == own["tokens"]
        np.testing.assert_allclose(line["logprobs"], own["logprobs"], atol=1e-4)
    assert alone["one"][0]["logprobs"] != alone["two"][0]["logprobs"]
    capsys.readouterr()
    assert main(["generate", str(base), "hi", *GREEDY, *words]) == 0
    shown = capsys.readouterr().out
    assert [part.split(" ")[0] for part in shown.split("--- ")[1:]] == ["one", "tabled", "two"]
    assert main(["generate", str(base), "hi", *words, "--adapter", "one"]) == 2
    assert "--adapter one is given twice" in capsys.readouterr().err
    assert main(["generate", "one", "hi", *words]) == 2
    assert "one ends in an adapter: export it (tunix export) before adding others" in capsys.readouterr().err


def test_a_folder_without_tokenizer_serves_ids_alone(base: Path, bare: Path):
    rows = [{"input_ids": ids} for ids in IDS]
    found = generated(bare, rows, *GREEDY)
    assert all("text" not in row for row in found)
    # config.json names 2 as its eos; the tokenizer's other stops are not known here.
    for row, ids in zip(found, IDS, strict=True):
        reference = AutoModelForCausalLM.from_pretrained(base)
        given = torch.tensor([ids])
        new = reference.generate(given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert row["tokens"] == new[0, len(ids) :].tolist()


def test_an_answer_ends_where_the_model_does(base: Path):
    """128 positions: a prompt of 120 leaves room for 8."""
    ids = [5 + i % 200 for i in range(120)]
    (row,) = generated(base, [{"input_ids": ids}], "--temperature", "0", "--max-tokens", "500")
    expected, _ = greedy_of_transformers(AutoModelForCausalLM.from_pretrained(base), ids)
    assert row["tokens"] == expected
    assert len(row["tokens"]) <= 8


def a_run(base: Path, folder: Path, **data: Any) -> Path:
    """A finished run of this model."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(json.dumps({"data": {"train": "train.jsonl", **data}}))
    (folder / "export").symlink_to(base)
    return folder


@pytest.mark.slow
def test_a_run_is_asked_as_it_was_trained(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    as_text, as_chat = (generated(base, [{"prompt": "hi"}], *GREEDY, *raw)[0]["tokens"] for raw in (["--raw"], []))
    told = generated(base, [user("hi", said("system", "be brief"))], *GREEDY)[0]["tokens"]
    strings = write_rows(tmp_path / "train.jsonl", [{"prompt": "a", "completion": "b"}])
    cases = [
        ({"format": "prompt_completion"}, as_text),
        ({}, as_text),
        ({"chat": True}, as_chat),
        ({"chat": True, "system": "be brief"}, told),
        ({"format": "messages"}, as_chat),
        ({"format": "text"}, as_text),
    ]
    for number, (data, expected) in enumerate(cases):
        run = a_run(base, tmp_path / f"run{number}", **data)
        assert generated(run, [{"prompt": "hi"}], *GREEDY)[0]["tokens"] == expected, data
    write_rows(strings, [user("a", said("assistant", "b"))])
    assert generated(tmp_path / "run1", [{"prompt": "hi"}], *GREEDY)[0]["tokens"] == as_chat
    write_rows(strings, [{"chosen": "User: a\n\nAssistant: b", "rejected": "User: a\n\nAssistant: c"}])
    assert generated(tmp_path / "run1", [{"prompt": "hi"}], *GREEDY)[0]["tokens"] == as_text
    assert generated(tmp_path / "run1" / "export", [{"prompt": "hi"}], *GREEDY)[0]["tokens"] == as_text
    strings.unlink()
    assert generated(tmp_path / "run1", [{"prompt": "hi"}], *GREEDY, "--raw")[0]["tokens"] == as_text
    assert main(["generate", "run1", "hi"]) == 2
    assert "train.jsonl: there is no such file" in (message := capsys.readouterr().err)
    assert "say --raw" in message


def test_what_takes_long_is_seen_to_go_on(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rows = [{"input_ids": ids} for ids in IDS]
    generated(base, rows, *GREEDY)
    assert "step" not in capsys.readouterr().err
    monkeypatch.setattr(tunix.commands.sampling, "PATIENCE", 0.0)
    generated(base, rows, *GREEDY)
    out, err = capsys.readouterr()
    assert "tokens/s" in err
    assert "step 4/4" in err
    assert out.startswith("4 rows, 4 completions, ")


# --- The screen -------------------------------------------------------------------------------------------------------


def test_one_answer_is_printed_as_it_comes(base: Path, capsys: pytest.CaptureFixture[str]):
    """The text of 20 tokens, in the three pieces of at most 8 that the engine gives, is that of the file."""
    words = ["--temperature", "0", "--max-tokens", "20"]
    (row,) = generated(base, [{"prompt": "hi"}], *words)
    capsys.readouterr()
    assert main(["generate", str(base), "hi", *words]) == 0
    out, err = capsys.readouterr()
    assert out == row["text"] + "\n"
    assert err == ("(cut off after 20 tokens)\n" if row["finish"] == "length" else "")


def test_several_answers_are_numbered(base: Path, capsys: pytest.CaptureFixture[str]):
    rows = generated(base, [{"prompt": "hi"}], "--n", "2", "--max-tokens", "6")
    capsys.readouterr()
    assert main(["generate", str(base), "hi", "--n", "2", "--max-tokens", "6"]) == 0
    blocks = [f"--- {j + 1} of 2 ({row['finish']})\n{row['text']}\n" for j, row in enumerate(rows)]
    assert capsys.readouterr().out == "".join(blocks)


def test_a_prompt_can_be_answered_into_a_file(base: Path):
    (expected,) = generated(base, [{"prompt": "hi"}], *GREEDY)
    assert main(["generate", str(base), "hi", "--out", "one.jsonl", *GREEDY]) == 0
    assert lines(Path("one.jsonl")) == [expected]


def test_text_comes_in_whole_characters_and_without_its_stop():
    """A byte is a token: the two of é and the three of € come apart, and `STOP` is held back until it is told apart."""
    stream = TextStream(TOKENIZER, ["STOP"])
    pieces = [stream.feed([token]) for token in TOKENIZER.encode("é€ST.SSTOP")]
    #                  é             €          S   T     .     S    S    T   O   P
    assert pieces == ["", "é", "", "", "€", "", "", "ST.", "", "S", "", "", ""]
    assert (stream.finish(), stream.text) == ("", "é€ST.S")

    broken = TextStream(TOKENIZER, ["STOP"])
    assert [broken.feed([token]) for token in TOKENIZER.encode("aST€")[:-1]] == ["a", "", "", "", ""]
    assert broken.finish() == "ST\ufffd"


@pytest.mark.parametrize("size", [1, 5, 50])
def test_long_texts_come_in_full(size: int):
    """What is settled is not decoded again, wherever the parts of characters and of a stop string lie."""
    said = "".join(f"é€{i} 𝄞ST" for i in range(80))
    ids = TOKENIZER.encode(f"{said}OP and more")
    stream = TextStream(TOKENIZER, ["STOP"])
    pieces = [stream.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(pieces) + stream.finish() == stream.text == said.removesuffix("ST")


# --- Chat -------------------------------------------------------------------------------------------------------------


def talked(model: Path, text: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", str(model), *GREEDY, *words])


def test_a_chat_remembers_and_forgets(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Every answer is the one that `generate` gives to the same messages; a fresh start gives the first one again."""
    first = generated(base, [user("hi")], *GREEDY)[0]["text"]
    second = generated(base, [user("so?", said("user", "hi"), said("assistant", first))], *GREEDY)[0]["text"]
    alone = generated(base, [user("so?")], *GREEDY)[0]["text"]
    assert second != alone
    capsys.readouterr()
    assert talked(base, "hi\n\nso?\n/rest\n/reset\nso?\n  /quit\nnever read\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == f"{first}\n{second}\n{alone}\n"
    assert "/rest is no command; there are /quit, /reset. Did you mean '/reset'?" in err
    assert "forgotten" in err


def test_a_chat_has_a_system_message_and_ends_with_its_input(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    first = generated(base, [user("hi", said("system", "be brief"))], *GREEDY)[0]["text"]
    capsys.readouterr()
    assert talked(base, "hi", monkeypatch, "--system", "be brief") == 0
    assert capsys.readouterr().out == first + "\n"


def test_without_a_template_a_chat_is_one_text_that_goes_on(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    start = [2, *TOKENIZER.encode("hi")]
    first = generated(plain, [{"input_ids": start}], *GREEDY)[0]
    ended = first["finish"] == "stop"
    text = [2] if ended else [*start, *first["tokens"]]
    second = generated(plain, [{"input_ids": [*text, *TOKENIZER.encode(" so")]}], *GREEDY)[0]
    capsys.readouterr()
    assert talked(plain, "hi\n so\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == f"{first['text']}\n{second['text']}\n"
    assert f"plain continuation: {plain} has no chat template" in err


def conversation(base: Path, write: Callable[[str], None], tokens: int) -> tunix.commands.chat.Conversation:
    inference = InferenceModel(InferenceOptions(str(base)))
    assert inference.tokenizer is not None
    sampling = inference.with_stop_ids(Sampling(max_tokens=tokens, temperature=0.0))
    return tunix.commands.chat.Conversation(inference, inference.tokenizer, sampling, seed=0, write=write)


def test_ctrl_c_stops_an_answer_and_not_the_chat(base: Path, capsys: pytest.CaptureFixture[str]):
    """What was said before it stays said."""
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 1:
            signal.raise_signal(signal.SIGINT)

    talk = conversation(base, write, tokens=20)
    talk.handle("hi")
    begun = written[0]
    assert written == [begun, "\n"]
    assert "(stopped)" in capsys.readouterr().err
    talk.handle("so?")
    turns = [said("user", "hi"), said("assistant", talk.turns[1]["content"])]
    assert talk.turns[1]["content"].startswith(begun)
    (expected,) = generated(base, [user("so?", *turns)], "--temperature", "0", "--max-tokens", "20")
    assert "".join(written[2:]) == expected["text"] + "\n"


def test_a_chat_that_is_too_long_says_so_and_goes_on(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert talked(base, f"{'x' * 200}\nhi\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    # 2 + 4 + 1 + 2 (begin, header of the user), 200, 1, and 1 + 9 + 1 + 2 of the assistant's header.
    assert "has 223 tokens, the model ends at 128: /reset forgets it" in err
    (expected,) = generated(base, [user("hi")], *GREEDY)
    assert out == expected["text"] + "\n"


# --- Bad input --------------------------------------------------------------------------------------------------------

ROWS = ["--input", "rows.jsonl", "--out", "out.jsonl"]
BAD: dict[str, tuple[list[dict[str, Any]], list[str], list[str]]] = {
    "nothing asked": ([], [], ["a prompt", "--input FILE"]),
    "asked twice": ([], ["hi", *ROWS], ["one of", "--input"]),
    "no out": ([], ["--input", "rows.jsonl"], ["--out FILE"]),
    "no folder": ([], ["hi", "--out", "gone/o.jsonl"], ["--out gone/o.jsonl: there is no folder"]),
    "taken": ([], ["hi", "--out", "rows.jsonl"], ["rows.jsonl exists already", "--out"]),
    "no file": ([], ["--input", "gone.jsonl", "--out", "o"], ["gone.jsonl: there is no such file"]),
    "wrong column": ([{"promt": "a"}], ROWS, ["row 1 of rows.jsonl has 'promt'", "Did you mean 'prompt'?"]),
    "wrong column later": ([{"prompt": "a"}, {"text": "a"}], ROWS, ["row 2 of rows.jsonl has 'text'", "input_ids"]),
    "null": ([{"prompt": None}], ROWS, ["row 1 of rows.jsonl has 'prompt'", "wanted"]),
    "empty prompt": ([], [""], ["the prompt: prompt is empty"]),
    "blank row": ([{"prompt": " \n"}], ROWS, ["row 1 of rows.jsonl: prompt is empty"]),
    "no ids": ([{"input_ids": []}], ROWS, ["row 1 of rows.jsonl: input_ids is empty"]),
    "ids beyond": ([{"input_ids": [999]}], ROWS, ["token id 999 is beyond the model's vocabulary of 272"]),
    "negative ids": ([{"input_ids": [-1]}], ROWS, ["input_ids holds -1"]),
    "ids of text": ([{"input_ids": "abc"}], ROWS, ["input_ids is 'abc', not a list of whole numbers"]),
    "a number": ([{"prompt": 3}], ROWS, ["row 1 of rows.jsonl", "3, not a list of at least one message"]),
    "wrong role": ([{"messages": [said("model", "a")]}], ROWS, ["'model'", "Did you mean 'assistant'?"]),
    "half a character": ([], ["\udc80"], ["the prompt: prompt cannot be written as JSON in UTF-8"]),
    "system twice": ([user("a")], [*ROWS, "--system", "s"], ["row 1 of rows.jsonl: --system", "messages bring"]),
    "system raw": ([], ["a", "--system", "s", "--raw"], ["--system: --raw was given"]),
    "too long": ([{"input_ids": [5] * 128}], ROWS, ["row 1 of rows.jsonl has 128 tokens", "ends at 128", "shorten"]),
    "no tokens": ([], ["hi", "--max-tokens", "0"], ["max_tokens is 0", "at least 1"]),
    "no mass": ([], ["hi", "--top-p", "0"], ["top_p is 0.0", "above 0 and at most 1"]),
    "more than all": ([], ["hi", "--top-p", "1.5"], ["top_p is 1.5", "above 0 and at most 1"]),
    "cold": ([], ["hi", "--temperature", "-1"], ["temperature is -1.0"]),
    "no number": ([], ["hi", "--temperature", "nan"], ["temperature is nan"]),
    "fewer than none": ([], ["hi", "--top-k", "-3"], ["top_k is -3"]),
    "min p": ([], ["hi", "--min-p", "2"], ["min_p is 2.0"]),
    "empty stop": ([], ["hi", "--stop", ""], ["stop_strings"]),
    "n": ([], ["hi", "--n", "0"], ["--n", "'0' is not a whole number above 0"]),
    "seed": ([], ["hi", "--seed", "-1"], ["--seed"]),
    "seed beyond": ([], ["hi", "--seed", str(2**32)], ["--seed", "from 0 to 4294967295"]),
    "slots": ([], ["hi", "--slots", "0"], ["--slots"]),
    "adapter": ([], ["hi", "--adapter", "gone"], ["gone/adapter_config.json"]),
    "dtype": ([], ["hi", "--dtype", "half"], ["--dtype", "'half'"]),
}


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a call that leaves everything as it was."""
    before = files(Path())
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert files(Path()) == before
    return err


@pytest.mark.parametrize(("rows", "words", "fragments"), BAD.values(), ids=BAD)
def test_what_cannot_be_answered_says_why(
    rows: list[dict[str, Any]],
    words: list[str],
    fragments: list[str],
    base: Path,
    capsys: pytest.CaptureFixture[str],
):
    write_rows(Path("rows.jsonl"), rows or [{"prompt": "a"}])
    message = refused(["generate", str(base), *words], capsys)
    assert all(fragment in message for fragment in fragments), message


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    for command in (["generate", "./gone", "hi"], ["chat", "./gone"]):
        assert "./gone: there is no such folder" in refused(command, capsys)


def test_a_folder_without_tokenizer_says_what_it_serves(bare: Path, capsys: pytest.CaptureFixture[str]):
    assert "has no tokenizer: give input_ids instead of prompt" in refused(["generate", str(bare), "hi"], capsys)
    assert "--stop 'x'" in refused(["generate", str(bare), "hi", "--stop", "x"], capsys)
    assert "it cannot chat" in refused(["chat", str(bare)], capsys)


def test_messages_want_a_template(plain: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(Path("rows.jsonl"), [user("a")])
    message = refused(["generate", str(plain), *ROWS], capsys)
    assert "row 1 of rows.jsonl" in message
    assert "has no chat template to render messages with" in message
    assert "--system: " in refused(["chat", str(plain), "--system", "s"], capsys)


def test_input_that_is_no_text(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", str(base)]) == 2
    assert "error: the input is not UTF-8 text" in capsys.readouterr().err
