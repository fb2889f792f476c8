"""The `adapter` section of a recipe, and which module it gives which rank and scale. Loads without jax."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_serializer, model_validator

from tunix.config import BaseType, Config, Fraction, Place, Positive
from tunix.errors import UserError
from tunix.models.config import DecoderConfig
from tunix.models.families.table import count_weights, matrices
from tunix.models.quantization.modules import BANKS, EXPERTS, PROJECTIONS, matched, projections_of

Table = Literal["embed_tokens", "lm_head"]
TABLES: dict[Table, str] = {"embed_tokens": "embed/w", "lm_head": "head/w"}
"""Hugging Face's names of the tables -> ours."""

NOT_IN_FP8 = (
    "`adapter.kind: qlora` keeps its base in tiles, which are dequantized before each product: take `kind: lora`, or "
    "leave one of the two keys out"
)
"""Why a rounded base is not multiplied in 8 bits."""


class LowRank(NamedTuple):
    """The rank and scale of one module's adapter."""

    rank: int
    scale: float
    """Multiplies A B: alpha / r, or alpha / sqrt(r) (rsLoRA)."""


class AdapterConfig(Config):
    """Low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685) on a frozen base."""

    source: Place | None = Field(default=None, alias="from")
    """A PEFT folder, a hub id of one, or a run that exported an adapter: training goes on from its A and B. Its rank,
    alpha, patterns, targets and kind are read from there, and what is also set here has to agree. The base
    stays the reference. `model.path` is its base, or ends in the same adapter."""
    kind: Literal["lora", "qlora"] = "lora"
    """`qlora` rounds the layers' frozen matrices (QLoRA, Dettmers et al. 2023, https://arxiv.org/abs/2305.14314): a
    quarter of the memory, for a slower step. Norms, embeddings and head stay as they are."""
    base: BaseType | None = None
    """For qlora, what they are rounded to: nf4 (its default) and int4 take half a byte a weight, int8 and fp8 one."""
    tile: Annotated[int, Field(ge=8)] | None = None
    """For qlora, inputs that share a scale, at most; 128 is its default. Fewer are more exact, and take more memory."""
    rank: Positive = 16
    """Width of the low-rank matrices: more can learn more, and takes more memory."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""
    ranks: dict[str, Positive] = Field(default={})
    """Other ranks for some modules, such as {q_proj: 8, "mlp.*": 32}; the first pattern that matches counts."""
    alphas: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Other alphas for some modules, such as {q_proj: 16}; the first pattern that matches counts."""
    rslora: bool = False
    """Scale alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Learn each output's magnitude apart from its direction (DoRA, Liu et al. 2024,
    https://arxiv.org/abs/2402.09353): nearer to full fine-tuning at low ranks, for a slower step."""
    start: Literal["zero", "pissa"] = "zero"
    """`zero`: A is random as in PEFT (uniform within 1 / sqrt(inputs)), B is 0. `pissa`: both are the weight's largest
    singular vectors, which learn faster (Meng et al. 2024, https://arxiv.org/abs/2404.02948); the first step is the
    base's either way."""
    dropout: Fraction = 0.0
    """Share of the adapter's inputs that is zeroed while training; never in evaluation and sampling."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Modules as Hugging Face spells them (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj), or regular
    expressions such as "self_attn.*". Of a mixture, experts.gate_up_proj and experts.down_proj ("experts.*" for both)
    adapt each expert; gate and up share their A, as PEFT's `target_parameters` do."""
    also: tuple[Table, ...] = ()
    """Tables that train in full along with the adapters: embed_tokens, lm_head. A model that ties them has one."""

    @model_serializer(mode="wrap")
    def _said(self, handler: Callable[["AdapterConfig"], dict[str, Any]]) -> dict[str, Any]:
        values = handler(self)
        values = {"from": values.pop("source", None), **values}
        # Settings that are read from the folder are not written down.
        written = set(values) if self.source is None else {"from", *self.model_fields_set}
        return {key: value for key, value in values.items() if key in written}

    @model_validator(mode="before")
    @classmethod
    def _rounded(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") == "qlora":
            stated = {key: value for key, value in values.items() if value is not None}
            return {"base": "nf4", "tile": 128, **stated}
        return values

    @field_validator("targets", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value != "all-linear" else value

    @field_validator("targets", "ranks", "alphas")
    @classmethod
    def _known(cls, value: Any, info: Any) -> Any:
        if value == "all-linear":
            return value
        if info.field_name == "targets" and not value:
            raise ValueError("targets is empty: nothing would train")
        for pattern in value:
            if pattern in TABLES:
                raise ValueError(
                    f"{pattern!r} is a table, which takes no low-rank matrices. `also: [{pattern}]` trains it whole"
                )
            matched(pattern)
        return value

    @model_validator(mode="after")
    def _agrees(self) -> "AdapterConfig":
        if self.source is not None and self.start != "zero":
            raise ValueError(f"start: {self.start} changes nothing with from: A and B start as the folder has them")
        for key in ("base", "tile"):
            if self.kind == "lora" and getattr(self, key) is not None:
                raise ValueError(f"{key} changes nothing for lora, which leaves the base as it is; set kind to qlora")
        for key, patterns in (("ranks", self.ranks), ("alphas", self.alphas)):
            for pattern in patterns:
                if not set(matched(pattern)) & set(self.targeted):
                    named = ", ".join(self.targeted)
                    raise ValueError(f"{key} has {pattern!r}, but targets adapts only {named}: add it there")
        return self

    @property
    def targeted(self) -> tuple[str, ...]:
        """The adapted modules by their short Hugging Face names, in our order."""
        if self.targets == "all-linear":
            return tuple(name for name in PROJECTIONS if not name.startswith(EXPERTS))
        names = {name for pattern in self.targets for name in matched(pattern)}
        return tuple(name for name in PROJECTIONS if name in names)

    @property
    def modules(self) -> dict[str, LowRank]:
        """Our name of each adapted module of any family -> the rank and scale of its adapter."""
        return {ours: self._low(name) for name in self.targeted for ours in PROJECTIONS[name]}

    def targeted_in(self, config: DecoderConfig) -> tuple[str, ...]:
        """Those of the adapted modules that a model has, as `targeted`.

        Raises:
            UserError: a target means none of them; or experts would be left as they are and nothing says so.
        """
        there = projections_of(config)
        if config.experts is not None:
            # Experts are adapted where they are named; `all-linear` does not leave them out silently.
            if self.targets == "all-linear":
                raise UserError(
                    f"adapter.targets: all-linear would leave the experts ({config.experts_module}) of {config.family} "
                    f"as they are, as PEFT's does; name what is to be adapted: [{', '.join(there)}]"
                )
            if any(name.startswith(EXPERTS) for name in self.targeted):
                settings = {"dropout": self.dropout, "dora": self.dora, "start": self.start != "zero" and self.start}
                for key, value in settings.items():
                    if value:
                        raise UserError(
                            f"adapter.{key}: {value} is not possible with experts among the targets, neither here nor "
                            "in PEFT: leave it out, or name no experts"
                        )
        for pattern in () if self.targets == "all-linear" else self.targets:
            if not there.keys() & matched(pattern):
                raise UserError(f"adapter.targets: {config.family} has no {pattern}; it has {', '.join(there)}")
        return tuple(name for name in self.targeted if name in there)

    def tables_in(self, config: DecoderConfig) -> tuple[str, ...]:
        """The tables that train along, by our names; a tied head is the embedding."""
        return tuple(dict.fromkeys("embed/w" if config.tied else TABLES[name] for name in sorted(self.also)))

    def modules_of(self, config: DecoderConfig) -> dict[str, LowRank]:
        """Our name of each adapted module that a model has -> the rank and scale of its adapter; see `targeted_in`."""
        there = projections_of(config)
        return {ours: self._low(name) for name in self.targeted_in(config) for ours in there[name]}

    def count_weights(self, config: DecoderConfig) -> int:
        """How many weights train: those of the low-rank matrices, of DoRA's magnitudes and of the tables in `also`."""
        counts, sides = count_weights(config), matrices(config)
        number = sum(counts[table] for table in self.tables_in(config))
        number += self.count_pairs(config, 0 if config.experts is None else config.experts.number)
        for name in self.modules_of(config) if self.dora else ():
            number += sides[name].layers * sides[name].outputs
        return number

    def count_pairs(self, config: DecoderConfig, experts: int) -> int:
        """How many weights the low-rank matrices have: `r (inputs + outputs)` of each adapted matrix, of so many
        experts in a layer. Gate and up share their A."""
        number, sides = 0, matrices(config)
        for name, low in self.modules_of(config).items():
            layers, inputs, outputs = sides[name]
            inputs = 0 if name == "ups" else inputs
            number += layers * (experts if name in BANKS else 1) * low.rank * (inputs + outputs)
        return number

    def alpha_of(self, name: str) -> float:
        """The alpha of a module, given the last part of its name."""
        return next((alpha for pattern, alpha in self.alphas.items() if name in matched(pattern)), self.alpha)

    def _low(self, name: str) -> LowRank:
        rank = next((rank for pattern, rank in self.ranks.items() if name in matched(pattern)), self.rank)
        return LowRank(rank, self.alpha_of(name) / (math.sqrt(rank) if self.rslora else rank))
