"""What is asked of this machine before JAX is: whether the driver of its GPU is new enough."""

from pathlib import Path

import pytest

from tunix.errors import UserError
from tunix.util import accelerators
from tunix.util.accelerators import check_driver

SAYS = {
    "closed": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Oct 25 07:26:31 UTC 2023\nGCC version:  gcc 12",
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U16)\n",
}


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)


def told(folder: Path, kind: str, version: str) -> Path:
    path = folder / "version"
    path.write_text(SAYS[kind].format(version))
    return path


@pytest.mark.parametrize("kind", SAYS)
@pytest.mark.parametrize(
    ("wheels", "version", "refused"),
    [
        ((13,), "535.129.03", "driver here is 535, and JAX's CUDA 13 wants 580 or newer: update it, or `pip install"),
        ((12,), "470.82.01", "driver here is 470, and JAX's CUDA 12 wants 525 or newer: update it; JAX_PLATFORMS=cpu"),
        ((13,), "580.65.06", None),
        ((12,), "535.129.03", None),
        ((12, 13), "535.129.03", None),
        ((), "470.82.01", None),
    ],
)
def test_a_driver_that_is_too_old_is_refused(kind, wheels, version, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(
        accelerators, "installed", lambda module: module in [f"jax_plugins.xla_cuda{x}" for x in wheels]
    )
    if refused is None:
        check_driver(told(tmp_path, kind, version))
        return
    with pytest.raises(UserError, match=refused.replace("(", r"\(")):
        check_driver(told(tmp_path, kind, version))


def test_whoever_leaves_the_gpu_out_or_skips_the_check_is_not_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerators, "installed", lambda module: True)
    old = told(tmp_path, "closed", "470.82.01")
    check_driver(tmp_path / "none")
    for name, value in (("JAX_PLATFORMS", "cpu"), ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")):
        with monkeypatch.context() as other:
            other.setenv(name, value)
            check_driver(old)
    with pytest.raises(UserError, match="CUDA 12 wants 525"):
        check_driver(old)
