"""A model as compiled programs that run without tunix: `prefill` and `decode` by `jax.export`, with Orbax weights.

The programs are traced as for a CPU, which takes attention as plain products and no kernel, so that one file runs on
CPUs, TPUs and NVIDIA's GPUs. The weights are arguments, laid out as decoding reads them. jax runs such files of up to
six months ago (https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees).
"""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from tunix.config import DType, MeshConfig
from tunix.errors import UserError, install_command
from tunix.hf.generation_config import write_generation_config
from tunix.hf.model_folder import copy_tokenizer
from tunix.hf.source import Source, check_vocabulary, loaded, pretrained, require_lm_head
from tunix.interop.orbax_arrays import Deferred, write_arrays
from tunix.interop.programs import STEP, Flat, Programs, Shapes, flat
from tunix.mesh import build_mesh
from tunix.models.families.table import read_json
from tunix.models.kv_cache import unstack
from tunix.models.model import Model, Params
from tunix.util.atomic_io import atomic_folder, refuse_taken
from tunix.util.exact import jit

PLATFORMS = ("cpu", "tpu", "cuda")
"""What the programs run on, by jax's names."""
SCRIPT = Path(__file__).with_name("standalone.py")
"""Goes along as `generate.py`."""


def export_stablehlo(source: Path, out: Path, *, shapes: Shapes) -> str:
    """Writes a model folder as programs: `prefill.bin`, `decode.bin`, `weights/`, `description.json`, `generate.py` and
    the tokenizer's files.

    Args:
        source: the folder in Hugging Face's format; its dtype is that of the weights and the computation.
        out: the new folder; must not exist, or be an empty one.
        shapes: the fixed sizes.

    Returns:
        How to call the script.

    Raises:
        UserError: the model or the sizes do not fit, flatbuffers is not installed, or something exists at `out`.
    """
    refuse_taken(out)
    _require_flatbuffers()
    found = pretrained(str(source))
    check_vocabulary(found)
    require_lm_head(found, str(source))
    _check(shapes, found.decoder.max_positions)
    mesh = build_mesh(MeshConfig(), jax.devices("cpu")[:1])
    with jax.set_mesh(mesh), atomic_folder(out) as folder:
        model, params = loaded(found, _dtype(source), mesh)
        weights = _laid_out(model, params)
        programs = Programs(model, shapes)
        _write_programs(folder, programs, weights)
        description = _description(found, programs, weights)
        (folder / "description.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(SCRIPT, folder / "generate.py")
        copy_tokenizer(source, folder)
        write_generation_config(folder, (source,), ())
        _write_weights(folder / "weights", weights)
    return f"python {out}/generate.py '[[1, 2, 3]]' --max-tokens 16"


def _require_flatbuffers() -> None:
    """Raises UserError where the package is not installed in which jax writes what it exports."""
    if find_spec("flatbuffers") is None:
        raise UserError(
            "--format stablehlo: jax writes programs with the package flatbuffers, which is not installed: "
            + install_command("stablehlo")
        )


def _check(shapes: Shapes, most: int) -> None:
    """Raises UserError unless the sizes fit each other and the model."""
    if shapes.prompt % STEP:
        raise UserError(f"--prompt-length {shapes.prompt} is not a multiple of {STEP}, in which prompts are read")
    if shapes.length <= shapes.prompt:
        raise UserError(
            f"--length {shapes.length} leaves no token after a prompt of --prompt-length {shapes.prompt}: raise it"
        )
    if shapes.length > most:
        raise UserError(f"--length {shapes.length}: the model ends at {most} tokens (max_position_embeddings)")


def _dtype(source: Path) -> DType:
    """The dtype of a folder's weights, according to its config.json."""
    raw = read_json(source / "config.json")
    stated = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return "bfloat16" if stated == "bfloat16" else "float32"


def _laid_out(model: Model, params: Params) -> Flat:
    """The weights as decoding reads them, parameter by parameter: `params` is emptied."""
    weights: Flat = {}
    lay_out = jit(unstack, static_argnums=0)
    for name in list(params):
        weights |= flat(lay_out(model, {name: params.pop(name)}))
    return weights


def _write_programs(folder: Path, programs: Programs, weights: Flat) -> None:
    for name, (function, arguments) in programs.arguments(weights).items():
        exported = export.export(jit(function), platforms=PLATFORMS)(*arguments)
        (folder / f"{name}.bin").write_bytes(exported.serialize())


def _description(source: Source, programs: Programs, weights: Flat) -> dict[str, Any]:
    """What a reader of the folder has to know, as JSON."""
    shapes, config = programs.shapes, source.decoder
    cache = programs.arguments(weights)["decode"][1][1]
    return {
        "family": config.family,
        "batch": shapes.batch,
        "prompt_length": shapes.prompt,
        "length": shapes.length,
        "vocab_size": config.vocab_size,
        "stop_ids": list(source.stop_ids),
        "platforms": list(PLATFORMS),
        "jax": jax.__version__,
        "prefill": "(weights, tokens int32 [batch, prompt_length], lengths int32 [batch]) -> (logits, cache)",
        "decode": "(weights, cache, tokens int32 [batch], positions int32 [batch]) -> (logits, cache)",
        "logits": "float32 [batch, vocab_size], of the next token of each row",
        "cache": [_shape(one) for one in cache],
        "weights": {name: _shape(x) for name, x in weights.items()},
    }


def _shape(x: Any) -> Mapping[str, Any]:
    return {"shape": list(x.shape), "dtype": str(x.dtype)}


def _write_weights(path: Path, weights: Flat) -> None:
    """Writes the weights one after the other; `weights` is emptied meanwhile."""

    def taken(name: str) -> np.ndarray:
        return np.asarray(weights.pop(name))

    write_arrays(
        path, {name: Deferred(x.shape, np.dtype(x.dtype), partial(taken, name)) for name, x in weights.items()}
    )
