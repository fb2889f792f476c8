"""Adapters in PEFT's format (https://huggingface.co/docs/peft): adapter_config.json and adapter_model.safetensors.

Our A and B keep the axes of the weight that they adapt (`[L D r]` and `[L r N H]` for q); PEFT flattens them
(`[r D]` and `[(N H) r]`, one pair in each layer). The layouts follow from the base's own. Of experts, PEFT's pair is
that of a parameter that holds all of them (`target_parameters`): `[(E r) D]` and `[(2 F) (r E)]` for gate and up, whose
wrapper is within that of down where both are adapted; `[(F 2) (r E)]` where gate and up take turns in the parameter
(`FamilyText.alternate`). That such a parameter has inputs before outputs changes nothing: A's inputs are the product's.
A reward model's adapter includes its scalar head, as PEFT's does for sequence classifiers, and tables that train are
saved whole.

Axes: L layers, r rank, D model width, N query heads, H head dim, E experts, F ffn width; 2 is gate and up.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from tunix.distributed import processes
from tunix.distributed.shared_folder import shared_folder
from tunix.errors import UserError
from tunix.hf.base_fingerprint import FILE, named_base
from tunix.hf.model_folder import STORED_DTYPE, copy_tokenizer, rename, write_generation_config
from tunix.hf.peft_config import CONFIG, described, text
from tunix.hf.safetensors_io import Entry, Stored, check_tensors, some, tensors_of_file, write_share
from tunix.hf.tensor_transfer import sent
from tunix.lora.adapt import plain_pairs, tables
from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.models.families.base import AXES, Tensor
from tunix.models.families.table import FAMILIES
from tunix.models.quantization.modules import BANKS

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
HEAD = "value/w"
LANGUAGE = "model.language_model."
"""Begins the names of the text part's modules in transformers' multimodal models."""


def save_adapter(
    path: Path,
    params: Mapping[str, jax.Array],
    adapter: AdapterConfig,
    config: DecoderConfig,
    base: str,
    scores: bool = False,
    fingerprint: str | None = None,
    tokenizer: Path | None = None,
    stops: Sequence[int] = (),
) -> None:
    """Writes a PEFT folder that loads on transformers' model of the family.

    Args:
        path: the new folder; must not exist, or be an empty folder.
        params: the adapter's weights and the tables that train with them; others are left out.
        adapter: the adapter's settings.
        config: the base model.
        base: hub id or path of the base model, where PEFT will look for it.
        scores: whether the value head is written too, as a reward model's.
        fingerprint: the base's (`hf.base_fingerprint.fingerprint`), if it is known.
        tokenizer: folder of a tokenizer that is not the base's, or has another chat template; None where it is the
            base's.
        stops: ids that end a completion; generation_config.json goes with the tokenizer.

    Raises:
        UserError: something is at `path`, or the disk refuses.
    """
    with shared_folder(path) as folder:
        with folder.in_step():
            if processes.lead() and fingerprint is not None:
                (folder.path / FILE).write_text(fingerprint, encoding="utf-8")
            if processes.lead():
                (folder.path / CONFIG).write_text(text(adapter, base, scores, config), encoding="utf-8")
            if processes.lead() and tokenizer is not None:
                copy_tokenizer(tokenizer, folder.path)
                write_generation_config(folder.path, (tokenizer,), stops, config.stops)
        write_share(folder, 0, WEIGHTS, list(_entries(params, adapter, config, scores)))


def load_adapter(folder: Path, config: DecoderConfig) -> tuple[AdapterConfig, dict[str, np.ndarray]]:
    """Reads a PEFT folder.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        config: the base model.

    Returns:
        The adapter's settings, and its arrays by our names, stacked over layers. A reward model's includes the value
        head; tables that were saved whole have the base's names.

    Raises:
        UserError: a file is missing or damaged, the adapter is of a kind that tunix does not compute, or its tensors do
            not fit the model.
    """
    adapter, scores = described(folder / CONFIG, config.tied)
    if not (folder / WEIGHTS).is_file():
        remedy = (
            "tunix loads no pickles: save it again with safe_serialization"
            if (folder / PICKLE).is_file()
            else "is it whole?"
        )
        raise UserError(f"{folder / WEIGHTS} is missing: {remedy}.")
    family = FAMILIES[config.family]
    stored = {
        rename(key.removeprefix(PREFIX), family.prefixes) or key: tensor
        for key, tensor in tensors_of_file(folder / WEIGHTS).items()
    }
    parts = _parts(adapter, config)
    whole = _whole(adapter, config, scores)
    wanted = {tensor.key(None): tensor.their_shape(shape) for tensor, shape in whole.values()}
    for tensor, shape in parts.values():
        wanted |= {tensor.key(layer): tensor.their_shape(shape) for layer in config.layers_with(tensor.mixer)}
    embed, head = family.tensors["embed/w"].name, family.tensors["head/w"].name
    if config.tied and adapter.also and head in stored:
        # A tied table may be there twice, as embedding and as head.
        copy = stored.pop(head)
        table = stored.setdefault(embed, copy)
        if table is not copy and (table.shape != copy.shape or not np.array_equal(table.read(), copy.read())):
            raise UserError(
                f"{folder / WEIGHTS}: {head} differs from {embed}, although the base's config.json ties them."
            )
    hint = f"Is this the base of the adapter? It names {named_base(folder) or 'none'}."
    check_tensors(stored, wanted, folder / WEIGHTS, hint)
    extra = sorted(set(stored) - set(wanted))
    if extra:
        raise UserError(f"{folder / WEIGHTS}: {len(extra)} tensor(s) have no place in this model: {some(extra)}.")
    arrays = {name: _read(stored[tensor.key(None)], tensor, shape) for name, (tensor, shape) in whole.items()}
    for name, (tensor, shape) in parts.items():
        layers = [_read(stored[tensor.key(layer)], tensor, shape) for layer in config.layers_with(tensor.mixer)]
        arrays[name] = np.stack(layers)
    return adapter, arrays


def _read(stored: Stored, tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    return tensor.read(stored.read(), shape)


Place = tuple[Tensor, tuple[int, ...]]
"""A parameter's tensor in a PEFT file, and its shape in our layout, in one layer."""


def _parts(adapter: AdapterConfig, config: DecoderConfig) -> dict[str, Place]:
    """The tensors of A, B and magnitudes. The layouts of A and B follow from that of the weight: its input axes are the
    last group of PEFT's layout."""
    family, tensors = FAMILIES[config.family], {}
    sizes = family.axes(config)
    modules = adapter.modules_of(config)
    for name, low in modules.items():
        if name in BANKS:
            continue
        base = family.tensors[f"layers/{name}/w"]
        output, inputs = re.findall(AXES, base.theirs)
        stem, of_x, of_y = base.name.removesuffix(".weight"), inputs.strip("()"), output.strip("()")
        layouts = {
            "a": Tensor(f"{stem}.lora_A.weight", f"r {inputs}", f"{of_x} r", base.mixer),
            "b": Tensor(f"{stem}.lora_B.weight", f"{output} r", f"r {of_y}", base.mixer, base.runs),
        }
        if adapter.dora:
            layouts["m"] = Tensor(f"{stem}.lora_magnitude_vector", output, of_y, base.mixer, base.runs)
        for letter, tensor in layouts.items():
            shape = tuple({**sizes, "r": low.rank}[axis] for axis in tensor.ours.split())
            tensors[f"layers/{name}/w_lora_{letter}"] = (tensor, shape)
    # PEFT wraps the parameters of a module of experts one after the other, down last.
    sizes = {**sizes, "F": config.ffn, "2": 2}
    inner = "base_layer." if "gates" in modules and "downs" in modules else ""
    both = "(F 2)" if family.alternate else "(2 F)"
    of_experts = {
        "gates": (inner, {"A": ("(E r) D", "E D r"), "B": (f"{both} (r E)", "E r 2 F")}),
        "downs": ("", {"A": ("(E r) F", "E F r"), "B": ("D (r E)", "E r D")}),
    }
    for name, (wrapper, layout) in of_experts.items():
        for letter, (theirs, ours) in layout.items() if name in modules else ():
            stem = f"model.layers.{{layer}}.{config.experts_module}"
            tensor = Tensor(f"{stem}.{wrapper}lora_{letter}.weight", theirs, ours)
            shape = tuple({**sizes, "r": modules[name].rank}[axis] for axis in ours.split())
            tensors[f"layers/{name}/w_lora_{letter.lower()}"] = (tensor, shape)
    return tensors


def _whole(adapter: AdapterConfig, config: DecoderConfig, scores: bool) -> dict[str, Place]:
    """The tensors that are saved whole: tables that train, and a reward model's head."""
    table = FAMILIES[config.family].tensors
    tensors = {name: (table[name], (config.vocab_size, config.d_model)) for name in tables(adapter, config)}
    return tensors | ({HEAD: (table[HEAD], (config.d_model,))} if scores else {})


def _entries(
    params: Mapping[str, jax.Array], adapter: AdapterConfig, config: DecoderConfig, scores: bool
) -> Iterator[Entry]:
    params = plain_pairs(dict(params), adapter)

    def entry(name: str, tensor: Tensor, layer: int | None) -> Entry:
        array = params[name]
        shape = array.shape if layer is None else array.shape[1:]
        place = () if layer is None else (config.layers_with(tensor.mixer).index(layer),)
        send = partial(sent, array, place, tensor.write, str(array.dtype))
        key = tensor.key(layer)
        key = key if config.vision is None else re.sub(r"^model\.", LANGUAGE, key)
        return Entry(PREFIX + key, tensor.their_shape(shape), STORED_DTYPE[str(array.dtype)], send)

    for name, (tensor, _) in _whole(adapter, config, scores).items():
        yield entry(name, tensor, None)
        if name == "embed/w" and config.tied and not scores:  # PEFT looks for both ends of a tied table
            yield entry(name, FAMILIES[config.family].tensors["head/w"], None)
    parts = _parts(adapter, config)
    for layer in range(config.num_layers):
        for name, (tensor, _) in parts.items():
            if layer in config.layers_with(tensor.mixer):
                yield entry(name, tensor, layer)
