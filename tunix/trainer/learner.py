"""A model in training: its weights, the optimizer's state, and the compiled functions that update and evaluate it.

Weights are in two dicts: `state.params` is trainable (all weights, or an adapter's) and donated to every step; `frozen`
is the base under an adapter, shared by all readers. A policy is a learner, and so is a critic that is a separate model.
Unless its docstring says otherwise, a method returns as soon as the work is dispatched to the device.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tunix.distributed.global_arrays import placed
from tunix.mesh import compiler_options
from tunix.models.model import Params
from tunix.trainer.frozen_model import FrozenModel, Teacher, Teachers, TellsLogprobs, not_shared
from tunix.trainer.logprobs import Scorer
from tunix.trainer.microbatches import TrainerSpec
from tunix.trainer.step import StepInputs, TrainState, apply, evaluate, gradients_of, shares, step
from tunix.types import Batch, Loss, Metrics
from tunix.util.exact import jit
from tunix.util.faults import planned

Frozen = TypeVar("Frozen", bound=TellsLogprobs)


class Learner:
    """Trains one model; `scorer` computes log-probs and values with its current weights."""

    def __init__(self, spec: TrainerSpec, params: Params, frozen: Params, reference: FrozenModel | None = None):
        """Takes over `params`: they are donated to the first step.

        Args:
            params: the trainable weights.
            frozen: the other weights; empty without an adapter.
            reference: for losses that read reference log-probs.
        """
        self.spec, self.frozen, self.reference = spec, frozen, reference
        self.teacher: TellsLogprobs | None = None
        """For losses that read a divergence from a teacher, or log-probs alone; set after construction."""
        self.gradients: Params | None = None
        """The sum of gradients that `forward_backward` added since the last `optim_step`; None without any."""
        self._loss: Any = 0.0
        """The sum of their losses."""
        self.scorer = Scorer(spec.model, spec.microbatcher, spec.length)
        everywhere = NamedSharding(spec.mesh, PartitionSpec())
        with jax.set_mesh(spec.mesh):
            moments = jax.tree.map(lambda x: x.sharding, abstract_moments(spec, params))
            new = jit(spec.optimizer.init, out_shardings=moments)(params)
            self.state = TrainState(params, new, placed(np.int32(0), everywhere))
        self._key = jit(lambda: jax.random.key(spec.seed), out_shardings=everywhere)()
        options = compiler_options(spec.mesh, spec.model.dtype)
        self._step = jit(partial(step, spec), static_argnames="loss", donate_argnums=0, options=options)
        self._gradients = jit(partial(gradients_of, spec), static_argnames="loss", options=options)
        # Not the gradients: every output already has a buffer of the old state to take.
        self._apply = jit(partial(apply, spec), donate_argnums=0)
        self._evaluate = jit(partial(evaluate, spec), static_argnames="loss", options=options)
        if spec.model.simulated:
            unrounded = replace(spec, model=replace(spec.model, simulated=()))
            self._evaluate_unrounded = jit(partial(evaluate, unrounded), static_argnames="loss", options=options)
        self._add = jit(lambda a, b: jax.tree.map(jax.numpy.add, a, b), donate_argnums=0)

    @property
    def params(self) -> Params:
        """All weights by name."""
        return {**self.frozen, **self.state.params}

    def step(self, batch: Batch, loss: Loss) -> Metrics:
        """One update, compiled as a single program with a donated state."""
        if planned("compile"):
            raise jax.errors.JaxRuntimeError("INTERNAL: a program cannot be compiled, as planned")
        inputs = self._inputs(batch, loss)
        with jax.set_mesh(self.spec.mesh):
            self.state, metrics = self._step(self.state, inputs, self._key, loss)
        return metrics

    def shares(self, batch: Batch, loss: Loss) -> np.ndarray:
        """`[S]` what each sequence adds to the loss of the next update on this batch; that of a pair is its first's."""
        scale = float(batch.weights.max())  # a huge weight must not hide whose it is
        counts = {name: np.asarray(count / scale, np.float32) for name, count in batch.counts.items()}
        batch = replace(batch, weights=batch.weights / np.float32(scale), counts=counts)
        inputs, compute = self._inputs(batch, loss), jit(partial(shares, self.spec), static_argnames="loss")
        with jax.set_mesh(self.spec.mesh):
            filled = range(int(inputs.microbatches.filled))
            parts = [compute(self.state, inputs, i, self._key, loss=loss) for i in filled]
        return np.sum(jax.device_get(parts), axis=0)

    def lowered(self, batch: Batch, loss: Loss) -> jax.stages.Lowered:
        """The program that `step` runs on such a batch, lowered but not compiled."""
        inputs = self._inputs(batch, loss)
        with jax.set_mesh(self.spec.mesh):
            return self._step.lower(self.state, inputs, self._key, loss)

    def forward_backward(self, batch: Batch, loss: Loss) -> Metrics:
        """Adds the batch's gradients to those accumulated since the last `optim_step`."""
        inputs = self._inputs(batch, loss)
        with jax.set_mesh(self.spec.mesh):
            gradients, metrics = self._gradients(self.state, inputs, self._key, loss)
            if self.gradients is None:
                self.gradients, self._loss = gradients, metrics["train/loss"]
            else:
                self.gradients, self._loss = self._add(self.gradients, gradients), self._loss + metrics["train/loss"]
        return metrics

    def optim_step(self) -> Metrics:
        """Applies the accumulated gradients and clears them.

        Raises:
            ValueError: no gradients were accumulated.
        """
        if self.gradients is None:
            raise ValueError("optim_step without gradients: call forward_backward first")
        with jax.set_mesh(self.spec.mesh):
            self.state, metrics = self._apply(self.state, self.gradients, self._loss)
        self.gradients = None
        return metrics

    def evaluate(self, batches: Iterable[Batch], loss: Loss) -> dict[str, float]:
        """The loss and its metrics over all batches, named `eval/...`, e.g. `eval/loss`; waits for the result.

        With simulated rounding also the loss of the unrounded weights, named `eval/unrounded`.
        """
        batches = list(batches)
        values = self._evaluated(batches, loss, self._evaluate)
        if self.spec.model.simulated:
            values["eval/unrounded"] = self._evaluated(batches, loss, self._evaluate_unrounded)["eval/loss"]
        return values

    def _evaluated(self, batches: List[Batch], loss: Loss, compiled: Callable) -> dict[str, float]:
        counts = {name: np.asarray(sum(batch.counts[name] for batch in batches)) for name in batches[0].counts}
        total: dict[str, jax.Array] = {}
        for batch in batches:
            inputs = self._inputs(replace(batch, counts=counts), loss)
            with jax.set_mesh(self.spec.mesh):
                sums = compiled(self.state.params, inputs, loss)
                total = self._add(total, sums) if total else sums
        return {f"eval/{name.removeprefix('train/')}": float(value) for name, value in total.items()}

    def _inputs(self, batch: Batch, loss: Loss) -> StepInputs:
        """The batch on the devices, and what else the loss reads.

        Raises:
            ValueError: the loss reads a reference or a teacher, and this learner has none.
        """
        microbatches, reference, states = self.spec.microbatcher.place(batch), None, ()
        if loss.reference:
            reference = not_shared(self.frozen, required("reference", self.reference).params)
        if loss.divergence and batch.stored is None:
            teacher = required("teacher", self.teacher)
            assert isinstance(teacher, Teacher | Teachers), "a divergence is of a teacher that is loaded here"
            several = isinstance(teacher, Teachers)
            states = teacher.states(batch, microbatches) if several else (teacher.states(batch, microbatches),)
        return StepInputs(self.frozen, reference, states, microbatches)


def abstract_moments(spec: TrainerSpec, params: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> Any:
    """Shapes and shardings of the optimizer's state: a moment lies as the parameter of its shape does.

    GSPMD alone would replicate it; all that is no such moment is replicated.

    Args:
        params: the trainable weights, or their shapes and shardings.
    """
    everywhere = NamedSharding(spec.mesh, PartitionSpec())

    def placed(path: tuple[Any, ...], moment: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        owner = params.get(names[-1]) if names else None
        place = owner.sharding if owner is not None and owner.shape == moment.shape else everywhere
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(placed, jax.eval_shape(spec.optimizer.init, dict(params)))


def required(name: str, model: Frozen | None) -> Frozen:
    """The frozen model, checked to be present.

    Raises:
        ValueError: it is None.
    """
    if model is None:
        raise ValueError(f"there is no {name}: build the client with one")
    return model
