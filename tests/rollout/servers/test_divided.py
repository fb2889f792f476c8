"""Several processes that sample on the same servers, pretended by threads.

Weights are written and loaded once, all know of the same servers, and where something fails all say the same.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.pretended import pretended
from tests.fake_vllm import FakeVLLM, served
from tests.rollout.servers.conftest import PROMPTS, WARM, Policy, sampler_of
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.hf import safetensors_io
from tunix.rollout.collect import shard
from tunix.rollout.servers.sampler import ServerSampler
from tunix.types import Completion, Request

NUMBER = 2
"""Processes that are pretended."""


class Servers:
    """Stand-ins, and a sampler of each process that asks them."""

    def __init__(self, policy: Policy, folder: Path, stack: ExitStack):
        self.policy, self.folder = policy, folder
        self.fakes = [FakeVLLM(policy.folder) for _ in range(2)]
        self.urls = [stack.enter_context(served(fake)) for fake in self.fakes]

    def sampler(self, **changes: Any) -> ServerSampler:
        """The sampler of this process; each would write to a folder of its own."""
        return sampler_of(self.policy, self.urls, self.folder / f"weights{processes.index()}", **changes)


@pytest.fixture
def servers(policy: Policy, tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(policy, tmp_path, stack)


def sampled(sampler: ServerSampler) -> list[Completion]:
    """What this process samples of its share of the prompts, two completions each."""
    places = shard(range(len(PROMPTS)))
    requests = [Request(PROMPTS[place], WARM, 7, 2 * place + i) for place in places for i in range(2)]
    return sampler.run(requests) if places else []


def error_of(act: Callable[[], Any]) -> str:
    """The message of the error that something raises."""
    with pytest.raises(UserError) as caught:
        act()
    return str(caught.value)


@pytest.mark.slow
def test_weights_are_written_and_loaded_once_and_draws_are_those_of_one_process(
    policy: Policy, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights = [policy.moved(0.01 * version) for version in range(3)]

    def act(_: int) -> list[Completion]:
        sampler, found = servers.sampler(), []
        for version in range(3):
            sampler.publish(weights[version], version)
            found += sampled(sampler)
        return found

    alone = act(0)
    names, last = [set(fake.asked) for fake in servers.fakes], servers.fakes[0].loads[-1]
    assert (tmp_path / "weights0").is_dir()
    for fake in servers.fakes:
        fake.loads.clear()
        fake.asked.clear()
        fake.restart(policy.folder)
    (first, second), _ = pretended(monkeypatch, NUMBER, act)
    # One process has prompts 0, 1 and 2 at each of three versions; of two the first has 0 and 2.
    order = [first[0:2], second[0:2], first[2:4], first[4:6], second[2:4], first[6:8]]
    order += [first[8:10], second[4:6], first[10:12]]
    for one, other in zip(alone, (x for group in order for x in group), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.versions.tolist() == other.versions.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    for fake in servers.fakes:
        assert [name.rpartition("-")[2] for name in fake.loads] == ["0", "1", "2"]
        assert all(count == 1 for count in fake.asked.values())
    again = [set(fake.asked) for fake in servers.fakes]
    assert not again[0] & again[1]
    assert len(again[0] | again[1]) == len(names[0] | names[1]) == 3 * 6
    # Only the lead writes, and the last folder of either stays.
    left = {path.name for path in (tmp_path / "weights0").iterdir()}
    assert left == {last, servers.fakes[0].loads[-1]}
    assert not (tmp_path / "weights1").exists()


@pytest.mark.slow
def test_a_server_that_one_process_asks_no_more_is_looked_at_again_for_all(
    policy: Policy, servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The second process cannot reach the first server for a while; meanwhile it was started anew."""
    reasons: list[list[Any]] = []

    def act(index: int) -> list[str]:
        sampler = servers.sampler()
        sampler.publish(policy.params, 0)
        processes.barrier("published")
        if index == 1:
            sampler.pool.drain(sampler.pool.servers[0], "there is no way")
            servers.fakes[0].restart(policy.folder)
        reasons.append([server.reason for server in sampler.pool.servers])
        processes.barrier("drained")
        sampler.publish(policy.moved(0.01), 1)
        assert [server.reason for server in sampler.pool.servers] == [None, None]
        assert sampler.pool.servers[0].base == servers.fakes[0].name
        sampled(sampler)
        return [server.model for server in sampler.pool.servers]

    with caplog.at_level(logging.WARNING):
        found, _ = pretended(monkeypatch, NUMBER, act)
    assert found[0] == found[1] == [servers.fakes[0].name, servers.fakes[1].name]
    assert sorted(reasons, key=str) == [["there is no way", None], [None, None]]
    assert caplog.text.count(f"{servers.urls[0]} is asked again") == NUMBER


@pytest.mark.slow
def test_one_that_lies_is_drained_by_all_and_where_none_is_left_all_say_so(
    policy: Policy, servers: Servers, monkeypatch: pytest.MonkeyPatch
):
    def act(index: int) -> tuple[list[Any], str]:
        sampler = servers.sampler()
        sampler.publish(policy.params, 0)
        processes.barrier("published")
        servers.fakes[1].manners.stale = True
        sampler.publish(policy.moved(0.01), 1)
        reasons = [server.reason for server in sampler.pool.servers]
        sampled(sampler)
        processes.barrier("sampled")
        for fake in servers.fakes:
            fake.gone = True
        # What one of them alone has found is what all of them say.
        if index == 1:
            sampler.pool.drain(sampler.pool.servers[0], "its own reason")
        return reasons, error_of(lambda: sampler.publish(policy.moved(0.02), 2))

    ((ours, said), (theirs, heard)), _ = pretended(monkeypatch, NUMBER, act)
    assert ours == theirs
    assert ours[0] is None
    assert "still has the earlier ones" in ours[1]
    assert said == heard
    assert said.startswith("rollout.servers: no server is left")
    assert "its own reason" in said
    assert "still has the earlier ones" in said


@pytest.mark.slow
def test_one_that_does_not_fit_is_refused_by_all(policy: Policy, servers: Servers, monkeypatch: pytest.MonkeyPatch):
    for manner, says in (("odd_tokens", "another tokenizer"), ("offset", "log-probs of a probe differ")):
        setattr(servers.fakes[1].manners, manner, -0.5 if manner == "offset" else True)
        act = lambda _: error_of(lambda: servers.sampler().publish(policy.params, 0))  # noqa: E731
        (one, other), _ = pretended(monkeypatch, NUMBER, act)
        assert one == other
        assert one.startswith(f"rollout.servers: {servers.urls[1]}: ")
        assert says in one
        setattr(servers.fakes[1].manners, manner, 0.0 if manner == "offset" else False)
        monkeypatch.undo()


@pytest.mark.parametrize("at", ["the folder", "config.json", "a tensor"])
def test_where_the_disk_refuses_all_say_so_and_nothing_is_left(
    policy: Policy, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
):
    """The lead's disk is full: before the folder, at its first file, or in the middle of the weights."""

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if at == "the folder":
        (tmp_path / "weights0").write_text("a file where a folder has to be")
    elif at == "config.json":
        monkeypatch.setattr("tunix.hf.model_folder.write_beside", refuse)
    else:
        monkeypatch.setattr(safetensors_io.np, "ascontiguousarray", refuse)
    act = lambda _: error_of(lambda: servers.sampler().publish(policy.params, 0))  # noqa: E731
    (one, other), _ = pretended(monkeypatch, NUMBER, act)
    assert one == other
    assert one.startswith(f"could not write {tmp_path / 'weights0'}")
    assert ("No space left on device" in one) or at == "the folder"
    assert not (tmp_path / "weights0").is_dir() or not list((tmp_path / "weights0").iterdir())
    assert not any(fake.loads for fake in servers.fakes)
