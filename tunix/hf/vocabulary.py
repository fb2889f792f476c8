"""Checks that two models give ids the same meaning, which comparing their probabilities of ids requires."""

from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError


def check_tokens(key: str, name: str, theirs: Tokenizer, mine: Tokenizer) -> None:
    """Refuses another model's tokenizer if its vocabulary differs from that of the model that trains.

    Args:
        key: the recipe's key that names the other model, e.g. `teacher.path`.
        name: the other model's path or hub id.
        theirs: its tokenizer.
        mine: the tokenizer of the model that trains.

    Raises:
        UserError: an id stands for another token there; the message names the first such id.
    """
    there, here = ({i: token for token, i in tokenizer.hf.get_vocab().items()} for tokenizer in (theirs, mine))
    place = next((i for i in range(max(*there, *here) + 1) if there.get(i) != here.get(i)), None)
    if place is not None:
        other, own = (repr(side[place]) if place in side else "no token" for side in (there, here))
        raise UserError(
            f"{key}: {name} has another vocabulary than the model that trains: id {place} is {other} there and {own} "
            "here. Probabilities of ids are compared: take a model with the same tokenizer"
        )
