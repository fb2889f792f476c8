"""A decoder as pure functions over a flat dict of arrays: the only interface through which other modules use a model.

`Model` splits the NNX module once. Its parameters are `{"layers/q/w": array, ...}`: one flat dict that jits, shards,
checkpoints and filters by name. The module, `Decoder`, is one for all families; what differs between them is in
`DecoderConfig`: tokens -> embeddings -> a scan over stacked blocks -> final norm -> hidden states `[B T D]`.
`token_logprobs.py` turns these into log-probs without ever holding all logits. Inputs are packed rows: in each segment
positions restart, and attention stays within it.

Adapters of `lora/` appear in the dict as `layers/q/w_lora_a` and `..._lora_b`; a variant adds `_lora_a0` and `_lora_b0`
(PiSSA) or `_lora_m` (DoRA).

Axes: B rows, T time, V vocabulary, D model width, F ffn width, N query heads, K kv heads, H head dim, L layers,
Dp width of inputs of layers, k chosen experts of a token.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from tunix.config import CacheType, DType, GradientSums
from tunix.errors import UserError
from tunix.mesh import Axes, constrain, platform, sharding
from tunix.models.attention.inputs import ByKind, Segments
from tunix.models.blocks import NAMES, PARTS, Attention, Auxiliary, Block, DraftHead, Kept, LayerInputs, layer_inputs
from tunix.models.config import MTP, SHARED, TOWER, DecoderConfig, Stage
from tunix.models.deltanet import before_each
from tunix.models.layers import (
    MATRICES,
    Matrix,
    Norm,
    Projection,
    RopeTables,
    TokenKeys,
    fold_tokens,
    rms_norm,
    rope_tables,
    weight,
)
from tunix.models.moe import CHOSEN, Bank
from tunix.models.quantization.formats import SCALE, Quantization, Simulated, in_compute, is_scale
from tunix.models.quantization.modules import BANKS
from tunix.models.scan import Others, Remat, Weights, over_layers
from tunix.models.token_logprobs import token_logprobs
from tunix.models.vision import TOWERS, seen_ahead, with_pictures
from tunix.types import Pictures
from tunix.util.exact import jit

Params = dict[str, jax.Array]
Path = tuple[str, ...]
"""Where a variable is in the module, e.g. `("layers", "mixer", "q", "w")`."""
TOGETHER = 1 << 26
"""Bytes, in float32, of the random matrices that one program creates before they are rounded, at most."""
PAGE = 4096
"""Bytes of a page of memory."""
READ_LATER = "kept by "
"""Begins the names under which a stage returns keys and values that later layers read, beside auxiliary terms."""
IN_DTYPE = ("beta", "decay")
"""Projections that are never multiplied in 8 bits: the rates of a DeltaNet's states, a number for each head."""
Adapt = Callable[["Block", nnx.Rngs], "Block"]


@jax.named_scope("embed")
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
        return nnx.merge(self.graph, unflatten_dict(weights))


class Decoder(nnx.Module):
    """The weights of the whole model; each of the layers' is stacked over those that have it."""

    def __init__(self, model: "Model", rngs: nnx.Rngs):
        """Creates all weights with random values."""
        config = model.config
        # A tied table is also the head, whose logits want unit scale; Gemma multiplies sqrt(D) back on the way in.
        sizes, axes, std = (config.vocab_size, config.d_model), ("vocab", "embed"), config.d_model**-0.5
        self.embed = Matrix(weight(rngs, sizes, axes, std))
        self.inputs = LayerInputs(config, rngs) if config.layer_inputs else None
        self.head = Matrix(weight(rngs, sizes, axes, std)) if model.has_lm_head and not config.tied else None
        self.norm = Norm(config.d_model, "embed", eps=config.norm_eps, offset=config.norm_offset)
        # Of a critic or a reward model: `x w` for each state. It starts at zero, and so predicts 0.
        value = nnx.Param(jnp.zeros((config.d_model,), jnp.float32), axes=("embed",))
        self.value = Matrix(value) if model.has_scalar_head else None
        self.mtp = DraftHead(config, rngs) if config.mtp else None
        vision = config.vision
        self.vision = TOWERS[vision.tower](vision, config.d_model, rngs) if vision else None

        def stack(mixer: str) -> Block:
            @nnx.split_rngs(splits=len(config.layers_with(mixer)))
            @nnx.vmap
            def made(rngs: nnx.Rngs) -> Block:
                block = Block(config, mixer, rngs)
                block = block if model.adapt is None else model.adapt(block, rngs)
                if isinstance(block.mixer, Attention):
                    block.mixer.cache_dtype = model.cache_dtype
                matrices = block.matrices()
                for name, rounding in model.simulated:
                    if name in matrices:
                        matrices[name].simulate(name, rounding)
                if model.quantization is not None:
                    for name, matrix in matrices.items():
                        matrix.quantize(name, model.quantization)
                for name, matrix in matrices.items():
                    matrix.fp8 = model.compute == "fp8" and name not in IN_DTYPE
                return block

            return made(rngs)

        parts = {mixer: nnx.split(stack(mixer)) for mixer in config.mixers}
        # Each weight is stacked over the layers that have it, in the order of their kinds.
        by_path: dict[Path, list[nnx.Variable]] = {}
        for _, state in parts.values():
            for path, variable in _flat(state).items():
                by_path.setdefault(path, []).append(variable)
        whole = {
            path: stacks[0] if len(stacks) == 1 else stacks[0].replace(jnp.concatenate([x[...] for x in stacks]))
            for path, stacks in by_path.items()
        }
        self.layers = _dict(unflatten_dict(whole))
        self.structures = {mixer: Structure(graph, tuple(_flat(state))) for mixer, (graph, state) in parts.items()}


def _flat(state: nnx.State) -> dict[Path, nnx.Variable]:
    return {tuple(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _dict(tree: Any) -> Any:
    return nnx.Dict({key: _dict(value) for key, value in tree.items()}) if isinstance(tree, dict) else tree


@dataclass(frozen=True)
class Model:
    """One model's structure and precision, without its weights."""

    config: DecoderConfig
    dtype: DType = "float32"
    """Dtype of the computation."""
    remat: Remat = "none"
    """What the backward pass recomputes of each layer; see `scan.KEEPS`."""
    gradient_sums: GradientSums = "compute"
    """Dtype in which the gradients of matrices are summed over tokens and devices: `dtype`, or float32."""
    router_aux_loss_coef: float = 0.0
    """What `trainer.expert_load.load_balance` is multiplied by in the loss that trains it; 0 for no such loss."""
    attention: str = "auto"
    """Name of the implementation of attention within rows; see `attend.implementation`."""
    adapt: Adapt | None = None
    """Adapts each block before it is stacked (`lora.adapt`); None for no adapter."""
    quantization: Quantization | None = None
    """How the layers' matrices are stored in few bits, norms and tables never; None stores them as they are."""
    simulated: tuple[tuple[str, Simulated], ...] = ()
    """Projections with simulated rounding (QAT) by name, and what each rounds; made by `formats.simulated`."""
    compute: Literal["fp8"] | None = None
    """In what the layers' matrices are multiplied (`layers.project_in_fp8`), but for `IN_DTYPE`; None: in `dtype`."""
    cache_dtype: CacheType | None = None
    """What attention in packed rows rounds keys and values to, as a sampler's cache does, with gradients as if it did
    not; None: nothing. What reads a cache rounds as that says."""
    has_scalar_head: bool = False
    """Whether there is a scalar head: the value head of a critic, or the score of a reward model."""
    has_lm_head: bool = True
    """Whether it gives log-probs; False for a reward model or a separate critic, which have the scalar head alone."""

    @cached_property
    def _decoder(self) -> Decoder:
        """The decoder without values."""
        return nnx.eval_shape(lambda: Decoder(self, nnx.Rngs(0)))

    @cached_property
    def _paths(self) -> dict[str, Path]:
        """The path in the module of each parameter, by the parameter's name."""
        return {name_of(path): path for path in _flat(nnx.state(self._decoder))}

    @cached_property
    def _variables(self) -> dict[str, nnx.Variable]:
        return {name_of(path): variable for path, variable in _flat(nnx.state(self._decoder)).items()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter; stacked ones start with L, or with the number of layers that have it."""
        return {name: variable.shape for name, variable in self._variables.items()}

    @cached_property
    def layers_of(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the layers that have each stacked parameter, in the order in which it is stacked."""
        mixers: dict[str, list[str]] = {}
        for mixer, structure in self._decoder.structures.items():
            for path in structure.paths:
                mixers.setdefault(name_of(("layers", *path)), []).append(mixer)
        kinds = list(enumerate(self.config.kinds))
        return {name: tuple(n for n, kind in kinds if kind.mixer in having) for name, having in mixers.items()}

    @cached_property
    def quantized(self) -> tuple[str, ...]:
        """Names of the parameters stored as rounded values; `is_scale` recognises those that hold their scales."""
        return tuple(name for name in self.shapes if name + SCALE in self.shapes)

    @cached_property
    def kinds(self) -> dict[str, jnp.dtype]:
        """Dtypes of the parameters whose dtype is fixed: rounded values and their scales."""
        fixed = {*self.quantized, *filter(is_scale, self.shapes)}
        return {name: variable.dtype for name, variable in self._variables.items() if name in fixed}

    @cached_property
    def axes(self) -> dict[str, Axes]:
        """Logical axes of each parameter."""
        axes: dict[str, Axes] = {name: variable.get_metadata("axes") for name, variable in self._variables.items()}
        return {name: ("layers", *of) if name.startswith("layers/") else of for name, of in axes.items()}

    def shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """The sharding of each parameter on a mesh."""
        return {name: sharding(self.axes[name], shape, mesh) for name, shape in self.shapes.items()}

    def abstract(self, dtypes: Mapping[str, DType], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of the parameters named in `dtypes`, which nobody has to make for that."""
        places = self.shardings(mesh)
        return {
            name: jax.ShapeDtypeStruct(self.shapes[name], self.kinds.get(name, dtype), sharding=places[name])
            for name, dtype in dtypes.items()
        }

    def init(self, key: PRNGKeyArray, dtypes: Mapping[str, DType], mesh: Mesh) -> Params:
        """Random values for the parameters named in `dtypes`, created with their sharding; others are never computed.

        Quantized values and their scales keep their fixed dtype (`kinds`).
        """

        # Groups of matrices that may exist unrounded at the same time: TOGETHER bytes at most, or one matrix.
        groups = [[name for name in dtypes if name not in self.kinds], []]
        for name in self.quantized:
            if name not in dtypes:
                continue
            together = (*groups[-1], name)
            if groups[-1] and sum(4 * math.prod(self.shapes[x]) for x in together if not is_scale(x)) > TOGETHER:
                groups.append([])
            groups[-1] += [name, name + SCALE]
        params: Params = {}
        for names in filter(None, groups):
            kinds = tuple((name, self.kinds.get(name, dtypes[name])) for name in names)
            jax.block_until_ready(params)
            params |= _maker(self, kinds, mesh)(key)
        return {name: params[name] for name in dtypes}

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        *,
        parents: Int[Array, "B T"] | None = None,
        interleaved: bool = False,
        noise: Float[Array, "B T D"] | None = None,
        dropout_keys: TokenKeys | None = None,
        pictures: Pictures | None = None,
        experts: Int[Array, "B T L k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Hidden states after the final norm, and auxiliary terms, stacked over the layers that have them at all.

        Args:
            parents, interleaved, pictures, experts: as in `types.Batch`.
            noise: added to the embeddings (NEFTune).
            dropout_keys: a key for each token, by which adapters drop inputs; None drops nothing.
        """
        c, dtype, structures, matrices = self.config, self.dtype, self._decoder.structures, self.matrices
        segments = Segments(segment_ids, positions, parents, **seen_ahead(pictures, c.vision), interleaved=interleaved)
        x = embedded(c, params["embed/w"], tokens, dtype)
        if noise is not None:
            x = x + noise.astype(dtype)
        if pictures is not None:
            assert c.vision is not None, "a model without a tower sees no pictures"
            assert c.vision.any_shape == (pictures.rope is not None), "rope is told of the rows that it turns by"
            x = with_pictures(x, self.soft_tokens(params, pictures), pictures)
        x = constrain(x, "rows", "time", None)
        stacked = {path[1:]: params[name] for name, path in self._paths.items() if path[0] == "layers"}

        def cast(path: Path, w: jax.Array) -> jax.Array:
            module, name = path[-2:]
            if module in matrices:
                w = matrices[module].on_grid(w) if name == "w" else w
                # What `project` casts itself has a gradient in its own dtype.
                if self.gradient_sums == "float32" and name in MATRICES and isinstance(matrices[module], Projection):
                    return w
            return in_compute(name, w, dtype)

        # Where rope turns the tokens to.
        places = positions if pictures is None or pictures.rope is None else jnp.asarray(pictures.rope)
        kinds = jnp.asarray([c.kinds_with(kind.mixer).index(kind) for kind in c.kinds])
        numbers = None if dropout_keys is None else jnp.arange(c.num_layers)
        by_layer = None if experts is None else jnp.moveaxis(constrain(experts, "rows", "time", None, None), 2, 0)
        plain, per_layer = (kinds, numbers, by_layer), None
        if c.layer_inputs:
            embed, context, norm = (params[name] for name in NAMES)
            context, norm = (in_compute("w", w, dtype) for w in (context, norm))
            per_layer = layer_inputs(c, embed, context, norm, tokens, x)

        def kinds_with(mixer: str) -> Callable[[Int[Array, ""]], tuple[RopeTables, Segments | ByKind]]:
            """A function from the index of a layer's kind, among those of its mixer, to its rope tables and view: one
            block serves them all."""
            kinds = c.kinds_with(mixer)
            tables = [rope_tables(places, kind.rope, kind.head_dim) for kind in kinds]
            views = tuple(segments._replace(window=kind.window, attention=self.attention) for kind in kinds)
            if len(kinds) == 1:
                return lambda _: (tables[0], views[0])
            stacked = jax.tree.map(lambda *each: jnp.stack(each), *tables)
            layers = tuple(c.kinds.count(kind) for kind in kinds)
            return lambda number: (jax.tree.map(lambda table: table[number], stacked), ByKind(views, number, layers))

        of_kind = {mixer: kinds_with(mixer) for mixer in c.mixers}

        def layer(
            stage: Stage, place: int, x: Float[Array, "B T D"], weights: Weights, others: Others
        ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
            """The stream after the layer at a place of a stage's period, its auxiliary terms, and the keys and values
            that later stages read, by the mixer of the layers that made them."""
            at = stage.start + place
            (index, number, layer_experts), kind = others.plain, c.kinds[at]
            layer_keys = None if dropout_keys is None else fold_tokens(dropout_keys, number)
            rope, view = of_kind[kind.mixer](index)
            read = Kept(*others.shared[kind.source.mixer]) if kind.mixer in SHARED else None
            block = structures[kind.mixer].block(weights)
            x, kept, terms = block(x, rope, view, read, layer_keys, others.differentiable, layer_experts)
            terms.pop(CHOSEN, None)  # nobody reads it here, and a scan would stack it over the layers
            if at in c.sources and stage.stop - stage.start == stage.period:
                assert isinstance(kept, Kept), "a layer hands on what others read"
                return x, {**terms, READ_LATER + kind.mixer: (kept.keys, kept.values)}
            return x, terms

        by_name: dict[str, list[jax.Array]] = {}
        shared: dict[str, PyTree] = {}
        for stage in c.stages:
            of_stage = slice(stage.start, stage.stop)
            inputs, own_inputs = jax.tree.map(lambda x, part=of_stage: x[part], (plain, per_layer))
            period = [structures[kind.mixer].paths for kind in c.kinds[of_stage][: stage.period]]
            weights = stacked
            if len(c.stages) > 1:  # each stacked over the layers of the stage that have it
                weights = {}
                for path, w in stacked.items():
                    mixers = tuple(mixer for mixer, structure in structures.items() if path in structure.paths)
                    within = [stage.start <= number < stage.stop for number in c.layers_with(mixers)]
                    if any(within):
                        weights[path] = w[within.index(True) : within.index(True) + sum(within)]
            others = Others(inputs, own_inputs, shared)
            x, terms = over_layers(partial(layer, stage), cast, x, weights, others, self.remat, period)
            for name, term in terms.items():
                if name.startswith(READ_LATER):  # by one layer
                    shared = {**shared, name.removeprefix(READ_LATER): jax.tree.map(lambda x: x[0], term)}
                else:
                    by_name.setdefault(name, []).append(term)
        # Cast as all weights are: a copy stored in the compute dtype (a reference, an export) then computes the same.
        norm = in_compute("norm/w", params["norm/w"], dtype)
        auxiliary = {name: jnp.concatenate(terms) for name, terms in by_name.items()}
        return rms_norm(x, norm, eps=c.norm_eps, offset=c.norm_offset), auxiliary

    @jax.named_scope("vision")
    def soft_tokens(self, params: Params, pictures: Pictures) -> Float[Array, "B Pi So D"]:
        """The embeddings of the soft tokens of pictures, by the tower among these parameters."""
        tower = {self._paths[name][1:]: x for name, x in params.items() if name.startswith(TOWER)}
        return nnx.merge(nnx.graphdef(self._decoder.vision), unflatten_dict(tower))(pictures, self.dtype)

    def draft_head(self, params: Params) -> DraftHead:
        """The head that drafts tokens, with its weights among these parameters, in the compute dtype."""
        names = [name for name in params if name.startswith(MTP)]
        head = {self._paths[name][1:]: in_compute(name, params[name], self.dtype) for name in names}
        return nnx.merge(nnx.graphdef(self._decoder.mtp), unflatten_dict(head))

    def draft_states(
        self,
        params: Params,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        parents: Int[Array, "B T"] | None = None,
        pictures: Pictures | None = None,
    ) -> Float[Array, "B T D"]:
        """States from which the head drafts the token after each one; those of first tokens mean nothing.

        Args:
            hidden: of `forward`, of which that of the token before each is read.
            parents, pictures: as in `types.Batch`.
        """
        before = before_each(segment_ids, parents)
        earlier = partial(jnp.take_along_axis, indices=jnp.maximum(before, 0)[..., None], axis=1)
        ids = jnp.where(before >= 0, segment_ids, 0)  # nothing is kept of a first token, which has none before it
        above = None if parents is None else jnp.where(before >= 0, parents, 0)
        places, kind = jnp.maximum(positions - 1, 0), self.config.cached_kinds[-1]
        view = Segments(ids, places, above, attention=self.attention)
        x, turned = embedded(self.config, params["embed/w"], tokens, self.dtype), places
        if pictures is not None:
            x = with_pictures(x, self.soft_tokens(params, pictures), pictures)
            turned = places if pictures.rope is None else earlier(jnp.asarray(pictures.rope))
        states, _ = self.draft_head(params)(x, earlier(hidden), rope_tables(turned, kind.rope, kind.head_dim), view)
        return states

    @jax.named_scope("head")
    def logits(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """All logits, float32. For few tokens: sampling and tests."""
        logits = jnp.einsum("BTD,VD->BTV", hidden, self.table(params), preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def table(self, params: Params) -> Float[Array, "V D"]:
        """The table of the language-model head, in the compute dtype."""
        return params["embed/w" if self.config.tied else "head/w"].astype(self.dtype)

    @jax.named_scope("head")
    def logprobs_of(
        self,
        params: Params,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        needed: Bool[Array, "B T"],
        *,
        entropy: bool = False,
        temperature: float = 1.0,
        candidates: Int[Array, "B T A"] | None = None,
        whole: bool = False,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
        """`log p(token_t | its segment before t)`, that distribution's entropy and the candidates' masses, as in
        `token_logprobs`, at the needed tokens, else 0.

        Args:
            hidden: of `forward`.
            candidates: as in `types.Batch`: where a token has some, the distribution is over these alone.
            whole: as in `token_logprobs`.
        """
        # The state at t - 1 predicts token t; nothing predicts the first token of a segment.
        needed = (needed & (positions > 0))[:, 1:]
        shifted = token_logprobs(
            hidden[:, :-1],
            self.table(params),
            tokens[:, 1:],
            needed,
            softcap=self.config.logit_softcap,
            entropy=entropy,
            temperature=temperature,
            candidates=None if candidates is None else candidates[:, 1:],
            whole=whole,
        )
        logprobs, spread, mass = (jnp.pad(x, ((0, 0), (1, 0))) for x in shifted)
        return logprobs, spread, mass

    @jax.named_scope("head")
    def above_mean_of(
        self,
        params: Params,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """How far each token's logit is above the mean of the vocabulary's, in float32; 0 at the first of a segment.

        The mean of products is the product with the mean of the table's rows, so that no logits are computed.

        Raises:
            UserError: the logits are softcapped, and no products.
        """
        if self.config.logit_softcap is not None:
            raise UserError(
                f"algorithm.label_smoothing: this model's logits are softcapped at {self.config.logit_softcap:g}, and "
                "their mean over the vocabulary is no single product: leave label_smoothing at 0"
            )
        table, product = self.table(params), partial(jnp.einsum, preferred_element_type=jnp.float32)
        mean = product("BTD,D->BT", hidden[:, :-1].astype(jnp.float32), jnp.mean(table, axis=0, dtype=jnp.float32))
        above = product("BTD,BTD->BT", hidden[:, :-1], table[tokens[:, 1:]]) - mean
        return jnp.where(positions > 0, jnp.pad(above, ((0, 0), (1, 0))), 0.0)

    @jax.named_scope("head")
    def values_of(
        self, params: Params, hidden: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """Values in float32: at t that of the state before token t is sampled; 0 at the first token of a segment."""
        values = hidden.astype(jnp.float32) @ params["value/w"].astype(jnp.float32)
        values = jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
        return jnp.where(positions > 0, values, 0.0)

    def rounding(self, name: str) -> tuple[Quantization, int]:
        """The quantization of a layer's matrix, given its stacked name, and how many of its axes are inputs."""
        assert self.quantization is not None
        return self.quantization, len(self.shapes[name]) - len(self.shapes[name + SCALE]) + 1

    def on_grid(self, name: str, w: jax.Array) -> jax.Array:
        """A layer's parameter with its simulated rounding, before it is cast, given its stacked name.

        See `Projection.on_grid`.
        """
        module = name.removeprefix("layers/").removesuffix("/w")
        return self.matrices[module].on_grid(w) if module in self.matrices else w

    @cached_property
    def matrices(self) -> dict[str, Projection | Bank]:
        """The projections of the layers and the banks of their experts by name, without their weights' values."""
        flat, structures = _flat(nnx.state(self._decoder.layers)), self._decoder.structures.values()
        blocks = [structure.block({path: flat[path] for path in structure.paths}) for structure in structures]
        return {name: matrix for block in blocks for name, matrix in block.matrices().items()}

    def layer(self, weights: Params, mixer: str, has_gains: bool = True) -> Block:
        """One block built from its weights, which are named as in `layers/` and have no axis L.

        Args:
            mixer: the layer's (`LayerKind.mixer`).
            has_gains: the weights hold DoRA's gains in place of its magnitudes, as weights for decoding do.
        """
        paths = {name: self._paths.get(f"layers/{name}") for name in weights}
        placed = {path[1:]: weights[name] for name, path in paths.items() if path is not None}
        block, turned = self._decoder.structures[mixer].block(placed), self.turned
        for name, matrix in block.matrices().items():
            if isinstance(matrix, Projection):
                matrix.has_gains, matrix.turned = has_gains, name in turned
            if matrix.fp8:  # `kv_cache.unstack` rounded it
                matrix.w_scale, matrix.quantized = nnx.Param(weights[f"{name}/w{SCALE}"]), True
        return block

    @property
    def turned(self) -> frozenset[str]:
        """Projections whose matrix is stored with its contracted axes last for sampling: those in 8-bit floats on a
        GPU, whose kernels read inputs side by side, and wide ones on a CPU.

        On a CPU the product of a few rows with a matrix whose rows are longer than a memory page takes 1.2 to 1.9 times
        as long as with the transposed matrix, whose rows are shorter.
        """
        if platform() != "cpu":
            return self.in_fp8.difference(BANKS) if platform() == "gpu" else frozenset()
        narrow = [name for name, x in self.matrices.items() if isinstance(x, Projection) and x.contracted == 1]
        matrices = {name: self.shapes[f"layers/{name}/w"][1:] for name in narrow}
        page = PAGE // jnp.dtype(self.dtype).itemsize
        wide = [name for name, (inputs, *rest) in matrices.items() if math.prod(rest) > max(page, inputs)]
        return frozenset(x for x in wide if f"layers/{x}/w" not in self.quantized and x not in self.in_fp8)

    @cached_property
    def in_fp8(self) -> frozenset[str]:
        """Matrices whose products are those of 8-bit floats."""
        return frozenset(name for name, x in self.matrices.items() if x.fp8)


@lru_cache(maxsize=16)
def _maker(
    model: Model, kinds: tuple[tuple[str, DType | jnp.dtype], ...], mesh: Mesh
) -> Callable[[PRNGKeyArray], Params]:
    """The compiled program that creates the named random parameters in their dtypes; equal models share it."""
    places = model.shardings(mesh)

    def make(key: PRNGKeyArray) -> Params:
        state = _flat(nnx.state(Decoder(model, nnx.Rngs(key))))
        flat = {name_of(path): variable[...] for path, variable in state.items()}
        return {name: flat[name].astype(kind) for name, kind in kinds}

    return jit(make, out_shardings={name: places[name] for name, _ in kinds})


def name_of(path: Path) -> str:
    """The name of a parameter: its path in the module without the parts of a block, e.g. `layers/q/w`."""
    return "/".join(part for part in path if part not in PARTS)


def rounded(model: Model, params: Params) -> tuple[Params, dict[str, float]]:
    """The weights rounded as a model with `simulated` computes with them, one matrix after the other.

    Returns:
        All weights, and for each rounded matrix its change in the compute dtype: the root mean square of the change,
        divided by that of the matrix.
    """

    @partial(jit, static_argnames="name")
    def on_grid_of(name: str, w: Float[Array, "L ..."]) -> tuple[jax.Array, jax.Array]:
        on_grid = jax.lax.map(partial(model.on_grid, name), w)
        change = on_grid.astype(model.dtype).astype(jnp.float32) - w.astype(jnp.float32)
        return on_grid, jnp.sum(change**2) / jnp.sum(w.astype(jnp.float32) ** 2)

    changed, moved = dict(params), {}
    for name in (f"layers/{one}/w" for one, rounding in model.simulated if rounding.weights and one in model.matrices):
        changed[name], error = on_grid_of(name, params[name])
        moved[name] = math.sqrt(float(error))
    return changed, moved
