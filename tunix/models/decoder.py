"""The decoder: one implementation for Llama, Gemma and Qwen. What differs between them is in `DecoderConfig`.

Tokens -> embeddings -> a scan over stacked blocks -> final norm -> hidden states `[B T D]`. `token_logprobs.py` turns
these into log-probs without ever holding all logits. Inputs are packed rows: in each segment positions restart, and
attention stays within it.

Axes: B rows, T time, V vocabulary, D model width, F ffn width, N query heads, K kv heads, H head dim, L layers,
Dp width of inputs of layers, k chosen experts of a token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from tunix.config import DType, GradientSums
from tunix.mesh import constrain
from tunix.models.attention.inputs import ByKind, Segments
from tunix.models.blocks import Auxiliary, Block, LayerInputs, layer_inputs
from tunix.models.config import SHARED, DecoderConfig, Stage
from tunix.models.layers import MATRICES, Norm, RopeTables, TokenKeys, fold_tokens, rms_norm, rope_tables, weight
from tunix.models.moe import CHOSEN
from tunix.models.quantization.fake_quant import Simulated
from tunix.models.quantization.formats import Quantization, in_compute
from tunix.models.scan import Others, Path, Remat, Weights, over_layers
from tunix.models.self_attention import Kept
from tunix.models.vision import TOWERS, with_pictures
from tunix.types import Pictures
from tunix.util.trees import tree_of

READ_LATER = "kept by "
"""Begins the names under which a stage returns keys and values that later layers read, beside auxiliary terms."""
OfKind = Callable[[Int[Array, ""]], tuple[RopeTables, Segments | ByKind]]
"""The rope tables and the view of a layer, from the index of its kind among those of its mixer."""
Adapt = Callable[["Block", nnx.Rngs], "Block"]


class Table(nnx.Module):
    """A `[V D]` table: the embedding, or an untied head."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        # A tied table is also the head, whose logits want unit scale; Gemma multiplies sqrt(D) back on the way in.
        self.w = weight(rngs, (config.vocab_size, config.d_model), ("vocab", "embed"), std=config.d_model**-0.5)


class ValueHead(nnx.Module):
    """The scalar head of a critic or a reward model: `x w` for each state. It starts at zero, and so predicts 0."""

    def __init__(self, config: DecoderConfig):
        self.w = nnx.Param(jnp.zeros((config.d_model,), jnp.float32), axes=("embed",))


def embedded(config: DecoderConfig, table: jax.Array, tokens: Int[Array, "B T"], dtype: DType) -> Float[Array, "B T D"]:
    """The embedded tokens: the residual stream before the first layer."""
    x = table[tokens].astype(dtype)
    return x * jnp.asarray(config.d_model**0.5, dtype) if config.scale_embeddings else x


@dataclass(frozen=True)
class Structure:
    """What layers with one mixer are made of."""

    graph: nnx.GraphDef
    """The structure of their block."""
    paths: tuple[Path, ...]
    """Where their weights are within the block."""

    def block(self, weights: Mapping[Path, Any]) -> Block:
        """The block with these weights."""
        return nnx.merge(self.graph, tree_of(weights))


class Decoder(nnx.Module):
    """The whole model; each weight of the layers is stacked over those that have it."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        *,
        adapt: Adapt | None = None,
        quantization: Quantization | None = None,
        simulated: Mapping[str, Simulated] | None = None,
        remat: Remat = "none",
        gradient_sums: GradientSums = "compute",
        attention: str = "auto",
        has_scalar_head: bool = False,
        has_lm_head: bool = True,
    ):
        """Creates all weights with random values.

        Args:
            adapt: turns each block into its adapted form before it is stacked (`lora.adapt`).
            quantization: how the layers' matrices are rounded, if they are; norms and tables never are.
            simulated: what some projections round in simulation (QAT), by their names.
            remat: what the backward pass recomputes (`scan.KEEPS`).
            gradient_sums: dtype in which the gradients of matrices are summed over tokens and devices.
            attention: name of the implementation of attention within rows, or "auto" (`attend.implementation`).
            has_scalar_head: whether there is a value head.
            has_lm_head: whether there is a table for logits, where that is not the embedding.
        """
        self.config, self.attention, self.gradient_sums = config, attention, gradient_sums
        self.remat: Remat = remat
        self.embed = Table(config, rngs)
        self.inputs = LayerInputs(config, rngs) if config.layer_inputs else None
        self.head = Table(config, rngs) if has_lm_head and not config.tied else None
        self.norm = Norm(config.d_model, "embed", eps=config.norm_eps, offset=config.norm_offset)
        self.value = ValueHead(config) if has_scalar_head else None
        vision = config.vision
        self.vision = TOWERS[vision.tower](vision, config.d_model, rngs) if vision else None

        def finished(block: Block, rngs: nnx.Rngs) -> Block:
            block = block if adapt is None else adapt(block, rngs)
            matrices = block.projections() | block.banks()
            for name, rounding in (simulated or {}).items():
                if name in matrices:
                    matrices[name].simulate(name, rounding)
            if quantization is not None:
                for name, matrix in matrices.items():
                    matrix.quantize(name, quantization)
            return block

        def stack(mixer: str) -> Block:
            @nnx.split_rngs(splits=len(config.layers_with(mixer)))
            @nnx.vmap
            def made(rngs: nnx.Rngs) -> Block:
                return finished(Block(config, mixer, rngs), rngs)

            return made(rngs)

        parts = {mixer: nnx.split(stack(mixer)) for mixer in config.mixers}
        self.layers = _joined([_flat(state) for _, state in parts.values()])
        self.structures = {mixer: Structure(graph, tuple(_flat(state))) for mixer, (graph, state) in parts.items()}

    def block(self, mixer: str) -> Block:
        """The layers with this mixer as one block, whose weights are stacked over all layers that have them."""
        flat = _flat(nnx.state(self.layers))
        return self.structures[mixer].block({path: flat[path] for path in self.structures[mixer].paths})

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segments: Segments,
        *,
        dtype: DType,
        noise: Float[Array, "B T D"] | None = None,
        dropout_keys: TokenKeys | None = None,
        pictures: Pictures | None = None,
        experts: Int[Array, "B T L k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Hidden states after the final norm, in `dtype`, and the layers' auxiliary terms, stacked.

        Args:
            segments: which tokens see each other, those of pictures included.
            noise: added to the embeddings (NEFTune).
            dropout_keys: a key for each token, by which adapters drop inputs; None drops nothing.
            pictures: of the rows, for a model that sees them.
            experts: those that each layer uses for each token, -1 where its router chooses; None where all do.
        """
        c = self.config
        x = embedded(c, self.embed.w[...], tokens, dtype)
        if noise is not None:
            x = x + noise.astype(dtype)
        if pictures is not None:
            assert self.vision is not None, "a model without a tower sees no pictures"
            assert self.vision.config.turns == (pictures.rope is not None), "rope is told of the rows that it turns by"
            x = with_pictures(x, self.vision(pictures, dtype), pictures)
        x = constrain(x, "rows", "time", None)
        stacked = {path: variable[...] for path, variable in _flat(nnx.state(self.layers)).items()}
        blocks = [self.block(mixer) for mixer in c.mixers]
        projections = {name: one for block in blocks for name, one in block.projections().items()}
        banks = {name: one for block in blocks for name, one in block.banks().items()}

        def cast(path: Path, w: jax.Array) -> jax.Array:
            module, name = path[-2:]
            if module in banks and name == "w":
                w = banks[module].on_grid(w)
            if module in projections:
                w = projections[module].on_grid(w) if name == "w" else w
                # What `project` casts itself has a gradient in its own dtype.
                if self.gradient_sums == "float32" and name in MATRICES:
                    return w
            return in_compute(name, w, dtype)

        turned = segments.positions if pictures is None or pictures.rope is None else jnp.asarray(pictures.rope)
        kinds = jnp.asarray([c.kinds_with(kind.mixer).index(kind) for kind in c.kinds])
        numbers = None if dropout_keys is None else jnp.arange(c.num_layers)
        by_layer = None if experts is None else jnp.moveaxis(constrain(experts, "rows", "time", None, None), 2, 0)
        plain, per_layer = (kinds, numbers, by_layer), self._layer_inputs(tokens, x)
        by_name: dict[str, list[jax.Array]] = {}
        shared: dict[str, PyTree] = {}
        for stage in c.stages:
            layer = partial(self._layer, stage, self._kinds(segments, turned), dropout_keys)
            others = Others(_part(plain, stage), _part(per_layer, stage), shared)
            period = [self.structures[kind.mixer].paths for kind in c.kinds[stage.start : stage.stop][: stage.period]]
            weights = self._of_stage(stacked, stage)
            x, terms = over_layers(layer, cast, x, weights, others, self.remat, period)
            for name, term in terms.items():
                if name.startswith(READ_LATER):  # by one layer
                    shared = {**shared, name.removeprefix(READ_LATER): jax.tree.map(lambda x: x[0], term)}
                else:
                    by_name.setdefault(name, []).append(term)
        # Cast as all weights are: a copy stored in the compute dtype (a reference, an export) then computes the same.
        norm = in_compute("norm/w", self.norm.w[...], dtype)
        auxiliary = {name: jnp.concatenate(terms) for name, terms in by_name.items()}
        return rms_norm(x, norm, eps=c.norm_eps, offset=c.norm_offset), auxiliary

    def _layer(
        self,
        stage: Stage,
        of_kind: Mapping[str, OfKind],
        dropout_keys: TokenKeys | None,
        place: int,
        x: Float[Array, "B T D"],
        weights: Weights,
        others: Others,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """The stream after a layer, its auxiliary terms, and the keys and values that later stages read.

        Args:
            stage: the layer's.
            of_kind: for each mixer what `_kinds_with` returns.
            dropout_keys: a key for each token.
            place: the layer's in its period.
            weights: those that it has.
            others: its kind and number, the experts of its tokens, its own inputs, and keys and values by the mixer of
                the layers that made them.
        """
        c, at = self.config, stage.start + place
        (index, number, experts), kind = others.plain, c.kinds[at]
        layer_keys = None if dropout_keys is None else fold_tokens(dropout_keys, number)
        rope, view = of_kind[kind.mixer](index)
        read = Kept(*others.shared[kind.source.mixer]) if kind.mixer in SHARED else None
        block = self.structures[kind.mixer].block(weights)
        x, kept, auxiliary = block(x, rope, view, read, layer_keys, others.differentiable, experts)
        auxiliary.pop(CHOSEN, None)  # nobody reads it here, and a scan would stack it over the layers
        if at in c.sources and stage.stop - stage.start == stage.period:
            assert isinstance(kept, Kept), "a layer hands on what others read"
            return x, {**auxiliary, READ_LATER + kind.mixer: (kept.keys, kept.values)}
        return x, auxiliary

    def _of_stage(self, stacked: Weights, stage: Stage) -> Weights:
        """The weights of the layers of a stage, each stacked over those of them that have it."""
        if len(self.config.stages) == 1:
            return stacked
        part: dict[Path, jax.Array] = {}
        for path, w in stacked.items():
            mixers = tuple(mixer for mixer, one in self.structures.items() if path in one.paths)
            within = [stage.start <= number < stage.stop for number in self.config.layers_with(mixers)]
            if any(within):
                part[path] = w[within.index(True) : within.index(True) + sum(within)]
        return part

    def _layer_inputs(self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Float[Array, "L B T Dp"] | None:
        """The inputs of each layer's own, where layers have some, for embedded tokens."""
        if self.inputs is None:
            return None
        embed, context, norm = self.inputs.embed.w[...], self.inputs.context.w[...], self.inputs.norm.w[...]
        context, norm = (in_compute("w", w, x.dtype) for w in (context, norm))
        return layer_inputs(self.config, embed, context, norm, tokens, x)

    def _kinds(self, segments: Segments, turned: Int[Array, "B T ..."]) -> dict[str, OfKind]:
        """For each mixer a function from the index of a layer's kind, among those of the mixer, to its rope tables and
        view: one block serves them all.

        Args:
            turned: where rope turns the tokens to, as in `rope_tables`.
        """
        return {mixer: self._kinds_with(mixer, segments, turned) for mixer in self.config.mixers}

    def _kinds_with(self, mixer: str, segments: Segments, turned: Int[Array, "B T ..."]) -> OfKind:
        kinds = self.config.kinds_with(mixer)
        tables = [rope_tables(turned, kind.rope, kind.head_dim) for kind in kinds]
        views = tuple(segments._replace(window=kind.window, attention=self.attention) for kind in kinds)
        if len(kinds) == 1:
            return lambda _: (tables[0], views[0])
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *tables)
        layers = tuple(self.config.kinds.count(kind) for kind in kinds)
        return lambda number: (jax.tree.map(lambda table: table[number], stacked), ByKind(views, number, layers))


def _part(stacked: PyTree, stage: Stage) -> PyTree:
    """The part of a stage in what is stacked over all layers."""
    return jax.tree.map(lambda x: x[stage.start : stage.stop], stacked)


def _flat(state: nnx.State) -> dict[Path, nnx.Variable]:
    return {tuple(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _joined(stacks: Sequence[Mapping[Path, nnx.Variable]]) -> nnx.Dict:
    """The weights of all layers, each stacked over those that have it, in the order of their kinds."""
    by_path: dict[Path, list[nnx.Variable]] = {}
    for stack in stacks:
        for path, variable in stack.items():
            by_path.setdefault(path, []).append(variable)

    def concatenated(parts: list[nnx.Variable]) -> nnx.Variable:
        if len(parts) == 1:
            return parts[0]
        return parts[0].replace(jnp.concatenate([part[...] for part in parts]))

    return _dict(tree_of({path: concatenated(parts) for path, parts in by_path.items()}))


def _dict(tree: Any) -> Any:
    return nnx.Dict({key: _dict(value) for key, value in tree.items()}) if isinstance(tree, dict) else tree
