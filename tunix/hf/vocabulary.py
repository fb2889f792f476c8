"""Whether two models mean the same token by an id: where their probabilities of ids are compared, they have to."""

from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError


def check_tokens(key: str, name: str, theirs: Tokenizer, mine: Tokenizer) -> None:
    """Refuses another model's tokenizer that differs from that of the model which trains.

    Args:
        key: of the recipe, that names the other model.
        name: of the other model.

    Raises:
        UserError: an id is another token there; the first one is told.
    """
    there, here = ({i: token for token, i in tokenizer.hf.get_vocab().items()} for tokenizer in (theirs, mine))
    place = next((i for i in range(max(*there, *here) + 1) if there.get(i) != here.get(i)), None)
    if place is not None:
        other, own = (repr(side[place]) if place in side else "no token" for side in (there, here))
        raise UserError(
            f"{key}: {name} has another vocabulary than the model that trains: id {place} is {other} there and {own} "
            "here. Probabilities of ids are compared: take a model with the same tokenizer"
        )
