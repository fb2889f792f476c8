"""The names of a layer's matrices, and which of them a pattern matches. Loads without jax.

Patterns are as in PEFT and qwix: a regular expression that matches a module's whole Hugging Face name, or what follows
one of its dots, e.g. `q_proj`. Layers are stacked here and treated alike, so a pattern cannot choose between layers.
"""

import re
from typing import TYPE_CHECKING

from tunix.errors import nearest

if TYPE_CHECKING:
    from tunix.models.config import DecoderConfig

MODULES = {
    "self_attn.q_proj": ("q", "global_q"),
    "self_attn.k_proj": ("k", "global_k"),
    "self_attn.v_proj": ("v", "global_v"),
    "self_attn.o_proj": ("o", "global_o"),
    "mlp.gate_proj": ("gate", "wide_gate"),
    "mlp.up_proj": ("up", "wide_up"),
    "mlp.down_proj": ("down", "wide_down"),
    "per_layer_input_gate": ("input_gate",),
    "per_layer_projection": ("input_out",),
    "linear_attn.in_proj_qkv": ("qkv",),
    "linear_attn.in_proj_z": ("z",),
    "linear_attn.in_proj_b": ("beta",),
    "linear_attn.in_proj_a": ("decay",),
    "linear_attn.out_proj": ("out",),
}
"""Hugging Face's names of a layer's matrices -> ours, those of all families; a layer has some of them. Several are ours
where the matrix has another shape in some layers: what is said of it holds for all."""
LINEAR, OWN_INPUT = "linear_attn.", "per_layer_"
"""What the names of the matrices of Gated DeltaNet layers begin with, and of those of inputs of each layer's own."""
GLOBAL, WIDE = "global_", "wide_"
"""What the names of the matrices of global layers begin with, where they have other shapes than those of local ones,
and of those of an ffn that is wider in some layers."""
PROJECTIONS = {name.split(".")[-1]: ours for name, ours in MODULES.items()}
"""The last part of Hugging Face's name -> ours."""
MOST_LAYERS = 128
"""Layers that a pattern is tried on: more than the deepest of these families has."""


def projections_of(config: "DecoderConfig") -> dict[str, tuple[str, ...]]:
    """The last part of Hugging Face's name -> ours, of the matrices that a model has."""
    kinds = ((LINEAR, config.delta is None), (OWN_INPUT, not config.layer_inputs))
    without = tuple(start for start, lacking in kinds if lacking)
    there = (name for name in MODULES if not name.startswith(without))
    return {name.split(".")[-1]: tuple(ours for ours in MODULES[name] if _has(config, ours)) for name in there}


def _has(config: "DecoderConfig", ours: str) -> bool:
    """Whether a model has this one among our names of a matrix."""
    if not ours.startswith(GLOBAL):
        return config.shared_wide or not ours.startswith(WIDE)
    own = config.global_heads
    return own is not None and not (own.keys_are_values and ours == f"{GLOBAL}v")


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
    return tuple(names)
