"""Where weights come from: a Hugging Face folder, a hub id, a finished run, or random initialisation.

A run's folder stands for what it exported. An adapter on a base, whether exported by a run or given in addition, is
merged while the weights are loaded. With `adapter: {from: FOLDER}` training continues from an existing adapter: its
settings (rank, alpha, targets, ...) are read from its folder, and training starts from its A and B; the base stays the
base: it is frozen, it is the reference, and the export names it.

A folder's config.json is checked against the headers of its weights: a size that contradicts the files is refused at
the cost of reading headers, where with a billion layers even a list of the missing tensors would take minutes.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tunix.config import DType, ModelConfig, MtpUse
from tunix.data.chat import turn_end, with_template
from tunix.data.config import DataConfig
from tunix.data.sources import Rows, texts
from tunix.data.tokenizer import Tokenizer, bpe_tokenizer, bytes_tokenizer, load_tokenizer
from tunix.errors import UserError
from tunix.hf.model_folder import (
    LAYER,
    TOKENIZER_CONFIG,
    has_score,
    load_params,
    named_tensors,
    resolve_folder,
    write_generation_config,
)
from tunix.hf.peft_folder import CONFIG, HEAD, described, fingerprint_of, foreign_base, load_adapter, named_base
from tunix.hf.picture_settings import with_reader
from tunix.hf.run_export import exported
from tunix.hf.safetensors_io import check_tensors, some
from tunix.lora.adapt import adapt, merge, quantization
from tunix.lora.config import NOT_IN_FP8, AdapterConfig
from tunix.models.config import DecoderConfig, is_own, trains
from tunix.models.families.table import (
    FAMILIES,
    family_of,
    from_hf,
    from_recipe,
    read_json,
    tensors_of,
    with_vision,
    without_mtp,
)
from tunix.models.model import Model, Params
from tunix.models.quantization.formats import (
    SCALE,
    Quantization,
    check_supported,
    plain,
    quantize_stack,
    simulated,
    supported,
)
from tunix.models.quantization.rules import Rules, read_rules
from tunix.util.atomic_io import atomic_folder
from tunix.util.exact import jit


def read_folder(folder: Path, pictures: bool = False, mtp: MtpUse | None = None) -> DecoderConfig:
    """The structure of the model in a folder with weights.

    Args:
        folder: has config.json and safetensors.
        pictures: whether the tower that sees pictures belongs to the model; else only the text part is read.
        mtp: whether the head that drafts tokens belongs to it.

    Raises:
        UserError: config.json is missing, broken or not supported; there are no weights, or a file of them is damaged;
            or the two disagree about a size.
    """
    file = folder / "config.json"
    raw = read_json(file)
    family = family_of(raw, file)
    stored = named_tensors(folder, family, mtp=mtp is not None)
    # No other size of config.json becomes the length of a list.
    text = raw.get("text_config")
    layers = (text if isinstance(text, dict) else raw).get("num_hidden_layers")
    there = len({at[1] for name in stored if (at := LAYER.match(name))})
    if isinstance(layers, int) and layers > there:
        raise UserError(
            f"{file}: num_hidden_layers = {layers}, but the files beside it have {there} layers: "
            f"model.layers.{there}. and what follows are missing. Download the folder again, or correct the number."
        )
    config = from_hf(raw, file, pictures, mtp)
    stored = stored if config.vision is None else named_tensors(folder, family, pictures=True, mtp=mtp is not None)
    if mtp and not any(name.startswith(tuple(FAMILIES[family].passengers)) for name in stored):
        raise without_mtp(file, "the files beside it hold no mtp.* tensor")
    sizes, wanted = FAMILIES[config.family].axes(config), {}
    for tensor in tensors_of(config).values():
        shape = tuple(sizes[axis] for axis in tensor.ours.split())
        keys = {key for layer in config.layers_with(tensor.mixer) for key in tensor.keys(layer, shape)}
        wanted |= dict.fromkeys(keys & stored.keys(), tensor.their_shape(shape))
    check_tensors(stored, dict(sorted(wanted.items())), folder)
    return config


TOKENIZER = "tokenizer"
"""Folder within a run folder, with the tokenizer that the run made or changed."""


@dataclass(frozen=True)
class Source:
    """A model's structure, the location of its weights, and its tokenizer."""

    decoder: DecoderConfig
    tokenizer: Tokenizer | None
    """The tokenizer; None where the folder has none: then only token ids can be used."""
    folder: Path | None = None
    """Hugging Face folder; None for random weights."""
    merged: Path | None = None
    """PEFT folder that is merged into the weights."""
    rounding: Quantization | None = None
    """How the weights were rounded when the adapter in `merged` was trained (QLoRA); it fits no others."""
    rules: Rules | None = None
    """How the weights in `folder` were rounded, where they are on a grid (QAT, or `tunix quantize`)."""
    name: str = ""
    """The base's name for adapters trained on it: a hub id or an absolute path; empty for random weights."""
    files: Path | None = None
    """Folder whose tokenizer files an export copies."""

    @property
    def stands_alone(self) -> bool:
        """Whether a folder contains exactly these weights, so that an adapter can name it as its base."""
        return self.folder is not None and self.merged is None

    @cached_property
    def has_scalar_head(self) -> bool:
        """Whether this is a reward model, according to its folder's tensors or the config of the merged adapter.

        No weights are read, and the result is cached. `load_adapter` refuses an adapter whose tensors are not those
        that its config describes.

        Raises:
            UserError: a file is missing or damaged, or its content is not supported.
        """
        if self.merged is not None and described(self.merged / CONFIG, self.decoder.tied).scores:
            return True
        return self.folder is not None and has_score(self.folder)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: the tokenizer's stop tokens, or those of the folder's config.json."""
        if self.tokenizer is not None:
            return self.tokenizer.stop_ids
        return listed_ids(dict(self.decoder.stops).get("eos_token_id"))


def pretrained(path: str, adapter: Path | None = None, pictures: bool = False, mtp: MtpUse | None = None) -> Source:
    """The source that a hub id, a model folder, a run's folder, or a PEFT folder (with its base) stands for.

    Args:
        adapter: a PEFT folder to merge into it.
        pictures: whether the tower that sees pictures belongs to the model; else only the text part is read.
        mtp: whether the head that drafts tokens belongs to it.

    Raises:
        UserError: there is no such folder, the run has not exported yet, or the adapter belongs to another base.
    """
    merged, local = adapter, Path(path).expanduser()
    if (local / "recipe.yaml").is_file():
        local = exported(local)
        path = str(local)
    if (local / CONFIG).is_file() and not (local / "config.json").is_file():
        if merged is not None:
            raise UserError(f"{path} already ends in an adapter; export it (tunix export) before adding {merged}")
        if not (base := named_base(local)):
            raise UserError(f"{local} is an adapter that names no base: give the base, and --adapter {local}")
        path, merged = base, local
    folder = resolve_folder(path)
    name = str(folder.resolve()) if Path(path).expanduser().is_dir() else path
    decoder = read_folder(folder, pictures, mtp)
    rounding, rules, tokenizer, files = None, read_rules(folder), load_tokenizer(folder), folder
    if merged is not None:
        if doubt := foreign_base(merged, name, folder, decoder):
            print(doubt, file=sys.stderr)
        rounding = fingerprint_of(merged).rounding
        if (merged / TOKENIZER_CONFIG).is_file() and (changed := load_tokenizer(merged)):
            # The run that trained the adapter had another tokenizer, or another chat template.
            tokenizer, files = _stopping(changed, tokenizer), merged
    return Source(decoder, tokenizer and _stopping(tokenizer), folder, merged, rounding, rules, name, files)


def of_recipe(config: ModelConfig, data: DataConfig, kept: Path, rows: Rows | None) -> Source:
    """The source of a recipe's model, with the tokenizer that its run uses.

    A tokenizer that exists in no folder of the user's (made for the run, or with another chat template) is written to
    `kept` once and always read from there, so that a resumed run and an export use the same one.

    Args:
        config: the recipe's `model` section.
        data: its `data` section; a chat template there replaces the tokenizer's.
        kept: the run's tokenizer folder.
        rows: training rows, read for `tokenizer: bpe`; None where `kept` is known to exist.

    Raises:
        UserError: the model cannot be found, or its tokenizer does not fit it or the chat template.
    """
    chat_template, sees = data.chat_template, data.pictures is not None
    if config.path is None:
        source = from_scratch(config, sees)
    else:
        source = pretrained(config.path, pictures=sees, mtp=config.mtp)
    if not kept.is_dir():
        template = FAMILIES[source.decoder.family].template
        if config.path:
            tokenizer = source.tokenizer
        elif config.tokenizer == "bytes":
            tokenizer = bytes_tokenizer(template, pictures=source.decoder.vision is not None)
        elif config.tokenizer == "bpe":
            assert rows is not None
            tokenizer = bpe_tokenizer(list(texts(rows)), source.decoder.vocab_size, template)
        else:
            tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
        if chat_template is not None:
            if tokenizer is None:
                raise UserError(
                    "data.chat_template changes nothing for a model without a tokenizer: its rows are token ids"
                )
            tokenizer = with_template(tokenizer, chat_template)
        if tokenizer is not None and (chat_template is not None or config.path is None):
            with atomic_folder(kept) as folder:
                tokenizer.save(folder)
                write_generation_config(folder, (source.files, source.folder), _stopping(tokenizer).stop_ids)
    if kept.is_dir() and (tokenizer := load_tokenizer(kept)):
        source = replace(source, tokenizer=_stopping(tokenizer, source.tokenizer), files=kept)
    check_vocabulary(source)
    if data.pictures is None:
        return source
    decoder, tokenizer = with_reader(
        source.decoder, source.tokenizer, source.folder, data.pictures, data.picture_tokens
    )
    return replace(source, decoder=decoder, tokenizer=tokenizer)


def from_scratch(config: ModelConfig, pictures: bool = False) -> Source:
    """The source of a randomly initialised model, without a tokenizer.

    Args:
        pictures: whether it has a tower that sees them.
    """
    assert config.preset or config.family, "the recipe is checked"
    decoder = from_recipe(config)
    return Source(with_vision(decoder, config.preset is not None) if pictures else decoder, None)


def _stopping(tokenizer: Tokenizer, replaced: Tokenizer | None = None) -> Tokenizer:
    """The tokenizer with all ids to stop at: those of its folder, of the tokenizer that it replaces, and what the turns
    of its chat template end in."""
    stops = [*tokenizer.generation_stops, *(replaced.generation_stops if replaced else ())]
    if (end := turn_end(tokenizer)) is not None:
        stops.append(end)
    return replace(tokenizer, generation_stops=tuple(dict.fromkeys(stops)))


def check_vocabulary(source: Source) -> None:
    """Checks that every id of the tokenizer has a row in the embedding table.

    Raises:
        UserError: the tokenizer has more ids than the model.
    """
    if source.tokenizer and source.tokenizer.vocab_size > source.decoder.vocab_size:
        raise UserError(
            f"the tokenizer has {source.tokenizer.vocab_size} ids, the model only {source.decoder.vocab_size}: "
            "they do not belong together (from scratch: raise model.sizes.vocab_size)"
        )


def with_stops(source: Source) -> DecoderConfig:
    """The structure with the special ids of an exported config.json: the folder's, or the tokenizer's where there is
    no folder; and with all ids that end a completion."""
    if (t := source.tokenizer) is None:
        return source.decoder
    stops = dict(source.decoder.stops)
    if source.folder is None:
        stops = {"bos_token_id": t.bos_id, "eos_token_id": t.eos_id, "pad_token_id": t.pad_id}
    if missing := set(source.stop_ids) - set(eos := listed_ids(stops.get("eos_token_id"))):
        stops["eos_token_id"] = (*eos, *(i for i in source.stop_ids if i in missing))
    return replace(source.decoder, stops=tuple(stops.items()))


def weights(
    source: Source, model: Model, mesh: Mesh, seed: int, trained: DType, frozen: DType, full: bool
) -> tuple[Params, Params]:
    """The `(trainable, frozen)` parameters, loaded or initialised, placed on the mesh.

    Args:
        model: the model with its adapter, if it has one.
        seed: seed of random values: of all weights without a folder, else of the adapter's.
        trained: dtype of the weights that train.
        frozen: dtype of those that do not.
        full: whether all weights train, or only the adapter's.

    Raises:
        UserError: the files are damaged or do not fit, or the adapter is a reward model's and a language model is
            needed.
    """
    mtp = model.config.mtp
    dtypes: dict[str, DType] = {name: trained if trains(name, full, mtp) else frozen for name in model.shapes}
    params: Params = {}
    if source.folder is not None:
        head = {HEAD} if HEAD in dtypes and not model.has_lm_head and has_score(source.folder) else set()
        base: dict[str, DType] = {name: dtype for name, dtype in dtypes.items() if name in head or not is_own(name)}
        if source.merged is None:
            params = load_params(model, source.folder, base, mesh)
        else:
            folder, whole, places = source.folder, replace(model, quantization=None), model.shardings(mesh)
            config, arrays = load_adapter(source.merged, source.decoder, lm_head=model.has_lm_head)
            with_adapter = Model(source.decoder, adapt=adapt(config, source.decoder), has_scalar_head=True)

            def merged(dtypes: Mapping[str, DType]) -> Params:
                """Weights of the base with the adapter merged into them."""
                params = load_params(whole, folder, dtypes, mesh)
                if source.rounding is not None:
                    params = as_rounded(params, source.decoder, source.rounding)
                placed = _placed(arrays, params, with_adapter, mesh)
                params = {name: x for name, x in params.items() if name not in placed}
                return jit(lambda base, pairs: merge({**base, **pairs}, config), donate_argnums=0)(params, placed)

            params = merged({name: dtype for name, dtype in base.items() if name not in model.kinds})
            # One after the other, so that only one matrix at a time is in memory unrounded.
            for name in (name for name in model.quantized if name in base):
                pair, (rounding, contracted) = (name, name + SCALE), model.rounding(name)
                rounded = partial(quantize_stack, name, quantization=rounding, contracted=contracted)
                rounded = jit(rounded, out_shardings=tuple(places[x] for x in pair))
                values = rounded(merged({name: base[name]})[name])
                params |= zip(pair, jax.block_until_ready(values), strict=True)
    missing: dict[str, DType] = {name: dtype for name, dtype in dtypes.items() if name not in params}
    if missing:
        params |= model.init(jax.random.key(seed), missing, mesh)
    trainable = {name: params[name] for name in dtypes if trains(name, full, mtp)}
    return trainable, {name: params[name] for name in dtypes if name not in trainable}


def loaded(source: Source, dtype: DType, mesh: Mesh) -> tuple[Model, Params]:
    """The model with all of its weights, for inference only; a reward model has a scalar head and no language head.

    Args:
        dtype: precision of the computation and the weights.
    """
    scores = source.has_scalar_head
    inputs = simulated(source.rules, weights=False)
    model = Model(source.decoder, dtype=dtype, simulated=inputs, has_scalar_head=scores, has_lm_head=not scores)
    trained, kept = weights(source, model, mesh, seed=0, trained=dtype, frozen=dtype, full=True)
    return model, trained | kept


def require_lm_head(source: Source, name: str) -> None:
    """Refuses a reward model where log-probs are needed.

    Args:
        name: the model's name as the user wrote it.

    Raises:
        UserError: the model is a reward model.
    """
    if source.has_scalar_head:
        raise UserError(
            f"{name} is a reward model: it gives scores and has no log-probs. `tunix eval {name} PAIRS` measures it, "
            "--reward-model uses it"
        )


def adapted(
    decoder: DecoderConfig, config: ModelConfig, adapter: AdapterConfig | None, rules: Rules | None = None
) -> Model:
    """The structure of the model that a recipe trains, adapter included.

    Args:
        decoder: the base's structure.
        adapter: the recipe's `adapter` section, if it has one.
        rules: how the model is rounded while it trains; None where it is not.

    Raises:
        UserError: this device cannot compute with the type that the base, or the model, is rounded to; or
            `check_experts` refuses.
    """
    adaptation, rounding = adapt(adapter, decoder) if adapter else None, quantization(adapter)
    if rounding is not None:
        if config.quantization is not None:  # an adapter's folder may say qlora where the recipe does not
            raise UserError(f"model.quantization: compute {config.quantization.compute}: {NOT_IN_FP8}")
        check_supported(rounding)
    if config.router_aux_loss_coef and decoder.experts is None:
        raise UserError(f"model.router_aux_loss_coef: {decoder.family} has no experts whose use it would even out")
    return Model(
        decoder,
        dtype=config.dtype,
        attention=config.attention,
        remat="block" if config.remat == "auto" else config.remat,
        gradient_sums=config.gradient_sums,
        compute=None if config.quantization is None else config.quantization.compute,
        router_aux_loss_coef=config.router_aux_loss_coef,
        adapt=adaptation,
        quantization=rounding,
        simulated=supported(rules),
    )


def as_rounded(params: Params, decoder: DecoderConfig, rounding: Quantization) -> Params:
    """The weights with the layers' matrices rounded and dequantized, in the same dtype; donates `params`."""
    model = Model(decoder, quantization=rounding)

    def rounded(params: Params) -> Params:
        new = dict(params)
        for name in (name for name in params if name in model.quantized):
            values, scales = quantize_stack(name, params[name], *model.rounding(name))
            new[name] = plain({name: values, name + SCALE: scales}, name).astype(params[name].dtype)
        return new

    return jit(rounded, donate_argnums=0)(params)


def beside(model: Model, params: Params, mesh: Mesh, adapter: Path) -> tuple[AdapterConfig, Params]:
    """Loads a PEFT folder's adapter alongside its base without merging: its settings and its parameters.

    Args:
        model: the base's.
        params: the base's weights, which stay unchanged.
        mesh: where the adapter is placed.
        adapter: the PEFT folder.

    Raises:
        UserError: the folder is missing or damaged, does not fit the base, or is a reward model's adapter.
    """
    settings, arrays = load_adapter(adapter, model.config, lm_head=True)
    return settings, _placed(arrays, params, replace(model, adapt=adapt(settings, model.config)), mesh)


def _placed(arrays: Mapping[str, np.ndarray], params: Params, model: Model, mesh: Mesh) -> Params:
    """An adapter's arrays on the devices, in the dtype of those of `params` that they replace."""
    places = model.shardings(mesh)
    kinds = {name: params[name].dtype if name in params else None for name in arrays}
    return {name: jax.device_put(jnp.asarray(array, kinds[name]), places[name]) for name, array in arrays.items()}


def listed_ids(ids: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Special ids of a folder, which may be none or one."""
    return () if ids is None else ids if isinstance(ids, tuple) else (ids,)


KEY = "adapter.from"


def settled(adapter: AdapterConfig | None, source: Source) -> tuple[AdapterConfig | None, Source]:
    """The complete adapter section once `from` has been read, and the source of the base under that adapter.

    Args:
        adapter: the recipe's section; without a `from` it is returned unchanged.
        source: the model's; where it ends in the same adapter that `from` names, its base is returned.

    Raises:
        UserError: there is no such adapter, tunix does not support its kind, it belongs to another base, or the section
            contradicts it.
    """
    if adapter is None or adapter.source is None:
        return adapter, source
    local = Path(adapter.source).expanduser()
    try:
        folder = exported(local) if (local / "recipe.yaml").is_file() else resolve_folder(adapter.source)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from error
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{KEY}: {folder} holds no {CONFIG}, so no adapter; `tunix export RUN OUT --adapter` writes that of a run"
        )
    if source.merged is not None:
        if source.merged.resolve() != folder.resolve():
            raise UserError(
                f"{KEY}: model.path ends in the adapter {source.merged}, which would be merged below {folder}: name "
                "the base as model.path, or the same adapter in both places"
            )
        source = replace(source, merged=None, rounding=None)
    assert source.folder is not None, "the recipe is checked: there is a model.path"
    # The settings are checked before the base's numbers are read, because it costs nothing.
    theirs = described(folder / CONFIG, source.decoder.tied).adapter
    named, modules = adapter.model_fields_set, theirs.modules_of(source.decoder)
    for key in ("rank", "alpha", "ranks", "alphas", "targets", "rslora", "dora", "also"):
        asked, stated = getattr(adapter, key), getattr(theirs, key)
        same = asked == stated
        if key not in ("rslora", "dora", "also"):  # different patterns may select the same modules
            same = theirs.model_copy(update={key: asked}).modules_of(source.decoder) == modules
        if key in named and not same:
            raise UserError(
                f"adapter.{key}: {asked} contradicts {folder}, which {KEY} names: its {key} is {stated}. Leave {key} "
                "out"
            )
    # A folder does not record dropout, and rounding only where its base was rounded.
    base, rounding = {"kind": adapter.kind, "base": adapter.base, "tile": adapter.tile}, fingerprint_of(folder).rounding
    if rounding is not None:
        if "kind" in named and quantization(adapter) != rounding:
            raise UserError(
                f"adapter.kind: {folder} was trained on a base in {rounding.base} (tile {rounding.tile}): leave kind, "
                "base and tile out, or say the same"
            )
        base = {"kind": "qlora", "base": rounding.base, "tile": rounding.tile}
    whole = theirs.model_copy(update={**base, "dropout": adapter.dropout, "source": str(folder)})
    if doubt := foreign_base(folder, source.name, source.folder, source.decoder):
        print(doubt, file=sys.stderr)
    return whole, source


def adapter_weights(adapter: AdapterConfig, model: Model, fresh: Params, mesh: Mesh) -> Params:
    """The weights that train: the adapter's A and B, and its tables and scalar head where its folder has them.

    Args:
        adapter: the section that `settled` returned.
        model: the model with that adapter.
        fresh: initial weights of everything that trains; those that the folder does not have are kept.
        mesh: where they are placed.

    Raises:
        UserError: its tensors are damaged or do not fit the model.
    """
    folder = Path(str(adapter.source))
    _, arrays = load_adapter(folder, model.config, lm_head=model.has_lm_head)
    if foreign := sorted(set(arrays) - set(model.shapes)):
        raise UserError(f"{KEY}: {folder} brings {some(foreign)}, which the model that trains does not have")
    return {**fresh, **_placed(arrays, fresh, model, mesh)}
