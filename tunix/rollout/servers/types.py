"""What passes between the parts of the sampler on servers.

Axes: T time, A alternatives, L layers, k chosen experts of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunix.errors import UserError


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
class Ask:
    """One request to a server: the rest of a turn of one completion."""

    identity: str
    """The same whenever the request is repeated, and of no other request, e.g. `"tunix-1f03-2-17-0"`."""
    prompt: tuple[int, ...]
    """Token ids that are continued: the prompt, and all that was sampled and observed after it."""
    settings: Mapping[str, Any]
    """What the body of the request has besides prompt and model, e.g. `{"temperature": 0.7, "seed": 5}`."""
    vocab_size: int
    """V: an answer with other ids is of another model, e.g. 151936."""
    routing: Routing | None = None
    """The experts that the answer may tell of, e.g. `Routing(48, 8, 128)`; None where they are not read."""


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


class Late(Failed):
    """A server had a request for longer than it may."""


class Stray(Failed):
    """The answer to another request came on the connection of this one."""


class Gone(Exception):
    """The server of a request is asked no more; the message is the reason."""


@dataclass(frozen=True)
class Expected:
    """What a server has to have, to sample for a run."""

    vocab_size: int
    """V, e.g. 151936."""
    length: int
    """Tokens of a prompt and its completion at most, e.g. 1024."""
    text: str
    """A text whose ids are compared."""
    ids: tuple[int, ...] | None
    """The ids of the text, e.g. `(2, 651)`; None where the run has no tokenizer."""
    temperature: float
    """The temperature of the completions that are trained on, e.g. 1.0."""
    tolerance: float
    """Largest difference of its log-probs to the trainer's, e.g. 0.05."""
    routing: Routing | None = None
    """The experts of the run's mixture, e.g. `Routing(48, 8, 128)`; None for another model."""


@dataclass(frozen=True)
class WeightsFolder:
    """Weights that servers are to load."""

    folder: Path
    """Where they are, e.g. `runs/grpo/weights/tunix-1f03-3`."""
    tag: str
    """Their name, of no other weights: the adapter's, or the version that a server reports; e.g. `"tunix-1f03-3"`."""
