"""Compiles lowered programs and reads their memory and collectives; results are kept in the user's cache by digest.

jax's own cache of compiled programs does not look at scopes, from which the trip counts of loops are read: it is not
used here.
"""

import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tunix.plan.account import COLLECTIVES, account, largest
from tunix.util.atomic_io import write_text_atomic

KEPT = Path("~/.cache/tunix/plans")
VERSION = "6"
"""Part of every digest: raised where what is read of a program changes."""
NUMBER = r"([\d.]+)\s*([KMGT]?)i?B?"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program, for each device."""

    peak: int
    """Bytes at the most, arguments included."""
    arguments: int
    """Bytes of the arguments."""
    sent: dict[str, list[float]]
    """Kind of collective -> how many run, and the bytes that a device sends in them."""
    sent_far: float
    """Those of these bytes that leave the devices which a fast network joins."""
    buffers: list[list[Any]]
    """The largest arrays that it writes: bytes, type and shape, scope, line of tunix."""
    seconds: float
    """What compiling took."""
    refused: str = ""
    """The compiler's message where the program does not fit; `peak` is then what it asks for."""


def compiled(lowered: jax.stages.Lowered, target: str, near: int) -> Compiled:
    """Compiles a program, or returns what is known of it.

    Args:
        target: the devices' name: programs for other devices are others.
        near: how many devices, in the order of the mesh, a fast network joins.
    """
    text = lowered.as_text()
    said = (VERSION, jax.__version__, target, near, text)
    file = KEPT.expanduser() / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()}.json"
    if file.is_file():
        return Compiled(**json.loads(file.read_text()))
    found = _compiled(lowered, near)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps(asdict(found)))
    return found


def _compiled(lowered: jax.stages.Lowered, near: int) -> Compiled:
    start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(str(error), time.perf_counter() - start)
    seconds, text, memory = time.perf_counter() - start, program.as_text(), program.memory_analysis()
    assert text is not None, "a program for devices has a text"
    assert memory is not None, "and its compiler an analysis of its memory"
    found = account(text)
    # Backends that do not report a peak: what is there at the end, and all temporaries.
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    reported = getattr(memory, "peak_memory_in_bytes", 0)
    return Compiled(
        peak=int(reported or whole + memory.temp_size_in_bytes),
        arguments=int(memory.argument_size_in_bytes),
        sent={kind: [found.number(kind), found.sent(kind)] for kind in COLLECTIVES if found.number(kind)},
        sent_far=found.sent_far(near),
        buffers=[list(one) for one in largest(text)],
        seconds=seconds,
    )


def _refused(message: str, seconds: float) -> Compiled:
    """What the message of a compiler that ran out of memory says."""
    asked = re.search(rf"(?:Used|requires?|allocate|need\w*)\D{{0,40}}{NUMBER}", message)
    peak = int(float(asked[1]) * UNITS[asked[2]]) if asked else 0
    # A TPU's compiler lists the largest allocations: size, shape, and the operation that they belong to.
    listed = re.findall(rf"Size: {NUMBER}\s+(?:Operator: op_name=\"([^\"]*)\"[^\n]*\s+)?Shape: ([\w\[\],]+)", message)
    buffers = [[int(float(n) * UNITS[unit]), shape, scope, ""] for n, unit, scope, shape in listed[:5]]
    return Compiled(peak, 0, {}, 0.0, buffers, seconds, message.splitlines()[0][:300])
