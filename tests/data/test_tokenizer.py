"""Tokenizers made on the spot are what transformers loads, and loaded ones tell their special ids truly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from tests.marks import slow
from tunix.data.templates import MARKERS
from tunix.data.tokenizer import bpe_tokenizer, bytes_tokenizer, load_tokenizer
from tunix.errors import UserError

TEXTS = [
    "def sort(list, *, key=None): return 12345 numbers, it's done.\n\n",
    "the the then there é ü 日本 🙂 e\u0301",
] * 20
TEXT = "the numbers 12345,\n\n it's there é 🙂 <end_of_turn> <|im_end|> \t x"
MODEL_TYPES = {
    "gemma": ("gemma", "gemma2", "gemma3_text", "gemma3"),
    "gemma4": ("gemma4_text", "gemma4"),
    "llama3": ("llama",),
    "chatml": ("qwen2", "qwen3"),
}


@pytest.mark.parametrize("template", MODEL_TYPES)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_made_tokenizers_survive_saving(tmp_path, template, kind):
    made = bytes_tokenizer(template) if kind == "bytes" else bpe_tokenizer(TEXTS, 400, template)
    specials = 3 + len(MARKERS[template])
    assert made.vocab_size == 256 + specials if kind == "bytes" else made.vocab_size > 256 + specials
    for model_type in MODEL_TYPES[template]:
        folder = tmp_path / model_type
        made.save(folder)
        # transformers picks the tokenizer's class by the model's type, and some classes rebuild the splitter.
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        hf, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
        assert ours is not None
        assert len(hf) == ours.vocab_size == made.vocab_size
        assert hf.encode(TEXT, add_special_tokens=False) == ours.encode(TEXT) == made.encode(TEXT)
        assert hf.encode(TEXT) == made.encode(TEXT, bos=made.adds_bos)
        assert ours.chat_template == hf.chat_template == made.chat_template
        for field in ("bos_id", "eos_id", "pad_id", "adds_bos", "stop_ids"):
            assert getattr(ours, field) == getattr(made, field)


@pytest.mark.parametrize("template", ["gemma", *slow(name for name in MODEL_TYPES if name != "gemma")])
def test_a_run_reads_its_own_tokenizer_without_torch(tmp_path, template):
    """A folder that names no type of model: AutoTokenizer would choose the same class, and import torch to do so."""
    bytes_tokenizer(template).save(tmp_path)
    code = "import sys; from tunix.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    hf, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours is not None
    assert type(ours.hf) is type(hf)
    assert repr(ours.hf) == repr(hf)
    assert ours.hf.backend_tokenizer.to_str() == hf.backend_tokenizer.to_str()


CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast")
CLASSES += ("Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "GPT2Tokenizer")


def foreign(folder: Path, **settings: object) -> None:
    """A tokenizer of bytes that splits numbers in threes, as no Qwen's does, and knows 123 and " of" by heart."""
    merges = [("1", "2"), ("12", "3"), ("Ġ", "o"), ("Ġo", "f")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["</s>", "<s>", *letters, *("".join(pair) for pair in merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|[^\p{L}\p{N}]"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("kind", CLASSES)
def test_the_ids_are_those_of_tokenizer_json(tmp_path, kind):
    """Whatever class AutoTokenizer would choose: some build another splitter, and some do not load at all."""
    foreign(tmp_path, bos_token="<s>", eos_token="</s>", **({} if kind is None else {"tokenizer_class": kind}))
    text = "sum of 123 e\u0301"
    expected = Backend.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False)
    assert expected.tokens == [*"sum", "Ġof", "Ġ", "123", "Ġ", "e", "Ì", "ģ"]
    for model_type in (None, "qwen2", "qwen3", "qwen3_5", "llama", "mixtral", "gemma2", "gemma3_text", "gpt_oss"):
        (tmp_path / "config.json").write_text(json.dumps({} if model_type is None else {"model_type": model_type}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        assert tokenizer.encode(text) == expected.ids
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (262, 1, 0, 0)
        assert tokenizer.decode(expected.ids) == text


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", None])
def test_special_tokens_that_a_folder_does_not_name_are_those_of_the_class(tmp_path, name):
    """Gemma's BOS is known to the family's class: without it no text would begin with one."""
    made = bytes_tokenizer("gemma")
    made.save(tmp_path)
    config = {"model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text("{}")
    if name is not None:
        (tmp_path / name).write_text(json.dumps(named))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    for field in ("bos_id", "eos_id", "pad_id", "adds_bos", "stop_ids", "vocab_size"):
        assert getattr(tokenizer, field) == getattr(made, field)
    # null says that there is none, as Qwen's do of BOS.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, "bos_token": None}))
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    without = load_tokenizer(tmp_path)
    assert without is not None
    assert (without.bos_id, without.eos_id) == (None, 1)


def test_templates_and_added_tokens_are_those_of_autotokenizer(tmp_path):
    """Files of templates, among them more than one, tokens of tokenizer_config.json, and settings of BOS."""
    bytes_tokenizer("llama3").save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"262": {"content": "<tool>", "special": False, "normalized": True}}
    settings |= {"add_bos_token": True, "model_max_length": 77}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "chat_template.jinja").write_text("first {{ messages[0].content }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    hf, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.chat_template == "first {{ messages[0].content }}"
    assert ours.hf.chat_template == hf.chat_template == {"default": ours.chat_template, "rag": "rag"}
    assert ours.hf.get_added_vocab() == hf.get_added_vocab()
    assert ours.encode("a<tool>b") == hf.encode("a<tool>b", add_special_tokens=False)
    assert ours.encode("a", bos=ours.adds_bos) == hf.encode("a")
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (hf.bos_token_id, hf.eos_token_id, hf.pad_token_id)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_what_is_saved_gives_transformers_the_same_ids(tmp_path, model_type):
    """As an export with another template writes it, for types whose class AutoTokenizer takes from the folder."""
    foreign(tmp_path, bos_token="<s>", eos_token="</s>")
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    loaded.replace_template("other").save(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": model_type}))
    hf = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert hf.chat_template == "other"
    assert hf.encode("sum of 123", add_special_tokens=False) == loaded.encode("sum of 123")


def test_ids_of_made_tokenizers():
    tokenizer = bytes_tokenizer()
    assert [tokenizer.decode([i]) for i in range(5)] == ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.stop_ids) == (0, 1, 2, (1, 4))
    assert tokenizer.encode("aé", bos=True) == [2, 5 + ord("a"), 5 + 0xC3, 5 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("a  b\x00 é 🙂\n")) == "a  b\x00 é 🙂\n"
    assert tokenizer.decode([2, 5 + ord("a"), 1], skip_special=True) == "a"
    assert (bytes_tokenizer("gemma").adds_bos, bytes_tokenizer("chatml").adds_bos) == (True, False)
    assert bytes_tokenizer("llama3").vocab_size == 262


def test_offsets_cover_every_character():
    tokenizer = bpe_tokenizer(TEXTS, 400)
    ids, offsets = tokenizer.encode_with_offsets("the then  there")
    assert ids == tokenizer.encode("the then  there")
    assert offsets[0, 0] == 0
    assert (offsets[1:, 0] == offsets[:-1, 1]).all()
    assert tokenizer.encode_with_offsets("")[1].shape == (0, 2)


def test_bpe_is_deterministic_and_merges():
    one, two = bpe_tokenizer(TEXTS, 320), bpe_tokenizer(iter(TEXTS), 320)
    assert one.hf.get_vocab() == two.hf.get_vocab()
    assert len(one.encode(TEXTS[0])) < len(bytes_tokenizer().encode(TEXTS[0]))
    assert one.decode(one.encode(TEXT)) == TEXT
    with pytest.raises(UserError, match=r"at least 261 ids .* not 260"):
        bpe_tokenizer(TEXTS, 260)


def test_stop_ids_come_from_generation_config_too(tmp_path):
    bytes_tokenizer().save(tmp_path)
    for eos, expected in ((9, (1, 4, 9)), ([1, 7], (1, 4, 7)), (None, (1, 4))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": 0.1}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        assert tokenizer.stop_ids == expected
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json is not JSON"):
        load_tokenizer(tmp_path)


def test_folders_without_a_whole_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no vocabulary: tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    bytes_tokenizer().save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="the tokenizer does not load"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        load_tokenizer(tmp_path / "gone")


def test_no_eos_is_an_error_only_where_it_is_needed(tmp_path):
    bytes_tokenizer().save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.stop_ids == (4,)
    with pytest.raises(UserError, match="names no eos_token"):
        assert tokenizer.eos_id
