"""What the devices send each other in one update of the recipes in `tiny.py`, and what its weights alone account for.

Each micro-batch gathers all weights twice, forward and backward, and sums their gradients once: of `w` bytes of
weights on `n` devices each sends `w (n - 1) / n` for a gather and as much for a scattered sum, which a CPU's compiler
writes as an all-reduce of twice that. The programs are compiled from shapes, for virtual devices of a CPU or for
devices that `tunix plan` knows (`--topology v5e:2x2`); each number of devices in a process of its own.
"""

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.programs import Collective, account
from benchmarks.scale.tiny import RECIPES
from tunix.plan.record import programs_of
from tunix.plan.subject import subject_of
from tunix.recipe.recipe import Recipe
from tunix.util import chips

NUMBERS = (2, 4, 8)
SMALL = 1024
"""Bytes below which a collective exchanges scalars or a norm."""


class Found(NamedTuple):
    """The exchanges of one update."""

    devices: int
    micro: int
    """Micro-batches at the most, which is what is counted; packed rows may fill fewer."""
    gather: float
    """Bytes that a device sends to gather all weights once, or to scatter the sum of their gradients."""
    sent: dict[str, tuple[float, float]]
    """What for, and by which collective -> how many run, and the bytes that a device sends in them."""


def purpose(one: Collective) -> str:
    """What a collective of an update is for, by its kind and by where it comes from."""
    if one.bytes < SMALL:
        return "scalars and norms"
    if one.kind in ("all-reduce", "reduce-scatter"):
        return f"gradients, {one.kind}"
    if one.kind == "all-gather":
        return f"weights, {'backward' if 'transpose(jvp' in one.scope else 'forward'}, all-gather"
    return f"activations, {one.kind}"


def exchanges(recipe: dict[str, Any], devices: list[Any]) -> Found:
    """Compiles an update with all devices along `fsdp`."""
    subject = subject_of(Recipe.build({**recipe, "mesh": {"fsdp": len(devices)}}), devices)
    update = next(one for one in programs_of(subject) if one.name == "step")
    assert update.lowered is not None
    sent: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for one in account(update.lowered.compile().as_text() or "").collectives:
        times, amount = sent[purpose(one)]
        sent[purpose(one)] = (times + one.times, amount + one.times * one.bytes)
    spec, number = subject.policy.spec, len(devices)
    weights = 4 * sum(math.prod(shape) for shape in spec.model.shapes.values())
    micro = -(-subject.setup.recipe.sequences_per_update // (spec.microbatcher.rows * spec.microbatcher.unit))
    return Found(number, micro, weights * (number - 1) / number, dict(sent))


def show(console: Console, name: str | None = None) -> None:
    """Compiles and prints; `name` is a topology, None for virtual devices of a CPU."""
    for recipe in RECIPES:
        columns = ("devices", "micro-batches", "what for", "runs", "kB", "one for each micro-batch, kB")
        table = Table(*columns, title=f"{recipe}: what a device sends in an update ({name or 'cpu'}, float32)")
        for number in NUMBERS if name is None else (0,):
            env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(number or 1)}
            words = [sys.executable, "-m", "benchmarks.scale.exchanges", recipe, *([name] if name else [])]
            done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
            found = Found(*json.loads(done.stdout.splitlines()[-1]))
            least = found.micro * found.gather / 1e3
            for what, (times, amount) in sorted(found.sent.items(), key=lambda one: -one[1][1]):
                each = {"all-reduce": 2 * least, "reduce-scatter": least, "all-gather": least}.get(what.split(", ")[-1])
                row = (what, f"{times:g}", f"{amount / 1e3:.1f}", "" if each is None else f"{each:.1f}")
                table.add_row(str(found.devices), str(found.micro), *row)
            total = sum(amount for _, amount in found.sent.values())
            table.add_row("", "", "together", "", f"{total / 1e3:.1f}", "", end_section=True)
        console.print(table)


def main() -> None:
    """Prints the exchanges of one recipe, as JSON; its devices are those at hand, or those of a topology."""
    recipe, *named = sys.argv[1:]
    if named:
        chips.prepare()
    devices = chips.devices_of(named[0]) if named else jax.devices()
    print(json.dumps(exchanges(RECIPES[recipe], devices)))


if __name__ == "__main__":
    main()
