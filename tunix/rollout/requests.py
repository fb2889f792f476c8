"""The requests of a call of a sampler.

Axes: T time.
"""

from collections.abc import Sequence as List

import numpy as np

from tunix.types import Begun


def requests_of(
    prompts: List[np.ndarray], n: int, seed: int, begun: List[Begun] | None
) -> list[tuple[np.ndarray, Begun]]:
    """The requests for `n` completions of each prompt, with their random numbers.

    Args:
        prompts: `[T]` token ids each.
        n: completions of a prompt; request i is sample i % n of prompt i // n.
        seed: of those that none has begun.
        begun: of each request what another call has begun; None where it is the first.
    """
    asked = [prompt for prompt in prompts for _ in range(n)]
    own = [Begun(seed, index) for index in range(len(asked))] if begun is None else begun
    return list(zip(asked, own, strict=True))
