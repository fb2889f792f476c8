"""What a process makes of an error while another one is dead."""

import errno

import pytest

from tunix.distributed import meeting
from tunix.errors import UserError


class Store:
    """A coordinator's store in which process 0 gives no sign of life."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.values[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


def test_an_error_that_a_dead_process_has_left_does_not_hide_its_death(monkeypatch: pytest.MonkeyPatch):
    """An answer that does not come is an error of this process alone, at once; that 0 is dead is known later."""
    store, found = Store(), list[tuple[int, str]]()

    def unanswered(*_: object) -> list[bytes]:
        raise UserError("process 0 did not answer")

    def ended(self: meeting.Watch, other: int, reason: str) -> None:
        found.append((other, reason))

    for name, value in (("PULSE", 0.05), ("SILENCE", 0.5), ("number", lambda: 2), ("index", lambda: 1)):
        monkeypatch.setattr(meeting, name, value)
    monkeypatch.setattr(meeting, "store", lambda: store)
    monkeypatch.setattr(meeting, "allgathered", unanswered)
    monkeypatch.setattr(meeting.Watch, "_end", ended)
    with pytest.raises(UserError, match="did not answer"), meeting.together(print):
        raise UserError("process 0 did not answer (rows/3)")
    assert found
    assert found[0][0] == 0
    assert "no sign of life" in found[0][1]


def test_where_the_line_cannot_be_written_it_ends_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """On a full disk, to which stderr goes, too. The process would wait for the dead one until JAX aborts it."""
    codes: list[int] = []

    def full(_: str) -> None:
        raise OSError(errno.EFBIG, "File too large")

    def ends(code: int) -> None:
        codes.append(code)
        raise SystemExit

    for name, value in (("PULSE", 60.0), ("number", lambda: 2), ("index", lambda: 1)):
        monkeypatch.setattr(meeting, name, value)
    monkeypatch.setattr(meeting.os, "_exit", ends)
    watch = meeting.Watch(full)
    watch.close()
    with pytest.raises(SystemExit):
        watch._end(0, "no sign of life")
    assert codes == [meeting.LOST]
