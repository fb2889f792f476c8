"""Writing safetensors: the format's bytes, in order, with a bounded number of them on their way."""

import json
import re
import struct
import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tunix.distributed.shared_folder import SharedFolder
from tunix.errors import UserError
from tunix.hf.safetensors_io import Entry, Sent, tensors_of_folder, write_share
from tunix.util import ahead


def test_a_file_is_a_header_and_the_bytes_in_order(tmp_path: Path):
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7, -8], np.int8)
    entries = [Entry("b", (3, 2), "F32", lambda: lambda: a.T), Entry("a", (2,), "I8", lambda: lambda: b)]
    write_share(SharedFolder(tmp_path), 0, "file", entries)
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]},
        "a": {"dtype": "I8", "shape": [2], "data_offsets": [24, 26]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    values = np.array([0, 3, 1, 4, 2, 5], np.float32).tobytes() + b"\x07\xf8"
    assert (tmp_path / "file").read_bytes() == struct.pack("<Q", len(text)) + text + values


@pytest.mark.parametrize(
    ("sizes", "most", "events"),
    [
        ([4, 4, 4], 8, "s0 s1 w0 s2 w1 w2"),
        ([4, 16, 4, 4], 16, "s0 w0 s1 w1 s2 s3 w2 w3"),  # the second needs more than the limit: it is alone
        ([16, 6, 6, 6, 6], 16, "s0 w0 s1 s2 w1 s3 w2 s4 w3 w4"),  # a table and layers: room for two of 6
    ],
)
def test_the_next_tensors_are_on_their_way_within_a_limit(
    sizes: list[int], most: int, events: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ahead, "LEAST_AHEAD", 8)
    alive, peak, seen = 0, 0, []

    def entry(number: int, size: int) -> Entry:
        def send() -> Sent:
            nonlocal alive, peak
            array = np.full(size, number, np.int8)
            alive += size
            peak = max(peak, alive)
            weakref.finalize(array, freed, size)
            seen.append(f"s{number}")
            return lambda: [seen.append(f"w{number}"), array][1]

        return Entry(str(number), (size,), "I8", send)

    def freed(size: int) -> None:
        nonlocal alive
        alive -= size

    write_share(SharedFolder(tmp_path), 0, "file", [entry(number, size) for number, size in enumerate(sizes)])
    assert " ".join(seen) == events
    assert (peak, alive) == (most, 0)
    assert (tmp_path / "file").read_bytes().endswith(b"".join(bytes([n]) * size for n, size in enumerate(sizes)))


A, B, C = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2, 3))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_shards(folder: Path, shards: dict[str, dict[str, float]], places: dict[str, str] | None) -> None:
    """Files of tensors of four equal numbers, and an index unless it is None."""
    for name, tensors in shards.items():
        save_file({key: np.full(4, value, np.float32) for key, value in tensors.items()}, folder / name)
    if places is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    ("shards", "places", "expected"),
    [
        # A stale copy in a later shard, and in an earlier one.
        ({A: {"head": 16}, B: {"norm": 1, "head": 0}}, {"head": A, "norm": B}, {"head": (A, 16), "norm": (B, 1)}),
        ({A: {"norm": 1, "head": 0}, B: {"head": 16}}, {"head": B, "norm": A}, {"head": (B, 16), "norm": (A, 1)}),
        # A shard, an adapter and another layout that the index does not name.
        (
            {A: {"head": 16}, C: {"head": 0}, "adapter_model.safetensors": {"head": 0}, "consolidated.safetensors": {}},
            {"head": A},
            {"head": (A, 16)},
        ),
        ({SINGLE: {"head": 16}, "consolidated.safetensors": {"head": 0}}, None, {"head": (SINGLE, 16)}),
        # An index that names the whole file, and one that is left over from shards that are gone.
        ({SINGLE: {"head": 16}}, {"head": SINGLE}, {"head": (SINGLE, 16)}),
        ({SINGLE: {"head": 16}}, {"head": A}, {"head": (SINGLE, 16)}),
        # A tensor that the index does not name, in one shard.
        ({A: {"head": 16, "scale": 3}}, {"head": A}, {"head": (A, 16), "scale": (A, 3)}),
    ],
)
def test_a_tensor_is_read_from_the_file_that_the_index_names(
    shards: dict[str, dict[str, float]],
    places: dict[str, str] | None,
    expected: dict[str, tuple[str, float]],
    tmp_path: Path,
):
    save_shards(tmp_path, shards, places)
    tensors = tensors_of_folder(tmp_path)
    assert {key: (x.file.name, float(x.read().mean())) for key, x in tensors.items()} == expected


@pytest.mark.parametrize(
    ("shards", "places", "message"),
    [
        ({A: {"head": 16}}, {"head": A, "norm": B}, f"{B} is missing; {INDEX} says that it holds norm"),
        ({A: {"head": 16}, B: {"norm": 1}}, {"head": B, "norm": B}, f"{B} lacks head, which {INDEX} says"),
        ({A: {"x": 1, "head": 16}, B: {"x": 2}}, {"head": A, "x": B, "gone": A}, f"{A} lacks gone"),
        (
            {A: {"head": 16, "scale": 1}, B: {"norm": 1, "scale": 2}},
            {"head": A, "norm": B},
            f"scale is in both {A} and {B}, and {INDEX} does not say which is right",
        ),
        ({SINGLE: {"head": 16}, A: {"head": 0}}, {"head": A}, f"holds weights twice: {SINGLE}, and {A}, which {INDEX}"),
        ({A: {"head": 16}, B: {"head": 0}}, None, f"has {A}, {B}, but neither {SINGLE} nor {INDEX}"),
    ],
)
def test_weights_that_contradict_each_other_are_refused(
    shards: dict[str, dict[str, float]], places: dict[str, str] | None, message: str, tmp_path: Path
):
    save_shards(tmp_path, shards, places)
    with pytest.raises(UserError, match=re.escape(message)):
        tensors_of_folder(tmp_path)
