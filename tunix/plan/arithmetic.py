"""What a program multiplies, moves and sends at the least, by the model's config, its packed rows and the mesh.

Products and kernels of attention hide what they read behind what they multiply, or the other way round; what stands
between them (norms, rope, activations, the optimizer) waits for memory alone, and adds to that. Nothing is counted that
a better compiler could leave out, so that no run on these devices is faster.

At the end, an upper estimate of the memory of a run (`estimated`): of one that is little nothing need be compiled.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tunix.errors import UserError
from tunix.lora.config import AdapterConfig
from tunix.mesh import RULES, bytes_of, groups_of
from tunix.models.attention.attend import SHORT
from tunix.models.config import DecoderConfig
from tunix.models.families.table import matrices
from tunix.models.scan import KEEPS, Remat
from tunix.plan.subject import structure
from tunix.recipe.recipe import Recipe
from tunix.run.opening import weight_counts
from tunix.trainer.mesh_choice import BYTES
from tunix.trainer.microbatches import TOKENS_ELSEWHERE
from tunix.trainer.perf import adapter_weights, idle_weights, matmul_weights, mixing_flops
from tunix.trainer.remat import activations
from tunix.types import Batch
from tunix.util.chips import Chip

RESULTS = {"q": "q", "k": "k", "v": "v", "o": "x", "gate": "gate", "up": "up"}
"""A layer's matrices -> the names in `KEEPS` of what they compute."""
ITEM = 2
"""Bytes of a number between products, at the least."""
BETWEEN_HOSTS = 50e9
"""Bytes that a GPU sends to another host a second: 400 Gb/s of InfiniBand for each
(https://www.nvidia.com/en-us/data-center/dgx-h100/)."""


class Work(NamedTuple):
    """The least that one run of a program does on each of its devices."""

    flops: float = 0.0
    """Multiplications and additions of products and of attention, recomputation included."""
    bytes: float = 0.0
    """Weights and caches that products and kernels read."""
    between: float = 0.0
    """Bytes that are read and written outside of products and kernels."""

    def seconds(self, chip: Chip) -> tuple[float, str]:
        """The least time on a chip, and what most of it waits for: `compute` or `memory`."""
        compute, memory, between = self.flops / chip.flops, self.bytes / chip.bandwidth, self.between / chip.bandwidth
        return max(compute, memory) + between, "compute" if compute > max(memory, between) else "memory"


def training(
    config: DecoderConfig,
    batch: Batch,
    adapter: AdapterConfig | None,
    remat: Remat,
    *,
    weights: int,
    state: int,
    devices: int,
    head: bool = True,
) -> Work:
    """An update on a packed batch.

    A product costs 2 FLOPs a weight and token forward, 2 for its input's gradient and 2 for a trained weight's.
    Attention's backward pass costs 2.5 of its forward, since scores are computed once more; logits are computed twice
    where the head trains.

    Args:
        config: the model.
        batch: the packed batch.
        adapter: what trains on frozen weights; None where all weights do.
        remat: what is recomputed.
        weights: bytes of all weights on each device: read forward and backward.
        state: bytes of the trained weights and their moments on each device: read and written once.
        devices: among how many the batch is divided.
        head: whether there is a head of the vocabulary's size; False for a critic.
    """
    tokens, layers = _tokens(batch), matmul_weights(config, head=False)
    table = config.vocab_size * config.d_model * head
    again = sum(
        x.layers * x.inputs * x.outputs
        for name, x in matrices(config).items()
        if name in RESULTS and RESULTS[name] not in KEEPS[remat]
    )
    products = (
        6 * layers + 8 * table if adapter is None else 4 * (layers + table) + 6 * adapter_weights(config, adapter)
    )
    attention, rest = _attention(config, batch), mixing_flops(config, tokens, 0.0)
    flops = (products + 2 * again) * tokens + 3.5 * attention + 3 * rest
    return Work(flops / devices, 2.0 * weights, 3 * _between(config, tokens) / devices + 2.0 * state)


def scoring(config: DecoderConfig, batch: Batch, *, weights: int, devices: int, head: bool = True) -> Work:
    """A forward pass over a packed batch; the arguments are those of `training`."""
    tokens = _tokens(batch)
    flops = 2 * matmul_weights(config, head) * tokens + _attention(config, batch) + mixing_flops(config, tokens, 0.0)
    return Work(flops / devices, weights, _between(config, tokens) / devices)


def sampling(
    config: DecoderConfig, tokens: int, context: int, *, weights: int, devices: int, item: int = 0, head: bool = True
) -> Work:
    """Tokens computed with the engine's copy of the weights: one in each slot, or those of prompts.

    Args:
        config: the model.
        tokens: how many there are on all devices.
        context: tokens that one sees on average, itself included.
        weights: bytes of the weights on each device, without an embedding that is only looked up.
        devices: how many sample.
        item: bytes of a number in the cache, which each token reads for itself; 0 for prompts, which need not read it.
        head: whether logits are computed.
    """
    seen = [(kind, min(context, kind.window or context)) for kind in config.kinds]
    cache = sum(2.0 * kind.kv_heads * kind.head_dim * number for kind, number in seen)
    attention = sum(4.0 * config.num_heads * kind.head_dim * number for kind, number in seen)
    flops = tokens * (2.0 * matmul_weights(config, head) + attention + mixing_flops(config, 1, 0.0))
    if config.experts is not None:  # few tokens do not meet all experts
        met = min(1.0, tokens * config.experts.active / config.experts.number)
        weights -= int((1 - met) * ITEM * idle_weights(config) / devices)
    return Work(flops / devices, weights + tokens * item * cache / devices)


def _tokens(batch: Batch) -> int:
    return int((np.asarray(batch.segment_ids) > 0).sum())


def _attention(config: DecoderConfig, batch: Batch) -> float:
    """FLOPs of attention forward: `4 N H` for a pair of a token and one that it sees."""
    seen = np.asarray(batch.positions)[np.asarray(batch.segment_ids) > 0] + 1.0
    pairs = {kind: np.minimum(seen, kind.window or np.inf).sum() for kind in config.distinct_kinds}
    return float(sum(4.0 * config.num_heads * kind.head_dim * pairs[kind] for kind in config.kinds))


def _between(config: DecoderConfig, tokens: int) -> float:
    """Bytes that a forward pass reads and writes between products: two norms, rope of queries and keys, an activation
    that reads gate and up."""
    heads = sum(2 * (config.num_heads + kind.kv_heads) * kind.head_dim for kind in config.kinds)
    active = 1 if config.experts is None else config.experts.active
    return float(ITEM * tokens * (heads + config.num_layers * (4 * config.d_model + 3 * active * config.ffn)))


class Sent(NamedTuple):
    """What each device sends to others in one run of a program, by the fewest bytes that a ring needs."""

    kinds: dict[str, float]
    """Kind of collective, e.g. `all-gather` -> bytes."""
    far: float
    """Those of these bytes that leave the devices which a fast network joins."""

    def seconds(self, chip: Chip) -> dict[str, float]:
        """The least time on a chip over each network."""
        return {"links": sum(self.kinds.values()) / chip.link, "network": self.far / BETWEEN_HOSTS}


def exchanged(
    config: DecoderConfig,
    mesh: Mesh,
    tokens: int,
    item: int,
    *,
    weights: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    trained: Collection[str] = (),
    microbatches: int = 1,
) -> Sent:
    """What devices send each other for a mesh's axes.

    `fsdp`: each pass over a micro-batch gathers the matrices of the layers, a backward pass again, and scatters the sum
    of the gradients of what trains (Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054). The table of the
    head is gathered once; a device has some columns of the embedding, and sends each other one those of its tokens.
    `data` and the other axes of the rows: the gradients' sum. `tensor`: two sums of activations in each layer, after
    attention and after the MLP, and as many in the backward pass (Shoeybi et al. 2019, Megatron-LM,
    https://arxiv.org/abs/1909.08053); one of the embedding, one of the head's gradient. `context`: keys and values are
    gathered, in the backward pass again, and their gradients scattered. `expert`: a token goes to the devices of its
    experts and back. What is recomputed sends nothing again.

    Args:
        config: the model.
        mesh: what it and the rows are split over.
        tokens: of one run, over all devices.
        item: bytes of a number of the computation.
        weights: all weights by name, as they are split; None where no device lacks a part, as in sampling.
        trained: names of those that train; none in a forward pass.
        microbatches: how often the layers are passed through.
    """
    sizes, passes, of_tokens = mesh.shape, 2 if trained else 1, (*(RULES["rows"] or ()), "context")
    local = tokens * item / math.prod(sizes[axis] for axis in of_tokens)
    sent: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)

    def send(kind: str, amount: float, *axes: str) -> None:
        devices = math.prod(sizes[axis] for axis in axes)
        sent[kind, axes] += amount * (devices - 1) / devices

    def split_over(x: jax.ShapeDtypeStruct) -> set[str]:
        assert isinstance(x.sharding, NamedSharding)
        return {axis for axes in x.sharding.spec for axis in ((axes,) if isinstance(axes, str) else axes or ())}

    for name, x in (weights or {}).items():
        split = split_over(x)
        shard = float(math.prod(x.sharding.shard_shape(x.shape)))
        whole = shard * (sizes["fsdp"] if "fsdp" in split else 1)
        looked_up = name.endswith("embed/w") and (name != "embed/w" or not config.tied)
        if "fsdp" in split and not looked_up:
            times = 1 if name in ("embed/w", "head/w") else passes * microbatches
            send("all-gather", times * min(item, bytes_of(x) / shard) * whole, "fsdp")
        if name in trained:
            if "fsdp" in split and not looked_up:
                send("reduce-scatter", microbatches * item * whole, "fsdp")
            send("all-reduce", 2 * microbatches * item * shard, *(axis for axis in of_tokens if axis not in split))
    if weights is not None and "fsdp" in split_over(weights["embed/w"]):
        send("all-to-all", (1 + ("embed/w" in trained)) * local * config.d_model, "fsdp")
    send("all-reduce", 2 * passes * (2 * config.num_layers + 1) * local * config.d_model, "tensor")
    heads = sum(2 * kind.kv_heads * kind.head_dim for kind in config.kinds if kind.paged)
    for kind, times in (("all-gather", passes), ("reduce-scatter", passes - 1)):
        send(kind, times * local * sizes["context"] * heads / sizes["tensor"], "context")
    if config.experts is not None and sizes["expert"] > 1:
        # Of the other devices, those that have any of a token's experts.
        devices = sizes["expert"]
        met = devices * (1 - (1 - 1 / devices) ** config.experts.active)
        send("all-to-all", 2 * passes * config.num_layers * local * config.d_model * met, "expert")
    group = {device: number for number, near in enumerate(groups_of(list(mesh.devices.flat))) for device in near}
    kinds, far = defaultdict[str, float](float), 0.0
    for (kind, axes), amount in sent.items():
        along = mesh.devices[tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)]
        if amount:
            kinds[kind] += amount
            far += amount * (len({group[device] for device in along.flat}) > 1)
    return Sent(dict(kinds), far)


SHARE = 0.5
"""The part of a device's memory that the estimate may take, so that nothing has to be compiled to see that it fits."""
STATE = 20
"""Bytes of a weight that trains, with two moments, the gradients of a micro-batch and their sum, all in float32."""


def estimated(recipe: Recipe, devices: int = 1) -> float | None:
    """Bytes of each device, above what any stage of a recipe needs; None where that is not known.

    It is not of a model of no known sizes, an adapter from a folder, an algorithm of the user's, a critic, a teacher, a
    reward model, pictures.

    Args:
        devices: among how many the weights are divided.
    """
    model = recipe.model
    try:
        config = structure(model, recipe.data.pictures is not None).decoder
    except UserError:
        return None
    if config.vision is not None:
        return None
    largest, item, stored = 0.0, BYTES[model.dtype], BYTES[model.param_dtype or model.dtype]
    remat = "block" if model.remat == "auto" else model.remat
    for stage in recipe.stages or (recipe,):
        trained, total = weight_counts(stage, config)
        name, judged = stage.algorithm.name, stage.reward and stage.reward.model
        if trained is None or stage.teacher or judged or name == "ppo" or ":" in name or remat == "offload":
            return None
        # A pair is packed into one row.
        length = stage.data.max_length * (2 if name in ("dpo", "reward") else 1)
        tokens = max(TOKENS_ELSEWHERE, (stage.micro_batch_size or 1) * length)
        needed = sum(activations(config, remat, item, tokens, min(length, SHORT)))
        # Beside a weight that trains there may be a reference's and the sampler's copy, beside a frozen one the latter.
        frozen = total - trained if stage.adapter is None else total
        weights = (STATE + 2 * item) * trained + (stored + item) * frozen
        largest = max(largest, weights / devices + needed)
    return largest
