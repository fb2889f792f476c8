"""Whether memory is ample by arithmetic: never where a step's own estimate says more than the arithmetic does."""

from typing import Any

import jax
import pytest

from tunix.plan.arithmetic import SHARE, estimated
from tunix.plan.subject import subject_of
from tunix.recipe.recipe import Recipe
from tunix.trainer.remat import held_by, step_bytes

SIZES = {"vocab_size": 4096, "d_model": 256, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
SFT: dict[str, Any] = {
    "model": {"init": "random", "family": "llama", "sizes": {**SIZES, "ffn": 1024}, "dtype": "float32"},
    "data": {"train": "rows.jsonl", "max_length": 256},
    "batch_size": 8,
    "output": "run",
}
CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "everything kept": {"model": {**SFT["model"], "remat": "none"}, "micro_batch_size": 64, "batch_size": 64},
    "long": {"data": {"train": "rows.jsonl", "max_length": 32_768}},
    "adapter": {"adapter": {"rank": 8}},
    "pairs": {"algorithm": {"name": "dpo"}, "data": {"train": "rows.jsonl", "max_length": 1024}},
    "rewards": {
        "algorithm": {"name": "grpo", "group_size": 4, "kl": 0.1},
        "reward": {"functions": ["number"]},
        "data": {"train": "rows.jsonl", "max_length": 256, "completion_length": 64},
    },
}
GIB = 2**30


def built(**changes: Any) -> Recipe:
    return Recipe.build({**SFT, **changes})


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_above_a_step_s_own(case: str):
    """What `remat: auto` goes by, which is within some percents of what XLA says."""
    recipe = built(**CASES[case])
    subject = subject_of(recipe, jax.devices()[:1], 80e9)
    policy = subject.policy
    held = held_by(policy.spec, policy.params, policy.base, copies=int(subject.reference is not None) + 1)
    needed = step_bytes(policy.spec, held, policy.spec.model.remat)
    estimate = estimated(recipe)
    assert estimate is not None
    # And it says yes of what takes a sixteenth.
    assert needed <= estimate <= SHARE * 16 * needed


@pytest.mark.parametrize(
    ("path", "changes", "expected"),
    [
        ("Qwen/Qwen3-0.6B", {}, True),
        ("Qwen/Qwen3-4B", {"adapter": {"rank": 16}}, True),
        ("Qwen/Qwen3-4B", {}, False),
        ("meta-llama/Llama-3.1-70B", {"adapter": {"rank": 16}}, False),
        ("nobody/nothing", {}, False),
    ],
)
def test_published_models_on_a_card_of_80_gb(path: str, changes: dict[str, Any], expected: bool):
    model = {"path": path, "dtype": "bfloat16", "remat": "auto"}
    data = {"train": "rows.jsonl", "max_length": 16_384}
    estimate = estimated(built(model=model, data=data, **changes))
    assert (estimate is not None and estimate <= SHARE * 80e9) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "distill"}, "teacher": {"path": "other"}},
        {"algorithm": {"name": "ppo"}, "reward": {"functions": ["number"]}},
        {"model": {**SFT["model"], "remat": "offload"}},
    ],
)
def test_what_arithmetic_does_not_know_is_planned(changes: dict[str, Any]):
    assert estimated(built()) is not None
    assert estimated(built(**changes)) is None
