"""Environments answer in threads, while other slots are sampled.

An answer belongs to a slot whose turn has ended, and which waits for it; the threads wait for the processes in which
environments live (`rollout/environments/remote.py`). Each environment is called by one thread at a time: its next turn
is sampled after the answer to the last.

Which tokens are computed together decides the last bits of their log-probs. So an answer is taken in the second round
after its turn has ended, and is waited for a little: what is quick comes at the same place whatever the clock says.
"""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from tunix.types import Completion, Reply

THREADS = 32
"""Environments that are asked at the same time, at most."""
PATIENCE = 0.25
"""Seconds that answers are waited for while others could be sampled; where one took longer, no further one is."""


class Replies:
    """The answers that are waited for."""

    def __init__(self, reply: Reply | None):
        """Nothing is waited for.

        Args:
            reply: asks the environment; None where there is none.
        """
        self._reply = reply
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment") if reply else None
        self._futures: dict[int, Future[np.ndarray | None]] = {}
        self._asked: dict[int, int] = {}
        """The round in which each was asked."""
        self._round, self._patient = 0, True

    @property
    def are_asked_for(self) -> bool:
        """Whether there is an environment."""
        return self._reply is not None

    def __bool__(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._futures)

    def __contains__(self, slot: int) -> bool:
        """Whether this slot waits for an answer."""
        return slot in self._futures

    def ask(self, slot: int, number: int, completion: Completion) -> bool:
        """Asks about the turn of a slot that has stopped; returns whether there is an environment to ask.

        Args:
            slot: waits for the answer.
            number: index of the request.
            completion: so far.
        """
        if self._reply is None or self._threads is None or completion.finish != "stop":
            return False
        self._futures[slot] = self._threads.submit(self._reply, number, completion)
        self._asked[slot] = self._round
        return True

    def arrived(self) -> list[tuple[int, np.ndarray | None]]:
        """The answers of a further round, by slot: tokens `[T]`, or None at the end of an episode."""
        self._round += 1
        due = [slot for slot in sorted(self._futures) if self._asked[slot] < self._round - 1]
        if due and self._patient:
            self._patient = not wait([self._futures[slot] for slot in due], timeout=PATIENCE).not_done
        return [(slot, self._futures.pop(slot).result()) for slot in due if self._futures[slot].done()]

    def wait(self) -> None:
        """Waits until one more answer has come."""
        wait(self._futures.values(), return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Ends the threads; answers that nobody waits for any more are given up."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
