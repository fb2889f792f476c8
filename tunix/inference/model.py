"""`InferenceModel`: a model with tokenizer and engine, shared by `tunix.load` and the commands that sample.

A row (a string, messages, or token ids) is rendered into the tokens of a prompt as the model was trained to read it;
the engine holds the weights and samples. `TextStream` decodes tokens as they arrive.

Axes: T time.
"""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.config import DType, MeshConfig, RowKind
from tunix.data.config import EPISODES, DataConfig
from tunix.data.examples import to_example
from tunix.data.shapes import Format, Rendering
from tunix.data.sources import open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Dropped
from tunix.errors import UserError, nearest
from tunix.hf.run_export import exported
from tunix.hf.source import Source, check_vocabulary, loaded, pretrained, require_lm_head
from tunix.mesh import build_mesh
from tunix.models.model import Model, Params
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.sampling import check
from tunix.rollout.engine.shapes import usual_slots
from tunix.types import Completion, Sampling
from tunix.util.startup import prepare_jax
from tunix.util.yaml_io import read_mapping

SETTLES = 32
"""Tokens after which a text that ends in a whole character is not decoded again, so that a long one takes no longer."""


class TextStream:
    """Decodes tokens as they arrive: whole characters only, and nothing from a stop string on."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Iterable[str] = (), *, skip_special: bool = True, includes: bool = False
    ):
        """Without special tokens, unless they are not skipped; a stop string itself is left out, unless included."""
        self.tokens: list[int] = []
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._skips, self._includes = skip_special, includes
        self._emitted, self._settled, self._behind = 0, "", 0

    @property
    def text(self) -> str:
        """The text so far, up to a stop string."""
        return until_stop(self._settled + self._tail, self._stops, includes=self._includes)

    @property
    def _tail(self) -> str:
        """The text of the tokens behind those whose text is settled."""
        return self._tokenizer.decode(
            self.tokens[self._behind :], self._skips, previous=self.tokens[max(self._behind - 1, 0) : self._behind]
        )

    def feed(self, tokens: Iterable[int | np.integer]) -> str:
        """Adds tokens; returns the new text that no later token can change."""
        many = len(self.tokens) - self._behind >= SETTLES
        # Behind a special token, which is skipped, a space could be lost.
        if many and not self._tokenizer.is_added(self.tokens[-1]) and not (tail := self._tail).endswith("\ufffd"):
            self._settled, self._behind = self._settled + tail, len(self.tokens)
        self.tokens += [int(token) for token in tokens]
        # An incomplete character decodes as U+FFFD until its bytes arrive.
        text = self.text.rstrip("\ufffd")
        held = max(
            (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
        return self._new(text[: len(text) - held])

    def finish(self) -> str:
        """The rest of the text, which `feed` held back."""
        return self._new(self.text)

    def _new(self, text: str) -> str:
        new = text[self._emitted :]
        self._emitted += len(new)
        return new


def until_stop(text: str, stops: Iterable[str], *, includes: bool = False) -> str:
    """The text before the first stop string in it, or up to its end where that is included."""
    ends = (at + includes * len(stop) for stop in stops if (at := text.find(stop)) >= 0)
    return text[: min(ends, default=len(text))]


COLUMNS: dict[str, Format] = {"prompt": "prompt_completion", "messages": "messages", "input_ids": "tokens"}
"""The columns that may hold a prompt, and their formats; of several in a row, the first is used."""


@dataclass(frozen=True)
class InferenceOptions:
    """Which model to load, and how its prompts are rendered."""

    model: str
    """Hub id, folder, or the folder of a run."""
    adapter: Path | None = None
    """PEFT folder of an adapter on top of the model."""
    dtype: DType = "float32"
    """Type of the computation and the weights."""
    slots: int | None = None
    """Completions that are sampled at a time; None for the device's default. Does not change the result."""
    system: str | None = None
    """System message before prompts that are strings; None for the run's."""
    raw: bool = False
    """Whether strings are sent unchanged, even if the tokenizer has a chat template."""
    length: int | None = None
    """Maximum tokens of prompt and answer; None for the model's limit."""
    speculate: int = 0
    """Draft tokens of each step, as a recipe's `rollout.speculate`, e.g. 1."""
    mtp: bool = False
    """Whether the model's own head makes them, as with a recipe's `model.mtp`."""

    def __post_init__(self) -> None:
        if self.mtp and not self.speculate:
            raise UserError(
                "--mtp loads a head that makes draft tokens, and --speculate asks for none: set that to 1 or more, or "
                "leave --mtp out"
            )


@dataclass(frozen=True, eq=False)
class InferenceModel:
    """A model, its tokenizer and its engine. The first access to the engine reads the weights."""

    options: InferenceOptions
    known: Source | None = None
    """The source, where it was looked up before; None where it is that of the options."""

    @cached_property
    def source(self) -> Source:
        """The structure, the location of the weights, and the tokenizer."""
        mtp = "freeze" if self.options.mtp else None
        source = self.known or pretrained(self.options.model, self.options.adapter, mtp=mtp)
        check_vocabulary(source)
        return source

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the model folder has none."""
        return self.source.tokenizer

    @property
    def limit(self) -> int:
        """Maximum tokens of prompt and answer."""
        return min(self.options.length or sys.maxsize, self.source.decoder.max_positions)

    @property
    def slots(self) -> int:
        """Number of completions that are sampled at a time."""
        return self.options.slots or usual_slots(jax.devices()[0].platform)

    @cached_property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    @cached_property
    def trained_on(self) -> DataConfig | None:
        """The `data` section of the run, which says how rows were rendered; None where the model is no run."""
        folder = Path(self.options.model).expanduser()
        if not (folder / "recipe.yaml").is_file():
            return None
        return DataConfig.model_validate(read_mapping(exported(folder).parent / "recipe.yaml")["data"])

    @cached_property
    def rendered_as(self) -> DataConfig | None:
        """The `data` section that says how prompts are rendered: that of the run, or of the run in whose folder a model
        is the export; None for any other model."""
        folder = Path(self.options.model).expanduser()
        recipe = folder.parent / "recipe.yaml"
        if self.trained_on is not None or folder.name != "export" or not recipe.is_file():
            return self.trained_on
        return DataConfig.model_validate(read_mapping(recipe)["data"])

    @cached_property
    def plain_reason(self) -> str | None:
        """The reason why strings are sent unchanged; None where they are sent as a user's message.

        Raises:
            UserError: a system message was given for strings that are sent unchanged; or the rows of the run are gone,
                which would tell.
        """
        reason = None
        if self.options.raw:
            reason = "--raw was given"
        elif not self.has_template:
            reason = f"{self.options.model} has no chat template"
        elif self.rendered_as is not None and not of_chats(self.rendered_as, self.options.model):
            reason = f"{self.options.model} was trained on plain strings"
        if reason is not None and self.options.system is not None:
            raise UserError(f"--system: {reason}, so a prompt is sent as it stands and has no system message")
        return reason

    @property
    def system(self) -> str | None:
        """The system message of chats: that of the options, else the run's."""
        if self.options.system is not None or self.rendered_as is None:
            return self.options.system
        return self.rendered_as.system

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables for the chat template, from the run."""
        return self.rendered_as.template_kwargs if self.rendered_as else {}

    def weights(self, devices: Sequence[Any] | None = None) -> tuple[Model, Params, Mesh]:
        """Reads the weights onto these devices, by default all; the caller owns them, since they are not cached."""
        prepare_jax()
        mesh = build_mesh(MeshConfig(), devices)
        return *loaded(self.source, self.options.dtype, mesh), mesh

    @cached_property
    def engine(self) -> Engine:
        """The engine, with the weights published to it."""
        model, params, mesh = self.weights()
        engine = self.new_engine(model, mesh)
        engine.publish(params, version=0)
        return engine

    def new_engine(self, model: Model, mesh: Mesh, moving: Collection[str] = (), further: int = 0) -> Engine:
        """An engine without weights, with room for so many tokens beyond the limit; `moving` as in `Engine`."""
        return Engine(
            model,
            mesh,
            slots=self.slots,
            max_length=self.limit + further,
            decode=self.tokenizer.decode if self.tokenizer else None,
            moving=moving,
            speculate=self.options.speculate,
        )

    def with_stop_ids(self, sampling: Sampling) -> Sampling:
        """Checks sampling settings and adds the model's stop ids.

        Raises:
            UserError: they are invalid, have stop strings without a tokenizer, or the model cannot sample.
        """
        require_lm_head(self.source, self.options.model)
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError(f"--stop {sampling.stop_strings[0]!r}: {self.options.model} has no tokenizer, so no text")
        sampling = replace(sampling, stop_ids=self.source.stop_ids)
        check(sampling, self.source.decoder.vocab_size)
        return sampling

    def prompt(self, row: Mapping[str, Any], where: str) -> np.ndarray:
        """The `[T]` int32 token ids of a row's prompt.

        Args:
            row: `prompt` (a string, or messages), `messages`, or `input_ids`, which are used unchanged.
            where: name of the row in error messages.

        Raises:
            UserError: it has no prompt, one that this model cannot read, or one that is too long.
        """
        name = prompt_column(row, where)
        # Mistakes that later code would report in terms of a recipe, or not at all.
        value, is_text = row[name], isinstance(row[name], str)
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise UserError(f"{where}: {name} cannot be written as JSON in UTF-8: {error}") from error
        if name != "input_ids" and self.tokenizer is None:
            raise UserError(f"{where}: {self.options.model} has no tokenizer: give input_ids instead of {name}")
        if is_text and not value.strip():
            raise UserError(f"{where}: {name} is empty; say something, or give input_ids")
        if not is_text and name != "input_ids" and not self.has_template:
            raise UserError(
                f"{where}: {self.options.model} has no chat template to render messages with: give a prompt that is a "
                "string, or input_ids"
            )
        if not is_text and self.options.system is not None:
            raise UserError(f"{where}: --system goes with prompts that are strings; {name} bring their own")
        data = DataConfig.model_construct(
            columns={"prompt_ids": "input_ids"},
            chat=is_text and self.plain_reason is None,
            system=self.system,
            template_kwargs=self.template_kwargs,
        )
        rendering = Rendering(COLUMNS[name], data, RowKind.PROMPT, self.source.decoder.vocab_size, uncut=True)
        example = to_example(row, self.tokenizer, rendering, where)
        if isinstance(example, Dropped):
            raise UserError(f"{where}: {example.detail or f'{name} is empty; give it at least one token'}")
        tokens = example.sequences[0].tokens
        if tokens.min() < 0:
            raise UserError(f"{where}: input_ids holds {tokens.min()}, which is no token id")
        if len(tokens) >= self.limit:
            raise UserError(f"{where} has {len(tokens)} tokens, but the model ends at {self.limit}: shorten it")
        return tokens

    def training_prompt(self, row: Mapping[str, Any]) -> str | list[Any] | None:
        """A row's prompt as in rows to train on: a string, or messages; None where it is token ids."""
        value = row[name := prompt_column(row, "the row")]
        if name == "input_ids":
            return None
        if isinstance(value, str) and self.plain_reason is not None:
            return value
        if isinstance(value, str):
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return [*system, {"role": "user", "content": value}]
        messages = list(value)
        while messages[-1]["role"] == "assistant":  # the given answer is replaced by a sampled one
            messages.pop()
        return messages

    def data(self, length: int, train: str = "the prompts") -> DataConfig:
        """A `data` section for the model's prompts: the run's, else one that renders like `prompt`, for rows of a name
        and so many tokens at most."""
        if self.trained_on is not None:
            return self.trained_on
        chat, kwargs = self.plain_reason is None, dict(self.template_kwargs)
        system = self.system if chat else None
        return DataConfig(train=train, max_length=length, chat=chat, system=system, template_kwargs=kwargs)

    def text(self, completion: Completion, *, skip_special: bool = True) -> str | None:
        """The text of a completion, without the stop string and, by default, special tokens; None without a
        tokenizer."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(completion.tokens, skip_special=skip_special)
        return until_stop(text, completion.sampling.stop_strings)


def prompt_column(row: Mapping[str, Any], where: str) -> str:
    """The column that holds a row's prompt.

    Raises:
        UserError: it has none of `COLUMNS`.
    """
    column = next((name for name in COLUMNS if row.get(name) is not None), None)
    if column is None:
        listed = ", ".join(map(repr, row)) or "no columns"
        hints = "".join(nearest(str(name), COLUMNS) for name in row)
        raise UserError(f"{where} has {listed}; wanted is prompt, messages or input_ids.{hints}")
    return column


def of_chats(data: DataConfig, run: str) -> bool:
    """Whether the rows of a run were conversations.

    Raises:
        UserError: this does not follow from the recipe alone, and the rows are gone.
    """
    if data.chat or data.format == "messages":
        return True
    data = data.first
    assert isinstance(data.train, str)
    if data.format in ("text", "tokens") or data.train == EPISODES:
        return False
    try:
        row = open_rows(data.train, data.split, data.columns.values())[0]
    except UserError as error:
        raise UserError(
            f"{error}. They are the rows of {run}, which tell how it reads a prompt that is a string: say --raw for "
            "plain strings, or give messages"
        ) from error
    if data.format == "auto" and data.columns.get("messages", "messages") in row:
        return True
    # The first part of a row; pairs may be whole transcripts, without a prompt.
    parts = (row.get(data.columns.get(name, name)) for name in ("prompt", "text", "chosen"))
    return not isinstance(next((part for part in parts if part is not None), None), str)
