"""A run's programs lowered from shapes alone: no weight is made and no device touched.

Axes: M micro-batches, R rows of a micro-batch, T time, S sequences, D model width, V vocabulary, Te teacher's width,
Sl slots.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from tunix.mesh import RULES, Axes, by_rows, compiler_options, sharding
from tunix.models.attention.pages import placed
from tunix.models.config import VisionConfig
from tunix.models.deltanet import STATE_AXES, SlotStates
from tunix.models.kv_cache import LAYERS, Weights, gains, is_top, magnified, unstack, view_axes
from tunix.models.model import Model, Params
from tunix.rollout.engine.page_tables import PageTables
from tunix.rollout.engine.pieces import Piece
from tunix.rollout.engine.programs import State, decode, initial_state, prefill
from tunix.rollout.engine.shapes import Sizes
from tunix.rollout.engine.slots import Slots
from tunix.trainer.frozen_model import compute_states, not_shared
from tunix.trainer.learner import abstract_moments
from tunix.trainer.logprobs import Scorer, Scores
from tunix.trainer.microbatches import PER_TOKEN, Microbatcher, TrainerSpec
from tunix.trainer.step import Compute, FrozenInputs, Microbatches, TeacherStates, TrainState
from tunix.types import Batch, Loss, Pictures
from tunix.util.exact import jit

Shapes = dict[str, jax.ShapeDtypeStruct]
"""Parameters by name: shape, dtype and sharding."""


class BatchShape(NamedTuple):
    """The shape of an update's batch."""

    number: int
    """M."""
    rows: int
    """R."""
    length: int
    """T."""
    sequences: int
    """S."""
    parents: bool = False
    """Whether segments share a prompt."""
    counts: tuple[str, ...] = ("tokens", "sequences")
    """Names of its denominators."""
    per_token: tuple[str, ...] = ()
    """Names of its values `[M R T]`."""
    per_sequence: tuple[str, ...] = ()
    """Names of its values `[S]`."""
    pictures: tuple[int, VisionConfig] | None = None
    """Pi, the pictures of a row, and the tower that sees them; None without any."""

    @classmethod
    def of(
        cls, batch: Batch, microbatcher: Microbatcher, pictures: tuple[int, VisionConfig] | None = None
    ) -> "BatchShape":
        """The shape of a batch as `Microbatcher.place` puts it on the mesh.

        Args:
            batch: made without pictures.
            microbatcher: splits it.
            pictures: the field, of rows that have them.
        """
        return cls(
            number=microbatcher.number(batch),
            rows=microbatcher.rows,
            length=batch.tokens.shape[1],
            sequences=len(batch.weights),
            parents=batch.parents is not None,
            counts=tuple(batch.counts),
            per_token=tuple(batch.per_token),
            per_sequence=tuple(batch.per_sequence),
            pictures=pictures,
        )


class TeacherShape(NamedTuple):
    """The shapes of `TeacherStates`."""

    hidden: jax.ShapeDtypeStruct
    """`[M R T Te]`."""
    table: jax.ShapeDtypeStruct
    """`[V Te]`."""
    softcap: float | None
    """Softcap of the teacher's logits, e.g. 30.0; None without one."""


def moments(spec: TrainerSpec, params: Shapes) -> object:
    """The shapes of the optimizer's state for these parameters: a tree of them."""
    return abstract_moments(spec.optimizer, params, NamedSharding(spec.mesh, PartitionSpec()))


def step(
    spec: TrainerSpec,
    params: Shapes,
    base: Shapes,
    batch: BatchShape,
    loss: Loss,
    reference: Shapes | None = None,
    teacher: TeacherShape | None = None,
) -> jax.stages.Lowered:
    """The training step of a learner with these parameters, as `Learner.step` runs it.

    Args:
        params: those that train.
        base: the frozen ones under an adapter.
        reference: where the loss reads its log-probs.
        teacher: where the loss reads a divergence from it.
    """
    drops = bool(spec.adapter and spec.adapter.dropout)
    compute = Compute(spec.model, spec.optimizer, spec.schedule, drops=drops)
    softcap = None if teacher is None else teacher.softcap

    # Records hold arrays, so they are made while the program is traced.
    def run(state: tuple, frozen: tuple, batch: tuple, key: PRNGKeyArray) -> tuple:
        base, reference, states = frozen
        of_teacher = None if states is None else TeacherStates(states[0], states[1], softcap)
        new, metrics = compute.step(
            TrainState(*state), FrozenInputs(base, reference, of_teacher), _record(batch), key, loss
        )
        return (new.params, new.moments, new.step), metrics

    number, key = jax.eval_shape(lambda: (jnp.int32(0), jax.random.key(0)))
    everywhere = NamedSharding(spec.mesh, PartitionSpec())
    number, key = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in (number, key))
    state, states = (params, moments(spec, params), number), None if teacher is None else teacher[:2]
    compiled = jit(run, donate_argnums=0, options=compiler_options(spec.mesh, spec.model.dtype))
    frozen = (base, None if reference is None else not_shared(base, reference), states)
    with jax.set_mesh(spec.mesh):
        return compiled.lower(state, frozen, _microbatches(spec.mesh, batch), key)


def scoring(
    scorer: Scorer, params: Shapes, batch: BatchShape, kind: Scores, temperature: float = 1.0
) -> jax.stages.Lowered:
    """Log-probs, entropies or values of given sequences, as a learner or a frozen model computes them.

    Args:
        params: all weights.
    """
    mesh, options = scorer.microbatcher.mesh, {} if kind == "values" else scorer.options

    def run(params: Params, batch: tuple) -> jax.Array:
        microbatches = _record(batch)
        if kind == "values":
            return scorer.compute_values(params, microbatches)
        return scorer.compute_logprobs(params, microbatches, temperature, entropy=kind == "entropies")

    with jax.set_mesh(mesh):
        return jit(run, options=options).lower(params, _microbatches(mesh, batch))


def teacher_states(
    model: Model, mesh: Mesh, params: Shapes, batch_of_teacher: BatchShape, students: BatchShape
) -> jax.stages.Lowered:
    """A teacher's states of a batch, as `Teacher.states` computes them.

    Args:
        mesh: the teacher's.
        batch_of_teacher: the batch in the teacher's micro-batches.
        students: the same batch in the student's.
    """

    def run(params: Params, batch: tuple) -> jax.Array:
        return compute_states(model, params, _record(batch), students.number, students.rows)

    with jax.set_mesh(mesh):
        return jit(run).lower(params, _microbatches(mesh, batch_of_teacher))


def teacher_shape(model: Model, students: Mesh, batch: BatchShape) -> TeacherShape:
    """What a student's step reads of its teacher for a batch."""
    width, places = model.config.d_model, NamedSharding(students, PartitionSpec(None, RULES["rows"]))
    hidden = jax.ShapeDtypeStruct((batch.number, batch.rows, batch.length, width), model.dtype, sharding=places)
    table = _placed(students, (model.config.vocab_size, width), model.dtype, ("vocab", "embed"))
    return TeacherShape(hidden, table, model.config.logit_softcap)


def views(model: Model, mesh: Mesh, params: Shapes) -> Weights:
    """The shapes of the weights as the engine copies them, layer by layer."""
    with jax.set_mesh(mesh):
        weights = jax.eval_shape(partial(unstack, model), params)
        if magnified(model):
            settled = zip(weights.layers, jax.eval_shape(partial(gains, model), weights), strict=True)
            weights = weights._replace(layers=tuple({**mine, **more} for mine, more in settled))
        top = {name: _placed(mesh, x.shape, x.dtype, view_axes(model, name)) for name, x in weights.top.items()}

        layers = tuple(
            {
                name: _placed(mesh, x.shape, x.dtype, view_axes(model, LAYERS + name)[: len(x.shape)])
                for name, x in layer.items()
            }
            for layer in weights.layers
        )
        return Weights(cast(Params, top), cast(Any, layers))


def shared(weights: Weights, base: Shapes) -> dict[str, Any]:
    """The shapes of the tables that the engine shares with a frozen base instead of copying them."""
    tables = {name: cast(Any, x) for name, x in weights.top.items() if is_top(name) and name in base}
    return {
        name: x
        for name, x in tables.items()
        if x.dtype == base[name].dtype and base[name].sharding.is_equivalent_to(x.sharding, len(x.shape))
    }


def state_of(model: Model, mesh: Mesh, sizes: Sizes) -> State:
    """The shapes of the engine's slots and pages."""
    with jax.set_mesh(mesh):
        state = initial_state.eval_shape(model, sizes)
        caches: list[Any] = []
        for cache in state.caches:
            if isinstance(cache, SlotStates):
                pairs = zip(cache, STATE_AXES, strict=True)
                caches.append(SlotStates(*(_placed(mesh, x.shape, x.dtype, axes) for x, axes in pairs)))  # pyright: ignore[reportArgumentType]
            elif cache is not None:
                caches.append(placed(cache, lambda x, axes: _placed(mesh, x.shape, x.dtype, axes)))
            else:  # a layer that keeps nothing of earlier tokens
                caches.append(None)
    hidden = _placed(mesh, state.hidden.shape, model.dtype, ("rows", None))
    progress = jax.tree.map(lambda x: _placed(mesh, x.shape, x.dtype, ("rows",)), state.progress)
    recent = _placed(mesh, state.recent.shape, state.recent.dtype, ("rows", None))
    return State(tuple(caches), cast(jax.Array, hidden), progress, cast(jax.Array, recent))


def decoding(model: Model, mesh: Mesh, weights: Weights, state: State, sizes: Sizes) -> jax.stages.Lowered:
    """A dispatch of the engine: up to `sizes.steps` tokens in each slot, with all the pages that there may be."""
    every, nothing = np.arange(sizes.slots), np.int32(0)
    slots = Slots(sizes.slots, sizes.max_length, sizes.speculate, turns=sizes.turns)
    reads = PageTables(sizes).reads(every, sizes.gathered(sizes.slots)[0])
    with jax.set_mesh(mesh):
        return decode.lower(model, sizes.steps, weights, state, slots.flow(every), reads, nothing, nothing)


def prefilling(model: Model, mesh: Mesh, weights: Weights, state: State, sizes: Sizes) -> jax.stages.Lowered:
    """The computation of a long piece of prompts in each shard."""
    with jax.set_mesh(mesh):
        return prefill.lower(model, weights, state, Piece(PageTables(sizes), sizes.piece).inputs)


def _placed(mesh: Mesh, shape: tuple[int, ...], dtype: object, axes: Axes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(axes, shape, mesh))


def _record(fields: tuple) -> Microbatches:
    """The record of what `_microbatches` returned, with arrays."""
    rows, values, weights, lengths, counts, per_sequence, filled, pictures = fields
    if pictures is not None:
        pixels, grids, places, rope = pictures
        pictures = Pictures(pixels, grids, places, rope)
    return Microbatches(rows, values, weights, lengths, counts, per_sequence, filled, pictures)


def _microbatches(mesh: Mesh, batch: BatchShape) -> tuple:
    """The fields of `Microbatches`: shapes of a batch as `Microbatcher.place` puts it on the mesh."""
    places = by_rows(mesh, batch.length)
    everywhere = NamedSharding(mesh, PartitionSpec())
    names = (*PER_TOKEN, "parents") if batch.parents else PER_TOKEN
    shape = (batch.number, batch.rows, batch.length)

    def token(name: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, bool if name == "loss_mask" else jnp.int32, sharding=places)

    def scalars(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=everywhere)

    values = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=places) for name in batch.per_token}
    counts = {name: scalars() for name in batch.counts}
    filled = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    each = scalars(batch.sequences)
    per_sequence = dict.fromkeys(batch.per_sequence, each)
    pictures = None
    if batch.pictures is not None:
        number, vision = batch.pictures
        by_picture, by_row = (*shape[:2], number), NamedSharding(mesh, PartitionSpec(None, RULES["rows"]))
        pixels = jax.ShapeDtypeStruct((*by_picture, *vision.shape), jnp.uint8, sharding=by_row)
        grids = jax.ShapeDtypeStruct((*by_picture, 2), jnp.int32, sharding=by_row)
        rope = jax.ShapeDtypeStruct((*shape, 3), jnp.int32, sharding=places) if vision.turns else None
        pictures = pixels, grids, token("places"), rope
    return {name: token(name) for name in names}, values, each, each, counts, per_sequence, filled, pictures
