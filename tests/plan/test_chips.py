"""A device is known by the name that JAX gives it, and by no longer one that begins alike."""

import pytest

from tunix.util.chips import chip_named


@pytest.mark.parametrize(
    ("kind", "tera", "giga"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H200", 989, 4800),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40", 181, 864),
        ("NVIDIA L40S", 362, 864),
        ("TPU v5 lite", 197, 819),
        ("TPU v5p", 459, 2765),
        ("TPU v6 lite", 918, 1640),
    ],
)
def test_published_figures_go_by_whole_names(kind: str, tera: float, giga: float):
    chip = chip_named(kind)
    assert chip is not None
    assert (chip.flops / 1e12, chip.bandwidth / 1e9) == (tera, giga)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA L400", "NVIDIA GeForce RTX 4090", "TPU v3"])
def test_others_have_none(kind: str):
    assert chip_named(kind) is None
