"""The towers that see pictures, by the names that a config gives them."""

from collections.abc import Callable, Mapping

from flax import nnx

from tunix.models.qwen_vision import QwenVision
from tunix.models.siglip import Siglip
from tunix.models.vision import Tower
from tunix.models.vision_config import VisionConfig

TOWERS: Mapping[str, Callable[[VisionConfig, int, nnx.Rngs], Tower]] = {"siglip": Siglip, "qwen": QwenVision}
"""`VisionConfig.tower` -> (sizes, D, random numbers) -> one with random weights."""
