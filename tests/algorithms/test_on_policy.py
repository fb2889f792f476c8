"""What GRPO and PPO do with a batch of rollouts, between the client and the loss: credit, parts, refills, gates.

The client is a fake of twenty lines that answers from a script and writes down what it is asked. An answer is a text:
its number is its reward, `!` makes the reward fail, `~` was cut off at the limit, `a|b` are two turns. A byte is a
token. Log-probs are -1 everywhere, the reference's -1.5, and the critic values the state before token t at t / 10.
"""

import json
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.algorithms.base import Needs, Update
from tunix.algorithms.episodes import observed
from tunix.algorithms.grpo import algorithm as grpo_module
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.grpo.config import PRESETS
from tunix.algorithms.on_policy import PolicyGradient
from tunix.algorithms.ppo.algorithm import PPO
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.sources import Rows
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import Prompt
from tunix.errors import Doubtful, UserError
from tunix.protocols import Client
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import Clock, Scored
from tunix.types import (
    Batch,
    Completion,
    Loss,
    LossInputs,
    LossOutputs,
    Metrics,
    OnDone,
    Reply,
    Request,
    Sampling,
    Sequence,
)

TOKENIZER = bytes_tokenizer()
BARGAINS = "tests.algorithms.bargains"
SAMPLING = Sampling(max_tokens=12)
PROMPT = 3
"""Tokens of a prompt: BOS and two bytes."""
FINE = {"train/loss": 0.5, "mismatch/max": 0.0, "mismatch/max/at": 0.0, "kl/reference": 0.0}


class Fake(Client):
    """Answers from a script; remembers what it was asked."""

    def __init__(self, *answers: str, metrics: Metrics = FINE):
        self.answers, self.metrics = iter(answers), metrics
        self.calls: list[str] = []
        self.steps: list[tuple[str, Batch]] = []
        self.seeds: list[int] = []

    def publish(self) -> int:
        self.calls.append("publish")
        return 1

    def run(
        self, requests: List[Request], reply: Reply | None = None, on_done: OnDone | None = None
    ) -> list[Completion]:
        self.calls.append(f"sample {len(requests)}")
        self.seeds.append(requests[0].seed)
        return [completion(next(self.answers), i, reply) for i in range(len(requests))]

    def logprobs(
        self,
        sequences: List[Sequence],
        of: Literal["policy", "reference"] = "policy",
        temperature: float = 1.0,
        size: int | None = None,
    ) -> list[np.ndarray]:
        self.calls.append(f"logprobs of {of}")
        return [np.full(len(x.tokens), -1.0 if of == "policy" else -1.5, np.float32) for x in sequences]

    def values(self, sequences: List[Sequence], size: int | None = None) -> list[np.ndarray]:
        self.calls.append("values")
        return [np.arange(len(x.tokens), dtype=np.float32) / 10 for x in sequences]

    def step(self, batch: Batch, loss: Loss, of: Literal["policy", "critic"] = "policy") -> Metrics:
        self.calls.append(f"step {of}")
        self.steps.append((of, batch))
        return self.metrics if of == "policy" else {"train/loss": 2.0, "value/error": 1.0}


def completion(answer: str, request: int, reply: Reply | None) -> Completion:
    """The answer as a sampler hands it over."""
    tokens, turns, written = [], [], answer.rstrip("~").split("|")
    for turn in written:
        drawn = TOKENIZER.encode(turn)
        turns.append((len(tokens), len(tokens) + len(drawn)))
        tokens += drawn
        so_far = _completion(tokens, turns, "stop")
        observed = reply(request, so_far) if reply and not answer.endswith("~") else None
        tokens += [] if observed is None else observed.tolist()
    return _completion(tokens, turns, "length" if answer.endswith("~") else "stop")


def _completion(tokens: list[int], turns: list[tuple[int, int]], finish: Literal["stop", "length"]) -> Completion:
    logprobs = np.zeros(len(tokens), np.float32)
    for start, end in turns:
        logprobs[start:end] = -1.0
    return Completion(
        np.array(tokens, np.int32), logprobs, finish, np.ones(len(tokens), np.int32), SAMPLING, tuple(turns)
    )


def scripted() -> Callable[[str], float]:
    """The reward of the script; made here, so that it runs in this process."""

    def worth(completion: str) -> float:
        if completion.endswith("!"):
            raise ValueError("as the script says")
        return float(completion.strip("."))

    return worth


@contextmanager
def rollouts(
    prompts: int = 2, environment: str | None = None, scored: bool = True, **changes: Any
) -> Iterator[RolloutStep]:
    """One step's prompts out of twelve."""
    rows = Rows("rows", [{"prompt": f"{i:02}"} for i in range(12)])
    examples = Examples(rows, TOKENIZER, DataConfig(train="rows", max_length=32), RowKind.PROMPT)
    stream = Prompts(examples, seed=0, epochs=1)
    scorer = Scorer([scripted()]) if scored else None
    play = Player(EnvironmentConfig(name=environment), TOKENIZER) if environment else None
    like = RolloutStep(
        collector=Collector(TOKENIZER, SAMPLING, scorer, play),
        stream=stream,
        size=prompts,
        seed=0,
        packed=partial(pack, max_length=32),
        tolerance=1e-3,
    )
    try:
        yield replace(next(RolloutStream(like)), **changes)
    finally:
        stream.close()
        like.collector.close()


def grpo(**settings: Any) -> GRPO:
    return GRPO(GRPO.Config(**{"group_size": 2, "advantage": "mean", **settings}), SAMPLING)


class Plain(PPO):
    """Without whitening, so that numbers by hand stay short."""

    def advantages(self, estimates: list[np.ndarray], counted: list[np.ndarray]) -> list[np.ndarray]:
        return estimates


def ppo(kind: type[PPO] = Plain, **settings: Any) -> PPO:
    return kind(PPO.Config(**settings), SAMPLING)


def updated(algorithm: PolicyGradient, client: Fake, **step: Any) -> Update:
    with rollouts(**step) as data:
        return algorithm.update(client, data)


def trained(batch: Batch, name: str) -> list[list[float]]:
    """The values of each sequence's trained tokens, in the order of the sequences."""
    found: list[list[float]] = [[] for _ in range(len(batch.weights))]
    for row, column in np.argwhere(np.asarray(batch.loss_mask)):
        values = np.asarray(batch.per_token[name])
        found[int(np.asarray(batch.sequence_ids)[row, column])].append(float(values[row, column]))
    return found


# --- What is asked of the client ------------------------------------------------------------------------------------


def test_a_step_publishes_samples_and_updates_and_asks_nothing_more():
    client = Fake("1", "0", "1", "1")
    update = updated(grpo(), client)
    assert client.calls == ["publish", "sample 4", "step policy"]
    assert update.metrics["reward/mean"] == 0.75
    assert update.metrics["reward/std"] == pytest.approx(np.sqrt(3) / 4)
    assert update.metrics["reward/signal"] == 0.5
    assert update.metrics["reward/failed"] == 0
    assert update.metrics["rollout/length"] == 1
    assert update.metrics["policy/entropy"] == 1  # -mean of the sampler's log-probs
    assert grpo().needs.reference is None
    assert update.notes == ()


@pytest.mark.parametrize(
    ("algorithm", "needs"),
    [
        (grpo(), Needs()),
        (grpo(entropy_bonus=0.1), Needs(entropy=True)),
        (grpo(kl=0.1), Needs(reference="update")),
        (grpo(kl=0.1, epochs=2), Needs(reference="step", measured=("reference_logprobs",))),
        (ppo(kl=0.1), Needs(reference="step", values="own", measured=("reference_logprobs", "values"))),
        (ppo(critic="shared"), Needs(values="shared", measured=("values",))),
    ],
)
def test_what_an_algorithm_asks_for(algorithm: PolicyGradient, needs: Needs):
    assert algorithm.needs == needs


def test_a_loss_of_ones_own_may_read_the_entropy_and_recomputed_log_probs_want_fresh_completions():
    class Own(GRPO):
        def loss(self, inputs: LossInputs) -> LossOutputs:
            return super().loss(inputs)

    assert Own(GRPO.Config(), SAMPLING).needs.entropy
    assert "leave old_logprobs out" in (grpo(old_logprobs="recompute").needs.fresh or "")
    assert grpo(old_logprobs="recompute", correction="mask").needs.fresh is None


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"kl": 0.1}, []),  # the update asks the reference itself
        ({"kl": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, ["logprobs of reference"]),
        ({"old_logprobs": "recompute"}, []),  # one update starts from them: the loss takes its own
        ({"old_logprobs": "recompute", "updates": 2}, ["logprobs of policy"]),
        ({"old_logprobs": "recompute", "epochs": 2, "kl": 0.1}, ["logprobs of policy", "logprobs of reference"]),
    ],
)
def test_forward_passes_are_those_that_the_settings_need(settings: dict[str, Any], asked: list[str]):
    client = Fake("1", "0", "1", "1")
    updated(grpo(**settings), client)
    assert [call for call in client.calls if call.startswith("logprobs")] == asked
    named = client.steps[0][1].per_token
    old = trained(client.steps[0][1], "old_logprobs") if "old_logprobs" in named else None
    assert (old is None) == (settings.get("old_logprobs") == "recompute" and "logprobs of policy" not in asked)
    assert ("sampler_logprobs" in named) == ("old_logprobs" in settings)


class Counting(Fake):
    """Notes how many sequences it is asked about."""

    def logprobs(
        self,
        sequences: List[Sequence],
        of: Literal["policy", "reference"] = "policy",
        temperature: float = 1.0,
        size: int | None = None,
    ) -> list[np.ndarray]:
        self.calls.append(f"{len(sequences)} of {size}")
        return [np.full(len(x.tokens), -1.0, np.float32) for x in sequences]


def test_of_groups_without_signal_nothing_is_measured():
    """Of two groups the first is thrown away: its two completions are asked about neither before nor after."""
    client = Counting("1", "1", "0", "2")
    settings = {"dynamic_sampling": True, "old_logprobs": "recompute", "updates": 2}
    with rollouts() as data:
        data.more = lambda number: []
        grpo(**settings).update(client, data)
    assert client.calls == ["publish", "sample 4", "2 of 4", "step policy"]


def test_parts_and_epochs():
    """Five prompts in two parts are 3 and 2; both come again in the second epoch, as the same batches."""
    client = Fake(*"0123456789")
    update = updated(grpo(updates=2, epochs=2), client, prompts=5)
    seen = [[float(x) for x in trained(batch, "advantages")[0]] for _, batch in client.steps]
    assert len(client.steps) == len(update.batches) == 4
    assert [int((batch.weights > 0).sum()) for _, batch in client.steps] == [6, 4, 6, 4]
    assert {len(batch.weights) for _, batch in client.steps} == {6}  # one shape
    assert seen[:2] == seen[2:]
    for first, again in zip(client.steps[:2], client.steps[2:], strict=True):
        np.testing.assert_array_equal(first[1].tokens, again[1].tokens)
    # No more parts than prompts.
    client = Fake(*"0123")
    updated(grpo(updates=4), client, prompts=2, size=4)
    assert len(client.steps) == 2


def test_answers_that_share_a_row_are_credited_as_apart():
    """Three tokens of a prompt, of which the last is repeated: two answers of one token are 2 + 2 + 2 tokens, not 8."""
    batches = []
    for together in (1, 2):
        client = Fake("1", "0", "3", "1")
        updated(grpo(), client, packed=partial(pack, max_length=32, together=together))
        batches.append(client.steps[0][1])
    apart, shared = batches
    assert apart.parents is None
    assert shared.parents is not None
    assert [int((batch.segment_ids > 0).sum()) for batch in batches] == [16, 12]
    assert trained(apart, "advantages") == trained(shared, "advantages")
    assert apart.counts == shared.counts


def test_a_part_in_which_all_failed_is_left_out():
    client = Fake("1!", "2!", "3", "5")
    update = updated(grpo(updates=2), client)
    assert len(client.steps) == 1
    assert trained(client.steps[0][1], "advantages") == [[-1.0], [1.0]]
    assert update.metrics["reward/failed"] == 0.5


@pytest.mark.parametrize(("std", "deviation"), [("population", 0.2338889**0.5), ("sample", 0.3508333**0.5)])
def test_every_token_is_credited_with_what_is_still_to_come(std: str, deviation: float):
    """KL .1 x .5 a token: `1` returns .95, the two tokens of `0.` -.1 and -.05. Over three tokens the mean is .8 / 3 =

    .26667, the deviations .68333, -.36667 and -.31667, and the sum of their squares .70167, over 3 or over 2.
    """
    client = Fake("1", "0.")
    updated(grpo(group_size=1, preset="reinforce_pp", advantage="batch", kl=0.1, token_returns=True, std=std), client)
    found = np.concatenate(trained(client.steps[0][1], "advantages"))
    np.testing.assert_allclose(found, np.array([0.68333, -0.36667, -0.31667]) / (deviation + 1e-4), rtol=1e-4)
    # The group's mean first: 1 and 3 are -1 and 1, less .05 each; a failure is left out of everything.
    client = Fake("1", "3", "7!")
    updated(grpo(group_size=3, advantage="mean_batch", token_returns=True), client, prompts=1)
    batch = client.steps[0][1]
    np.testing.assert_allclose(np.concatenate(trained(batch, "advantages")), [-1, 1, 0, 0], atol=1e-3)


def test_a_teacher_joins_the_advantages():
    """Rewards 1 and 3 are -1 and 1. The teacher's log-prob is -1.5 at each token, the sampler's -1: .2 x -.5 each."""
    client = Fake("1", "3.")
    updated(grpo(teacher_kl=0.2), client, prompts=1)
    assert client.calls.count("logprobs of teacher") == 1
    batch = client.steps[0][1]
    np.testing.assert_allclose(np.concatenate(trained(batch, "advantages")), [-1.1, 0.9, 0.9], rtol=1e-6)
    sampled = jnp.where(jnp.asarray(batch.loss_mask), -1.0, 0.0)
    outputs = grpo(teacher_kl=0.2).loss(LossInputs(batch, sampled))
    drift = np.asarray(outputs.metrics["kl/teacher"])[np.asarray(batch.loss_mask)]
    np.testing.assert_allclose(drift, 0.5)


# --- Failures -------------------------------------------------------------------------------------------------------


def test_returns_of_tokens_are_discounted():
    """Rewards 1 and 2 at the last of 1 and 3 tokens, gamma 1/2, KL -.1 x .5 at each: returns .95; and from the last one
    1.95, .925 and .4125. Their mean is 1.059375, and the squares of the distances sum to 1.24168."""
    client = Fake("1", "2..")
    settings = {"group_size": 1, "advantage": "batch", "kl": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    updated(grpo(**settings, token_returns=True, gamma=0.5, std_eps=1e-9), client)
    (first, second) = trained(client.steps[0][1], "advantages")
    scale = (1.24168 / 4) ** 0.5
    expected = [(x - 1.059375) / scale for x in (0.95, 0.4125, 0.925, 1.95)]
    np.testing.assert_allclose([*first, *second], expected, rtol=1e-5)


def test_a_failure_has_weight_0_and_no_influence():
    """Rewards 1, 2 and a failure: the mean is 1.5, whatever the third would have been."""
    client = Fake("1", "2", "99!")
    update = updated(grpo(group_size=3), client, prompts=1)
    (_, batch) = client.steps[0]
    assert trained(batch, "advantages") == [[-0.5], [0.5], [0.0, 0.0, 0.0]]
    assert batch.weights.tolist() == [1.0, 1.0, 0.0]
    assert batch.counts == {"tokens": 2.0, "sequences": 2.0}
    assert update.metrics["reward/mean"] == 1.5
    assert update.metrics["reward/worth"] == 1.5
    assert update.metrics["reward/failed"] == pytest.approx(1 / 3)
    (note,) = update.notes
    assert note.startswith(
        "1 rewards failed and are left out, for instance worth raised ValueError: as the script says ("
    )
    assert note.endswith("test_on_policy.py, line 133)")
    *_, last = update.samples
    assert last["rewards"] == {"worth": None}
    assert last["failures"] == {"worth": note.partition("for instance ")[2]}
    # PPO whitens over what counts: 1 - .3 and 2 - .3 become -1 and 1.
    client = Fake("1", "2", "9!")
    updated(ppo(PPO, group_size=3, lam=1.0), client, prompts=1)
    batch = client.steps[-1][1]
    assert batch.weights.tolist() == [1.0, 1.0, 0.0]
    np.testing.assert_allclose(trained(batch, "advantages")[:2], [[-1.0], [1.0]], atol=1e-6)


class Median(GRPO):
    """The README's own algorithm."""

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        return rewards_PG - np.nanmedian(rewards_PG, axis=1, keepdims=True)


class Careless(GRPO):
    """The same, without a thought of failures."""

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        return rewards_PG - np.median(rewards_PG, axis=1, keepdims=True)


def member(name: str, size: int) -> PolicyGradient:
    """An algorithm that compares groups of a size: a preset, PPO, or a subclass."""
    if name == "ppo":
        return ppo(PPO, group_size=size)
    kind = {"median": Median, "careless": Careless}.get(name, GRPO)
    return kind(GRPO.Config(group_size=size, preset=name if name in PRESETS else None), SAMPLING)


@pytest.mark.parametrize("name", ["plain", *PRESETS, "ppo", "median"])
def test_one_reward_in_five_fails_in_every_preset(name: str):
    """What is trained of two groups of five with a failure each is what is trained of the other four."""
    found = []
    for answers in (
        ("1", "2.", "9!", "4", "7", "3!", "3", "0..", "5", "6"),
        ("1", "2.", "4", "7", "3", "0..", "5", "6"),
    ):
        client = Fake(*answers)
        update = updated(member(name, len(answers) // 2), client)
        assert update.metrics["reward/failed"] == pytest.approx(0.2 if "9!" in answers else 0)
        assert all(np.isfinite(row["advantage"]) for row in update.samples)
        batch = client.steps[-1][1]
        of_counted = [x for x, weight in zip(trained(batch, "advantages"), batch.weights, strict=True) if weight]
        assert len(of_counted) == 8
        found.append((np.concatenate(of_counted), batch.counts))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-6)
    assert np.ptp(found[0][0]) > 1
    assert found[0][1] == found[1][1]


def test_a_failure_that_reaches_the_others_is_refused_before_the_update():
    """numpy's median of a group with a failure is NaN, of all its samples."""
    client = Fake("1", "2", "4", "5", "9!", "3")
    with pytest.raises(UserError, match=r"advantages of sample 0 of prompt 1 \('..'; worth 5\) is nan, .* nanmedian"):
        updated(member("careless", 3), client)
    assert not client.steps


def test_not_one_score_ends_the_step_before_an_update():
    client = Fake("1!", "2!", "3!", "4!")
    with pytest.raises(UserError, match="none of the 4 samples of a step could be scored, the first because worth rai"):
        updated(grpo(), client)
    assert not client.steps


def test_truncated_completions_are_masked_but_still_count_in_the_baseline():
    client = Fake("4", "2~")
    update = updated(grpo(mask_truncated=True), client, prompts=1)
    batch = client.steps[0][1]
    assert batch.weights.tolist() == [1.0, 0.0]
    assert trained(batch, "advantages") == [[1.0], [-1.0]]
    assert update.metrics["rollout/truncated"] == 0.5
    client = Fake("4", "2~")
    updated(grpo(), client, prompts=1)
    assert client.steps[0][1].weights.tolist() == [1.0, 1.0]


def test_overlong_answers_are_worth_less():
    """Limit 12, buffer 4: 10 drawn tokens are 2 over 12 - 4, a penalty of -1/2. The mean of 1 and 1 - 1/2 is 3/4."""
    client = Fake("1", "1.........")
    update = updated(grpo(overlong_buffer=4), client, prompts=1)
    (first, second) = trained(client.steps[0][1], "advantages")
    assert (first, second) == ([0.25], [-0.25] * 10)
    assert update.metrics["reward/mean"] == 1.0  # what the reward said
    assert update.metrics["reward/signal"] == 1.0  # and yet there is something to learn
    assert update.notes == ()


def test_the_shorter_of_right_answers_are_worth_more():
    """1, 3 and 5 tokens: 1 + .2 (1/2, 0 and -1/2), so that the advantages of `mean` are .1, 0 and -.1."""
    client = Fake("1", "1..", "1....")
    update = updated(grpo(length_penalty=0.2, group_size=3), client, prompts=1)
    (first, second, third) = trained(client.steps[0][1], "advantages")
    np.testing.assert_allclose([first[0], *second, *third], [0.1, *[0.0] * 3, *[-0.1] * 5], atol=1e-7)
    assert (update.metrics["reward/mean"], update.metrics["reward/signal"]) == (1.0, 1.0)


def test_the_tokens_of_highest_covariance_are_told_to_the_loss():
    """The sampler's log-probs are all -1, so that every covariance is 0: of equal ones the first; half of four tokens
    are two."""
    client = Fake("1", "2..")
    updated(grpo(covariance=("kl", 0.5), group_size=2), client, prompts=1)
    assert trained(client.steps[0][1], "covariant") == [[1.0], [1.0, 0.0, 0.0]]


class Doubling(Fake):
    """A trainer that finds the sampler's tokens (log-prob -1) less likely where the answer is longer than a token."""

    def logprobs(
        self,
        sequences: List[Sequence],
        of: Literal["policy", "reference"] = "policy",
        temperature: float = 1.0,
        size: int | None = None,
    ) -> list[np.ndarray]:
        self.calls.append(f"logprobs of {of}")
        found = [np.full(len(x.tokens), -1.0, np.float32) for x in sequences]
        for own in found:
            own[PROMPT + 1 :] -= np.log(3.0)
            own[:PROMPT] = 9.0  # the prompt's play no part
        return found


def test_completions_on_which_trainer_and_sampler_disagree_are_left_out():
    """exp|difference| is 1 at the first token, 3 after it: means 1, 2, 7/3. Their rewards count in the baseline."""
    settings = {"group_size": 3, "old_logprobs": "recompute"}
    client = Doubling("1", "02", "003")
    update = updated(grpo(mismatch_limit=2.1, **settings), client, prompts=1)
    batch = client.steps[0][1]
    assert batch.weights.tolist() == [1, 1, 0]
    assert (float(batch.counts["tokens"]), float(batch.counts["sequences"])) == (3, 2)
    assert trained(batch, "advantages") == [[-1], [0, 0], [1, 1, 1]]
    assert update.metrics["mismatch/dropped"] == pytest.approx(1 / 3)
    assert [call for call in client.calls if call.startswith("logprobs")] == ["logprobs of policy"]
    # What is written of the last one's tokens, for `tunix report`: log 3 is 1.0986.
    assert list(update.samples)[2]["per_token"] == {
        "tokens": TOKENIZER.encode("003"),
        "trained": [1, 1, 1],
        "advantages": [1, 1, 1],
        "logprobs": [-1, -1, -1],
        "mismatch": [0, -1.0986, -1.0986],
    }
    client = Doubling("1", "02", "003")
    assert updated(grpo(mismatch_limit=1.5, **settings), client, prompts=1).metrics["mismatch/dropped"] == 2 / 3
    client = Doubling("10", "02", "003")
    assert updated(grpo(mismatch_limit=1.5, **settings), client, prompts=1).batches == ()  # nothing is left


# --- Signal ---------------------------------------------------------------------------------------------------------


def test_equal_rewards_are_told():
    update = updated(grpo(), Fake("2", "2", "1", "1"))
    assert update.metrics["reward/signal"] == 0
    assert update.notes[0].startswith("no signal: the rewards of every group are equal (mean 1.5)")
    update = updated(grpo(), Fake("2", "2", "2", "2"))
    assert update.notes[0].startswith("no signal: all rewards are equal (mean 2)")
    # Where the whole batch is compared, groups need not differ within themselves.
    for algorithm in (grpo(advantage="batch"), ppo(group_size=2)):
        update = updated(algorithm, Fake("2", "2", "1", "1"))
        assert (update.metrics["reward/signal"], update.notes) == (1.0, ())
    update = updated(ppo(), Fake("1", "1"))
    assert update.notes[0].startswith("no signal: all rewards are equal (mean 1)")


def test_dynamic_sampling_replaces_exactly_the_groups_without_signal():
    """Four groups, of which two teach something; one of two refilled ones does, and then the last one."""
    client = Fake("1", "1", "1", "0", "2", "2", "0", "3", *("5", "5", "0", "7"), *("8", "0"))
    update = updated(grpo(dynamic_sampling=True), client, prompts=4)
    assert client.calls[:4] == ["publish", "sample 8", "sample 4", "sample 2"]
    assert len(set(client.seeds)) == 3
    found = trained(client.steps[0][1], "advantages")
    assert found == [[0.5], [-0.5], [-1.5], [1.5], [-3.5], [3.5], [4.0], [-4.0]]
    assert update.metrics["reward/signal"] == 1.0
    assert int(update.metrics["rollout/length"]) == 1


def test_dynamic_sampling_goes_on_with_fewer_groups(monkeypatch: pytest.MonkeyPatch):
    """After the last round that is allowed; or with all of them where not one taught anything."""
    monkeypatch.setattr(grpo_module, "MAX_REFILLS", 1)
    client = Fake("1", "0", "2", "2", "3", "3")
    updated(grpo(dynamic_sampling=True), client)
    assert client.calls == ["publish", "sample 4", "sample 2", "step policy"]
    assert (client.steps[0][1].weights > 0).sum() == 2
    client = Fake("1", "1", "2", "2", "3", "3", "4", "4")
    update = updated(grpo(dynamic_sampling=True), client)
    assert trained(client.steps[0][1], "advantages") == [[0.0]] * 4
    assert "no signal" in update.notes[0]


def test_a_refill_that_fails_is_a_refill_without_signal():
    client = Fake("1", "0", "2", "2", "1!", "1!", "4", "5")
    updated(grpo(dynamic_sampling=True), client)
    assert client.calls[1:4] == ["sample 4", "sample 2", "sample 2"]
    assert trained(client.steps[0][1], "advantages") == [[0.5], [-0.5], [-0.5], [0.5]]


# --- Credit of turns ------------------------------------------------------------------------------------------------


def test_grpo_credits_all_turns_and_none_of_what_was_observed():
    """`1`, `more`, `0` earns 1 + 0 and `4`, `more`, `0` earns 4; the mean is 2.5."""
    client = Fake("1|0", "4|0")
    update = updated(grpo(), client, prompts=1, environment=f"{BARGAINS}:Bargain", scored=False)
    batch = client.steps[0][1]
    assert trained(batch, "advantages") == [[-1.5, -1.5], [1.5, 1.5]]
    assert trained(batch, "old_logprobs") == [[-1.0, -1.0]] * 2
    # BOS and two bytes, the turn, `more`, the turn.
    mask = np.asarray(batch.loss_mask)[np.asarray(batch.sequence_ids) == 1][: PROMPT + 6]
    assert mask.tolist() == [False] * PROMPT + [True] + [False] * 4 + [True]
    assert update.metrics["rollout/turns"] == 2
    assert update.metrics["rollout/length"] == 2
    assert update.metrics["reward/environment"] == 2.5
    # Of ECHO's term: `more` of both, and nothing else.
    client = Fake("1|0", "4|0")
    updated(grpo(observation_weight=0.1), client, prompts=1, environment=f"{BARGAINS}:Bargain", scored=False)
    batch = client.steps[0][1]
    observed = np.asarray(batch.per_token["observed"])[np.asarray(batch.sequence_ids) == 1][: PROMPT + 6]
    assert observed.tolist() == [0.0] * (PROMPT + 1) + [1.0] * 4 + [0.0]
    assert float(batch.counts["observed"]) == 8


def test_prompts_of_further_transcripts_are_no_observations():
    """A turn, an observation, a second transcript of two prompt tokens with a turn, a third that was never answered."""
    made = _completion([0] * 7, [(0, 1), (4, 5)], "stop")
    episode = Scored(Prompt(np.zeros(2, np.int32), "", {}), replace(made, restarts=(2, 6)), "", {"right": 1.0})
    assert observed(episode).tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0]


def test_ppo_credits_a_turn_on_its_last_token():
    """Rewards 2 at the end of the first turn and 0 at that of the second; V is t / 10 and the drawn tokens are

    3, 4 (`2.`), then 9, 10 (`0.`) behind `more`. With gamma 1 and lambda 1 the advantage is what is still to come less
    the value: 2 - .3, 2 - .4, 0 - .9, 0 - 1; with lambda 0 it is r + V' - V, and V' of token 4 is that of token 9.
    """
    for lam, expected in ((1.0, [1.7, 1.6, -0.9, -1.0]), (0.0, [0.1, 2 + 0.9 - 0.4, 0.1, -1.0])):
        client = Fake("2.|0.")
        updated(ppo(lam=lam), client, prompts=1, environment=f"{BARGAINS}:Bargain", scored=False)
        (found,) = trained(client.steps[0][1], "advantages")
        np.testing.assert_allclose(found, expected, atol=1e-6)
        (returns,) = trained(client.steps[0][1], "returns")
        np.testing.assert_allclose(returns, np.add(expected, [0.3, 0.4, 0.9, 1.0]), atol=1e-6)
        np.testing.assert_allclose(trained(client.steps[0][1], "old_values"), [[0.3, 0.4, 0.9, 1.0]], atol=1e-6)


def test_an_environment_that_does_not_judge_leaves_it_to_the_functions():
    """The functions read the whole text, `1more.1more` less its words: here the reward is that of the last turn."""
    client = Fake("1.")
    update = updated(ppo(lam=1.0), client, prompts=1, environment=f"{BARGAINS}:Judged")
    np.testing.assert_allclose(trained(client.steps[0][1], "advantages"), [[0.7, 0.6]], atol=1e-6)
    assert update.metrics["reward/mean"] == 1.0
    assert "reward/environment" not in update.metrics


def test_a_truncated_episode_goes_on_in_the_state_behind_its_last_token():
    """Tokens 3 and 4 are drawn, and the game would have gone on: the state behind them is worth .5."""
    client = Fake("1.~", "0.")
    updated(ppo(lam=0.0), client, environment=f"{BARGAINS}:Bargain", scored=False)
    np.testing.assert_allclose(trained(client.steps[0][1], "advantages"), [[0.1, 1.1], [0.1, -0.4]], atol=1e-6)


def test_a_truncated_turn_that_ends_the_game_has_nothing_to_come():
    """As above, but the second answer's `0` ends the game, although the limit cut it off: 0 - .4 without the .5."""
    client = Fake("1.~", "0.~")
    updated(ppo(lam=0.0), client, environment=f"{BARGAINS}:Bargain", scored=False)
    np.testing.assert_allclose(trained(client.steps[0][1], "advantages"), [[0.1, 1.1], [0.1, -0.4]], atol=1e-6)


def test_a_truncated_answer_that_was_judged_is_worth_what_was_said():
    client = Fake("1.~", "1.")
    updated(ppo(lam=0.0), client)
    np.testing.assert_allclose(trained(client.steps[0][1], "advantages"), [[0.1, 0.6], [0.1, 0.6]], atol=1e-6)


# --- PPO's own ------------------------------------------------------------------------------------------------------


def test_the_critic_warms_up_alone():
    client, algorithm = Fake(*"123456"), ppo(critic_warmup=2)
    with rollouts() as data:
        seen = [algorithm.update(client, data) for _ in range(3)]
    assert [name for name, _ in client.steps] == ["critic", "critic", "critic", "policy"]
    assert "train/loss" not in seen[0].metrics
    assert seen[0].metrics["critic/loss"] == 2.0
    assert (seen[2].metrics["train/loss"], seen[2].metrics["critic/loss"]) == (0.5, 2.0)
    other = ppo(critic_warmup=2)
    other.set_state(algorithm.get_state())
    client = Fake("1", "2")
    updated(other, client)
    assert [name for name, _ in client.steps] == ["critic", "policy"]  # it goes on where it was


def test_a_shared_trunk_has_one_step():
    client = Fake("1", "2")
    algorithm = ppo(critic="shared")
    updated(algorithm, client)
    assert [name for name, _ in client.steps] == ["policy"]
    assert algorithm.objective.values
    assert not ppo().objective.values


def test_each_seat_is_compared_with_the_same_seat():
    # Seat 0 loses the first game and wins the second, seat 1 the other way round: each is 1 from its mean of 0.
    client = Fake("a|w", "a|b|w")
    update = updated(grpo(), client, prompts=1, environment=f"{BARGAINS}:Duel", scored=False)
    assert trained(client.steps[0][1], "advantages") == [[-1, 1], [1, -1, 1]]
    assert update.metrics["reward/seat0"] == update.metrics["reward/seat1"] == update.metrics["reward/mean"] == 0
    assert update.metrics["reward/signal"] == 1


def test_a_seat_that_was_never_asked_is_no_part_of_its_mean():
    client = Fake("w", "a|w")
    update = updated(grpo(), client, prompts=1, environment=f"{BARGAINS}:Duel", scored=False)
    assert trained(client.steps[0][1], "advantages") == [[1], [-1, 0]]
    assert update.metrics["reward/seat0"] == 0
    assert update.metrics["reward/seat1"] == 1  # of the second game alone
    # Its scores differ for seat 0 alone, which is a signal, also for dynamic sampling.
    client = Fake("w", "a|w")
    updated(grpo(dynamic_sampling=True), client, prompts=1, environment=f"{BARGAINS}:Duel", scored=False)
    assert client.calls == ["publish", "sample 2", "step policy"]


def test_ppo_credits_each_seat_with_what_it_earned_later():
    # Values are t / 10, at tokens 3, 8 and 13; with lam 1 an advantage is the seat's outcome less the value.
    client = Fake("a|w", "a|b|w")
    updated(ppo(lam=1.0), client, environment=f"{BARGAINS}:Duel", scored=False)
    first, second = trained(client.steps[0][1], "advantages")
    assert first == pytest.approx([-1 - 0.3, 1 - 0.8])
    assert second == pytest.approx([1 - 0.3, -1 - 0.8, 1 - 1.3])


@pytest.mark.parametrize("make", [grpo, ppo])
def test_the_coefficient_of_the_entropy_follows_the_completions(make: Callable[..., PolicyGradient]):
    """The sampler's log-probs are -1, so that the entropy is 1: below a target of 1.5 the coefficient rises from .02 by
    .005 a step, and counts; above one of .5 it falls, and does not. A run that goes on from its checkpoint is there."""
    for target, counts, after in ((1.5, [0.02, 0.025], 0.03), (0.5, [0.0, 0.0], 0.01)):
        algorithm, client = make(entropy_bonus=0.02, entropy_target=target), Fake(*"1011")
        with rollouts(prompts=1) as data:
            algorithm.update(client, data)
            resumed = make(entropy_bonus=0.02, entropy_target=target)
            resumed.set_state(json.loads(json.dumps(algorithm.get_state())))
            update = resumed.update(client, data)
        batches = [batch for name, batch in client.steps if name == "policy"]
        found = [float(batch.per_sequence["entropy_coefficient"][0]) for batch in batches]
        assert found == pytest.approx(counts)
        assert update.metrics["policy/entropy_coefficient"] == pytest.approx(counts[1])
        assert resumed.get_state()["entropy"] == pytest.approx(after)
        assert algorithm.needs.entropy
    assert "entropy" not in make().get_state()


def test_the_kl_coefficient_follows_what_was_measured():
    """Log-probs -1 against -1.5: k1 is .5 a token, so 2 tokens are 1 nat. A target of .5 is passed by more than 20 %:

    the coefficient grows by 0.1 x 0.2 = 2 % a step. In the reward it takes .1 x .5 from each token.
    """
    algorithm = ppo(kl=0.1, kl_target=0.5, lam=1.0)
    client = Fake("1.", "1.")
    with rollouts(prompts=1) as data:
        first, second = algorithm.update(client, data), algorithm.update(client, data)
    assert first.metrics["kl/completion"] == pytest.approx(1.0)
    assert first.metrics["kl/coefficient"] == pytest.approx(0.1)
    assert second.metrics["kl/coefficient"] == pytest.approx(0.102)
    assert algorithm.get_state()["kl"] == pytest.approx(0.1 * 1.02**2)
    for (_, batch), c in zip(client.steps[1::2], (0.1, 0.102), strict=True):
        expected = [1 - 2 * c / 2 - 0.3, 1 - c / 2 - 0.4]
        np.testing.assert_allclose(trained(batch, "advantages"), [expected], atol=1e-6)
    # In the loss it travels with the sequences, so that nothing is compiled again.
    algorithm = ppo(kl=0.1, kl_target=2.0, kl_in="loss", kl_estimator="k3")
    client = Fake("1.", "1.")
    with rollouts(prompts=1) as data:
        algorithm.update(client, data)
        algorithm.update(client, data)
    told = [float(batch.per_sequence["kl_coefficient"][0]) for name, batch in client.steps if name == "policy"]
    assert told == pytest.approx([0.1, 0.098])  # half of the target: down by as much


# --- Gates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worst", [2e-3, float("nan"), float("inf")])
def test_a_sampler_that_is_another_model_stops_the_run_at_the_token(worst: float):
    """Place 5 of the flattened rows is token 5 of the first sequence: 3 of the prompt, then `12.`."""
    client = Fake("12.", "3", metrics={**FINE, "mismatch/max": worst, "mismatch/max/at": 5.0})
    with pytest.raises(Doubtful, match=r"at token 5 \(id \d+\) of sample 0 .* differ by .*, more than 0.001"):
        updated(grpo(), client, prompts=1)


def test_rounding_passes_the_gate():
    client = Fake("1", "3", metrics={**FINE, "mismatch/max": 9e-4, "mismatch/max/at": 3.0})
    assert updated(grpo(), client, prompts=1).metrics["mismatch/max"] == 9e-4


def test_a_policy_that_does_not_start_as_its_reference_stops_the_run():
    moved: Metrics = {**FINE, "kl/reference": 0.02}
    with pytest.raises(Doubtful, match="before the first update"):
        updated(grpo(kl=0.1), Fake("1", "3", metrics=moved), prompts=1)
    updated(grpo(kl=0.1), Fake("1", "3", metrics=moved), prompts=1, first=False)


# --- Several things at once -----------------------------------------------------------------------------------------


def test_the_draws_follow_from_the_place_in_the_data():
    """The same step draws the same; the next one, and a second collection of one step, draw otherwise."""
    seeds = []
    for _ in range(2):
        client = Fake(*"12345678")
        with rollouts() as data:
            grpo().update(client, data)
            stream = RolloutStream(data)
            grpo().update(client, next(stream))
        seeds.append(client.seeds)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


class Reporting(Fake):
    """Reports each completion as soon as it has ended, the last one first, and waits until its rewards have begun."""

    def __init__(self, *answers: str, begun: threading.Event | None = None):
        super().__init__(*answers)
        self.begun = begun

    def run(self, requests, reply=None, on_done=None) -> list[Completion]:
        completions = super().run(requests, reply)
        assert on_done is not None
        for number in reversed(range(len(completions))):
            assert not on_done(number, completions[number])
            assert self.begun is None or self.begun.wait(60)
        return completions


@pytest.mark.parametrize("make", [grpo, ppo])
def test_rewards_that_began_early_change_nothing(make: Callable[..., PolicyGradient]):
    """A reward of one sample a call, one that awaits several, and one of the whole batch, in which order counts."""

    async def awaited(completion: str) -> float:
        return len(completion) / 3

    def placed(completions: list[str]) -> list[float]:
        return [place + len(completion) for place, completion in enumerate(completions)]

    updates = []
    for kind in (Fake, Reporting):
        client = kind("1", "0", "3.", "9!", "2..", "4")
        with Scorer([scripted(), awaited, placed]) as scorer, rollouts(prompts=3, scored=False) as data:
            data.collector = replace(data.collector, scorer=scorer)
            updates.append((make(group_size=2).update(client, data), client.steps))
    (early, its_steps), (late, their_steps) = updates
    numbers = [{k: v for k, v in x.metrics.items() if not k.startswith("perf/")} for x in (early, late)]
    assert numbers[0] == numbers[1]
    assert (list(early.samples), early.notes) == (list(late.samples), late.notes)
    assert "worth raised ValueError" in early.notes[0]
    for (_, mine), (_, theirs) in zip(its_steps, their_steps, strict=True):
        for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_reward_begins_while_others_sample():
    """The client goes on only when a reward has begun; all of the reward's time is then the sampler's too."""
    begun = threading.Event()

    def noticed(completion: str) -> float:
        begun.set()
        return float(completion)

    with Scorer([noticed]) as scorer, rollouts(scored=False) as data:
        data.collector = replace(data.collector, scorer=scorer)
        metrics = grpo().update(Reporting("1", "0", "3", "4", begun=begun), data).metrics
    assert metrics["reward/mean"] == 2
    assert 0 < metrics["perf/reward_overlap"] <= 1


def test_the_clock_adds_up_what_a_step_did():
    clock = Clock()
    update = updated(grpo(), Fake(*"1234"), clock=clock)
    assert set(clock) == {"rollout", "reward", "update"}
    assert {name for name in update.metrics if name.startswith("perf/")} == {
        "perf/rollout_seconds",
        "perf/reward_seconds",
        "perf/reward_overlap",
        "perf/update_seconds",
    }
    assert update.metrics["perf/reward_overlap"] == 0  # this client reports nothing before the end


# --- GAE's lambda ---------------------------------------------------------------------------------------------------


def test_advantages_and_returns_by_lambda():
    """Values .3 .4, reward 2 on the last: deltas .4 - .3 = .1 and 2 - .4 = 1.6. lam 1/2: A = .1 + .8, 1.6."""
    client = Fake("02", "00")
    updated(ppo(lam=0.5), client)
    batch = next(batch for of, batch in client.steps if of == "policy")
    np.testing.assert_allclose(trained(batch, "advantages")[0], [0.9, 1.6], rtol=1e-6)
    np.testing.assert_allclose(trained(batch, "returns")[0], [1.2, 2.0], rtol=1e-6)
