"""Model and adapter folders that say what is not so: names and links that leave them, sizes that no file bears out,
damaged headers, pickles, bombs. Each is refused by name, in one message, before anything is computed from it.

Each row is a lie told in a folder that is right otherwise.
"""

import json
import os
import pickle
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tunix.data.tokenizer import bytes_tokenizer, load_tokenizer
from tunix.errors import UserError
from tunix.hf.model_folder import expected
from tunix.hf.peft_folder import load_adapter
from tunix.hf.source import pretrained, read_folder
from tunix.models.families.table import SIZE_NAMES, small, to_hf, with_sizes
from tunix.models.model import Model
from tunix.recipe.recipe import Recipe

Lie = Callable[[Path], Any]
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SIZES = dict.fromkeys(SIZE_NAMES, 8) | {"vocab_size": 272, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
BILLION = 10**9


def written(folder: Path, family: str = "llama") -> Path:
    """A two-layer model's folder: zeros, and a config.json that fits them."""
    sizes = {name: size for name, size in SIZES.items() if name != "window" or small(family).window}
    config = with_sizes(small(family), {**sizes, "head_dim": 4})
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(to_hf(config)))
    shapes = expected(config, Model(config).shapes)
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / SINGLE)
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each family, and an adapter."""
    here = tmp_path_factory.mktemp("good")
    for family in ("llama", "gemma2", "gemma3", "qwen2"):
        bytes_tokenizer("llama3").save(written(here / family))
        written(here / f"{family}-again", family)
    (here / "adapter").mkdir()
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (here / "adapter/adapter_config.json").write_text(json.dumps(said))
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    pairs = {stem.format(i, "AB"[j]): np.zeros(((2, 8), (8, 2))[j], np.float32) for i in range(2) for j in range(2)}
    save_file(pairs, here / "adapter/adapter_model.safetensors")
    return here


@pytest.fixture
def here(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    return tmp_path


def said(path: str, **fields: Any) -> Lie:
    """A JSON file says something else."""

    def change(here: Path) -> None:
        file = here / path
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def write(path: str, data: str | bytes) -> Lie:
    return lambda here: (here / path).write_bytes(data if isinstance(data, bytes) else data.encode())


def shards(name: str) -> Lie:
    """Every tensor of the Llama is in a shard of this name, if the index is to be believed."""

    def change(here: Path) -> None:
        keys = list(load_file(here / "llama" / SINGLE))
        (here / "llama" / SINGLE).rename(here / "outside.safetensors")
        (here / "llama" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(keys, name)}))

    return change


def linked(path: str) -> Lie:
    """A file is a link to one outside."""

    def change(here: Path) -> None:
        (here / path).rename(here / "outside")
        (here / path).symlink_to(here / "outside")

    return change


def sub_linked(here: Path) -> None:
    shards("sub/outside.safetensors")(here)
    (here / "llama/sub").symlink_to(here)


def pipe(path: str) -> Lie:
    def change(here: Path) -> None:
        (here / path).unlink()
        os.mkfifo(here / path)

    return change


def header(change: Callable[[dict[str, Any]], Any]) -> Lie:
    """The Llama's file begins with another header; its bytes stay."""

    def rewrite(here: Path) -> None:
        file = here / "llama" / SINGLE
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        told = json.loads(data[8 : 8 + length])
        change(told)
        text = json.dumps(told).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return rewrite


def overlap(told: dict[str, Any]) -> None:
    """The second tensor is where the first is."""
    first, second, *_ = (name for name in told if name != "__metadata__" and told[name]["shape"] == [4, 8])
    told[second]["data_offsets"] = told[first]["data_offsets"]


def beyond(told: dict[str, Any]) -> None:
    last = max((name for name in told if name != "__metadata__"), key=lambda name: told[name]["data_offsets"])
    told[last]["data_offsets"][1] += 4096


def pickled(path: str, name: str) -> Lie:
    """The weights are a pickle, which would run a command."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, ("exploded",)

    def change(here: Path) -> None:
        (here / path).unlink()
        (here / path).with_name(name).write_bytes(pickle.dumps(Bomb()))

    return change


NAMES: dict[str, tuple[Lie, list[str]]] = {
    "a shard above": (shards("../outside.safetensors"), ["llama names the file '../outside.safetensors'"]),
    "a shard by its absolute path": (
        lambda here: shards(str(here / "outside.safetensors"))(here),
        ["llama names the file '/", "outside.safetensors', which is none of its own"],
    ),
    "a shard behind a link": (sub_linked, ["llama/sub/outside.safetensors is a link to", "put a copy in the place"]),
    "a shard of null": (shards("a\0b"), ["llama names the file 'a\\x00b'"]),
    "a shard of 300 letters": (shards("a" * 300), ["is missing"]),
    "linked weights": (linked(f"llama/{SINGLE}"), [f"llama/{SINGLE} is a link to", "outside, outside of"]),
    "linked config": (linked(f"llama/{CONFIG}"), [f"llama/{CONFIG} is a link to"]),
    "linked tokenizer": (linked("llama/tokenizer.json"), ["llama/tokenizer.json is a link to"]),
    "linked template": (linked("llama/chat_template.jinja"), ["llama/chat_template.jinja is a link to"]),
    # It is copied beside an export, though it is not read here: a secret would leave with the model.
    "linked vocabulary": (
        lambda here: (here / "llama/vocab.json").symlink_to("/etc/passwd"),
        ["llama/vocab.json is a link to /etc/passwd"],
    ),
    "linked rules": (
        lambda here: [
            write("llama/tunix_quantization.json", "{}")(here),
            linked("llama/tunix_quantization.json")(here),
        ],
        ["llama/tunix_quantization.json is a link to"],
    ),
    "a pipe": (pipe(f"llama/{CONFIG}"), [f"llama/{CONFIG} is not a file but a pipe"]),
}
HUGE: dict[str, tuple[Lie, list[str]]] = {
    "layers": (said(f"llama/{CONFIG}", num_hidden_layers=BILLION), ["num_hidden_layers = 1000000000", "have 2 layers"]),
    "layers of a name": (
        lambda here: [
            save_file({f"model.layers.{BILLION - 1}.a": np.zeros(1)}, here / "llama" / SINGLE),
            said(f"llama/{CONFIG}", num_hidden_layers=BILLION)(here),
        ],
        ["num_hidden_layers = 1000000000", "have 1 layers"],
    ),
    "width": (said(f"llama/{CONFIG}", hidden_size=BILLION), ["embed_tokens.weight expected (272, 1000000000), found"]),
    "vocabulary": (
        said(f"llama/{CONFIG}", vocab_size=10**18),
        ["embed_tokens.weight expected (1000000000000000000, 8)"],
    ),
    "hidden units": (said(f"llama/{CONFIG}", intermediate_size=BILLION), ["down_proj.weight expected (8, 1000000000)"]),
    "heads": (said(f"llama/{CONFIG}", num_attention_heads=BILLION), ["num_heads = 1000000000"]),
    "head dim": (said(f"llama/{CONFIG}", head_dim=2 * BILLION), ["k_proj.weight expected (2000000000, 8), found"]),
    "a number of digits": (
        lambda here: (here / "llama" / CONFIG).write_text(
            (here / "llama" / CONFIG).read_text().replace('"vocab_size": 272', '"vocab_size": ' + "9" * 5000)
        ),
        [f"llama/{CONFIG} is not valid JSON"],
    ),
    "nested lists": (write(f"llama/{CONFIG}", "[" * 100_000), [f"llama/{CONFIG} is not valid JSON"]),
}
DAMAGED: dict[str, tuple[Lie, list[str]]] = {
    "a header of 2^63 bytes": (write(f"llama/{SINGLE}", b"\xff" * 7 + b"\x7f{}"), ["is not a whole safetensors file"]),
    "a header that is no JSON": (write(f"llama/{SINGLE}", b"\2\0\0\0\0\0\0\0{["), ["is not a whole safetensors file"]),
    "overlapping tensors": (header(overlap), ["is not a whole safetensors file"]),
    "a tensor beyond the end": (header(beyond), ["is not a whole safetensors file"]),
    "a shape that is not its bytes'": (
        header(lambda told: told["model.norm.weight"].update(shape=[BILLION])),
        ["is not a whole safetensors file"],
    ),
    "a negative shape": (
        header(lambda told: told["model.norm.weight"].update(shape=[-8])),
        ["is not a whole safetensors file"],
    ),
    "a dtype of nobody": (
        header(lambda told: told["model.norm.weight"].update(dtype="F33")),
        ["is not a whole safetensors file"],
    ),
    "NaN for a field": (write(f"llama/{CONFIG}", '{"model_type": "llama", "hidden_size": NaN}'), ["hidden_size = nan"]),
    "an endless norm": (said(f"llama/{CONFIG}", rms_norm_eps=float("inf")), ["rms_norm_eps = inf", "positive number"]),
    "a list for a type": (said(f"llama/{CONFIG}", model_type=["llama"]), ["model_type = ['llama'] is not supported"]),
    "a list for the text part": (said(f"gemma3/{CONFIG}", text_config=[1]), ["text_config = [1]"]),
    "a list for the index": (
        lambda here: [shards("x")(here), write(f"llama/{INDEX}", '{"weight_map": ["x"]}')(here)],
        ["weight_map must name the file of each tensor"],
    ),
    "a pickle": (pickled(f"llama/{SINGLE}", "pytorch_model.bin"), ["pytorch_model.bin", "loads no pickles"]),
}
TABLES = {"name": NAMES, "huge": HUGE, "damaged": DAMAGED}


@pytest.mark.parametrize(
    ("lie", "words"),
    [pytest.param(*row, id=f"{table}-{name}") for table, rows in TABLES.items() for name, row in rows.items()],
)
def test_a_model_that_lies_is_refused_within_a_second(lie: Lie, words: list[str], here: Path):
    lie(here)
    family = "gemma3" if "text_config" in (here / "gemma3" / CONFIG).read_text() else "llama"
    start = time.process_time()
    with pytest.raises(UserError) as refused:
        pretrained(family)
    assert time.process_time() - start < 1
    assert all(word in str(refused.value) for word in words), refused.value
    assert not Path("exploded").exists()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2"])
def test_a_billion_layers_are_refused_before_a_pattern_is_made_of_them(family: str, here: Path):
    # These families make a tuple with an entry for each layer, local or not, while config.json is read.
    said(f"{family}/{CONFIG}", num_hidden_layers=BILLION, layer_types=None)(here)
    with pytest.raises(UserError, match="num_hidden_layers = 1000000000, but the files beside it have 2 layers"):
        pretrained(family)


def test_a_billion_layers_in_the_text_part_are_refused(here: Path):
    told = json.loads((here / "gemma3" / CONFIG).read_text())
    text = {**told, "model_type": "gemma3_text", "num_hidden_layers": BILLION, "layer_types": None}
    (here / "gemma3" / CONFIG).write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    with pytest.raises(UserError, match="num_hidden_layers = 1000000000, but the files beside it have 2 layers"):
        pretrained("gemma3")


def test_links_of_the_hubs_cache_are_followed(here: Path, tmp_path: Path):
    # models--a--b/snapshots/REVISION/config.json -> ../../blobs/HASH, as huggingface_hub has it.
    repo = tmp_path / "hub/models--a--b"
    snapshot, blobs = repo / "snapshots/0123abc", repo / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate((here / "llama").iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert pretrained(str(snapshot)).decoder == read_folder(here / "llama")
    # Somebody's own link to the whole snapshot is no file's.
    (tmp_path / "mine").symlink_to(snapshot)
    assert pretrained("mine").decoder == read_folder(here / "llama")
    # The blobs of another repository are not its own.
    repo.joinpath("blobs").rename(tmp_path / "hub/blobs")
    (repo / "blobs").symlink_to(tmp_path / "hub/blobs")
    with pytest.raises(UserError, match=r"is a link to .*/hub/blobs/"):
        pretrained(str(snapshot))


def test_links_within_a_folder_are_its_own(here: Path):
    (here / "llama" / SINGLE).rename(here / "llama/weights.safetensors")
    (here / "llama" / SINGLE).symlink_to("weights.safetensors")
    model = Model(read_folder(here / "llama"))
    assert model.shapes["embed/w"] == (272, 8)


def test_paths_in_a_tokenizers_config_are_not_followed(here: Path):
    # Published folders hold the paths of the machine that they were made on.
    (here / "other").mkdir()
    bytes_tokenizer("chatml").save(here / "other")
    elsewhere = {name: str(here / "other/tokenizer.json") for name in ("tokenizer_file", "vocab_file", "merges_file")}
    said("llama/tokenizer_config.json", **elsewhere)(here)
    tokenizer = load_tokenizer(here / "llama")
    assert tokenizer is not None
    assert tokenizer.has_token("<|eot_id|>")
    assert not tokenizer.has_token("<|im_start|>")


ADAPTERS: dict[str, tuple[Lie, list[str]]] = {
    "linked weights": (linked("adapter/adapter_model.safetensors"), ["adapter/adapter_model.safetensors is a link to"]),
    "linked config": (linked("adapter/adapter_config.json"), ["adapter/adapter_config.json is a link to"]),
    "a huge rank": (said("adapter/adapter_config.json", r=10**12), ["lora_A.weight expected (1000000000000, 8)"]),
    "a rank that is no number": (said("adapter/adapter_config.json", r=float("nan")), ["r = nan must be a positive"]),
    "a pickle": (pickled("adapter/adapter_model.safetensors", "adapter_model.bin"), ["loads no pickles"]),
}


@pytest.mark.parametrize(("lie", "words"), ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_that_lies_is_refused_within_a_second(lie: Lie, words: list[str], here: Path):
    config = read_folder(here / "llama")
    lie(here)
    start = time.process_time()
    with pytest.raises(UserError) as refused:
        load_adapter(here / "adapter", config)
    assert time.process_time() - start < 1
    assert all(word in str(refused.value) for word in words), refused.value
    assert not Path("exploded").exists()


LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPES: dict[str, tuple[str, str]] = {
    "a tag": ("model: !!python/object/apply:os.mkdir [exploded]", "could not determine a constructor"),
    "a billion laughs": (LAUGHS + "model: *i\n", "more than 100000 values where every alias"),
    "a list within itself": ("model: &m [*m]", "more than 100000 values where every alias"),
    "nested lists": ("model: " + "[" * 600, "not readable as YAML: maximum recursion depth"),
}


@pytest.mark.parametrize(("text", "words"), RECIPES.values(), ids=RECIPES)
def test_a_recipe_that_is_a_bomb_is_refused_within_a_second(text: str, words: str, here: Path):
    (here / "r.yaml").write_text(text)
    start = time.process_time()
    with pytest.raises(UserError, match=words) as refused:
        Recipe.load(here / "r.yaml")
    assert time.process_time() - start < 1
    assert len(str(refused.value)) < 5000
    assert not Path("exploded").exists()
