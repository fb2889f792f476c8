"""Weights on servers: they are handed over, shown to be there, and servers that cannot have them are refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_vllm import FakeVLLM
from tests.rollout.servers.conftest import PROMPTS, WARM, Policy, scored
from tests.tiny_runs import model_folder
from tunix.errors import UserError
from tunix.rollout.servers.handover import Handover
from tunix.rollout.servers.sampler import ServerSampler


def test_each_publication_is_a_folder_that_servers_load_and_old_ones_go(policy: Policy, start: Any, tmp_path: Path):
    sampler, fakes = start(2)
    for version in range(3):
        weights = policy.moved(0.01 * version)
        sampler.publish(weights, version)
        ((one,),) = sampler.sample(PROMPTS[:1], 1, WARM, 5)
        np.testing.assert_allclose(one.logprobs, scored(policy, PROMPTS[0], one, weights), atol=1e-5)
        assert one.versions.tolist() == [version] * 8
        left = [path.name for path in (tmp_path / "weights").iterdir()]
        assert left == [fakes[0].loads[-1]]
    assert fakes[0].loads == fakes[1].loads
    assert len(fakes[0].loads) == 3
    assert not fakes[0].paused


def test_a_server_that_keeps_earlier_weights_is_found_out_however_small_the_update(
    policy: Policy, start: Any, caplog: pytest.LogCaptureFixture
):
    sampler, fakes = start(2, tolerance=2.0)
    sampler.publish(policy.params, 0)
    fakes[1].manners.stale = True
    with caplog.at_level(logging.WARNING):
        sampler.publish(policy.moved(1e-5), 1)
    assert sampler.pool.servers[0].reason is None
    assert "still has the earlier ones" in str(sampler.pool.servers[1].reason)
    assert "still has the earlier ones" in caplog.text
    sampler.publish(policy.moved(1e-5), 2)  # these do not differ from those before
    assert sampler.pool.servers[0].reason is None


def test_a_server_that_loads_only_a_part_is_found_out_below_the_gate(policy: Policy, start: Any):
    sampler, (fake,) = start(tolerance=2.0)
    sampler.publish(policy.params, 0)
    fake.manners.partial = True
    with pytest.raises(UserError, match="it has not loaded all of the new ones"):
        sampler.publish(policy.moved(0.01), 1)


def test_equal_weights_under_another_version_are_no_lie(policy: Policy, start: Any):
    sampler, _ = start()
    for version in range(2):
        sampler.publish(policy.params, version)
    assert sampler.sample(PROMPTS[:1], 1, WARM, 5)[0][0].versions[0] == 1


def test_a_server_that_a_killed_run_has_left_paused_goes_on(policy: Policy, start: Any):
    sampler, (fake,) = start(timeout=20.0)
    fake.service.batches.pause()
    sampler.publish(policy.params, 0)
    assert sampler.sample(PROMPTS[:1], 1, WARM, 5)[0][0].finish == "length"


def _other_model(fake: FakeVLLM, policy: Policy) -> None:
    fake.service.publish(policy.moved(0.3))
    fake.manners.stale = True


FAULTS: dict[str, tuple[Callable[[FakeVLLM, Policy], None], str]] = {
    "ids": (lambda fake, _: setattr(fake.manners, "keeps_ids", True), "returns text and no token ids"),
    "raw": (lambda fake, _: setattr(fake.manners, "raw", True), "--logprobs-mode processed_logprobs"),
    "model": (_other_model, "log-probs of a probe differ"),
    "offset": (lambda fake, _: setattr(fake.manners, "offset", -0.5), "log-probs of a probe differ"),
    "tokens": (lambda fake, _: setattr(fake.manners, "odd_tokens", True), "another tokenizer"),
    "length": (lambda fake, _: setattr(fake.service, "length", 32), "--max-model-len 64"),
    "gone": (lambda fake, _: setattr(fake, "gone", True), "the engine is dead"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_does_not_fit_is_refused_at_the_start(policy: Policy, start: Any, fault: str):
    fake = FakeVLLM(policy.folder)
    FAULTS[fault][0](fake, policy)
    sampler, _ = start(fakes=[FakeVLLM(policy.folder), fake])
    with pytest.raises(UserError, match=r"rollout\.servers: ") as caught:
        sampler.publish(policy.params, 0)
    assert FAULTS[fault][1] in str(caught.value)
    assert sampler.pool.servers[1].url in str(caught.value)


def test_a_server_with_a_smaller_vocabulary_is_refused(policy: Policy, start: Any):
    sampler, _ = start(vocab_size=policy.model.config.vocab_size + 8)
    with pytest.raises(UserError, match="another vocabulary"):
        sampler.publish(policy.params, 0)


def test_a_server_with_another_structure_is_refused(policy: Policy, start: Any, tmp_path: Path):
    other = model_folder(tmp_path / "other", hidden_size=48)
    sampler, _ = start(fakes=[FakeVLLM(other)])
    with pytest.raises(UserError, match="a model of the same structure"):
        sampler.publish(policy.params, 0)


def test_an_address_where_nothing_listens(policy: Policy, start: Any, tmp_path: Path):
    sampler, _ = start()
    handover = Handover(tmp_path / "w", policy.write, adapter=False)
    missing = ServerSampler(["http://127.0.0.1:9"], 5.0, handover, sampler._probe)
    with pytest.raises(UserError, match=r"rollout\.servers: http://127.0.0.1:9: .*ConnectError"):
        missing.publish(policy.params, 0)


def test_sampling_before_weights_is_a_mistake_of_ours(policy: Policy, start: Any):
    sampler, _ = start()
    with pytest.raises(ValueError, match="publish"):
        sampler.sample(PROMPTS, 1, WARM, 0)
