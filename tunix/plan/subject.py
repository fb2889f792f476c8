"""What a run holds in its devices' memory, as shapes: weights, moments, the reference, a critic, a teacher, the engine.

The model's structure is known without its weights and without a download. The pieces are built by the functions that a
run uses, up to the point where weights would be read.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from tunix.algorithms.distill.config import DistillConfig
from tunix.config import DType, ModelConfig, MtpUse
from tunix.errors import UserError
from tunix.hf.peft_folder import CONFIG, named_base
from tunix.hf.run_export import exported
from tunix.hf.source import Source, from_scratch, settled
from tunix.mesh import build_mesh, bytes_of
from tunix.models.config import DecoderConfig, is_own
from tunix.models.families.table import presets, read_config, with_vision
from tunix.models.kv_cache import LAYERS, Weights, is_top
from tunix.models.model import Model
from tunix.plan.programs import views
from tunix.recipe.recipe import Recipe
from tunix.rollout.engine.shapes import Sizes
from tunix.run.describe import remat_line, sampling_line
from tunix.run.frozen_models import divided
from tunix.run.kernels import attention_of, experts_line
from tunix.run.opening import cached_config
from tunix.run.sampler import local_engine
from tunix.run.setup import Setup, Shapes, algorithm_of, apart
from tunix.trainer.learner import abstract_moments
from tunix.trainer.microbatches import Microbatcher, TrainerSpec, rows_per_microbatch
from tunix.types import Workload

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

    setup: Setup
    policy: Trained
    critic: Trained | None
    reference: Frozen | None
    teachers: tuple[Frozen, ...]
    """Those that are not on a server."""
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
        if self.teachers:
            numbers[self.taught_on] = self.teachers[0].microbatcher.mesh.size
        return numbers

    @property
    def taught_on(self) -> Place:
        """Whose devices teachers use."""
        elsewhere = self.teachers and self.teachers[0].microbatcher.mesh is not self.policy.spec.mesh
        return "teaching" if elsewhere else "training"

    @property
    def teacher_reads(self) -> tuple[str, ...]:
        """What of `held` a teacher's programs read: the policy's weights where it teaches itself."""
        config = self.setup.recipe.teacher
        return ("weights", "frozen base") if config is not None and config.is_policy else ("teacher",)

    @property
    def held(self) -> dict[Place, dict[str, int]]:
        """Bytes on each device of a place between two programs, by what they are."""
        policy, critic = self.policy, self.critic
        held: dict[Place, dict[str, int]] = {place: {} for place in self.devices}
        held["training"] = {
            "weights": bytes_of(policy.params),
            "optimizer's moments": bytes_of(abstract_moments(policy.spec, policy.params)),
            "frozen base": bytes_of(policy.base),
        }
        if critic is not None:
            moments = abstract_moments(critic.spec, critic.params)
            held["training"]["critic and its moments"] = bytes_of([critic.params, moments])
        if self.reference is not None and self.reference.params is not policy.base:
            held["training"]["reference"] = bytes_of(self.reference.params)
        if self.teachers and self.teacher_reads == ("teacher",):
            held[self.taught_on]["teacher"] = bytes_of([teacher.params for teacher in self.teachers])
        place: Place = "training" if self.sampled is None else self.sampled.place
        if self.reward_model is not None:
            held[place]["reward model"] = bytes_of(self.reward_model.params)
        if self.sampled is not None:
            held[place] |= {"sampler's copy": self.sampled.copied, "newer weights": self.sampled.newer}
        return {place: {name: size for name, size in sizes.items() if size} for place, sizes in held.items()}


def subject_of(recipe: Recipe, devices: list[Any], memory: float | None = None) -> Subject:
    """What a run of a recipe (without stages) holds on these devices.

    `memory`: bytes of each device that programs may take; None where that is not known.

    Raises:
        UserError: the model's sizes are not known, or the recipe does not fit the devices.
    """
    source, devices = structure(recipe.model, recipe.data.pictures is not None), list(devices)
    if recipe.adapter is not None and recipe.adapter.source is not None:
        adapter, source = settled(recipe.adapter, source)
        recipe = recipe.model_copy(update={"adapter": adapter})
    if isinstance(recipe.algorithm, DistillConfig):  # there are no texts to show a teacher
        recipe = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"success": None})})
    students, sampling_mesh = apart(recipe.rollout.devices, divided(recipe.teacher, devices)[0])
    setup = Setup.on(students, recipe, source, algorithm_of(recipe), memory, sampling_mesh)
    setup = replace(setup, updates=(recipe.steps or 1000) * recipe.algorithm.updates_per_step)
    mesh, spec, critic_spec, dtype = setup.mesh, setup.spec, setup.critic_spec, recipe.model.dtype
    policy = Trained(spec, *setup.abstract(spec))

    # The reference: the base under an adapter, or a copy in the compute dtype.
    reference = None
    plain = replace(spec.model, adapt=None, has_scalar_head=False)
    if spec.adapter is not None:
        reference = Frozen(plain, policy.base, spec.microbatcher)
    elif setup.keeps_reference:
        dtypes: dict[str, DType] = {name: kind for name, kind in _cast(setup, plain).items() if not is_own(name)}
        reference = Frozen(plain, plain.abstract(dtypes, mesh), spec.microbatcher)

    held_here, each = list[Frozen](), () if recipe.teacher is None else recipe.teacher.each.values()
    for config in each:
        if config.is_policy:
            held_here.append(Frozen(spec.model, policy.all, spec.microbatcher))
        if config.is_policy or config.is_served or config.is_stored:
            continue
        random = ModelConfig(init="random", family=config.family, sizes=config.sizes) if config.path is None else None
        model = Model(structure(random or ModelConfig(path=config.path)).decoder, dtype=config.dtype)
        teachers = mesh if config.mesh is None else build_mesh(config.mesh, divided(config, devices)[1])
        rows = rows_per_microbatch(
            teachers, recipe.sequences_per_update, recipe.micro_batch_size, spec.length, bool(recipe.data.packing)
        )
        params = model.abstract(dict.fromkeys(model.shapes, config.dtype), teachers)
        held_here.append(Frozen(model, params, Microbatcher(rows, teachers)))

    reward_model = None
    if recipe.reward is not None and recipe.reward.model is not None:
        decoder = structure(ModelConfig(path=recipe.reward.model)).decoder
        model = Model(decoder, dtype=dtype, has_scalar_head=True, has_lm_head=False)
        params = model.abstract(dict.fromkeys(model.shapes, dtype), sampling_mesh or mesh)
        reward_model = Frozen(model, params, spec.microbatcher)

    _, attention = attention_of(source.decoder, recipe.model, mesh, setup.length, branched=setup.branched, tried=False)
    chosen = (
        setup.mesh_reason if mesh.size > 1 else None,
        attention,
        experts_line(source.decoder, recipe.model, mesh),
        remat_line(spec),
        sampling_line(setup) if setup.samples else None,
    )
    return Subject(
        setup,
        policy,
        None if critic_spec is None else Trained(critic_spec, *setup.abstract(critic_spec)),
        reference,
        tuple(held_here),
        _sampled(setup, policy),
        reward_model,
        tuple(filter(None, chosen)),
    )


def _cast(setup: Setup, model: Model) -> dict[str, DType]:
    """Dtypes of weights in the precision of the computation; those that are rounded later keep theirs."""
    exact = {f"layers/{name}/w" for name, _ in model.simulated}
    return {name: setup.trained_dtype if name in exact else model.dtype for name in model.shapes}


def _sampled(setup: Setup, policy: Trained) -> Sampled | None:
    """The engine of a run that samples in its process, or shows samples."""
    # The largest workload: of a step, of an evaluation by rewards, or of the samples that are shown.
    recipe, spec = setup.recipe, policy.spec
    rewarded = recipe.rewarded
    held_out = bool(recipe.data.eval or recipe.data.eval_split) and recipe.algorithm.has_lm_head
    work, shown = setup.workload(recipe.eval.rows if held_out and rewarded else 0), recipe.eval.samples
    if work is None and held_out and shown:
        prompt = max(recipe.data.max_length - recipe.eval.sample_tokens, 1)
        work = Workload(shown, prompt, recipe.data.max_length)
    if work is None or recipe.rollout.engine == "vllm":
        return None
    engine = local_engine(setup)
    weights = views(spec.model, engine.mesh, policy.all)
    matters, sizes = work.requests > shown, engine.sizes.of_requests([work.length] * work.requests)
    # The engine's copies of what trains.
    top = [x for name, x in weights.top.items() if name in policy.params]
    layers = [x for layer in weights.layers for name, x in layer.items() if LAYERS + name in policy.params]
    moved = bytes_of([layers, top])
    if setup.sampling_mesh is not None:
        params = spec.model.abstract(_cast(setup, spec.model), engine.mesh)
        arriving, later = (max(bytes_of(params[name]) for name in names) for names in (params, policy.params))
        newer = later + moved if recipe.rollout.max_staleness else 0
        return Sampled(engine.mesh, sizes, weights, work, "sampling", bytes_of(weights), arriving, newer, matters)
    # Tables are shared with a frozen base instead of copied, unless the adapter trains them.
    base = {name: x for name, x in policy.base.items() if is_top(name) and name not in policy.params}
    shared = [
        x
        for name, x in weights.top.items()
        if name in base and x.dtype == base[name].dtype and base[name].sharding.is_equivalent_to(x.sharding, x.ndim)
    ]
    copied, newer = bytes_of(weights) - bytes_of(shared), moved if recipe.rollout.max_staleness else 0
    return Sampled(engine.mesh, sizes, weights, work, "training", copied, 0, newer, matters)


def structure(config: ModelConfig, pictures: bool = False) -> Source:
    """The source of a recipe's model, with neither weights nor tokenizer, but with a tower that sees pictures if asked.

    Raises:
        UserError: the model's sizes are not known here.
    """
    if config.path is None:
        return from_scratch(config, pictures)
    return Source(decoder_of(config.path, pictures, config.mtp), None, name=config.path)


def decoder_of(path: str, pictures: bool = False, mtp: MtpUse | None = None) -> DecoderConfig:
    """The structure of a model: from the config.json of a folder, of a run's export or of a hub id's files in the
    cache, or else from the preset that a hub id names.

    Raises:
        UserError: there is none of these.
    """
    folder = Path(path).expanduser()
    if (folder / "recipe.yaml").is_file():
        folder = exported(folder)
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file() and (base := named_base(folder)):
        return decoder_of(base, pictures, mtp)
    if folder.is_dir():
        return read_config(folder, pictures, mtp)
    if (cached := cached_config(path)) is not None:
        return read_config(cached.parent, pictures, mtp)
    # `Qwen/Qwen3-0.6B-Base` names `qwen3-0.6b`.
    asked = path.rpartition("/")[2]
    bare = {text: re.sub(r"[-_ ]", "", text.lower()) for text in (asked, *presets())}
    named = [preset for preset in presets() if re.search(rf"{re.escape(bare[preset])}(?![0-9.])", bare[asked])]
    if named:
        decoder = replace(presets()[max(named, key=len)], mtp=mtp)
        return with_vision(decoder, published=True) if pictures else decoder
    raise UserError(
        f"{path}: its sizes are not known here, and a plan downloads nothing: give a folder with its config.json, "
        "such as `model.path=folder`"
    )
