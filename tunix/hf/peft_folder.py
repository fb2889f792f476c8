"""Adapters in PEFT's format (https://huggingface.co/docs/peft): adapter_config.json, adapter_model.safetensors, and
beside them tunix_base.json, which says what base the adapter belongs to.

Every field of adapter_config.json that would change what the adapter computes is either understood or refused by name.

The base is known by a few numbers of every matrix, saved with the adapter and compared at loading. The file also says
how the base was rounded when the adapter was trained (QLoRA), so that it is rounded in the same way under it. Numbers
are compared by their distance and not as a digest, because a base that was saved again in another dtype is the same
base, and a fine-tuned version of it may be intended. So equal weights pass, changed ones cause a note, and only
unrelated weights are refused. An adapter that another tool wrote has no numbers: it only names its base.

Our A and B keep the axes of the weight that they adapt (`[L D r]` and `[L r N H]` for q); PEFT flattens them
(`[r D]` and `[(N H) r]`, one pair in each layer). The layouts follow from the base's own. Of experts, PEFT's pair is
that of a parameter that holds all of them (`target_parameters`): `[(E r) D]` and `[(2 F) (r E)]` for gate and up, whose
wrapper is within that of down where both are adapted; `[(F 2) (r E)]` where gate and up take turns in the parameter
(`FamilyText.alternate`). That such a parameter has inputs before outputs changes nothing: A's inputs are the product's.
A reward model's adapter includes its scalar head, as PEFT's does for sequence classifiers, and tables that train are
saved whole.

Axes: L layers, r rank, D model width, N query heads, H head dim, E experts, F ffn width; 2 is gate and up.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float

from tunix.distributed import processes
from tunix.distributed.shared_folder import shared_folder
from tunix.errors import UserError
from tunix.hf.model_folder import CARD, copy_tokenizer, named_tensors, rename, reward_model, write_generation_config
from tunix.hf.safetensors_io import DTYPES, Entry, check_tensors, some, tensors_of_file, write_share
from tunix.hf.tensor_transfer import entry_of, places_of
from tunix.lora.adapt import plain_pairs, quantization
from tunix.lora.config import TABLES, AdapterConfig, Table
from tunix.models.config import DecoderConfig
from tunix.models.families.base import AXES, SCORE, Tensor
from tunix.models.families.hf_config import Fields
from tunix.models.families.table import FAMILIES, read_json
from tunix.models.quantization.formats import Quantization
from tunix.models.quantization.modules import (
    BANKS,
    EXPERTS,
    MODULES,
    PROJECTIONS,
    matched,
    modules_of,
    projections_of,
    short,
)

CONFIG = "adapter_config.json"
TASKS = {False: "CAUSAL_LM", True: "SEQ_CLS"}
"""PEFT's task types, by whether the model is a reward model."""
HEADS = (SCORE.removesuffix(".weight"), "classifier")
"""Names of the scalar head that a reward model's adapter saves whole: the one we write, and PEFT's alternative."""

HARMLESS = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",  # a tied table is one here anyway
    "inference_mode",
    "lora_dropout",  # only while training, and its training is over
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
"""Fields of adapter_config.json that do not affect what the adapter computes."""

OF_LANGUAGE = r"(.*\.)?(language_model|model)\.layers\.\d+\.\w+\.(%s)"
"""A pattern of the text part's modules in a multimodal model, and in a model of text alone."""


class Described(NamedTuple):
    """The content of an adapter_config.json."""

    adapter: AdapterConfig
    scores: bool
    """Whether the adapter is a reward model's, which includes its scalar head."""


def described(file: Path, tied: bool) -> Described:
    """Reads an adapter_config.json.

    Args:
        file: its path.
        tied: whether the base's head is its embedding.

    Raises:
        UserError: it is missing or damaged, or describes a kind that tunix does not support.
    """
    fields = Fields(read_json(file), file)
    if fields.get("peft_type") != "LORA":
        fields.refuse("peft_type", "is not supported; only LORA is.")
    if fields.get("task_type") not in (*TASKS.values(), None):
        fields.refuse("task_type", f"is not supported; {' and '.join(TASKS.values())} are.")
    if fields.get("bias", "none") != "none":
        fields.refuse("bias", "is not supported; only 'none' is.")
    if fields.get("init_lora_weights", True) not in (True, False, "gaussian"):
        fields.refuse("init_lora_weights", "changes the base's weights; convert the adapter to a plain LoRA first.")
    for name, kinds in (("r", int), ("lora_alpha", int | float)):
        if not _positive(fields.get(name), kinds):
            fields.refuse(name, "must be a positive number.")
    # Matrices of experts are parameters, which PEFT finds by the ends of their names.
    ends = fields.get("target_parameters") or []
    experts = {name: f"model.layers.0.mlp.{name}" for name in PROJECTIONS if name.startswith(EXPERTS)}
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        fields.refuse("target_parameters", "must be a list of names of parameters.")
    foreign = sorted(end for end in ends if not any(name.endswith(f".{end}") for name in experts.values()))
    if foreign:
        fields.refuse("target_parameters", f"has {some(foreign)}; tunix adapts only {', '.join(experts)}.")
    parameters = tuple(x for x, name in experts.items() if any(name.endswith(f".{end}") for end in ends))
    modules: tuple[str, ...] = ()
    asked = fields.get("target_modules")
    if asked or not parameters:
        patterns = [".*"] if asked == "all-linear" else [asked] if isinstance(asked, str) else asked
        if not isinstance(patterns, list) or not patterns or not all(isinstance(name, str) for name in patterns):
            fields.refuse("target_modules", f"must be a list of module names, of {', '.join(PROJECTIONS)}.")
        if asked is patterns and (foreign := sorted(set(patterns) - set(PROJECTIONS) - set(MODULES))):
            fields.refuse("target_modules", f"has {some(foreign)}; tunix adapts only {', '.join(PROJECTIONS)}.")
        try:
            adapted = {name for pattern in patterns for name in matched(pattern)}
        except ValueError as error:
            fields.refuse("target_modules", f"is not supported: {error}.")
        modules = tuple(name for name in PROJECTIONS if name in adapted and not name.startswith(EXPERTS))
    targets = modules + parameters
    scores = fields.get("task_type") == TASKS[True]

    def kept(name: str, kinds: Any) -> dict[str, Any]:
        """The patterns of a field that match an adapted module; PEFT ignores others."""
        patterns = {}
        for pattern, value in (fields.get(name) or {}).items():
            if not _positive(value, kinds):
                fields.refuse(name, f"gives {pattern!r} the value {value!r}; it must be a positive number.")
            try:
                means = matched(pattern)
            except ValueError as error:
                fields.refuse(name, f"is not supported: {error}.")
            if set(means) & set(targets):
                patterns[pattern] = value
            # A pattern of ours does not take `down_proj` for that of experts.
            for expert in (name for name in targets if name.startswith(EXPERTS) and name not in means):
                if re.fullmatch(rf"(.*\.)?({pattern})", f"model.layers.0.mlp.{expert}"):
                    patterns.setdefault(expert, value)
        return patterns

    ranks, alphas = kept("rank_pattern", int), kept("alpha_pattern", int | float)
    # The tables that it saves whole; PEFT itself adds `model.embed_tokens` where the head is tied to it.
    saved = {name.split(".")[-1] for name in fields.get("modules_to_save") or ()}
    if scores and not saved & set(HEADS):
        fields.refuse("modules_to_save", f"is not supported for scores; {[HEADS[0]]} is.")
    if not saved <= {*TABLES, *(HEADS if scores else ())}:
        fields.refuse("modules_to_save", f"is not supported; tunix trains {' and '.join(TABLES)} whole.")
    tables: tuple[Table, ...] = tuple(name for name in TABLES if name in saved)
    if tied and not fields.raw.get("ensure_weight_tying") and len(tables) == 1 and not scores:
        fields.refuse("modules_to_save", "unties the head from the embedding, which config.json ties: save both.")
    rslora, dora = bool(fields.get("use_rslora")), bool(fields.get("use_dora"))
    for name in sorted(set(fields.raw) - fields.read - set(HARMLESS)):
        if fields.raw[name]:
            fields.refuse(name, "is not supported: tunix would compute another model.")
    rank, alpha = fields.get("r"), float(fields.get("lora_alpha"))
    adapter = AdapterConfig(
        rank=rank, alpha=alpha, ranks=ranks, alphas=alphas, rslora=rslora, dora=dora, targets=targets, also=tables
    )
    return Described(adapter, scores)


def _positive(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


FILE = "tunix_base.json"
"""File in the adapter's folder, next to adapter_config.json; PEFT ignores it."""
VALUES = 8
"""How many numbers of each matrix are compared."""
SAME = 0.02
"""Distance up to which two bases count as the same: bfloat16 changes numbers by 0.2 %, eight bits by 1 %."""
UNRELATED = 0.5
"""Distance from which two bases are unrelated: independent weights are 1.2 apart, fine-tuned ones below 0.3."""

Numbers = Float[np.ndarray, "matrices 8"]


class BaseFingerprint(NamedTuple):
    """What an adapter's folder says about its base."""

    base: str
    """Name of the base: a hub id or a path, e.g. `meta-llama/Llama-3.2-1B`."""
    rounding: Quantization | None
    """How the base's matrices were rounded; None where they were not, or another tool wrote the adapter."""
    numbers: Numbers | None
    """A few numbers of each matrix of the base; None where another tool wrote the adapter."""


def fingerprint(name: str, folder: Path, config: DecoderConfig, rounding: Quantization | None) -> str:
    """The content of FILE for adapters of a base, as JSON text.

    Args:
        name: hub id or path of the base.
        folder: the folder with its weights.
        config: its structure.
        rounding: how the weights are rounded while the adapter trains on them; None where they are not.

    Raises:
        UserError: the folder's files are missing or damaged.
    """
    numbers = _numbers(folder, config)
    assert numbers is not None, "the base was loaded, so its tensors are there"
    encoded = base64.b64encode(numbers.astype(ml_dtypes.bfloat16).tobytes()).decode()
    rounded = None if rounding is None else {"base": rounding.base, "tile": rounding.tile}
    content = {"base": name, "rounded": rounded, "matrices": len(numbers), "numbers": encoded}
    return json.dumps(content, indent=2) + "\n"


def named_base(adapter: Path) -> str:
    """The base that a PEFT folder names; empty where it names none."""
    return str(read_json(adapter / CONFIG).get("base_model_name_or_path") or "")


def fingerprint_of(adapter: Path) -> BaseFingerprint:
    """What an adapter's folder says about its base.

    Raises:
        UserError: the fingerprint in the folder is damaged.
    """
    if not (adapter / FILE).is_file():
        return BaseFingerprint(named_base(adapter), None, None)
    content = read_json(adapter / FILE)
    try:
        numbers = np.frombuffer(base64.b64decode(content["numbers"], validate=True), ml_dtypes.bfloat16)
        rounded = content.get("rounded")
        rounding = None if rounded is None else quantization(AdapterConfig.model_validate({"kind": "qlora", **rounded}))
        return BaseFingerprint(str(content["base"]), rounding, numbers.astype(np.float32).reshape(-1, VALUES))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UserError(f"{adapter / FILE} is damaged ({error}): copy the adapter again, or remove this file") from None


def foreign_base(adapter: Path, name: str, folder: Path, config: DecoderConfig) -> str:
    """A note to the user where an adapter may belong to another base than the one it is loaded on; empty if not.

    Args:
        adapter: a PEFT folder.
        name: hub id or path of the base that it is loaded on.
        folder: the folder with that base's weights.
        config: that base's structure.

    Raises:
        UserError: it belongs to weights that have nothing in common with these.
    """
    known = fingerprint_of(adapter)
    numbers = None if known.numbers is None else _numbers(folder, config)
    # Where the shapes differ, loading reports which of the two does not fit.
    if known.numbers is None or numbers is None or numbers.shape != known.numbers.shape:
        # Names are compared by their last part: folders are often moved, but rarely renamed.
        if not known.base or Path(known.base).name == Path(name).name:
            return ""
        return (
            f"note: {adapter} was trained on {known.base} and is put on {name}: their shapes fit, their weights may not"
        )
    moved = distance(known.numbers, numbers)
    if moved <= SAME:
        return ""
    now = f"is put on {name}" if known.base != name else "its weights are others now"
    if moved < UNRELATED:
        return f"note: {adapter} was trained on {known.base} and {now}: the matrices have moved by {moved:.0%}"
    raise UserError(
        f"{adapter} was trained on {known.base} and {now}: the shapes fit, but the matrices have nothing in common. "
        f"Give it the base that it was trained on; if these weights are meant, remove {adapter / FILE}"
    )


def distance(a: Numbers, b: Numbers) -> float:
    """Mean over the matrices of `|a - b| / max(|a|, |b|)`: 0 for equal bases, about 1.2 for independent ones."""
    size = np.maximum(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    return float(np.mean(np.linalg.norm(a - b, axis=1) / np.maximum(size, np.finfo(np.float32).tiny)))


def _numbers(folder: Path, config: DecoderConfig) -> Numbers | None:
    """A few numbers of every matrix's middle row, evenly spaced, from the files; None where a matrix is missing or
    unusual (loading reports it)."""
    stored, table = named_tensors(folder, config.family), FAMILIES[config.family].tensors
    wanted = [table["embed/w"].name]
    # Without those of experts, which are most of a mixture's tensors.
    names = [f"layers/{name}/w" for ours in projections_of(config).values() for name in ours if name not in BANKS]
    matrices = [table[name] for name in names if name in table]
    wanted += [x.key(n) for n in range(config.num_layers) for x in matrices if n in config.layers_with(x.mixer)]
    if not all(key in stored and len(stored[key].shape) == 2 and stored[key].dtype in DTYPES for key in wanted):
        return None
    numbers = []
    for key in wanted:
        rows, columns = stored[key].shape
        (row,) = stored[key].read(rows // 2, rows // 2 + 1)
        numbers.append(row[np.linspace(0, columns - 1, VALUES).astype(int)].astype(np.float32))
    return np.stack(numbers)


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
    card: str | None = None,
) -> None:
    """Writes a PEFT folder that loads on transformers' model of the family.

    Args:
        path: the new folder; must not exist, or be an empty folder.
        params: the adapter's weights and the tables that train with them; others are left out.
        adapter: the adapter's settings.
        config: the base model.
        base: hub id or path of the base model, where PEFT will look for it.
        scores: whether the value head is written too, as a reward model's.
        fingerprint: the base's (`fingerprint`), if it is known.
        tokenizer: folder of a tokenizer that is not the base's, or has another chat template; None where it is the
            base's.
        stops: ids that end a completion; generation_config.json goes with the tokenizer.
        card: the text of README.md; None for none.

    Raises:
        UserError: something is at `path`, or the disk refuses.
    """
    parts, pairs = _parts(adapter, config, scores), plain_pairs(dict(params))
    tensors = [(name, tensor) for name, (tensor, _) in parts.items()]
    if "embed/w" in parts and config.tied and not scores:  # PEFT looks for both ends of a tied table
        tensors.append(("embed/w", FAMILIES[config.family].tensors["head/w"]))
    by_layer: list[tuple[int, Entry]] = []
    for name, tensor in tensors:
        for key, place in places_of(config, tensor, pairs[name].shape).items():
            key = PREFIX + (key if config.vision is None else re.sub(r"^model\.", LANGUAGE, key))
            layer = config.layers_with(tensor.mixer)[place[0]] if tensor.layered else -1
            by_layer.append((layer, entry_of(key, pairs[name], place, tensor, str(pairs[name].dtype))))
    entries = [entry for _, entry in sorted(by_layer, key=itemgetter(0))]  # tables, then layer by layer
    targeted = adapter.targeted_in(config)
    # PiSSA is written as the equivalent plain adapter of twice the rank, with alphas that keep its scale.
    wider = 2 if adapter.start == "pissa" else 1
    louder = math.sqrt(wider) if adapter.rslora else wider
    # PEFT's pattern `down_proj` would match the experts' too.
    called = {short(name): name if config.experts else short(name) for name in modules_of(config)}
    ranks = {called[name]: adapter.modules[PROJECTIONS[name][0]].rank for name in targeted}
    alphas = {called[name]: adapter.alpha_of(name) for name in targeted}
    modules = [name for name in targeted if not name.startswith(EXPERTS)]
    whole = ["embed_tokens"] if config.tied and adapter.also else list(adapter.also)
    fields = {
        "peft_type": "LORA",
        "task_type": TASKS[scores],
        "modules_to_save": whole + ([HEADS[0]] if scores else []) or None,
        "ensure_weight_tying": config.tied and bool(adapter.also),
        "base_model_name_or_path": base,
        "r": wider * adapter.rank,
        "lora_alpha": louder * adapter.alpha,
        "rank_pattern": {name: wider * rank for name, rank in ranks.items() if rank != adapter.rank},
        "alpha_pattern": {name: louder * alpha for name, alpha in alphas.items() if alpha != adapter.alpha},
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        # A tower has modules of the same names.
        "target_modules": modules if config.vision is None else OF_LANGUAGE % "|".join(modules),
        "target_parameters": [called[name] for name in targeted if name.startswith(EXPERTS)] or None,
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with shared_folder(path) as folder:
        with folder.in_step():
            if processes.lead():
                text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
                (folder.path / CONFIG).write_text(text, encoding="utf-8")
                if card is not None:
                    (folder.path / CARD).write_text(card, encoding="utf-8")
                if fingerprint is not None:
                    (folder.path / FILE).write_text(fingerprint, encoding="utf-8")
                if tokenizer is not None:
                    copy_tokenizer(tokenizer, folder.path)
                    write_generation_config(folder.path, (tokenizer,), stops, config.stops)
        write_share(folder, 0, WEIGHTS, entries)


def load_adapter(
    folder: Path, config: DecoderConfig, *, lm_head: bool = False
) -> tuple[AdapterConfig, dict[str, np.ndarray]]:
    """Reads a PEFT folder.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        config: the base model.
        lm_head: whether a language model is needed, which a reward model's adapter is refused for.

    Returns:
        The adapter's settings, and its arrays by our names, stacked over layers. A reward model's includes the value
        head; tables that were saved whole have the base's names.

    Raises:
        UserError: a file is missing or damaged, the adapter is of a kind that tunix does not compute, or its tensors do
            not fit the model; or it is a reward model's and a language model is needed.
    """
    adapter, scores = described(folder / CONFIG, config.tied)
    if not (folder / WEIGHTS).is_file():
        pickled = "tunix loads no pickles: save it again with safe_serialization"
        remedy = pickled if (folder / PICKLE).is_file() else "is it whole?"
        raise UserError(f"{folder / WEIGHTS} is missing: {remedy}.")
    family = FAMILIES[config.family]
    stored = {
        rename(key.removeprefix(PREFIX), family.prefixes) or key: tensor
        for key, tensor in tensors_of_file(folder / WEIGHTS).items()
    }
    if lm_head and scores:
        raise reward_model(folder)
    parts = _parts(adapter, config, scores)
    keys = {name: list(places_of(config, tensor, shape)) for name, (tensor, shape) in parts.items()}
    wanted = {key: tensor.their_shape(shape) for name, (tensor, shape) in parts.items() for key in keys[name]}
    embed, head = family.tensors["embed/w"].name, family.tensors["head/w"].name
    if config.tied and adapter.also and head in stored:
        # A tied table may be there twice, as embedding and as head.
        copy = stored.pop(head)
        table = stored.setdefault(embed, copy)
        if table is not copy and not table.same_values(copy):
            raise UserError(
                f"{folder / WEIGHTS}: {head} differs from {embed}, although the base's config.json ties them."
            )
    hint = f"Is this the base of the adapter? It names {named_base(folder) or 'none'}."
    check_tensors(stored, wanted, folder / WEIGHTS, hint)
    extra = sorted(set(stored) - set(wanted))
    if extra:
        raise UserError(f"{folder / WEIGHTS}: {len(extra)} tensor(s) have no place in this model: {some(extra)}.")
    arrays: dict[str, np.ndarray] = {}
    for name, (tensor, shape) in parts.items():
        read = [tensor.read(stored[key].read(), shape) for key in keys[name]]
        arrays[name] = np.stack(read) if tensor.layered else read[0]
    return adapter, arrays


Place = tuple[Tensor, tuple[int, ...]]
"""A parameter's tensor in a PEFT file, and its shape in our layout, in one layer."""


def _parts(adapter: AdapterConfig, config: DecoderConfig, scores: bool = False) -> dict[str, Place]:
    """The tensors that are saved whole (tables that train, a reward model's head), and A, B and magnitudes.
    The layouts of A and B follow from that of the weight: its input axes are the last group of PEFT's layout."""
    family = FAMILIES[config.family]
    table = (config.vocab_size, config.d_model)
    tensors: dict[str, Place] = {name: (family.tensors[name], table) for name in adapter.tables_in(config)}
    if scores:
        tensors[HEAD] = (family.tensors[HEAD], (config.d_model,))
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
    stem, sizes = f"model.layers.{{layer}}.{config.experts_module}", {**sizes, "F": config.ffn, "2": 2}
    inner = "base_layer." if "downs" in modules else ""
    both = "(F 2)" if family.alternate else "(2 F)"
    for name, theirs, layout, ours in (
        ("gates", f"{stem}.{inner}lora_A", "(E r) D", "E D r"),
        ("gates", f"{stem}.{inner}lora_B", f"{both} (r E)", "E r 2 F"),
        ("downs", f"{stem}.lora_A", "(E r) F", "E F r"),
        ("downs", f"{stem}.lora_B", "D (r E)", "E r D"),
    ):
        if name in modules:
            shape = tuple({**sizes, "r": modules[name].rank}[axis] for axis in ours.split())
            tensor = Tensor(f"{theirs}.weight", layout, ours)
            tensors[f"layers/{name}/w_lora_{theirs[-1].lower()}"] = (tensor, shape)
    return tensors
