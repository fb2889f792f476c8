"""A run's programs lowered from shapes alone: no weight is made and no device touched."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.mesh import RULES, Axes, by_rows, compiler_options, sharding
from tunix.models.attention.pages import placed
from tunix.models.config import VisionConfig
from tunix.models.deltanet import STATE_AXES, SlotStates
from tunix.models.kv_cache import LAYERS, Weights, gains, magnified, unstack, view_axes
from tunix.models.model import Model, Params
from tunix.rollout.engine.page_tables import PageTables
from tunix.rollout.engine.pieces import Piece
from tunix.rollout.engine.programs import State, decode, initial_state, prefill
from tunix.rollout.engine.shapes import Sizes
from tunix.rollout.engine.slots import Slots
from tunix.run.setup import Shapes
from tunix.trainer.frozen_model import compute_states, not_shared
from tunix.trainer.learner import abstract_moments
from tunix.trainer.microbatches import Microbatcher, Microbatches, TrainerSpec
from tunix.trainer.step import StepInputs, TeacherStates, TrainState
from tunix.trainer.step import step as train_step
from tunix.types import Batch, Loss, Pictures
from tunix.util.exact import jit


def microbatches_of(
    batch: Batch, microbatcher: Microbatcher, pictures: int = 0, vision: VisionConfig | None = None
) -> Microbatches:
    """The shapes of a batch, which was made without pictures, as `Microbatcher.place` puts it on the mesh; of so many
    pictures of a row where the model has a tower that sees them."""

    def described(tree: Any, where: NamedSharding) -> Any:
        def shape(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=where)

        return jax.tree.map(shape, tree)

    shapes = microbatcher.place(batch, described)
    if vision is None:
        return shapes
    tokens, by_row = shapes.rows["tokens"], NamedSharding(microbatcher.mesh, PartitionSpec(None, RULES["rows"]))
    by_picture = (*tokens.shape[:2], pictures)
    pixels: Any = jax.ShapeDtypeStruct((*by_picture, *vision.shape), jnp.uint8, sharding=by_row)
    grids: Any = jax.ShapeDtypeStruct((*by_picture, 2), jnp.int32, sharding=by_row)
    rope: Any = (
        jax.ShapeDtypeStruct((*tokens.shape, 3), jnp.int32, sharding=tokens.sharding) if vision.any_shape else None
    )
    return replace(shapes, pictures=Pictures(pixels, grids, tokens, rope))


def step(
    spec: TrainerSpec,
    params: Shapes,
    base: Shapes,
    microbatches: Microbatches,
    loss: Loss,
    reference: Shapes | None = None,
    teachers: Sequence[tuple[Model, bool]] = (),
) -> jax.stages.Lowered:
    """The training step of a learner with these parameters, over a frozen base where it trains an adapter, as
    `Learner.step` runs it; with the reference, or the states of the teachers, that the loss reads: for each whether
    all tokens follow it."""
    number, key = jax.eval_shape(lambda: (jnp.int32(0), jax.random.key(0)))
    everywhere = NamedSharding(spec.mesh, PartitionSpec())
    number, key = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in (number, key))
    state = TrainState(cast(Params, params), abstract_moments(spec, params), cast(Any, number))
    states, shape = list[TeacherStates](), microbatches.rows["tokens"].shape
    for teacher, is_whole in teachers:
        width, near = teacher.config.d_model, by_rows(spec.mesh, shape[2])
        hidden = jax.ShapeDtypeStruct((*shape, width), teacher.dtype, sharding=near)
        table = jax.ShapeDtypeStruct((teacher.config.vocab_size, width), teacher.dtype)
        table = _placed(spec.mesh, table, ("vocab", "embed"))
        followed = None if is_whole else jax.ShapeDtypeStruct(shape, bool, sharding=near)
        cap = teacher.config.logit_softcap
        states.append(TeacherStates(cast(Any, hidden), cast(Any, table), cap, followed=cast(Any, followed)))
    others = None if reference is None else not_shared(base, reference)
    inputs = StepInputs(cast(Params, base), others, tuple(states), microbatches)
    options = compiler_options(spec.mesh, spec.model.dtype)
    with jax.set_mesh(spec.mesh):
        compiled = jit(partial(train_step, spec), static_argnames="loss", donate_argnums=0, options=options)
        return compiled.lower(state, inputs, key, loss)


def teacher_states(
    model: Model, mesh: Mesh, params: Shapes, of_teacher: Microbatches, students: Microbatches
) -> jax.stages.Lowered:
    """A teacher's states of a batch on its mesh, as `Teacher.states` computes them: the batch in its micro-batches, and
    in its students'."""
    number, rows, _ = students.rows["tokens"].shape
    with jax.set_mesh(mesh):
        compiled = jit(partial(compute_states, model), static_argnames=("number", "rows"))
        return compiled.lower(params, of_teacher, number=number, rows=rows)


def views(model: Model, mesh: Mesh, params: Shapes) -> Weights:
    """The shapes of the weights as the engine copies them, layer by layer."""
    with jax.set_mesh(mesh):
        weights = jax.eval_shape(partial(unstack, model), params)
        if magnified(model):
            settled = zip(weights.layers, jax.eval_shape(partial(gains, model), weights), strict=True)
            weights = weights._replace(layers=tuple({**mine, **more} for mine, more in settled))
        top = {name: _placed(mesh, x, view_axes(model, name)) for name, x in weights.top.items()}
        layers = tuple(
            {name: _placed(mesh, x, view_axes(model, LAYERS + name)[: x.ndim]) for name, x in layer.items()}
            for layer in weights.layers
        )
        return Weights(cast(Params, top), cast(Any, layers))


def state_of(model: Model, mesh: Mesh, sizes: Sizes) -> State:
    """The shapes of the engine's slots and pages."""
    with jax.set_mesh(mesh):
        state = initial_state.eval_shape(model, sizes)
        caches: list[Any] = []
        for cache in state.caches:
            if isinstance(cache, SlotStates):
                pairs = zip(cache, STATE_AXES, strict=True)
                caches.append(SlotStates(*(_placed(mesh, x, axes) for x, axes in pairs)))  # pyright: ignore[reportArgumentType]
            elif cache is not None:
                caches.append(placed(cache, lambda x, axes: _placed(mesh, x, axes)))
            else:  # a layer that keeps nothing of earlier tokens
                caches.append(None)
    hidden = _placed(mesh, state.hidden, ("rows", None))
    progress = jax.tree.map(lambda x: _placed(mesh, x, ("rows",)), state.progress)
    recent = _placed(mesh, state.recent, ("rows", None))
    return State(tuple(caches), cast(jax.Array, hidden), progress, cast(jax.Array, recent))


def decoding(model: Model, mesh: Mesh, weights: Weights, state: State, sizes: Sizes) -> jax.stages.Lowered:
    """A dispatch of the engine: up to `sizes.steps` tokens in each slot, with all the pages that there may be."""
    every, nothing = np.arange(sizes.slots), np.int32(0)
    slots = Slots(sizes)
    reads = PageTables(sizes).reads(every, sizes.gathered(sizes.slots)[0])
    with jax.set_mesh(mesh):
        return decode.lower(
            model, sizes.steps, sizes.speculate, weights, state, slots.flow(every), reads, nothing, nothing
        )


def prefilling(model: Model, mesh: Mesh, weights: Weights, state: State, sizes: Sizes) -> jax.stages.Lowered:
    """The computation of a long piece of prompts in each shard."""
    with jax.set_mesh(mesh):
        return prefill.lower(model, weights, state, Piece(PageTables(sizes), sizes.piece).inputs)


def _placed(mesh: Mesh, x: Any, axes: Axes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(axes, x.shape, mesh))
