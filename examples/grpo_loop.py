"""GRPO in the open: prompts -> samples -> rewards -> advantages -> packed batch -> steps, over `tunix.client`.

    python examples/sft_loop.py && python examples/grpo_loop.py          a small model gets better at sorting letters
    python examples/grpo_loop.py model=Qwen/Qwen3-0.6B rows=rows.jsonl length=1024 max_tokens=256 dtype=bfloat16

A row has two columns, `prompt` and `answer`; `reward` compares a completion with the answer. By default the rows are
letters to sort, and the model is what `sft_loop.py` leaves in runs/sft_loop, which is right now and then.

All of GRPO is here (Shao et al. 2024, https://arxiv.org/abs/2402.03300). Its relatives change `advantages`,
`clipped_surrogate` or what a batch is made of; `tunix run` adds worker processes, a gate, resumption and evaluation.

Axes: P prompts, G group, B rows of a packed batch, T time.
"""

import json
import random
import sys
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import tunix
from tunix.data.tokenizer import load_tokenizer
from tunix.types import Completion


@dataclass(frozen=True)
class Config:
    """Each setting can be given on the command line, as `name=value`."""

    model: str = "runs/sft_loop"  # where the weights come from: a hub id or a folder in Hugging Face's format
    rows: str = ""  # a JSONL file with `prompt` and `answer`; empty for letters to sort
    output: str = "runs/grpo_loop"  # the trained model goes here
    prompts: int = 16  # P: prompts of a step
    group_size: int = 8  # G: completions of each prompt, which are compared with each other
    updates: int = 2  # updates of a step, each on its share of the prompts; the ratio is 1 at the first
    max_tokens: int = 8
    length: int = 64  # T: tokens of a packed row, and of a prompt with its completion at most
    steps: int = 25
    learning_rate: float = 1e-3
    clip: float = 0.2  # how far the ratio may move from 1 before a token stops counting
    dtype: str = "float32"
    seed: int = 0


def to_sort(seed: int) -> list[dict[str, str]]:
    """Three of ten letters to put in order, all 720 problems: `cab>` is answered by `abc`."""
    problems = ["".join(letters) for letters in permutations("abcdefghij", 3)]
    random.Random(seed).shuffle(problems)
    return [{"prompt": f"{letters}>", "answer": "".join(sorted(letters))} for letters in problems]


def reward(completion: str, answer: str) -> float:
    """1 for the answer, else 0."""
    return float(completion == answer)


def advantages(rewards_PG: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4) within each group: how much better than the policy's other answers."""
    centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    return centred_PG / (rewards_PG.std(axis=1, keepdims=True) + 1e-4)


def clipped_surrogate(inputs: tunix.LossInputs, clip: float) -> tunix.LossOutputs:
    """L = - min(r A, clip(r, 1 - clip, 1 + clip) A) at each token, r = p(y_t) / p_old(y_t): eq. 3 without its KL.

    A loss returns a term for each token, `[B T]`; the client masks, sums and divides it once, by the batch's tokens as
    DAPO does. `over="sequences"` would be the paper's mean over completions.
    """
    batch = inputs.batch
    # Where nothing is trained the log-probs mean nothing; a ratio of 1 there keeps gradients finite.
    log_ratio = jnp.where(batch.loss_mask, inputs.logprobs - batch.per_token["old_logprobs"], 0.0)
    ratio, advantage = jnp.exp(log_ratio), batch.per_token["advantages"]
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    return tunix.LossOutputs(
        {"policy": tunix.Term(-surrogate, over="tokens")},
        metrics={"policy/clipped": jnp.float32(jnp.abs(ratio - 1) > clip)},
        # At the first update of a step sampler and trainer are one model: what differs then is their rounding.
        peaks={"mismatch/max": jnp.abs(log_ratio)},
    )


def as_sequence(prompt: np.ndarray, completion: Completion, advantage: float) -> tunix.Sequence:
    """Prompt and completion as one sequence; the completion is trained, each token with the advantage of the whole."""
    before, sampled = np.zeros_like(prompt, np.float32), np.ones_like(completion.logprobs)
    return tunix.Sequence(
        tokens=np.concatenate([prompt, completion.tokens]),
        loss_mask=np.concatenate([before, sampled]) > 0,
        per_token={
            "old_logprobs": np.concatenate([before, completion.logprobs]),
            "advantages": np.concatenate([before, np.float32(advantage) * sampled]),
        },
    )


def main(config: Config) -> list[dict[str, float]]:
    """Trains, writes the model, and returns the metrics of each step."""
    if Path(config.output).exists():
        sys.exit(f"{config.output} is there already: give another output=FOLDER, or move it away")
    tokenizer = load_tokenizer(config.model)
    assert tokenizer is not None, f"{config.model} has no tokenizer"
    rows = to_sort(config.seed)
    if config.rows:
        rows = [json.loads(line) for line in Path(config.rows).read_text(encoding="utf-8").splitlines()]
    P, G = config.prompts, config.group_size
    sampling = tunix.Sampling(config.max_tokens, temperature=1.0, stop_ids=tokenizer.stop_ids)
    loss = tunix.Loss(partial(clipped_surrogate, clip=config.clip))
    client = tunix.client(
        {"path": config.model, "dtype": config.dtype},
        optimizer={"learning_rate": config.learning_rate, "warmup": 3, "b2": 0.95},
        length=config.length,
        batch_size=P * G // config.updates,
        seed=config.seed,
    )
    history = []
    for step in range(config.steps):
        asked = [rows[(step * P + p) % len(rows)] for p in range(P)]
        prompts = [np.array(tokenizer.encode(row["prompt"], bos=tokenizer.adds_bos), np.int32) for row in asked]

        client.publish()  # the sampler has the present weights from now on
        groups = client.sample(prompts, n=G, sampling=sampling, seed=config.seed + step)

        texts = [[tokenizer.decode(completion.tokens, skip_special=True) for completion in group] for group in groups]
        rewards_PG = np.array([[reward(text, asked[p]["answer"]) for text in texts[p]] for p in range(P)])
        advantages_PG = advantages(rewards_PG)

        updates = []
        for part in np.array_split(np.arange(P), config.updates):
            sequences = [as_sequence(prompts[p], groups[p][g], advantages_PG[p, g]) for p in part for g in range(G)]
            updates.append(client.step(tunix.pack(sequences, len(sequences), config.length), loss))

        numbers = {"reward/mean": rewards_PG.mean(), "mismatch/max": updates[0]["mismatch/max"]}
        numbers |= {name: updates[-1][name] for name in ("policy/clipped", "train/grad_norm")}
        history.append({name: float(value) for name, value in numbers.items()})
        print(f"step {step + 1:4}  " + "  ".join(f"{name} {value:.5f}" for name, value in history[-1].items()))

    client.export(Path(config.output))
    tokenizer.save(config.output)
    return history


if __name__ == "__main__":
    settings = dict(word.split("=", 1) for word in sys.argv[1:])
    main(Config(**{name: type(getattr(Config, name))(value) for name, value in settings.items()}))
