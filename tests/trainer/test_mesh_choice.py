"""Meshes: what they have to divide, the choice of `mesh: auto` by arithmetic, and the order of devices of slices."""

from dataclasses import dataclass, replace
from itertools import product

import jax
import numpy as np
import pytest

from tests.trainers import PLAIN
from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.mesh import build_mesh, groups_of
from tunix.trainer.mesh_choice import Demand, choose, placed, require, state_bytes

LARGE = replace(
    PLAIN, vocab_size=128_256, d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, ffn=28_672
)
"""The sizes of Llama 3.1 70B."""


@dataclass(frozen=True)
class Device:
    """A device that is not here: what ordering one reads."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "fake"


@dataclass(frozen=True)
class InSlice(Device):
    slice_index: int = 0
    core_on_chip: int = 0

    @property
    def coords(self) -> tuple[int, int, int]:
        """Its place in a slice of 2 x 2."""
        return self.id % 2, self.id // 2 % 2, 0


def gpus(hosts: int, each: int = 8) -> list[Device]:
    return [Device(host * each + i, host) for host, i in product(range(hosts), range(each))]


def tpus(slices: int, each: int = 4) -> list[InSlice]:
    """Slices of two hosts."""
    places = product(range(slices), range(each))
    return [InSlice(one * each + i, (one * each + i) // 2, "tpu", "fake", one) for one, i in places]


def sizes_of(demand: Demand, devices: list, memory: float | None = None) -> tuple[int, int, int]:
    sizes, _ = choose(demand, devices, memory)
    return sizes.data, sizes.fsdp, sizes.tensor


def test_the_bytes_of_a_model():
    """2 layers of 32 x 8 x (2 x 4 + 2 x 2) + 3 x 32 x 64 = 9216, a head and an embedding of 96 x 32."""
    weights = 2 * 9216 + 2 * 96 * 32
    assert state_bytes(PLAIN, "bfloat16", "float32") == weights * (4 + 4 + 8)
    assert state_bytes(PLAIN, "bfloat16", "bfloat16", "bfloat16", copies=1) == weights * (2 + 2 + 4 + 2)
    assert state_bytes(PLAIN, "bfloat16", None) == weights * 2
    assert state_bytes(replace(PLAIN, tied=True), "float32", None) == (weights - 96 * 32) * 4


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (gpus(1, 1), (1, 1, 1)),
        (gpus(1), (1, 8, 1)),
        (gpus(1, 16), (1, 16, 1)),
        # More than 16 with one fast network: products are split as well, by no more than the 8 kv heads.
        (gpus(1, 64), (1, 16, 4)),
        (gpus(1, 256), (2, 16, 8)),
        # Only copies of the weights cross the network between hosts.
        (gpus(4), (4, 8, 1)),
        (tpus(2, 32), (2, 16, 2)),
        # 3 divides no size.
        (gpus(1, 6), (3, 2, 1)),
    ],
)
def test_auto_by_the_number_of_devices(devices: list, expected: tuple[int, int, int]):
    assert sizes_of(Demand(LARGE, rows=1024), devices) == expected


def test_weights_that_do_not_fit_on_a_host_cross_hosts():
    """70.6e9 weights of 14 bytes are 0.99 TB: 40 GB is half of a GPU's memory, so it takes 25 of them at least."""
    demand = Demand(LARGE, state=70.6e9 * 14, rows=1024)
    assert sizes_of(demand, gpus(32), 80e9) == (2, 16, 8)
    assert sizes_of(replace(demand, state=70.6e9 * 2), gpus(32), 80e9) == (32, 8, 1)


def test_auto_by_the_rows():
    """Four rows are no use to eight shards; the two kv heads take the rest."""
    assert sizes_of(Demand(PLAIN, rows=8), gpus(1)) == (1, 8, 1)
    assert sizes_of(Demand(PLAIN, rows=4), gpus(1)) == (1, 4, 2)
    assert sizes_of(Demand(PLAIN, rows=8, micro=4), gpus(1)) == (1, 4, 2)
    assert sizes_of(Demand(PLAIN, rows=12, packing=False), gpus(1)) == (1, 4, 2)
    # Nothing fits one row; the reason says that seven devices have none.
    alone = replace(PLAIN, num_kv_heads=1)
    assert sizes_of(Demand(alone, rows=1), gpus(1)) == (1, 8, 1)
    assert "7 of 8 shards have none" in choose(Demand(alone, rows=1), gpus(1), None)[1]


def test_the_reason():
    _, why = choose(Demand(LARGE, state=140e9, rows=64), gpus(4), 80e9)
    assert why == (
        "mesh: auto takes {data: 4, fsdp: 8, tensor: 1} for 32 device(s); 17.5 of 80 GB a device are weights, "
        "gradients and moments; 4 groups of 8 have a fast network each"
    )


@pytest.mark.parametrize(
    ("mesh", "demand", "words"),
    [
        (MeshConfig(tensor=8), Demand(PLAIN), ["tensor 8 does not divide 4 query heads, 2 kv heads; tensor 2 would"]),
        (MeshConfig(fsdp=1, tensor=4, data=2), Demand(PLAIN), ["tensor 4 does not divide 2 kv heads; tensor 2 would"]),
        (
            MeshConfig(fsdp=4, tensor=2),
            Demand(replace(PLAIN, vocab_size=97)),
            ["tensor 2 does not divide 97 ids of the vocabulary; tensor 1 would", "{data: 1, fsdp: 8, tensor: 1}"],
        ),
        (
            MeshConfig(fsdp=8),
            Demand(replace(PLAIN, d_model=36)),
            ["fsdp 8 does not divide 36 columns of the model (d_model); fsdp 6 or 9 would"],
        ),
        (
            MeshConfig(data=2, fsdp=4),
            Demand(PLAIN, rows=6),
            ["data 2 x fsdp 4, but an update has 6 of them, so that 2 of 8 shards have none; 8 would do"],
        ),
        (MeshConfig(), Demand(PLAIN, rows=12, packing=False), ["an update has 12, no multiple of 8; 16 would do"]),
        (MeshConfig(), Demand(PLAIN, rows=32, micro=12), ["micro_batch_size is 12, no multiple of 8; 16 would do"]),
        (
            MeshConfig(context=4, fsdp=2),
            Demand(PLAIN, length=1500),
            ["context 4 makes no whole blocks of 128 of rows of 1500 tokens (data.max_length); 1536 would do"],
        ),
        (
            MeshConfig(context=8, fsdp=1),
            Demand(PLAIN, length=2048, sampled=True),
            ["context 8 splits rows of training, but the model also completes prompts"],
        ),
    ],
)
def test_a_mesh_that_does_not_divide(mesh: MeshConfig, demand: Demand, words: list[str]):
    with pytest.raises(UserError) as caught:
        placed(mesh, demand, jax.devices())
    for word in words:
        assert word in str(caught.value)


def test_a_mesh_that_divides():
    mesh, why = placed(MeshConfig(fsdp=4, tensor=2), Demand(PLAIN, rows=12, micro=4), jax.devices())
    assert (dict(mesh.shape), why) == ({"data": 1, "fsdp": 4, "context": 1, "expert": 1, "tensor": 2}, None)
    require(mesh, Demand(PLAIN))


def test_data_crosses_slices_and_tensor_stays_within():
    mesh = build_mesh(MeshConfig(data=2, fsdp=4, tensor=2), tpus(4))
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices[:, :, 0, 0])
    # Copies are in different slices; of the four shards of the weights two are in each; products stay in one.
    assert slices.tolist() == [[[0, 0]] * 2 + [[1, 1]] * 2, [[2, 2]] * 2 + [[3, 3]] * 2]
    hosts = build_mesh(MeshConfig(data=2, fsdp=8), gpus(2))
    processes = np.vectorize(lambda device: device.process_index)(hosts.devices[:, :, 0, 0, 0])
    assert processes.tolist() == [[0] * 8, [1] * 8]


def test_a_slice_of_several_hosts_is_one_group():
    assert len(groups_of(tpus(1))) == 1
    assert [len(group) for group in groups_of(tpus(2))] == [4, 4]
    # A TPU's single slice has no number.
    assert len(groups_of([Device(i, i // 4, "tpu") for i in range(8)])) == 1
    # Hosts of different sizes.
    assert len(groups_of(gpus(2)[:12])) == 1


def test_devices_of_two_kinds_are_refused_with_their_numbers():
    mixed = [Device(0, 0, device_kind="NVIDIA H100"), Device(1, 0, device_kind="NVIDIA H100"), Device(2, 0)]
    with pytest.raises(UserError, match="these are 2 x NVIDIA H100 and 1 x fake: choose those of one kind, GPUs with"):
        build_mesh(MeshConfig(fsdp=3), mixed)
