"""An engine that answers what a test says, in place of a model that has learned it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tunix.inference.model import InferenceModel
from tunix.rollout.engine.engine import Engine
from tunix.types import Completion


class Scripted(Engine):
    """Answers each request of `serve` with a text, whose tokens have a log-prob of -0.5."""

    def __init__(self, inference: InferenceModel, answer: Callable[[str], str]):
        """`answer` is given a request's prompt as text, special tokens included."""
        model, _, mesh = inference.weights(jax.devices()[:1])
        super().__init__(model, mesh, slots=1, max_length=inference.limit)
        self._answer, self._tokenizer = answer, inference.tokenizer

    def serve(self, pull: Any, on_done: Any, on_progress: Any) -> None:
        tokenizer, number = self._tokenizer, 0
        assert tokenizer is not None
        while (arrivals := pull(True)) is not None:
            for request in arrivals.requests:
                text = self._answer(tokenizer.decode(request.prompt, False))
                ids = np.array([*tokenizer.encode(text), request.sampling.stop_ids[-1]], np.int32)
                assert len(ids) <= request.sampling.max_tokens
                logprobs, versions = np.full(len(ids), -0.5, np.float32), np.full(len(ids), 7, np.int32)
                turns = ((0, len(ids)),)
                on_done(number, Completion(ids, logprobs, "stop", versions, request.sampling, turns))
                number += 1
