"""The client in this process: the verbs of `tunix.protocols.Client` over compiled functions on one mesh.

Weights are in two dicts: `state.params` trains (all of them, or an adapter's) and is donated to every step; `frozen` is
the base under an adapter, shared by all that read it. Every verb returns as soon as the device has its work.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.hf.model_folder import save_folder
from tunix.hf.peft_adapter import save_adapter
from tunix.lora.adapt import merge, merge_rounded
from tunix.lora.config import AdapterConfig
from tunix.mesh import fast_products
from tunix.models.model import Model, Params, is_own
from tunix.models.on_grid import rounded
from tunix.models.quantization.rules import Rules
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import Decode
from tunix.rollout.engine.warmup import Workload
from tunix.trainer.checkpoint import load_state, save_state
from tunix.trainer.logprobs import Scorer
from tunix.trainer.microbatches import Cut
from tunix.trainer.step import Compute, Held, Passes, TrainState
from tunix.trainer.teacher import Teacher
from tunix.types import Batch, Completion, Loss, Metrics, Reply, Sampling, Sequence
from tunix.util.exact import jit

SLOTS = {"cpu": 64}
"""Completions that are decoded at a time, by platform: more only costs memory."""
SLOTS_ELSEWHERE = 256


@dataclass(frozen=True)
class Machinery:
    """What a trainer is made of; fixed for its life."""

    model: Model
    mesh: Mesh
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    cut: Cut
    length: int
    """T of packed rows."""
    seed: int
    longest: int | None = None
    """Tokens of a prompt and its completion at most, where several sequences have room in a row; None for `length`."""
    adapter: AdapterConfig | None = None
    rules: Rules | None = None
    """How the model is rounded while it trains, as an export says it."""
    files: Path | None = None
    """Folder whose tokenizer files an export takes along."""
    base: str = ""
    """What an exported adapter names as its base."""
    mark: str | None = None
    """What it knows of that base (`lora.belonging`); None where nobody else has it."""
    slots: int | None = None
    """Completions that are sampled at a time; None for what fills this kind of device."""
    decode: Decode | None = None
    """Token ids -> text, which stop strings are looked for in."""
    reference: bool = False
    """Whether the weights that the run starts from are kept, to be asked for their log-probs. An adapter's base is
    there anyway."""


class Trainer:
    """Implements `Client` for one process."""

    def __init__(
        self,
        machinery: Machinery,
        params: Params,
        frozen: Params,
        critic: "Trainer | None" = None,
        teacher: Teacher | None = None,
        reference: Params | None = None,
    ):
        """Takes over `params`: they are donated to the first step.

        Args:
            params: the weights that train.
            frozen: the others; empty without an adapter.
            critic: a model of its own that values states; None where the model has a value head, or none is asked.
            teacher: a frozen model that is learned from.
            reference: weights that are asked in place of those that the run starts from; without adapter and heads.
        """
        self.machinery, self.frozen, self.critic, self.teacher = machinery, frozen, critic, teacher
        copied = machinery.reference and machinery.adapter is None and reference is None
        self._reference = self._snapshot(params) if copied else reference
        with jax.set_mesh(machinery.mesh):
            self._state = self._new_state(params)
        self._key = jax.device_put(jax.random.key(machinery.seed), self._everywhere)
        self.merging: float | None = None
        """By how much the last export moved the matrices of a quantized base (`lora.adapt.merge_rounded`)."""
        self._gathered: Params | None = None
        self._version = 0
        self._stale = True

    @property
    def state(self) -> TrainState:
        """All that training changes, the critic's included."""
        return self._state if self.critic is None else replace(self._state, critic=self.critic.state)

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state, self._stale = replace(state, critic=None), True
        if self.critic is not None:
            assert state.critic is not None
            self.critic.state = state.critic

    def step(self, batch: Batch, loss: Loss, of: Literal["policy", "critic"] = "policy") -> Metrics:
        """One fused, donated update.

        Raises:
            ValueError: there is no critic of its own.
        """
        if of == "critic":
            if self.critic is None:
                raise ValueError("there is no critic of its own: build the trainer with one")
            return self.critic.step(batch, loss)
        passes, held = self._read(batch, loss)
        with jax.set_mesh(self.machinery.mesh):
            self._state, metrics = self._step(self._state, held, passes, self._key, loss)
        self._stale = True
        return metrics

    def forward_backward(self, batch: Batch, loss: Loss) -> Metrics:
        """Adds the batch's gradients to those not yet applied."""
        passes, held = self._read(batch, loss)
        with jax.set_mesh(self.machinery.mesh):
            gradients, metrics = self._gradients(self._state, held, passes, self._key, loss)
            self._gathered = gradients if self._gathered is None else self._add(self._gathered, gradients)
        return metrics

    def optim_step(self) -> Metrics:
        """Applies the gathered gradients and clears them.

        Raises:
            ValueError: nothing was gathered since the last one.
        """
        if self._gathered is None:
            raise ValueError("optim_step without gradients: call forward_backward first")
        with jax.set_mesh(self.machinery.mesh):
            self._state, metrics = self._apply(self._state, self._gathered)
        self._gathered, self._stale = None, True
        return metrics

    def evaluate(self, batches: Iterable[Batch], loss: Loss) -> dict[str, float]:
        """The loss and its metrics over all batches, as `eval/...`, e.g. `eval/loss`; waits for the result.

        Of a model that is rounded while it trains, also the loss of the weights behind it, as `eval/unrounded`.
        """
        batches = list(batches)
        found = self._evaluated(batches, loss, self._evaluate)
        if self.machinery.model.simulated:
            found["eval/unrounded"] = self._evaluated(batches, loss, self._evaluate_unrounded)["eval/loss"]
        return found

    def _evaluated(self, batches: List[Batch], loss: Loss, compiled: Callable) -> dict[str, float]:
        counts = {name: np.asarray(sum(batch.counts[name] for batch in batches)) for name in batches[0].counts}
        total: dict[str, jax.Array] = {}
        for batch in batches:
            passes, held = self._read(replace(batch, counts=counts), loss)
            with jax.set_mesh(self.machinery.mesh):
                sums = compiled(self._state.params, held, passes, loss)
                total = self._add(total, sums) if total else sums
        return {f"eval/{name.removeprefix('train/')}": float(value) for name, value in total.items()}

    def logprobs(
        self,
        sequences: List[Sequence],
        of: Literal["policy", "reference", "teacher"] = "policy",
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """`[T]` log-probs of each sequence's tokens, 0 for the first.

        `reference` is as the property says.

        Raises:
            ValueError: a reference or a teacher is asked for where none is held.
        """
        if of == "teacher":
            return self._teaching.logprobs(sequences, temperature)
        if of == "policy":
            return self._scorer.logprobs(self.params, sequences, temperature=temperature)
        return self._base_scorer.logprobs(self.reference, sequences, temperature=temperature)

    def entropies(self, sequences: List[Sequence], temperature: float = 1.0) -> list[np.ndarray]:
        """`[T]` entropies of the policy's distributions that each sequence's tokens are drawn from; 0 for the first."""
        return self._scorer.entropies(self.params, sequences, temperature=temperature)

    def values(self, sequences: List[Sequence]) -> list[np.ndarray]:
        """`[T]` values of each sequence's states: at t of the one before token t is drawn; 0 for the first.

        Raises:
            ValueError: the model has no value head.
        """
        if self.critic is not None:
            return self.critic.values(sequences)
        if not self.machinery.model.critic:
            raise ValueError("there is no value head: build the model with critic=True")
        return self._scorer.values(self.params, sequences)

    def sample(
        self, prompts: List[np.ndarray], n: int, sampling: Sampling, seed: int, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """`n` completions a prompt, from the published weights.

        Raises:
            ValueError: the weights have changed since the last `publish`.
        """
        if self._stale:
            raise ValueError("the weights have changed: publish() before sample()")
        return self._engine.sample(prompts, n, sampling, seed, reply)

    def publish(self) -> int:
        """The sampler uses the weights as they are now: copies in the compute dtype; a frozen base is copied once."""
        if self._stale:
            self._version, self._stale = self._version + 1, False
            moving = () if self.machinery.adapter is None else tuple(self._state.params)
            self._engine.load(self.params, self._version, moving)
        return self._version

    def warm(self, work: Workload) -> None:
        """Compiles whatever this workload of the sampler can meet, so that nothing compiles afterwards."""
        self.publish()
        self._engine.warm(work)

    def save(self, path: Path) -> None:
        """Writes the whole train state as one folder."""
        save_state(path, self.state)

    def load(self, path: Path) -> None:
        """Restores what `save` wrote; gradients gathered before are dropped."""
        self.state = load_state(path, self.state)
        self._gathered, self._stale = None, True

    def export(self, path: Path, adapter: bool = False, packed: bool = False) -> None:
        """Writes a Hugging Face folder, an adapter merged into its base; or the adapter alone as a PEFT folder.

        A model that is rounded while it trains is written as it computes: its weights on their grid, or `packed` into
        few bits. A reward model's folder is a sequence classifier's.

        Raises:
            ValueError: the adapter is asked for where none is trained, or few bits where nothing is rounded.
        """
        m = self.machinery
        if packed and m.rules is None:
            raise ValueError("there are no rounded weights to pack: train with rules")
        if not adapter:
            whole = self.params if packed else self._whole()
            how = {"source": m.files, "dtype": m.model.dtype, "scores": not m.model.speaks, "rules": m.rules}
            save_folder(path, m.model.config, whole, packed=packed, **how)
        elif m.adapter is None:
            raise ValueError("there is no adapter to export: all weights were trained")
        else:
            of = {"base": m.base, "scores": not m.model.speaks, "mark": m.mark}
            save_adapter(path, self._state.params, m.adapter, m.model.config, **of)

    @property
    def params(self) -> Params:
        """All weights by name."""
        return {**self.frozen, **self._state.params}

    @property
    def reference(self) -> Params:
        """The weights that were given as such, else the base under the adapter, or those that the run started from.

        Raises:
            ValueError: none is held.
        """
        if self._reference is not None:
            return self._reference
        if self.machinery.adapter is not None:
            return self.frozen
        raise ValueError("no reference is held: build the trainer with reference=True")

    @property
    def has_reference(self) -> bool:
        """Whether there is one beside the policy itself."""
        return self._reference is not None or self.machinery.adapter is not None

    def forget_reference(self) -> None:
        """Lets go of weights that were given as the reference, where it has been asked all that it will be."""
        self._reference = None

    def _read(self, batch: Batch, loss: Loss) -> tuple[Passes, Held]:
        """What a compiled function reads of a batch, and what it holds beside the weights that train."""
        passes = self.machinery.cut.place(batch)
        lesson = self._teaching.lesson(batch, passes) if loss.divergence else None
        return passes, Held(self.frozen, self.reference if loss.reference else None, lesson)

    @property
    def _teaching(self) -> Teacher:
        if self.teacher is None:
            raise ValueError("no teacher is held: build the trainer with one")
        return self.teacher

    @cached_property
    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self.machinery.mesh, PartitionSpec())

    @cached_property
    def _compute(self) -> Compute:
        m = self.machinery
        return Compute(m.model, m.optimizer, m.schedule, drops=bool(m.adapter and m.adapter.dropout))

    @property
    def _products(self) -> dict[str, str]:
        return fast_products(self.machinery.mesh, self.machinery.model.dtype)

    @cached_property
    def _step(self):
        return jit(self._compute.step, static_argnames="loss", donate_argnums=0, options=self._products)

    @cached_property
    def _gradients(self):
        return jit(self._compute.gradients, static_argnames="loss", options=self._products)

    @cached_property
    def _apply(self):
        # Not the gradients: every output already has a buffer of the old state to take.
        return jit(self._compute.apply, donate_argnums=0)

    @cached_property
    def _evaluate(self):
        return jit(self._compute.evaluate, static_argnames="loss", options=self._products)

    @cached_property
    def _evaluate_unrounded(self):
        plain = replace(self._compute, model=replace(self.machinery.model, simulated=()))
        return jit(plain.evaluate, static_argnames="loss", options=self._products)

    @cached_property
    def _engine(self) -> Engine:
        m = self.machinery
        platform = m.mesh.devices.flat[0].platform
        slots = m.slots or SLOTS.get(platform, SLOTS_ELSEWHERE)
        return Engine(m.model, m.mesh, slots=slots, length=m.longest or m.length, decode=m.decode)

    @cached_property
    def _scorer(self) -> Scorer:
        m = self.machinery
        return Scorer(m.model, m.cut, m.length)

    @cached_property
    def _base_scorer(self) -> Scorer:
        return replace(self._scorer, model=replace(self.machinery.model, adapt=None, critic=False))

    def _whole(self) -> Params:
        """All weights as they compute: an adapter merged into its base, matrices on their grid."""
        m = self.machinery
        if m.adapter is None:
            with jax.set_mesh(m.mesh):
                return rounded(m.model, self.params)[0] if m.model.simulated else self.params
        if m.model.quantization is None:
            return jit(partial(merge, adapter=m.adapter))(self.params)
        with jax.set_mesh(m.mesh):
            merged, self.merging = merge_rounded(self.params, m.adapter, m.model.dtype)
        return merged

    def _snapshot(self, params: Params) -> Params:
        """The weights as they are now, in the compute dtype: training takes their buffers over. No value head's.

        Matrices on a grid stay as they are: the grid of a rounded one would be another.
        """
        model = self.machinery.model
        on_grid, kept = {f"layers/{name}/w" for name, _ in model.simulated}, [x for x in params if not is_own(x)]

        def copied(params: Params) -> Params:
            return {name: (x if name in on_grid else x.astype(model.dtype)).copy() for name, x in params.items()}

        with jax.set_mesh(self.machinery.mesh):
            return jit(copied)({name: params[name] for name in kept})

    @cached_property
    def _add(self):
        return jit(lambda a, b: jax.tree.map(jax.numpy.add, a, b), donate_argnums=0)

    def _new_state(self, params: Params) -> TrainState:
        """Step 0: a moment of its parameter's shape lives where that lives (GSPMD would replicate it)."""
        tx = self.machinery.optimizer

        def home(path: tuple[Any, ...], moment: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            owner = params.get(names[-1]) if names else None
            return owner.sharding if owner is not None and owner.shape == moment.shape else self._everywhere

        moments = jax.tree_util.tree_map_with_path(home, jax.eval_shape(tx.init, params))
        step = jax.device_put(np.int32(0), self._everywhere)
        return TrainState(params, jit(tx.init, out_shardings=moments)(params), step)
