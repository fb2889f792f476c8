"""`tunix.load`: a model with the methods `generate`, `chat` and `score`, without a run or output files.

Axes: T time.
"""

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tunix.config import DType
from tunix.data.sources import Rows
from tunix.errors import UserError
from tunix.hf.source import require_lm_head
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.inference.scoring import sequences_to_score, token_scores
from tunix.models.model import Model, Params
from tunix.types import Completion, Sampling

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
        require_lm_head(self.source, self.options.model)
        listed = [rows] if isinstance(rows, str) else list(rows)
        table = Rows("rows", [{"text": row} if isinstance(row, str) else dict(row) for row in listed])
        size = self.source.decoder.vocab_size
        sequences = sequences_to_score(table, self.tokenizer, size, max_length)
        scores = token_scores(*self._weights, sequences, batch_size=batch_size)
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
    >>> print(model.generate("sort: c a b", sampling=tunix.Sampling(max_tokens=16, temperature=0))[0])

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
