"""Small models of the families that a real vLLM serves in the slow tests, and transformers' tokens to compare with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import randomise
from tunix.data.templates import TemplateName
from tunix.data.tokenizer import bytes_tokenizer

FAMILIES: dict[str, tuple[TemplateName, dict[str, Any]]] = {
    "llama": ("llama3", {}),
    "gemma3_text": ("gemma", {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "qwen3": ("chatml", {}),
}
WIDE = {"num_experts": 8, "moe_intermediate_size": 64}
LAYERS = ["sliding_attention", "full_attention"]
MIXTURES: dict[str, tuple[TemplateName, dict[str, Any]]] = {
    "qwen3_moe": ("chatml", {**WIDE, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "mixtral": ("chatml", {"num_local_experts": 8}),
    "gpt_oss": ("chatml", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}),
    "gemma4_text": (
        "gemma",
        {
            **WIDE,
            "layer_types": LAYERS,
            "global_head_dim": 64,
            "sliding_window": 16,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
    ),
}
"""The same of families with experts."""
"""transformers' name of a family -> the special tokens of its tokenizer, and fields besides the sizes."""
# vLLM's attention on a CPU has no heads of 8 or 16 numbers.
SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


def family_folder(folder: Path, model_type: str, **fields: Any) -> Path:
    """A random model of a family as transformers saves it, with a tokenizer of bytes."""
    template, usual = (FAMILIES | MIXTURES)[model_type]
    config = AutoConfig.for_model(model_type, **{**SIZES, **usual, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(folder)
    bytes_tokenizer(template).save(folder)
    return folder


def greedy(folder: Path, prompts: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    """transformers' most likely continuation of each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=number, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


def likelihoods(folder: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """transformers' log-probs of what follows a prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    of_all = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return of_all[range(len(tokens)), list(tokens)].tolist()
