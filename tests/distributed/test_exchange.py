"""What processes hand to each other: in their order, whole, and no more of it is kept than is needed."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import numpy as np
import pytest

from tests.distributed.pretended import pretended
from tunix.data.pipeline import SHARE, Divided
from tunix.data.types import Dropped, Kept, Prompt
from tunix.distributed import processes
from tunix.distributed.shared_folder import shared_folder
from tunix.errors import UserError
from tunix.rollout.collect import allgathered, shard
from tunix.rollout.types import Clock, Scored
from tunix.run.loop import Loop
from tunix.trainer.config import CheckpointConfig
from tunix.types import Completion, Sampling, Sequence


def test_what_is_exchanged_comes_in_order_and_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    def act(index: int) -> list[list[bytes]]:
        return [processes.allgathered("name", f"{index} {turn}".encode()) for turn in range(20)]

    found, store = pretended(monkeypatch, 3, act)
    expected = [[f"{index} {turn}".encode() for index in range(3)] for turn in range(20)]
    assert found == [expected] * 3
    assert len(store.values) <= 3 * 2


def test_the_lead_tells_and_any_of_them_is_heard(monkeypatch: pytest.MonkeyPatch):
    def act(index: int) -> tuple[int, bool, bool]:
        told = processes.broadcast("number", lambda: {"is": 7 + index})["is"]
        return told, processes.any_of("one", index == 1), processes.any_of("none", False)

    assert pretended(monkeypatch, 2, act)[0] == [(7, True, False)] * 2


def test_where_some_fail_all_raise_the_error_of_the_first_of_them(monkeypatch: pytest.MonkeyPatch):
    """The third and the second of three fail at the second of three things; the lead alone at the third."""

    def act(index: int) -> list[Any]:
        def second() -> bytes:
            if index:
                raise UserError(f"process {index} cannot")
            return b"it can"

        def third() -> int:
            raise UserError(f"process {index} decides nothing")

        found: list[Any] = [processes.all_done("name", lambda: f"-{index}".encode())]
        for attempt in (lambda: processes.all_done("name", second), lambda: processes.broadcast("name", third)):
            with pytest.raises(UserError) as caught:
                attempt()
            found.append(str(caught.value))
        return [*found, processes.broadcast("name", lambda: "on")]

    found, _ = pretended(monkeypatch, 3, act)
    assert found == [[[b"-0", b"-1", b"-2"], "process 1 cannot", "process 0 decides nothing", "on"]] * 3


def test_a_process_that_cannot_sample_ends_the_sampling_of_all(monkeypatch: pytest.MonkeyPatch):
    prompts = [Prompt(np.array([place], np.int32), f"{place}>", {}) for place in range(2)]

    def act(index: int) -> str:
        def sample() -> list[list[Scored]]:
            if index:
                raise UserError("no server is left")
            return [[]]

        with pytest.raises(UserError) as caught:
            allgathered(sample, prompts, Sampling(max_tokens=4), Clock())
        return str(caught.value)

    assert pretended(monkeypatch, 2, act)[0] == ["no server is left"] * 2


def test_all_find_what_differs(monkeypatch: pytest.MonkeyPatch):
    def act(index: int) -> str:
        try:
            processes.agree({"version": "1", "recipe, steps": str(4 + (index == 2))})
        except UserError as error:
            return str(error)
        return ""

    found, _ = pretended(monkeypatch, 3, act)
    assert found == ["process 2 has another recipe, steps than process 0: 5, not 4"] * 3


def test_one_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch):
    def act(index: int) -> str:
        if index == 1:
            return ""
        with pytest.raises(UserError, match="process 1 did not answer"):
            processes.allgathered("name", b"", deadline=0.2)
        return "named"

    assert pretended(monkeypatch, 2, act)[0] == ["named", ""]


def test_groups_come_back_in_the_order_of_the_prompts_and_counts_are_sums(monkeypatch: pytest.MonkeyPatch):
    """Three prompts for two processes: the first has the first and the third."""
    sampling = Sampling(max_tokens=4)
    prompts = [Prompt(np.array([place], np.int32), f"{place}>", {"place": place}) for place in range(3)]

    def episode(prompt: Prompt) -> Scored:
        tokens, logprobs = prompt.tokens + 10, np.array([-0.1], np.float32)
        made = Completion(tokens, logprobs, "stop", np.array([7], np.int32), sampling, turns=((0, 1),))
        return Scored(prompt, made, str(prompt.row["place"]), {"a": prompt.row["place"] / 3}, {"b": "why"}, (0.5,))

    def act(index: int) -> tuple[list[list[Scored]], dict[str, float]]:
        clock, own = Clock(), shard(prompts)

        def sample() -> list[list[Scored]]:
            clock.counted.update(tokens=len(own), **({"rewards": 0.5} if index else {}))
            return [[episode(prompt)] for prompt in own]

        allgathered(sample, prompts, sampling, clock)  # what it counted is that of all, and is not counted again
        return allgathered(sample, prompts, sampling, clock), clock.counted

    for groups, counted in pretended(monkeypatch, 2, act)[0]:
        assert counted == {"tokens": 6, "rewards": 1.0}
        for (found,), prompt in zip(groups, prompts, strict=True):
            expected = episode(prompt)
            assert (found.text, found.rewards, found.failures) == (expected.text, expected.rewards, expected.failures)
            assert (found.prompt.text, found.prompt.row) == (prompt.text, prompt.row)
            assert (found.completion.finish, found.completion.turns) == ("stop", ((0, 1),))
            for name in ("tokens", "logprobs", "versions"):
                ours, theirs = getattr(found.completion, name), getattr(expected.completion, name)
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours, theirs)


def test_the_lead_decides_when_it_is_time_to_save(monkeypatch: pytest.MonkeyPatch):
    """Two processes whose clocks differ by a minute, and a checkpoint every minute."""

    def act(index: int) -> bool:
        loop = Loop.__new__(Loop)
        loop.job = SimpleNamespace(saving=CheckpointConfig(every=None, every_minutes=1.0))  # pyright: ignore
        loop.step, loop._saved_at = 3, time.monotonic() - 90 * index
        return loop._save_is_due

    assert pretended(monkeypatch, 2, act)[0] == [False, False]


def row_of(place: int) -> Kept | Dropped:
    """A row of many kinds; row 40 is no example."""
    if place == 40:
        raise UserError("row 41 is no example")
    if place % 5 == 3:
        return Dropped("too long")
    tokens = np.arange(place % 7 + 1, dtype=np.int32)
    values = {"loss_weights": np.linspace(0, 1, len(tokens)).astype(np.float32)}
    sequence = Sequence(tokens, tokens % 2 == 1, 0.5 + place, values, {"label": place / 3})
    return Kept((sequence,) * (1 + place % 2), truncated=place % 4 == 0)


def assert_same_row(found: Kept | Dropped, expected: Kept | Dropped) -> None:
    assert type(found) is type(expected)
    if isinstance(found, Dropped) or isinstance(expected, Dropped):
        assert found == expected
        return
    assert (found.truncated, len(found.sequences)) == (expected.truncated, len(expected.sequences))
    for ours, theirs in zip(found.sequences, expected.sequences, strict=True):
        assert (ours.weight, ours.per_sequence) == (theirs.weight, theirs.per_sequence)
        for one, other in ((ours.tokens, theirs.tokens), (ours.loss_mask, theirs.loss_mask)):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(ours.per_token["loss_weights"], theirs.per_token["loss_weights"])


def test_rows_are_rendered_once_and_all_have_all(monkeypatch: pytest.MonkeyPatch):
    rendered: list[list[int]] = [[], []]

    def act(index: int) -> list[Kept | Dropped]:
        def render(place: int) -> Kept | Dropped:
            rendered[index].append(place)
            return row_of(place)

        rows = Divided(grain.MapDataset.range(100).map(render), "rows")
        found = [rows[place] for place in range(100) if place != 40]
        rows.restart()
        with pytest.raises(UserError, match="row 41 is no example"):
            _ = rows[40]
        return found

    found, store = pretended(monkeypatch, 2, act)
    expected = [row_of(place) for place in range(100) if place != 40]
    for each in found:
        for one, other in zip(each, expected, strict=True):
            assert_same_row(one, other)
    first = [sorted(places[:50]) for places in rendered]
    assert sorted(first[0] + first[1]) == list(range(100)), "each row was rendered by one of them"
    assert len(store.values) <= 2 * 2


@pytest.mark.parametrize("to", [0, 1, 2])
def test_one_that_waits_for_rows_can_be_stopped_and_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch, to: int):
    """Or at the window that it was waiting for, its own share of which it has given; or at one that both have read."""
    window = 2 * SHARE
    waiting = threading.Barrier(2)

    def act(index: int) -> Kept | Dropped:
        rows = Divided(grain.MapDataset.range(4 * window).map(row_of), "rows")
        _ = rows[0]
        if index == 0:
            # It has read ahead where the other has not.
            threading.Timer(0.3, rows.stop).start()
            with pytest.raises(processes.Stopped):
                _ = rows[window]
        waiting.wait(30)
        rows.restart()
        time.sleep(0.3 * index)
        return rows[to * window]

    for found in pretended(monkeypatch, 2, act)[0]:
        assert_same_row(found, row_of(to * window))


@pytest.mark.parametrize("sees", [True, False])
def test_a_folder_is_written_by_those_who_see_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sees: bool):
    def act(index: int) -> None:
        own = tmp_path / "out" if not index else tmp_path / "elsewhere"
        with shared_folder(own) as folder:
            for number in range(4):
                if folder.writes(number):
                    (folder.path / str(number)).write_text(str(index))

    if not sees:
        exchanged = processes.allgathered
        monkeypatch.setattr(
            processes,
            "allgathered",
            lambda name, own, *rest: exchanged(name, b"" if name == "seen" and processes.index() else own, *rest),
        )
    pretended(monkeypatch, 2, act)
    written = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
    assert written == {"0": "0", "1": "1" if sees else "0", "2": "0", "3": "1" if sees else "0"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
