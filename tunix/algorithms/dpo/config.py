"""The `algorithm` section of a recipe for DPO and its relatives. Loads without jax."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, cast, get_args

from pydantic import Field

from tunix.algorithms.config import REFERENCE_PATH_GONE, Above0, NonNegative, Rule, RuledConfig, Settings, Unit
from tunix.config import TINY_GROUP, Positive, RowKind

PairedForm = Literal["sigmoid", "robust", "exo", "ipo", "hinge", "discopop", "nca", "sppo_hard", "apo_zero", "apo_down"]
SortedForm = Literal["aot", "aot_unpaired"]
Form = Literal[PairedForm, SortedForm, "simpo", "orpo", "cpo"]

SORTED = get_args(SortedForm)
"""Forms that compare the sorted values of a whole batch."""
REFERENCED = (*get_args(PairedForm), *SORTED)
"""Forms that compare with a reference; the others have none."""
SMOOTHED = ("sigmoid", "robust", "simpo", "cpo", "exo", *SORTED)
"""Forms with label smoothing."""
DIVERGING = ("sigmoid", "robust", "hinge")
"""Forms that are defined for any divergence from the reference."""


def forms_of(loss: object) -> list[str]:
    """The names of the forms that are added, of `loss` as it is written."""
    return [str(form) for form in loss] if isinstance(loss, Mapping) else [str(loss)]


class DPOConfig(RuledConfig):
    """Pairs of completions, of which one is better; nulls become the defaults of the form."""

    tiny_caps: ClassVar[Mapping[str, int]] = {"group_size": TINY_GROUP}

    name: str = "dpo"
    loss: Form | dict[PairedForm, Above0] = "sigmoid"
    """The form: how the two rewards of a pair are compared. `simpo`, `orpo` and `cpo` need no reference model. Several
    with a reference are added with weights: {sigmoid: 0.8, nca: 0.2} (as MPO, https://arxiv.org/abs/2411.10442)."""
    beta: Annotated[float, Field(gt=0)] | None = None
    """Scale of the rewards: the larger, the closer to the reference. With ipo it is the paper's tau, with orpo its
    lambda, with sppo_hard 1 / eta. Null: 0.1; with simpo 2, with discopop 0.05, with sppo_hard 0.001."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Share of pairs whose label is assumed to be wrong; with exo the rejected completion's share of the target. Null:
    0; with robust 0.1, with exo 0.001."""
    gamma: NonNegative | None = None
    """SimPO's margin, by which the chosen reward should be larger than the rejected one. Null: 1."""
    length_normalized: bool = False
    """Whether log-ratios are divided by the completion's length in tokens; raise beta with it."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The divergence from the reference (f-DPO, Wang et al. 2023, https://arxiv.org/abs/2309.16240)."""
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Parameter of `divergence: alpha`: near 0 it is the reverse KL, near 1 the forward KL. TRL's
    `f_alpha_divergence_coef` is 1 less this. Null: 0.5."""
    ld_alpha: Unit = 1.0
    """Weight of the log-ratios of a completion's tokens after as many as the shorter side of its pair has, so that
    length alone is preferred less (LD-DPO, Liu et al. 2024, https://arxiv.org/abs/2409.06411). 1: they all count."""
    policy_weights: bool = False
    """Whether a pair's loss is multiplied by how likely both sides are as completions of the policy, so that rows that
    it would not write count less (WPO, Zhou et al. 2024, https://arxiv.org/abs/2406.11827). It takes two forward passes
    before each update."""
    sft_weight: NonNegative | None = None
    """Weight of the chosen completion's mean negative log-likelihood. Null: 0; with orpo and cpo 1."""
    sft_reduction: Literal["sequences", "tokens"] = "sequences"
    """What that is a mean over: chosen completions, of each one's token mean, as in RPO; or `tokens`, the chosen tokens
    of the batch, as TRL's `sft` term."""
    reference: Literal["snapshot", "precompute"] = "snapshot"
    """`snapshot`: the frozen base under an adapter, else a frozen copy of the first weights, computed at every step.
    `precompute`: its log-probs of all rows are computed before the first step, and stored alongside them."""
    online: bool = False
    """Whether the policy samples the completions; those of highest and lowest reward are a prompt's pair."""
    group_size: Positive = 2
    """Completions of each prompt, with `online: true`."""

    gone: ClassVar[Mapping[str, str]] = {
        "tau": "discopop's temperature is the paper's, 0.05",
        "offset": "a column `margin` is for reward models; subtract it in the `loss` of a subclass",
        "reference_path": REFERENCE_PATH_GONE,
        "loss: bco": "take nca or apo_zero, which judge each completion by itself too; of rows with labels kto learns",
        "reward_shift": "it was of loss: bco, in whose place are nca and apo_zero",
    }
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("label_smoothing",),
            lambda s: any(form in SMOOTHED for form in forms_of(s["loss"])),
            f"with this loss: it is read by {', '.join(SMOOTHED)}",
        ),
        Rule(("gamma",), lambda s: s["loss"] == "simpo", "without loss: simpo"),
        Rule(
            ("divergence",),
            lambda s: all(form in DIVERGING for form in forms_of(s["loss"])),
            f"with this loss: it is read by {', '.join(DIVERGING)}",
        ),
        Rule(("alpha",), lambda s: s["divergence"] == "alpha", "without divergence: alpha"),
        Rule(
            ("length_normalized",),
            lambda s: all(form in REFERENCED for form in forms_of(s["loss"])) and s["divergence"] == "reverse_kl",
            "here: simpo and orpo are normalised always, cpo never, and only the reverse KL can be",
        ),
        Rule(
            ("ld_alpha",),
            lambda s: all(form in get_args(PairedForm) for form in forms_of(s["loss"])) and not s["length_normalized"],
            "here: it weights sums of log-ratios, which losses with a reference have, but aot and aot_unpaired",
        ),
        Rule(
            ("policy_weights",),
            lambda s: s["loss"] not in SORTED,
            "with aot and aot_unpaired, which compare sides of different pairs",
        ),
        Rule(
            ("reference",),
            lambda s: all(form in REFERENCED for form in forms_of(s["loss"])) and not s["online"],
            "here: it is read by the losses with a reference, of given pairs",
        ),
        Rule(("sft_reduction",), lambda s: bool(s["sft_weight"]), "while sft_weight is 0: set sft_weight"),
        Rule(("group_size",), lambda s: bool(s["online"]), "without online: true"),
    )

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        forms = forms_of(settings["loss"])
        form = forms[0] if len(forms) == 1 else "several"
        smoothing = {"robust": 0.1, "exo": 0.001}
        return {
            "beta": {"simpo": 2.0, "discopop": 0.05, "sppo_hard": 0.001}.get(form, 0.1),
            "label_smoothing": next((smoothing[x] for x in forms if x in smoothing), 0.0),
            "gamma": 1.0,
            "alpha": 0.5,
            "sft_weight": 1.0 if form in ("orpo", "cpo") else 0.0,
        }

    def conflicts(self) -> list[str]:
        wrong = []
        if not self.forms:
            wrong.append("loss: an empty sum; name a form")
        if "robust" in self.forms and not self.label_smoothing:
            wrong.append("label_smoothing: robust without a share of wrong labels is sigmoid; set it, or loss: sigmoid")
        if "exo" in self.forms and not self.label_smoothing:
            wrong.append("label_smoothing: exo takes the logarithm of the rejected completion's share; set it above 0")
        if self.online and self.group_size < 2:
            wrong.append(f"group_size: {self.group_size} completion of a prompt makes no pair; take 2 or more")
        return wrong

    @property
    def forms(self) -> Mapping[Form, float]:
        """The forms that are added, with their weights."""
        return {self.loss: 1.0} if isinstance(self.loss, str) else cast(Mapping[Form, float], self.loss)

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return any(form in REFERENCED for form in self.forms)

    @property
    def sees_pictures(self) -> bool:
        """Where all log-probs are those of the step itself, on given pairs."""
        return not (self.online or self.sorts or self.policy_weights or self.reference == "precompute")

    @property
    def sorts(self) -> bool:
        """Whether the pairs of a batch are sorted against each other."""
        return self.loss in SORTED

    @property
    def reads(self) -> RowKind:
        """Pairs of completions; or prompts, where the policy samples the completions."""
        return RowKind.PROMPT if self.online else RowKind.PAIRS

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the policy's completions are ranked by rewards."""
        return self.online

    @property
    def samples_per_prompt(self) -> int:
        """Completions of each prompt that are ranked: the group size."""
        return self.group_size

    def sequences_per_update(self, batch_size: int) -> int:
        """Sequences of one update: two for each pair."""
        return 2 * batch_size

    def complaints(self, batch_size: int) -> Iterator[str]:
        """A message where a form that sorts pairs has a single one."""
        if self.sorts and batch_size < 2:
            yield f"batch_size: {self.loss} sorts the pairs of a batch, and 1 has no other; take 2 or more"
