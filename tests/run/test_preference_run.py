"""DPO, KTO and online DPO through the command line: what is learned, measured, held out and refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest

import tunix.run.reference_cache
import tunix.trainer.trainer
from tests.marks import slow
from tests.tiny_rl import REWARDS
from tests.tiny_runs import files, lines, metrics, train, write_recipe, write_rows
from tunix.algorithms.dpo.algorithm import ranked
from tunix.cli import main
from tunix.trainer.trainer import Trainer

LETTERS = "abcdefgh"
PREFERENCES = ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy")


def pairs(number: int, seed: int = 0) -> list[dict[str, str]]:
    """The chosen side answers with capitals, the rejected one with small letters."""
    rng = np.random.default_rng(seed)

    def word() -> str:
        return "".join(rng.choice(list(LETTERS), size=int(rng.integers(3, 8))))

    return [{"prompt": f"{word()}>", "chosen": word().upper(), "rejected": word()} for _ in range(number)]


def labelled(number: int, seed: int = 0) -> list[dict[str, object]]:
    """The same with one side each, and whether it is the better one."""
    sides = [(row, bool(i % 2)) for i, row in enumerate(pairs(number, seed))]
    return [
        {"prompt": x["prompt"], "completion": x["chosen" if good else "rejected"], "label": good} for x, good in sides
    ]


def write_preferences(folder: Path, name: str = "r.yaml", rows=pairs, **changes) -> str:
    """A recipe of DPO, and rows beside it."""
    write_rows(folder / "train.jsonl", rows(64))
    write_rows(folder / "held.jsonl", rows(16, seed=1))
    usual = {
        "algorithm.name": "dpo",
        "data.eval": "held.jsonl",
        "steps": 12,
        "optimizer.learning_rate": 3e-3,
        "eval.samples": 0,
    }
    return str(write_recipe(folder / name, {**usual, **{key.replace("__", "."): x for key, x in changes.items()}}))


def held_out(run: str = "run") -> tuple[dict, dict]:
    """The first and the last evaluation."""
    found = [row for row in metrics(run) if "eval/loss" in row]
    return found[0], found[-1]


@pytest.mark.parametrize("adapter", [None, *slow([{"rank": 4, "alpha": 8.0}])])
def test_dpo_learns_from_its_reference(adapter, tmp_path):
    """From ln 2, where the policy is the reference, to every held-out pair told apart."""
    changes = {"adapter": adapter, "optimizer.learning_rate": 1e-2} if adapter else {}
    train(write_preferences(tmp_path, **changes))
    first, last = held_out()
    assert first["eval/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert first["eval/kl/reference"] == pytest.approx(0, abs=1e-9)
    assert last["eval/rewards/accuracy"] > 0.9
    assert last["eval/loss"] < 0.6
    assert last["eval/kl/reference"] > 0
    row = lines(Path("run/metrics.jsonl"))[-1]
    assert {*PREFERENCES, "logprobs/chosen", "logprobs/rejected", "kl/reference"} <= row.keys()
    assert row["rewards/margin"] == pytest.approx(row["rewards/chosen"] - row["rewards/rejected"], abs=1e-5)
    assert row["train/loss"] < 0.6
    assert row["compile/count"] == lines(Path("run/metrics.jsonl"))[2]["compile/count"]  # of the second step


@pytest.mark.slow
def test_a_form_without_reference_holds_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tunix.trainer.trainer, "snapshot", lambda *_: pytest.fail("a reference is held"))
    train(write_preferences(tmp_path, algorithm={"name": "dpo", "loss": "simpo"}, steps=3))
    _, last = held_out()
    assert last["eval/rewards/accuracy"] > 0.5
    assert "eval/kl/reference" not in last


@pytest.mark.slow
def test_a_run_ends_where_held_out_pairs_are_told_apart(tmp_path, capfd):
    until = {"eval.until": {"eval/rewards/accuracy": 0.9}, "eval.every": 2}
    train(write_preferences(tmp_path, **until))
    assert "the run has reached eval.until" in capfd.readouterr().err
    assert held_out()[1]["step"] < 12


@pytest.mark.slow  # tests/algorithms/test_pairs.py has them without a run around them
def test_micro_batches_and_padding_change_nothing(tmp_path):
    first = write_preferences(tmp_path, steps=2)
    train(first)
    train(first, "output=small", "micro_batch_size=1")
    train(first, "output=padded", "data.packing=false")
    wanted = [
        (row["train/loss"], row["train/grad_norm"], row["rewards/margin"])
        for row in metrics("run")
        if "train/loss" in row
    ]
    for run in ("small", "padded"):
        rows = [(x["train/loss"], x["train/grad_norm"], x["rewards/margin"]) for x in metrics(run) if "train/loss" in x]
        np.testing.assert_allclose(rows, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss", slow(["kto", "apo_zero"]))
def test_kto_learns_from_labels(loss, tmp_path):
    train(write_preferences(tmp_path, rows=labelled, algorithm={"name": "kto", "loss": loss}, steps=16))
    first, last = held_out()
    assert first["eval/loss"] == pytest.approx(0.5, abs=1e-4)  # 1 - sigmoid(0)
    assert last["eval/rewards/chosen"] > last["eval/rewards/rejected"]
    assert last["eval/rewards/accuracy"] > 0.9
    row = lines(Path("run/metrics.jsonl"))[-1]
    assert {*PREFERENCES, "kl/reference"} <= row.keys()
    assert ("kl/z0" in row) == (loss == "kto")
    assert row.get("kl/z0", 0.0) >= 0
    assert row["compile/count"] == lines(Path("run/metrics.jsonl"))[2]["compile/count"]  # of the second step


@pytest.mark.slow
def test_kto_on_one_label_alone_leaves_the_other_ones_metrics_out(tmp_path):
    def good(number: int, seed: int = 0) -> list[dict[str, object]]:
        return [row for row in labelled(2 * number, seed) if row["label"]]

    train(write_preferences(tmp_path, rows=good, algorithm={"name": "kto"}, steps=2))
    row = lines(Path("run/metrics.jsonl"))[-1]
    assert "rewards/chosen" in row
    assert not {"rewards/rejected", "logprobs/rejected", "rewards/margin"} & row.keys()


def test_kto_needs_another_row(tmp_path, capfd):
    recipe = write_preferences(tmp_path, rows=labelled, algorithm={"name": "kto"}, batch_size=1)
    assert main(["check", recipe]) == 2
    assert "batch_size: 1 row has no other row's prompt" in capfd.readouterr().err


def online(folder: Path, **changes) -> str:
    (folder / "rewards.py").write_text(REWARDS + "\ndef same(completion):\n    return 1.0\n")
    usual = {
        "algorithm": {"name": "dpo", "online": True, "group_size": 4},
        "data.max_length": 32,
        "data.completion_length": 12,
        "reward.functions": ["rewards.py:letters"],
        "logging.samples.groups": 2,
        "rollout.temperature": 0.8,
        "batch_size": 4,
        "steps": 3,
        **changes,
    }
    return write_preferences(
        folder, rows=lambda n, seed=0: [{"prompt": row["prompt"]} for row in pairs(n, seed)], **usual
    )


@pytest.mark.slow  # others here learn from given pairs, and tests/run/test_rl_run.py from drawn answers
def test_online_pairs_are_drawn_ranked_and_learned_from(tmp_path):
    train(online(tmp_path))
    rows = [row for row in metrics("run") if "train/loss" in row]
    assert rows[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert rows[0]["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert all(row["mismatch/max"] < 1e-3 for row in rows)
    assert all(0 < row["reward/signal"] <= 1 for row in rows)
    assert rows[-1]["compile/count"] == rows[1]["compile/count"]
    drawn = [row for row in lines(Path("run/samples.jsonl")) if "group" in row and row["step"] == 1]
    assert len(drawn) == 8
    for group in (0, 1):
        own = [row for row in drawn if row["group"] == group]
        worth = {row["side"]: row["rewards"]["letters"] for row in own}
        every = [row["rewards"]["letters"] for row in own]
        if min(every) < max(every):
            assert (worth["chosen"], worth["rejected"]) == (max(every), min(every))


@pytest.mark.slow
def test_online_without_a_difference_says_so_and_updates_nothing(tmp_path, capfd):
    train(online(tmp_path, **{"reward.functions": ["rewards.py:same"], "steps": 1}))
    (row,) = (row for row in metrics("run") if "reward/signal" in row)
    assert row["reward/signal"] == 0
    assert "train/loss" not in row
    assert "no signal: all rewards are equal" in capfd.readouterr().err


def test_online_wants_rewards(tmp_path, capfd):
    recipe = write_preferences(tmp_path, algorithm={"name": "dpo", "online": True})
    assert main(["check", recipe]) == 2
    assert "reward: dpo learns from rewards" in capfd.readouterr().err


PRECOMPUTE = {"algorithm": {"name": "dpo", "reference": "precompute"}, "steps": 3}


@pytest.mark.parametrize("adapter", slow([None, {"rank": 4, "alpha": 8.0}]))
def test_a_reference_asked_beforehand_is_the_same(adapter, tmp_path, monkeypatch):
    """As one that is asked at every step, up to rounding; and none is held."""
    train(write_preferences(tmp_path, adapter=adapter, steps=3))
    monkeypatch.setattr(tunix.trainer.trainer, "snapshot", lambda *_: pytest.fail("a reference is held"))
    train(write_preferences(tmp_path, adapter=adapter, **PRECOMPUTE, output="beforehand"))
    for mine, theirs in zip(metrics("beforehand"), metrics("run"), strict=True):
        for name in {
            "train/loss",
            "train/grad_norm",
            "rewards/margin",
            "eval/loss",
            "eval/rewards/margin",
        } & theirs.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    (folder,) = tmp_path.glob("train.jsonl.reference-*")
    assert [file.name for file in folder.iterdir()] == ["00000.safetensors"]


@pytest.mark.slow
def test_an_interrupted_computation_goes_on(tmp_path, monkeypatch, capfd):
    """64 + 16 pairs are 160 sequences: shards of 64, 64 and 32, of which one is missing."""
    monkeypatch.setattr(tunix.run.reference_cache, "CHUNK", 64)
    recipe = write_preferences(tmp_path, **PRECOMPUTE)
    train(recipe)
    assert "reference: 160 of 160 sequences" in capfd.readouterr().err
    (folder,) = tmp_path.glob("train.jsonl.reference-*")
    before = files(folder)
    assert sorted(before) == [f"0000{i}.safetensors" for i in range(3)]
    (folder / "00001.safetensors").unlink()
    train(recipe, "output=again")
    told = capfd.readouterr().err
    assert "reference: 128 of 160 sequences" in told
    assert "reference: 160 of 160" not in told  # that one was there
    assert files(folder) == before
    train(recipe, "output=third")
    assert "reference: " not in capfd.readouterr().err


@pytest.mark.slow
def test_shards_of_something_else_are_not_taken(tmp_path, capfd):
    recipe = write_preferences(tmp_path, **PRECOMPUTE)
    train(recipe)
    (folder,) = tmp_path.glob("train.jsonl.reference-*")
    capfd.readouterr()
    train(recipe, "output=other", "seed=1")  # other first weights
    assert (
        f"{folder.name}: of other rows, another model or precision; the reference is recomputed"
        in capfd.readouterr().err
    )
    (other,) = (x for x in tmp_path.glob("train.jsonl.reference-*") if x != folder)
    (other / "00000.safetensors").replace(folder / "00000.safetensors")
    assert main(["run", recipe, "output=mixed"]) == 2
    assert "of another data set, model or precision: delete it" in capfd.readouterr().err
    (folder / "00000.safetensors").write_bytes(b"cut off")
    assert main(["run", recipe, "output=mixed"]) == 2
    assert "cannot be read" in capfd.readouterr().err


def test_digests_tell_weights_apart():
    """Whichever bit, place or type changes."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    swapped, moved = array[::-1], array + np.float32(1e-6)
    names = [{"w": x} for x in (array, swapped, moved, array.astype(np.float16), array.reshape(4, 3))] + [{"v": array}]

    def digest_of(weights: dict[str, np.ndarray]) -> str:
        params = {name: jnp.asarray(x) for name, x in weights.items()}
        return Trainer.fingerprint(cast(Trainer, SimpleNamespace(learner=SimpleNamespace(params=params))))

    found = [digest_of(weights) for weights in names]
    assert len(set(found)) == len(found)
    assert digest_of({"w": array.copy()}) == found[0]


@pytest.mark.parametrize("reference", slow(["snapshot", "precompute"]))
def test_a_run_that_goes_on_has_the_reference_it_began_with(reference, tmp_path):
    """Two steps and two more are four: bit for bit."""
    recipe = write_preferences(tmp_path, algorithm={"name": "dpo", "reference": reference}, steps=4, eval__every=4)
    train(recipe)
    train(recipe, "output=halves", "steps=2")
    train(recipe, "output=halves")
    whole, halves = ([row for row in metrics(run) if "train/loss" in row] for run in ("run", "halves"))
    names = ("train/loss", "train/grad_norm", "rewards/margin", "kl/reference")
    assert [[row[name] for name in names] for row in halves] == [[row[name] for name in names] for row in whole]


def test_best_and_worst_of_each_group():
    scores = np.array([[1.0, 3.0, 2.0, 3.0], [2.0, np.nan, 2.0, 2.0], [np.nan, 0.5, np.nan, -1.0], [np.nan] * 4])
    assert ranked(scores) == [(1, 0), None, (1, 3), None]  # the first of equals; what failed is no side
    assert ranked(np.array([[np.nan, 1.0]])) == [None]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["aot", "aot_unpaired"])
def test_sorted_forms_see_the_whole_batch_whatever_the_micro_batches(form, tmp_path):
    recipe = write_preferences(tmp_path, algorithm={"name": "dpo", "loss": form}, steps=4, batch_size=8)
    train(recipe)
    train(recipe, "output=small", "micro_batch_size=1")
    read = [
        [(x["train/loss"], x["train/grad_norm"]) for x in metrics(run) if "train/loss" in x] for run in ("run", "small")
    ]
    np.testing.assert_allclose(read[1], read[0], rtol=1e-3, atol=1e-6)
    rows = [row for row in metrics("run") if "train/loss" in row]
    assert rows[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-5)  # the policy is the reference
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert rows[-1]["compile/count"] == rows[1]["compile/count"]
