"""`python -m tunix.plan.worker`: plans one recipe; reads a request on standard input, writes lines of JSON.

It runs in a process of its own, since compilers of devices that are not here are set up once in a process, and since it
may have to be stopped.
"""

import json
import os
import sys
from collections.abc import Callable, Collection
from typing import Any

import jax

from tunix.errors import UserError
from tunix.mesh import groups_of
from tunix.plan import chips, topology
from tunix.plan.remedies import Remedy, joined, remedies, with_overrides
from tunix.plan.subject import Place, subject_of
from tunix.plan.verdict import Target, Verdict, examined, refuted, with_arrays
from tunix.recipe.recipe import Recipe

Tell = Callable[[dict[str, Any]], None]


def main() -> None:
    """Answers the request: one line for each stage's verdict, one for each change that was tried, or one error."""
    request = json.loads(sys.stdin.read())
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Compilers write to both: only the lines of this protocol go to the first.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    if request["topology"] is not None:
        topology.prepare()
    # It does not look at scopes, which say how often loops run.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        answer(request, tell)
    except UserError as error:
        tell({"error": str(error)})


def answer(request: dict[str, Any], tell: Tell) -> None:
    """Plans every stage of a recipe, and tries changes where one does not fit.

    Args:
        request: `recipe` and `name` of `Recipe.build`, `topology` (None for the devices at hand), `remedies`.
        tell: receives each line of the answer.
    """
    named = request["topology"]
    recipe = Recipe.build(request["recipe"], request["name"])
    for number, stage in enumerate(recipe.stages or (recipe,)):
        # A later stage's folder does not exist yet: its model is the first one's.
        model = stage.model.model_copy(update={name: vars(recipe.model)[name] for name in SOURCE})
        stage = stage.model_copy(update={"model": model})
        tell({"begun": number})
        found = _verdict(stage, named, lambda program: tell({"compiling": program}))
        tell({"verdict": found.report(), "stage": number})
        if not found.fits and request["remedies"]:
            tell({"change": _change(stage, found, named, tell), "stage": number})


SOURCE = ("path", "init", "family", "preset", "sizes")
"""Keys of `model` that say what it is."""


def _verdict(recipe: Recipe, named: str | None, tell: Callable[[str], None]) -> Verdict:
    target, devices = _target(named)
    found = examined(subject_of(recipe, devices, float(target.limit)), target, tell)
    larger = topology.roomiest(named) if named else None
    if larger is None or not any(one.refused for one in found.needs):
        return found
    tell("it once more for chips with more memory, to name its arrays")
    roomy, devices = _target(larger)
    return with_arrays(found, subject_of(recipe, devices, float(target.limit)), roomy)


def _change(recipe: Recipe, found: Verdict, named: str | None, tell: Tell) -> str | None:
    """The changes with which the recipe fits, one for each place that is too small; None where there are none."""

    def suits(one: Remedy, places: Collection[Place]) -> bool:
        try:
            changed, (target, devices) = with_overrides(recipe, one.overrides), _target(one.topology or named)
            made = subject_of(changed, devices, float(target.limit))
        except UserError:  # a change that this recipe does not allow
            return False
        return not any(refuted(made, target, place) for place in places)

    def first(place: Place) -> Remedy | None:
        worst = next((one.name for one in found.needs if one.place == place), "")
        for one in remedies(recipe, worst, named, place):
            tell({"trying": one.words})
            if suits(one, [place]):
                return one
        return None

    changes = [one for one in map(first, found.misfits) if one is not None]
    whole = joined(changes)
    # What helps one place must not be too much for another.
    return whole.words if len(changes) == len(found.misfits) and suits(whole, found.held) else None


def _target(named: str | None) -> tuple[Target, list[Any]]:
    """The devices of a topology, or those at hand, and what they have."""
    if named is not None:
        topology.hasten(chips.chip_of(named).platform)
        devices = topology.devices_of(named)
        limit, chip = topology.limit_of(named), chips.chip_of(named)
        return Target(named, len(devices), limit, chip, topology.near_of(named)), devices
    devices = jax.devices()
    topology.hasten(devices[0].platform)
    stats = devices[0].memory_stats() or {}
    # Virtual devices of a CPU share its memory.
    limit = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    near = len(devices) // len(groups_of(devices))
    return Target(devices[0].device_kind, len(devices), int(limit), near=near), devices


if __name__ == "__main__":
    main()
