"""Folders of few bits: the words by hand, what compressed-tensors and transformers make of them, what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.commands.test_quantize import logits, their_logits
from tests.marks import slow
from tests.models.quantization.test_qat import INTEGERS, LOSS, batch
from tests.tiny_models import CASES, load, one_device, our_logits, reference_folder, rows_of, tokens
from tests.tiny_runs import lines, losses, model_folder, train, write_recipe, write_rows
from tests.trainers import trainer
from tunix.cli import main
from tunix.errors import UserError
from tunix.hf.model_folder import save_folder
from tunix.hf.packed_weights import pack_words, unpack_words
from tunix.hf.source import loaded, pretrained
from tunix.models.model import rounded
from tunix.models.quantization.formats import simulated
from tunix.models.quantization.rules import Rules
from tunix.models.quantization.schemes import SECTION, check_section

pytestmark = pytest.mark.models

UP, QUERY = (f"model.layers.1.{name}" for name in ("mlp.up_proj", "self_attn.q_proj"))
NAMES = list({case.model_type: name for name, case in CASES.items() if "experts" not in str(case)}.values())
"""A case of every family but those with experts, which have a test of their own."""
MIXTURES = ["qwen3_moe-one-of-four-tied", "mixtral-five"]
"""Those whose packed experts transformers reads; Gemma 4's it leaves random, with a warning."""
WORDS = "o_proj=none,self_attn.*=int8,down_proj=fp8,.*=int4:16"
DOWN_FP8 = {"module": "down_proj", "weights": "fp8"}
INT4 = {"module": ".*", "weights": "int4", "tile": 16}


def rules(*listed: dict) -> Rules:
    return Rules.model_validate({"rules": listed})


def test_words_by_hand():
    # Raised by 8: 0, 8, 15, 9, 8, 8, 8, 8 from the lowest four bits on; the second word holds -1 + 8, and nothing.
    row = np.array([[-8, 0, 7, 1, 0, 0, 0, 0, -1]])
    np.testing.assert_array_equal(pack_words(row, 4).view(np.uint32), [[0x88889F80, 0x7]])
    np.testing.assert_array_equal(pack_words(np.array([[-128, 127, 0, -1]]), 8).view(np.uint32), [[0x7F80FF00]])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [64, 67])
def test_words_are_those_of_compressed_tensors(bits, inputs):
    half = 1 << bits - 1
    values = np.random.default_rng(0).integers(-half, half, (5, inputs)).astype(np.int8)
    packed = pack_words(values, bits)
    np.testing.assert_array_equal(packed, pack_to_int32(torch.from_numpy(values), bits).numpy())
    np.testing.assert_array_equal(unpack_words(packed, inputs), values)
    theirs = unpack_from_int32(torch.from_numpy(packed), bits, torch.Size(values.shape))
    np.testing.assert_array_equal(theirs.numpy(), values)


def test_a_packed_folder_is_the_other_one_in_few_bits(tmp_path, capsys):
    model_folder(tmp_path / "base")
    write_rows(tmp_path / "held.jsonl", [{"text": f"{n} and {n + 1}"} for n in range(5)])
    for out, packed in (("plain", []), ("packed", ["--packed"])):
        assert main(["quantize", "base", out, "--rules", WORDS, "--data", "held.jsonl", *packed]) == 0
    said = capsys.readouterr().out
    for out in ("plain", "packed"):
        assert f"base rounded into {out}, float32, {Path(out, 'model.safetensors').stat().st_size / 1e3:.3g}kB" in said
    told = [line for line in said.splitlines() if "into" not in line]
    assert told[: len(told) // 2] == told[len(told) // 2 :]  # the same errors and losses
    plain, packed = (load_file(f"{name}/model.safetensors") for name in ("plain", "packed"))
    assert packed["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    (outputs, inputs), query = plain[f"{UP}.weight"].shape, plain[f"{QUERY}.weight"].shape
    assert packed[f"{UP}.weight_packed"].shape == (outputs, inputs // 8)
    assert packed[f"{UP}.weight_scale"].shape == (outputs, inputs // 16)
    assert packed[f"{QUERY}.weight_packed"].shape == (query[0], query[1] // 4)
    assert packed[f"{QUERY}.weight_scale"].shape == (query[0], 1)
    assert packed[f"{UP}.weight_shape"].tolist() == [outputs, inputs]
    untouched = {key for key in packed if not key.split(".")[-1].startswith("weight_")} - {
        f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)
    }
    assert untouched
    assert all(torch.equal(packed[key], plain[key]) for key in untouched)
    ignored = json.loads(Path("packed/config.json").read_text())[SECTION]["ignore"]
    assert ignored == ["lm_head", r"re:.*self_attn\.o_proj$"]  # vLLM wants to hear of each that stays as it is
    folders = [loaded(pretrained(name), "float32", one_device()) for name in ("plain", "packed")]
    for name, value in folders[0][1].items():
        np.testing.assert_allclose(folders[1][1][name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.slow  # every family with one type stays
def test_every_type_is_read_by_transformers(tmp_path):
    """Integers in words, by group and by output, and small floats, in one folder."""
    ours = trainer(rules=rules({"module": "o_proj"}, {"module": "self_attn.*", "weights": "int8"}, DOWN_FP8, INT4))
    for _ in range(3):
        ours.step(batch(), LOSS)
    ours.export(tmp_path / "out", packed=True)
    own = logits(ours.learner.spec.model, ours.learner.params)
    np.testing.assert_allclose(their_logits(tmp_path / "out"), own, atol=1e-4)
    behind = logits(replace(ours.learner.spec.model, simulated=()), ours.learner.params)
    assert np.abs(behind - own).max() > 1e-2
    model, params = loaded(pretrained(str(tmp_path / "out")), "float32", one_device())
    np.testing.assert_allclose(logits(model, params), own, atol=1e-5)


@pytest.mark.parametrize("name", [NAMES[0], *slow([*NAMES[1:], *MIXTURES])])
def test_every_family_is_read_by_transformers(name, tmp_path):
    reference_folder(CASES[name], tmp_path / "base")
    model, params = load(tmp_path / "base")
    how = rules({"module": "o_proj", "weights": "int8"}, DOWN_FP8, {**INT4, "tile": 8})
    save_folder(tmp_path / "out", model.config, params, source=None, dtype="float32", rules=how, packed=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        wanted = theirs.eval()(torch.from_numpy(tokens()).long()).logits.numpy()
    model = replace(model, simulated=simulated(how))
    own = np.asarray(our_logits(model, params, rows_of(*([row] for row in tokens()))))
    np.testing.assert_allclose(own, wanted, atol=1e-4)
    _, again = load(tmp_path / "out")
    for key, value in rounded(model, params)[0].items():
        np.testing.assert_allclose(again[key], value, rtol=1e-6, atol=1e-9, err_msg=key)


def test_rounded_inputs_are_rounded_by_transformers_too(tmp_path):
    """What no other folder tells it. Its steps are 1 / 127.5 of a token's largest value, where ours are 1 / 127."""
    ours = trainer(rules=INTEGERS)
    for name, packed in (("plain", False), ("packed", True)):
        ours.export(tmp_path / name, packed=packed)
    own = logits(ours.learner.spec.model, ours.learner.params)
    plain, packed = (their_logits(tmp_path / name) for name in ("plain", "packed"))
    behind = logits(replace(ours.learner.spec.model, simulated=simulated(INTEGERS, weights=False)), ours.learner.params)
    assert 0.5 < np.abs(packed - plain).mean() / np.abs(own - behind).mean() < 2
    assert np.abs(packed - own).mean() < 0.03
    group = json.loads((tmp_path / "packed/config.json").read_text())[SECTION]["config_groups"]["group_0"]
    assert (group["format"], group["input_activations"]["strategy"]) == ("int-quantized", "token")


@pytest.mark.slow
def test_a_packed_folder_is_trained_on_and_exported(tmp_path):
    """LoRA on it, and the adapter on it again: it is a base like any other."""
    model_folder(tmp_path / "base")
    write_rows(tmp_path / "held.jsonl", [{"text": f"{n} and {n + 1}"} for n in range(5)])
    assert main(["quantize", "base", "packed", "--rules", WORDS, "--packed"]) == 0
    recipe = {"model": {"path": "packed", "dtype": "float32"}, "adapter": {"kind": "lora", "rank": 4}, "steps": 3}
    train(str(write_recipe(tmp_path / "r.yaml", recipe)))
    assert losses("run")[-1] < losses("run")[0]
    assert main(["export", "run", "merged"]) == 0
    assert SECTION not in json.loads(Path("merged/config.json").read_text())
    for name, more in (("merged", []), ("packed", ["--adapter", "run/export"])):
        assert main(["score", name, "held.jsonl", "--out", f"{name}.jsonl", *more]) == 0
    sums = ([row["sum"] for row in lines(Path(f"{name}.jsonl"))] for name in ("merged", "packed"))
    np.testing.assert_allclose(*sums, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["quantize", "base", "out", "--rules", ".*=nf4", "--packed"], "packed: '.*' rounds to nf4, for which"),
        (["export", "run", "out", "--packed"], "run trained no rounded weights (`quantization` in its recipe)"),
    ],
)
def test_what_cannot_be_packed(words, told, tmp_path, capsys):
    model_folder(tmp_path / "base")
    if words[0] == "export":
        train(str(write_recipe(tmp_path / "r.yaml", {"model": {"path": "base", "dtype": "float32"}, "steps": 1})))
    assert main(words) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq', and tunix reads 'compressed-tensors' alone"),
        ({"format": "marlin-24"}, "has format 'marlin-24', and tunix reads pack-quantized"),
        ({"config_groups": {"FP8": ["Linear"]}}, "has no config_groups that say what each is"),
        ({"config_groups": None}, "has no config_groups that say what each is"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "rounds the cache too"),
        ({"config_groups": {"a": {"input_activations": {"num_bits": 8}}}}, "rounds what comes into a matrix too"),
    ],
)
def test_sections_of_others_that_are_not_read(changes, told, tmp_path):
    usual = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {}}}
    check_section(usual, tmp_path / "config.json")
    with pytest.raises(UserError, match=re.escape(told)):
        check_section({**usual, **changes}, tmp_path / "config.json")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda t: t.pop(f"{UP}.weight_packed"), "up_proj.weight_scale is there without model.layers.1.mlp.up_proj"),
        (lambda t: t.pop(f"{UP}.weight_shape"), "up_proj.weight_packed is there without its shape"),
        (
            lambda t: t.update({f"{UP}.weight_shape": torch.tensor([64, 40])}),
            "no matrix (64, 40) of 4 or 8 bits",
        ),
        (lambda t: t.update({f"{UP}.weight_scale": torch.ones(64, 3)}), "is no scale for each output"),
        (lambda t: t.update({f"{UP}.weight_zero_point": torch.ones(64, 2)}), "up_proj.weight_zero_point"),
    ],
)
def test_a_damaged_folder_is_told(damage, told, tmp_path):
    model_folder(tmp_path / "base")
    assert main(["quantize", "base", "out", "--rules", WORDS, "--packed"]) == 0
    tensors = load_file("out/model.safetensors")
    damage(tensors)
    save_file(tensors, "out/model.safetensors")
    with pytest.raises(UserError, match=re.escape(told)):
        load(tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe-one-of-four-tied",
        *slow(["qwen3_5_moe-five-of-two", "mixtral-five", "gemma4_moe-five-of-three"]),
    ],
)
def test_experts_are_packed_each_for_itself(name, tmp_path):
    """What is read is what is rounded: int4 in tiles of 8, of every expert by its own scales."""
    reference_folder(CASES[name], tmp_path / "base")
    model, params = load(tmp_path / "base")
    rules = Rules.model_validate({"rules": [{"module": "experts.*", "weights": "int4", "tile": 8}]})
    settings = {"source": None, "dtype": "float32", "rules": rules, "packed": True}
    save_folder(tmp_path / "packed", model.config, params, **settings)
    expected, moved = rounded(replace(model, simulated=simulated(rules)), params)
    assert set(moved) == {f"layers/{one}/w" for one in ("gates", "ups", "downs")}
    _, found = load(tmp_path / "packed")
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, atol=1e-6, err_msg=key)
    w = np.asarray(params["layers/gates/w"])
    tiles = w.reshape(*w.shape[:2], -1, 8, w.shape[3])
    steps = np.abs(tiles).max(axis=3, keepdims=True) / 7.5  # the largest lies half a step beyond 7
    errors = np.abs(np.asarray(found["layers/gates/w"]).reshape(tiles.shape) - tiles)
    assert np.all(errors <= 0.5 * steps * (1 + 1e-4))
    assert errors.max() > 0.25 * steps.min()
    stated = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    (group,) = stated["config_groups"].values()
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    packed = [key.removesuffix(".weight_packed") for key in stored if key.endswith(".weight_packed")]
    assert len(packed) == 3 * model.config.experts.number * model.config.num_layers
    assert all(any(re.fullmatch(one.removeprefix("re:"), key) for one in group["targets"]) for key in packed)
