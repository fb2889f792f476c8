"""How long a user waits for the first step of a GRPO run: with nothing compiled before, and started again.

This process leaves the device to the runs: it imports JAX and computes nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.device.resume import ROOT, ended
from benchmarks.device.rows import Row, Setting
from tunix.util.atomic_io import read_rows

SMALL = {"family": "qwen3", "sizes": {"vocab_size": 512, "d_model": 64, "num_layers": 2, "num_heads": 4, "ffn": 128}}
REWARD = '''
def even(completion, completion_ids):
    """The share of even tokens."""
    return sum(number % 2 == 0 for number in completion_ids) / len(completion_ids)
'''


def recipe(setting: Setting) -> dict[str, Any]:
    """8 prompts of 64 tokens, 8 answers of 64 to each."""
    return {
        "model": {"init": "random", "dtype": setting.dtype, **(SMALL if setting.small else {"preset": "qwen3-0.6b"})},
        "data": {"train": "train.jsonl", "max_length": 128, "completion_length": 64},
        "reward": {"functions": ["rewards.py:even"]},
        "algorithm": {"name": "grpo", "group_size": 8},
        "batch_size": 8,
        "steps": 1,
        "output": "run",
    }


def rows(case: str, setting: Setting) -> Iterator[Row]:
    """Seconds from the command to the line of the first step's metrics, cold and warm."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        for state in ("cold", "warm"):
            folder = Path(place) / state
            folder.mkdir()
            prompts = (json.dumps({"prompt_ids": rng.integers(0, 512, 64).tolist()}) + "\n" for _ in range(64))
            (folder / "train.jsonl").write_text("".join(prompts))
            (folder / "rewards.py").write_text(REWARD)
            (folder / "r.yaml").write_text(yaml.safe_dump(recipe(setting)))
            seconds, parts = _first_step(folder, Path(place) / "cache")
            yield Row(f"first step of a GRPO run, {state}", message=parts, seconds=seconds, turns=1)


def _first_step(folder: Path, cache: Path) -> tuple[float, str]:
    """Seconds until the metrics of the first step are there, and what the run said on its way, by second."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    env.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the run's own is tried
    start, log, said = time.monotonic(), folder / "log", dict[str, float]()
    with log.open("wb") as file:
        command = [sys.executable, "-m", "tunix.cli", "run", "r.yaml"]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file)
    while process.poll() is None and not read_rows(folder / "run/metrics.jsonl"):
        for line in log.read_text(errors="replace").splitlines():
            said.setdefault(line.strip(), time.monotonic() - start)
        time.sleep(0.05)
    seconds = time.monotonic() - start
    ended(process, folder)
    told = (f"{line[:60]} {second:.0f} s" for line, second in said.items() if "compil" in line or "plan" in line)
    return seconds, "; ".join(told)
