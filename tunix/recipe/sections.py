"""`Sections`: the sections of the recipe of one run, each checked by itself. Loads without jax.

`Recipe` (`recipe.py`) adds stages, files and the tiny form; `rules.py` checks which sections do not fit together.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from tunix.algorithms.distill.config import TeacherConfig
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import AlgorithmConfig, Config, EvalConfig, MeshConfig, ModelConfig, Place, Positive
from tunix.data.config import DataConfig
from tunix.lora.config import AdapterConfig
from tunix.models.quantization.rules import QuantizationConfig
from tunix.recipe.algorithms import algorithm_config, corrected
from tunix.rollout.config import RolloutConfig
from tunix.rollout.rewards.config import RewardConfig
from tunix.trainer.config import CheckpointConfig, LoggingConfig, OptimizerConfig


class Sections(Config):
    """The sections of one run."""

    model: ModelConfig
    adapter: AdapterConfig | None = None
    quantization: QuantizationConfig | None = None
    """Simulates rounding during training (QAT), for a model that will be quantized."""
    data: DataConfig
    algorithm: SerializeAsAny[AlgorithmConfig] = SFTConfig()
    teacher: TeacherConfig | None = None
    """The model that the student learns from, with `algorithm: {name: distill}`."""
    reward: RewardConfig | None = None
    """How completions of the model are scored: for training, and on the rows of `data.eval`."""
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig | Literal["auto"] = "auto"
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    eval: EvalConfig = EvalConfig()
    batch_size: Positive = 32
    """Sequences per update over all devices; prompts per step where the policy writes the completions."""
    micro_batch_size: Positive | None = None
    """Sequences per micro-batch (gradient accumulation); does not change the result."""
    steps: Positive | None = None
    """Number of updates; or set `epochs`. One epoch where neither is set."""
    epochs: Positive | None = None
    """Number of epochs over the training rows, instead of `steps`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: initial weights, order of the rows, noise, sampling."""
    output: Place
    """The run folder; by default `runs/` and the name of the recipe's file."""

    @property
    def sequences_per_update(self) -> int:
        """Number of sequences in one optimizer update."""
        return self.algorithm.sequences_per_update(self.batch_size)

    @field_validator("algorithm", mode="before")
    @classmethod
    def _choose(cls, value: Any) -> Any:
        return algorithm_config(value).model_validate(value) if isinstance(value, Mapping) else value

    @model_validator(mode="before")
    @classmethod
    def _corrected(cls, value: Any) -> Any:
        """Where servers sample, importance weights are on unless the recipe says otherwise."""
        if not isinstance(value, Mapping):
            return value
        rollout, algorithm = value.get("rollout"), value.get("algorithm")
        on_servers = isinstance(rollout, Mapping) and rollout.get("engine") == "vllm"
        return {**value, "algorithm": corrected(algorithm)} if on_servers and isinstance(algorithm, Mapping) else value

    @model_validator(mode="before")
    @classmethod
    def _one_epoch(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("steps") is None and value.get("epochs") is None:
            return {**value, "epochs": 1}
        return value
