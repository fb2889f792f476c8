"""A dense family that tunix does not have, as its file would be: Llama's tensors with an own name for each norm."""

from dataclasses import replace
from typing import Any

from tunix.models.config import DecoderConfig
from tunix.models.families.base import SHARED, FamilyText, decoder, in_layers, sizes, written
from tunix.models.families.hf_config import Fields
from tunix.models.families.llama import LLAMA


def read(fields: Fields) -> DecoderConfig:
    """A `toyling` config.json."""
    shape = sizes(fields)
    rope = fields.rope(10_000.0, shape["max_positions"])
    return decoder(fields, TOY.small, shape, tied=True, eps=1e-5, rope=rope)


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `toyling` folder."""
    return written(config) | {"model_type": "toyling"}


TOY = FamilyText(
    model_types=("toyling",),
    hub="toyling",
    template="chatml",
    architecture="ToylingForCausalLM",
    classifier="ToylingForSequenceClassification",
    read=read,
    write=write,
    tensors={
        **SHARED,
        **in_layers({"pre_attn_norm/w": ("before.weight", "D", "D"), "pre_mlp_norm/w": ("between.weight", "D", "D")}),
    },
    presets={"toyling-1b": replace(LLAMA.presets["llama3.2-1b"], family="toy")},
    small=replace(LLAMA.small, family="toy"),
)
