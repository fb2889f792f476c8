"""The record of an asynchronous run's calls: what was written is replayed, whatever a kill has cut off."""

from pathlib import Path

from tunix.rollout.asynchronous import Journal
from tunix.util.atomic_io import read_rows


def written(path: Path) -> Journal:
    """Step 1: a call that was paused and one that ended; step 2: one that was killed."""
    journal = Journal(path, "mine")
    journal.begun(1, 0, weights=1)
    journal.ended(1, 0, paused=3)
    journal.ended(1, 0)  # it was paused: nothing is added
    journal.begun(1, 1, weights=2)
    journal.ended(1, 1)
    journal.begun(2, 0, weights=2)
    return journal


def test_what_was_written_is_known_again(tmp_path: Path):
    assert not written(tmp_path / "replay.jsonl").needs_before(9), "these calls have begun"
    again = Journal(tmp_path / "replay.jsonl", "mine")
    calls = [again.calls.get(key) for key in ((1, 0), (1, 1), (2, 0))]
    assert [(call.weights, call.paused, call.ended) for call in calls if call] == [
        (1, 3, False),
        (2, None, True),
        (2, None, False),
    ]
    assert again.calls.get((2, 1)) is None
    # Weights of one step are wanted until the call that had them has begun again.
    assert (again.needs_before(1), again.needs_before(2), again.needs_before(3)) == (False, True, True)
    again.begun(1, 0, weights=1)
    assert (again.needs_before(2), again.needs_before(3)) == (False, True)
    again.keep(range(2, 3))
    assert again.calls.get((1, 1)) is None


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path):
    path = tmp_path / "replay.jsonl"
    written(path)
    rows = read_rows(path)
    path.write_text(path.read_text()[:-5])
    journal = Journal(path, "mine")
    assert read_rows(path) == rows[:-1]
    journal.begun(2, 0, weights=3)
    assert read_rows(path) == [*rows[:-1], {"step": 2, "call": 0, "weights": 3}]


def test_what_another_recipe_has_recorded_is_dropped(tmp_path: Path):
    written(tmp_path / "replay.jsonl")
    assert Journal(tmp_path / "replay.jsonl", "another").calls.get((1, 0)) is None
    assert read_rows(tmp_path / "replay.jsonl") == [{"recipe": "another"}]


def test_steps_of_weights_that_are_gone_are_forgotten(tmp_path: Path):
    """Step 1 has begun with weights 1, and step 2 with weights 2, which are those that there are."""
    path = tmp_path / "replay.jsonl"
    written(path)
    journal = Journal(path, "mine")
    journal.keep(range(9), 1)
    assert journal.calls.get((1, 0)) is not None
    journal.keep(range(9), 2)
    for found in (journal, Journal(path, "mine")):
        assert found.calls.get((1, 0)) is found.calls.get((1, 1)) is None
        assert (call := found.calls.get((2, 0))) is not None
        assert call.weights == 2
