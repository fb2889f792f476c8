"""Adapters in PEFT's format (https://huggingface.co/docs/peft): adapter_config.json and adapter_model.safetensors.

Our A and B keep the axes of the weight that they adapt (`[L D r]` and `[L r N H]` for q); PEFT flattens them
(`[r D]` and `[(N H) r]`, one pair in each layer). The layouts follow from the base's own. A reward model's adapter
brings its scalar head along, as PEFT does for sequence classifiers.

Axes: L layers, r rank, the others as in `models/decoder.py`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tunix.errors import UserError
from tunix.files import atomic_folder
from tunix.lora.adapt import PROJECTIONS, targets
from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.models.families import FAMILIES, read_json
from tunix.models.family import SCORE, Tensor
from tunix.models.hf import STORED_DTYPE, rename
from tunix.models.tensor_files import Entry, Stored, check_tensors, some, tensors_of_file, write_tensors

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
HEAD = "value/w"
TASKS = {False: "CAUSAL_LM", True: "SEQ_CLS"}
"""PEFT's name of what the model does, by whether it gives scores."""
HEADS = ([SCORE.removesuffix(".weight")], ["classifier", "score"])
"""What an adapter of a reward model saves whole: as we write it, and as PEFT does by itself."""

HARMLESS = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",  # only while training, and we train without
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    )
)
"""Fields of adapter_config.json that change nothing in what the adapter computes."""


class Pair(NamedTuple):
    """A and B of one adapted weight in a PEFT file."""

    a: Tensor
    b: Tensor


def save_adapter(
    path: Path,
    params: Mapping[str, jax.Array],
    adapter: AdapterConfig,
    config: DecoderConfig,
    base: str,
    scores: bool = False,
) -> None:
    """Writes a PEFT folder that loads on transformers' model of the family.

    Args:
        path: where; must not exist, or be an empty folder.
        params: holds the adapters; others are left out.
        adapter: what they are.
        config: the model below.
        base: hub id or path of the model below, as PEFT will look for it.
        scores: the value head goes along, as a reward model's.

    Raises:
        UserError: something is at `path`, or the disk refuses.
    """
    fields = {
        "peft_type": "LORA",
        "task_type": TASKS[scores],
        "modules_to_save": HEADS[0] if scores else None,
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rslora,
        "target_modules": list(targets(adapter)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with atomic_folder(path) as folder:
        (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        write_tensors(folder / WEIGHTS, list(_entries(params, adapter, config, scores)))


def load_adapter(folder: Path, config: DecoderConfig) -> tuple[AdapterConfig, dict[str, np.ndarray]]:
    """Reads a PEFT folder.

    Args:
        folder: adapter_config.json and adapter_model.safetensors.
        config: the model that it shall sit on.

    Returns:
        What it is, and its arrays by our names, stacked over layers; a reward model's has the value head too.

    Raises:
        UserError: a file is missing or damaged, the adapter is of a kind that tunix does not compute, or its tensors do
            not fit the model.
    """
    adapter, scores = _read_config(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        remedy = (
            "tunix loads no pickles: save it again with safe_serialization"
            if (folder / PICKLE).is_file()
            else "is it whole?"
        )
        raise UserError(f"{folder / WEIGHTS} is missing: {remedy}.")
    prefixes = FAMILIES[config.family].prefixes
    stored: dict[str, Stored] = {}
    for key, tensor in tensors_of_file(folder / WEIGHTS).items():
        stored[rename(key.removeprefix(PREFIX), prefixes) or key] = tensor
    pairs = {name: _pair(name, config) for name in _adapted(adapter)}
    head = FAMILIES[config.family].tensors[HEAD]
    _check(stored, pairs, adapter, config, {SCORE: head.their_shape((config.d_model,))} if scores else {}, folder)
    arrays = {HEAD: _read(stored[SCORE], head, (config.d_model,))} if scores else {}
    for name, pair in pairs.items():
        for letter, tensor, shape in zip("ab", pair, _shapes(pair, adapter, config), strict=True):
            layers = [_read(stored[tensor.key(layer)], tensor, shape) for layer in range(config.num_layers)]
            arrays[f"{name}_lora_{letter}"] = np.stack(layers)
    return adapter, arrays


def _read(stored: Stored, tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    with stored.open() as piece:
        return tensor.read(piece, shape, tuple(slice(None) for _ in shape))


def _adapted(adapter: AdapterConfig) -> list[str]:
    """Our names of the adapted weights."""
    return [f"layers/{PROJECTIONS[name]}/w" for name in targets(adapter)]


def _pair(name: str, config: DecoderConfig) -> Pair:
    """The layouts of A and B, from that of the weight: its input axes are those of PEFT's last group."""
    base = FAMILIES[config.family].tensors[name]
    output, inputs = re.findall(r"\([^)]*\)|\S+", base.theirs)
    stem = base.name.removesuffix(".weight")
    return Pair(
        Tensor(f"{stem}.lora_A.weight", f"r {inputs}", f"{inputs.strip('()')} r"),
        Tensor(f"{stem}.lora_B.weight", f"{output} r", f"r {output.strip('()')}"),
    )


def _shapes(pair: Pair, adapter: AdapterConfig, config: DecoderConfig) -> tuple[tuple[int, ...], ...]:
    """Our shapes of A and B in one layer."""
    c = config
    sizes = {"D": c.d_model, "N": c.num_heads, "K": c.num_kv_heads, "H": c.head_dim, "F": c.ffn, "r": adapter.rank}
    return tuple(tuple(sizes[axis] for axis in tensor.ours.split()) for tensor in pair)


def _entries(
    params: Mapping[str, jax.Array], adapter: AdapterConfig, config: DecoderConfig, scores: bool
) -> Iterator[Entry]:
    if scores:
        value, head = params[HEAD], FAMILIES[config.family].tensors[HEAD]
        written = partial(lambda array: head.write(np.asarray(array)), value)
        yield Entry(PREFIX + SCORE, head.their_shape(value.shape), STORED_DTYPE[str(value.dtype)], written)
    for layer in range(config.num_layers):
        for name in _adapted(adapter):
            for letter, tensor in zip("ab", _pair(name, config), strict=True):
                array = params[f"{name}_lora_{letter}"]

                def make(array: jax.Array = array, tensor: Tensor = tensor, layer: int = layer) -> np.ndarray:
                    return tensor.write(np.asarray(array[layer]))

                shape = tensor.their_shape(array.shape[1:])
                yield Entry(PREFIX + tensor.key(layer), shape, STORED_DTYPE[str(array.dtype)], make)


def _read_config(file: Path) -> tuple[AdapterConfig, bool]:
    """What the adapter is, and whether it is a reward model's."""
    raw = read_json(file)

    def refuse(name: str, why: str) -> UserError:
        return UserError(f"{file}: {name} = {raw.get(name)!r} {why}")

    if raw.get("peft_type") != "LORA":
        raise refuse("peft_type", "is not supported; only LORA is.")
    if raw.get("task_type") not in (*TASKS.values(), None):
        raise refuse("task_type", f"is not supported; {' and '.join(TASKS.values())} are.")
    scores = raw.get("task_type") == TASKS[True]
    if scores and raw.get("modules_to_save") not in HEADS:
        raise refuse("modules_to_save", f"is not supported for scores; {HEADS[0]} is.")
    if raw.get("bias", "none") != "none":
        raise refuse("bias", "is not supported; only 'none' is.")
    if raw.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise refuse("init_lora_weights", "changes the base's weights; convert the adapter to a plain LoRA first.")
    asked = {"peft_type", "task_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora", "target_modules"}
    asked |= {"modules_to_save"} if scores else set()
    for name in sorted(set(raw) - asked - HARMLESS):
        if raw[name]:
            raise refuse(name, "is not supported: tunix would compute another model.")
    for name, kinds in (("r", int), ("lora_alpha", int | float)):
        if isinstance(raw.get(name), bool) or not isinstance(raw.get(name), kinds) or raw[name] <= 0:
            raise refuse(name, "must be a positive number.")
    adapter = AdapterConfig(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        rslora=bool(raw.get("use_rslora", False)),
        targets=_targets(raw.get("target_modules"), refuse),
    )
    return adapter, scores


def _targets(modules: Any, refuse: Any) -> tuple[str, ...]:
    """The adapted modules in our order."""
    named = list(PROJECTIONS) if modules == "all-linear" else modules
    if not isinstance(named, list) or not named:
        raise refuse("target_modules", f"must be a list of module names, of {', '.join(PROJECTIONS)}.")
    foreign = sorted(set(named) - set(PROJECTIONS))
    if foreign:
        raise refuse("target_modules", f"has {some(foreign)}; tunix adapts only {', '.join(PROJECTIONS)}.")
    return tuple(name for name in PROJECTIONS if name in named)


def _check(
    stored: Mapping[str, Stored],
    pairs: Mapping[str, Pair],
    adapter: AdapterConfig,
    config: DecoderConfig,
    head: Mapping[str, tuple[int, ...]],
    folder: Path,
) -> None:
    wanted, file = dict(head), folder / WEIGHTS
    for pair in pairs.values():
        for tensor, shape in zip(pair, _shapes(pair, adapter, config), strict=True):
            wanted |= {tensor.key(layer): tensor.their_shape(shape) for layer in range(config.num_layers)}
    check_tensors(stored, wanted, file)
    extra = sorted(set(stored) - set(wanted))
    if extra:
        raise UserError(f"{file}: {len(extra)} tensor(s) have no place in this model: {some(extra)}.")
