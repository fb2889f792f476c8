"""The words of vLLM's completions protocol: the body of a request, the check of an answer, and what passes between the
parts of the sampler on servers.

`Sampling` -> `settings` -> POST /v1/completions with the prompt's token ids -> `answered` -> `Answer`. Nothing is left
to a server's defaults, which may come from the model's generation_config.json.

The experts that a mixture's tokens used come with a completion, and the trainer replays them
(`rollout/engine/experts.py` says why). Their form is vLLM's: the base64 of a .npy file with `[T L k]` integers, for the
prompt and all that follows it but for the last token, which was sampled and has not passed through the layers.
`tunix serve` returns the same.

Axes: T time, A alternatives, L layers, k chosen experts of a token.
"""

import base64
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix.errors import UserError
from tunix.rollout.engine.experts import UNKNOWN
from tunix.rollout.engine.sampling import check
from tunix.types import Sampling


@dataclass(frozen=True)
class Routing:
    """How many experts there are in a mixture."""

    layers: int
    """L: layers with experts, e.g. 48."""
    active: int
    """k: experts of a token in each, e.g. 8."""
    number: int
    """Experts of a layer, e.g. 128."""


@dataclass(frozen=True)
class Expected:
    """What a server has to have, to sample for a run."""

    vocab_size: int
    """V, e.g. 151936: a server that samples other ids has another model."""
    length: int
    """Tokens of a prompt and its completion at most, e.g. 1024."""
    ids: tuple[int, ...] | None
    """The ids of `probe.TEXT`, e.g. `(2, 651)`; None where the run has no tokenizer."""
    temperature: float
    """The temperature of the completions that are trained on, e.g. 1.0."""
    tolerance: float
    """Largest difference of its log-probs to the trainer's, e.g. 0.05."""
    routing: Routing | None = None
    """The experts of the run's mixture, e.g. `Routing(48, 8, 128)`; None for another model."""


@dataclass(frozen=True)
class Ask:
    """One request to a server: the rest of a turn of one completion."""

    identity: str
    """The same whenever the request is repeated, and of no other request, e.g. `"tunix-1f03-2-17-0"`."""
    prompt: tuple[int, ...]
    """Token ids that are continued: the prompt, and all that was sampled and observed after it."""
    settings: Mapping[str, Any]
    """What the body of the request has besides prompt and model, e.g. `{"temperature": 0.7, "seed": 5}`."""
    expected: Expected
    """What the answer is compared with: its ids are of this vocabulary, and its experts of this mixture."""


@dataclass(frozen=True)
class Answer:
    """What a server sampled for a request."""

    tokens: np.ndarray
    """`[T]` int32, the stop token included where there is one, e.g. `[603, 651, 1]`."""
    logprobs: np.ndarray
    """`[T]` float32 log-probs in nats, as the server reports them, e.g. `[-0.3, -1.1, -0.01]`."""
    stopped: bool
    """Whether a stop id or string ended it; else the limit of tokens did."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """`[T A]` int32 ids and `[T A]` float32 log-probs of the most likely tokens, where they were asked for."""
    experts: np.ndarray | None = None
    """`[T L k]` int16 experts of the prompt and of all sampled tokens but the last, e.g. `[[[5, 0]]]`, -1 where not
    known; None where the server returns none."""


class Refused(UserError):
    """A server refuses a request for what it asks: no other server would answer it."""


class Unfit(UserError):
    """A server cannot sample for this run: it has another model, or lacks what the run needs."""


class Failed(Exception):
    """A request came to nothing for a reason that may pass; the message is a clause, e.g. `"it answered 503"`."""

    after = 0.0
    """Seconds for which the server wants not to be asked again."""


class Late(Failed):
    """A server had a request for longer than it may."""


class Stray(Failed):
    """The answer to another request came on the connection of this one."""


class Gone(Exception):
    """The server of a request is asked no more; the message is the reason."""


FIELD = "routed_experts"
"""Their name in an answer."""
FLAG = "--enable-return-routed-experts"
"""The option with which vLLM 0.32 returns them."""


def written_experts(experts: np.ndarray) -> str:
    """`[T L k]` experts as text, in few bytes: a token of a large mixture has hundreds of them."""
    narrow = np.uint8 if int(experts.min(initial=0)) >= 0 and int(experts.max(initial=0)) < 256 else np.int16
    file = io.BytesIO()
    np.save(file, experts.astype(narrow), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def read_experts(text: Any) -> np.ndarray:
    """The inverse of `written_experts`, in the type that was sent.

    Raises:
        ValueError: it is no such text.
    """
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, TypeError) as error:
        raise ValueError(f"{text!s:.40} is not the base64 of a .npy file") from error


def experts_of(choice: dict[str, Any], ask: Ask, sampled: int) -> np.ndarray | None:
    """`[T L k]` int16 experts in an answer of so many sampled tokens, -1 where the server knows none; None where it
    returns none, or is not asked of a mixture.

    Raises:
        Unfit: they are not those of the run's model.
    """
    text, routing = choice.get(FIELD), ask.expected.routing
    if text is None or routing is None:
        return None
    remedy = f"take a server with this run's model, of vLLM 0.32 or newer, or start it without {FLAG}"
    try:
        experts = read_experts(text)
    except ValueError as error:
        raise Unfit(f"its {FIELD} cannot be read: {error}; {remedy}") from None
    shape = (len(ask.prompt) + sampled - 1, routing.layers, routing.active)
    if experts.shape != shape or experts.dtype.kind not in "iu":
        raise Unfit(
            f"its {FIELD} are {experts.dtype} of shape {experts.shape}, and integers of shape {shape} were expected "
            f"(tokens but the last, layers, experts of a token): {remedy}"
        )
    if len(experts) and not (int(experts.min()) >= UNKNOWN and int(experts.max()) < routing.number):
        raise Unfit(
            f"its {FIELD} have numbers from {experts.min()} to {experts.max()}, and a layer has experts 0 to "
            f"{routing.number - 1}: {remedy}"
        )
    # What a server leaves at 0 because it did not record it would be trained as if it had been used.
    if ((experts[..., 1:] == experts[..., :-1]) & (experts[..., 1:] != UNKNOWN)).any():
        raise Unfit(f"its {FIELD} name an expert twice for one token: it does not record those of all layers; {remedy}")
    return experts.astype(np.int16)


COLDEST = 0.01
"""vLLM raises lower temperatures to this, but for 0."""
ID = "token_id:"
"""How a token is written where `return_tokens_as_token_ids` is set."""


LISTED = 0.9
"""Least mass of the `top_k` ids that a server lists: of equals of the last one vLLM keeps all, and lists none."""
IMPOSSIBLE = -9999.0
"""The log-prob of what cannot be sampled, as the protocols write it; JSON has no infinity."""


def refuse(sampling: Sampling, vocab_size: int, decodes: bool) -> None:
    """Refuses settings that are invalid, or that servers do not compute as tunix defines them; stop strings are found
    where there is a tokenizer that decodes.

    Raises:
        UserError: naming the setting and why.
    """
    check(sampling, vocab_size)
    s = sampling
    rules = (
        ("min_p", not (s.min_p and s.top_p < 1), "servers cut by min_p before top_p, tunix after it: set one of them"),
        (
            "temperature",
            s.temperature == 0 or s.temperature >= COLDEST,
            f"servers raise it to {COLDEST:g}: set 0 for greedy",
        ),
        ("prompt_logprobs", not s.prompt_logprobs, "servers are asked for no log-probs of prompts"),
        ("stop_strings", decodes or not s.stop_strings, "there is no tokenizer to find them with: set stop_ids"),
    )
    for name, holds, why in rules:
        if not holds:
            raise UserError(
                f"sampling: {name} is {getattr(s, name)!r}, which rollout.engine: vllm cannot honour: {why}"
            )


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
    # What follows are tokens and log-probs that no model of this run can have.
    if len(tokens) != len(logprobs):
        raise Unfit(f"it returns {len(tokens)} token ids with {len(logprobs)} log-probs")
    tokens, logprobs, most = np.array(tokens, np.int32), np.array(logprobs, np.float32), ask.settings["max_tokens"]
    if not 0 < len(tokens) <= most:
        raise Unfit(f"it returns {len(tokens)} tokens where 1 to {most} were asked for")
    last = ask.expected.vocab_size - 1
    if int(tokens.min()) < 0 or int(tokens.max()) > last:
        raise Unfit(f"it samples id {int(tokens.max())}, and the vocabulary has 0 to {last}: another model")
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > 1e-3:
        raise Unfit(f"it reports {float(logprobs[np.argmax(logprobs)]):g} as the log-prob of a token")
    listed = None
    if top:  # the most likely tokens, of which a server lists the sampled one too
        rows: list[list[tuple[float, int]]] = []
        cut, lists = 0 < ask.settings["top_k"] <= top, choice["logprobs"]["top_logprobs"]
        if len(lists) != len(tokens):
            raise Unfit(f"it lists alternatives of {len(lists)} of {len(tokens)} tokens")
        for sampled, by_token in zip(tokens.tolist(), lists, strict=True):
            every = sorted(((x, int(token.removeprefix(ID))) for token, x in by_token.items()), reverse=True)
            ranked = every[:top]
            if len(ranked) < top:
                raise Unfit(f"it lists {len(ranked)} alternatives where {top} were asked for: see its --max-logprobs")
            if cut and (mass := sum(math.exp(x) for x, _ in ranked)) < LISTED:
                raise Unfit(
                    f"it lists the {top} ids that a token may be drawn from with probabilities that sum to {mass:.2f}: "
                    "start it with --logprobs-mode processed_logprobs. If it was, so many others are as likely as the "
                    "last of them, all of which vLLM keeps: set another rollout.top_k, or sample in float32"
                )
            if cut and all(token != sampled for _, token in ranked):  # as likely as the last that is listed
                ranked[-1:] = [x for x in every if x[1] == sampled]
            rows.append(ranked)
        ids, likely = [[token for _, token in row] for row in rows], [[x for x, _ in row] for row in rows]
        possible = np.array(likely, np.float32)
        listed = np.array(ids, np.int32), np.where(possible <= IMPOSSIBLE, -np.inf, possible)
    experts = experts_of(choice, ask, len(tokens))
    return Answer(tokens, logprobs, reason == "stop", top=listed, experts=experts)
