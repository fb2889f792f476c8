"""`tunix generate`: completes one prompt on the screen, or many rows in a file.

Rows -> prompts (`inference/model.py`) -> the engine -> one JSON object per completion, in the order of the rows.
Completion j of row i depends on (seed, i n + j, token index) alone, also with each of several adapters, so the same
command writes the same file. Rows are sampled in chunks, which `resumable_output.py` stores, so that an interrupted
call can resume.

`choose` selects from the scored completions of each prompt (best-of-n, rejection sampling), as rows for SFT. The
trained tokens must be the sampled ones. Rows of `prompt` and `completion` (strings, or messages where the prompt was
sent as a chat) are written if each of them, rendered as by `tunix run`, gives exactly the sampled tokens. If one does
not (it was cut off, its text has other tokens, or its prompt was given as ids), all rows are `input_ids` with `labels`,
which need no rendering.

Several adapters are loaded unmerged with one base and share the engine's batches; one with its own embeddings, which
cannot be mixed within a batch, samples after the others.
"""

import json
import math
import sys
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from tunix.algorithms.episodes import total_rewards
from tunix.commands.resumable_output import ResumableOutput, digest_of_folder, digest_of_rows, resumable_output
from tunix.commands.sampling import (
    Bar,
    ProgressSampler,
    open_collector,
    reward_config,
    score_fields,
)
from tunix.data.config import DataConfig
from tunix.data.examples import prompt_text, to_example
from tunix.data.shapes import TEMPLATE_KWARGS, Rendering
from tunix.data.sources import Rows, open_rows
from tunix.data.types import Kept, Prompt
from tunix.errors import Interrupted, UserError
from tunix.hf.peft_folder import fingerprint_of, foreign_base
from tunix.hf.source import Source, as_rounded, beside, pretrained
from tunix.inference.model import InferenceModel, InferenceOptions, TextStream, prompt_column
from tunix.lora.multi_lora import LoadedAdapter
from tunix.models.config import is_adapter
from tunix.models.model import Params
from tunix.rollout.engine.engine import Engine
from tunix.rollout.rewards.config import RewardConfig
from tunix.trainer.progress import readable
from tunix.types import Completion, Request, Sampling
from tunix.util.atomic_io import refuse_out

UNTRAINED = -100
"""The label of a token that is no target."""
WAVES = 8
"""Completions of a chunk for each slot: slots idle only at the end of a chunk, and a kill loses at most one chunk."""


def digest_of_source(source: Source) -> str:
    """The digest of a model's files, and of those of its adapter."""
    return digest_of_rows(digest_of_folder(folder) for folder in (source.folder, source.merged) if folder is not None)


@dataclass(frozen=True)
class Chosen:
    """The selected rows to train on, and counts about the selection."""

    rows: list[dict[str, Any]]
    """Rows in the order of the prompts, the best completion of each first."""
    prompts: int
    """Prompts with at least one selected completion."""
    failed: int
    """Prompts without a scored completion."""
    longest: int
    """Tokens of the longest row."""
    respelled: int
    """Rows whose text does not give the sampled tokens; above 0, all rows are ids."""


def choose(
    inference: InferenceModel,
    prompts: List[Prompt],
    groups: Iterable[List[Mapping[str, Any]]],
    most: int | None,
    threshold: float | None,
) -> Chosen:
    """Selects completions as rows to train on, the best first and of equal ones the first.

    Args:
        inference: the model.
        prompts: the prompts.
        groups: the completions of each as they are written to the file: `tokens`, `text`, `reward` (None for none).
        most: maximum number of a prompt's; None for all.
        threshold: minimum reward; None for any.
    """
    taken: list[tuple[Prompt, Mapping[str, Any]]] = []
    failed = served = 0
    for prompt, group in zip(prompts, groups, strict=True):
        scored = [x for x in group if x["reward"] is not None]
        passing = [x for x in scored if threshold is None or x["reward"] >= threshold]
        best = sorted(passing, key=lambda x: -x["reward"])[:most]
        taken += [(prompt, x) for x in best]
        served += bool(best)
        failed += not scored
    texts = [_as_text(inference, prompt, completion) for prompt, completion in taken]
    respelled = sum(text is None for text in texts)
    rows, longest = [], 0
    for text, (prompt, completion) in zip(texts, taken, strict=True):
        before, tokens = prompt.tokens.tolist(), completion["tokens"]
        ids = {"input_ids": [*before, *tokens], "labels": [UNTRAINED] * len(before) + list(tokens)}
        shape = ids if respelled or text is None else text
        rows.append({**shape, **{name: completion[name] for name in ("reward", "row", "sample")}})
        longest = max(longest, len(ids["input_ids"]))
    return Chosen(rows, served, failed, longest, respelled)


def _as_text(inference: InferenceModel, prompt: Prompt, completion: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row as text; None where rendering it would not give the sampled tokens."""
    if inference.tokenizer is None or (words := inference.training_prompt(prompt.row)) is None:
        return None
    text = completion["text"]
    turn = {"role": "assistant", "content": text}
    row = {"prompt": words, "completion": text if isinstance(words, str) else [turn]}
    row |= {name: prompt.row[name] for name in ("tools", TEMPLATE_KWARGS) if prompt.row.get(name) is not None}
    data, vocab_size = DataConfig(train=""), inference.source.decoder.vocab_size
    rendering = Rendering("prompt_completion", data, vocab_size=vocab_size, uncut=True)
    try:
        example = to_example(row, inference.tokenizer, rendering)
    except UserError:  # the template refuses this answer, which can still be trained as ids
        return None
    if not isinstance(example, Kept):
        return None
    sequence, sampled = example.sequences[0], [*prompt.tokens.tolist(), *completion["tokens"]]
    # A template may close a turn with a token that is neither sampled nor trained.
    same = sequence.tokens[: len(sampled)].tolist() == sampled
    trained = [*range(len(prompt.tokens), len(sampled))]
    return row if same and np.flatnonzero(sequence.loss_mask).tolist() == trained else None


class ComparedAdapters:
    """Several adapters on one base, with an engine that samples with each of them."""

    def __init__(self, inference: InferenceModel, paths: List[Path]):
        """Loads the base and the adapters of PEFT folders.

        Raises:
            UserError: an adapter is not accessible, does not fit the base, or was trained on a base that was rounded
                otherwise than that of the others (QLoRA).
        """
        self.paths = paths
        if twice := {path for path in paths if paths.count(path) > 1}:
            raise UserError(f"--adapter {twice.pop()} is given twice")
        source = inference.source
        if source.merged is not None:
            raise UserError(
                f"{inference.options.model} ends in an adapter: export it (tunix export) before adding others"
            )
        assert source.folder is not None  # only recipes start from random weights
        for path in paths:
            if warning := foreign_base(path, source.name, source.folder, source.decoder):
                print(warning, file=sys.stderr)
        roundings = {path: fingerprint_of(path).rounding for path in paths}
        if len(set(roundings.values())) > 1:
            listed = "; ".join(
                f"{path}: {f'{rounding.base} in tiles of {rounding.tile}' if rounding else 'no rounding'}"
                for path, rounding in roundings.items()
            )
            raise UserError(
                f"--adapter: their base was rounded differently while they trained ({listed}): ask each alone"
            )
        model, self._params, mesh = inference.weights()
        if (rounding := roundings[paths[0]]) is not None:
            self._params = as_rounded(self._params, model.config, rounding)
        self.mixtures: list[tuple[Params, dict[str, LoadedAdapter]]] = []
        """(embeddings, adapters by name) of those that share batches: all without embeddings, then each other."""
        together: dict[str, LoadedAdapter] = {}
        for path in paths:
            settings, params = beside(model, self._params, mesh, path)
            tables = {name: x for name, x in params.items() if not is_adapter(name)}
            adapter = LoadedAdapter(settings, {name: x for name, x in params.items() if name not in tables})
            if tables:
                self.mixtures.append((tables, {str(path): adapter}))
            else:
                together[str(path)] = adapter
        if together:
            self.mixtures.insert(0, ({}, together))
        self.engine = inference.new_engine(model, mesh, {name for tables, _ in self.mixtures for name in tables})
        self._versions = count()

    def sample(self, requests: List[Request], bar: Bar, done: int) -> dict[Path, list[Completion]]:
        """The completions of the requests with each adapter; `done` were sampled before."""
        completions: dict[str, list[Completion]] = {}
        for tables, adapters in self.mixtures:
            self.engine.publish({**self._params, **tables}, next(self._versions), adapters=adapters)
            before = done + len(requests) * len(completions)

            def show(number: int, _: np.ndarray, before: int = before) -> None:
                bar.show(before + max(0, number + 1 - self.engine.slots))  # requests start in order

            mixed = [replace(request, adapter=name) for name in adapters for request in requests]
            sampled = self.engine.run(mixed, on_tokens=show)
            for i, name in enumerate(adapters):
                completions[name] = sampled[i * len(requests) :][: len(requests)]
        return {path: completions[str(path)] for path in self.paths}


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `tunix generate` by their names, which its help explains."""

    prompt: str | None
    """A string to answer; None with `input`."""
    sampling: Sampling
    """How tokens are sampled; the model's stop ids are added."""
    input: str | None = None
    out: Path | None = None
    """.jsonl to write; required with `input`."""
    n: int = 1
    seed: int = 0
    adapters: List[Path] = ()
    """PEFT folders whose answers are compared; empty for the model's own."""
    reward: List[str] = ()
    """What scores each completion (`sampling.reward_config`); requires `out`, and one model."""
    reward_model: str | None = None
    deadline: float = 10.0
    best: int | None = None
    """Maximum number of completions of each prompt to write as rows to train on; None for all."""
    threshold: float | None = None
    """Minimum reward of a completion that is written as a row to train on; None for any."""


def generate(model: InferenceOptions, options: GenerateOptions) -> None:
    """Prints completions of a prompt, or writes those of a prompt or of rows to a file.

    Raises:
        UserError: the model, an adapter, the rows or the output are not accessible, or a setting is invalid.
        Interrupted: by Ctrl-C while a file was written; the same call resumes it.
    """
    rewards = reward_config(options.reward, options.reward_model, options.deadline)
    for name in ("best", "threshold"):
        if rewards is None and vars(options)[name] is not None:
            raise UserError(f"--{name} selects by reward: add --reward, for instance exact_match")
    if rewards is not None and options.adapters:
        raise UserError("--reward scores the completions of one model: give one --adapter at a time")
    if rewards is not None and options.out is None:
        raise UserError("--reward: say with --out FILE where the scores go")
    if (options.prompt is None) == (options.input is None):
        raise UserError('give one of a prompt, as in `tunix generate MODEL "prompt"`, and --input FILE')
    if options.input is not None and options.out is None:
        raise UserError(f"--input {options.input}: say with --out FILE where the completions go")
    if options.out is not None:
        refuse_out(options.out)
    table = Rows("the prompt", [{"prompt": options.prompt}]) if options.input is None else open_rows(options.input)
    inference = InferenceModel(model)
    options = replace(options, sampling=inference.with_stop_ids(options.sampling))
    prompts = []
    for index in range(len(table)):
        row, where = table[index], table.name if options.input is None else f"row {index + 1} of {table.name}"
        prompts.append(Prompt(inference.prompt(row, where), prompt_text(row), row))
    compared = ComparedAdapters(inference, options.adapters) if options.adapters else None
    call = _Call(inference, prompts, options, rewards, compared)
    if options.out is not None:
        call.write(options.out)
    elif options.n > 1 or compared:
        (answers,) = call.sampled([range(1)])
        for _, sample, completion, more in answers:
            name = f"{sample + 1} of {options.n}"
            if adapter := more.get("adapter"):
                name = f"{adapter}, {name}" if options.n > 1 else adapter
            print(f"--- {name} ({completion.finish})\n{inference.text(completion)}")
        if drafts := call.engine.drafts:
            print(f"({options.n} answers{drafts})", file=sys.stderr)
    else:  # printed as it is sampled
        assert inference.tokenizer is not None  # a string was encoded
        stream = TextStream(inference.tokenizer, options.sampling.stop_strings)

        def show(_: int, tokens: np.ndarray) -> None:
            print(stream.feed(tokens), end="", flush=True)

        request = Request(prompts[0].tokens, options.sampling, options.seed)
        (completion,) = inference.engine.run([request], on_tokens=show)
        print(stream.finish())
        drafts = inference.engine.drafts
        if drafts or completion.finish == "length":
            said = "cut off after " if completion.finish == "length" else ""
            print(f"({said}{len(completion.tokens)} tokens{drafts})", file=sys.stderr)


Answer = tuple[int, int, Completion, Mapping[str, Any]]
"""The number of the row, and of the sample; the completion; and further fields by name."""


@dataclass(frozen=True)
class _Call:
    inference: InferenceModel
    prompts: List[Prompt]
    options: GenerateOptions
    rewards: RewardConfig | None
    compared: ComparedAdapters | None

    @property
    def per_row(self) -> int:
        """Completions of each row."""
        return self.options.n * (len(self.compared.paths) if self.compared else 1)

    @property
    def engine(self) -> Engine:
        """What samples; the first access reads the weights."""
        return self.compared.engine if self.compared else self.inference.engine

    def write(self, out: Path) -> None:
        """Samples the missing chunks, and then writes the file."""
        inference, options = self.inference, self.options
        rows, prompts = max(1, WAVES * inference.slots // options.n), len(self.prompts)
        if self.compared and len(self.compared.mixtures) > 1:
            rows = prompts  # the engine compiles again for each mixture that it changes to
        # Everything that determines the lines: of rewards the settings, custom files (one that is missing is reported
        # where it is loaded) and a model's weights; also the slots, from which the size of chunks follows.
        rewards = None
        if (config := self.rewards) is not None:
            files = [Path(function.name.rpartition(":")[0]) for function in config.functions]
            texts = {str(file): file.read_text(encoding="utf-8") for file in files if file.suffix and file.is_file()}
            weights = None if config.model is None else digest_of_source(pretrained(config.model))
            rewards = {**config.model_dump(mode="json"), "files": texts, "weights": weights}
        inputs: dict[str, Any] = {
            "model": digest_of_source(inference.source),
            "rows": digest_of_rows([prompt.row, prompt.tokens.tolist()] for prompt in self.prompts),
            "rewards": rewards,
            "n": options.n,
            "seed": options.seed,
            "dtype": inference.options.dtype,
            "slots": inference.slots,
            **{key: list(x) if isinstance(x, tuple) else x for key, x in vars(options.sampling).items()},
        }
        if inference.options.speculate:  # the last bits of log-probs follow from it
            inputs |= {"speculate": inference.options.speculate, "mtp": inference.options.mtp}
        if self.compared:
            inputs["adapters"] = {str(path): digest_of_folder(path) for path in self.compared.paths}
        with resumable_output(out, inputs, rows * self.per_row, prompts * self.per_row) as output:
            if output.done:
                print(f"going on after {output.done // self.per_row} of {prompts} rows", file=sys.stderr)
            chunks = [range(i, min(i + rows, prompts)) for i in range(output.done // self.per_row, prompts, rows)]
            if chunks:
                try:
                    with closing(self.sampled(chunks, output.done)) as sampled:
                        for chunk in sampled:
                            output.append(self._line(i, j, completion, more) for i, j, completion, more in chunk)
                except KeyboardInterrupt as stopped:
                    kept = "interrupted before anything was kept"
                    if output.done:
                        kept = (
                            f"interrupted: {output.done // self.per_row} of {prompts} rows are kept next to {out}; "
                            "the same call goes on after them"
                        )
                    raise Interrupted(kept) from stopped
            summary = self._finish(output)
        drafts = self.engine.drafts if chunks else ""
        print(f"{summary}{drafts}, written to {out}")

    def sampled(self, chunks: List[range], done: int = 0) -> Generator[list[Answer], None, None]:
        """Samples and scores chunks of rows.

        Args:
            chunks: the rows of each.
            done: completions of the rows before.

        Yields:
            The completions of a chunk in the order of their lines.
        """
        inference, options, n = self.inference, self.options, self.options.n
        with closing(Bar("generate", len(self.prompts) * self.per_row)) as bar:
            if self.compared:
                for chunk in chunks:
                    requests = [
                        Request(self.prompts[i].tokens, options.sampling, options.seed, i * n + j)
                        for i in chunk
                        for j in range(n)
                    ]
                    completions = self.compared.sample(requests, bar, done)
                    done += len(chunk) * self.per_row
                    yield [
                        (i, j, by_request[(i - chunk.start) * n + j], {"adapter": str(path)})
                        for i in chunk
                        for path, by_request in completions.items()
                        for j in range(n)
                    ]
                return
            longest = max(len(prompt.tokens) for prompt in self.prompts) + options.sampling.max_tokens
            data, columns = inference.data(min(longest, inference.limit)), list(self.prompts[0].row)
            with open_collector(inference, options.sampling, self.rewards, columns, data) as collector:
                sampler = ProgressSampler(inference.engine, bar, done=done)
                for chunk in chunks:
                    groups = collector.collect(sampler, self.prompts[chunk.start : chunk.stop], n, options.seed)
                    totals = total_rewards(groups, collector.weights).tolist() if collector.weights else None
                    yield [
                        (i, j, scored.completion, score_fields(scored, total[j]) if total else {})
                        for i, group, total in zip(chunk, groups, totals or [None] * len(groups), strict=True)
                        for j, scored in enumerate(group)
                    ]

    def _line(self, row: int, sample: int, completion: Completion, more: Mapping[str, Any]) -> str:
        """A completion as a line of the file, with additional fields by name."""
        columns, text = self.prompts[row].row, self.inference.text(completion)
        name = prompt_column(columns, "the row")
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

    def _finish(self, output: ResumableOutput) -> str:
        """Writes the file from the stored lines; returns its summary."""
        prompts, lines, options = len(self.prompts), map(json.loads, output.lines()), self.options
        if options.best is None and options.threshold is None:
            tokens = scores = failed = 0
            for line in lines:
                tokens += len(line["tokens"])
                failed += "reward" in line and line["reward"] is None
                scores += line.get("reward") or 0.0
            output.finish(output.lines())
            if self.compared:
                return f"{prompts} rows, {len(self.compared.paths)} adapters, {output.done} completions"
            summary = f"{prompts} rows, {output.done} completions, {readable(tokens)} tokens"
            if self.rewards is None:
                return summary
            mean = scores / (output.done - failed) if output.done > failed else math.nan
            return f"{summary}, mean reward {mean:.4f}" + (f", {failed} without a score" if failed else "")
        groups = iter(lambda: list(islice(lines, options.n)), [])
        chosen = choose(self.inference, self.prompts, groups, options.best, options.threshold)
        below = prompts - chosen.prompts - chosen.failed
        reasons = [f"{below} had nothing above the threshold"] if below else []
        reasons += [f"{chosen.failed} had no score"] if chosen.failed else []
        left_out = f" ({', '.join(reasons)})" if reasons else ""
        if not chosen.rows:
            raise UserError(
                f"no completion of {prompts} rows was taken{left_out}. They are kept: the same call with a lower "
                "--threshold selects again without sampling"
            )
        output.finish(json.dumps(row) + "\n" for row in chosen.rows)
        text = f"{len(chosen.rows)} rows to train on, from {chosen.prompts} of {prompts} prompts"
        text += f"{left_out}; the longest has {chosen.longest} tokens"
        if chosen.respelled:
            text += f"; as ids, since the text of {chosen.respelled} would not be trained as it was sampled"
        return text
