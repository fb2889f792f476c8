"""Every test runs with checked annotations, on 8 virtual CPU devices, with compiled programs kept between runs.

jaxtyping and beartype check shapes and types of every function of tunix that is called; a wrong axis fails the test.
"""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.marks import QUICKLY

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Collectives that do not wait for each other may run at once, each with a thread of every device. With no more threads
# than devices XLA on a CPU then waits for one that never comes, and ends the process after 40 seconds.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Two processes share two cores: torch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `make test-slow` runs with what users have.
os.environ.setdefault("XLA_FLAGS", QUICKLY)
# Compiling is most of the tests' time; programs are the same from run to run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path("~/.cache/tunix/tests").expanduser()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# So is compiling Python, in the hundreds of processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax
from jaxtyping import install_import_hook

sys.dont_write_bytecode = False
install_import_hook("tunix", "beartype.beartype")

from tunix.models import expert_products  # noqa: E402 (after the hook, which checks it)

if os.environ["XLA_FLAGS"] == QUICKLY:
    # A branch of the program for each number of rows, in each of the nine products of a mixture of experts: with a
    # quarter of them it compiles in a third of the time and computes the same (tests/models/test_moe.py has all).
    expert_products.STEPS = 4

# What a shell starts in the background ignores ctrl-c, and so would what these tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

MAPPINGS = Path("/proc/self/maps")
EVERY = 16
"""Tests between two counts: the system takes a hundredth of a second for one."""
MOST_MAPPINGS = 30_000
"""Linux allows a process 65530 by default. XLA on a CPU takes several for each compiled program and does not look
whether it got them: the process ends with a segmentation fault, most of the way through the suite."""


@pytest.fixture(autouse=True)
def _away_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative outputs such as runs/ land in the test's own folder."""
    monkeypatch.chdir(tmp_path)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which a tier has no test is not read: transformers, torch and peft take seconds to import."""
    if not collection_path.match("test_*.py"):
        return None
    tier, text = config.getoption("markexpr"), collection_path.read_text()
    if collection_path.parent.name == "worlds":
        return tier != "worlds" or None
    whole = "\npytestmark = pytest.mark.models\n" in text
    return (whole if "not models" in tier else tier.startswith("models") and "mark.models" not in text) or None


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage, again and again, is a twelfth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


finished = itertools.count(1)


@pytest.fixture(autouse=True)
def _room_for_programs() -> Iterator[None]:
    """Compiled programs are let go of before they are too many; those used again come from the cache on the disk."""
    yield
    if next(finished) % EVERY == 0 and MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
