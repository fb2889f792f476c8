"""What follows from a recipe before weights are read: the mesh, the rows of a batch, the model and its optimizer.

A run, its export, its plan and `tunix.client` begin with a `Setup`; `client.py` and `sampler.py` go on from there.

Axes: T time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from tunix.algorithms.base import Algorithm
from tunix.config import CriticKind, DType, RowKind
from tunix.data.packing import row_length
from tunix.data.pipeline import Layout
from tunix.errors import UserError
from tunix.hf.peft_folder import fingerprint
from tunix.hf.source import Source, adapted, with_stops
from tunix.mesh import AXES
from tunix.models.config import is_own, trains
from tunix.models.model import Model
from tunix.models.quantization.formats import check_multiplies_fp8
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.sections import Sections
from tunix.rollout.config import RolloutMeshConfig
from tunix.run.card import model_card
from tunix.trainer.export import Exporter
from tunix.trainer.mesh_choice import Demand, placed, state_bytes
from tunix.trainer.microbatches import Microbatcher, TrainerSpec, answers_per_row, rows_per_microbatch
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.trainer.perf import Work
from tunix.trainer.remat import chosen, held_by
from tunix.types import Sampling, Workload

Shapes = dict[str, jax.ShapeDtypeStruct]
"""Parameters by name: shape, dtype and sharding."""

MISMATCH: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.25, "int8": 1.0, "fp8": 1.0}
"""Default `rollout.mismatch_tolerance`: the largest difference of trainer and sampler that rounding explains. For
bfloat16, five times the largest measured one (4.6e-2, Gemma 2 of four layers), since trained models are sharper than
random ones. It is used too where activations are rounded to 8 bits: values that differ in their last bit may round in
different directions. Caches of 8 bits round keys and values that the trainer does not round, which is no mistake of
either: four times the largest difference of fp8 that was measured (0.24, a small model in float32 with heads of 8
numbers; docs/log.md)."""
ON_SERVERS: dict[str, float] = {"float32": 0.01, "bfloat16": 2.0}
"""The default with `rollout.engine: vllm`, whose kernels add in another order and keep other intermediate results. It
finds other weights, another model and another transform, not small defects: `mismatch/mean` shows those
(docs/log.md has what was measured)."""


def layout(algorithm: Algorithm, multiple: int = 1) -> Layout:
    """How the algorithm's given sequences are packed into rows, whose number is a multiple of `multiple`."""
    return Layout(algorithm.sequences_per_example, algorithm.extra_tokens, algorithm.prepare_sequence, multiple)


def algorithm_of(recipe: Sections, stop_ids: tuple[int, ...] = (), stop_strings: tuple[str, ...] = ()) -> Algorithm:
    """The algorithm of a recipe, which knows how the policy's completions are sampled: up to stop ids of its tokenizer
    and stop strings, of the recipe and of an environment's turns."""
    rollout = recipe.rollout
    stops = (*rollout.stop, *stop_strings)
    sampling = Sampling(
        recipe.data.longest_completion,
        rollout.temperature,
        rollout.top_k,
        rollout.top_p,
        rollout.min_p,
        stop_ids,
        stops,
    )
    return algorithm_class(recipe.algorithm.name)(recipe.algorithm, sampling)


def apart(config: RolloutMeshConfig | None, devices: Sequence[Any]) -> tuple[list[Any], Mesh | None]:
    """`(training's, sampling's)` devices: those that only sample are the last ones of each process.

    Args:
        config: the recipe's `rollout.mesh`; None for auto.
        devices: of all processes, without those of a teacher.

    Raises:
        UserError: they cannot be shared out over the processes, or none is left to train.
    """
    number = None if config is None else config.devices
    if number is None:
        return list(devices), None
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(device.process_index, []).append(device)
    each = number // len(groups)
    if number % len(groups):
        near = " or ".join(str(share * len(groups)) for share in (each, each + 1) if share)
        raise UserError(
            f"rollout.mesh: devices {number} are not as many for each of {len(groups)} processes; {near} would be"
        )
    if least := [len(group) for group in groups.values() if len(group) <= each]:
        raise UserError(
            f"rollout.mesh: of {least[0]} device(s) of a process {each} would only sample, so that none is left to "
            "train: give it fewer, or leave `devices` out, and sampling and training share all"
        )
    training = [device for group in groups.values() for device in group[:-each]]
    sampling = np.asarray([device for group in groups.values() for device in group[-each:]])
    return training, Mesh(sampling.reshape(1, -1, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass(frozen=True)
class Setup:
    """A recipe with its model's structure, its algorithm and its devices."""

    recipe: Sections
    """The sections of one stage, with an adapter that is `settled`."""
    source: Source
    """The model's structure and the location of its weights."""
    algorithm: Algorithm
    mesh: Mesh
    """The devices that train."""
    memory: float | None = None
    """Bytes that a device gives to programs; None where that is not known."""
    sampling_mesh: Mesh | None = None
    """Devices that only sample; None where sampling and training share all."""
    mesh_reason: str | None = None
    """Why the mesh was chosen, a line; None where the recipe names it."""
    updates: int = 1
    """Updates of the whole run, for the learning-rate schedule, e.g. 1000."""
    keeps_reference: bool = False
    """Whether a frozen copy of the initial weights is kept as the reference. An adapter's base is available anyway."""
    critic: CriticKind | None = None
    """Where values of states come from; None where no values are needed."""

    @classmethod
    def on(
        cls,
        devices: Sequence[Any],
        recipe: Sections,
        source: Source,
        algorithm: Algorithm,
        memory: float | None,
        sampling_mesh: Mesh | None = None,
    ) -> "Setup":
        """The setup of a run on the devices that train, which `mesh` divides.

        Raises:
            UserError: the mesh does not fit the devices, the model or the rows.
        """
        model, decoder, full = recipe.model, source.decoder, recipe.adapter is None
        trained: DType | None = (model.param_dtype or "float32") if full else None
        copies = int(full and algorithm.needs.keeps_reference)
        demand = Demand(
            model=decoder,
            state=state_bytes(decoder, model.dtype, trained, recipe.optimizer.moments_dtype, copies=copies),
            rows=recipe.sequences_per_update // algorithm.sequences_per_example,
            packing=bool(recipe.data.packing),
            micro=recipe.micro_batch_size,
            length=layout(algorithm).length(recipe.data),
            sampled=recipe.algorithm.reads == RowKind.PROMPT,
        )
        mesh, reason = placed(recipe.mesh, demand, devices, memory)
        return cls(
            recipe,
            source,
            algorithm,
            mesh,
            memory,
            sampling_mesh,
            reason,
            keeps_reference=algorithm.needs.keeps_reference,
            critic=algorithm.needs.values,
        )

    @property
    def samples(self) -> bool:
        """Whether the policy writes the completions that it learns from."""
        return self.recipe.algorithm.reads == RowKind.PROMPT

    @property
    def tolerance(self) -> float:
        """The largest difference of the trainer's and the sampler's log-probs with which a run goes on, e.g. 1e-3."""
        rollout, dtype = self.recipe.rollout, self.recipe.model.dtype
        if rollout.mismatch_tolerance is not None:
            return rollout.mismatch_tolerance
        if rollout.engine == "vllm":
            return ON_SERVERS[dtype]
        simulated = self.recipe.quantization is not None and self.recipe.quantization.inputs
        rounds = simulated or self.recipe.model.quantization is not None
        cache = dtype if rollout.replay.cache else rollout.cache_dtype or dtype
        return max(MISMATCH[kind] for kind in ("bfloat16" if rounds else dtype, cache))

    # Rows

    @cached_property
    def answers_together(self) -> int:
        """The number of completions that share a row and their prompt; see `answers_per_row`.

        One where an environment starts each episode with a different prompt, and without packing.
        """
        data, number = self.recipe.data, self.recipe.sequences_per_update
        if self.recipe.plays or not data.packing:
            return 1
        longest, completion, micro = data.max_length, data.longest_completion, self.recipe.micro_batch_size
        decoder, group = self.source.decoder, self.algorithm.group
        return answers_per_row(self.mesh, decoder, group, number, longest, completion, micro)

    def sampled_row_length(self, number: int) -> int:
        """T of rows that hold `number` sampled sequences of one prompt."""
        data = self.recipe.data
        # An environment's turns are part of the completion, which may fill everything after the prompt; without packing
        # nothing is shared.
        shared = not self.recipe.plays and data.packing
        return row_length(number, data.max_length, data.longest_completion if shared else None)

    @cached_property
    def length(self) -> int:
        """T of training rows, e.g. 2048."""
        whole = layout(self.algorithm).length(self.recipe.data)
        return max(whole, self.sampled_row_length(self.answers_together))

    @property
    def branched(self) -> bool:
        """Whether segments of a row see tokens of others; see `types.Batch.parents`."""
        return self.microbatcher.unit > 1 or self.microbatcher.trie

    @cached_property
    def microbatcher(self) -> Microbatcher:
        """How training rows are split into micro-batches."""
        recipe, together = self.recipe, self.answers_together
        unit = max(self.algorithm.sequences_per_example, together)
        micro = None if recipe.micro_batch_size is None else max(recipe.micro_batch_size // together, 1)
        size, packing = recipe.sequences_per_update // unit, bool(recipe.data.packing)
        rows = rows_per_microbatch(self.mesh, size, micro, self.length, packing)
        rollout = recipe.rollout
        trie = rollout.history == "template" or bool(rollout.environment and rollout.environment.agent)
        return Microbatcher(rows, self.mesh, unit, recipe.data.pictures or 0, trie)

    # Models

    @cached_property
    def spec(self) -> TrainerSpec:
        """The policy, its optimizer and the rest of what stays fixed while it trains.

        Raises:
            UserError: this device does not support the requested types.
        """
        recipe, critic = self.recipe, self.critic
        if recipe.model.quantization is not None:
            check_multiplies_fp8(self.mesh.devices.flat[0], recipe.model.dtype)
        model = adapted(with_stops(self.source), recipe.model, recipe.adapter, recipe.quantization)
        cache = recipe.rollout.cache_dtype if recipe.rollout.replay.cache else None
        scalar, lm = critic in ("shared", "alone"), critic != "alone"
        model = replace(model, cache_dtype=cache, has_scalar_head=scalar, has_lm_head=lm)
        trained, _ = self.dtypes(model)
        spec = TrainerSpec(
            model=model,
            mesh=self.mesh,
            optimizer=build_optimizer(recipe.optimizer, self.updates, {name: model.axes[name] for name in trained}),
            schedule=build_schedule(recipe.optimizer, self.updates),
            microbatcher=self.microbatcher,
            length=self.length,
            seed=recipe.seed,
            adapter=recipe.adapter,
            skips_nonfinite=recipe.optimizer.on_nonfinite == "skip",
        )
        if recipe.model.remat != "auto":
            return spec
        params, base = self.abstract(spec)
        remat, reason = chosen(spec, held_by(spec, params, base, copies=1 + self.keeps_reference), self.memory)
        return replace(spec, model=replace(model, remat=remat), remat_reason=reason)

    @cached_property
    def critic_spec(self) -> TrainerSpec | None:
        """A critic that is a separate model: the policy's structure with a scalar head in place of the other.

        Rounding is simulated, and a cache replayed, only for the model that samples.
        """
        if self.critic != "own":
            return None
        decoder = replace(self.spec.model.config, mtp=None)
        plain = replace(self.spec.model, config=decoder, simulated=(), cache_dtype=None)
        model = replace(plain, has_scalar_head=True, has_lm_head=False)
        rate, config = self.recipe.algorithm.learning_rate_of_critic, self.recipe.optimizer
        config = config.model_copy(update={"learning_rate": rate}) if rate else config
        trained, _ = self.dtypes(model)
        optimizer = build_optimizer(config, self.updates, {name: model.axes[name] for name in trained})
        return replace(self.spec, model=model, optimizer=optimizer, schedule=build_schedule(config, self.updates))

    @cached_property
    def exporter(self) -> Exporter:
        """Writes folders of the policy; an adapter records its base's fingerprint only where that is an unchanged
        folder."""
        source, digest, card = self.source, None, partial(model_card, self.recipe, self.source.name)
        if self.recipe.adapter is not None and source.folder is not None and source.stands_alone:
            digest = fingerprint(source.name, source.folder, source.decoder, self.spec.model.quantization)
        files, rules, stops = source.files, self.recipe.quantization, source.stop_ids
        return Exporter(files, rules, source.name, source.folder, digest, stops, card)

    @property
    def trained_dtype(self) -> DType:
        """Dtype of the weights that train, and of their moments' source."""
        return self.recipe.model.param_dtype or "float32"

    @property
    def frozen_dtype(self) -> DType:
        """Dtype of the weights that do not train."""
        return self.recipe.model.param_dtype or self.recipe.model.dtype

    def dtypes(self, model: Model) -> tuple[dict[str, DType], dict[str, DType]]:
        """Dtypes of the `(trainable, frozen)` parameters of the policy or the critic by name, but for those that are
        fixed (`Model.kinds`)."""
        adapter = self.recipe.adapter
        if adapter is None:
            trainable = [name for name in model.shapes if trains(name, True, model.config.mtp)]
            frozen = [name for name in model.shapes if not trains(name, True, model.config.mtp)]
        else:
            # Tables that the adapter trains are weights of the base too.
            replaced = set(adapter.tables_in(model.config))
            trainable = [name for name in model.shapes if is_own(name) or name in replaced]
            frozen = [name for name in model.shapes if not is_own(name)]
        return dict.fromkeys(trainable, self.trained_dtype), dict.fromkeys(frozen, self.frozen_dtype)

    def abstract(self, spec: TrainerSpec) -> tuple[Shapes, Shapes]:
        """The `(trainable, frozen)` parameters of the policy or the critic as shapes."""
        trained, frozen = (spec.model.abstract(dtypes, spec.mesh) for dtypes in self.dtypes(spec.model))
        return trained, frozen

    @property
    def work(self) -> Work:
        """What an update computes, for the counts of FLOPs and padding."""
        reference, critic = self.algorithm.objective.reference, self.critic == "own"
        return Work(self.source.decoder, self.recipe.adapter, self.microbatcher.rows, reference, critic)

    def workload(self, held_out: int) -> Workload | None:
        """The largest workload of the sampler at a step, or an evaluation with so many prompts; None where neither
        samples."""
        recipe = self.recipe
        begun = recipe.batch_size + recipe.rollout.spare(recipe.batch_size)
        trained = begun if self.samples else 0
        tasks = recipe.eval.tasks
        evaluated = max([held_out, *(task.n * max(task.pass_at, default=1) for task in tasks)])
        if not evaluated + trained:
            return None
        replies = recipe.plays or any(task.environment or task.harness_task for task in tasks)
        return Workload(
            requests=max(evaluated, trained * recipe.algorithm.samples_per_prompt),
            prompt_length=recipe.data.max_length if replies else recipe.data.longest_prompt,
            length=recipe.data.max_length,
        )
