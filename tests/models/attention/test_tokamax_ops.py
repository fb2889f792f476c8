"""What is asked of tokamax before a kernel of it is called: whether it is there, tried, and whole."""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest

from tunix.models.attention import tokamax_ops
from tunix.models.attention.tokamax_ops import OPERATIONS, attention_mask, missing, operation

pytestmark = pytest.mark.models


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    missing.cache_clear()
    operation.cache_clear()
    yield
    missing.cache_clear()
    operation.cache_clear()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_installed_version_has_its_operations(name):
    pytest.importorskip("tokamax")
    assert missing(name) is None
    assert callable(operation(name))


def test_its_mask_is_made():
    pytest.importorskip("tokamax")
    assert attention_mask(k_start=None, k_end=None, is_causal=True).is_causal


@pytest.mark.parametrize("installed", ["0.0.9", "0.0.18", "0.1.0rc1"])
def test_a_version_that_was_not_tried_is_not_called(installed, monkeypatch):
    monkeypatch.setattr(tokamax_ops, "version", lambda package: installed)
    assert str(missing("attention")).startswith(
        f"tokamax {installed} was not tried, 0.0.12 to 0.0.17 were: `pip install"
    )


def test_a_module_that_moved_is_a_reason(monkeypatch):
    monkeypatch.setattr(tokamax_ops, "version", lambda package: "0.0.15")
    monkeypatch.setitem(sys.modules, "tokamax._src.ops.ragged_dot.pallas_mosaic_gpu", ModuleType("empty"))
    reason = "tokamax 0.0.15 has no PallasMosaicGpuRaggedDot here (module 'empty' has no attribute"
    assert str(missing("ragged_dot")).startswith(reason)


def test_without_tokamax_its_extra_is_named(monkeypatch):
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(tokamax_ops, "version", version)
    assert missing("attention") == "it needs tokamax: `pip install '.[gpu]'` in a clone of tunix"
