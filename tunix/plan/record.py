"""One step of a recipe's algorithm with a client that lowers each program that it is asked to run.

The algorithm sees full rows of made-up tokens and random rewards: whatever it is, a user's own class included, the
programs are those of its first steps. What only the engine and the sizes of its caches decide is added at the end.

Axes: T time.
"""

import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tunix.data.pipeline import pictures_of_row
from tunix.mesh import bytes_of
from tunix.models.model import Model
from tunix.plan import arithmetic, programs
from tunix.plan.subject import Place, Subject, Trained
from tunix.run.rehearsal import Rehearsal, Scored
from tunix.trainer.learner import abstract_moments
from tunix.trainer.logprobs import Scorer, Scores
from tunix.trainer.microbatches import Microbatches
from tunix.trainer.perf import training_flops
from tunix.types import MOST_TOP, Batch, Loss, Metrics, Sequence

MOST_STEPS = 64
"""Steps after which an algorithm that has not updated its policy is taken as it is; PPO may warm its critic up."""


@dataclass
class Program:
    """One program of a run: what is asked of it, and what it needs on each device once its compiler was asked."""

    name: str
    """What it does, e.g. `step`."""
    place: Place = "training"
    """Whose devices run it."""
    times: float = 0.0
    """How often it runs in a step of the recipe."""
    tokens: int = 0
    """Tokens of one run over all devices."""
    model_flops: float = 0.0
    """FLOPs of the model in one run over all devices, without recomputation; 0 where it does not train."""
    work: arithmetic.Work = field(default_factory=arithmetic.Work)
    """What one run multiplies and moves on each device at the least, by arithmetic."""
    sent: arithmetic.Sent = field(default_factory=lambda: arithmetic.Sent({}, 0.0))
    """What each device sends in one run at the least, by arithmetic."""
    lowered: jax.stages.Lowered | None = None
    """None where arithmetic says what it needs."""
    traced_in: float = 0.0
    """Seconds, here."""
    reads: tuple[str, ...] = ()
    """What of `Subject.held` of its place is among its arguments."""
    peak: int = 0
    """Bytes that it needs on each device, arguments included: by its compiler, where that is asked."""
    besides: int = 0
    """Bytes on each device that neither it reads nor `Subject.held` lists; below 0 where some are listed twice."""
    gradients: int = 0
    """Bytes of the gradients on each device."""
    caches: int = 0
    """Bytes of caches on each device among its arguments."""
    total: int = 0
    """Bytes: its own peak and everything that the run holds meanwhile."""
    kinds: dict[str, int] = field(default_factory=dict)
    """The same by what they are."""
    compiled_in: float = 0.0
    """Seconds, here, with what else was compiled at the time; of a TPU's program at the effort of a plan."""
    refused: str = ""
    """The compiler's message where the program does not fit; `peak` is then what it asks for."""
    buffers: list[list[Any]] = field(default_factory=list)
    """The arrays that a compiler lists in such a message: bytes, type and shape, scope."""
    seconds: float | None = None
    """The least time of one run; None where the devices' figures are not known."""
    bound: str = ""
    """What that is bound by: `compute`, `memory`, `links` or, between hosts of GPUs, `network`."""


class Recorder(Rehearsal):
    """A client that makes up completions and records the programs behind everything else."""

    def __init__(self, subject: Subject):
        super().__init__(subject.setup)
        self.subject = subject
        self.programs: dict[tuple[Hashable, ...], Program] = {}
        """By what tells programs apart, in the order in which they are first asked for."""

    def step(self, batch: Batch, loss: Loss, of: Literal["policy", "critic"] = "policy") -> Metrics:
        """Records an update; its metrics are zeros of the right names."""
        subject = self.subject
        trained = subject.policy if of == "policy" else subject.critic
        assert trained is not None, "the algorithm updates a critic: it has one"
        spec = trained.spec
        model, vision = spec.model, spec.model.config.vision
        pictures = pictures_of_row(self.recipe.data, spec.microbatcher.unit)
        config, teachers = self.recipe.teacher, subject.teachers if loss.divergence is not None else ()
        if config is not None and config.is_stored:
            batch = replace(batch, stored=np.zeros((*batch.tokens.shape, 2, MOST_TOP + 1), np.float32))
        shapes = programs.microbatches_of(batch, spec.microbatcher, pictures, vision)
        reference = subject.reference.params if loss.reference and subject.reference else None
        for number, teacher in enumerate(teachers):
            theirs, mesh = programs.microbatches_of(batch, teacher.microbatcher), teacher.microbatcher.mesh
            program = self.asked(
                ("teacher", number, *_key(theirs)),
                "teacher's states",
                subject.teacher_reads,
                partial(programs.teacher_states, teacher.model, mesh, teacher.params, theirs, shapes),
            )
            program.place = subject.taught_on
            _note_pass(program, teacher.model, teacher.params, batch, mesh, theirs.number, head=False)

        def lower() -> jax.stages.Lowered:
            each = [(x.model, config is None or config.column is None) for x in teachers]
            return programs.step(spec, trained.params, trained.base, shapes, loss, reference, each)

        reads = ["critic and its moments"] if of == "critic" else ["weights", "optimizer's moments"]
        reads += ["frozen base", *(["reference"] if reference else [])]
        name = "step" if of == "policy" else "critic's step"
        program = self.asked((of, loss, *_key(shapes)), name, tuple(reads), lower)
        program.tokens = int((np.asarray(batch.segment_ids) > 0).sum())
        program.model_flops = training_flops(model.config, batch, spec.adapter)
        program.work = arithmetic.training(
            model.config,
            batch,
            spec.adapter,
            model.remat,
            weights=shapes.number * bytes_of(trained.all),
            state=bytes_of([trained.params, abstract_moments(spec, trained.params)]),
            devices=spec.mesh.size,
            head=of == "policy",
        )
        program.sent = arithmetic.exchanged(
            model.config,
            spec.mesh,
            program.tokens,
            jnp.dtype(model.dtype).itemsize,
            weights=trained.all,
            trained=trained.params.keys(),
            microbatches=shapes.number,
        )
        program.gradients = bytes_of(trained.params)
        if shapes.number > 1:  # and their sum over micro-batches, in float32 or wider
            wide = {name: x.update(dtype=jnp.promote_types(x.dtype, jnp.float32)) for name, x in trained.params.items()}
            program.gradients += bytes_of(wide)
        assert program.lowered is not None, "updates are lowered"
        return dict.fromkeys(program.lowered.out_info[1], 0.0)

    def score(
        self, kind: Scores, of: Scored, sequences: List[Sequence], temperature: float, size: int | None
    ) -> List[np.ndarray]:
        subject = self.subject
        if of == "critic" and subject.critic is None:
            of = "policy"
        models = {"policy": subject.policy, "reference": subject.reference, "critic": subject.critic}
        # Those that are not on a server.
        for number, scored in enumerate(subject.teachers if of == "teacher" else (models[of],)):
            assert scored is not None, f"the algorithm reads a {of}: it has one"
            spec, params = (scored.spec, scored.all) if isinstance(scored, Trained) else (scored, scored.params)
            model, microbatcher = spec.model, spec.microbatcher
            scorer = Scorer(model, microbatcher, subject.policy.spec.length)
            batch = replace(scorer, microbatcher=replace(microbatcher, pictures=0)).packed(sequences, size)
            shapes = programs.microbatches_of(batch, microbatcher, microbatcher.pictures, model.config.vision)
            name = kind if kind != "logprobs" else "log-probs" if of == "policy" else f"{of}'s log-probs"
            named = {"policy": ("weights",), "critic": ("critic and its moments",), "teacher": subject.teacher_reads}
            program = self.asked(
                (name, number, temperature, *_key(shapes)),
                name,
                (*named.get(of, (of,)), "frozen base"),
                partial(scorer.lowered, kind, params, shapes, temperature),
            )
            program.place = subject.taught_on if of == "teacher" else "training"
            _note_pass(program, model, params, batch, microbatcher.mesh, shapes.number, head=kind != "values")
        return [np.zeros(len(x.tokens), np.float32) for x in sequences]

    def asked(
        self,
        key: tuple[Hashable, ...],
        name: str,
        reads: tuple[str, ...],
        lower: Callable[[], jax.stages.Lowered],
    ) -> Program:
        """The program of this key, which runs once more; lowered where it is new."""
        if key not in self.programs:
            start = time.perf_counter()
            program = Program(name, reads=reads, lowered=lower(), traced_in=time.perf_counter() - start)
            self.programs[key] = program
        self.programs[key].times += 1
        return self.programs[key]


def _note_pass(
    program: Program, model: Model, params: programs.Shapes, batch: Batch, mesh: Mesh, number: int, head: bool
) -> None:
    """Notes the arithmetic of a forward pass over a batch in so many micro-batches."""
    program.tokens = int((np.asarray(batch.segment_ids) > 0).sum())
    weights, item = number * bytes_of(params), jnp.dtype(model.dtype).itemsize
    program.work = arithmetic.scoring(model.config, batch, weights=weights, devices=mesh.size, head=head)
    program.sent = arithmetic.exchanged(model.config, mesh, program.tokens, item, weights=params, microbatches=number)


def _key(shapes: Microbatches) -> tuple[Hashable, ...]:
    leaves, tree = jax.tree.flatten(shapes)
    return tree, *leaves


def programs_of(subject: Subject) -> list[Program]:
    """The programs of a run: what its algorithm asks for, and the engine's at their largest."""
    recorder = Recorder(subject)  # pyright: ignore[reportAbstractUsage]  # it saves nothing
    algorithm = subject.setup.algorithm
    if algorithm.needs.reference == "run":
        # The reference is the policy at its start.
        algorithm.precomputed_logprobs = lambda sequence: recorder.logprobs([sequence])[0]
    spec = subject.policy.spec
    with closing(recorder.stream()) as stream:
        item = next(stream)
        for _ in range(MOST_STEPS):
            for program in recorder.programs.values():
                program.times = 0.0
            algorithm.update(recorder, item)
            if any(key[0] == "policy" for key in recorder.programs):
                break
    asked, sampled = [*recorder.programs.values()], subject.sampled
    if sampled is None:
        return asked
    model, config, sizes, mesh, place = spec.model, spec.model.config, sampled.sizes, sampled.mesh, sampled.place
    state = programs.state_of(model, mesh, sizes)
    pages = bytes_of(state.caches)
    # On devices of its own the old copy goes first, and the new one is in its place while the last array arrives.
    publish = Program("publish", place, peak=sampled.copied if place == "training" else sampled.arriving)
    if not sampled.matters:  # it only shows samples
        return [*asked, publish, Program("pages of the cache", place, peak=pages, caches=pages)]
    copy, weights, piece = ("sampler's copy",), sampled.weights, sizes.piece * sizes.shards
    ask = recorder.asked
    decoding = ask(("decode",), "decode", copy, lambda: programs.decoding(model, mesh, weights, state, sizes))
    filling = ask(("prefill",), "prefill", copy, lambda: programs.prefilling(model, mesh, weights, state, sizes))
    for program, tokens in ((decoding, sizes.slots), (filling, piece)):
        program.place, program.tokens, program.caches, program.times = place, tokens, pages, 0.0
        program.besides = sampled.copied - bytes_of(weights)  # what the copy shares with a frozen base is there once
    if subject.setup.samples:
        prompts, work, item = subject.setup.recipe.batch_size, sampled.work, jnp.dtype(model.dtype).itemsize
        requests = prompts * subject.setup.recipe.algorithm.samples_per_prompt
        drawn = min(work.length, algorithm.sampling.max_tokens)
        decoding.times = float(-(-requests // sizes.slots) * drawn)
        filling.times = float(-(-prompts * work.prompt_length // piece))
        read = bytes_of(weights) - (0 if config.tied else bytes_of(weights.top["embed/w"]))
        cache = 1 if sizes.cache_dtype in ("int8", "fp8") else arithmetic.ITEM
        context, devices = work.length - drawn // 2, mesh.size
        decoding.work = arithmetic.sampling(config, sizes.slots, context, weights=read, devices=devices, item=cache)
        filling.work = arithmetic.sampling(
            config, piece, work.prompt_length // 2 + 1, weights=read, devices=devices, head=False
        )
        for program in (decoding, filling):
            program.sent = arithmetic.exchanged(config, mesh, program.tokens, item)
    return [*recorder.programs.values(), publish]
