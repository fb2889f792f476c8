"""`tunix.load`: a model with the methods `generate`, `chat` and `score`, without a run; and `tunix score`.

Log-probs of given rows are computed by the training code. Nothing is truncated: a row that is too long is an error. The
command writes one JSON object per row: `logprobs` (one for each token after the first), `tokens` (their ids), `sum`.

Axes: T time.
"""

import json
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from tunix.config import DType, RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.sources import Rows, open_rows
from tunix.data.teacher import vocabulary
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Kept
from tunix.errors import UserError
from tunix.hf.source import require_lm_head
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.mesh import row_shards
from tunix.models.model import Model, Params
from tunix.trainer.logprobs import Scorer
from tunix.trainer.metrics import perplexity
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.progress import Display, readable
from tunix.types import MOST_TOP, Completion, Sampling, Sequence
from tunix.util.atomic_io import refuse_out, write_text_atomic

PromptLike = str | List[int] | Mapping[str, Any]
"""A prompt: a string, token ids, or a row with `prompt`, `messages` or `input_ids`."""


@dataclass(frozen=True)
class Answer:
    """One completion of a prompt; prints as its text."""

    text: str
    """Text without special tokens and stop string, e.g. `Paris.`; empty where there is no tokenizer."""
    completion: Completion
    """The token ids, their log-probs, and the reason why it ended."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RowScore:
    """The log-probs of one row under a model."""

    tokens: np.ndarray
    """`[T]` int32 ids, e.g. `[2, 17, 9]`."""
    logprobs: np.ndarray
    """`[T - 1]` float32 log-probs in nats of each token after the first, e.g. `[-1.2, -0.3]`."""

    @property
    def sum(self) -> float:
        """Total log-prob in nats of the tokens after the first, e.g. -1.5."""
        return float(self.logprobs.sum(dtype=np.float64))


class LoadedModel(InferenceModel):
    """A loaded model, returned by `tunix.load`. The first call that needs weights reads them."""

    def generate(
        self, prompts: PromptLike | List[PromptLike], n: int = 1, *, sampling: Sampling, seed: int = 0
    ) -> list[Answer]:
        """Samples `n` answers to each prompt; item i is answer `i % n` to prompt `i // n`.

        A string is sent as a user's message where the model has a chat template and was trained on chats.

        Args:
            prompts: one, or several in a list; a list of integers is one prompt of token ids.
            n: number of answers to each prompt, e.g. 4.
            sampling: how tokens are sampled, e.g. `tunix.Sampling(max_tokens=64, temperature=0.7)`; the model's stop
                ids are added.
            seed: an answer depends on (seed, its index, token index) alone.

        Raises:
            UserError: the model cannot be loaded, or a prompt or a setting is invalid.
        """
        sampling = self.with_stop_ids(sampling)
        single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        listed: Any = [prompts] if single else prompts
        tokens = []
        for number, prompt in enumerate(listed, start=1):  # each as a row with the column that it stands for
            if isinstance(prompt, str):
                prompt = {"prompt": prompt}
            elif not isinstance(prompt, Mapping):
                prompt = {"input_ids": [int(token) for token in prompt]}
            tokens.append(self.prompt(prompt, f"prompt {number}"))
        groups = self.engine.sample(tokens, n, sampling, seed)
        return [Answer(self.text(one) or "", one) for group in groups for one in group]

    def chat(self, messages: str | List[Mapping[str, str]], *, sampling: Sampling, seed: int = 0) -> str:
        """Samples the assistant's next turn.

        Args:
            messages: all turns so far, e.g. `[{"role": "user", "content": "Hello"}]`; a string is one user's turn.
            sampling: as in `generate`.
            seed: as in `generate`.

        Raises:
            UserError: the model has no chat template, or a setting is invalid.
        """
        if not self.has_template:
            raise UserError(f"{self.options.model} has no chat template, so it cannot chat: use generate")
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return self.generate({"messages": turns}, sampling=sampling, seed=seed)[0].text

    def score(self, rows: str | List[Any], *, batch_size: int = 8, max_length: int = 1024) -> list[RowScore]:
        """Computes the log-prob of every token of given rows after the first.

        Args:
            rows: strings, or rows of text, messages, prompt and completion, or input_ids; all of one kind.
            batch_size: rows of a micro-batch.
            max_length: maximum tokens of a row; a longer one is an error, nothing is truncated.

        Raises:
            UserError: the model has no language-model head, or a row is invalid.
        """
        listed = [rows] if isinstance(rows, str) else list(rows)
        table = Rows("rows", [{"text": row} if isinstance(row, str) else dict(row) for row in listed])
        return self.score_table(table, batch_size, max_length)

    def score_table(
        self, rows: Rows, batch_size: int, max_length: int, progress: Callable[[int, int], None] = lambda *_: None
    ) -> list[RowScore]:
        """As `score`, of opened rows; `progress` as of `token_scores`."""
        require_lm_head(self.source, self.options.model)
        sequences = sequences_to_score(rows, self.tokenizer, self.source.decoder.vocab_size, max_length)
        scores = token_scores(*self._weights, sequences, batch_size=batch_size, progress=progress)
        return [RowScore(sequence.tokens, x[1:]) for sequence, x in zip(sequences, scores, strict=True)]

    @cached_property
    def _weights(self) -> tuple[Model, Params, Mesh]:
        return self.weights()


def load(
    model: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: DType = "float32",
    system: str | None = None,
    raw: bool = False,
    length: int | None = None,
    slots: int | None = None,
) -> LoadedModel:
    """Loads a model that completes prompts, chats and scores text.

    >>> model = tunix.load("runs/quickstart")
    >>> print(model.generate("sort: c a b", sampling=tunix.Sampling(max_tokens=16, temperature=0.0))[0])

    Args:
        model: a hub id, a Hugging Face folder, a PEFT folder, or the folder of a run.
        adapter: a PEFT folder on top.
        dtype: of the computation and the weights.
        system: a system message before prompts that are strings.
        raw: strings are sent unchanged, even if the tokenizer has a chat template.
        length: maximum tokens of prompt and answer; None for the model's limit.
        slots: answers that are sampled at a time; None for the default of this kind of device. It does not change the
            result.

    Raises:
        UserError: there is no such model, or the adapter belongs to another one.
    """
    on_top = None if adapter is None else Path(adapter).expanduser()
    loaded = LoadedModel(InferenceOptions(str(model), on_top, dtype, slots, system, raw, length))
    _ = loaded.tokenizer  # a mistyped folder is reported here, before anything else is done
    return loaded


def sequences_to_score(
    rows: Rows, tokenizer: Tokenizer | None, vocab_size: int, max_length: int, kind: RowKind = RowKind.ALL
) -> list[Sequence]:
    """Renders rows as sequences whose tokens after the first are all scored, or those that are trained of a kind.

    Raises:
        UserError: a row is too long, too short, or invalid.
    """
    examples = Examples(rows, tokenizer, DataConfig(train="", max_length=sys.maxsize), kind, vocab_size)
    sequences = []
    for index in range(len(rows)):
        where, example = f"row {index + 1} of {rows.name}", examples[index]
        if not isinstance(example, Kept):
            reason = example.detail or "nothing to score in a row of fewer than two tokens; leave it out"
            raise UserError(f"{where}: {reason}")
        (sequence,) = example.sequences
        if (size := len(sequence.tokens)) > max_length:
            raise UserError(f"{where} has {size} tokens, more than max_length (--max-length) {max_length}: raise it")
        sequences.append(sequence)
    return sequences


def token_scores(
    model: Model,
    params: Params,
    mesh: Mesh,
    sequences: List[Sequence],
    what: Literal["logprobs", "values"] = "logprobs",
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> list[np.ndarray]:
    """The `[T]` log-probs, or values, of each sequence's tokens, in shapes that compile once.

    Args:
        batch_size: rows of a micro-batch.
        progress: receives the numbers of sequences and of tokens that are done.
    """
    # One shape for all micro-batches, no longer than the rows need.
    length = -(-max(len(sequence.tokens) for sequence in sequences) // 64) * 64
    rows = -(-batch_size // row_shards(mesh)) * row_shards(mesh)
    scorer = Scorer(model, Microbatcher(rows, mesh), length)
    scores: list[np.ndarray] = []
    size, tokens = 8 * batch_size, 0
    for start in range(0, len(sequences), size):
        group = sequences[start : start + size]
        scores += scorer.scores(what, params, group, size=size)
        tokens += sum(len(sequence.tokens) for sequence in group)
        progress(len(scores), tokens)
    return scores


def score(
    model: str,
    data: str,
    out: Path,
    *,
    adapter: Path | None = None,
    batch_size: int = 8,
    max_length: int = 1024,
    dtype: DType = "float32",
    top_k: int = 0,
) -> float:
    """Scores every row of `data` and writes `out`; the options are those of `LoadedModel.score` and `tunix.load`.

    With `top_k` the trained tokens alone are scored, and what is written are rows to distil from (`teacher.path:
    stored`): `input_ids`, `loss_mask`, and of each trained token the log-probs of itself and of the most likely ids.

    Returns:
        The perplexity: exp of minus the mean log-prob over all tokens after the first of their row.

    Raises:
        UserError: the model, the rows or the output are not accessible.
    """
    refuse_out(out)
    if top_k > MOST_TOP:
        raise UserError(f"--top-k {top_k}: {MOST_TOP} ids at most are told of a token")
    rows = open_rows(data)
    with closing(Display("score", len(rows), 0)) as display:
        if top_k:
            inference = InferenceModel(InferenceOptions(model, adapter, dtype, batch_size, length=max_length + 1))
            require_lm_head(inference.source, model)
            tokenizer, vocab_size = inference.tokenizer, inference.source.decoder.vocab_size
            sequences = sequences_to_score(rows, tokenizer, vocab_size, max_length, RowKind.COMPLETION)
            lines, total, count = _likely(inference, sequences, top_k, display)
        else:
            loaded = LoadedModel(InferenceOptions(model, adapter, dtype))
            scores = loaded.score_table(rows, batch_size, max_length, lambda done, _: display.update(done, {}))
            lines = []
            for row in scores:
                logprobs = [round(float(x), 7) for x in row.logprobs]
                lines.append({"logprobs": logprobs, "tokens": row.tokens[1:].tolist(), "sum": row.sum})
            total, count = sum(row.sum for row in scores), sum(len(row.logprobs) for row in scores)
    write_text_atomic(out, "".join(json.dumps(line) + "\n" for line in lines))
    value = perplexity(-total / count)
    print(f"{len(rows)} rows, {readable(count)} tokens: perplexity {value:.4f}, written to {out}")
    return value


CHUNK = 64
"""Rows whose likeliest ids are asked for at a time."""


def _likely(
    inference: InferenceModel, sequences: List[Sequence], top_k: int, display: Display
) -> tuple[list[dict[str, Any]], float, int]:
    """Rows with the log-probs of each trained token and of the likeliest ids in its place; their sum and number."""
    sampling, lines, total, count = Sampling(max_tokens=0, prompt_logprobs=True, top_logprobs=top_k), [], 0.0, 0
    words = None if inference.tokenizer is None else vocabulary(inference.tokenizer)
    for start in range(0, len(sequences), CHUNK):
        part = sequences[start : start + CHUNK]
        answers = inference.engine.sample([x.tokens for x in part], 1, sampling, 0)
        for sequence, (completion,) in zip(part, answers, strict=True):
            scores, mask = completion.prompt_scores, sequence.loss_mask
            assert scores is not None, "they were asked for"
            ids = np.concatenate([sequence.tokens[:, None], scores.top_ids], axis=1)[mask]
            logprobs = np.concatenate([scores.logprobs[:, None], scores.top_logprobs], axis=1)[mask]
            row = {"input_ids": sequence.tokens.tolist(), "loss_mask": mask.astype(int).tolist()}
            listed = [[round(x, 6) for x in token] for token in np.minimum(logprobs, 0).tolist()]
            lines.append({**row, "top_ids": ids.tolist(), "top_logprobs": listed, "tokenizer": words})
            total, count = total + float(logprobs[:, 0].sum(dtype=np.float64)), count + len(logprobs)
        display.update(start + len(part), {})
    return lines, total, count
