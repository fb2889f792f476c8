"""`python -m tunix.plan.worker`: plans one recipe; reads a request on standard input, writes lines of JSON.

It runs in a process of its own, since compilers of devices that are not here are set up once in a process, and since it
may have to be stopped. Where a recipe does not fit, it tries a short list of changes, the smallest first (`remedies`).
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tunix.errors import UserError
from tunix.mesh import groups_of
from tunix.plan import chips, topology
from tunix.plan.chips import SHAPES, chip_of, number_of
from tunix.plan.subject import Place, subject_of
from tunix.plan.verdict import Target, Verdict, examined, refuted, with_arrays
from tunix.recipe.recipe import Recipe
from tunix.util.yaml_io import overridden

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
        verdict = _verdict(stage, named, lambda program: tell({"compiling": program}))
        tell({"verdict": verdict.report(), "stage": number})
        if not verdict.fits and request["remedies"]:
            tell({"change": _change(stage, verdict, named, tell), "stage": number})


SOURCE = ("path", "init", "family", "preset", "sizes")
"""Keys of `model` that say what it is."""


def _verdict(recipe: Recipe, named: str | None, tell: Callable[[str], None]) -> Verdict:
    target, devices = _target(named)
    verdict = examined(subject_of(recipe, devices, float(target.limit)), target, tell)
    if not any(need.refused for need in verdict.needs):
        return verdict
    larger = None
    if named and chips.chip_of(named).platform == "tpu" and not named.startswith("v5p"):
        # As many of the TPUs with the most memory.
        shapes = (f"v5p:{shape}" for shape in SHAPES["v5p"])
        larger = next((shape for shape in shapes if number_of(shape) == number_of(named)), None)
    if larger is None:
        return verdict
    tell("it once more for chips with more memory, to name its arrays")
    roomy, devices = _target(larger)
    return with_arrays(verdict, subject_of(recipe, devices, float(target.limit)), roomy)


def _change(recipe: Recipe, verdict: Verdict, named: str | None, tell: Tell) -> str | None:
    """The changes with which the recipe fits, one for each place that is too small; None where there are none."""

    def suits(remedy: Remedy, places: Collection[Place]) -> bool:
        try:
            changed, overrides = recipe, list(remedy.overrides)
            if overrides:
                changed = Recipe.build(overridden(recipe.sections(), overrides), "plan")
            target, devices = _target(remedy.topology or named)
            made = subject_of(changed, devices, float(target.limit))
        except UserError:  # a change that this recipe does not allow
            return False
        return not any(refuted(made, target, place) for place in places)

    def first(place: Place) -> Remedy | None:
        worst = next((need.name for need in verdict.needs if need.place == place), "")
        for remedy in remedies(recipe, worst, named, place):
            tell({"trying": remedy.words})
            if suits(remedy, [place]):
                return remedy
        return None

    changes = [remedy for remedy in map(first, verdict.misfits) if remedy is not None]
    whole = joined(changes)
    # What helps one place must not be too much for another.
    return whole.words if len(changes) == len(verdict.misfits) and suits(whole, verdict.held) else None


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


MOST_DEVICES = 64
"""Devices that are suggested at most."""


@dataclass(frozen=True)
class Remedy:
    """One change to try."""

    overrides: tuple[str, ...] = ()
    """As on the command line."""
    topology: str | None = None
    """Other devices; None for the same."""

    @property
    def words(self) -> str:
        """The change as it is given to `tunix plan`."""
        return " ".join((*self.overrides, *(["--topology", self.topology] if self.topology else [])))


def joined(changes: Sequence[Remedy]) -> Remedy:
    """Several changes as one."""
    overrides = tuple(word for one in changes for word in one.overrides)
    return Remedy(overrides, next((one.topology for one in changes if one.topology), None))


def remedies(recipe: Recipe, worst: str, topology: str | None, place: Place = "training") -> Iterator[Remedy]:
    """Changes to try, in order.

    Args:
        recipe: of one run, without stages.
        worst: name of the program that needs most.
        topology: of the plan; None for the devices at hand.
        place: whose devices have not enough memory.
    """
    if place == "sampling":
        yield from _narrower(recipe)
        # Copies of the weights on more of the devices that only sample.
        mesh = recipe.rollout.devices
        assert mesh is not None, "devices of its own are written"
        assert mesh.devices is not None
        tensor = 2 * mesh.tensor
        while tensor <= mesh.devices:
            yield Remedy((f"rollout.mesh.tensor={tensor}",))
            tensor *= 2
        return
    if place == "teaching":
        yield from _fewer_rows(recipe, ())
        return
    if worst in ("decode", "prefill", "pages of the cache", "publish"):
        yield from _narrower(recipe)
    else:  # fewer activations at a time: recomputed layers, then smaller micro-batches
        layers = () if recipe.model.remat != "none" else ("model.remat=block",)
        if layers:
            yield Remedy(layers)
        yield from _fewer_rows(recipe, layers)
    optimizer = recipe.optimizer
    if optimizer.name in ("adamw", "lion") and optimizer.moments_dtype == "float32":
        # Moments in bfloat16, with the decay that they need.
        slow = optimizer.name == "adamw" and (optimizer.b2 or 0.999) > 0.996
        yield Remedy(("optimizer.moments_dtype=bfloat16", *(["optimizer.b2=0.99"] if slow else [])))
    if recipe.adapter is None:
        yield Remedy(("adapter={kind: lora, rank: 16, alpha: 32}",))
    if topology is not None:  # the same chips, 2 to 64 of them; of TPUs the shapes that exist
        name = topology.split(":")[0]
        gpus = chip_of(topology).platform == "gpu"
        for shape in ("2", "4", "8", "16", "32", "64") if gpus else SHAPES[name]:
            if number_of(topology) < number_of(f"{name}:{shape}") <= MOST_DEVICES:
                yield Remedy(topology=f"{name}:{shape}")


def _fewer_rows(recipe: Recipe, layers: tuple[str, ...]) -> Iterator[Remedy]:
    """Smaller micro-batches, each with these overrides."""
    size = recipe.micro_batch_size or recipe.sequences_per_update
    for part in (2, 4, 16):
        if size // part:
            yield Remedy((*layers, f"micro_batch_size={size // part}"))


def _narrower(recipe: Recipe) -> Iterator[Remedy]:
    """Fewer completions at a time."""
    slots = recipe.rollout.slots or 256
    return (Remedy((f"rollout.slots={slots // part}",)) for part in (2, 4, 8, 16) if slots // part)


if __name__ == "__main__":
    main()
