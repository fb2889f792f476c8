"""`python -m benchmarks.compiled`: training steps of published sizes, compiled for accelerators that are not here.

Each is compiled in a process of its own from shapes alone, by XLA's TPU compiler (`pip install '.[plan-tpu]'`) or
NVIDIA's (`'.[plan-gpu]'`): peak memory, kernels, copies and collectives of each device, with loops counted as often
as they run. Nothing is run. With `--engine`, the sampler's decode program (`compiled_engine.py`).
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import compiled_engine
from benchmarks.programs import COLLECTIVES, account, largest
from benchmarks.shapes import Shape
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.mesh import build_mesh
from tunix.models.families.table import preset
from tunix.models.model import Model
from tunix.models.scan import Remat
from tunix.plan import programs
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.microbatches import Microbatcher, TrainerSpec
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.util import chips
from tunix.util.chips import chip_of

GIGA = 2**30


@dataclass(frozen=True)
class Case:
    """One training step."""

    preset: str
    topology: str
    rows: int
    length: int
    mesh: MeshConfig
    number: int = 1
    """Micro-batches."""
    devices: int | None = None
    """How many of the topology's devices; None for all."""
    remat: Remat = "block"
    before: str = ""
    """The same step compiled before attention by chunks and a head that is reduced once, as far as it was."""

    def lowered(self) -> Any:
        """The step, lowered for the topology."""
        chips.prepare()
        chips.hasten(chip_of(self.topology).platform)
        mesh = build_mesh(self.mesh, chips.devices_of(self.topology)[: self.devices])
        model = Model(preset(self.preset), dtype="bfloat16", remat=self.remat)
        config = OptimizerConfig()
        spec = TrainerSpec(
            model=model,
            mesh=mesh,
            optimizer=build_optimizer(config, 100, model.axes),
            schedule=build_schedule(config, 100),
            microbatcher=Microbatcher(self.rows, mesh),
            length=self.length,
            seed=0,
        )
        params = model.abstract(dict.fromkeys(model.shapes, "float32"), mesh)
        batch = Shape("", model.config, self.number * self.rows, self.length).batch()
        shapes = programs.microbatches_of(batch, spec.microbatcher)
        return programs.step(spec, params, {}, shapes, SFT(SFTConfig()).objective)


ONE, EIGHT, MANY = MeshConfig(), MeshConfig(fsdp=8), MeshConfig(fsdp=64)
CASES: dict[str, Case] = {
    "qwen-16k-h100": Case("qwen3-0.6b", "h100:1", 1, 16_384, ONE, before="25.8 GiB, 4,756 GB"),
    "qwen-16k-v5p": Case("qwen3-0.6b", "v5p:2x2x1", 1, 16_384, ONE, devices=1, before="26.2 GiB, 3,966 GB"),
    "qwen-64k-h100": Case("qwen3-0.6b", "h100:1", 1, 65_536, ONE, before="223.1 GiB, 99,514 GB"),
    "qwen-64k-v5p": Case("qwen3-0.6b", "v5p:2x2x1", 1, 65_536, ONE, devices=1, before="220.4 GiB: refused"),
    "qwen-128k-h100": Case("qwen3-0.6b", "h100:8", 1, 131_072, MeshConfig(context=8)),
    "qwen-128k-v5p": Case("qwen3-0.6b", "v5p:2x2x2", 1, 131_072, MeshConfig(context=8)),
    "gemma-16k-h100": Case("gemma3-1b", "h100:1", 1, 16_384, ONE, before="168 TFLOP, 1,359 GB"),
    "gemma-16k-v5p": Case("gemma3-1b", "v5p:2x2x1", 1, 16_384, ONE, devices=1),
    "llama-8b-h100": Case("llama3.1-8b", "h100:8", 8, 4096, EIGHT, before="20.9 GiB, 1,355 GB, sent 96.8 GB"),
    "llama-8b-v6e": Case("llama3.1-8b", "v6e:2x4", 8, 4096, EIGHT, before="21.2 GiB, 1,391 GB, sent 137.8 GB"),
    "llama-70b-h100": Case("llama3.1-70b", "h100:64", 64, 4096, MANY, before="33.4 GiB, 9,761 GB, sent 1,472 GB"),
    "llama-70b-v5p": Case("llama3.1-70b", "v5p:4x4x4", 64, 4096, MANY, before="34.4 GiB, 6,788 GB, sent 1,909 GB"),
    "llama-70b-tp-h100": Case(
        "llama3.1-70b", "h100:64", 8, 4096, MeshConfig(fsdp=8, tensor=8), before="25.2 GiB, 1,210 GB, sent 107 GB"
    ),
}


COLUMNS = ("step", "before", "trace + compile, s", "peak GiB", "copies above 1 MB", "GB sent, each device", "kernels")


def measured(name: str, dump: Path | None) -> dict[str, Any]:
    """Compiles one case and reads its program."""
    start = time.perf_counter()
    lowered = CASES[name].lowered()
    traced = time.perf_counter() - start
    compiled = lowered.compile()
    text = compiled.as_text()
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / f"{name}.txt").write_text(text)
    found, memory = account(text), compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {
        "traced": traced,
        "compiled": time.perf_counter() - start - traced,
        "peak": getattr(memory, "peak_memory_in_bytes", 0) or held,
        "held": held,
        "copies": found.copied(2**20),
        "sent": {kind: (found.number(kind), found.sent(kind)) for kind in COLLECTIVES if found.number(kind)},
        "looped": max((one.loops for one in found.collectives), default=0),
        "kernels": found.kernels,
        "unbounded": sorted(set(found.unbounded)),
        "largest": largest(text),
    }


def row(name: str, found: dict[str, Any]) -> list[str]:
    """A case's row of the table."""
    sent = "; ".join(f"{kind} {amount / 1e9:.1f} in {number:.0f}" for kind, (number, amount) in found["sent"].items())
    kernels = ", ".join(f"{kernel} {number:.0f}" for kernel, number in found["kernels"].items() if number > 1)
    seconds = f"{found['traced']:.0f} + {found['compiled']:.0f}"
    numbers = (f"{found['peak'] / GIGA:,.1f}", f"{found['copies']:,.0f}")
    return [name, CASES[name].before, seconds, *numbers, sent, kernels]


def main() -> None:
    """Compiles each case in a process of its own and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*CASES, *compiled_engine.CASES]
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help="which of them")
    parser.add_argument("--engine", action="store_true", help="the sampler's programs in place of training steps")
    parser.add_argument("--dump", type=Path, help="a folder for the optimized training steps")
    parser.add_argument("--one", choices=names, metavar="CASE", help="used by the benchmark itself")
    arguments = parser.parse_args()
    if (name := arguments.one) is not None:
        engines = compiled_engine.CASES
        found = compiled_engine.measured(engines[name]) if name in engines else measured(name, arguments.dump)
        print(json.dumps(found))
        return
    cases = compiled_engine.CASES if arguments.engine else CASES
    table = Table(*((*compiled_engine.COLUMNS, *compiled_engine.MORE) if arguments.engine else COLUMNS))
    for name in arguments.cases or cases:
        command = [sys.executable, "-m", "benchmarks.compiled", "--one", name]
        command += ["--dump", str(arguments.dump)] if arguments.dump else []
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            table.add_row(name, cases[name].before, f"refused: {made.stderr.strip().splitlines()[-1][:200]}")
            continue
        found = json.loads(made.stdout.splitlines()[-1])
        table.add_row(*(compiled_engine.row(name, found) if arguments.engine else row(name, found)))
        sys.stderr.write(f"{name}: {json.dumps(found)}\n")
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
