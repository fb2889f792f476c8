"""A model that answers: what `tunix generate` and `tunix chat` share.

A row (a string, messages, or token ids) becomes the tokens of a prompt, in the way that the model was trained to read
it; the engine holds the weights and draws. `TextStream` makes text of tokens that come in pieces.

Axes: T time.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.config import DType, MeshConfig, RowKind
from tunix.data.accounting import Dropped
from tunix.data.config import DataConfig
from tunix.data.examples import to_example
from tunix.data.shapes import Format, Rendering
from tunix.data.sources import open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError, nearest
from tunix.hf.source import Source, check_vocabulary, exported, loaded, must_speak, pretrained
from tunix.inference.text_stream import until_stop
from tunix.mesh import build_mesh
from tunix.models.model import Model, Params
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.sampling import check
from tunix.rollout.engine.shapes import usual_slots
from tunix.types import Completion, Sampling
from tunix.util.compile_cache import keep_compilations
from tunix.util.yaml_io import read_mapping

COLUMNS: dict[str, Format] = {"prompt": "prompt_completion", "messages": "messages", "input_ids": "tokens"}
"""What a row may ask with, and how it is rendered; where it has several, the first is meant."""


@dataclass(frozen=True)
class InferenceOptions:
    """Which model is to answer, and how prompts are put to it."""

    model: str
    """Hub id, folder, or the folder of a run."""
    adapter: Path | None = None
    """PEFT folder on top."""
    dtype: DType = "float32"
    """Of the computation and the weights."""
    slots: int | None = None
    """Completions that are drawn at a time; None for what fills this kind of device. Never changes the result."""
    system: str | None = None
    """System message before prompts that are strings."""
    raw: bool = False
    """Strings are sent as they stand, also where the tokenizer has a chat template."""
    length: int | None = None
    """Tokens of prompt and answer at most; None for as many as the model reads."""


@dataclass(frozen=True, eq=False)
class InferenceModel:
    """A model, its tokenizer and its engine. Weights are read when the engine is first asked for."""

    asked: InferenceOptions

    @cached_property
    def source(self) -> Source:
        """The structure, where the weights are, and the tokenizer."""
        source = pretrained(self.asked.model, self.asked.adapter)
        check_vocabulary(source)
        return source

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where the folder has none."""
        return self.source.tokenizer

    @property
    def limit(self) -> int:
        """Tokens of prompt and answer at most."""
        return min(self.asked.length or sys.maxsize, self.source.decoder.max_positions)

    @property
    def slots(self) -> int:
        """Completions that are drawn at a time."""
        return self.asked.slots or usual_slots(jax.devices()[0].platform)

    @cached_property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    @cached_property
    def trained_on(self) -> DataConfig | None:
        """How the rows of the run were rendered, where the model is a run."""
        folder = Path(self.asked.model).expanduser()
        if not (folder / "recipe.yaml").is_file():
            return None
        return DataConfig.model_validate(read_mapping(exported(folder).parent / "recipe.yaml")["data"])

    @cached_property
    def plain(self) -> str | None:
        """Why a string is sent as it stands; None where it is sent as a user's message.

        Raises:
            UserError: a system message was given, and there is no place for it.
        """
        reason = None
        if self.asked.raw:
            reason = "--raw was given"
        elif not self.has_template:
            reason = f"{self.asked.model} has no chat template"
        elif self.trained_on is not None and not _of_chats(self.trained_on, self.asked.model):
            reason = f"{self.asked.model} was trained on plain strings"
        if reason is not None and self.asked.system is not None:
            raise UserError(f"--system: {reason}, so a prompt is sent as it stands and has no system message")
        return reason

    @property
    def system(self) -> str | None:
        """The system message of chats: the one asked for, else that of the run."""
        if self.asked.system is not None or self.trained_on is None:
            return self.asked.system
        return self.trained_on.system

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables of the chat template: those of the run."""
        return self.trained_on.template_kwargs if self.trained_on else {}

    def weights(self) -> tuple[Model, Params, Mesh]:
        """The model with its weights on all devices, read anew: whoever asks holds them."""
        keep_compilations()
        mesh = build_mesh(MeshConfig())
        return *loaded(self.source, self.asked.dtype, mesh), mesh

    @cached_property
    def engine(self) -> Engine:
        """With the weights in place."""
        model, params, mesh = self.weights()
        decode = self.tokenizer.decode if self.tokenizer else None
        engine = Engine(model, mesh, slots=self.slots, length=self.limit, decode=decode)
        engine.publish(params, version=0)
        return engine

    def stopping(self, sampling: Sampling) -> Sampling:
        """The settings with the model's own stop ids.

        Raises:
            UserError: they mean nothing, look for text where there is no tokenizer, or nothing is ever drawn.
        """
        must_speak(self.source, self.asked.model)
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError(f"--stop {sampling.stop_strings[0]!r}: {self.asked.model} has no tokenizer, so no text")
        sampling = replace(sampling, stop_ids=self.source.stop_ids)
        check(sampling, self.source.decoder.vocab_size)
        return sampling

    def prompt(self, row: Mapping[str, Any], where: str) -> np.ndarray:
        """`[T]` int32 tokens that a row asks with.

        Args:
            row: `prompt` (a string, or messages), `messages`, or `input_ids`, which are taken as they stand.
            where: how the row is called in a message.

        Raises:
            UserError: it asks with nothing, with what this model cannot read, or for more than it reads.
        """
        name = asked_with(row, where)
        self._check(name, row[name], where)
        how = Rendering(
            format=COLUMNS[name],
            columns={"prompt_ids": "input_ids"},
            train_on=RowKind.PROMPT,
            prompt_length=sys.maxsize,
            chat=isinstance(row[name], str) and self.plain is None,
            system=self.system,
            template_kwargs=self.template_kwargs,
            vocab_size=self.source.decoder.vocab_size,
        )
        example = to_example(row, self.tokenizer, how, where)
        if isinstance(example, Dropped):
            raise UserError(f"{where}: {name} is empty; give it at least one token")
        tokens = example.sequences[0].tokens
        if tokens.min() < 0:
            raise UserError(f"{where}: input_ids holds {tokens.min()}, which is no token id")
        if len(tokens) >= self.limit:
            raise UserError(f"{where} has {len(tokens)} tokens, but the model ends at {self.limit}: shorten it")
        return tokens

    def said(self, row: Mapping[str, Any]) -> str | list[Any] | None:
        """What a row asks with, as rows to train on say it: a string, or messages; None where it gave ids."""
        value = row[name := asked_with(row, "the row")]
        if name == "input_ids" or (isinstance(value, str) and self.plain is not None):
            return None if name == "input_ids" else value
        if isinstance(value, str):
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return [*system, {"role": "user", "content": value}]
        asked = list(value)
        while asked[-1]["role"] == "assistant":  # it is asked for another answer
            asked.pop()
        return asked

    def data(self, length: int, train: str = "the prompts") -> DataConfig:
        """How its rows are read, as a recipe says it: a run's own way, else that of `prompt`.

        Args:
            length: tokens of a sequence at most.
            train: the name of the rows.
        """
        if self.trained_on is not None:
            return self.trained_on
        chat = self.plain is None
        return DataConfig(train=train, max_length=length, chat=chat, system=self.system if chat else None)

    def text(self, completion: Completion) -> str | None:
        """What it says, without special tokens and up to a stop string; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(completion.tokens, skip_special=True)
        return until_stop(text, completion.sampling.stop_strings)

    def _check(self, name: str, value: Any, where: str) -> None:
        """What would not be understood further down, or only in the words of a recipe."""
        is_text = isinstance(value, str)
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise UserError(f"{where}: {name} cannot be written as JSON in UTF-8: {error}") from error
        if name != "input_ids" and self.tokenizer is None:
            raise UserError(f"{where}: {self.asked.model} has no tokenizer: give input_ids instead of {name}")
        if is_text and not value.strip():
            raise UserError(f"{where}: {name} is empty; say something, or give input_ids")
        if not is_text and name != "input_ids" and not self.has_template:
            raise UserError(
                f"{where}: {self.asked.model} has no chat template to render messages with: give a prompt that is a "
                "string, or input_ids"
            )
        if not is_text and self.asked.system is not None:
            raise UserError(f"{where}: --system goes with prompts that are strings; {name} bring their own")


def asked_with(row: Mapping[str, Any], where: str) -> str:
    """The column that a row asks with.

    Raises:
        UserError: it has none of them.
    """
    found = next((name for name in COLUMNS if row.get(name) is not None), None)
    if found is None:
        listed = ", ".join(map(repr, row)) or "no columns"
        hints = "".join(nearest(str(column), COLUMNS) for column in row)
        raise UserError(f"{where} has {listed}; wanted is prompt, messages or input_ids.{hints}")
    return found


def _of_chats(data: DataConfig, run: str) -> bool:
    """Whether the rows of a run were conversations.

    Raises:
        UserError: the recipe alone does not say it, and the rows are gone.
    """
    if data.chat or data.format == "messages":
        return True
    if data.format in ("text", "tokens"):
        return False
    try:
        row = open_rows(data.train, data.split)[0]
    except UserError as error:
        raise UserError(
            f"{error}. The rows of {run} tell how it reads a prompt: say --raw for plain strings, or name "
            f"{exported(Path(run).expanduser())} to have it rendered as a chat"
        ) from error
    if data.format == "auto" and data.columns.get("messages", "messages") in row:
        return True
    return not any(isinstance(row.get(data.columns.get(name, name)), str) for name in ("prompt", "text"))
