"""The compiled training step: gradients of a loss over packed rows, summed over micro-batches, and their application.

A batch arrives as `[M R T]`: M micro-batches of R rows, of which the first `filled` hold data; the loop runs only
those, so packing saves time and nothing recompiles. Terms are divided by the counts of the whole batch, taken before
the split: micro-batches, padding and devices cannot change the result.

Axes: M micro-batches, R rows of a micro-batch, T time, S sequences, D model width, V vocabulary, Te teacher's width;
L layers, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from tunix.algorithms.ops import trained_only
from tunix.config import LOSS_WEIGHTS, OBSERVED
from tunix.mesh import constrain
from tunix.models.blocks import Auxiliary
from tunix.models.config import MTP
from tunix.models.divergence import Side, Stored, compared
from tunix.models.layers import TokenKeys
from tunix.models.model import Model, Params
from tunix.models.moe import EXPECTED, ROWS
from tunix.trainer.microbatches import Index, Microbatches, TrainerSpec, described
from tunix.types import Batch, Compared, Loss, LossInputs, LossOutputs, Term
from tunix.util.loops import loop

COUNTS, MEANS = f"moe/{ROWS}", f"moe/{EXPECTED}"
"""Where the sums of a step hold the rows of each expert `[L E]`, and the expected ones, until `load_metrics` replaces
them."""


def load_balance(rows: Float[Array, "L E"], expected: Float[Array, "L E"]) -> Float[Array, ""]:
    """E times the sum over experts of the share of choices and the mean probability, in the mean of the layers.

    1 where all experts are used alike, E where one is used alone (Fedus et al. 2021, https://arxiv.org/abs/2101.03961,
    equation 4). The choices have no gradient; the probabilities have. With the rows of a whole batch, the expected ones
    of its micro-batches have values, and gradients, that add up to those of the batch.
    """
    all_rows = jnp.maximum(jnp.sum(rows, axis=-1), 1.0)
    return rows.shape[-1] * jnp.mean(jnp.sum(rows * expected, axis=-1) / all_rows**2)


def load_sums(auxiliary: Auxiliary, rows: Float[Array, "L E"] | None, coefficient: float) -> dict[str, jax.Array]:
    """One micro-batch's part of the metrics, and of the loss as `loss/router_aux` where it counts.

    Empty without experts. The loss is `coefficient` times `load_balance` of the whole batch; other trainers take the
    shares of each micro-batch.

    Args:
        auxiliary: the layers' terms, stacked over layers.
        rows: of each expert in the whole batch; None where the micro-batch is the whole.
        coefficient: of the loss; 0 for none.
    """
    if ROWS not in auxiliary:
        return {}
    sums = {COUNTS: auxiliary[ROWS], MEANS: auxiliary[EXPECTED]}
    if coefficient:
        balance = load_balance(auxiliary[ROWS] if rows is None else rows, auxiliary[EXPECTED])
        sums["loss/router_aux"] = coefficient * balance
    return sums


def load_metrics(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The sums with the rows of each expert replaced by metrics; as they are without experts.

    `moe/load_balance` is what its function says.

    `moe/largest_share` is E times the share of a layer's rows that its most used expert has, 1 where all are used alike
    and E where one has all, in the mean of the layers; `moe/largest_share_max` is that of the most uneven layer.
    `moe/unused` is the share of experts without a row.
    """
    scalars = dict(sums)
    if COUNTS in scalars:
        rows = scalars.pop(COUNTS)
        shares = rows / jnp.maximum(jnp.sum(rows, axis=-1, keepdims=True), 1.0)
        largest = rows.shape[-1] * jnp.max(shares, axis=-1)
        scalars |= {
            "moe/load_balance": load_balance(rows, scalars.pop(MEANS)),
            "moe/largest_share": jnp.mean(largest),
            "moe/largest_share_max": jnp.max(largest),
            "moe/unused": jnp.mean((rows == 0).astype(jnp.float32)),
        }
    return scalars


DROPOUT = 0xD0
"""Folded into a step's key for dropout, so that the noise of the embeddings shares nothing with it."""
Sums = dict[str, "jax.Array | Peak"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Peak:
    """The largest of some per-token values, and its index."""

    value: Any
    """Float scalar, e.g. 3.5; typed Any, since `jax.eval_shape` puts a shape here."""
    place: Any
    """Integer scalar: index in the batch's flattened `[M R T]`, e.g. 17."""


@jax.tree_util.register_dataclass
@described
@dataclass(frozen=True)
class TrainState:
    """Everything that training updates. Random numbers follow from the run's seed and `step`."""

    params: Params
    """The trainable weights: all of them, or only the adapter's."""
    moments: optax.OptState
    """The optimizer's state."""
    step: Int[Array, ""]
    """Number of updates done, e.g. 100."""
    critic: TrainState | None = None
    """The train state of a critic that is a separate model; None without one."""


@jax.tree_util.register_dataclass
@described
@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states for one batch, on the student's mesh, and the head that maps them to logits."""

    hidden: Float[Array, "M R T Te"]
    """The teacher's hidden states after its final norm."""
    table: Float[Array, "V Te"] | None
    """The matrix of the teacher's head; None where it is the student's, which teaches itself."""
    softcap: float | None = field(metadata={"static": True})
    """Softcap of the teacher's logits, e.g. 30.0; None without one."""
    share: float = field(default=1.0, metadata={"static": True})
    """Its share of the divergence, e.g. 0.25 of several teachers'."""
    followed: Bool[Array, "M R T"] | None = None
    """Which tokens follow this teacher, e.g. those of every other sequence; None where all do."""


class StepInputs(NamedTuple):
    """What a step reads and does not update."""

    base: Params
    """The frozen weights under an adapter; empty without one."""
    reference: Params | None
    """The reference's weights that are not in the base, where the loss reads its log-probs."""
    teachers: tuple[TeacherStates, ...]
    """The states of each teacher for this batch, where the loss reads a divergence."""
    microbatches: Microbatches
    """The batch on the devices."""


def step(
    spec: TrainerSpec, state: TrainState, inputs: StepInputs, key: PRNGKeyArray, loss: Loss
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update: the new state and the metrics. The caller's jit donates `state`."""
    gradients, metrics = gradients_of(spec, state, inputs, key, loss)
    state, more = apply(spec, state, gradients, metrics["train/loss"])
    return state, metrics | more


def gradients_of(
    spec: TrainerSpec, state: TrainState, inputs: StepInputs, key: PRNGKeyArray, loss: Loss
) -> tuple[Params, dict[str, jax.Array]]:
    """The gradients of the whole batch's loss, and its metrics."""
    key, microbatches, rows = jax.random.fold_in(key, state.step), inputs.microbatches, None
    if spec.model.router_aux_loss_coef and microbatches.number > 1:
        # The loss is a product of two means, of which a micro-batch's gradient needs the whole batch's first one.
        rows = accumulate(
            lambda index: _forward(spec, state.params, inputs, microbatches.at(index), loss, key)[1][ROWS],
            microbatches,
        )

    def one_microbatch(params: Params, index: Index) -> tuple[jax.Array, Sums]:
        sums = sums_of(spec, params, inputs, index, loss, key, rows)
        # The head that drafts is trained beside the model, whose loss this is no part of.
        return cast(jax.Array, sums["train/loss"]) + cast(jax.Array, sums.get("loss/mtp", 0.0)), sums

    gradient, axes = jax.grad(one_microbatch, has_aux=True), spec.model.axes

    def placed(index: Index) -> tuple[Params, Sums]:
        # As the weights: a sum over micro-batches is then never held whole by any device.
        gradients, sums = gradient(state.params, index)
        return {name: constrain(x, *axes[name]) for name, x in gradients.items()}, sums

    gradients, sums = accumulate(placed, microbatches)
    return gradients, to_scalars(sums)


def shares(
    spec: TrainerSpec, state: TrainState, inputs: StepInputs, index: Index, key: PRNGKeyArray, loss: Loss
) -> Float[Array, "S"]:
    """What each sequence of a micro-batch adds to the loss of the next update.

    With its denominators fixed, the loss is linear in the weights of sequences: a share is weight times derivative.
    """
    key, microbatches = jax.random.fold_in(key, state.step), inputs.microbatches

    def weighted(weights: Float[Array, "S"]) -> jax.Array:
        changed = inputs._replace(microbatches=replace(microbatches, weights=weights))
        return cast(jax.Array, sums_of(spec, state.params, changed, index, loss, key)["train/loss"])

    return microbatches.weights * jax.grad(weighted)(microbatches.weights)


@jax.named_scope("optimizer")
def apply(
    spec: TrainerSpec, state: TrainState, gradients: Params, loss: Float[Array, ""]
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Applies the optimizer; returns the new state and its metrics.

    With `skips_nonfinite`, where the `loss` or a gradient is not finite, weights and optimizer state are the old ones,
    bit for bit, and only the count of updates goes on.
    """
    updates, moments = spec.optimizer.update(gradients, state.moments, state.params)
    params, done = cast(Params, optax.apply_updates(state.params, updates)), state.step
    # As the optimizer clips by it: in bfloat16 it would have three digits, and on CPUs memory of its own.
    wide = {name: x.astype(jnp.float32) for name, x in gradients.items()}
    metrics = {"train/grad_norm": optax.tree.norm({name: x for name, x in wide.items() if not name.startswith(MTP)})}
    if spec.skips_nonfinite:
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(wide))
        # Chosen, not multiplied by 0: 0 times NaN is NaN.
        old = (state.params, state.moments)
        params, moments = jax.tree.map(lambda new, kept: jnp.where(finite, new, kept), (params, moments), old)
        metrics["train/skipped"] = 1.0 - finite.astype(jnp.float32)
        # The schedule waits too, so that its count is the optimizer's.
        counts = optax.tree.get_all_with_path(
            state.moments, "count", lambda path, _: "ScaleBySchedule" in str(path[-1])
        )
        done = counts[0][1]
    metrics["train/learning_rate"] = jnp.asarray(spec.schedule(done), jnp.float32)
    return TrainState(params, moments, state.step + 1), metrics


def evaluate(spec: TrainerSpec, params: Params, inputs: StepInputs, loss: Loss) -> dict[str, jax.Array]:
    """The loss and its metrics, forward only and without noise."""
    return to_scalars(accumulate(lambda index: sums_of(spec, params, inputs, index, loss, None), inputs.microbatches))


def sums_of(
    spec: TrainerSpec,
    params: Params,
    inputs: StepInputs,
    index: Index,
    loss: Loss,
    key: PRNGKeyArray | None,
    rows: Float[Array, "L E"] | None = None,
) -> Sums:
    """One micro-batch's share of the loss and its metrics, already divided by the whole batch's counts.

    Args:
        key: of embedding noise and dropout; None for an evaluation, without noise.
        rows: of each expert in the whole batch; None where nobody reads them, or the micro-batch is the whole.
    """
    model, batch = spec.model, inputs.microbatches.at(index)
    hidden, auxiliary = _forward(spec, params, inputs, batch, loss, key)
    params = {**inputs.base, **params}
    tokens, positions, mask = map(jnp.asarray, (batch.tokens, batch.positions, batch.loss_mask))

    needed = mask | (jnp.asarray(batch.per_token[OBSERVED]) > 0) if OBSERVED in batch.per_token else mask

    def logprobs_of(model: Model, params: Params, hidden: jax.Array, *, reference: bool) -> tuple[jax.Array, ...]:
        candidates = None if reference and loss.whole else jax.tree.map(jnp.asarray, batch.candidates)
        return model.logprobs_of(
            params,
            hidden,
            tokens,
            positions,
            needed,
            entropy=loss.entropy and not reference,
            temperature=loss.temperature,
            candidates=candidates,
            whole=loss.whole,
        )

    logprobs, entropy, mass = jnp.zeros(batch.tokens.shape, jnp.float32), None, 0.0
    if loss.logprobs:
        logprobs, entropy, mass = logprobs_of(model, params, hidden, reference=False)
    values = model.values_of(params, hidden, positions) if loss.values else None
    read = LossInputs(batch, logprobs, entropy if loss.entropy else None, values)
    if loss.whole:
        read = replace(read, whole_logprobs=logprobs + mass)
    if loss.above_mean and key is not None:
        read = replace(read, above_mean=model.above_mean_of(params, hidden, tokens, positions))
    if loss.reference:
        assert inputs.reference is not None, "the loss reads a reference: hold one"
        of_reference = replace(model, adapt=None, has_scalar_head=False)
        reference = {**inputs.base, **inputs.reference}
        states = hidden_of(of_reference, reference, batch)
        reference_logprobs, *_ = logprobs_of(of_reference, reference, states, reference=True)
        read = replace(read, reference_logprobs=jax.lax.stop_gradient(reference_logprobs))
    if loss.divergence:
        assert inputs.teachers or batch.stored is not None, "the loss reads a divergence: hold a teacher"
        # Shifted as for log-probs: the state at t - 1 predicts token t.
        table = model.table(params)
        student, each = Side(hidden[:, :-1], table, model.config.logit_softcap), list[Compared]()
        if batch.stored is not None:
            ids, theirs = (jnp.asarray(batch.stored)[:, 1:, i] for i in (0, 1))
            trained = (mask & (positions > 0))[:, 1:]
            each.append(compared(student, Stored(ids.astype(int), theirs), tokens[:, 1:], trained, loss.divergence))
        for states in inputs.teachers:
            theirs = jax.lax.stop_gradient(table) if states.table is None else states.table
            teacher = Side(states.hidden[index][:, :-1], theirs, states.softcap)
            follows = mask & (positions > 0) & (True if states.followed is None else states.followed[index])
            beside = compared(student, teacher, tokens[:, 1:], follows[:, 1:], loss.divergence)
            each.append(jax.tree.map(lambda x, share=states.share: share * x, beside))
        together = functools.reduce(lambda x, y: jax.tree.map(jnp.add, x, y), each)
        read = replace(read, compared=jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), together))
    sums = loss_sums(loss.function, read)
    if key is None:  # an evaluation adds up what it finds in its batches, which shares do not bear
        return sums
    if model.config.mtp == "train":
        fixed = {name: x if name.startswith(MTP) else jax.lax.stop_gradient(x) for name, x in params.items()}
        segments, parents = jnp.asarray(batch.segment_ids), jax.tree.map(jnp.asarray, batch.parents)
        states = model.draft_states(
            fixed, jax.lax.stop_gradient(hidden), tokens, positions, segments, parents, batch.pictures
        )
        # Of the state of a sequence's first token, which the head does not have, nothing is asked.
        drafted, *_ = model.logprobs_of(fixed, states, tokens, positions - 1, mask)
        sums["loss/mtp"] = reduce(Term(-drafted), batch)
    load = load_sums(auxiliary, rows, model.router_aux_loss_coef)
    if "loss/router_aux" in load:
        sums["train/loss"] = cast(jax.Array, sums["train/loss"]) + load["loss/router_aux"]
    return {**sums, **load}


def _forward(
    spec: TrainerSpec, params: Params, inputs: StepInputs, batch: Batch, loss: Loss, key: PRNGKeyArray | None
) -> tuple[Float[Array, "B T D"], Auxiliary]:
    """The policy's final hidden states for a micro-batch, with noise where there is a key, and auxiliary terms."""
    noise, dropout_keys = None, None
    if key is not None and loss.embedding_noise:
        noise = embedding_noise(batch, spec.model.config.d_model, loss.embedding_noise, key)
    if key is not None and spec.adapter is not None and spec.adapter.dropout:
        dropout_keys = token_keys(batch, jax.random.fold_in(key, DROPOUT))
    return forward_of(spec.model, {**inputs.base, **params}, batch, noise, dropout_keys)


def hidden_of(model: Model, params: Params, batch: Batch) -> Float[Array, "B T D"]:
    """The final hidden states for a batch's rows of a model that is not the policy: its routers choose themselves."""
    return forward_of(model, params, replace(batch, experts=None))[0]


def forward_of(
    model: Model,
    params: Params,
    batch: Batch,
    noise: Float[Array, "B T D"] | None = None,
    dropout_keys: TokenKeys | None = None,
) -> tuple[Float[Array, "B T D"], Auxiliary]:
    """The final hidden states for a batch's rows, and the layers' auxiliary terms."""
    tokens, positions, segments = map(jnp.asarray, (batch.tokens, batch.positions, batch.segment_ids))
    parents, experts, pictures = jax.tree.map(jnp.asarray, (batch.parents, batch.experts, batch.pictures))
    return model.forward(
        params,
        tokens,
        positions,
        segments,
        parents=parents,
        interleaved=batch.interleaved,
        experts=experts,
        pictures=pictures,
        noise=noise,
        dropout_keys=dropout_keys,
    )


@jax.named_scope("loss")
def loss_sums(function: Callable[[LossInputs], LossOutputs], inputs: LossInputs) -> Sums:
    """Evaluates and reduces a loss to `train/loss` (the sum of the terms), each of several terms, and its metrics.

    Sequences of weight 0 affect neither its value nor its gradient.
    """
    outputs, batch = function(trained_only(inputs)), inputs.batch
    terms = {name: reduce(term, batch) for name, term in outputs.terms.items()}
    sums: Sums = {"train/loss": sum(terms.values(), jnp.float32(0))}
    if len(terms) > 1:
        sums |= {f"loss/{name}": value for name, value in terms.items()}
    metrics = {name: x if isinstance(x, Term) else Term(x) for name, x in outputs.metrics.items()}
    sums |= {name: reduce(term, batch) for name, term in metrics.items()}
    for name, values in outputs.peaks.items():
        # Over trained tokens of sequences with a weight above 0; nan counts as infinity.
        counts = batch.loss_mask & (batch.weights[batch.sequence_ids] > 0)
        flat = jnp.where(counts, jnp.where(jnp.isnan(values), jnp.inf, values), -jnp.inf).ravel()
        place = jnp.argmax(flat)
        sums[name] = Peak(flat[place], place.astype(jnp.int32))
    return sums


def to_scalars(sums: Sums) -> dict[str, jax.Array]:
    """Sums as scalars by name; the index of a peak gets the suffix `/at`."""
    flat: dict[str, jax.Array] = {}
    for name, value in sums.items():
        flat |= {name: value.value, f"{name}/at": value.place} if isinstance(value, Peak) else {name: value}
    return load_metrics(flat)


def reduce(term: Term, batch: Batch) -> Float[Array, ""]:
    """The masked, weighted sum of a term's values, divided by the denominator that it names (see `types.Term`).

    0 where no token or sequence counts.
    """
    values, over = term.values, term.over
    if values.ndim == 1:
        assert over in ("sequences", "pairs"), f"one value for each of {over}?"
        # A sequence is counted in the micro-batch that holds its trained tokens.
        present = jnp.zeros(batch.weights.shape, bool).at[batch.sequence_ids].max(batch.loss_mask)
        share, count = jnp.where(present, batch.weights, 0.0)[:: 2 if over == "pairs" else 1], batch.counts[over]
    elif over == "observed":
        share, count = batch.weights[batch.sequence_ids] * batch.per_token[OBSERVED], batch.counts["observed"]
    else:
        share = jnp.where(batch.loss_mask, batch.weights[batch.sequence_ids], 0.0)
        if LOSS_WEIGHTS in batch.per_token:
            share = share * batch.per_token[LOSS_WEIGHTS]
        count = batch.counts["tokens" if over == "tokens" else "sequences"]
        if over == "sequences":
            share = share / batch.lengths[batch.sequence_ids]
        elif over != "tokens":
            assert not isinstance(over, str), f"values of tokens over {over}?"
            assert over > 0, f"a sum over {over:g} tokens?"
            share = share / over
    # where, not a product: a value outside of the mask, or of a sequence of weight 0, may be infinite.
    return jnp.sum(jnp.where(share > 0, values * share, 0.0)) / jnp.where(count > 0, count, 1.0)


def accumulate(compute: Callable, microbatches: Microbatches) -> Any:
    """Sums `compute(index)` over the filled micro-batches, in float32 or wider; of peaks it keeps the largest.

    A single micro-batch is computed without a loop.
    """
    if microbatches.number == 1:
        return compute(0)
    shapes, is_peak = jax.eval_shape(compute, 0), lambda x: isinstance(x, Peak)
    size = microbatches.rows["tokens"][0].size

    def nothing(x: Any) -> Any:
        if isinstance(x, Peak):
            return Peak(jnp.float32(-jnp.inf), jnp.int32(0))
        # bf16 weights have bf16 gradients; their sum over micro-batches must not lose the small ones.
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    def body(i: jax.Array, sums: Any) -> Any:
        def joined(a: Any, b: Any) -> Any:
            if not isinstance(a, Peak):
                return a + b
            larger = b.value > a.value  # of equal ones the earlier stays
            return Peak(jnp.where(larger, b.value, a.value), jnp.where(larger, b.place + i * size, a.place))

        return jax.tree.map(joined, sums, compute(i), is_leaf=is_peak)

    start = jax.tree.map(nothing, shapes, is_leaf=is_peak)
    sums = loop(microbatches.filled, body, start, usual=microbatches.number)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, shapes)


def token_keys(batch: Batch, key: PRNGKeyArray) -> TokenKeys:
    """A random key for each token, which depends only on its sequence and position, not on packing."""

    def token(sequence: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, sequence), position)

    return jax.vmap(jax.vmap(token))(jnp.asarray(batch.sequence_ids), jnp.asarray(batch.positions))


def embedding_noise(batch: Batch, width: int, alpha: float, key: PRNGKeyArray) -> Float[Array, "B T D"]:
    """NEFTune (Jain et al. 2023, https://arxiv.org/abs/2310.05914): uniform in +-1, times `alpha / sqrt(length D)`.

    A token's noise depends only on its sequence and position, so that packing and micro-batches cannot change it.
    """
    length = jax.ops.segment_max(
        jnp.where(batch.segment_ids > 0, batch.positions + 1, 0).ravel(),
        batch.sequence_ids.ravel(),
        num_segments=batch.weights.shape[0],
    )

    def uniform(token_key: jax.Array) -> jax.Array:
        return jax.random.uniform(token_key, (width,), minval=-1.0, maxval=1.0)

    noise = jax.vmap(jax.vmap(uniform))(token_keys(batch, key))
    size = alpha / jnp.sqrt(jnp.maximum(length, 1)[batch.sequence_ids] * float(width))
    return jnp.where(batch.segment_ids > 0, size, 0.0)[..., None] * noise
