"""The `algorithm` section of a recipe for DPO and its relatives. Loads without jax."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tunix.algorithms.config import NonNegative, Rule, RuledConfig, Settings
from tunix.config import Positive, Reads

Form = Literal["sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down", "simpo", "orpo", "cpo"]

REFERENCED = ("sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down")
"""Forms that compare with a reference; the others hold none."""
LOGISTIC = ("sigmoid", "robust", "simpo", "cpo")
"""Forms that are a log-likelihood of the label, so that it can be wrong, and have an offset."""
DIVERGING = ("sigmoid", "robust", "hinge")
"""Forms that are derived for any divergence from the reference."""


class DPOConfig(RuledConfig):
    """Pairs of completions, of which one is better; nulls become what is usual for the form."""

    name: str = "dpo"
    loss: Form = "sigmoid"
    """How a pair is compared. `simpo`, `orpo` and `cpo` need no reference model."""
    beta: Annotated[float, Field(gt=0)] | None = None
    """Scale of the rewards: the larger, the nearer to the reference. With ipo it is the paper's tau, with orpo its
    lambda. Null: 0.1; with simpo 2."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Share of pairs that are taken to be labelled the wrong way round. Null: 0; with robust 0.1."""
    gamma: NonNegative | None = None
    """SimPO's margin, by which the chosen reward should be larger. Null: 1."""
    offset: NonNegative = 0.0
    """Times the row's `margin`: the chosen reward should be larger by that (ODPO, Amini et al. 2024,
    https://arxiv.org/abs/2402.10571). 0: a column `margin` is not read."""
    length_normalized: bool = False
    """Log-ratios are divided by the completion's tokens, so that length alone earns nothing; raise beta with it."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """From the reference (f-DPO, Wang et al. 2023, https://arxiv.org/abs/2309.16240)."""
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of `divergence: alpha`: near 0 it is the reverse KL, near 1 the forward KL. Null: 0.5."""
    sft_weight: NonNegative | None = None
    """Weight of the chosen completion's mean negative log-likelihood. Null: 0; with orpo and cpo 1."""
    reference: Literal["snapshot", "precompute"] = "snapshot"
    """`snapshot`: the frozen base under an adapter, else a frozen copy of the first weights, asked at every step.
    `precompute`: asked once for all rows before the first step, and kept beside them."""
    reference_path: str | None = None
    """Another model of the same structure as the reference: a hub id, a folder or a run. Null: the weights that the run
    starts from, or the base under an adapter."""
    online: bool = False
    """The policy writes the completions; the best and the worst of a prompt, by the rewards, are its pair."""
    group_size: Positive = 2
    """Completions of each prompt, with `online: true`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("label_smoothing",),
            lambda s: s["loss"] in LOGISTIC,
            f"with this loss: it is read by {', '.join(LOGISTIC)}",
        ),
        Rule(
            ("offset",),
            lambda s: s["loss"] in LOGISTIC and not s["online"],
            f"here: it is read by {', '.join(LOGISTIC)}, of given pairs",
        ),
        Rule(("gamma",), lambda s: s["loss"] == "simpo", "without loss: simpo"),
        Rule(
            ("divergence",), lambda s: s["loss"] in DIVERGING, f"with this loss: it is read by {', '.join(DIVERGING)}"
        ),
        Rule(("alpha",), lambda s: s["divergence"] == "alpha", "without divergence: alpha"),
        Rule(
            ("length_normalized",),
            lambda s: s["loss"] in REFERENCED and s["divergence"] == "reverse_kl",
            "here: simpo and orpo are normalised always, cpo never, and only the reverse KL can be",
        ),
        Rule(
            ("reference",),
            lambda s: s["loss"] in REFERENCED and not s["online"],
            "here: it is read by the losses with a reference, of given pairs",
        ),
        Rule(
            ("reference_path",),
            lambda s: s["loss"] in REFERENCED,
            f"with this loss: it is read by {', '.join(REFERENCED)}",
        ),
        Rule(("group_size",), lambda s: bool(s["online"]), "without online: true"),
    )

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        """What null stands for, given the other settings."""
        form = settings["loss"]
        return {
            "beta": 2.0 if form == "simpo" else 0.1,
            "label_smoothing": 0.1 if form == "robust" else 0.0,
            "gamma": 1.0,
            "alpha": 0.5,
            "sft_weight": 1.0 if form in ("orpo", "cpo") else 0.0,
        }

    def conflicts(self) -> list[str]:
        """What is wrong between settings that are all read; one sentence each."""
        found = []
        if self.loss == "robust" and not self.label_smoothing:
            found.append("label_smoothing: robust without a share of wrong labels is sigmoid; set it, or loss: sigmoid")
        if self.online and self.group_size < 2:
            found.append(f"group_size: {self.group_size} completion of a prompt makes no pair; take 2 or more")
        return found

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss in REFERENCED

    @property
    def reads(self) -> Reads:
        """Two completions, of which one is better; or a prompt, where the policy writes them."""
        return "prompts" if self.online else "pairs"

    @property
    def learns_from_rewards(self) -> bool:
        """Where the policy's own completions are ranked."""
        return self.online

    def sequences_per_update(self, batch_size: int) -> int:
        """Two for each pair."""
        return 2 * batch_size
