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
        return sft_loss(
            inputs.logprobs,
            self.config.reduction,
            label_smoothing=self.config.label_smoothing,
            above_mean=inputs.above_mean,
        )

    @property
    def objective(self) -> Loss:
        """The loss, with NEFTune's noise on the embeddings and label smoothing where the recipe sets them."""
        config, objective = self.config, super().objective
        return replace(objective, embedding_noise=config.neftune_alpha, above_mean=config.label_smoothing > 0)
