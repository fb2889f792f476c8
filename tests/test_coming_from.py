"""docs/coming_from.md line by line: each line's settings give the number that the other library's default gives.

The expected numbers follow the published code of TRL 1.16.0, verl 0.9.1 and NeMo-RL, worked by hand. Every line of the
page has a check here, by the page's heading and a word of its left column; a line without a check, or a check without
a line, fails.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from tests.algorithms.grpo.test_grpo_loss import SAMPLED, A, B
from tests.policy_batches import Taken, batch_of, inputs_of, reduced
from tests.preference_batches import Side
from tests.preference_batches import batch_of as pairs_of
from tests.preference_batches import inputs_of as pair_inputs
from tunix.algorithms.advantages import group_advantages, whitened
from tunix.algorithms.dpo.algorithm import DPO
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.ppo.algorithm import PPO
from tunix.algorithms.ppo.config import PPOConfig
from tunix.algorithms.ppo.loss import gae
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.lora.adapt import START_OF_A
from tunix.lora.config import AdapterConfig
from tunix.trainer.config import OptimizerConfig
from tunix.trainer.optimizer import build_schedule
from tunix.types import Sampling

PAGE = Path(__file__).parents[1] / "docs/coming_from.md"
ALGORITHMS = {"grpo": GRPOConfig, "ppo": PPOConfig, "dpo": DPOConfig, "sft": SFTConfig}
Sections = dict[str, dict[str, Any]]


def page() -> Iterator[tuple[str, str, str]]:
    """(heading, left column, settings as written) of every line."""
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|") and not line.startswith(("| theirs", "|---")):
            _, theirs, ours, _, _ = line.split("|")
            yield heading, theirs.strip(), ours.strip().strip("`")


LINES = list(page())


def run(heading: str) -> Sections:
    """The settings of a table's lines as one recipe; no key may be told twice with two values."""
    sections: Sections = {"algorithm": {}, "optimizer": {}, "adapter": {}}
    for _, _, ours in (line for line in LINES if line[0] == heading):
        for section, keys in yaml.safe_load(ours).items():
            assert all(sections[section].setdefault(key, value) == value for key, value in keys.items())
    return sections


def algorithm(sections: Sections, **changes: Any) -> Any:
    """The section `algorithm`, checked."""
    return ALGORITHMS[sections["algorithm"].get("name", "grpo")](**{**sections["algorithm"], **changes})


def optimizer(sections: Sections) -> OptimizerConfig:
    return OptimizerConfig(**sections["optimizer"])


def loss(sections: Sections, taken: list[Taken] | None = None, **changes: Any) -> dict[str, float]:
    """Of two completions: ratios 1.5 and .5 with A = 1, and 1.1 with A = -2; d to the reference log 2, 0, -log 2."""
    config = algorithm(sections, **changes)
    if config.old_logprobs == "sampler":  # then nothing else was sampled from
        own = [{name: x for name, x in one.more.items() if name != "sampler_logprobs"} for one in taken or BOTH]
        taken = [replace(one, more=more) for one, more in zip(taken or BOTH, own, strict=True)]
    return reduced(GRPO(config, Sampling(max_tokens=10)).gated_loss, inputs_of(batch_of(taken or BOTH)))


BOTH = [Taken(x.current, x.old, x.advantage, {**x.more, **y.more}) for x, y in zip((A, B), SAMPLED, strict=True)]
"""With a sampler of its own: the policy over it is .6, 1.5 and 6.6."""
REWARDS = np.array([[1.0, 0.0, 0.0, 3.0]])
K3 = (log(2) - 0.5, 0.0, 1 - log(2))
"""exp(-d) - 1 + d at log 2, 0 and -log 2."""


def close(found: Any, expected: Any, rel: float = 1e-5) -> None:
    assert found == pytest.approx(expected, rel=rel)


def advantage(eps: float) -> Callable[[Sections], None]:
    """Mean 1, squares 0 1 1 4: torch.std is sqrt(6 / 3)."""

    def check(s: Sections) -> None:
        config = algorithm(s)
        found = group_advantages(REWARDS, config.advantage, config.std_eps, config.std)
        close(found[0, 3], 2 / (sqrt(2) + eps), 1e-9)
        # Equal rewards but for a hair show the epsilon: +-h over (sqrt(2) h + eps).
        near = group_advantages(np.array([[0.0, 2e-6]]), config.advantage, config.std_eps, config.std)
        close(near[0, 1], 1e-6 / (sqrt(2) * 1e-6 + eps), 1e-6)

    return check


def advantage_beside_others(s: Sections) -> None:
    """Rewards 1 0 0 3. Beside 3 stand 1 0 0: mean 1/3, squares' sum 2/3, torch.std sqrt(1/3). In a group with one
    success its others are all equal, so that it is 1 and not a million."""
    config = algorithm(s)
    found = group_advantages(REWARDS, config.advantage, config.std_eps, config.std)
    close(found[0, 3], (8 / 3) / (sqrt(1 / 3) + 1e-6), 1e-9)
    close(found[0, 0], 0.0, 1e-9)
    once = group_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]), config.advantage, config.std_eps, config.std)
    close(once[0, 0], 1.0, 1e-9)
    close(once[0, 1], -(1 / 3) / (sqrt(1 / 3) + 1e-6), 1e-9)


def delta(s: Sections) -> None:
    """TRL: -min(min(r, delta) A, clip(r) A). Ours bounds only what has A < 0, and from 1 + epsilon on that is the same:
    for A = -2 and r of 9, 1.15 and .5 with delta 1.2 and 3: 2.4, 2.3, 1.6 and 6, 2.3, 1.6."""
    clips(None)(s)
    for bound, expected in ((1.2, (2.4, 2.3, 1.6)), (3.0, (6.0, 2.3, 1.6))):
        for r, value in zip((9.0, 1.15, 0.5), expected, strict=True):
            assert -min(min(r, bound) * -2, min(max(r, 0.8), 1.2) * -2) == value
            close(at_ratio(s, r, -2.0, bound), value)
        for r in (9.0, 1.15, 0.5):
            close(at_ratio(s, r, 1.0, bound), -min(min(r, bound), min(max(r, 0.8), 1.2)))
    # Below it theirs caps the unclipped ratio alone: with 1.1, a ratio of 1.15 has 2.3 for A = -2 (ours 2.2), and -1.1
    # for A = 1 (ours -1.15).
    assert -min(min(1.15, 1.1) * -2, 1.15 * -2) == 2.3
    assert -min(min(1.15, 1.1), 1.15) == -1.1
    close(at_ratio(s, 1.15, -2.0, 1.1), 2.2)
    close(at_ratio(s, 1.15, 1.0, 1.1), -1.15)


def at_ratio(s: Sections, ratio: float, advantage: float, dual: float) -> float:
    """The loss of a single token with a dual clip."""
    sampled = {"reference_logprobs": [-1.0], "sampler_logprobs": [-1.0 - log(ratio)]}
    token = Taken([-1.0], [-1.0 - log(ratio)], [advantage], sampled)
    return loss(s, [token], dual_clip=dual, kl=0.0, **unread(s))["train/loss"]


def weighted_k3(s: Sections) -> None:
    """By each token's ratio with `ratio: sequence` too, where TRL takes sqrt(1.5 x .5) for both of the first's."""
    k3(0.04, (1.5, 0.5, 1.1))(s)
    close(loss(s, ratio="sequence")["loss/kl"], 0.04 * (1.5 * K3[0] + 0.5 * K3[1] + 1.1 * K3[2]) / 3)
    theirs = 0.04 * (sqrt(0.75) * (K3[0] + K3[1]) + 1.1 * K3[2]) / 3
    assert abs(loss(s, ratio="sequence")["loss/kl"] - theirs) > 1e-3


def clips(dual: float | None) -> Callable[[Sections], None]:
    """min(1.5, 1.2), min(.5, .8), and with A = -2 and a ratio of 9: -18, or 3 x -2 with the dual clip."""

    def check(s: Sections) -> None:
        far = Taken(
            [-1.0], [-1.0 - log(9)], [-2.0], {"reference_logprobs": [-1.0], "sampler_logprobs": [-1.0 - log(9)]}
        )
        terms = [1.2, 0.5, -18.0 if dual is None else dual * -2.0]
        close(loss(s, [BOTH[0], far], kl=0.0, **unread(s))["train/loss"], -sum(terms) / 3)

    return check


def unread(s: Sections) -> dict[str, Any]:
    """Settings that mean nothing without a KL term."""
    return dict.fromkeys(("kl_in", "kl_estimator", "kl_output_clamp")) | {"kl_weighted": False}


def clamped(s: Sections) -> None:
    """d = -3: exp(3) - 4 = 16.1 is 10; d = -25 as well, and finite."""
    for d in (-3.0, -25.0):
        one = Taken([-1.0], [-1.0], [0.0], {"reference_logprobs": [-1.0 - d], "sampler_logprobs": [-1.0]})
        close(loss(s, [one])["loss/kl"], 10 * algorithm(s).kl)


def k3(coefficient: float, weights: tuple[float, float, float]) -> Callable[[Sections], None]:
    def check(s: Sections) -> None:
        expected = coefficient * sum(w * k for w, k in zip(weights, K3, strict=True)) / 3
        if not algorithm(s).kl_weighted or weights != (1, 1, 1):
            close(loss(s)["loss/kl"], expected)
        else:
            close(loss(s, kl_weighted=False)["loss/kl"], expected)

    return check


def rate(at: float, end: float) -> Callable[[Sections], None]:
    """The rate of the first update, and of the one halfway through 100."""

    def check(s: Sections) -> None:
        schedule = build_schedule(optimizer(s), 100)
        close(float(schedule(0)), at)
        close(float(schedule(50)), end)

    return check


def warmup(s: Sections) -> None:
    """get_linear_schedule_with_warmup: step / 10 of the rate for steps 0 to 9, then all of it."""
    schedule = build_schedule(OptimizerConfig(learning_rate=1.0, schedule="constant", **s["optimizer"]), 100)
    close([float(schedule(step)) for step in (0, 1, 9, 10, 11)], [0, 0.1, 0.9, 1, 1])


def adam(s: Sections) -> None:
    assert (optimizer(s).b1, optimizer(s).b2, optimizer(s).eps) == (0.9, 0.999, 1e-8)


def decay(weight: float, norm: float | None = 1.0) -> Callable[[Sections], None]:
    def check(s: Sections) -> None:
        assert (optimizer(s).weight_decay, optimizer(s).clip_norm) == (weight, norm)

    return check


def group(size: int) -> Callable[[Sections], None]:
    def check(s: Sections) -> None:
        assert algorithm(s).group_size == size

    return check


def token_mean(s: Sections) -> None:
    """(1.2 + .5 - 2.2) / 3, not a mean of the completions' means."""
    close(loss(s, kl=0.0, **unread(s))["train/loss"], -(1.2 + 0.5 - 2.2) / 3)


def rloo(s: Sections) -> None:
    """R - mean(others) is 2 (R - mean) of two."""
    close(group_advantages(np.array([[1.0, 0.0]]), algorithm(s).advantage)[0].tolist(), [1, -1])
    assert algorithm(s).group_size == 2


def one_action(s: Sections) -> None:
    """exp of the summed log-ratios: .75 and 1.1; a mean over completions."""
    close(loss(s)["train/loss"], -(min(0.75, 0.8) - 2.2) / 2)


def in_reward(coefficient: float) -> Callable[[Sections], None]:
    def check(s: Sections) -> None:
        config = algorithm(s)
        assert (config.kl, config.kl_in, config.kl_estimator) == (coefficient, "reward", "k1")
        assert "loss/kl" not in loss(s)

    return check


def clipped_action(s: Sections) -> None:
    """A ratio of 1.3 x 1.2 = 1.56 counts as 1.2."""
    up = Taken([-1.0, -1.0], [-1 - log(1.3), -1 - log(1.2)], [1.0, 1.0], {"reference_logprobs": [-1.0, -1.0]})
    close(loss(s, [up])["train/loss"], -1.2)


PAIR = [Side([-1.0, -2.0], [-1.5, -2.5]), Side([-1.0], [-0.5])]
"""Log-ratios 1 over two tokens and -.5 over one."""


def preference(s: Sections, sides: list[Side] = PAIR, **changes: Any) -> float:
    return reduced(DPO(algorithm(s, **changes)).loss, pair_inputs(pairs_of(sides)))["train/loss"]


def dpo(s: Sections) -> None:
    """-log sigmoid(.1 x 1.5)."""
    close(preference(s), log(1 + exp(-0.15)))


def dpo_and_sft(s: Sections) -> None:
    """Chosen completions of two tokens and of one: theirs is (1 + 2 + 4) / 3, a mean of means (1.5 + 4) / 2. Log-ratios
    1.5 apart, and 2."""
    ragged = [*PAIR, Side([-4.0], [-5.0]), Side([-3.0, -1.0], [-2.0, -1.0])]
    dpo = (log(1 + exp(-0.15)) + log(1 + exp(-0.2))) / 2
    close(preference(s, ragged), dpo + 0.5 * 7 / 3)
    close(preference(s, ragged, sft_reduction="sequences"), dpo + 0.5 * 5.5 / 2)


def ipo(s: Sections) -> None:
    """Means over tokens, .5 and -.5: (1 - 1 / .2)^2; sums would be (1.5 - 5)^2."""
    close(preference(s), 16.0)


def nll(s: Sections) -> None:
    """-log p of three tokens over three: (log 2 + 1 + 2) / 3."""
    given = inputs_of(batch_of([A, B]))
    close(reduced(SFT(algorithm(s)).loss, given)["train/loss"], (log(2) + 3) / 3)


def low_rank(s: Sections) -> None:
    """PEFT's factor alpha / r is 2."""
    config = AdapterConfig(**s["adapter"])
    assert (config.rank, config.alpha / config.rank, config.dropout) == (16, 2, 0.05)


def low_rank_start(s: Sections) -> None:
    """kaiming_uniform(a=sqrt(5)) of 64 inputs: sqrt(6 / (1 + 5) / 64) = 1 / 8 is the bound."""
    assert AdapterConfig(**s["adapter"]).start == "zero"
    drawn = np.asarray(START_OF_A(jax.random.key(0), (64, 512), np.float32))
    assert 0.124 < np.abs(drawn).max() <= 0.125


def returns(s: Sections) -> None:
    """gamma and lambda 1: what is still to come less the value. Reward 1 at the end, values .3 and .4."""
    config = algorithm(s)
    assert config.name == "ppo"
    found, _ = gae(np.array([0.0, 1.0]), np.array([0.3, 0.4]), np.ones(2, bool), config.gamma, config.lam)
    close(found.tolist(), [0.7, 0.6])


def whitening(s: Sections) -> None:
    """1 and 3: mean 2, unbiased variance 2."""
    config = algorithm(s)
    (found,) = whitened([np.array([1.0, 3.0])], [np.ones(2, bool)], std=config.std)
    close(found.tolist(), [-1 / sqrt(2), 1 / sqrt(2)])


def values(s: Sections) -> None:
    """V 2, old 0, return 1.2: clipped V is .5 and max(.64, .49) = .64, half of it .32."""
    more = {"values": [2.0], "old_values": [0.0], "returns": [1.2]}
    given = inputs_of(batch_of([Taken([-1.0], [-1.0], [0.0], more)]), values=True)
    close(reduced(PPO(algorithm(s)).value_loss, given)["train/loss"], 0.32)
    # V 1, old 0, return 1.2: clipped .5, and max(.04, .49) = .49.
    more = {"values": [1.0], "old_values": [0.0], "returns": [1.2]}
    given = inputs_of(batch_of([Taken([-1.0], [-1.0], [0.0], more)]), values=True)
    close(reduced(PPO(algorithm(s)).value_loss, given)["train/loss"], 0.245)


def critic(s: Sections) -> None:
    assert algorithm(s).critic_learning_rate == 1e-5


def ppo_clips(s: Sections) -> None:
    config = algorithm(s)
    assert (config.clip_low, config.clip_high, config.dual_clip) == (0.2, 0.2, 3.0)


def reinforce(s: Sections) -> None:
    """Of tokens 1, 1 and 3: mean 5/3, squares 4/9 4/9 16/9, unbiased variance 4/3."""
    config = algorithm(s)
    assert (config.advantage, config.token_returns) == ("batch", True)
    found = whitened(
        [np.array([1.0, 1.0]), np.array([3.0])], [np.ones(2, bool), np.ones(1, bool)], config.std_eps, config.std
    )
    close(np.concatenate(found).tolist(), [-(2 / 3) / sqrt(4 / 3)] * 2 + [(4 / 3) / sqrt(4 / 3)])


def recomputed(s: Sections) -> None:
    """The ratio is to the trainer's old log-probs (1.5, .5, 1.1), not to the sampler's (.6, 1.5, 6.6)."""
    close(loss(s, kl=0.0, **unread(s))["policy/ratio"], (1.5 + 0.5 + 1.1) / 3)


CHECKS: dict[str, dict[str, Callable[[Sections], None]]] = {
    "TRL: GRPO": {
        "num_generations": group(8),
        "scale_rewards": advantage(1e-4),
        "loss_type": token_mean,
        "epsilon: 0.2": clips(None),
        "delta": delta,
        "beta: 0.04": weighted_k3,
        "learning_rate": rate(1e-6, 0.5e-6),
        "lr_scheduler_type": rate(1e-6, 0.5e-6),
        "adam_beta1": adam,
        "weight_decay": decay(0.0),
    },
    "TRL: a warm-up": {"warmup_steps": warmup},
    "TRL: RLOO": {
        "num_generations": rloo,
        "one action": one_action,
        "epsilon": clipped_action,
        "beta": in_reward(0.05),
        "learning_rate": rate(1e-6, 0.5e-6),
    },
    "TRL: DPO": {
        "sigmoid": dpo,
        "label_smoothing": dpo,
        "learning_rate": rate(1e-6, 0.5e-6),
    },
    "TRL: DPO with an SFT term": {"loss_weights": dpo_and_sft},
    "TRL: IPO": {"ipo": ipo},
    "TRL: SFT with LoRA": {
        "loss_type": nll,
        "learning_rate": rate(2e-5, 1e-5),
        "lora_r": low_rank,
        "init_lora_weights": low_rank_start,
    },
    "verl: GRPO": {
        "norm_adv": advantage(1e-6),
        "loss_agg_mode": token_mean,
        "clip_ratio_c": clips(3.0),
        "use_kl_loss": k3(0.001, (1, 1, 1)),
        "low_var_kl": clamped,
        "lr: 1e-6": rate(1e-6, 1e-6),
        "weight_decay": decay(0.01),
        "old_log_prob": recomputed,
    },
    "verl: PPO": {
        "gae": returns,
        "masked_whiten": whitening,
        "cliprange_value": values,
        "critic.optim.lr": critic,
        "clip_ratio_c": ppo_clips,
    },
    "verl: REINFORCE++": {"adv_estimator": reinforce, "use_kl_in_reward": in_reward(0.001)},
    "NeMo-RL: GRPO": {
        "num_generations": group(16),
        "normalize_rewards": advantage_beside_others,
        "token_level_loss": token_mean,
        "ratio_clip_min": clips(None),
        "reference_policy_kl_penalty": k3(0.01, (1, 1, 1)),
        "kl_output_clamp_value": clamped,
        "use_on_policy_kl_approximation": k3(0.01, (0.6, 1.5, 6.6)),
        "lr: 5e-6": rate(5e-6, 5e-6),
        "betas": adam,
        "ConstantLR": rate(5e-6, 5e-6),
    },
}


@pytest.mark.parametrize(("heading", "word"), [(h, word) for h, checks in CHECKS.items() for word in checks])
def test_a_line_gives_their_number(heading: str, word: str):
    (line,) = (line for line in LINES if line[0] == heading and word in line[1])
    CHECKS[heading][word](run(heading))
    # Left out, the line's settings are missing from the run, or ours too.
    assert re.match(r"(algorithm|optimizer|adapter): \{.+\}$", line[2])


def test_every_line_of_the_page_is_held():
    assert len(LINES) == sum(map(len, CHECKS.values()))
    for heading, theirs, _ in LINES:
        assert sum(word in theirs for word in CHECKS[heading]) == 1, theirs
