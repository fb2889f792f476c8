"""TRL's worker: its trainers for training, transformers for generation, as TRL uses it."""

import tempfile

from turns import CORES, reward, start, words

case, turn = start()

import torch  # noqa: E402  (after the cores are chosen)

torch.set_num_threads(CORES)

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

STEPS = 200
BLOCK = 32
"""Tokens of a page of the cache of continuous batching."""
PLAIN = {
    "output_dir": tempfile.mkdtemp(),
    "max_steps": STEPS,
    "learning_rate": case["learning_rate"],
    "lr_scheduler_type": "constant",
    "max_grad_norm": case["clip_norm"],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": case["seed"],
}
"""Settings of all trainers: the case's, float32, and nothing that is not part of the step."""


class Gate(TrainerCallback):
    """A callback by which a turn is one optimizer step, with all that comes before it."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Begins the first turn."""
        turn()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Ends a turn and begins the next."""
        turn()


def model() -> torch.nn.Module:
    """The folder's model in float32."""
    return AutoModelForCausalLM.from_pretrained(case["weights"], dtype=torch.float32)


def tokenizer():
    """The folder's tokenizer."""
    return AutoTokenizer.from_pretrained(case["weights"])


def sft() -> None:
    """SFT on token ids, so that nothing is rendered."""
    rows = case["rows"]
    data = Dataset.from_dict({"input_ids": rows * STEPS})
    config = SFTConfig(per_device_train_batch_size=len(rows), max_length=len(rows[0]), packing=False, **PLAIN)
    lora = case["lora"]
    how = lora and LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules="all-linear")
    trainer = SFTTrainer(
        model(), config, train_dataset=data, processing_class=tokenizer(), peft_config=how, callbacks=[Gate()]
    )
    trainer.train()


def dpo() -> None:
    """DPO on text of the same ids; each completion gets an end token. The reference is computed in each step."""
    # A completion is appended to its prompt as text: without the space their border would be one unknown word.
    columns = {"prompt": ("prompts", ""), "chosen": ("chosen", " "), "rejected": ("rejected", " ")}
    texts = {name: [space + words(ids) for ids in case[key]] * STEPS for name, (key, space) in columns.items()}
    data = Dataset.from_dict(texts)
    config = DPOConfig(per_device_train_batch_size=len(case["prompts"]), beta=case["beta"], max_length=None, **PLAIN)
    DPOTrainer(model(), args=config, train_dataset=data, processing_class=tokenizer(), callbacks=[Gate()]).train()


def grpo() -> None:
    """Whole GRPO steps; completions come from transformers' generate."""

    def scored(completions: list[str], **_: object) -> list[float]:
        return reward(completions)

    config = GRPOConfig(
        per_device_train_batch_size=case["groups"] * case["group"],
        num_generations=case["group"],
        max_completion_length=case["new"],
        beta=case["kl"],
        temperature=1.0,
        num_iterations=1,
        steps_per_generation=1,
        **PLAIN,
    )
    data = Dataset.from_dict({"prompt": [words(ids) for ids in case["prompts"]] * STEPS})
    trainer = GRPOTrainer(
        model(), scored, args=config, train_dataset=data, processing_class=tokenizer(), callbacks=[Gate()]
    )
    trainer.train()


def generate() -> None:
    """Completions in one static batch, or by continuous batching where the requests differ in length."""
    net, prompts, new = model().eval(), case["prompts"], case["new"]
    (even if len(set(new)) == 1 else continuous)(net, prompts, new)


def even(net, prompts: list[list[int]], new: list[int]) -> None:
    """Completions of all prompts at once; none ends early."""
    ids, tokens = torch.tensor(prompts), 0
    while True:
        turn(tokens=tokens)
        with torch.inference_mode():
            net.generate(ids, do_sample=True, top_k=0, max_new_tokens=new[0], min_new_tokens=new[0])
        tokens = sum(new)


def continuous(net, prompts: list[list[int]], new: list[int]) -> None:
    """transformers' continuous batching, each request with its own limit."""
    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(new), eos_token_id=-1, pad_token_id=0)
    blocks = sum(-(-(len(ids) + limit) // BLOCK) for ids, limit in zip(prompts, new, strict=True))
    # Without a number of blocks it takes its share of all memory; shared pages would outlast a turn.
    cache = ContinuousBatchingConfig(page_size=BLOCK, num_blocks=blocks, allow_block_sharing=False)
    tokens = 0
    with net.continuous_batching_context_manager(settings, continuous_batching_config=cache) as manager:
        while True:
            turn(tokens=tokens)
            for ids, limit in zip(prompts, new, strict=True):
                manager.add_request(ids, max_new_tokens=limit)
            tokens = done = 0
            while done < len(prompts):
                found = manager.get_result(timeout=1)
                if found is not None and found.is_finished():
                    done, tokens = done + 1, tokens + len(found.generated_tokens)


{"sft": sft, "dpo": dpo, "grpo": grpo, "generate": generate}[case["kind"]]()
