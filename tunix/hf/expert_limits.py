"""What is not done with the experts of a mixture, refused before anything is loaded."""

from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.models.config import DecoderConfig


def check_experts(decoder: DecoderConfig, config: ModelConfig, rounds: str | None) -> None:
    """Refuses what a recipe asks of experts.

    Args:
        rounds: the recipe's section by which the model is rounded; None where it is not.

    Raises:
        UserError: a loss on experts for a model that has none, or experts that would be rounded and cannot be.
    """
    if config.router_aux_loss_coef and decoder.experts is None:
        raise UserError(f"model.router_aux_loss_coef: {decoder.family} has no experts whose use it would even out")
    if rounds is not None:
        refuse_rounding(decoder, rounds)


def refuse_rounding(decoder: DecoderConfig, what: str) -> None:
    """Refuses to round a model of which the experts would stay as they are.

    Args:
        what: the recipe's section, or the command.

    Raises:
        UserError: the model has experts with biases.
    """
    if decoder.experts is not None and decoder.experts.biases:
        raise UserError(
            f"{what}: the {decoder.experts.number} experts of each layer of {decoder.family}, which have biases, "
            "cannot be rounded yet; use another model, or leave it unrounded"
        )
