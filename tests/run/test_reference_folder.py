"""A reference that is named: another model than the one that the run starts from is compared with, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.marks import slow
from tests.tiny_runs import metrics, model_folder, train, write_recipe, write_rows
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer
from tunix.recipe.recipe import Recipe

ROWS = [
    {"prompt_ids": [2, 70, 71], "chosen_ids": [80, 81, 1], "rejected_ids": [90, 1]},
    {"prompt_ids": [2, 72], "chosen_ids": [82, 1], "rejected_ids": [91, 92, 93, 1]},
]
BETA = 0.5


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """`start` and `other`, two random models of one structure, and two pairs."""
    model_folder(tmp_path / "start", seed=0)
    model_folder(tmp_path / "other", seed=1)
    write_rows(tmp_path / "train.jsonl", ROWS)
    return tmp_path


def recipe(folder: Path, changes: dict[str, Any] | None = None, **algorithm: Any) -> str:
    """One step of DPO from `start`."""
    usual = {
        "model": {"path": "start", "dtype": "float32"},
        "algorithm": {"name": "dpo", "beta": BETA, "reference_path": "other", **algorithm},
        "batch_size": 2,
        "steps": 2,
    }
    return str(write_recipe(folder / "r.yaml", {**usual, **(changes or {})}))


def rewards(side: str) -> float:
    """`beta (log p_start - log p_other)` of a side's completions, in the mean: by transformers."""
    models = [AutoModelForCausalLM.from_pretrained(name).eval() for name in ("start", "other")]
    found = 0.0
    for row in ROWS:
        tokens = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
        with torch.no_grad():
            logprobs = [model(tokens).logits[0, :-1].log_softmax(-1) for model in models]
        places = range(len(row["prompt_ids"]) - 1, tokens.shape[1] - 1)
        start, other = (sum(float(x[t, tokens[0, t + 1]]) for t in places) for x in logprobs)
        found += BETA * (start - other)
    return found / len(ROWS)


@pytest.mark.parametrize("reference", ["snapshot", *slow(["precompute"])])
@pytest.mark.parametrize("adapter", [None, *slow([{"rank": 4}])])
def test_rewards_are_measured_from_the_folder_that_is_named(folders: Path, reference: str, adapter: dict | None):
    train(recipe(folders, {"adapter": adapter} if adapter else None, reference=reference))
    first = next(row for row in metrics("run") if "train/loss" in row)  # measured before the first update
    chosen, rejected = rewards("chosen"), rewards("rejected")
    assert abs(chosen - rejected) > 0.1
    assert first["rewards/chosen"] == pytest.approx(chosen, abs=1e-4)
    assert first["rewards/rejected"] == pytest.approx(rejected, abs=1e-4)


@pytest.mark.slow
def test_the_start_by_its_name_is_the_usual_reference(folders: Path):
    train(recipe(folders, reference_path="start"))
    train(recipe(folders, reference_path=None), "output=usual")
    named, usual = ([row["train/loss"] for row in metrics(run) if "train/loss" in row] for run in ("run", "usual"))
    assert named == usual


@pytest.mark.slow
def test_kto_compares_with_it_too(folders: Path):
    rows = [{"prompt_ids": x["prompt_ids"], "completion_ids": x["chosen_ids"], "label": True} for x in ROWS]
    write_rows(folders / "train.jsonl", rows)
    kto = {"name": "kto", "beta": BETA, "reference_path": "other"}
    train(recipe(folders, {"algorithm": kto}))
    first = next(row for row in metrics("run") if "train/loss" in row)
    assert first["rewards/chosen"] == pytest.approx(rewards("chosen"), abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vocab_size": 288}, "(vocab_size 288 instead of 272)"),
        ({"num_hidden_layers": 3, "intermediate_size": 48}, "(num_layers 3 instead of 2, ffn 48 instead of 64)"),
    ],
)
def test_another_structure_is_refused(folders: Path, fields: dict[str, Any], said: str, capsys):
    model_folder(folders / "strange", **fields)
    assert main(["run", recipe(folders, reference_path="strange")]) == 2
    wanted = f"algorithm.reference_path: strange is of another structure than the model that trains {said}"
    assert wanted in capsys.readouterr().err
    assert not Path("run/metrics.jsonl").exists()


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(folders: Path, capsys):
    # Both are bytes behind `<pad> <eos> <bos>`, ids 0 to 2, and the markers of a chat template, which differ from 3 on.
    bytes_tokenizer("gemma").save(folders / "other")
    assert main(["run", recipe(folders)]) == 2
    told = capsys.readouterr().err
    assert "algorithm.reference_path: other has another vocabulary than the model that trains" in told
    assert "id 3 is '<start_of_turn>' there and '<|start_header_id|>' here" in told


def test_one_that_rounds_its_inputs_is_refused(folders: Path, capsys):
    assert main(["quantize", "other", "rounded", "--rules", ".*=int8/int8"]) == 0
    assert main(["run", recipe(folders, reference_path="rounded")]) == 2
    assert "algorithm.reference_path: rounded rounds its activations" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"reference_path": "nowhere/at/all"}, "nowhere/at/all"),
        ({"loss": "simpo", "beta": 2.0}, "reference_path is 'other', which changes nothing with this loss"),
    ],
)
def test_what_cannot_be_a_reference(folders: Path, algorithm: dict[str, Any], said: str, capsys):
    assert main(["run", recipe(folders, **algorithm)]) == 2
    assert said in capsys.readouterr().err


def test_tiny_asks_for_no_other_model(folders: Path):
    tiny = Recipe.load(recipe(folders, {"model.family": "llama"}), tiny=True)
    assert tiny.algorithm.model_dump()["reference_path"] is None
