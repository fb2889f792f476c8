"""QLoRA trains: on every family, in every algorithm, on a mesh, and what it samples is what it computes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.trainers import RICH, sequences, trainer
from tunix.algorithms.dpo.algorithm import DPO
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.ppo.algorithm import PPO
from tunix.algorithms.ppo.config import PPOConfig
from tunix.algorithms.reward.algorithm import RewardModel
from tunix.algorithms.reward.config import RewardModelConfig
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.lora.config import AdapterConfig
from tunix.models.config import is_adapter, is_own
from tunix.models.families.table import FAMILIES
from tunix.models.model import Params
from tunix.models.quantization.formats import is_scale, plain
from tunix.trainer.frozen_model import reference_of
from tunix.trainer.trainer import Trainer
from tunix.types import Sampling, Sequence

pytestmark = pytest.mark.models

QLORA = AdapterConfig(kind="qlora", rank=4, tile=16)
LOSS = SFT(SFTConfig()).objective
# RICH has every switch of the decoder on.
SMALL = {name: family.small for name, family in FAMILIES.items()}
# Experts are not rounded: `tests/trainer/test_expert_load.py` has what is said then.
SHAPES = {"rich": RICH, **{name: replace(c, vocab_size=96) for name, c in SMALL.items() if c.experts is None}}
ALGORITHMS = {
    "sft": SFT(SFTConfig()),
    "dpo": DPO(DPOConfig()),
    "reward": RewardModel(RewardModelConfig()),
    "grpo": GRPO(GRPOConfig(kl=0.1)),
    "ppo": PPO(PPOConfig(critic="shared")),
}
HEADS = {"reward": {"has_scalar_head": True, "has_lm_head": False}, "ppo": {"has_scalar_head": True}}


def batch(seed=0):
    return pack(sequences(6, seed), 6, 24)


@pytest.mark.parametrize("name", slow(SHAPES))
def test_adapters_learn_and_the_base_stays(name):
    ours = trainer(SHAPES[name], adapter=QLORA)
    assert all(is_adapter(key) for key in ours.state.params)
    before = jax.tree.map(np.asarray, ours.learner.frozen)
    losses = []
    for _ in range(8):
        metrics = ours.step(batch(), LOSS)
        losses.append(float(metrics["train/loss"]))
        assert np.isfinite(float(metrics["train/grad_norm"]))
    assert losses[-1] < losses[0] - 0.05
    assert float(metrics["train/grad_norm"]) > 0
    for key, value in before.items():
        np.testing.assert_array_equal(ours.learner.frozen[key], value)


@pytest.mark.parametrize("name", slow(ALGORITHMS))
def test_every_loss_moves_the_adapter_and_the_head_alone(name):
    algorithm = ALGORITHMS[name]
    ours = trainer(adapter=QLORA, rows=6, **HEADS.get(name, {}))
    has_lm_head = ours.learner.spec.model.has_lm_head
    short = sequences(6, longest=11)  # two, and the spare token of a score, fit in a row
    rows = [algorithm.prepare_sequence(row) for row in (rollouts(ours, short) if has_lm_head else short)]
    packed = pack(rows, 6, 24, sequences_per_example=2 if algorithm.config.reads == "pairs" else 1)
    asked = ours.logprobs(rows, of="reference") if has_lm_head else []
    base, before = jax.tree.map(np.asarray, (ours.learner.frozen, ours.state.params))
    assert all(map(is_own, before))
    for _ in range(3):  # B is 0, and so are A's gradients at first; under a head of zeros B's are too
        norm = float(ours.step(packed, algorithm.objective)["train/grad_norm"])
        assert np.isfinite(norm)
        assert norm > 0
    for key, value in base.items():
        np.testing.assert_array_equal(ours.learner.frozen[key], value)
    for key, value in before.items():
        assert np.any(ours.state.params[key] != value), key
    # The reference is the same base with the adapter off.
    for old, new in zip(asked, ours.logprobs(rows, of="reference") if has_lm_head else [], strict=True):
        np.testing.assert_array_equal(new, old)


def rollouts(ours, rows):
    """Sequences with what a loss on rewards reads: the policy's and the reference's log-probs, and random numbers."""
    rng = np.random.default_rng(0)
    columns = {"old_logprobs": ours.logprobs(rows), "reference_logprobs": ours.logprobs(rows, of="reference")}
    for name in ("advantages", "returns", "old_values"):
        columns[name] = [rng.standard_normal(len(row.tokens)).astype(np.float32) for row in rows]
    return [replace(row, per_token={name: x[i] for name, x in columns.items()}) for i, row in enumerate(rows)]


def on_base(client: Trainer, frozen: Params) -> None:
    """Puts another base under a client's adapter, which is its reference too."""
    client.learner.frozen = frozen
    client.learner.reference = reference_of(client.learner.spec, {}, frozen, kept=True)


@pytest.mark.parametrize("kind", ["nf4", *slow(["int8", "int4", "fp8"])])
def test_a_step_is_that_of_lora_on_the_dequantized_base(kind):
    adapter = QLORA.model_copy(update={"base": kind})
    quantized = trainer(RICH, adapter=adapter)
    plainly = trainer(RICH, adapter=AdapterConfig(rank=4))
    base = quantized.learner.frozen
    on_base(plainly, {key: plain(base, key) for key in base if not is_scale(key)})
    for ours, theirs in zip(quantized.state.params.values(), plainly.state.params.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)  # both start alike
    for _ in range(3):
        mine, other = (float(one.step(batch(), LOSS)["train/loss"]) for one in (quantized, plainly))
        assert mine == pytest.approx(other, abs=1e-5)
    ones = sequences(4, seed=3)
    for of in ("policy", "reference"):
        for ours, theirs in zip(quantized.logprobs(ones, of=of), plainly.logprobs(ones, of=of), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    "mesh", slow([MeshConfig(), MeshConfig(fsdp=2, tensor=4), MeshConfig(data=2, fsdp=2, tensor=2)])
)
def test_a_mesh_changes_nothing(mesh):
    one, many = trainer(adapter=QLORA, rows=8), trainer(adapter=QLORA, devices=8, mesh=mesh, rows=8)
    gate, scales = (many.learner.frozen[name].sharding.spec for name in ("layers/gate/w", "layers/gate/w_scale"))
    assert gate[2] == scales[2]  # the outputs of both live together
    for key, value in one.learner.frozen.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(many.learner.frozen[key]))
    for seed in range(3):
        rows = pack(sequences(12, seed), 12, 24)
        ours, theirs = (float(each.step(rows, LOSS)["train/loss"]) for each in (one, many))
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("name", slow(["rich", "llama", "gemma3", "qwen2"]))
def test_what_is_sampled_is_what_is_trained(name):
    ours = trainer(SHAPES[name], adapter=QLORA, length=24)
    for _ in range(3):
        ours.step(batch(), LOSS)
    ours.publish()
    prompts = [s.tokens[:5] for s in sequences(3, seed=5)]
    greedy = [found[0] for found in ours.sample(prompts, 1, Sampling(max_tokens=12, temperature=0.0), seed=0)]
    drawn = [found[0] for found in ours.sample(prompts, 1, Sampling(max_tokens=12, temperature=1.0), seed=0)]
    assert_same_as_full_forward(ours, prompts, drawn)

    dequantized = trainer(SHAPES[name], adapter=AdapterConfig(rank=4), length=24)
    base = ours.learner.frozen
    on_base(dequantized, {key: plain(base, key) for key in base if not is_scale(key)})
    dequantized.state = replace(dequantized.state, params=jax.tree.map(jnp.copy, ours.state.params))
    dequantized.publish()
    plainly = [found[0] for found in dequantized.sample(prompts, 1, Sampling(max_tokens=12, temperature=0.0), seed=0)]
    for a, b in zip(greedy, plainly, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


def assert_same_as_full_forward(ours, prompts, drawn, atol=1e-4):
    """The sampler's log-probs beside the trainer's."""
    whole = [
        Sequence(np.concatenate([prompt, found.tokens]), np.arange(len(prompt) + len(found.tokens)) >= len(prompt))
        for prompt, found in zip(prompts, drawn, strict=True)
    ]
    for prompt, found, logprobs in zip(prompts, drawn, ours.logprobs(whole), strict=True):
        np.testing.assert_allclose(found.logprobs, logprobs[len(prompt) :], atol=atol)


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_alone(tmp_path):
    ours = trainer(adapter=QLORA)
    ours.step(batch(), LOSS)
    ours.save(tmp_path / "state").result()
    held = ours.state.params
    other = trainer(adapter=QLORA, seed=1)
    other.load(tmp_path / "state")
    assert set(other.state.params) == set(held) == {key for key in held if is_adapter(key)}
    for key, value in held.items():
        np.testing.assert_array_equal(other.state.params[key], value)
