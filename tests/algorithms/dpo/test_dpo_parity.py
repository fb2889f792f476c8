"""DPO's loss and its gradients of all weights against transformers on torch, the equations written out anew."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import CASES, by_hf_name, load, one_device, randomise, reference_folder
from tests.trainers import local_client
from tunix.algorithms.dpo.algorithm import DPO
from tunix.algorithms.dpo.config import DPOConfig
from tunix.data.packing import pack
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.microbatches import Microbatcher, TrainerSpec
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.types import Sequence

pytestmark = pytest.mark.models

BETA = 0.3


def pairs(vocab: int = 96) -> list[Sequence]:
    """Three pairs with prompts of 3 to 9 tokens and sides of 2 to 8."""
    rng = np.random.default_rng(0)

    def one() -> list[Sequence]:
        prompt = rng.integers(3, vocab, int(rng.integers(3, 10)))
        sides = [np.concatenate([prompt, rng.integers(3, vocab, int(rng.integers(2, 9)))]) for _ in range(2)]
        return [Sequence(x.astype(np.int32), np.arange(len(x)) >= len(prompt)) for x in sides]

    return [side for _ in range(3) for side in one()]


def logprob(model: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
    """`log p(completion | prompt)`."""
    ids = torch.from_numpy(sequence.tokens).long()
    logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
    taken = logits.gather(1, ids[1:, None])[:, 0]
    return taken[torch.from_numpy(sequence.loss_mask[1:])].sum()


def test_loss_and_gradients_equal_torch(tmp_path):
    reference = reference_folder(CASES["llama-grouped-tied"], tmp_path / "reference")
    policy = AutoModelForCausalLM.from_pretrained(
        tmp_path / "reference", dtype=torch.float32, attn_implementation="eager"
    )
    randomise(policy, seed=1)
    policy.save_pretrained(tmp_path / "policy")
    sequences = pairs()
    gaps = []
    for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True):
        with torch.no_grad():
            base = logprob(reference, chosen) - logprob(reference, rejected)
        gaps.append(BETA * (logprob(policy, chosen) - logprob(policy, rejected) - base))
    loss = -torch.nn.functional.logsigmoid(torch.stack(gaps)).mean()
    loss.backward()

    model, start = load(tmp_path / "reference")
    _, params = load(tmp_path / "policy")
    config = OptimizerConfig(learning_rate=1.0, schedule="constant")
    mesh, axes = one_device(), {name: model.axes[name] for name in start}
    made = (build_optimizer(config, 1, axes), build_schedule(config, 1), Microbatcher(1, mesh))
    trainer = local_client(TrainerSpec(model, mesh, *made, length=40, seed=0), start, {}, reference=True)
    trainer.learner.state = replace(trainer.state, params=params)
    batch = pack(sequences, 6, 40, sequences_per_example=2)
    metrics = trainer.forward_backward(batch, DPO(DPOConfig(beta=BETA)).objective)
    assert float(metrics["train/loss"]) == pytest.approx(loss.item(), rel=1e-4)
    assert float(metrics["rewards/margin"]) == pytest.approx(torch.stack(gaps).mean().item(), rel=1e-4)
    assert trainer.learner.gradients is not None
    ours = by_hf_name(model, trainer.learner.gradients)
    theirs = {name: weight.grad.numpy() for name, weight in policy.named_parameters()}
    assert ours.keys() == theirs.keys()
    relative = {name: np.linalg.norm(ours[name] - x) / np.linalg.norm(x) for name, x in theirs.items()}
    assert max(relative.values()) < 1e-3, max(relative, key=relative.__getitem__)
