"""A config.json, read field by field: a field that is neither read nor known to be harmless is refused by name.

A family's `read` takes each field that it understands; `finish` then looks at what is left. Rope comes in two
spellings, `rope_parameters` (transformers 5, for Gemma 3 one per layer type) and `rope_theta` with `rope_scaling`;
both may be present, as in the files that we write, if they agree.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tunix.errors import UserError
from tunix.models.config import Experts, Rope, Stops

KINDS = ("default", "linear", "llama3", "yarn", "proportional")
STOPS = ("bos_token_id", "eos_token_id", "pad_token_id")

HARMLESS = frozenset(
    (
        *("architectures", "dtype", "initializer_range", "model_type", "name_or_path", "_name_or_path", "torch_dtype"),
        *("transformers_version", "unsloth_fixed", "unsloth_version", "use_cache", "cache_implementation"),
        *("return_dict", "num_labels", "id2label", "label2id", "problem_type", "chunk_size_feed_forward"),
        *("output_attentions", "output_hidden_states", "_attn_implementation", "_attn_implementation_autoset"),
        *("_commit_hash", "sep_token_id", "cls_token_id", "unk_token_id"),
    )
)
"""Fields that change nothing in the computation of a decoder, whatever their value."""

HARMLESS_AT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "hidden_dropout_prob"), (0, None)),
    **dict.fromkeys(("attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop"), (0, None)),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "is_encoder_decoder": (False,),
    "is_decoder": (True, False),
    "quantization_config": (None,),
}
"""Fields that change nothing at these values only."""


Integers = Mapping[str, tuple[str, int]]
"""Our name of a number -> the field's, and what it is where the file leaves it out."""


class Fields:
    """The fields of one JSON object, and which of them were read."""

    def __init__(self, raw: Mapping[str, Any], file: Path, inside: str = ""):
        """Starts with no field read.

        Args:
            raw: the object.
            file: the file that it is in, for messages.
            inside: path of the object within the file, such as `rope_parameters.`.
        """
        self.raw, self.file, self.inside, self.read = raw, file, inside, set[str]()

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raises the error for a field that cannot be used."""
        stated = f" = {self.raw[name]!r}" if name in self.raw else ""
        raise UserError(f"{self.file}: {self.inside}{name}{stated} {why}")

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; `default` only where the field is missing, not where it is null."""
        self.read.add(name)
        return self.raw.get(name, default)

    def _stated(self, name: str, default: int | float | None) -> Any:
        """The raw value; missing and null mean `default`, and are an error where there is none."""
        value = default if self.get(name) is None else self.raw[name]
        if value is None:
            self.refuse(name, "is missing; the model cannot be built without it.")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least 1, or 0; missing and null mean `default`, and are an error where there is none."""
        value = self._stated(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
            self.refuse(name, "must be a positive integer.")
        return value

    def integers(self, table: Integers) -> dict[str, int]:
        """Positive integers by our names."""
        return {ours: self.integer(name, default) for ours, (name, default) in table.items()}

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; missing and null mean `default`, and are an error where there is none."""
        value = self._stated(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.refuse(name, "must be a positive number.")
        return float(value)

    def optional(self, name: str, default: float | None = None) -> float | None:
        """A positive number, or None where the field is null; `default` where it is missing."""
        return None if self.get(name, default) is None else self.number(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """True or False."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false.")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses any value but these (or a missing field)."""
        if name in self.raw and self.get(name) not in allowed:
            self.refuse(name, f"is not supported here; only {' or '.join(map(repr, allowed))} is.")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A JSON object; empty where the field is missing or null."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            self.refuse(name, "must be an object.")
        return value

    def experts(self, number: int = 128, active: int = 8, *, renormalise: bool = True) -> Experts:
        """The experts of a mixture, whose number has two spellings.

        The loss that evens out their use is not part of the model (`model.router_aux_loss_coef` of a recipe).

        Args:
            number: how many there are where the file does not say.
            active: how many a token uses where the file does not say.
            renormalise: whether the weights of those that a token uses are divided by their sum.
        """
        self.read |= {"output_router_logits", "router_aux_loss_coef"}
        stated = [self.integer(name) for name in ("num_experts", "num_local_experts") if self.get(name) is not None]
        if len(set(stated)) > 1:
            self.refuse("num_experts", "contradicts num_local_experts in the same file.")
        experts = Experts(stated[0] if stated else number, self.integer("num_experts_per_tok", active), renormalise)
        if experts.active > experts.number:
            self.refuse("num_experts_per_tok", f"is more than the {experts.number} experts that there are.")
        return experts

    def stops(self) -> Stops:
        """The ids that the folder names, lists as tuples."""
        stated = {name: self.get(name) for name in STOPS if name in self.raw}
        for name, ids in stated.items():
            if any(type(i) is not int for i in (ids if isinstance(ids, list) else [] if ids is None else [ids])):
                self.refuse(name, "must be a token id, a list of them, or null.")
        return tuple((name, tuple(ids) if isinstance(ids, list) else ids) for name, ids in stated.items())

    def local_layers(self, layers: int, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which layers are local, from `layer_types` or else `default`; empty where none is."""
        local = self.layer_types(layers, {"sliding_attention": True, "full_attention": False}) or default
        return local if any(local) else ()

    def layer_types(self, layers: int, names: Mapping[str, bool]) -> tuple[bool, ...] | None:
        """The type of each layer, one of two; None where the file does not say."""
        types = self.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != layers or any(name not in list(names) for name in types):
            self.refuse("layer_types", f"must name {' or '.join(names)} for each of the {layers} layers.")
        return tuple(names[name] for name in types)

    def rope(
        self,
        theta: float,
        max_positions: int,
        *,
        layer_type: str | None = None,
        theta_field: str = "rope_theta",
        scaling_field: str | None = "rope_scaling",
        share: float | None = None,
    ) -> Rope:
        """The rope of the model, or of one layer type, from both spellings.

        Args:
            theta: the base where the file names none.
            max_positions: the original length where a stretched rope names none.
            layer_type: key within `rope_parameters` (Gemma 3); None where it is flat.
            theta_field: the old spelling's field for the base.
            scaling_field: the old spelling's field for the stretch.
            share: the part of a head that is rotated where the file names none; None where all of it always is.
        """
        stated = self.optional(theta_field)
        base = theta if stated is None else stated
        new, where = self.mapping("rope_parameters"), "rope_parameters."
        if layer_type is not None:
            new, where = Fields(new, self.file, where).mapping(layer_type), f"{where}{layer_type}."
        blocks = [(new, where)]
        if scaling_field is not None:
            blocks.append((self.mapping(scaling_field), f"{scaling_field}."))
        parts = [Fields(block, self.file, at) for block, at in blocks if block]
        ropes = [_read_rope(part, base, max_positions, share) for part in parts]
        ropes = ropes or [Rope(theta=base, share=1.0 if share is None else share)]
        if any(rope != ropes[0] for rope in ropes) or (stated is not None and ropes[0].theta != stated):
            self.refuse("rope_parameters", f"contradicts {theta_field} or {scaling_field} in the same file.")
        return ropes[0]

    def finish(self) -> None:
        """Refuses the first field that was not read and could change the computation."""
        for name in sorted(set(self.raw) - self.read - HARMLESS):
            if name in HARMLESS_AT:
                self.only(name, *HARMLESS_AT[name])
            else:
                self.refuse(name, "is a field that tunix does not know for this family, so the model could differ.")


def _read_rope(block: Fields, theta: float, max_positions: int, share: float | None) -> Rope:
    kind = block.get("rope_type", block.get("type", "default"))
    block.read.add("type")
    if kind not in KINDS:
        block.refuse("rope_type" if "rope_type" in block.raw else "type", f"is not supported; {', '.join(KINDS)} are.")
    rope = Rope(theta=block.number("rope_theta", theta), kind=kind)
    if share is not None:
        block.only("mrope_interleaved", True, None)
        sections = block.get("mrope_section")
        if sections is not None:
            if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(n, int) for n in sections):
                block.refuse("mrope_section", "must be three numbers of pairs: of time, rows and columns.")
            rope = replace(rope, sections=tuple(sections))
        rope = replace(rope, share=block.number("partial_rotary_factor", share))
    if kind != "default":
        rope = replace(rope, factor=block.number("factor", 1.0 if kind == "proportional" else None))
    if kind in ("llama3", "yarn"):
        rope = replace(rope, original_length=block.integer("original_max_position_embeddings", max_positions))
    if kind == "llama3":
        low, high = block.number("low_freq_factor"), block.number("high_freq_factor")
        if high <= low:
            block.refuse("high_freq_factor", f"must be greater than low_freq_factor = {low}.")
        rope = replace(rope, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        rope = replace(rope, truncate=block.flag("truncate", True))
        rope = replace(rope, beta_fast=block.number("beta_fast", 32.0), beta_slow=block.number("beta_slow", 1.0))
        # The stated factor on cos and sin, or that of DeepSeek's `mscale` pair; None for the paper's. As in
        # transformers a 0 in the pair stands for none, and one of them alone means nothing.
        stated = block.optional("attention_factor")
        mscale, all_dims = (block.optional(name) if block.get(name) else None for name in ("mscale", "mscale_all_dim"))
        if stated is None and mscale is not None and all_dims is not None:
            grown = 0.1 * math.log(max(rope.factor, 1.0))
            stated = (mscale * grown + 1.0) / (all_dims * grown + 1.0)
        rope = replace(rope, attention_factor=stated)
        if block.get("attn_factor") not in (None, 1):
            block.refuse(
                "attn_factor",
                "is read by some programs and not by others (transformers does not): write the factor that cos and sin "
                "are multiplied by as attention_factor, or leave it out.",
            )
    block.finish()
    return rope


def written_integers(table: Integers, config: Any) -> dict[str, int]:
    """The fields of config.json from what `Fields.integers` has read."""
    return {name: getattr(config, ours) for ours, (name, _) in table.items()}


def write_rope(rope: Rope) -> dict[str, Any]:
    """One rope as transformers 5 spells it."""
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default" and (rope.kind, rope.factor) != ("proportional", 1.0):
        written["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        written["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        written |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        written |= {} if rope.truncate else {"truncate": False}
        written |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    return written
