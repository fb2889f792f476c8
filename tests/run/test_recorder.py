"""What the recorder adds to a row: speeds, and shares of rows and of the devices' peak, by arithmetic."""

import threading
from dataclasses import replace
from queue import Queue

import jax
import numpy as np
import pytest

from tests.trainers import PLAIN
from tunix.algorithms.base import Update
from tunix.data.packing import pack
from tunix.data.types import THOUGHTS, Accounting
from tunix.lora.config import AdapterConfig
from tunix.run import recorder as recorders
from tunix.run.recorder import Recorder
from tunix.trainer import progress
from tunix.trainer.config import LoggingConfig
from tunix.trainer.perf import Work, training_flops
from tunix.trainer.progress import Display
from tunix.types import Batch, Sequence
from tunix.util.chips import Chip

MATRICES, HEAD = 2 * 9216, 96 * 32
"""Weights of PLAIN: 2 layers of 32 x 8 x (2 x 4 + 2 x 2) + 3 x 32 x 64, and 96 ids of 32."""
PAIRS = 6 + 15 + 3
"""Pairs of tokens in documents of 3, 5 and 2."""
ATTENTION = 2 * 4 * 8 * PAIRS
"""2 layers, 4 heads and 8 columns for each: half of the FLOPs of one product of attention."""


def batch() -> Batch:
    """Documents of 3, 5 and 2 tokens in two rows of 8: 10 of 16 tokens."""
    return pack([Sequence(np.ones(n, np.int32), np.ones(n, bool)) for n in (3, 5, 2)], 3, 8)


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, step, values) -> None:
        self.rows.append(dict(values))

    def close(self) -> None: ...


def row_of(work: Work, metrics: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The row of one step with this batch, on devices that make a million FLOPs a second in all."""
    chip = Chip("cpu", 1e6 / jax.device_count(), 1e6, "cpu")
    monkeypatch.setattr(recorders, "chip_named", lambda _: chip)
    sink = Rows()
    recorder = Recorder([sink], Display("run", 1, 0), LoggingConfig(every=1), work)
    recorder.push(1, Update(metrics, (batch(),)), Accounting())
    recorder.flush()
    return sink.rows[0]


def test_a_long_compilation_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch):
    said: Queue[str] = Queue()
    monkeypatch.setattr(progress, "LINES_EVERY", 0.01)
    monkeypatch.setattr(Display, "say", lambda _, text: said.put(text))
    recorder = Recorder([], Display("run", 1, 0), LoggingConfig(), Work(PLAIN, rows=1))
    with recorder.compiling("the sampler"):
        assert said.get(timeout=60) == "compiling the sampler"
        assert said.get(timeout=60).startswith("compiling the sampler: 0 done, ")
        jax.jit(lambda x: 3.7 * x).lower(1.0).compile()
        while not said.get(timeout=60).startswith("compiling the sampler: 1 done, "):
            pass
    with recorder.first("update"):
        assert said.get(timeout=60).startswith("the first update: 0 programs compiled, ")
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    recorder.push(1, Update({}, ()), Accounting())
    with recorder.first("update"):
        assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_fill_counts_the_rows_of_micro_batches(monkeypatch: pytest.MonkeyPatch):
    assert row_of(Work(PLAIN, rows=1), {}, monkeypatch)["perf/fill"] == 10 / 16
    # Two rows are padded to four.
    assert row_of(Work(PLAIN, rows=4), {}, monkeypatch)["perf/fill"] == 10 / 32


def test_each_rule_that_shortens_rows_is_said_once(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(Display, "say", lambda _, text: said.append(text))
    recorder = Recorder([], Display("run", 3, 0), LoggingConfig(), Work(PLAIN))
    counts = [
        Accounting(rows=8, kept=8),
        Accounting(rows=16, kept=15, truncated=2, dropped={"no prompt": 1}),
        Accounting(rows=24, kept=22, truncated=3, dropped={"no prompt": 2}, notes={THOUGHTS: 4}),
    ]
    for step, accounting in enumerate(counts, 1):
        recorder.push(step, Update({}, (batch(),)), accounting)
    assert said == [
        "rows: 1 of the first 16: dropped, no prompt (tunix inspect shows which)",
        "rows: 2 of the first 16: cut off (tunix inspect shows which)",
        f"rows: 4 of the first 24: {THOUGHTS} (tunix inspect shows which)",
    ]


def test_a_step_that_is_all_update_has_one_share_of_the_peak(monkeypatch: pytest.MonkeyPatch):
    row = row_of(Work(PLAIN), {}, monkeypatch)
    assert row["perf/update_mfu"] == pytest.approx(row["perf/mfu"])
    assert row["perf/mfu"] * row["perf/step_seconds"] * 1e6 == pytest.approx(60 * (MATRICES + HEAD) + 12 * ATTENTION)


@pytest.mark.parametrize(
    ("changes", "flops"),
    [
        ({}, 60 * (MATRICES + HEAD) + 12 * ATTENTION),
        ({"reference": True}, (60 + 20) * (MATRICES + HEAD) + 16 * ATTENTION),
        ({"critic": True}, 60 * (2 * MATRICES + HEAD) + 24 * ATTENTION),
    ],
)
def test_the_update_alone(changes: dict, flops: float, monkeypatch: pytest.MonkeyPatch):
    """10 tokens, 6 FLOPs a weight and 12 a pair to train, 2 and 4 for a reference; an update of a quarter second."""
    row = row_of(replace(Work(PLAIN), **changes), {"perf/update_seconds": 0.25}, monkeypatch)
    assert row["perf/update_mfu"] == pytest.approx(flops / 0.25 / 1e6)


def test_an_adapter_spares_the_gradients_of_its_base():
    q = AdapterConfig(rank=2, targets=("q_proj",))
    # A: 32 x 2, B: 2 x 32, in both layers.
    expected = 40 * (MATRICES + HEAD) + 60 * 2 * 128 + 12 * ATTENTION
    assert training_flops(PLAIN, batch(), q) == expected
