"""The closed set of shapes: few programs whatever the sizes, and pages for everything that is asked."""

from dataclasses import replace

import numpy as np
import pytest

from tunix.rollout.engine.shapes import Sizes

BARE = Sizes(1, 64, 2048, 128, 32, 0, 0, (None,), (), 1, "bfloat16")


def sizes_of(slots: int, length: int, shards: int = 1, windows: tuple[int | None, ...] = (None,)) -> Sizes:
    bare = replace(BARE, slots=slots, max_length=length, shards=shards, windows=windows)
    return replace(bare, pages=bare.most_pages(slots // shards))


@pytest.mark.parametrize("slots", [1, 8, 64, 256, 1024])
@pytest.mark.parametrize("length", [64, 640, 5120, 17_408])
@pytest.mark.parametrize("windows", [(None,), (512, None), (4096,)])
def test_a_sampler_has_nine_programs_at_most(slots, length, windows):
    for shards in {1, min(8, slots)}:
        sizes = sizes_of(slots, length, shards, windows)
        dispatches = [pages for width in sizes.widths for pages in sizes.gathered(width)]
        assert len(dispatches) + len(sizes.pieces) + 1 <= 9, "one copies pages"
        for width in sizes.widths:
            most = [min(width // shards * sizes.columns(kind), pages) for kind, pages in enumerate(sizes.pages)]
            assert sizes.gathered(width)[0] == tuple(most)


def test_dispatches_gather_down_to_a_page_for_each_slot_by_equal_factors():
    """What a server holds room for, and short requests do not need, must not be read in every step."""
    sizes = sizes_of(64, 2048)
    assert [sizes.gathered(width) for width in sizes.widths] == [[(1024,), (256,), (64,)], [(128,), (8,)], [(16,)]]
    # A pool of fewer pages than slots, and a window, which is never short.
    assert replace(sizes, pages=(40,)).gathered(64) == [(40,)]
    assert sizes_of(64, 2048, windows=(512, None)).gathered(64) == [(384, 1024), (384, 256), (384, 64)]


def test_slots_and_pages_are_no_more_than_requests_need():
    sizes = sizes_of(64, 1024)
    assert (sizes.columns(0), sizes.pages) == (8, (512,))
    assert sizes.of_requests([1024] * 64) == sizes
    # One request of five pages: a slot of at most eight; of the 8 pages a quarter would be too few.
    assert (sizes.of_requests([600]).slots, sizes.of_requests([600]).pages) == (1, (8,))
    # Short ones in all slots: a page each are 64, between 128 and 32.
    assert (sizes.of_requests([100] * 99).slots, sizes.of_requests([100] * 99).pages) == (64, (128,))
    # In shards, as many in each: nine requests are two in some shard of eight.
    of_shards = sizes_of(64, 1024, shards=8).of_requests([1024] * 9)
    assert (of_shards.slots, of_shards.pages) == (64, (64,))
    # What a window needs is never short: 512 and 32 tokens touch six pages of 128, in a slot more than there are.
    assert sizes_of(64, 1024, windows=(512, None)).of_requests([100] * 99).pages == (6 * 65, 128)


def test_shapes_cover_those_of_smaller_loads_and_no_larger_ones():
    sizes = sizes_of(64, 1024)
    few, short, whole = (sizes.of_requests(tokens) for tokens in ([600] * 2, [100] * 64, [1024] * 64))
    assert (whole.covers(few), whole.covers(short), whole.covers(whole)) == (True, True, True)
    # Too few slots, and too few pages in as many slots.
    assert (few.covers(whole), short.covers(whole)) == (False, False)


def test_a_piece_is_long_where_it_is_filled():
    assert (BARE.pieces, BARE.piece_of(5000), BARE.piece_of(1536)) == ((2048, 256), 2048, 2048)
    assert [BARE.piece_of(tokens) for tokens in (1535, 300, 1)] == [256, 256, 256]
    assert [BARE.width(most) for most in (1,)] == [1]
    assert list(np.array(sizes_of(256, 64).widths)) == [256, 32, 4]
    # Of four slots or fewer there is no smaller number: it would be one more program.
    assert [sizes_of(slots, 64).widths for slots in (64, 32, 5, 4)] == [(64, 8, 1), (32, 4), (5, 1), (4,)]
    assert [sizes_of(256, 64).width(most) for most in (1, 4, 5, 33)] == [4, 4, 32, 256]


def test_pages_that_are_read_in_their_places_need_one_program_for_a_width():
    sizes = replace(sizes_of(256, 5120), reader="ragged")
    assert [sizes.gathered(width) for width in sizes.widths] == [[sizes.pages]] * 3
