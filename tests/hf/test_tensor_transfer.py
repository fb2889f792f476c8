"""How tensors come from files onto a mesh: each byte once, in long pieces, not too many at a time, the same values."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.marks import slow
from tests.tiny_models import CASES, by_hf_name, load, one_device, reference_folder
from tunix.config import DType, MeshConfig
from tunix.errors import UserError
from tunix.hf import safetensors_io, tensor_transfer
from tunix.hf.model_folder import load_params
from tunix.mesh import build_mesh
from tunix.models.families.table import read_config
from tunix.models.model import Model
from tunix.models.quantization.formats import Quantization
from tunix.util.ahead import ahead

MESHES = [{"fsdp": 1}, {"fsdp": 8}, {"tensor": 8}, {"fsdp": 4, "tensor": 2}, {"data": 8}]


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    number = int(np.prod(list(sizes.values())))
    return build_mesh(MeshConfig(**{"data": 1, "fsdp": 1, "tensor": 1, **sizes}), jax.devices()[:number])


def data_of(file: Path) -> tuple[int, int]:
    """The bytes of a safetensors file that are tensors."""
    data = file.read_bytes()
    (header,) = struct.unpack("<Q", data[:8])
    ends = [held["data_offsets"][1] for key, held in json.loads(data[8 : 8 + header]).items() if key[:2] != "__"]
    assert 8 + header + max(ends) == len(data)
    return 8 + header, len(data)


def assert_read_once(ranges: list[tuple[int, int]], file: Path) -> None:
    """Each byte of its tensors, and none twice."""
    ranges.sort()
    start, end = data_of(file)
    assert ranges[0][0] == start
    assert all(one[1] == after[0] for one, after in pairwise(ranges))
    assert ranges[-1][1] == end


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Qwen's: with biases, an untied head, and 3 layers, which 8 devices do not divide; nor its heads and norms."""
    folder = tmp_path_factory.mktemp("model")
    reference_folder(CASES["qwen2-biases-grouped"], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("sizes", [MESHES[2], *slow([MESHES[0], MESHES[1], MESHES[3], MESHES[4]])], ids=str)
def test_each_byte_is_read_once_whatever_the_mesh(sizes, host, folder, ranges, monkeypatch):
    """And the numbers are the same where the host transposes, as for a CPU, and where the devices do."""
    monkeypatch.setattr(tensor_transfer, "HOST_TURNS", ("cpu",) if host else ())
    model, spread = load(folder, mesh=mesh_of(sizes))
    assert_read_once(ranges, folder / "model.safetensors")
    theirs = load_file(folder / "model.safetensors")
    ours = by_hf_name(model, spread)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 1}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_a_base_that_is_rounded_is_read_once_too(sizes, folder, ranges):
    model = Model(read_config(folder), quantization=Quantization("int8", 16))
    dtypes: dict[str, DType] = dict.fromkeys(model.shapes, "float32")
    mesh = mesh_of(sizes)
    params = load_params(model, folder, dtypes, mesh)
    start, end = data_of(folder / "model.safetensors")
    assert sum(stop - begin for begin, stop in ranges) == end - start
    plain = load_params(model, folder, dtypes, one_device())
    for name, x in params.items():
        np.testing.assert_array_equal(x, plain[name], err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "limit", "most"),
    [
        ([4, 4, 4, 4], 8, 8),
        ([4, 4, 9, 4, 4], 8, 9),  # the third is above the limit: it is alone
        ([3, 5, 1, 1, 1, 6], 7, 7),
        ([1] * 10, 100, 10),
    ],
)
def test_readers_hold_no_more_than_the_limit(sizes, limit, most):
    held, seen, started = 0, [], []

    def start(job: int) -> int:
        nonlocal held
        held += sizes[job]
        seen.append(held)
        started.append(job)
        return 10 * job

    used = []
    for job, result in ahead(range(len(sizes)), sizes.__getitem__, start, limit):
        assert result == 10 * job
        used.append(job)
        held -= sizes[job]
    assert used == started == list(range(len(sizes)))
    assert max(seen) == most


def test_all_that_fits_is_started_before_the_first_is_used():
    started = []
    jobs: Iterator = ahead(range(5), lambda job: 1, started.append, 3)
    next(jobs)
    assert started == [0, 1, 2]
    next(jobs)
    assert started == [0, 1, 2, 3]


def test_a_file_that_shrinks_meanwhile_is_named(tmp_path, monkeypatch):
    reference_folder(CASES["llama-grouped-tied"], tmp_path)
    checked, file = safetensors_io.safe_open, tmp_path / "model.safetensors"

    @contextmanager
    def shrinking(path, framework):
        with checked(path, framework):
            yield
        file.write_bytes(file.read_bytes()[:-64])

    monkeypatch.setattr(safetensors_io, "safe_open", shrinking)
    with pytest.raises(UserError, match=r"model\.safetensors has become shorter"):
        load(tmp_path)
