"""gpt-oss's folders: experts in MXFP4 and as transformers writes them, and what is said where something is wrong."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.hf.test_model_folder import rewrite
from tests.hf.test_tensor_transfer import assert_read_once, mesh_of
from tests.marks import slow
from tests.tiny_models import CASES, Case, load, one_device, our_logits, reference_folder, rows_of, tokens
from tests.tiny_runs import VOCAB, losses, train, write_recipe
from tunix.cli import main
from tunix.commands.quantize import read_words
from tunix.config import DType
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.hf import tensor_transfer
from tunix.hf.model_folder import load_params, save_folder
from tunix.hf.packed_weights import dequantized
from tunix.hf.source import read_folder
from tunix.models.families.table import from_hf, preset, to_hf
from tunix.models.model import Model, rounded
from tunix.models.quantization.formats import Quantization, simulated
from tunix.trainer.mesh_choice import state_bytes
from tunix.trainer.optimizer import decays
from tunix.trainer.perf import matmul_weights

pytestmark = pytest.mark.models

NAME = "gpt_oss-five-of-two"
EXPERTS = "model.layers.1.mlp.experts"
WIDE = Case("gpt_oss", {**CASES[NAME].fields, "intermediate_size": 64})
"""With whole blocks of 32 inputs, and other numbers of inputs than of outputs."""
SECTION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def packed(rng: np.random.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales that stand for `[E R C]`, of unit size."""
    *rows, columns = shape
    blocks = rng.integers(0, 256, (*rows, columns // 32, 16), np.uint8)
    scales = rng.integers(122, 126, (*rows, columns // 32), np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales)


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, Path]:
    """A folder as published, and the same as transformers dequantizes it."""
    return made(WIDE, tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("plain"))


def made(case: Case, folder: Path, plain: Path) -> tuple[Path, Path]:
    """Both folders of a random model."""
    reference_folder(case, plain)
    held = {key: x.to(torch.bfloat16) for key, x in load_file(plain / "model.safetensors").items()}
    rng, published = np.random.default_rng(0), dict(held)
    for key in [key for key in held if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        number, inputs, outputs = published.pop(key).shape
        blocks, scales = packed(rng, number, outputs, inputs)
        published |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        held[key] = convert_moe_packed_tensors(blocks, scales)
    save_file(held, plain / "model.safetensors", {"format": "pt"})
    save_file(published, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(raw))
    more = {"experts_per_token": 2, "initial_context_length": 4096, "quantization_config": SECTION}
    (folder / "config.json").write_text(json.dumps(raw | more))
    return folder, plain


def test_every_pair_of_numbers_at_every_usual_scale_is_that_of_transformers():
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 250, 1, 1))
    scales = np.tile(np.arange(3, 253, dtype=np.uint8)[None, :, None], (1, 1, 16))
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales)).transpose(1, 2)
    ours = dequantized(blocks, scales)
    assert ours.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())
    # 0x1A at 2^0: the low bits 1010 are -1, the high ones 0001 are 0.5.
    first = dequantized(np.full((1, 1, 16), 0x1A, np.uint8), np.full((1, 1), 127, np.uint8))
    np.testing.assert_array_equal(first[0, :2].astype(np.float32), [-1.0, 0.5])


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 1}, *slow([{"fsdp": 8}, {"expert": 5}, {"fsdp": 2, "tensor": 4}])], ids=repr
)
def test_a_published_folder_is_loaded_as_transformers_dequantizes_it(both, sizes, ranges):
    """And each byte of either folder is read once: those of a gate and an up beside it are read together."""
    config = read_folder(both[0])
    assert config == read_folder(both[1])
    model, loaded = Model(config, dtype="bfloat16"), []
    for folder in both:
        ranges.clear()
        loaded.append(load_params(model, folder, dict.fromkeys(model.shapes, "bfloat16"), mesh_of(sizes)))
        assert_read_once(ranges, folder / "model.safetensors")
    found, expected = loaded
    for name, x in expected.items():
        np.testing.assert_array_equal(jax.device_get(found[name]), jax.device_get(x), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}], ids=repr)
def test_gate_and_up_are_read_together_where_a_base_is_rounded(sizes, host, both, ranges, monkeypatch):
    """Each byte once, in MXFP4 and not, where the host transposes and where the devices do; and the same numbers."""
    config, how = read_folder(both[0]), Quantization("nf4", 16)
    model = Model(config, dtype="bfloat16", quantization=how)
    dtypes: dict[str, DType] = dict.fromkeys(model.shapes, "bfloat16")
    expected = load_params(model, both[1], dtypes, one_device())
    monkeypatch.setattr(tensor_transfer, "HOST_TURNS", ("cpu",) if host else ())
    for folder in both:
        ranges.clear()
        found = load_params(model, folder, dtypes, mesh_of(sizes))
        assert_read_once(ranges, folder / "model.safetensors")
        for name, x in expected.items():
            np.testing.assert_array_equal(jax.device_get(found[name]), jax.device_get(x), err_msg=name)


@pytest.mark.parametrize("name", ["gates", "ups"])
def test_one_of_those_that_take_turns_is_loaded_alone(name, both):
    config = read_folder(both[0])
    wanted: dict[str, DType] = {f"layers/{name}/w": "float32"}
    found, expected = load_params(Model(config), both[0], wanted, one_device()), load(both[1])[1]
    assert set(found) == set(wanted)
    np.testing.assert_array_equal(found[f"layers/{name}/w"], expected[f"layers/{name}/w"])


def test_its_logits_are_those_of_transformers_and_its_export_is_plain(both, tmp_path):
    model, params = load(both[0])
    ids = tokens()
    reference = AutoModelForCausalLM.from_pretrained(both[1], dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        theirs = reference(torch.from_numpy(ids).long()).logits.numpy()
    np.testing.assert_allclose(our_logits(model, params, rows_of(*([row] for row in ids))), theirs, atol=1e-4)
    save_folder(tmp_path / "out", model.config, params, source=both[0], dtype="bfloat16")
    ours, plain = (load_file(one / "model.safetensors") for one in (tmp_path / "out", both[1]))
    assert set(ours) == set(plain)
    assert all(torch.equal(ours[key], plain[key]) for key in plain)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_the_preset_has_its_weights_and_is_read_back_from_what_an_export_writes(tmp_path):
    """20.9B parameters, 3.6B of them active with the head and the table's row, as its model card counts."""
    config = preset("gpt-oss-20b")
    assert state_bytes(config, "bfloat16", None) / 2 == pytest.approx(20.91e9, rel=1e-3)
    assert matmul_weights(config) == pytest.approx(3.6e9, rel=0.02)
    shapes = Model(config).shapes
    exempt = {name for name in shapes if not decays(name)}
    assert exempt == {name for name in shapes if name.endswith(("/b", "norm/w", "/sinks"))}
    assert from_hf(json.loads(json.dumps(to_hf(config))), tmp_path / "config.json") == config


@pytest.fixture
def folder(both, tmp_path) -> Path:
    """A copy of the published folder, to be broken."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((both[0] / file).read_bytes())
    return tmp_path


def cut(held: dict[str, torch.Tensor], key: str, rows: int) -> None:
    """Leaves the first rows of a tensor."""
    held[key] = held[key][:rows].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), r"down_proj_blocks is there without .*down_proj_scales"),
        (lambda t: t.pop(f"{EXPERTS}.down_proj_blocks"), r"experts\.0\.down_proj\.weight.*\.down_proj \[experts, inp"),
        (
            lambda t: cut(t, f"{EXPERTS}.gate_up_proj_scales", 4),
            r"gate_up_proj_scales \(4, 128, 1\) of U8 are no MXFP4",
        ),
        (lambda t: t.pop(f"{EXPERTS}.gate_up_proj_bias"), r"missing: .*experts\.0\.gate_proj\.bias"),
        (lambda t: cut(t, f"{EXPERTS}.down_proj_bias", 4), r"down_proj_bias expected \(5, 32\), found \(4, 32\)"),
        (lambda t: cut(t, f"{EXPERTS}.gate_up_proj_bias", 4), r"experts\.4\.gate_proj\.bias"),
        (lambda t: cut(t, "model.layers.0.self_attn.sinks", 3), r"sinks expected \(4,\), found \(3,\)"),
        (lambda t: t.update({"model.layers.0.mlp.router.scale": torch.ones(5)}), r"no place for: .*router\.scale"),
        (lambda t: t.update({f"{EXPERTS}.up_proj_scales": torch.ones(5)}), r"no place for: .*experts\.up_proj_scales"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, folder):
    def changed(held):
        change(held)
        return held

    rewrite(folder, changed)
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts_per_token": 4}, "experts_per_token = 4 is not supported here; only 2 is"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 is more than the 5 experts"),
        ({"swiglu_limit": -7.0}, "swiglu_limit = -7.0 must be a positive number"),
        ({"quantization_config": {"quant_method": "gptq"}}, "tunix reads 'compressed-tensors' and 'mxfp4' alone"),
        ({"router_bias": True}, "router_bias = True is a field that tunix does not know"),
    ],
)
def test_fields_that_are_not_understood_are_refused(fields, message, folder):
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(UserError, match=re.escape(message)):
        from_hf(raw | fields, folder / "config.json")


@pytest.mark.parametrize(
    ("weights", "packed"),
    [("int4:16", True), *slow([("fp8", True), ("int8", True), ("int4", True), ("fp8", False), ("nf4:32", False)])],
)
def test_a_rounded_folder_is_read_back(weights, packed, both, tmp_path, capsys):
    """Of every expert by its own scales, outputs before inputs, beside biases that stay as they are."""
    words = ["quantize", str(both[0]), str(tmp_path / "out"), "--rules", f"experts.*={weights}", "--dtype", "float32"]
    assert main(words + ["--packed"] * packed) == 0
    assert "experts.down_proj " in capsys.readouterr().out
    model, params = load(both[0])
    _, found = load(tmp_path / "out")
    parsed = read_words(f"experts.*={weights}")
    expected, moved = rounded(replace(model, simulated=simulated(parsed)), params)
    assert set(moved) == {f"layers/{one}/w" for one in ("gates", "ups", "downs")}
    assert min(moved.values()) > 1e-3
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, atol=1e-6, err_msg=key)
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held[f"{EXPERTS}.gate_up_proj_bias"].shape == (5, 128)
    if packed:
        assert held[f"{EXPERTS}.4.up_proj.weight_scale"].shape == (64, 2 if weights == "int4:16" else 1)


@pytest.mark.slow
def test_an_adapter_is_trained_on_a_published_folder_and_merged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("base", "plain"):
        (tmp_path / name).mkdir()
    case = Case("gpt_oss", {**WIDE.fields, "vocab_size": VOCAB})
    base, plain = made(case, tmp_path / "base", tmp_path / "plain")
    bytes_tokenizer("llama3").save(base)
    adapter = {"kind": "lora", "rank": 4, "alpha": 8, "targets": ["q_proj", "experts.*"]}
    model = {"path": str(base), "dtype": "float32"}
    train(str(write_recipe(tmp_path / "r.yaml", {"model": model, "adapter": adapter, "steps": 6})))
    first, *_, last = losses("run")
    assert last < first
    assert main(["export", "run", "merged"]) == 0
    ours, theirs = (load_file(one / "model.safetensors") for one in (tmp_path / "merged", plain))
    assert set(ours) == set(theirs)
    moved = {key for key, x in theirs.items() if not torch.equal(ours[key].float(), x.float())}
    ends = ("q_proj.weight", "experts.gate_up_proj", "experts.down_proj")
    assert moved == {key for key in theirs if key.endswith(ends)}
    again = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32, attn_implementation="eager")
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager"), "run/export"
    )
    ids = torch.from_numpy(tokens()).long()
    with torch.no_grad():
        whole, apart = again(ids).logits, peft(ids).logits
    assert (whole - apart).abs().max() < 1e-4
