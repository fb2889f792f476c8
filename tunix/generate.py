"""`tunix generate`: completions of one prompt on the screen, or of many rows in a file.

Rows -> prompts (`speaker.py`) -> the engine -> one JSON object per completion, in the order of the rows: `row` (from
0), `sample` (0 to n - 1), what the row asked with under its own name, `tokens` (their ids, a stop token included),
`text` (without special tokens, and without a stop string; absent without a tokenizer), `logprobs` and `finish`.
Completion j of row i draws by (seed, i n + j, token index) alone, so the same command writes the same file.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunix.data.sources import Rows, open_rows
from tunix.errors import UserError
from tunix.files import refuse_out, write_text_atomic
from tunix.rollout.episode import Request
from tunix.speaker import Asked, Speaker, TextStream, asked_with
from tunix.trainer.progress import Display, readable
from tunix.types import Completion, Sampling

PATIENCE = 2.0
"""Seconds before progress is shown."""


def generate(
    asked: Asked,
    prompt: str | None,
    *,
    rows: str | None = None,
    out: Path | None = None,
    sampling: Sampling,
    n: int = 1,
    seed: int = 0,
) -> None:
    """Answers a prompt on the screen, or writes `out`.

    Args:
        asked: the model.
        prompt: one string; or
        rows: .jsonl, .parquet, ... with `prompt`, `messages` or `input_ids`.
        out: .jsonl to write; a prompt alone may do without.
        sampling: how tokens are drawn; the model's own stop ids are added.
        n: completions of each prompt.
        seed: of the draws.

    Raises:
        UserError: the model, the rows or the output are not to be had, or a setting means nothing.
    """
    if (prompt is None) == (rows is None):
        raise UserError('give one of a prompt, as in `tunix generate MODEL "prompt"`, and --input FILE')
    if rows is not None and out is None:
        raise UserError(f"--input {rows}: say with --out FILE where the completions go")
    if out is not None:
        refuse_out(out)
    table = Rows("the prompt", [{"prompt": prompt}]) if rows is None else open_rows(rows)
    speaker = Speaker(asked)
    sampling = speaker.stopping(sampling)
    questions = [table[index] for index in range(len(table))]
    wheres = ["the prompt"] if rows is None else [f"row {i + 1} of {table.name}" for i in range(len(table))]
    prompts = [speaker.prompt(row, where) for row, where in zip(questions, wheres, strict=True)]
    requests = [Request(prompts[i // n], sampling, seed, i) for i in range(n * len(prompts))]
    if out is None:
        _show(speaker, requests)
        return
    names = [asked_with(row, where) for row, where in zip(questions, wheres, strict=True)]
    shown = [{name: row[name]} for name, row in zip(names, questions, strict=True)]
    found = _drawn(speaker, requests)
    lines = [_line(speaker, i // n, i % n, shown[i // n], completion) for i, completion in enumerate(found)]
    write_text_atomic(out, "".join(lines))
    tokens = sum(len(completion.tokens) for completion in found)
    print(f"{len(prompts)} rows, {len(found)} completions, {readable(tokens)} tokens, written to {out}")


def _show(speaker: Speaker, requests: Sequence[Request]) -> None:
    """Texts on stdout: one as it comes, several one after the other under their numbers."""
    if len(requests) > 1:
        for number, completion in enumerate(_drawn(speaker, requests), start=1):
            print(f"--- {number} of {len(requests)} ({completion.finish})\n{speaker.text(completion)}")
        return
    assert speaker.tokenizer is not None  # a string was encoded
    stream = TextStream(speaker.tokenizer, requests[0].sampling.stop_strings)

    def hear(_: int, tokens: np.ndarray) -> None:
        print(stream.feed(tokens), end="", flush=True)

    (completion,) = speaker.engine.run(requests, on_tokens=hear)
    print(stream.finish())
    if completion.finish == "length":
        print(f"(cut off after {len(completion.tokens)} tokens)", file=sys.stderr)


def _drawn(speaker: Speaker, requests: Sequence[Request]) -> list[Completion]:
    """All completions; what takes long is seen to go on."""
    engine = speaker.engine
    progress = _Progress(len(requests), engine.slots)
    found = engine.run(requests, on_tokens=progress.hear)
    progress.close()
    return found


@dataclass
class _Progress:
    """A bar on stderr, once it has taken long enough to wonder."""

    total: int
    slots: int
    began: float = field(default_factory=time.monotonic)
    display: Display | None = None
    tokens: int = 0
    done: int = 0

    def hear(self, request: int, tokens: np.ndarray) -> None:
        """Requests begin in their order, so all but the latest `slots` of those that were heard of have ended."""
        self.tokens += len(tokens)
        self.done = max(self.done, request + 1 - self.slots)
        seconds = time.monotonic() - self.began
        if self.display is None and seconds > PATIENCE:
            self.display = Display("generate", self.total, 0)
        if self.display is not None:
            self.display.update(self.done, {"perf/tokens_per_second": self.tokens / seconds})

    def close(self) -> None:
        if self.display is not None:
            self.display.update(self.total, {})
            self.display.close()


def _line(speaker: Speaker, row: int, sample: int, shown: Mapping[str, Any], completion: Completion) -> str:
    text = speaker.text(completion)
    said = {
        "row": row,
        "sample": sample,
        **shown,
        "tokens": completion.tokens.tolist(),
        **({} if text is None else {"text": text}),
        "logprobs": [round(float(x), 7) for x in completion.logprobs],
        "finish": completion.finish,
    }
    return json.dumps(said) + "\n"
