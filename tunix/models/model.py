"""A decoder as pure functions over a flat dict of arrays: the only way the rest of the house meets a model.

`Model` splits the NNX module once. Its parameters are `{"layers/q/w": array, ...}`: one flat dict that jits, shards,
checkpoints and filters by name. Adapters of `lora/` appear in it as `layers/q/w_lora_a` and `..._lora_b`; a variant
adds `_lora_a0` and `_lora_b0` (PiSSA) or `_lora_m` (DoRA).

Axes: B rows, T time, D model.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from tunix.config import DType
from tunix.mesh import Axes, sharding
from tunix.models.config import DecoderConfig
from tunix.models.decoder import Adapt, Block, Decoder
from tunix.models.layers import Projection, Segments, TokenKeys
from tunix.models.quantization.fake_quant import Simulated
from tunix.models.quantization.formats import SCALE, Quantization, is_scale
from tunix.models.token_logprobs import token_logprobs
from tunix.util.exact import jit

Params = dict[str, jax.Array]
TOGETHER = 1 << 26
"""Bytes of random matrices that are made in one program, before they are rounded."""


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return "_lora_" in name


def is_own(name: str) -> bool:
    """Whether no folder of a base holds a parameter: an adapter's and a value head's are added, and always train."""
    return is_adapter(name) or name.startswith("value/")


PAGE = 4096
"""Bytes of a page of memory."""


@dataclass(frozen=True)
class Model:
    """One model's structure and precision, without its weights."""

    config: DecoderConfig
    dtype: DType = "float32"
    """Of the computation."""
    remat: bool = False
    """Recompute each layer in the backward pass."""
    adapt: Adapt | None = None
    """How blocks are adapted (`lora.adapt`), if they are."""
    quantization: Quantization | None = None
    """How the layers' matrices are rounded, if they are."""
    simulated: tuple[tuple[str, Simulated], ...] = ()
    """How some projections compute as if they were rounded, by name (QAT); `models.simulated.simulated` makes it."""
    critic: bool = False
    """Has a value head."""
    speaks: bool = True
    """Gives log-probs; False for a reward model, and a critic of its own, which have the value head alone."""

    @cached_property
    def _split(self) -> tuple[nnx.GraphDef, dict[str, nnx.Variable]]:
        abstract = nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))
        graph, state = nnx.split(abstract)
        return graph, {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter; stacked ones start with L."""
        return {name: variable.shape for name, variable in self._split[1].items()}

    @cached_property
    def quantized(self) -> tuple[str, ...]:
        """The parameters that are held as rounded values; `is_scale` tells those that hold their scales."""
        return tuple(name for name in self.shapes if name + SCALE in self.shapes)

    @cached_property
    def kinds(self) -> dict[str, jnp.dtype]:
        """The dtype of each parameter that has one of its own: of rounded values, and of their scales."""
        fixed = {*self.quantized, *filter(is_scale, self.shapes)}
        return {name: variable.dtype for name, variable in self._split[1].items() if name in fixed}

    @cached_property
    def axes(self) -> dict[str, Axes]:
        """Logical axes of each parameter; an adapter's follow its base's."""
        return {name: _axes(name, variable) for name, variable in self._split[1].items()}

    def shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """Where each parameter lives on a mesh."""
        return {name: sharding(self.axes[name], shape, mesh) for name, shape in self.shapes.items()}

    def init(self, key: PRNGKeyArray, dtypes: Mapping[str, DType], mesh: Mesh) -> Params:
        """Random values for the parameters named in `dtypes`, made where they live; the others are never computed.

        Those that are quantized, and their scales, keep the dtype that they have.
        """

        def made(names: list[str]) -> Params:
            kinds = tuple((name, self.kinds.get(name, dtypes[name])) for name in names)
            return _maker(self, kinds, mesh)(key)

        params = made([name for name in dtypes if name not in self.kinds])
        for names in self._together([name for name in self.quantized if name in dtypes]):
            params |= jax.block_until_ready(made([one for name in names for one in (name, name + SCALE)]))
        return {name: params[name] for name in dtypes}

    def _together(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Matrices that may be there together as they were before rounding: small ones, or one alone."""
        group: list[str] = []
        for name in names:
            if group and sum(4 * math.prod(self.shapes[one]) for one in (*group, name)) > TOGETHER:
                yield group
                group = []
            group.append(name)
        if group:
            yield group

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        *,
        parents: Int[Array, "B T"] | None = None,
        noise: Float[Array, "B T D"] | None = None,
        drawn: TokenKeys | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm; `parents` as in `types.Batch`, `noise` and `drawn` as in `Decoder`."""
        decoder = nnx.merge(self._split[0], _nest(params))
        return decoder(tokens, Segments(segment_ids, positions, parents), dtype=self.dtype, noise=noise, drawn=drawn)

    def logits(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """All logits, float32. For few tokens: sampling and tests."""
        logits = jnp.einsum("BTD,VD->BTV", hidden, self.table(params), preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def table(self, params: Params) -> Float[Array, "V D"]:
        """The head's table in the compute dtype."""
        return params["embed/w" if self.config.tied else "head/w"].astype(self.dtype)

    def logprobs(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        needed: Bool[Array, "B T"],
        *,
        entropy: bool = False,
        temperature: float = 1.0,
        noise: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """`log p(token_t | its segment before t)` and that distribution's entropy at the needed tokens, else 0."""
        hidden = self.hidden(params, tokens, positions, segment_ids, noise=noise)
        return self.logprobs_of(params, hidden, tokens, positions, needed, entropy=entropy, temperature=temperature)

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
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """`logprobs` from hidden states that are there already."""
        # The state at t - 1 predicts token t; the first token of a segment is predicted by nothing.
        needed = (needed & (positions > 0))[:, 1:]
        found = token_logprobs(
            hidden[:, :-1],
            self.table(params),
            tokens[:, 1:],
            needed,
            softcap=self.config.logit_softcap,
            entropy=entropy,
            temperature=temperature,
        )
        logprobs, spread = (jnp.pad(x, ((0, 0), (1, 0))) for x in found)
        return logprobs, spread

    def values_of(
        self, params: Params, hidden: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """At t the value of the state before token t is drawn, float32; 0 at the first token of a segment."""
        values = hidden.astype(jnp.float32) @ params["value/w"].astype(jnp.float32)
        values = jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
        return jnp.where(positions > 0, values, 0.0)

    def rounding(self, name: str) -> tuple[Quantization, int]:
        """How one layer's matrix is rounded, by its stacked name, and how many of its axes are inputs."""
        assert self.quantization is not None
        return self.quantization, len(self.shapes[name]) - len(self.shapes[name + SCALE]) + 1

    def on_grid(self, name: str, w: jax.Array) -> jax.Array:
        """One layer's parameter as it multiplies, before it is cast, by its stacked name: see `Projection.on_grid`."""
        return self._simulating[name].on_grid(w) if name in self._simulating else w

    @cached_property
    def _simulating(self) -> dict[str, Projection]:
        """The projections that round, by the name of their matrix."""
        found = self._layers.projections()
        return {f"layers/{name}/w": found[name] for name, _ in self.simulated}

    @cached_property
    def _layers(self) -> Block:
        return nnx.eval_shape(lambda: self._build(nnx.Rngs(0)).layers)

    @cached_property
    def _layer_graph(self) -> nnx.GraphDef:
        return nnx.split(self._layers)[0]

    def layer(self, weights: Params, settled: bool = True) -> Block:
        """One block from its own weights, named as in `layers/` but without the axis L.

        Args:
            settled: the weights hold DoRA's gains in the place of its magnitudes, as those for decoding do.
        """
        block: Block = nnx.merge(self._layer_graph, _nest(weights))
        for name, projection in block.projections().items():
            projection.settled, projection.turned = settled, name in self.turned
        return block

    @cached_property
    def turned(self) -> frozenset[str]:
        """Projections whose matrix is kept with its contracted axes last for sampling: wide ones, on a CPU.

        There the product of a few rows with a matrix whose rows are longer than a memory page takes 1.2 to 1.9 times
        as long as with the same matrix turned around, which has shorter ones.
        """
        if jax.default_backend() != "cpu":
            return frozenset()
        projections = self._layers.projections().items()
        matrices = {name: self.shapes[f"layers/{name}/w"][1:] for name, one in projections if one.contracted == 1}
        page = PAGE // jnp.dtype(self.dtype).itemsize
        wide = [name for name, (inputs, *rest) in matrices.items() if math.prod(rest) > max(page, inputs)]
        return frozenset(name for name in wide if f"layers/{name}/w" not in self.quantized)

    def _build(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(
            self.config,
            rngs,
            adapt=self.adapt,
            quantization=self.quantization,
            simulated=dict(self.simulated),
            remat=self.remat,
            critic=self.critic,
            speaks=self.speaks,
        )


@lru_cache(maxsize=16)
def _maker(
    model: Model, kinds: tuple[tuple[str, DType | jnp.dtype], ...], mesh: Mesh
) -> Callable[[PRNGKeyArray], Params]:
    """The compiled program that makes the named random values in their dtypes; the same for models that are equal."""
    places = model.shardings(mesh)

    def make(key: PRNGKeyArray) -> Params:
        flat = _flatten(nnx.to_pure_dict(nnx.split(model._build(nnx.Rngs(key)))[1]))
        return {name: flat[name].astype(kind) for name, kind in kinds}

    return jit(make, out_shardings={name: places[name] for name, _ in kinds})


def _axes(name: str, variable: nnx.Variable) -> Axes:
    axes: Axes = variable.get_metadata("axes")
    rank = len(variable.shape) - name.startswith("layers/")
    if name.endswith(("_lora_a", "_lora_a0")):
        axes = (*axes[: rank - 1], "rank")
    elif name.endswith(("_lora_b", "_lora_b0")):
        axes = ("rank", *axes[len(axes) - rank + 1 :])
    return ("layers", *axes) if name.startswith("layers/") else axes


def _nest(flat: Mapping[str, jax.Array]) -> dict:
    nested: dict = {}
    for name, value in flat.items():
        *path, last = name.split("/")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return nested


def _flatten(nested: dict, prefix: str = "") -> Params:
    flat: Params = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value
    return flat
