"""A model as compiled programs that run without tunix: `prefill` and `decode` by `jax.export`, with Orbax weights.

The programs are two pure functions of flat trees, with every shape fixed. They are the engine's functions
(`models.kv_cache`) without the block tables that it keeps on the host: each row has one page, as long as a sequence may
become, so that where a token goes and what it sees follow from its position alone. Prompts are one packed piece, as the
engine prefills them; layers with states hold those of each row.

They are traced as for a CPU, which takes attention as plain products and no kernel, so that one file runs on CPUs, TPUs
and NVIDIA's GPUs. The weights are arguments, laid out as decoding reads them. jax runs such files of up to six months
ago (https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees).

Axes: B rows, C tokens at a time, V vocabulary; C are those of the longest prompt.
"""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import export
from jaxtyping import Array, Float, Int

from tunix.config import MeshConfig
from tunix.errors import UserError, install_command
from tunix.hf.model_folder import copy_tokenizer, write_generation_config
from tunix.hf.source import check_vocabulary, loaded, pretrained, require_lm_head
from tunix.interop.orbax_arrays import Deferred, writing_handler
from tunix.mesh import build_mesh
from tunix.models.attention.pages import NOWHERE, Gathered, PieceView, SlotsView, Table, Visits, Writes
from tunix.models.deltanet import PIECE_CHUNK, PieceStates, StepView
from tunix.models.families.table import read_json
from tunix.models.kv_cache import Weights, empty, extend, unstack
from tunix.models.model import Model
from tunix.util.atomic_io import atomic_folder, refuse_taken
from tunix.util.exact import jit

STEP = 64
"""A prompt's length is a multiple of it, since attention reads a piece in blocks of so many."""
Flat = dict[str, jax.Array]
"""Weights by name: `embed/w`, and those of a layer as `layers/3/q/w`."""
Output = tuple[Float[Array, "B V"], list[jax.Array]]
"""Logits of the next tokens in float32, and the arrays of the cache."""


@dataclass(frozen=True)
class Shapes:
    """The fixed sizes of both programs."""

    batch: int
    """B, e.g. 1."""
    prompt: int
    """C, e.g. 512."""
    length: int
    """Tokens of prompt and answer together, e.g. 1024."""


def flat(weights: Weights) -> Flat:
    """Weights for decoding by name."""
    layers = enumerate(weights.layers)
    return {**weights.top, **{f"layers/{n}/{name}": x for n, layer in layers for name, x in layer.items()}}


def unflat(weights: Flat, layers: int) -> Weights:
    """The inverse of `flat`."""
    top = {name: x for name, x in weights.items() if not name.startswith("layers/")}
    by_layer: list[dict[str, jax.Array]] = [{} for _ in range(layers)]
    for name, x in weights.items():
        if name not in top:
            _, number, rest = name.split("/", 2)
            by_layer[int(number)][rest] = x
    return Weights(top, tuple(by_layer))


@dataclass(frozen=True)
class Programs:
    """The two functions of one model."""

    model: Model
    shapes: Shapes

    def prefill(self, weights: Flat, tokens: Int[Array, "B C"], lengths: Int[Array, "B"]) -> Output:
        """Reads a prompt into each row of an empty cache.

        Args:
            weights: by name.
            tokens: the prompts, each from the first column on; what is behind its length means nothing.
            lengths: tokens of each prompt, from 1 to C.

        Returns:
            Logits of the token after each prompt, and the cache.
        """
        s, unflattened = self.shapes, unflat(weights, self.model.config.num_layers)
        columns, rows = (jnp.arange(number, dtype=jnp.int32) for number in (s.prompt, s.batch))
        ids = jnp.where(columns < lengths[:, None], rows[:, None] + 1, 0).reshape(1, -1)
        positions, last = jnp.tile(columns, s.batch)[None], rows * s.prompt + lengths - 1
        # Nothing came before the piece, and each row is written to its own page, from the first place on.
        none, begins = jnp.zeros((1, 1), jnp.int32), jnp.zeros_like(ids)
        visits = Visits(none, none, none, none, none[0])
        writes = Writes(jnp.where(ids > 0, ids - 1, NOWHERE), positions)
        windows = [kind.window for kind in self.model.config.paged_kinds]
        views = [PieceView(ids, positions, begins, visits, writes, window) for window in windows]
        chunks = np.full((s.batch, s.prompt // PIECE_CHUNK), -2, np.int32)  # each continues the one before
        chunks[:, 0] = -1  # or is its sequence's first
        states = PieceStates(ids, jnp.asarray(chunks.reshape(1, -1)), last)
        hidden, caches, _ = extend(
            self.model, unflattened, self.empty_cache(), tokens.reshape(1, -1), positions, views, states
        )
        logits = self.model.logits(unflattened.top, hidden[0, last][:, None])[:, 0]
        return logits, jax.tree.leaves(caches)

    def decode(
        self, weights: Flat, cache: list[jax.Array], tokens: Int[Array, "B"], positions: Int[Array, "B"]
    ) -> Output:
        """Reads one more token in each row.

        Args:
            weights: by name.
            cache: of the call before.
            tokens: the next tokens.
            positions: how many tokens each row has before them; a token behind `Shapes.length` is not kept.

        Returns:
            Logits of the token after that, and the cache.
        """
        s, unflattened = self.shapes, unflat(weights, self.model.config.num_layers)
        rows, at = jnp.arange(s.batch)[:, None], positions[:, None]
        writes = Writes(jnp.where(at < s.length, rows, NOWHERE), at)
        # Each row's page is where its number says, and begins at position 0.
        gathered, table = Gathered(rows.T, rows.T, 0 * rows.T), Table(rows, 0 * rows[:, 0])
        paged = self.model.config.paged_kinds
        views = [SlotsView(writes, at, table, gathered, kind.window) for kind in paged]
        caches = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(self.empty_cache)), cache)
        live = StepView(jnp.ones(s.batch, bool))
        hidden, caches, _ = extend(self.model, unflattened, caches, tokens[:, None], at, views, live)
        return self.model.logits(unflattened.top, hidden)[:, 0], jax.tree.leaves(caches)

    def empty_cache(self) -> Any:
        """The cache that prompts are read into: a page of `Shapes.length` tokens for each row."""
        c, s = self.model.config, self.shapes
        numbers = [s.batch] * len(c.paged_kinds)
        return empty(c, numbers, s.length, self.model.dtype, slots=s.batch, dtype=self.model.dtype)


PLATFORMS = ("cpu", "tpu", "cuda")
"""What the programs run on, by jax's names."""


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
    if find_spec("flatbuffers") is None:
        raise UserError(
            "--format stablehlo: jax writes programs with the package flatbuffers, which is not installed: "
            + install_command("stablehlo")
        )
    model_source = pretrained(str(source))
    check_vocabulary(model_source)
    require_lm_head(model_source, str(source))
    config, most = model_source.decoder, model_source.decoder.max_positions
    if shapes.prompt % STEP:
        raise UserError(f"--prompt-length {shapes.prompt} is not a multiple of {STEP}, in which prompts are read")
    if shapes.length <= shapes.prompt:
        raise UserError(
            f"--length {shapes.length} leaves no token after a prompt of --prompt-length {shapes.prompt}: raise it"
        )
    if shapes.length > most:
        raise UserError(f"--length {shapes.length}: the model ends at {most} tokens (max_position_embeddings)")
    raw = read_json(source / "config.json")
    stated = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    mesh = build_mesh(MeshConfig(), jax.devices("cpu")[:1])
    with jax.set_mesh(mesh), atomic_folder(out) as folder:
        model, params = loaded(model_source, "bfloat16" if stated == "bfloat16" else "float32", mesh)
        # As decoding reads them, parameter by parameter, so that no two copies of all of them exist.
        weights: Flat = {}
        lay_out = jit(unstack, static_argnums=0)
        for name in list(params):
            weights |= flat(lay_out(model, {name: params.pop(name)}))
        programs, exporting = Programs(model, shapes), partial(export.export, platforms=PLATFORMS)
        of_weights = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in weights.items()}
        prompts = jax.ShapeDtypeStruct((shapes.batch, shapes.prompt), jnp.int32)
        row_ids = jax.ShapeDtypeStruct((shapes.batch,), jnp.int32)
        cache = jax.tree.leaves(jax.eval_shape(programs.empty_cache))
        exported = {
            "prefill": exporting(jit(programs.prefill))(of_weights, prompts, row_ids),
            "decode": exporting(jit(programs.decode))(of_weights, cache, row_ids, row_ids),
        }
        for name, program in exported.items():
            (folder / f"{name}.bin").write_bytes(program.serialize())
        description = {
            "family": config.family,
            "batch": shapes.batch,
            "prompt_length": shapes.prompt,
            "length": shapes.length,
            "vocab_size": config.vocab_size,
            "stop_ids": list(model_source.stop_ids),
            "platforms": list(PLATFORMS),
            "jax": jax.__version__,
            "prefill": "(weights, tokens int32 [batch, prompt_length], lengths int32 [batch]) -> (logits, cache)",
            "decode": "(weights, cache, tokens int32 [batch], positions int32 [batch]) -> (logits, cache)",
            "logits": "float32 [batch, vocab_size], of the next token of each row",
            "cache": [{"shape": x.shape, "dtype": str(x.dtype)} for x in cache],
            "weights": {name: {"shape": x.shape, "dtype": str(x.dtype)} for name, x in weights.items()},
        }
        (folder / "description.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(Path(__file__).with_name("standalone.py"), folder / "generate.py")
        copy_tokenizer(source, folder)
        write_generation_config(folder, (source,), ())
        # Each leaves the devices' memory when its turn has come.
        arrays = {
            name: Deferred(x.shape, np.dtype(x.dtype), lambda name=name: np.asarray(weights.pop(name)))
            for name, x in weights.items()
        }
        with ocp.Checkpointer(writing_handler()) as writer:
            writer.save(folder / "weights", ocp.args.PyTreeSave(arrays))
    return f"python {out}/generate.py '[[1, 2, 3]]' --max-tokens 16"
