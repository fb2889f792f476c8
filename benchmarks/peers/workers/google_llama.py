"""A Hugging Face folder of a Llama as google/tunix reads it. Runs where `import tunix` means theirs."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import AutoConfig
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as loading

mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
_apply_rope = llama.apply_rope


def config(folder: str) -> llama.ModelConfig:
    """The folder's config, as their class."""
    c = AutoConfig.from_pretrained(folder)
    return llama.ModelConfig(
        num_layers=c.num_hidden_layers,
        vocab_size=c.vocab_size,
        embed_dim=c.hidden_size,
        hidden_dim=c.intermediate_size,
        num_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        num_kv_heads=c.num_key_value_heads,
        rope_theta=c.rope_parameters["rope_theta"],
        norm_eps=c.rms_norm_eps,
        weight_tying=c.tie_word_embeddings,
    )


def weights(folder: str) -> nnx.Module:
    """The folder's model in float32. Its rotary embedding is given the config's base, where theirs (0.1.7) always takes
    1,000,000: other answers than transformers' otherwise."""
    llama.apply_rope = partial(_apply_rope, rope_theta=config(folder).rope_theta)
    return loading.create_model_from_safe_tensors(folder, config(folder), mesh, jnp.float32)
