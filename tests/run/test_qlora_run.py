"""QLoRA through the command line: in every algorithm, exported, killed and gone on with, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.marks import slow
from tests.run.test_preference_run import write_preferences
from tests.run.test_reward_run import write_reward
from tests.tiny_models import one_device
from tests.tiny_rl import write_policy
from tests.tiny_runs import lines, losses, metrics, model_folder, train, write_recipe, write_rows
from tunix.cli import main
from tunix.config import ModelConfig
from tunix.hf.peft_folder import FILE
from tunix.hf.source import adapted, pretrained, weights
from tunix.lora.config import AdapterConfig

pytestmark = pytest.mark.models

QLORA = {"kind": "qlora", "rank": 4, "alpha": 8.0, "tile": 16}
STEPS = {"steps": 3, "optimizer.learning_rate": 1e-2}


def policy(folder: Path, **algorithm) -> str:
    write_policy(folder, adapter=QLORA, algorithm={"group_size": 4, **algorithm})
    return str(folder / "r.yaml")


RUNS = {
    "dpo": lambda here: write_preferences(here, adapter=QLORA, steps=3),
    "reward": lambda here: str(write_reward(here, adapter=QLORA, steps=3, output="run")),
    "grpo": lambda here: policy(here, name="grpo", kl=0.1),
    "ppo": lambda here: policy(here, name="ppo", group_size=1),
}


@pytest.mark.parametrize("name", slow(["grpo", "dpo", "reward", "ppo"]))
def test_every_algorithm_trains_the_adapter_alone(name, tmp_path):
    train(RUNS[name](tmp_path))
    # 32 or 64 inputs in tiles of 16: half a byte and 4 / 16 bytes a weight
    said = " ".join(Path("run/log.txt").read_text().split())
    assert "matrices in nf4, 0.750 bytes a weight" in said
    assert "layers: nf4 weights, each matrix dequantized to float32 in memory before its product; attention:" in said
    rows = [row for row in metrics("run") if row["step"]]
    assert all(np.isfinite(row["train/grad_norm"]) for row in rows)
    assert max(row["train/grad_norm"] for row in rows) > 0
    if name == "dpo":  # the reference is the rounded base, which the policy is at first: nothing is preferred yet
        assert rows[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-5)
    if name in ("grpo", "ppo"):
        assert all(row["mismatch/max"] < 1e-3 for row in rows)
    if name == "grpo":
        assert rows[0]["kl/reference"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_the_merged_folder_is_the_model_that_was_trained(tmp_path, capsys):
    model_folder(tmp_path / "base")
    recipe = {"model": {"path": "base", "dtype": "float32"}, "adapter": QLORA, **STEPS}
    train(str(write_recipe(tmp_path / "r.yaml", recipe)))
    assert Path("run/export/adapter_config.json").is_file()
    assert losses("run")[-1] < losses("run")[0]
    assert main(["export", "run", "merged"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the nf4 base was dequantized" in said
    assert "moves the matrices by 0.00%" in said  # float32 holds them as they are
    # A run stands for what it trained: the rounded base, not the folder's.
    asked = {"run": ["run"], "merged": ["merged"], "base": ["base"], "beside": ["base", "--adapter", "run/export"]}
    for name, (model, *more) in asked.items():
        assert main(["score", model, "held.jsonl", "--out", f"{name}.jsonl", *more]) == 0
    run, merged, base, beside = ([row["sum"] for row in lines(Path(f"{name}.jsonl"))] for name in asked)
    np.testing.assert_allclose(run, merged, rtol=1e-5)
    np.testing.assert_allclose(run, beside, rtol=1e-5)  # the adapter knows how its base was rounded
    assert np.abs(np.subtract(run, base)).max() > 0.1
    model = AutoModelForCausalLM.from_pretrained("merged").eval()
    before = load_file("base/model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    after = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    error = np.sqrt(np.mean((after - before) ** 2) / np.mean(before**2))
    assert 0.03 < error < 0.3  # nf4's rounding, about a tenth, and the adapter

    # Gone on from, the same weights are rounded anew, wherever they came from.
    adapter = AdapterConfig.model_validate(QLORA)
    found = []
    for name in ("run", "merged"):
        source = pretrained(name)
        model = adapted(source.decoder, ModelConfig(path=name, dtype="float32"), adapter)
        found.append(weights(source, model, one_device(), 0, "float32", "float32", full=False)[1])
    for key in model.quantized:
        ours, theirs = (np.asarray(frozen[key]).astype(int) for frozen in found)
        assert np.mean(ours != theirs) < 1e-3, key  # one that lies between two numbers may fall either way


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter.rank": 33}, "adapter.rank: 33 is above 32, the most that q_proj's matrix can have: lower it"),
        # 67 is prime
        ({"model.sizes.ffn": 67}, "adapter.tile: 16 leaves tiles of 1 for the 67 inputs of down"),
    ],
)
def test_what_does_not_fit_the_matrices(changes, words, tmp_path, capsys):
    usual = {"adapter": dict(QLORA), "steps": 1}
    assert main(["run", str(write_recipe(tmp_path / "r.yaml", {**usual, **changes}))]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_adapters_share_a_base_that_was_rounded_alike(tmp_path, capsys):
    model_folder(tmp_path / "base")
    recipe = {"model": {"path": "base", "dtype": "float32"}, "adapter": QLORA, **STEPS}
    train(str(write_recipe(tmp_path / "r.yaml", recipe)))
    shutil.copytree("run/export", "twin")
    write_rows(tmp_path / "asked.jsonl", [{"input_ids": [97, 98, 99]}, {"input_ids": [100, 32]}])
    greedy = ["--input", "asked.jsonl", "--temperature", "0", "--max-tokens", "5"]
    both = ["--adapter", "run/export", "--adapter", "twin"]
    for model, out, more in (("run", "alone", []), ("base", "both", both)):
        assert main(["generate", model, *greedy, "--out", f"{out}.jsonl", *more]) == 0
    alone, together = (lines(Path(f"{name}.jsonl")) for name in ("alone", "both"))
    assert [row["tokens"] for row in together] == [row["tokens"] for row in alone for _ in range(2)]
    for ours, theirs in zip(together, (row for row in alone for _ in range(2)), strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-4)
    said = json.loads(Path("twin", FILE).read_text())
    assert said["rounded"] == {"base": "nf4", "tile": 16}
    Path("twin", FILE).write_text(json.dumps({**said, "rounded": None}))
    capsys.readouterr()
    assert main(["generate", "base", *greedy, "--out", "no.jsonl", *both]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "(run/export: nf4 in tiles of 16; twin: no rounding): ask each alone" in told
    Path("twin", FILE).write_text(json.dumps({**said, "rounded": {"base": "nf5", "tile": 16}}))
    assert main(["score", "base", "asked.jsonl", "--out", "no.jsonl", "--adapter", "twin"]) == 2
    assert "tunix_base.json is damaged" in " ".join(capsys.readouterr().err.split())
