"""Several adapters on one base, for decoding: each row of a batch uses its own.

Together they form one wide adapter. Their A's are joined along the channels, their B's too, and
`y = x W + ((x A) * share) B`: a row's share is its adapter's scale in that adapter's channels and 0 in the others. So
ranks, scales and targets may differ, only a row's short share is gathered, the products stay dense, and a row without
an adapter is exactly the base's. The cost is that of one adapter whose rank is the sum of theirs.

Axes: r rank (of all adapters together), L layers, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.errors import UserError
from tunix.lora.adapt import adapt, plain_pairs
from tunix.lora.config import AdapterConfig
from tunix.models.blocks import Block
from tunix.models.config import is_adapter
from tunix.models.kv_cache import LAYERS, Weights, gains, unstack
from tunix.models.layers import Adapter
from tunix.models.model import Model, Params
from tunix.models.quantization.modules import BANKS
from tunix.util.exact import jit


class LoadedAdapter(NamedTuple):
    """An adapter that is loaded with a base."""

    settings: AdapterConfig
    params: Params
    """Its weights, named as in a model with this adapter; without tables."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """The structure of several adapters on one base; their values come later, and may change."""

    base: Model
    settings: tuple[AdapterConfig, ...]
    """The settings of each adapter, in the order of their numbers, which start at 1."""

    def __post_init__(self) -> None:
        if self.base.adapt is not None:
            raise ValueError("the model has an adapter already: load all of them with its base")
        if any(name in BANKS for one in self.settings for name in one.modules_of(self.base.config)):
            raise UserError(
                "an adapter of experts (adapter.targets: experts.*) cannot be mixed with others in a batch: merge it "
                "with `tunix export`, or sample with it alone"
            )

    @cached_property
    def model(self) -> Model:
        """The base with all of them."""
        return replace(self.base, adapt=partial(_adapted, self.settings))

    def with_adapters(self, base: Weights, params: Sequence[Params]) -> Weights:
        """Weights for decoding: the base's, not copied, with the adapters' added to each layer.

        Args:
            params: the weights of each adapter.

        Raises:
            ValueError: they contain weights of a base, such as tables.
        """
        for more in (sorted(name for name in own if not is_adapter(name)) for own in params):
            if more:
                raise ValueError(f"{more} cannot differ between the rows of a batch: load them as weights")
        views = _views(self, base, tuple(params))
        return base._replace(layers=tuple({**own, **mine} for own, mine in zip(base.layers, views, strict=True)))

    @cached_property
    def alone(self) -> tuple[Model, ...]:
        """For each adapter, the base with that one alone."""
        return tuple(replace(self.base, adapt=adapt(one, self.base.config)) for one in self.settings)


def _adapted(settings: Sequence[AdapterConfig], block: Block, _: nnx.Rngs) -> Block:
    """A block with the parameters of all adapters, joined."""
    for number, (name, projection) in enumerate(block.projections().items()):
        if not (width := sum(_ranks(settings, name))):
            continue
        axes, contracted = projection.w.get_metadata("axes"), projection.contracted
        inputs, outputs = projection.w.shape[:contracted], projection.w.shape[contracted:]
        entries, dora = len(settings) + 1, any(one.dora for one in settings)
        projection.w_lora_a = nnx.Param(jnp.zeros((*inputs, width)), axes=(*axes[:contracted], "rank"))
        projection.w_lora_b = nnx.Param(jnp.zeros((width, *outputs)), axes=("rank", *axes[contracted:]))
        projection.w_lora_share = nnx.Param(jnp.zeros((entries, width)), axes=(None, None))
        if dora:
            projection.w_lora_gain = nnx.Param(jnp.ones((entries, *outputs)), axes=(None, *axes[contracted:]))
        projection.adapter = Adapter(1.0, number, magnitude=dora, mixed=True)
    return block


def _ranks(settings: Sequence[AdapterConfig], name: str) -> list[int]:
    """Channels of each adapter in one module; PiSSA's are twice its rank, and 0 where the module is not adapted."""
    wider = [2 if one.start == "pissa" else 1 for one in settings]
    lows = [one.modules.get(name) for one in settings]
    return [wide * low.rank if low else 0 for wide, low in zip(wider, lows, strict=True)]


@partial(jit, static_argnames="mixture")
def _views(mixture: Mixture, base: Weights, params: tuple[Params, ...]) -> tuple[Params, ...]:
    """The weights that the adapters add to each layer."""
    settings, stacked = mixture.settings, Params()
    pairs = [plain_pairs(own, one) for own, one in zip(params, settings, strict=True)]
    gains_of = [_gains(model, base, own) for model, own in zip(mixture.alone, params, strict=True)]
    for name in {name: None for one in settings for name in one.modules_of(mixture.base.config)}:
        stem = f"{LAYERS}{name}/w_lora_"
        having = [own for own in pairs if f"{stem}a" in own]
        stacked[f"{stem}a"] = jnp.concatenate([own[f"{stem}a"] for own in having], axis=-1)
        stacked[f"{stem}b"] = jnp.concatenate([own[f"{stem}b"] for own in having], axis=1)
        ranks = _ranks(settings, name)
        # The factor of each adapter on each channel; the first row, for no adapter, is 0.
        share, ends = np.zeros((len(settings) + 1, sum(ranks)), np.float32), np.cumsum(ranks)
        for number, (adapter, rank, end) in enumerate(zip(settings, ranks, ends, strict=True), start=1):
            if rank:
                share[number, end - rank : end] = adapter.modules[name].scale
        stacked[f"{stem}share"] = jnp.broadcast_to(jnp.asarray(share), (len(stacked[f"{stem}b"]), *share.shape))
        if any(gains_of):
            ones = jnp.ones(stacked[f"{stem}b"].shape[:1] + stacked[f"{stem}b"].shape[2:])
            entries = [ones, *(gain.get(f"{stem}m", ones) for gain in gains_of)]
            stacked[f"{stem}gain"] = jnp.stack(entries, axis=1)
    return unstack(mixture.model, stacked).layers


def _gains(model: Model, base: Weights, params: Params) -> Params:
    """DoRA's gains under one adapter alone, `[L *O]`, by the names of its magnitudes; nothing where it has none."""
    if not any(name.endswith("_lora_m") for name in params):
        return {}
    views = unstack(model, params).layers
    layers = tuple({**frozen, **mine} for frozen, mine in zip(base.layers, views, strict=True))
    by_layer = gains(model, base._replace(layers=layers))
    names = {name: None for layer in by_layer for name in layer}
    return {f"{LAYERS}{name}": jnp.stack([layer[name] for layer in by_layer if name in layer]) for name in names}
