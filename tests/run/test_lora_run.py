"""A run with every variant of an adapter at once: it goes on where it stopped, and all readers of its export agree."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.tiny_runs import EVAL, files, lines, losses, model_folder, train, write_recipe
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer

pytestmark = pytest.mark.models

ADAPTER = {
    "rank": 4,
    "ranks": {"mlp.*": 2},
    "alphas": {"v_proj": 8},
    "rslora": True,
    "dora": True,
    "start": "pissa",
    "dropout": 0.2,
    "also": ["embed_tokens", "lm_head"],
}


def scored(model: str, *words: str) -> list[dict]:
    assert main(["score", model, "held.jsonl", "--out", "scores.jsonl", *words]) == 0
    found = lines(Path("scores.jsonl"))
    Path("scores.jsonl").unlink()
    return found


def flat(found: list[dict]) -> np.ndarray:
    return np.concatenate([one["logprobs"] for one in found])


@pytest.mark.slow
def test_all_variants_at_once_go_on_and_out(tmp_path: Path):
    base = model_folder(tmp_path / "base")
    sections = {"model": {"path": "base", "dtype": "float32"}, "adapter": ADAPTER, "optimizer.lora_plus": 4.0, **EVAL}
    write_recipe(tmp_path / "r.yaml", {**sections, "eval.samples": 0})
    train("r.yaml", "output=whole")
    train("r.yaml", "steps=2")
    train("r.yaml")
    assert losses("run") == losses("whole")
    assert files(tmp_path / "run/export") == files(tmp_path / "whole/export")

    assert main(["export", "run", "merged"]) == 0
    merged = scored("merged")
    np.testing.assert_allclose(flat(scored("run")), flat(merged), atol=1e-4)
    assert np.abs(flat(merged) - flat(scored("base"))).max() > 0.01
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run/export").eval()
    bos = bytes_tokenizer("llama3").bos_id
    for row in merged[:2]:
        ids = [bos, *row["tokens"]]
        with torch.no_grad():
            logprobs = torch.log_softmax(theirs(torch.tensor([ids])).logits[0].double(), -1)
        found = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        np.testing.assert_allclose(found.numpy(), row["logprobs"], atol=1e-4)
