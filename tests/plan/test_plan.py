"""Plans of small recipes on the CPU at hand: what is held, which programs there are, and what does not fit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.marks import slow
from tunix.commands.plan import Plan, ask
from tunix.errors import UserError
from tunix.models.families.table import presets
from tunix.plan import worker
from tunix.plan.arithmetic import Sent, Work
from tunix.plan.record import Program, programs_of
from tunix.plan.subject import Place, Subject, decoder_of, subject_of
from tunix.plan.worker import Target, Verdict, remedies
from tunix.recipe.recipe import Recipe
from tunix.trainer.frozen_model import not_shared
from tunix.util.chips import CHIPS, devices_of, limit_of

SIZES = {"vocab_size": 96, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 64}
SFT: dict[str, Any] = {
    "model": {"init": "random", "family": "llama", "sizes": SIZES, "dtype": "bfloat16"},
    "data": {"train": "rows.jsonl", "max_length": 32},
    "batch_size": 8,
    "micro_batch_size": 8,
    "output": "runs/plan",
}
SAMPLED = {
    "data": {"train": "rows.jsonl", "max_length": 32, "completion_length": 16},
    "reward": {"functions": ["number"]},
    "micro_batch_size": None,
}


def recipe(**sections: Any) -> Recipe:
    return Recipe.build({**SFT, **sections})


def subject(**sections: Any) -> Subject:
    return subject_of(recipe(**sections), jax.devices())


def number_of_weights(made: Subject) -> int:
    return sum(math.prod(shape) for shape in made.policy.spec.model.shapes.values())


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for plans."""
    monkeypatch.setattr(worker, "KEPT", tmp_path / "plans")
    return tmp_path / "plans"


def test_a_hub_id_names_its_preset():
    named = {
        "Qwen/Qwen3-0.6B": "qwen3-0.6b",
        "google/gemma-3-1b-it": "gemma3-1b",
        "google/gemma-3-12b-it": "gemma3-12b",
        "meta-llama/Llama-3.2-1B-Instruct": "llama3.2-1b",
        "meta-llama/Llama-3.1-70B": "llama3.1-70b",
        "Skywork/Skywork-Reward-V2-Qwen3-0.6B": "qwen3-0.6b",
        "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    }
    assert {name: decoder_of(name) for name in named} == {name: presets()[preset] for name, preset in named.items()}
    with pytest.raises(UserError, match="its sizes are not known here"):
        decoder_of("mistralai/Mistral-7B-v0.3")
    assert decoder_of("google/gemma-2-9b-it") == presets()["gemma2-9b"]


def test_an_unknown_model_is_refused_without_a_download():
    with pytest.raises(UserError, match=r"nobody/nothing.*downloads nothing.*config\.json"):
        decoder_of("nobody/nothing")


def test_weights_and_moments_are_what_arithmetic_says():
    """float32: 4 bytes a weight, AdamW twice as much; on 8 devices an eighth, but for what 8 does not divide."""
    whole = subject_of(recipe(), jax.devices()[:1])
    number = number_of_weights(whole)
    assert whole.held["training"]["weights"] == 4 * number
    assert whole.held["training"]["optimizer's moments"] == pytest.approx(8 * number, abs=64)
    assert subject().held["training"]["weights"] == 4 * number // 8
    halved = subject_of(recipe(optimizer={"moments_dtype": "bfloat16", "b2": 0.99}), jax.devices()[:1])
    assert halved.held["training"]["optimizer's moments"] == pytest.approx(4 * number, abs=64)


def test_a_frozen_base_is_its_own_reference_and_gives_its_tables_to_the_sampler():
    made = subject_of(
        recipe(**SAMPLED, algorithm={"name": "grpo", "group_size": 4, "kl": 0.1}, adapter={"rank": 4}),
        jax.devices()[:1],
    )
    base = 2 * sum(math.prod(shape) for name, shape in made.policy.spec.model.shapes.items() if "_lora_" not in name)
    adapter = 2 * sum(math.prod(shape) for name, shape in made.policy.spec.model.shapes.items() if "_lora_" in name)
    tables = 2 * SIZES["vocab_size"] * SIZES["d_model"] + 2 * SIZES["d_model"]  # the head is the embedding
    assert made.held["training"]["frozen base"] == base
    assert "reference" not in made.held["training"]
    assert made.reference is not None
    assert not_shared(made.policy.base, made.reference.params) == {}, "a program is given it once"
    assert made.held["training"]["sampler's copy"] == base - tables + adapter


def test_a_share_of_the_memory_that_is_too_small_is_refused_with_one_that_works():
    given: dict[str, Any] = {**SAMPLED, "algorithm": {"name": "grpo", "group_size": 4}}
    with pytest.raises(UserError, match=r"rollout.memory: 0 GB are left .* 0.001 of 0.01 GB is 1e-05 GB") as caught:
        subject_of(recipe(**given, rollout={"memory": 0.001}), jax.devices()[:1], 1e7)
    least = float(str(caught.value).rsplit(" ", 1)[1])
    assert subject_of(recipe(**given, rollout={"memory": least}), jax.devices()[:1], 1e7).sampled is not None
    with pytest.raises(UserError, match=r"the smallest that works is"):
        subject_of(recipe(**given, rollout={"memory": least - 0.002}), jax.devices()[:1], 1e7)


ALGORITHMS = {
    "ppo": (
        {**SAMPLED, "algorithm": {"name": "ppo", "critic_warmup": 1, "updates": 2, "kl": 0.1}},
        # All prompts of a step are one piece of 2048 tokens.
        {"step": 2, "critic's step": 2, "values": 1, "reference's log-probs": 1, "decode": 16, "prefill": 1},
    ),
    "dpo": ({"algorithm": {"name": "dpo"}, "data": {"train": "rows.jsonl", "max_length": 32}}, {"step": 1}),
    "kto": ({"algorithm": {"name": "kto"}}, {"step": 1, "log-probs": 1, "reference's log-probs": 1}),
}


@pytest.mark.parametrize("name", ["dpo", *slow(["ppo", "kto"])])
def test_an_algorithm_tells_its_programs_itself(name: str):
    sections, expected = ALGORITHMS[name]
    found = {one.name: one.times for one in programs_of(subject(**sections)) if one.times}
    assert found == expected


def test_a_small_recipe_is_planned_for_the_cpu_at_hand(kept: Path):
    told: list[dict] = []
    request = {"recipe": recipe().sections(), "name": "r.yaml", "topology": None, "remedies": True}
    worker.answer(request, told.append)
    (found,) = (one["verdict"] for one in told if "verdict" in one)
    assert found["fits"]
    (step,) = found["programs"]
    assert step["name"] == "step"
    # 8 devices with a row each: 6 FLOPs a weight and token, and those of the attention.
    weights = 2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64) + 96 * 32
    assert step["work"][0] > 6 * weights * 32
    assert step["kinds"]["weights"] == found["places"]["training"]["held"]["weights"]
    assert sum(step["kinds"].values()) == step["total"] == found["needed"]
    assert min(step["traced_in"], step["compiled_in"]) > 0
    assert step["buffers"] == []
    # The same program is compiled once.
    assert len(list(kept.iterdir())) == 1
    worker.answer(request, told.append)
    (again,) = told[-1]["verdict"]["programs"]
    assert told[-1]["verdict"] | {"programs": [again | {"traced_in": step["traced_in"]}]} == found


def test_what_a_program_does_not_read_is_held_beside_it(monkeypatch: pytest.MonkeyPatch):
    """A step of 10 that reads 4 of weights, beside a copy of 3: 13. A growing cache of 2 + 4 beside 4 + 3: 13 too."""
    monkeypatch.setattr(worker, "compiled", lambda lowered, target: {"peak": 10})
    held = {"weights": 4, "copy": 3}
    program = replace(programs_of(subject())[0], reads=("weights",), gradients=1, times=2.0)
    program = replace(program, work=Work(8e12, 2e9), sent=Sent({"all-reduce": 3e9}, 0.3e9))
    target = Target("h100:8", 8, 13, CHIPS["h100"])
    need = worker.measured(program, held, target)
    assert (need.total, need.kinds) == (13, {**held, "gradients": 1, "activations and temporaries": 5})
    # 8 TFLOP at 989 a second are 8.09 ms, 2 GB at 3.35 TB/s 0.6, 3 GB over NVLink 6.7, 0.3 GB between hosts 6.
    assert (need.bound, need.seconds) == ("compute", pytest.approx(8e12 / 989e12))
    found = Verdict(target, {"training": held}, [need, Program("growing", total=13)], {"training": 8})
    assert found.most_on("training") == 13
    assert not found.misfits
    assert replace(found, target=replace(target, limit=12)).misfits
    assert replace(found, programs=[replace(need, refused="no")]).misfits


def test_the_prediction_is_by_all_that_a_step_runs():
    """Two updates of 0.5 s with 989 TFLOP of the model each, and a decode of 4 x 0.25 s, on two H100: 2 s."""
    update = Program("step", total=1, times=2.0, model_flops=989e12, tokens=1000, seconds=0.5)
    decode = Program("decode", total=1, times=4.0, tokens=64, seconds=0.25)
    found = Verdict(Target("h100:2", 2, 9, CHIPS["h100"]), {"training": {}}, [update, decode], {"training": 2})
    assert found.prediction() == {"step_seconds": 2.0, "tokens_per_second": 1000.0, "mfu": 0.5}
    assert Verdict(Target("cpu", 1, 9), {"training": {}}, [update], {"training": 1}).prediction() is None
    # On a device each, in turns and at the same time.
    places: dict[Place, dict] = {"training": {}, "sampling": {}}
    apart = replace(found, held=places, programs=[update, replace(decode, place="sampling")])
    assert apart.prediction() == found.prediction()
    assert replace(apart, concurrent=True).prediction() == {
        "step_seconds": 1.0,
        "tokens_per_second": 2000.0,
        "mfu": 1.0,
    }


def test_changes_begin_with_the_smallest():
    words = [" ".join(one) for one in remedies(recipe(micro_batch_size=8), "step", "h100:4")]
    assert words[:4] == [
        "model.remat=block",
        *(f"model.remat=block micro_batch_size={n}" for n in (4, 2)),
        "optimizer.moments_dtype=bfloat16 optimizer.b2=0.99",
    ]
    assert words[-4:] == [f"--topology h100:{n}" for n in (8, 16, 32, 64)]
    sampling = [
        " ".join(one)
        for one in remedies(recipe(**SAMPLED, algorithm={"name": "grpo"}, rollout={"slots": 64}), "decode", None)
    ]
    assert sampling[:4] == [f"rollout.slots={n}" for n in (32, 16, 8, 4)]


def test_a_run_that_cannot_fit_is_told_the_change_that_would(kept: Path, monkeypatch: pytest.MonkeyPatch):
    """The moments alone are too much: only bfloat16 helps, and nothing is compiled for what comes before it."""
    devices = jax.devices()[:1]
    held = subject_of(recipe(), devices).held
    tight = Target("cpu", 1, sum(held["training"].values()) - 1)
    monkeypatch.setattr(worker, "target_of", lambda named: (tight, devices))
    monkeypatch.setattr(worker, "refuted", lambda made, target, place: sum(made.held[place].values()) > target.limit)
    found = Verdict(tight, held, [Program("step", total=tight.limit + 1)], {"training": 1})
    tried: list[dict] = []
    changed = worker.change(recipe(), found, None, tried.append)
    assert changed == "optimizer.moments_dtype=bfloat16 optimizer.b2=0.99"
    assert tried[-1] == {"trying": changed}


def test_a_compiler_that_runs_out_of_memory_is_understood():
    said = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in hbm. Used 17.40G of 15.75G hbm.

  1. Size: 4.00G
     Operator: op_name="jit(step)/while/body/dot_general"
     Shape: f32[8,4096,32768]{2,1,0:T(8,128)}
     Unpadded size: 4.00G
"""
    found = worker.refusal(said)
    assert found["peak"] == int(17.4 * 2**30)
    assert found["buffers"] == [[4 * 2**30, "f32[8,4096,32768]", "jit(step)/while/body/dot_general"]]
    assert "Used 17.40G of 15.75G" in found["refused"]


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("h10:1", "'h10' is not known. Did you mean 'h100'? There are v5e"),
        ("a100", "There are v5e, v5p, v6e, h100, h200"),
    ],
)
def test_an_unknown_topology_lists_those_that_there_are(topology: str, words: str):
    with pytest.raises(UserError) as error:
        devices_of(topology)
    assert words in str(error.value)


def test_the_limit_of_a_topology():
    assert limit_of("h100:8") == int(0.92 * 80e9)


@pytest.mark.slow
def test_a_worker_is_stopped_at_its_deadline():
    assert ask(recipe(), None, deadline=0.5) == Plan(late=True)


@pytest.mark.slow
def test_a_worker_answers_over_its_pipe():
    found = ask(recipe(), None)
    assert found.fits
    assert [one["name"] for one in found.verdicts[0]["programs"]] == ["step"]


@pytest.mark.slow
def test_a_tower_and_its_pictures_are_held_and_computed():
    """The tower is frozen in bfloat16; two pictures of 16 x 16 pixels come with each of 8 rows."""
    model = {**SFT["model"], "family": "gemma3"}
    given = {"model": model, "data": {"train": "rows.jsonl", "max_length": 32, "pictures": 2}}
    text, seen = (subject_of(recipe(**one), jax.devices()[:1]) for one in ({"model": model}, given))
    shapes = seen.policy.spec.model.shapes
    tower = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("vision/"))
    assert text.held["training"].get("frozen base", 0) == 0
    assert seen.held["training"]["frozen base"] == 2 * tower
    assert seen.held["training"]["weights"] == text.held["training"]["weights"]
    (step,) = (program for program in programs_of(seen) if program.name == "step")
    assert step.lowered is not None
    assert "8x2x16x4x4x3xui8" in step.lowered.as_text()
