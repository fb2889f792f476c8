"""The experts that a mixture's tokens used, as servers return them with a completion: the trainer replays them
(`rollout/engine/experts.py` says why).

The form is vLLM's: the base64 of a .npy file with `[T L k]` integers, for the prompt and all that follows it but for
the last token, which was sampled and has not passed through the layers. `tunix serve` returns the same.

Axes: T time, L layers, k chosen experts of a token.
"""

import base64
import io
from typing import Any

import numpy as np

from tunix.rollout.engine.experts import UNKNOWN
from tunix.rollout.servers.types import Ask, Unfit

FIELD = "routed_experts"
"""Their name in an answer."""
FLAG = "--enable-return-routed-experts"
"""The option with which vLLM 0.32 returns them."""


def written(experts: np.ndarray) -> str:
    """`[T L k]` experts as text, in few bytes: a token of a large mixture has hundreds of them."""
    narrow = np.uint8 if int(experts.min(initial=0)) >= 0 and int(experts.max(initial=0)) < 256 else np.int16
    file = io.BytesIO()
    np.save(file, experts.astype(narrow), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def read(text: Any) -> np.ndarray:
    """The inverse of `written`, in the type that was sent.

    Raises:
        ValueError: it is no such text.
    """
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, TypeError) as error:
        raise ValueError(f"{text!s:.40} is not the base64 of a .npy file") from error


def experts_of(choice: dict[str, Any], ask: Ask, sampled: int) -> np.ndarray | None:
    """`[T L k]` int16 experts in an answer, -1 where the server knows none; None where it returns none.

    Args:
        choice: of the answer.
        ask: what was asked; where it is not asked of a mixture there is nothing to read.
        sampled: tokens of the answer.

    Raises:
        Unfit: they are not those of the run's model.
    """
    text, routing = choice.get(FIELD), ask.routing
    if text is None or routing is None:
        return None
    remedy = f"take a server with this run's model, of vLLM 0.32 or newer, or start it without {FLAG}"
    try:
        found = read(text)
    except ValueError as error:
        raise Unfit(f"its {FIELD} cannot be read: {error}; {remedy}") from None
    shape = (len(ask.prompt) + sampled - 1, routing.layers, routing.active)
    if found.shape != shape or found.dtype.kind not in "iu":
        raise Unfit(
            f"its {FIELD} are {found.dtype} of shape {found.shape}, and integers of shape {shape} were expected "
            f"(tokens but the last, layers, experts of a token): {remedy}"
        )
    if len(found) and not (int(found.min()) >= UNKNOWN and int(found.max()) < routing.number):
        raise Unfit(
            f"its {FIELD} have numbers from {found.min()} to {found.max()}, and a layer has experts 0 to "
            f"{routing.number - 1}: {remedy}"
        )
    # What a server leaves at 0 because it did not record it would be trained as if it had been used.
    if ((found[..., 1:] == found[..., :-1]) & (found[..., 1:] != UNKNOWN)).any():
        raise Unfit(f"its {FIELD} name an expert twice for one token: it does not record those of all layers; {remedy}")
    return found.astype(np.int16)
