"""`Recipe`: all settings of a run, read from YAML and checked before any device is initialized. Loads without jax.

A file and its overrides -> plain sections -> resolved stages -> `Recipe`, a frozen value. Each stage takes the sections
above the list as defaults, writes to a separate folder, and starts from the weights of the stage before. `tiny()` is
the same recipe with a small random model and generated data. All mistakes are reported together, each by its key.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError, model_validator

from tunix.config import AlgorithmConfig, Config
from tunix.data.config import CurriculumConfig
from tunix.errors import UserError, nearest
from tunix.models.families.table import FAMILIES
from tunix.recipe.algorithms import DEFAULT, algorithm_config
from tunix.recipe.sections import Sections, complaints
from tunix.recipe.tiny import replaced, shrunk, toy_model
from tunix.rollout.environments.config import RolloutSource
from tunix.util.yaml_io import keys_set, overridden, problems, read_mapping, shown, without_effect, write_yaml

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
        # Merged key by key into the shared sections; a stage's own algorithm or length replaces theirs.
        merged = {**shared, **stage}
        for key, section in stage.items():
            default = shared.get(key)
            if isinstance(section, Mapping) and isinstance(default, Mapping):
                replaces = key == "algorithm" and section.get("name", DEFAULT) != default.get("name", DEFAULT)
                merged[key] = dict(section) if replaces else {**default, **section}
        for key, rival in (("steps", "epochs"), ("epochs", "steps")):
            if stage.get(key) is not None:
                merged[rival] = stage.get(rival)
        algorithm, model = merged.get("algorithm"), merged.get("model")
        if resolved:
            before, section = resolved[-1]["output"], stage.get("model")
            for key in SOURCE:
                if isinstance(section, Mapping) and section.get(key):
                    raise UserError(
                        f"{where}: stages.{index}.model.{key}: only the first stage names weights; this one "
                        f"starts from {before}"
                    )
            precisions = model if isinstance(model, Mapping) else {}
            precisions = {key: value for key, value in precisions.items() if key not in SOURCE}
            merged["model"] = {**precisions, "path": before}
        name = str(algorithm.get("name", DEFAULT)) if isinstance(algorithm, Mapping) else DEFAULT
        folder = f"{index}_{name.rpartition(':')[2]}"
        # Below a shared folder of checkpoints each stage has its own.
        section, written = merged.get("checkpoint"), stage.get("checkpoint")
        place = section.get("folder") if isinstance(section, Mapping) else None
        inherited = not (isinstance(written, Mapping) and "folder" in written)
        if isinstance(section, Mapping) and isinstance(place, str) and inherited:
            merged["checkpoint"] = {**section, "folder": f"{place.rstrip('/')}/{folder}"}
        resolved.append({**merged, "output": f"{output}/{folder}"})
    return resolved


# Keys that may change when a run is resumed: none of them affects the weights up to the step that was reached.
_FREE = re.compile(
    r"(stages\.\d+\.)?(output|logging|checkpoint\.(every|every_minutes|keep|best)|mesh|teacher\.mesh|micro_batch_size|steps|epochs|eval"
    r"|data\.eval|data\.eval_split|optimizer\.on_nonfinite|rollout\.(servers|weights_folder|timeout))(\.|$)"
)


class Recipe(Sections):
    """All settings of one run. With `stages`, the sections of the recipe are those of the first stage."""

    stages: tuple["Recipe", ...] = ()
    """Resolved stages, run one after the other; empty for a single run."""

    @model_validator(mode="after")
    def _agree(self, info: Any) -> "Recipe":
        staged = bool(info.context and info.context.get("staged"))
        if wrong := list(complaints(self, staged)):
            raise ValueError("\n".join(wrong))
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = (), tiny: bool = False) -> "Recipe":
        """Loads a recipe from a YAML file.

        Args:
            path: the file; if there is none, the bare name of a recipe that tunix includes, such as `quickstart`.
            overrides: each `section.key=value`, as on the command line; `stages.0.steps=3` overrides within a stage.
            tiny: a model and data for a laptop; see `tiny`. What overrides set takes precedence.

        Raises:
            UserError: every mistake in the file and the overrides, one line each.
        """
        path, overrides = recipe_file(path), list(overrides)
        sections = written_sections(path, overrides)
        recipe = cls.build(sections, str(path))
        return recipe.tiny(str(path), keys_set(sections, overrides)) if tiny else recipe

    @classmethod
    def build(cls, sections: Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """Builds a checked recipe from plain sections, with stages resolved.

        Args:
            sections: the content of a YAML file.
            where: the file's name, for messages.

        Raises:
            UserError: every mistake, one line each.
        """
        staged = sections.get("stages") not in (None, [], ())
        parts = resolved_stages(sections, where) if staged else [{**sections, "stages": ()}]
        recipes: list[Recipe] = []
        faults: list[list[str]] = []
        for part in parts:
            try:
                recipes.append(cls.model_validate(part, context={"staged": staged, "families": tuple(FAMILIES)}))
                faults.append([])
            except ValidationError as error:
                faults.append(problems(error, known_keys(part.get("algorithm"))))
        if any(faults):
            # Those of keys that all stages share are reported once.
            wrong = [line for line in faults[0] if all(line in fault for fault in faults)]
            wrong += [f"stages.{i}.{line}" for i, fault in enumerate(faults) for line in fault if line not in wrong]
            raise UserError("\n".join(f"{where}: {line}" for line in wrong))
        if early := [index for index, stage in enumerate(recipes[:-1]) if stage.quantization is not None]:
            raise UserError(
                f"{where}: stages.{early[0]}.quantization: a later stage would train on from rounded weights; quantize "
                f"in stages.{len(recipes) - 1}, the last, alone"
            )
        folders = [stage.checkpoint.folder for stage in recipes if stage.checkpoint.folder is not None]
        if shared := next((folder for folder in folders if folders.count(folder) > 1), None):
            raise UserError(f"{where}: checkpoint.folder: {shared} is that of two stages; each needs its own")
        if not staged:
            return recipes[0]
        return recipes[0].model_copy(update={"output": sections["output"], "stages": tuple(recipes)})

    def sections(self) -> dict[str, Any]:
        """The plain values of all keys, from which `build` makes an equal recipe."""
        if not self.stages:
            return self.model_dump(mode="json", exclude={"stages"})
        first, *later = self.stages
        drop = {"stages": True, "output": True, "model": set(SOURCE)}
        dumped = [stage.model_dump(mode="json", exclude=drop) for stage in later]
        return {"output": self.output, "stages": [first.model_dump(mode="json", exclude={"stages", "output"}), *dumped]}

    def to_yaml(self) -> str:
        """The resolved recipe as YAML, from which `load` reads an equal one."""
        return write_yaml(self.sections())

    def difference(self, other: "Recipe") -> list[str]:
        """The differing keys that prevent one recipe from resuming the other's run."""
        ours, theirs = dict(flattened(self.sections())), dict(flattened(other.sections()))
        keys = [*ours, *(key for key in theirs if key not in ours)]
        differing = [key for key in keys if ours.get(key) != theirs.get(key)]
        return [key for key in differing if not _FREE.match(key)]

    @property
    def identity(self) -> str:
        """A digest of all that a resumed run has to have in common with the run that it goes on from."""
        kept = [f"{key}: {value}" for key, value in flattened(self.sections()) if not _FREE.match(key)]
        return hashlib.sha256("\n".join(kept).encode()).hexdigest()

    @property
    def replaced(self) -> tuple[str, ...]:
        """What of a tiny recipe is toy, a phrase each, such as `rows: 64 generated chats`; empty for any other."""
        return tuple(dict.fromkeys(line for stage in self.stages or (self,) for line in replaced(stage)))

    def tiny(self, where: str = "recipe", said: Iterable[frozenset[str]] = ()) -> "Recipe":
        """This recipe for a laptop: a two-layer random model of the family and at most 20 steps; rows that would be
        downloaded become a few generated ones, the user's own stay.

        Args:
            where: the file's name, for messages.
            said: keys that stay as they are, of the recipe or of each of its stages; none by default.

        Raises:
            UserError: the family does not follow from the recipe.
        """
        runs, kept = self.stages or (self,), tuple(said)
        kept = kept or (frozenset(),) * len(runs)
        output = self.output if "output" in kept[0] else f"{self.output}-tiny"
        try:
            toy = toy_model(self.model, self.data, kept[0])
            parts = self.sections()["stages"] if self.stages else [self.sections()]
            tiny = [shrunk(part, run.algorithm, toy, keys) for part, run, keys in zip(parts, runs, kept, strict=True)]
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        tiny[0]["model"] = toy or tiny[0]["model"]
        return Recipe.build({"output": output, "stages": tiny} if self.stages else {**tiny[0], "output": output}, where)


def written_sections(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The plain values that a recipe's file and the overrides set, with the output, and nothing else filled in.

    Raises:
        UserError: the file cannot be read, or an override is malformed or has no effect.
    """
    overrides = list(overrides)
    sections = overridden({"output": f"runs/{path.stem}", **read_mapping(path)}, overrides)
    if ineffective := without_effect(sections, overrides):
        raise UserError("\n".join(f"{path}: {line}" for line in ineffective))
    return sections


def included_recipes() -> dict[str, Path]:
    """The included recipes by name: inside the installed package, or next to it in a source checkout."""
    package = Path(__file__).parents[1]
    places = (package / "recipes", package.parent / "recipes")
    return {file.stem: file for place in places for file in sorted(place.glob("*.yaml"))}


def recipe_file(recipe: str | Path) -> Path:
    """The file of a recipe: the path itself, or that of the included recipe with this bare name.

    Raises:
        UserError: there is none; with the nearest included one.
    """
    path = Path(recipe).expanduser()
    if (path / "recipe.yaml").is_file():
        raise UserError(f"{path} is the folder of a run; its recipe is {path / 'recipe.yaml'}")
    if path.exists():
        return path
    known, bare = included_recipes(), len(path.parts) == 1 and not path.suffix
    if bare and path.name in known:
        return known[path.name]
    # Compared without suffixes, which any two names have in common.
    stem = path.stem if path.suffix in (".yaml", ".yml") else path.name
    siblings = {other.stem: other.name for other in path.parent.glob("*.y*ml")}
    if close := difflib.get_close_matches(stem, siblings, n=1):
        raise UserError(f"{path}: no such file. Did you mean {siblings[close[0]]!r}?")
    if close := difflib.get_close_matches(stem, known, n=1):
        name = close[0]
        raise UserError(f"{path}: no such file. Did you mean {name!r}, which tunix brings ({known[name]})?")
    if hint := nearest(path.name, siblings.values()):
        raise UserError(f"{path}: no such file.{hint}")
    raise UserError(f"{path}: no such file, nor the name of a recipe that tunix brings (`tunix recipes`)")


def recipe_of_run(run: str | Path) -> Recipe | None:
    """The recipe of a run, or of its last stage, whose output is the present place of the folder, since a run may have
    been moved: a later stage finds the stage before it next to its own folder. None where `run` is no run."""
    folder = Path(run).expanduser()
    if not (folder / "recipe.yaml").is_file():
        return None
    recipe = Recipe.load(folder / "recipe.yaml", [f"output={json.dumps(str(folder))}"])
    return recipe.stages[-1] if recipe.stages else recipe


def known_keys(algorithm: Any) -> dict[str, list[str]]:
    """The known keys of each section and of those inside, for hints; those of `algorithm` follow from its name."""
    keys: dict[str, list[str]] = {}
    sections: list[tuple[str, type[Config]]] = [("", Recipe)]
    for place, section in sections:
        keys[place] = [field.alias or key for key, field in section.model_fields.items()]
        for key, field in section.model_fields.items():
            kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
            inner = [kind for kind in kinds if issubclass(kind, Config) and kind is not Recipe]
            sections += [(f"{place}.{key}".lstrip("."), kind) for kind in inner]
    keys |= {"data.train": list(RolloutSource.model_fields), "data.curriculum": list(CurriculumConfig.model_fields)}
    if isinstance(algorithm, Mapping):
        try:
            keys["algorithm"] = list(algorithm_config(algorithm).model_fields)
        except UserError:  # the name itself is the mistake, and already reported
            keys["algorithm"] = list(AlgorithmConfig.model_fields)
    return keys


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of nested mappings with its dotted path."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if path == "stages" else ()
    if not inner:
        yield path, value
    for key, item in inner:
        yield from flattened(item, f"{path}.{key}".lstrip("."))
