"""TRL's worker of `benchmarks.learning`: `GRPOTrainer` on a task of reasoning-gym, measured by greedy answers."""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from problems import Problems
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

problems = Problems()
case = problems.case
torch.set_num_threads(2)
model: Any = AutoModelForCausalLM.from_pretrained(case["weights"], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(case["weights"])


class Measure(TrainerCallback):
    """Measures at the start and after every so many steps; one of ours is several updates, theirs is one."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measures the weights that all begin with."""
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Answers the held-out questions greedily."""
        step, rest = divmod(state.global_step, case["updates"])
        if rest or step % case["every"]:
            return
        inputs = tokenizer(problems.questions("held_out"), return_tensors="pt", padding=True, padding_side="left")
        model.eval()
        with torch.inference_mode():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=case["new"])
        model.train()
        problems.measured(
            step, tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )


config = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    max_steps=case["steps"] * case["updates"],
    per_device_train_batch_size=case["prompts"] * case["group"] // case["updates"],
    steps_per_generation=case["updates"],
    num_generations=case["group"],
    max_completion_length=case["new"],
    loss_type="dapo",  # the mean over all tokens, as our GRPO's
    beta=0.0,
    temperature=1.0,
    learning_rate=case["learning_rate"],
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=case["warmup"],
    adam_beta2=case["b2"],
    max_grad_norm=case["clip_norm"],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    logging_strategy="no",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    seed=case["seed"],
)
trainer = GRPOTrainer(
    model,
    lambda prompts, completions, **_: problems.scores(prompts, completions),
    args=config,
    train_dataset=Dataset.from_dict({"prompt": problems.questions("train")}),
    processing_class=tokenizer,
    callbacks=[Measure()],
)
trainer.train()
