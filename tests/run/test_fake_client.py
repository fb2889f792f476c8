"""A client of thirty lines, with no model behind it, is all that the algorithms and a run's loop need."""

from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers import PLAIN
from tunix.algorithms.base import Algorithm
from tunix.algorithms.stream import rollouts
from tunix.data.packing import pack
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import Accounting, Packed
from tunix.protocols import Client
from tunix.recipe.algorithms import ALGORITHMS, algorithm_class
from tunix.rollout.rewards.base import Reward
from tunix.run import loop as loop_file
from tunix.run.evaluation import Evaluation, Samples
from tunix.run.loop import Job, Loop
from tunix.run.recorder import Recorder
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.config import CheckpointConfig, LoggingConfig
from tunix.trainer.perf import Work
from tunix.trainer.progress import Display
from tunix.types import Batch, Compared, Completion, Loss, LossInputs, Sampling, Sequence
from tunix.util.atomic_io import read_rows


class FakeClient(Client):
    """Samples random tokens, gives every token the log-prob -1, and computes losses of that without any gradient."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def run(self, requests, reply=None, on_done=None):
        self.calls.append("sample")
        rng, ones = np.random.default_rng(requests[0].seed), np.ones(4)
        made = lambda sampling: Completion(  # noqa: E731
            rng.integers(3, 90, 4).astype(np.int32), -ones, "stop", ones.astype(np.int32), sampling, ((0, 4),)
        )
        return [made(request.sampling) for request in requests]

    def logprobs(self, sequences, of="policy", temperature=1.0, size=None):
        self.calls.append(f"logprobs of {of}")
        return [-np.ones(len(one.tokens), np.float32) for one in sequences]

    def values(self, sequences, size=None):
        return self.logprobs(sequences, "values")

    def step(self, batch, loss, of="policy"):
        self.calls.append(f"step of {of}")
        return {"train/loss": self._loss(batch, loss), "train/grad_norm": 1.0}

    def evaluate(self, batches, loss):
        return {"eval/loss": float(np.mean([self._loss(batch, loss) for batch in batches]))}

    def publish(self):
        self.calls.append("publish")
        return 1

    def save(self, path):
        path.mkdir()
        return self

    def result(self): ...

    def load(self, path):
        assert path.is_dir()

    def _loss(self, batch: Batch, loss: Loss) -> float:
        x = jnp.where(batch.loss_mask, -1.0, 0.0)
        compared = Compared(-x, x, -x) if loss.divergence else None
        inputs = LossInputs(batch, x, x if loss.entropy else None, x if loss.values else None, x, compared)
        return float(sum(jnp.nan_to_num(term.values).sum() for term in loss.function(inputs).terms.values()))


SAMPLING = Sampling(max_tokens=4)
ON_POLICY = {
    "grpo": {"kl": 0.1, "group_size": 2},
    "ppo": {"kl": 0.1},
    "dpo": {"online": True, "group_size": 2},
    "distill": {"on_policy": True, "divergence": "sampled"},
}
GIVEN = {"sft": {}, "dpo": {}, "kto": {}, "reward": {}, "distill": {}}


def made(name: str, settings: dict[str, Any]) -> Algorithm:
    return algorithm_class(name)(ALGORITHMS[name][0](**settings), SAMPLING)


def given(number: int) -> Packed:
    """A batch of eight sequences: pairs, and those with a label, are eight as well."""
    rng = np.random.default_rng(number)
    mask = np.arange(8) > 3
    labels = [{"label": float(i % 2)} for i in range(8)]
    listed = tuple(Sequence(rng.integers(3, 90, 8).astype(np.int32), mask, per_sequence=own) for own in labels)
    return Packed(pack(listed, 8, 32, sequences_per_example=2), Accounting(), listed)


@pytest.mark.parametrize("name", GIVEN)
def test_given_sequences(name: str):
    client = FakeClient()
    update = made(name, GIVEN[name]).update(client, given(0))
    assert client.calls[-1] == "step of policy"
    assert np.isfinite(update.metrics["train/loss"])
    assert np.isfinite(made(name, GIVEN[name]).evaluate(client, [given(1)])["eval/loss"])


@pytest.mark.parametrize("name", ON_POLICY)
def test_completions_of_the_policy(name: str):
    client, algorithm = FakeClient(), made(name, ON_POLICY[name])
    rows = [{"prompt_ids": [1, 5, number]} for number in range(8)]
    reward = Reward("tokens", lambda completion, completion_ids: sum(completion_ids) / 100)
    stream = rollouts(algorithm, rows, None, [reward], batch_size=2, max_length=16)
    with closing(stream):
        for _ in range(2):
            update = algorithm.update(client, next(stream))
            assert np.isfinite(update.metrics["train/loss"])
    assert client.calls[:2] == ["publish", "sample"]
    assert client.calls[-1] == "step of policy"


@pytest.mark.parametrize("name", ON_POLICY)
def test_a_queue_may_stand_between_sampling_and_learning(name: str):
    """Two steps are sampled before the first is learned from; nothing is sampled while learning."""
    client, algorithm = FakeClient(), made(name, ON_POLICY[name])
    rows = [{"prompt_ids": [1, 5, number]} for number in range(8)]
    reward = Reward("tokens", lambda completion, completion_ids: sum(completion_ids) / 100)
    with closing(rollouts(algorithm, rows, None, [reward], batch_size=2, max_length=16)) as stream:
        waiting = [algorithm.rollout(client, data) for data in islice(stream, 2)]
        assert "step of policy" not in client.calls
        client.calls.clear()
        updates = [algorithm.learn(client, experience) for experience in waiting]
    assert all(np.isfinite(update.metrics["train/loss"]) for update in updates)
    assert not {"publish", "sample"} & set(client.calls)


def job_in(folder: Path, client: FakeClient, saving: CheckpointConfig, display: Display) -> Job:
    """Four steps of supervised fine-tuning."""
    return Job(
        folder=folder,
        client=client,
        work=Work(PLAIN),
        algorithm=made("sft", {}),
        stream=Listed([given(number) for number in range(4)]),
        total=4,
        evaluation=Evaluation(made("sft", {}), [given(9)]),
        eval_every=2,
        saving=saving,
        samples=Samples([], [], client, None, folder / "samples.jsonl", display),
        exports_adapter=False,
    )


def test_tokens_of_samples_are_written_as_texts(tmp_path: Path):
    """A byte is a token; of `\u00e9` there are two, each half a letter. The given rows stay as they are."""
    tokenizer = bytes_tokenizer("llama3")
    ids = tokenizer.encode("a \u00e9")
    rows = [{"group": 0, "per_token": {"tokens": ids, "trained": [1, 1, 1, 1]}}, {"group": 1}]
    samples = Samples([], [], FakeClient(), tokenizer, tmp_path / "samples.jsonl", Display("run", 4, 0))
    with closing(samples):
        samples.add(3, rows)
    assert read_rows(tmp_path / "samples.jsonl") == [
        {"step": 3, "group": 0, "per_token": {"tokens": ["a", " ", "\ufffd", "\ufffd"], "trained": [1, 1, 1, 1]}},
        {"step": 3, "group": 1},
    ]
    assert rows[0]["per_token"]["tokens"] == ids


def test_a_whole_loop(tmp_path: Path):
    """Steps, evaluations and checkpoints of a run; the second loop goes on from where the first was saved."""
    client, display = FakeClient(), Display("run", 4, 0)
    job = job_in(tmp_path, client, CheckpointConfig(every=2), display)
    with closing(Checkpoints(tmp_path / "checkpoints", CheckpointConfig())) as checkpoints:
        loop = Loop(job, checkpoints, Recorder([], display, LoggingConfig(), Work(PLAIN)), None)
        loop.run()
        assert (loop.finished, checkpoints.steps()) == (True, [2, 4])
        again = Loop(job, checkpoints, Recorder([], display, LoggingConfig(), Work(PLAIN)), 2)
        assert (again.step, job.stream.mark()()) == (2, {"next": 3})
    assert client.calls.count("step of policy") == 4


@pytest.mark.parametrize(
    ("saving", "saved"),
    [
        ({"every": None}, [4]),
        ({"every": 3}, [3, 4]),
        ({"every": None, "every_minutes": 2.5}, [3, 4]),
        ({"every": 2, "every_minutes": 2.5}, [2, 4]),
        ({"every": None, "every_minutes": 0.5}, [1, 2, 3, 4]),
    ],
)
def test_checkpoints_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saving: dict[str, Any], saved: list[int]):
    """Each step takes a minute; the checkpoint after the last step is written in any case."""
    client, display = FakeClient(), Display("run", 4, 0)
    job = job_in(tmp_path, client, CheckpointConfig(keep=9, **saving), display)
    with closing(Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep=9))) as checkpoints:
        loop = Loop(job, checkpoints, Recorder([], display, LoggingConfig(), Work(PLAIN)), None)
        loop._saved_at = 0.0
        monkeypatch.setattr(loop_file, "time", SimpleNamespace(monotonic=lambda: 60.0 * loop.step))
        loop.run()
        assert checkpoints.steps() == saved


class Listed:
    """A stream of a list."""

    def __init__(self, items: list[Packed]):
        self.items, self.next = items, 0

    def __next__(self) -> Packed:
        self.next += 1
        return self.items[self.next - 1]

    def mark(self) -> Callable[[], dict[str, Any]]:
        state = {"next": self.next}
        return lambda: state

    def set_state(self, state) -> None:
        self.next = state["next"]

    def close(self) -> None: ...
