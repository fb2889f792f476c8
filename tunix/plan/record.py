"""One step of a recipe's algorithm with a client that lowers each program that it is asked to run.

The algorithm sees full rows of made-up tokens and random rewards: whatever it is, a user's own class included, the
programs are those of its first steps. What only the engine and the sizes of its caches decide is added at the end.

Axes: T time.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from tunix.config import RowKind
from tunix.data.packing import pack
from tunix.data.pipeline import pictures_of_row
from tunix.plan import arithmetic, programs
from tunix.plan.arithmetic import NOTHING, Work
from tunix.plan.programs import BatchShape
from tunix.plan.subject import Frozen, Place, Subject, Trained
from tunix.run.rehearsal import Rehearsal
from tunix.trainer.logprobs import Scorer, Scores
from tunix.trainer.perf import training_flops
from tunix.types import Batch, Loss, Metrics, Sequence
from tunix.util.trees import bytes_of

MOST_STEPS = 64
"""Steps after which an algorithm that has not updated its policy is taken as it is; PPO may warm its critic up."""


@dataclass
class Program:
    """One program of a run."""

    name: str
    """What it does, e.g. `step`."""
    reads: tuple[str, ...]
    """What of `Subject.held` of its place is among its arguments."""
    lowered: jax.stages.Lowered | None = None
    """None where arithmetic says what it needs."""
    peak: int = 0
    """Bytes that it needs on each device where it is not compiled, arguments included."""
    besides: int = 0
    """Bytes on each device that neither it reads nor `Subject.held` lists; below 0 where some are listed twice."""
    gradients: int = 0
    """Bytes of the gradients on each device."""
    caches: int = 0
    """Bytes of caches on each device among its arguments."""
    times: float = 0.0
    """How often it runs in a step of the recipe."""
    flops: float = 0.0
    """FLOPs of the model in one run over all devices, without recomputation; 0 where it does not train."""
    work: Work = NOTHING
    """What one run multiplies and moves on each device at the least."""
    tokens: int = 0
    """Tokens of one run over all devices."""
    traced_in: float = 0.0
    """Seconds."""
    place: Place = "training"
    """Whose devices run it."""

    @classmethod
    def traced(cls, name: str, reads: tuple[str, ...], lower: Callable[[], jax.stages.Lowered]) -> "Program":
        """A program that is lowered now, and how long that takes."""
        start = time.perf_counter()
        lowered = lower()
        return cls(name, reads, lowered, traced_in=time.perf_counter() - start)


class Recorder(Rehearsal):
    """A client of shapes."""

    def __init__(self, subject: Subject):
        """Records nothing yet."""
        super().__init__(subject.recipe)
        self.subject = subject
        self.programs: dict[tuple, Program] = {}

    def step(self, batch: Batch, loss: Loss, of: Literal["policy", "critic"] = "policy") -> Metrics:
        """Records an update; its metrics are zeros of the right names."""
        subject = self.subject
        trained = subject.critic if of == "critic" else subject.policy
        assert trained is not None, "the algorithm updates a critic: it has one"
        microbatcher, vision = trained.spec.microbatcher, trained.spec.model.config.vision
        number = pictures_of_row(self.recipe.data, microbatcher.unit)
        shape = BatchShape.of(batch, microbatcher, None if vision is None else (number, vision))
        reference = subject.reference.params if loss.reference and subject.reference else None
        states = None
        reads = ["critic and its moments"] if of == "critic" else ["weights", "optimizer's moments"]
        reads += ["frozen base", *(["reference"] if reference else [])]
        if loss.divergence is not None and subject.teacher is not None:
            states = programs.teacher_shape(subject.teacher.model, trained.spec.mesh, shape)
            self._teach(subject.teacher, batch, shape)

        def lower() -> jax.stages.Lowered:
            return programs.step(trained.spec, trained.params, trained.base, shape, loss, reference, states)

        name = "step" if of == "policy" else "critic's step"
        program = self._add((of, shape, loss), name, tuple(reads), lower)
        program.flops = training_flops(trained.spec.model.config, batch, trained.spec.adapter)
        program.work = arithmetic.training(
            trained.spec.model.config,
            batch,
            trained.spec.adapter,
            trained.spec.model.remat,
            weights=shape.number * bytes_of(trained.all),
            state=bytes_of([trained.params, programs.moments(trained.spec, trained.params)]),
            devices=trained.spec.mesh.size,
            head=of == "policy",
        )
        program.tokens = int((np.asarray(batch.segment_ids) > 0).sum())
        program.gradients = bytes_of(trained.params)
        if shape.number > 1:  # and their sum over micro-batches, in float32 or wider
            program.gradients += bytes_of(
                {name: x.update(dtype=jnp.promote_types(x.dtype, jnp.float32)) for name, x in trained.params.items()}
            )
        assert program.lowered is not None, "updates are lowered"
        return dict.fromkeys(program.lowered.out_info[1], 0.0)

    def logprobs(
        self,
        sequences: List[Sequence],
        of: Literal["policy", "reference", "teacher"] = "policy",
        temperature: float = 1.0,
        size: int | None = None,
    ) -> List[np.ndarray]:
        """Records the scoring of sequences; their log-probs are zeros."""
        if of == "policy":
            return self._score("log-probs", self.subject.policy, sequences, "logprobs", temperature, size)
        frozen = self.subject.reference if of == "reference" else self.subject.teacher
        assert frozen is not None, f"the algorithm reads a {of}: it has one"
        return self._score(f"{of}'s log-probs", frozen, sequences, "logprobs", temperature, size)

    def entropies(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """Records the scoring of sequences; their entropies are zeros."""
        return self._score("entropies", self.subject.policy, sequences, "entropies", temperature, size)

    def values(self, sequences: List[Sequence], size: int | None = None) -> List[np.ndarray]:
        """Records the scoring of sequences; their values are zeros."""
        return self._score("values", self.subject.critic or self.subject.policy, sequences, "values", size=size)

    def _score(
        self,
        name: str,
        of: Trained | Frozen,
        sequences: List[Sequence],
        kind: Scores,
        temperature: float = 1.0,
        size: int | None = None,
    ) -> List[np.ndarray]:
        """Records a forward pass over sequences; the result is zeros."""
        place, params = (of.spec, of.all) if isinstance(of, Trained) else (of, of.params)
        model, microbatcher = place.model, place.microbatcher
        scorer = Scorer(model, microbatcher, self.subject.policy.spec.length)
        plain = [replace(x, per_token={}, per_sequence={}) for x in sequences]
        batch = pack(plain, size or len(plain), scorer.length, packing=True)
        vision = model.config.vision
        seen = None if vision is None else (microbatcher.pictures, vision)
        shape = BatchShape.of(batch, microbatcher, seen)
        reads = {"log-probs": "weights", "entropies": "weights", "reference's log-probs": "reference"}
        weights_read = reads.get(name, "teacher" if name.startswith("teacher") else "critic and its moments")
        if name == "values" and self.subject.critic is None:
            weights_read = "weights"
        program = self._add(
            (name, shape, temperature),
            name,
            (weights_read, "frozen base"),
            lambda: programs.scoring(scorer, params, shape, kind, temperature),
        )
        program.work = arithmetic.scoring(
            model.config,
            batch,
            weights=shape.number * bytes_of(params),
            devices=microbatcher.mesh.size,
            head=kind != "values",
        )
        program.tokens = int((np.asarray(batch.segment_ids) > 0).sum())
        program.place = self.subject.taught_on if of is self.subject.teacher else "training"
        return [np.zeros(len(x.tokens), np.float32) for x in sequences]

    def _teach(self, teacher: Frozen, batch: Batch, shape: BatchShape) -> None:
        """Records the teacher's pass over a batch."""
        batch_of_teacher = BatchShape.of(batch, teacher.microbatcher)
        mesh = teacher.microbatcher.mesh

        def lower() -> jax.stages.Lowered:
            return programs.teacher_states(teacher.model, mesh, teacher.params, batch_of_teacher, shape)

        program = self._add(("teacher", batch_of_teacher), "teacher's states", ("teacher",), lower)
        program.work = arithmetic.scoring(
            teacher.model.config,
            batch,
            weights=batch_of_teacher.number * bytes_of(teacher.params),
            devices=mesh.size,
            head=False,
        )
        program.place = self.subject.taught_on

    def _add(self, key: tuple, name: str, reads: tuple[str, ...], lower: Callable[[], jax.stages.Lowered]) -> Program:
        """The program of this key, which runs once more."""
        if key not in self.programs:
            self.programs[key] = Program.traced(name, reads, lower)
        self.programs[key].times += 1
        return self.programs[key]


def programs_of(subject: Subject) -> list[Program]:
    """The programs of a run, those that need most first."""
    recorder, algorithm = Recorder(subject), subject.algorithm
    if algorithm.precomputes:
        of = "policy" if algorithm.reference_path is None else "reference"  # the policy at its start, or another model
        algorithm.precomputed_logprobs = lambda sequence: recorder.logprobs([sequence], of)[0]
    spec = subject.policy.spec
    with closing(recorder.stream(algorithm, spec.model.config, spec.mesh)) as stream:
        item = next(stream)
        for _ in range(MOST_STEPS):
            for program in recorder.programs.values():
                program.times = 0.0
            algorithm.update(recorder, item)
            if any(key[0] == "policy" for key in recorder.programs):
                break
    return [*recorder.programs.values(), *_sampling(subject)]


def _sampling(subject: Subject) -> list[Program]:
    """The engine's programs at their largest; where it only shows samples, by arithmetic."""
    sampled = subject.sampled
    if sampled is None:
        return []
    spec, sizes, mesh = subject.policy.spec, sampled.sizes, sampled.mesh
    state = programs.state_of(spec.model, mesh, sizes)
    pages = bytes_of(state.caches)
    place = sampled.place
    # On devices of its own the old copy goes first, and the new one is in its place while the last array arrives.
    publish = Program("publish", (), peak=sampled.copied if place == "training" else sampled.arriving, place=place)
    if not sampled.matters:
        return [publish, Program("pages of the cache", (), peak=pages, caches=pages, place=place)]
    copy, twice = ("sampler's copy",), sampled.copied - bytes_of(sampled.weights)
    decode = partial(programs.decoding, spec.model, mesh, sampled.weights, state, sizes)
    prefill = partial(programs.prefilling, spec.model, mesh, sampled.weights, state, sizes)
    piece = sizes.piece * sizes.shards
    decoding, filling = Program.traced("decode", copy, decode), Program.traced("prefill", copy, prefill)
    decoding.tokens, filling.tokens = sizes.slots, piece
    for program in (decoding, filling):
        program.caches, program.besides, program.place = pages, twice, place
    if subject.algorithm.train_on == RowKind.PROMPT:
        prompts, work = subject.recipe.batch_size, sampled.work
        requests = prompts * subject.recipe.algorithm.samples_per_prompt
        drawn = min(work.length, subject.algorithm.sampling.max_tokens)
        decoding.times = float(-(-requests // sizes.slots) * drawn)
        filling.times = float(-(-prompts * work.prompt_length // piece))
        config, looked_up = spec.model.config, 0 if spec.model.config.tied else bytes_of(sampled.weights.top["embed/w"])
        read, devices = bytes_of(sampled.weights) - looked_up, mesh.size
        context, item = work.length - drawn // 2, 1 if sizes.cache_dtype in ("int8", "fp8") else arithmetic.ITEM
        decoding.work = arithmetic.sampling(config, sizes.slots, context, weights=read, devices=devices, item=item)
        filling.work = arithmetic.sampling(
            config, piece, work.prompt_length // 2 + 1, weights=read, devices=devices, head=False
        )
    return [decoding, filling, publish]
