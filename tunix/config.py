"""The sections of a recipe that no single room owns, and what all sections are: typed, frozen, unknown keys refused.

The names are a contract with users. Each room's own section is in its `config.py` (`data/`, `rollout/`, `trainer/`,
`lora/`, `algorithms/*/`); how they make a recipe is in `recipe/recipe.py`. Rules that concern one section are checked
here, before any device wakes. Loads without jax.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Family = Literal["llama", "gemma", "gemma2", "gemma3", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = get_args(Family)
DType = Literal["float32", "bfloat16"]
BaseType = Literal["nf4", "int8", "int4", "fp8"]
"""What a frozen base is rounded to: 4-bit NormalFloat, integers, or 8-bit floats (e4m3)."""
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

_NAMES: tuple[tuple[str, Family], ...] = (
    (r"gemma-?3", "gemma3"),
    (r"gemma-?2-", "gemma2"),
    (r"gemma", "gemma"),
    (r"qwen-?3", "qwen3"),
    (r"qwen", "qwen2"),
    (r"llama", "llama"),
)


def family_of_name(name: str) -> Family | None:
    """The family that a hub id such as `google/gemma-3-1b-it` names, or None."""
    return next((family for pattern, family in _NAMES if re.search(pattern, name.lower())), None)


class Config(BaseModel):
    """A frozen section that forbids unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: Any) -> Any:
        # pydantic takes true for 1: `steps: true` would train one step.
        annotation = cls.model_fields[info.field_name].annotation
        switches = annotation is bool or any(choice is value for choice in get_args(annotation))
        if isinstance(value, bool) and not switches:
            raise ValueError(f"{str(value).lower()} does not fit: this key is no switch")
        return value


Reads = Literal["completions", "prompts", "pairs", "labels"]
"""What an algorithm wants of a row: a completion, a prompt alone, two completions that are compared, or one with a
verdict."""


class AlgorithmConfig(Config):
    """What the section of every algorithm has; each adds its own keys in `algorithms/*/config.py`."""

    name: str
    """One of ours, or `file.py:Class` for an algorithm of one's own."""
    speaks: ClassVar[bool] = True
    """Whether the model that it trains says something, which can be sampled; a reward model does not."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step of the run."""
        return 1

    @property
    def reads(self) -> Reads:
        """What rows have to bring."""
        return "completions"

    @property
    def learns_from_rewards(self) -> bool:
        """Whether completions that the model writes are trained on by what they are worth."""
        return False

    @property
    def learns_from_teacher(self) -> bool:
        """Whether a recipe has to name a teacher."""
        return False

    @property
    def samples_per_prompt(self) -> int:
        """Completions of each prompt, where the policy writes them."""
        return 1

    def sequences_per_update(self, batch_size: int) -> int:
        """Sequences that one update sees, where a step takes `batch_size` rows."""
        return batch_size

    def complaints(self, batch_size: int) -> Iterator[str]:
        """What is wrong with this section beside a batch of so many rows, one sentence each, with the key."""
        yield from ()


class ModelConfig(Config):
    """Which weights, and in which precision."""

    path: str | None = None
    """Hub id, local folder, or the folder of a run."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` trains from scratch: give `family`, and `preset` or `sizes`."""
    family: Family | None = None
    """For `init: random` without a preset, and for `--tiny` where the path does not tell it."""
    preset: str | None = None
    """A published size, such as `llama3.2-1b`."""
    sizes: dict[str, int] = {}
    """Sizes that replace the preset's: vocab_size, d_model, num_layers, num_heads, num_kv_heads, head_dim, ffn, ..."""
    tokenizer: str | None = None
    """For `init: random`: a folder, `bytes`, or `bpe` (trained on the training rows to fill sizes.vocab_size)."""
    dtype: DType = "bfloat16"
    """Of the computation; log-probs, norms and softmax are always float32."""
    param_dtype: DType | None = None
    """Of the stored weights; float32 where they train, else the compute dtype."""
    remat: Literal["none", "block"] = "none"
    """`block` recomputes each layer in the backward pass: a third more work for far fewer activations."""

    @model_validator(mode="after")
    def _source(self) -> "ModelConfig":
        if self.init == "pretrained":
            if self.path is None:
                raise ValueError("path is missing: a hub id, a folder, or `init: random` to train from scratch")
            for key in ("preset", "sizes", "tokenizer"):
                if getattr(self, key):
                    raise ValueError(f"{key} only means something with `init: random`; the folder says it itself")
        elif self.path is not None:
            raise ValueError(f"path is {self.path!r}, but `init: random` reads no weights: leave one of them out")
        elif self.family is None and self.preset is None:
            raise ValueError(f"`init: random` wants a family ({', '.join(FAMILIES)}) or a preset")
        return self


class MeshConfig(Config):
    """Devices along each axis; -1 takes what is left. Rows are split over data x fsdp, weights over fsdp and tensor."""

    data: int = 1
    """Copies of the weights; each sees its own rows."""
    fsdp: int = -1
    """Shards of the weights and of their moments; each sees its own rows too."""
    tensor: int = 1
    """Shards of every matrix product: heads, ffn and vocabulary."""

    @model_validator(mode="after")
    def _sizes(self) -> "MeshConfig":
        sizes = (self.data, self.fsdp, self.tensor)
        if any(size == 0 or size < -1 for size in sizes):
            given = f"data={self.data} fsdp={self.fsdp} tensor={self.tensor}"
            raise ValueError(f"sizes are positive, or -1 for what is left, not {given}")
        if sizes.count(-1) > 1:
            raise ValueError("only one axis can be -1")
        return self


class EvalConfig(Config):
    """Evaluation on `data.eval` while training."""

    every: Positive = 50
    """Steps between evaluations; the last step is always evaluated."""
    rows: Positive = 256
    """Rows of `data.eval` that are read, from its start."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Greedy completions of held-out prompts, shown and written before and after training."""
    sample_tokens: Positive = 48
    """Tokens of such a completion at most."""
    until: dict[str, float] = {}
    """Ends the run as soon as an evaluation reaches one of these, such as {eval/reward: 0.9} or {eval/loss: 1.5}."""

    @field_validator("until")
    @classmethod
    def _known(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if not name.startswith(("eval/loss", "eval/reward")):
                raise ValueError(
                    f"{name!r} is no metric of an evaluation: eval/loss, or eval/reward and eval/reward/NAME"
                )
        return value
