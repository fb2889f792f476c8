"""The recipe's section `data`. Loads without jax."""

from typing import Literal

from pydantic import model_validator

from tunix.config import Config, Place, Positive

EPISODES = "environment"
"""Stands for rows that `rollout.environment` makes."""
Packing = Literal[True, False, "wrapped", "split"]


class DataConfig(Config):
    """Where the rows come from and how they become sequences."""

    train: Place
    """Hub id, folder, file (.jsonl, .json, .csv, .tsv, .parquet, .arrow; text also .gz or .zst), or `module:function` /
    `file.py:function` that returns the rows. `environment`, and left out where `rollout.environment` is of a package
    that makes its own: the episodes of it, by number."""
    eval: Place | None = None
    """Held-out rows for evaluation, in the same notation as `train`."""
    split: str = "train"
    """Split of `train`, where it has splits."""
    eval_split: str | None = None
    """Split of `eval`; null: the one for validation, else that for test, else the only one. Without `eval`, this split
    of `train` is the held-out one."""
    format: Literal["auto", "messages", "prompt_completion", "text", "tokens", "pairs"] = "auto"
    """Shape of a row; `auto` derives it from the first row's columns."""
    columns: dict[str, str] = {}
    """Our column name -> the data's, for instance {prompt: question, completion: answer}."""
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
        if self.cuts and self.pictures:
            raise ValueError(f"packing {self.packing!r} would cut pictures; with data.pictures it is true or false")
        if self.picture_tokens and not self.pictures:
            raise ValueError("picture_tokens changes nothing without data.pictures; leave it out")
        if self.system and not self.chat:
            raise ValueError("system changes nothing without `chat: true`; rows of messages have their own")
        return self
