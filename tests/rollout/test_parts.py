"""Log-probs, values and a reward model's scores are computed in parts, while other completions are still sampled."""

from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.marks import slow
from tests.trainers import trainer
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.on_policy import PolicyGradient
from tunix.algorithms.ppo.algorithm import PPO
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.sources import open_rows
from tunix.data.types import Prompt
from tunix.rollout.backlog import Backlog
from tunix.rollout.collect import Collector, Judge, Judged, Parts, RolloutStep, RolloutStream
from tunix.rollout.environments.base import Episode, Episodes
from tunix.rollout.environments.problem import Problem
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import Reward
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import ENVIRONMENT
from tunix.trainer.trainer import Trainer
from tunix.types import Batch, Completion, Sampling, Sequence

PROMPTS, GROUP, LONGEST = 3, 4, 12
SAMPLING = Sampling(max_tokens=LONGEST, stop_ids=(5, 17, 29, 41))


def test_a_part_begins_when_all_of_it_have_ended():
    """Seven places in parts of three: whatever ends when, a part has the same places."""
    parts = Parts(7, 3)
    begun = [parts.add(place, 10 * place) for place in (6, 4, 0, 3, 1, 5, 2)]
    assert begun == [[60], [], [], [], [], [30, 40, 50], [0, 10, 20]]


class Noted(Trainer):
    """Notes what it is asked for, and how many completions had ended then."""

    def __init__(self, client: Trainer):
        super().__init__(client.learner, client.sampler, client.exporter, client.critic)
        self.ended, self.calls = 0, []

    def run(self, requests, reply=None, on_done=None):
        def counted(number: int, completion: Completion) -> bool:
            self.ended += 1
            return on_done(number, completion)

        return super().run(requests, reply, counted)

    def logprobs(self, sequences, of="policy", temperature=1.0, size=None):
        self.calls.append((of, len(sequences), size, self.ended))
        return super().logprobs(sequences, of, temperature, size)

    def values(self, sequences: list[Sequence], size: int | None = None):
        self.calls.append(("values", len(sequences), size, self.ended))
        return super().values(sequences, size)


def ppo() -> PolicyGradient:
    settings = {"kl": 0.1, "kl_in": "reward", "critic": "shared", "old_logprobs": "recompute", "epochs": 2}
    return PPO(PPO.Config(**settings), SAMPLING)


def grpo() -> PolicyGradient:
    return GRPO(GRPO.Config(group_size=GROUP, kl=0.1, epochs=2, old_logprobs="recompute"), SAMPLING)


def stream(together: int, spare: int = 0) -> RolloutStream:
    rows = open_rows([{"prompt_ids": [1, 2, number]} for number in range(3, 20)])
    config = DataConfig(train="rows", max_length=24, completion_length=LONGEST)
    prompts = Prompts(Examples(rows, None, config, RowKind.PROMPT), seed=5, epochs=1)
    scorer = Scorer([Reward("sum", lambda completion, completion_ids: float(sum(completion_ids) % 7))])
    common = {"size": PROMPTS, "seed": 5, "packed": partial(pack, max_length=24), "tolerance": 1e-3}
    backlog = Backlog(prompts, SAMPLING) if spare else None
    like = RolloutStep(
        Collector(None, SAMPLING, scorer), prompts, **common, backlog=backlog, spare=spare,
        measured_together=together,
    )  # fmt: skip
    return RolloutStream(like)


def one_step(make: Callable[[], PolicyGradient], together: int, spare: int = 0) -> tuple[Noted, list[Batch]]:
    algorithm = make()
    client = Noted(trainer(has_scalar_head=algorithm.needs.values == "shared", reference=True))
    with closing(stream(together, spare)) as steps:
        data = next(steps)
        prepared = algorithm.prepare(client, algorithm.rollout(client, data))
    assert "logprobs" in data.clock
    return client, list(prepared.batches)


@pytest.mark.parametrize("make", [*slow([ppo]), grpo])
def test_parts_give_what_all_at_once_gives(make: Callable[[], PolicyGradient]):
    """The real decoder and the real engine; four completions a part."""
    (apart, found), (whole, expected) = one_step(make, 4), one_step(make, 64)
    names = {"policy", "reference", *(["values"] if make is ppo else [])}
    number = PROMPTS * (GROUP if make is grpo else 1)
    assert {call[0] for call in apart.calls} == names
    for name in names:
        own = [call[1:] for call in apart.calls if call[0] == name]
        assert [calls[:2] for calls in own] == [(4, 4)] * (number // 4) if number > 4 else [(number, number)]
        assert [call[1:] for call in whole.calls if call[0] == name] == [(number, number, number)]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        for name, values in theirs.per_token.items():
            np.testing.assert_allclose(mine.per_token[name], values, atol=2e-5, rtol=2e-5, err_msg=name)


def test_parts_begin_while_others_are_sampled():
    """Answers of different lengths: the first part is measured before all have ended."""
    client, _ = one_step(grpo, 4)
    ended = [call[3] for call in client.calls if call[0] == "reference"]
    assert ended == sorted(ended)
    assert 4 <= ended[0] < ended[-1] == PROMPTS * GROUP


def test_where_groups_race_parts_are_those_that_came_first():
    """Two prompts more are begun; only completions of the groups that are taken are measured."""
    client, _ = one_step(grpo, 4, spare=2)
    assert [call[1] for call in client.calls if call[0] == "reference"] == [4] * PROMPTS


def test_a_judge_scores_parts():
    """Five completions in parts of two; each part has its own, and all scores come back in their order."""
    asked: list[int] = []

    def begin(prompts: Any, completions: Any, texts: Any) -> Callable[[], list[Judged]]:
        asked.append(len(completions))
        return lambda: [Judged(float(x.tokens.sum())) for x in completions]

    client = trainer()
    client.publish()
    with closing(stream(4)) as steps:
        data = next(steps)
    collector = Collector(None, SAMPLING, None, judges=(Judge("judge", 1.0, 2, begin),))
    groups = collector.collect(client, data.prompts[:1], 5, seed=1, clock=data.clock)
    assert sorted(asked) == [1, 2, 2]
    for episode in groups[0]:
        assert episode.rewards == {"judge": float(episode.completion.tokens.sum())}
    assert 0 <= data.clock.metrics["perf/reward_overlap"] <= 1


def test_completions_that_no_environment_plays_have_its_reward_too():
    """As those of another process have, among whose prompts are some that are played: it left these out."""
    client = trainer()
    client.publish()
    with closing(stream(4)) as steps:
        data = next(steps)

    class Playing(Player):
        scores = True

        def __init__(self) -> None:
            pass

    plain = Collector(
        None, SAMPLING, None, judges=(Judge("judge", 1.0, 2, lambda *x: lambda: [Judged(1.0)] * len(x[1])),)
    )
    collector = replace(plain, sources={"game": replace(plain, play=Playing())})
    (group,) = collector.collect(client, data.prompts[:1], 5, seed=1, clock=data.clock)
    for episode in group:
        assert episode.rewards == {"judge": 1.0, ENVIRONMENT: pytest.approx(np.nan, nan_ok=True)}
        assert episode.unscored is None


def test_episodes_of_two_data_sets_end_with_the_player_that_began_them():
    class Noting(Player):
        """A player whose episodes end at their first turn; notes which ended, and whether they were let go of."""

        def __init__(self) -> None:
            self.ended, self.closed = list[Episode](), 0

        def __call__(self, rows: List[Any], seed: int, numbers: List[int] | None = None) -> Episodes:
            made = [Episode(Problem(), row, np.random.default_rng(seed)) for row in rows]
            for episode in made:
                episode.on_end = self.ended.append
            return Episodes(made, 1, self.let_go)

        def let_go(self) -> None:
            self.closed += 1

    first, second = Noting(), Noting()
    plain = Collector(None, SAMPLING, None)
    collector = replace(plain, sources={"a": replace(plain, play=first), "b": replace(plain, play=second)})
    prompt, sources = Prompt(np.array([1], np.int32), "", {"prompt_ids": [1]}), ("a", "b", "", "a")
    played = collector._played([replace(prompt, source=source) for source in sources], 0, [0, 1, 2, 3])
    assert played is not None
    assert [x is None for x in played.episodes] == [False, False, True, False]
    token, logprob, version = np.array([7], np.int32), np.array([-0.1], np.float32), np.array([0], np.int32)
    ended = Completion(token, logprob, "stop", version, SAMPLING, turns=((0, 1),))
    for number in (1, 3):
        assert played.reply(number, ended) is None
    assert (first.ended, second.ended) == ([played.episodes[3]], [played.episodes[1]])
    played.finish(dict(enumerate([replace(ended, finish="length"), ended, ended, ended])))
    assert first.ended == [played.episodes[3], played.episodes[0]]
    assert (first.closed, second.closed) == (1, 1)
