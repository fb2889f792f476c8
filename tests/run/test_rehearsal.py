"""What a run compiles before its first rollout is what its first update runs: nothing twice, nothing left."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.marks import slow
from tests.run.test_ahead_run import APART
from tests.tiny_rl import write_policy
from tests.tiny_runs import train
from tunix.run import build
from tunix.run.rehearsal import compiled_ahead
from tunix.run.setup import Setup
from tunix.trainer.trainer import Trainer

UPDATES = ("step", "compute_logprobs", "compute_values")
"""The functions of updates that are compiled, by name."""
GRPO = {"name": "grpo", "group_size": 4}


def compiled(records: list[logging.LogRecord]) -> Counter[str]:
    """How often each of UPDATES was compiled."""
    names = (re.match(r"Finished XLA compilation of jit\((\w+)\)", record.getMessage()) for record in records)
    return Counter(name[1] for name in names if name is not None and name[1] in UPDATES)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[list[Counter[str]]]:
    """The counts when programs have been compiled ahead, of each run."""
    counts: list[Counter[str]] = []

    def counting(setup: Setup, client: Trainer) -> None:
        before = setup.algorithm.get_state()
        compiled_ahead(setup, client)
        assert setup.algorithm.get_state() == before, "a rehearsal is no step"
        counts.append(compiled(caplog.records))

    monkeypatch.setattr(build, "compiled_ahead", counting)
    jax.config.update("jax_log_compiles", True)  # of all threads, which the context manager is not
    yield counts
    jax.config.update("jax_log_compiles", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"algorithm": GRPO}, {"step": 1}),
        *slow(
            [
                (
                    {"algorithm": {**GRPO, "kl": 0.1, "updates": 2, "old_logprobs": "recompute"}},
                    {"step": 1, "compute_logprobs": 1},
                ),
                ({"algorithm": {**GRPO, "kl": 0.1}, "adapter": {"rank": 4, "alpha": 16}}, {"step": 1}),
                ({"algorithm": {"name": "ppo"}}, {"step": 2, "compute_values": 1}),
                ({"algorithm": {"name": "dpo", "online": True}}, {"step": 1}),
                ({"algorithm": GRPO, "rollout__max_staleness": 1, **APART}, {"step": 1}),
                ({"algorithm": GRPO, "data__packing": False}, {"step": 1}),
                ({"algorithm": GRPO, "rollout__top_k": 8}, {"step": 1}),
            ]
        ),
    ],
)
def test_the_update_is_compiled_before_the_first_rollout_and_never_again(
    changes: dict[str, Any],
    expected: dict[str, int],
    tmp_path: Path,
    logged: list[Counter[str]],
    caplog: pytest.LogCaptureFixture,
):
    train(str(write_policy(tmp_path, **changes, steps=2)))
    assert logged == [compiled(caplog.records)]
    assert logged[0] == expected
