"""A recipe: everything that makes a run, read from YAML and checked before any device wakes. Loads without jax.

A file and its overrides -> plain sections -> its stages (`stages.py`) -> `Recipe`, a frozen value. `tiny()` is the same
recipe with a model and data that a laptop has at hand. Every mistake is reported at once, by its key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError, model_validator

from tunix.config import AlgorithmConfig, Config
from tunix.errors import UserError, nearest
from tunix.recipe.algorithms import algorithm_config
from tunix.recipe.rules import complaints
from tunix.recipe.sections import Sections
from tunix.recipe.stages import SOURCE, resolved_stages
from tunix.recipe.tiny import CAPPED, shrunk, tiny_model
from tunix.util.yaml_io import outranked, overridden, problems, read_mapping, write_yaml

# Keys in which a resumed run may differ: none of them changes a weight up to the step that was reached.
_FREE = re.compile(
    r"(stages\.\d+\.)?(output|logging|checkpoint|mesh|teacher\.mesh|micro_batch_size|steps|epochs|eval"
    r"|data\.eval|data\.eval_split)(\.|$)"
)


class Recipe(Sections):
    """One run as a value. With `stages`, its own sections are those of the first stage."""

    stages: tuple["Recipe", ...] = ()
    """Resolved stages, run one after the other; empty where the recipe is a single run."""

    @model_validator(mode="after")
    def _agree(self, info: Any) -> "Recipe":
        staged = bool(info.context and info.context.get("staged"))
        if wrong := list(complaints(self, staged)):
            raise ValueError("\n".join(wrong))
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = (), tiny: bool = False) -> "Recipe":
        """The recipe in a YAML file.

        Args:
            path: the file; or, where there is none, the bare name of a recipe that tunix brings, such as `quickstart`.
            overrides: `section.key=value` each, as on the command line; `stages.0.steps=3` reaches into a stage.
            tiny: a model and data for a laptop; see `tiny`. Overrides of what it caps are kept as they are.

        Raises:
            UserError: every mistake in the file and the overrides, one line each.
        """
        path, overrides = _found(Path(path).expanduser()), list(overrides)
        sections = overridden({"output": f"runs/{path.stem}", **read_mapping(path)}, overrides)
        if unheard := outranked(sections, overrides):
            raise UserError("\n".join(f"{path}: {line}" for line in unheard))
        recipe = cls.build(sections, str(path))
        if not tiny:
            return recipe
        kept = [override for override in overrides if CAPPED.match(override)]
        return cls.build(overridden(recipe.tiny(str(path)).sections(), kept), str(path))

    @classmethod
    def build(cls, sections: Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """The recipe that plain sections make, with stages resolved.

        Args:
            sections: what a YAML file holds.
            where: the file's name, for messages.

        Raises:
            UserError: every mistake, one line each.
        """
        staged = sections.get("stages") not in (None, [], ())
        parts = resolved_stages(sections, where) if staged else [{**sections, "stages": ()}]
        checked = [_checked(part, staged) for part in parts]
        recipes = tuple(part for part in checked if isinstance(part, Recipe))
        if len(recipes) < len(checked):
            raise UserError("\n".join(f"{where}: {line}" for line in _gathered(checked)))
        if early := [index for index, stage in enumerate(recipes[:-1]) if stage.quantization is not None]:
            raise UserError(
                f"{where}: stages.{early[0]}.quantization: a later stage would train on from rounded weights; quantize "
                f"in stages.{len(recipes) - 1}, the last, alone"
            )
        return recipes[0].model_copy(update={"output": sections["output"], "stages": recipes}) if staged else recipes[0]

    def sections(self) -> dict[str, Any]:
        """Plain values of every key, from which `build` makes an equal recipe."""
        if not self.stages:
            return self.model_dump(mode="json", exclude={"stages"})
        first, *later = self.stages
        drop = {"stages": True, "output": True, "model": set(SOURCE)}
        dumped = [stage.model_dump(mode="json", exclude=drop) for stage in later]
        return {"output": self.output, "stages": [first.model_dump(mode="json", exclude={"stages", "output"}), *dumped]}

    def to_yaml(self) -> str:
        """The resolved recipe as YAML; `load` reads an equal one back."""
        return write_yaml(self.sections())

    def difference(self, other: "Recipe") -> list[str]:
        """The keys in which two recipes differ so that one cannot go on with the other's run."""
        mine, theirs = dict(_flat(self.sections())), dict(_flat(other.sections()))
        keys = [*mine, *(key for key in theirs if key not in mine)]
        differing = [key for key in keys if mine.get(key) != theirs.get(key)]
        return [key for key in differing if not _FREE.match(key)]

    def tiny(self, where: str = "recipe") -> "Recipe":
        """The same recipe for a laptop: a two-layer random model of the family, a few made rows, at most 20 steps.

        Args:
            where: the file's name, for messages.

        Raises:
            UserError: the family cannot be told from the recipe.
        """
        sections, output = self.sections(), f"{self.output}-tiny"
        try:
            model = tiny_model(self.model)
            if not self.stages:
                return Recipe.build(
                    {**shrunk(sections, self.algorithm, model["family"]), "model": model, "output": output}, where
                )
            staged = zip(sections["stages"], self.stages, strict=True)
            first, *later = (shrunk(stage, recipe.algorithm, model["family"]) for stage, recipe in staged)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        return Recipe.build({"output": output, "stages": [{**first, "model": model}, *later]}, where)


def brought() -> dict[str, Path]:
    """The recipes that tunix brings, by name: inside of the package where a wheel put them, else beside it."""
    package = Path(__file__).parents[1]
    places = (package / "recipes", package.parent / "recipes")
    return {file.stem: file for place in places for file in sorted(place.glob("*.yaml"))}


def _found(path: Path) -> Path:
    """The file itself, or the one of ours that a bare name stands for.

    Raises:
        UserError: neither is there.
    """
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    if path.name not in (known := brought()):
        names = ", ".join(known)
        raise UserError(f"{path}: no such file, nor a recipe that tunix brings: {names}.{nearest(path.name, known)}")
    return known[path.name]


def _checked(sections: Mapping[str, Any], staged: bool) -> "Recipe | list[str]":
    """The recipe, or what is wrong with it.

    Args:
        staged: what is set may be meant for another stage than this one.
    """
    try:
        return Recipe.model_validate(sections, context={"staged": staged})
    except ValidationError as error:
        return problems(error, _keys(sections.get("algorithm")))


def _gathered(checked: List["Recipe | list[str]"]) -> list[str]:
    """The problems of all stages; those that all of them share stand above the stages, and are told once."""
    faults = [fault if isinstance(fault, list) else [] for fault in checked]
    common = [line for line in faults[0] if all(line in fault for fault in faults)]
    own = [f"stages.{index}.{line}" for index, fault in enumerate(faults) for line in fault if line not in common]
    return common + own


def _keys(algorithm: Any) -> dict[str, list[str]]:
    """The known keys of each section, for hints; the algorithm's are those of its own config."""
    keys = {"": list(Recipe.model_fields)}
    for name, field in Recipe.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        for section in (kind for kind in kinds if issubclass(kind, Config) and kind is not Recipe):
            keys[name] = [field.alias or key for key, field in section.model_fields.items()]
    if isinstance(algorithm, Mapping):
        try:
            keys["algorithm"] = list(algorithm_config(algorithm).model_fields)
        except UserError:  # the name itself is the mistake, and already told
            keys["algorithm"] = list(AlgorithmConfig.model_fields)
    return keys


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a tree with its dotted path."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if path == "stages" else ()
    if not inner:
        yield path, value
    for key, item in inner:
        yield from _flat(item, f"{path}.{key}".lstrip("."))
