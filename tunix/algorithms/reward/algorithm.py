"""Reward models: a scalar head in place of the language model's, trained on pairs of a better and a worse side."""

from typing import Literal

from tunix.algorithms.base import Algorithm
from tunix.algorithms.reward.config import RewardModelConfig
from tunix.algorithms.reward.loss import reward_loss
from tunix.data.packing import as_scored
from tunix.types import Loss, LossInputs, LossOutputs, Sequence


class RewardModel(Algorithm):
    """A reward model: a sequence's score is the value of the state after its last token."""

    Config = RewardModelConfig
    config: RewardModelConfig

    sequences_per_example = 2
    extra_tokens = 1

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `reward_loss`."""
        return reward_loss(inputs, self.config.centring)

    @property
    def critic(self) -> Literal["alone"]:
        """`alone`: the model has a value head and no language-model head."""
        return "alone"

    @property
    def objective(self) -> Loss:
        """The loss on values; log-probs are not computed."""
        return Loss(self.loss, logprobs=False, values=True)

    def prepare_sequence(self, sequence: Sequence) -> Sequence:
        """The sequence with one more token at its end, where its score is read; see `as_scored`."""
        return as_scored(sequence)
