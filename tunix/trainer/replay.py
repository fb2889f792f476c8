"""Whose routers replay the experts that the sampler recorded (`rollout/engine/experts.py`): the policy's alone.

Another model, such as a reference, a teacher or a separate critic, chooses experts itself. What it says of a text has
to be its own opinion, and its experts of one number need not do what the policy's do; nobody sampled from it, so there
is no choice of its own to replay.

Axes: T time.
"""

from collections.abc import Sequence as List
from dataclasses import replace

from tunix.types import Sequence


def unreplayed(sequences: List[Sequence]) -> list[Sequence]:
    """Sequences as models other than the policy read them: without the policy's experts."""
    return [replace(one, experts=None) if one.experts is not None else one for one in sequences]
