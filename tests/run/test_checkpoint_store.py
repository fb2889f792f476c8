"""Checkpoints on an object store: complete by a file written last, of one run alone, and resumed to the bit.

The bucket is a local folder (`tests/fake_store.py`): fsspec sees it directly, tensorstore over HTTP on this machine.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from etils.epath import backend

from tests.fake_store import HOLDS, FakeStore, environment, served
from tests.run.test_bad_input import refused
from tests.run.test_kill import Run, lasting, no_process_left, write_run
from tests.tiny_runs import files, lines, losses, metrics, train, write_recipe
from tests.trainer.test_checkpoint import restored, state
from tests.trainers import StateClient
from tunix.cli import main
from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.checkpoint_folder import COMPLETE
from tunix.trainer.config import CheckpointConfig

URL = "gs://bucket/runs/x"
CONFIG = CheckpointConfig(folder=URL)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all buckets, which tensorstore looks for once in a process."""
    folder = tmp_path_factory.mktemp("buckets")
    with served(folder) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(address).items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture
def store(root: Path, monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """An empty store."""
    for file in root.iterdir():
        file.unlink()
    store = FakeStore(root)
    monkeypatch.setattr(backend._FileSystemSpecBackend, "fs", lambda self, path: store)
    return store


def names(store: FakeStore, step: int) -> list[str]:
    """The files of a checkpoint."""
    prefix = f"{URL.removeprefix('gs://')}/{step}/"
    return [key.removeprefix(prefix) for key in store.objects.keys(prefix)]


def checkpoints(*, keep: int = 3, read_only: bool = False) -> closing[Checkpoints]:
    return closing(Checkpoints(Path(URL), CheckpointConfig(folder=URL, keep=keep), read_only=read_only))


@pytest.mark.slow
def test_the_last_and_the_best_are_kept_and_read_by_another_process(store: FakeStore):
    measured = {1: {"eval/loss": 3.0}, 2: {"eval/loss": 1.0}, 3: {}, 4: {"eval/loss": 2.0}}
    for steps, kept in (([1, 2, 3], [2, 3]), ([4, 5, 6], [2, 5, 6])):
        with checkpoints(keep=2) as saved:
            for step in steps:
                saved.save(step, StateClient(state(step)), {"n": step}, measured.get(step, {}))
            saved.wait()
            assert saved.steps() == kept
            assert restored(saved, 2) == ([2.0, 2.0], 2, {"n": 2})
    assert [step for step in range(7) if names(store, step)] == [2, 5, 6]
    assert {COMPLETE, "state/commit_success.txt", "record/metadata", "metrics/metrics"} <= set(names(store, 5))


@pytest.mark.parametrize("missing", [f"3/{COMPLETE}", "3/record/metadata"])
def test_without_its_last_file_there_is_no_checkpoint(missing: str, store: FakeStore):
    """A process that dies, or a store that refuses, leaves the step before; the rest goes when the run starts again."""
    with checkpoints() as saved:
        saved.save(2, StateClient(state(2)), {"n": 2}, {})
        saved.wait()
        store.refuses = missing
        saved.save(3, StateClient(state(3)), {"n": 3}, {})
        message = r"gs://bucket/runs/x: a checkpoint could not.*403.*intact: see that the store can be reached"
        with pytest.raises(UserError, match=message):
            saved.wait()
        assert saved.latest() == 2
    assert "state/commit_success.txt" in names(store, 3)
    with checkpoints(read_only=True) as reader:
        assert reader.steps() == [2]
    assert names(store, 3)
    with checkpoints() as saved:
        assert saved.steps() == [2]
        assert not names(store, 3)
        store.refuses = ""
        saved.save(3, StateClient(state(3)), {"n": 3}, {})
        saved.wait()
        assert restored(saved, 3) == ([3.0, 3.0], 3, {"n": 3})


def test_half_a_deletion_leaves_no_checkpoint(store: FakeStore, monkeypatch: pytest.MonkeyPatch):
    with checkpoints(keep=1) as saved:
        saved.save(1, StateClient(state(1)), {}, {})
        saved.wait()
        whole = names(store, 1)
        delete = FakeStore.rm_file

        def dying(self: FakeStore, path: str) -> None:
            if not path.endswith(f"/1/{COMPLETE}"):
                raise OSError("killed")
            delete(self, path)

        monkeypatch.setattr(FakeStore, "rm_file", dying)
        saved.save(2, StateClient(state(2)), {}, {})
        with pytest.raises(UserError, match="killed"):
            saved.wait()
        assert names(store, 1) == [name for name in whole if name != COMPLETE]
        assert saved.steps() == [2]


def test_of_two_processes_the_later_one_goes_on(store: FakeStore):
    with checkpoints() as first, checkpoints() as second:
        second.save(1, StateClient(state(1)), {"n": 1}, {})
        second.wait()
        first.save(2, StateClient(state(2)), {"n": 2}, {})
        with pytest.raises(UserError, match=r"checkpoint\.folder: another process has begun to write to gs://bucket"):
            first.wait()
        assert second.steps() == [1]


def test_a_damaged_checkpoint_is_named(store: FakeStore):
    with checkpoints() as saved:
        saved.save(1, StateClient(state(1)), {"n": 1}, {})
        saved.wait()
        store.objects.put("bucket/runs/x/1/state/manifest.ocdbt", b"")
        with pytest.raises(UserError, match=r"gs://bucket/runs/x/1: the checkpoint cannot be read.*store can be rea"):
            restored(saved, 1)


@pytest.mark.slow
def test_a_run_goes_on_from_a_store_without_its_folder_and_is_exported(store: FakeStore, tmp_path: Path):
    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"folder": URL, "every": 2}})
    write_recipe(tmp_path / "disk.yaml", {"checkpoint": {"every": 2}})
    train("disk.yaml", "output=disk")
    train("r.yaml", "steps=2")
    assert not (tmp_path / "run/checkpoints").exists()
    shutil.rmtree(tmp_path / "run")  # as on a new machine
    train("r.yaml")
    assert [one["step"] for one in metrics("run") if "train/loss" in one] == [3, 4]
    assert losses("run") == losses("disk")[2:]
    assert files(tmp_path / "run/export") == files(tmp_path / "disk/export")
    assert main(["export", "run", "out", "--step", "2"]) == 0
    assert main(["export", "disk", "gs://bucket/out", "--step", "2"]) == 0
    there = {Path(key).name: store.cat_file(key) for key in store.find("gs://bucket/out")}
    assert files(tmp_path / "out") == there
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert main(["export", "moved", "again"]) == 0
    assert files(tmp_path / "again") == files(tmp_path / "disk/export")


OTHERS = {
    "recipe": (["seed=1"], ["seed differ", "another checkpoint.folder"]),
    "output": (["output=other"], ["another run, with output run: output differ"]),
    "fresh": (["--fresh"], ["holds checkpoints of steps [4]", "--fresh deletes nothing"]),
}


@pytest.mark.parametrize(("words", "fragments"), OTHERS.values(), ids=OTHERS)
def test_no_other_run_takes_the_checkpoints(
    words: list[str],
    fragments: list[str],
    store: FakeStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"folder": URL}})
    train("r.yaml")
    before, there = files(tmp_path), {key: store.objects.file(key).read_bytes() for key in store.objects.keys("bucket")}
    message = refused(["run", "r.yaml", *words], capsys)
    assert all(fragment in message for fragment in ["checkpoint.folder: gs://bucket/runs/x holds", *fragments]), message
    assert files(tmp_path) == before
    assert {key: store.objects.file(key).read_bytes() for key in store.objects.keys("bucket")} == there
    # What has no owner is nobody's: it may be the only copy of something.
    store.rm_file("gs://bucket/runs/x/recipe.yaml")
    assert "but not the recipe.yaml of their run" in refused(["run", "r.yaml", "output=other"], capsys)


@pytest.mark.slow
def test_a_run_does_not_leave_its_checkpoints_behind(
    store: FakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"folder": URL}})
    train("r.yaml")
    shutil.rmtree(tmp_path / "run/export")
    for other in ("null", "gs://bucket/runs/y", "elsewhere"):
        assert "checkpoint.folder differ" in refused(["run", "r.yaml", f"checkpoint.folder={other}"], capsys)


def test_a_store_that_refuses_is_named_before_weights_are_read(
    store: FakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"folder": URL}, "model": {"path": "no/such"}})
    store.refuses = "recipe.yaml"
    message = refused(["run", "r.yaml"], capsys)
    assert message.startswith("error: checkpoint.folder: gs://bucket/runs/x cannot be used"), message
    assert "403" in message
    assert "Check the address, and that this machine may read and write there" in message


def test_a_store_that_cannot_be_reached_is_named(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Cannot connect to host storage.googleapis.com")

    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"folder": URL}})
    monkeypatch.setattr(FakeStore, "ls", unreachable)
    message = refused(["run", "r.yaml"], capsys)
    assert message.startswith("error: checkpoint.folder: gs://bucket/runs/x cannot be used"), message
    assert "Cannot connect to host" in message
    assert not (tmp_path / "run").exists()


def test_a_folder_on_a_disk_is_owned_likewise(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"folder": "disk/x"}})
    train("r.yaml")
    assert sorted(os.listdir("disk/x")) == ["4", "recipe.yaml", "writer"]
    assert "output differ" in refused(["run", "r.yaml", "output=other"], capsys)
    (tmp_path / "file").write_text("")
    message = refused(["run", "r.yaml", "output=other", "checkpoint.folder=file"], capsys)
    assert "checkpoint.folder: file cannot be used" in message


def test_stages_have_a_folder_each(tmp_path: Path):
    stages = [{"steps": 2}, {"algorithm": {"name": "dpo"}}]
    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"folder": f"{URL}/"}, "stages": stages})
    recipe = Recipe.load(tmp_path / "r.yaml")
    assert [stage.checkpoint.folder for stage in recipe.stages] == [f"{URL}/0_sft", f"{URL}/1_dpo"]
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert Recipe.load(tmp_path / "again.yaml") == recipe
    assert recipe.tiny().stages[0].checkpoint.folder is None
    shared = [{**stage, "checkpoint": {"folder": URL}} for stage in stages]
    write_recipe(tmp_path / "r.yaml", {"stages": shared})
    with pytest.raises(UserError, match=r"checkpoint\.folder: gs://bucket/runs/x is that of two stages"):
        Recipe.load(tmp_path / "r.yaml")
    write_recipe(tmp_path / "r.yaml", {"checkpoint": {"folder": "s3://bucket/x"}})
    with pytest.raises(UserError, match=r"checkpoint\.folder: s3://bucket/x: Orbax writes to gs:// and to disks alone"):
        Recipe.load(tmp_path / "r.yaml")


@pytest.mark.slow  # tests/run/test_kill.py kills a run that saves to a disk
def test_killed_before_a_checkpoint_is_complete_it_ends_like_the_uninterrupted_run(store: FakeStore, tmp_path: Path):
    """Between the state and the file that makes it a checkpoint; the uninterrupted run saves on a disk."""
    for name in ("disk", "store"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name)
    recipe = (tmp_path / "store/r.yaml").read_text()
    (tmp_path / "store/r.yaml").write_text(recipe.replace("every: 5", f"every: 5\n  folder: {URL}"))
    program = ("tests.fake_store", str(store.objects.root))
    with no_process_left() as runs:
        runs.append(Run(tmp_path / "disk"))
        runs.append(Run(tmp_path / "store", program, {HOLDS: f"/10/{COMPLETE}"}))
        whole, run = runs
        run.until(lambda: {"state/commit_success.txt", "metrics/metrics"} <= set(names(store, 10)))
        run.kill()
        assert COMPLETE not in names(store, 10)
        assert COMPLETE in names(store, 5)
        runs.append(Run(tmp_path / "store", program))
        assert runs[-1].wait() == 0, run.log
        assert "going on from step 5" in run.log
        assert whole.wait() == 0, whole.log
    assert lasting(run.run) == lasting(whole.run)
    assert lines(run.run / "samples.jsonl") == lines(whole.run / "samples.jsonl")
    assert files(run.run / "export") == files(whole.run / "export")
