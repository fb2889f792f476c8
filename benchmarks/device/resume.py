"""A short run that is killed and started again, beside one that nobody interrupts: both end on the same bits.

This process leaves the device to the runs: it imports JAX and computes nothing.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.device.rows import Row, Setting, check
from tunix.util.atomic_io import read_rows

STEPS, EVERY, KILLED = 60, 5, 12
"""Steps of the run, those from one checkpoint to the next, and the step after which it is killed."""
VOCAB, LENGTH = 8192, 48
SIZES = {"vocab_size": VOCAB, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn": 128}
ROOT = Path(__file__).parents[2]
ORDER = "--xla_gpu_deterministic_ops=true"
"""A GPU may otherwise add in another order each time."""


def recipe(setting: Setting) -> dict[str, Any]:
    """Noise, moments, a schedule and shuffled rows: all that a resumed run could lose."""
    return {
        "model": {"init": "random", "family": "llama", "sizes": SIZES, "dtype": setting.dtype},
        "data": {"train": "train.jsonl", "max_length": LENGTH},
        "algorithm": {"name": "sft", "neftune_alpha": 5},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup": 5},
        "batch_size": 8,
        "steps": STEPS,
        "checkpoint": {"every": EVERY, "keep": 2},
        "output": "run",
    }


def started(folder: Path, setting: Setting) -> subprocess.Popen[bytes]:
    """`tunix run` in a folder, which gets the recipe and its rows."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCAB, 5 + (7 * i) % 40).tolist() for i in range(64)]
    rows = (json.dumps({"input_ids": one, "labels": [-100] * 3 + one[3:]}) + "\n" for one in ids)
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe(setting)))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = [os.environ.get("XLA_FLAGS", ""), *([ORDER] if setting.platform == "gpu" else [])]
    env = {**os.environ, "XLA_FLAGS": " ".join(flags), "PYTHONPATH": path}
    command = [sys.executable, "-m", "tunix.cli", "run", "r.yaml"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


def ended(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits for its end.

    Raises:
        RuntimeError: it failed; with what it said last.
    """
    if process.wait():
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"tunix run ended with {process.returncode}: {' '.join(last)}")


def killed(folder: Path, setting: Setting) -> int:
    """Kills the run in the middle, after a checkpoint; the step that it had reached.

    Raises:
        RuntimeError: it ended before.
    """
    process = started(folder, setting)
    metrics = folder / "run/metrics.jsonl"
    while not (rows := read_rows(metrics)) or rows[-1]["step"] < KILLED:
        if process.poll() is not None:
            ended(process, folder)
            raise RuntimeError(f"the run ended before step {KILLED} was seen")
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return int(read_rows(metrics)[-1]["step"])


def end(run: Path) -> dict[str, Any]:
    """What has to be equal: metrics apart from time, the exported files. The weights say what the moments were."""
    passing = ("time/", "perf/", "compile/")
    lasting = [{k: v for k, v in row.items() if not k.startswith(passing)} for row in read_rows(run / "metrics.jsonl")]
    export = {f"export/{file.name}": file.read_bytes() for file in (run / "export").iterdir()}
    return {**export, "metrics": lasting}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is not equal, or in one of them alone."""
    return sorted(name for name in {*one, *other} if name not in one or name not in other or one[name] != other[name])


def rows(case: str, setting: Setting) -> Iterator[Row]:
    """One row: how many parts of the end differ."""
    with tempfile.TemporaryDirectory() as place:
        whole, broken = Path(place) / "whole", Path(place) / "broken"
        step = killed(broken, setting)
        ended(started(broken, setting), broken)
        resumed = "going on from step" in (broken / "log").read_text(errors="replace")
        ended(started(whole, setting), whole)
        apart = differing(end(whole / "run"), end(broken / "run"))
    said = f"killed at step {step} of {STEPS}; differing: {', '.join(apart[:3]) or 'nothing'}"
    if not resumed:
        said, apart = f"{said}; it began anew instead of going on", [*apart, "start"]
    yield check("a run that is killed and resumed", len(apart), 0, said)
