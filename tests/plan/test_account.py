"""What a compiled program costs, against arithmetic."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tunix.config import MeshConfig
from tunix.mesh import build_mesh
from tunix.plan.account import Account, account, largest
from tunix.plan.hlo import arrays, parsed, size
from tunix.util.loops import loop, switch

M, K, N, LAYERS = 8, 32, 16, 5
X = jax.ShapeDtypeStruct((M, K), jnp.float32)
STACKED = jax.ShapeDtypeStruct((LAYERS, K, K), jnp.float32)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def text(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def read(function, *arguments) -> Account:
    return account(text(function, *arguments))


def through_layers(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_types_as_xla_prints_them():
    assert arrays("(f32[2,3]{1,0:T(8,128)}, s32[])") == [("f32", (2, 3)), ("s32", ())]
    sizes = {
        "f32[2,3]{1,0}": 24,
        "bf16[4]": 8,
        "pred[5]": 5,
        "s4[8]": 4,
        "u8[3]": 3,
        "f8e4m3fn[2,2]": 4,
        "token[]": 0,
        "f32[8]{0:S(1)}": 0,
    }
    assert {kind: size(kind) for kind in sizes} == sizes


def test_a_product_costs_two_for_each_multiplication():
    found = read(jnp.matmul, X, jax.ShapeDtypeStruct((K, N), jnp.float32))
    assert found.flops == 2 * M * K * N
    assert found.bytes == pytest.approx(4 * (M * K + K * N + M * N))


def test_a_scan_costs_its_layers_and_reads_each_once():
    found = read(through_layers, X, STACKED)
    assert found.flops == LAYERS * 2 * M * K * K
    once = 4 * (LAYERS * K * K + LAYERS * 2 * M * K)
    # Each layer is sliced (read and written) and then read; x is read and written by the product and by tanh.
    assert once < found.bytes < 4 * once
    assert found.unbounded == []


def test_a_loop_of_unknown_length_costs_what_its_scope_states():
    def rounds(x: jax.Array, number: jax.Array, usual: int | None) -> jax.Array:
        def body(_, x: jax.Array) -> jax.Array:
            return x @ jnp.ones((K, K))

        return jax.lax.fori_loop(0, number, body, x) if usual is None else loop(number, body, x, usual=usual)

    assert read(partial(rounds, usual=7), X, NUMBER).flops == 7 * 2 * M * K * K
    # Of another shape: a compile cache does not look at scopes, and would return the program above.
    silent = read(partial(rounds, usual=None), jax.ShapeDtypeStruct((2 * M, K), jnp.float32), NUMBER)
    assert silent.flops == 2 * 2 * M * K * K
    (scope,) = silent.unbounded
    assert scope.endswith("while")


def test_of_two_branches_the_dearer_one_counts():
    def either(x: jax.Array, number: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(number > 0, lambda: x @ w @ w, lambda: x @ w)

    found = read(either, X, NUMBER, jax.ShapeDtypeStruct((K, K), jnp.float32))
    assert found.flops == 2 * 2 * M * K * K


def test_collectives_by_kind_number_and_bytes():
    mesh = build_mesh(MeshConfig(fsdp=8))

    def summed(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(jax.lax.psum(x, "fsdp")), x)

    spec = PartitionSpec("fsdp")
    shared = jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((8 * M, K), jnp.float32, sharding=NamedSharding(mesh, spec))
    found = read(shared, x)
    (one,) = found.collectives
    assert (one.kind, one.times, one.loops) == ("all-reduce", 3, 1)
    assert one.bytes == 2 * 7 / 8 * 4 * M * K
    assert found.sent("all-reduce") == found.sent() == 3 * one.bytes
    assert found.number("all-gather") == 0


def test_a_convolution_costs_what_its_window_meets():
    """As a TPU's compiler writes a product with one free axis of 16 as a window that slides over padding."""
    program = """ENTRY %main (x: bf16[64,1,32], w: bf16[16,32,8]) -> bf16[64,16,8] {
  %x = bf16[64,1,32]{2,1,0} parameter(0)
  %w = bf16[16,32,8]{2,1,0} parameter(1)
  ROOT %y = bf16[64,16,8]{2,1,0} convolution(%x, %w), window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=b0f_0io->b0f
}
"""
    assert account(program).flops == 2 * 64 * 32 * 8 * 16
    strided = """ENTRY %main (x: f32[2,8,6,3], w: f32[3,2,3,5]) -> f32[2,4,5,5] {
  %x = f32[2,8,6,3]{3,2,1,0} parameter(0)
  %w = f32[3,2,3,5]{3,2,1,0} parameter(1)
  ROOT %y = f32[2,4,5,5] convolution(%x, %w), window={size=3x2 stride=2x1 pad=1_0x0_0}, dim_labels=b01f_01io->b01f
}
"""
    # Along the first axis outputs 0..3 see inputs -1..1, 1..3, 3..5, 5..7: 2 + 3 + 3 + 3; along the second all 5 x 2.
    assert account(strided).flops == 2 * 2 * 3 * 5 * 11 * 10


def test_a_loop_that_counts_in_twos_runs_half_as_often():
    """As a TPU's compiler unrolls the exchange of a product's operand."""
    program = """%body (s: (f32[8,8], s32[])) -> (f32[8,8], s32[]) {
  %s = (f32[8,8]{1,0}, s32[]) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%s), index=0
  %i = s32[] get-tuple-element(%s), index=1
  %two = s32[] constant(2)
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %j = s32[] add(%i, %two)
  ROOT %t = (f32[8,8]{1,0}, s32[]) tuple(%y, %j)
}

%condition (s: (f32[8,8], s32[])) -> pred[] {
  %s = (f32[8,8]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=1
  %limit = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (s: (f32[8,8], s32[])) -> (f32[8,8], s32[]) {
  %s = (f32[8,8]{1,0}, s32[]) parameter(0)
  ROOT %w = (f32[8,8]{1,0}, s32[]) while(%s), condition=%condition, body=%body
}
"""
    assert account(program).flops == 3 * 2 * 8 * 8 * 8
    assert account(program.replace("constant(2)", "constant(1)")).flops == 5 * 2 * 8 * 8 * 8


def test_the_largest_arrays_are_named():
    (first, *_) = largest(text(lambda x, w: jnp.tanh(x @ w), X, jax.ShapeDtypeStruct((K, 999), jnp.float32)))
    assert first[:2] == (4 * M * 999, f"f32[{M},999]")
    assert first[2].startswith("jit(<lambda>)/")


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parsed("HloModule nothing\n")


def through_kinds(x: jax.Array, weights: jax.Array, times: tuple[int, int] | None) -> jax.Array:
    """Every fourth layer multiplies by its whole matrix, the others by a quarter of it."""

    def layer(x: jax.Array, inputs: tuple) -> tuple[jax.Array, None]:
        w, kind = inputs
        branches = (lambda x, w: jnp.pad(x @ w[:, : K // 4], ((0, 0), (0, K - K // 4))), jnp.matmul)
        if times is None:
            return jax.lax.switch(kind, branches, x, w), None
        return switch(kind, branches, x, w, times=times), None

    return jax.lax.scan(layer, x, (weights, jnp.arange(len(weights)) % 4 // 3))[0].sum()


@pytest.mark.parametrize("function", [through_kinds, jax.grad(through_kinds, (0, 1))], ids=["forward", "gradient"])
def test_a_choice_costs_what_its_branches_cost_as_often_as_they_are_taken(function):
    weights, products = jax.ShapeDtypeStruct((4, K, K), jnp.float32), 1 if function is through_kinds else 3
    whole = 2 * M * K * K * products
    assert read(partial(function, times=(3, 1)), X, weights).flops == 3 * whole / 4 + whole


def test_a_choice_that_nobody_describes_costs_its_dearest_branch():
    weights = jax.ShapeDtypeStruct((8, K, K), jnp.float32)
    assert read(partial(through_kinds, times=None), X, weights).flops == 8 * 2 * M * K * K


FUSED = """HloModule step

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[64,272]) -> f32[16,272] {
  %input = f32[64,272]{1,0} parameter(0)
  %all-reduce.1 = f32[64,272]{1,0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum
  %zero = u32[] constant(0)
  ROOT %part = f32[16,272]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={16,272}
}

%begun (part: bf16[16,128]) -> bf16[64,128] {
  %part = bf16[16,128]{1,0:S(1)} parameter(0)
  ROOT %all-gather.1 = bf16[64,128]{1,0} all-gather(%part), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}
}

%beside (part: bf16[16,128]) -> bf16[64,128] {
  %part = bf16[16,128]{1,0:S(1)} parameter(0)
  ROOT %all-gather.2 = bf16[64,128]{1,0} all-gather(%part), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: f32[64,272], w: bf16[16,128]) -> f32[16,272] {
  %x = f32[64,272]{1,0} parameter(0)
  %w = bf16[16,128]{1,0:S(1)} parameter(1)
  %first = bf16[64,128]{1,0} fusion(%w), kind=kCustom, calls=%begun, metadata={op_name="jit(step)/gate"}
  %second = bf16[64,128]{1,0} fusion(%w), kind=kOutput, calls=%beside, metadata={op_name="jit(step)/up"}
  %third = bf16[64,128]{1,0} all-gather(%w), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %out = f32[16,272]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(step)/sum"}
}
"""


def test_what_a_tpu_fuses_with_a_collective_is_sent_once():
    """Of a ring of 4: a sum that is cut afterwards sends 3/4 of it, once; a gather of 4 KiB parts three of them. That
    they come from the vector memory changes nothing; of a gather in two fusions there is one."""
    found = account(FUSED)
    assert {(one.kind, one.bytes, one.scope) for one in found.collectives} == {
        ("reduce-scatter", 64 * 272 * 4 * 3 // 4, "jit(step)/sum"),
        ("all-gather", 3 * 16 * 128 * 2, "jit(step)/gate"),
        ("all-gather", 3 * 16 * 128 * 2, ""),
    }
    assert found.number() == 3


RAGGED = """HloModule jit_step

ENTRY %main (rows: bf16[64,128], zeros: bf16[64,128], n: s32[4]) -> bf16[64,128] {
  %rows = bf16[64,128]{1,0} parameter(0)
  %zeros = bf16[64,128]{1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  ROOT %out = bf16[64,128]{1,0} ragged-all-to-all(%rows, %zeros, %n, %n, %n, %n), replica_groups={{0,1,2,3}}
}
"""


def test_rows_whose_number_data_decide_are_all_counted_but_not_where_they_come_to():
    (one,) = account(RAGGED).collectives
    assert (one.kind, one.bytes) == ("ragged-all-to-all", 64 * 128 * 2 * 3 // 4)


def test_cycles_count_as_often_as_their_loop_runs():
    body, whole = Account(cycles=2.0), Account(cycles=1.0)
    whole.add(body, 3.0, loops=1)
    assert whole.cycles == 7


def test_a_scatter_costs_its_updates():
    """An array that is given away is changed in place: 2 rows of 32 of 1000 are read and written, at two indices."""
    many, two = jax.ShapeDtypeStruct((1000, K), jnp.float32), jax.ShapeDtypeStruct((2, K), jnp.float32)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    put = jax.jit(lambda x, at, new: x.at[at].set(new), donate_argnums=0)
    found = account(put.lower(many, rows, two).compile().as_text())
    assert found.bytes < 16 * 4 * 2 * K
