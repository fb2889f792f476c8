"""The recipe's section `data`. Loads without jax."""

from typing import Literal

from pydantic import model_validator

from tunix.config import Config, Positive


class DataConfig(Config):
    """Where the rows come from and how they become sequences."""

    train: str
    """Hub id, folder, .jsonl, .parquet, .arrow, or `module:function` / `file.py:function` that returns the rows."""
    eval: str | None = None
    """Likewise; held-out rows for `eval/loss`."""
    split: str = "train"
    """Split of `train` where it has splits."""
    eval_split: str | None = None
    """Split of `eval`; with `eval` left out, that split of `train`."""
    format: Literal["auto", "messages", "prompt_completion", "text", "tokens", "pairs"] = "auto"
    """Shape of a row; `auto` reads it off the first row's columns."""
    columns: dict[str, str] = {}
    """Our column -> theirs, for instance {prompt: question, completion: answer}."""
    max_length: Positive = 1024
    """Tokens of a sequence, and of a packed row. Of pairs: of each side, and a packed row has room for two
    (see completion_length)."""
    prompt_length: Positive | None = None
    """Tokens of a prompt, where a policy writes the completions; null leaves max_length less completion_length."""
    completion_length: Positive | None = None
    """Tokens of such a completion at most, over all of its turns; null is half of max_length, or what prompt_length
    leaves. Of given pairs: tokens of a side after what both have in common; null is what max_length leaves. Rows are
    that much shorter."""
    on_overflow: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a longer one; it is counted either way. A prompt that is read alone loses its beginning."""
    chat: bool = False
    """Prompts (and completions) that are strings become a chat of user (and assistant), in the model's template; so do
    pairs of transcripts, `Human: ... Assistant: ...`."""
    system: str | None = None
    """System message of such chats."""
    shuffle: bool = True
    """False takes the rows in file order."""
    packing: Literal[True, False, "wrapped", "split"] = True
    """Several sequences in a row; true and false never change the result. Of texts and completions that
    are longer than max_length `split` makes several pieces, each a sequence of its own, instead of truncating them;
    `wrapped` fills the rows of a batch in order, and cuts wherever one is full. With both `batch_size` counts pieces,
    and a piece's first token, which nothing in it predicts, is not trained."""
    chat_template: str | None = None
    """For a tokenizer without one: `gemma`, `llama3`, `chatml`, or a .jinja file. Replaces the folder's own."""
    template_kwargs: dict[str, str | bool | int] = {}
    """Variables of the chat template, such as {enable_thinking: false}, or {date_string: 26 Jul 2024} where a template
    would write today's date, which a run that goes on tomorrow could not repeat."""

    @property
    def cuts(self) -> bool:
        """Whether long texts become several pieces."""
        return isinstance(self.packing, str)

    @property
    def longest_completion(self) -> int:
        """Tokens of a completion that a policy writes."""
        rest = self.max_length - self.prompt_length if self.prompt_length else self.max_length // 2
        return self.completion_length or max(rest, 1)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that a policy is given."""
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
        if self.system and not self.chat:
            raise ValueError("system changes nothing without `chat: true`; rows of messages bring their own")
        return self
