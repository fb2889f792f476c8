"""What MaxText calls each weight, how it lies there, and the arithmetic between: a table for each family.

Read from the public mapping of MaxText, AI-Hypercomputer/maxtext at commit 0647496f, in
src/maxtext/checkpoint_conversion/utils/param_mapping.py, functions `*_MAXTEXT_TO_HF_PARAM_MAPPING` (names) and
`*_MAXTEXT_TO_HF_PARAM_HOOK_FN` (values) of LLAMA31, GEMMA2, GEMMA3 and QWEN; vocabularies from the files in
src/maxtext/configs/models.
Our layout of a layer's weights is MaxText's already. What differs, and is easily overlooked:

* Llama's queries are divided by sqrt(H). Where the rope is stretched as Llama 3.1's, of each head's query and key the
  two halves that rope turns together are interleaved: dimensions 0, H/2, 1, H/2 + 1, ... The mapping always does so,
  and its models are all of 3.1; a plain rope of MaxText's turns halves (`maxtext_settings.neighbours`).
* Gemma 2's queries are divided too, Gemma 3's are not. By the mapping the divisor is sqrt(H); here it is what scores
  are divided by, which for Gemma 2 27B is sqrt(D / N), as in `standalone_scripts/convert_gemma2_chkpt.py`: MaxText
  divides nothing afterwards.
* Gemma's norms hold 1 + w, and its embedding is multiplied by sqrt(D), which for Gemma 3 is rounded to bfloat16 first.
* Gemma 2 has a local and a global layer in one layer of MaxText; a scan over Gemma 3 has six, and the layers that are
  left over stand apart.
* A scanned stack has its layers as the second axis (`param_scan_axis`, 1 by default), also of norms: `[D L]`.

Everything is computed in float32. Moves round nothing, nor does sqrt(H) where H is a power of 4; elsewhere a value is
rounded once each way, in float32: what was bfloat16 comes back to the bit (1 + w from |w| = 2^-16 on).

Axes: V vocabulary, D model width, N query heads, K kv heads, H head dim, L layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from tunix.errors import UserError
from tunix.interop.maxtext_settings import differences, neighbours
from tunix.models.config import DecoderConfig

Array = Float32[np.ndarray, "..."]
Step = Callable[[Array, DecoderConfig], Array]
PERIOD = 6
"""Layers of one step of MaxText's scan over Gemma 3."""


class Change(NamedTuple):
    """How the values of a weight change; both ways take and give our layout."""

    there: Step
    """Ours -> MaxText's."""
    back: Step
    """MaxText's -> ours."""

    def then(self, other: "Change") -> "Change":
        """Both changes, one after the other."""
        return Change(
            lambda x, c: other.there(self.there(x, c), c),
            lambda x, c: self.back(other.back(x, c), c),
        )


class Leaf(NamedTuple):
    """One weight's name in MaxText."""

    path: str
    """Below `params`, or below its layer: `self_attention/query/kernel`."""
    change: Change
    turned: bool = False
    """Whether a matrix lies the other way round than here."""


class Block(NamedTuple):
    """Layers that MaxText keeps together."""

    prefix: str
    """Below `decoder`, e.g. `layers_3`."""
    layers: tuple[int, ...]
    """Their numbers here, from 0."""
    stacked: bool
    """Whether their weights are stacks, even of one layer."""
    suffix: str = ""
    """Added to the first part of their weights' names: `self_attention_local`."""


class Table(NamedTuple):
    """Everything that MaxText has of one family."""

    leaves: Mapping[str, Leaf]
    """By our names."""
    blocks: Callable[[int, bool], Sequence[Block]]
    """Number of layers, whether they are scanned -> where they are."""
    vocabulary: Mapping[int, int]
    """Rows of the published embedding -> rows of MaxText's, where they differ: the others are zeros, or left out."""

    def rows(self, config: DecoderConfig) -> int:
        """The rows of MaxText's embedding."""
        return self.vocabulary.get(config.vocab_size, config.vocab_size)


def table_of(config: DecoderConfig, names: Sequence[str], where: str) -> Table:
    """The table of a model's family.

    Args:
        config: of the model.
        names: of its parameters.
        where: the folder for the message.

    Raises:
        UserError: MaxText's mapping has no such family, or the model differs from what MaxText computes.
    """
    found = TABLES.get(config.family)
    if found is None:
        raise UserError(
            f"{where}: {config.family} has no table for MaxText, whose mapping we know of {', '.join(TABLES)}; "
            "a new one is a line of tunix/interop/maxtext_tables.py"
        )
    lost = [name for name in names if name not in found.leaves]
    if lost:
        raise UserError(f"{where}: MaxText's {config.family} has no place for {', '.join(lost)} of this model")
    for difference in differences(config):
        raise UserError(f"{where}: {difference}")
    return found


def _same(x: Array, config: DecoderConfig) -> Array:
    return x


def _divided(x: Array, config: DecoderConfig) -> Array:
    return x * np.float32(config.scale)


def _multiplied(x: Array, config: DecoderConfig) -> Array:
    return x * np.float32(1 / config.scale)


def _interleaved(x: Array, config: DecoderConfig) -> Array:
    if not neighbours(config):
        return x
    first, second = np.split(x, 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(x.shape)


def _halved(x: Array, config: DecoderConfig) -> Array:
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1) if neighbours(config) else x


def _embedding(kind: type) -> Change:
    """The embedding times sqrt(D), which is rounded to this type."""

    def factor(config: DecoderConfig) -> np.float32:
        return np.float32(kind(config.d_model**0.5))

    return Change(lambda x, c: x * factor(c), lambda x, c: x / factor(c))


MOVED = Change(_same, _same)
SCALED = Change(_divided, _multiplied)
ROTATED = Change(_interleaved, _halved)
OFFSET = Change(lambda x, c: x + np.float32(1), lambda x, c: x - np.float32(1))


def _plain(layers: int, scanned: bool) -> list[Block]:
    if scanned:
        return [Block("layers", tuple(range(layers)), True)]
    return [Block(f"layers_{layer}", (layer,), False) for layer in range(layers)]


def _paired(layers: int, scanned: bool) -> list[Block]:
    """Gemma 2: even layers are local, odd ones global."""
    kinds = ("_local", "_global")
    if scanned:
        return [Block("layers", tuple(range(kind, layers, 2)), True, kinds[kind]) for kind in range(2)]
    return [Block(f"layers_{layer // 2}", (layer,), False, kinds[layer % 2]) for layer in range(layers)]


def _in_sixes(layers: int, scanned: bool) -> list[Block]:
    """Gemma 3: a scan over six layers at a time, and what is left over."""
    if not scanned:
        return _plain(layers, False)
    whole = layers - layers % PERIOD
    scan = [Block(f"layers/layers_{place}", tuple(range(place, whole, PERIOD)), True) for place in range(PERIOD)]
    rest = [Block(f"layers_remainder/layers_{layer - whole}", (layer,), False) for layer in range(whole, layers)]
    return (scan if whole else []) + rest


def _layers(
    query: Change, key: Change, norms: Mapping[str, str], of_norms: Change = MOVED, **more: str
) -> dict[str, Leaf]:
    """A layer's weights by our names; `norms` and `more` are those that not all families have."""
    matrices = {
        "q/w": Leaf("self_attention/query/kernel", query),
        "k/w": Leaf("self_attention/key/kernel", key),
        "v/w": Leaf("self_attention/value/kernel", MOVED),
        "o/w": Leaf("self_attention/out/kernel", MOVED),
        "gate/w": Leaf("mlp/wi_0/kernel", MOVED),
        "up/w": Leaf("mlp/wi_1/kernel", MOVED),
        "down/w": Leaf("mlp/wo/kernel", MOVED),
    }
    scales = {f"{ours}/w": Leaf(f"{theirs}/scale", of_norms) for ours, theirs in norms.items()}
    biases = {f"{ours}/b": Leaf(f"self_attention/{theirs}/bias", MOVED) for ours, theirs in more.items()}
    return {f"layers/{ours}": leaf for ours, leaf in {**matrices, **scales, **biases}.items()}


def _tops(embedding: Change = MOVED, norm: Change = MOVED) -> dict[str, Leaf]:
    return {
        "embed/w": Leaf("token_embedder/embedding", embedding),
        "norm/w": Leaf("decoder/decoder_norm/scale", norm),
    }


HEAD = {"head/w": Leaf("decoder/logits_dense/kernel", MOVED, turned=True)}
"""Gemma's head is its embedding in every MaxText model."""
TWO = {"pre_attn_norm": "pre_self_attention_layer_norm", "pre_mlp_norm": "post_self_attention_layer_norm"}
FOUR = {
    "pre_attn_norm": "pre_self_attention_norm",
    "post_attn_norm": "post_self_attention_norm",
    "pre_mlp_norm": "pre_ffw_norm",
    "post_mlp_norm": "post_ffw_norm",
}
OF_HEADS = {"q_norm": "self_attention/query_norm", "k_norm": "self_attention/key_norm"}

TABLES: Mapping[str, Table] = {
    "llama": Table({**_tops(), **HEAD, **_layers(SCALED.then(ROTATED), ROTATED, TWO)}, _plain, {}),
    "gemma2": Table(
        {**_tops(_embedding(np.float32), OFFSET), **_layers(SCALED, MOVED, FOUR, OFFSET)},
        _paired,
        {256_000: 256_128},
    ),
    "gemma3": Table(
        {**_tops(_embedding(ml_dtypes.bfloat16), OFFSET), **_layers(MOVED, MOVED, FOUR | OF_HEADS, OFFSET)},
        _in_sixes,
        {262_208: 262_144},
    ),
    "qwen2": Table(
        {**_tops(), **HEAD, **_layers(MOVED, MOVED, TWO, q="query", k="key", v="value")},
        _plain,
        {},
    ),
    "qwen3": Table({**_tops(), **HEAD, **_layers(MOVED, MOVED, TWO | OF_HEADS)}, _plain, {}),
}
"""The families that can be converted."""
