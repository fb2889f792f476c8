"""How often what is in a compiled program runs, against arithmetic."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.programs import Account, account, arrays, largest, parsed, sharers, size
from tunix.config import MeshConfig
from tunix.mesh import build_mesh
from tunix.util.loops import loop, switch

M, K, LAYERS = 8, 32, 5
X = jax.ShapeDtypeStruct((M, K), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((K, K), jnp.float32)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def text(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def read(function, *arguments) -> Account:
    return account(text(function, *arguments))


def kernel(x: jax.Array) -> jax.Array:
    """A custom kernel of XLA for CPUs."""
    return jax.lax.linalg.cholesky(x, symmetrize_input=False)


def runs(found: Account) -> float:
    """How often it ran."""
    return sum(times for name, times in found.kernels.items() if "potrf" in name)


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


def test_a_loop_of_unknown_length_costs_what_its_scope_states():
    def rounds(x: jax.Array, number: jax.Array, usual: int | None) -> jax.Array:
        def body(_, x: jax.Array) -> jax.Array:
            return kernel(x)

        return jax.lax.fori_loop(0, number, body, x) if usual is None else loop(number, body, x, usual=usual)

    assert runs(read(partial(rounds, usual=7), SQUARE, NUMBER)) == 7
    # Of another shape: a compile cache does not look at scopes, and would return the program above.
    silent = read(partial(rounds, usual=None), jax.ShapeDtypeStruct((2 * K, 2 * K), jnp.float32), NUMBER)
    assert runs(silent) == 1
    (scope,) = silent.unbounded
    assert scope.endswith("while")


def test_of_two_branches_the_dearer_one_counts():
    def either(x: jax.Array, number: jax.Array) -> jax.Array:
        return jax.lax.cond(number > 0, lambda: kernel(kernel(x)), lambda: kernel(x))

    assert runs(read(either, SQUARE, NUMBER)) == 2


def test_a_scan_runs_its_kernel_in_each_layer_and_copies_what_it_stacks():
    """As a GPU's compiler writes it: a kernel within a fusion, a slice that begins while others run, an update in place
    beside its index, and a fusion that computes."""
    program = """%sliced (p: f32[5,512,512], i: s32[]) -> f32[1,512,512] {
  %p = f32[5,512,512]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,512,512]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,512,512}
}

%stacked (p: f32[5,512,512], x: f32[1,512,512], i: s32[]) -> f32[5,512,512] {
  %p = f32[5,512,512]{2,1,0} parameter(0)
  %x = f32[1,512,512]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %last = s32[] subtract(%i, %zero)
  ROOT %put = f32[5,512,512]{2,1,0} dynamic-update-slice(%p, %x, %last, %zero, %zero)
}

%cloned (x: f32[1,512,512]) -> f32[1,512,512] {
  %x = f32[1,512,512]{2,1,0} parameter(0)
  ROOT %k = f32[1,512,512]{2,1,0} custom-call(%x), custom_call_target="kernel"
}

%added (x: f32[1,512,512], p: f32[5,512,512], i: s32[]) -> f32[1,512,512] {
  %x = f32[1,512,512]{2,1,0} parameter(0)
  %p = f32[5,512,512]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice = f32[1,512,512]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,512,512}
  ROOT %sum = f32[1,512,512]{2,1,0} add(%x, %slice)
}

%body (s: (f32[5,512,512], s32[])) -> (f32[5,512,512], s32[]) {
  %s = (f32[5,512,512]{2,1,0}, s32[]) parameter(0)
  %p = f32[5,512,512]{2,1,0} get-tuple-element(%s), index=0
  %i = s32[] get-tuple-element(%s), index=1
  %begun = ((f32[5,512,512]{2,1,0}, s32[]), f32[1,512,512]{2,1,0}, u32[]) fusion-start(%p, %i), calls=%sliced
  %x = f32[1,512,512]{2,1,0} fusion-done(%begun)
  %y = f32[1,512,512]{2,1,0} custom-call(%x), custom_call_target="kernel"
  %again = f32[1,512,512]{2,1,0} fusion(%x), kind=kCustom, calls=%cloned
  %z = f32[1,512,512]{2,1,0} fusion(%y, %p, %i), kind=kLoop, calls=%added
  %q = f32[5,512,512]{2,1,0} fusion(%p, %z, %i), kind=kLoop, calls=%stacked
  ROOT %t = (f32[5,512,512]{2,1,0}, s32[]) tuple(%q, %i)
}

ENTRY %main (s: (f32[5,512,512], s32[])) -> (f32[5,512,512], s32[]) {
  %s = (f32[5,512,512]{2,1,0}, s32[]) parameter(0)
  ROOT %w = (f32[5,512,512]{2,1,0}, s32[]) while(%s), body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    found = account(program)
    assert found.kernels == {"kernel": 2 * LAYERS}
    # A slice and an update of a layer, a megabyte each: none is its whole stack.
    assert found.copied(4 * 512 * 512) == 2 * LAYERS
    assert found.copied(4 * 512 * 512 + 100) == 0


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


def test_a_loop_that_counts_in_twos_runs_half_as_often():
    """As a TPU's compiler unrolls the exchange of a product's operand."""
    program = """%body (s: (f32[8,8], s32[])) -> (f32[8,8], s32[]) {
  %s = (f32[8,8]{1,0}, s32[]) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%s), index=0
  %i = s32[] get-tuple-element(%s), index=1
  %two = s32[] constant(2)
  %y = f32[8,8]{1,0} custom-call(%x, %x), custom_call_target="product"
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
    assert account(program).kernels == {"product": 3}
    assert account(program.replace("constant(2)", "constant(1)")).kernels == {"product": 5}


def test_the_largest_arrays_are_named():
    (first, *_) = largest(text(lambda x, w: jnp.tanh(x @ w), X, jax.ShapeDtypeStruct((K, 999), jnp.float32)))
    assert first[:2] == (4 * M * 999, f"f32[{M},999]")
    assert first[2].startswith("jit(<lambda>)/")


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parsed("HloModule nothing\n")


def through_kinds(x: jax.Array, number: int, times: tuple[int, int] | None) -> jax.Array:
    """Every fourth layer runs two kernels, the others one."""

    def layer(x: jax.Array, kind: jax.Array) -> tuple[jax.Array, None]:
        branches = (kernel, lambda x: kernel(kernel(x)))
        if times is None:
            return jax.lax.switch(kind, branches, x), None
        return switch(kind, branches, x, times=times), None

    return jax.lax.scan(layer, x, jnp.arange(number) % 4 // 3)[0].sum()


@pytest.mark.parametrize("wrap", [lambda function: function, jax.grad], ids=["forward", "gradient"])
def test_a_choice_costs_what_its_branches_cost_as_often_as_they_are_taken(wrap):
    assert runs(read(wrap(partial(through_kinds, number=4, times=(3, 1))), SQUARE)) == 3 + 2


def test_a_choice_that_nobody_describes_costs_its_dearest_branch():
    assert runs(read(partial(through_kinds, number=8, times=None), SQUARE)) == 8 * 2


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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("replica_groups={{0,2,4},{1,3,5}}, dimensions={0}", 3),
        ("source_target_pairs={{0,7},{1,0}}", 2),
        ("replica_groups=[8,4]<=[32], use_global_device_ids=true", 4),
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}", 4),
        ("replica_groups=mesh['a'=8,'b'=4] {'a'}, to_apply=%add", 8),
        ("replica_groups=mesh['a'=8,'b'=1,'c'=4] {'b','c'}, to_apply=%add", 4),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, dimensions={0}", 2),
        # A half of an axis of four times two.
        ("replica_groups=mesh['a'=8] {'a':(4)2}", 2),
        ("no groups at all", 2),
    ],
)
def test_how_many_devices_exchange(text: str, number: int):
    assert sharers(text) == number
