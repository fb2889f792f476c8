"""What a parameter is, by its name: an adapter's, a head's, a tower's, and whether it trains. Loads without jax."""

TOWER = "vision/"
"""Begins the names of a model's parameters that belong to its tower."""


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return "_lora_" in name


def is_own(name: str) -> bool:
    """Whether a parameter is an adapter's or a value head's: no folder of a base has it, and it always trains."""
    return is_adapter(name) or name.startswith("value/")


def trains(name: str, full: bool) -> bool:
    """Whether a parameter trains: an adapter's and a value head's always, the base's where it is trained in full, a
    tower's never.

    Args:
        full: whether the weights of the base train.
    """
    return is_own(name) or (full and not name.startswith(TOWER))
