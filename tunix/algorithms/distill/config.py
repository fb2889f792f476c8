"""The `algorithm` and `teacher` sections of a recipe for distillation. Loads without jax."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tunix.algorithms.config import NonNegative, Rule, RuledConfig, Settings
from tunix.config import FAMILIES, Config, DType, Family, MeshConfig, Positive, Reads

_GIVEN = "with on_policy: true"


class DistillConfig(RuledConfig):
    """Whose text the student learns on, and which distance to the teacher is made small there."""

    name: str = "distill"
    on_policy: bool = False
    """The student writes the completions, and the teacher says what it thinks of each token; else on given text."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "sampled"] | None = None
    """Of the two next-token distributions: KL(teacher || student), KL(student || teacher), or generalised
    Jensen-Shannon. `sampled`: the reverse KL, estimated by the drawn token alone. Null: forward_kl on given text,
    sampled with `on_policy: true`."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The teacher's share of the mixture that jsd compares with: near 0 it is like forward_kl, near 1 like reverse_kl.
    Null: 0.5."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """The teacher's k most likely tokens are compared one by one, all others as one; 0: every token for itself."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Divides both models' logits, and the divergence is multiplied by its square. Null: 1. On-policy it is
    rollout.temperature."""
    sft_weight: NonNegative = 0.0
    """Weight of the negative log-likelihood of the given tokens beside the divergence; 0 for none."""
    train_on: Literal["completion", "all"] = "completion"
    """Of given rows: the assistant's turns with their stop tokens, or every token but the first."""
    reduction: Literal["tokens", "sequences"] = "tokens"
    """Mean over the batch's trained tokens, or mean over sequences of each one's token mean."""
    group_size: Positive | None = None
    """Completions of each prompt, with `on_policy: true`. Null: 1."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("beta",), lambda s: s["divergence"] == "jsd", "without divergence: jsd"),
        Rule(("top_k",), lambda s: s["divergence"] != "sampled", "with divergence: sampled, which asks for one token"),
        Rule(("temperature",), lambda s: not s["on_policy"], f"{_GIVEN}: set rollout.temperature"),
        Rule(("sft_weight", "train_on"), lambda s: not s["on_policy"], f"{_GIVEN}: only prompts are read of a row"),
        Rule(("group_size",), lambda s: bool(s["on_policy"]), "without on_policy: true"),
    )

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        """What null stands for, given the other settings."""
        kind = "sampled" if settings["on_policy"] else "forward_kl"
        return {"divergence": kind, "beta": 0.5, "temperature": 1.0, "group_size": 1}

    def conflicts(self) -> list[str]:
        """What is wrong between settings that are all read; one sentence each."""
        if self.divergence == "sampled" and not self.on_policy:
            return [
                "divergence: sampled is an estimate from tokens that the student drew: set on_policy: true, or take "
                "forward_kl, reverse_kl or jsd"
            ]
        return []

    @property
    def reads(self) -> Reads:
        """On-policy the student writes the completions."""
        return "prompts" if self.on_policy else "completions"

    @property
    def learns_from_teacher(self) -> bool:
        """Always."""
        return True

    @property
    def samples_per_prompt(self) -> int:
        """The group, on-policy."""
        return self.group_size or 1

    def sequences_per_update(self, batch_size: int) -> int:
        """On-policy, all completions of a step."""
        return batch_size * self.samples_per_prompt


class TeacherMesh(MeshConfig):
    """Devices of the teacher alone, along each axis."""

    fsdp: int = 1
    """Shards of the weights."""

    @model_validator(mode="after")
    def _counted(self) -> "TeacherMesh":
        if -1 in (self.data, self.fsdp, self.tensor):
            raise ValueError("-1 leaves open how many devices are the teacher's and how many the student's: give sizes")
        return self

    @property
    def size(self) -> int:
        """Devices."""
        return self.data * self.fsdp * self.tensor


class TeacherConfig(Config):
    """A frozen model of the student's vocabulary, of any family and size."""

    path: str | None = None
    """Hub id, local folder, the folder of a run, or a PEFT folder. An adapter on the student's frozen base shares
    it."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random`: nothing to learn from, but everything runs; `--tiny` sets it."""
    family: Family | None = None
    """With `init: random`."""
    sizes: dict[str, int] = Field(default_factory=dict)
    """With `init: random`, as in `model.sizes`."""
    dtype: DType = "bfloat16"
    """Of the weights and of the computation; logits are always float32."""
    mesh: TeacherMesh | None = None
    """Devices of its own, the last ones; `mesh` is then made of the others. Null: it shares the student's."""

    @model_validator(mode="after")
    def _source(self) -> "TeacherConfig":
        if self.init == "random":
            if self.path is not None:
                raise ValueError(f"path is {self.path!r}, but `init: random` reads no weights: leave one of them out")
            if self.family is None:
                raise ValueError(f"`init: random` wants a family: {', '.join(FAMILIES)}")
            return self
        if self.path is None:
            raise ValueError("path is missing: a hub id, a folder, or the folder of a run")
        for key in ("family", "sizes"):
            if getattr(self, key):
                raise ValueError(f"{key} only means something with `init: random`; the folder says it itself")
        return self
