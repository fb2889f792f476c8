"""Groups of collectives, in every way in which programs name them."""

import pytest

from tunix.plan.account import Account, Collective
from tunix.plan.hlo import group


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("replica_groups={{0,2},{1,3}}, dimensions={0}", (0, 2)),
        ("source_target_pairs={{0,7},{1,0}}", (0, 7)),
        ("replica_groups=[8,4]<=[32], use_global_device_ids=true", (0, 1, 2, 3)),
        # Of the numbers 0 1 | 2 3 | 4 5 | 6 7, transposed: 0 2 4 6 are the first four.
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}", (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=8,'b'=4] {'a'}, to_apply=%add", (0, 4, 8, 12, 16, 20, 24, 28)),
        ("replica_groups=mesh['a'=8,'b'=1,'c'=4] {'b','c'}, to_apply=%add", (0, 1, 2, 3)),
        # A mesh of the numbers 0 2 4 6 | 1 3 5 7.
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, dimensions={0}", (0, 1)),
        # The second half of an axis of four times two.
        ("replica_groups=mesh['a'=8] {'a':(4)2}", (0, 1)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", (0, 2)),
        ("no groups at all", (0, 1)),
    ],
)
def test_the_first_group(text: str, devices: tuple[int, ...]):
    assert tuple(group(text)) == devices


def test_what_leaves_a_host_is_told_from_what_stays():
    within, across = Collective("all-reduce", 3, "", (0, 1), times=2.0), Collective("all-gather", 5, "", (0, 8))
    found = Account(collectives=[within, across])
    assert (found.sent(), found.sent_far(8), found.sent_far(16)) == (11, 5, 0)
