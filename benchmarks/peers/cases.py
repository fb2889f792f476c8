"""The cases of the table: what is computed, on which weights and ids, written to files that every worker reads.

A case's folder holds `case.json`: the kind of work, the Hugging Face folder of the weights, token ids and settings. All
of it follows from a seed. The words of the small tokenizer in the folder of the weights are the ids (`w17` is 17),
because some libraries take text only.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import LORA, OPTIMIZER, SHAPES, Shape

PROMPT, NEW = 64, 128
"""Tokens of a prompt and a completion where text is generated."""
RAGGED, SHORTEST, LONGEST = 32, 8, 512
"""Requests, and their numbers of new tokens."""
TAILED, MEDIAN, SPREAD, FEWEST, MOST = 48, 160, 1.1, 32, 4096
"""Requests whose numbers of new tokens are log-normal: their median, the deviation of the logarithm, and both ends."""
SHARED, SAMPLES, LONG_PROMPT, SHORT = 4, 8, 512, 64
"""Prompts, completions of each, and tokens of both."""
TURNS, TURN, OBSERVED = 4, 48, 24
"""Turns of an episode at most, tokens of each in the mean, and tokens that an environment answers with."""
GROUP, GROUPS, STEP = 8, 2, 64
"""Completions of a prompt, prompts, and tokens of both in a GRPO step."""
PAIRS, SIDE = 4, 128
"""Pairs of a DPO step, and tokens of a prompt and of each completion."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    title: str
    shape: str
    kind: str
    """`sft`, `dpo`, `grpo` or `generate`: what a worker does."""
    fill: Callable[[Shape], dict[str, Any]]
    """Makes the ids and settings of the work."""

    def write(self, folder: Path, weights: Path) -> Path:
        """Writes the case to a file, and returns its path."""
        shape = SHAPES[self.shape]
        common = {"kind": self.kind, "shape": self.shape, "weights": str(weights), "seed": 0}
        rates = {"learning_rate": OPTIMIZER.learning_rate, "clip_norm": OPTIMIZER.clip_norm}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "case.json"
        path.write_text(json.dumps(common | rates | self.fill(shape)), "utf-8")
        return path


def _ids(shape: Shape, rows: int, length: int) -> list[list[int]]:
    """Random ids, without those of the tokenizer's special words."""
    rng = np.random.default_rng(0)
    return rng.integers(SPECIAL, shape.config.vocab_size, (rows, length)).tolist()


def _sft(shape: Shape) -> dict[str, Any]:
    return {"rows": _ids(shape, shape.rows, shape.length), "lora": None}


def _lora(shape: Shape) -> dict[str, Any]:
    return _sft(shape) | {"lora": {"rank": LORA.rank, "alpha": LORA.alpha}}


def _dpo(shape: Shape) -> dict[str, Any]:
    ids = np.array(_ids(shape, 3 * PAIRS, SIDE)).reshape(3, PAIRS, SIDE).tolist()
    return dict(zip(("prompts", "chosen", "rejected"), ids, strict=True)) | {"beta": 0.1}


def _grpo(shape: Shape) -> dict[str, Any]:
    return {"prompts": _ids(shape, 64, STEP), "groups": GROUPS, "group": GROUP, "new": STEP, "kl": 0.04}


def _even(shape: Shape) -> dict[str, Any]:
    return {"prompts": _ids(shape, 16, PROMPT), "new": [NEW] * 16, "slots": 16}


def _ragged(shape: Shape) -> dict[str, Any]:
    new = np.random.default_rng(0).uniform(SHORTEST, LONGEST, RAGGED).astype(int).tolist()
    return {"prompts": _ids(shape, RAGGED, PROMPT), "new": new, "slots": RAGGED}


def _long_tailed(shape: Shape) -> dict[str, Any]:
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, TAILED)
    new = np.clip(drawn, FEWEST, MOST).astype(int).tolist()
    return {"prompts": _ids(shape, TAILED, PROMPT), "new": new, "slots": 16}


def _shared(shape: Shape) -> dict[str, Any]:
    prompts = [ids for ids in _ids(shape, SHARED, LONG_PROMPT) for _ in range(SAMPLES)]
    return {"prompts": prompts, "new": [SHORT] * len(prompts), "slots": 16}


def _turns(shape: Shape) -> dict[str, Any]:
    more = {"turns": TURNS, "every": TURN, "observation": _ids(shape, 1, OBSERVED)[0], "slots": 16}
    return {"prompts": _ids(shape, 24, PROMPT), "new": [2 * TURNS * TURN] * 24, **more}


SPECIAL = 4
"""Number of the tokenizer's special words, which have the first ids: padding, begin, end, unknown."""

CASES = {
    "sft-small": Case("SFT, full, small, 8 x 256", "small", "sft", _sft),
    "sft-big": Case("SFT, full, big, 4 x 512", "big", "sft", _sft),
    "lora-small": Case("SFT, LoRA, small, 8 x 256", "small", "sft", _lora),
    "lora-big": Case("SFT, LoRA, big, 4 x 512", "big", "sft", _lora),
    "dpo": Case("DPO, small, 4 pairs of 128 + 128", "small", "dpo", _dpo),
    "grpo": Case("GRPO, whole step, small, 2 x 8, 64 + 64, with KL", "small", "grpo", _grpo),
    "generate-small": Case("generate, small, 16 x (64 + 128)", "small", "generate", _even),
    "generate-big": Case("generate, big, 16 x (64 + 128)", "big", "generate", _even),
    "ragged": Case("generate, small, 32 ragged requests of 8 to 512", "small", "generate", _ragged),
    "ragged-big": Case("generate, big, 32 ragged requests of 8 to 512", "big", "generate", _ragged),
    "long-tailed": Case("generate, small, 48 requests of 32 to 4,096, log-normal", "small", "generate", _long_tailed),
    "shared": Case("generate, small, 4 prompts of 512, 8 x 64 of each", "small", "generate", _shared),
    "turns": Case("generate, small, 24 episodes of 4 turns of about 48 + 24", "small", "generate", _turns),
}


def write_weights(shape: Shape, folder: Path) -> Path:
    """A Hugging Face folder of the shape's random weights, with a tokenizer whose words are ids."""
    if not (folder / "tokenizer.json").exists():
        shape.trainer().export(folder)
        _write_tokenizer(folder, shape.config.vocab_size)
    return folder


def _write_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(SPECIAL, vocab))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **named).save_pretrained(folder)
