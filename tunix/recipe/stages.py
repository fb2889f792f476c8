"""A recipe with `stages` becomes a list of recipes, while it is still plain mappings. Loads without jax.

Each stage takes the sections above the list as defaults, writes into a folder of its own, and starts from the weights
of the stage before.
"""

from collections.abc import Mapping
from typing import Any

from tunix.errors import UserError
from tunix.util.yaml_io import shown

SOURCE = ("path", "init", "family", "preset", "sizes", "tokenizer")
"""The keys of `model` that say where weights come from; a later stage gets them from the stage before."""


def resolved_stages(sections: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Each stage with the sections above it as defaults, its own output, and the weights of the one before.

    Raises:
        UserError: `stages` is no list of mappings, or a stage sets what the list decides.
    """
    shared = {key: value for key, value in sections.items() if key != "stages"}
    listed, output = sections["stages"], shared.get("output")
    if not isinstance(listed, list) or not all(isinstance(own, Mapping) for own in listed):
        raise UserError(f"{where}: stages: {shown(listed)} is not a list of mappings, one for each stage")
    if not isinstance(output, str):
        raise UserError(f"{where}: output: {shown(output)} is no folder for the stages")
    resolved: list[dict[str, Any]] = []
    for index, own in enumerate(listed):
        for key in {"output", "stages"} & own.keys():
            raise UserError(f"{where}: stages.{index}.{key}: set it once, above the stages; each writes below {output}")
        merged = _inherited(shared, own)
        if resolved:
            merged["model"] = _continued(own, merged.get("model"), resolved[-1]["output"], f"{where}: stages.{index}")
        algorithm = merged.get("algorithm")
        name = str(algorithm.get("name", "sft")) if isinstance(algorithm, Mapping) else "sft"
        resolved.append({**merged, "output": f"{output}/{index}_{name.rpartition(':')[2]}"})
    return resolved


def _inherited(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's sections, key by key over those above it. Another algorithm, or another length, starts clean."""
    merged = {**shared, **own}
    for key, mine in own.items():
        theirs = shared.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            other = key == "algorithm" and mine.get("name", "sft") != theirs.get("name", "sft")
            merged[key] = dict(mine) if other else {**theirs, **mine}
    for key, rival in (("steps", "epochs"), ("epochs", "steps")):
        if own.get(key) is not None:
            merged[rival] = own.get(rival)
    return merged


def _continued(own: Mapping[str, Any], model: Any, before: str, where: str) -> dict[str, Any]:
    """The `model` section of a later stage: the run before as its path, the precisions as they were."""
    asked = own.get("model")
    for key in SOURCE:
        if isinstance(asked, Mapping) and asked.get(key):
            raise UserError(f"{where}.model.{key}: only the first stage names weights; this one starts from {before}")
    kept = model if isinstance(model, Mapping) else {}
    return {**{key: value for key, value in kept.items() if key not in SOURCE}, "path": before}
