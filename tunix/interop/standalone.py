"""Greedy tokens from the programs and the weights beside this file. Needs jax, numpy, orbax-checkpoint and flatbuffers.

    python generate.py '[[5, 12, 7]]' --max-tokens 16

Takes lists of token ids, at most as many as description.json has rows (`batch`), and prints the lists that follow them.
`prefill(weights, tokens, lengths)` reads prompts into an empty cache, `decode(weights, cache, tokens, positions)` one
more token of each row; both return the logits of the next tokens and the cache. Copy from here what you need.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import orbax.checkpoint as ocp

EXACT = {"xla_allow_excess_precision": False}
"""XLA rounds where the program says so, as it does in training."""


def load(folder: Path) -> tuple[dict[str, Any], dict[str, jax.Array], Callable, Callable]:
    """The description, the weights by name on the first device, and the functions `prefill` and `decode`."""
    description = json.loads((folder / "description.json").read_text())
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(x["shape"], x["dtype"], sharding=place) for name, x in description["weights"].items()
    }
    with ocp.StandardCheckpointer() as reader:
        weights = reader.restore((folder / "weights").absolute(), target)
    read = {name: (folder / f"{name}.bin").read_bytes() for name in ("prefill", "decode")}
    prefill, decode = (jax.export.deserialize(bytearray(code)).call for code in read.values())
    # The cache of the call before is written in place.
    called = jax.jit(decode, donate_argnums=1, compiler_options=EXACT)
    return description, weights, jax.jit(prefill, compiler_options=EXACT), called


def generate(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The most likely tokens after each prompt, up to a stop id (included) or `max_tokens`."""
    description, weights, prefill, decode = load(folder)
    check(description, prompts, max_tokens)
    tokens = np.zeros((description["batch"], description["prompt_length"]), np.int32)
    lengths = np.ones(description["batch"], np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    logits, cache = prefill(weights, tokens, lengths)
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(max_tokens):
        new = np.argmax(np.asarray(logits), axis=-1).astype(np.int32)
        for answer, token in zip(answers, new, strict=False):
            if not answer or answer[-1] not in description["stop_ids"]:
                answer.append(int(token))
        if step == max_tokens - 1 or all(answer[-1] in description["stop_ids"] for answer in answers):
            break
        logits, cache = decode(weights, cache, new, lengths + step)
    return answers


def check(description: dict[str, Any], prompts: list[list[int]], max_tokens: int) -> None:
    """Exits with a sentence where the prompts do not fit the fixed shapes."""
    rows, most, length = description["batch"], description["prompt_length"], description["length"]
    if not 0 < len(prompts) <= rows:
        sys.exit(f"error: {len(prompts)} prompts, and the programs have {rows} row(s): tunix export ... --batch N")
    for prompt in prompts:
        if not 0 < len(prompt) <= most:
            sys.exit(
                f"error: a prompt of {len(prompt)} tokens; from 1 to {most} fit: tunix export ... --prompt-length N"
            )
        if len(prompt) + max_tokens > length:
            sys.exit(f"error: {len(prompt)} + {max_tokens} tokens, and {length} fit: tunix export ... --length N")
        if not all(0 <= token < description["vocab_size"] for token in prompt):
            sys.exit(f"error: {prompt} holds an id outside of the vocabulary of {description['vocab_size']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Greedy tokens, without tunix.")
    parser.add_argument("prompts", type=json.loads, help="token ids as JSON, e.g. '[[5, 12, 7]]'")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    print(json.dumps(generate(Path(__file__).parent, arguments.prompts, arguments.max_tokens)))
