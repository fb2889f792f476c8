"""Tiny models as transformers names their tensors and as MaxText lays them, both written out here, without tunix.

What MaxText's mapping does is spelled out head by head and layer by layer. `there` gives the arrays of a checkpoint by
their paths below `params/params`.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import save_file

SIZES = {"V": 40, "D": 16, "F": 24, "N": 4, "K": 2, "H": 16}
FIELDS = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": {"model_type": "llama", "num_hidden_layers": 3, "tie_word_embeddings": False},
    "llama3.1": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
        "rope_parameters": LLAMA31,
    },
    "gemma2": {"model_type": "gemma2", "num_hidden_layers": 4, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 14, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "qwen2": {"model_type": "qwen2", "num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 3, "tie_word_embeddings": False},
}
"""Differences of each family from FIELDS; Gemma 3 has two scanned blocks of six layers and two layers that are left."""
Tensors = dict[str, np.ndarray]


def fields(family: str, **changes) -> dict:
    """A config.json."""
    return FIELDS | FAMILIES[family] | changes


def tensors(config: dict, dtype=np.float32, seed: int = 0) -> Tensors:
    """Random weights by transformers' names; those of norms are multiples of 1/64, so that 1 + w is exact."""
    rng, model_type = np.random.default_rng(seed), config["model_type"]
    d, f = config["hidden_size"], config["intermediate_size"]
    h = config["head_dim"]
    q, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    if model_type.startswith("gemma"):
        norms |= {"pre_feedforward_layernorm": d, "post_feedforward_layernorm": d}
    if model_type in ("gemma3_text", "qwen3"):
        norms |= {"self_attn.q_norm": h, "self_attn.k_norm": h}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}.weight": (size,) for name, size in norms.items()}
        shapes |= {
            at + "self_attn.q_proj.weight": (q, d),
            at + "self_attn.k_proj.weight": (kv, d),
            at + "self_attn.v_proj.weight": (kv, d),
            at + "self_attn.o_proj.weight": (d, q),
            at + "mlp.gate_proj.weight": (f, d),
            at + "mlp.up_proj.weight": (f, d),
            at + "mlp.down_proj.weight": (d, f),
        }
        if model_type == "qwen2":
            shapes |= {f"{at}self_attn.{one}_proj.bias": (q if one == "q" else kv,) for one in "qkv"}
    found = {}
    for name, shape in shapes.items():
        values = rng.integers(-64, 64, shape) / 64 if "norm" in name else rng.standard_normal(shape)
        found[name] = values.astype(np.float32).astype(dtype)
    return found


def folder(path: Path, config: dict, weights: Tensors) -> Path:
    """A model folder in Hugging Face's format."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


def by_heads(matrix: np.ndarray, heads: int) -> np.ndarray:
    """`[(heads H) D]` -> `[D heads H]`."""
    size = len(matrix) // heads
    return np.stack([matrix[head * size : (head + 1) * size].T for head in range(heads)], axis=1)


def in_pairs(kernel: np.ndarray) -> np.ndarray:
    """What rope turns together, i and H/2 + i, side by side."""
    found, half = np.empty_like(kernel), kernel.shape[-1] // 2
    for i in range(half):
        found[:, :, 2 * i] = kernel[:, :, i]
        found[:, :, 2 * i + 1] = kernel[:, :, half + i]
    return found


def layer_there(config: dict, weights: Tensors, layer: int) -> Tensors:
    """The arrays of one layer in MaxText, in float32."""
    model_type, heads, kv = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    gemma = model_type.startswith("gemma")

    def get(name: str) -> np.ndarray:
        return weights[f"model.layers.{layer}.{name}"].astype(np.float32)

    query = by_heads(get("self_attn.q_proj.weight"), heads)
    key = by_heads(get("self_attn.k_proj.weight"), kv)
    if model_type in ("llama", "gemma2"):
        query = query * np.float32(1 / np.sqrt(config.get("query_pre_attn_scalar", config["head_dim"])))
    if "rope_parameters" in config:
        query, key = in_pairs(query), in_pairs(key)
    output = get("self_attn.o_proj.weight")
    size = config["head_dim"]
    found = {
        "self_attention/query/kernel": query,
        "self_attention/key/kernel": key,
        "self_attention/value/kernel": by_heads(get("self_attn.v_proj.weight"), kv),
        "self_attention/out/kernel": np.stack([output[:, n * size : (n + 1) * size].T for n in range(heads)]),
        "mlp/wi_0/kernel": get("mlp.gate_proj.weight").T,
        "mlp/wi_1/kernel": get("mlp.up_proj.weight").T,
        "mlp/wo/kernel": get("mlp.down_proj.weight").T,
    }
    if gemma:
        names = {
            "pre_self_attention_norm": "input_layernorm",
            "post_self_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    else:
        names = {
            "pre_self_attention_layer_norm": "input_layernorm",
            "post_self_attention_layer_norm": "post_attention_layernorm",
        }
    if model_type in ("gemma3_text", "qwen3"):
        names |= {"self_attention/query_norm": "self_attn.q_norm", "self_attention/key_norm": "self_attn.k_norm"}
    found |= {f"{there}/scale": get(f"{here}.weight") + np.float32(gemma) for there, here in names.items()}
    if model_type == "qwen2":
        for there, here, number in (("query", "q", heads), ("key", "k", kv), ("value", "v", kv)):
            found[f"self_attention/{there}/bias"] = get(f"self_attn.{here}_proj.bias").reshape(number, -1)
    return found


def there(config: dict, weights: Tensors, scanned: bool) -> Tensors:
    """The arrays of a checkpoint of MaxText, in float32."""
    model_type, number = config["model_type"], config["num_hidden_layers"]
    gemma = model_type.startswith("gemma")
    embedding = weights["model.embed_tokens.weight"].astype(np.float32)
    if model_type == "gemma2":
        embedding = embedding * np.float32(config["hidden_size"] ** 0.5)
    if model_type == "gemma3_text":
        embedding = embedding * ml_dtypes.bfloat16(config["hidden_size"] ** 0.5).astype(np.float32)
    found = {
        "token_embedder/embedding": embedding,
        "decoder/decoder_norm/scale": weights["model.norm.weight"].astype(np.float32) + np.float32(gemma),
    }
    if "lm_head.weight" in weights:
        found["decoder/logits_dense/kernel"] = weights["lm_head.weight"].astype(np.float32).T
    layers = [layer_there(config, weights, layer) for layer in range(number)]

    def stacked(numbers: range, name: str) -> np.ndarray:
        return np.stack([layers[one][name] for one in numbers], axis=1)

    for name in layers[0]:
        first, rest = name.split("/", 1)
        if model_type == "gemma2":
            for kind, begin in (("local", 0), ("global", 1)):
                if scanned:
                    found[f"decoder/layers/{first}_{kind}/{rest}"] = stacked(range(begin, number, 2), name)
                else:
                    for pair in range(number // 2):
                        found[f"decoder/layers_{pair}/{first}_{kind}/{rest}"] = layers[2 * pair + begin][name]
        elif model_type == "gemma3_text" and scanned:
            for place in range(6):
                found[f"decoder/layers/layers_{place}/{name}"] = stacked(range(place, number // 6 * 6, 6), name)
            for left in range(number % 6):
                found[f"decoder/layers_remainder/layers_{left}/{name}"] = layers[number // 6 * 6 + left][name]
        elif scanned:
            found[f"decoder/layers/{name}"] = stacked(range(number), name)
        else:
            found |= {f"decoder/layers_{layer}/{name}": layers[layer][name] for layer in range(number)}
    return found


def checkpoint(path: Path, arrays: Tensors, dtype=np.float32) -> Path:
    """A train state of MaxText, written by Orbax itself; returns the folder of the arrays."""
    tree: dict = {}
    for name, array in arrays.items():
        node = tree
        *parts, last = name.split("/")
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = np.ascontiguousarray(array.astype(dtype))
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(path / "0" / "items", {"params": {"params": tree}, "step": 0, "opt_state": {}})
    return path / "0" / "items"


def arrays_of(items: Path) -> Tensors:
    """The arrays of a checkpoint, read by Orbax itself."""
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(items)["params"]["params"]
    found: Tensors = {}

    def walk(node: dict, path: str) -> None:
        for name, value in node.items():
            walk(value, f"{path}{name}/") if isinstance(value, dict) else found.update({path + name: np.asarray(value)})

    walk(tree, "")
    return found
