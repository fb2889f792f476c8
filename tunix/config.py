"""The sections of a recipe: typed, frozen, unknown keys refused. Loads without jax.

The names are a contract with users. Each algorithm's own section lives beside it (`algorithms/*/config.py`); how the
sections make a recipe is in `recipe.py`. Rules that concern one section are checked here, before any device wakes.
"""

import re
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tunix.update_rules import complaints

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

    def sequences_per_update(self, batch_size: int) -> int:
        """Sequences that one update sees, where a step takes `batch_size` rows."""
        return batch_size


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


class DataConfig(Config):
    """Where the rows come from and how they become sequences."""

    train: str
    """Hub id, folder, .jsonl, .parquet, .arrow, or `module:function` / `file.py:function` that returns the rows."""
    eval: str | None = None
    """Likewise; held-out rows for `eval/loss`."""
    split: str = "train"
    """Split of `train` where it has splits."""
    eval_split: str | None = None
    """Split of `eval`; with `eval` left out, that split of `train`."""
    format: Literal["auto", "messages", "prompt_completion", "text", "tokens", "pairs"] = "auto"
    """Shape of a row; `auto` reads it off the first row's columns."""
    columns: dict[str, str] = {}
    """Our column -> theirs, for instance {prompt: question, completion: answer}."""
    max_length: Positive = 1024
    """Tokens of a sequence, and of a packed row. Of pairs: of each side, and a packed row has room for two
    (see completion_length)."""
    prompt_length: Positive | None = None
    """Tokens of a prompt, where a policy writes the completions; null leaves max_length less completion_length."""
    completion_length: Positive | None = None
    """Tokens of such a completion at most, over all of its turns; null is half of max_length, or what prompt_length
    leaves. Of given pairs: tokens of a side after what both have in common; null is what max_length leaves. Rows are
    that much shorter."""
    on_overflow: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a longer one; it is counted either way. A prompt that is read alone loses its beginning."""
    chat: bool = False
    """Prompts (and completions) that are strings become a chat of user (and assistant), in the model's template; so do
    pairs of transcripts, `Human: ... Assistant: ...`."""
    system: str | None = None
    """System message of such chats."""
    shuffle: bool = True
    """False takes the rows in file order."""
    packing: Literal[True, False, "wrapped", "split"] = True
    """Several sequences in a row; true and false never change the result. Of texts and completions that
    are longer than max_length `split` makes several pieces, each a sequence of its own, instead of truncating them;
    `wrapped` fills the rows of a batch in order, and cuts wherever one is full. With both `batch_size` counts pieces,
    and a piece's first token, which nothing in it predicts, is not trained."""
    chat_template: str | None = None
    """For a tokenizer without one: `gemma`, `llama3`, `chatml`, or a .jinja file. Replaces the folder's own."""
    template_kwargs: dict[str, str | bool | int] = {}
    """Variables of the chat template, such as {enable_thinking: false}, or {date_string: 26 Jul 2024} where a template
    would write today's date, which a run that goes on tomorrow could not repeat."""

    @property
    def cuts(self) -> bool:
        """Whether long texts become several pieces."""
        return isinstance(self.packing, str)

    @property
    def longest_completion(self) -> int:
        """Tokens of a completion that a policy writes."""
        rest = self.max_length - self.prompt_length if self.prompt_length else self.max_length // 2
        return self.completion_length or max(rest, 1)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that a policy is given."""
        return self.prompt_length or max(self.max_length - self.longest_completion, 1)

    @model_validator(mode="after")
    def _fits(self) -> "DataConfig":
        if self.longest_prompt + self.longest_completion > self.max_length > 1:
            raise ValueError(
                f"prompt_length {self.longest_prompt} and completion_length {self.longest_completion} do not fit into "
                f"max_length {self.max_length}, the tokens of a whole sequence"
            )
        if self.cuts and self.on_overflow != "truncate":
            raise ValueError(
                f"on_overflow {self.on_overflow!r} changes nothing with packing {self.packing!r}, which cuts what is "
                "too long into pieces; leave it out"
            )
        if self.system and not self.chat:
            raise ValueError("system changes nothing without `chat: true`; rows of messages bring their own")
        return self


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


class RewardFunction(Config):
    """One reward: a function, what it is told, and how much it counts."""

    name: str
    """A shipped one (exact_match, number, math, gsm8k, format, length, repetition, cosine, json_schema, unit_tests), or
    `module:function` or `file.py:function`."""
    label: str | None = None
    """Its name in the metrics; null takes the function's. Two uses of one function need two labels."""
    weight: float = 1.0
    """Multiplies its scores in the sum."""
    clip: tuple[float, float] | None = None
    """Scores count as no less than the first and no more than the second, before the weight. Null: as they are."""
    options: dict[str, Any] = {}
    """Arguments with one value for the whole run, such as {pattern: "<answer>.*</answer>"}."""
    columns: dict[str, str] = {}
    """Argument -> column of the row, where they are called differently, such as {answer: solution}."""

    @field_validator("clip")
    @classmethod
    def _rising(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"{list(value)} is no interval: the lower bound stands first")
        return value

    @property
    def title(self) -> str:
        """The name in metrics and messages, e.g. `exact_match`."""
        return self.label or self.name.rpartition(":")[2]


class RewardConfig(Config):
    """What a completion is worth: functions in worker processes with the time they are given, and a reward model."""

    functions: tuple[RewardFunction, ...] = ()
    """One or several; a plain name stands for a function with weight 1 and no options."""
    model: str | None = None
    """Hub id, folder, or run of a reward model (a sequence classifier with one label). It scores beside the functions,
    under the name `model`, on the devices of the run."""
    model_weight: float = 1.0
    """Multiplies its scores in the sum."""
    model_length: Positive | None = None
    """Tokens of prompt and completion that it reads; a longer one fails. Null: data.max_length, twice that where it has
    another tokenizer than the policy, and never more than it was made for."""
    deadline: Annotated[float, Field(gt=0)] = 10.0
    """Seconds of a call, after which the sample counts as failed and the worker is replaced."""
    workers: Positive | None = None
    """Processes that score; null: as many as there are cores, at most 8. Never changes a result."""

    @field_validator("functions", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple):
            return value
        return tuple({"name": item} if isinstance(item, str) else item for item in listed)

    @model_validator(mode="after")
    def _distinct(self) -> "RewardConfig":
        titles = [function.title for function in self.functions] + ["model"] * bool(self.model)
        if twice := sorted({title for title in titles if titles.count(title) > 1}):
            raise ValueError(f"{', '.join(twice)} stands there twice: give one of them another label")
        if self.model is None and (self.model_weight != 1.0 or self.model_length):
            raise ValueError("model_weight and model_length change nothing without a reward model: set model")
        return self


class EnvironmentConfig(Config):
    """What answers the model: one episode of it per completion."""

    name: str = "problem"
    """A shipped one (problem, calculator, guessing), or `module:Class` or `file.py:Class`."""
    options: dict[str, Any] = {}
    """Its settings, such as {guesses: 5}."""
    turns: Positive = 16
    """Answers of the model in an episode at most; an environment that has not ended by then counts as failed."""


class RolloutConfig(Config):
    """How a policy writes completions. Only settings that the loss mirrors: it sees the distribution drawn from."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in the sampler and in the loss."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the model's stop tokens."""
    slots: Positive | None = None
    """Completions that are decoded at a time; null: as many as fill this kind of device. Never changes a result."""
    mismatch_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference between the trainer's and the sampler's log-prob of a token; beyond it the run stops. Null:
    1e-3 in float32, 0.25 in bfloat16 and where `quantization` rounds activations: rounding alone makes some."""
    environment: EnvironmentConfig | None = None
    """What answers the model; null for single answers."""
    samples: Annotated[int, Field(ge=0)] = 1
    """Groups of each step that are written to samples.jsonl."""

    @model_validator(mode="before")
    @classmethod
    def _mirrored(cls, value: Any) -> Any:
        for key in ("top_k", "top_p", "min_p"):
            if isinstance(value, dict) and key in value:
                raise ValueError(
                    f"{key} cuts the distribution off, which the loss cannot mirror: the ratio of trainer and sampler "
                    "would not be 1. Set temperature instead; tunix generate and tunix chat know it"
                )
        return value
