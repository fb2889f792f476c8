"""What a family file fills in: how its config.json is read and written, and what its tensors are called.

A `Tensor` maps one of our weights to its Hugging Face name and layout, such as `(N H) D` there and `D N H` here, and
converts between the two. The families here share most names; a family file adds its norms.

Axes: V vocabulary, D model width, F ffn width, N query heads, K kv heads, H head dim, E experts.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from tunix.data.templates import TemplateName
from tunix.models.config import COLOURS, DENSE_AND_EXPERTS, FRAMES, TOWER_LAYER, DecoderConfig, VisionConfig
from tunix.models.families.hf_config import Fields, write_rope

SCORE = "score.weight"
"""The scalar head of a reward model's folder."""
AXES = r"\([^)]*\)|\S+"
"""Matches one axis of a file: `D`, or the flattened `(N H)`."""
Array = TypeVar("Array", bound=Any)
"""An array of numpy or jax, which this module is loaded without."""
Names = Mapping[str, tuple[str, str, str]]
"""Our names within some part -> the file's, the axes in the file, and ours; as in `Tensor`."""
Pattern = Callable[[int], tuple[bool, ...]]
"""A number of layers -> which of them are of some kind; nothing where none is."""


@dataclass(frozen=True)
class Tensor:
    """One weight in a Hugging Face folder. Layers are single here: `L` is in neither layout."""

    name: str
    """The name in the file, with `{layer}` where each layer has one, and `{expert}` where each expert has one."""
    theirs: str
    """Axes in the file, flattened ones in parentheses: `(N H) D`. `1` is an axis that we leave out."""
    ours: str
    """Axes in our order: `D N H`, or `E D F`. Where each expert's is a tensor of its own, E is the first."""
    mixer: str | tuple[str, ...] | None = None
    """The mixer whose layers have it (`LayerKind.mixer`), or several; None where all layers do."""
    runs: tuple[str, tuple[int, ...]] | None = None
    """An axis that the file takes apart, and how many of it come first, then next: of `("U", (1, 1))` in `(Hk U Dk)`
    the first of each head of all heads, the second of all heads, then the rest of all heads. None where it does not."""

    def key(self, layer: int | None, expert: int | None = None) -> str:
        """The name in the file."""
        return self.name.format(layer=layer, expert=expert)

    @property
    def layered(self) -> bool:
        """Whether each layer has one."""
        return "{layer}" in self.name

    def keys(self, layer: int | None, shape: tuple[int, ...]) -> tuple[str, ...]:
        """The names in the file of a weight that has `shape` here: one, or one for each expert."""
        experts = range(shape[0]) if self.by_expert else (None,)
        return tuple(self.key(layer, expert) for expert in experts)

    @property
    def by_expert(self) -> bool:
        """Whether each expert's part is a tensor of its own in the file."""
        return "{expert}" in self.name

    @property
    def single(self) -> "Tensor":
        """The tensor of one expert; the tensor itself where there are no experts."""
        return replace(self, ours=self.ours.removeprefix("E ")) if self.by_expert else self

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file of a weight that has `shape` here."""
        sizes = dict(zip(self.ours.split(), shape, strict=True))
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.groups)

    def read(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Our weight, or one expert's part of it, from the file's array; the inverse of `write`.

        Args:
            array: numpy's or jax's, in the layout of the file.
            shape: of the weight.
        """
        axes = self.single.ours.split()
        sizes = dict(zip(axes, shape, strict=True))
        order, runs = self._order, self.order_of_runs(shape)
        array = array if runs is None else array.take(np.argsort(runs), self._taken_apart)
        return array.reshape([sizes[axis] for axis in order]).transpose([order.index(axis) for axis in axes])

    def write(self, array: np.ndarray) -> np.ndarray:
        """Our weight, or one expert's part of it, in the file's layout."""
        axes = self.single.ours.split()
        sizes, runs = self.single.their_shape(array.shape), self.order_of_runs(array.shape)
        theirs = array.transpose([axes.index(axis) for axis in self._order]).reshape(sizes)
        return theirs if runs is None else theirs.take(runs, self._taken_apart)

    def order_of_runs(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """For each place along the file's axis that takes `runs` apart the place in our order; None where none does.

        Args:
            shape: of the weight here, or of one expert's part of it.
        """
        if self.runs is None:
            return None
        (axis, first), group = self.runs, self.groups[self._taken_apart]
        sizes = dict(zip(self.single.ours.split(), shape[-len(self.single.ours.split()) :], strict=True))
        places = np.arange(math.prod(sizes[one] for one in group)).reshape([sizes[one] for one in group])
        parts = np.split(places, np.cumsum(first), axis=group.index(axis))
        return np.concatenate([part.reshape(-1) for part in parts])

    @property
    def _taken_apart(self) -> int:
        """The file's axis that takes `runs` apart."""
        assert self.runs is not None
        return next(number for number, group in enumerate(self.groups) if self.runs[0] in group)

    @property
    def turned(self) -> "Tensor":
        """The same weight, from a file that holds the matrix transposed."""
        outer, inner = re.findall(AXES, self.theirs)
        return replace(self, theirs=f"{inner} {outer}")

    @property
    def outputs_first(self) -> "Tensor":
        """The same matrix in the layout of a linear layer, which packed folders keep to: outputs before inputs."""
        return self.turned if self._order == self.single.ours.split() else self

    @property
    def is_transposed(self) -> bool:
        """Whether the file holds a matrix the other way round than we do."""
        return len(self.groups) == 2 and self.turned._order == self.single.ours.split() != self._order

    @property
    def contracted(self) -> int:
        """How many of our first axes are a matrix's inputs, which come last in the file."""
        return len(self.groups[-1])

    @property
    def groups(self) -> list[list[str]]:
        """Our axes that each of the file's axes holds, outermost first; none for `1`."""
        listed = re.findall(AXES, self.theirs)
        return [[] if group == "1" else group.strip("()").split() for group in listed]

    @property
    def _order(self) -> list[str]:
        return [axis for group in self.groups for axis in group]


def axis_sizes(config: DecoderConfig) -> dict[str, int]:
    """The size of each axis of a model's weights, by its letters, which the families' files explain."""
    c, experts, delta, gemma4, tower = config, config.experts, config.delta, config.gemma4, config.vision
    sizes = {"V": c.vocab_size, "D": c.d_model, "N": c.num_heads, "K": c.num_kv_heads, "H": c.head_dim, "F": c.ffn}
    sizes |= {"L": c.num_layers, "Dm": 2 * c.d_model, "Hg": 2 * c.head_dim, "Fw": 2 * c.ffn, "E": 0, "Fe": c.ffn}
    if experts is not None:
        sizes |= {"E": experts.number, "Fs": experts.shared}
        if c.feed_forward == DENSE_AND_EXPERTS:
            sizes["F"] = experts.shared
    if delta is not None:
        sizes |= {"Hk": delta.key_heads, "Hv": delta.value_heads, "Dk": delta.key_dim, "Dv": delta.value_dim}
        sizes |= {"U": delta.channels // delta.key_dim, "Ta": delta.taps}
    if gemma4 is not None:
        sizes |= {"Kw": gemma4.global_kv_heads, "Hw": gemma4.global_head_dim, "Dp": gemma4.layer_inputs}
        sizes |= {"Da": c.num_layers * gemma4.layer_inputs, "Vl": gemma4.layer_vocab or c.vocab_size}
    if tower is not None:
        sizes |= {"Dt": tower.width, "Ft": tower.ffn, "Nt": tower.num_heads, "Ht": tower.head_dim, "Qk": 3}
        sizes |= {"Pl": tower.positions**2, "Pr": tower.patch, "Pc": tower.patch, "Rb": COLOURS, "Fr": FRAMES}
        sizes |= dict.fromkeys(("Ds", "Fm"), tower.width * tower.pool**2)
    return sizes


@dataclass(frozen=True)
class VisionText:
    """What a family's multimodal folders have besides its text part: a tower that sees pictures."""

    architecture: str
    """Class in transformers, such as `Gemma3ForConditionalGeneration`."""
    read: Callable[[Fields], VisionConfig]
    """The fields of a multimodal config.json -> the tower's config."""
    write: Callable[[DecoderConfig, VisionConfig], dict[str, Any]]
    """Our config and its tower's -> the fields of a multimodal config.json that tell of the tower."""
    tensors: Mapping[str, Tensor]
    """Our parameter name -> the tensor."""
    prefixes: tuple[tuple[str, str | None], ...]
    """Prefixes of tensors in multimodal folders -> those that the tables here have; None for parts left out."""
    written: tuple[tuple[str, str], ...]
    """Prefixes that the tables here have -> those of a multimodal folder that is written anew."""
    published: VisionConfig
    """The tower of the published sizes."""
    small: VisionConfig
    """A tiny tower for `init: random` without a preset."""


@dataclass(frozen=True)
class FamilyText:
    """Everything that is particular to one family; its file defines one, and the table of `table.py` lists it."""

    model_types: tuple[str, ...]
    """`model_type` in config.json, such as `("gemma3_text", "gemma3")`."""
    hub: str
    """A regular expression that is found in the family's hub ids in lower case, such as `gemma-?3`. Where several
    families match, the longest match decides."""
    template: TemplateName
    """The chat format of models from scratch."""

    architecture: str
    """Class in transformers, such as `LlamaForCausalLM`."""
    classifier: str | None
    """The class of a reward model, such as `LlamaForSequenceClassification`; None where transformers has none."""
    read: Callable[[Fields], DecoderConfig]
    """The fields of config.json, or of its `text_config`, -> our config."""
    write: Callable[[DecoderConfig], dict[str, Any]]
    """Our config -> the fields of config.json."""
    tensors: Mapping[str, Tensor]
    """Our parameter name -> the tensor; those that a config does not have are simply unused."""
    presets: Mapping[str, DecoderConfig]
    """The published sizes by name, such as `gemma3-1b`."""
    small: DecoderConfig
    """A tiny shape for `init: random` without a preset."""
    local: Pattern = lambda layers: ()
    """The published pattern of local layers."""
    linear: Pattern = lambda layers: ()
    """The published pattern of Gated DeltaNets."""
    whole_heads: bool = False
    """Whether transformers refuses a d_model that num_heads does not divide (nothing computes with the quotient)."""
    axes: Callable[[DecoderConfig], dict[str, int]] = axis_sizes
    """The size of each axis that `tensors` names."""
    multimodal: tuple[str, ...] = ()
    """Fields of a multimodal config.json, whose text part is in `text_config`, that concern its other parts."""
    prefixes: tuple[tuple[str, str | None], ...] = ()
    """Prefixes of tensors in multimodal folders -> those of a text folder; None for parts that are left out."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ends of the names of tensors that hold all experts, which a folder may have in place of one for each -> the ends
    of each expert's matrices, in the order of its rows: `.gate_up_proj` -> `.gate_proj.weight`, `.up_proj.weight`."""
    alternate: bool = False
    """Whether the several matrices of an expert take turns along the last axis of such a tensor, which transformers
    has transposed in these families: of `[E D 2F]` the columns 0, 2, ... are the gate's."""
    writes_stacked: bool = False
    """Whether an export has the tensors of all experts, as transformers does in this family."""
    spare: Callable[[DecoderConfig, str], bool] = lambda config, name: False
    """Whether a folder may have a tensor of this name that the model has no use for; an export leaves it out."""
    packed: tuple[str, ...] = ()
    """The `quant_method` of its published folders, such as mxfp4, where the tensors say all about themselves."""
    passengers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Prefixes of tensors that nothing here computes with, and that an export takes along from the folder that was
    loaded, such as a head that drafts several tokens -> fields of config.json that go with them."""
    mtp: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors of a head of one layer that drafts tokens (`DraftHead`), which are among the passengers where it
    is not read; empty where none is known."""
    vision: VisionText | None = None
    """The sight of its multimodal folders; None where there are none, or only their text part is known."""


Shape = dict[str, Any]
"""The sizes of a model, as keyword arguments of DecoderConfig: those of `SMALL`."""
SMALL = Shape(
    vocab_size=512, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn=192, max_positions=2048
)
"""A shape for `FamilyText.small`."""


def sized(
    base: DecoderConfig,
    d_model: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    local: Pattern = lambda layers: (),
    linear: Pattern = lambda layers: (),
    **different: Any,
) -> DecoderConfig:
    """A published size of a family.

    Args:
        base: what its sizes have in common.
        local: which layers are local.
        linear: which layers are Gated DeltaNets.
        different: what else this one has of its own, as DecoderConfig names it.
    """
    return replace(
        base,
        d_model=d_model,
        ffn=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        local_layers=local(layers),
        linear_layers=linear(layers),
        **different,
    )


def sizes(fields: Fields, defaults: Mapping[str, int | None] | None = None) -> Shape:
    """The shape that a config.json states.

    Args:
        fields: config.json.
        defaults: by Hugging Face name, for what the file may leave out. Without one, `head_dim` is
            hidden_size / num_attention_heads and `num_key_value_heads` is num_attention_heads.
    """
    defaults = defaults or {}
    d_model = fields.integer("hidden_size", defaults.get("hidden_size"))
    heads = fields.integer("num_attention_heads", defaults.get("num_attention_heads"))
    return Shape(
        vocab_size=fields.integer("vocab_size", defaults.get("vocab_size")),
        d_model=d_model,
        num_layers=fields.integer("num_hidden_layers", defaults.get("num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", defaults.get("num_key_value_heads") or heads),
        head_dim=fields.integer("head_dim", defaults.get("head_dim") or d_model // heads),
        ffn=fields.integer("intermediate_size", defaults.get("intermediate_size")),
        max_positions=fields.integer("max_position_embeddings", defaults.get("max_position_embeddings")),
    )


def decoder(
    fields: Fields, like: DecoderConfig, shape: Shape, *, tied: bool = False, eps: float = 1e-6, **different: Any
) -> DecoderConfig:
    """The config of a config.json, whose `rms_norm_eps`, `tie_word_embeddings` and special ids are read here.

    Args:
        fields: config.json.
        like: any size of the family, for what no field says, such as its norms; that the file's activation is `silu` is
            checked here, others have several spellings.
        shape: its sizes.
        tied: whether the head is the table where the file does not say.
        eps: that of norms where the file does not say.
        different: what else the family has read, as DecoderConfig names it; takes precedence over the shape.
    """
    if like.activation == "silu":
        fields.only("hidden_act", "silu")
    stated = {"norm_eps": fields.number("rms_norm_eps", eps), "tied": fields.flag("tie_word_embeddings", tied)}
    return replace(like, **{**shape, **stated, "stops": fields.stops(), **different})


def written(config: DecoderConfig, *, old_rope: bool = True) -> dict[str, Any]:
    """The fields of config.json that all families share.

    Args:
        old_rope: whether the rope is also written in the old spelling, which the latest families never had.
    """
    rope = write_rope(config.rope)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    old = {"rope_theta": config.rope.theta, "rope_scaling": None if config.rope.kind == "default" else scaling}
    return {
        "model_type": config.family,
        **({"hidden_act": "silu"} if config.activation == "silu" else {}),
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        # In both spellings: a reader that only knows the old one would otherwise silently use a wrong base.
        "rope_parameters": rope,
        **(old if old_rope else {}),
        **{name: list(ids) if isinstance(ids, tuple) else ids for name, ids in config.stops},
    }


def layer_types(config: DecoderConfig) -> list[str]:
    """`local_layers` as config.json spells them."""
    local = config.local_layers or (False,) * config.num_layers
    return ["sliding_attention" if here else "full_attention" for here in local]


def in_layers(table: Names, mixer: str | tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """Tensors by our full names, from a table by names within a layer; of layers with this mixer, or of all."""
    return {
        f"layers/{ours}": Tensor(f"model.layers.{{layer}}.{name}", theirs, axes, mixer)
        for ours, (name, theirs, axes) in table.items()
    }


def of_tower(start: str, table: Names, layers: str, layer_table: Names) -> dict[str, Tensor]:
    """The weights of a tower's modules and their biases, which have the first of the file's axes.

    Args:
        start: what names in the file begin with.
        table: the modules outside of the layers.
        layers: what those of the layers begin with, before the layer's number.
        layer_table: the modules of a layer.
    """
    tensors: dict[str, Tensor] = {}
    places = (
        ("vision/", start, table, None),
        ("vision/layers/", f"{start}{layers}{{layer}}.", layer_table, TOWER_LAYER),
    )
    for ours_start, their_start, modules, mixer in places:
        for ours, (name, theirs, axes) in modules.items():
            outputs = re.findall(AXES, theirs)[0]
            tensors[ours_start + ours] = Tensor(f"{their_start}{name}.weight", theirs, axes, mixer)
            bias = Tensor(f"{their_start}{name}.bias", outputs, outputs.strip("()"), mixer)
            tensors[f"{ours_start}{ours}_bias"] = bias
    return tensors


STACKED = {".gate_up_proj": (".gate_proj.weight", ".up_proj.weight"), ".down_proj": (".down_proj.weight",)}
"""How several families hold the matrices of all experts of a layer (`FamilyText.stacked`)."""
SHARED: Mapping[str, Tensor] = {
    "embed/w": Tensor("model.embed_tokens.weight", "V D", "V D"),
    "head/w": Tensor("lm_head.weight", "V D", "V D"),
    "norm/w": Tensor("model.norm.weight", "D", "D"),
    "value/w": Tensor(SCORE, "1 D", "D"),
    **in_layers(
        {
            "q/w": ("self_attn.q_proj.weight", "(N H) D", "D N H"),
            "k/w": ("self_attn.k_proj.weight", "(K H) D", "D K H"),
            "v/w": ("self_attn.v_proj.weight", "(K H) D", "D K H"),
            "o/w": ("self_attn.o_proj.weight", "D (N H)", "N H D"),
            "gate/w": ("mlp.gate_proj.weight", "F D", "D F"),
            "up/w": ("mlp.up_proj.weight", "F D", "D F"),
            "down/w": ("mlp.down_proj.weight", "D F", "F D"),
        }
    ),
}
"""Tensors that have the same names in all families here."""

TWO_NORMS: Mapping[str, Tensor] = in_layers(
    {
        "pre_attn_norm/w": ("input_layernorm.weight", "D", "D"),
        "pre_mlp_norm/w": ("post_attention_layernorm.weight", "D", "D"),
    }
)
"""Norms of a block that norms only its inputs."""

QKV_BIASES: Mapping[str, Tensor] = in_layers(
    {
        "q/b": ("self_attn.q_proj.bias", "(N H)", "N H"),
        "k/b": ("self_attn.k_proj.bias", "(K H)", "K H"),
        "v/b": ("self_attn.v_proj.bias", "(K H)", "K H"),
    }
)
"""Biases of a layer's queries, keys and values."""

QK_NORMS: Mapping[str, Tensor] = in_layers(
    {
        "q_norm/w": ("self_attn.q_norm.weight", "H", "H"),
        "k_norm/w": ("self_attn.k_norm.weight", "H", "H"),
    }
)
"""Norms of each head's query and key."""
