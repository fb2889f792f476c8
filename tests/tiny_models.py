"""Random tiny models that transformers builds and saves, the reference of all model tests: one table for all families.

A new family adds rows here and inherits parity of logits and gradients, packing, and the round trip. Every weight is
random, norms and biases too, so that none of them can be forgotten unseen.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoConfig

from tunix.config import MeshConfig
from tunix.hf.model_folder import load_params
from tunix.mesh import build_mesh
from tunix.models.families.table import FAMILIES, read_config
from tunix.models.model import Model, Params

if TYPE_CHECKING:
    import torch

ROWS, LENGTH = 3, 40


@dataclass(frozen=True)
class Case:
    """One tiny configuration, in transformers' words."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Differences from SIZES."""

    def hf_config(self) -> Any:
        return AutoConfig.for_model(self.model_type, **{**SIZES, **self.fields})


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Stretched ropes start to matter beyond their original length: 8 or 16 here, of 40 positions.
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

CASES: dict[str, Case] = {
    "llama-grouped-tied": Case("llama", {"tie_word_embeddings": True}),
    "llama-multihead-untied-llama3": Case("llama", {"num_key_value_heads": 4, "rope_parameters": LLAMA3}),
    "llama-multiquery-linear-wide-heads": Case(
        "llama", {"num_key_value_heads": 1, "head_dim": 12, "rope_parameters": LINEAR}
    ),
    "llama-yarn": Case("llama", {"rope_parameters": YARN, "rms_norm_eps": 1e-3}),
    "llama-yarn-attention-factor": Case("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "gemma-multiquery": Case("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma-multihead-untied": Case("gemma", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "gemma2-windows-caps": Case(
        "gemma2",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-no-caps": Case(
        "gemma2",
        {"sliding_window": 5, "head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3-dual-rope": Case(
        "gemma3_text",
        {"sliding_window": 6, "layer_types": TYPES, "rope_parameters": GEMMA3_ROPE, "query_pre_attn_scalar": 24},
    ),
    "gemma3-pattern-untied-multiquery": Case(
        "gemma3_text",
        {
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 4.0,
        },
    ),
    "qwen2-biases-grouped": Case("qwen2", {}),
    "qwen2-window-tied": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3-wide-heads-tied": Case("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-yarn-window": Case(
        "qwen3",
        {"rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 7, "layer_types": TYPES},
    ),
}

# The norm of a DeltaNet's heads divides by what they read, which in a random model may be near 0: with an eps of 1e-6
# transformers' own gradients are 2e-3 off those in float64.
DELTA = {
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CASES |= {
    "qwen3_5-three-to-one": Case("qwen3_5_text", {**DELTA, "num_hidden_layers": 4}),
    "qwen3_5-wide-values-tied": Case(
        "qwen3_5_text",
        {
            **DELTA,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
    "qwen3_5-alone-key-heads": Case(
        "qwen3_5_text",
        {
            **DELTA,
            "rms_norm_eps": 3e-3,  # attention before them, computed in another order, moves what they read
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 4,
        },
    ),
}

CASES |= {
    "qwen3_moe-seven-of-three": Case(
        "qwen3_moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True},
    ),
    "qwen3_moe-one-of-four-tied": Case(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "head_dim": 16,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3_5_moe-five-of-two": Case(
        "qwen3_5_moe_text",
        {
            **DELTA,
            "layer_types": ["linear_attention", "full_attention"],
            "num_hidden_layers": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "qwen3_5_moe-three-of-four-tied": Case(
        "qwen3_5_moe_text",
        {
            **DELTA,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 12,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-five": Case("mixtral", {"num_local_experts": 5}),
    "mixtral-all-of-three-tied": Case(
        "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "tie_word_embeddings": True}
    ),
}

# Far from their tokens, global layers are told apart by the ropes of few pairs: a small theta turns them here.
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "hidden_size_per_layer_input": 0}
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
CASES |= {
    "gemma4-keys-are-values": Case(
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "rope_parameters": GEMMA4_ROPE,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma4-inputs-of-layers": Case(
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 120,
        },
    ),
    "gemma4-shared-keys": Case(
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            # transformers computes no such model without these; what few of them make may be near 0, and is normed.
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 97,
            "rope_parameters": GEMMA4_ROPE,
        },
    ),
    "gemma4-shared-keys-wide-ffn": Case(
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 97,
        },
    ),
    "gemma4_moe-five-of-three": Case(
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "rope_parameters": GEMMA4_ROPE,
            "final_logit_softcapping": 4.0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4-last-layer-global-untied": Case(
        "gemma4_text", {**GEMMA4, "num_key_value_heads": 1, "tie_word_embeddings": False}
    ),
}

CASES |= {
    "gpt_oss-five-of-two": Case(
        "gpt_oss",
        {
            "num_hidden_layers": 2,
            "head_dim": 12,
            "sliding_window": 6,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "swiglu_limit": 1.25,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}
HEAVY = ("gpt_oss-five-of-two", "qwen3_5_moe-five-of-two", "mixtral-five", "gemma4_moe-five-of-three")
"""Cases of which the fast tests compare logits and gradients alone: what else they would show, others do."""
EACH = (
    "llama-multiquery-linear-wide-heads",
    "gemma-multiquery",
    "gemma2-windows-caps",
    "gemma3-dual-rope",
    "qwen2-biases-grouped",
    "qwen3-wide-heads-tied",
    "qwen3_5-wide-values-tied",
    "qwen3_moe-seven-of-three",
    "gemma4-keys-are-values",
)
"""A case of each family, for what logits and gradients of all of them imply for the others."""


def randomise(model: "torch.nn.Module", seed: int = 0) -> None:
    """Fills every parameter: matrices with unit gain, vectors (norms, biases) around where they start.

    So too what does not train but is saved, such as a factor on a whole layer, which would amplify errors near 0. Where
    attention has no scale, norms of queries have it, as in trained models: softmaxes would be sharp and amplify too.
    """
    import torch  # not in the environment of `make test-newest`, whose tests use the rest of this file

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for buffer in saved_buffers(model).values():
            buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("sinks"):
                weight.copy_(noise)
            elif weight.ndim == 1:
                weight.add_(0.3 * noise)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
        for module in model.modules():
            if getattr(module, "scaling", None) == 1.0:
                module.q_norm.weight.mul_(module.head_dim**-0.5)


def saved_buffers(model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """The numbers of a model that do not train but are in its folder."""
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def reference_model(case: Case) -> Any:
    """transformers' model with random weights, float32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)  # decay rates of DeltaNets stay near where they start, which is random
    model = AutoModelForCausalLM.from_config(case.hf_config(), attn_implementation="eager", dtype=torch.float32)
    randomise(model)
    return model.eval()


def reference_folder(case: Case, folder: Path) -> Any:
    """Saves a random model into `folder` and returns it."""
    model = reference_model(case)
    model.save_pretrained(folder)
    return model


def one_device() -> jax.sharding.Mesh:
    return build_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])


def load(folder: Path, dtype: Any = "float32", mesh: Any = None) -> tuple[Model, Params]:
    """Our model of a folder and its weights."""
    model = Model(read_config(folder), dtype=dtype)
    return model, load_params(model, folder, dict.fromkeys(model.shapes, dtype), mesh or one_device())


def tokens(seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> np.ndarray:
    """Random ids; never 0, whose embedding transformers gives no gradient where it is the padding id."""
    return np.random.default_rng(seed).integers(3, SIZES["vocab_size"], (rows, length)).astype(np.int32)


class Rows(NamedTuple):
    """Packed rows `[B T]`, as the model takes them."""

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    needed: jax.Array


def rows_of(*rows: list[np.ndarray]) -> Rows:
    """Rows of ROWS x LENGTH, each given as its sequences; what is left over is padding."""
    ids, positions, segments = np.zeros((3, ROWS, LENGTH), np.int32)
    for row, held in enumerate(rows):
        start = 0
        for segment, sequence in enumerate(held, start=1):
            here = (row, slice(start, start + len(sequence)))
            ids[here], positions[here], segments[here] = sequence, np.arange(len(sequence)), segment
            start += len(sequence)
    return Rows(*map(jnp.asarray, (ids, positions, segments, segments > 0)))


# One program for a model serves all tests of it. Unoptimised code is compiled twice as fast and counts the same.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@partial(quick_jit, static_argnums=0)
def our_logits(model: Model, params: Params, rows: Rows) -> jax.Array:
    """All logits."""
    return model.logits(params, model.forward(params, rows.tokens, rows.positions, rows.segment_ids)[0])


def row_logprobs(model: Model, params: Params, tokens, positions, segment_ids, needed, temperature=1.0) -> jax.Array:
    """The log-probs of the needed tokens of packed rows, else 0, through the chunked head."""
    hidden, _ = model.forward(params, tokens, positions, segment_ids)
    return model.logprobs_of(params, hidden, tokens, positions, needed, temperature=temperature)[0]


@partial(quick_jit, static_argnums=0)
def loss_and_gradients(model: Model, params: Params, rows: Rows) -> tuple[jax.Array, Params]:
    """The summed negative log-prob of all tokens but each segment's first, through the chunked head."""
    return jax.value_and_grad(lambda params: -row_logprobs(model, params, *rows).sum())(params)


def by_hf_name(model: Model, params: Params) -> dict[str, np.ndarray]:
    """Our parameters (or gradients) under their names and in their layouts in a Hugging Face folder."""
    found = {}
    for name, array in params.items():
        tensor = FAMILIES[model.config.family].tensors[name]
        if name.startswith("layers/"):
            for place, layer in enumerate(model.config.layers_with(tensor.mixer)):
                own = np.asarray(array[place])
                keys = tensor.keys(layer, own.shape)
                parts = own if tensor.by_expert else [own]
                found |= {key: tensor.write(part) for key, part in zip(keys, parts, strict=True)}
        else:
            found[tensor.name] = tensor.write(np.asarray(array))
    return found


LLAMAS = ("gate_proj", "up_proj", "down_proj")
MERGED = {"qwen3_moe": LLAMAS, "qwen3_5_moe_text": LLAMAS, "mixtral": ("w1", "w3", "w2"), "gemma4_text": LLAMAS}
"""What the matrices of an expert are called in a folder, where transformers has one parameter for all experts."""


def merged(named: Mapping[str, np.ndarray], model_type: str) -> dict[str, np.ndarray]:
    """A folder's tensors as transformers' model holds them: one parameter for a matrix of all experts."""
    found, experts = {}, dict[str, dict[str, list[np.ndarray]]]()
    if model_type == "gpt_oss":
        return alternating(named)
    for name, array in named.items():
        if (parts := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name)) is None:
            found[name] = array
        else:
            experts.setdefault(parts[1], {}).setdefault(parts[2], []).append(array)
    for stem, matrices in experts.items():
        gate, up, down = (np.stack(matrices[one]) for one in MERGED[model_type])
        found |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}.down_proj": down}
    return {name.replace(".block_sparse_moe.", ".mlp."): array for name, array in found.items()}


def alternating(named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As `merged` where gates and ups take turns along the last axis, and there are biases."""
    found, experts = {}, dict[tuple[str, str], dict[str, list[np.ndarray]]]()
    for name, array in named.items():
        if (parts := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.(weight|bias)", name)) is None:
            found[name] = array
        else:
            experts.setdefault((parts[1], parts[3]), {}).setdefault(parts[2], []).append(array)
    for (stem, kind), matrices in experts.items():
        end = "_bias" if kind == "bias" else ""
        gates, ups = np.stack(matrices["gate_proj"]), np.stack(matrices["up_proj"])
        found[f"{stem}.gate_up_proj{end}"] = np.stack([gates, ups], axis=-1).reshape(*gates.shape[:-1], -1)
        if not end:
            found[f"{stem}.down_proj"] = np.stack(matrices["down_proj"])
    return found


def gradients_by_hf_name(reference: Any) -> dict[str, np.ndarray]:
    """The gradients of transformers' model under the names of a folder, each expert's for itself."""
    found = {}
    for name, weight in reference.named_parameters():
        gradient = weight.grad.numpy()
        if reference.config.model_type == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts"):
            found[name] = gradient
            continue
        if reference.config.model_type == "gpt_oss":
            found |= apart(name, gradient)
            continue
        gate, up, down = MERGED[reference.config.model_type]
        for expert, part in enumerate(gradient):
            halves = zip((gate, up), np.split(part, 2), strict=True) if last == "gate_up_proj" else [(down, part)]
            found |= {f"{stem}.{expert}.{matrix}.weight": one for matrix, one in halves}
    return found


def apart(name: str, gradient: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of each of gpt-oss's experts, from one of all of them; biases of down matrices stay together."""
    stem, _, last = name.rpartition(".")
    if last == "down_proj_bias":
        return {name: gradient}
    end = "bias" if last.endswith("_bias") else "weight"
    found = {}
    for expert, part in enumerate(gradient):
        parts = {"gate_proj": part[..., ::2], "up_proj": part[..., 1::2]} if "gate_up" in last else {"down_proj": part}
        found |= {f"{stem}.{expert}.{matrix}.{end}": one for matrix, one in parts.items()}
    return found
