"""The sections that one run is described by. Loads without jax.

`Recipe` (`recipe.py`) adds stages, files and the tiny form; `rules.py` says which sections do not go together.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from tunix.algorithms.distill.config import TeacherConfig
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import AlgorithmConfig, Config, EvalConfig, MeshConfig, ModelConfig, Positive
from tunix.data.config import DataConfig
from tunix.lora.config import AdapterConfig
from tunix.models.quantization.rules import QuantizationConfig
from tunix.recipe.algorithms import algorithm_config
from tunix.rollout.config import RolloutConfig
from tunix.rollout.rewards.config import RewardConfig
from tunix.trainer.config import CheckpointConfig, LoggingConfig, OptimizerConfig


class Sections(Config):
    """One run's sections, each by itself."""

    model: ModelConfig
    adapter: AdapterConfig | None = None
    quantization: QuantizationConfig | None = None
    """Trains a model that is to be rounded, with the rounding in it."""
    data: DataConfig
    algorithm: SerializeAsAny[AlgorithmConfig] = SFTConfig()
    teacher: TeacherConfig | None = None
    """Of whom a student learns; for `algorithm: {name: distill}`."""
    reward: RewardConfig | None = None
    """What completions that the model writes are worth: to train on, and on the rows of `data.eval`."""
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    eval: EvalConfig = EvalConfig()
    batch_size: Positive = 32
    """Sequences per update, over all devices; prompts per step where the policy writes the completions."""
    micro_batch_size: Positive | None = None
    """Sequences per compiled pass; never changes the result."""
    steps: Positive | None = None
    """Updates; or give `epochs`. One epoch where neither is given."""
    epochs: Positive | None = None
    """Passes over the training rows, instead of `steps`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of everything random: first weights, order of the rows, noise."""
    output: str
    """The run folder; where a file does not say it, `runs/` and the file's name."""

    @property
    def sequences_per_update(self) -> int:
        """Sequences that one optimizer update sees."""
        return self.algorithm.sequences_per_update(self.batch_size)

    @field_validator("algorithm", mode="before")
    @classmethod
    def _choose(cls, value: Any) -> Any:
        return algorithm_config(value).model_validate(value) if isinstance(value, Mapping) else value

    @model_validator(mode="before")
    @classmethod
    def _one_epoch(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("steps") is None and value.get("epochs") is None:
            return {**value, "epochs": 1}
        return value
