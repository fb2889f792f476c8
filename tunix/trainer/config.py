"""The recipe's sections `optimizer`, `checkpoint` and `logging`. Loads without jax."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunix.config import Config, DType, Fraction, Positive
from tunix.trainer.update_rules import complaints


class OptimizerConfig(Config):
    """The update rule (optax). Keys that the chosen rule does not read are refused."""

    name: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """muon moves the layers' matrices, and AdamW everything else beside it."""
    learning_rate: Annotated[float, Field(gt=0)] = 1.0e-5
    """The highest rate, reached at the end of the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls after the warm-up, over the steps that are left."""
    warmup: Annotated[float, Field(ge=0)] = 0.0
    """Below 1 a share of all steps, rounded, else a number of steps n; the rate rises linearly, with 1/n of it at the
    first update."""
    warmup_from_zero: bool = False
    """The warm-up begins with an update at rate 0, one later than else, as in Hugging Face's
    `get_*_schedule_with_warmup` (which round a share up)."""
    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the rate that linear and cosine end at."""
    b1: Fraction | None = None
    """Decay of the momentum; null takes the rule's usual value: adamw 0.9, lion 0.9, muon's AdamW 0.9."""
    b2: Fraction | None = None
    """Decay of the squares' mean (of lion's momentum); null: adamw 0.999, lion 0.99, muon's AdamW 0.999."""
    eps: Annotated[float, Field(gt=0)] | None = None
    """Keeps denominators from 0; null: adamw 1e-8, adafactor 1e-30, muon 1e-8."""
    momentum: Fraction | None = None
    """Null: none for sgd, 0.95 for muon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled; on matrices only, never on norms and biases."""
    lora_plus: Annotated[float, Field(gt=0)] | None = None
    """An adapter's B learns so many times faster than its A (LoRA+, Hayou et al. 2024,
    https://arxiv.org/abs/2402.12354, who take 16); null for the same rate."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global norm that gradients are clipped to; null for none."""
    moments_dtype: DType = "float32"
    """What momentum and mean squares are kept in, whatever the weights are. bfloat16 halves them, and wants decays of
    0.996 at most: nearer to 1 they round back to what they were. adafactor's are few, and float32."""

    @model_validator(mode="after")
    def _read(self) -> "OptimizerConfig":
        if wrong := list(complaints(self.model_dump())):
            raise ValueError("\n".join(wrong))
        return self


class CheckpointConfig(Config):
    """How often the train state is written, and which are kept."""

    every: Positive = 100
    """Steps between checkpoints; the last step is always saved."""
    keep: Positive = 3
    """The last n; older ones are deleted."""
    best: bool = True
    """Also the one with the lowest eval/loss so far, where there is an evaluation."""


class LoggingConfig(Config):
    """metrics.jsonl is always written."""

    every: Positive = 1
    """Steps between rows."""
    wandb: str | None = None
    """Project name; WANDB_MODE=offline works."""
    tensorboard: bool = False
    """Event files in the run folder's `tensorboard/`; needs the extra of that name."""
