"""`python -m tunix.plan.worker`: plans one recipe; reads a request on standard input, writes lines of JSON.

It runs in a process of its own, since compilers of devices that are not here are set up once in a process, and since it
may have to be stopped. Where a recipe does not fit, it tries a short list of changes, the smallest first (`remedies`).
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax

from tunix.errors import UserError
from tunix.plan import topology
from tunix.plan.subject import Place, subject_of
from tunix.plan.verdict import Target, Verdict, examined, refuted
from tunix.recipe.recipe import Recipe
from tunix.util.chips import SHAPES, chip_of, number_of
from tunix.util.yaml_io import overridden

Tell = Callable[[dict[str, Any]], None]
SOURCE = ("path", "init", "family", "preset", "sizes")
"""Keys of `model` that say what it is."""
MOST_DEVICES = 64
"""Devices that are suggested at most."""
Change = tuple[str, ...]
"""Words for `tunix plan`: overrides such as `model.remat=block`, and other devices as `--topology h100:8`."""
TOPOLOGY = "--topology "


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
    # A program that is read back from it may not say its peak.
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
        target, devices = target_of(named)
        subject = subject_of(stage, devices, float(target.limit))
        verdict = examined(subject, target, lambda program: tell({"compiling": program}))
        tell({"verdict": verdict.report(), "stage": number})
        if not verdict.fits and request["remedies"]:
            tell({"change": change(stage, verdict, named, tell), "stage": number})


def change(recipe: Recipe, verdict: Verdict, named: str | None, tell: Tell) -> str | None:
    """The changes with which the recipe fits, one for each place that is too small; None where there are none."""

    def suits(words: Change, places: Collection[Place]) -> bool:
        overrides = [word for word in words if not word.startswith(TOPOLOGY)]
        others = [word.removeprefix(TOPOLOGY) for word in words if word.startswith(TOPOLOGY)]
        try:
            changed = Recipe.build(overridden(recipe.sections(), overrides), "plan") if overrides else recipe
            target, devices = target_of(others[0] if others else named)
            subject = subject_of(changed, devices, float(target.limit))
        except UserError:  # a change that this recipe does not allow
            return False
        return not any(refuted(subject, target, place) for place in places)

    def first(place: Place) -> Change | None:
        worst = next((program.name for program in verdict.programs if program.place == place), "")
        for words in remedies(recipe, worst, named, place):
            tell({"trying": " ".join(words)})
            if suits(words, [place]):
                return words
        return None

    changes = [words for words in map(first, verdict.misfits) if words is not None]
    together = tuple(word for words in changes for word in words)
    # What helps one place must not be too much for another.
    return " ".join(together) if len(changes) == len(verdict.misfits) and suits(together, verdict.held) else None


def target_of(named: str | None) -> tuple[Target, list[Any]]:
    """The devices of a topology, or those at hand, and what they have."""
    if named is not None:
        chip = chip_of(named)
        topology.hasten(chip.platform)
        devices = topology.devices_of(named)
        return Target(named, len(devices), topology.limit_of(named), chip), devices
    devices = jax.devices()
    topology.hasten(devices[0].platform)
    stats = devices[0].memory_stats() or {}
    # Virtual devices of a CPU share its memory.
    limit = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    return Target(devices[0].device_kind, len(devices), int(limit)), devices


def remedies(recipe: Recipe, worst: str, topology: str | None, place: Place = "training") -> Iterator[Change]:
    """Changes to try, in order.

    Args:
        recipe: of one run, without stages.
        worst: name of the program that needs most.
        topology: of the plan; None for the devices at hand.
        place: whose devices have not enough memory.
    """
    slots, size = recipe.rollout.slots or 256, recipe.micro_batch_size or recipe.sequences_per_update
    fewer_slots = [(f"rollout.slots={slots // part}",) for part in (2, 4, 8, 16) if slots // part]
    smaller = [f"micro_batch_size={size // part}" for part in (2, 4, 16) if size // part]
    if place == "teaching":
        yield from ((words,) for words in smaller)
        return
    if place == "sampling":
        yield from fewer_slots
        # Copies of the weights on more of the devices that only sample.
        mesh = recipe.rollout.devices
        assert mesh is not None, "devices of its own are written"
        assert mesh.devices is not None
        tensor = 2 * mesh.tensor
        while tensor <= mesh.devices:
            yield (f"rollout.mesh.tensor={tensor}",)
            tensor *= 2
        return
    if worst in ("decode", "prefill", "pages of the cache", "publish"):
        yield from fewer_slots
    else:  # fewer activations at a time: recomputed layers, then smaller micro-batches
        layers = () if recipe.model.remat != "none" else ("model.remat=block",)
        if layers:
            yield layers
        yield from ((*layers, words) for words in smaller)
    optimizer = recipe.optimizer
    if optimizer.name in ("adamw", "lion") and optimizer.moments_dtype == "float32":
        # Moments in bfloat16, with the decay that they need.
        slow = optimizer.name == "adamw" and (optimizer.b2 or 0.999) > 0.996
        yield ("optimizer.moments_dtype=bfloat16", *(["optimizer.b2=0.99"] if slow else []))
    if recipe.adapter is None:
        yield ("adapter={kind: lora, rank: 16, alpha: 32}",)
    if topology is not None:  # the same chips, 2 to 64 of them; of TPUs the shapes that exist
        name = topology.split(":")[0]
        gpus = chip_of(topology).platform == "gpu"
        for shape in ("2", "4", "8", "16", "32", "64") if gpus else SHAPES[name]:
            if number_of(topology) < number_of(f"{name}:{shape}") <= MOST_DEVICES:
                yield (f"{TOPOLOGY}{name}:{shape}",)


if __name__ == "__main__":
    main()
