"""A recipe: everything that makes a run, read from YAML and checked before any device wakes. Loads without jax.

A file and its overrides -> plain sections -> its stages (`stages.py`) -> `Recipe`, a frozen value -> `run()`. `tiny()`
is the same recipe with a model and data that a laptop has at hand. Every mistake is reported at once, by its key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from tunix.algorithms.config import PolicyConfig
from tunix.algorithms.distill.config import DistillConfig, TeacherConfig
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.kto.config import KTOConfig
from tunix.algorithms.sft.config import SFTConfig
from tunix.catalogue import ALGORITHMS, algorithm_config
from tunix.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    Family,
    LoggingConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    Positive,
    RewardConfig,
    RolloutConfig,
)
from tunix.errors import UserError, nearest
from tunix.lora.config import AdapterConfig
from tunix.models.families import preset, small, with_sizes
from tunix.models.rules import QuantizationConfig
from tunix.reading import outranked, overridden, problems, read_mapping, write_yaml
from tunix.shrink import CAPPED, shrunk, tiny_model
from tunix.stages import SOURCE, resolved_stages

if TYPE_CHECKING:
    from tunix.run import RunResult

# Keys in which a resumed run may differ: none of them changes a weight up to the step that was reached.
_FREE = re.compile(
    r"(stages\.\d+\.)?(output|logging|checkpoint|mesh|teacher\.mesh|micro_batch_size|steps|epochs|eval"
    r"|data\.eval|data\.eval_split)(\.|$)"
)


class Recipe(Config):
    """One run as a value. With `stages`, its own sections are those of the first stage."""

    model: ModelConfig
    adapter: AdapterConfig | None = None
    quantization: QuantizationConfig | None = None
    """Trains a model that is to be rounded, with the rounding in it."""
    data: DataConfig
    algorithm: SerializeAsAny[AlgorithmConfig] = SFTConfig()
    teacher: TeacherConfig | None = None
    """Of whom a student learns; for `algorithm: {name: distill}`."""
    reward: RewardConfig | None = None
    """What completions that the model writes are worth: to train on, and on the rows of `data.eval`."""
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    eval: EvalConfig = EvalConfig()
    batch_size: Positive = 32
    """Sequences per update, over all devices; prompts per step where the policy writes the completions."""
    micro_batch_size: Positive | None = None
    """Sequences per compiled pass; never changes the result."""
    steps: Positive | None = None
    """Updates; or give `epochs`. One epoch where neither is given."""
    epochs: Positive | None = None
    """Passes over the training rows, instead of `steps`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of everything random: first weights, order of the rows, noise."""
    output: str
    """The run folder; where a file does not say it, `runs/` and the file's name."""
    stages: tuple["Recipe", ...] = ()
    """Resolved stages, run one after the other; empty where the recipe is a single run."""

    @property
    def sequences_per_update(self) -> int:
        """Sequences that one optimizer update sees."""
        return self.algorithm.sequences_per_update(self.batch_size)

    @field_validator("algorithm", mode="before")
    @classmethod
    def _choose(cls, value: Any) -> Any:
        return algorithm_config(value).model_validate(value) if isinstance(value, Mapping) else value

    @model_validator(mode="before")
    @classmethod
    def _one_epoch(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("steps") is None and value.get("epochs") is None:
            return {**value, "epochs": 1}
        return value

    @model_validator(mode="after")
    def _agree(self, info: Any) -> "Recipe":
        staged = bool(info.context and info.context.get("staged"))
        if complaints := [*_disagreements(self), *_unread(self, staged), *_untaught(self, staged)]:
            raise ValueError("\n".join(complaints))
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

    def run(self, *, fresh: bool = False) -> "RunResult":
        """Trains; goes on where the run folder holds the same recipe.

        Args:
            fresh: start again, leaving what the folder held aside.
        """
        from tunix.run import run

        return run(self, fresh=fresh)


def brought() -> dict[str, Path]:
    """The recipes that tunix brings, by name: inside of the package where a wheel put them, else beside it."""
    package = Path(__file__).parent
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


def _disagreements(recipe: Recipe) -> Iterator[str]:
    """The rules across sections, and those that ask the families."""
    model = recipe.model
    if model.init == "random":
        try:
            decoder = preset(model.preset) if model.preset else small(cast(Family, model.family))
            with_sizes(decoder, model.sizes)
        except UserError as error:
            yield f"model.{error}"
        else:
            if model.family not in (None, decoder.family):
                yield f"model.family: {model.family!r} is not that of preset {model.preset!r}; leave it out"
    if recipe.steps and recipe.epochs:
        yield f"steps and epochs: {recipe.steps} and {recipe.epochs}; give one, or clear one with `epochs=null`"
    if recipe.micro_batch_size and recipe.micro_batch_size > (largest := recipe.sequences_per_update):
        named = "batch_size, which is" if largest == recipe.batch_size else "the sequences of an update, which are"
        yield f"micro_batch_size: {recipe.micro_batch_size} is above {named} {largest}"
    warmup = recipe.optimizer.warmup
    if recipe.steps and warmup >= 1 and warmup >= recipe.steps:
        yield (
            f"optimizer.warmup: {warmup:g} steps of warm-up do not end before the run's {recipe.steps}; "
            "below 1 it is a share of them"
        )
    if recipe.quantization is not None and recipe.adapter is not None:
        yield (
            f"quantization: {recipe.quantization.mode} trains the weights that it rounds, and under an adapter they "
            "are frozen: leave one of them out. `adapter: {kind: qlora}` rounds a frozen base; `tunix quantize` rounds "
            "a model whose adapter is merged"
        )
    if recipe.data.cuts and recipe.algorithm.reads != "completions":
        yield (
            f"data.packing: {recipe.data.packing} cuts a text into pieces, and {recipe.algorithm.name} reads "
            f"{recipe.algorithm.reads}, which stay whole; take true or false"
        )
    if recipe.adapter is not None and recipe.adapter.source and model.init == "random":
        yield "adapter.from: an adapter belongs to the base that it was trained on; this one is random: set model.path"
    if recipe.optimizer.lora_plus and recipe.adapter is None:
        yield "optimizer.lora_plus: changes nothing without an adapter section, whose B it is about"
    if recipe.adapter is not None and recipe.adapter.dropout and recipe.algorithm.reads == "prompts":
        yield (
            f"adapter.dropout: {recipe.adapter.dropout:g} would have the trainer compute other log-probs than the "
            f"sampler drew with, which {recipe.algorithm.name} learns from; set it to 0"
        )
    if recipe.eval != EvalConfig() and not (recipe.data.eval or recipe.data.eval_split):
        usual = EvalConfig()
        changed = [key for key in EvalConfig.model_fields if getattr(recipe.eval, key) != getattr(usual, key)]
        names = ", ".join(f"eval.{key}" for key in sorted(changed))
        yield f"{names}: changes nothing without held-out rows; set data.eval or data.eval_split"


def _unread(recipe: Recipe, staged: bool) -> Iterator[str]:
    """What is asked of rewards and rollouts where there are none, and what they lack.

    Args:
        staged: what is set may be meant for another stage than this one.
    """
    if not recipe.algorithm.speaks and not staged:
        yield from _unsaid(recipe)
        return
    held_out = bool(recipe.data.eval or recipe.data.eval_split)
    rewarded = recipe.reward is not None or recipe.rollout.environment is not None
    writes = recipe.algorithm.reads == "prompts"
    if isinstance(recipe.algorithm, KTOConfig) and recipe.algorithm.loss == "kto" and recipe.batch_size < 2:
        yield "batch_size: 1 row has no other row's prompt, from which kto measures the KL; take 2 or more"
    if isinstance(recipe.algorithm, DPOConfig) and recipe.algorithm.sorts and recipe.batch_size < 2:
        yield f"batch_size: {recipe.algorithm.loss} sorts the pairs of a batch, and 1 has no other; take 2 or more"
    if recipe.algorithm.learns_from_rewards:
        if not rewarded:
            yield (
                f"reward: {recipe.algorithm.name} learns from rewards: name some, as in "
                "`reward: {functions: [exact_match]}`, or a rollout.environment that gives them"
            )
        if isinstance(recipe.algorithm, PolicyConfig) and recipe.algorithm.updates > recipe.batch_size:
            yield f"algorithm.updates: {recipe.algorithm.updates} parts of {recipe.batch_size} prompts (batch_size)"
        return
    judged = any(name == "eval/reward" or name.startswith("eval/reward/") for name in recipe.eval.until)
    if judged and not (rewarded and held_out):
        yield "eval.until: eval/reward is not measured without a reward section and held-out rows"
    if staged:
        return
    if rewarded and not held_out and not (writes and recipe.reward is None):
        yield f"reward: {recipe.algorithm.name} does not train on rewards; to evaluate by them, set data.eval"
    for key in _unread_lengths(recipe):
        if getattr(recipe.data, key) and not (rewarded or writes):
            yield f"data.{key}: changes nothing where the model writes no completions; max_length is the limit"
    if not (rewarded or writes) and recipe.rollout != RolloutConfig():
        yield f"rollout: changes nothing for {recipe.algorithm.name} without a reward"


def _unread_lengths(recipe: Recipe) -> tuple[str, ...]:
    """Limits of completions that nobody has where the model writes none; the sides of given pairs have one."""
    return ("prompt_length",) if recipe.algorithm.reads == "pairs" else ("prompt_length", "completion_length")


def _unsaid(recipe: Recipe) -> Iterator[str]:
    """What is asked of completions where the model writes none."""
    why = f"{recipe.algorithm.name} trains a model that gives scores and writes nothing"
    for key in ("reward", "rollout"):
        if getattr(recipe, key) != Recipe.model_fields[key].get_default():
            yield f"{key}: changes nothing, since {why}; leave the section out"
    for key in _unread_lengths(recipe):
        if getattr(recipe.data, key):
            yield f"data.{key}: changes nothing, since {why}; max_length is the limit"
    if recipe.adapter is not None and "lm_head" in recipe.adapter.also:
        yield f"adapter.also: lm_head trains nothing, since {why}; leave it out"
    if recipe.eval.samples:
        yield f"eval.samples: {recipe.eval.samples} completions to show, but {why}; leave it out"


def _untaught(recipe: Recipe, staged: bool) -> Iterator[str]:
    """A student without a teacher, and a teacher without a student.

    Args:
        staged: the teacher may be meant for another stage than this one.
    """
    name = recipe.algorithm.name
    if isinstance(recipe.algorithm, DistillConfig):
        if recipe.teacher is None:
            yield f"teacher: {name} learns from one: name it, as in `teacher: {{path: google/gemma-3-4b-it}}`"
    elif recipe.teacher is not None and name in ALGORITHMS and not staged:
        yield f"teacher: changes nothing for {name}; algorithm: {{name: distill}} learns from one"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a tree with its dotted path."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if path == "stages" else ()
    if not inner:
        yield path, value
    for key, item in inner:
        yield from _flat(item, f"{path}.{key}".lstrip("."))
