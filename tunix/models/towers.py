"""The towers that see pictures, by the names that a config gives them."""

from collections.abc import Mapping
from typing import Protocol

from flax import nnx

from tunix.models.qwen_vision import QwenVision
from tunix.models.siglip import Siglip
from tunix.models.vision import Tower
from tunix.models.vision_config import VisionConfig


class MakesTower(Protocol):
    """The class of a tower: (sizes, D, random numbers) -> one with random weights."""

    def __call__(self, config: VisionConfig, d_model: int, rngs: nnx.Rngs) -> Tower: ...


TOWERS: Mapping[str, MakesTower] = {"siglip": Siglip, "qwen": QwenVision}
"""`VisionConfig.tower` -> the class."""
