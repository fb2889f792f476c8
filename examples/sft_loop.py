"""Supervised fine-tuning in the open: rows -> tokens -> packed batch -> loss -> step, over `tunix.client`.

    python examples/sft_loop.py                                       a small random model learns to sort three letters
    python examples/sft_loop.py model=Qwen/Qwen3-0.6B rows=rows.jsonl length=1024 learning_rate=1e-5 dtype=bfloat16

A row has two columns, `prompt` and `completion`. The model is a hub id or a folder in Hugging Face's format; without
one, two layers start from random weights and read bytes, and `grpo_loop.py` goes on from them by reward.

The client holds weights, optimizer and devices; what is learned, and from what, is all here. What `tunix run` does
besides: chat templates with proved masks, checkpoints that resume to the bit, evaluation, curves.

Axes: B rows of a packed batch, T time.
"""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np

import tunix
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer


@dataclass(frozen=True)
class Config:
    """Each setting can be given on the command line, as `name=value`."""

    model: str = ""  # where the weights come from; empty for random ones
    rows: str = ""  # a JSONL file with `prompt` and `completion`; empty for letters to sort
    output: str = "runs/sft_loop"  # the trained model goes here
    length: int = 64  # T: tokens of a packed row; a longer sequence is left out
    batch_size: int = 64  # sequences of an update
    steps: int = 30
    learning_rate: float = 3e-3
    dtype: str = "float32"  # in which the model computes; `bfloat16` on accelerators
    seed: int = 0


def to_sort(seed: int) -> list[dict[str, str]]:
    """Three of ten letters to put in order, all 720 problems: `cab>` is answered by `abc`."""
    problems = ["".join(letters) for letters in permutations("abcdefghij", 3)]
    random.Random(seed).shuffle(problems)
    return [{"prompt": f"{letters}>", "completion": "".join(sorted(letters))} for letters in problems]


def as_sequence(row: dict[str, str], tokenizer: Tokenizer) -> tunix.Sequence:
    """Prompt and completion as one sequence, of which the completion is trained, the token that ends it included."""
    prompt = tokenizer.encode(row["prompt"], bos=tokenizer.adds_bos)
    completion = tokenizer.ended(tokenizer.encode_after(prompt, row["completion"]))
    tokens = np.array([*prompt, *completion], np.int32)
    return tunix.Sequence(tokens, loss_mask=np.arange(len(tokens)) >= len(prompt))


def in_batches(sequences: list[tunix.Sequence], config: Config) -> Iterator[tunix.Batch]:
    """Packed batches without end, in another order every epoch; the last few sequences of an epoch are left out.

    Sequences share the rows of a batch as segments that never see each other, so that little of it is padding.
    """
    rng = np.random.default_rng(config.seed)
    size = min(config.batch_size, len(sequences))
    while True:
        order = rng.permutation(len(sequences))
        for start in range(0, len(order) - size + 1, size):
            yield tunix.pack([sequences[i] for i in order[start : start + size]], size, config.length)


def negative_log_likelihood(inputs: tunix.LossInputs) -> tunix.LossOutputs:
    """L = - sum_t m_t log p(y_t | y_<t) / sum_t m_t, over all trained tokens of the batch.

    A loss returns a term for each token, `[B T]`. The client masks, sums and divides it, once, by a count that is taken
    of the whole batch: neither packing nor micro-batches nor the number of devices change the result.
    """
    return tunix.LossOutputs({"nll": tunix.Term(-inputs.logprobs, over="tokens")})


def main(config: Config) -> list[dict[str, float]]:
    """Trains, writes the model, and returns the metrics of each step; the last ones have the held-out loss too."""
    if Path(config.output).exists():
        sys.exit(f"{config.output} is there already: give another output=FOLDER, or move it away")
    tokenizer = load_tokenizer(config.model) if config.model else bytes_tokenizer()
    assert tokenizer is not None, f"{config.model} has no tokenizer"
    rows = to_sort(config.seed)
    if config.rows:
        rows = [json.loads(line) for line in Path(config.rows).read_text(encoding="utf-8").splitlines()]
    sequences = [as_sequence(row, tokenizer) for row in rows]
    kept = [sequence for sequence in sequences if len(sequence.tokens) <= config.length]
    held_out, trained = kept[: len(kept) // 16 + 1], kept[len(kept) // 16 + 1 :]
    print(f"{len(trained)} rows to train on, {len(held_out)} held out, {len(rows) - len(kept)} too long")

    start = {"path": config.model} if config.model else {"init": "random", "family": "llama"}
    client = tunix.client(
        {**start, "dtype": config.dtype},
        # adapter={"rank": 16} would train LoRA's matrices on the frozen weights.
        optimizer={"learning_rate": config.learning_rate, "warmup": 0.1},
        steps=config.steps,
        length=config.length,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    loss = tunix.Loss(negative_log_likelihood)
    history = []
    for step, batch in zip(range(1, config.steps + 1), in_batches(trained, config), strict=False):
        metrics = client.step(batch, loss)  # gradients and their application, in one compiled call
        history.append({name: float(value) for name, value in metrics.items()})
        if step % 10 == 0:
            print(f"step {step:4}  loss {history[-1]['train/loss']:.4f}  gradient {history[-1]['train/grad_norm']:.3f}")

    history[-1] |= client.evaluate([tunix.pack(held_out, len(held_out), config.length)], loss)
    print(f"held out   loss {history[-1]['eval/loss']:.4f}")
    client.export(Path(config.output))
    tokenizer.save(config.output)
    print(f"{config.output} is a model for transformers, vLLM, `tunix chat` and grpo_loop.py")
    return history


if __name__ == "__main__":
    settings = dict(word.split("=", 1) for word in sys.argv[1:])
    main(Config(**{name: type(getattr(Config, name))(value) for name, value in settings.items()}))
