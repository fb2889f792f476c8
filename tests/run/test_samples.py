"""What is recorded of a run's completions: which steps and groups, up to how many bytes, what a kill leaves of it."""

import gzip
import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.commands.test_report import sample, write_run
from tests.run.test_fake_client import FakeClient
from tests.tiny_runs import lines, write_recipe
from tunix.cli import main
from tunix.commands import report
from tunix.commands.report import facts_of
from tunix.errors import UserError
from tunix.run.evaluation import Samples
from tunix.trainer.config import SamplesConfig
from tunix.trainer.progress import Display
from tunix.util.atomic_io import PACKED, SAMPLES, append_rows, complete_lines, forget_after, read_rows


def recorded(folder: Path, config: SamplesConfig, steps: range) -> list[tuple[int, int]]:
    """Step and group of what is recorded of steps with three groups of two completions; it goes on with the file."""
    folder.mkdir(exist_ok=True)
    with closing(Samples([], [], FakeClient(), None, folder / PACKED, Display("run", 9, 0), config)) as samples:
        for step in steps:
            samples.record(step, [{"group": i // 2, "completion": f"{step} {i}" * 40} for i in range(6)])
    return [(row["step"], row["group"]) for row in read_rows(folder / SAMPLES)]


def test_steps_and_groups_that_are_recorded(tmp_path: Path):
    assert recorded(tmp_path / "default", SamplesConfig(), range(1, 3)) == [(1, 0), (1, 0), (2, 0), (2, 0)]
    assert recorded(tmp_path / "some", SamplesConfig(every=2, groups=2), range(1, 5)) == [
        (step, group) for step in (2, 4) for group in (0, 0, 1, 1)
    ]
    every_group = [(3, 0), (3, 0), (3, 1), (3, 1), (3, 2), (3, 2)]
    assert recorded(tmp_path / "all", SamplesConfig(every=3, groups="all"), range(1, 6)) == every_group
    assert recorded(tmp_path / "none", SamplesConfig(groups=0), range(1, 6)) == []
    assert not (tmp_path / "none" / PACKED).exists()


def test_what_is_not_recorded_is_not_made(tmp_path: Path):
    def rows():
        yield {"group": 0, "completion": "a"}
        yield {"group": 1}
        raise AssertionError("the third row is of no group that is asked for")

    with closing(Samples([], [], FakeClient(), None, tmp_path / PACKED, Display("run", 9, 0))) as samples:
        samples.record(1, rows())
        samples.wait()
    samples.config = SamplesConfig(every=2)
    samples.record(1, rows())  # its thread has ended


def test_recording_ends_where_the_file_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A step is recorded whole or not at all; killed before or after one that has no room and gone on, the file has the
    same bytes."""
    free = recorded(tmp_path / "free", SamplesConfig(), range(1, 9))
    assert len(free) == 16
    size = (tmp_path / "free" / PACKED).stat().st_size
    bounded = SamplesConfig(megabytes=size * 0.6 / 1e6)  # eight members of about the same size: room for four
    whole = recorded(tmp_path / "whole", bounded, range(1, 9))
    assert whole == free[:8]
    packed = (tmp_path / "whole" / PACKED).read_bytes()
    assert len(packed) <= size * 0.6
    said = capsys.readouterr().err
    assert said.count("has no room in it is not recorded") == 1
    assert "step 5: samples.jsonl.gz has reached logging.samples.megabytes" in said
    for killed, saved in ((4, 2), (5, 4), (7, 6), (8, 5)):
        folder = tmp_path / f"killed{killed}"
        recorded(folder, bounded, range(1, killed + 1))
        with (folder / PACKED).open("ab") as file:
            file.write(packed[:20])
        if killed < 5:
            forget_after(folder / SAMPLES, saved)
            assert {row["step"] for row in read_rows(folder / SAMPLES)} == set(range(1, saved + 1))
        else:  # what follows is not read any more
            (folder / PACKED).write_bytes(packed)
            forget_after(folder / SAMPLES, saved)
        recorded(folder, bounded, range(saved + 1, 9))
        assert (folder / PACKED).read_bytes() == packed
    forget_after(tmp_path / "whole" / SAMPLES, None)
    assert not (tmp_path / "whole" / PACKED).exists()


def test_any_gzip_reads_it_and_a_kill_costs_one_step(tmp_path: Path):
    path, plain = tmp_path / PACKED, tmp_path / SAMPLES
    rows = [{"step": step, "text": f"é{step}\r\n" * 50_000} for step in range(3)]  # more than is read at a time
    ends = []
    for row in rows:
        assert append_rows(path, [row], 10**9)
        ends.append(path.stat().st_size)
    assert [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] == rows
    assert not append_rows(path, rows[:1], ends[2] + 100)
    assert path.stat().st_size == ends[2]
    assert [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] == rows
    content = path.read_bytes()
    for cut in (ends[1] + 1, ends[1] + 11, ends[2] - 1):
        path.write_bytes(content[:cut])
        assert read_rows(plain) == rows[:2]
        forget_after(plain, 7)
        assert path.stat().st_size == ends[1]
    path.write_bytes(content[: ends[0]] + b"no gzip" + content[ends[0] :])
    with pytest.raises(UserError, match=f"damaged at byte {ends[0]} .*: move it away"):
        read_rows(plain)


def test_the_report_reads_both_kinds_of_files(tmp_path: Path):
    """That of an earlier version is plain; a damaged one is refused in a line."""
    old = write_run(tmp_path / "old")
    new = write_run(tmp_path / "new")
    (new / "samples.jsonl").unlink()
    for step in range(1, 11):
        append_rows(new / PACKED, [sample(step, 0, j) for j in range(4)], 10**9)
    assert facts_of(new)["samples"] == facts_of(old)["samples"]
    assert len(facts_of(new)["samples"]) == 40
    (new / PACKED).write_bytes(b"no gzip at all")
    assert main(["report", str(new)]) == 2


@pytest.mark.parametrize("name", [SAMPLES, PACKED])
def test_of_long_files_the_report_reads_every_nth_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path / "run")
    (run / SAMPLES).unlink()
    for step in range(1, 11):
        append_rows(run / name, [sample(step, 0, 0)], 10**9)
    size = (run / name).stat().st_size * (4 if name == PACKED else 1)
    monkeypatch.setitem(report.READ, SAMPLES, size / 1.5)
    facts = facts_of(run)
    assert facts["samples_every"] == 2
    assert {row["step"] for row in facts["samples"]} == {2, 4, 6, 8, 10}


def test_what_would_change_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = str(write_recipe(tmp_path / "r.yaml"))
    refusals = {
        "logging.samples.every=2": "logging.samples.every: changes nothing for sft, which trains on no completions",
        "logging.samples.groups=all": "logging.samples.groups: changes nothing for sft",
        "logging.samples={groups: 0, every: 2}": "every changes nothing with groups: 0",
        "rollout.samples=4": "samples is gone: logging.samples says what is recorded",
        "logging.samples.megabytes=0": "logging.samples.megabytes",
    }
    for words, said in refusals.items():
        assert main(["check", recipe, words]) == 2
        assert said in capsys.readouterr().err
    assert main(["check", recipe, "logging.samples.megabytes=2"]) == 0


def test_lines_of_a_missing_file(tmp_path: Path):
    assert list(complete_lines(tmp_path / SAMPLES)) == lines(tmp_path / SAMPLES) == []
