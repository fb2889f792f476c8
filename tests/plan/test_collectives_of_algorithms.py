"""What eight devices send each other in a step of each algorithm, read from the compiled program, against arithmetic.

Each matrix of a layer is gathered for the forward pass and again for the backward one, which multiplies by it, and its
gradient is summed once. XLA's CPU compiler sums by all-reduce where a GPU's scatters the sum, and each device then cuts
its part from it.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.programs import Account, account
from tests.trainers import PLAIN, sequences, trainer
from tunix.algorithms.kto.loss import BASELINE
from tunix.config import MeshConfig
from tunix.data.packing import LABEL, pack
from tunix.models import token_logprobs as blocks
from tunix.recipe.algorithms import ALGORITHMS, algorithm_class
from tunix.trainer.frozen_model import Teacher
from tunix.trainer.learner import Learner
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.trainer import Trainer
from tunix.types import Batch, Loss

ROWS, LENGTH = 8, 32
CONFIG = replace(PLAIN, vocab_size=512)
CRITIC = "ppo's critic"
NAMED = ("old_logprobs", "sampler_logprobs", "advantages", "returns", "old_values")
"""What losses read of each token of a rollout."""


def client_for(name: str) -> Trainer:
    """On eight devices, with what the algorithm's loss reads: a reference, a value head, a teacher."""
    heads = {"has_scalar_head": name in ("ppo", "reward", CRITIC), "has_lm_head": name not in ("reward", CRITIC)}
    client = trainer(CONFIG, devices=8, mesh=MeshConfig(fsdp=8), rows=ROWS, length=LENGTH, reference=True, **heads)
    spec = client.learner.spec
    client.learner.teacher = Teacher(
        spec.model, Microbatcher(ROWS, spec.mesh), LENGTH, client.learner.params, spec.mesh
    )
    return client


def batch_for(name: str) -> Batch:
    """Eight full rows, one to a device."""
    pairs, noise = name in ("dpo", "reward"), np.random.default_rng(0)
    made = [
        replace(
            one,
            per_token={key: noise.normal(size=len(one.tokens)).astype(np.float32) for key in NAMED},
            per_sequence={LABEL: 1.0, BASELINE: 0.1} if name == "kto" else {},
        )
        for one in sequences(2 * ROWS, longest=LENGTH // 2, vocab=CONFIG.vocab_size)
    ]
    return pack(made, len(made), LENGTH, True, sequences_per_example=1 + pairs, multiple=ROWS)


def objective_of(name: str) -> Loss:
    """The loss of an algorithm as it is configured by default."""
    known = name.partition("'")[0]
    algorithm = algorithm_class(known)(ALGORITHMS[known][0]())
    return algorithm.value_objective if name == CRITIC else algorithm.objective


def compiled(learner: Learner, batch: Batch, loss: Loss) -> Account:
    """What the step costs that the learner runs for this batch."""
    return account(learner.lowered(batch, loss).compile().as_text())


@pytest.fixture(autouse=True)
def several_blocks_and_chunks(monkeypatch: pytest.MonkeyPatch):
    """Eight blocks of four tokens, and a chunk for every 128 ids."""
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(blocks, "CHUNK_LOGITS", 4 * 128)


def matrices(client: Trainer) -> int:
    """Bytes of the matrices of all layers."""
    shapes = client.learner.spec.model.shapes
    return sum(4 * math.prod(x) for name, x in shapes.items() if name.startswith("layers/") and len(x) > 2)


# How often each matrix of a layer is gathered in a pass, and how many tables of heads in a step.
CASES = {"sft": (2, 1), "dpo": (3, 2), "kto": (3, 2), "grpo": (2, 1), "ppo": (2, 1), CRITIC: (2, 0), "reward": (2, 0)}
CASES |= {"distill": (2, 2)}
SMALLEST = 4 * CONFIG.d_model * CONFIG.num_kv_heads * CONFIG.head_dim * 7 // 8
"""Bytes sent of the smallest matrix; collectives of numbers of tokens, sequences or norms are smaller."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_matrices_are_gathered_and_their_gradients_summed_once_in_each_pass(name: str):
    client, batch = client_for(name), batch_for(name)
    found = compiled(client.learner, batch, objective_of(name))
    gathered, tables = CASES[name]
    passes = len(client.learner.spec.microbatcher.place(batch).rows["tokens"])
    table, ring = 4 * CONFIG.vocab_size * CONFIG.d_model, 7 / 8
    # Within the loops over passes and layers; a table of a head before them, its gradient at the end of each pass.
    expected = {
        ("all-gather", 2): passes * gathered * ring * matrices(client),
        ("all-gather", 0): tables * ring * table,
        ("all-reduce", 2): passes * 2 * ring * matrices(client),
        ("all-reduce", 1): passes * 2 * ring * table * min(tables, 1),
        # Each device has some columns of the embedding, and sends each other one those of its tokens; gradients back.
        ("all-to-all", 1): passes * gathered * ring * 4 * LENGTH * CONFIG.d_model,
    }
    sent: dict[tuple[str, int], float] = dict.fromkeys(expected, 0.0)
    for one in found.collectives:
        if one.bytes >= SMALLEST:
            sent[one.kind, one.loops] = sent.get((one.kind, one.loops), 0.0) + one.bytes * one.times
    assert {where: pytest.approx(amount, abs=1.1 * SMALLEST) for where, amount in expected.items()} == sent
    assert [one for one in found.collectives if one.scope.count("usually_") > 1] == []  # the head's loops
