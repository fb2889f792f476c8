"""`tunix generate`: completions of one prompt on the screen, or of many rows in a file.

Rows -> prompts (`inference.py`) -> the engine -> one JSON object per completion, in the order of the rows: `row` (from
0), `sample` (0 to n - 1), what the row asked with under its own name, `tokens` (their ids, a stop token included),
`text` (without special tokens, and without a stop string; absent without a tokenizer), `logprobs`, `finish`, and where
rewards were asked for `reward` (their weighted sum, null where one failed), `rewards` and `failures` by name.
Completion j of row i draws by (seed, i n + j, token index) alone, so the same command writes the same file. Rows go to
the engine in chunks, which `resumable_output.py` keeps: a call that was interrupted goes on. `rejection_sampling.py`
makes rows to train on.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tunix.algorithms.advantages import weighted_sum
from tunix.algorithms.episodes import rewards_of
from tunix.commands.progress import Bar, Drawing
from tunix.commands.rejection_sampling import Chosen, Question, choose
from tunix.commands.resumable_output import Partial, digest_of_rows, partial
from tunix.commands.reward_flags import digest_of_source, fingerprint, judged
from tunix.data.pipeline import Prompt
from tunix.data.rendered import prompt_text
from tunix.data.sources import Rows, open_rows
from tunix.errors import Interrupted, UserError
from tunix.inference.model import InferenceModel, InferenceOptions, asked_with
from tunix.inference.text_stream import TextStream
from tunix.rollout.collect import Collector, Scored
from tunix.rollout.engine.request import Request
from tunix.rollout.rewards.config import RewardConfig
from tunix.trainer.progress import readable
from tunix.types import Completion, Sampling
from tunix.util.atomic_io import refuse_out

WAVES = 8
"""Completions of a chunk for each slot: the slots run empty at its end only, and no more is lost by a kill."""


@dataclass(frozen=True)
class Judged:
    """How completions are scored, and which are taken."""

    rewards: RewardConfig
    """What each is worth."""
    best: int | None = None
    """Rows to train on are written: the best so many completions of each prompt. None with a threshold for all."""
    threshold: float | None = None
    """Likewise, of those that are worth at least so much."""

    @property
    def selects(self) -> bool:
        """Whether rows to train on are written, instead of all completions."""
        return self.best is not None or self.threshold is not None


def generate(
    asked: InferenceOptions,
    prompt: str | None,
    *,
    rows: str | None = None,
    out: Path | None = None,
    sampling: Sampling,
    n: int = 1,
    seed: int = 0,
    judging: Judged | None = None,
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
        judging: scores the completions; only into a file.

    Raises:
        UserError: the model, the rows or the output are not to be had, or a setting means nothing.
        Interrupted: by Ctrl-C while a file was written; the same call goes on.
    """
    if judging is not None and out is None:
        raise UserError("--reward: say with --out FILE where the scores go")
    speaker, sampling, questions = opened(asked, prompt, rows, out, sampling)
    if out is None:
        _show(speaker, [Request(questions[0].tokens, sampling, seed, i) for i in range(n)])
        return
    _Writing(speaker, questions, sampling, n, seed, judging).write(out)


def opened(
    asked: InferenceOptions, prompt: str | None, rows: str | None, out: Path | None, sampling: Sampling
) -> tuple[InferenceModel, Sampling, list[Question]]:
    """Who answers, how, and what it is asked; arguments as in `generate`.

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
    speaker = InferenceModel(asked)
    sampling = speaker.stopping(sampling)
    return speaker, sampling, [_question(speaker, table, i, rows is not None) for i in range(len(table))]


def _question(speaker: InferenceModel, table: Rows, index: int, listed: bool) -> Question:
    row = table[index]
    return Question(row, speaker.prompt(row, f"row {index + 1} of {table.name}" if listed else table.name))


def _show(speaker: InferenceModel, requests: List[Request]) -> None:
    """Texts on stdout: one as it comes, several one after the other under their numbers."""
    if len(requests) > 1:
        first = requests[0]
        with closing(Bar("generate", len(requests))) as bar:
            (found,) = Drawing(speaker.engine, bar).sample([first.prompt], len(requests), first.sampling, first.seed)
        for number, completion in enumerate(found, start=1):
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


@dataclass(frozen=True)
class _Writing:
    """One call that writes a file."""

    speaker: InferenceModel
    questions: List[Question]
    sampling: Sampling
    n: int
    seed: int
    judging: Judged | None

    def write(self, out: Path) -> None:
        """All chunks that are not there yet, and then the file."""
        rows, prompts = max(1, WAVES * self.speaker.slots // self.n), len(self.questions)
        with partial(out, self._follows_from(), rows * self.n, self.n * prompts) as kept:
            if kept.held:
                print(f"going on after {kept.held // self.n} of {prompts} rows", file=sys.stderr)
            if kept.held < self.n * prompts:
                try:
                    self._draw(kept, rows)
                except KeyboardInterrupt as stopped:
                    raise Interrupted(_told(out, kept, self.n, prompts)) from stopped
            told = self._finish(kept)
        print(f"{told}, written to {out}")

    def _follows_from(self) -> dict[str, Any]:
        """What the lines follow from; the slots too, since they are the chunks' size."""
        sampling = {key: list(x) if isinstance(x, tuple) else x for key, x in vars(self.sampling).items()}
        return {
            "model": digest_of_source(self.speaker.source),
            "rows": digest_of_rows([one.row, one.tokens.tolist()] for one in self.questions),
            "rewards": None if self.judging is None else fingerprint(self.judging.rewards),
            "n": self.n,
            "seed": self.seed,
            "dtype": self.speaker.asked.dtype,
            "slots": self.speaker.slots,
            **sampling,
        }

    def _draw(self, kept: Partial, rows: int) -> None:
        """The chunks that are not there yet, of so many rows each."""
        longest = max(len(question.tokens) for question in self.questions) + self.sampling.max_tokens
        data = self.speaker.data(min(longest, self.speaker.limit))
        rewards = self.judging and self.judging.rewards
        with judged(self.speaker, self.sampling, rewards, list(self.questions[0].row), data) as collector:
            engine = self.speaker.engine
            with closing(Bar("generate", self.n * len(self.questions))) as bar:
                drawing = Drawing(engine, bar, drawn=kept.held)
                for first in range(kept.held // self.n, len(self.questions), rows):
                    kept.append(self._chunk(collector, drawing, first, self.questions[first : first + rows]))

    def _chunk(self, collector: Collector, drawing: Drawing, first: int, questions: List[Question]) -> list[str]:
        """The lines of some rows, the first of which has the number `first`."""
        prompts = [Prompt(one.tokens, prompt_text(one.row), one.row) for one in questions]
        scored = collector.collect(drawing, prompts, self.n, self.seed)
        totals = weighted_sum(rewards_of(scored), collector.weights).tolist() if collector.weights else None
        return [
            line(
                self.speaker,
                first + i,
                j,
                questions[i].row,
                one.completion,
                {} if totals is None else _worth(one, totals[i][j]),
            )
            for i, group in enumerate(scored)
            for j, one in enumerate(group)
        ]

    def _finish(self, kept: Partial) -> str:
        """Writes the file of all that was kept; what there is to say about it."""
        lines = map(json.loads, kept.lines())
        if self.judging is None or not self.judging.selects:
            tokens = scores = failed = 0
            for line in lines:
                tokens += len(line["tokens"])
                failed += "reward" in line and line["reward"] is None
                scores += line.get("reward") or 0.0
            kept.finish(kept.lines())
            told = f"{len(self.questions)} rows, {kept.held} completions, {readable(tokens)} tokens"
            if self.judging is None:
                return told
            mean = scores / (kept.held - failed) if kept.held > failed else math.nan
            return f"{told}, mean reward {mean:.4f}" + (f", {failed} without a score" if failed else "")
        chosen = choose(self.speaker, self.questions, _groups(lines, self.n), self.judging.best, self.judging.threshold)
        if not chosen.rows:
            raise UserError(
                f"no completion of {len(self.questions)} rows was taken{_left_out(chosen, len(self.questions))}. They "
                "are kept: the same call with a lower --threshold chooses anew and draws nothing"
            )
        kept.finish(json.dumps(row) + "\n" for row in chosen.rows)
        return _summary(chosen, len(self.questions))


def line(
    speaker: InferenceModel,
    row: int,
    sample: int,
    asked: Mapping[str, Any],
    completion: Completion,
    more: Mapping[str, Any],
) -> str:
    """A completion as a line of the file.

    Args:
        row: its number, from 0.
        sample: from 0 to n - 1.
        asked: the row.
        more: what else there is to say, by name.
    """
    name, text = asked_with(asked, "the row"), speaker.text(completion)
    said = {
        "row": row,
        "sample": sample,
        name: asked[name],
        "tokens": completion.tokens.tolist(),
        **({} if text is None else {"text": text}),
        "logprobs": [round(float(x), 7) for x in completion.logprobs],
        "finish": completion.finish,
        **more,
    }
    return json.dumps(said) + "\n"


def _groups(lines: Iterator[dict[str, Any]], n: int) -> Iterator[list[dict[str, Any]]]:
    """The completions of each row."""
    while group := list(islice(lines, n)):
        yield group


def _worth(scored: Scored, total: float) -> dict[str, Any]:
    """What a completion's line says of its rewards; null where there is no score."""
    values = {"reward": total, **scored.rewards}
    reward, *each = [None if math.isnan(value) else value for value in values.values()]
    failures = {"failures": dict(scored.failures)} if scored.failures else {}
    return {"reward": reward, "rewards": dict(zip(scored.rewards, each, strict=True)), **failures}


def _summary(chosen: Chosen, prompts: int) -> str:
    told = f"{len(chosen.rows)} rows to train on, from {chosen.prompts} of {prompts} prompts"
    told += f"{_left_out(chosen, prompts)}; the longest has {chosen.longest} tokens"
    if chosen.respelled:
        told += f"; as ids, since the text of {chosen.respelled} would not be trained as it was drawn"
    return told


def _left_out(chosen: Chosen, prompts: int) -> str:
    """Prompts without a row, and why."""
    below = prompts - chosen.prompts - chosen.failed
    parts = [f"{below} had nothing above the threshold"] if below else []
    parts += [f"{chosen.failed} had no score"] if chosen.failed else []
    return f" ({', '.join(parts)})" if parts else ""


def _told(out: Path, kept: Partial, n: int, rows: int) -> str:
    if not kept.held:
        return "interrupted before anything was kept"
    return f"interrupted: {kept.held // n} of {rows} rows are kept beside {out}; the same call goes on after them"
