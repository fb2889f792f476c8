"""What is asked of this machine before JAX is: whether its GPUs' driver is new enough, and their memory free."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunix.errors import UserError
from tunix.util import accelerators
from tunix.util.accelerators import cards, check_cards, check_driver

SAYS = {
    "closed": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Oct 25 07:26:31 UTC 2023\nGCC version:  gcc 12",
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U16)\n",
}


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
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


TWO = """0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 81000
1, GPU-bb, NVIDIA H100 80GB HBM3, 81559, 9000
"""
KINDS = TWO.replace("1, GPU-bb, NVIDIA H100 80GB HBM3", "1, GPU-bb, NVIDIA L4")


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch):
    """`nvidia-smi` as it answers on a machine with GPUs."""

    def answers(text: str, **env: str) -> None:
        cards.cache_clear()
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(accelerators, "accelerated", lambda: True)
        monkeypatch.setattr(accelerators, "installed", lambda module: module == "jax_plugins.xla_cuda13")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))

    yield answers
    cards.cache_clear()


@pytest.mark.parametrize(
    ("text", "visible", "expected"),
    [
        (TWO, None, [0, 1]),
        (TWO, "1", [1]),
        (TWO, "GPU-aa", [0]),
        (TWO, "", []),
        (KINDS, None, [0, 1]),
        # CUDA numbers the fastest first, nvidia-smi by the bus.
        (KINDS, "0", []),
        (KINDS, "GPU-bb", [1]),
        (TWO, "MIG-cc", []),
        ("No devices were found\n", None, []),
        ("0, GPU-aa, NVIDIA GB10, [N/A], [N/A]\n", None, []),
    ],
)
def test_the_gpus_that_jax_would_use_are_those_of_nvidia_smi(smi, text, visible, expected):
    smi(text, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert [card.number for card in cards()] == expected


def test_a_gpu_that_others_have_taken_is_refused_before_jax_takes_it(smi):
    smi(TWO)
    words = r"GPU 1 \(NVIDIA H100 80GB HBM3\): other processes have taken 70.9 of 79.6 GiB.*MEM_FRACTION=0.10$"
    with pytest.raises(UserError, match=words):
        check_cards()


@pytest.mark.parametrize(
    "env",
    [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"},
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ],
)
def test_whoever_chooses_another_gpu_or_takes_less_is_not_refused(smi, env):
    smi(TWO, **env)
    check_cards()


def test_without_nvidia_smi_nothing_is_known_and_nothing_refused(smi, monkeypatch):
    smi(TWO)

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert cards() == ()
    check_cards()


def test_a_jax_for_cpus_does_not_mind_who_has_the_gpu(smi, monkeypatch):
    smi(TWO)
    monkeypatch.setattr(accelerators, "installed", lambda module: False)
    assert cards() == ()
    check_cards()
