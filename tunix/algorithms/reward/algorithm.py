"""Reward models: a scalar head in place of the language model's, trained on pairs of a better and a worse side."""

from tunix.algorithms.base import Algorithm, Needs
from tunix.algorithms.reward.config import RewardModelConfig
from tunix.algorithms.reward.loss import MARGIN, reward_loss
from tunix.data.packing import as_scored
from tunix.types import LossInputs, LossOutputs, Sequence


class RewardModel(Algorithm):
    """A reward model: a sequence's score is the value of the state after its last token."""

    Config = RewardModelConfig
    config: RewardModelConfig

    sequences_per_example = 2
    extra_tokens = 1

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """`reward_loss` by the config, with the rows' margins where they have some."""
        assert inputs.values is not None
        margins = inputs.batch.per_sequence.get(MARGIN)
        return reward_loss(inputs.values, inputs.batch, margins=margins, centring=self.config.centring)

    @property
    def needs(self) -> Needs:
        """Values of a model without a language-model head; log-probs are not computed."""
        return Needs(logprobs=False, values="alone")

    def prepare_sequence(self, sequence: Sequence) -> Sequence:
        """The sequence with one more token at its end, where its score is read; see `as_scored`."""
        return as_scored(sequence)
