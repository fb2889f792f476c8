"""The body of POST /v1/completions: what is taken of it, what it means for the engine, and the answer.

The words are those of vLLM and OpenAI (https://docs.vllm.ai/en/latest/serving/openai_compatible_server). A setting that
the engine does not compute is refused, not ignored.

Axes: T time, L layers, k chosen experts of a token.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from tunix.rollout.servers.protocol import FIELD, written_experts
from tunix.types import Completion, Request, Sampling

HALF = 32
"""Bits of a request's seed that seed the engine; the rest counts as the request's number."""


class CompletionBody(BaseModel):
    """A request, with the defaults of the protocol."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | list[int]
    request_id: str = Field(default_factory=lambda: secrets.token_hex(8))
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: float = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[StrictInt] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True
    # What has no effect at these values, and cannot be had at others.
    n: Literal[1] = 1
    stream: Literal[False] = False
    echo: Literal[False] = False
    repetition_penalty: Literal[1] = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0

    @field_validator("prompt", mode="before")
    @classmethod
    def _single(cls, prompt: Any) -> Any:
        """Refuses a list of prompts: digits in strings are texts, no token ids."""
        if isinstance(prompt, list) and any(type(item) is not int for item in prompt):
            raise ValueError("it is a text or a list of token ids, whole numbers; several prompts are several requests")
        return prompt

    def sampling(self, stop_ids: Sequence[int]) -> Sampling:
        """The engine's settings.

        Args:
            stop_ids: the model's own, which end a completion unless `ignore_eos` is set.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=float(self.temperature),
            top_k=max(self.top_k, 0),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            stop_ids=tuple(self.stop_token_ids) + (() if self.ignore_eos else tuple(stop_ids)),
            stop_strings=stops,
            top_logprobs=self.logprobs or 0,
        )

    def request(self, prompt: np.ndarray, sampling: Sampling, adapter: str | None) -> Request:
        """What the engine completes: the same tokens for the same body, whatever else it is asked for."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        return Request(prompt, sampling, seed % (1 << HALF), seed >> HALF, adapter=adapter)

    def answer(
        self, prompt: np.ndarray, completion: Completion, text: str | None, spell: Callable[[int], str]
    ) -> dict[str, Any]:
        """The answer.

        Args:
            prompt: `[T]` its token ids.
            completion: what the engine sampled.
            text: of the completion; None without a tokenizer.
            spell: how a token is written among the log-probs.
        """
        choice: dict[str, Any] = {"index": 0, "text": text or "", "finish_reason": completion.finish, "logprobs": None}
        if self.logprobs is not None:
            choice["logprobs"] = _logprobs(completion, spell)
        if self.return_token_ids:
            choice |= {"token_ids": completion.tokens.tolist(), "prompt_token_ids": prompt.tolist()}
            if completion.experts is not None:
                choice[FIELD] = written_experts(completion.experts[:-1])
        asked, sampled = len(prompt), len(completion.tokens)
        usage = {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}
        identity = f"cmpl-{self.request_id}"
        return {"id": identity, "object": "text_completion", "model": self.model, "choices": [choice], "usage": usage}


def _logprobs(completion: Completion, spell: Callable[[int], str]) -> dict[str, Any]:
    """The log-probs of the tokens, and of the most likely ones at each."""
    names, values = [spell(int(token)) for token in completion.tokens], completion.logprobs.tolist()
    top = [{name: value} for name, value in zip(names, values, strict=True)]
    if completion.top is not None:
        for listed, ids, likely in zip(top, *completion.top, strict=True):
            listed |= {spell(int(i)): float(x) for i, x in zip(ids, likely, strict=True)}
    return {"token_logprobs": values, "tokens": names, "top_logprobs": top}
