"""What tests of several modules watch."""

import pytest

from tunix.hf import safetensors_io


@pytest.fixture
def ranges(monkeypatch) -> list[tuple[int, int]]:
    """The ranges of bytes that are read, as they are read."""
    found, read = [], safetensors_io.read_range

    def counting(file, begin, into):
        found.append((begin, begin + len(into)))
        read(file, begin, into)

    monkeypatch.setattr(safetensors_io, "read_range", counting)
    return found
