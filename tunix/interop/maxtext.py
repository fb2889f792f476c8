"""MaxText's checkpoints: a model folder becomes one, and one becomes a model folder, an array at a time.

A checkpoint is an Orbax tree `params/params/...` of a train state (`orbax_arrays`). `LEAVES` is a table for each family
of what MaxText calls each weight, how it lies there and the arithmetic between. Both ways the arrays that there must be
are known before any is read: those that are missing, too many or of another shape are named.

Settings are read from MaxText 0.2.5: `layers/attentions.py` and `layers/embeddings.py` for ropes, `models/gemma*.py`
for scores and norms, `configs/models` for what a model's name stands for. Every size and number that a config.json
states is set, so that a name gives the kind of model alone.

Read from the public mapping of MaxText, AI-Hypercomputer/maxtext at commit 0647496f, in
src/maxtext/checkpoint_conversion/utils/param_mapping.py, functions `*_MAXTEXT_TO_HF_PARAM_MAPPING` (names) and
`*_MAXTEXT_TO_HF_PARAM_HOOK_FN` (values) of LLAMA31, GEMMA2, GEMMA3 and QWEN; vocabularies from the files in
src/maxtext/configs/models.
Our layout of a layer's weights is MaxText's already. What differs, and is easily overlooked:

* Llama's queries are divided by sqrt(H). Where the rope is stretched as Llama 3.1's, of each head's query and key the
  two halves that rope turns together are interleaved: dimensions 0, H/2, 1, H/2 + 1, ... The mapping always does so,
  and its models are all of 3.1; a plain rope of MaxText's turns halves (`neighbours`).
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict
from jaxtyping import Float32

from tunix.config import DType
from tunix.distributed.shared_folder import shared_folder
from tunix.errors import UserError
from tunix.hf.model_folder import expected, has_score, named_tensors, resolve_folder, reward_model, write_beside
from tunix.hf.safetensors_io import Entry, Stored, check_tensors, some, write_shards
from tunix.hf.tensor_transfer import STORED_DTYPE
from tunix.interop.orbax_arrays import ITEMS, STEP, Arrays, Deferred, writing_handler
from tunix.models.config import DecoderConfig, Rope
from tunix.models.families.base import Tensor
from tunix.models.families.table import FAMILIES, read_config, to_hf
from tunix.models.model import Model
from tunix.util.atomic_io import atomic_folder, refuse_taken

NAMES = {
    "llama": "llama3-8b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-4b",
    "qwen2": "qwen2.5-1.5b",
    "qwen3": "qwen3-0.6b",
}
"""Our families -> a model of MaxText's of the same kind."""
STRETCHED = "llama3.1-8b"
"""Models of this name turn Llama's queries and keys by pairs of neighbours, and stretch the rope by `LLAMA31`."""
WIDE_SCORES = "gemma3-27b"
"""Gemma 3 under this name divides scores by the root of D / N instead of the root of H."""
LLAMA31 = Rope(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
"""Numbers that MaxText has in its code."""
GEMMAS_EPS = 1e-6
"""MaxText's Gemma has it in its code for the norms of its layers."""


def neighbours(config: DecoderConfig) -> bool:
    """Whether MaxText turns dimensions 2i and 2i + 1 together, and not i and H/2 + i as everywhere else."""
    return config.family == "llama" and config.rope.kind == "llama3"


def rows_of(config: DecoderConfig) -> int:
    """The rows of MaxText's embedding."""
    return VOCABULARY.get((config.family, config.vocab_size), config.vocab_size)


Array = Float32[np.ndarray, "..."]
PERIOD = 6
"""Layers of one step of MaxText's scan over Gemma 3."""
VOCABULARY = {("gemma2", 256_000): 256_128, ("gemma3", 262_208): 262_144}
"""A family and the rows of its published embedding -> rows of MaxText's: the others are zeros, or left out."""


@dataclass(frozen=True)
class Leaf:
    """One weight's name in MaxText, and how its values lie there."""

    path: str
    """Below `params`, or below its layer: `self_attention/query/kernel`."""
    scaled: bool = False
    """Whether it is multiplied by what scores are."""
    rotated: bool = False
    """Whether the two halves that rope turns together are interleaved (`neighbours`)."""
    offset: bool = False
    """Whether it is 1 + w."""
    embedding: type | None = None
    """The type that sqrt(D) is rounded to, by which it is multiplied; None where it is not."""
    turned: bool = False
    """Whether a matrix lies the other way round than here."""

    def there(self, x: Array, config: DecoderConfig) -> Array:
        """Our values -> MaxText's, in our layout."""
        if self.scaled:
            x = x * np.float32(config.scale)
        if self.embedding:
            x = x * np.float32(self.embedding(config.d_model**0.5))
        if self.offset:
            x = x + np.float32(1)
        if self.rotated and neighbours(config):
            x = np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)
        return x

    def back(self, x: Array, config: DecoderConfig) -> Array:
        """MaxText's values -> ours, in our layout."""
        if self.rotated and neighbours(config):
            x = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        if self.offset:
            x = x - np.float32(1)
        if self.embedding:
            x = x / np.float32(self.embedding(config.d_model**0.5))
        if self.scaled:
            x = x * np.float32(1 / config.scale)
        return x


def _leaves(
    query: Leaf, key: Leaf, norms: Mapping[str, str], embedding: type | None = None, **biases: str
) -> dict[str, Leaf]:
    """A family's weights by our names; `norms` and `biases` are those that not all families have. A Gemma, whose
    embedding is multiplied, has no head of its own in MaxText, and its norms are 1 + w."""
    gemma = embedding is not None
    matrices = {
        "q/w": query,
        "k/w": key,
        "v/w": Leaf("self_attention/value/kernel"),
        "o/w": Leaf("self_attention/out/kernel"),
        "gate/w": Leaf("mlp/wi_0/kernel"),
        "up/w": Leaf("mlp/wi_1/kernel"),
        "down/w": Leaf("mlp/wo/kernel"),
    }
    scales = {f"{ours}/w": Leaf(f"{theirs}/scale", offset=gemma) for ours, theirs in norms.items()}
    added = {f"{ours}/b": Leaf(f"self_attention/{theirs}/bias") for ours, theirs in biases.items()}
    return {
        "embed/w": Leaf("token_embedder/embedding", embedding=embedding),
        "norm/w": Leaf("decoder/decoder_norm/scale", offset=gemma),
        **({} if gemma else {"head/w": Leaf("decoder/logits_dense/kernel", turned=True)}),
        **{f"layers/{ours}": leaf for ours, leaf in {**matrices, **scales, **added}.items()},
    }


QUERY, KEY = Leaf("self_attention/query/kernel"), Leaf("self_attention/key/kernel")
SCALED_QUERY = replace(QUERY, scaled=True)
TWO = {"pre_attn_norm": "pre_self_attention_layer_norm", "pre_mlp_norm": "post_self_attention_layer_norm"}
FOUR = {
    "pre_attn_norm": "pre_self_attention_norm",
    "post_attn_norm": "post_self_attention_norm",
    "pre_mlp_norm": "pre_ffw_norm",
    "post_mlp_norm": "post_ffw_norm",
}
OF_HEADS = {"q_norm": "self_attention/query_norm", "k_norm": "self_attention/key_norm"}
LEAVES: Mapping[str, Mapping[str, Leaf]] = {
    "llama": _leaves(replace(SCALED_QUERY, rotated=True), replace(KEY, rotated=True), TWO),
    "gemma2": _leaves(SCALED_QUERY, KEY, FOUR, np.float32),
    "gemma3": _leaves(QUERY, KEY, FOUR | OF_HEADS, ml_dtypes.bfloat16),
    "qwen2": _leaves(QUERY, KEY, TWO, q="query", k="key", v="value"),
    "qwen3": _leaves(QUERY, KEY, TWO | OF_HEADS),
}
"""The families that can be converted -> their weights by our names."""


def checked_config(folder: Path, where: str) -> DecoderConfig:
    """The structure of a model that MaxText has a place for.

    Args:
        folder: has its config.json.
        where: what the message names.

    Raises:
        UserError: MaxText's mapping has no such family, or MaxText would compute the model in another way, whatever its
            settings are.
    """
    config = read_config(folder)
    family, none = config.family, (False,) * config.num_layers
    if family not in LEAVES:
        raise UserError(
            f"{where}: {family} has no table for MaxText, whose mapping we know of {', '.join(LEAVES)}; a new one is a "
            "line of tunix/interop/maxtext.py"
        )

    def refuse(why: str) -> NoReturn:
        raise UserError(f"{where}: {why}")

    if lost := [name for name in Model(config).shapes if name not in LEAVES[family]]:
        refuse(f"MaxText's {family} has no place for {', '.join(lost)} of this model")
    if (config.local_layers or none) != (FAMILIES[family].local(config.num_layers) or none):
        refuse(f"layer_types differ from the pattern of MaxText's {family}, which its code fixes")
    if family == "gemma2" and config.num_layers % 2:
        refuse(
            f"num_hidden_layers = {config.num_layers} is odd, and MaxText's gemma2 pairs a local with a global layer"
        )
    if family in ("gemma2", "gemma3") and config.norm_eps != GEMMAS_EPS:
        refuse(f"rms_norm_eps = {config.norm_eps}, and MaxText's {family} has {GEMMAS_EPS} in its code")
    wide = (config.d_model // config.num_heads) ** -0.5
    if family == "gemma3" and config.scale not in (config.head_dim**-0.5, wide):
        refuse(
            f"query_pre_attn_scalar is neither head_dim = {config.head_dim} nor hidden_size // num_attention_heads, "
            "and MaxText's gemma3 has no other"
        )
    rope, local = config.rope, config.rope_local
    if rope.kind not in ("default", "linear") and not neighbours(config):
        refuse(f"a rope of the type {rope.kind} is not one that we know MaxText's {family} to compute")
    numbers, fixed = ((x.factor, x.low_freq_factor, x.high_freq_factor, x.original_length) for x in (rope, LLAMA31))
    if neighbours(config) and numbers != fixed:
        refuse(
            "rope_parameters has the factors {:g}, {:g} and {:g} and the length {}, and MaxText has Llama 3.1's in its "
            "code: {:g}, {:g}, {:g} and {}".format(*numbers, *fixed)
        )
    if local is not None and local.kind != "default":
        refuse(f"the rope of its local layers is stretched, which that of MaxText's {family} is not")
    for each in (rope, local):
        if each is not None and each.theta % 1:
            refuse(f"rope_theta = {each.theta} is no whole number, which MaxText's has to be")
    return config


ROOT = "params/params/"
"""Where a train state of MaxText has its weights."""
TOWERS = ("vision_encoder/",)
"""Weights of other modalities, which are left out, as they are of a model folder."""
STACKS = ("decoder/layers/", "decoder/layers_remainder/")
"""What only a checkpoint of scanned layers has."""
TABLES_OF_WORDS = ("embed/w", "head/w")
"""Our parameters that have a row for each token of the vocabulary."""


@dataclass(frozen=True)
class Slot:
    """One array of a checkpoint, and what it is here."""

    name: str
    """Our parameter, e.g. `layers/q/w`."""
    layers: tuple[int | None, ...]
    """The layers that it holds, `(None,)` for none."""
    leaf: Leaf
    stacked: bool
    shape: tuple[int, ...]
    """In the checkpoint, e.g. `[D L N H]`."""
    ours: tuple[int, ...]
    """Shape of the weight here, in one layer, e.g. `[D N H]`."""


def slots(config: DecoderConfig, scanned: bool) -> dict[str, Slot]:
    """The arrays of a checkpoint by their paths below `params/params`.

    Args:
        config: of the model.
        scanned: whether layers are stacked.
    """
    number, family = config.num_layers, config.family
    # Where MaxText keeps layers together: what their paths below `decoder` begin with, what is added to the first part
    # of their weights' names, their numbers, and whether their weights are stacks, even of one layer.
    blocks: list[tuple[str, str, Sequence[int], bool]]
    if family == "gemma2":  # even layers are local, odd ones global
        kinds = ("_local", "_global")
        blocks = [(f"layers_{layer // 2}", kinds[layer % 2], [layer], False) for layer in range(number)]
        if scanned:
            blocks = [("layers", kinds[kind], range(kind, number, 2), True) for kind in range(2)]
    elif not scanned:
        blocks = [(f"layers_{layer}", "", [layer], False) for layer in range(number)]
    elif family == "gemma3":  # a scan over six layers at a time, and what is left over
        whole = number - number % PERIOD
        steps = PERIOD if whole else 0
        blocks = [(f"layers/layers_{place}", "", range(place, whole, PERIOD), True) for place in range(steps)]
        left = range(whole, number)
        blocks += [(f"layers_remainder/layers_{layer - whole}", "", [layer], False) for layer in left]
    else:
        blocks = [("layers", "", range(number), True)]
    arrays: dict[str, Slot] = {}
    for name, shape in Model(config).shapes.items():
        leaf = LEAVES[family][name]
        if not name.startswith("layers/"):
            there = (rows_of(config), *shape[1:]) if name in TABLES_OF_WORDS else shape
            arrays[leaf.path] = Slot(name, (None,), leaf, False, there[::-1] if leaf.turned else there, shape)
            continue
        ours, (first, _, rest) = shape[1:], leaf.path.partition("/")
        for prefix, suffix, layers, stacked in blocks:
            there = (ours[0], len(layers), *ours[1:]) if stacked else ours
            path = f"decoder/{prefix}/{first}{suffix}/{rest}"
            arrays[path] = Slot(name, tuple(layers), leaf, stacked, there, ours)
    return arrays


def export_maxtext(source: Path, out: Path, *, scanned: bool = True) -> str:
    """Writes a model folder as a checkpoint of MaxText, in float32: `out/0/items`, with config.json and the tokenizer
    in `out`, by which `import_maxtext` reads it back.

    Float32 is MaxText's own `weight_dtype`, and what its arithmetic needs: 1 + w in bfloat16 would keep little of a
    norm of Gemma.

    Args:
        source: the folder in Hugging Face's format.
        out: the new folder; must not exist, or be an empty one.
        scanned: whether layers are stacked, as MaxText has them by default (`scan_layers`).

    Returns:
        MaxText's settings for it: `load_parameters_path=out/0/items model_name=qwen3-0.6b ...`.

    Raises:
        UserError: the family has no table, a tensor is missing or misshapen, or something exists at `out`.
    """
    refuse_taken(out)
    config = checked_config(source, str(source))
    if has_score(source):
        raise reward_model(source)
    stored = named_tensors(source, config.family)
    check_tensors(stored, expected(config, Model(config).shapes), source)

    def array_of(slot: Slot) -> Array:
        array, tensor = np.zeros(slot.shape, np.float32), FAMILIES[config.family].tensors[slot.name]
        for place, layer in enumerate(slot.layers):
            read = tensor.read(stored[tensor.key(layer)].read(), slot.ours)
            ours = slot.leaf.there(read.astype(np.float32), config)
            there = array[:, place] if slot.stacked else array.T if slot.leaf.turned else array
            rows = min(len(ours), len(there))  # of a vocabulary MaxText may have more or fewer
            there[:rows] = ours[:rows]
        return array

    arrays = {
        ROOT + path: Deferred(slot.shape, np.dtype(np.float32), partial(array_of, slot))
        for path, slot in slots(config, scanned).items()
    }
    with atomic_folder(out) as folder:
        write_beside(folder, config, {**to_hf(config), "dtype": "float32"}, source)
        # As MaxText's own manager writes a step.
        tree = {**unflatten_dict(arrays, sep="/"), "step": 0, "opt_state": {}}
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(items=writing_handler())) as writer:
            writer.save(folder / STEP, ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
    name = NAMES[config.family]
    if neighbours(config):
        name = STRETCHED
    elif config.family == "gemma3" and config.scale != config.head_dim**-0.5:
        name = WIDE_SCORES
    settings: dict[str, str | int | float | bool] = {
        "load_parameters_path": f"{out}/{STEP}/{ITEMS}",
        "model_name": name,
        "override_model_config": True,
        "scan_layers": scanned,
        "base_num_decoder_layers": config.num_layers // (2 if config.family == "gemma2" else 1),
        "base_emb_dim": config.d_model,
        "base_num_query_heads": config.num_heads,
        "base_num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "base_mlp_dim": config.ffn,
        "vocab_size": rows_of(config),
        # It divides logits by sqrt(D) where the head is the embedding, unless told otherwise: right for Gemma, whose
        # embedding is multiplied by that.
        "logits_via_embedding": config.tied,
        "normalize_embedding_logits": config.scale_embeddings,
        "normalization_layer_epsilon": config.norm_eps,
        "rope_max_timescale": int(config.rope.theta),
        "rope_linear_scaling_factor": config.rope.factor if config.rope.kind == "linear" else 1.0,
        "attn_logits_soft_cap": config.attention_softcap or 0.0,
        "final_logits_soft_cap": config.logit_softcap or 0.0,
    }
    if config.window is not None:
        settings["sliding_window_size"] = config.window
    if config.rope_local is not None:
        settings["local_rope_max_timescale"] = int(config.rope_local.theta)
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()
    )


def import_maxtext(source: Path, out: Path, *, like: str | Path | None = None, dtype: DType | None = None) -> None:
    """Writes a checkpoint of MaxText as a model folder, which everything here and transformers read.

    Args:
        source: the folder of the arrays (`.../0/items`), of a step, or of all steps, of which the last is taken.
        out: the new folder; must not exist, or be an empty one.
        like: a model folder or hub id with the config.json and the tokenizer; None where they are in `source`.
        dtype: of the written weights; None keeps each array's own.

    Raises:
        UserError: there is no checkpoint or no config.json, the family has no table, arrays are missing, too many or
            misshapen, or something exists at `out`.
    """
    refuse_taken(out)
    if like is None and not (source / "config.json").is_file():
        raise UserError(
            f"{source} has no config.json, and a checkpoint of MaxText does not say what its model is: name a folder "
            "of the same model in Hugging Face's format, --like FOLDER"
        )
    like = source if like is None else resolve_folder(str(like))
    config = checked_config(like, str(like / "config.json"))
    arrays = Arrays(source)
    if not any(path.startswith(ROOT) for path in arrays.shapes):
        tops = some(sorted({path.partition("/")[0] for path in arrays.shapes})) or "nothing"
        raise UserError(f"{arrays.folder} holds {tops}, and no {ROOT}: it is no train state of MaxText")
    scanned = any(path.startswith(tuple(ROOT + stack for stack in STACKS)) for path in arrays.shapes)
    wanted = slots(config, scanned)
    there: dict[str, Stored] = {}
    for path, shape in arrays.shapes.items():
        name, kind = path.removeprefix(ROOT), str(arrays.dtypes[path])
        if path.startswith("params/") and not name.startswith(TOWERS):
            there[name] = Stored(source, name, shape, STORED_DTYPE.get(kind, kind), 0)
    shapes = {path: slot.shape for path, slot in wanted.items()}
    for path, slot in wanted.items():
        # A vocabulary may also be as long as the model's own.
        longer = slot.ours[::-1] if slot.leaf.turned else slot.ours
        if slot.name in TABLES_OF_WORDS and path in there and there[path].shape == longer:
            shapes[path] = longer
    hint = f"{like}/config.json describes the model; is it the same?"
    check_tensors(there, shapes, source, hint)
    if extra := sorted(there.keys() - wanted.keys()):
        raise UserError(f"{arrays.folder}: {len(extra)} array(s) have no place in the model: {some(extra)}. {hint}")
    written = dtype or str(arrays.dtypes[ROOT + LEAVES[config.family]["embed/w"].path])
    held: dict[str, np.ndarray] = {}

    def tensor_of(path: str, slot: Slot, place: int, tensor: Tensor, kind: str) -> np.ndarray:
        if path not in held:
            held.clear()  # each array is read once and let go of before the next
            held[path] = arrays.read(ROOT + path)
        whole, rows = held[path], slot.ours[0]
        layer = whole[:, place] if slot.stacked else whole.T if slot.leaf.turned else whole
        ours = slot.leaf.back(layer.astype(np.float32), config)
        if len(ours) != rows:
            ours = np.concatenate([ours[:rows], np.zeros((max(rows - len(ours), 0), *ours.shape[1:]), np.float32)])
        return tensor.write(ours).astype(kind)

    entries: list[Entry] = []
    for path, slot in wanted.items():
        kind, tensor = dtype or str(arrays.dtypes[ROOT + path]), FAMILIES[config.family].tensors[slot.name]
        for place, layer in enumerate(slot.layers):
            read, shape = partial(tensor_of, path, slot, place, tensor, kind), tensor.their_shape(slot.ours)
            entries.append(Entry(tensor.key(layer), shape, STORED_DTYPE[kind], partial(partial, read)))
    with shared_folder(out) as folder:
        write_beside(folder.path, config, {**to_hf(config), "dtype": written}, like)
        write_shards(folder, entries)
