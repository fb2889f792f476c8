"""Post-training of language models in JAX.

`tunix.train("recipes/quickstart.yaml")` runs a recipe from Python, `tunix --help` lists the commands. `tunix.client`
serves a custom training loop, `tunix.connect` is its like on a server, `tunix.load` loads a model to generate, chat and
score. Nothing is imported before it is used, so that `import tunix` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix import losses
    from tunix.algorithms.base import Algorithm
    from tunix.algorithms.distill.algorithm import Distill
    from tunix.algorithms.dpo.algorithm import DPO
    from tunix.algorithms.grpo.algorithm import GRPO
    from tunix.algorithms.kto.algorithm import KTO
    from tunix.algorithms.ppo.algorithm import PPO
    from tunix.algorithms.reward.algorithm import RewardModel
    from tunix.algorithms.sft.algorithm import SFT
    from tunix.algorithms.stream import rollouts
    from tunix.data.packing import pack
    from tunix.inference.load import load
    from tunix.recipe.recipe import Recipe
    from tunix.run.client import client
    from tunix.run.opening import train
    from tunix.serving.tinker.client import connect
    from tunix.types import Batch, Completion, Loss, LossInputs, LossOutputs, Sampling, Sequence, Term

_WHERE = {
    "Recipe": "tunix.recipe.recipe",
    "train": "tunix.run.opening",
    "load": "tunix.inference.load",
    "client": "tunix.run.client",
    "connect": "tunix.serving.tinker.client",
    "rollouts": "tunix.algorithms.stream",
    "pack": "tunix.data.packing",
    "Algorithm": "tunix.algorithms.base",
    "SFT": "tunix.algorithms.sft.algorithm",
    "DPO": "tunix.algorithms.dpo.algorithm",
    "KTO": "tunix.algorithms.kto.algorithm",
    "RewardModel": "tunix.algorithms.reward.algorithm",
    "GRPO": "tunix.algorithms.grpo.algorithm",
    "PPO": "tunix.algorithms.ppo.algorithm",
    "Distill": "tunix.algorithms.distill.algorithm",
    "Batch": "tunix.types",
    "Completion": "tunix.types",
    "Loss": "tunix.types",
    "LossInputs": "tunix.types",
    "LossOutputs": "tunix.types",
    "Sampling": "tunix.types",
    "Sequence": "tunix.types",
    "Term": "tunix.types",
}
"""The module of each public name."""

__version__ = "0.1.0"
__all__ = [
    "DPO",
    "GRPO",
    "KTO",
    "PPO",
    "SFT",
    "Algorithm",
    "Batch",
    "Completion",
    "Distill",
    "Loss",
    "LossInputs",
    "LossOutputs",
    "Recipe",
    "RewardModel",
    "Sampling",
    "Sequence",
    "Term",
    "__version__",
    "client",
    "connect",
    "load",
    "losses",
    "pack",
    "rollouts",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("tunix.losses")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'tunix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
