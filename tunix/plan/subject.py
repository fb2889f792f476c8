"""What a run holds in its devices' memory, as shapes: weights, moments, the reference, a critic, a teacher, the engine.

The pieces are built by the functions that a run uses, up to the point where weights would be read.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.config import DType, ModelConfig, RowKind
from tunix.data.types import Prompt
from tunix.hf.source import settled
from tunix.mesh import build_mesh
from tunix.models.kv_cache import LAYERS, Weights
from tunix.models.model import Model
from tunix.models.param_names import is_own
from tunix.plan import programs
from tunix.plan.programs import Shapes
from tunix.plan.structure import structure
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.recipe import Recipe
from tunix.rollout.engine.shapes import Sizes
from tunix.run.build import settings_of
from tunix.run.describe import remat_line, sampling_line
from tunix.run.devices import apart, mesh_of
from tunix.run.evaluation import Evaluation
from tunix.run.frozen_models import divided
from tunix.run.kernels import attention_line, experts_line
from tunix.run.streams import workload_of
from tunix.trainer.build import ClientSettings, critic_spec_of, sampler_of, spec_of, stored
from tunix.trainer.microbatches import Microbatcher, TrainerSpec, rows_per_microbatch
from tunix.types import Sampling, Workload
from tunix.util.trees import bytes_of

Place = Literal["training", "sampling", "teaching"]
"""Devices of a run: those that train, and do all that has none of its own; those that only sample; a teacher's own."""


@dataclass(frozen=True)
class Trained:
    """A model that trains."""

    spec: TrainerSpec
    params: Shapes
    """The trainable weights."""
    base: Shapes
    """The frozen weights under an adapter."""

    @property
    def all(self) -> Shapes:
        """All weights by name."""
        return {**self.base, **self.params}


@dataclass(frozen=True)
class Frozen:
    """A reference or a teacher."""

    model: Model
    params: Shapes
    microbatcher: Microbatcher


@dataclass(frozen=True)
class Sampled:
    """What the engine holds."""

    mesh: Mesh
    sizes: Sizes
    weights: Weights
    work: Workload
    place: Place
    """Whose devices it uses; on its own it holds no optimizer and no reference."""
    copied: int
    """Bytes of the copy of the weights on each device."""
    arriving: int
    """Bytes on each device of the largest array that is handed over to devices which only sample; 0 where none is."""
    newer: int
    """Bytes on each device that arrive while older weights are sampled from; 0 where sampling and learning take
    turns."""
    matters: bool
    """Whether training or an evaluation samples; False where a few samples are shown."""


@dataclass(frozen=True)
class Subject:
    """Everything that one run holds."""

    recipe: Recipe
    algorithm: Algorithm
    policy: Trained
    critic: Trained | None
    reference: Frozen | None
    teacher: Frozen | None
    sampled: Sampled | None
    """None for a run that never samples."""
    reward_model: Frozen | None = None
    """A reward model; it scores where completions are sampled."""
    chosen: tuple[str, ...] = ()
    """Lines about what was left to tunix: the mesh, the implementation of attention, what is recomputed."""

    @property
    def devices(self) -> dict[Place, int]:
        """How many devices each place has."""
        numbers: dict[Place, int] = {"training": self.policy.spec.mesh.size}
        if self.sampled is not None:
            numbers[self.sampled.place] = self.sampled.mesh.size
        if self.teacher is not None:
            numbers[self.taught_on] = self.teacher.microbatcher.mesh.size
        return numbers

    @property
    def taught_on(self) -> Place:
        """Whose devices a teacher uses."""
        elsewhere = self.teacher is not None and self.teacher.microbatcher.mesh is not self.policy.spec.mesh
        return "teaching" if elsewhere else "training"

    @property
    def held(self) -> dict[Place, dict[str, int]]:
        """Bytes on each device of a place between two programs, by what they are."""
        bytes_by_place: dict[Place, dict[str, int]] = {place: {} for place in self.devices}
        bytes_by_place["training"] = self._trained()
        if self.teacher is not None:
            bytes_by_place[self.taught_on]["teacher"] = bytes_of(self.teacher.params)
        place: Place = "training" if self.sampled is None else self.sampled.place
        if self.reward_model is not None:
            bytes_by_place[place]["reward model"] = bytes_of(self.reward_model.params)
        if self.sampled is not None:
            bytes_by_place[place] |= {"sampler's copy": self.sampled.copied, "newer weights": self.sampled.newer}
        return {place: {name: size for name, size in held.items() if size} for place, held in bytes_by_place.items()}

    def _trained(self) -> dict[str, int]:
        """What training holds on each of its devices."""
        policy, critic = self.policy, self.critic
        held = {
            "weights": bytes_of(policy.params),
            "optimizer's moments": bytes_of(programs.moments(policy.spec, policy.params)),
            "frozen base": bytes_of(policy.base),
        }
        if critic is not None:
            held["critic and its moments"] = bytes_of(critic.params) + bytes_of(
                programs.moments(critic.spec, critic.params)
            )
        if self.reference is not None and self.reference.params is not policy.base:
            held["reference"] = bytes_of(self.reference.params)
        return held


def subject_of(recipe: Recipe, devices: list[Any], memory: float | None = None) -> Subject:
    """What a run of a recipe (without stages) holds on these devices.

    Args:
        memory: bytes of each device that programs may take; None where that is not known.

    Raises:
        UserError: the model's sizes are not known, or the recipe does not fit the devices.
    """
    source, devices = structure(recipe.model, recipe.data.pictures is not None), list(devices)
    if recipe.adapter is not None and recipe.adapter.source is not None:
        adapter, source = settled(recipe.adapter, source)
        recipe = recipe.model_copy(update={"adapter": adapter})
    students, sampling_mesh = apart(recipe.rollout.devices, divided(recipe.teacher, devices)[0])
    sampling = Sampling(max_tokens=recipe.data.longest_completion, temperature=recipe.rollout.temperature)
    algorithm: Algorithm = algorithm_class(recipe.algorithm.name)(recipe.algorithm, sampling)
    mesh, why = mesh_of(recipe, source.decoder, algorithm, students, memory)
    settings = settings_of(recipe, source, mesh, recipe.steps or 1000, algorithm, sampling=sampling_mesh)
    branched = settings.microbatcher.unit > 1
    attention = attention_line(source.decoder, recipe.model, mesh, settings.length, branched=branched)
    experts = experts_line(source.decoder, recipe.model.dtype, mesh)
    policy = _trained(settings, spec_of(settings, source, mesh, memory))
    samples = algorithm.train_on == RowKind.PROMPT
    sampling = sampling_line(recipe.rollout, policy.spec, memory, sampling_mesh) if samples else None
    critic = _trained(settings, critic_spec_of(settings, policy.spec)) if settings.critic == "own" else None
    return Subject(
        recipe,
        algorithm,
        policy,
        critic,
        _reference(algorithm, settings, policy),
        _teacher(recipe, policy.spec, devices),
        _sampled(recipe, algorithm, settings, policy, memory),
        _reward_model(recipe, policy.spec, sampling_mesh),
        tuple(filter(None, (why if mesh.size > 1 else None, attention, experts, remat_line(policy.spec), sampling))),
    )


def _trained(settings: ClientSettings, spec: TrainerSpec) -> Trained:
    params, base = (spec.model.abstract(dtypes, spec.mesh) for dtypes in stored(settings, spec.model))
    return Trained(spec, params, base)


def _reference(algorithm: Algorithm, settings: ClientSettings, policy: Trained) -> Frozen | None:
    """The reference: the base under an adapter, a copy in the compute dtype, or another model of the same structure."""
    spec, other = policy.spec, algorithm.reference_path is not None
    if not (settings.reference or other or spec.adapter is not None):
        return None
    model = replace(spec.model, adapt=None, has_scalar_head=False)
    if spec.adapter is not None and not other:
        return Frozen(model, policy.base, spec.microbatcher)
    dtypes: dict[str, DType] = {name: dtype for name, dtype in _cast(settings, model).items() if not is_own(name)}
    return Frozen(model, model.abstract(dtypes, spec.mesh), spec.microbatcher)


def _cast(settings: ClientSettings, model: Model) -> dict[str, DType]:
    """Dtypes of weights in the precision of the computation; those that are rounded later keep theirs."""
    exact = {f"layers/{name}/w" for name, _ in model.simulated}
    trained: DType = settings.model.param_dtype or "float32"
    return {name: trained if name in exact else model.dtype for name in model.shapes}


def _teacher(recipe: Recipe, student: TrainerSpec, devices: list[Any]) -> Frozen | None:
    config = recipe.teacher
    if config is None:
        return None
    random = ModelConfig(init="random", family=config.family, sizes=config.sizes) if config.path is None else None
    source = structure(random or ModelConfig(path=config.path))
    mesh = student.mesh if config.mesh is None else build_mesh(config.mesh, divided(config, devices)[1])
    model = Model(source.decoder, dtype=config.dtype)
    rows = rows_per_microbatch(
        mesh, recipe.sequences_per_update, recipe.micro_batch_size, student.length, bool(recipe.data.packing)
    )
    params = model.abstract(dict.fromkeys(model.shapes, config.dtype), mesh)
    return Frozen(model, params, Microbatcher(rows, mesh))


def _reward_model(recipe: Recipe, policy: TrainerSpec, sampling: Mesh | None) -> Frozen | None:
    if recipe.reward is None or recipe.reward.model is None:
        return None
    decoder = structure(ModelConfig(path=recipe.reward.model)).decoder
    model = Model(decoder, dtype=recipe.model.dtype, has_scalar_head=True, has_lm_head=False)
    params = model.abstract(dict.fromkeys(model.shapes, recipe.model.dtype), sampling or policy.mesh)
    return Frozen(model, params, policy.microbatcher)


def _sampled(
    recipe: Recipe, algorithm: Algorithm, settings: ClientSettings, policy: Trained, memory: float | None
) -> Sampled | None:
    """The engine of a run that samples in its process, or shows samples."""
    spec, work = policy.spec, _workload(recipe, algorithm)
    if work is None or recipe.rollout.engine == "vllm":
        return None
    engine = sampler_of(settings, spec, memory)
    weights = programs.views(spec.model, engine.mesh, policy.all)
    matters, sizes = work.requests > recipe.eval.samples, engine.sizes.of_requests([work.length] * work.requests)
    # The engine's copies of what trains.
    top = [x for name, x in weights.top.items() if name in policy.params]
    layers = [x for layer in weights.layers for name, x in layer.items() if LAYERS + name in policy.params]
    moved = bytes_of([layers, top])
    if settings.sampler_devices is not None:
        params = spec.model.abstract(_cast(settings, spec.model), engine.mesh)
        arriving, later = (max(bytes_of(params[name]) for name in names) for names in (params, policy.params))
        newer = later + moved if settings.sampler_ahead else 0
        return Sampled(engine.mesh, sizes, weights, work, "sampling", bytes_of(weights), arriving, newer, matters)
    kept = programs.shared(weights, policy.base) if policy.base else {}
    kept = {name: x for name, x in kept.items() if name not in policy.params}
    copied, newer = bytes_of(weights) - bytes_of(kept), moved if settings.sampler_ahead else 0
    return Sampled(engine.mesh, sizes, weights, work, "training", copied, 0, newer, matters)


def _workload(recipe: Recipe, algorithm: Algorithm) -> Workload | None:
    """The largest workload of the sampler: of a step, of an evaluation by rewards, or of the samples that are shown."""
    rewarded = recipe.reward is not None or recipe.rollout.environment is not None
    held_out = bool(recipe.data.eval or recipe.data.eval_split) and recipe.algorithm.has_lm_head
    prompts = [Prompt(np.zeros(1, np.int32), "", {})] * recipe.eval.rows if held_out and rewarded else []
    work = workload_of(recipe, algorithm, Evaluation(algorithm, prompts=prompts))
    shown = recipe.eval.samples if held_out else 0
    if work is None and shown:
        prompt = max(recipe.data.max_length - recipe.eval.sample_tokens, 1)
        return Workload(shown, prompt, recipe.data.max_length)
    return work
