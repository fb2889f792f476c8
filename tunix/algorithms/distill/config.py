"""The `algorithm` and `teacher` sections of a recipe for distillation. Loads without jax."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tunix.algorithms.config import NonNegative, Rule, RuledConfig, Settings
from tunix.config import TINY_GROUP, Config, DType, Family, MeshConfig, Place, Positive, RowKind

POLICY = "policy"
"""`teacher.path` for the present weights of the model that trains."""
STORED = "stored"
"""`teacher.path` for log-probs that the rows have."""
PRESETS: Mapping[str, Settings] = {
    # Shenfeld et al. 2026, https://arxiv.org/abs/2601.19897: KL(policy(. | x) || policy(. | x, demonstration)) on the
    # policy's own completions. The paper's teacher is a moving average of the policy; this one is the policy itself.
    "sdft": {"on_policy": True, "divergence": "reverse_kl"},
    # Zhao et al. 2026, https://arxiv.org/abs/2601.18734: the first weights, which see the solution, as in the authors'
    # code (https://github.com/siyan-zhao/OPSD, scripts/run_opsd.sh); its later option to clip each token is not here.
    "opsd": {"on_policy": True, "divergence": "jsd", "beta": 0.5},
    # Huebotter et al. 2026, https://arxiv.org/abs/2601.20802: KL(policy(. | x) || policy(. | x, f)), f another attempt
    # that succeeded, and feedback. The paper regularises the teacher, as by a moving average; this one is the policy.
    "sdpo": {"on_policy": True, "divergence": "reverse_kl", "group_size": 8, "success": 1.0},
}
PROMPTS: Mapping[str, str] = {
    # The texts of the authors' code.
    "sdft": "{prompt}\n\nThis is an example for a response to the question:\n{completion}\n\n"
    "Now answer with a response of your own, including the thinking process.",
    "opsd": "{prompt}\n\nHere is a reference solution to this problem:\n"
    "=== Reference Solution Begin ===\n{completion}\n=== Reference Solution End ===\n\n\n"
    "After reading the reference solution above, make sure you truly understand the reasoning behind each step — do "
    "not copy or paraphrase it. Now, using your own words and independent reasoning, derive the same final answer to "
    "the problem above. Think step by step, explore different approaches, and don't be afraid to backtrack or "
    "reconsider if something doesn't work out:\n",
    "sdpo": "{prompt}{attempt}{feedback}\n\nCorrectly solve the original question.\n",
}
"""Preset -> what the teacher is asked."""
SHOWN: Mapping[str, str] = {
    "attempt": "\nCorrect solution:\n\n{}\n\n",
    "feedback": "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{}\n\n",
}
"""What stands in `teacher.prompt` for a completion of the policy, where there is such a thing: the texts of SDPO."""


class DistillConfig(RuledConfig):
    """Which text the student learns on, and which divergence from the teacher is minimised there."""

    tiny_caps: ClassVar[Mapping[str, int]] = {"group_size": TINY_GROUP}

    name: str = "distill"
    preset: Literal["sdft", "opsd", "sdpo"] | None = None
    """The model as its own teacher, which sees more in its prompt: settings for all keys that are not written, and a
    `teacher` where none is. The row's `completion`: `sdft` (https://arxiv.org/abs/2601.19897), with the present
    weights, or `opsd` (https://arxiv.org/abs/2601.18734), with the first ones. What other completions and the rewards
    show: `sdpo` (https://arxiv.org/abs/2601.20802), with the present weights."""
    on_policy: bool = False
    """Whether the student samples the completions and the teacher scores each token; else it learns on given text."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "sampled"] | None = None
    """Divergence of the next-token distributions: KL(teacher || student), KL(student || teacher), or generalised
    Jensen-Shannon. `sampled`: the reverse KL, estimated from the sampled token alone. Null: forward_kl on given text,
    sampled with `on_policy: true`."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The teacher's share in the mixture of jsd: near 0 it is like forward_kl, near 1 like reverse_kl. Null: 0.5."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """The teacher's k most likely tokens are compared one by one, all others as one bucket; 0 compares all tokens."""
    sft_weight: NonNegative = 0.0
    """Weight of the negative log-likelihood of the given tokens, added to the divergence; 0 for none."""
    prefix_weight: NonNegative = 0.0
    """gamma of IW-OPD (https://arxiv.org/abs/2606.22600), which takes 0.5: how much more the first sampled token of a
    completion counts; what later ones gain falls as the sampled text departs from the teacher. 0: all count alike."""
    group_size: Positive | None = None
    """Completions of each prompt, with `on_policy: true`. Null: 1."""
    success: float | None = None
    """Total reward from which a completion is `{attempt}` in `teacher.prompt` for the others of its prompt, and below
    which what rewards log as `feedback` is `{feedback}` for itself. Completions with neither are not trained. Null: the
    teacher is asked before anything is sampled."""

    presets: ClassVar[Mapping[str, Settings]] = PRESETS
    gone: ClassVar[Mapping[str, str]] = {
        "reduction": "it is the mean over the batch's trained tokens",
        "temperature": "it is 1 on given text, and rollout.temperature with on_policy: true",
        "train_on": "of given rows the completion is trained; make texts of rows to train all of it",
    }
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("beta",), lambda s: s["divergence"] == "jsd", "without divergence: jsd"),
        Rule(("top_k",), lambda s: s["divergence"] != "sampled", "with divergence: sampled, which asks for one token"),
        Rule(("prefix_weight",), lambda s: s["divergence"] == "sampled", "without divergence: sampled"),
        Rule(("sft_weight",), lambda s: not s["on_policy"], "with on_policy: true: only prompts are read of a row"),
        Rule(("group_size", "success"), lambda s: bool(s["on_policy"]), "without on_policy: true"),
    )

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        kind = "sampled" if settings["on_policy"] else "forward_kl"
        return {"divergence": kind, "beta": 0.5, "group_size": 1}

    def conflicts(self) -> list[str]:
        if self.divergence == "sampled" and not self.on_policy:
            return [
                "divergence: sampled is an estimate from tokens that the student sampled: set on_policy: true, or take "
                "forward_kl, reverse_kl or jsd"
            ]
        return []

    @property
    def learns_from_teacher(self) -> bool:
        return True

    @property
    def learns_from_rewards(self) -> bool:
        return self.success is not None

    @property
    def reads(self) -> RowKind:
        """The completion of a given text; only the prompt where the student samples the completions."""
        return RowKind.PROMPT if self.on_policy else RowKind.COMPLETION

    @property
    def samples_per_prompt(self) -> int:
        """On-policy, completions of each prompt: the group size."""
        return self.group_size or 1

    def sequences_per_update(self, batch_size: int) -> int:
        """Sequences of one update: on-policy all completions of a step."""
        return batch_size * self.samples_per_prompt


class TeacherMesh(MeshConfig):
    """Devices of the teacher alone, along each axis."""

    fsdp: int = 1
    """Shards of the weights."""

    @model_validator(mode="after")
    def _counted(self) -> "TeacherMesh":
        if -1 in (self.data, self.fsdp, self.context, self.tensor):
            raise ValueError("-1 leaves open how many devices are the teacher's and how many the student's: give sizes")
        return self

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.context * self.tensor


class OneTeacher(Config):
    """A frozen model with the student's vocabulary, of any family and size."""

    path: Place | None = None
    """Hub id, local folder, the folder of a run, or a PEFT folder. A teacher that is an adapter on the student's frozen
    base shares that base. `policy`: the model that trains, with its present weights, which sees more in `prompt`.
    `stored`: nobody, as the rows have log-probs that `tunix score --top-k` wrote.
    `http://HOST:8000/v1`: a server that repeats prompts with their log-probs (`echo`), as vLLM and `tunix serve` do,
    for algorithms that ask for sampled tokens alone."""
    family: Family | None = None
    """Without a path, the family of a random teacher, which has nothing to teach, but everything runs: `--tiny` sets
    it."""
    sizes: dict[str, int] = Field(default_factory=dict)
    """Sizes of a random teacher, as in `model.sizes`."""
    dtype: DType = "bfloat16"
    """Dtype of the weights and of the computation; logits are always float32."""
    chat_template: str | None = None
    """The chat template of what the teacher reads: `student` for the student's, or as in `data.chat_template`. Null:
    that of its folder. Completions are the same tokens for both, or the row is dropped."""
    align: Literal["tokens", "text"] = "tokens"
    """What is compared of a sampled completion: its tokens, with a teacher of the student's vocabulary; or `text`, with
    one of another. The completion is cut where both vocabularies begin a token, and each token of a span has the gap of
    the whole span: a span is one action, which is an approximation where it has several tokens."""
    prompt: str | None = None
    """What the teacher is asked in place of the prompt, or of its last user's message, with columns of the row in
    braces: `"{prompt} A hint: {hint}"`. `{prompt}` is that message, `{completion}` the row's answer."""
    max_length: Positive | None = None
    """Most tokens of a prompt and its completion as the teacher reads them, where these are not the student's. Null:
    `data.max_length`, and twice that with `prompt`."""
    served: str | None = None
    """Name of the model on a server; null: the only one that it lists."""
    key_variable: str | None = None
    """Environment variable that holds a server's API key; null: none is sent."""
    mesh: TeacherMesh | None = None
    """Devices for the teacher alone, the last ones; `mesh` then has the others. Null: it shares the student's."""

    @property
    def is_policy(self) -> bool:
        """Whether the model that trains is its own teacher."""
        return self.path == POLICY

    @property
    def is_stored(self) -> bool:
        """Whether the rows have what it says."""
        return self.path == STORED

    @property
    def is_served(self) -> bool:
        """Whether a server has it."""
        return self.path is not None and self.path.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def _source(self) -> "OneTeacher":
        if isinstance(self, TeacherConfig) and self.by_name:  # no model, but a list of several
            return self
        if self.path is None and self.family is None:
            raise ValueError("path is missing: a hub id, a folder, or the folder of a run")
        for key in ("family", "sizes"):
            if self.path is not None and getattr(self, key):
                raise ValueError(f"{key} is that of a random teacher, and path is {self.path!r}: leave one of them out")
        if self.is_served and (self.mesh or self.dtype != "bfloat16"):
            raise ValueError("mesh and dtype are the server's own: leave them out")
        if idle := [key for key in ("served", "key_variable") if getattr(self, key) and not self.is_served]:
            raise ValueError(f"{idle[0]} changes nothing without a server in path: leave it out")
        if self.is_policy and (self.mesh or self.chat_template or self.dtype != "bfloat16"):
            raise ValueError("mesh, dtype and chat_template are the student's with path: policy: leave them out")
        if self.is_stored and (self.mesh or self.chat_template or self.dtype != "bfloat16" or self.prompt):
            raise ValueError("mesh, dtype, chat_template and prompt change nothing that is stored: leave them out")
        if self.align == "text" and (self.path is None or self.is_policy or self.is_served or self.is_stored):
            raise ValueError("align: text is for a teacher with a tokenizer, loaded here from a folder: leave it out")
        if self.is_policy and self.prompt is None:
            raise ValueError("path: policy has nothing to teach itself without more in its prompt: set teacher.prompt")
        if self.prompt is not None and "{prompt}" not in self.prompt:
            raise ValueError("prompt leaves the question out: write {prompt} where it is to stand")
        # As the student's tokens, which a random teacher reads too: it has no chat template of its own.
        alike = self.path is None or self.is_served or self.is_stored
        same_format = self.chat_template == "student" or (alike and self.chat_template is None)
        if self.max_length and self.prompt is None and same_format and self.align == "tokens":
            raise ValueError(
                f"max_length is {self.max_length}, and the teacher reads what the student does: leave it out"
            )
        return self

    gone: ClassVar[Mapping[str, str]] = {"init": "a teacher without a path is random, of the family that is named"}


class NamedTeacher(OneTeacher):
    """One of several teachers."""

    weight: NonNegative = 1.0
    """Its share of the loss, relative to the others'; without `teacher.column`."""


class TeacherConfig(OneTeacher):
    """The model that the student learns from, or several."""

    by_name: dict[str, NamedTeacher] = Field(default_factory=dict)
    """Several teachers, in place of `path` and all other keys, such as `{math: {path: ...}, code: {path: ...}}`. Their
    divergences are added up, by their weights as shares of the sum; with `column` a row follows one of them."""
    column: str | None = None
    """Column of a row with the name of the teacher that it follows (MOPD, https://arxiv.org/abs/2606.30406)."""

    @property
    def each(self) -> Mapping[str, OneTeacher]:
        """The teachers, by the key of the recipe that each is under."""
        return {f"teacher.by_name.{name}": x for name, x in self.by_name.items()} or {"teacher": self}

    @property
    def is_served(self) -> bool:
        """Whether a server has one of them."""
        return any(x.is_served for x in self.by_name.values()) or super().is_served

    @property
    def tells_tokens(self) -> str | None:
        """Why one of them tells log-probs of what was sampled and nothing else, in words; None where all tell more."""
        by_text = any(x.align == "text" for x in self.each.values())
        return "on a server" if self.is_served else "with another vocabulary" if by_text else None

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Each teacher's share of the loss, e.g. `(0.25, 0.75)`; None where a row follows one of them."""
        weights = [x.weight for x in self.by_name.values()] or [1.0]
        return None if self.column else tuple(weight / sum(weights) for weight in weights)

    @model_validator(mode="after")
    def _of_several(self) -> "TeacherConfig":
        if not self.by_name:
            if self.column:
                raise ValueError("column chooses among several teachers: name them in by_name, or leave it out")
            return self
        fields = OneTeacher.model_fields
        if wrong := [
            key for key, field in fields.items() if getattr(self, key) != field.get_default(call_default_factory=True)
        ]:
            raise ValueError(f"{wrong[0]}: of several teachers each has its own: write it below its name in by_name")
        weighted = [name for name, x in self.by_name.items() if "weight" in x.model_fields_set]
        if self.column and any(self.by_name[name].weight != 1 for name in weighted):
            raise ValueError(
                f"by_name.{weighted[0]}.weight: changes nothing with column, by which a row follows one teacher alone: "
                "leave it out (rows have a column `weight` of their own)"
            )
        if not any(x.weight for x in self.by_name.values()):
            raise ValueError("by_name: the weights of all teachers are 0, so that nobody is followed: raise one")
        if stored := [name for name, x in self.by_name.items() if x.is_stored]:
            raise ValueError(f"by_name.{stored[0]}.path: stored log-probs are followed alone: write it in teacher.path")
        if apart := [name for name, x in self.by_name.items() if x.mesh]:
            raise ValueError(
                f"by_name.{apart[0]}.mesh: several teachers share the student's devices: leave it out, or have a "
                "server hold that one"
            )
        return self
