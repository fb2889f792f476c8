"""Reads and writes Hugging Face model folders, tensor by tensor.

Reading: every tensor that the config requires is looked up and its shape checked before anything is read. Then
`tensor_transfer` brings them to the devices, a few at a time; a matrix that is quantized is rounded on the way, so that
the unrounded model is never in memory. Writing: the same way back, into an atomic folder.

A written folder gets the generation_config.json of the folder which training started from, with all ids at which the
trained turns end: transformers and vLLM stop at its `eos_token_id`, and read that of config.json only where there is no
such file. Tensors of that folder that do not train (`FamilyText.passengers`: the head of Qwen 3.5 that drafts tokens,
`mtp.`) are taken along as they were, whether they draft here or not.

A reward model's folder is transformers' sequence classifier with a single label. transformers scores the rightmost
token that is not padding, so the padding id must be one that no sequence ends with: where a folder pads with its
end-of-text token, as many do, the score would be that of the token before it. `padding` chooses another id, which
is set in the tokenizer's files too.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.config import DType
from tunix.data.tokenizer import GENERATION_CONFIG, eos_ids
from tunix.distributed import processes
from tunix.distributed.shared_folder import shared_folder
from tunix.errors import UserError
from tunix.hf.packed_weights import VALUES, split_experts, stack_experts, unpacked
from tunix.hf.picture_settings import write_settings
from tunix.hf.safetensors_io import Entry, Stored, check_tensors, local_copy, some, tensors_of_folder, write_shards
from tunix.hf.tensor_transfer import entry_of, load, packed_entries, places_of
from tunix.models.config import MTP, DecoderConfig, Stops, is_adapter, is_own
from tunix.models.families.base import SCORE
from tunix.models.families.table import FAMILIES, read_json, tensors_of, to_hf
from tunix.models.model import Model, Params
from tunix.models.quantization.formats import is_scale, tile_of
from tunix.models.quantization.modules import BANKS, modules_of
from tunix.models.quantization.rules import RULES_FILE, Rules
from tunix.models.quantization.schemes import SECTION, Packing, check_packs, section
from tunix.util.object_store import url_of


def write_generation_config(
    folder: Path, sources: Sequence[Path | None], stops: Sequence[int], special: Stops = ()
) -> None:
    """Writes a source's generation_config.json with every other field unchanged; only its `eos_token_id` grows.

    Args:
        folder: where it is written.
        sources: folders, of which the first that has the file is taken.
        stops: ids at which completions ended while the model was trained; without any the file is copied as it is.
        special: fields of config.json that the file begins with where no source has one, since nothing reads them
            there any more, e.g. `(("pad_token_id", 0),)`.

    Raises:
        UserError: the source's file is damaged.
    """
    files = [source / GENERATION_CONFIG for source in sources if source is not None]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        fields = {name: list(ids) if isinstance(ids, tuple) else ids for name, ids in special}
    else:
        fields = read_json(file)
    eos = eos_ids(fields, str(file))
    if file is not None and set(stops) <= set(eos):
        shutil.copyfile(file, folder / GENERATION_CONFIG)
    elif stops:
        ids = list(dict.fromkeys((*eos, *stops)))
        fields["eos_token_id"] = ids[0] if len(ids) == 1 else ids
        (folder / GENERATION_CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
LABEL = "reward"


def padding(config: DecoderConfig, files: Path | None) -> tuple[int | None, str | None]:
    """The padding of a reward model: the first that no sequence ends with of the folder's padding id, the tokenizer's
    padding token, any added token with `pad` in its name, and BOS.

    Args:
        config: has the special ids of the folder's config.json.
        files: folder of the tokenizer's files, or None.

    Returns:
        Its id, e.g. 0; None where no token is suitable: transformers then scores one sequence at a time. And its text,
        e.g. `<pad>`, where the tokenizer's files contain it.
    """
    stops = dict(config.stops)
    eos = stops.get("eos_token_id")
    ends = set(eos if isinstance(eos, tuple) else (eos,))
    read = {
        name: read_json(files / name) for name in (TOKENIZER, TOKENIZER_CONFIG) if files and (files / name).is_file()
    }
    added = {token["content"]: token["id"] for token in read.get(TOKENIZER, {}).get("added_tokens", [])}
    pad = read.get(TOKENIZER_CONFIG, {}).get("pad_token")
    padded = added.get(str(pad["content"] if isinstance(pad, Mapping) else pad))  # older folders write an object
    named = [number for token, number in added.items() if "pad" in token.lower()]
    candidates = (stops.get("pad_token_id"), padded, *named, stops.get("bos_token_id"))
    chosen = next((x for x in candidates if isinstance(x, int) and x >= 0 and x not in ends), None)
    return chosen, next((token for token, number in added.items() if number == chosen), None)


def rename(key: str, prefixes: Sequence[tuple[str, str | None]]) -> str | None:
    """A tensor's name by the first of these prefixes that it has; None where it belongs to a part that is left out."""
    for theirs, ours in prefixes:
        if key.startswith(theirs):
            return None if ours is None else ours + key.removeprefix(theirs)
    return key


CARD = "README.md"
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a tokenizer that an export copies from the folder that training started from."""

HARMLESS_BUFFERS = re.compile(r"(^|\.)rotary_emb\.inv_freq$|\.self_attn\.(bias|masked_bias)$")
"""Buffers that older folders contain although the model computes them."""

WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
"""What is taken of a folder from elsewhere: neither pickles nor code."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""Begins the names of a layer's tensors."""


def resolve_folder(path: str) -> Path:
    """The path of a local folder, of a hub id's snapshot (downloaded once, without pickles and code), or of the copy
    of a folder on an object store, such as `gs://bucket/model`, without its weights.

    Raises:
        UserError: there is no such folder, or the hub or the store cannot provide it.
    """
    if url := url_of(path):
        return local_copy(url, WANTED)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{path} is a file; a model is a folder with config.json and safetensors.")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path):
        raise UserError(f"{path}: there is no such folder.")
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=WANTED, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise UserError(
            f"{path} is gated: accept its terms at https://huggingface.co/{path}, then `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{path} is neither a folder here nor a model on the hub. Check the name; if private, `hf auth login`."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{path} is no folder here and the hub cannot be reached ({type(error).__name__}). "
            "Download it where there is a network and give the folder's path."
        ) from error


def load_params(model: Model, folder: Path, dtypes: Mapping[str, DType], mesh: Mesh) -> Params:
    """Loads a folder's weights onto the mesh in their target dtype; those that the model quantizes are rounded.

    Args:
        model: determines which tensors there must be; adapters, and a value head that is not in `dtypes`, are not part
            of the folder.
        folder: contains `model.safetensors`, or shards with their index.
        dtypes: dtype by name of the wanted parameters: all of the base, or some.
        mesh: where they are placed.

    Raises:
        UserError: a file is missing or damaged, or tensors are missing, too many, of another shape or dtype.
    """
    config, family = model.config, FAMILIES[model.config.family]
    stored = named_tensors(folder, config.family, pictures=config.vision is not None, mtp=config.mtp is not None)
    if model.has_lm_head and SCORE in stored:
        raise reward_model(folder)
    shapes = {
        name: shape
        for name, shape in model.shapes.items()
        if not is_scale(name) and (name in dtypes or not is_own(name))
    }
    wanted = expected(config, shapes)
    axes = "inputs, outputs" if family.alternate else "rows, columns"
    # A folder may have one tensor of all experts in place of one for each.
    stacks = (
        f"one that ends in {end} [experts, {axes}] holds {' and '.join(parts)}"
        for end, parts in family.stacked.items()
        if not end.endswith("_bias")
    )
    hint = f"Of all experts of a layer {', '.join(stacks)}." if family.stacked else ""
    check_tensors(stored, wanted, folder, hint)
    embed, head = family.tensors["embed/w"].name, family.tensors["head/w"].name
    extra = sorted(name for name in stored if name not in wanted and not family.spare(config, name))
    if head in extra and (config.tied or not model.has_lm_head):
        extra.remove(head)
        # A language model's head is not needed for scores.
        if model.has_lm_head and not stored[embed].same_values(stored[head]):
            raise UserError(
                f"{stored[head].file}: {head} differs from {embed}, although config.json ties them. "
                "Set tie_word_embeddings to false there, or remove the tensor."
            )
    if extra:
        reason = ""
        if any(int(at[1]) >= config.num_layers for name in extra if (at := LAYER.match(name))):
            reason = f" The files have more layers than num_hidden_layers = {config.num_layers}."
        raise UserError(f"{folder}: {len(extra)} tensor(s) that config.json has no place for: {some(extra)}.{reason}")
    return load(model, stored, dtypes, mesh)


def has_score(folder: Path) -> bool:
    """Whether a folder is a reward model's: whether it has a scalar head.

    Raises:
        UserError: it holds no weights, or a file is missing or damaged.
    """
    return SCORE in tensors_of_folder(folder)


def reward_model(folder: Path) -> UserError:
    """The error for a reward model's folder where a language model is needed."""
    return UserError(
        f"{folder} is a reward model: it has {SCORE} and gives scores, not words. Name it as reward.model, or go on "
        "training it with `algorithm: {name: reward}`"
    )


def named_tensors(folder: Path, family: str, pictures: bool = False, mtp: bool = False) -> dict[str, Stored]:
    """A folder's tensors by the names that a text-only model gives them; other modalities and buffers are left out.
    Packed matrices are included as the numbers that they stand for.

    Args:
        folder: has safetensors.
        family: whose prefixes the names have.
        pictures: whether the tensors of a tower that sees pictures are included.
        mtp: whether those of a head that drafts tokens are.

    Raises:
        UserError: it holds no weights, or a file is missing or damaged.
    """
    named: dict[str, Stored] = {}
    vision = FAMILIES[family].vision if pictures else None
    prefixes = FAMILIES[family].prefixes if vision is None else vision.prefixes
    if mtp:
        prefixes = [(theirs, ours) for theirs, ours in prefixes if theirs not in FAMILIES[family].passengers]
    for key, tensor in unpacked(tensors_of_folder(folder)).items():
        name = rename(key, prefixes)
        if name is not None and not HARMLESS_BUFFERS.search(name):
            named |= dict(split_experts(name, tensor, FAMILIES[family]))
    return named


def expected(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors that a folder must contain for our parameters -> their shapes in the file."""
    table, wanted = tensors_of(config), dict[str, tuple[int, ...]]()
    for name, shape in shapes.items():
        theirs = table[name].their_shape(shape[1:] if table[name].layered else shape)
        wanted |= dict.fromkeys(places_of(config, table[name], shape), theirs)
    return wanted


def save_folder(
    path: Path,
    config: DecoderConfig,
    params: Mapping[str, jax.Array],
    *,
    source: Path | None,
    dtype: DType | None,
    scores: bool = False,
    rules: Rules | None = None,
    packed: bool = False,
    base: Path | None = None,
    stops: Sequence[int] = (),
    card: str | None = None,
) -> None:
    """Writes a folder that transformers loads: config.json, safetensors, and the tokenizer's files of `source`.

    The folder appears complete or not at all. Few tensors at a time are on the host.

    Args:
        path: the new folder; must not exist, or be an empty folder.
        config: the model's structure.
        params: base weights only (call `lora.adapt.merge` first, where there are adapters).
        source: the folder that training started from, or None.
        dtype: dtype of the written weights; None keeps each weight's own.
        scores: whether the value head is written, as for a reward model; a critic's is not part of a language model.
        rules: how the weights are rounded, which the folder records; None where they are not.
        packed: whether the weights are rounded here and written in few bits.
        base: the folder that the weights were loaded from; tensors in it that its family has and that do not train
            are taken along (`FamilyText.passengers`). None for none.
        stops: ids that end a completion, which generation_config.json will contain.
        card: the text of README.md; None for none.

    Raises:
        UserError: something exists at `path`, the disk refuses a write, or a type has no packed format.
    """
    assert not any(map(is_adapter, params)), "merge the adapters first"
    params = {name: x for name, x in params.items() if scores or not is_own(name)}
    has_trained = config.mtp == "train" and not scores
    params = {name: x for name, x in params.items() if has_trained or not name.startswith(MTP)}
    family = FAMILIES[config.family]
    with shared_folder(path) as folder:
        packing: dict[str, Packing] = {}
        if packed:
            assert rules is not None, "packing follows rules"
            check_packs(rules)
            for ours, rule in rules.modules.items():
                name = f"layers/{ours}/w"
                if name in params:  # else it is a matrix of another family
                    outputs, inputs = family.tensors[name].outputs_first.their_shape(params[name].shape[1:])
                    packing[ours] = Packing(rule, (outputs, inputs), tile_of(inputs, rule.tile or inputs))
        along: list[Stored] = []
        if base is not None and not scores and not has_trained and family.passengers:
            along = [x for key, x in tensors_of_folder(base).items() if key.startswith(tuple(family.passengers))]
        with folder.in_step():
            fields = {**to_hf(config), "dtype": dtype or str(params["embed/w"].dtype)}
            if base is not None and (along or has_trained):
                raw = read_json(base / "config.json")
                raw = raw.get("text_config", raw)
                inside = fields if config.vision is None else fields["text_config"]
                inside |= {name: raw[name] for names in family.passengers.values() for name in names if name in raw}
            if processes.lead():
                if card is not None:
                    (folder.path / CARD).write_text(card, encoding="utf-8")
                write_beside(folder.path, config, fields, source, scores, rules, packing, stops, base)
                if config.vision is not None:
                    write_settings(folder.path, config.vision, [x for x in (source, base) if x is not None])
        # In the order of the model: embedding, layer by layer, norm, head.
        table, packed_by_name = tensors_of(config), {f"layers/{ours}/w": pack for ours, pack in packing.items()}
        ends = sorted((name for name in params if not table[name].layered), reverse=True)
        by_layer: list[tuple[float, Entry]] = []
        for name in (*(name for name in params if table[name].layered), *ends):
            tensor, array, layers = table[name], params[name], config.layers_with(table[name].mixer)
            for key, place in places_of(config, tensor, array.shape).items():
                layer = layers[place[0]] if tensor.layered else -1 if name == "embed/w" else math.inf
                if name in packed_by_name:
                    module, pack = key.removesuffix(VALUES), packed_by_name[name]
                    parts = packed_entries(module, array, place, tensor.outputs_first, pack)
                else:
                    parts = (entry_of(key, array, place, tensor, dtype or str(array.dtype)),)
                by_layer.extend((layer, part) for part in parts)
        entries = [entry for _, entry in sorted(by_layer, key=itemgetter(0))]
        if config.vision is not None and family.vision is not None:
            # A multimodal export keeps the names of the folder that the weights were loaded from.
            keys, written = () if base is None else tensors_of_folder(base), family.vision.written
            theirs = {rename(key, family.vision.prefixes): key for key in keys}
            entries = [replace(x, key=theirs.get(x.key) or str(rename(x.key, written))) for x in entries]
        if family.writes_stacked:
            entries = list(stack_experts(entries, family))
        entries += (Entry(x.key, x.shape, x.dtype, lambda x=x: x.read) for x in along)
        write_shards(folder, entries)


def write_beside(
    folder: Path,
    config: DecoderConfig,
    fields: dict[str, Any],
    source: Path | None,
    scores: bool = False,
    rules: Rules | None = None,
    packing: Mapping[str, Packing] | None = None,
    stops: Sequence[int] = (),
    base: Path | None = None,
) -> None:
    """Writes everything but the weights: config.json with these fields and more, generation_config.json, the
    tokenizer's files, the rules.

    Args:
        folder: where they are written.
        config: the model's structure.
        fields: of config.json, e.g. `{**to_hf(config), "dtype": "float32"}`; those of a classifier are added.
        source: the folder whose tokenizer files are copied; None for none.
        scores, rules: as in `save_folder`.
        packing: how matrices are packed, by our short names; None where none are.
        stops, base: as in `save_folder`.
    """
    if source is not None:
        copy_tokenizer(source, folder)
    write_generation_config(folder, (source, base), stops, config.stops)
    if scores:
        pad_id, pad_token = padding(config, source)
        fields |= {
            "architectures": [FAMILIES[config.family].classifier],
            "id2label": {"0": LABEL},
            "label2id": {LABEL: 0},
            "pad_token_id": pad_id,
        }
        file = folder / TOKENIZER_CONFIG
        if pad_token is not None and file.is_file():
            text = json.dumps({**read_json(file), "pad_token": pad_token}, indent=2, ensure_ascii=False) + "\n"
            file.write_text(text, encoding="utf-8")
    if rules is not None:
        stated = {**rules.model_dump(mode="json", include={"rules"}), "weights": "on their grid"}
        (folder / RULES_FILE).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    if packing:
        head = SCORE if scores else FAMILIES[config.family].tensors["head/w"].name
        table = tensors_of(config)
        modules = {name: ours for name, ours in modules_of(config).items() if not set(ours) & set(BANKS)}
        for name in BANKS if config.experts else ():  # under its name in a folder
            modules[table[f"layers/{name}/w"].name.partition("{layer}.")[2].removesuffix(f".{VALUES}")] = (name,)
        fields[SECTION] = section(packing, head.removesuffix(f".{VALUES}"), modules)
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the files of a folder's tokenizer."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
