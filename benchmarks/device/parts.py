"""The parts in order of their worth, and what a part's process runs: `python -m benchmarks.device.parts NAME`.

It writes a line of JSON for each row as soon as it is known, so that a part that is stopped loses only what it had not
found yet.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.device.rows import Row, Setting

MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""JAX takes three quarters of a GPU's memory otherwise."""


class Part(NamedTuple):
    """One process of the command."""

    module: str
    """File of this folder."""
    function: str
    """What yields the rows, called with the setting, or with the part's name and the setting."""
    seconds: float
    """The longest that it may take, some times what is expected: a part that hangs leaves time for others."""
    measures: bool
    """Whether its rows are times; else they are checks."""
    named: bool = False
    """Whether the function takes the part's name first."""


PARTS: dict[str, Part] = {
    "peaks": Part("speeds", "peaks", 60, True),
    "kernels": Part("checks", "kernels", 150, False),
    "sft-16k": Part("speeds", "step", 120, True, named=True),
    "parity": Part("parity", "rows", 150, False),
    "lora-4b-16k": Part("speeds", "step", 120, True, named=True),
    "resume": Part("resume", "rows", 150, False),
    "decode": Part("speeds", "decode", 120, True),
    "sft-64k": Part("speeds", "step", 150, True, named=True),
    "mismatch": Part("checks", "trainer_and_sampler", 180, False),
    "grpo": Part("speeds", "grpo", 150, True),
    "sft-8k": Part("speeds", "step", 90, True, named=True),
    "sft-16k-remat": Part("speeds", "step", 120, True, named=True),
}


def rows(name: str, setting: Setting) -> Iterator[Row]:
    """The rows of a part, computed in this process."""
    from importlib import import_module

    part = PARTS[name]
    function: Callable[..., Iterator[Row]] = getattr(import_module(f"benchmarks.device.{part.module}"), part.function)
    yield from function(name, setting) if part.named else function(setting)


def say(**line: Any) -> None:
    """Writes a line for the command."""
    print(json.dumps(line), flush=True)


def main() -> None:
    """Runs one part, or tells of the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["machine", *PARTS])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--platform", default="cpu")
    arguments = parser.parse_args()
    for name, value in MEMORY.items():
        os.environ.setdefault(name, value)
    if arguments.name == "machine":
        from benchmarks.device.speeds import machine

        say(machine=asdict(machine()))
        return
    for row in rows(arguments.name, Setting(arguments.small, arguments.platform)):
        say(row=asdict(row))


if __name__ == "__main__":
    main()
