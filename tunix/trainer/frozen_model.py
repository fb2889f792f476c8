"""Models that are not trained: log-probs of sequences under them, the policy's reference, and a teacher's states.

The reference is the policy's initial weights. A teacher's states `[M R T Te]`
are much smaller than its logits `[B T V]`, so they are copied to the student's mesh, which may consist of other
devices; the matrix of the head is copied there once. The teacher is not part of a checkpoint.

Experts that the sampler recorded (`rollout/engine/experts.py`) are replayed by the policy's routers alone
(`unreplayed`): nobody sampled from another model, so there is no choice of its own to replay, and its experts of one
number need not do what the policy's do.

Where a teacher reads the sequences in its own chat format (`data/teacher.py`), they are packed a second time, for it
alone; what it gives for each trained token is then copied to that token's place in the student's rows. Of several
teachers each reads the sequences that follow it, or all of them.

Axes: B rows, T time, M micro-batches, R rows of a micro-batch, V vocabulary, Te teacher's width, Tt teacher's time.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from tunix.data.teacher import Spans
from tunix.distributed.global_arrays import placed
from tunix.mesh import by_rows, sharding
from tunix.models.config import is_own
from tunix.models.model import Model, Params
from tunix.trainer.logprobs import Later, Scorer, each_microbatch
from tunix.trainer.microbatches import Microbatches, TrainerSpec
from tunix.trainer.step import TeacherStates, hidden_of
from tunix.types import IN_A_LATER_TOKEN, Batch, Sequence, TeacherView
from tunix.util.exact import jit


@dataclass(frozen=True)
class FrozenModel(Scorer):
    """A model with its weights."""

    params: Params
    """All weights, in the compute dtype, since they are never updated."""

    def logprobs(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """The `[T]` log-probs of each sequence's tokens, 0 for the first; `size` as in `Scorer.scores`."""
        return self.scores("logprobs", self.weights, unreplayed(sequences), size, temperature)

    @property
    def weights(self) -> Params:
        """The weights of now."""
        return self.params


def not_shared(base: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a reference that are not the base's own arrays, as all are where it is the base under an adapter.

    A program is given them once: of arrays given twice a TPU's compiler counts both, and a copy that it makes, too.
    """
    return {name: x for name, x in reference.items() if base.get(name) is not x}


def unreplayed(sequences: List[Sequence]) -> list[Sequence]:
    """Sequences as models other than the policy read them: without the policy's experts."""
    return [replace(sequence, experts=None) for sequence in sequences]


@runtime_checkable
class TellsLogprobs(Protocol):
    """A model that may be elsewhere."""

    def logprobs(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """As `FrozenModel.logprobs`."""
        ...


def at_the_students(read: List[np.ndarray], views: List[TeacherView]) -> Later:
    """`[T]` arrays of sequences from a teacher's `[Tt]` arrays of its views of them, which may be on their way."""
    return Later(len(views), lambda i: read[i][views[i].places])  # place 0 has the 0 of a first token


@dataclass(frozen=True)
class Teacher(FrozenModel):
    """A frozen model on a separate mesh or the student's; it reads each sequence as its `Sequence.teacher` says."""

    students: Mesh
    """The student's mesh."""
    policy: Callable[[], Params] | None = None
    """Returns the present weights of the student where it teaches itself (`params` is empty then); None elsewhere."""

    @property
    def weights(self) -> Params:
        return self.params if self.policy is None else self.policy()

    def logprobs(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        views = [sequence.teacher for sequence in sequences if sequence.teacher is not None]
        if not views:
            return super().logprobs(sequences, temperature, size)
        read = as_sequences(views)
        for i, (sequence, view) in enumerate(zip(sequences, views, strict=True)):
            if (ids := sequence.candidates) is not None:  # the distribution is over these for the teacher, too
                moved = np.full((len(view.tokens), ids.shape[1]), -1, ids.dtype)
                moved[view.places[sequence.loss_mask]] = ids[sequence.loss_mask]
                read[i] = replace(read[i], candidates=moved)
        return at_the_students(super().logprobs(read, temperature, size), views)

    def states(self, batch: Batch, microbatches: Microbatches, only: int | None = None) -> TeacherStates:
        """The teacher's hidden states for a batch, with its head; returns before the devices are done.

        Args:
            microbatches: the same batch, placed on the student's mesh.
            only: number of the teacher of whose followers alone they are; None for all sequences.
        """
        (number, rows, length), read, places = microbatches.rows["tokens"].shape, batch, None
        near, followed = by_rows(self.students, length), None

        def in_microbatches(x: np.ndarray) -> np.ndarray:
            return np.pad(x, ((0, number * rows - len(x)), (0, 0))).reshape(number, rows, length)

        with jax.set_mesh(self.microbatcher.mesh):
            if batch.teacher is not None:
                chosen = np.array([only in (None, view.number) for view in batch.teacher])
                # A pass has one sequence at least: nobody follows what is said of it.
                ids = np.flatnonzero(chosen) if chosen.any() else np.zeros(1, np.int64)
                read = self.packed(as_sequences([batch.teacher[i] for i in ids]), len(batch.weights))
                everywhere = NamedSharding(self.microbatcher.mesh, PartitionSpec())
                places = placed(in_microbatches(places_of_states(batch, read, ids)), everywhere)
                if only is not None:
                    followed = placed(in_microbatches(chosen[np.asarray(batch.sequence_ids)]), near)
            states = self._states(self.weights, self.microbatcher.place(read), places, number=number, rows=rows)
        table = self._table if self.policy is None else None
        return TeacherStates(jax.device_put(states, near), table, self.model.config.logit_softcap, followed=followed)

    @cached_property
    def _table(self) -> Float[Array, "V Te"]:
        """The matrix of the head, on the student's mesh."""
        table = self.model.table(self.params)
        return jax.device_put(table, sharding(("vocab", "embed"), table.shape, self.students))

    @cached_property
    def _states(self):
        return jit(partial(compute_states, self.model), static_argnames=("number", "rows"))


@dataclass(frozen=True, kw_only=True)
class TextTeacher(Teacher):
    """A teacher of another vocabulary, which reads the text of each sampled completion after its own prompt."""

    spans: Callable[[np.ndarray], Spans]
    """Aligns the ids of a completion."""

    def logprobs(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """`[T]` log-probs of spans of text, each at the last of its tokens and `IN_A_LATER_TOKEN` at the others, which
        `episodes.by_spans` divides; those of spans that its `length` cuts are left out."""
        read, parts = list[Sequence](), list[tuple[np.ndarray, int, Spans]]()
        for sequence in sequences:
            assert sequence.teacher is not None, "its prompt is in its own tokens"
            at = np.flatnonzero(sequence.loss_mask)
            begin, spans = int(sequence.teacher.places[at[0]]), self.spans(sequence.tokens[at])
            tokens = np.concatenate([sequence.teacher.tokens[:begin], spans.tokens])[: self.length]
            read.append(Sequence(tokens, np.arange(len(tokens)) > 0))
            parts.append((at, begin, spans))
        arrays = FrozenModel.logprobs(self, read, temperature, size)

        def at_spans(index: int) -> np.ndarray:
            (at, begin, spans), scores = parts[index], arrays[index]
            scores = scores[begin:]
            sums = np.bincount(spans.theirs[: len(scores)], scores, minlength=1)
            whole = spans.theirs[len(scores)] if len(scores) < len(spans.theirs) else len(sums)
            ends = np.append(np.diff(spans.ours) > 0, True) & (spans.ours < whole)
            values = np.zeros(len(sequences[index].tokens), np.float32)
            values[at] = IN_A_LATER_TOKEN
            values[at[ends]] = sums[spans.ours[ends]]
            return values

        return Later(len(read), at_spans)


@dataclass(frozen=True)
class Teachers:
    """Several teachers: all are followed in each sequence, or one, which the sequence names.

    With shares w_k their losses are added up, `sum_k w_k D(q_k, p)`: as the teachers of an ensemble in You et al. 2017
    (https://doi.org/10.1145/3097983.3098135), and the experts of DeepSeek-V4 by the reverse KL. As
    `sum_k w_k KL(q_k || p) = KL(q || p) + const` with the mixture `q = sum_k w_k q_k`, that is the forward KL beside
    the mixture of their distributions; of the reverse KL it is that beside their geometric mean. A token's log-prob is
    therefore the mean of theirs. The teacher that a sequence names is alone in it, as in MOPD
    (https://arxiv.org/abs/2606.30406).
    """

    each: tuple[TellsLogprobs, ...]
    """The teachers, by their numbers."""
    shares: tuple[float, ...] | None
    """w, e.g. `(0.25, 0.75)`; None where each sequence follows the teacher of the number in its view."""

    def logprobs(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """As `FrozenModel.logprobs`."""
        number = len(sequences)
        parts: list[list[tuple[float, List[np.ndarray], int]]] = [[] for _ in range(number)]
        for k, teacher in enumerate(self.each):
            follow = [i for i, x in enumerate(sequences) if self.shares or (x.teacher and x.teacher.number == k)]
            if follow:
                read = teacher.logprobs([sequences[i] for i in follow], temperature, size or number)
                for place, i in enumerate(follow):
                    parts[i].append((self.shares[k] if self.shares else 1.0, read, place))

        def summed(index: int) -> np.ndarray:
            return np.sum([np.float32(weight) * arrays[i] for weight, arrays, i in parts[index]], axis=0)

        return Later(number, summed)

    def states(self, batch: Batch, microbatches: Microbatches) -> tuple[TeacherStates, ...]:
        """As `Teacher.states`, of each."""
        states = list[TeacherStates]()
        for k, teacher in enumerate(self.each):
            assert isinstance(teacher, Teacher), "a divergence is of teachers that are loaded here"
            of_it = teacher.states(batch, microbatches, None if self.shares else k)
            states.append(replace(of_it, share=self.shares[k]) if self.shares else of_it)
        return tuple(states)


def as_sequences(views: List[TeacherView]) -> list[Sequence]:
    """What a teacher reads, as sequences to pack."""
    return [Sequence(view.tokens, np.arange(len(view.tokens)) > 0) for view in views]


def places_of_states(batch: Batch, read: Batch, ids: Int[np.ndarray, "read"]) -> Int[np.ndarray, "B T"]:
    """For each token of the student's rows, the index among all tokens of the teacher's rows whose state predicts the
    token after it, where that is trained; 0 elsewhere.

    Args:
        batch: the student's rows.
        read: the teacher's, of some sequences of `batch.teacher`.
        ids: which these are; what is at tokens of the others means nothing.
    """
    assert batch.teacher is not None, "it reads the student's rows"
    views, real, trained = batch.teacher, np.asarray(read.segment_ids) > 0, np.asarray(batch.loss_mask)
    # The index of each token of each view among the teacher's rows, one view after the other.
    first = np.cumsum([0, *(len(view.tokens) for view in views)])
    index = np.zeros(first[-1], np.int32)
    index[first[ids[np.asarray(read.sequence_ids)[real]]] + np.asarray(read.positions)[real]] = np.flatnonzero(real)
    # The place of each trained token in its view; its sequence is packed whole, so that its position is its index.
    begin = np.cumsum([0, *(len(view.places) for view in views)])
    owner, position = (np.asarray(x)[trained] for x in (batch.sequence_ids, batch.positions))
    place = np.concatenate([view.places for view in views])[begin[owner] + position]
    states = np.zeros(trained.shape, np.int32)
    row, column = np.nonzero(trained)
    states[row, column - 1] = index[first[owner] + place - 1]
    return states


def compute_states(
    model: Model,
    params: Params,
    microbatches: Microbatches,
    places: Int[Array, "M R T"] | None = None,
    *,
    number: int,
    rows: int,
) -> Float[Array, "M R T Te"]:
    """A teacher's states for its own micro-batches, in the student's: `number` of `rows` rows.

    Rows beyond the batch are padding on both sides.

    Args:
        model: the teacher's.
        params: its weights.
        microbatches: what it reads.
        places: see `places_of_states`; None where it reads the student's rows.
        number: M.
        rows: R.
    """
    hidden = each_microbatch(partial(hidden_of, model, params), microbatches)
    if places is not None:
        return hidden.reshape(-1, hidden.shape[-1])[places]
    flat = hidden.reshape(-1, *hidden.shape[2:])[: number * rows]
    padded = jnp.pad(flat, ((0, number * rows - len(flat)), (0, 0), (0, 0)))
    return padded.reshape(number, rows, *flat.shape[1:])


def reference_of(spec: TrainerSpec, params: Params, frozen: Params, *, kept: bool) -> FrozenModel | None:
    """The policy's reference, without an adapter and without a value head: the base under an adapter; else a copy of
    the present weights, where one is to be `kept`.

    Args:
        params: the trainable weights.
        frozen: the other weights; empty without an adapter.
    """
    if spec.adapter is None and not kept:
        return None
    model, weights = replace(spec.model, adapt=None, has_scalar_head=False), frozen
    if spec.adapter is None:
        # In the compute dtype, and a copy, since training donates the buffers of the originals. Matrices with simulated
        # rounding keep their dtype: after a cast they would round to another grid.
        on_grid = {f"layers/{name}/w" for name, _ in model.simulated}

        def copied(params: Params) -> Params:
            return {name: (x if name in on_grid else x.astype(model.dtype)).copy() for name, x in params.items()}

        with jax.set_mesh(spec.mesh):
            weights = jit(copied)({name: x for name, x in params.items() if not is_own(name)})
    return FrozenModel(model, spec.microbatcher, spec.length, weights)
