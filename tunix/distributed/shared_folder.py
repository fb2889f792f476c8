"""A new folder that a run's processes write together: the lead makes it, and all who see it share out its files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunix.distributed import processes
from tunix.util.atomic_io import atomic_folder


@dataclass(frozen=True)
class SharedFolder:
    """A folder that is being written; it appears complete or not at all."""

    path: Path
    """The temporary folder."""
    writers: tuple[int, ...] = (0,)
    """The processes that see it, such as those on hosts with a common file system; the lead is the first."""

    def writes(self, number: int) -> bool:
        """Whether this process writes the file of a number. The others take part in gathering what is in it."""
        return self.writers[number % len(self.writers)] == processes.index()


@contextmanager
def shared_folder(path: Path) -> Iterator[SharedFolder]:
    """A temporary folder that is renamed to `path` when the blocks of all processes have ended without an error.

    Args:
        path: as the lead has it.

    Raises:
        UserError: as `atomic_folder`, in the lead.
    """
    if processes.lead():
        with atomic_folder(path) as folder:
            yield _shared(folder)
            processes.meet("written")
    else:
        yield _shared(path)
        processes.meet("written")
    processes.meet("complete")


def _shared(folder: Path) -> SharedFolder:
    place = Path(processes.told("folder", lambda: str(folder)))
    seen = processes.exchanged("seen", b"1" if place.is_dir() else b"")
    return SharedFolder(place, tuple(number for number, sees in enumerate(seen) if sees))
