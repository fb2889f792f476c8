"""Reads and writes PEFT's adapter_config.json: an adapter's settings, limited to the kinds that tunix supports.

Every field that would change what the adapter computes is either understood or refused by name. Loads without jax.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tunix.errors import UserError
from tunix.hf.safetensors_io import some
from tunix.lora.config import AdapterConfig, Table
from tunix.models.config import DecoderConfig
from tunix.models.families.base import SCORE
from tunix.models.families.table import read_json
from tunix.models.quantization.modules import EXPERTS, MODULES, PROJECTIONS, matched, modules_of, short

CONFIG = "adapter_config.json"
TASKS = {False: "CAUSAL_LM", True: "SEQ_CLS"}
"""PEFT's task types, by whether the model is a reward model."""
HEADS = (SCORE.removesuffix(".weight"), "classifier")
"""Names of the scalar head that a reward model's adapter saves whole: the one we write, and PEFT's alternative."""
TABLES: tuple[Table, ...] = ("embed_tokens", "lm_head")

HARMLESS = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",  # a tied table is one here anyway
        "inference_mode",
        "lora_dropout",  # only while training, and its training is over
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    )
)
"""Fields of adapter_config.json that do not affect what the adapter computes."""
READ = frozenset(
    (
        "peft_type",
        "task_type",
        "bias",
        "init_lora_weights",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "target_modules",
        "target_parameters",
        "modules_to_save",
    )
)

OF_LANGUAGE = r"(.*\.)?(language_model|model)\.layers\.\d+\.\w+\.(%s)"
"""A pattern of the text part's modules in a multimodal model, and in a model of text alone."""

Refuse = Callable[[str, str], UserError]
"""A function (field, reason) -> the error that refuses the field."""


class Described(NamedTuple):
    """The content of an adapter_config.json."""

    adapter: AdapterConfig
    scores: bool
    """Whether the adapter is a reward model's, which includes its scalar head."""


def text(adapter: AdapterConfig, base: str, scores: bool, config: DecoderConfig) -> str:
    """The content of an adapter's adapter_config.json, as JSON text.

    Args:
        adapter: its settings; PiSSA is written as the equivalent plain adapter of twice the rank, with alphas that keep
            its scale.
        base: hub id or path of the base model, where PEFT will look for it.
        scores: whether the model is a reward model.
        config: the base model.
    """
    tied, targeted = config.tied, adapter.targeted_in(config)
    wider = 2 if adapter.start == "pissa" else 1
    louder = math.sqrt(wider) if adapter.rslora else wider
    # PEFT's pattern `down_proj` would match the experts' too.
    called = {short(name): name if config.experts else short(name) for name in modules_of(config)}
    ranks = {called[name]: adapter.modules[PROJECTIONS[name][0]].rank for name in targeted}
    alphas = {called[name]: adapter.alpha_of(name) for name in targeted}
    modules = [name for name in targeted if not name.startswith(EXPERTS)]
    whole = (["embed_tokens"] if tied and adapter.also else list(adapter.also)) + ([HEADS[0]] if scores else [])
    fields = {
        "peft_type": "LORA",
        "task_type": TASKS[scores],
        "modules_to_save": whole or None,
        "ensure_weight_tying": tied and bool(adapter.also),
        "base_model_name_or_path": base,
        "r": wider * adapter.rank,
        "lora_alpha": louder * adapter.alpha,
        "rank_pattern": {name: wider * rank for name, rank in ranks.items() if rank != adapter.rank},
        "alpha_pattern": {name: louder * alpha for name, alpha in alphas.items() if alpha != adapter.alpha},
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        # A tower has modules of the same names.
        "target_modules": modules if config.vision is None else OF_LANGUAGE % "|".join(modules),
        "target_parameters": [called[name] for name in targeted if name.startswith(EXPERTS)] or None,
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def described(file: Path, tied: bool) -> Described:
    """Reads an adapter_config.json.

    Args:
        file: its path.
        tied: whether the base's head is its embedding.

    Raises:
        UserError: it is missing or damaged, or describes a kind that tunix does not support.
    """
    raw = read_json(file)

    def refuse(name: str, why: str) -> UserError:
        return UserError(f"{file}: {name} = {raw.get(name)!r} {why}")

    if raw.get("peft_type") != "LORA":
        raise refuse("peft_type", "is not supported; only LORA is.")
    if raw.get("task_type") not in (*TASKS.values(), None):
        raise refuse("task_type", f"is not supported; {' and '.join(TASKS.values())} are.")
    if raw.get("bias", "none") != "none":
        raise refuse("bias", "is not supported; only 'none' is.")
    if raw.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise refuse("init_lora_weights", "changes the base's weights; convert the adapter to a plain LoRA first.")
    for name in sorted(set(raw) - READ - HARMLESS):
        if raw[name]:
            raise refuse(name, "is not supported: tunix would compute another model.")
    for name, kinds in (("r", int), ("lora_alpha", int | float)):
        if not _positive(raw.get(name), kinds):
            raise refuse(name, "must be a positive number.")
    # Matrices of experts are parameters, which PEFT finds by the ends of their names.
    ends = raw.get("target_parameters") or []
    experts = {name: f"model.layers.0.mlp.{name}" for name in PROJECTIONS if name.startswith(EXPERTS)}
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        raise refuse("target_parameters", "must be a list of names of parameters.")
    foreign = sorted(end for end in ends if not any(name.endswith(f".{end}") for name in experts.values()))
    if foreign:
        raise refuse("target_parameters", f"has {some(foreign)}; tunix adapts only {', '.join(experts)}.")
    parameters = tuple(x for x, name in experts.items() if any(name.endswith(f".{end}") for end in ends))
    modules: tuple[str, ...] = ()
    asked = raw.get("target_modules")
    if asked or not parameters:
        patterns = [".*"] if asked == "all-linear" else [asked] if isinstance(asked, str) else asked
        if not isinstance(patterns, list) or not patterns or not all(isinstance(name, str) for name in patterns):
            raise refuse("target_modules", f"must be a list of module names, of {', '.join(PROJECTIONS)}.")
        if asked is patterns and (foreign := sorted(set(patterns) - set(PROJECTIONS) - set(MODULES))):
            raise refuse("target_modules", f"has {some(foreign)}; tunix adapts only {', '.join(PROJECTIONS)}.")
        try:
            adapted = {name for pattern in patterns for name in matched(pattern)}
        except ValueError as error:
            raise refuse("target_modules", f"is not supported: {error}.") from None
        modules = tuple(name for name in PROJECTIONS if name in adapted and not name.startswith(EXPERTS))
    targets = modules + parameters
    scores = raw.get("task_type") == TASKS[True]
    ranks = _pattern(raw.get("rank_pattern"), "rank_pattern", int, targets, refuse)
    alphas = _pattern(raw.get("alpha_pattern"), "alpha_pattern", int | float, targets, refuse)
    # The tables that it saves whole; PEFT itself adds `model.embed_tokens` where the head is tied to it.
    saved = {name.split(".")[-1] for name in raw.get("modules_to_save") or ()}
    if scores and not saved & set(HEADS):
        raise refuse("modules_to_save", f"is not supported for scores; {[HEADS[0]]} is.")
    if not saved <= {*TABLES, *(HEADS if scores else ())}:
        raise refuse("modules_to_save", f"is not supported; tunix trains {' and '.join(TABLES)} whole.")
    tables: tuple[Table, ...] = tuple(name for name in TABLES if name in saved)
    if tied and not raw.get("ensure_weight_tying") and len(tables) == 1 and not scores:
        raise refuse("modules_to_save", "unties the head from the embedding, which config.json ties: save both.")
    adapter = AdapterConfig(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        ranks=ranks,
        alphas=alphas,
        rslora=bool(raw.get("use_rslora", False)),
        dora=bool(raw.get("use_dora", False)),
        targets=targets,
        also=tables,
    )
    return Described(adapter, scores)


def _positive(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


def _pattern(patterns: Any, name: str, kinds: Any, targets: tuple[str, ...], refuse: Refuse) -> dict[str, Any]:
    """The patterns that match an adapted module; PEFT ignores others."""
    kept = {}
    for pattern, value in (patterns or {}).items():
        if not _positive(value, kinds):
            raise refuse(name, f"gives {pattern!r} the value {value!r}; it must be a positive number.")
        try:
            means = matched(pattern)
        except ValueError as error:
            raise refuse(name, f"is not supported: {error}.") from None
        if set(means) & set(targets):
            kept[pattern] = value
        # A pattern of ours does not take `down_proj` for that of experts.
        for expert in (name for name in targets if name.startswith(EXPERTS) and name not in means):
            if re.fullmatch(rf"(.*\.)?({pattern})", f"model.layers.0.mlp.{expert}"):
                kept.setdefault(expert, value)
    return kept
