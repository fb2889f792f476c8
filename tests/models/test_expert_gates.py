"""The gate of experts' products: what multiplies well passes, and what is broken does not."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.tiny_models import one_device
from tunix.config import ModelConfig, ProductsConfig
from tunix.errors import UserError
from tunix.mesh import AXES
from tunix.models import grouped_products as kernels
from tunix.models import kernel_gates
from tunix.models.families.table import small
from tunix.models.grouped_products import grouped_gradients, grouped_products
from tunix.models.kernel_gates import grouped_difference
from tunix.run import describe
from tunix.run import kernels as kernels_of_run

pytestmark = pytest.mark.models

BFLOAT16 = ModelConfig(path="model", dtype="bfloat16")
FP8 = ModelConfig(path="model", dtype="bfloat16", quantization=ProductsConfig(compute="fp8"))


def test_right_products_pass_and_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_gates, "MEASURED", tmp_path / "found.json")
    assert grouped_difference(16, 8, "float32") < 1e-5
    monkeypatch.setattr(kernel_gates, "grouped_products", lambda rows, *_, **__: rows * np.nan)
    assert grouped_difference(16, 8, "float32") < 1e-5, "measured once for a device"


def broken_products(rows, matrices, sizes, *, transposed):
    """The first group's matrix for all."""
    return grouped_products(rows, jnp.broadcast_to(matrices[:1], matrices.shape), sizes, transposed=transposed)


def broken_gradients(rows, d, matrices, sizes):
    """A group without rows has the gradient of the one before it, as a kernel once had it."""
    right = grouped_gradients(rows, d, matrices, sizes)
    return jnp.where((sizes > 0)[:, None, None], right, jnp.roll(right, 1, axis=0))


@pytest.mark.parametrize(
    ("name", "broken", "dtype"),
    [
        ("products", broken_products, "float32"),
        ("gradients", broken_gradients, "float32"),
        ("products", broken_products, "float8_e4m3fn"),
    ],
)
def test_wrong_ones_are_noticed(name, broken, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_gates, "MEASURED", tmp_path / "found.json")
    assert kernel_gates._measured(16, 8, dtype) < 1e-5
    monkeypatch.setattr(kernel_gates, f"grouped_{name}", broken)
    assert grouped_difference(16, 8, dtype) > kernels_of_run.LIMIT


def test_a_run_on_such_a_device_is_refused(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels_of_run, "grouped_difference", lambda *x: asked.append(x) or 0.3)
    mixture = small("qwen3_moe")
    kernels_of_run.check_products(mixture, BFLOAT16, one_device())
    monkeypatch.setattr(kernels_of_run, "_platform", lambda mesh: "gpu")
    kernels_of_run.check_products(replace(mixture, experts=None), BFLOAT16, one_device())
    assert not asked, "a CPU has no kernels, and a dense model no experts"
    with pytest.raises(UserError, match=r"off plain products by 0\.3 of their size"):
        kernels_of_run.check_products(mixture, BFLOAT16, one_device())
    with pytest.raises(UserError, match=r"off plain .*: leave out model.quantization$"):
        kernels_of_run.check_products(mixture, FP8, one_device())
    assert asked == [(mixture.d_model, mixture.ffn, dtype) for dtype in ("bfloat16", "float8_e4m3fn")]


@dataclass(frozen=True)
class Gpu:
    """As much of a device as is asked for its kernels."""

    compute_capability: str
    device_kind: str = "NVIDIA X"
    platform: str = "gpu"
    process_index: int = 0
    id: int = 0


def mesh_of(capability: str) -> Mesh:
    return Mesh(np.array([Gpu(capability)]).reshape(1, 1, 1, 1, 1), AXES)


def test_a_run_says_which_kernels_multiply_its_experts(monkeypatch):
    mixture = replace(small("gpt_oss"), d_model=2880, ffn=2880)
    assert kernels_of_run.experts_line(mixture, BFLOAT16, mesh_of("9.0")) == (
        "experts: triton (mosaic: widths of 2880 and 2880 are no multiples of 128)"
    )
    monkeypatch.setattr(kernels, "missing", lambda name: None)
    assert (
        kernels_of_run.experts_line(replace(mixture, d_model=256, ffn=128), BFLOAT16, mesh_of("9.0"))
        == "experts: mosaic"
    )
    assert kernels_of_run.experts_line(replace(mixture, d_model=256, ffn=128), FP8, mesh_of("9.0")) == (
        "experts: triton (mosaic: it multiplies numbers of 16 bits, not float8_e4m3fn); mosaic"
    )
    assert kernels_of_run.experts_line(mixture, BFLOAT16, one_device()) is None
    assert kernels_of_run.experts_line(replace(mixture, experts=None), BFLOAT16, mesh_of("9.0")) is None


def test_a_gpu_without_kernels_is_named_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(describe, "missing", lambda name: "tokamax 0.0.9 was not tried")
    (old,) = describe.device_notes(mesh_of("7.5"))
    assert "NVIDIA X has compute capability 7.5, and kernels" in old
    assert "want 8.0 or more: it works without them, slowly" in old
    assert not list(describe.device_notes(mesh_of("8.6")))
    assert not list(describe.device_notes(one_device()))
    (other,) = describe.device_notes(mesh_of("9.0"))
    assert other == "attention does without its fastest kernel: tokamax 0.0.9 was not tried"
