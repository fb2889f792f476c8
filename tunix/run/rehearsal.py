"""A step of a run's algorithm on made-up rows: its programs are known, and compiled, before there is a rollout.

Axes: T time.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.algorithms.distill.algorithm import Distill
from tunix.data.config import DataConfig
from tunix.data.sources import Rows
from tunix.distributed import processes
from tunix.hf.source import Source
from tunix.mesh import compile_on
from tunix.protocols import Client
from tunix.rollout.collect import Collector, Judge, Judged
from tunix.run.inputs import Inputs, open_stream
from tunix.run.loop import Stream
from tunix.run.setup import Setup
from tunix.trainer.frozen_model import FrozenModel, Teachers
from tunix.trainer.learner import Learner
from tunix.trainer.logprobs import Scores
from tunix.trainer.trainer import Trainer
from tunix.types import Batch, Completion, Loss, Metrics, OnDone, Reply, Request, Sequence

Scored = Literal["policy", "reference", "teacher", "critic"]
"""Whose numbers are asked for; a critic's may be those of the policy's value head."""


class Rehearsal(Client):
    """What the clients of a rehearsal have in common: completions and random rewards, so that groups differ, are made
    up; nothing is trained, saved or exported."""

    def __init__(self, setup: Setup):
        self.setup, self.recipe = setup, setup.recipe
        self._random = np.random.default_rng(0)

    def score(
        self, kind: Scores, of: Scored, sequences: List[Sequence], temperature: float, size: int | None
    ) -> List[np.ndarray]:
        """Takes the scoring of sequences by a model; the result is zeros."""
        raise NotImplementedError

    def logprobs(
        self, sequences: List[Sequence], of: Scored = "policy", temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """Log-probs of sequences, all zeros."""
        return self.score("logprobs", of, sequences, temperature, size)

    def values(self, sequences: List[Sequence], size: int | None = None) -> List[np.ndarray]:
        """Values of sequences, all zeros."""
        return self.score("values", "critic", sequences, 1.0, size)

    def forward_backward(self, batch: Batch, loss: Loss) -> Metrics:
        """Taken as a whole step, which needs as much at least; so nothing is left for `optim_step`."""
        return self.step(batch, loss)

    def optim_step(self) -> Metrics:
        """No metrics."""
        return {}

    def evaluate(self, batches: Iterable[Batch], loss: Loss) -> dict[str, float]:
        """Needs less than a step: left out."""
        return {}

    def run(
        self, requests: List[Request], reply: Reply | None = None, on_done: OnDone | None = None
    ) -> list[Completion]:
        """Completions of made-up tokens, as long as can be."""
        limit, played = self.recipe.data.max_length, self.recipe.plays
        completions = []
        for request in requests:
            room = limit - len(request.prompt)
            number = max(room if played else min(request.sampling.max_tokens, room), 1)
            tokens, zeros = np.ones(number, np.int32), np.zeros(number, np.float32)
            top, n = None, request.sampling.top_logprobs
            if n:
                top = np.ones((number, n), np.int32), np.zeros((number, n), np.float32)
            completions.append(Completion(tokens, zeros, "length", tokens, request.sampling, ((0, number),), top=top))
        return completions

    def publish(self) -> int:
        """There are no weights to pass on."""
        return 1

    def stream(self) -> Stream:
        """Steps of full rows, as the run's own stream makes them."""
        setup, recipe, data = self.setup, self.recipe, self.recipe.data
        decoder = setup.source.decoder
        made_up = DataConfig(
            train="rehearsal",
            format="tokens",
            completion_length=data.completion_length,
            packing=data.packing,
            max_length=data.max_length,
            prompt_length=data.prompt_length,
        )

        def ids(number: int) -> list[int]:
            return [token % (decoder.vocab_size - 1) + 1 for token in range(number)]

        # A row of every kind, each as long as can be. Pairs share their prompt where the recipe bounds what differs.
        side, bounded = data.completion_length or data.max_length // 2, data.completion_length or data.prompt_length
        row = {
            "input_ids": ids(data.max_length),
            "prompt_ids": ids(data.longest_prompt if bounded else data.max_length - side),
            "completion_ids": ids(side),
            "chosen_ids": ids(side),
            "rejected_ids": ids(side)[::-1],
            "label": True,
        }

        def rewarded(prompts: object, completions: List[Completion], texts: object) -> Callable[[], list[Judged]]:
            return lambda: [Judged(score) for score in self._random.uniform(size=len(completions)).tolist()]

        # Rows are as long as where an environment answers some of the prompts.
        environment = next((x.environment for x in data.sources if x.environment), recipe.rollout.environment)
        rollout = recipe.rollout.model_copy(update={"environment": environment})
        return open_stream(
            replace(setup, recipe=recipe.model_copy(update={"data": made_up, "epochs": None, "rollout": rollout})),
            Inputs(Source(decoder, None), Rows("rehearsal", [row] * recipe.batch_size), None),
            Collector(
                None, setup.algorithm.sampling, None, None, data.max_length, (Judge("rehearsal", 1.0, 64, rewarded),)
            ),
            1,
        )


class Compiler(Rehearsal):
    """Compiles every program that the algorithm asks for, at the same time, in the shapes of a full step."""

    def __init__(self, setup: Setup, client: Trainer, pool: ThreadPoolExecutor):
        """For the client that will run them; the pool has the threads."""
        super().__init__(setup)
        self.waiting: list[Future[object]] = []
        """The programs on their way."""
        self._client, self._pool = client, pool
        self._known = set[tuple[object, ...]]()

    def step(self, batch: Batch, loss: Loss, of: Literal["policy", "critic"] = "policy") -> Metrics:
        """Compiles an update; its metrics are zeros of the right names."""
        learner = self._client.learner if of == "policy" else self._client.critic
        assert learner is not None, "the algorithm updates a critic: it has one"
        lowered = learner.lowered(batch, loss)
        shapes = tuple(x.shape for x in jax.tree.leaves(batch))
        self._compile(lowered, learner.spec.mesh, of, loss, shapes)
        return dict.fromkeys(lowered.out_info[1], 0.0)

    def score(
        self, kind: Scores, of: Scored, sequences: List[Sequence], temperature: float, size: int | None
    ) -> List[np.ndarray]:
        learner = self._client.learner
        models = {"reference": learner.reference, "teacher": learner.teacher, "critic": self._client.critic or learner}
        model = learner if of == "policy" else models[of]
        assert model is not None, f"the algorithm reads a {of}: it has one"
        for each in model.each if isinstance(model, Teachers) else (model,):
            if not isinstance(each, Learner | FrozenModel):  # on a server
                continue
            scorer, params = (each.scorer, each.params) if isinstance(each, Learner) else (each, each.weights)
            microbatches = scorer.microbatcher.place(scorer.packed(sequences, size))
            lowered = scorer.lowered(kind, params, microbatches, temperature)
            self._compile(lowered, scorer.microbatcher.mesh, kind, id(each), size or len(sequences), temperature)
        return [np.zeros(len(x.tokens), np.float32) for x in sequences]

    def _compile(self, lowered: jax.stages.Lowered, mesh: Mesh, *key: object) -> None:
        """Compiles a program, unless the one of this key is on its way already."""
        if key not in self._known:
            self._known.add(key)
            self.waiting.append(self._pool.submit(compile_on, mesh, lowered))


def compiled_ahead(setup: Setup, client: Trainer) -> None:
    """Compiles what the first update of a run will run, all programs at the same time; waits until they are.

    Where that cannot be known before the first rollout, nothing happens, and they are compiled when they are called: a
    rehearsal has not the shapes of pictures, of experts that the sampler records, of a teacher's states or one that is
    shown completions; nor of a class of the user's, whose `update` may do anything. Several processes have to run what
    they run in one order.
    """
    algorithm, decoder = setup.algorithm, setup.source.decoder
    plain = decoder.vision is None and decoder.routed is None and algorithm.objective.divergence is None
    plain &= not (isinstance(algorithm, Distill) and algorithm.config.success is not None)
    shipped = type(algorithm).__module__.startswith("tunix.")
    if not (plain and shipped and setup.samples and processes.number() == 1):
        return
    state = algorithm.get_state()
    with ThreadPoolExecutor() as pool:
        compiler = Compiler(setup, client, pool)  # pyright: ignore[reportAbstractUsage]  # it saves nothing
        with closing(compiler.stream()) as stream:
            algorithm.update(compiler, next(stream))
        for program in compiler.waiting:
            program.result()
    algorithm.set_state(state)
