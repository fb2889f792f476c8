"""MaxText's checkpoints: a model folder becomes one, and one becomes a model folder, an array at a time.

A checkpoint is an Orbax tree `params/params/...` of a train state (`orbax_arrays`); `maxtext_tables` has the names and
the arithmetic. Both ways the arrays that there must be are known before any is read: those that are missing, too many
or of another shape are named.

Axes: V vocabulary, D model width, L layers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tunix.config import DType
from tunix.distributed.shared_folder import shared_folder
from tunix.errors import UserError
from tunix.hf.model_folder import STORED_DTYPE, expected, has_score, named_tensors, reward_model, write_beside
from tunix.hf.safetensors_io import Entry, Stored, check_tensors, some, write_shards
from tunix.interop.maxtext_settings import settings_of
from tunix.interop.maxtext_tables import TABLES, Array, Leaf, Table, table_of
from tunix.interop.orbax_arrays import ITEMS, STEP, Arrays, Deferred, nested, write_step
from tunix.models.config import DecoderConfig
from tunix.models.families.base import Tensor
from tunix.models.families.table import FAMILIES, read_config, to_hf
from tunix.models.model import Model
from tunix.util.atomic_io import atomic_folder, refuse_taken

ROOT = "params/params/"
"""Where a train state of MaxText has its weights."""
TOWERS = ("vision_encoder/",)
"""Weights of other modalities, which are left out, as they are of a model folder."""
STACKS = ("decoder/layers/", "decoder/layers_remainder/")
"""What only a checkpoint of scanned layers has."""
TABLES_OF_WORDS = ("embed/w", "head/w")
"""Our parameters that have a row for each token of the vocabulary."""
SHARD = 5 << 30


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
    own: tuple[int, ...]
    """Shape of the weight here, in one layer, e.g. `[D N H]`."""


def slots(config: DecoderConfig, table: Table, scanned: bool) -> dict[str, Slot]:
    """The arrays of a checkpoint by their paths below `params/params`.

    Args:
        config: of the model.
        table: of its family.
        scanned: whether layers are stacked.
    """
    found: dict[str, Slot] = {}
    for name, shape in Model(config).shapes.items():
        leaf = table.leaves[name]
        if not name.startswith("layers/"):
            there = (table.rows(config), *shape[1:]) if name in TABLES_OF_WORDS else shape
            found[leaf.path] = Slot(name, (None,), leaf, False, there[::-1] if leaf.turned else there, shape)
            continue
        for block in table.blocks(config.num_layers, scanned):
            first, _, rest = leaf.path.partition("/")
            own = shape[1:]
            whole = (own[0], len(block.layers), *own[1:]) if block.stacked else own
            path = f"decoder/{block.prefix}/{first}{block.suffix}/{rest}"
            found[path] = Slot(name, block.layers, leaf, block.stacked, whole, own)
    return found


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
    config = read_config(source)
    if has_score(source):
        raise reward_model(source)
    shapes = Model(config).shapes
    table = table_of(config, list(shapes), str(source))
    stored = named_tensors(source, config.family)
    check_tensors(stored, expected(config, shapes), source)
    arrays = {
        ROOT + path: Deferred(slot.shape, np.dtype(np.float32), partial(_stack, slot, config, stored))
        for path, slot in slots(config, table, scanned).items()
    }
    with atomic_folder(out) as folder:
        write_beside(folder, config, {**to_hf(config), "dtype": "float32"}, source)
        write_step(folder, {**nested(arrays), "step": 0, "opt_state": {}})
    return _settings(config, out, scanned)


def _stack(slot: Slot, config: DecoderConfig, stored: Mapping[str, Stored]) -> Array:
    """An array of a checkpoint, from the tensors of a model folder."""
    found = np.zeros(slot.shape, np.float32)
    for place, layer in enumerate(slot.layers):
        tensor = _tensor(config, slot)
        read = tensor.read(stored[tensor.key(layer)].read(), slot.own)
        ours = slot.leaf.change.there(read.astype(np.float32), config)
        there = found[:, place] if slot.stacked else found.T if slot.leaf.turned else found
        rows = min(len(ours), len(there))  # of a vocabulary MaxText may have more or fewer
        there[:rows] = ours[:rows]
    return found


def import_maxtext(source: Path, out: Path, *, like: Path | None = None, dtype: DType | None = None) -> None:
    """Writes a checkpoint of MaxText as a model folder, which everything here and transformers read.

    Args:
        source: the folder of the arrays (`.../0/items`), of a step, or of all steps, of which the last is taken.
        out: the new folder; must not exist, or be an empty one.
        like: a model folder with the config.json and the tokenizer; None where they are in `source`.
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
    like = like or source
    config = read_config(like)
    table = table_of(config, list(Model(config).shapes), str(like / "config.json"))
    arrays = Arrays(source)
    if not any(path.startswith(ROOT) for path in arrays.shapes):
        tops = some(sorted({path.partition("/")[0] for path in arrays.shapes})) or "nothing"
        raise UserError(f"{arrays.folder} holds {tops}, and no {ROOT}: it is no train state of MaxText")
    scanned = any(path.startswith(tuple(ROOT + one for one in STACKS)) for path in arrays.shapes)
    wanted = slots(config, table, scanned)
    _check(arrays, wanted, like)
    written = dtype or str(arrays.dtypes[ROOT + table.leaves["embed/w"].path])
    with shared_folder(out) as folder:
        write_beside(folder.path, config, {**to_hf(config), "dtype": written}, like)
        write_shards(folder, list(_entries(arrays, wanted, config, dtype)), SHARD)


def _check(arrays: Arrays, wanted: Mapping[str, Slot], like: Path) -> None:
    """Raises UserError unless the arrays are those of the model, in their shapes and in a dtype that weights have."""
    there = {
        path.removeprefix(ROOT): shape
        for path, shape in arrays.shapes.items()
        if path.startswith("params/") and not path.removeprefix(ROOT).startswith(TOWERS)
    }
    reads = f"{like}/config.json describes the model; is it the same?"
    if missing := [path for path in wanted if path not in there]:
        raise UserError(f"{arrays.folder}: {len(missing)} array(s) are missing: {some(missing)}. {reads}")
    if extra := sorted(path for path in there if path not in wanted):
        raise UserError(f"{arrays.folder}: {len(extra)} array(s) have no place in the model: {some(extra)}. {reads}")
    wrong = [path for path, slot in wanted.items() if not _fits(slot, there[path])]
    if wrong:
        found = "; ".join(f"{path} expected {wanted[path].shape}, found {there[path]}" for path in wrong[:3])
        raise UserError(f"{arrays.folder}: {len(wrong)} array(s) have another shape: {found}. {reads}")
    foreign = [path for path in wanted if str(arrays.dtypes[ROOT + path]) not in STORED_DTYPE]
    if foreign:
        kind = arrays.dtypes[ROOT + foreign[0]]
        raise UserError(
            f"{arrays.folder}: {len(foreign)} array(s) are {kind}: {some(foreign)}. Only {', '.join(STORED_DTYPE)} are "
            "read"
        )


def _fits(slot: Slot, shape: tuple[int, ...]) -> bool:
    """Whether an array has its shape; a vocabulary may also be as long as the model's own."""
    longer = slot.own[::-1] if slot.leaf.turned else slot.own
    return shape == slot.shape or (slot.name in TABLES_OF_WORDS and shape == longer)


def _entries(arrays: Arrays, wanted: Mapping[str, Slot], config: DecoderConfig, dtype: DType | None) -> Iterator[Entry]:
    """The tensors to write, array by array: each is read once and let go of before the next."""
    reader = _OneAtATime(arrays)
    for path, slot in wanted.items():
        kind = dtype or str(arrays.dtypes[ROOT + path])
        tensor = _tensor(config, slot)
        for place, layer in enumerate(slot.layers):
            make = partial(_single, reader, path, slot, place, config, kind)
            shape = tensor.their_shape(slot.own)
            yield Entry(tensor.key(layer), shape, STORED_DTYPE[kind], partial(partial, make))


def _single(reader: "_OneAtATime", path: str, slot: Slot, place: int, config: DecoderConfig, kind: str) -> np.ndarray:
    """A tensor of a model folder, from an array of a checkpoint."""
    whole = reader.read(ROOT + path)
    own = whole[:, place] if slot.stacked else whole.T if slot.leaf.turned else whole
    ours = slot.leaf.change.back(own.astype(np.float32), config)
    rows = slot.own[0]
    if len(ours) != rows:
        ours = np.concatenate([ours[:rows], np.zeros((max(rows - len(ours), 0), *ours.shape[1:]), np.float32)])
    return _tensor(config, slot).write(ours).astype(kind)


class _OneAtATime:
    """Reads arrays, and keeps the last one: the tensors of its layers are asked for one after the other."""

    def __init__(self, arrays: Arrays):
        self._arrays, self._path, self._value = arrays, "", np.empty(0)

    def read(self, path: str) -> np.ndarray:
        if path != self._path:
            self._value = np.empty(0)  # let go of before the next is read
            self._path, self._value = path, self._arrays.read(path)
        return self._value


def _tensor(config: DecoderConfig, slot: Slot) -> Tensor:
    return FAMILIES[config.family].tensors[slot.name]


def _settings(config: DecoderConfig, out: Path, scanned: bool) -> str:
    """MaxText's settings for a checkpoint, as they are written in a shell."""
    settings = {
        "load_parameters_path": f"{out}/{STEP}/{ITEMS}",
        **settings_of(config, TABLES[config.family].rows(config), scanned),
    }
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()
    )
