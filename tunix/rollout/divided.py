"""The prompts of a step among the processes of a run: each samples and scores its own, and all receive all."""

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any, TypeVar

from tunix.data.rendered import prompt_messages
from tunix.data.types import Prompt
from tunix.distributed import processes
from tunix.rollout.arrivals import columns, columns_of
from tunix.rollout.backlog import Pending
from tunix.rollout.encoded import decoded, encoded, episode_of, saved_episode
from tunix.rollout.rewards.base import parted
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import Clock, Scored
from tunix.types import Sampling

Item = TypeVar("Item")


def dealt(items: List[Item]) -> list[Item]:
    """What is dealt to this process: every `processes.number()`th."""
    return list(items[processes.index() :: processes.number()])


def shared(
    sample: Callable[[], list[list[Scored]]], prompts: List[Prompt], sampling: Sampling, clock: Clock
) -> list[list[Scored]]:
    """Hands this process's groups to all, and returns those of all, in the order of the prompts.

    Args:
        sample: the groups of the prompts that were `dealt` to this process.
        prompts: of all processes.
        sampling: the settings of the completions.
        clock: its counts become those of all.

    Raises:
        UserError: that of the first process that has none, in all of them.
    """
    if processes.number() == 1:
        return sample()
    parts = _of_all(lambda: [[saved_episode(x) for x in group] for group in sample()], clock)
    rows = [parts[i % len(parts)][i // len(parts)] for i in range(len(prompts))]
    return [[episode_of(x, prompt, sampling) for x in row] for prompt, row in zip(prompts, rows, strict=True)]


def shared_race(
    race: Callable[[List[Pending], int], tuple[list[list[Scored]], list[Pending]]],
    prompts: List[Pending],
    wanted: int,
    sampling: Sampling,
    clock: Clock,
) -> tuple[list[list[Scored]], list[Pending]]:
    """The groups that are complete first, and the other prompts with what has been sampled for them; both in the order
    of the prompts.

    Each process races its own prompts for its own share of the groups. So no clock decides which come first, only how
    many processes there are.

    Args:
        race: (prompts, groups to take, at least one) -> the groups and the other prompts of this process.
        prompts: of all processes.
        wanted: groups to take, in all processes together.
        sampling: the settings of the completions.
        clock: its counts become those of all.

    Raises:
        UserError: see `shared`.
    """
    if processes.number() == 1:
        return race(prompts, wanted)

    def give() -> dict[str, Any]:
        own, share = dealt(prompts), len(dealt(range(wanted)))
        groups, left = race(own, share) if share else ([], own)
        begun = {one.place: [x and encoded(x) for x in one.so_far] for one in left}
        return {"groups": [[saved_episode(x) for x in group] for group in groups], "left": begun}

    taken: dict[int, list[Scored]] = {}
    left: dict[int, Pending] = {}
    for process, one in enumerate(_of_all(give, clock)):
        groups = iter(one["groups"])
        for prompt in prompts[process :: processes.number()]:
            begun = one["left"].get(str(prompt.place))
            if begun is None:
                taken[prompt.place] = [episode_of(x, prompt, sampling) for x in next(groups)]
            else:
                so_far = tuple(x and decoded(x, sampling) for x in begun)
                left[prompt.place] = replace(prompt, so_far=so_far)
    order = [prompt.place for prompt in prompts]
    return [taken[place] for place in order if place in taken], [left[place] for place in order if place in left]


def _of_all(give: Callable[[], Any], clock: Clock) -> list[Any]:
    """What each process gives, as JSON values; the clock's counts become those of all.

    Raises:
        UserError: see `shared`.
    """
    own = processes.all_done("groups", lambda: json.dumps({"given": give(), "counted": clock.counted}).encode())
    found = [json.loads(one) for one in own]
    names = dict.fromkeys(name for one in found for name in one["counted"])
    clock.counted = {name: sum(one["counted"].get(name, 0) for one in found) for name in names}
    return [one["given"] for one in found]


def scored_as_a_whole(groups: list[list[Scored]], scorer: Scorer | None, clock: Clock) -> list[list[Scored]]:
    """Adds the rewards of functions that read the whole batch: the lead calls them, and tells the others.

    Args:
        groups: of all processes.
        scorer: these functions; None without any.
        clock: receives what they log.
    """
    if scorer is None:
        return groups
    found, metrics = processes.told("rewards", lambda: _scores(scorer, [one for group in groups for one in group]))
    clock.logged |= metrics
    scores = iter(found)
    return [[_with(one, *next(scores)) for one in group] for group in groups]


def _scores(
    scorer: Scorer, episodes: List[Scored]
) -> tuple[list[tuple[dict[str, float], dict[str, str], dict[str, Any]]], dict[str, list[float]]]:
    """The rewards of each episode, why some failed and what was logged of it; and the values that were logged."""
    scoring = scorer.open(columns_of([one.prompt for one in episodes]))
    for number, one in enumerate(episodes):
        row = columns(one.prompt, one.completion)
        scoring.add(number, one.prompt.text, one.text, row, prompt_messages(one.prompt.row))
    found = scoring.result()
    scores = [parted(dict(zip(found, row, strict=True))) for row in zip(*found.values(), strict=True)]
    return [(*parts, scoring.logged.get(number, {})) for number, parts in enumerate(scores)], scoring.metrics


def _with(
    episode: Scored, rewards: Mapping[str, float], failures: Mapping[str, str], logged: Mapping[str, Any]
) -> Scored:
    return replace(
        episode,
        rewards={**episode.rewards, **rewards},
        failures={**episode.failures, **failures},
        logged={**episode.logged, **logged},
    )
