"""Quantized models out: `tunix quantize`, the exports of QAT runs, what reads them, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.marks import slow
from tests.models.quantization.test_qat import INTEGERS, LOSS, MIXED, batch
from tests.paged import next_token, pages_of
from tests.test_pages import blocks
from tests.tiny_models import Rows, one_device, our_logits
from tests.tiny_rl import write_policy
from tests.tiny_runs import EVAL, files, losses, metrics, model_folder, train, write_recipe, write_rows
from tests.trainers import trainer
from tunix.cli import main
from tunix.commands.quantize import read_words
from tunix.errors import UserError
from tunix.hf.source import loaded, pretrained
from tunix.models.quantization import formats as simulated
from tunix.models.quantization.modules import PROJECTIONS
from tunix.models.quantization.rules import RULES_FILE, QuantizationConfig, Rules
from tunix.recipe.recipe import Recipe
from tunix.util.yaml_io import parse_yaml

pytestmark = pytest.mark.models

QAT = {"mode": "qat", "rules": [{"module": "o_proj"}, {"module": ".*", "weights": "int4", "tile": 16}]}
QUERY, DOWN, OUTPUT = (
    f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj", "self_attn.o_proj")
)
PACKED = batch()
ROWS = Rows(*map(jnp.asarray, (PACKED.tokens, PACKED.positions, PACKED.segment_ids, PACKED.segment_ids > 0)))


def by_hand(w: np.ndarray, steps: float) -> np.ndarray:
    """`[outputs, inputs]` with a scale for each output, whose largest value is `steps` steps."""
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(steps)
    return np.clip(np.round(w / scale), -np.ceil(steps), np.floor(steps)) * scale


def logits(model, params) -> np.ndarray:
    """Of one packed batch, at its real tokens."""
    return np.asarray(our_logits(model, params, ROWS))[np.asarray(ROWS.needed)]


def their_logits(folder: Path) -> np.ndarray:
    """transformers' of the same sequences, in the same order."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for row, segments in zip(*map(np.asarray, (ROWS.tokens, ROWS.segment_ids)), strict=True):
        for segment in range(1, segments.max() + 1):
            ids = torch.tensor(row[segments == segment][None].astype(np.int64))
            found.append(model(ids).logits[0].detach().numpy())
    return np.concatenate(found)


@pytest.mark.slow  # a run whose export is evaluated stays
def test_an_export_computes_as_it_trained(tmp_path):
    ours = trainer(rules=MIXED)
    for _ in range(3):
        ours.step(batch(), LOSS)
    ours.export(tmp_path / "out")
    own = logits(ours.learner.spec.model, ours.learner.params)
    np.testing.assert_allclose(their_logits(tmp_path / "out"), own, atol=1e-4)
    behind = logits(replace(ours.learner.spec.model, simulated=()), ours.learner.params)
    assert np.abs(behind - own).max() > 1e-2
    model, params = loaded(pretrained(str(tmp_path / "out")), "float32", one_device())
    assert model.simulated == ()
    np.testing.assert_allclose(logits(model, params), own, atol=1e-5)


@pytest.mark.parametrize("dtype", slow(["float32", "bfloat16"]))
def test_rounded_inputs_are_read_back(dtype, tmp_path):
    ours = trainer(rules=INTEGERS, dtype=dtype)
    ours.step(batch(), LOSS)
    ours.export(tmp_path / "out")
    own = logits(ours.learner.spec.model, ours.learner.params)
    model, params = loaded(pretrained(str(tmp_path / "out")), dtype, one_device())
    simulated = {name for name, _ in model.simulated if name in model.matrices}
    assert simulated == {"q", "k", "v", "o", "gate", "up", "down"}
    np.testing.assert_array_equal(logits(model, params), own)
    # transformers does not know of them.
    assert np.abs(their_logits(tmp_path / "out") - own).max() > 1e-3


@pytest.mark.slow  # tests/models/quantization/test_qat.py rounds without a run around it
def test_a_run_rounds_evaluates_and_exports(tmp_path, capsys):
    model_folder(tmp_path / "base")
    # Token ids: a run on strings and a folder with a chat template would render them differently.
    for name, number in (("train", 32), ("held", 6)):
        ids = [[97 + (i + j) % 7 for j in range(12)] for i in range(number)]
        write_rows(tmp_path / f"{name}.jsonl", [{"input_ids": row, "labels": [-100] * 4 + row[4:]} for row in ids])
    recipe = {"model": {"path": "base", "dtype": "float32"}, "quantization": QAT, "steps": 6, **EVAL}
    train(str(write_recipe(tmp_path / "r.yaml", recipe)))
    capsys.readouterr()
    assert "6 of a layer's 7 matrices compute as int4" in " ".join(Path("run/log.txt").read_text().split())
    rows = [row for row in metrics("run") if "eval/loss" in row]
    assert losses("run")[-1] < losses("run")[0]
    assert all(row["eval/unrounded"] != row["eval/loss"] for row in rows)
    # The first evaluation is that of rounding the folder, and of the folder as it is.
    assert main(["quantize", "base", "ptq", "--rules", "o_proj=none,.*=int4:16", "--data", "held.jsonl"]) == 0
    (told,) = re.findall(r"held-out loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out)
    assert [float(x) for x in told] == pytest.approx([rows[0]["eval/unrounded"], rows[0]["eval/loss"]], abs=1e-4)
    # The export has the loss of the last one, wherever it is measured; and is what the checkpoint gives.
    assert main(["eval", "run", "--out", "run.json"]) == 0
    loss = json.loads(Path("run.json").read_text())["metrics"]["loss"]["value"]
    assert loss == pytest.approx(rows[-1]["eval/loss"], abs=1e-4)
    assert main(["export", "run", "again"]) == 0
    assert files(Path("again")) == files(Path("run/export"))
    stored = json.loads(Path("again", RULES_FILE).read_text())
    assert stored["rules"][1] == {"module": ".*", "weights": "int4", "activations": None, "tile": 16}
    # On the grid: each tile of 16 inputs has at most 15 values, of one step.
    before, after = (load_file(f"{name}/model.safetensors") for name in ("base", "again"))
    tiles = after[QUERY].reshape(-1, 16)
    assert max(len(np.unique(tile)) for tile in tiles) <= 15
    assert max(len(np.unique(tile)) for tile in after[OUTPUT].reshape(-1, 16)) == 16
    assert before.keys() == after.keys()


def test_rounding_a_folder_by_hand(tmp_path, capsys):
    model_folder(tmp_path / "base")
    write_rows(tmp_path / "held.jsonl", [{"text": f"{n} and {n + 1}"} for n in range(9)])
    rules = "o_proj=none,down_proj=int4:64,self_attn.*=int8,.*=fp8"
    assert main(["quantize", "base", "out", "--rules", rules, "--data", "held.jsonl", "--rows", "5"]) == 0
    said = capsys.readouterr().out
    before, after = (load_file(f"{name}/model.safetensors") for name in ("base", "out"))
    assert before.keys() == after.keys()
    np.testing.assert_array_equal(after[OUTPUT], before[OUTPUT])
    np.testing.assert_array_equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    for name, steps in ((QUERY, 127.5), (DOWN, 7.5)):  # 64 inputs in tiles of 64: a scale for each output, too
        w, largest = before[name], np.abs(before[name]).max(axis=1, keepdims=True)
        # The largest lies half a step from two numbers, and the last bit of its quotient says to which it falls.
        inner = np.abs(w) < largest
        np.testing.assert_allclose(after[name][inner], by_hand(w, steps)[inner], rtol=1e-6, atol=1e-8)
        assert np.abs(after[name] - w).max() <= 0.5001 * (largest / steps).max()

    def moved(part: str) -> str:
        pairs = [(before[key], after[key]) for key in before if part in key]
        return f"{np.sqrt(sum(((b - a) ** 2).sum() for a, b in pairs) / sum((a**2).sum() for a, _ in pairs)):.3%}"

    assert f"q_proj     int8, a scale for each output: moved by {moved('q_proj')}" in said
    assert f"down_proj  int4, tiles of 64: moved by {moved('down_proj')}" in said
    assert "o_proj     as it was" in said
    for name in ("base", "out"):
        assert main(["eval", name, "held.jsonl", "--rows", "5", "--out", f"{name}.json"]) == 0
    found = [json.loads(Path(f"{name}.json").read_text())["metrics"]["loss"]["value"] for name in ("base", "out")]
    assert f"held-out loss {found[0]:.4f} -> {found[1]:.4f} nats per token" in said
    assert found[0] != found[1]


def test_rules_from_words_and_files(tmp_path):
    words = read_words("o_proj=none, mlp.*=int4:64/int8,.*=nf4")
    wanted = [
        {"module": "o_proj"},
        {"module": "mlp.*", "weights": "int4", "tile": 64, "activations": "int8"},
        {"module": ".*", "weights": "nf4", "tile": 128},  # 4 bits want tiles; 8 take a scale for each output
    ]
    assert words == Rules.model_validate({"rules": wanted})
    assert {name: rule.weights for name, rule in words.modules.items()} == {
        **dict.fromkeys(("gate", "up", "down", "gates", "ups", "downs", "wide_gate", "wide_up", "wide_down"), "int4"),
        **dict.fromkeys(("q", "k", "v", "global_q", "global_k", "global_v", "input_gate", "input_out"), "nf4"),
        **dict.fromkeys(("qkv", "z", "beta", "decay", "out"), "nf4"),
    }
    (tmp_path / "rules.yaml").write_text("rules: [{module: .*, weights: int8}]")
    assert read_words(str(tmp_path / "rules.yaml")).rules[0].tile is None


# An input that falls between two numbers, in sampler and trainer by different last bits, moves one token by about 4e-3.
@pytest.mark.slow  # tests/models/quantization/test_qat.py compares sampler and trainer without a run around them
@pytest.mark.parametrize(("rules", "most"), [(MIXED, 1e-3), (INTEGERS, 0.02)])
def test_reinforcement_passes_the_gate(rules, most, tmp_path):
    section = {"mode": "qat", **rules.model_dump(mode="json")}
    train(str(write_policy(tmp_path, quantization=section, algorithm={"name": "grpo", "group_size": 4, "kl": 0.1})))
    rows = [row for row in metrics("run") if row["step"]]
    assert all(row["mismatch/max"] < most and row["mismatch/mean"] < most / 20 for row in rows)
    assert max(row["train/grad_norm"] for row in rows) > 0
    assert rows[0]["kl/reference"] == pytest.approx(0, abs=most / 1000)  # the reference is rounded, too


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (
            [{"module": "qproj", "weights": "int8"}],
            r"'qproj' matches no module.*q_proj, k_proj.*Did you mean 'q_proj'\?",
        ),
        ([{"module": "lm_head", "weights": "int8"}], "'lm_head' is a table; tables, norms and biases are never"),
        ([{"module": r"layers\.0\..*", "weights": "int8"}], "some layers only"),
        ([], "no rule rounds anything"),
        ([{"module": "q_proj"}], "no rule rounds anything"),
        (
            [{"module": "mlp.*", "weights": "int8"}, {"module": "up_proj", "weights": "int4"}],
            r"'up_proj' changes nothing: its modules have met 'mlp\.\*' before",
        ),
        ([{"module": "q_proj", "activations": "int8"}], "activations changes nothing where the weights stay"),
        ([{"module": "q_proj", "tile": 64}], "tile changes nothing where the weights stay"),
        (
            [{"module": "q_proj", "weights": "nf4", "activations": "int8"}],
            "int8 and weights nf4 have no product: with int8 activations, weights are int8 or int4",
        ),
        ([{"module": "q_proj", "weights": "fp8", "activations": "int8"}], "int8 and weights fp8 have no product"),
        ([{"module": "q_proj", "weights": "int3"}], "'nf4', 'int8', 'int4' or 'fp8'"),
        ([{"module": "q_proj", "weights": "int8", "tile": 4}], "greater than or equal to 8"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rules, told):
    with pytest.raises(ValidationError, match=told):
        QuantizationConfig.model_validate({"rules": rules})


@pytest.mark.parametrize("adapter", [{"kind": "qlora"}, {"kind": "lora"}])
def test_an_adapter_beside_it_is_refused(adapter, tmp_path, capsys):
    path = write_recipe(tmp_path / "r.yaml", {"adapter": adapter, "quantization": QAT})
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert "quantization: qat trains the weights that it rounds, and under an adapter they are frozen" in said


def test_only_the_last_stage_rounds(tmp_path, capsys):
    for stages, code in (([{}, {"quantization": QAT}], 0), ([{"quantization": QAT}, {"quantization": None}], 2)):
        path = write_recipe(tmp_path / "r.yaml", {"stages": stages})
        assert main(["check", str(path)]) == code
    assert "stages.0.quantization: a later stage would train on from rounded weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["base", "out", "--rules", "q_proj"], "--rules: 'q_proj' is no rule; one is MODULE=TYPE"),
        (["base", "out", "--rules", "qproj=int8"], "--rules: rules.0.module: 'qproj' matches no module"),
        (["base", "out", "--rules", "q_proj=int7"], "rules.0.weights: 'int7' is not one of"),
        (["base", "out", "--rules", "rules.yml"], "rules.yml: no such file"),
        (["base", "base"], "base"),
        (["out2", "out3"], "out2 is rounded already (tunix_quantization.json)"),
        (["base", "out", "--rules", "down_proj=int4:8"], "quantization.rules: 8 leaves tiles of 1 for the 67 inputs"),
    ],
)
def test_what_cannot_be_quantized(words, told, tmp_path, capsys):
    model_folder(tmp_path / "base", intermediate_size=67)
    if "out2" in words:
        assert main(["quantize", "base", "out2"]) == 0
    before = files(tmp_path / "base")
    assert main(["quantize", *words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert files(tmp_path / "base") == before
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_rounded_folder_is_not_trained_as_if_it_were_not(tmp_path, capsys):
    model_folder(tmp_path / "base")
    assert main(["quantize", "base", "weights"]) == 0
    assert main(["quantize", "base", "inputs", "--rules", ".*=int8/int8"]) == 0
    for name, section, told in (
        ("weights", QAT, "rounded already"),
        ("inputs", None, "rounds its activations too"),
    ):
        path = write_recipe(
            tmp_path / "r.yaml", {"model": {"path": name, "dtype": "float32"}, "quantization": section, "steps": 1}
        )
        assert main(["run", str(path)]) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    (tmp_path / "weights" / RULES_FILE).write_text('{"rules": [{"module": ".*", "weights": "int1"}]}')
    assert main(["score", "weights", "held.jsonl", "--out", "o.jsonl"]) == 2
    assert "does not say how the weights were rounded" in capsys.readouterr().err


def test_a_type_that_the_device_does_not_know_is_told(monkeypatch):
    def refused(how, key):
        raise UserError(f"{key}: {how.base} cannot be computed on this abacus")

    monkeypatch.setattr(simulated, "check_supported", refused)
    with pytest.raises(UserError, match=r"quantization.rules: int8 cannot be computed on this abacus"):
        simulated.supported(INTEGERS)


def test_the_page_s_section_reaches_every_matrix():
    block, *_ = blocks("docs/guide/quantization.md", "yaml")
    section = parse_yaml(block.text, "quantization.md")["quantization"]
    assert set(QuantizationConfig.model_validate(section).modules) == {
        name for ours in PROJECTIONS.values() for name in ours
    }


def test_tokens_are_drawn_without_rounding_weights_again(tmp_path):
    """Once for a publish: the program that draws holds no rounding."""
    ours = trainer(rules=MIXED)
    ours.publish()
    engine = ours.sampler
    model, weights = engine.model, engine.hold().weights

    def one(weights):
        none = jnp.zeros((2,), jnp.int32)
        return next_token(model, weights, pages_of(model.config, 2, 16), none, none)[0]

    drawn = jax.jit(one).lower(weights).as_text()
    trained = jax.jit(lambda params: model.forward(params, *ROWS[:3])[0])
    assert "round_nearest_even" not in drawn
    assert "round_nearest_even" in trained.lower(ours.learner.params).as_text()


def test_the_recipe_reads_back(tmp_path):
    recipe = Recipe.load(write_recipe(tmp_path / "r.yaml", {"quantization": QAT}))
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert Recipe.load(tmp_path / "again.yaml") == recipe
