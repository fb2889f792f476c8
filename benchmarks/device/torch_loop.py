"""The same training steps in torch, transformers and Liger on the same card: the loop that a user would write.

Where torch with CUDA, transformers or liger-kernel is not there, a row says so. Weights are random and float32, and
computed in bfloat16 by autocast; under LoRA the frozen ones are bfloat16. AdamW is fused. Packed texts see themselves
alone: by flash-attn's variable lengths if that is there, else each text goes through SDPA as a row of its own, which
needs no padding since all are equally long.
"""

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.device.rows import Row, Setting
from benchmarks.device.speeds import LONGEST, STEPS, TURNS
from benchmarks.shapes import LORA, Shape
from tunix.models.config import DecoderConfig

NEEDED = ("torch", "transformers", "liger_kernel")


def rows(case: str, setting: Setting) -> Iterator[Row]:
    """The row of a training step of `STEPS`."""
    settings = STEPS[case]
    shape = settings.shape(setting)
    what = "SFT" if settings.adapter is None else "LoRA"
    name = f"torch: {what} {shape.name}, 1 x {shape.length}, {shape.documents} documents"
    needed = [*NEEDED, *([] if settings.adapter is None else ["peft"])]
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        yield Row(name, "skipped", f"{', '.join(missing)} not installed")
        return
    import torch

    if not torch.cuda.is_available():
        yield Row(name, "skipped", "torch has no CUDA")
        return
    flash = importlib.util.find_spec("flash_attn") is not None
    step = _step(shape, settings.remat == "block", settings.adapter is not None, flash)
    seconds: list[float] = []
    for turn in range(TURNS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if turn >= 2:
            seconds.append(time.perf_counter() - start)
        if sum(seconds) > LONGEST:
            break
    yield Row(
        name,
        message=f"torch {torch.__version__}, Liger, {'flash-attn' if flash else 'SDPA'}, remat {settings.remat}",
        seconds=float(np.median(seconds)),
        turns=len(seconds),
        tokens=shape.length,
        flops=shape.flops(settings.adapter),
        memory=torch.cuda.max_memory_allocated(),
    )


def _step(shape: Shape, remat: bool, lora: bool, flash: bool) -> Any:
    """A training step on the card."""
    import torch
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from transformers import Qwen3Config, Qwen3ForCausalLM

    apply_liger_kernel_to_qwen3(
        rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=True
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if lora else torch.float32)
    with torch.device("cuda"):
        attention = "flash_attention_2" if flash else "sdpa"
        model: Any = Qwen3ForCausalLM._from_config(Qwen3Config(**_sizes(shape.config)), attn_implementation=attention)
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=LORA.rank, lora_alpha=2 * LORA.rank, target_modules=targets))
        for weight in model.parameters():
            weight.data = weight.data.float() if weight.requires_grad else weight.data
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.as_tensor(shape.tokens(), device="cuda").long()
    length = shape.length // shape.documents
    positions = torch.arange(length, device="cuda").repeat(shape.documents)[None]
    if not flash:
        tokens, positions = tokens.reshape(-1, length), positions.reshape(-1, length)
    labels = torch.where(positions == 0, -100, tokens)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, position_ids=positions, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _sizes(config: DecoderConfig) -> dict[str, Any]:
    """A Qwen 3 as transformers' config names its sizes."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
    }
