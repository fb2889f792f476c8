"""Changes of a recipe, or of its devices, that make it fit: a short list, the smallest change first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunix.plan.chips import SHAPES, chip_of, number_of
from tunix.plan.subject import Place
from tunix.recipe.recipe import Recipe
from tunix.util.yaml_io import overridden

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
        yield from _divided(recipe)
        return
    if place == "teaching":
        yield from _fewer_rows(recipe, ())
        return
    samples = worst in ("decode", "prefill", "pages of the cache", "publish")
    yield from (_narrower(recipe) if samples else _shorter(recipe))
    smaller = _smaller_moments(recipe)
    if smaller:
        yield Remedy(smaller)
    if recipe.adapter is None:
        yield Remedy(("adapter={kind: lora, rank: 16, alpha: 32}",))
    if topology is not None:
        yield from (Remedy(topology=more) for more in _more_devices(topology))


def _shorter(recipe: Recipe) -> Iterator[Remedy]:
    """Fewer activations at a time: recomputed layers, then smaller micro-batches."""
    layers = () if recipe.model.remat != "none" else ("model.remat=block",)
    if layers:
        yield Remedy(layers)
    yield from _fewer_rows(recipe, layers)


def _fewer_rows(recipe: Recipe, layers: tuple[str, ...]) -> Iterator[Remedy]:
    """Smaller micro-batches, each with these overrides."""
    size = recipe.micro_batch_size or recipe.sequences_per_update
    least = recipe.algorithm.samples_per_prompt if recipe.data.packing else 1
    for part in (2, 4, 16):
        if size // part >= max(1, min(least, size // part)):
            yield Remedy((*layers, f"micro_batch_size={size // part}"))


def _narrower(recipe: Recipe) -> Iterator[Remedy]:
    """Fewer completions at a time."""
    slots = recipe.rollout.slots or 256
    return (Remedy((f"rollout.slots={slots // part}",)) for part in (2, 4, 8, 16) if slots // part)


def _divided(recipe: Recipe) -> Iterator[Remedy]:
    """Copies of the weights on more of the devices that only sample."""
    mesh = recipe.rollout.devices
    assert mesh is not None, "devices of its own are written"
    assert mesh.devices is not None
    tensor = 2 * mesh.tensor
    while tensor <= mesh.devices:
        yield Remedy((f"rollout.mesh.tensor={tensor}",))
        tensor *= 2


def _smaller_moments(recipe: Recipe) -> tuple[str, ...]:
    """Moments in bfloat16, with the decay that they need."""
    if recipe.optimizer.name not in ("adamw", "lion") or recipe.optimizer.moments_dtype != "float32":
        return ()
    slow = recipe.optimizer.name == "adamw" and (recipe.optimizer.b2 or 0.999) > 0.996
    return ("optimizer.moments_dtype=bfloat16", *(["optimizer.b2=0.99"] if slow else []))


def _more_devices(topology: str) -> Iterator[str]:
    """The same chips, 2 to 64 of them; of TPUs the shapes that exist."""
    name, number = topology.split(":")[0], number_of(topology)
    if chip_of(topology).platform == "gpu":
        yield from (f"{name}:{n}" for n in (2, 4, 8, 16, 32, 64) if number < n <= MOST_DEVICES)
        return
    named = [f"{name}:{shape}" for shape in SHAPES[name]]
    yield from (one for one in named if number < number_of(one) <= MOST_DEVICES)


def with_overrides(recipe: Recipe, overrides: tuple[str, ...]) -> Recipe:
    """The recipe of one run with overrides."""
    return Recipe.build(overridden(recipe.sections(), list(overrides)), "plan") if overrides else recipe
