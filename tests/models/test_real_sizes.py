"""Published sizes with random bfloat16 weights are built and take steps on a machine with 24 GB and no accelerator.

Each in a process of its own, `python -m tests.models.test_real_sizes NAME`: what a process has taken at most is what is
looked at, and one that has held another model before gives its memory back late.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers import trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.data.packing import pack
from tunix.models.families.table import preset
from tunix.trainer.config import OptimizerConfig
from tunix.types import Sequence

pytestmark = pytest.mark.models

# Parameters as the model cards count them, with the embedding once where it is tied.
SIZES = {"qwen3-0.6b": 0.596e9, "gemma3-1b": 1.000e9, "llama3.2-1b": 1.236e9}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_published_size_learns_a_row_by_heart(name: str):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-m", __name__, name], env=env, check=True)


def learn_by_heart(name: str) -> None:
    """Three steps on one row."""
    config = preset(name)
    # Moments in float32, the default, take 8 bytes a weight, and a step of 1.2B then more than 24 GB.
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", b2=0.99, moments_dtype="bfloat16")
    client = trainer(config, length=64, optimizer=optimizer, dtype="bfloat16", param_dtype="bfloat16", rows=1)
    params = client.state.params
    assert sum(x.size for x in params.values()) == pytest.approx(SIZES[name], rel=2e-3)
    assert {x.dtype for x in params.values()} == {jnp.dtype(jnp.bfloat16)}
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 64).astype(np.int32)
    batch = pack([Sequence(ids, np.ones(64, bool))], 1, 64)
    loss = SFT(SFTConfig()).objective
    losses = [float(client.step(batch, loss)["train/loss"]) for _ in range(3)]
    # Random weights know nothing: somewhat above log(vocabulary), by the spread of their logits.
    uniform = np.log(config.vocab_size)
    assert uniform - 1 < losses[0] < uniform + 3
    assert losses[2] < losses[1] < losses[0]
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(client.state.params))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 20e9


if __name__ == "__main__":
    learn_by_heart(sys.argv[1])
