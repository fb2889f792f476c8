"""Whether a server samples from the model that is trained.

At the start its length, its vocabulary and the ids of a text are compared. After each hand-over it completes a prompt,
and the log-probs that it reports have to be the trainer's of the same tokens, and of the same experts where it returns
them.

Axes: B rows, T time, L layers, k chosen experts of a token.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from tunix.distributed.global_arrays import everywhere, placed
from tunix.mesh import compiler_options, row_shards
from tunix.models.model import Model, Params
from tunix.rollout.engine.experts import UNKNOWN
from tunix.rollout.servers.handover import cards
from tunix.rollout.servers.protocol import Answer, Ask, Expected, Refused, Unfit, settings
from tunix.rollout.servers.server import Server
from tunix.types import Sampling
from tunix.util.exact import jit

TEXT = "Compare 12 + 34, naïve Zürich,\n\tdef f(x): return x ** 2  # 東京 🙂"
"""A text with whatever tokenizers treat differently."""
TOKENS = 16
"""Tokens of the probe's prompt, and of its completion, at most."""
CLEARLY = 4.0
"""By how many times one explanation of a server's log-probs has to be better than another."""
GROWN, LEAST = 20.0, 1e-5
"""By how many times the mean difference may grow from a server's first weights on, or from this many nats where it was
less: rounding stays what it is, but a part that was not loaded falls behind with each update."""
TIED = (
    "vLLM 0.32 on a CPU keeps a copy of a head that is tied to the embeddings, which loading does not renew: there, "
    "train an adapter, or a model whose head is not tied"
)
MIXED = (
    "vLLM 0.32 on a CPU does not renew the experts of a mixture, of which it keeps copies in another order: there, let "
    "tunix sample"
)


async def inspect(server: Server, expected: Expected) -> None:
    """Notes the name of a server's model, and compares what can be compared before any weights are loaded.

    Raises:
        Failed: it does not answer.
        Unfit: it cannot sample for this run.
    """
    listed = await cards(server)
    models = [card for card in listed if not card.get("parent")] or listed
    if not models:
        raise Unfit("it serves no model")
    server.base = server.model = str(models[0]["id"])
    longest = models[0].get("max_model_len")
    if longest is not None and longest < expected.length:
        raise Unfit(
            f"its prompts with completions have {longest} tokens at most, and those of this run {expected.length}: "
            f"start it with --max-model-len {expected.length}, or lower data.max_length"
        )
    last = Ask("tunix-vocabulary", (expected.vocab_size - 1,), settings(Sampling(1), 1, 0), expected)
    try:
        await server.complete(last)
    except Refused as error:
        raise Unfit(
            f"it has another vocabulary: it does not take id {expected.vocab_size - 1}, the last one here ({error})"
        ) from None
    if expected.ids is None:
        return
    try:
        text = {"model": server.base, "prompt": TEXT, "add_special_tokens": False}
        theirs = tuple((await server.call("/tokenize", text))["tokens"])
    except Refused:  # it has no tokenizer to ask
        return
    if theirs != expected.ids:
        at = next((i for i, pair in enumerate(zip(theirs, expected.ids, strict=False)) if pair[0] != pair[1]), 0)
        raise Unfit(
            f"it has another tokenizer: {TEXT!r} has the ids {list(theirs)} there and {list(expected.ids)} "
            f"here, which differ from place {at} on. It has to be started with the model and tokenizer of this run"
        )


class Probe:
    """A prompt whose completion is compared with the trainer's model."""

    def __init__(self, model: Model, mesh: Mesh, length: int, expected: Expected):
        """Compares nothing yet.

        Args:
            model: the trainer's.
            mesh: its devices.
            length: T of the row that is computed, for which the model's attention was chosen.
            expected: the run's temperature, tolerance and ids of the text.
        """
        self._model, self._mesh, self._length, self.expected = model, mesh, length, expected

        def scored(
            params: Params, tokens: Int[Array, "B T"], experts: Int[Array, "B T L k"] | None, *, temperature: float
        ) -> Float[Array, "B T"]:
            """The log-probs of rows that are one sequence each."""
            positions = jax.numpy.broadcast_to(jax.numpy.arange(tokens.shape[1]), tokens.shape)
            ones = jax.numpy.ones_like(tokens)
            hidden, _ = model.forward(params, tokens, positions, ones, experts=experts)
            return model.logprobs_of(params, hidden, tokens, positions, ones > 0, temperature=temperature)[0]

        self._scored = jit(scored, static_argnames="temperature", options=compiler_options(mesh, model.dtype))
        ids = expected.ids or tuple(np.random.default_rng(0).integers(0, expected.vocab_size, TOKENS).tolist())
        prompt = ids[: max(1, min(TOKENS, expected.length // 2))]
        answer = min(TOKENS, expected.length - len(prompt))
        sampling = Sampling(answer, temperature=expected.temperature)
        what = settings(sampling, answer, 0)
        self.ask = Ask("tunix-probe", prompt, what, expected)
        self._seen: dict[str, tuple[Answer, np.ndarray]] = {}
        self._first: dict[str, float] = {}
        """The mean difference that each server began with, by its address."""

    def check(self, url: str, answer: Answer, params: Mapping[str, Any]) -> None:
        """Compares a server's answer to `ask` with the weights that it was told to load; to be called by all processes.

        Raises:
            Unfit: it samples from other weights, or reports something else than the log-probs it samples by.
        """
        expected, before = self.expected, self._seen.get(url)
        of_trainer = self._logprobs(params, answer, expected.temperature)
        self._seen[url] = answer, of_trainer
        off = np.abs(answer.logprobs - of_trainer)
        same = (
            before is not None
            and np.array_equal(before[0].tokens, answer.tokens)
            and np.array_equal(before[0].logprobs, answer.logprobs)
        )
        if before is not None and same and not np.array_equal(before[1], of_trainer):
            raise Unfit("it answers as it did before it was told to load new weights: it still has the earlier ones")
        if expected.temperature != 1:
            plain = np.abs(answer.logprobs - self._logprobs(params, answer, 1.0))
            if CLEARLY * float(plain.mean()) < float(off.mean()):
                raise Unfit(
                    "it reports log-probs before the temperature is applied, by which it does not sample: start it "
                    "with --logprobs-mode processed_logprobs"
                )
        mean = float(off.mean())
        first = max(self._first.setdefault(url, mean), LEAST)
        if mean > GROWN * first:
            known = ((self._model.config.tied, TIED), (expected.routing, MIXED))
            raise Unfit(
                f"its log-probs of a probe differ from the trainer's by {mean:.4g} in the mean, {mean / first:.0f} "
                "times as much as with its first weights: it has not loaded all of the new ones"
                + "".join(f". {hint}" for applies, hint in known if applies)
            )
        if not float(off.max()) <= expected.tolerance:
            raise Unfit(
                f"its log-probs of a probe differ from the trainer's by {float(off.max()):.4g} (in the mean "
                f"{mean:.4g}), more than rollout.mismatch_tolerance, {expected.tolerance:g}: it serves "
                "another model, or weights that another run has handed to it: start it anew"
                + (f". {MIXED}" if self.expected.routing else "")
            )

    def _logprobs(self, params: Mapping[str, Any], answer: Answer, temperature: float) -> np.ndarray:
        """`[T]` the trainer's log-probs of the tokens of an answer."""
        start, end = len(self.ask.prompt), len(self.ask.prompt) + len(answer.tokens)
        row = np.zeros(max(self._length, end), np.int32)
        row[:end] = [*self.ask.prompt, *answer.tokens.tolist()]
        experts = None
        if answer.experts is not None:
            unknown = np.full((len(row) - len(answer.experts), *answer.experts.shape[1:]), UNKNOWN, np.int16)
            experts = self._rows(np.concatenate([answer.experts, unknown]))
        with jax.set_mesh(self._mesh):
            logprobs = self._scored(dict(params), self._rows(row), experts, temperature=temperature)
            return np.asarray(everywhere(logprobs))[0, start:end]

    def _rows(self, row: np.ndarray) -> jax.Array:
        """The same row `[T ...]` for each shard of the rows."""
        rows = np.broadcast_to(row, (row_shards(self._mesh), *row.shape))
        return placed(rows, NamedSharding(self._mesh, PartitionSpec()))
