"""The parts in order of their worth, and what a part's process runs: `python -m benchmarks.device.parts NAME CASE`.

It writes a line of JSON for each row as soon as it is known, so that a part that is stopped loses only what it had not
found yet.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.device.rows import Row, Setting

ALONE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""Of a process that has the device to itself: JAX takes three quarters of a GPU's memory otherwise."""
TOGETHER = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Of processes that share the device."""
UNTUNED = "--xla_gpu_autotune_level=0"
"""Takes the first kernel for a product in place of the fastest of dozens, each of which is compiled: on an H200's 16
cores three processes took 113 s until their first product in float32."""
STORED: tuple[str, ...] = tuple(json.loads((Path(__file__).parent / "reference.json").read_text()))
"""The models of which numbers are stored: every family, and a second one of Gemma 4."""


KERNELS = ("mosaic", "tokamax", "splash", "chunked")
KINDS = ("packed", "windowed", "soft-capped", "shared prompts")
"""Of attention, `checks.KINDS`."""
XPROF = ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool")
"""Modules that tokamax imports only to measure its kernels, which nothing here does: they do not travel."""


class Part(NamedTuple):
    """Some rows: checks, which run all at once, or times, each in a process that has the device to itself."""

    module: str
    """File of this folder."""
    function: str
    """What yields the rows, called with a case and the setting."""
    cases: tuple[str, ...]
    """Each in a process of its own."""
    seconds: float
    """The longest that a case may take, some times what is expected: one that hangs leaves time for others."""
    measures: bool = False
    """Whether its rows are times."""


PARTS: dict[str, Part] = {
    "kernels": Part("checks", "kernels", tuple(f"{name}, {kind}" for name in KERNELS for kind in KINDS), 150),
    "parity": Part("parity", "rows", STORED, 150),
    "mismatch": Part("checks", "trainer_and_sampler", tuple(x for x in STORED if x != "gemma4_moe"), 180),
    "resume": Part("resume", "rows", ("killed",), 150),
    "attention": Part("attention", "rows", ("mosaic, tokamax, splash, cudnn, chunked",), 90, True),
    "sft": Part("speeds", "step", ("packed-16k", "16k"), 90, True),
    "grpo": Part("speeds", "grpo", ("8x8",), 120, True),
    "decode": Part("speeds", "decode", ("256", "1024"), 90, True),
    "lora": Part("speeds", "step", ("4b-16k",), 90, True),
    "long": Part("speeds", "step", ("64k",), 120, True),
    "mixture": Part("speeds", "step", ("mixture-16k",), 120, True),
    "start": Part("start", "rows", ("grpo",), 150, True),
    "peaks": Part("speeds", "peaks", ("bfloat16",), 60, True),
    "torch": Part("torch_loop", "rows", ("packed-16k", "16k", "4b-16k"), 90, True),
}


def rows(name: str, case: str, setting: Setting) -> Iterator[Row]:
    """The rows of a part's case, computed in this process."""
    part = PARTS[name]
    module = importlib.import_module(f"benchmarks.device.{part.module}")
    function: Callable[[str, Setting], Iterator[Row]] = getattr(module, part.function)
    yield from function(case, setting)


def say(**line: Any) -> None:
    """Writes a line for the command."""
    print(json.dumps(line), flush=True)


def main() -> None:
    """Runs one case of a part, or tells of the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["machine", *PARTS])
    parser.add_argument("case", nargs="?", default="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--platform", default="cpu")
    arguments = parser.parse_args()
    measures = arguments.name != "machine" and PARTS[arguments.name].measures
    for variable, value in (ALONE if measures else TOGETHER).items():
        os.environ.setdefault(variable, value)
    if arguments.platform == "gpu" and not measures:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {UNTUNED}"
    if importlib.util.find_spec("xprof") is None:
        sys.modules.update({name: ModuleType(name) for name in XPROF})
    if arguments.name == "machine":
        from benchmarks.device.speeds import machine

        say(machine=asdict(machine()))
        return
    for row in rows(arguments.name, arguments.case, Setting(arguments.small, arguments.platform)):
        say(row=asdict(row))


if __name__ == "__main__":
    main()
