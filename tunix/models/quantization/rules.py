"""Which matrices of a model are rounded to what: the rules of a recipe, of `tunix quantize`, and of a rounded folder.

The first rule whose pattern matches a module counts, as in qwix. A folder whose weights are rounded to a grid has the
rules in `tunix_quantization.json`; a program that does not read that file loads plain weights. Loads without jax.

What is multiplied is logged when a run starts; docs/kernels.md says which of it a platform multiplies as it is.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from tunix.config import BaseType, Config, DType
from tunix.errors import UserError
from tunix.models.quantization.modules import PROJECTIONS, matched, projections_of
from tunix.util.atomic_io import refuse_foreign

if TYPE_CHECKING:
    from tunix.models.config import DecoderConfig

ActivationType = Literal["int8", "fp8"]
FITTING: Mapping[ActivationType, tuple[BaseType, ...]] = {"int8": ("int8", "int4"), "fp8": ("fp8",)}
"""The weights that go with rounded activations in a product: integers with integers, floats with floats."""
USUAL_TILE: Mapping[BaseType, int | None] = {"nf4": 128, "int4": 128, "int8": None, "fp8": None}
TABLES = ("embed_tokens", "lm_head")
RULES_FILE = "tunix_quantization.json"


class Rule(Config):
    """How the modules that a pattern matches are rounded."""

    module: str
    """As Hugging Face spells it (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, and of experts
    experts.gate_up_proj, experts.down_proj), or a regular expression such as "self_attn.*"; of several rules that
    match, the first counts."""
    weights: BaseType | None = None
    """nf4, int4, int8 or fp8; null leaves the modules as they are, whatever later rules say."""
    activations: ActivationType | None = None
    """Rounds the inputs too, with one scale for each token: int8 with int8 or int4 weights, fp8 with fp8 weights."""
    tile: Annotated[int, Field(ge=8)] | None = None
    """Inputs that share a scale, at most; null is all inputs of an output. The default is 128 for 4 bits, else
    null."""

    @model_validator(mode="before")
    @classmethod
    def _tiled(cls, values: Any) -> Any:
        if isinstance(values, dict) and "tile" not in values:  # compared, not looked up: it may be a list
            tiles = [tile for name, tile in USUAL_TILE.items() if values.get("weights") == name]
            return {**values, "tile": tiles[0]} if tiles else values
        return values

    @field_validator("module")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in TABLES:
            raise ValueError(f"{value!r} is a table; tables, norms and biases are never rounded")
        matched(value)
        return value

    @model_validator(mode="after")
    def _agrees(self) -> "Rule":
        if self.weights is None and (self.activations or self.tile):
            key = "activations" if self.activations else "tile"
            raise ValueError(f"{key} changes nothing where the weights stay as they are; set weights")
        if self.activations and self.weights not in FITTING[self.activations]:
            fitting = " or ".join(FITTING[self.activations])
            raise ValueError(
                f"activations {self.activations} and weights {self.weights} have no product: with "
                f"{self.activations} activations, weights are {fitting}"
            )
        return self


class Rules(Config):
    """Quantization rules, in order of precedence."""

    rules: tuple[Rule, ...]
    """The first whose pattern matches a module counts; a module that none matches stays as it is."""

    @field_validator("rules")
    @classmethod
    def _counting(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        if not any(rule.weights for rule in rules):
            raise ValueError("no rule rounds anything; one is {module: .*, weights: int8}")
        taken: dict[str, str] = {}
        for rule in rules:
            meant = matched(rule.module)
            if not set(meant) - taken.keys():
                before = ", ".join(dict.fromkeys(repr(taken[name]) for name in meant))
                raise ValueError(
                    f"{rule.module!r} changes nothing: its modules have met {before} before, and the first rule counts"
                )
            taken |= {name: rule.module for name in meant if name not in taken}
        return rules

    @property
    def modules(self) -> dict[str, Rule]:
        """Our name of each rounded module -> the rule that counts."""
        first: dict[str, Rule] = {}
        for rule in self.rules:
            names = [ours for module in matched(rule.module) for ours in PROJECTIONS[module]]
            first |= {name: rule for name in names if name not in first}
        return {name: rule for name, rule in first.items() if rule.weights}

    @property
    def inputs(self) -> bool:
        """Whether activations are rounded."""
        return any(rule.activations for rule in self.modules.values())

    def summary(self, config: "DecoderConfig") -> str:
        """What is rounded, as a run logs it, e.g. `7 of a layer's 7 matrices compute as int8 with inputs in int8`."""
        kinds, there = [f"{w}{f' with inputs in {x}' if x else ''}" for w, x in self.kinds], projections_of(config)
        rounded = [name for name, ours in there.items() if set(ours) & self.modules.keys()]
        return f"{len(rounded)} of a layer's {len(there)} matrices compute as {', '.join(kinds)}"

    @property
    def kinds(self) -> list[tuple[BaseType | None, ActivationType | None]]:
        """What weights and activations are rounded to, each pair once."""
        return list(dict.fromkeys((rule.weights, rule.activations) for rule in self.modules.values()))


class QuantizationConfig(Rules):
    """Quantization-aware training (Jacob et al. 2018, https://arxiv.org/abs/1712.05877): the model computes with
    rounded weights, and trains the full-precision ones that they are rounded from."""

    mode: Literal["qat"] = "qat"
    """`qat` rounds in the forward pass; gradients pass as if it had not. What is sampled, evaluated and exported is the
    rounded model."""


def read_rules(folder: Path) -> Rules | None:
    """How the weights of a folder were rounded; None where there is no such file.

    Raises:
        UserError: the file is damaged, or has rules that this version does not know.
    """
    file = folder / RULES_FILE
    if not file.is_file():
        return None
    refuse_foreign(folder, file.name)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Rules(rules=content["rules"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{file} does not say how the weights were rounded ({reason}): write the folder again, or remove the file "
            "to load them as plain weights"
        ) from error


def matmuls_line(
    kinds: Sequence[tuple[BaseType | None, BaseType | None]],
    compute: DType,
    *,
    simulated: bool = False,
    fp8: bool = False,
) -> str:
    """What a run logs about how its products are computed, e.g. `products of the layers: nf4 weights, each matrix
    dequantized to float32`; docs/kernels.md says how each platform multiplies that.

    Args:
        kinds: what the weights and the activations of its layers are rounded to; nothing for a run that rounds nothing.
        compute: dtype of the computation.
        simulated: the weights are stored unrounded, and rounded in each forward pass; so are activations always.
        fp8: products are those of 8-bit floats, gradients of weights aside.
    """
    if fp8:
        return f"products of the layers: e4m3 x e4m3, for gradients e5m2 x e4m3, for those of weights {compute}"
    described = []
    for weights, activations in kinds or [(None, None)]:
        if weights is None:
            described.append(compute)
        elif activations is None and not simulated:
            described.append(f"{weights} weights, each matrix dequantized to {compute}")
        else:
            rounded = f"{weights} weights" + (f" and {activations} activations" if activations else "")
            described.append(f"{rounded}, rounded and dequantized to {compute} before each product")
    return f"products of the layers: {'; '.join(described)}"
