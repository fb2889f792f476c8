"""The records that pass between the layers of the architecture, in the order in which data meets them.

`Sequence` (one example as token ids) -> `Batch` (packed rows) -> `LossInputs` (what a loss reads) -> `LossOutputs`.
A row holds sequences as segments that never see each other; those that are compared may share their prompt's segment.

Each axis letter has one meaning in all of tunix: in the `Axes:` lines at the head of files, in annotations, and in
suffixes such as `rewards_PG`. Two letters stand where the initial is taken; those of a single place are small letters.
These are the letters that several rooms share; the others are named at the head of the files that use them.

    A   alternatives: the most likely ids that are reported with a sampled token
    B   rows: of a batch, or of requests that are computed together
    C   tokens at a time: the part of T that is computed at once, such as a chunk of a prompt
    Co  columns of a page table: the pages that a slot holds
    D   model width
    E   experts
    F   ffn width
    G   group: the completions of one prompt
    H   head dim
    I   inputs: all contracted axes of a projection, flattened
    K   kv heads
    L   layers
    M   micro-batches
    N   query heads
    O   outputs: the other axes of a projection, flattened
    P   prompts
    Pa  pairs: sequences 2 i (chosen) and 2 i + 1 (rejected) of a batch
    Pc  columns of a patch: its pixels from left to right
    Pg  pages: blocks of a cache of keys and values
    Pi  pictures: the most that a row has
    Pp  patches: the squares that a picture is cut into
    Pr  rows of a patch: its pixels from top to bottom
    Pt  tokens of a page
    Q   queries of a block
    R   rows of a micro-batch
    Rb  colours: red, green and blue
    S   sequences: those of a batch
    Sl  slots: the requests that the engine decodes side by side
    So  soft tokens: those that stand for a picture
    St  decode steps: those of one dispatch of the engine
    T   time: the tokens of a row or of a sequence
    Te  teacher's width
    Tt  teacher's time: the tokens of a sequence as its teacher reads it
    V   vocabulary
    Vi  visits: pairs of a page and who reads or writes it
    k   chosen experts of a token
    r   rank: the inner axis of an adapter
    s   shards of the rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, NamedTuple, no_type_check

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, UInt8

from tunix.errors import UserError

Over = Literal["tokens", "sequences", "pairs", "observed"]
Metrics = Mapping[str, jax.Array | float]
"""Scalars by name. They may still be on their way from the device: read them late, so that it never waits."""


@jax.tree_util.register_dataclass
@no_type_check  # where a program is lowered and not called, jax puts descriptions of arrays into it
@dataclass(frozen=True)
class Pictures:
    """The pictures of a sequence, or of packed rows, and which tokens stand for them.

    A picture is cut into patches, of which some neighbours each make a soft token."""

    pixels: UInt8[Array | np.ndarray, "*B Pi Pp Pr Pc Rb"]
    """The patches of each, e.g. `[2 4096 14 14 3]` of a sequence with two; zeros after the last patch of a picture that
    has fewer than there is room for, and after the last picture of a row."""
    grids: Int[Array | np.ndarray, "*B Pi 2"]
    """Rows and columns of soft tokens of each, e.g. `[[16, 16], [16, 16]]`; zeros after the last picture of a row."""
    places: Int[Array | np.ndarray, "*B T"]
    """1 + the index among the soft tokens of all of them, 0 for text; e.g. `[0, 1, 2, 3, 4, 0]` of one with four."""
    rope: Int[Array | np.ndarray, "*B T 3"] | None = None
    """Time, row and column to which rope turns each token (`rope_positions`), e.g. `[[0, 0, 0], [1, 1, 1], [1, 1, 2]]`;
    None where that is its place in the sequence."""

    @property
    def number(self) -> int:
        """Pi."""
        return self.pixels.shape[-5]

    def within(self, begin: int, end: int) -> Pictures:
        """Those of the tokens `begin` to `end` of a sequence, none of which is cut, numbered from the first one."""
        at, counts = np.asarray(self.places)[begin:end], np.prod(self.grids, axis=-1)
        seen, ends = at[at > 0], np.cumsum(counts)
        first = np.searchsorted(ends, seen[0]) if len(seen) else 0
        last = np.searchsorted(ends, seen[-1]) + 1 if len(seen) else 0
        assert len(seen) == counts[first:last].sum(), "pictures are whole"
        places = np.where(at > 0, at - counts[:first].sum(), 0).astype(np.int32)
        rope = None if self.rope is None else self.rope[begin:end]
        return Pictures(self.pixels[first:last], self.grids[first:last], places, rope)

    def followed(self, number: int) -> Pictures:
        """Those of the sequence where it goes on with so many tokens of text, whatever their ids are."""
        rope = self.rope
        if rope is not None:
            after = np.max(rope[-1]) + np.arange(1, number + 1, dtype=np.int32)
            rope = np.concatenate([rope, np.repeat(after[:, None], 3, axis=1)])
        return Pictures(self.pixels, self.grids, np.pad(np.asarray(self.places), (0, number)), rope)


IN_A_LATER_TOKEN = np.inf
"""A teacher's log-prob of a token whose span ends with a later one, which has that of the whole span."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TeacherView:
    """A sequence as a teacher reads it: in the teacher's chat format, or with more in the prompt."""

    tokens: np.ndarray
    """`[Tt]` int32: all token ids up to the last one that is trained, e.g. `[2, 105, 651, 603]`."""
    places: np.ndarray
    """`[T]` int32: where in `tokens` each trained token of the sequence is, 0 for the others, e.g. `[0, 0, 3]`."""
    number: int = 0
    """Which of several teachers the sequence follows, e.g. 1; 0 where there is one, or all are followed."""


@dataclass(frozen=True)
class Sequence:
    """One example: its token ids, which of them are trained, and named values for losses that need them."""

    tokens: np.ndarray
    """`[T]` int32: all token ids, the prompt's and the stop token's included, e.g. `[2, 651, 603, 1]`."""
    loss_mask: np.ndarray
    """`[T]` bool: the targets of the loss, e.g. `[False, False, True, True]`; never the first of all."""
    weight: float = 1.0
    """Multiplies the sequence's share of the loss and of its denominators, e.g. 1.0; 0 leaves the sequence out."""
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Named `[T]` float values, e.g. `{"old_logprobs": [0.0, 0.0, -0.7, -0.1]}` in nats. `LOSS_WEIGHTS` are weights."""
    per_sequence: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, e.g. `{"advantage": 0.5}`."""
    pictures: Pictures | None = None
    """Its pictures, e.g. one of 256 soft tokens; None without any."""
    experts: np.ndarray | None = None
    """`[T L k]` int16 as in `Completion.experts`, e.g. `[[[5, 0]]]`; None where no router is replayed."""
    restarts: tuple[int, ...] = ()
    """Where further transcripts of one episode begin, each at position 0 and seeing nothing before, e.g. `(812,)`."""
    teacher: TeacherView | None = None
    """How its teacher reads it, e.g. with a system message; None where that is as it is, or nobody teaches."""
    candidates: np.ndarray | None = None
    """`[T A]` int32: the ids that each token was sampled from, e.g. `[[-1, -1], [603, 651]]`, padded with -1; only -1
    where that was every id. None where it was everywhere."""
    stored: np.ndarray | None = None
    """`[T 2 A]` float32: ids that a teacher found likely for each token, exact below 2^24, and their log-probs, e.g.
    `[[[603, 651], [-0.1, -2.4]]]`; -1 where nothing is trained. None where no such thing is stored."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Sequences packed into rows. Padding has segment 0, mask False and sequence 0."""

    tokens: Int[Array | np.ndarray, "B T"]
    """Token ids, 0 in the padding; e.g. a row `[2, 651, 1, 2, 603, 1, 0, 0]` of two sequences."""
    positions: Int[Array | np.ndarray, "B T"]
    """Position within the sequence, from 0; e.g. `[0, 1, 2, 0, 1, 2, 0, 0]` for that row."""
    segment_ids: Int[Array | np.ndarray, "B T"]
    """1, 2, ... along a row, e.g. `[1, 1, 1, 2, 2, 2, 0, 0]`; a segment sees itself, and its parent if it has one."""
    loss_mask: Bool[Array | np.ndarray, "B T"]
    """True where the token is a target of the loss, e.g. `[False, True, True, False, True, True, False, False]`."""
    sequence_ids: Int[Array | np.ndarray, "B T"]
    """Index of the token's sequence in the `[S]` arrays, e.g. `[0, 0, 0, 5, 5, 5, 0, 0]`."""
    weights: Float[Array | np.ndarray, "S"]
    """Weight of each sequence, e.g. `[1.0, 1.0, 0.5]`; 0 where the last batch of an epoch has fewer than S."""
    lengths: Float[Array | np.ndarray, "S"]
    """Trained tokens of each sequence, by their weights where they have some, e.g. `[2.0, 17.0]`; 1 where none is."""
    counts: Mapping[str, Float[Array | np.ndarray, ""]]
    """The denominators of the whole batch, weighted, taken before any split: `tokens`, `sequences`, and `pairs` where
    sequences 2 i and 2 i + 1 are a pair; e.g. `{"tokens": 28.0, "sequences": 3.0}`."""
    per_token: Mapping[str, Num[Array | np.ndarray, "B T"]] = field(default_factory=dict)
    """Named values of `Sequence.per_token` packed into rows, 0 in the padding, e.g. `old_logprobs` in nats."""
    per_sequence: Mapping[str, Num[Array | np.ndarray, "S"]] = field(default_factory=dict)
    """Named values of `Sequence.per_sequence`, e.g. `{"advantage": [0.5, -0.5, 0.0]}`."""
    parents: Int[Array | np.ndarray, "B T"] | None = None
    """The segment that a token sees besides its own, what of it comes earlier in the row, or its own again, e.g.
    `[1, 1, 1, 1, 1, 1, 0, 0]`: a prompt is computed once for the completions that are compared. None where no sequence
    shares anything."""
    interleaved: bool = field(default=False, metadata={"static": True})
    """Whether other segments may lie between the tokens of one, e.g. branches between those of what they continue: a
    branch sees what stands before it in the row."""
    places: Int[Array | np.ndarray, "B T"] | None = None
    """Each token's place in its sequence, e.g. 812 where a further transcript begins; None for micro-batches."""
    pictures: Pictures | None = None
    """The rows' pictures, e.g. of two in each row; None where the model sees none."""
    experts: Int[Array | np.ndarray, "B T L k"] | None = None
    """The experts that the policy uses, e.g. `[[[[5, 0]]]]`, -1 where its router chooses; None where it always does."""
    teacher: tuple[TeacherView, ...] | None = None
    """How a teacher reads each sequence, in their order, e.g. of 8; None where it reads the rows as they are."""
    candidates: Int[Array | np.ndarray, "B T A"] | None = None
    """The ids that each token was sampled from, as in `Sequence.candidates`: log-probs and entropies are of the
    distribution over these, e.g. `[[[-1, -1], [603, 651]]]`; None where it is over all ids everywhere."""
    stored: Float[Array | np.ndarray, "B T 2 A"] | None = None
    """What a teacher said of each token in advance, e.g. `[[[[603, 651], [-0.1, -2.4]]]]`; as in `Sequence.stored`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Compared:
    """Student and teacher at each token, 0 where nothing is trained. Only the divergence has a gradient."""

    divergence: Float[Array, "B T"]
    """In nats, e.g. 0.21; see `Divergence`."""
    teacher_logprobs: Float[Array, "B T"]
    """The teacher's log-prob of the batch's token in nats, at the divergence's temperature, e.g. -1.3."""
    agreement: Float[Array, "B T"]
    """Whether the same token is the most likely one for both, e.g. 1.0 for yes and 0.0 for no."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossInputs:
    """What a loss reads: arrays aligned with the batch's tokens, 0 where nothing is trained or the weight is 0."""

    batch: Batch
    """The rows that the log-probs belong to, e.g. a micro-batch of 4 rows of 2048 tokens."""
    logprobs: Float[Array, "B T"]
    """`log p(token_t | tokens before t)` in nats, e.g. -1.2; 0 where nothing is trained, or observed (`OBSERVED`)."""
    entropy: Float[Array, "B T"] | None = None
    """Entropy in nats of the policy's distribution of token t, e.g. 0.8; None where the loss does not read it."""
    values: Float[Array, "B T"] | None = None
    """The critic's value of the state before token t, in units of the reward, e.g. 0.4; None where it is not read."""
    reference_logprobs: Float[Array, "B T"] | None = None
    """`logprobs` in nats of the weights that the run began with, without gradient, e.g. -1.4; None where not read."""
    compared: Compared | None = None
    """Student and teacher, e.g. with a `divergence` of 0.21 nats at a token; None where the loss has no divergence."""
    whole_logprobs: Float[Array, "B T"] | None = None
    """`logprobs` in nats among all ids where those are over a token's candidates, e.g. -1.3; None where not read."""
    above_mean: Float[Array, "B T"] | None = None
    """How far the logit of token t is above the mean of the vocabulary's, e.g. 9.1; None where it is not read."""

    def per_token(self, values_S: Num[Array, "S"]) -> Num[Array, "B T"]:
        """Per-sequence values repeated at every token of their sequence."""
        return values_S[self.batch.sequence_ids]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Term:
    """One summand of the loss, not yet reduced. The framework masks, weights and divides it, once."""

    values: Float[Array, "B T"] | Float[Array, "S"]
    """Per-token values, e.g. `-inputs.logprobs` in nats, of which those outside of the mask do not matter; or one value
    for each sequence (`sequences`) or pair (`pairs`), of which those without a trained token do not matter."""
    over: Over | float = field(metadata={"static": True}, default="tokens")
    """What the values are averaged over, e.g. `"tokens"`: the mean over all trained tokens. `"sequences"`: the mean
    over sequences (per-token values are first averaged within each sequence). `"pairs"`: the mean over pairs.
    `"observed"`: the mean over tokens that an environment wrote. A number such as 512.0: the sum over a sequence's
    tokens divided by it, then the mean over sequences (Dr. GRPO's constant length)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossOutputs:
    """What a loss returns: terms that are summed, and values that are only reported."""

    terms: Mapping[str, Term]
    """Terms by name, e.g. `{"policy": Term(...), "kl": Term(...)}`; the loss is their sum."""
    metrics: Mapping[str, Float[Array, "B T"] | Term] = field(default_factory=dict)
    """Reported values by metric name, e.g. `{"kl": ...}`: per-token values are averaged over trained tokens, a term as
    it says."""
    peaks: Mapping[str, Float[Array, "B T"]] = field(default_factory=dict)
    """Per-token values by metric name, e.g. `{"mismatch/max": ...}`: the largest over trained tokens is reported, and
    at which token it was."""

    def add(
        self, name: str, values: Float[Array, "B T"] | Float[Array, "S"], over: Over | float = "tokens"
    ) -> LossOutputs:
        """The same outputs with one more term."""
        return replace(self, terms={**self.terms, name: Term(values, over)})


@dataclass(frozen=True)
class Divergence:
    """A distance between the teacher's and the student's next-token distributions; see `models/divergence.py`."""

    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Which one, e.g. `"forward_kl"`: KL(teacher || student). `"reverse_kl"`: KL(student || teacher). `"jsd"`: the
    generalised Jensen-Shannon divergence."""
    beta: float = 0.5
    """The teacher's share of jsd's mixture, between 0 and 1, e.g. 0.5; near 0 jsd behaves like forward_kl."""
    top_k: int = 0
    """How many of the teacher's most likely ids are compared one by one, e.g. 64, while all others form one bucket; 0
    compares every id."""
    temperature: float = 1.0
    """Divides the logits of both models, e.g. 1.0."""


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
    """Whether `inputs.reference_logprobs` is read, which costs a forward pass; the client must have a reference."""
    divergence: Divergence | None = None
    """Which divergence `inputs.compared` holds, e.g. `Divergence("reverse_kl")`, which costs a forward pass of the
    teacher; the client must have a teacher. None where `inputs.compared` is not read."""
    temperature: float = 1.0
    """Divides the logits before log-probs and entropy, e.g. 0.7: the sampler's, so that both use one distribution."""
    whole: bool = False
    """Whether `inputs.whole_logprobs` is read, and entropy and reference are over all ids where `Batch.candidates` are
    fewer."""
    embedding_noise: float = 0.0
    """NEFTune's alpha, e.g. 5.0: uniform noise of `alpha / sqrt(T D)` on the embeddings while training; 0 for none."""
    above_mean: bool = False
    """Whether `inputs.above_mean` is read, while training; an evaluation has none."""


MOST_TOP = 64
"""A: alternatives whose log-probs are reported with a sampled token, at most."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. Nothing is read from a folder's generation_config.json.

    The transform, in this order: logits / temperature, then the `top_k` most likely, then the smallest set of most
    likely ids whose mass reaches `top_p`, then the ids of at least `min_p` times the mass of the most likely one.
    """

    max_tokens: int = 64
    """Most tokens that are sampled, e.g. 256, the stop token included; over all turns where an environment answers."""
    temperature: float = 1.0
    """Divides the logits, e.g. 0.7; 0 is greedy."""
    top_k: int = 0
    """How many of the most likely ids can be sampled, e.g. 40; 0 for all."""
    top_p: float = 1.0
    """Probability mass of the most likely ids that can be sampled, e.g. 0.95; 1 for all (Holtzman et al. 2019, arXiv
    1904.09751)."""
    min_p: float = 0.0
    """Least probability of an id as a share of the most likely one's, e.g. 0.05; 0 for all (Nguyen et al. 2024, arXiv
    2407.01082)."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a completion (a turn of it), kept as its last token, e.g. `(1, 107)`."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, e.g. `("</answer>",)`; the token that completes one is kept as the last token."""
    top_logprobs: int = 0
    """A: for how many of the most likely ids log-probs are reported with each sampled token, e.g. 5."""
    prompt_logprobs: bool = False
    """Whether log-probs of the prompt's tokens are computed too, before any transform; `max_tokens` may then be 0."""

    @property
    def for_training(self) -> Sampling:
        """The same, which also reports all that a loss has to know of the draw: the ids that each token is drawn from.

        Raises:
            UserError: these may be more than `MOST_TOP`.
        """
        if not self.top_k and (self.top_p < 1 or self.min_p):
            cut = f"top_p: {self.top_p:g}" if self.top_p < 1 else f"min_p: {self.min_p:g}"
            raise UserError(
                f"{cut}: the ids that a token is drawn from are kept for the loss, {MOST_TOP} at most, and this may "
                f"leave more: set top_k as well, such as {MOST_TOP}"
            )
        if self.top_k > MOST_TOP:
            raise UserError(
                f"top_k: {self.top_k}: the ids that a token is drawn from are kept for the loss: set {MOST_TOP} or less"
            )
        return replace(self, top_logprobs=max(self.top_logprobs, self.top_k))


class TokenScores(NamedTuple):
    """Log-probs in nats of given tokens, each after those before it; 0 for the first, which nothing predicts."""

    logprobs: Any
    """`[T]` float32, e.g. `[0, -1.2]`."""
    top_ids: Any
    """`[T A]` int32: the most likely ids in its place, e.g. `[[0, 0], [651, 603]]`; A as in `Sampling.top_logprobs`."""
    top_logprobs: Any
    """`[T A]` float32 of these, e.g. `[[0, 0], [-0.4, -1.2]]`."""


@dataclass(frozen=True)
class Completion:
    """What a sampler returns for one request. Where an environment answers, its tokens stand among the sampled ones."""

    tokens: np.ndarray
    """`[T]` int32: token ids after the prompt, stop tokens included where there are any, e.g. `[603, 651, 1]`."""
    logprobs: np.ndarray
    """`[T]` float32: log-probs in nats of the sampled tokens after the sampling transform, e.g. `[-0.3, -1.1, -0.01]`;
    0 where an environment wrote."""
    finish: Literal["stop", "length", "paused"]
    """Why it ended, e.g. `"length"`; `"stop"` also where the environment had no answer to a turn that stopped.
    `"paused"`: the call ended before it, and another can continue it."""
    versions: np.ndarray
    """`[T]` int32: the version of the weights that each token was sampled from, e.g. `[3, 3, 3]`; where an environment
    wrote, of those that were published at the time."""
    sampling: Sampling
    """The settings that were used, e.g. `Sampling(max_tokens=256, temperature=0.7)`."""
    turns: tuple[tuple[int, int], ...]
    """(start, end) in `tokens` of what was sampled in each turn, e.g. `((0, 12),)`; an environment wrote the rest."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """`[T A]` int32 ids of the most likely tokens and `[T A]` float32 log-probs in nats, e.g. `[[603, 651]]` and
    `[[-0.3, -1.6]]`, -inf where an id could not be sampled; None unless `Sampling.top_logprobs` asks for them."""
    prompt_scores: TokenScores | None = None
    """Log-probs of the prompt's tokens, e.g. of `[0, -1.2]`; None unless `Sampling.prompt_logprobs` asks for them."""
    experts: np.ndarray | None = None
    """`[T L k]` int16: experts that prompt and completion used, e.g. `[[[5, 0]]]`; -1, or None, where not known."""
    restarts: tuple[int, ...] = ()
    """Where in `tokens` further transcripts of the episode begin, with prompts of their own, e.g. `(780,)`."""

    @property
    def candidates(self) -> np.ndarray | None:
        """`[T A]` int32: the ids that each sampled token was drawn from, e.g. `[[603, 651], [1, -1]]`, padded with -1,
        and -1 where an environment wrote; None where `Sampling.top_k` cuts nothing."""
        if self.top is None or not self.sampling.top_k:
            return None
        ids, logprobs = self.top
        return np.where(np.isfinite(logprobs) & self.drawn[:, None], ids, -1)

    @property
    def drawn(self) -> np.ndarray:
        """`[T]` bool: the tokens that the policy sampled, which are the ones that can be trained."""
        mask = np.zeros(len(self.tokens), bool)
        for start, end in self.turns:
            mask[start:end] = True
        return mask


class Restart(NamedTuple):
    """What the model reads next where that does not begin with all that it has read and written, such as a template's
    rendering without earlier thoughts: another transcript of the episode."""

    prompt: np.ndarray
    """`[T]` int32 token ids, all of them, e.g. `[2, 651, 603]`."""


Reply = Callable[[int, Completion], np.ndarray | Restart | None]
"""An environment: (request, its completion so far) -> `[T]` tokens of an observation, another transcript, or None when
the episode ends."""
OnDone = Callable[[int, Completion], bool]
"""Called with (request, its completion) once it has ended; returns whether that is enough: others are paused then."""


@dataclass(frozen=True)
class Request:
    """A prompt to complete once."""

    prompt: np.ndarray
    """`[T]` int32 token ids, at least one, e.g. `[2, 651, 603]`."""
    sampling: Sampling
    """How its tokens are sampled, e.g. `Sampling(max_tokens=256, temperature=0.7)`."""
    seed: int
    """The seed of its random numbers, e.g. 2968811710: a token's depend on (seed, index, token index) alone."""
    index: int = 0
    """Its number among the requests of that seed, e.g. 3."""
    adapter: str | None = None
    """Name of the loaded adapter that answers, e.g. `"poet"`; None for the weights alone."""
    so_far: Completion | None = None
    """The partial rollout that is continued, e.g. a paused completion of 12 tokens; None for a new one."""
    pictures: Pictures | None = None
    """Those of its prompt, e.g. one, the same object for all requests that share them; None without any."""


def requests_of(prompts: List[np.ndarray], n: int, sampling: Sampling, seed: int) -> list[Request]:
    """`n` requests for each prompt `[T]`: number i is sample i % n of prompt i // n.

    Raises:
        UserError: no completion is asked for.
    """
    if n < 1:
        raise UserError(f"n is {n}: ask for at least one completion of each prompt")
    return [Request(prompt, sampling, seed, i * n + j) for i, prompt in enumerate(prompts) for j in range(n)]


@dataclass(frozen=True)
class Usage:
    """What a call of a sampler took."""

    tokens: int
    """Tokens that were sampled, e.g. 40960."""
    slot_steps: int
    """Decode steps, counted once for each slot whether it had something to sample or not, e.g. 65536."""
    bytes: float
    """Bytes that a device must read for these steps at least, e.g. 2.1e12: all weights and the cache, in each step."""
    drafted: int = 0
    """Draft tokens that were checked, e.g. 81920; 0 without `rollout.speculate`."""
    accepted: int = 0
    """Those of them that were sampled there anyway, e.g. 24576."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(x + y for x, y in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Workload:
    """The largest workload that a sampler will meet."""

    requests: int
    """Requests at a time, e.g. 512."""
    prompt_length: int
    """Tokens of a prompt, e.g. 256."""
    length: int
    """Tokens of a prompt and all that follows it, e.g. 1024."""
