"""Supervised fine-tuning: maximise the likelihood of the trained tokens."""

from dataclasses import replace

from tunix.algorithms.base import Algorithm
from tunix.algorithms.sft.config import SFTConfig
from tunix.algorithms.sft.loss import sft_loss
from tunix.types import Loss, LossInputs, LossOutputs


class SFT(Algorithm):
    """Supervised fine-tuning, on completions or on whole texts."""

    Config = SFTConfig
    config: SFTConfig

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """`sft_loss` by the config."""
        return sft_loss(inputs.logprobs, self.config.reduction)

    @property
    def objective(self) -> Loss:
        """The loss, with NEFTune's noise on the embeddings where the recipe sets it."""
        return replace(super().objective, embedding_noise=self.config.neftune_alpha)
