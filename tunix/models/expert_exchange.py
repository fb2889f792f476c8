"""All-to-all of a mixture of experts: tokens to the devices that have their experts, and the results back.

Devices of the mesh axis `expert` have tokens and experts of their own. A token goes once to each device that has any of
its experts, with its choice and weights; that device's part of its sum comes back, and the parts are added up at home.
That is the dispatch and combine of Lepikhin et al. 2020 (GShard, https://arxiv.org/abs/2006.16668) without a capacity:
each device has room for all tokens of all devices, a block for each, so that none is dropped.

Accelerators send of a block what is in it (`jax.lax.ragged_all_to_all`). XLA has no such program for CPUs, where blocks
are sent whole: as many bytes as if every device gathered all tokens.

Axes: s shards of the rows, k chosen experts of a token, D model width; n tokens of a shard.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.mesh import platform
from tunix.models.expert_products import sums, taken
from tunix.util.loops import needed_first

AXIS = "expert"


class Destinations(NamedTuple):
    """Which tokens of a device go to which device of the axis."""

    tokens: Int[Array, "s n"]
    """The tokens of the block for each device, in their order; those that do not go there come last."""
    places: Int[Array, "n s"]
    """The row of each token in all blocks together, one after the other."""
    there: Bool[Array, "n s"]
    """Whether a token goes to a device."""
    sent: Int[Array, "s"]
    """How many tokens go to each device."""
    received: Int[Array, "s"]
    """How many come from each device."""

    @property
    def arrived(self) -> Bool[Array, "s n"]:
        """Whether a row of the blocks that came has a token."""
        return jnp.arange(len(self.places)) < self.received[:, None]


def destinations(experts: Int[Array, "n k"], real: Bool[Array, "n"], per_device: int) -> Destinations:
    """Where the tokens of this device go; every device of the axis calls it with its tokens.

    Args:
        experts: what each token has chosen.
        real: which tokens are not padding, which goes nowhere.
        per_device: how many experts each device has; those of the first device are 0 to `per_device` - 1.
    """
    devices = jax.lax.axis_size(AXIS)
    there = jnp.any(experts[..., None] // per_device == jnp.arange(devices), axis=1) & real[:, None]
    order, back = needed_first(there.T)
    places = back.T + len(experts) * jnp.arange(devices)
    sent = jnp.sum(there, axis=0, dtype=jnp.int32)
    return Destinations(order, places, there, sent, jax.lax.all_to_all(sent, AXIS, 0, 0, tiled=True))


@jax.custom_vjp
def dispatch(x: Float[Array, "n D"], where: Destinations) -> Float[Array, "s n D"]:
    """What came of each device's tokens; rows without one hold anything. Its transpose is `combine`."""
    return _exchanged(taken(x, where.tokens), where.sent, where.received)


@jax.custom_vjp
def combine(parts: Float[Array, "s n D"], where: Destinations) -> Float[Array, "n D"]:
    """For each token the sum of what the devices computed of it, in float32; 0 for one that went nowhere."""
    back = _exchanged(parts, where.received, where.sent)
    return sums(back.reshape(-1, parts.shape[-1]), where.places, where.there)


dispatch.defvjp(
    lambda x, where: (dispatch(x, where), where),
    lambda where, d: (combine(d, where), None),
)
combine.defvjp(
    lambda parts, where: (combine(parts, where), where),
    lambda where, d: (dispatch(d, where), None),
)


def _exchanged(
    blocks: Float[Array, "s n _"], sent: Int[Array, "s"], received: Int[Array, "s"]
) -> Float[Array, "s n _"]:
    """The block for this device from each device; of each block only its first rows are meant, as many as are sent."""
    if platform() == "cpu":
        return jax.lax.all_to_all(blocks, AXIS, 0, 0, tiled=True)
    devices, n = blocks.shape[:2]
    starts = n * jnp.arange(devices, dtype=jnp.int32)
    places = jnp.full(devices, n * jax.lax.axis_index(AXIS), jnp.int32)
    rows = blocks.reshape(devices * n, -1)
    came = jax.lax.ragged_all_to_all(rows, jnp.zeros_like(rows), starts, sent, places, received, axis_name=AXIS)
    return came.reshape(blocks.shape)
