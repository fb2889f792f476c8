"""Resolves `algorithm.name`: the name of a built-in algorithm, or a custom class. Loads without jax.

`ALGORITHMS` at the end is the table of built-in ones.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from tunix.algorithms.distill.config import DistillConfig
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.kto.config import KTOConfig
from tunix.algorithms.ppo.config import PPOConfig
from tunix.algorithms.reward.config import RewardModelConfig
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import AlgorithmConfig
from tunix.errors import UserError, nearest
from tunix.util.plugins import is_reference, load_object
from tunix.util.yaml_io import shown


def algorithm_config(section: Mapping[Any, Any]) -> type[AlgorithmConfig]:
    """The config class of an `algorithm` section. A custom algorithm is imported and has it as its `Config`.

    Raises:
        UserError: no algorithm has this name, or the custom class has no `Config`.
    """
    name = str(section.get("name", DEFAULT))
    if name in ALGORITHMS:
        return ALGORITHMS[name][0]
    algorithm = algorithm_class(name)
    # Looked up along the bases: a subclass that adds no keys inherits its parent's.
    config = next((vars(base)["Config"] for base in algorithm.__mro__ if "Config" in vars(base)), None)
    if not (isinstance(config, type) and issubclass(config, AlgorithmConfig)):
        raise UserError(f"name is {name!r}, a class without `Config`, which names its keys, e.g. Config = SFTConfig")
    return config


def algorithm_class(name: str) -> type:
    """The class of an algorithm: a built-in one, or `file.py:Class`. Imports it, and jax with it.

    Raises:
        UserError: no algorithm has this name.
    """
    if name in ALGORITHMS:
        module, _, attribute = ALGORITHMS[name][1].partition(":")
        return vars(importlib.import_module(module))[attribute]  # an error here is a defect of tunix, and is raised
    if not is_reference(name):
        hint = nearest(name, ALGORITHMS)
        known = ", ".join(ALGORITHMS)
        raise UserError(f"name is {shown(name)}, not one of {known}, nor a class of yours as file.py:Class.{hint}")
    loaded = load_object(name)
    if not isinstance(loaded, type):
        raise UserError(f"name is {name!r}, which is no class")
    return loaded


DEFAULT = "sft"
"""The algorithm of a section without a name."""
ALGORITHMS: dict[str, tuple[type[AlgorithmConfig], str]] = {
    "sft": (SFTConfig, "tunix.algorithms.sft.algorithm:SFT"),
    "ppo": (PPOConfig, "tunix.algorithms.ppo.algorithm:PPO"),
    "distill": (DistillConfig, "tunix.algorithms.distill.algorithm:Distill"),
    "grpo": (GRPOConfig, "tunix.algorithms.grpo.algorithm:GRPO"),
    "dpo": (DPOConfig, "tunix.algorithms.dpo.algorithm:DPO"),
    "kto": (KTOConfig, "tunix.algorithms.kto.algorithm:KTO"),
    "reward": (RewardModelConfig, "tunix.algorithms.reward.algorithm:RewardModel"),
}
"""`algorithm.name` -> the config class of its section, and the algorithm's class (imported only when it is used)."""
