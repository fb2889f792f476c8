"""Reward models: a scalar head in place of the language model's, trained on pairs of which one side is better.

Axes: T time.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from tunix.algorithms.base import Algorithm
from tunix.algorithms.reward.config import RewardModelConfig
from tunix.algorithms.reward.loss import reward_loss
from tunix.types import Loss, LossInputs, LossOutputs, Sequence


class RewardModel(Algorithm):
    """A sequence's score is the value of the state behind its last token."""

    Config = RewardModelConfig
    config: RewardModelConfig

    members = 2
    spare_tokens = 1

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `reward_loss`."""
        return reward_loss(inputs, self.config.centring)

    @property
    def train_on(self) -> Literal["pairs"]:
        """A chosen and a rejected completion of each row."""
        return "pairs"

    @property
    def critic(self) -> str:
        """The model has the value head alone."""
        return "alone"

    @property
    def objective(self) -> Loss:
        """Values, and no log-probs."""
        return Loss(self.loss, logprobs=False, values=True)

    def prepared(self, sequence: Sequence) -> Sequence:
        """The sequence up to its last trained token, with a spare one behind, where its score stands.

        What a template writes behind the stop token is cut off: a policy's completion, which is scored as it was drawn,
        does not have it either.
        """
        end = int(np.flatnonzero(sequence.loss_mask)[-1]) + 1
        return replace(with_spare(sequence.tokens[:end]), weight=sequence.weight, per_sequence=sequence.per_sequence)


def with_spare(tokens: np.ndarray) -> Sequence:
    """`[T + 1]` tokens whose last one stands for the state behind the others: it is trained, and never read."""
    longer = np.append(tokens, 0).astype(np.int32)
    return Sequence(longer, np.arange(len(longer)) == len(tokens))
