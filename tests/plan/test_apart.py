"""Plans of runs with devices of their own for sampling or for a teacher: what each device holds, and what would fit."""

import math
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.plan.test_plan import SAMPLED, SIZES, recipe, subject
from tunix.commands.plan import summary
from tunix.plan import worker
from tunix.plan.record import Program, programs_of
from tunix.plan.subject import Subject, subject_of
from tunix.plan.worker import Target, Verdict, examined, refuted, remedies
from tunix.rollout.engine.shapes import PAGE

pytestmark = pytest.mark.models

GRPO: dict[str, Any] = {**SAMPLED, "algorithm": {"name": "grpo", "group_size": 4}}
APART: dict[str, Any] = {**GRPO, "rollout": {"slots": 16, "mesh": {"devices": 4, "tensor": 2}}}
MATRICES = 96 * 32 + 2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64)
"""Weights of which a device of two has half: the table and the layers' matrices; the norms are on both."""
NORMS = 32 + 2 * 2 * 32
COPY = 2 * (MATRICES // 2 + NORMS)
"""Bytes of half a copy in bfloat16."""
GATES = 2 * 2 * 32 * 64 // 2
"""Bytes of the largest array that is handed over: the gates of both layers, of which a device of two has half."""


def named(made: Subject) -> dict[str, Program]:
    return {one.name: one for one in programs_of(made)}


def test_a_device_that_samples_holds_its_share_of_a_copy_and_its_pages():
    """16 slots on two copies are 8 for each, of at most 32 tokens: a page."""
    made = subject(**APART)
    assert made.devices == {"training": 4, "sampling": 4}
    assert math.prod(made.policy.spec.model.shapes["embed/w"]) == 96 * 32
    number = sum(math.prod(shape) for shape in made.policy.spec.model.shapes.values())
    assert number == MATRICES + NORMS
    assert made.held["sampling"] == {"sampler's copy": COPY}
    # A quarter of everything, in float32, and nothing of the sampler's.
    assert made.held["training"]["weights"] == 4 * number // 4
    assert "sampler's copy" not in made.held["training"]
    found = named(made)
    assert {name: one.place for name, one in found.items()} == {
        "step": "training",
        **dict.fromkeys(("decode", "prefill", "publish"), "sampling"),
    }
    # Keys and values of a kv head (of two, split over two devices), in two layers, in bfloat16.
    assert found["decode"].caches == 8 * PAGE * 2 * 2 * 8 * 2
    assert (found["publish"].peak, found["decode"].besides) == (GATES, 0)


def test_weights_that_arrive_meanwhile_are_there_twice():
    """With a copy that waits, and the array that is on its way; under an adapter only what trains moves."""
    made = subject(**{**APART, "rollout": {**APART["rollout"], "max_staleness": 1}})
    assert made.held["sampling"] == {"sampler's copy": COPY, "newer weights": COPY + GATES}
    alone = subject_of(recipe(**{**GRPO, "rollout": {"slots": 16, "max_staleness": 1}}), jax.devices()[:1])
    assert alone.held["training"]["newer weights"] == alone.held["training"]["sampler's copy"] == 2 * (MATRICES + NORMS)
    adapted = subject(**APART, adapter={"rank": 4})
    ahead = subject(**{**APART, "rollout": {**APART["rollout"], "max_staleness": 1}}, adapter={"rank": 4})
    (one, other), names = (x.held["sampling"] for x in (adapted, ahead)), adapted.policy.params
    assert one["sampler's copy"] == other["sampler's copy"]
    # Of a factor, only the side of the heads, of the kv heads or of the hidden layer is split over two devices.
    shapes = {name: math.prod(adapted.policy.spec.model.shapes[name]) for name in names}
    assert sum(shapes.values()) < other["newer weights"] < 2 * (sum(shapes.values()) + max(shapes.values())) < COPY


@pytest.mark.slow
def test_each_place_is_compiled_for_its_own_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tunix.plan.worker.KEPT", tmp_path)
    made = subject(**APART)
    found = examined(made, Target("cpu", 8, 10**9))
    needs = {one.name: one for one in found.programs}
    assert needs["decode"].kinds["sampler's copy"] == COPY
    assert not {"weights", "optimizer's moments"} & needs["decode"].kinds.keys()
    assert needs["decode"].total > COPY + needs["decode"].kinds["caches"]
    assert needs["publish"].total == COPY + GATES
    assert not {"sampler's copy", "caches"} & needs["step"].kinds.keys()
    places = found.report()["places"]
    assert {place: one["needed"] for place, one in places.items()} == {
        "training": needs["step"].total,
        "sampling": max(needs[name].total for name in ("decode", "prefill", "publish")),
    }
    # A copy on each device does not fit where half of one does; training is not asked.
    whole = subject(**{**APART, "rollout": {"slots": 16, "mesh": {"devices": 4, "tensor": 1}}})
    least = examined(whole, Target("cpu", 8, 10**9)).most_on("sampling")
    between = Target("cpu", 8, (least + found.most_on("sampling")) // 2)
    assert found.most_on("sampling") < between.limit
    assert [refuted(one, between, "sampling") for one in (whole, made)] == [True, False]
    assert not refuted(whole, between, "training")
    # The same slots on all 8 devices, beside what trains there.
    shared = examined(subject(**GRPO), Target("cpu", 8, 10**9))
    decode = next(one for one in shared.programs if one.name == "decode")
    assert {"weights", "optimizer's moments", "sampler's copy"} <= decode.kinds.keys()


def test_a_reward_model_scores_where_completions_are_sampled(tmp_path: Path):
    (tmp_path / "judge").mkdir()
    judged = {"reward": {"model": "meta-llama/Llama-3.2-1B-Instruct"}}
    made = subject(**{**APART, **judged})
    assert "reward model" in made.held["sampling"]
    assert "reward model" not in made.held["training"]


def test_a_teacher_of_its_own_devices_is_held_there():
    sizes = {**SIZES, "d_model": 64}
    given: dict[str, Any] = {"algorithm": {"name": "distill"}, "data": {"train": "rows.jsonl", "max_length": 32}}
    teacher = {"family": "llama", "sizes": sizes}
    made = subject_of(recipe(**given, teacher={**teacher, "mesh": {"fsdp": 4}}), jax.devices())
    assert made.devices == {"training": 4, "teaching": 4}
    assert made.held["teaching"].keys() == {"teacher"}
    assert "teacher" not in made.held["training"]
    assert named(made)["teacher's states"].place == "teaching"
    together = subject_of(recipe(**given, teacher=teacher), jax.devices())
    assert together.held.keys() == {"training"}
    assert "teacher" in together.held["training"]


def verdict(limit: int, step: int, decode: int) -> Verdict:
    """Needs of both places, of which neither holds anything."""
    needs = [Program("step", total=step), Program("decode", "sampling", total=decode)]
    needs.sort(key=lambda one: -one.total)
    target = Target("cpu", 8, limit)
    return Verdict(target, {"training": {}, "sampling": {}}, needs, {"training": 4, "sampling": 4})


def test_a_run_fits_where_both_places_do():
    assert not verdict(9, 9, 8).misfits
    assert verdict(9, 10, 8).misfits == ["training"]
    assert verdict(9, 8, 10).misfits == ["sampling"]
    assert verdict(9, 10, 11).misfits == ["training", "sampling"]
    gib = 2**30
    assert summary(verdict(24 * gib, 20 * gib, 22 * gib).report()) == (
        "on 8 x cpu: fits: 22.0 GiB of 24.0 GiB during `decode` on each sampling device, 2.0 GiB to spare; "
        "20.0 GiB during `step` on each training device"
    )


def _both(made: Subject, place: str) -> bool:
    """Whether sampling is asked about a change for training as well."""
    return place == "sampling" and made.setup.recipe.micro_batch_size is not None


def test_each_place_gets_a_change_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Training: the second change; sampling: no fewer slots help, but a copy on twice as many devices."""
    given = recipe(**{**APART, "rollout": {"slots": 32, "mesh": {"devices": 4, "tensor": 1}}})

    def refuted(made: Subject, target: Target, place: str) -> bool:
        if place == "training":
            return made.setup.recipe.micro_batch_size is None
        mesh = made.setup.recipe.rollout.devices
        return mesh is None or mesh.tensor == 1

    target, devices = Target("cpu", 8, 10**9), jax.devices()
    monkeypatch.setattr(worker, "target_of", lambda named: (target, devices))
    monkeypatch.setattr(worker, "refuted", refuted)
    tried: list[dict] = []
    changed = worker.change(given, verdict(10**9, 2 * 10**9, 3 * 10**9), None, tried.append)
    assert changed == "model.remat=block micro_batch_size=16 rollout.mesh.tensor=2"
    halved = given.model_copy(update={"micro_batch_size": 16})
    assert worker.change(halved, verdict(10**9, 1, 3 * 10**9), None, tried.append) == "rollout.mesh.tensor=2"
    # What helps training is too much for sampling, once both are changed.
    monkeypatch.setattr(worker, "refuted", lambda *asked: refuted(*asked) or _both(asked[0], asked[2]))
    assert worker.change(given, verdict(10**9, 2 * 10**9, 3 * 10**9), None, tried.append) is None
    assert worker.change(given, verdict(10**9, 2 * 10**9, 1), None, tried.append) is None
    words = [" ".join(one) for one in remedies(given, "decode", "h100:8", "sampling")]
    assert words == [*(f"rollout.slots={n}" for n in (16, 8, 4, 2)), *(f"rollout.mesh.tensor={n}" for n in (2, 4))]
