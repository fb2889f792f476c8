"""`tunix generate`: completes one prompt on the screen, or many rows in a file.

Rows -> prompts (`inference/model.py`) -> the engine -> one JSON object per completion, in the order of the rows: `row`
(from 0), `sample` (0 to n - 1), the row's prompt under the name of its column, `tokens` (ids with the stop token),
`text` (without special tokens and stop string; absent without a tokenizer), `logprobs`, `finish`, and with rewards
`reward` (their weighted sum, null where one failed), `rewards` and `failures` by name. Completion j of row i depends
on (seed, i n + j, token index) alone, so the same command writes the same file. Rows are sampled in chunks, which
`resumable_output.py` stores, so that an interrupted call can resume.

`choose` selects from the scored completions of each prompt (best-of-n, rejection sampling), as rows for SFT. The
trained tokens must be the sampled ones. Rows of `prompt` and `completion` (strings, or messages where the prompt was
sent as a chat) are written if each of them, rendered as by `tunix run`, gives exactly the sampled tokens. If one does
not (it was cut off, its text has other tokens, or its prompt was given as ids), all rows are `input_ids` with `labels`,
which need no rendering.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tunix.algorithms.episodes import total_rewards
from tunix.commands.resumable_output import ResumableOutput, digest_of_rows, resumable_output
from tunix.commands.sampling import Bar, ProgressSampler, digest_of_source, fingerprint, open_collector
from tunix.data.accounting import Kept
from tunix.data.examples import to_example
from tunix.data.rendered import prompt_text
from tunix.data.shapes import TEMPLATE_KWARGS, Rendering
from tunix.data.sources import Rows, open_rows
from tunix.data.types import Prompt
from tunix.errors import Interrupted, UserError
from tunix.inference.model import InferenceModel, InferenceOptions, TextStream, prompt_column
from tunix.rollout.collect import Collector
from tunix.rollout.rewards.config import RewardConfig
from tunix.rollout.types import Scored
from tunix.trainer.progress import readable
from tunix.types import Completion, Request, Sampling
from tunix.util.atomic_io import refuse_out

UNTRAINED = -100
"""The label of a token that is no target."""


@dataclass(frozen=True)
class Question:
    """A row with a prompt to answer."""

    row: Mapping[str, Any]
    """The columns of the row."""
    tokens: np.ndarray
    """`[T]` int32 token ids of the prompt."""


@dataclass(frozen=True)
class Chosen:
    """The selected rows to train on, and counts about the selection."""

    rows: list[dict[str, Any]]
    """Rows in the order of the prompts, the best completion of each first."""
    prompts: int
    """Number of prompts with at least one selected completion."""
    failed: int
    """Number of prompts without a scored completion."""
    longest: int
    """Number of tokens in the longest row."""
    respelled: int
    """Number of rows whose text does not give the sampled tokens; above 0, all rows are ids."""


def ranked(rewards: List[float | None], most: int | None, threshold: float | None) -> list[int]:
    """The indices of the selected completions, the best first, of equal ones the first.

    Args:
        rewards: of one prompt's completions; None where there is no score.
        most: maximum number to select; None for all.
        threshold: minimum reward; None for any.
    """
    scored = [(value, i) for i, value in enumerate(rewards) if value is not None]
    passing = [(-value, i) for value, i in scored if threshold is None or value >= threshold]
    return [i for _, i in sorted(passing)][:most]


def choose(
    inference: InferenceModel,
    questions: List[Question],
    groups: Iterable[List[Mapping[str, Any]]],
    most: int | None,
    threshold: float | None,
) -> Chosen:
    """Selects completions and writes them as rows to train on.

    Args:
        groups: the completions of each question as written to the file: `tokens`, `text`, `reward`.
        most: maximum number of completions for each prompt; None for all.
        threshold: minimum reward; None for any.
    """
    taken: list[tuple[Question, Mapping[str, Any]]] = []
    failed = prompts = 0
    for question, group in zip(questions, groups, strict=True):
        places = ranked([one["reward"] for one in group], most, threshold)
        taken += [(question, group[place]) for place in places]
        prompts += bool(places)
        failed += all(one["reward"] is None for one in group)
    texts = [_as_text(inference, question, completion) for question, completion in taken]
    respelled = sum(text is None for text in texts)
    rows, longest = [], 0
    for text, (question, completion) in zip(texts, taken, strict=True):
        prompt, tokens = question.tokens.tolist(), completion["tokens"]
        ids = {"input_ids": [*prompt, *tokens], "labels": [UNTRAINED] * len(prompt) + list(tokens)}
        shape = ids if respelled or text is None else text
        rows.append({**shape, **{name: completion[name] for name in ("reward", "row", "sample")}})
        longest = max(longest, len(ids["input_ids"]))
    return Chosen(rows, prompts, failed, longest, respelled)


def _as_text(inference: InferenceModel, question: Question, completion: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row as text; None where rendering it would not give the sampled tokens."""
    if inference.tokenizer is None or (prompt := inference.training_prompt(question.row)) is None:
        return None
    text = completion["text"]
    turn = {"role": "assistant", "content": text}
    row = {"prompt": prompt, "completion": text if isinstance(prompt, str) else [turn]}
    row |= {name: question.row[name] for name in ("tools", TEMPLATE_KWARGS) if question.row.get(name) is not None}
    rendering = Rendering("prompt_completion", max_length=sys.maxsize, vocab_size=inference.source.decoder.vocab_size)
    try:
        example = to_example(row, inference.tokenizer, rendering)
    except UserError:  # the template refuses this answer, which can still be trained as ids
        return None
    start, sampled = len(question.tokens), [*question.tokens.tolist(), *completion["tokens"]]
    if not isinstance(example, Kept):
        return None
    sequence = example.sequences[0]
    # A template may close a turn with a token that is neither sampled nor trained.
    same = sequence.tokens[: len(sampled)].tolist() == sampled
    return row if same and np.flatnonzero(sequence.loss_mask).tolist() == [*range(start, len(sampled))] else None


WAVES = 8
"""Completions of a chunk for each slot: slots idle only at the end of a chunk, and a kill loses at most one chunk."""


@dataclass(frozen=True)
class Selection:
    """How completions are scored, and which are selected as rows to train on."""

    rewards: RewardConfig
    """How each completion is scored."""
    best: int | None = None
    """Maximum number of completions to select for each prompt, the best ones; None for all."""
    threshold: float | None = None
    """Minimum reward of a selected completion; None for any."""

    @property
    def selects(self) -> bool:
        """Whether rows to train on are written instead of all completions."""
        return self.best is not None or self.threshold is not None


def generate(
    options: InferenceOptions,
    prompt: str | None,
    *,
    rows: str | None = None,
    out: Path | None = None,
    sampling: Sampling,
    n: int = 1,
    seed: int = 0,
    selection: Selection | None = None,
) -> None:
    """Prints completions of a prompt, or writes those of a prompt or of rows to a file.

    Args:
        options: the model.
        prompt: a string; None with `rows`.
        rows: .jsonl, .parquet, ... with `prompt`, `messages` or `input_ids`; None with `prompt`.
        out: .jsonl to write; required with `rows`.
        sampling: how tokens are sampled; the model's stop ids are added.
        n: completions of each prompt.
        seed: of the sampling.
        selection: scores the completions, and selects some of them; requires `out`.

    Raises:
        UserError: the model, the rows or the output are not accessible, or a setting is invalid.
        Interrupted: by Ctrl-C while a file was written; the same call resumes it.
    """
    if selection is not None and out is None:
        raise UserError("--reward: say with --out FILE where the scores go")
    inference, sampling, questions = open_questions(options, prompt, rows, out, sampling)
    if out is None:
        _show(inference, [Request(questions[0].tokens, sampling, seed, i) for i in range(n)])
        return
    _Writing(inference, questions, sampling, n, seed, selection).write(out)


def open_questions(
    options: InferenceOptions, prompt: str | None, rows: str | None, out: Path | None, sampling: Sampling
) -> tuple[InferenceModel, Sampling, list[Question]]:
    """The model, its sampling with stop ids, and the prompts; arguments as in `generate`.

    Raises:
        UserError: the model, the rows or the output are not accessible, or a setting is invalid.
    """
    if (prompt is None) == (rows is None):
        raise UserError('give one of a prompt, as in `tunix generate MODEL "prompt"`, and --input FILE')
    if rows is not None and out is None:
        raise UserError(f"--input {rows}: say with --out FILE where the completions go")
    if out is not None:
        refuse_out(out)
    table = Rows("the prompt", [{"prompt": prompt}]) if rows is None else open_rows(rows)
    inference = InferenceModel(options)
    sampling = inference.with_stop_ids(sampling)
    questions = []
    for index in range(len(table)):
        where = table.name if rows is None else f"row {index + 1} of {table.name}"
        questions.append(Question(table[index], inference.prompt(table[index], where)))
    return inference, sampling, questions


def _show(inference: InferenceModel, requests: List[Request]) -> None:
    """Prints texts to stdout: a single one as it is sampled, several with numbers when all are done."""
    if len(requests) > 1:
        with closing(Bar("generate", len(requests))) as bar:
            sampled = ProgressSampler(inference.engine, bar).run(requests)
        for number, completion in enumerate(sampled, start=1):
            print(f"--- {number} of {len(requests)} ({completion.finish})\n{inference.text(completion)}")
        return
    assert inference.tokenizer is not None  # a string was encoded
    stream = TextStream(inference.tokenizer, requests[0].sampling.stop_strings)

    def show(_: int, tokens: np.ndarray) -> None:
        print(stream.feed(tokens), end="", flush=True)

    (completion,) = inference.engine.run(requests, on_tokens=show)
    print(stream.finish())
    if completion.finish == "length":
        print(f"(cut off after {len(completion.tokens)} tokens)", file=sys.stderr)


@dataclass(frozen=True)
class _Writing:
    """A call of `tunix generate` that writes a file."""

    inference: InferenceModel
    questions: List[Question]
    sampling: Sampling
    n: int
    seed: int
    selection: Selection | None

    def write(self, out: Path) -> None:
        """Samples the missing chunks, and then writes the file."""
        rows, prompts = max(1, WAVES * self.inference.slots // self.n), len(self.questions)
        with resumable_output(out, self._inputs(), rows * self.n, self.n * prompts) as output:
            if output.done:
                print(f"going on after {output.done // self.n} of {prompts} rows", file=sys.stderr)
            if output.done < self.n * prompts:
                try:
                    self._sample(output, rows)
                except KeyboardInterrupt as stopped:
                    kept = "interrupted before anything was kept"
                    if output.done:
                        kept = (
                            f"interrupted: {output.done // self.n} of {prompts} rows are kept next to {out}; the same "
                            "call goes on after them"
                        )
                    raise Interrupted(kept) from stopped
            summary = self._finish(output)
        print(f"{summary}, written to {out}")

    def _inputs(self) -> dict[str, Any]:
        """Everything that determines the lines; also the slots, from which the size of chunks follows."""
        sampling = {key: list(x) if isinstance(x, tuple) else x for key, x in vars(self.sampling).items()}
        return {
            "model": digest_of_source(self.inference.source),
            "rows": digest_of_rows([one.row, one.tokens.tolist()] for one in self.questions),
            "rewards": None if self.selection is None else fingerprint(self.selection.rewards),
            "n": self.n,
            "seed": self.seed,
            "dtype": self.inference.options.dtype,
            "slots": self.inference.slots,
            **sampling,
        }

    def _sample(self, output: ResumableOutput, rows: int) -> None:
        """Samples the missing chunks, of `rows` rows each."""
        longest = max(len(question.tokens) for question in self.questions) + self.sampling.max_tokens
        data = self.inference.data(min(longest, self.inference.limit))
        rewards = self.selection and self.selection.rewards
        with open_collector(self.inference, self.sampling, rewards, list(self.questions[0].row), data) as collector:
            engine = self.inference.engine
            with closing(Bar("generate", self.n * len(self.questions))) as bar:
                sampler = ProgressSampler(engine, bar, done=output.done)
                for first in range(output.done // self.n, len(self.questions), rows):
                    output.append(self._chunk(collector, sampler, first, self.questions[first : first + rows]))

    def _chunk(
        self, collector: Collector, sampler: ProgressSampler, first: int, questions: List[Question]
    ) -> list[str]:
        """Samples and scores some rows, the first of which has the number `first`; returns their lines."""
        prompts = [Prompt(one.tokens, prompt_text(one.row), one.row) for one in questions]
        scored = collector.collect(sampler, prompts, self.n, self.seed)
        totals = total_rewards(scored, collector.weights).tolist() if collector.weights else None
        return [
            line(
                self.inference,
                first + i,
                j,
                questions[i].row,
                one.completion,
                {} if totals is None else _rewards(one, totals[i][j]),
            )
            for i, group in enumerate(scored)
            for j, one in enumerate(group)
        ]

    def _finish(self, output: ResumableOutput) -> str:
        """Writes the file from the stored lines; returns its summary."""
        lines = map(json.loads, output.lines())
        if self.selection is None or not self.selection.selects:
            tokens = scores = failed = 0
            for line in lines:
                tokens += len(line["tokens"])
                failed += "reward" in line and line["reward"] is None
                scores += line.get("reward") or 0.0
            output.finish(output.lines())
            summary = f"{len(self.questions)} rows, {output.done} completions, {readable(tokens)} tokens"
            if self.selection is None:
                return summary
            mean = scores / (output.done - failed) if output.done > failed else math.nan
            return f"{summary}, mean reward {mean:.4f}" + (f", {failed} without a score" if failed else "")
        best, threshold = self.selection.best, self.selection.threshold
        chosen = choose(self.inference, self.questions, _groups(lines, self.n), best, threshold)
        if not chosen.rows:
            raise UserError(
                f"no completion of {len(self.questions)} rows was taken{_left_out(chosen, len(self.questions))}. They "
                "are kept: the same call with a lower --threshold selects again without sampling"
            )
        output.finish(json.dumps(row) + "\n" for row in chosen.rows)
        text = f"{len(chosen.rows)} rows to train on, from {chosen.prompts} of {len(self.questions)} prompts"
        text += f"{_left_out(chosen, len(self.questions))}; the longest has {chosen.longest} tokens"
        if chosen.respelled:
            text += f"; as ids, since the text of {chosen.respelled} would not be trained as it was sampled"
        return text


def line(
    inference: InferenceModel,
    row: int,
    sample: int,
    columns: Mapping[str, Any],
    completion: Completion,
    more: Mapping[str, Any],
) -> str:
    """A completion as a line of the file.

    Args:
        row: number of the row, from 0.
        sample: number of the completion, from 0 to n - 1.
        columns: the row.
        more: additional fields by name.
    """
    name, text = prompt_column(columns, "the row"), inference.text(completion)
    fields = {
        "row": row,
        "sample": sample,
        name: columns[name],
        "tokens": completion.tokens.tolist(),
        **({} if text is None else {"text": text}),
        "logprobs": [round(float(x), 7) for x in completion.logprobs],
        "finish": completion.finish,
        **more,
    }
    return json.dumps(fields) + "\n"


def _groups(lines: Iterator[dict[str, Any]], n: int) -> Iterator[list[dict[str, Any]]]:
    """Yields the completions of each row."""
    while group := list(islice(lines, n)):
        yield group


def _rewards(scored: Scored, total: float) -> dict[str, Any]:
    """The fields of a completion's rewards; null where there is no score."""
    values = {"reward": total, **scored.rewards}
    reward, *each = [None if math.isnan(value) else value for value in values.values()]
    failures = {"failures": dict(scored.failures)} if scored.failures else {}
    return {"reward": reward, "rewards": dict(zip(scored.rewards, each, strict=True)), **failures}


def _left_out(chosen: Chosen, prompts: int) -> str:
    """Text about prompts without a row, and the reason; empty without any."""
    below = prompts - chosen.prompts - chosen.failed
    parts = [f"{below} had nothing above the threshold"] if below else []
    parts += [f"{chosen.failed} had no score"] if chosen.failed else []
    return f" ({', '.join(parts)})" if parts else ""
