"""The sequences of a step as its record lists them."""

from tests.data.test_packing import episode
from tunix.algorithms.base import Update
from tunix.data.packing import pack
from tunix.run.sequences import sequences_of


def test_transcripts_of_a_trie_are_listed_one_after_the_other():
    """The second is the trunk, within which the others lie in the row. A branch begins with the last shared token."""
    (row,) = sequences_of(Update({}, (pack([episode()], 1, 20, trie=True),)))
    transcripts = [9, 11, 12], [7, 8, 9, 13, 14, 15], [13, 14, 15, 16, 17, 18], [1, 2, 3]
    assert row["tokens"] == [token for transcript in transcripts for token in transcript]
