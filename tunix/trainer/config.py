"""The recipe's sections `optimizer`, `checkpoint` and `logging`. Loads without jax."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tunix.config import Config, DType, Fraction, Place, Positive

DEFAULTS = {
    "adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    "adafactor": {"eps": 1e-30},
    "lion": {"b1": 0.9, "b2": 0.99},
    "muon": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    "sgd": {"b1": 0.0},
}
"""The keys among b1, b2 and eps that each rule reads, and what null is for each."""
OnNonfinite = Literal["stop", "skip", "rollback"]
MOST_SKIPS, MOST_ROLLBACKS = 8, 3
"""Steps in a row in which an update may be skipped, and how often a run may go back, before it stops."""
LARGEST_DECAY = 1 - 2**-8
"""The largest decay of a moment in bfloat16. Neighbouring bfloat16 numbers differ by up to 2**-7 of their value: a
decay that subtracts less than half of that never changes them."""


class OptimizerConfig(Config):
    """The update rule (optax). Keys that the chosen rule does not read are refused."""

    name: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """muon updates the matrices of the layers, and AdamW everything else."""
    learning_rate: Annotated[float, Field(gt=0)] = 1.0e-5
    """The highest rate, reached at the end of the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls after the warm-up: to 0, over the remaining steps."""
    warmup: Annotated[float, Field(ge=0)] = 0.0
    """Below 1 a share of all steps, rounded, else a number of steps n; the rate rises linearly, with 1/n of it at the
    first update."""
    warmup_from_zero: bool = False
    """Starts the warm-up with an update at rate 0, so that it is one update later, as in Hugging Face's
    `get_*_schedule_with_warmup` (which round a share up)."""
    b1: Fraction | None = None
    """Decay of the momentum; null for the rule's default: adamw 0.9, lion 0.9, muon's AdamW 0.9, and none for
    sgd. That of Muon itself is 0.95."""
    b2: Fraction | None = None
    """Decay of the mean of squares (for lion, of the momentum); null: adamw 0.999, lion 0.99, muon's AdamW 0.999."""
    eps: Annotated[float, Field(gt=0)] | None = None
    """Added to denominators; null: adamw 1e-8, adafactor 1e-30, muon 1e-8."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; applied to matrices only, never to norms and biases."""
    lora_plus: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of an adapter's B as a multiple of that of its A (LoRA+, Hayou et al. 2024,
    https://arxiv.org/abs/2402.12354, who take 16); null for the same rate."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum global norm of the gradients; null for no clipping."""
    on_nonfinite: OnNonfinite = "stop"
    """What is done where a loss or a gradient norm is not finite: `stop` ends the run before such weights are saved;
    `skip` leaves weights and optimizer as they are and goes on, `rollback` goes back to the last checkpoint and on from
    there with the rows that follow. The step's sequences are written to the run folder."""
    moments_dtype: DType = "float32"
    """Type in which momentum and mean squares are stored, independent of the weights. bfloat16 halves their memory and
    requires decays of at most 0.996: closer to 1, a moment rounds back to its old value. adafactor's stay float32."""

    gone: ClassVar[Mapping[str, str]] = {"end": "linear and cosine fall to 0"}

    @model_validator(mode="after")
    def _read(self) -> "OptimizerConfig":
        name, wrong = self.name, []
        for key in ("b1", "b2", "eps"):
            if getattr(self, key) is not None and key not in DEFAULTS[name]:
                wrong.append(f"{key} changes nothing for {name}, which reads {', '.join(DEFAULTS[name])}")
        if self.warmup_from_zero and not self.warmup:
            wrong.append("warmup_from_zero changes nothing without a warm-up: set warmup")
        if self.moments_dtype == "bfloat16":
            # Of lion only b2 is the decay of a moment.
            decays = {key: x for key, x in self.constants.items() if key == "b2" or (key == "b1" and name != "lion")}
            if not any(decays.values()):
                why = "whose statistics stay in float32" if name == "adafactor" else "which keeps none without momentum"
                wrong.append(f"moments_dtype changes nothing for {name}, {why}")
            wrong += [
                f"moments_dtype: {decay:g} ({key}) of a bfloat16 number rounds back to that number, so that moments "
                f"would never fall: set {key} to 0.99 or less, or moments_dtype to float32"
                for key, decay in decays.items()
                if decay > LARGEST_DECAY
            ]
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    @property
    def constants(self) -> dict[str, float]:
        """Those of b1, b2 and eps that the rule reads, with the defaults where they are null."""
        written = {key: getattr(self, key) for key in DEFAULTS[self.name]}
        return {key: default if written[key] is None else written[key] for key, default in DEFAULTS[self.name].items()}


class CheckpointConfig(Config):
    """How often checkpoints of the train state are written, which are kept, and where."""

    every: Positive | None = 100
    """Steps between checkpoints; null for none by steps. The last step is always saved."""
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes after which a checkpoint is written whatever the steps, so that a large model's are no more frequent than
    a lost quarter of an hour is worth, e.g. 15; null for none by time."""
    keep: Positive = 3
    """Number of most recent checkpoints to keep; older ones are deleted."""
    best: bool = True
    """Also keeps the checkpoint with the lowest eval/loss, where there is an evaluation."""
    folder: Place | None = None
    """Where they are, of this run alone: an address such as gs://bucket/runs/x, or a folder on a disk; stages have one
    in there each. Null for `checkpoints/` in the run folder."""


PROFILE = "profile"
"""The folder of a run's profiles."""


class ProfileConfig(Config):
    """Steps of which JAX's profiler writes a trace into the run folder's `profile/`, of the first process's devices."""

    steps: tuple[Positive, Positive]
    """The first and the last step of the window, from 1; the first two steps also compile."""

    @field_validator("steps")
    @classmethod
    def _ordered(cls, steps: tuple[int, int]) -> tuple[int, int]:
        if steps[0] > steps[1]:
            raise ValueError(f"{list(steps)} ends before it begins: write the first step, then the last")
        return steps

    def beyond(self, total: int) -> str | None:
        """What is wrong where the window ends after the last of `total` steps."""
        text = f"logging.profile.steps: {list(self.steps)} ends after the run's last step, {total}; choose earlier ones"
        return text if self.steps[1] > total else None


class SamplesConfig(Config):
    """What is recorded of the completions that a run learns from; `tunix report` shows it."""

    every: Positive = 1
    """Steps between recorded ones."""
    groups: Annotated[int, Field(ge=0)] | Literal["all"] = 1
    """How many groups of completions of such a step are recorded, its first ones or all; 0 for none. With more
    than one all samples are packed, in samples.jsonl.gz."""
    megabytes: Annotated[float, Field(gt=0)] = 1000.0
    """Size that the file never exceeds: a step that has no room in it is not recorded, be it completions or answers
    to held-out prompts and tasks."""

    @model_validator(mode="after")
    def _read(self) -> "SamplesConfig":
        if self.groups == 0 and self.every != 1:
            raise ValueError("every changes nothing with groups: 0, which records no step: leave it out")
        return self


class LoggingConfig(Config):
    """Where metrics are logged besides metrics.jsonl, which is always written, and which samples are recorded."""

    every: Positive = 1
    """Steps between logged rows."""
    samples: SamplesConfig = SamplesConfig()
    """Which completions are recorded in samples.jsonl, and handed to the trackers below."""
    wandb: str | None = None
    """Name of a Weights & Biases project, whose key is in WANDB_API_KEY; WANDB_MODE=offline works. Samples are tables.
    """
    trackio: str | None = None
    """Name of a trackio project, on this machine or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL; requires the extra
    `trackio`. Samples are traces."""
    mlflow: str | None = None
    """Name of an MLflow experiment at MLFLOW_TRACKING_URI; requires the extra `mlflow`. Samples are tables, one file a
    step."""
    tensorboard: bool = False
    """Writes event files to the run folder's `tensorboard/`; requires the extra `tensorboard`. Samples are texts."""
    profile: ProfileConfig | None = None
    """Steps that are profiled, as `profile: {steps: [10, 12]}`; `tunix trace RUN` shows where their time went."""
