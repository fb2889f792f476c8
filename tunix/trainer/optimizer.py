"""Builds the optax transformation of an `optimizer` section: clip -> rule -> decoupled decay -> learning rate.

All of it is computed in float32, whatever the weights are; `moments_dtype` is the type in which moments are stored.
Weight decay applies to matrices only, not to norms and biases. AdamW: Loshchilov & Hutter 2017,
https://arxiv.org/abs/1711.05101. Adafactor: Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235. Lion: Chen et al.
2023, https://arxiv.org/abs/2302.06675. Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import optax

from tunix.config import DType
from tunix.mesh import Axes
from tunix.models.config import MTP
from tunix.trainer.config import OptimizerConfig

MUON_RMS = 0.2
"""Root mean square of a Muon update: that of a typical AdamW update, so that AdamW's learning rates carry over
(Liu et al. 2025, https://arxiv.org/abs/2502.16982)."""


def build_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The schedule, updates done -> learning rate: linear warm-up, then constant, linear or cosine down to 0.

    Args:
        steps: updates of the whole run, warm-up included.
    """
    rate = config.learning_rate
    warm = round(config.warmup * steps) if config.warmup < 1 else int(config.warmup)  # updates until the full rate
    rest = max(steps - warm, 1)
    decay = {
        "constant": lambda: optax.constant_schedule(rate),
        "linear": lambda: optax.linear_schedule(rate, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(rate, rest),
    }[config.schedule]()
    # The first update already moves the weights: a warm-up of n updates uses 1/n, 2/n, ..., 1 of the rate. Hugging
    # Face's lags by one update, with 0, 1/n, ..., (n - 1)/n; from update n on they agree.
    lead = 0 if config.warmup_from_zero else 1
    return optax.join_schedules([lambda step: rate * (step + lead) / warm, decay], [warm]) if warm else decay


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter: not to norms, biases, sinks, rates of decay and magnitudes, nor to
    frozen parameters."""
    exempt = ("/b", "/bias", "/sinks", "/a_log", "/factor", "_lora_m", "_lora_a0", "_lora_b0")
    return not (name.endswith(exempt) or name.split("/")[-2].endswith("norm"))


def build_optimizer(config: OptimizerConfig, steps: int, axes: Mapping[str, Axes]) -> optax.GradientTransformation:
    """The optax transformation of an `optimizer` section.

    Args:
        steps: updates of the whole run, for the schedule.
        axes: logical axes by parameter name, from which Muon finds the axes of a matrix.
    """
    head = {name: of for name, of in axes.items() if name.startswith(MTP)}
    if 0 < len(head) < len(axes):
        rest = {name: of for name, of in axes.items() if name not in head}
        # The head that drafts is clipped and moved by itself, and all others are as without it.
        return _in_parts(_named(rest), build_optimizer(config, steps, rest), build_optimizer(config, steps, head))
    schedule = build_schedule(config, steps)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    mask = {name: decays(name) for name in axes}
    constants = config.constants
    match config.name:
        case "muon":
            rule = [_muon(config, axes)]
        case "adamw":
            rule = [optax.scale_by_adam(constants["b1"], constants["b2"], constants["eps"])]
        case "lion":
            rule = [optax.scale_by_lion(constants["b1"], constants["b2"])]
        case "adafactor":
            # Update clipping at 1 as in the paper; the rate is the recipe's, not relative to the parameter's size.
            factored = optax.scale_by_factored_rms(epsilon=constants["eps"])
            rule = [_by_layer(optax.chain(factored, optax.clip_by_block_rms(1.0)), axes)]
        case "sgd":
            rule = [optax.trace(constants["b1"]) if constants["b1"] else optax.identity()]
    decay = optax.add_decayed_weights(config.weight_decay, mask) if config.weight_decay else optax.identity()
    parts = [clip, *rule, decay, optax.scale_by_learning_rate(schedule)]
    parts += [] if config.lora_plus is None else [lora_plus(config.lora_plus)]
    return _in_float32(optax.chain(*parts), config.moments_dtype)


def _in_float32(inner: optax.GradientTransformation, storage: DType) -> optax.GradientTransformation:
    """Computes in float32 and stores the moments in `storage`: 0.999 of a bfloat16 number rounds to that number."""

    def cast(tree: Any, dtype: DType) -> Any:
        return optax.tree.cast(tree, jax.numpy.dtype(dtype))

    def stored(state: optax.OptState) -> Any:
        # Only moments are under a parameter's name; the rest are counters and constants.
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x.astype(storage) if isinstance(path[-1], jax.tree_util.DictKey) else x, state
        )

    def init(params: Any) -> Any:
        return stored(inner.init(cast(params, "float32")))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jax.numpy.bfloat16 else x, state)
        updates, state = inner.update(cast(updates, "float32"), state, cast(params, "float32"))
        return updates, stored(state)

    return optax.GradientTransformation(init, update)


def _in_parts(
    split: Callable[[Any], tuple[dict[str, Any], ...]],
    first: optax.GradientTransformation,
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """A transformation of the first of the parts that `split` makes of parameters by name, and one of each other."""

    def init(params: Any) -> Any:
        part, *rest = split(params)
        return first.init(part), *map(others.init, rest)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        parts = enumerate(zip(split(updates), state, split(params), strict=True))
        results: list[Any] = [(others if i else first).update(x, moments, of) for i, (x, moments, of) in parts]
        moved = {name: x for part, _ in results for name, x in part.items()}
        return {name: moved[name] for name in updates}, tuple(new_state for _, new_state in results)

    return optax.GradientTransformation(init, update)


def _named(names: Collection[str]) -> Callable[[Any], tuple[dict[str, Any], ...]]:
    """What splits parameters by name into those of these names and all others."""
    return lambda tree: (
        {name: x for name, x in tree.items() if name in names},
        {name: x for name, x in tree.items() if name not in names},
    )


def lora_plus(ratio: float) -> optax.GradientTransformation:
    """LoRA+ (Hayou, Ghosh & Yu 2024, https://arxiv.org/abs/2402.12354): `eta_B = ratio * eta_A`.

    B starts at 0 and A does not: with equal rates, a wide model learns its features from B too slowly.
    """

    def scaled(updates: Any, _: Any) -> Any:
        return {name: ratio * x if name.endswith("_lora_b") else x for name, x in updates.items()}

    return optax.stateless(scaled)


def _by_layer(inner: optax.GradientTransformation, axes: Mapping[str, Axes]) -> optax.GradientTransformation:
    """Applies `inner` to each layer of a stacked parameter `[L ...]` separately.

    An outlier gradient in one layer must neither shrink the updates of the others nor enter their statistics.
    """

    def parts(tree: Any) -> tuple[dict[str, Any], ...]:
        """What is not stacked, then the stacked parameters, those of as many layers together."""
        stacked = {name: x for name, x in tree.items() if axes[name][0] == "layers"}
        numbers = sorted({len(x) for x in stacked.values()}, reverse=True) or [0]
        of = [{name: x for name, x in stacked.items() if len(x) == number} for number in numbers]
        return {name: x for name, x in tree.items() if name not in stacked}, *of

    def init(params: Any) -> Any:
        return (jax.vmap(inner.init) if params else inner.init)(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return (jax.vmap(inner.update) if updates else inner.update)(updates, state, params)

    return _in_parts(parts, inner, optax.GradientTransformation(init, update))


def _muon(config: OptimizerConfig, axes: Mapping[str, Axes]) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and biases (as its authors do)."""
    # Of each stacked parameter that is a matrix of a layer the axes that are its rows and columns. The taps of a
    # convolution are none: they mix no channels.
    matrices: dict[str, optax.contrib.MuonDimensionNumbers] = {}
    for name, names in axes.items():
        if names[0] == "layers" and len(names) >= 3 and "embed" in names and decays(name):
            # After those of layers and experts, contracted axes come first; `o` contracts heads and head, all others
            # one axis.
            first = 2 if names[1] == "expert" else 1
            end = first + (2 if names[first : first + 2] == ("heads", "head") else 1)
            rows, columns = tuple(range(first, end)), tuple(range(end, len(names)))
            matrices[name] = optax.contrib.MuonDimensionNumbers(rows, columns)
    # Matrices alone: optax moves others by Nesterov's variant of Adam, and decays norms and biases too. Its rate turns
    # the sign.
    muon = optax.contrib.muon(
        -1.0,
        beta=0.95,
        eps=config.constants["eps"],
        muon_weight_dimension_numbers=matrices,
        consistent_rms=MUON_RMS,
    )
    adam = optax.scale_by_adam(config.constants["b1"], config.constants["b2"], config.constants["eps"])
    return _in_parts(_named(matrices), muon, adam)
