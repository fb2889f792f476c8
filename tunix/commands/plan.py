"""`tunix plan`: what a recipe needs of devices, by kind, whether that fits, and how fast it could be.

A worker finds it out (`plan/worker.py`); its lines are waited for until a deadline, and printed. Loads without jax and
rich, which the first line of a run does not wait for.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.util.accelerators import FRACTION, MEMORY, accelerated, cards

if TYPE_CHECKING:
    from rich.console import Console

GIB = 2**30
WIDTH = 120
PATIENCE = 180.0
"""Seconds after which a run starts without having been planned."""


@dataclass
class Plan:
    """What the worker answered."""

    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """One for each stage, as `Verdict.report` of `plan/worker.py` makes them."""
    changes: dict[int, str | None] = field(default_factory=dict)
    """Stage -> the smallest change that fits, or None where none was found; only for stages that do not fit."""
    tried: list[str] = field(default_factory=list)
    """Changes that were tried."""
    late: bool = False
    """Whether the deadline ended it."""

    @property
    def fits(self) -> bool:
        """Whether all stages were examined and fit."""
        return bool(self.verdicts) and all(verdict["fits"] for verdict in self.verdicts)


def ask(
    recipe: Recipe,
    topology: str | None,
    deadline: float = 600.0,
    remedies: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The plan of a recipe, all of its stages included.

    Args:
        topology: such as `h100:8`; None for the devices at hand.
        deadline: seconds after which the worker is stopped.
        remedies: whether changes are tried where it does not fit.
        tell: receives what is being done, in a few words.

    Raises:
        UserError: the topology or the model is not known, a compiler is not installed, or it broke down.
    """
    request = {"recipe": recipe.sections(), "name": "recipe", "topology": topology, "remedies": remedies}
    # Of the devices at hand the worker takes no memory that it does not need; for others it computes on the CPU.
    platform = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if topology is None else {"JAX_PLATFORMS": "cpu"}
    plan = Plan()
    with tempfile.TemporaryFile("w+") as noise:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tunix.plan.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
            env=os.environ | platform,
        )
        stop = threading.Timer(deadline, worker.kill)
        stop.start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(request))
            worker.stdin.close()
            for line in map(json.loads, worker.stdout):
                match line:
                    case {"error": error}:
                        raise UserError(error)
                    case {"verdict": verdict}:
                        plan.verdicts.append(verdict)
                    case {"change": change, "stage": stage}:
                        plan.changes[stage] = change
                    case {"begun": _}:
                        tell("tracing the programs")
                    case {"trying": words}:
                        plan.tried.append(words)
                        tell(f"it does not fit; trying {words}")
                    case {"compiling": program}:
                        tell(f"compiling {program}")
            code = worker.wait()
        finally:
            plan.late = not stop.is_alive()
            stop.cancel()
            worker.kill()
        if code and not plan.late:
            noise.seek(0)
            last = "".join(noise.readlines()[-3:]).strip()[-600:]
            raise UserError(f"the plan's process ended with {code}: {last}")
    return plan


def plan(
    recipe: Recipe,
    topologies: Sequence[str | None],
    deadline: float,
    *,
    as_json: bool = False,
    console: "Console | None" = None,
) -> None:
    """Prints the plan of a recipe for each topology, or a JSON object for each; arguments and errors as of `ask`."""
    if not (math.isfinite(deadline) and deadline > 0):
        raise UserError(f"--deadline {deadline:g}: it is a number of seconds above 0")
    from rich.console import Console

    console = console or Console(highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH  # of a file or a pipe: nobody says how wide it is
    for topology in topologies:
        with _progress(topology) as tell:
            planned = ask(recipe, topology, deadline, tell=tell)
        if as_json:
            console.print_json(json.dumps(asdict(planned)))
        else:
            _show(planned, recipe, console)
        if planned.late and not planned.verdicts:
            raise UserError(f"--deadline {deadline:g}: nothing was compiled in time; give it more seconds")


def require_fit(recipe: Recipe, fresh: bool) -> None:
    """`refuse_misfit` of the accelerators here, before JAX takes them; nothing is asked on a CPU, of a run that goes
    on, and where arithmetic says that memory is ample (`plan/arithmetic.py`)."""
    if not accelerated() or (Path(recipe.output).expanduser().exists() and not fresh):
        return
    from tunix.plan.arithmetic import SHARE, estimated  # this loads jax

    # Of the bytes that JAX may take of the smallest card.
    share = float(os.environ.get(MEMORY, FRACTION))
    memory = min((min(share * card.total, card.free) for card in cards()), default=0.0)
    if (needed := estimated(recipe)) is not None and needed <= SHARE * memory:
        return
    refuse_misfit(recipe, None, "`tunix run --no-plan` tries it all the same.")


def refuse_misfit(recipe: Recipe, topology: str | None, otherwise: str) -> None:
    """Raises a UserError where a recipe does not fit devices, with the smallest change that does, and how to try it
    otherwise; where it cannot be found out whether it fits, a line on standard error says why."""
    with _progress(topology) as tell:
        try:
            planned = ask(recipe, topology, PATIENCE, tell=tell)
        except UserError as error:
            tell(f"not planned: {error}")
            return
        if planned.late and planned.fits:
            tell(f"not planned to the end within {PATIENCE:.0f} s")
    stages = recipe.stages or (recipe,)
    for number, verdict in enumerate(planned.verdicts):
        if not verdict["fits"]:
            remedy = suggestion(planned, number)
            raise UserError(
                f"{stages[number].output} {summary(verdict)}. "
                f"{remedy[0].upper()}{remedy[1:]}. `tunix plan` shows what takes the memory; {otherwise}"
            )


@contextmanager
def _progress(topology: str | None) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done; where that is no terminal, a line for each thing."""
    from rich.console import Console

    console, where = Console(stderr=True, highlight=False), topology or "the devices at hand"
    if not console.is_terminal:
        yield lambda words: print(f"{where}: {words}", file=sys.stderr, flush=True)
        return
    with console.status(f"{where}: starting") as status:
        yield lambda words: status.update(f"{where}: {words}")


def _show(planned: Plan, recipe: Recipe, console: "Console") -> None:
    from rich.box import SIMPLE
    from rich.table import Column, Table

    stages = recipe.stages or (recipe,)
    for number, verdict in enumerate(planned.verdicts):
        console.print(f"[bold]{stages[number].output}[/] {summary(verdict)}")
        for line in verdict["chosen"]:
            console.print(f"  {line}", markup=False)
        # The kinds of memory during the program of each place that needs most, and the arrays that its compiler lists.
        for name, most in first_of_each(verdict).items():
            alone = len(verdict["places"]) == 1
            devices = "each device" if alone else f"each of {verdict['places'][name]['number']} {name} device(s)"
            table = Table(f"of {devices}, during {most['name']}", Column("GiB", justify="right"), box=SIMPLE)
            for kind, size in sorted(most["kinds"].items(), key=lambda item: -item[1]):
                table.add_row(kind, f"{size / GIB:.2f}")
            console.print(table)
            for buffer in most["buffers"]:
                console.print(f"  {_array(buffer)}", markup=False)
        # Every program: what is needed while it runs, what it costs, and the least time that takes.
        table = Table(Column("program", no_wrap=True), box=SIMPLE)
        for name in ("GiB with all held", "a step", "TFLOP", "GB moved", "GB sent", "least ms", "s to trace + compile"):
            table.add_column(name, justify="right")
        for program in verdict["programs"]:
            flops, moved, sent = program["work"][0], sum(program["work"][1:]), sum(program["sent"].values())
            known = program["seconds"] is not None and not program["refused"]
            least = f"{1e3 * program['seconds']:,.0f}, {program['bound']}" if known else ""
            times = f"{program['times']:g} x" if program["times"] else ""
            made = f"{program['traced_in']:.0f} + {program['compiled_in']:.0f}" if program["compiled_in"] else ""
            table.add_row(
                program["name"],
                f"{program['total'] / GIB:.2f}",
                times,
                f"{flops / 1e12:,.1f}" if flops else "",
                f"{moved / 1e9:,.0f}" if flops else "",
                f"{sent / 1e9:,.1f}" if flops else "",
                least,
                made,
            )
        console.print(table)
        console.print("GiB by the compiler; TFLOP, GB and least ms by arithmetic of the model, full rows and the mesh")
        if (prediction := verdict["prediction"]) is not None:
            seconds, speed, share = (prediction[name] for name in ("step_seconds", "tokens_per_second", "mfu"))
            console.print(
                f"predicted, not measured: a step of {seconds:{'.3g' if seconds < 1000 else ',.0f'}} s at the least, "
                f"{speed:,.0f} trained tokens/s, MFU {share:{'.0%' if share > 0.1 else '.1%'}}, "
                "if rows are full and every device reaches its peaks"
            )
        if number in planned.changes:
            console.print(suggestion(planned, number))
    if planned.late:
        console.print("the deadline ended this plan: what is missing was not compiled in time (--deadline)")


def summary(verdict: dict[str, Any]) -> str:
    """One sentence: on which devices (a topology such as `h100:8`, or those at hand), whether it fits, by how much."""
    devices, needed, limit, programs = (verdict[name] for name in ("devices", "needed", "limit", "programs"))
    where = f"on {devices}" if ":" in devices else f"on {verdict['number']} x {devices}"
    refused = next((program for program in programs if program["refused"]), None)
    if refused and needed <= limit:  # its message names no size
        return f"{where}: does not fit: the compiler refuses `{refused['name']}`: {refused['refused']}"

    def during(program: dict[str, Any]) -> str:
        whose = "" if len(verdict["places"]) == 1 else f" on each {program['place']} device"
        return f"`{program['name']}`{whose}"

    most = during(programs[0]) if programs else "nothing"
    word, rest = ("fits", "to spare") if verdict["fits"] else ("does not fit", "too much")
    text = f"{where}: {word}: {_gib(needed)} of {_gib(limit)} during {most}, {_gib(abs(limit - needed))} {rest}"
    others = [program for program in first_of_each(verdict).values() if program is not programs[0]]
    text += "".join(f"; {_gib(program['total'])} during {during(program)}" for program in others)
    if refused is None:
        return text
    largest = "; the largest array is " + _array(refused["buffers"][0]) if refused["buffers"] else ""
    return f"{text}: the compiler refuses `{refused['name']}`{largest}"


def first_of_each(verdict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The program that needs most of each place, in the order of the places."""
    first = {program["place"]: program for program in reversed(verdict["programs"])}
    return {place: first[place] for place in verdict["places"] if place in first}


def suggestion(planned: Plan, stage: int) -> str:
    """The change that fits, or that none was found."""
    change = planned.changes.get(stage)
    if change is not None:
        return f"it fits with: {change}"
    return f"none of these fits: {'; '.join(planned.tried)}" if planned.tried else "no change is known that could fit"


def _array(buffer: list[Any]) -> str:
    """An array that a compiler lists: its size, type and shape, and the end of its scope, which names the operation."""
    size, shape, scope = buffer
    return "  ".join(filter(None, (_gib(size), shape, "/".join(scope.split("/")[-3:]))))


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
