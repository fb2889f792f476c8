"""The sampler as one step of an asynchronous run sees it: its calls take weights that are recorded, go on where they
were paused, and end in all processes together.
"""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tunix.distributed import processes
from tunix.protocols import Metered
from tunix.rollout.requests import requests_of
from tunix.types import Begun, Completion, OnDone, Reply, Sampling, Usage

Pause = Callable[[int], bool]
"""(dispatches so far) -> whether the call is paused instead of the next one."""


@runtime_checkable
class Holding(Protocol):
    """A sampler that goes on with weights which it holds while newer ones are published, and that can be paused."""

    def hold(self) -> Any:
        """The weights that were published last."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether a publication waits until nobody holds the weights before."""
        ...

    def sample(
        self,
        prompts: List[np.ndarray],
        n: int,
        sampling: Sampling,
        seed: int,
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        begun: List[Begun] | None = None,
        pause: Callable[[int], bool] | None = None,
        held: Any = None,
    ) -> list[list[Completion]]:
        """As `SamplingClient.sample`, with held weights; `pause` is asked before each dispatch."""
        ...


@runtime_checkable
class Calls(Protocol):
    """Decides which weights each call takes, and records it."""

    def begin(self, step: int, call: int) -> tuple[Any, Pause]:
        """The weights of the sampler's next call, and what pauses it."""
        ...

    def end(self, step: int, call: int) -> None:
        """Records that a call has ended.

        Raises:
            processes.Stopped: the run is to end, and the call was given up.
        """
        ...


class Feeder:
    """A `SamplingClient` for one step."""

    def __init__(self, calls: Calls, sampler: Holding, step: int):
        """Calls nothing yet.

        Args:
            calls: decides about each call.
            sampler: is called.
            step: the number of the step.
        """
        self._calls, self._sampler, self._step, self._called = calls, sampler, step, 0
        self.usage: Usage | None = None
        """What the last call of `sample` took; None where there was none."""

    def sample(
        self,
        prompts: List[np.ndarray],
        n: int,
        sampling: Sampling,
        seed: int,
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        begun: List[Begun] | None = None,
    ) -> list[list[Completion]]:
        """See `protocols.SamplingClient.sample`."""
        requests = requests_of(prompts, n, seed, begun)
        done: dict[int, Completion] = {}
        self.usage, enough = None, False
        if not requests:  # other processes have some, and a call is one of all processes
            return self._called_once([], sampling, seed, reply, None, [])
        while (left := [i for i in range(len(requests)) if i not in done]) and not enough:

            def hear(number: int, completion: Completion, left: list[int] = left) -> bool:
                nonlocal enough
                enough |= on_done is not None and on_done(left[number], completion)
                return enough

            asked, own = zip(*(requests[i] for i in left), strict=True)
            found = self._called_once(asked, sampling, seed, reply, hear, own)
            for i, (completion,) in zip(left, found, strict=True):
                if completion.finish == "paused" and not enough:
                    prompt, one = requests[i]
                    requests[i] = prompt, replace(one, so_far=completion)
                else:
                    done[i] = completion
        return [[done[i * n + j] for j in range(n)] for i in range(len(prompts))]

    def _called_once(
        self,
        prompts: List[np.ndarray],
        sampling: Sampling,
        seed: int,
        reply: Reply | None,
        hear: OnDone | None,
        begun: List[Begun],
    ) -> list[list[Completion]]:
        """One call of the sampler, which has ended when it has in all processes."""
        call, self._called = self._called, self._called + 1
        held, pause = self._calls.begin(self._step, call)
        found: list[list[Completion]] = []

        def act() -> bytes:
            found.extend(self._sampler.sample(prompts, 1, sampling, seed, reply, hear, begun, pause, held))
            return b""

        processes.all_done("call", act)
        self._count()
        self._calls.end(self._step, call)
        return found

    def _count(self) -> None:
        if isinstance(self._sampler, Metered) and (new := self._sampler.usage) is not None:
            old = self.usage or Usage(0, 0, 0.0)
            self.usage = Usage(old.tokens + new.tokens, old.slot_steps + new.slot_steps, old.bytes + new.bytes)
