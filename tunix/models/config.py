"""The settings in which decoders differ, and layers within one decoder, as plain numbers and switches; at the end what
a parameter is, by its name. Loads without jax.

Axes: Dt width of a tower, Ft ffn width of a tower, Lt layers of a tower, Nt heads of a tower, Ht head dim of a tower,
Pp patches, Pr rows of a patch, Pc columns of a patch, Rb colours, So soft tokens.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

Activation = Literal["silu", "gelu_tanh"]
COLOURS = 3
FRAMES = 2
"""Frames of a film that a patch of Qwen's tower spans; a picture is read as so many equal ones."""
ROPE_THETA = 10_000.0
"""Base of the frequencies by which the patches of Qwen's tower turn."""


@dataclass(frozen=True)
class VisionConfig:
    """A tower (`models/vision.py`) and the soft tokens that it makes."""

    tower: str
    """Its name in `TOWERS`, e.g. `siglip`."""
    width: int
    """Dt, e.g. 1152."""
    ffn: int
    """Ft, e.g. 4304."""
    num_layers: int
    """Lt, e.g. 27."""
    num_heads: int
    """Nt, e.g. 16."""
    patch: int
    """Pixels of a patch's side, e.g. 14."""
    pool: int
    """Patches of a side of the square that a soft token stands for, e.g. 4."""
    positions: int
    """Learned positions of patches along a side, e.g. 64."""
    norm_eps: float
    tokens: int
    """So: soft tokens of a picture at most, e.g. 256."""
    begin_id: int
    """The id of the token before a picture's, e.g. 255999."""
    end_id: int
    """The id of the token after them, e.g. 256000."""
    soft_id: int
    """The id that stands for each of them, e.g. 262144."""
    film_id: int | None = None
    """The id that would stand for parts of a film, e.g. 248057, which an export repeats; None where there is none."""

    @property
    def any_shape(self) -> bool:
        """Whether pictures keep their proportions, and the decoder's rope turns their tokens by row and column
        (`Rope.sections`); else all become squares of `side` pixels, whose tokens see the later ones of their picture.
        """
        return self.tower == "qwen"

    @property
    def head_dim(self) -> int:
        """Ht."""
        return self.width // self.num_heads

    @property
    def patches(self) -> int:
        """Pp: patches of a picture at most."""
        return self.tokens * self.pool**2

    @property
    def side(self) -> int:
        """Pixels of a side of a picture, where all are squares of one size, e.g. 896."""
        return self.positions * self.patch

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(Pp, Pr, Pc, Rb), the shape of a picture's patches."""
        return (self.patches, self.patch, self.patch, COLOURS)


DELTANET = "deltanet"
"""The mixer of layers with a state instead of keys and values."""
EXPERTS = "experts"
"""The feed-forward part with several experts."""
DENSE_AND_EXPERTS = "dense_and_experts"
"""The feed-forward part of a dense ffn and several experts, each with norms of its own."""
GLOBAL = "global"
"""The mixer of global layers whose heads have other sizes than those of local ones (`Gemma4`)."""
SHARED = {"shared": "attention", "shared_wide": "attention", "global_shared": GLOBAL, "global_shared_wide": GLOBAL}
"""The mixers of layers without keys and values of their own -> the mixer of the layers whose they read. Those that are
called wide come with an ffn that is twice as wide."""
TOWER_LAYER = "tower"
"""Stands for the layers of the tower that sees pictures (`DecoderConfig.vision`), which have no mixer of these."""
WIDE = tuple(mixer for mixer in SHARED if mixer.endswith("_wide"))
Stops = tuple[tuple[str, int | tuple[int, ...] | None], ...]
"""Special ids by field, e.g. `(("eos_token_id", 2),)`: tuples, so that a config can be a key of compiled functions."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and how it is stretched."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    kind: Literal["default", "linear", "llama3", "yarn", "proportional"] = "default"
    """How frequencies are scaled beyond the original length; proportional: they are those of a head that is rotated
    whole, and the last ones are 0."""
    factor: float = 1.0
    """Divides the frequencies: all of them (linear, proportional), or the low ones (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_length / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_length / this stay as they are."""
    original_length: int = 8192
    """Positions that the model was pre-trained on."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original length stay as they are."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by `factor`."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None for 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: whether the dimensions of `beta_fast` and `beta_slow` are whole numbers, rounded outwards."""
    share: float = 1.0
    """The part of each head that is rotated, its first dimensions, e.g. 0.25 for Qwen 3.5; proportional: the first of
    its pairs (i, i + H/2)."""
    sections: tuple[int, int, int] | None = None
    """Qwen 3.5: how many pairs turn by a token's time, by its row in a picture and by its column (`Pictures.rope`),
    e.g. (11, 11, 10); None where all turn by its place in the sequence."""


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of Gated DeltaNet layers (`models/deltanet.py`)."""

    key_heads: int
    """Heads of queries and keys, e.g. 16."""
    value_heads: int
    """Heads of values and states, e.g. 32: a multiple of `key_heads`."""
    key_dim: int
    """Width of a head's keys, e.g. 128."""
    value_dim: int
    """Width of a head's values, e.g. 128."""
    taps: int = 4
    """Tokens that the convolution before it sees, the present one included."""

    @property
    def channels(self) -> int:
        """What the convolution mixes of each key head: its query and key, and the values of its value heads."""
        return 2 * self.key_dim + self.value_heads // self.key_heads * self.value_dim

    @property
    def runs(self) -> tuple[int, int, int]:
        """Axes of the channels: key heads, and for each so many runs as wide as its key: query, key and values."""
        return self.key_heads, self.channels // self.key_dim, self.key_dim


@dataclass(frozen=True)
class Clamp:
    """How an expert of gpt-oss joins its gate g with its other factor u: `(u + 1) g sigmoid(slope g)`, both clamped."""

    limit: float = 7.0
    """g is at most this, and u between minus this and this."""
    slope: float = 1.702
    """That of the sigmoid."""


@dataclass(frozen=True)
class Experts:
    """The settings of an ffn of several experts (`models/moe.py`); the width of each is `DecoderConfig.ffn`."""

    number: int
    """How many there are, e.g. 128."""
    active: int
    """How many each token uses, e.g. 8."""
    renormalise: bool = True
    """Whether the weights of those that a token uses are divided by their sum."""
    shared: int = 0
    """Width of a further expert that all tokens use, with a gate of its own, or of the dense ffn beside the experts
    (`DENSE_AND_EXPERTS`); 0 for none."""
    biases: bool = False
    """Whether the router and the experts' matrices have biases."""
    clamp: Clamp | None = None
    """gpt-oss: how gates are applied; None for `DecoderConfig.activation`."""


@dataclass(frozen=True)
class Gemma4:
    """What Gemma 4 alone has: global layers with other heads, shared keys and values, and inputs of each layer's own.

    In all of its layers a head's value is divided by its root mean square, as `qk_norm` does without a weight, and what
    a layer returns is multiplied by a number that the folder has for it, and that does not train.
    """

    global_kv_heads: int
    """K of global layers, e.g. 4 where local layers have 16."""
    global_head_dim: int
    """H of global layers, e.g. 512 where local layers have 256."""
    keys_are_values: bool = False
    """Whether values are made of the keys before their norm and rope: then global layers have no v."""
    shared_layers: int = 0
    """E2B and E4B: so many layers at the end have no keys and values; each reads those of the last layer before them
    that sees as far, e.g. 20."""
    shared_wide: bool = False
    """E2B: the ffn of these layers is twice as wide."""
    layer_inputs: int = 0
    """E2B and E4B: width of the embeddings that a token has for each layer (`blocks.py`), e.g. 256; 0 for none."""
    layer_vocab: int | None = None
    """Ids that have such embeddings, from 0 on, e.g. 262144; those beyond have none. None: all of the vocabulary."""


@dataclass(frozen=True)
class LayerKind:
    """The settings in which layers of one decoder differ. Known while a program is traced: never an array."""

    rope: Rope
    window: int | None = None
    """Positions that a token sees, itself included; None for all of its sequence."""
    mixer: str = "attention"
    """What mixes the tokens, by its name in `MIXERS` of `models/blocks.py`; it decides which weights a layer has."""
    head_dim: int = 0
    """H of its queries, keys and values, e.g. 128; 0 where it has none."""
    kv_heads: int = 0
    """K, e.g. 8; 0 where it has no keys and values."""

    @property
    def paged(self) -> bool:
        """Whether keys and values of earlier tokens are kept in pages; else a state of constant size, or nothing."""
        return self.mixer != DELTANET and self.mixer not in SHARED

    @property
    def source(self) -> "LayerKind":
        """The kind of the layers whose keys and values it reads: itself where it has some."""
        return replace(self, mixer=SHARED.get(self.mixer, self.mixer))


class Stage(NamedTuple):
    """Layers, one after the other, that are computed by one scan."""

    start: int
    """The number of the first one."""
    stop: int
    """One after the number of the last one."""
    period: int
    """After how many layers their mixers repeat, e.g. 4 for three of one mixer and one of another."""


@dataclass(frozen=True)
class DecoderConfig:
    """The configuration of one decoder; `families` fill it from config.json or a preset."""

    family: str
    """The family's name in the table of `models/families/table.py`, e.g. `gemma3`."""
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    """Width of the feed-forward part; of one expert where there are several."""
    activation: Activation
    norm_eps: float
    tied: bool
    """Whether the head is the embedding table."""
    max_positions: int
    """Longest sequence that the folder states, in tokens; carried to the export."""
    rope: Rope
    norm_offset: bool = False
    """Gemma: norms multiply by 1 + w."""
    post_norms: bool = False
    """Gemma 2 and 3: attention and ffn outputs are normed again before the residual."""
    qk_norm: bool = False
    """Gemma 3, Qwen 3: RMSNorm over each head's query and key."""
    qkv_bias: bool = False
    """Qwen 2: biases on q, k, v."""
    o_bias: bool = False
    """gpt-oss: a bias on o."""
    sinks: bool = False
    """gpt-oss: a learned score of each head that takes part in its softmax and mixes no value."""
    scale_embeddings: bool = False
    """Gemma: embeddings are multiplied by sqrt(d_model)."""
    query_scale: float | None = None
    """Multiplies q.k; None for head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Gemma 2: cap * tanh(scores / cap)."""
    logit_softcap: float | None = None
    """Gemma 2: cap * tanh(logits / cap)."""
    window: int | None = None
    """Positions that a local layer sees, itself included."""
    local_layers: tuple[bool, ...] = ()
    """For each layer whether it is local; empty where none is."""
    rope_local: Rope | None = None
    """Gemma 3: rope of the local layers; None for `rope`."""
    gemma4: Gemma4 | None = None
    """What Gemma 4 alone has; None in other families."""
    output_gate: bool = False
    """Qwen 3.5: each head's output of attention is multiplied by a sigmoid, made by the other half of q's matrix."""
    linear_layers: tuple[bool, ...] = ()
    """For each layer whether it is a Gated DeltaNet; empty where none is."""
    delta: DeltaNet | None = None
    """The sizes of the Gated DeltaNet layers, where there are any."""
    mixer: str = "attention"
    """The mixer of tokens of the other layers, by its name in `MIXERS` of `models/blocks.py`."""
    experts: Experts | None = None
    """The experts of the feed-forward part, where it has several."""
    feed_forward: str = "gated"
    """The feed-forward part, by its name in `FEED_FORWARDS` of `models/blocks.py`."""
    mtp: Literal["freeze", "train"] | None = None
    """Qwen 3.5: the head that drafts tokens (`DraftHead`) belongs to the model, and whether it trains; None where
    it is not read."""
    vision: VisionConfig | None = None
    """Gemma 3, Qwen 3.5: the tower that sees pictures; None where only text is read."""
    stops: Stops = ()
    """bos_token_id, eos_token_id, pad_token_id of the folder, carried to the export."""

    @property
    def shared_layers(self) -> int:
        """How many layers at the end read the keys and values of others."""
        return self.gemma4.shared_layers if self.gemma4 else 0

    @property
    def layer_inputs(self) -> int:
        """Width of the embeddings that a token has for each layer; 0 where it has none."""
        return self.gemma4.layer_inputs if self.gemma4 else 0

    @property
    def scale(self) -> float:
        """The factor on q.k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of its layers that have projections, as Hugging Face calls them, e.g. `("self_attn", "mlp")`;
        empty where a projection is the layer's own."""
        dense = self.experts is None or self.feed_forward == DENSE_AND_EXPERTS
        mixture = () if self.experts is None else (self.experts_module,)
        shared = ("mlp.shared_expert",) if self.experts is not None and self.experts.shared else ()
        linear = () if self.delta is None else ("linear_attn",)
        inputs = ("",) if self.layer_inputs else ()
        return ("self_attn", *linear, *(("mlp",) if dense else shared), *mixture, *inputs)

    @property
    def experts_module(self) -> str:
        """What transformers' models call the module of a layer's experts, e.g. `mlp.experts`."""
        return "experts" if self.feed_forward == DENSE_AND_EXPERTS else "mlp.experts"

    @property
    def routed(self) -> tuple[int, int] | None:
        """Layers with several experts and how many of these a token uses, `(L, k)`; None where no layer has several."""
        return None if self.experts is None else (self.num_layers, self.experts.active)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        far = LayerKind(self.rope, None, self.mixer, self.head_dim, self.num_kv_heads)
        near = far
        if self.window is not None:
            near = replace(far, rope=self.rope_local or self.rope, window=self.window)
        gemma4 = self.gemma4
        if gemma4 is not None:
            far = replace(far, mixer=GLOBAL, head_dim=gemma4.global_head_dim, kv_heads=gemma4.global_kv_heads)
        linear, none = LayerKind(self.rope, mixer=DELTANET), (False,) * self.num_layers
        kinds = [
            linear if delta else near if local else far
            for delta, local in zip(self.linear_layers or none, self.local_layers or none, strict=True)
        ]
        first, wide = self.num_layers - self.shared_layers, gemma4 is not None and gemma4.shared_wide
        readers = {source: mixer for mixer, source in SHARED.items() if (mixer in WIDE) == wide}
        return (*kinds[:first], *(replace(kind, mixer=readers[kind.mixer]) for kind in kinds[first:]))

    @cached_property
    def distinct_kinds(self) -> tuple[LayerKind, ...]:
        """Each kind of layer once, in the order in which they first appear."""
        return tuple(dict.fromkeys(self.kinds))

    @property
    def paged_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers whose keys and values are kept in pages, each once."""
        return tuple(kind for kind in self.distinct_kinds if kind.paged)

    @property
    def cached_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer that keeps something of earlier tokens: that of the head that drafts comes last, and
        is the one of layers that see everything."""
        far = next(kind for kind in self.paged_kinds if kind.window is None) if self.mtp else None
        return self.kinds if far is None else (*self.kinds, far)

    @property
    def mixers(self) -> tuple[str, ...]:
        """Each mixer once, in the order in which they first appear."""
        return tuple(dict.fromkeys(kind.mixer for kind in self.kinds))

    def layers_with(self, mixer: str | tuple[str, ...] | None) -> tuple[int, ...]:
        """The numbers of the layers with this mixer, or with one of several; None for all layers."""
        if mixer == TOWER_LAYER:
            return tuple(range(self.vision.num_layers if self.vision else 0))
        wanted = (mixer,) if isinstance(mixer, str) else mixer
        return tuple(number for number, kind in enumerate(self.kinds) if wanted is None or kind.mixer in wanted)

    def kinds_with(self, mixer: str) -> tuple[LayerKind, ...]:
        """The kinds of layers with this mixer, each once."""
        return tuple(kind for kind in self.distinct_kinds if kind.mixer == mixer)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The scans that compute the layers in turn: one, but where layers read the keys and values of others. Then the
        period that has these others is a stage of its own, from which they are handed on."""
        first = self.num_layers - self.shared_layers
        if not self.shared_layers:
            return (Stage(0, first, self._period(0, first)),)
        period = self._period(0, first)
        before = Stage(0, first - period, period)
        last = Stage(first, self.num_layers, self._period(first, self.num_layers))
        return (*((before,) if before.stop else ()), Stage(first - period, first, period), last)

    @property
    def sources(self) -> tuple[int, ...]:
        """The numbers of the layers whose keys and values later layers read, e.g. (13, 14)."""
        unshared = self.kinds[: self.num_layers - self.shared_layers]
        read = {kind.source for kind in self.kinds[len(unshared) :]}
        return tuple(
            number for number, kind in enumerate(unshared) if kind in read and kind not in unshared[number + 1 :]
        )

    def _period(self, start: int, stop: int) -> int:
        """After how many of these layers their mixers repeat."""
        mixers = [kind.mixer for kind in self.kinds[start:stop]]
        number = len(mixers)
        return next(
            length
            for length in range(1, number + 1)
            if number % length == 0 and mixers == mixers[:length] * (number // length)
        )


TOWER = "vision/"
"""Begins the names of a model's parameters that belong to its tower."""
MTP = "mtp/"
"""Begins the names of those that belong to the head that drafts tokens."""


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return "_lora_" in name


def is_own(name: str) -> bool:
    """Whether a parameter is an adapter's or a value head's: no folder of a base has it, and it always trains."""
    return is_adapter(name) or name.startswith("value/")


def trains(name: str, full: bool, mtp: str | None) -> bool:
    """Whether a parameter trains: an adapter's and a value head's always, the base's where it is trained in full, a
    tower's never.

    Args:
        full: whether the weights of the base train.
        mtp: as in `DecoderConfig`.
    """
    return is_own(name) or (full and not name.startswith((TOWER,) if mtp == "train" else (TOWER, MTP)))
