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

import jax
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
        """The base with the parameters of all of them, joined."""

        def adapted(block: Block, _: nnx.Rngs) -> Block:
            entries, dora = len(self.settings) + 1, any(adapter.dora for adapter in self.settings)
            for number, (name, projection) in enumerate(block.projections().items()):
                if not (width := sum(_ranks(self.settings, name))):
                    continue
                axes, contracted = projection.w.get_metadata("axes"), projection.contracted
                inputs, outputs = projection.w.shape[:contracted], projection.w.shape[contracted:]
                projection.w_lora_a = nnx.Param(jnp.zeros((*inputs, width)), axes=(*axes[:contracted], "rank"))
                projection.w_lora_b = nnx.Param(jnp.zeros((width, *outputs)), axes=("rank", *axes[contracted:]))
                projection.w_lora_share = nnx.Param(jnp.zeros((entries, width)), axes=(None, None))
                if dora:
                    gain = jnp.ones((entries, *outputs))
                    projection.w_lora_gain = nnx.Param(gain, axes=(None, *axes[contracted:]))
                projection.adapter = Adapter(1.0, number, magnitude=dora, mixed=True)
            return block

        return replace(self.base, adapt=adapted)

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
        return _joined(base, _views(self, base, tuple(params)))


def _joined(base: Weights, views: tuple[Params, ...]) -> Weights:
    return base._replace(layers=tuple({**layer, **more} for layer, more in zip(base.layers, views, strict=True)))


def _ranks(settings: Sequence[AdapterConfig], name: str) -> list[int]:
    """Channels of each adapter in one module; PiSSA's are twice its rank, and 0 where the module is not adapted."""
    lows = [(2 if adapter.start == "pissa" else 1, adapter.modules.get(name)) for adapter in settings]
    return [wider * low.rank if low else 0 for wider, low in lows]


@partial(jit, static_argnames="mixture")
def _views(mixture: Mixture, base: Weights, params: tuple[Params, ...]) -> tuple[Params, ...]:
    """The weights that the adapters add to each layer."""
    settings, stacked, all_gains = mixture.settings, Params(), list[Params]()
    for adapter, weights in zip(settings, params, strict=True):
        by_name = dict[str, list[jax.Array]]()
        if adapter.dora:  # its gains under this adapter alone, `[L *O]`, by the names of its magnitudes
            model = replace(mixture.base, adapt=adapt(adapter, mixture.base.config))
            for layer in gains(model, _joined(base, unstack(model, weights).layers)):
                for name, gain in layer.items():
                    by_name.setdefault(f"{LAYERS}{name}", []).append(gain)
        all_gains.append({name: jnp.stack(by_layer) for name, by_layer in by_name.items()})
    pairs = [plain_pairs(weights) for weights in params]
    for name in {name: None for adapter in settings for name in adapter.modules_of(mixture.base.config)}:
        stem, ranks = f"{LAYERS}{name}/w_lora_", _ranks(settings, name)
        a, b = ([own[f"{stem}{letter}"] for own in pairs if f"{stem}{letter}" in own] for letter in "ab")
        stacked[f"{stem}a"], stacked[f"{stem}b"] = jnp.concatenate(a, axis=-1), jnp.concatenate(b, axis=1)
        # The factor of each adapter on each channel; the first row, for no adapter, is 0.
        share, ends = np.zeros((len(settings) + 1, sum(ranks)), np.float32), np.cumsum(ranks)
        for number, (adapter, rank, end) in enumerate(zip(settings, ranks, ends, strict=True), start=1):
            if rank:
                share[number, end - rank : end] = adapter.modules[name].scale
        stacked[f"{stem}share"] = jnp.broadcast_to(jnp.asarray(share), (len(stacked[f"{stem}b"]), *share.shape))
        if any(all_gains):
            ones = jnp.ones(stacked[f"{stem}b"].shape[:1] + stacked[f"{stem}b"].shape[2:])
            entries = [ones, *(gain.get(f"{stem}m", ones) for gain in all_gains)]
            stacked[f"{stem}gain"] = jnp.stack(entries, axis=1)
    return unstack(mixture.model, stacked).layers
