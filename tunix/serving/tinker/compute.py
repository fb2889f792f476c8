"""The compiled programs of all clients' adapters: forward, forward and backward, and the optimizer.

All adapters share the base, which is also what the engine publishes, and the programs: an adapter of a lower rank than
the highest has zeros in the channels that it lacks, and in modules that its client does not train. These stay zeros,
since the gradient of each of the two matrices has the other one as a factor, so that nothing is compiled for a new
client, whatever its rank. The update is scaled by `ALPHA / rank` of each adapter.

A datum's tokens and what its loss reads are aligned: position i reads `tokens[i]` and predicts `target_tokens[i]`. In
rows they are a place apart, as in training: a datum takes a place more than it has tokens, whose token nobody reads.
Losses are plain sums over tokens and data.

Axes: B rows, R rows of a micro-batch, T time, A alternatives (the targets of a position).
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from tunix.algorithms.ops import cispo_surrogate, clipped_surrogate, log_ratio, plain_surrogate
from tunix.data.packing import pack
from tunix.errors import UserError, nearest
from tunix.lora.adapt import adapt
from tunix.lora.config import AdapterConfig
from tunix.lora.multi_lora import LoadedAdapter
from tunix.mesh import compiler_options
from tunix.models.config import is_adapter
from tunix.models.model import Params
from tunix.models.quantization.modules import EXPERTS, projections_of
from tunix.rollout.engine.engine import Engine
from tunix.serving.tinker.wire import Datum
from tunix.trainer.logprobs import unpack
from tunix.trainer.microbatches import Microbatcher, rows_per_microbatch
from tunix.trainer.step import forward_of
from tunix.types import Batch, Sequence
from tunix.util.exact import jit

ALPHA = 32.0
"""The protocol does not name alpha; this is that of the adapters of its exports."""
SHORTEST = 128
"""Tokens of the shortest rows; others have the next power of two that the longest datum fits in."""
VALUES = "weights", "logprobs", "advantages"
"""What a loss may read beside its targets."""


class Kind(NamedTuple):
    """A loss by its name in the protocol."""

    inputs: tuple[str, ...]
    """What it reads beside `target_tokens`."""
    config: Mapping[str, float]
    """Its settings, with their defaults."""


LOSSES: dict[str, Kind] = {
    "cross_entropy": Kind(("weights",), {}),
    "importance_sampling": Kind(("logprobs", "advantages"), {}),
    "ppo": Kind(("logprobs", "advantages"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Kind(("logprobs", "advantages"), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Kind(("logprobs", "advantages"), {"beta": 0.05}),
}


class Chosen(NamedTuple):
    """A loss and its settings, as the programs take them; 0 where it has no such setting."""

    number: Any = np.int32(0)
    """The loss's place in `LOSSES`, e.g. 2."""
    low: Any = np.float32(0)
    """The ratio counts as no less, e.g. 0.8."""
    high: Any = np.float32(0)
    """The ratio counts as no more, e.g. 1.2."""
    beta: Any = np.float32(0)
    """That of `dro`, e.g. 0.05."""


def chosen(name: str, config: Mapping[str, float | str]) -> tuple[Kind, Chosen]:
    """A loss and its settings, those that are left out at their defaults.

    Raises:
        UserError: there is no such loss, or it has no such setting.
    """
    if (kind := LOSSES.get(name)) is None:
        remedy = " Say loss_fn=importance_sampling." if name == "stable_reinforce" else nearest(name, LOSSES)
        raise UserError(f"loss_fn: {name!r} is not computed here; {', '.join(LOSSES)} are.{remedy}")
    for key, value in config.items():
        if key not in kind.config:
            raise UserError(f"loss_fn_config: {name} has no {key!r}; it has {', '.join(kind.config) or 'none'}")
        if isinstance(value, str):
            raise UserError(f"loss_fn_config: {key} is a number, not {value!r}")
    settings = {**kind.config, **config}
    values = (np.float32(settings.get(key, 0)) for key in ("clip_low_threshold", "clip_high_threshold", "beta"))
    return kind, Chosen(np.int32(list(LOSSES).index(name)), *values)


def losses_of(
    loss: Chosen, logprobs: Float[Array, "R T"], values: Mapping[str, Float[Array, "R T"]], rows: Batch
) -> Float[Array, "R T"]:
    """The loss of each token; their sum is the loss. With r = p / q the ratio:

        cross_entropy        -w log p
        importance_sampling  -r A
        ppo                  -min(r A, clip(r, low, high) A)
        cispo                -sg(clip(r, low, high)) A log p
        dro                  -(A log p - beta/2 (log p - log q)^2)

    https://tinker-docs.thinkingmachines.ai/losses; the papers are in `tunix.algorithms.ops` and, of DRO,
    https://arxiv.org/abs/2405.19107. Nothing is masked: where nothing is to be learnt, weight or advantage is 0.
    """
    w, q, advantages = (values[name] for name in VALUES)
    log_ratios = log_ratio(logprobs, q, rows)
    ratio = jnp.exp(log_ratios)
    low, high = 1.0 - loss.low, loss.high - 1.0
    branches = (
        lambda: -w * logprobs,
        lambda: plain_surrogate(ratio, advantages).loss,
        lambda: clipped_surrogate(ratio, advantages, low, high).loss,
        lambda: cispo_surrogate(logprobs, ratio, advantages, low, high).loss,
        lambda: -logprobs * advantages + 0.5 * loss.beta * (logprobs - q) ** 2,
    )
    return jax.lax.switch(loss.number, branches)


class Adapter(NamedTuple):
    """The weights of an adapter, and what its B is multiplied by where they are used."""

    params: Params
    """Matrices of the highest rank, with zeros in the channels that are not trained."""
    factor: float
    """The highest rank divided by its own: the model is scaled for the highest."""


class Step(NamedTuple):
    """The settings of an update (AdamW, Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101)."""

    learning_rate: Any = 1e-4
    beta1: Any = 0.9
    beta2: Any = 0.95
    eps: Any = 1e-12
    weight_decay: Any = 0.0
    """Decoupled, of all that trains."""
    grad_clip_norm: Any = 0.0
    """The largest norm of the summed gradients; 0 for any."""


class Outputs(NamedTuple):
    """What a loss says of each datum, in the shape of its targets: `[T]` or `[T A]`."""

    logprobs: list[np.ndarray]
    """Log-probs of the targets in nats."""
    losses: list[np.ndarray]
    """What is summed."""


class Compute:
    """The base, and the programs over it; to be used by one thread."""

    def __init__(self, engine: Engine, params: Params, rank: int, longest: int):
        """Shares the base with an engine.

        Args:
            engine: what samples from it, on the same devices.
            params: its weights.
            rank: the highest that an adapter may have.
            longest: tokens of a datum at most.

        Raises:
            UserError: a matrix cannot have this rank.
        """
        model, mesh = engine.model, engine.mesh
        self.rank, self.mesh, self.frozen, self._longest = rank, mesh, params, longest
        # Programs of two threads reach several devices in one order. A single one need not wait while others compile.
        self._lock = engine.lock if mesh.size > 1 else nullcontext()
        # The requests of a batch cannot have experts of their own.
        self.modules = tuple(name for name in projections_of(model.config) if not name.startswith(EXPERTS))
        """The modules that can be adapted, by their short Hugging Face names."""
        structure = adapt(self.settings(rank, self.modules), model.config)
        self.model = replace(model, remat="block", adapt=structure)
        try:
            shardings = self.model.shardings(mesh)
        except UserError as error:
            raise UserError(f"--rank {rank}: {error}") from None
        self._places = {name: place for name, place in shardings.items() if is_adapter(name)}
        self._axes = {name: self.model.axes[name].index("rank") for name in self._places}
        options = compiler_options(mesh, model.dtype)
        self._forward = jit(self._losses, options=options)
        self._backward = jit(self._gradients, donate_argnums=2, options=options)
        self._update = jit(self._stepped)
        self._zeros = jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))
        self._moments = jit(optax.scale_by_adam().init)
        self.nothing = Adapter(self.widened({}), 1.0)
        """No adapter: the base."""

    @staticmethod
    def settings(rank: int, modules: tuple[str, ...]) -> AdapterConfig:
        """The `adapter` section of an adapter of such a rank in these modules."""
        return AdapterConfig(rank=rank, alpha=ALPHA, targets=modules)

    def zeros(self, like: Any) -> Any:
        """Zeros in the shapes of a tree of arrays."""
        with jax.set_mesh(self.mesh):
            return self._zeros(like)

    def fresh(self, seed: int, rank: int, modules: tuple[str, ...]) -> Params:
        """The initial weights of an adapter: A is random, B is 0."""
        new = self.model.init(jax.random.key(seed), dict.fromkeys(self._axes, "float32"), self.mesh)
        return self.widened(self.narrowed(new, rank, modules))

    def moments(self, params: Params) -> optax.OptState:
        """The optimizer's state before the first update."""
        with jax.set_mesh(self.mesh):
            return self._moments(params)

    def narrowed(self, arrays: Mapping[str, Any], rank: int, modules: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The arrays of the modules that an adapter trains, without the channels that it lacks."""
        named = {f"layers/{name}/w_lora_{ab}" for name in self.settings(rank, modules).modules for ab in "ab"}
        return {
            name: np.take(np.asarray(x), np.arange(rank), axis=self._axes[name])
            for name, x in arrays.items()
            if name in named
        }

    def widened(self, arrays: Mapping[str, np.ndarray]) -> Params:
        """What `narrowed` made narrower, on the devices."""
        wide: Params = {}
        for name, place in self._places.items():
            shape = self.model.shapes[name]
            if name in arrays:
                lacking = [(0, size - have) for size, have in zip(shape, arrays[name].shape, strict=True)]
                whole = np.pad(arrays[name].astype(np.float32), lacking)
            else:
                whole = np.zeros(shape, np.float32)
            wide[name] = jax.device_put(whole, place)
        return wide

    def loaded(self, adapter: Adapter) -> LoadedAdapter:
        """An adapter as the engine loads it, of the same settings for all."""
        return LoadedAdapter(self.settings(self.rank, self.modules), _louder(adapter.params, adapter.factor))

    def check(self, data: List[Datum], kind: Kind) -> None:
        """Checks that a loss can be computed of data.

        Raises:
            UserError: an input is missing, is not understood or is not aligned; or a datum is empty or too long.
        """
        if not data:
            raise UserError("there is no datum: send at least one")
        vocab, wanted = self.model.config.vocab_size, {"target_tokens", *kind.inputs}
        for number, datum in enumerate(data):
            inputs, length = datum.inputs, len(datum.tokens)
            if inputs.keys() != wanted:
                raise UserError(
                    f"datum {number}: loss_fn_inputs are {', '.join(inputs) or 'none'}; this loss reads "
                    f"{', '.join(sorted(wanted))}"
                )
            if not 1 <= length <= self._longest:
                raise UserError(f"datum {number} has {length} tokens; 1 to {self._longest} can be read")
            shape = inputs["target_tokens"].shape
            if shape[:1] != (length,) or len(shape) > 2:
                raise UserError(
                    f"datum {number}: target_tokens has the shape {list(shape)} for {length} tokens of model_input: a "
                    "target for each, or a row of targets"
                )
            if len(shape) == 2 and kind is not LOSSES["cross_entropy"]:
                raise UserError(f"datum {number}: target_tokens has {shape[1]} columns, which only cross_entropy reads")
            for name, values in {"model_input": datum.tokens, **inputs}.items():
                if name in VALUES and values.shape != shape:
                    raise UserError(
                        f"datum {number}: {name} has the shape {list(values.shape)}, and target_tokens {list(shape)}: "
                        "each target has a value"
                    )
                if name in VALUES and not np.isfinite(values).all():
                    raise UserError(f"datum {number}: {name} holds a value that is not finite")
                if name not in VALUES and (not values.size or not 0 <= values.min() <= values.max() < vocab):
                    raise UserError(f"datum {number}: {name} holds ids outside of the vocabulary, 0 to {vocab - 1}")

    def forward(self, adapter: Adapter, data: List[Datum], loss: Chosen) -> Outputs:
        """What a loss says of data, without gradients."""
        return self._each(data, lambda rows: self._forward(self.frozen, adapter, rows, loss))

    def backward(self, adapter: Adapter, sums: Params, data: List[Datum], loss: Chosen) -> tuple[Outputs, Params]:
        """As `forward`, and `sums` with the gradients of the data's summed loss added; donates `sums`."""

        def run(rows: Batch) -> tuple[jax.Array, jax.Array]:
            nonlocal sums
            sums, logprobs, losses = self._backward(self.frozen, adapter, sums, rows, loss)
            return logprobs, losses

        return self._each(data, run), sums

    def update(
        self, params: Params, moments: optax.OptState, gradients: Params, step: Step
    ) -> tuple[Params, optax.OptState, float]:
        """The weights and moments after an update, and the norm of the gradients."""
        with self._lock, jax.set_mesh(self.mesh):
            params, moments, norm = self._update(params, moments, gradients, Step(*map(np.float32, step)))
        return params, moments, float(norm)

    def _each(self, data: List[Datum], run: Callable[[Batch], tuple[jax.Array, jax.Array]]) -> Outputs:
        """Calls `run` for each micro-batch of the data, which returns log-probs and losses `[A R T]`."""
        outputs = Outputs(list(map(np.zeros, range(len(data)))), list(map(np.zeros, range(len(data)))))
        widths = [datum.inputs["target_tokens"].shape[1:] for datum in data]
        for width in dict.fromkeys(widths):
            # Data of as many targets at a position, in packed rows `[B T]`. What the loss reads is there as `NAME/0`,
            # `NAME/1`, ..., ids as float32, which has all integers up to 2**24.
            members = [number for number, other in enumerate(widths) if other == width]
            longest = max(len(data[i].tokens) for i in members) + 1
            length = max(SHORTEST, 1 << (longest - 1).bit_length())
            sequences = []
            for i in members:
                targets, columns = data[i].inputs["target_tokens"], dict[str, np.ndarray]()
                for name in ("target_tokens", *VALUES):
                    values = np.asarray(data[i].inputs.get(name, np.zeros(targets.shape)), np.float32)
                    for k, column in enumerate(values.reshape(len(targets), -1).T):
                        columns[f"{name}/{k}"] = np.append(np.float32(0), column)  # a place after its token
                tokens = np.append(data[i].tokens, 0).astype(np.int32)
                sequences.append(Sequence(tokens, np.arange(len(tokens)) > 0, per_token=columns))
            batch, lengths = pack(sequences, len(sequences), length), [len(x.tokens) for x in sequences]
            number = rows_per_microbatch(self.mesh, 1 << 30, None, length, packing=False)
            placed, alone = Microbatcher(number, self.mesh).place(batch), np.ones(1, np.float32)
            with self._lock, jax.set_mesh(self.mesh):
                # Nothing is divided: the sequences do not count, and their number is in no shape.
                parts = [
                    run(replace(placed.at(i), weights=alone, lengths=alone, counts={}))
                    for i in range(-(-len(batch.tokens) // number))
                ]
            for listed, of_rows in zip(outputs, zip(*parts, strict=True), strict=True):
                whole = np.concatenate([np.asarray(x) for x in of_rows], axis=1)[:, : len(batch.tokens)]
                for number, values in zip(members, unpack(np.moveaxis(whole, 0, -1), batch, lengths), strict=True):
                    listed[number] = values[1:] if width else values[1:, 0]
        return outputs

    def _losses(
        self, frozen: Params, adapter: Adapter, rows: Batch, loss: Chosen
    ) -> tuple[Float[Array, "A R T"], Float[Array, "A R T"]]:
        """Log-probs of the targets and the losses of these, 0 in the padding."""
        params = {**frozen, **_louder(adapter.params, adapter.factor)}
        hidden, _ = forward_of(self.model, params, rows)
        positions, mask, values = jnp.asarray(rows.positions), jnp.asarray(rows.loss_mask), rows.per_token
        names = ("target_tokens", *VALUES)
        columns = {name: jnp.stack([values[f"{name}/{k}"] for k in range(len(values) // len(names))]) for name in names}

        def of_column(column: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            targets = column["target_tokens"].astype(jnp.int32)
            logprobs, *_ = self.model.logprobs_of(params, hidden, targets, positions, mask)
            return logprobs, jnp.where(mask, losses_of(loss, logprobs, column, rows), 0.0)

        return jax.lax.map(of_column, columns)

    def _gradients(
        self, frozen: Params, adapter: Adapter, sums: Params, rows: Batch, loss: Chosen
    ) -> tuple[Params, jax.Array, jax.Array]:
        def summed(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            logprobs, losses = self._losses(frozen, adapter._replace(params=params), rows, loss)
            return jnp.sum(losses), (logprobs, losses)

        gradients, results = jax.grad(summed, has_aux=True)(adapter.params)
        return jax.tree.map(jnp.add, sums, gradients), *results

    def _stepped(
        self, params: Params, moments: optax.OptState, gradients: Params, step: Step
    ) -> tuple[Params, optax.OptState, jax.Array]:
        norm = optax.tree.norm(gradients)
        # torch's `clip_grad_norm_` divides by the norm and 1e-6.
        share = jnp.where(step.grad_clip_norm > 0, jnp.minimum(1.0, step.grad_clip_norm / (norm + 1e-6)), 1.0)
        gradients = jax.tree.map(lambda x: x * share, gradients)
        directions, moments = optax.scale_by_adam(step.beta1, step.beta2, step.eps).update(gradients, moments)
        rate, decay = step.learning_rate, step.weight_decay
        new = jax.tree.map(lambda x, direction: x - rate * (direction + decay * x), params, directions)
        return new, moments, norm


def _louder(params: Params, factor: Any) -> Params:
    return {name: x * factor if name.endswith("_lora_b") else x for name, x in params.items() if is_adapter(name)}
