"""Where a turn ends: the sampler's stop ids, and the eos ids of every folder that is written, hold all of its tokens.

The tokenizer of the tests is `bytes_tokenizer("llama3")`: <pad> 0, <eos> 1, <bos> 2, headers 3 and 4, <|eot_id|> 5.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.tiny_runs import model_folder, train, write_recipe, write_rows
from tunix.cli import main
from tunix.config import MeshConfig, ModelConfig
from tunix.data.chat import turn_end
from tunix.data.config import DataConfig
from tunix.data.tokenizer import bytes_tokenizer, load_tokenizer
from tunix.errors import UserError
from tunix.hf.model_folder import load_params, save_folder, write_generation_config
from tunix.hf.source import of_recipe, pretrained, with_stops
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.mesh import build_mesh
from tunix.models.model import Model
from tunix.types import Sampling

TURNS = "{% for m in messages %}{{ '<|start_header_id|>' + m.content }}END{% endfor %}"
"""A chat template whose turns end in what stands for END."""
BASE = {"eos_token_id": 7, "temperature": 0.6, "transformers_version": "4.51.0"}
"""A generation_config.json with a stop that nothing else names."""


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "generation_config.json").read_text())


def recipe_parts(base: Path | None, template: str | None) -> tuple[ModelConfig, DataConfig]:
    model = {"path": str(base)} if base else {"init": "random", "family": "llama", "tokenizer": "bytes"}
    data = {"train": "rows.jsonl", "chat_template": template}
    return ModelConfig.model_validate({**model, "dtype": "float32"}), DataConfig.model_validate(data)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = model_folder(tmp_path / "base", eos_token_id=1, pad_token_id=0)
    (folder / "generation_config.json").write_text(json.dumps(BASE))
    return folder


def jinja(tmp_path: Path, end: str) -> str:
    (tmp_path / "turns.jinja").write_text(TURNS.replace("END", end))
    return str(tmp_path / "turns.jinja")


@pytest.mark.parametrize(
    ("end", "stop"),
    [
        ("<pad>", 0),
        (" <pad>", 0),  # as Llama 2 writes a space before </s>
        ("\n<pad>\n", 0),
        ("<|eot_id|><eos>", 5),
        ("", None),
        ("\n### End\n", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_what_a_turn_ends_in_is_read_from_the_template(end: str, stop: int | None):
    assert turn_end(bytes_tokenizer("llama3").replace_template(TURNS.replace("END", end))) == stop


@pytest.mark.parametrize(("template", "stop"), [("gemma", 4), ("gemma4", 4), ("llama3", 5), ("chatml", 4)])
def test_turns_of_the_shipped_templates_end(template: Any, stop: int):
    assert turn_end(bytes_tokenizer(template)) == stop


def test_a_chat_template_keeps_the_stops_of_the_folder(base: Path, tmp_path: Path):
    """<eos> and <|eot_id|> by their names, 7 of the folder, <pad> of the template; every other field goes along."""
    config, data = recipe_parts(base, jinja(tmp_path, " <pad>"))
    assert pretrained(str(base)).stop_ids == (1, 5, 7)
    for _ in ("first", "resumed"):
        source = of_recipe(config, data, tmp_path / "kept", rows=None)
        assert source.stop_ids == (1, 5, 7, 0)
        assert written(tmp_path / "kept") == {**BASE, "eos_token_id": [7, 1, 5, 0]}
    (tmp_path / "kept" / "generation_config.json").unlink()  # as an earlier version left it
    assert of_recipe(config, data, tmp_path / "kept", rows=None).stop_ids == (1, 5, 7, 0)
    assert dict(with_stops(source).stops)["eos_token_id"] == (1, 5, 7, 0)


def test_transformers_stops_where_the_turns_end(base: Path, tmp_path: Path):
    """A final norm of zeros makes all logits 0, so that greedy decoding says <pad>, the first id, again and again."""
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.zeros(32)}, base / "model.safetensors", {"format": "pt"})
    source = of_recipe(*recipe_parts(base, jinja(tmp_path, " <pad>")), tmp_path / "kept", rows=None)
    model = Model(with_stops(source))
    params = load_params(model, base, dict.fromkeys(model.shapes, "float32"), build_mesh(MeshConfig()))
    out = tmp_path / "out"
    save_folder(out, model.config, params, source=source.files, dtype="float32", stops=source.stop_ids)
    assert written(out) == {**BASE, "eos_token_id": [7, 1, 5, 0]}
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [1, 5, 7, 0]
    assert pretrained(str(out)).stop_ids == (1, 5, 7, 0)
    assert AutoTokenizer.from_pretrained(out).chat_template == TURNS.replace("END", " <pad>")
    prompt = torch.tensor([[9, 10]])
    for folder, length in ((base, 8), (out, 1)):
        reference: Any = AutoModelForCausalLM.from_pretrained(folder)
        said = reference.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        assert said[0, 2:].tolist() == [0] * length


def test_a_model_from_scratch_stops_at_the_end_of_its_turns(tmp_path: Path):
    """Gemma's 4 and <eos>; without a tokenizer there is nothing to say."""
    config, data = recipe_parts(None, None)
    config = config.model_copy(update={"family": "gemma"})
    source = of_recipe(config, data, tmp_path / "kept", rows=None)
    assert source.stop_ids == (1, 4)
    assert written(tmp_path / "kept") == {"eos_token_id": [1, 4]}
    assert with_stops(source).stops == (("bos_token_id", 2), ("eos_token_id", (1, 4)), ("pad_token_id", 0))


SPECIAL = (("bos_token_id", 2), ("eos_token_id", (1, 9)), ("pad_token_id", 0))


@pytest.mark.parametrize(
    ("content", "stops", "expected"),
    [
        ('{"eos_token_id":1,  "top_p": 0.9}', (1,), '{"eos_token_id":1,  "top_p": 0.9}'),  # nothing to add: as it is
        ('{"eos_token_id": [5, 1]}', (1, 5), '{"eos_token_id": [5, 1]}'),
        ('{"eos_token_id": 3}', (), '{"eos_token_id": 3}'),
        ('{"eos_token_id": 3, "top_p": 0.9}', (1, 3), {"eos_token_id": [3, 1], "top_p": 0.9}),
        ('{"top_p": 0.9}', (1,), {"eos_token_id": 1, "top_p": 0.9}),
        # transformers no longer reads config.json's where there is the file.
        (None, (1, 5), {"bos_token_id": 2, "eos_token_id": [1, 9, 5], "pad_token_id": 0}),
        (None, (), None),
    ],
)
def test_only_the_eos_ids_grow(tmp_path: Path, content: str | None, stops: tuple[int, ...], expected: Any):
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    out.mkdir()
    if content is not None:
        (base / "generation_config.json").write_text(content)
    write_generation_config(out, (None, tmp_path, base), stops, SPECIAL)
    if expected is None:
        assert not list(out.iterdir())
    elif isinstance(expected, str):
        assert (out / "generation_config.json").read_text() == expected
    else:
        assert written(out) == expected
        assert GenerationConfig.from_pretrained(out).eos_token_id == expected["eos_token_id"]


def test_eos_ids_of_a_folder_are_those_that_transformers_reads(base: Path):
    """generation_config.json, and config.json where that is missing or names none."""
    assert load_tokenizer(base).stop_ids == (1, 5, 7)  # pyright: ignore[reportOptionalMemberAccess]
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 8]}))
    (base / "generation_config.json").write_text("{}")
    assert load_tokenizer(base).stop_ids == (1, 5, 8)  # pyright: ignore[reportOptionalMemberAccess]
    (base / "generation_config.json").unlink()
    assert load_tokenizer(base).stop_ids == (1, 5, 8)  # pyright: ignore[reportOptionalMemberAccess]
    (base / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is \['</s>'\], neither a token id nor"):
        load_tokenizer(base)


def stops_of(model: Path) -> tuple[int, ...]:
    """Stop ids of what `tunix generate`, `chat`, `serve` and `eval` sample with."""
    return InferenceModel(InferenceOptions(str(model))).with_stop_ids(Sampling(max_tokens=1)).stop_ids


CHAT = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}] * 8
FORMS = {
    "full": {},
    "packed": {"quantization": {"rules": [{"module": ".*", "weights": "int4", "tile": 32}]}},
    "adapter": {"adapter": {"rank": 2}},
    "stages": {"stages": [{"steps": 1}, {"adapter": {"rank": 2}}]},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_export_of_a_run_stops_where_its_turns_end(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
):
    """The folder of the run, what `tunix export` writes of it, and a run on top of it."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", CHAT)
    model = {"path": str(base), "dtype": "float32"}
    changes = {"model": model, "data.chat_template": jinja(tmp_path, " <pad>"), "steps": 1, **FORMS[form]}
    write_recipe(tmp_path / "r.yaml", changes)
    train("r.yaml")
    assert main(["export", "run", "out", *(["--packed"] if form == "packed" else [])]) == 0
    last = next(Path("run").glob("1_*"), Path("run"))
    folders = [last / "export", Path("out")]
    if form in ("adapter", "stages"):
        assert main(["export", "run", "alone", "--adapter"]) == 0
        folders.append(Path("alone"))
    for folder in folders:
        assert set(written(folder)["eos_token_id"]) == {0, 1, 5, 7}
        assert written(folder)["temperature"] == 0.6
        assert set(stops_of(folder)) == {0, 1, 5, 7}
        assert AutoTokenizer.from_pretrained(folder).chat_template == TURNS.replace("END", " <pad>")
    assert set(stops_of(Path("run"))) == {0, 1, 5, 7}
    plain = {name: value for name, value in changes.items() if name not in ("data.chat_template", *FORMS[form])}
    write_recipe(tmp_path / "next.yaml", {**plain, "model.path": "run", "output": "next"})
    train("next.yaml")
    assert set(written(Path("next") / "export")["eos_token_id"]) == {0, 1, 5, 7}
    assert set(stops_of(Path("next"))) == {0, 1, 5, 7}
