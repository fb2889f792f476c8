"""MaxText's own code in a process of its own, which has nothing of tunix: writes checkpoints, loads them, gives logits.

    python maxtext_program.py JOBS.json

Each job: `settings` as on MaxText's command line, `tokens` (one row), `logits` (.npy to write). With `save` a random
model is made and its checkpoint written to that folder; without, the settings name one to load.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}  # the first is MaxText's own: no Google Cloud

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.common import checkpointing
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils

EXACT = ["dtype=float32", "matmul_precision=highest", "attention=dot_product"]
ALONE = ["run_name=test", "skip_jax_distributed_system=true", "per_device_batch_size=1"]
BASE = Path(maxtext.__path__[0]) / "configs" / "base.yml"


def main() -> None:
    """Runs the jobs of a file one after the other."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        length = f"max_target_length={len(job['tokens'])}"
        config = pyconfig.initialize(["", str(BASE), *EXACT, *ALONE, length, *job["settings"]])
        mesh = maxtext_utils.get_mesh_from_config(config)
        with jax.set_mesh(mesh):
            model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))
            if "save" in job:
                save(randomised(model), job["save"], config)
            else:
                load(model, config)
            np.save(job["logits"], logits(model, job["tokens"]))


def randomised(model: Any) -> Any:
    """A model whose norms and biases are no longer all alike; in numbers that bfloat16 has, which MaxText makes of the
    embedding where it is the head."""
    rng = np.random.default_rng(0)

    def moved(array: jax.Array) -> jax.Array:
        return jnp.asarray(array + 0.1 * rng.standard_normal(array.shape), jnp.bfloat16).astype(array.dtype)

    nnx.update(model, jax.tree.map(moved, nnx.state(model, nnx.Param)))
    return model


def load(model: Any, config: Any) -> None:
    """Reads a checkpoint into a model as training does; and as decoding and post-training do, which gives the same."""
    weights = nnx.state(model, nnx.Param)
    checkpointing.load_params_from_path(config.load_parameters_path, weights, config.checkpoint_storage_concurrent_gb)
    nnx.update(model, weights)
    other = nnx.state(model_creation_utils.from_pretrained(config, mesh=model.mesh), nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, weights.to_pure_dict(), other.to_pure_dict())


def save(model: Any, folder: str, config: Any) -> None:
    """Writes a step as training does where layers are scanned, and parameters alone otherwise."""
    if not config.scan_layers:
        checkpointing.save_params_to_path(folder, {"params": nnx.state(model, nnx.Param).to_pure_dict()})
        return
    manager = checkpointing.create_orbax_checkpoint_manager(folder, True, False, 1)
    checkpointing.save_checkpoint(manager, 0, TrainStateNNX(model, None), config=config, force=True)
    checkpointing.wait_until_finished(manager)


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits of one row, `[T V]`."""
    row = jnp.asarray([tokens], jnp.int32)
    places = jnp.arange(len(tokens))[None]
    return np.asarray(model(row, places, decoder_segment_ids=jnp.ones_like(row), enable_dropout=False)[0])


if __name__ == "__main__":
    main()
