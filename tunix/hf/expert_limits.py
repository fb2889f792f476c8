"""What is not done with the experts of a mixture, refused before anything is loaded."""

from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.models.config import DecoderConfig
from tunix.models.quantization.rules import Rules


def check_experts(decoder: DecoderConfig, config: ModelConfig, rules: Rules | None) -> None:
    """Refuses what a recipe asks of experts.

    Args:
        rules: how the model is rounded while it trains; None where it is not.

    Raises:
        UserError: a loss on experts for a model that has none, or experts that would be rounded.
    """
    if config.router_aux_loss_coef and decoder.experts is None:
        raise UserError(f"model.router_aux_loss_coef: {decoder.family} has no experts whose use it would even out")
    if rules is not None:
        refuse_rounding(decoder, "quantization")


def refuse_rounding(decoder: DecoderConfig, what: str) -> None:
    """Refuses to round a model of which the experts would stay as they are.

    Args:
        what: the recipe's section, or the command.

    Raises:
        UserError: the model has experts.
    """
    if decoder.experts is not None:
        raise UserError(
            f"{what}: the {decoder.experts.number} experts of each layer of {decoder.family} (mlp.experts), nearly all "
            "of its weights, cannot be rounded yet; use a model without experts, or leave it unrounded"
        )
