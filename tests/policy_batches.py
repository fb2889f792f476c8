"""Small rollouts with known log-probs for the losses of GRPO and PPO, packed as a run packs them.

A `Taken` gives one number per drawn token; the prompt's two tokens stand before them. The current log-probs travel
through `pack` as a per-token value, so that a loss sees them where the model would put them.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from tunix.data.packing import pack
from tunix.trainer.step import loss_sums
from tunix.types import Batch, LossInputs, LossOutputs, Sequence

PROMPT = 2
LENGTH = 12


@dataclass(frozen=True)
class Taken:
    """One completion; each list has a number for every token after the prompt."""

    current: List[float]
    old: List[float]
    advantage: List[float]
    more: Mapping[str, List[float]] = field(default_factory=dict)
    """Further per-token values."""
    trained: List[bool] | None = None
    """All of them where left out."""
    weight: float = 1.0

    def sequence(self, fill: float = 0.0) -> Sequence:
        """The same as a record; `fill` stands wherever nothing is trained."""
        number = len(self.current)
        mask = np.array([False] * PROMPT + list(self.trained or [True] * number))
        named = {"current": self.current, "old_logprobs": self.old, "advantages": self.advantage, **self.more}
        values = {name: np.array([fill] * PROMPT + list(x), np.float32) for name, x in named.items()}
        per_token = {name: np.where(mask, x, np.float32(fill)) for name, x in values.items()}
        return Sequence(np.arange(PROMPT + number, dtype=np.int32), mask, self.weight, per_token)


def batch_of(taken: List[Taken], packing: bool = True, fill: float = 0.0) -> Batch:
    """The completions in rows of 12."""
    return pack([one.sequence(fill) for one in taken], len(taken), LENGTH, packing)


def inputs_of(batch: Batch, entropy: bool = False, values: bool = False) -> LossInputs:
    """What a loss reads of such a batch; `entropy` and `values` are taken from the values of that name."""
    named = {
        name: jnp.asarray(x) for name, x in batch.per_token.items() if name not in ("current", "entropy", "values")
    }
    return LossInputs(
        replace(batch, per_token=named),
        jnp.asarray(batch.per_token["current"]),
        jnp.asarray(batch.per_token["entropy"]) if entropy else None,
        jnp.asarray(batch.per_token["values"]) if values else None,
    )


def rows(batch: Batch, start: int, end: int) -> Batch:
    """Some rows of a batch as a pass of its own: per-sequence arrays and counts stay those of the whole."""
    names = ("tokens", "positions", "segment_ids", "loss_mask", "sequence_ids", "places")
    own = {name: getattr(batch, name)[start:end] for name in names}
    return replace(batch, **own, per_token={name: x[start:end] for name, x in batch.per_token.items()})


def reduced(loss: Callable[[LossInputs], LossOutputs], inputs: LossInputs) -> dict[str, float]:
    """The loss, its terms and its metrics, as the framework reduces them."""
    sums = loss_sums(loss, inputs)
    return {name: float(x) for name, x in sums.items() if isinstance(x, jax.Array)}


def gradients(
    loss: Callable[[LossInputs], LossOutputs], inputs: LossInputs, over: str = "logprobs"
) -> dict[tuple[int, int], float]:
    """`d loss / d logprobs` (or `values`) of each token, by (sequence, position), the prompt and padding included."""

    def total(x: jax.Array) -> jax.Array:
        changed = replace(inputs, **{over: x})
        return loss_sums(loss, changed)["train/loss"]

    found = np.asarray(jax.grad(total)(getattr(inputs, over)))
    batch = inputs.batch
    places = zip(
        *(np.asarray(x).ravel() for x in (batch.segment_ids, batch.sequence_ids, batch.positions)), strict=True
    )
    named = {}
    for (segment, sequence, position), value in zip(places, found.ravel(), strict=True):
        if segment:
            named[int(sequence), int(position)] = float(value)
        else:
            assert value == 0, "a gradient in the padding"
    return named
