"""Writing safetensors: the format's bytes, in order, with a bounded number of them on their way."""

import json
import struct
import weakref
from pathlib import Path

import numpy as np
import pytest

from tunix.hf.safetensors_io import Entry, Sent, write_tensors
from tunix.util import ahead


def test_a_file_is_a_header_and_the_bytes_in_order(tmp_path: Path):
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7, -8], np.int8)
    entries = [Entry("b", (3, 2), "F32", lambda: lambda: a.T), Entry("a", (2,), "I8", lambda: lambda: b)]
    write_tensors(tmp_path / "file", entries)
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

    write_tensors(tmp_path / "file", [entry(number, size) for number, size in enumerate(sizes)])
    assert " ".join(seen) == events
    assert (peak, alive) == (most, 0)
    assert (tmp_path / "file").read_bytes().endswith(b"".join(bytes([n]) * size for n, size in enumerate(sizes)))
