"""What a run says of its products, and that docs/kernels.md has what the compiler does here.

Programs are read by hand first: what XLA prints of a product, a fusion around one, a copy before it.
"""

import re
from pathlib import Path

import jax
import pytest

from benchmarks.kernels import compiled, operations
from benchmarks.programs import Product, account, elements, products
from tunix.models.quantization.rules import matmuls_line

pytestmark = pytest.mark.models

PAGE = Path(__file__).parents[3] / "docs" / "kernels.md"
FUSED = """HloModule jit_f, is_scheduled=true

FileNames
1 "layers.py"

%copy_inside (input: s8[4,6]) -> s8[4,6] {
  %input = s8[4,6]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy = s8[4,6]{1,0:T(8,128)(4,1)} copy(%input)
}

%inside (p0: f32[4,6], p1: s8[4,6], p2: bf16[2,4]) -> bf16[2,6] {
  %p0 = f32[4,6]{1,0} parameter(0)
  %p1 = s8[4,6]{1,0} parameter(1)
  %values = s8[4,6]{1,0} fusion(%p1), kind=kLoop, calls=%copy_inside
  %p2 = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(2)
  %numbers = bf16[4,6]{1,0} convert(%values), metadata={op_name="jit(f)/convert"}
  ROOT %y = bf16[2,6]{1,0} convolution(%p2, %numbers), dim_labels=bf_io->bf
}

ENTRY %main.1 (x.1: bf16[2,4], w.1: s8[4,6], scale.1: f32[1,6]) -> bf16[2,6] {
  %x.1 = bf16[2,4]{1,0} parameter(0)
  %w.1 = s8[4,6]{1,0:T(32,128)(4,1)} parameter(1), sharding={replicated}
  %scale.1 = f32[1,6]{1,0} parameter(2)
  %copy-start = (s8[4,6]{1,0:T(32,128)(4,1)S(1)}, s8[4,6]{1,0}, u32[]{:S(2)}) copy-start(%w.1)
  %spread = f32[4,6]{1,0} broadcast(%scale.1), dimensions={0,1}, backend_config={"estimated_cycles":"30"}
  %copy-done = s8[4,6]{1,0} copy-done(%copy-start)
  ROOT %f = bf16[2,6]{1,0} fusion(%spread, %copy-done, %x.1), kind=kOutput, calls=%inside, \
backend_config={"estimated_cycles":"12"}
}
"""
WRITTEN = """HloModule jit_g

%widen (p: s8[4,6]) -> f32[4,6] {
  %p = s8[4,6]{1,0} parameter(0)
  ROOT %wide = f32[4,6]{1,0} convert(%p)
}

ENTRY %main.2 (x.2: f32[2,4], w.2: s8[4,6]) -> f32[2,6] {
  %x.2 = f32[2,4]{1,0} parameter(0)
  %w.2 = s8[4,6]{1,0} parameter(1)
  %made = f32[4,6]{1,0} fusion(%w.2), kind=kLoop, calls=%widen
  ROOT %dot = f32[2,6]{1,0} dot(%x.2, %made), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_programs_are_read_by_hand():
    # The fusion reads the weight as it was given; the scales were spread to a matrix before.
    assert products(FUSED) == [Product("convolution", ("bf16", "bf16", "bf16"), ("s8", "bf16"), ("f32[4,6]",))]
    assert products(WRITTEN) == [Product("dot", ("f32", "f32", "f32"), ("f32",), ("f32[4,6]",))]
    assert account(FUSED).cycles == 30 + 12
    assert account(WRITTEN).cycles == 0
    assert elements("f32[4,6]") == 24
    assert elements("u32[]") == 1


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((None, None, "float32"), "float32"),
        (("nf4", None, "float32"), "nf4 weights, each matrix dequantized to float32"),
        (
            ("int8", "int8", "bfloat16"),
            "int8 weights and int8 activations, rounded and dequantized to bfloat16 before each product",
        ),
    ],
)
def test_a_product_is_told(asked, told):
    weights, activations, compute = asked
    assert matmuls_line([(weights, activations)], compute) == f"products of the layers: {told}"


def test_the_line_of_a_run():
    assert matmuls_line([], "float32") == "products of the layers: float32"
    assert matmuls_line([("nf4", None), ("fp8", "fp8")], "bfloat16") == (
        "products of the layers: nf4 weights, each matrix dequantized to bfloat16; fp8 weights and fp8 activations, "
        "rounded and dequantized to bfloat16 before each product"
    )
    assert matmuls_line([("int4", None)], "float32", simulated=True) == (
        "products of the layers: int4 weights, rounded and dequantized to float32 before each product"
    )


@pytest.mark.parametrize("base", ["nf4", "int4", "int8", "fp8"])
def test_this_processor_does_what_the_page_says(base):
    """Rows of its table begin with the operation; each cell with its way, in bold."""
    way = re.search(rf"^\| `{base} weights` \| \*\*(\w+)\*\*", PAGE.read_text(), re.M)
    assert way is not None
    one = operations(16, (64, 128))[f"{base} weights, float32"]
    (found,) = products(compiled(one, jax.devices("cpu")[0]).as_text() or "")
    assert found.types == ("f32", "f32", "f32")
    read = any(kind in ("u4", "s4", "s8", "f8e4m3fn") for kind in found.reads)
    written = any(elements(kind) == 64 * 128 for kind in found.made)
    assert (read, written) == {"before": (False, True), "inside": (True, False)}[way[1]]
