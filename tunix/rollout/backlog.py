"""Prompts that wait for their step, those that were begun in an earlier one at the front.

A step that oversamples begins more groups than it trains on, and ends when it has enough of them. The others come back
here with all that was sampled, and are the first prompts of the next step. All of it is part of the position that a
run saves: completions and episodes are JSON values there, bit for bit, and also between the processes of a run.

Axes: G group, T time.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunix.data.pipeline import Prompts
from tunix.data.types import Accounting, Prompt
from tunix.rollout.types import Scored
from tunix.types import Completion, Request, Sampling
from tunix.util.coded import array_of, coded

ARRAYS = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
"""What is saved of a completion, by the name of its attribute."""


def encoded(completion: Completion) -> dict[str, Any]:
    """A completion as JSON values."""
    arrays = {name: coded(np.asarray(getattr(completion, name), dtype)) for name, dtype in ARRAYS.items()}
    saved = {**arrays, "finish": completion.finish, "turns": completion.turns, "restarts": completion.restarts}
    if (experts := completion.experts) is not None:
        saved |= {"experts": coded(experts.astype(np.int16)), "routed": experts.shape[1:]}
    if completion.top is not None:
        saved["top"] = [coded(x) for x in completion.top]
    return saved


def decoded(saved: Mapping[str, Any], sampling: Sampling) -> Completion:
    """The inverse of `encoded`, with the settings of the completion, which are not saved."""
    tokens, logprobs, versions = (array_of(saved[name]) for name in ARRAYS)
    turns = tuple((start, end) for start, end in saved["turns"])
    experts = array_of(saved["experts"]).reshape(-1, *saved["routed"]) if "experts" in saved else None
    restarts, top = tuple(saved.get("restarts", ())), None
    if "top" in saved:
        ids, likely = (array_of(x).reshape(-1, sampling.top_logprobs) for x in saved["top"])
        top = ids, likely
    return Completion(
        tokens, logprobs, saved["finish"], versions, sampling, turns, top=top, experts=experts, restarts=restarts
    )


def saved_episode(episode: Scored) -> dict[str, Any]:
    """An episode as JSON values; with what its environment made of the prompt."""
    names = ("text", "rewards", "failures", "turn_rewards", "seats", "ended", "logged")
    saved = {name: getattr(episode, name) for name in names}
    start = {"tokens": coded(episode.prompt.tokens), "text": episode.prompt.text, "source": episode.prompt.source}
    return {**saved, "completion": encoded(episode.completion), "prompt": start}


def episode_of(saved: Mapping[str, Any], prompt: Prompt, sampling: Sampling) -> Scored:
    """The inverse of `saved_episode`, with the prompt for the row's columns and the settings, which are not saved."""
    begun = saved["prompt"]
    start = replace(prompt, tokens=array_of(begun["tokens"]), text=begun["text"], source=begun.get("source", ""))
    return Scored(
        start,
        decoded(saved["completion"], sampling),
        saved["text"],
        saved["rewards"],
        failures=saved["failures"],
        turn_rewards=tuple(saved["turn_rewards"]),
        seats=tuple(saved["seats"]),
        ended=saved.get("ended", False),
        logged=saved["logged"],
    )


BEGUN = "begun"
"""The key of a position under which the prompts that were begun are."""


@dataclass(frozen=True, kw_only=True)
class Pending(Prompt):
    """A prompt with its place in the data, which its random numbers follow from, and what has been sampled for it."""

    place: int
    """Position of its row in the order of the data, over all epochs, e.g. 4711."""
    so_far: tuple[Completion | None, ...] = ()
    """`[G]` completions, ended, paused, or None; empty where nothing was begun, e.g. `()`."""

    def requests(self, n: int, sampling: Sampling, seed: int) -> list[Request]:
        """Its `n` requests; the random numbers of each follow from the run's seed, its place and its number."""
        seed = int(np.random.SeedSequence([seed, self.place]).generate_state(1)[0])
        return [
            Request(self.tokens, sampling, seed, index, so_far=completion)
            for index, completion in enumerate(self.so_far or (None,) * n)
        ]


class Backlog:
    """A queue in front of a stream of prompts, to which a step returns what it has begun and not trained on."""

    def __init__(self, stream: Prompts, sampling: Sampling):
        """An empty queue in front of a stream; all completions have these settings."""
        self._stream, self._sampling = stream, sampling
        self._queue: list[Pending] = []

    def take(self, number: int) -> list[Pending]:
        """The next `number` prompts, those that came back first; fewer where the data is exhausted."""
        taken, self._queue = self._queue[:number], self._queue[number:]
        while len(taken) < number:
            place = self._stream.get_state()["next_index"]
            prompts = self._stream.take(1)
            if not prompts:
                break
            taken += [Pending(**vars(prompt), place=place) for prompt in prompts]
        return taken

    def put_back(self, prompts: List[Pending]) -> None:
        """Returns prompts to the queue, which stays in the order of the data."""
        self._queue = sorted([*self._queue, *prompts], key=lambda prompt: prompt.place)

    def get_state(self) -> dict[str, Any]:
        """The position, as values that JSON can store."""
        begun = [{"place": x.place, "so_far": [y and encoded(y) for y in x.so_far]} for x in self._queue]
        return {**self._stream.get_state(), BEGUN: begun}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned; the rows of the prompts in it are read again."""
        position = {name: value for name, value in state.items() if name != BEGUN}
        self._queue = []
        for saved in state[BEGUN]:
            self._stream.set_state({**position, "next_index": saved["place"]})
            (prompt,) = self._stream.take(1)
            so_far = tuple(x and decoded(x, self._sampling) for x in saved["so_far"])
            self._queue.append(Pending(**vars(prompt), place=saved["place"], so_far=so_far))
        self._stream.set_state(position)
        self._stream.accounting = Accounting(**position["accounting"])


class Race:
    """Groups on their way, of which the first that are complete are taken.

    Groups that end in one dispatch of the sampler end in the order of its slots, so that no clock decides.
    """

    def __init__(self, groups: List[list[Completion | None]], wanted: int, due: Collection[int] = ()):
        """Nothing is taken yet.

        Args:
            groups: `[P][G]` what is there of each completion; all groups are of one size.
            wanted: groups to take, at most all.
            due: the numbers of groups that have to be among them, at most as many.
        """
        assert len(due) <= wanted, f"{len(due)} groups cannot wait, and {wanted} are taken"
        self._due = set(due)
        """Groups that have to be taken, and are not yet."""
        self.groups = groups
        self.taken: list[int] = []
        """The numbers of the groups that were taken, in that order."""
        self.wanted, self.size = min(wanted, len(groups)), len(groups[0])
        """Groups that are taken, and completions of each."""

    @property
    def over(self) -> bool:
        """Whether there are enough groups."""
        return len(self.taken) == self.wanted

    @property
    def missing(self) -> list[int]:
        """The numbers of the requests that have not ended; request i is of group i // n."""
        return [i for i, x in enumerate(x for group in self.groups for x in group) if not _ended(x)]

    def start(self) -> list[tuple[int, Completion]]:
        """Takes groups that were complete before; returns the completions of those, with the numbers of their
        requests."""
        return [own for group in range(len(self.groups)) for own in self._taken(group)]

    def add(self, number: int, completion: Completion) -> list[tuple[int, Completion]]:
        """Adds a completion; returns all of its group, with their numbers, where the group is taken for it."""
        group, member = divmod(number, self.size)
        self.groups[group][member] = completion if len(completion.tokens) else None
        return self._taken(group)

    def _taken(self, group: int) -> list[tuple[int, Completion]]:
        members = [completion for completion in self.groups[group] if completion is not None and _ended(completion)]
        if self.over or group in self.taken or len(members) < self.size:
            return []
        if group not in self._due and self.wanted - len(self.taken) <= len(self._due):
            return []  # the places that are left are for others; this one is the first of the next step
        self._due.discard(group)
        self.taken.append(group)
        return [(group * self.size + member, completion) for member, completion in enumerate(members)]


def _ended(completion: Completion | None) -> bool:
    return completion is not None and completion.finish != "paused"
