"""A run's programs lowered from shapes alone: no weight is made and no device touched.

Axes: M micro-batches, R rows of a micro-batch, T time, S sequences, D model width, V vocabulary, Te teacher's width,
Sl slots.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from tunix.mesh import RULES, Axes, by_rows, compiler_options, sharding
from tunix.models.attention.layouts import placed
from tunix.models.deltanet import STATE_AXES, SlotStates
from tunix.models.kv_cache import LAYERS, Weights, gains, is_top, magnified, unstack, view_axes
from tunix.models.model import Model, Params
from tunix.models.vision_config import VisionConfig
from tunix.rollout.engine.holdings import Holdings
from tunix.rollout.engine.pieces import Piece
from tunix.rollout.engine.programs import State, blank, decode, prefill
from tunix.rollout.engine.shapes import Sizes
from tunix.rollout.engine.slots import Slots
from tunix.trainer.frozen_model import beside
from tunix.trainer.learner import abstract_moments
from tunix.trainer.logprobs import Scorer, Scores
from tunix.trainer.microbatches import PER_TOKEN, Microbatcher
from tunix.trainer.spec import TrainerSpec
from tunix.trainer.step import Compute, FrozenInputs, Microbatches, TeacherStates, TrainState
from tunix.trainer.teacher import compute_states
from tunix.types import Batch, Loss, Pictures
from tunix.util.exact import jit
from tunix.util.trees import bytes_of

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
        names = (tuple(x) for x in (batch.counts, batch.per_token, batch.per_sequence))
        number, (_, length) = microbatcher.number(batch), batch.tokens.shape
        return cls(
            number, microbatcher.rows, length, len(batch.weights), batch.parents is not None, *names, pictures=pictures
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
        told = None if states is None else TeacherStates(states[0], states[1], softcap)
        new, metrics = compute.step(TrainState(*state), FrozenInputs(base, reference, told), _record(batch), key, loss)
        return (new.params, new.moments, new.step), metrics

    number, key = jax.eval_shape(lambda: (jnp.int32(0), jax.random.key(0)))
    number, key = (_on(spec.mesh, x) for x in (number, key))
    state, states = (params, moments(spec, params), number), None if teacher is None else teacher[:2]
    compiled = jit(run, donate_argnums=0, options=compiler_options(spec.mesh, spec.model.dtype))
    frozen = (base, None if reference is None else beside(base, reference), states)
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
    model: Model, mesh: Mesh, params: Shapes, own: BatchShape, students: BatchShape
) -> jax.stages.Lowered:
    """A teacher's states of a batch, as `Teacher.states` computes them.

    Args:
        mesh: the teacher's.
        own: the batch in the teacher's micro-batches.
        students: the same batch in the student's.
    """

    def run(params: Params, batch: tuple) -> jax.Array:
        return compute_states(model, params, _record(batch), students.number, students.rows)

    with jax.set_mesh(mesh):
        return jit(run).lower(params, _microbatches(mesh, own))


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

        def layer(own: Mapping[str, Any]) -> Any:
            return {
                name: _placed(mesh, x.shape, x.dtype, view_axes(model, LAYERS + name)[: len(x.shape)])
                for name, x in own.items()
            }

        return Weights(cast(Params, top), tuple(map(layer, weights.layers)))


def shared(weights: Weights, base: Shapes) -> dict[str, Any]:
    """The shapes of the tables that the engine shares with a frozen base instead of copying them."""
    return {
        name: x for name, x in weights.top.items() if is_top(name) and name in base and _alike(base[name], cast(Any, x))
    }


def view_bytes(weights: Weights, names: Collection[str]) -> int:
    """Bytes on each device of the engine's copies of these parameters."""
    layers = [x for layer in weights.layers for name, x in layer.items() if LAYERS + name in names]
    return bytes_of([layers, [x for name, x in weights.top.items() if name in names]])


def _alike(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> bool:
    """Whether two arrays of one shape have one dtype and one place."""
    assert one.sharding is not None
    assert other.sharding is not None
    return one.dtype == other.dtype and one.sharding.is_equivalent_to(other.sharding, len(one.shape))


def state_of(model: Model, mesh: Mesh, sizes: Sizes) -> State:
    """The shapes of the engine's slots and pages."""
    with jax.set_mesh(mesh):
        state = blank.eval_shape(model, sizes)
        caches = tuple(_placed_cache(mesh, one) for one in state.caches)
    hidden = _placed(mesh, state.hidden.shape, model.dtype, ("rows", None))
    progress = jax.tree.map(lambda x: _placed(mesh, x.shape, x.dtype, ("rows",)), state.progress)
    recent = _placed(mesh, state.recent.shape, state.recent.dtype, ("rows", None))
    return State(caches, cast(jax.Array, hidden), progress, cast(jax.Array, recent))


def _placed_cache(mesh: Mesh, cache: Any) -> Any:
    """The shapes of what a layer keeps of earlier tokens, where they are; None where it keeps nothing."""
    if cache is None:
        return None
    if isinstance(cache, SlotStates):
        return SlotStates(*(_placed(mesh, x.shape, x.dtype, axes) for x, axes in zip(cache, STATE_AXES, strict=True)))  # pyright: ignore[reportArgumentType]
    return placed(cache, lambda x, axes: _placed(mesh, x.shape, x.dtype, axes))


def decoding(model: Model, mesh: Mesh, weights: Weights, state: State, sizes: Sizes) -> jax.stages.Lowered:
    """A dispatch of the engine: up to `sizes.steps` tokens in each slot, with all the pages that there may be."""
    every, nothing = np.arange(sizes.slots), np.int32(0)
    slots = Slots(sizes.slots, sizes.length, sizes.guesses, turns=sizes.turns)
    reads = Holdings(sizes).reads(every, sizes.gathered(sizes.slots)[0])
    with jax.set_mesh(mesh):
        return decode.lower(model, sizes.steps, weights, state, slots.flow(every), reads, nothing, nothing)


def prefilling(model: Model, mesh: Mesh, weights: Weights, state: State, sizes: Sizes) -> jax.stages.Lowered:
    """The computation of a long piece of prompts in each shard."""
    with jax.set_mesh(mesh):
        return prefill.lower(model, weights, state, Piece(Holdings(sizes), sizes.piece).inputs)


def gradient_bytes(params: Shapes, batch: BatchShape) -> int:
    """Bytes of the gradients on each device: their sum over micro-batches, in float32 or wider, and a micro-batch's."""
    own = bytes_of(params)
    if batch.number == 1:
        return own
    wide = {name: x.update(dtype=jnp.promote_types(x.dtype, jnp.float32)) for name, x in params.items()}
    return own + bytes_of(wide)


def _on(mesh: Mesh, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of an array that every device holds."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _placed(mesh: Mesh, shape: tuple[int, ...], dtype: object, axes: Axes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(axes, shape, mesh))


def _record(fields: tuple) -> Microbatches:
    """The record of what `_microbatches` returned, with arrays."""
    *rest, pictures = fields
    return Microbatches(*rest, pictures=None if pictures is None else Pictures(*pictures))


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
        own, by_row = (*shape[:2], number), NamedSharding(mesh, PartitionSpec(None, RULES["rows"]))
        pixels = jax.ShapeDtypeStruct((*own, *vision.shape), jnp.uint8, sharding=by_row)
        grids = jax.ShapeDtypeStruct((*own, 2), jnp.int32, sharding=by_row)
        rope = jax.ShapeDtypeStruct((*shape, 3), jnp.int32, sharding=places) if vision.turns else None
        pictures = pixels, grids, token("places"), rope
    return {name: token(name) for name in names}, values, each, each, counts, per_sequence, filled, pictures
