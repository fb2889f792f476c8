"""How config.json describes packed weights: the `quantization_config` of compressed-tensors.

A scheme states how many bits a matrix has, how many inputs share a scale, whether inputs are rounded too, and how the
values are stored in the file, which `hf/packed_weights.py` reads and writes.
Format: https://github.com/vllm-project/compressed-tensors. Loads without jax.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tunix.errors import UserError, nearest
from tunix.models.quantization.rules import RULES_FILE, Rule, Rules

SECTION, METHOD = "quantization_config", "compressed-tensors"
WORDS, INTEGERS, FLOATS, MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
FORMATS = (WORDS, INTEGERS, FLOATS, MIXED, "naive-quantized")
"""Formats that are read; `naive-quantized` is stored like integers and floats."""
NUMBER = r"\d+"
BITS = {"int4": 4, "int8": 8, "fp8": 8}


def check_packs(rules: Rules) -> None:
    """Refuses rules that the format cannot express.

    Raises:
        UserError: one of them rounds to nf4.
    """
    for rule in rules.rules:
        if rule.weights is not None and rule.weights not in BITS:
            raise UserError(
                f"packed: {rule.module!r} rounds to {rule.weights}, for which {METHOD} has no format; it has "
                f"{', '.join(BITS)}. Not packed, each weight is written as the number on its grid"
            )


@dataclass(frozen=True)
class Packing:
    """How one of a layer's matrices is packed."""

    rule: Rule
    shape: tuple[int, int]
    """`(O, I)`: outputs and inputs."""
    tile: int
    """Inputs that share a scale."""

    @property
    def format(self) -> str:
        """The format in which it is stored."""
        if self.rule.weights == "fp8":
            return FLOATS
        return INTEGERS if self.rule.weights == "int8" and self.rule.activations else WORDS

    @property
    def scheme(self) -> dict[str, Any]:
        """The group in config.json that describes it, without the targets."""
        assert self.rule.weights is not None
        kinds = {"int4": "int", "int8": "int", "fp8": "float"}
        bits = {"num_bits": BITS[self.rule.weights], "type": kinds[self.rule.weights], "symmetric": True}
        whole = self.tile == self.shape[1]
        shared = {"strategy": "channel"} if whole else {"strategy": "group", "group_size": self.tile}
        inputs = None
        if kind := self.rule.activations:
            inputs = {"num_bits": 8, "type": kinds[kind], "symmetric": True, "strategy": "token", "dynamic": True}
        weights = {**bits, **shared, "dynamic": False}
        return {"weights": weights, "input_activations": inputs, "format": self.format}


def section(packing: Mapping[str, Packing], head: str, there: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The value of SECTION in config.json.

    Args:
        packing: how each packed matrix of a layer is packed, by our name of it, e.g. `up`.
        head: the name of the head, which stays as it is.
        there: the names of the matrices that the model has -> ours (`modules_of`); `{expert}` in one is any number.
    """
    ignored, groups = [head], dict[str, dict[str, Any]]()
    for theirs, ours in there.items():
        target = f"re:.*{re.escape(theirs).replace(re.escape('{expert}'), NUMBER)}$"
        if not (packings := [packing[name] for name in ours if name in packing]):
            ignored.append(target)
            continue
        # Where shapes differ, the tile may be a whole row of the narrower ones: its size is stated for all.
        scheme = max(packings, key=lambda packing: packing.shape[1]).scheme
        groups.setdefault(json.dumps(scheme), {"targets": [], **scheme})["targets"].append(target)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
        "ignore": ignored,
    }


def check_section(stated: Mapping[str, Any], file: Path, others: Sequence[str] = ()) -> None:
    """Refuses a `quantization_config` that this module does not read.

    Args:
        others: methods whose tensors say all about themselves.

    Raises:
        UserError: it is another method's or another format's, or rounds what tunix would leave as it is.
    """

    def refuse(what: str) -> NoReturn:
        raise UserError(f"{file}: {SECTION} {what}: take the model that it was made of")

    if (method := stated.get("quant_method")) in others:
        return
    if method != METHOD:
        read = " and ".join(map(repr, (METHOD, *others)))
        refuse(f"is of quant_method {method!r}, and tunix reads {read} alone")
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        refuse("has no config_groups that say what each is")
    formats = {stated.get("format"), *(group.get("format") or stated.get("format") for group in groups.values())}
    for unknown in sorted(str(one) for one in formats - {*FORMATS}):
        refuse(f"has format {unknown!r}, and tunix reads {', '.join(FORMATS)}{nearest(unknown, FORMATS)}")
    rounds = any(group.get("input_activations") for group in groups.values())
    if stated.get("kv_cache_scheme") or (rounds and not (file.parent / RULES_FILE).is_file()):
        what = "the cache" if stated.get("kv_cache_scheme") else "what comes into a matrix"
        refuse(f"rounds {what} too, which tunix knows of its own folders alone ({RULES_FILE})")
