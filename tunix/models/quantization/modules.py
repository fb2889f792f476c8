"""The names of a layer's matrices, and which of them a pattern matches. Loads without jax.

Patterns are as in PEFT and qwix: a regular expression that matches a module's whole Hugging Face name, or what follows
one of its dots, e.g. `q_proj`. Layers are stacked here and treated alike, so a pattern cannot choose between layers.
"""

import re
from collections.abc import Collection

from tunix.errors import nearest

MODULES = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "mlp.shared_expert.gate_proj": "gate",
    "mlp.shared_expert.up_proj": "up",
    "mlp.shared_expert.down_proj": "down",
    "linear_attn.in_proj_qkv": "qkv",
    "linear_attn.in_proj_z": "z",
    "linear_attn.in_proj_b": "beta",
    "linear_attn.in_proj_a": "decay",
    "linear_attn.out_proj": "out",
}
"""Hugging Face's names of a layer's matrices -> ours, those of all families; a layer has some of them."""
PROJECTIONS = {name.split(".")[-1]: ours for name, ours in MODULES.items()}
"""The last part of Hugging Face's name -> ours."""
MOST_LAYERS = 128
"""Layers that a pattern is tried on: more than the deepest of these families has."""


def modules_of(parts: Collection[str]) -> dict[str, str]:
    """Hugging Face's name -> ours, of the matrices of a model whose layers have these parts.

    Args:
        parts: as `DecoderConfig.parts`, e.g. `("self_attn", "mlp")`.
    """
    return {name: ours for name, ours in MODULES.items() if name.rpartition(".")[0] in parts}


def projections_of(parts: Collection[str]) -> dict[str, str]:
    """As `modules_of`, by the last part of Hugging Face's name."""
    return {name.split(".")[-1]: ours for name, ours in modules_of(parts).items()}


def matched(pattern: str) -> tuple[str, ...]:
    """The modules that a pattern matches, by the last part of their names.

    Raises:
        ValueError: it is no regular expression, matches nothing, or matches a module in some layers only.
    """
    try:
        whole = re.compile(rf"(.*\.)?({pattern})")
    except re.error as error:
        raise ValueError(f"{pattern!r} is neither a module's name nor a regular expression ({error})") from None
    names = []
    for name in MODULES:
        layers = [n for n in range(MOST_LAYERS) if whole.fullmatch(f"model.layers.{n}.{name}")]
        if layers and len(layers) < MOST_LAYERS:
            raise ValueError(
                f"{pattern!r} means {name} of some layers only; layers are stacked and treated alike, so leave the "
                r"layer's number open: layers\.\d+\."
            )
        names += [name.split(".")[-1]] if layers else []
    if not names:
        hint = nearest(pattern, [*PROJECTIONS, *MODULES])
        raise ValueError(f"{pattern!r} matches no module of these models; they have {', '.join(PROJECTIONS)}.{hint}")
    return tuple(dict.fromkeys(names))
