"""Folders on an object store: fsspec's own file system in memory stands in for the bucket."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import load_file, save_file

from tests.hf.test_tensor_transfer import data_of
from tests.marks import slow
from tests.tiny_models import CASES, load, reference_folder
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.hf import safetensors_io
from tunix.hf.model_folder import resolve_folder, save_folder
from tunix.hf.safetensors_io import local_copy, tensors_of_folder
from tunix.hf.source import pretrained
from tunix.recipe.recipe import Recipe
from tunix.util.object_store import url_of


class Bucket(MemoryFileSystem):
    """A store that counts the bytes that were asked for."""

    protocol = ("gs", "gcs")
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    cachable = False

    def __init__(self):
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []
        self.refuses = ""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs:/").removeprefix("/"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.ranges.append((Path(path).name, start, end))
        return super().cat_file(path, start, end, **kwargs)

    def open(self, path, mode="rb", **kwargs):
        if self.refuses and path.endswith(self.refuses):
            raise PermissionError("no right to write")
        return super().open(path, mode, **kwargs)


@pytest.fixture
def bucket(monkeypatch, tmp_path) -> Bucket:
    store = Bucket()
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    monkeypatch.setattr(backend._FileSystemSpecBackend, "fs", lambda self, path: store)
    monkeypatch.setattr(safetensors_io, "COPIES", tmp_path / "copies")
    return store


@pytest.fixture
def folder(tmp_path) -> Path:
    reference_folder(CASES["llama-grouped-tied"], tmp_path / "model")
    bytes_tokenizer("llama3").save(tmp_path / "model")
    return tmp_path / "model"


def put(bucket: Bucket, folder: Path, url: str) -> None:
    for file in folder.iterdir():
        bucket.pipe_file(f"{url}/{file.name}", file.read_bytes())


def test_addresses_and_paths_are_told_apart():
    assert url_of("gs://bucket/a/b/") == url_of(Path("gs://bucket/a/b")) == "gs://bucket/a/b"
    assert url_of("s3://bucket/a") == "s3://bucket/a"
    for local in ("runs/a", "/gs/a", "gs", "google/gemma-3-1b-it", "file://a", "gs://"):
        assert url_of(local) is None


@pytest.mark.parametrize("name", ["llama-grouped-tied", *slow(["gpt_oss-five-of-two"])])
def test_a_model_is_read_from_a_bucket_each_byte_of_its_weights_once(name, bucket, tmp_path):
    folder = tmp_path / "model"
    reference_folder(CASES[name], folder)
    put(bucket, folder, "gs://bucket/model")
    bucket.pipe_file("gs://bucket/model/optimizer.bin", b"a pickle")
    bucket.pipe_file("gs://bucket/model/step/other.json", b"{}")
    copy = resolve_folder("gs://bucket/model")
    assert not (copy / "optimizer.bin").exists()
    assert (copy / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    begin, end = data_of(folder / "model.safetensors")
    (copied,) = copy.glob("*.safetensors")
    assert copied.stat().st_size == end
    assert not any(copied.read_bytes()[begin:])  # a hole
    bucket.ranges.clear()
    (_, ours), (_, theirs) = load(copy), load(folder)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    assert {name for name, *_ in bucket.ranges} == {"model.safetensors"}
    assert min(start for _, start, _ in bucket.ranges) == begin
    assert sum(stop - start for _, start, stop in bucket.ranges) == end - begin


def test_a_model_in_a_bucket_is_named_by_its_address(folder, bucket):
    put(bucket, folder, "gs://bucket/model")
    source = pretrained("gs://bucket/model")
    assert source.name == "gs://bucket/model"
    assert source.tokenizer is not None
    assert source.decoder == pretrained(str(folder)).decoder


def test_a_changed_folder_is_copied_again(folder, bucket):
    put(bucket, folder, "gs://bucket/model")
    bucket.pipe_file("gs://bucket/model/chat_template.jinja", b"old")
    copy = resolve_folder("gs://bucket/model")
    bucket.rm_file("gs://bucket/model/chat_template.jinja")
    bucket.pipe_file("gs://bucket/model/generation_config.json", b"{}")
    assert resolve_folder("gs://bucket/model") == copy
    assert not (copy / "chat_template.jinja").exists()
    assert (copy / "generation_config.json").read_text() == "{}"


@pytest.mark.parametrize("cut", [4, 100, -64])
def test_damaged_weights_in_a_bucket_are_named_as_local_ones_are(cut, folder, bucket):
    put(bucket, folder, "gs://bucket/model")
    bucket.pipe_file("gs://bucket/model/model.safetensors", (folder / "model.safetensors").read_bytes()[:cut])
    with pytest.raises(UserError, match=r"bucket/model/model\.safetensors is not a whole safetensors file"):
        pretrained("gs://bucket/model")


def test_a_tensor_in_a_bucket_is_read_from_the_shard_that_the_index_names(bucket, tmp_path):
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({"head": np.ones(4, np.float32)}, tmp_path / shards[0])
    save_file({"norm": np.ones(4, np.float32), "head": np.zeros(4, np.float32)}, tmp_path / shards[1])
    places = {"head": shards[0], "norm": shards[1]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    put(bucket, tmp_path, "gs://bucket/shards")
    head = tensors_of_folder(local_copy("gs://bucket/shards", ["*"]))["head"]
    assert (head.file.name, head.read().sum()) == (shards[0], 4)


def test_a_folder_that_is_not_there_and_a_missing_package_are_named(bucket, monkeypatch):
    with pytest.raises(UserError, match="gs://bucket/nothing: there is no such folder"):
        resolve_folder("gs://bucket/nothing")
    monkeypatch.undo()

    def absent(self, path):
        raise ImportError("Please install s3fs to access S3")

    monkeypatch.setattr(backend._FileSystemSpecBackend, "fs", absent)
    with pytest.raises(UserError, match=r"install s3fs.*pip install '\.\[s3\]'"):
        resolve_folder("s3://bucket/model")


def test_an_export_to_a_bucket_is_the_local_one_and_replaces_nothing(folder, bucket, tmp_path):
    model, params = load(folder)
    for out in (tmp_path / "out", Path("gs://bucket/out")):
        save_folder(out, model.config, params, source=folder, dtype="float32")
    local = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    there = {Path(file).name: bucket.cat_file(file) for file in bucket.find("gs://bucket/out")}
    assert there == local
    with pytest.raises(UserError, match="gs://bucket/out is there already"):
        save_folder(Path("gs://bucket/out"), model.config, params, source=None, dtype="float32")
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


def test_an_export_that_a_bucket_refuses_leaves_nothing(folder, bucket):
    model, params = load(folder)
    bucket.refuses = "config.json"  # the last: all others are written before
    with pytest.raises(UserError, match=r"gs://bucket/out: .*no right to write"):
        save_folder(Path("gs://bucket/out"), model.config, params, source=None, dtype="float32")
    assert bucket.find("gs://bucket/out") == []


def test_an_export_touches_nothing_that_is_in_a_bucket(folder, bucket):
    """A folder that holds folders alone is taken too; and what somebody writes meanwhile stays if the export fails."""
    model, params = load(folder)
    bucket.pipe_file("gs://bucket/models/mine/model.safetensors", b"kept")
    with pytest.raises(UserError, match="gs://bucket/models is there already"):
        save_folder(Path("gs://bucket/models"), model.config, params, source=None, dtype="float32")

    class Busy(Bucket):
        def open(self, path, mode="rb", **kwargs):
            if path.endswith("config.json"):
                self.pipe_file("gs://bucket/out/others/notes.txt", b"kept too")
            return super().open(path, mode, **kwargs)

    bucket.__class__, bucket.refuses = Busy, "config.json"
    with pytest.raises(UserError, match="no right to write"):
        save_folder(Path("gs://bucket/out"), model.config, params, source=None, dtype="float32")
    assert bucket.find("gs://bucket") == ["/bucket/models/mine/model.safetensors", "/bucket/out/others/notes.txt"]


def test_a_run_in_a_bucket_is_refused_before_anything_is_read():
    with pytest.raises(UserError, match=r"output: gs://bucket/runs/a is .*no lock.*tunix export"):
        Recipe.load("sft_qwen", ["output=gs://bucket/runs/a"])
