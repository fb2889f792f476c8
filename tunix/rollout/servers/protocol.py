"""The words of vLLM's completions protocol: the body of a request, and the check of an answer.

`Sampling` -> `settings` -> POST /v1/completions with the prompt's token ids -> `answered` -> `Answer`. Nothing is left
to a server's defaults, which may come from the model's generation_config.json.

Axes: T time, A alternatives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunix.errors import UserError
from tunix.rollout.engine.sampling import check
from tunix.rollout.servers.routing import experts_of
from tunix.rollout.servers.types import Answer, Ask, Failed, Stray, Unfit
from tunix.types import Sampling

COLDEST = 0.01
"""vLLM raises lower temperatures to this, but for 0."""
ID = "token_id:"
"""How a token is written where `return_tokens_as_token_ids` is set."""


def refuse(sampling: Sampling, vocab_size: int, decodes: bool) -> None:
    """Refuses settings that are invalid, or that servers do not compute as tunix defines them.

    Args:
        sampling: the settings of requests.
        vocab_size: V.
        decodes: whether there is a tokenizer.

    Raises:
        UserError: naming the setting and why.
    """
    check(sampling, vocab_size)
    s = sampling
    rules = (
        ("prompt_logprobs", not s.prompt_logprobs, "servers report them before the temperature and the cuts"),
        ("min_p", not (s.min_p and s.top_p < 1), "servers cut by min_p before top_p, tunix after it: set one of them"),
        (
            "temperature",
            s.temperature == 0 or s.temperature >= COLDEST,
            f"servers raise it to {COLDEST:g}: set 0 for greedy",
        ),
        ("stop_strings", decodes or not s.stop_strings, "there is no tokenizer to find them with: set stop_ids"),
    )
    for name, holds, why in rules:
        if not holds:
            given = f"{name} is {getattr(s, name)!r}"
            raise UserError(f"sampling: {given}, which rollout.engine: vllm cannot honour: {why}")


def settings(sampling: Sampling, max_tokens: int, seed: int) -> dict[str, Any]:
    """The settings of a request, every one of them written out."""
    return {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": seed,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        # The end-of-text id stops only where it is one of the stop ids, as in tunix's own engine.
        "ignore_eos": True,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": False,
        "logprobs": sampling.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def seed_of(seed: int, index: int, place: int) -> int:
    """The seed of a request, from that of the call, the request's number, and how many tokens it already has.

    A turn that begins after others has random numbers of its own, since servers count tokens from the request's start.
    """
    return int(np.random.SeedSequence([seed, index, place]).generate_state(1, np.uint64)[0] >> 1)


def answered(body: Any, ask: Ask) -> Answer:
    """Reads the answer to a request.

    Raises:
        Failed: it is the answer to another request, or none.
        Unfit: the server cannot say what a trainer has to know.
    """
    try:
        identity, (choice,), top = str(body["id"]), body["choices"], ask.settings["logprobs"]
        reason = choice["finish_reason"]
    except (TypeError, KeyError, ValueError):
        raise Failed(f"it answered {body!s:.80}") from None
    # A late or second answer on a connection that is used again is that of an earlier request.
    if identity.removeprefix("cmpl-") != ask.identity:
        raise Stray(f"it answered request {identity} where {ask.identity} was asked")
    tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if tokens is None:
        raise Unfit("it returns text and no token ids, which a tokenizer cannot bring back: take vLLM 0.10.2 or newer")
    if logprobs is None:
        raise Unfit("it returns no log-probs of the sampled tokens: see its --max-logprobs")
    if (theirs := choice.get("prompt_token_ids")) is not None and tuple(theirs) != ask.prompt:
        raise Stray("it answered another prompt")
    if reason not in ("stop", "length"):
        raise Failed(f"it ended a completion with {reason!r}")
    found = Answer(np.array(tokens, np.int32), np.array(logprobs, np.float32), reason == "stop")
    _check(found, ask)
    listed = _top(choice["logprobs"], top) if top else None
    return replace(found, top=listed, experts=experts_of(choice, ask, len(found.tokens)))


def _check(answer: Answer, ask: Ask) -> None:
    """Refuses tokens and log-probs that no model of this run can have."""
    tokens, logprobs, most = answer.tokens, answer.logprobs, ask.settings["max_tokens"]
    if len(tokens) != len(logprobs):
        raise Unfit(f"it returns {len(tokens)} token ids with {len(logprobs)} log-probs")
    if not 0 < len(tokens) <= most:
        raise Unfit(f"it returns {len(tokens)} tokens where 1 to {most} were asked for")
    if int(tokens.min()) < 0 or int(tokens.max()) >= ask.vocab_size:
        raise Unfit(
            f"it samples id {int(tokens.max())}, and the vocabulary has 0 to {ask.vocab_size - 1}: another model"
        )
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > 1e-3:
        raise Unfit(f"it reports {float(logprobs[np.argmax(logprobs)]):g} as the log-prob of a token")


def _top(logprobs: Mapping[str, Any], number: int) -> tuple[np.ndarray, np.ndarray]:
    """`[T A]` ids and log-probs of the most likely tokens, of which a server lists the sampled one too."""
    rows = [_ranked(one, number) for one in logprobs["top_logprobs"]]
    ids, values = ([row[i] for row in rows] for i in (0, 1))
    return np.array(ids, np.int32), np.array(values, np.float32)


def _ranked(listed: Mapping[str, float], number: int) -> tuple[Sequence[int], Sequence[float]]:
    ranked = sorted(((value, int(token.removeprefix(ID))) for token, value in listed.items()), reverse=True)[:number]
    if len(ranked) < number:
        raise Unfit(f"it lists {len(ranked)} alternatives where {number} were asked for: see its --max-logprobs")
    return [token for _, token in ranked], [value for value, _ in ranked]
