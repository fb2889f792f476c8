"""`python -m benchmarks.remote`: completions of servers beside those of the engine in the trainer, in one run.

The small Llama shape with random weights, 16 x (64 + 64) tokens. Each gets what the trainer hands over, and they take
turns: an update, the hand-over, the sampling. Reported are the seconds of the hand-over, the sampled tokens a second,
and how much the log-probs of trainer and sampler differ; for an adapter and for all weights. The servers are a `tunix
serve` and, where TUNIX_VLLM names the Python of an environment with it (docs/guide/servers.md), a vLLM.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import PYTHON, WHY, ours, real
from benchmarks.shapes import LORA, OPTIMIZER, SHAPES
from tunix.algorithms.sft.algorithm import SFT
from tunix.config import DType, MeshConfig, ModelConfig
from tunix.data.packing import pack
from tunix.data.tokenizer import bytes_tokenizer
from tunix.hf.model_folder import save_folder
from tunix.hf.source import pretrained
from tunix.lora.config import AdapterConfig
from tunix.mesh import build_mesh
from tunix.models.model import Model
from tunix.recipe.sections import Sections
from tunix.rollout.config import RolloutConfig
from tunix.rollout.environments.config import MixtureConfig
from tunix.run.client import client_of
from tunix.run.setup import Setup
from tunix.trainer.trainer import Trainer
from tunix.types import Completion, Loss, LossInputs, LossOutputs, Sampling, Sequence, Term

PROMPTS, PROMPT, NEW = 16, 64, 64
LENGTH = PROMPT + NEW
SAMPLING = Sampling(NEW, temperature=0.8)


class Turn(NamedTuple):
    """What one turn of one engine took."""

    handover: float
    """Seconds from the trainer's weights to an engine that samples from them."""
    sampling: float
    """Seconds of all completions."""
    differences: np.ndarray
    """Absolute differences of the log-probs of the sampled tokens."""


def likelihood(inputs: LossInputs) -> LossOutputs:
    """The loss of an update: any that moves all weights."""
    return LossOutputs({"likelihood": Term(-inputs.logprobs)})


def client_on(folder: Path, dtype: DType, adapter: AdapterConfig | None, rollout: RolloutConfig) -> Trainer:
    """A trainer of the model in a folder, which samples on servers, or itself."""
    recipe = Sections(
        model=ModelConfig(path=str(folder), dtype=dtype),
        adapter=adapter,
        data=MixtureConfig(train="made-up prompts", max_length=LENGTH),
        optimizer=OPTIMIZER,
        rollout=rollout,
        batch_size=PROMPTS,
        micro_batch_size=PROMPTS,
        output=str(folder),
    )
    source = pretrained(str(folder))
    return client_of(Setup(recipe, source, SFT(recipe.algorithm), build_mesh(MeshConfig()), updates=100))


def turn(client: Trainer, prompts: list[np.ndarray], seed: int) -> Turn:
    """One update, its hand-over, and completions of the prompts."""
    mask = np.ones(PROMPT, bool)
    client.step(pack([Sequence(one, mask) for one in prompts], PROMPTS, LENGTH, packing=False), Loss(likelihood))
    jax.block_until_ready(client.learner.params)
    began = time.monotonic()
    client.publish()
    published = time.monotonic()
    groups = client.sample(prompts, 1, SAMPLING, seed)
    ended = time.monotonic()
    return Turn(published - began, ended - published, _differences(client, prompts, [one for (one,) in groups]))


def _differences(client: Trainer, prompts: list[np.ndarray], found: list[Completion]) -> np.ndarray:
    sequences = [
        Sequence(np.concatenate([prompt, one.tokens]), np.arange(PROMPT + len(one.tokens)) >= PROMPT)
        for prompt, one in zip(prompts, found, strict=True)
    ]
    own = client.logprobs(sequences, temperature=SAMPLING.temperature)
    pairs = zip(own, found, strict=True)
    return np.concatenate([np.abs(ours[PROMPT:] - one.logprobs) for ours, one in pairs])


def measured(
    folder: Path, work: Path, urls: Mapping[str, str], dtype: DType, adapter: AdapterConfig | None, turns: int
) -> dict[str, list[Turn]]:
    """The turns of all engines, one after the other; the first of each, which compiles, is left out."""
    clients = {"tunix": client_on(folder, dtype, adapter, RolloutConfig(slots=PROMPTS))}
    for name, url in urls.items():
        rollout = RolloutConfig(
            engine="vllm",
            servers=(url,),
            weights_folder=str(work / name),
            temperature=SAMPLING.temperature,
            mismatch_tolerance=5.0,
        )
        clients[name] = client_on(folder, dtype, adapter, rollout)
    rng = np.random.default_rng(0)
    vocab = clients["tunix"].learner.spec.model.config.vocab_size
    found: dict[str, list[Turn]] = {name: [] for name in clients}
    for number in range(turns + 1):
        prompts = [rng.integers(0, vocab, PROMPT).astype(np.int32) for _ in range(PROMPTS)]
        for name, client in clients.items():
            found[name].append(turn(client, prompts, number))
    return {name: each[1:] for name, each in found.items()}


def row(turns: list[Turn]) -> tuple[str, ...]:
    """The figures of an engine: medians, and the lowest and the highest."""

    def spread(values: Callable[[Turn], float], digits: str) -> str:
        each = [values(one) for one in turns]
        return f"{statistics.median(each):{digits}} ({min(each):{digits}} to {max(each):{digits}})"

    off = np.concatenate([one.differences for one in turns])
    return (
        spread(lambda one: one.handover, ".3f"),
        spread(lambda one: len(one.differences) / one.sampling, ".0f"),
        f"{off.mean():.2e}",
        f"{off.max():.2e}",
    )


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--turns", type=int, default=5)
    words: Any = parser.parse_args()
    if PYTHON is None:
        print(f"no vLLM: {WHY}", file=sys.stderr)
    table = Table("handed over", "engine", "hand-over s", "tokens/s", "mismatch, mean", "max")
    with tempfile.TemporaryDirectory() as place:
        work, config = Path(place), SHAPES["small"].config
        model, mesh = Model(config, dtype=words.dtype), build_mesh(MeshConfig())
        params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), mesh)
        save_folder(work / "model", config, params, source=None, dtype=words.dtype)
        bytes_tokenizer("llama3").save(work / "model")
        size: dict[str, Any] = {"length": LENGTH, "dtype": words.dtype}
        lora = ("--enable-lora", "--max-lora-rank", str(LORA.rank))
        with ExitStack() as stack:
            slots = ("--enable-lora", "--slots", str(PROMPTS))
            urls = {"tunix serve": stack.enter_context(ours(work / "model", work / "log.tunix", *slots, **size))}
            if PYTHON is not None:
                urls["vLLM"] = stack.enter_context(real(work / "model", work / "log.vllm", *lora, **size))
            for what, adapter in (("adapter", LORA), ("all weights", None)):
                found = measured(work / "model", work / "weights", urls, words.dtype, adapter, words.turns)
                for name, turns in found.items():
                    table.add_row(what, name, *row(turns))
    Console(width=120).print(f"{words.dtype}, small, {PROMPTS} x ({PROMPT} + {NEW}) tokens", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
