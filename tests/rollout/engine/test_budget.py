"""Slots and pages by the bytes that there are for keys and values: arithmetic by hand."""

from dataclasses import replace

import pytest

from tests.tiny_models import one_device
from tests.trainers import PLAIN
from tunix.models.config import LayerKind
from tunix.rollout.engine import shapes
from tunix.rollout.engine.shapes import MOST_SLOTS, NoRoom, Sizes, page_bytes, within
from tunix.trainer.sampler_mesh import shares

WIDE = replace(PLAIN, num_layers=4, num_kv_heads=2, head_dim=8)
BARE = Sizes(1, 1000, 256, 16, 32, 0, 0, (None,), (), 1, "bfloat16")
PAGE = 2 * 2 * 8 * 16 * 2 * 4
"""Keys and values of 2 heads of 8, 16 tokens, 2 bytes each, 4 layers."""


def test_slots_get_half_of_the_longest_each_and_pages_all_the_room():
    assert page_bytes(WIDE, one_device(), BARE) == (PAGE,)
    # 1000 tokens are 63 pages, each there twice; ten times that are twenty slots.
    found = within(BARE, WIDE, one_device(), None, 10.0 * 2 * 63 * PAGE)
    assert (found.slots, found.pages) == (20, (630,))
    # No more pages than slots can hold, and no more slots than help.
    assert within(BARE, WIDE, one_device(), 4, 10.0 * 2 * 63 * PAGE).pages == (4 * 63,)
    assert within(BARE, WIDE, one_device(), None, 1e12).slots == MOST_SLOTS
    without = within(BARE, WIDE, one_device(), None, None)
    assert (without.slots, without.pages) == (64, (64 * 63,))


def test_layers_with_a_window_have_all_they_need():
    heads = {"head_dim": WIDE.head_dim, "kv_heads": WIDE.num_kv_heads}
    near, far = LayerKind(WIDE.rope, 64, **heads), LayerKind(WIDE.rope, **heads)
    local = replace(WIDE, local_layers=(True, True, True, False), window=64)
    assert local.kinds == (near, near, near, far)
    sizes = replace(BARE, windows=(64, None))
    # A window of 64 and 32 new tokens touch 7 pages; a slot more is for the one whose prompt is being computed.
    room = 2.0 * (3 * 7 * PAGE * 3 // 4 + 70 * PAGE // 4)
    assert within(sizes, local, one_device(), 2, room).pages == (21, 70)


@pytest.mark.parametrize("window", [64, 4096])
def test_slots_that_are_not_given_have_room_for_their_windows(window: int):
    """Of n slots: n + 1 windows of 7 pages or all 63 in three of four layers, n halves of 63 pages in the fourth."""
    kinds = replace(WIDE, local_layers=(True, True, True, False), window=window)
    own = 7 if window == 64 else 63
    for number in (2, 9):
        room = 2.0 * PAGE / 4 * (3 * own * (number + 1) + 63 * number / 2)
        found = within(replace(BARE, windows=(window, None)), kinds, one_device(), None, room + 1)
        assert (found.slots, found.pages) == (number, (own * (number + 1), 63 * number // 2))


def test_too_little_for_one_request_is_refused_with_the_arithmetic():
    with pytest.raises(NoRoom, match=r"rollout.memory: 0.0005 GB .* of 1000 tokens .* 0.000516 GB") as caught:
        within(BARE, WIDE, one_device(), 1, 2.0 * 61 * PAGE)
    assert caught.value.need == 2 * 63 * PAGE
    # Of a device of 0.01 GB, 0.2 leave 0.0005: the rest takes 0.0015, and with 0.000516 that is 0.2016.
    said = shares(0.2, 0.01e9, 0.0005e9, caught.value.need)
    assert "0.2 of 0.01 GB is 0.002 GB, and" in said
    assert said.endswith("take 0.0015 GB: the smallest that works is 0.202")
    assert shares(0.9, 0.01e9, -0.01e9, 0.0).endswith("take 0.019 GB: no share of this device is enough")
    assert within(BARE, WIDE, one_device(), 1, 2.0 * 63 * PAGE).pages == (63,)


def test_pages_that_are_read_in_their_places_count_once():
    found = within(replace(BARE, reader="triton"), WIDE, one_device(), None, 10.0 * 63 * PAGE)
    assert (found.slots, found.pages) == (20, (630,))


def test_numbers_of_8_bits_are_half_and_int8_has_scales():
    assert page_bytes(WIDE, one_device(), replace(BARE, cache_dtype="fp8")) == (PAGE // 2,)
    # Beside a head's 8 bytes there are 4 of a scale.
    assert page_bytes(WIDE, one_device(), replace(BARE, cache_dtype="int8")) == (PAGE // 2 * 12 // 8,)


def test_slots_give_way_where_a_kernel_cannot_count_the_pages_of_their_windows(monkeypatch: pytest.MonkeyPatch):
    """21 pages of 16 tokens, 2 kv heads of 8 numbers: three windows of 7, so two slots and one to spare."""
    kinds = replace(WIDE, local_layers=(True, True, True, False), window=64)
    numbers = 21 * kinds.num_kv_heads * 16 * kinds.head_dim
    monkeypatch.setattr(shapes, "MOST_NUMBERS", numbers)
    found = within(replace(BARE, windows=(64, None), reader="triton"), kinds, one_device(), 8, None)
    assert (found.slots, found.pages) == (2, (21, 21))
