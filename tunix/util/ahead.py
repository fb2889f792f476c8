"""Work that is started ahead of its use, in order and within a bound of bytes: tensors on their way in and out."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

LEAST_AHEAD = 1 << 25
"""Bytes that may always be held ahead."""

Job = TypeVar("Job")
Started = TypeVar("Started")


def limit_of(sizes: Iterable[int]) -> int:
    """The bytes that a model's tensors may hold ahead: room for two of the layers' largest.

    Its tables, of which there are at most two of a size, are started alone, so that no others are held beside them.

    Args:
        sizes: of all tensors, in bytes.
    """
    many = [size for size, count in Counter(sizes).items() if count > 2]
    return max([LEAST_AHEAD, *(2 * size for size in many)])


def ahead(
    jobs: Iterable[Job], size: Callable[[Job], int], start: Callable[[Job], Started], limit: int
) -> Iterator[tuple[Job, Started]]:
    """Yields jobs in their order with what starting them returned; later ones are started while one is used.

    Args:
        size: bytes that a job holds from its start until the next one is asked for.
        limit: most bytes that started jobs hold together; one that needs more is started alone.
    """
    started: deque[tuple[Job, Started]] = deque()
    held = 0
    for job in jobs:
        while started and held + size(job) > limit:
            yield started[0]
            held -= size(started.popleft()[0])
        started.append((job, start(job)))
        held += size(job)
    while started:
        yield started[0]
        started.popleft()
