"""Which keys of the `optimizer` section apply to which update rule. Loads without jax."""

from collections.abc import Iterator, Mapping
from typing import Any

READS = {
    "adamw": ("b1", "b2", "eps"),
    "adafactor": ("eps",),
    "lion": ("b1", "b2"),
    "muon": ("b1", "b2", "eps", "momentum"),
    "sgd": ("momentum",),
}
"""The keys among b1, b2, eps and momentum that each rule reads."""
DECAYS = {
    "adamw": {"b1": 0.9, "b2": 0.999},
    "lion": {"b2": 0.99},
    "muon": {"b1": 0.9, "b2": 0.999, "momentum": 0.95},
    "sgd": {"momentum": 0.0},
    "adafactor": {},
}
"""The default decays of each rule's moments."""
LARGEST_DECAY = 1 - 2**-8
"""The largest decay of a moment in bfloat16. Neighbouring bfloat16 numbers differ by up to 2**-7 of their value: a
decay that subtracts less than half of that never changes them."""


def complaints(section: Mapping[str, Any]) -> Iterator[str]:
    """Messages about keys of an `optimizer` section that have no effect or contradict each other.

    Args:
        section: the value of every key.
    """
    name = section["name"]
    for key in ("b1", "b2", "eps", "momentum"):
        if section[key] is not None and key not in READS[name]:
            yield f"{key} changes nothing for {name}, which reads {', '.join(READS[name])}"
    if section["schedule"] == "constant" and section["end"]:
        yield "end changes nothing for a constant schedule"
    if section["warmup_from_zero"] and not section["warmup"]:
        yield "warmup_from_zero changes nothing without a warm-up: set warmup"
    if section["moments_dtype"] == "bfloat16":
        yield from _rounded(section)


def _rounded(section: Mapping[str, Any]) -> Iterator[str]:
    """Messages about moments in bfloat16."""
    name = section["name"]
    decays = {key: default if section[key] is None else section[key] for key, default in DECAYS[name].items()}
    if not any(decays.values()):
        why = "whose statistics stay in float32" if name == "adafactor" else "which keeps none without momentum"
        yield f"moments_dtype changes nothing for {name}, {why}"
    for key, decay in decays.items():
        if decay > LARGEST_DECAY:
            yield (
                f"moments_dtype: {decay:g} ({key}) of a bfloat16 number rounds back to that number, so that moments "
                f"would never fall: set {key} to 0.99 or less, or moments_dtype to float32"
            )
