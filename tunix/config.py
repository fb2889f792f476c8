"""The sections of a recipe that belong to no single folder, and their base class: typed, frozen, no unknown keys.

The names are a contract with users. A folder's own section is in its `config.py` (`data/`, `rollout/`, `trainer/`,
`lora/`, `algorithms/*/`); how they make a recipe is in `recipe/recipe.py`. Rules that concern one section are checked
here, before any device is initialised. Loads without jax.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

DType = Literal["float32", "bfloat16"]
CacheType = Literal["float32", "bfloat16", "int8", "fp8"]
"""What keys and values are kept in: numbers of 8 bits are integers with a scale for each token and kv head, or e4m3."""
GradientSums = Literal["compute", "float32"]
LOSS_WEIGHTS = "loss_weights"
"""Name of the per-token value by which a trained token counts in the loss and its denominators, where it is given."""
OBSERVED = "observed"
"""Name of the per-token value that is 1 at tokens that an environment wrote, whose log-probs a loss reads too."""
TINY_BATCH, TINY_GROUP, TINY_COMPLETION = 8, 4, 32
"""Largest sizes of a `--tiny` run: rows of a batch, completions of a prompt, tokens of a completion."""
BaseType = Literal["nf4", "int8", "int4", "fp8"]
"""What a frozen base is rounded to: 4-bit NormalFloat, integers, or 8-bit floats (e4m3)."""
CriticKind = Literal["own", "shared", "alone"]
"""Where values come from: a separate model, a head on the policy's trunk, or a model without a language head."""
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes of a file's name, and of its path, at most, on Linux."""


def _possible(value: str) -> str:
    """The text, which an operating system would take as a path: others raise wherever somebody looks for the file."""
    if (longest := max(len(os.fsencode(name)) for name in value.split("/"))) > LONGEST_NAME:
        raise ValueError(f"{value!r} is no path: a name in it has {longest} bytes, and may have {LONGEST_NAME}")
    if (length := len(os.fsencode(value))) > LONGEST_PATH:
        raise ValueError(f"{value!r} is no path: it has {length} bytes, and may have {LONGEST_PATH}")
    if "\0" in value:
        raise ValueError(f"{value!r} is no path: it has a zero byte")
    if value.startswith("~") and os.path.expanduser(value) == value:
        raise ValueError(f"{value!r}: there is no such user's folder; ~/ is that of the one who runs this")
    return value


Place = Annotated[str, AfterValidator(_possible)]
"""A path, or something in its place: a hub id, an address, a reference to code."""


def families(info: Any) -> tuple[str, ...]:
    """The names that a recipe's `family` may have, from the validation context, since the table of families is in a
    higher layer. Empty without a context; `models.families.table` then refuses an unknown family at its look-up."""
    return (info.context or {}).get("families", ())


def _known(name: str, info: Any) -> str:
    if (known := families(info)) and name not in known:
        raise PydanticCustomError("literal_error", "a family", {"expected": ", ".join(map(repr, known))})
    return name


Family = Annotated[str, AfterValidator(_known)]
"""A family by its name in the table of `models/families/table.py`."""


class Config(BaseModel):
    """A frozen section that forbids unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    gone: ClassVar[Mapping[str, str]] = {}
    """Keys, and values such as `loss: bco`, that there were before -> what holds now, or what to write instead."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_gone(cls, written: Any) -> Any:
        if isinstance(written, Mapping):
            settings = [key for key in written if key not in cls.model_fields]
            settings += [f"{key}: {value}" for key, value in written.items() if isinstance(value, str)]
            if gone := [setting for setting in settings if setting in cls.gone]:
                raise ValueError("\n".join(f"{setting} is gone: {cls.gone[setting]}" for setting in gone))
        return written

    def changed(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys that are not at their defaults, for messages about settings without effect."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].get_default()]

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: Any) -> Any:
        # pydantic takes true for 1: `steps: true` would train one step.
        annotation = cls.model_fields[info.field_name].annotation
        switches = annotation is bool or any(choice is value for choice in get_args(annotation))
        if isinstance(value, bool) and not switches:
            raise ValueError(f"{str(value).lower()} does not fit: this key is no switch")
        return value


class RowKind(StrEnum):
    """Which columns of a row are read, and which of its tokens are targets."""

    COMPLETION = "completion"
    """A given text, of which the completion's tokens are targets."""
    ALL = "all"
    """A given text, of which every token after the first is a target."""
    PROMPT = "prompt"
    """A prompt alone: the policy samples the completions."""
    ROW = "row"
    """The columns as they are: an environment builds its prompts from them."""
    PAIRS = "pairs"
    """Two completions of a prompt, which are compared."""
    LABELS = "labels"
    """A completion with a label, desirable or not."""

    @property
    def is_text(self) -> bool:
        """Whether a row is a given text on its own: nothing is compared with it and nothing continues it, so that it
        can be cut into pieces."""
        return self in (RowKind.COMPLETION, RowKind.ALL)

    @property
    def words(self) -> str:
        """The plural that messages use."""
        return _WORDS[self]


_WORDS: dict[RowKind, str] = {
    RowKind.COMPLETION: "completions",
    RowKind.ALL: "texts",
    RowKind.PROMPT: "prompts",
    RowKind.ROW: "prompts",
    RowKind.PAIRS: "pairs",
    RowKind.LABELS: "labelled completions",
}


class AlgorithmConfig(Config):
    """The keys that the section of every algorithm has; each adds its own in `algorithms/*/config.py`."""

    name: str
    """A built-in algorithm, or `file.py:Class` for a custom one."""
    tiny_caps: ClassVar[Mapping[str, int]] = {}
    """Keys -> the largest values that they have in a `--tiny` run, unless the run's overrides set them."""
    has_lm_head: ClassVar[bool] = True
    """Whether the trained model has a language-model head, so that it can be sampled; a reward model has none."""

    @property
    def learns_from_teacher(self) -> bool:
        """Whether a recipe has to name a teacher."""
        return False

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in one step of the run."""
        return 1

    @property
    def reads(self) -> RowKind:
        """The kind of rows that it trains on."""
        return RowKind.COMPLETION

    @property
    def learns_from_rewards(self) -> bool:
        """Whether it trains on the model's own completions by their rewards."""
        return False

    @property
    def sees_pictures(self) -> bool:
        """Whether it trains on rows with pictures."""
        return False

    @property
    def samples_per_prompt(self) -> int:
        """Completions of each prompt, where the policy samples them."""
        return 1

    @property
    def learning_rate_of_critic(self) -> float | None:
        """Learning rate of a critic that is a separate model; None for the optimizer's."""
        return None

    def tiny(self, batch_size: int) -> dict[str, Any]:
        """The section's plain values for a `--tiny` run: fewer rollouts, and nothing that needs a download.

        Args:
            batch_size: rows of a batch in that run.
        """
        values = self.model_dump(mode="json")
        caps = {key: cap for key, cap in self.tiny_caps.items() if values[key] is not None}
        return values | {key: min(values[key], cap) for key, cap in caps.items()}

    def sequences_per_update(self, batch_size: int) -> int:
        """Sequences that one update sees, where a step takes `batch_size` rows."""
        return batch_size

    def complaints(self, batch_size: int) -> Iterator[str]:
        """What is wrong with this section for batches of `batch_size` rows: one sentence each, with the key."""
        yield from ()


class ProductsConfig(Config):
    """In which numbers the matrices of the layers are multiplied."""

    compute: Literal["fp8"]
    """`fp8` multiplies 8-bit floats: weights and activations in e4m3, gradients of activations in e5m2 (Micikevicius et
    al. 2022, https://arxiv.org/abs/2209.05433), each token and each output scaled by a power of two, summed in float32.
    Gradients of weights, routers, norms, attention, tables and head stay in `dtype`. For NVIDIA's GPUs from
    compute capability 8.9 on (L4, L40, H100, H200, Blackwell) and TPU v7x; a CPU computes the same, slowly."""


MtpUse = Literal["freeze", "train"]
"""What happens to a head that drafts tokens, where it is read."""


class ModelConfig(Config):
    """Which weights, and in which precision."""

    path: Place | None = None
    """Hub id, local folder, the folder of a run, or a folder on an object store, such as gs://bucket/model."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` trains from scratch: give `family`, and `preset` or `sizes`."""
    family: Family | None = None
    """Model family, for `init: random` without a preset, and for `--tiny` where the path does not show it."""
    preset: str | None = None
    """A published size, such as `llama3.2-1b`."""
    sizes: dict[str, int] = {}
    """Sizes that replace the preset's: vocab_size, d_model, num_layers, num_heads, num_kv_heads, head_dim, ffn, ..."""
    tokenizer: str | None = None
    """For `init: random`: a folder, `bytes`, or `bpe` (trained on the training rows to fill sizes.vocab_size)."""
    dtype: DType = "bfloat16"
    """Precision of the computation; log-probs, norms and softmax are always float32."""
    param_dtype: DType | None = None
    """Precision of the stored weights; null: float32 where they train, else `dtype`."""
    remat: Literal["none", "attention", "mlp", "block", "offload", "auto"] = "none"
    """What the backward pass recomputes of each layer instead of keeping it, never attention itself: `none` of its
    products, the projections to queries, keys and values (`attention`), gate and up of the `mlp`, or the whole
    `block`: a third more work for far fewer activations. `offload` is `block` with what that keeps in the host's
    memory. `auto` takes the first of none, attention, mlp and block that fits by estimate, and block where the
    device does not say how much memory it has."""
    gradient_sums: GradientSums = "compute"
    """Precision in which the gradients of the layers' matrices are summed over tokens and devices: that of the
    computation, or `float32`, which loses no digits over however many devices, for twice the bytes."""
    quantization: ProductsConfig | None = None
    """Products in fewer bits, for speed; the weights that train keep theirs, and so do those that are exported."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0.0)
    """For mixtures of experts: what the loss that evens out their use is multiplied by, e.g. 0.001. It is off by
    default: in RL it disturbs what is learned. The use is that of the whole batch, so `micro_batch_size` changes
    nothing; where there are several micro-batches it takes another forward pass. `moe/...` logs the use either way."""
    mtp: MtpUse | None = None
    """What happens to the head of a folder that drafts tokens, Qwen 3.5's `mtp.*`: with `freeze` and `train` it makes
    the draft tokens of `rollout.speculate`. `train` trains it too, to predict the trained tokens from the states that
    the model has of those before, without moving the model: its gradients are clipped apart, and all else is as
    without. Null: it is not loaded. An export has it, as it was unless it trained."""
    attention: Literal["auto", "einsum", "chunked", "splash", "mosaic", "tokamax"] = "auto"
    """How attention within rows is computed. `einsum` writes all scores, `chunked` a block of them at a time: its
    memory grows with a row's length, not its square, and it skips what no query sees. `splash` is a kernel for TPUs,
    `mosaic` and `tokamax` are kernels for NVIDIA's GPUs (`pip install '.[gpu]'`): the first, for Hopper, skips other
    documents of a row in its backward pass too; the second, for Hopper and Blackwell, does not. `auto`: the first
    kernel that there is, else einsum for rows of at most 1024 tokens, and chunked for longer ones."""

    @model_validator(mode="after")
    def _source(self, info: Any) -> "ModelConfig":
        if self.init == "pretrained":
            if self.path is None:
                raise ValueError("path is missing: a hub id, a folder, or `init: random` to train from scratch")
            for key in ("preset", "sizes", "tokenizer"):
                if getattr(self, key):
                    raise ValueError(f"{key} only means something with `init: random`; the folder says it itself")
        elif self.path is not None:
            raise ValueError(f"path is {self.path!r}, but `init: random` reads no weights: leave one of them out")
        elif self.family is None and self.preset is None:
            known = f" ({', '.join(families(info))})" if families(info) else ""
            raise ValueError(f"`init: random` wants a family{known} or a preset")
        elif self.mtp is not None:
            raise ValueError(
                f"mtp: {self.mtp} drafts with a folder's head, and `init: random` reads none; leave it out"
            )
        return self


class MeshConfig(Config):
    """Devices along each axis; -1 takes what is left. Rows are split over data x fsdp x expert, weights over fsdp and
    tensor, the experts of a mixture over expert too.

    `mesh: auto`, the default, chooses the sizes, and the run's log says why. Sizes that are given have to divide
    the model's heads, kv heads, ffn, vocabulary (by tensor), experts (by expert) and d_model (by fsdp), and the rows.
    """

    data: int = 1
    """Copies of the weights; each sees its own rows."""
    fsdp: int = -1
    """Shards of the weights and of their moments; each sees its own rows too."""
    context: int = 1
    """Parts of each row: a device holds the states of its part's tokens, and attends to the keys of the whole row."""
    expert: int = 1
    """Shards of the experts of a mixture; each sees its own rows too, but its experts those of all of these shards."""
    tensor: int = 1
    """Shards of every matrix product: heads, ffn and vocabulary."""

    @model_validator(mode="after")
    def _sizes(self) -> "MeshConfig":
        sizes = dict(self)
        if any(size == 0 or size < -1 for size in sizes.values()):
            axes = " ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(f"sizes are positive, or -1 for what is left, not {axes}")
        if list(sizes.values()).count(-1) > 1:
            raise ValueError("only one axis can be -1")
        return self
