"""The recipe's section `reward`. Loads without jax."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tunix.config import Config, Place, Positive


class RewardFunction(Config):
    """One reward: a function, its arguments, and its weight."""

    name: str
    """A shipped reward (exact_match, number, math, gsm8k, format, length, repetition, cosine, json_schema, unit_tests),
    or `module:function` or `file.py:function`."""
    style: Literal["tunix", "trl", "verl"] = "tunix"
    """How it is called: by the names of its parameters, with texts; or as TRL's GRPOTrainer calls its reward functions,
    with `prompts` and `completions` of the batch (lists of messages where the row has messages), the columns as lists,
    `log_metric` and `log_extra`. There a score of None leaves the sample out of this reward. Or as verl calls its
    `compute_score(data_source, solution_str, ground_truth, extra_info)`, which may return a mapping with `score`: the
    completion is solution_str, and ground_truth the column `reward_model.ground_truth`."""
    label: str | None = None
    """Its name in the metrics; null takes the function's. Two uses of one function need two labels."""
    weight: float = 1.0
    """Factor of its scores in the weighted sum."""
    options: dict[str, Any] = {}
    """Arguments with one value for the whole run, such as {pattern: "<answer>.*</answer>"}."""
    columns: dict[str, str] = {}
    """Argument -> column of the row, where their names differ, such as {answer: solution}."""

    gone: ClassVar[Mapping[str, str]] = {"clip": "the function returns the score as it is to count"}

    @property
    def title(self) -> str:
        """The name in metrics and messages, e.g. `exact_match`."""
        return self.label or self.name.rpartition(":")[2]


class JudgeConfig(Config):
    """A language model that reads a rubric and scores completions by it; docs/guide/judges.md."""

    model: Place
    """Who judges: the address of an OpenAI-compatible server with its path, such as http://host:8000/v1; a hub id or a
    folder, which is loaded on the devices of the run; or `base`, the frozen base under the adapter that trains, which
    takes no further memory."""
    rubric: Place
    """A file of prose and criteria, each in a line `- name (weight): description`."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Worst and best score of a criterion, as the judge is asked for it. The reward is the weighted mean of the
    criteria, in [0, 1] whatever the scale."""
    weight: float = 1.0
    """Factor of its scores in the weighted sum."""
    pairwise: bool = False
    """Which of a prompt's two completions is better, asked in both orders, for dpo with `online: true` and
    `group_size: 2`. The better one scores 1 and the other 0; both 0.5 where the orders disagree."""
    cache: bool = True
    """Whether verdicts are kept in judge.jsonl of the run folder, so that the same completion of the same prompt is
    never judged twice, nor after a restart."""
    max_tokens: Positive = 512
    """Tokens of a verdict at most."""
    concurrency: Positive = 32
    """Verdicts that are asked for at a time."""
    deadline: Annotated[float, Field(gt=0)] = 120.0
    """Seconds in which a server has to answer, further attempts included; then the sample fails."""
    served: str | None = None
    """Name of the model on the server; null: the only one that it lists."""
    key_variable: str | None = None
    """Environment variable that holds the server's API key; null: none is sent."""
    options: dict[str, Any] = {}
    """Further fields of a request to the server, such as {response_format: {type: json_object}}; null leaves one out,
    as in {max_tokens: null, max_completion_tokens: 512}."""
    length: Positive | None = None
    """Tokens of question and verdict at most, of a model that is loaded here. Null: the rubric's, and twice
    data.max_length for each completion; never more than its own limit."""

    @property
    def is_server(self) -> bool:
        """Whether a server judges."""
        return self.model.startswith(("http://", "https://"))

    @field_validator("model")
    @classmethod
    def _address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https"):
            return value
        if not parts.hostname or not parts.path.strip("/"):
            raise ValueError(f"{value!r} is no address of an API; write its path too, as in http://host:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(f"{value!r}: an address is a scheme, a host, a port and a path; a key is for key_variable")
        return value.rstrip("/")

    @field_validator("scale")
    @classmethod
    def _rising(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not (value[0] < value[1] and all(map(math.isfinite, value))):
            raise ValueError(f"{list(value)} is no scale: write the worst score and then the best, as in [1, 10]")
        return value

    @model_validator(mode="after")
    def _of_model(self) -> "JudgeConfig":
        keys = ("length",) if self.is_server else ("deadline", "served", "key_variable", "options")
        if ignored := self.changed(keys):
            what = (
                "with a server, which has its own" if self.is_server else f"without a server, and {self.model} is none"
            )
            raise ValueError(f"{', '.join(ignored)}: of no effect {what}; leave out")
        return self


class RewardConfig(Config):
    """How completions are scored: by functions in worker processes with a deadline, by a reward model, by a judge."""

    functions: tuple[RewardFunction, ...] = ()
    """One or several; a name alone is a function with weight 1 and no options."""
    model: Place | None = None
    """Hub id, folder, or run of a reward model (a sequence classifier with one label). It scores in addition to the
    functions, under the name `model` and with weight 1, on the devices of the run. It reads data.max_length tokens,
    twice that where its tokenizer is not the policy's; a longer completion fails."""
    judge: JudgeConfig | None = None
    """A language model that scores by a rubric, in addition, under the name `judge`."""
    deadline: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that a call may take; after that the sample counts as failed and the worker process is replaced, of which
    there are as many as cores, at most 8."""

    gone: ClassVar[Mapping[str, str]] = {
        "model_weight": "it is 1; weigh the functions against it",
        "workers": "there are as many as cores, at most 8; what waits for something else is an `async def`",
        "model_length": "it reads data.max_length tokens, twice that with a tokenizer of its own",
    }

    @field_validator("functions", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple):
            return value
        return tuple({"name": item} if isinstance(item, str) else item for item in listed)

    @model_validator(mode="after")
    def _distinct(self) -> "RewardConfig":
        titles = [function.title for function in self.functions] + ["model"] * bool(self.model)
        titles += ["judge"] * bool(self.judge)
        if twice := sorted({title for title in titles if titles.count(title) > 1}):
            raise ValueError(f"{', '.join(twice)} stands there twice: give one of them another label")
        return self
