"""The records that cross the floors of the house, in the order in which data meets them.

`Sequence` (one example as token ids) -> `Batch` (sequences packed in rows) -> `LossInputs` (what a loss reads)
-> `LossOutputs` (what a loss returns). `Completion` is what a sampler gives back.

Axes: B rows, T time, S sequences of a batch. A row holds several sequences as segments that never see each other;
sequences that are compared with each other may share the segment of their prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

LOSS_WEIGHTS = "loss_weights"
"""The per-token value by which a trained token counts, in the loss and in its denominators, where rows give it."""
Over = Literal["tokens", "sequences", "pairs"]
Metrics = Mapping[str, jax.Array | float]
"""Scalars by name. They may still be on their way from the device: read them late, so that it never waits."""


@dataclass(frozen=True)
class Sequence:
    """One example: its token ids, which of them are trained, and named values for losses that need them."""

    tokens: np.ndarray
    """`[T]` int32: every token, the prompt and the stop token included."""
    loss_mask: np.ndarray
    """`[T]` bool: True where the token is a target of the loss. The first token never is: nothing predicts it."""
    weight: float = 1.0
    """Multiplies the sequence's share of the loss and of its denominators; 0 leaves the sequence out."""
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Named `[T]` float values, such as `old_logprobs`; `LOSS_WEIGHTS` is read by the framework itself."""
    per_sequence: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, such as `advantage`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Sequences packed in rows. Padding has segment 0, mask False and sequence 0."""

    tokens: Int[Array | np.ndarray, "B T"]
    """Token ids, 0 in the padding."""
    positions: Int[Array | np.ndarray, "B T"]
    """Position within the sequence, from 0."""
    segment_ids: Int[Array | np.ndarray, "B T"]
    """1, 2, ... along a row; a segment sees itself, and its parent where there are parents."""
    loss_mask: Bool[Array | np.ndarray, "B T"]
    """Targets of the loss."""
    sequence_ids: Int[Array | np.ndarray, "B T"]
    """Index of the token's sequence in the `[S]` arrays."""
    weights: Float[Array | np.ndarray, "S"]
    """Weight of each sequence; 0 where the last batch of an epoch has fewer than S."""
    lengths: Float[Array | np.ndarray, "S"]
    """Trained tokens of each sequence, each counted by its weight where it has one; 1 for none, so that it can
    divide."""
    counts: Mapping[str, Float[Array | np.ndarray, ""]]
    """The denominators of the whole batch, weighted: `tokens`, `sequences`, and `pairs` where sequences 2 i and 2 i + 1
    are one. Taken before any split."""
    per_token: Mapping[str, Num[Array | np.ndarray, "B T"]] = field(default_factory=dict)
    """Named per-token values."""
    per_sequence: Mapping[str, Num[Array | np.ndarray, "S"]] = field(default_factory=dict)
    """Named per-sequence values."""
    parents: Int[Array | np.ndarray, "B T"] | None = None
    """The segment that a token sees besides its own (all of it lies before), or its own again: a prompt is computed
    once for the completions that are compared. None where no sequence shares anything."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Compared:
    """Student and teacher at each token, 0 where nothing is trained. Only the divergence has a gradient."""

    divergence: Float[Array, "B T"]
    """Nats; see `Divergence`."""
    teacher_logprobs: Float[Array, "B T"]
    """The teacher's log-prob of the taken token, at the divergence's temperature."""
    agreement: Float[Array, "B T"]
    """1 where both find the same token the most likely one."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossInputs:
    """What a loss reads: arrays aligned with the batch's tokens, 0 where nothing is trained or the weight is 0."""

    batch: Batch
    """The rows that the log-probs belong to."""
    logprobs: Float[Array, "B T"]
    """`log p(token_t | tokens before t)`; 0 where nothing is trained."""
    entropy: Float[Array, "B T"] | None = None
    """Entropy in nats of the distribution that token t was drawn from, where the loss asks for it."""
    values: Float[Array, "B T"] | None = None
    """The critic's value of the state before token t is drawn, where the loss asks for it."""
    reference_logprobs: Float[Array, "B T"] | None = None
    """`logprobs` under the weights that the run started from, without gradient, where the loss asks for them."""

    compared: Compared | None = None
    """The teacher beside the policy, where the loss asks for a divergence."""

    def per_token(self, values_S: Num[Array, "S"]) -> Num[Array, "B T"]:
        """Spreads per-sequence values over the tokens of each sequence."""
        return values_S[self.batch.sequence_ids]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Term:
    """One summand of the loss, not yet reduced. The framework masks, weights and divides it, once."""

    values: Float[Array, "B T"] | Float[Array, "S"]
    """Per-token values, of which those outside of the mask do not matter; or one for each sequence (`sequences`) or
    pair (`pairs`), of which those do not matter that have no trained token in `LossInputs.batch`."""
    over: Over | float = field(metadata={"static": True}, default="tokens")
    """`tokens`: mean over all trained tokens. `sequences`: mean over sequences, of per-token values each one's own
    mean. `pairs`: mean over pairs. A number: sum over tokens / number, then the mean over sequences (Dr. GRPO's
    constant length)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossOutputs:
    """What a loss returns: terms that are summed, and what is only reported."""

    terms: Mapping[str, Term]
    """By name; the loss is their sum."""
    metrics: Mapping[str, Float[Array, "B T"] | Term] = field(default_factory=dict)
    """By metric name: per-token values, reported as their mean over trained tokens, or a term's mean."""
    peaks: Mapping[str, Float[Array, "B T"]] = field(default_factory=dict)
    """Per-token values by metric name, reported as their largest over trained tokens, and where it is."""

    def add(
        self, name: str, values: Float[Array, "B T"] | Float[Array, "S"], over: Over | float = "tokens"
    ) -> LossOutputs:
        """The same outputs with one more term."""
        return replace(self, terms={**self.terms, name: Term(values, over)})


@dataclass(frozen=True)
class Divergence:
    """Which distance between the teacher's and the student's next-token distributions; `models/divergence.py`."""

    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """KL(teacher || student), KL(student || teacher), or generalised Jensen-Shannon between them."""
    beta: float = 0.5
    """Of jsd, between 0 and 1: the teacher's share of the mixture. Near 0 it is like forward_kl."""
    top_k: int = 0
    """The teacher's most likely ids stand for themselves, all others are one; 0: every id for itself."""
    temperature: float = 1.0
    """Divides the logits of both."""


@dataclass(frozen=True)
class Loss:
    """A pure loss function and what it needs of the model; equal losses share one compiled step."""

    function: Callable[[LossInputs], LossOutputs]
    """`LossInputs -> LossOutputs`; traced once."""
    logprobs: bool = True
    """Whether `inputs.logprobs` is read; zeros otherwise, for a critic's loss."""
    entropy: bool = False
    """Whether `inputs.entropy` is read; it costs a little of the head's time."""
    values: bool = False
    """Whether `inputs.values` is read; the model must have a value head."""
    reference: bool = False
    """Whether `inputs.reference_logprobs` is read, at the price of a forward pass; a reference must be held."""
    divergence: Divergence | None = None
    """Which `inputs.compared` is read, at the price of a forward pass of the teacher; a teacher must be held."""
    temperature: float = 1.0
    """Divides the logits before log-probs and entropy: that of the sampler, so that both speak of one distribution."""
    embedding_noise: float = 0.0
    """NEFTune's alpha: uniform noise of `alpha / sqrt(T D)` on the embeddings while training; 0 for none."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Nothing is read from a folder's generation_config.json.

    The transform, in this order: logits / temperature, then the `top_k` most likely, then the smallest set of most
    likely ids whose mass reaches `top_p`, then the ids of at least `min_p` times the mass of the most likely one.
    """

    max_tokens: int = 64
    """Drawn tokens at most, the stop token included; over all turns where an environment answers."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Ids that can be drawn, the most likely ones; 0 for all."""
    top_p: float = 1.0
    """Mass of the ids that can be drawn, the most likely ones (Holtzman et al. 2019, arXiv 1904.09751)."""
    min_p: float = 0.0
    """Least mass of an id, as a share of the most likely one's (Nguyen et al. 2024, arXiv 2407.01082)."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a completion (a turn of it), kept as its last token."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion; the token that completes one is kept as the last token."""
    top_logprobs: int = 0
    """Of how many most likely ids the log-probs are reported beside each drawn token's."""
    prompt_logprobs: bool = False
    """Whether the log-probs of the prompt's tokens are reported too."""


@dataclass(frozen=True)
class Completion:
    """What a sampler returns for one request. Where an environment answers, its tokens stand among the drawn ones."""

    tokens: np.ndarray
    """`[T]` int32 after the prompt, stop tokens included where there are any."""
    logprobs: np.ndarray
    """`[T]` float32: log-probs of the drawn tokens after the sampling transform; 0 where an environment wrote."""
    finish: Literal["stop", "length"]
    """Why it ended; `stop` also where the environment had no answer to a turn that stopped."""
    version: int
    """The version of the weights that drew it."""
    sampling: Sampling
    """The settings used."""
    turns: tuple[tuple[int, int], ...]
    """(start, end) in `tokens` of what was drawn in each turn, e.g. `((0, 12),)`; the rest was observed."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """`[T n]` ids and log-probs of the most likely ones, where asked for."""
    prompt_logprobs: np.ndarray | None = None
    """`[T]` of the prompt's own tokens under the same transform, 0 for the first, where asked for."""

    @property
    def drawn(self) -> np.ndarray:
        """`[T]` bool: the tokens that the policy chose, and that can be trained."""
        mask = np.zeros(len(self.tokens), bool)
        for start, end in self.turns:
            mask[start:end] = True
        return mask


Reply = Callable[[int, Completion], np.ndarray | None]
"""An environment as the sampler sees it: (request, all of its completion so far) -> tokens of the observation that the
same request goes on with, or None at the end of the episode."""
