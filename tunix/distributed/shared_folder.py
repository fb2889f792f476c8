"""A new folder that a run's processes write together: the lead makes it, and all who see it share out its files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tunix.distributed import processes
from tunix.errors import UserError
from tunix.util.atomic_io import atomic_folder


@dataclass(frozen=True)
class SharedFolder:
    """A folder that is being written; it appears complete or not at all."""

    path: Path
    """The temporary folder."""
    writers: tuple[int, ...] = (0,)
    """The processes that see it, such as those on hosts with a common file system; the lead is the first."""
    errors: list[OSError] = field(default_factory=list)
    """What the disk has refused this process, which all raise at the end, e.g. `[]`."""

    def writes(self, number: int) -> bool:
        """Whether this process writes the file of a number. The others take part in gathering what is in it."""
        return not self.errors and self.writers[number % len(self.writers)] == processes.index()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Notes an error of the disk where there are several processes: this one goes on gathering with the others,
        which would wait for it, and all of them raise it at the end."""
        try:
            yield
        except OSError as error:
            if processes.number() == 1:
                raise
            self.errors.append(error)


@contextmanager
def shared_folder(path: Path) -> Iterator[SharedFolder]:
    """A temporary folder that is renamed to the lead's `path` when the blocks of all processes have ended without an
    error.

    Raises:
        UserError: as `atomic_folder`, in all processes.
    """
    if processes.number() == 1:
        with atomic_folder(path) as folder:
            yield SharedFolder(folder)
        return
    with ExitStack() as stack:
        made = processes.broadcast("folder", lambda: [str(stack.enter_context(atomic_folder(path))), str(path)])
        place, name = map(Path, made)
        seen = processes.allgathered("seen", b"1" if place.is_dir() else b"")
        folder = SharedFolder(place, tuple(number for number, sees in enumerate(seen) if sees))
        yield folder

        def written() -> bytes:
            if folder.errors:
                reason = folder.errors[0].strerror or folder.errors[0]
                raise UserError(f"could not write {name}: {reason}. Nothing was left behind.")
            return b""

        processes.all_done("written", written)
        processes.broadcast("complete", stack.close)
