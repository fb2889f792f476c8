"""What is not done with the experts of a mixture, refused before anything is loaded."""

from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.models.config import DecoderConfig


def check_experts(decoder: DecoderConfig, config: ModelConfig) -> None:
    """Refuses what a recipe asks of experts.

    Raises:
        UserError: a loss on experts for a model that has none.
    """
    if config.router_aux_loss_coef and decoder.experts is None:
        raise UserError(f"model.router_aux_loss_coef: {decoder.family} has no experts whose use it would even out")
