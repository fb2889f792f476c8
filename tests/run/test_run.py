"""Whole runs through the command line: what the run folder holds, how it goes on, and what comes out of it."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tunix
from tests.tiny_runs import (
    ADAPTER,
    EVAL,
    files,
    lines,
    losses,
    metrics,
    model_folder,
    row,
    rows,
    train,
    write_recipe,
    write_rows,
)
from tunix.cli import main
from tunix.recipe.recipe import Recipe
from tunix.run import export as export_file
from tunix.trainer.learner import Learner

ROOT = Path(__file__).parents[2]
EVERY_UPDATE = {
    "step",
    "time/seconds",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens",
    "perf/fill",
    "perf/tokens_per_second",
    "perf/step_seconds",
    "perf/peak_memory",
    "compile/count",
    "data/kept",
    "data/truncated",
    "data/dropped",
}


def scored(model: str, data: Path, out: str, *words: str) -> list[dict[str, Any]]:
    """The rows of `tunix score`."""
    assert main(["score", model, str(data), "--out", out, *words]) == 0
    return lines(Path(out))


def their_logprobs(model: Any, ids: list[int]) -> np.ndarray:
    """transformers' log-probs of every token after the first."""
    with torch.no_grad():
        found = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return found[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


def flat(found: list[dict[str, Any]]) -> np.ndarray:
    return np.concatenate([one["logprobs"] for one in found])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in `run`: two epochs of 36 rows, of which 4 are cut and 4 come to nothing."""
    folder = tmp_path_factory.mktemp("finished")
    # 1 + 10 + 60 + 1 tokens are more than 48, and of 1 + 60 + 3 + 1 tokens none of the first 48 is trained.
    odd = [row(10, 60), row(60, 3)] * 4
    write_rows(folder / "train.jsonl", [*rows(28), *odd])
    write_rows(folder / "held.jsonl", rows(6, seed=3))
    write_recipe(folder / "r.yaml", {"steps": None, "epochs": 2, **EVAL, "checkpoint": {"every": 3, "keep": 2}})
    before = Path.cwd()
    os.chdir(folder)
    try:
        train("r.yaml")
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path) -> Path:
    """The same folder, this test's own."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


# --- What a run leaves behind -------------------------------------------------------------------------------------


def test_a_run_folder_holds_what_is_promised(here: Path):
    run = here / "run"
    assert Recipe.load(run / "recipe.yaml") == Recipe.load(here / "r.yaml")
    assert {path.name for path in run.iterdir()} == {
        ".lock",
        "recipe.yaml",
        "log.txt",
        "metrics.jsonl",
        "curves.svg",
        "samples.jsonl",
        "checkpoints",
        "export",
        "tokenizer",
    }
    start, *updates = metrics(run)
    # (28 + 4) kept rows twice, in batches of 8.
    assert [one["step"] for one in updates] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert set(start) == {"step", "time/seconds", "eval/loss"}
    for one in updates:
        assert set(one) - {"eval/loss"} == EVERY_UPDATE
        assert one["compile/count"] == 0
        assert ("eval/loss" in one) == (one["step"] % 2 == 0)
    kept, truncated, dropped = ([one[f"data/{name}"] for one in updates] for name in ("kept", "truncated", "dropped"))
    assert kept == [8, 16, 24, 32, 40, 48, 56, 64]
    assert (truncated[-1], dropped[-1]) == (8, 8)
    assert truncated == sorted(truncated)
    assert updates[-1]["eval/loss"] < 0.5 * start["eval/loss"]
    seconds = [one["time/seconds"] for one in updates]
    assert seconds == sorted(seconds)


def test_the_last_and_the_best_checkpoints_are_kept(here: Path):
    # Every third step and the last one are saved, of which two are kept; the best evaluation is that of the last.
    assert sorted(path.name for path in (here / "run/checkpoints").iterdir()) == ["6", "8"]


def test_samples_are_taken_before_and_after(here: Path):
    samples = lines(here / "run/samples.jsonl")
    assert [one["step"] for one in samples] == [0, 0, 8, 8]
    first = rows(6, seed=3)[0]
    assert samples[0]["prompt"] == samples[2]["prompt"] == first["prompt"]
    assert samples[0]["expected"] == first["completion"]
    assert samples[2]["finish"] in ("stop", "length")


def test_the_export_is_what_transformers_and_score_compute(here: Path):
    hf = AutoModelForCausalLM.from_pretrained(here / "run/export").eval()
    tokenizer = AutoTokenizer.from_pretrained(here / "run/export")
    held = lines(here / "held.jsonl")
    found = scored("run", here / "held.jsonl", "scores.jsonl")
    total, trained = 0.0, 0
    for one, given in zip(found, held, strict=True):
        ids = [*tokenizer(given["prompt"] + given["completion"])["input_ids"], tokenizer.eos_token_id]
        assert one["tokens"] == ids[1:]
        np.testing.assert_allclose(one["logprobs"], their_logprobs(hf, ids), atol=1e-4)
        assert one["sum"] == pytest.approx(sum(one["logprobs"]), abs=1e-4)
        answer = one["logprobs"][len(given["prompt"]) :]  # BOS and prompt are n + 1 tokens, the first has no log-prob
        total, trained = total - sum(answer), trained + len(answer)
    # The run's own evaluation is the mean over the held-out completions.
    assert metrics("run")[-1]["eval/loss"] == pytest.approx(total / trained, abs=1e-4)


def test_python_gets_what_the_files_say(here: Path):
    result = tunix.train("r.yaml")
    assert (result.folder, result.export) == (Path("run"), Path("run/export"))
    assert result.metrics == metrics("run")
    assert result.samples == lines(here / "run/samples.jsonl")
    # Trained are the completions, of one letter each, and an EOS behind every one.
    held = [one["completion"] for one in lines(here / "held.jsonl")]
    trained = [*"".join(held), *["EOS"] * len(held)]
    shares = [trained.count(token) / len(trained) for token in set(trained)]
    assert result.unigram_entropy == pytest.approx(-sum(share * math.log(share) for share in shares))


def test_a_finished_run_says_so_and_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]):
    before = files(here)
    train("r.yaml")
    assert "finished already, at step 8" in capsys.readouterr().err
    after, log = files(here), "run/log.txt"
    assert after.pop(log).startswith(before.pop(log))
    assert after == before
    shutil.rmtree(here / "run/checkpoints")  # as people do to make room
    train("r.yaml")
    assert "its checkpoints are gone" in capsys.readouterr().err
    kept = {name: data for name, data in before.items() if not name.startswith("run/checkpoints")}
    assert {name: data for name, data in files(here).items() if name != log} == kept


def test_more_steps_go_on_from_the_end(here: Path, capsys: pytest.CaptureFixture[str]):
    earlier, weights = metrics("run"), (here / "run/export/model.safetensors").read_bytes()
    train("r.yaml", "epochs=null", "steps=10")
    assert "going on from step 8" in capsys.readouterr().err
    assert metrics("run")[:9] == earlier
    assert [one["step"] for one in metrics("run")] == list(range(11))
    assert [one["compile/count"] for one in metrics("run")[1:]] == [0] * 10
    assert [one["step"] for one in lines(here / "run/samples.jsonl")] == [0, 0, 8, 8, 10, 10]
    # The export is that of the new end, and the old one is still there.
    assert (here / "run/export.old-1/model.safetensors").read_bytes() == weights
    assert (here / "run/export/model.safetensors").read_bytes() != weights
    loss = metrics("run")[-1]["eval/loss"]
    assert loss < earlier[-1]["eval/loss"]


@pytest.mark.slow
def test_fresh_starts_again_and_loses_nothing(here: Path):
    before = files(here / "run")
    train("r.yaml", "--fresh", "epochs=null", "steps=2")
    assert files(here / "run.old-1") == before
    assert [one["step"] for one in metrics("run")] == [0, 1, 2]
    assert metrics("run")[1]["train/loss"] == metrics("run.old-1")[1]["train/loss"]


@pytest.mark.slow
def test_a_run_starts_from_another_run(here: Path):
    model = {"path": "run", "dtype": "float32"}
    write_recipe(here / "next.yaml", {"model": model, "output": "next", "steps": 1, **EVAL})
    train("next.yaml")
    assert metrics("next")[0]["eval/loss"] == pytest.approx(metrics("run")[-1]["eval/loss"], abs=1e-5)
    assert (here / "next/export/tokenizer.json").read_bytes() == (here / "run/export/tokenizer.json").read_bytes()


def test_any_kept_checkpoint_can_be_exported(here: Path, capsys: pytest.CaptureFixture[str]):
    before = files(here / "run")
    (here / "train.jsonl").unlink()  # rows are no longer needed
    assert main(["export", "run", "out/six", "--step", "6"]) == 0
    assert main(["export", "run", "eight"]) == 0
    assert files(here / "run") == before
    assert files(here / "eight") == files(here / "run/export")
    found = scored("out/six", here / "held.jsonl", "six.jsonl")
    given = lines(here / "held.jsonl")
    answers = [one["logprobs"][len(told["prompt"]) :] for one, told in zip(found, given, strict=True)]
    assert metrics("run")[6]["eval/loss"] == pytest.approx(-np.concatenate(answers).mean(), abs=1e-4)


# --- Stages -------------------------------------------------------------------------------------------------------

STAGES = {
    "stages": [{"steps": 3}, {"steps": 4, "optimizer": {"learning_rate": 1e-3}, "seed": 1}],
    "checkpoint": {"every": 2},
    "algorithm.name": "own.py:Stopping",
    **EVAL,
}
# Asks itself to stop during the update that the file `stop` counts down to.
STOPPING = """
import os, signal
from pathlib import Path
from tunix.algorithms.sft.algorithm import SFT

class Stopping(SFT):
    def update(self, client, batch):
        stop = Path("stop")
        left = int(stop.read_text()) - 1 if stop.exists() else -1
        if left >= 0:
            stop.write_text(str(left))
        if left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().update(client, batch)
"""


def lasting(run: str) -> list[dict[str, Any]]:
    """What a run's metrics say apart from time."""
    return [{k: v for k, v in one.items() if not k.startswith(("time/", "perf/"))} for one in metrics(run)]


@pytest.mark.slow
def test_a_stage_starts_from_the_one_before_and_is_resumed_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "own.py").write_text(STOPPING)
    write_recipe(tmp_path / "r.yaml", STAGES)
    train("r.yaml", "output=whole")
    first, second = metrics("whole/0_Stopping"), metrics("whole/1_Stopping")
    assert [len(first), len(second)] == [4, 5]
    assert second[0]["eval/loss"] == pytest.approx(first[-1]["eval/loss"], abs=1e-5)

    (tmp_path / "stop").write_text("4")  # the first update of the second stage
    assert main(["run", "r.yaml"]) == 130
    err = capsys.readouterr().err
    assert err.endswith(
        "stopped at step 1 of 4, with a checkpoint in run/1_Stopping. The same command goes on from there.\n"
    )

    def finished() -> dict[str, bytes]:
        """What the first stage wrote, but for its log, in which each start says that it is finished."""
        return {name: content for name, content in files(tmp_path / "run/0_Stopping").items() if name != "log.txt"}

    before = finished()
    train("r.yaml")
    assert finished() == before
    for stage in ("0_Stopping", "1_Stopping"):
        assert lasting(f"run/{stage}") == lasting(f"whole/{stage}")
        assert files(tmp_path / f"run/{stage}/export") == files(tmp_path / f"whole/{stage}/export")

    # The second stage stands on the first, which can no longer be trained on.
    assert main(["run", "r.yaml", "stages.0.steps=5"]) == 2
    assert "run/0_Stopping was asked for more steps, but run/1_Stopping has started" in capsys.readouterr().err
    train("r.yaml", "stages.1.steps=5")
    assert len(metrics("run/1_Stopping")) == 6
    assert finished() == before


@pytest.mark.slow
def test_an_adapter_on_an_adapter_ends_in_a_whole_folder(tmp_path: Path):
    model_folder(tmp_path / "base")
    changes = {"model": {"path": "base", "dtype": "float32"}, "adapter.rank": 2, "steps": 2}
    write_recipe(tmp_path / "r.yaml", {**changes, **EVAL, "eval.samples": 0, "stages": [{}, {"seed": 1}]})
    train("r.yaml")
    assert (tmp_path / "run/0_sft/export/adapter_config.json").is_file()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/1_sft/export")
    first, second = metrics("run/0_sft"), metrics("run/1_sft")
    assert second[0]["eval/loss"] == pytest.approx(first[-1]["eval/loss"], abs=1e-5)
    held = lines(tmp_path / "held.jsonl")
    found = scored("run", tmp_path / "held.jsonl", "scores.jsonl")
    shutil.move("run", "moved")
    assert main(["export", "moved", "out"]) == 0
    again = scored("out", tmp_path / "held.jsonl", "again.jsonl")
    np.testing.assert_allclose(flat(again), flat(found), atol=1e-5)
    answers = [one["logprobs"][len(told["prompt"]) :] for one, told in zip(found, held, strict=True)]
    assert second[-1]["eval/loss"] == pytest.approx(-np.concatenate(answers).mean(), abs=1e-4)
    # A run whose last stage has not come to its end has no weights to give, though its first stage has.
    shutil.rmtree("moved/1_sft")
    assert main(["score", "moved", "held.jsonl", "--out", "none.jsonl"]) == 2


@pytest.mark.slow
def test_an_export_reads_parameters_alone_in_the_bytes_that_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_recipe(tmp_path / "r.yaml", {"model.dtype": "bfloat16", "steps": 2})
    train("r.yaml")
    read, load = {}, export_file.load_params

    def watched(path: Path, target: dict) -> dict:
        read.update(load(path, target))
        return read

    monkeypatch.setattr(export_file, "load_params", watched)
    monkeypatch.setattr(Learner, "__init__", lambda *_, **__: pytest.fail("moments are made with a learner"))
    assert main(["export", "run", "out"]) == 0
    assert {str(x.dtype) for x in read.values()} == {"bfloat16"}
    assert files(tmp_path / "out") == files(tmp_path / "run/export")


# --- The same losses, however it is computed ------------------------------------------------------------------------


@pytest.mark.slow  # tests/trainer/test_step.py has each without a run around it
def test_mesh_packing_and_passes_do_not_change_the_losses(tmp_path: Path):
    write_recipe(tmp_path / "r.yaml", {"steps": 6})
    train("r.yaml", "output=plain")
    assert len(losses("plain")) == 6
    # One device instead of eight, in a process of its own.
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "tunix.cli", "run", "r.yaml", "output=single"], env=env, check=True)
    np.testing.assert_allclose(losses("single"), losses("plain"), atol=1e-4)
    # Another mesh, restored onto the first after three steps.
    train("r.yaml", "output=other", "mesh={fsdp: 4, tensor: 2}", "steps=3")
    train("r.yaml", "output=other")
    np.testing.assert_allclose(losses("other"), losses("plain"), atol=1e-4)
    # A pass of all eight rows, each with one sequence, against packed passes of four rows.
    train("r.yaml", "output=rows", "mesh={fsdp: 4, tensor: 2}", "data.packing=false", "steps=3")
    train("r.yaml", "output=passes", "mesh={fsdp: 4, tensor: 2}", "micro_batch_size=4", "steps=3")
    np.testing.assert_allclose(losses("rows"), losses("plain")[:3], atol=1e-4)
    np.testing.assert_allclose(losses("passes"), losses("plain")[:3], atol=1e-4)


# --- Folders of transformers ----------------------------------------------------------------------------------------


@pytest.mark.models
def test_an_adapter_trains_alone_and_goes_to_peft_and_back(tmp_path: Path):
    from peft import PeftModel  # takes seconds

    base = model_folder(tmp_path / "base")
    adapter = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}
    model = {"path": "base", "dtype": "float32"}
    write_recipe(tmp_path / "r.yaml", {"model": model, "adapter": adapter, **EVAL})
    train("r.yaml")
    names = {path.name for path in (tmp_path / "run/export").iterdir()}
    assert names == ADAPTER
    saved = json.loads((tmp_path / "run/checkpoints/4/state/_METADATA").read_text())["tree_metadata"]
    keys = [[part["key"] for part in leaf["key_metadata"]] for leaf in saved.values()]
    trained = {f"layers/{name}/w_lora_{letter}" for name in ("q", "v", "down") for letter in "ab"}
    assert {key[1] for key in keys if key[0] == "params"} == trained

    held = tmp_path / "held.jsonl"
    assert main(["export", "run", "merged"]) == 0
    assert main(["export", "run", "alone", "--adapter"]) == 0
    assert files(tmp_path / "alone") == files(tmp_path / "run/export")
    beside = flat(scored("base", held, "beside.jsonl", "--adapter", "alone"))
    merged = flat(scored("merged", held, "merged.jsonl"))
    np.testing.assert_allclose(beside, merged, atol=1e-4)
    np.testing.assert_allclose(flat(scored("run", held, "run.jsonl")), merged, atol=1e-4)
    assert np.abs(merged - flat(scored("base", held, "base.jsonl"))).max() > 0.01

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run/export").eval()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    given = lines(held)[0]
    ids = [*tokenizer(given["prompt"] + given["completion"])["input_ids"], tokenizer.eos_token_id]
    for hf in (theirs, plain):
        np.testing.assert_allclose(their_logprobs(hf, ids), lines(Path("run.jsonl"))[0]["logprobs"], atol=1e-4)


@pytest.mark.slow
def test_a_folder_without_a_tokenizer_serves_token_ids(tmp_path: Path):
    model_folder(tmp_path / "base", tokenizer=False)
    ids = [list(range(first, first + 12)) for first in range(24)]
    given = [{"input_ids": one, "labels": [-100] * 4 + one[4:]} for one in ids]
    write_rows(tmp_path / "train.jsonl", given)
    write_rows(tmp_path / "held.jsonl", given[:3])
    write_recipe(tmp_path / "r.yaml", {"model": {"path": "base", "dtype": "float32"}, **EVAL})
    train("r.yaml")
    samples = lines(tmp_path / "run/samples.jsonl")
    assert samples[0]["prompt"] == [0, 1, 2, 3]
    assert samples[0]["expected"] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert len(samples[-1]["completion"]) == 6
    assert not (tmp_path / "run/export/tokenizer.json").exists()
    found = scored("run", tmp_path / "held.jsonl", "scores.jsonl")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export").eval()
    for one, told in zip(found, given[:3], strict=True):
        assert one["tokens"] == told["input_ids"][1:]
        np.testing.assert_allclose(one["logprobs"], their_logprobs(hf, told["input_ids"]), atol=1e-4)


@pytest.mark.slow
def test_a_chat_template_of_the_recipe_goes_with_the_export(tmp_path: Path):
    model_folder(tmp_path / "base")
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}")
    said = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ccc"}]}
    write_rows(tmp_path / "train.jsonl", [said] * 8)
    changes = {"model": {"path": "base", "dtype": "float32"}, "data.chat_template": "mine.jinja", "steps": 1}
    write_recipe(tmp_path / "r.yaml", changes)
    train("r.yaml")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/export")
    assert tokenizer.apply_chat_template(said["messages"], tokenize=False) == "u:ab;a:ccc;"
    scratch = {"data.chat_template": "mine.jinja", "steps": 1, "output": "scratch"}
    train(str(write_recipe(tmp_path / "s.yaml", scratch)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "scratch/export")
    assert tokenizer.apply_chat_template(said["messages"], tokenize=False) == "u:ab;a:ccc;"


# --- Where numbers go -----------------------------------------------------------------------------------------------


def events(path: Path) -> list[tuple[int, str, float]]:
    """Step, name and value of every number in a TensorBoard file: length, checksum, record, checksum, ..."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        at += 16 + size
    return found


@pytest.mark.slow
def test_wandb_offline_and_tensorboard_get_every_row(tmp_path: Path):
    write_recipe(tmp_path / "r.yaml", {"logging": {"wandb": "tunix-tests", "tensorboard": True}, "steps": 2})
    train("r.yaml")
    (board,) = (tmp_path / "run/tensorboard").iterdir()
    shown = {(step, name): value for step, name, value in events(board)}
    for one in metrics("run"):
        assert shown[(one["step"], "train/loss")] == pytest.approx(one["train/loss"])
    (offline,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in offline.read_bytes()
    identity = json.loads((tmp_path / "run/trackers/wandb.json").read_text())["id"]
    assert identity in offline.name
    train("r.yaml", "steps=3")
    assert json.loads((tmp_path / "run/trackers/wandb.json").read_text())["id"] == identity


@pytest.mark.slow
def test_rows_can_be_further_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(str(write_recipe(tmp_path / "r.yaml", {"logging.every": 3, "steps": 5})))
    assert [one["step"] for one in metrics("run")] == [3]
    train("r.yaml", "logging.every=9", "--fresh")
    assert metrics("run") == []
    assert "done in" in capsys.readouterr().err
