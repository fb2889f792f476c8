"""`tunix.load`: a model that completes, chats and scores in three methods, without a run and without files.

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
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.hf.source import must_speak
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.inference.scoring import RowScore, scored, sequences_to_score
from tunix.models.model import Model, Params
from tunix.types import Completion, Sampling

Asked = str | List[int] | Mapping[str, Any]
"""A prompt: a string, token ids, or a row with `prompt`, `messages` or `input_ids`."""


@dataclass(frozen=True)
class Answer:
    """One completion of a prompt; prints as its text."""

    text: str
    """Without special tokens and up to a stop string, e.g. `Paris.`; empty where there is no tokenizer."""
    completion: Completion
    """Token ids, their log-probs, and why it ended."""

    def __str__(self) -> str:
        return self.text


class LoadedModel:
    """What `tunix.load` returns. Weights are read by the first call that needs them."""

    def __init__(self, options: InferenceOptions):
        """Reads nothing yet.

        Args:
            options: which model, and how prompts are put to it.
        """
        self._options, self._model = options, InferenceModel(options)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What turns text into ids; None where the folder has none."""
        return self._model.tokenizer

    def generate(self, prompts: Asked | List[Asked], n: int = 1, *, sampling: Sampling, seed: int = 0) -> list[Answer]:
        """`n` answers to each prompt, one after the other: answer `i % n` of prompt `i // n`.

        A string is put as a user's message where the model has a chat template and was trained on chats.

        Args:
            prompts: one, or several in a list; a list of whole numbers is one prompt of token ids.
            n: answers of each, e.g. 4.
            sampling: how tokens are chosen, e.g. `tunix.Sampling(max_tokens=64, temperature=0.7)`; the model's own
                stop ids are added.
            seed: an answer follows from (seed, its place, token index) alone.

        Raises:
            UserError: the model, a prompt or a setting means nothing.
        """
        sampling = self._model.stopping(sampling)
        rows = [_row(one) for one in _listed(prompts)]
        asked = [self._model.prompt(row, f"prompt {number}") for number, row in enumerate(rows, start=1)]
        found = self._model.engine.sample(asked, n, sampling, seed)
        return [Answer(self._model.text(one) or "", one) for group in found for one in group]

    def chat(self, messages: str | List[Mapping[str, str]], *, sampling: Sampling, seed: int = 0) -> str:
        """The assistant's next turn.

        Args:
            messages: all turns so far, e.g. `[{"role": "user", "content": "Hello"}]`; a string is one user's turn.
            sampling: as in `generate`.
            seed: as in `generate`.

        Raises:
            UserError: the model has no chat template, or a setting means nothing.
        """
        if not self._model.has_template:
            raise UserError(f"{self._options.model} has no chat template, so it cannot chat: use generate")
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return self.generate({"messages": said}, sampling=sampling, seed=seed)[0].text

    def score(self, rows: str | List[Any], *, batch_size: int = 8, max_length: int = 1024) -> list[RowScore]:
        """The log-prob of every token of given rows after its first.

        Args:
            rows: strings, or rows of text, messages, prompt and completion, or input_ids; all of one kind.
            batch_size: rows of a micro-batch.
            max_length: tokens of a row at most; a longer one is an error, nothing is cut.

        Raises:
            UserError: the model gives no log-probs, or a row is not to be read.
        """
        must_speak(self._model.source, self._options.model)
        listed = [rows] if isinstance(rows, str) else list(rows)
        table = Rows("rows", [{"text": row} if isinstance(row, str) else dict(row) for row in listed])
        size = self._model.source.decoder.vocab_size
        sequences = sequences_to_score(table, self.tokenizer, size, max_length)
        return scored(*self._weights, sequences, batch_size)

    @cached_property
    def _weights(self) -> tuple[Model, Params, Mesh]:
        return self._model.weights()


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
    """A model that completes, chats and scores.

    >>> model = tunix.load("runs/quickstart")
    >>> print(model.generate("sort: c a b", sampling=tunix.Sampling(max_tokens=16, temperature=0))[0])

    Args:
        model: a hub id, a Hugging Face folder, a PEFT folder, or the folder of a run.
        adapter: a PEFT folder on top.
        dtype: of the computation and the weights.
        system: a system message before prompts that are strings.
        raw: strings are put as they stand, also where the tokenizer has a chat template.
        length: tokens of prompt and answer at most; None for as many as the model reads.
        slots: answers that are sampled at a time; None for what fills this kind of device. Never changes the result.

    Raises:
        UserError: there is no such model, or the adapter is not its own.
    """
    on_top = None if adapter is None else Path(adapter).expanduser()
    loaded = LoadedModel(InferenceOptions(str(model), on_top, dtype, slots, system, raw, length))
    _ = loaded.tokenizer  # a mistyped folder is reported here, before anything else is done
    return loaded


def _listed(prompts: Asked | List[Asked]) -> List[Asked]:
    """Several prompts as they are, a single one in a list."""
    single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
    return [prompts] if single else prompts  # pyright: ignore[reportReturnType]


def _row(asked: Asked) -> Mapping[str, Any]:
    """A prompt as a row."""
    if isinstance(asked, Mapping):
        return asked
    return {"prompt": asked} if isinstance(asked, str) else {"input_ids": [int(token) for token in asked]}
