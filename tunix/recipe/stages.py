"""Resolves a recipe with `stages` into the sections of each stage, as plain mappings. Loads without jax.

Each stage takes the sections above the list as defaults, writes to a separate folder, and starts from the weights of
the stage before.
"""

from collections.abc import Mapping
from typing import Any

from tunix.errors import UserError
from tunix.recipe.algorithms import DEFAULT
from tunix.util.yaml_io import shown

SOURCE = ("path", "init", "family", "preset", "sizes", "tokenizer")
"""The keys of `model` that determine where weights come from; a later stage starts from the stage before instead."""


def resolved_stages(sections: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The complete sections of each stage, with its output folder and the stage before as its model.

    Raises:
        UserError: `stages` is no list of mappings, or a stage sets a key that is set for it.
    """
    shared = {key: value for key, value in sections.items() if key != "stages"}
    listed, output = sections["stages"], shared.get("output")
    if not isinstance(listed, list) or not all(isinstance(stage, Mapping) for stage in listed):
        raise UserError(f"{where}: stages: {shown(listed)} is not a list of mappings, one for each stage")
    if not isinstance(output, str):
        raise UserError(f"{where}: output: {shown(output)} is no folder for the stages")
    resolved: list[dict[str, Any]] = []
    for index, stage in enumerate(listed):
        for key in {"output", "stages"} & stage.keys():
            raise UserError(f"{where}: stages.{index}.{key}: set it once, above the stages; each writes below {output}")
        merged = _inherited(shared, stage)
        if resolved:
            merged["model"] = _continued(stage, merged.get("model"), resolved[-1]["output"], f"{where}: stages.{index}")
        algorithm = merged.get("algorithm")
        name = str(algorithm.get("name", DEFAULT)) if isinstance(algorithm, Mapping) else DEFAULT
        folder = f"{index}_{name.rpartition(':')[2]}"
        resolved.append({**merged, **_checkpoint(stage, merged, folder), "output": f"{output}/{folder}"})
    return resolved


def _inherited(shared: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's sections merged key by key into the shared ones; its own algorithm or length replaces theirs."""
    merged = {**shared, **stage}
    for key, section in stage.items():
        default = shared.get(key)
        if isinstance(section, Mapping) and isinstance(default, Mapping):
            replaces = key == "algorithm" and section.get("name", DEFAULT) != default.get("name", DEFAULT)
            merged[key] = dict(section) if replaces else {**default, **section}
    for key, rival in (("steps", "epochs"), ("epochs", "steps")):
        if stage.get(key) is not None:
            merged[rival] = stage.get(rival)
    return merged


def _checkpoint(stage: Mapping[str, Any], merged: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The `checkpoint` section of a stage if it inherits a folder: its own checkpoints are in a folder in there."""
    section, written = merged.get("checkpoint"), stage.get("checkpoint")
    folder = section.get("folder") if isinstance(section, Mapping) else None
    if (
        not isinstance(section, Mapping)
        or not isinstance(folder, str)
        or (isinstance(written, Mapping) and "folder" in written)
    ):
        return {}
    return {"checkpoint": {**section, "folder": f"{folder.rstrip('/')}/{name}"}}


def _continued(stage: Mapping[str, Any], model: Any, before: str, where: str) -> dict[str, Any]:
    """The `model` section of a later stage: the stage before as its path, with inherited precisions."""
    section = stage.get("model")
    for key in SOURCE:
        if isinstance(section, Mapping) and section.get(key):
            raise UserError(f"{where}.model.{key}: only the first stage names weights; this one starts from {before}")
    inherited = model if isinstance(model, Mapping) else {}
    return {**{key: value for key, value in inherited.items() if key not in SOURCE}, "path": before}
