"""Tokens that earlier weights have sampled, as `rollout.oversample` leaves some: what is measured of them."""

import numpy as np

from tests.policy_batches import PROMPT, Taken, batch_of, inputs_of
from tunix.algorithms.ops import CURRENT, compared_with_sampler
from tunix.types import LossOutputs

TAKEN = slice(PROMPT, PROMPT + 3)


def test_tokens_of_earlier_weights_say_nothing_about_the_sampler():
    """Differences of 0.5, 3 and 0.25, the second of a token that weights before the last update have sampled."""
    taken = Taken([-1.0, -5.0, -2.0], [-1.5, -2.0, -2.25], [1.0] * 3, {CURRENT: [1.0, 0.0, 1.0]})
    inputs = inputs_of(batch_of([taken]))
    found = compared_with_sampler(LossOutputs({}), inputs)
    differences = {"mismatch/max": found.peaks, "mismatch/mean": found.metrics}
    for name, values in differences.items():
        np.testing.assert_allclose(np.asarray(values[name])[0, TAKEN], [0.5, 0.0, 0.25])
    # exp(d) - 1 - d for d, the trainer's log-prob less the sampler's.
    k3 = [np.expm1(0.5) - 0.5, 0.0, np.expm1(0.25) - 0.25]
    np.testing.assert_allclose(np.asarray(found.metrics["mismatch/k3"])[0, TAKEN], k3, rtol=1e-5)
