"""The names of a layer's matrices, and which of them a pattern matches. Loads without jax.

Patterns are as in PEFT and qwix: a regular expression that matches a module's whole Hugging Face name, or what follows
one of its dots, e.g. `q_proj`. Layers are stacked here and treated alike, so a pattern cannot choose between layers.
Nor can it choose between the experts of a mixture, whose matrices are named as the parameters that hold them all:
`experts.gate_up_proj` and `experts.down_proj`, of which `down_proj` alone, a dense ffn's, is none. Some mixtures are
the layer's own and not its ffn's; a pattern that matches the one place means the experts of both.
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
    "mlp.shared_expert.gate_proj": ("gate",),
    "mlp.shared_expert.up_proj": ("up",),
    "mlp.shared_expert.down_proj": ("down",),
    "mlp.experts.gate_up_proj": ("gates", "ups"),
    "mlp.experts.down_proj": ("downs",),
    "experts.gate_up_proj": ("gates", "ups"),
    "experts.down_proj": ("downs",),
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
GLOBAL, WIDE = "global_", "wide_"
"""What the names of the matrices of global layers begin with, where they have other shapes than those of local ones,
and of those of an ffn that is wider in some layers."""
EXPERTS = "experts."
"""Begins the short names of the matrices of experts."""


def short(name: str) -> str:
    """The last part of Hugging Face's name, of experts the last two: `q_proj`, `experts.down_proj`."""
    start, _, last = name.rpartition(".")
    return f"{EXPERTS}{last}" if f".{start}.".endswith(f".{EXPERTS}") else last


PROJECTIONS: dict[str, tuple[str, ...]] = {}
"""Hugging Face's short name -> ours."""
for _name, _ours in MODULES.items():
    PROJECTIONS.setdefault(short(_name), _ours)  # those of a shared expert are among the ffn's
BANKS = tuple(ours for name, several in PROJECTIONS.items() if name.startswith(EXPERTS) for ours in several)
"""Our names of the matrices of experts, which are stacked over these."""
MOST_LAYERS = 128
"""Layers that a pattern is tried on: more than the deepest of these families has."""


def modules_of(config: "DecoderConfig") -> dict[str, tuple[str, ...]]:
    """Hugging Face's name -> ours, of the matrices that a model has."""
    gemma4, absent = config.gemma4, []
    if gemma4 is None or not gemma4.shared_wide:
        absent.append(WIDE)
    if gemma4 is None or gemma4.keys_are_values:
        absent.append(GLOBAL if gemma4 is None else f"{GLOBAL}v")
    there = (name for name in MODULES if name.rpartition(".")[0] in config.parts)
    return {name: tuple(x for x in MODULES[name] if not x.startswith(tuple(absent))) for name in there}


def projections_of(config: "DecoderConfig") -> dict[str, tuple[str, ...]]:
    """As `modules_of`, by Hugging Face's short name."""
    return {short(name): ours for name, ours in modules_of(config).items()}


def matched(pattern: str) -> tuple[str, ...]:
    """The modules that a pattern matches, by their short names.

    Raises:
        ValueError: it is no regular expression, matches nothing, or matches a module in some layers only.
    """
    try:
        whole = re.compile(rf"(.*\.(?<!\.experts\.))?({pattern})")
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
        names += [short(name)] if layers else []
    if not names:
        hint = nearest(pattern, [*PROJECTIONS, *MODULES])
        raise ValueError(f"{pattern!r} matches no module of these models; they have {', '.join(PROJECTIONS)}.{hint}")
    return tuple(dict.fromkeys(names))
