"""The recipe's section `data`. Loads without jax."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from tunix.config import Config, Place, Positive

EPISODES = "environment"
"""Stands for rows that `rollout.environment` makes."""
Packing = Literal[True, False, "wrapped", "split"]
RowFormat = Literal["auto", "messages", "prompt_completion", "text", "tokens", "pairs"]
FINEST = 100_000
"""Rows after which the ratios of a mixture are exact, at most."""


class RowsConfig(Config):
    """One of several sets of rows; the keys of `data` hold for all of them."""

    path: Place
    """As `data.train`."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = ""
    """Its name in metrics, of letters, digits and `_ . -`; left out: that of the file, folder, function or data set."""
    split: str | None = None
    """Its split, where it has splits; null: as `data.split` and `data.eval_split` say."""
    format: RowFormat | None = None
    """Shape of its rows; null: as `data.format` says."""
    columns: dict[str, str] | None = None
    """Our column name -> its own; null: as `data.columns` says."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Fills in the name: `chats` for `rows/chats.jsonl`, `owner/data:chats` and `my.py:chats`; a text is a path."""
        value = {"path": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or value.get("name") or not isinstance(value.get("path"), str):
            return value
        last = PurePath(value["path"]).name.rpartition(":")[2]
        name = re.sub(r"[^\w.-]", "_", last.partition(".")[0] or last)
        return {**value, "name": name or "rows"}

    @property
    def in_environment(self) -> bool:
        """Whether an environment of its own makes its prompts."""
        return False


class SourceConfig(RowsConfig):
    """One of the data sets of a mixture."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the rows that are read: of two with weights 2 and 1, every three rows hold two of the first."""


def form_of(value: Any) -> str:
    """Which of two forms a key has, for pydantic: a list of data sets, or a single one."""
    return "list[]" if isinstance(value, list | tuple) else "path[]"


# The brackets keep the tags out of messages.
Mixed = Annotated[
    Annotated[Place, Tag("path[]")] | Annotated[tuple[SourceConfig, ...], Tag("list[]")], Discriminator(form_of)
]
HeldOut = Annotated[
    Annotated[Place, Tag("path[]")] | Annotated[tuple[RowsConfig, ...], Tag("list[]")], Discriminator(form_of)
]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratios of some weights, as they are written: [0.2, 0.3] -> [2, 3].

    Raises:
        ValueError: they are so fine that the ratios would not be exact within `FINEST` rows.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    whole = [weight // math.gcd(*whole) for weight in whole]
    if sum(whole) > FINEST:
        written = " : ".join(f"{weight:g}" for weight in weights)
        raise ValueError(f"the weights {written} are exact only within {sum(whole):,} rows; round them")
    return whole


class CurriculumConfig(Config):
    """Which prompts come when, where the policy writes the completions."""

    by: str
    """`success`: prompts whose completions nearly all succeed, or nearly all fail, are passed over more often;
    `level`: rows of one `level` at a time, the next one when enough succeed; another column, of numbers: its rows in
    ascending order over the whole run."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """How often a prompt is taken at least when its turn comes, so that none dies; of levels, those that are passed."""
    window: Positive = 8
    """Latest groups whose mean is a success rate: of a prompt, or of the level."""
    success: float = 0.5
    """Total reward from which a completion counts as a success."""
    raise_at: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Success rate at which the level rises."""

    @model_validator(mode="after")
    def _read(self) -> "CurriculumConfig":
        idle = {"success": ("raise_at",), "level": ()}.get(self.by, ("floor", "window", "success", "raise_at"))
        if changed := self.changed(idle):
            raise ValueError(f"{', '.join(changed)}: of no effect with by: {self.by}; leave out")
        return self


class DataConfig(Config):
    """Where the rows come from and how they become sequences."""

    train: Mixed
    """Hub id, folder, file (.jsonl, .json, .csv, .tsv, .parquet, .arrow; text also .gz or .zst), or `module:function` /
    `file.py:function` that returns the rows. `environment`, and left out where `rollout.environment` is of a package
    that makes its own: the episodes of it, by number. Or a list of such data sets, which are interleaved by their
    weights; see `data.train` below."""
    eval: HeldOut | None = None
    """Held-out rows for evaluation, in the same notation as `train`; of a list each is measured by itself, too."""
    split: str = "train"
    """Split of `train`, where it has splits."""
    eval_split: str | None = None
    """Split of `eval`; null: the one for validation, else that for test, else the only one. Without `eval`, this split
    of `train` is the held-out one."""
    format: RowFormat = "auto"
    """Shape of a row; `auto` derives it from the first row's columns."""
    columns: dict[str, str] = {}
    """Our column name -> the data's, for instance {prompt: question, completion: answer}; a dot leads into a column, as
    in {answer: reward_model.ground_truth}."""
    curriculum: CurriculumConfig | None = None
    """Which prompts come when, where the policy writes the completions; null: in the order of the data."""
    turns: Literal["last", "all", "each"] | None = None
    """Which of the assistant's turns are trained (SFT): the `last`; `all` as parts of one sequence, where the template
    shows each of them as it did when it was the last; or `each` as a sequence of its own, with the conversation up to
    it as the template would have shown it then. null: all in one sequence, whatever the template makes of earlier
    ones, such as leaving out their thoughts."""
    max_length: Positive = 1024
    """Most tokens of a sequence, and tokens of a packed row. For pairs the limit is for each side, and a packed row has
    room for two (see completion_length)."""
    prompt_length: Positive | None = None
    """Most tokens of a prompt, where the policy samples completions; null: max_length less completion_length."""
    completion_length: Positive | None = None
    """Most tokens of a sampled completion, over all of its turns; null: max_length less prompt_length, or half of
    max_length. For given pairs: most tokens of a side after what both sides have in common, which makes packed rows
    shorter; null: what max_length leaves."""
    on_overflow: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a row above the limit; it is counted in any case. A prompt alone loses its beginning."""
    chat: bool = False
    """Converts prompts (and completions) that are strings into a chat of user (and assistant), in the model's template;
    pairs of transcripts, `Human: ... Assistant: ...`, too."""
    system: str | None = None
    """System message of the chats that `chat: true` makes."""
    shuffle: bool = True
    """False takes the rows in file order."""
    packing: Packing = True
    """Whether a row holds several sequences; true and false give the same result. `split` cuts texts and completions
    that are longer than max_length into pieces, each a separate sequence, instead of truncating them; `wrapped` fills
    the rows of a batch in order, and cuts wherever one is full. With both, `batch_size` counts pieces, and a piece's
    first token, which nothing in it predicts, is not trained."""
    pictures: Positive | None = None
    """Most pictures of a packed row, and of a row of the data, whose column `images` holds them: paths from the data's
    folder, bytes or PIL images. Room for more costs time whether they are there or not. null: only text is read."""
    picture_tokens: Positive | None = None
    """Most tokens of a picture where pictures keep their proportions (Qwen 3.5), e.g. 256 for 512 x 512 pixels; larger
    ones are made smaller. null: 256. Gemma 3's pictures all have as many as the model says."""
    chat_template: Place | None = None
    """Chat template: `gemma`, `gemma4`, `llama3`, `chatml`, or a .jinja file; replaces the tokenizer's own."""
    template_kwargs: dict[str, str | bool | int] = {}
    """Variables of the chat template, such as {enable_thinking: false}, or {date_string: 26 Jul 2024} where a template
    would write today's date, which a run that is resumed tomorrow could not repeat."""

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The data sets of a mixture; empty where `train` is a single one."""
        return () if isinstance(self.train, str) else self.train

    @property
    def held_out(self) -> tuple[RowsConfig, ...]:
        """The held-out data sets of a list; empty where `eval` is a single one, or none."""
        return self.eval if isinstance(self.eval, tuple) else ()

    def of(self, rows: RowsConfig) -> "DataConfig":
        """The section as it holds for one of its sets of rows."""
        changes = {key: value for key in ("format", "columns") if (value := getattr(rows, key)) is not None}
        return self.model_copy(update=changes)

    @property
    def first(self) -> "DataConfig":
        """The section as it holds for the first of several data sets alone; itself where there is one."""
        if not self.sources:
            return self
        source = self.sources[0]
        return self.of(source).model_copy(update={"train": source.path, "split": source.split or self.split})

    @property
    def divides_rows(self) -> bool:
        """Whether a row may become several sequences of a batch, so that their number is known from the rows alone."""
        return self.cuts or self.turns == "each"

    @property
    def cuts(self) -> bool:
        """Whether long texts are cut into several pieces."""
        return isinstance(self.packing, str)

    @property
    def longest_completion(self) -> int:
        """Most tokens of a sampled completion."""
        rest = self.max_length - self.prompt_length if self.prompt_length else self.max_length // 2
        return self.completion_length or max(rest, 1)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt that completions are sampled for."""
        return self.prompt_length or max(self.max_length - self.longest_completion, 1)

    @model_validator(mode="after")
    def _of_several(self) -> "DataConfig":
        for key, listed in (("train", self.sources), ("eval", self.held_out)):
            if not listed and not isinstance(getattr(self, key), str | None):
                raise ValueError(f"{key}: an empty list has no rows; name a data set")
            names = [rows.name for rows in listed]
            if twice := next((rows for rows in listed if names.count(rows.name) > 1), None):
                raise ValueError(f"{key}: two data sets are called {twice.name!r}: give one of them another `name`")
        if self.sources:
            whole_weights([source.weight for source in self.sources])
            if self.split != "train":
                raise ValueError(f"split: {self.split} is that of one data set; give each of data.train its own")
            if self.eval_split and not self.eval:
                raise ValueError(
                    f"eval_split: {self.eval_split}: name its data set in data.eval; data.train has several"
                )
        return self

    @model_validator(mode="after")
    def _fits(self) -> "DataConfig":
        if self.longest_prompt + self.longest_completion > self.max_length > 1:
            raise ValueError(
                f"prompt_length {self.longest_prompt} and completion_length {self.longest_completion} do not fit into "
                f"max_length {self.max_length}, the tokens of a whole sequence"
            )
        if self.cuts and self.on_overflow != "truncate":
            raise ValueError(
                f"on_overflow {self.on_overflow!r} changes nothing with packing {self.packing!r}, which cuts what is "
                "too long into pieces; leave it out"
            )
        if self.turns == "each" and self.cuts:
            raise ValueError(
                f"turns: each makes sequences of turns, and packing {self.packing!r} pieces of rows; take one"
            )
        if self.turns and self.pictures:
            raise ValueError(f"turns: {self.turns} would part a conversation from its pictures; leave one of them out")
        if self.cuts and self.pictures:
            raise ValueError(f"packing {self.packing!r} would cut pictures; with data.pictures it is true or false")
        if self.picture_tokens and not self.pictures:
            raise ValueError("picture_tokens changes nothing without data.pictures; leave it out")
        if self.system and not self.chat:
            raise ValueError("system changes nothing without `chat: true`; rows of messages have their own")
        return self
