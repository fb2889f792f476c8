"""A small Llama, stand-ins that serve it, and a sampler that asks them."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fake_vllm import LENGTH, FakeVLLM, served
from tests.tiny_runs import model_folder
from tunix.config import MeshConfig
from tunix.hf.model_folder import save_folder
from tunix.hf.source import loaded, pretrained
from tunix.mesh import build_mesh
from tunix.models.model import Model, Params
from tunix.rollout.engine.engine import Engine
from tunix.rollout.servers import server
from tunix.rollout.servers.handover import Handover
from tunix.rollout.servers.probe import TEXT, Probe
from tunix.rollout.servers.protocol import Expected
from tunix.rollout.servers.sampler import ServerSampler
from tunix.trainer.logprobs import Scorer
from tunix.trainer.microbatches import Microbatcher
from tunix.types import Completion, Sampling, Sequence

PROMPTS = [np.arange(5, 5 + n, dtype=np.int32) for n in (3, 7, 4)]
WARM = Sampling(max_tokens=8, temperature=0.7)


@dataclass
class Policy:
    """What a trainer has: a model with weights, and other weights that an update would make of them."""

    folder: Path
    model: Model
    params: Params
    mesh: Any
    text: Callable[..., str]
    ids: tuple[int, ...]

    def moved(self, by: float = 1e-3) -> Params:
        """Weights that differ a little everywhere."""
        return {name: x * (1 + by) for name, x in self.params.items()}

    def write(self, path: Path, params: Any, adapter: bool) -> None:
        assert not adapter
        save_folder(path, self.model.config, params, source=self.folder, dtype=None)


@pytest.fixture(scope="package")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = model_folder(tmp_path_factory.mktemp("model") / "llama")
    source, mesh = pretrained(str(folder)), build_mesh(MeshConfig(), jax.devices()[:1])
    assert source.tokenizer is not None
    ids = tuple(source.tokenizer.encode(TEXT))
    return Policy(folder, *loaded(source, "float32", mesh), mesh, source.tokenizer.decode, ids)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAUSE", 0.01)
    monkeypatch.setattr(server, "HEALTH_EVERY", 0.1)
    monkeypatch.setattr(server, "HEALTH_DEADLINE", 2.0)


@pytest.fixture
def start(policy: Policy, tmp_path: Path) -> Iterator[Callable[..., tuple[ServerSampler, list[FakeVLLM]]]]:
    """Starts some stand-ins, and a sampler that asks them."""
    with ExitStack() as stack:

        def started(
            number: int = 1, timeout: float = 60.0, fakes: list[FakeVLLM] | None = None, **changes: Any
        ) -> tuple[ServerSampler, list[FakeVLLM]]:
            fakes = [FakeVLLM(policy.folder) for _ in range(number)] if fakes is None else fakes
            urls = [stack.enter_context(served(fake)) for fake in fakes]
            return sampler_of(policy, urls, tmp_path / "weights", timeout, **changes), fakes

        yield started


def sampler_of(policy: Policy, urls: List[str], folder: Path, timeout: float = 60.0, **changes: Any) -> ServerSampler:
    """A sampler that asks servers, and hands weights over in a folder."""
    vocab = policy.model.config.vocab_size
    expected = replace(Expected(vocab, LENGTH, policy.ids, 0.7, 1e-4), **changes)
    probe = Probe(policy.model, policy.mesh, LENGTH, expected)
    return ServerSampler(urls, timeout, Handover(folder, policy.write, adapter=False), probe, policy.text)


def engine(policy: Policy, params: Params | None = None) -> Engine:
    own = Engine(policy.model, policy.mesh, slots=1, max_length=LENGTH, decode=policy.text)
    own.publish(policy.params if params is None else params, 0)
    return own


def scored(policy: Policy, prompt: np.ndarray, completion: Completion, params: Params | None = None) -> np.ndarray:
    """The trainer's log-probs of a completion at its temperature."""
    whole = np.concatenate([prompt, completion.tokens])
    row = Sequence(whole, np.arange(len(whole)) > 0)
    scorer = Scorer(policy.model, Microbatcher(1, policy.mesh), LENGTH)
    weights, temperature = policy.params if params is None else params, completion.sampling.temperature
    return scorer.scores("logprobs", weights, [row], temperature=temperature)[0][len(prompt) :]


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [one for group in groups for one in group]
