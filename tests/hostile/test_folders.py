"""Model folders in which some values are others: a model, or a message that names the file. Lies that somebody would
tell are in tests/hf/test_folders_that_lie.py."""

import copy
import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.hf.test_folders_that_lie import INDEX, SINGLE, written
from tests.hostile.attack import attack
from tests.marks import slow
from tests.serving.test_fuzz import places
from tunix.data.tokenizer import bytes_tokenizer, load_tokenizer
from tunix.errors import UserError
from tunix.hf.safetensors_io import tensors_of_file
from tunix.hf.source import read_folder

FAMILIES = ("llama", "gemma2", "gemma3", "qwen2", "qwen3", "gemma4", "qwen3_5", "gpt_oss")
BIG = 10**400
ODD = [
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, 10**30, BIG, 0.5, -0.0, 1e308, float("nan"), float("inf"), ""),
    *("a", "\0", "\ud800", "llama", "default", "yarn", "x" * 300, "sliding_attention", [], [[]], [None], [1], ["a"]),
    *([2, 3], [0] * 3, [True], ["sliding_attention", "full_attention"], [{}], [1, "a"], {}, {"a": 1}),
    *({"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 8}, {"rope_type": []}),
]
KEYS = ("a", "model_type", "text_config", "rope_scaling", "eos_token_id", "layer_types")
FINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a base of 400 digits": ("llama", {"rope_theta": BIG}, r"rope_theta = 10+ must be a positive number|rope_theta"),
    "a norm of 400 digits": ("gemma2", {"rms_norm_eps": BIG}, "rms_norm_eps = 1.* must be a positive number"),
    "a scale of 400 digits": ("gemma2", {"query_pre_attn_scalar": BIG}, "query_pre_attn_scalar = 1.* positive integer"),
    "a stop that is half a token": ("llama", {"eos_token_id": 0.5}, "eos_token_id = 0.5 must be a token id"),
    "a list of texts for a stop": ("llama", {"bos_token_id": ["a"]}, r"bos_token_id = \['a'\] must be a token id"),
    "a mapping for a layer's type": ("qwen3", {"layer_types": [{}, "full_attention"]}, "layer_types = .* must name"),
}


@pytest.mark.parametrize(("family", "fields", "message"), FINDS.values(), ids=FINDS)
def test_a_config_that_was_a_traceback(family: str, fields: dict[str, Any], message: str, tmp_path: Path):
    file = written(tmp_path / family, family) / "config.json"
    told = {name: value for name, value in json.loads(file.read_text()).items() if name != "rope_parameters"}
    file.write_text(json.dumps({**told, **fields}))
    with pytest.raises(UserError, match=message):
        read_folder(file.parent)


@pytest.mark.parametrize("name", ["\ud800", "\udfff.safetensors"])
def test_a_shard_with_half_a_character(name: str, tmp_path: Path):
    folder = written(tmp_path / "llama")
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"names the file '.*', which is none of its own"):
        read_folder(folder)


Change = tuple[int, int, Any, str]
CHANGES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 10**6), st.sampled_from(ODD), st.sampled_from(KEYS)),
    min_size=1,
    max_size=3,
)


def changed(tree: Any, changes: list[Change]) -> Any:
    """The tree with some values that are others, left out, deeper, or under another key."""
    tree = copy.deepcopy(tree)
    for kind, number, odd, other in changes:
        ways = list(places(tree))
        if not ways:
            break
        *way, key = ways[number % len(ways)]
        holder = tree
        for step in way:
            holder = holder[step]
        match kind:
            case 5:
                del holder[key]
            case 6 if isinstance(holder, dict):
                holder[other] = copy.deepcopy(odd)
            case 7:
                holder[key] = {"a": holder[key]}
            case _:
                holder[key] = copy.deepcopy(odd)
    return tree


numbers = pytest.mark.parametrize("number", [15, *slow([15_000])])
"""Of a property that takes milliseconds: 15,000 for each of the eight families."""


def reads_folder(folder: Path) -> None:
    """A folder is read, or refused."""
    with suppress(UserError):
        read_folder(folder)


def reads_tensors(file: Path, most: int) -> None:
    """Tensors of a file are read, none of which has more bytes than the file, or refused."""
    with suppress(UserError):
        for tensor in tensors_of_file(file).values():
            if tensor.dtype in ("F32", "BF16", "F16"):
                assert tensor.read().size * tensor.read().itemsize == tensor.size <= most


def reads_tokenizer(folder: Path) -> None:
    """A tokenizer is read and does its work, or is refused."""
    with suppress(UserError):
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        tokenizer.decode(tokenizer.encode("a b"), True)
        assert tokenizer.vocab_size > max(tokenizer.stop_ids, default=0)
        assert tokenizer.adds_bos in (True, False)


def model_with_tokenizer(folder: Path) -> Path:
    """The files that `reads_tokenizer` reads."""
    bytes_tokenizer("llama3").save(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}')
    return folder


@numbers
@pytest.mark.parametrize("family", FAMILIES)
def test_no_config_is_a_traceback(family: str, number: int, tmp_path: Path):
    file = written(tmp_path / family, family) / "config.json"
    told = json.loads(file.read_text())

    def reads(changes: list[Change]) -> None:
        file.write_text(json.dumps(changed(told, changes)))
        reads_folder(file.parent)

    attack(reads, CHANGES, number)


@pytest.mark.parametrize("number", [15, *slow([100_000])])
def test_no_header_is_a_traceback(number: int, tmp_path: Path):
    file = written(tmp_path / "llama") / SINGLE
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    told, end = json.loads(whole[8 : 8 + length]), len(whole) - 8 - length

    def reads(case: tuple[list[Change], int, int, list[tuple[int, int]]]) -> None:
        changes, longer, kept, bits = case
        text = json.dumps(changed(told, changes)).encode() if changes else whole[8 : 8 + length]
        header = bytearray(struct.pack("<Q", (len(text) + longer) % (1 << 64)) + text)
        for place, byte in bits:
            header[place % len(header)] = byte
        file.write_bytes(header + whole[8 + length :][: end - kept])
        reads_tensors(file, end)

    lengths = st.sampled_from([0] * 8 + [1, -1, 1 << 40, 1 << 63])
    flips = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3)
    attack(reads, st.tuples(CHANGES | st.just([]), lengths, st.sampled_from([0, 0, 0, 1, end]), flips), number)


@pytest.mark.parametrize("number", [15, *slow([30_000])])
def test_no_index_is_a_traceback_or_leads_elsewhere(number: int, tmp_path: Path):
    folder = written(tmp_path / "llama")
    tensors = tensors_of_file(folder / SINGLE)
    (folder / SINGLE).rename(folder / "a.safetensors")
    told = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    names = ["../a", "/etc/passwd", "", ".", "..", "a.safetensors/", "./a.safetensors", "a\\b", "b/../a", "~", SINGLE]

    def reads(case: tuple[list[Change], int, str | None]) -> None:
        changes, key, name = case
        index = changed(told, changes)
        if name is not None:
            index = {"weight_map": {**told["weight_map"], sorted(tensors)[key % len(tensors)]: name}}
        (folder / INDEX).write_text(json.dumps(index))
        reads_folder(folder)

    attack(reads, st.tuples(CHANGES, st.integers(0, 99), st.none() | st.sampled_from(names)), number)


def test_a_tokenizer_whose_length_is_a_text(tmp_path: Path):
    bytes_tokenizer("llama3").save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": "long"}))
    with pytest.raises(UserError, match="the tokenizer does not load: '>' not supported"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("stop", [-1, 2**31, 10**30, [1, 2**63]])
def test_a_stop_that_no_vocabulary_has(stop: Any, tmp_path: Path):
    (model_with_tokenizer(tmp_path) / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is .*, neither a token id nor a list"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("number", [15, *slow([20_000])])
def test_no_tokenizer_is_a_traceback(number: int, tmp_path: Path):
    model_with_tokenizer(tmp_path)
    told = {file.name: json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))}

    def reads(case: tuple[str, list[Change]]) -> None:
        name, changes = case
        (tmp_path / name).write_text(json.dumps(changed(told[name], changes)))
        try:
            reads_tokenizer(tmp_path)
        finally:
            (tmp_path / name).write_text(json.dumps(told[name]))

    attack(reads, st.tuples(st.sampled_from(sorted(told)), CHANGES), number)
