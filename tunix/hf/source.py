"""Where weights come from: a Hugging Face folder, a hub id, a finished run, or nowhere (random).

A run's folder stands for what it exported. An adapter on top of a base, of a run or given beside it, is merged while
the weights are loaded.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.config import DType, Family, ModelConfig
from tunix.data.chat import with_template
from tunix.data.sources import Rows
from tunix.data.templates import TemplateName
from tunix.data.tokenizer import Tokenizer, bpe_tokenizer, bytes_tokenizer, load_tokenizer
from tunix.errors import UserError
from tunix.hf.base_fingerprint import foreign_base, named_base, rounding_of
from tunix.hf.checked_config import read_folder
from tunix.hf.model_folder import has_score, load_params, resolve_folder, reward_model
from tunix.hf.peft_adapter import HEAD, load_adapter
from tunix.hf.peft_config import CONFIG
from tunix.lora.adapt import adapt, merge, quantization
from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.models.families.table import preset, small, with_sizes
from tunix.models.model import Model, Params, is_own
from tunix.models.quantization.fake_quant import simulated, supported
from tunix.models.quantization.formats import SCALE, Quantization, check_supported, dequantize, quantize
from tunix.models.quantization.rules import Rules, read_rules
from tunix.util.atomic_io import atomic_folder
from tunix.util.exact import jit
from tunix.util.yaml_io import read_mapping

TEMPLATES: dict[Family, TemplateName] = {
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "llama": "llama3",
    "qwen2": "chatml",
    "qwen3": "chatml",
}
"""Chat format of a family, for models from scratch."""

TOKENIZER = "tokenizer"
"""Folder within a run folder: the tokenizer that the run made or changed."""


@dataclass(frozen=True)
class Source:
    """A model's structure, where its weights are, and its tokenizer."""

    decoder: DecoderConfig
    tokenizer: Tokenizer | None
    """None where the folder has none: only token ids are served."""
    folder: Path | None = None
    """Hugging Face folder; None for random weights."""
    merged: Path | None = None
    """PEFT folder that is merged into the weights."""
    rounding: Quantization | None = None
    """How the weights were rounded when the adapter in `merged` was trained (QLoRA): it belongs to these."""
    rules: Rules | None = None
    """How the weights in `folder` were rounded, where they lie on a grid (QAT, or `tunix quantize`)."""
    name: str = ""
    """What an adapter trained on these weights calls its base: a hub id or an absolute path; empty for random ones."""
    files: Path | None = None
    """Folder whose tokenizer files an export takes along."""

    @property
    def stands_alone(self) -> bool:
        """Whether the weights are in a folder as they are, so that an adapter can name it as its base."""
        return self.folder is not None and self.merged is None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends a completion: the tokenizer's stop tokens, or those of the folder's config.json."""
        if self.tokenizer is not None:
            return self.tokenizer.stop_ids
        ids = dict(self.decoder.stops).get("eos_token_id")
        return () if ids is None else ids if isinstance(ids, tuple) else (ids,)


def pretrained(path: str, adapter: Path | None = None) -> Source:
    """What a hub id, a folder or the folder of a run stands for; a PEFT folder, for its base with it.

    Args:
        adapter: a PEFT folder on top.

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
        path, merged = _base(local), local
    folder = resolve_folder(path)
    name = str(folder.resolve()) if Path(path).expanduser().is_dir() else path
    decoder = read_folder(folder)
    if merged is not None and (doubt := foreign_base(merged, name, folder, decoder)):
        print(doubt, file=sys.stderr)
    rounding = None if merged is None else rounding_of(merged)
    rules = read_rules(folder)
    return Source(decoder, load_tokenizer(folder), folder, merged, rounding, rules, name, folder)


def exported(run: Path) -> Path:
    """The folder that a finished run exported; of the last stage where it has stages.

    Raises:
        UserError: there is none yet.
    """
    stages = read_mapping(run / "recipe.yaml").get("stages") or []
    last = f"{len(stages) - 1}_*/export" if stages else "export"
    found = next(run.glob(last), None)
    if found is None:
        raise UserError(f"{run} has exported nothing yet: finish the run, or write a folder: tunix export {run} OUT")
    return found


def of_recipe(config: ModelConfig, chat_template: str | None, kept: Path, rows: Rows | None) -> Source:
    """The model of a recipe, with the tokenizer that its run uses.

    A tokenizer that no folder of the user's holds as it is (made on the spot, or with another chat template) is written
    to `kept` once and always read from there: a run that goes on, and an export, have the very same.

    Args:
        chat_template: replaces the tokenizer's own, where it is not None.
        kept: the run's tokenizer folder.
        rows: training rows, read for `tokenizer: bpe`; None where `kept` is known to be there.

    Raises:
        UserError: the model is not to be had, or its tokenizer does not fit it or the chat template.
    """
    source = from_scratch(config) if config.path is None else pretrained(config.path)
    if not kept.is_dir():
        tokenizer = source.tokenizer if config.path else _made(config, source.decoder, rows)
        if chat_template is not None:
            tokenizer = _with_template(tokenizer, chat_template)
        if tokenizer is not None and (chat_template is not None or config.path is None):
            with atomic_folder(kept) as folder:
                tokenizer.save(folder)
    if kept.is_dir():
        source = replace(source, tokenizer=load_tokenizer(kept), files=kept)
    check_vocabulary(source)
    return source


def from_scratch(config: ModelConfig) -> Source:
    """The structure of a random model, without a tokenizer."""
    decoder = preset(config.preset) if config.preset else small(_family(config))
    return Source(with_sizes(decoder, dict(config.sizes)), None)


def _made(config: ModelConfig, decoder: DecoderConfig, rows: Rows | None) -> Tokenizer | None:
    """The tokenizer that a recipe asks for beside a random model."""
    template = TEMPLATES[decoder.family]
    if config.tokenizer == "bytes":
        return bytes_tokenizer(template)
    if config.tokenizer == "bpe":
        assert rows is not None
        return bpe_tokenizer(list(_texts(rows)), decoder.vocab_size, template)
    return load_tokenizer(config.tokenizer) if config.tokenizer else None


def _with_template(tokenizer: Tokenizer | None, chat_template: str) -> Tokenizer:
    if tokenizer is None:
        raise UserError("data.chat_template changes nothing for a model without a tokenizer: its rows are token ids")
    return with_template(tokenizer, chat_template)


def check_vocabulary(source: Source) -> None:
    """Every id that the tokenizer gives must have a row in the table.

    Raises:
        UserError: it has not.
    """
    if source.tokenizer and source.tokenizer.vocab_size > source.decoder.vocab_size:
        raise UserError(
            f"the tokenizer has {source.tokenizer.vocab_size} ids, the model only {source.decoder.vocab_size}: "
            "they do not belong together (from scratch: raise model.sizes.vocab_size)"
        )


def with_stops(source: Source) -> DecoderConfig:
    """The structure, carrying the tokenizer's special ids into an exported config.json."""
    if source.folder or source.tokenizer is None:
        return source.decoder
    t = source.tokenizer
    stops = (("bos_token_id", t.bos_id), ("eos_token_id", t.eos_id), ("pad_token_id", t.pad_id))
    return replace(source.decoder, stops=stops)


def weights(
    source: Source, model: Model, mesh: Mesh, seed: int, trained: DType, frozen: DType, full: bool
) -> tuple[Params, Params]:
    """`(trainable, frozen)` parameters, where they live.

    Args:
        seed: of random values: all of a model from scratch, else the adapter's.
        trained: dtype of the weights that train.
        frozen: dtype of those that do not.
        full: all weights train; else only the adapter's.
    """
    dtypes: dict[str, DType] = {name: trained if full or is_own(name) else frozen for name in model.shapes}
    params: Params = {}
    if source.folder is not None:
        held = {HEAD} if HEAD in dtypes and not model.speaks and has_score(source.folder) else set()
        base: dict[str, DType] = {name: dtype for name, dtype in dtypes.items() if name in held or not is_own(name)}
        params = _loaded(source, model, base, mesh)
    missing: dict[str, DType] = {name: dtype for name, dtype in dtypes.items() if name not in params}
    if missing:
        params |= model.init(jax.random.key(seed), missing, mesh)
    mine = {name for name in dtypes if full or is_own(name)}
    return {n: params[n] for n in dtypes if n in mine}, {n: params[n] for n in dtypes if n not in mine}


def loaded(source: Source, dtype: DType, mesh: Mesh) -> tuple[Model, Params]:
    """The model with all of its weights, to be asked and not trained; a reward model has its scalar head alone.

    Args:
        dtype: of the computation and the weights.
    """
    scores = gives_scores(source)
    inputs = simulated(source.rules, weights=False)
    model = Model(source.decoder, dtype=dtype, simulated=inputs, critic=scores, speaks=not scores)
    params, _ = weights(source, model, mesh, seed=0, trained=dtype, frozen=dtype, full=True)
    return model, params


def gives_scores(source: Source) -> bool:
    """Whether the source is a reward model: its folder, or the adapter on top, has a scalar head."""
    if source.merged is not None and HEAD in load_adapter(source.merged, source.decoder)[1]:
        return True
    return source.folder is not None and has_score(source.folder)


def must_speak(source: Source, name: str) -> None:
    """Refuses a reward model where log-probs are asked for.

    Args:
        name: of the model, as it was asked for.

    Raises:
        UserError: it is one.
    """
    if gives_scores(source):
        raise UserError(
            f"{name} is a reward model: it gives scores and has no log-probs. `tunix eval {name} PAIRS` measures it, "
            "--reward-model uses it"
        )


def adapted(
    decoder: DecoderConfig, config: ModelConfig, adapter: AdapterConfig | None, rules: Rules | None = None
) -> Model:
    """The model that a recipe trains.

    Args:
        rules: how it is rounded while it trains.

    Raises:
        UserError: this device cannot compute with what the base, or the model, is rounded to.
    """
    adaptation, rounding = adapt(adapter, decoder) if adapter else None, quantization(adapter)
    if rounding is not None:
        check_supported(rounding)
    how = {"adapt": adaptation, "quantization": rounding, "simulated": supported(rules)}
    return Model(decoder, dtype=config.dtype, remat=config.remat == "block", **how)


def _loaded(source: Source, model: Model, dtypes: Mapping[str, DType], mesh: Mesh) -> Params:
    """The weights of a source's folder, its adapter merged into them; quantized ones are rounded afterwards."""
    assert source.folder is not None
    if source.merged is None:
        return load_params(model, source.folder, dtypes, mesh)
    whole, params = replace(model, quantization=None), Params()
    rest: dict[str, DType] = {name: dtype for name, dtype in dtypes.items() if name not in model.kinds}
    places = model.shardings(mesh)
    params |= _merged(load_params(whole, source.folder, rest, mesh), whole, source, mesh)
    # One after the other, so that one matrix at a time is there as it was.
    for name in (name for name in model.quantized if name in dtypes):
        found = _merged(load_params(whole, source.folder, {name: dtypes[name]}, mesh), whole, source, mesh)
        pair = (name, name + SCALE)
        rounded = jit(partial(_rounded, model, name), out_shardings=tuple(places[one] for one in pair))
        params |= zip(pair, jax.block_until_ready(rounded(found[name])), strict=True)
    return params


def as_rounded(params: Params, decoder: DecoderConfig, how: Quantization) -> Params:
    """The weights with the layers' matrices as they are after rounding, in the same dtype; takes their place."""
    return jit(partial(_as_rounded, decoder=decoder, how=how), donate_argnums=0)(params)


def _as_rounded(params: Params, decoder: DecoderConfig, how: Quantization) -> Params:
    model = Model(decoder, quantization=how)

    def one(name: str, w: jax.Array) -> jax.Array:
        return jax.vmap(dequantize)(*_rounded(model, name, w)).astype(w.dtype)

    return {name: one(name, w) if name in model.quantized else w for name, w in params.items()}


def _rounded(model: Model, name: str, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a stacked matrix."""
    return jax.lax.map(lambda layer: quantize(layer, *model.rounding(name)), w)


def _merged(params: Params, model: Model, source: Source, mesh: Mesh) -> Params:
    """The base with the source's adapter added.

    Raises:
        UserError: the adapter makes a reward model of it, and a language model is wanted.
    """
    assert source.merged is not None
    config, arrays = load_adapter(source.merged, source.decoder)
    if model.speaks and HEAD in arrays:
        raise reward_model(source.merged)
    if source.rounding is not None:
        params = as_rounded(params, source.decoder, source.rounding)
    places = Model(source.decoder, adapt=adapt(config, source.decoder), critic=True).shardings(mesh)
    arrays = {name: array.astype(params[name].dtype) if name in params else array for name, array in arrays.items()}
    placed = {name: jax.device_put(jnp.asarray(array), places[name]) for name, array in arrays.items()}
    params = {name: x for name, x in params.items() if name not in placed}
    return jit(lambda base, mine: merge({**base, **mine}, config), donate_argnums=0)(params, placed)


def beside(model: Model, params: Params, mesh: Mesh, adapter: Path) -> tuple[AdapterConfig, Params]:
    """A PEFT folder's adapter beside weights that stay as they are: what it is, and its own parameters.

    Args:
        model: of the base.
        params: the base.

    Raises:
        UserError: the folder is not to be had, does not fit the base, or makes a reward model of it.
    """
    settings, arrays = load_adapter(adapter, model.config)
    if HEAD in arrays:
        raise reward_model(adapter)
    places = replace(model, adapt=adapt(settings, model.config)).shardings(mesh)
    own = {
        name: jax.device_put(jnp.asarray(array, params[name].dtype if name in params else None), places[name])
        for name, array in arrays.items()
    }
    return settings, own


def _base(adapter: Path) -> str:
    """The base of a PEFT folder that was given in the place of a model.

    Raises:
        UserError: it names none.
    """
    if not (named := named_base(adapter)):
        raise UserError(f"{adapter} is an adapter that names no base: give the base, and --adapter {adapter}")
    return named


def _family(config: ModelConfig) -> Family:
    assert config.family is not None  # the recipe is checked
    return config.family


def _texts(rows: Rows) -> Iterator[str]:
    """Every string of the rows, also those within messages."""
    for index in range(len(rows)):
        yield from _strings(rows[index])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for key, item in value.items() if key != "role" for text in _strings(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _strings(item))
