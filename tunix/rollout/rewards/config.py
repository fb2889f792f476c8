"""The recipe's section `reward`. Loads without jax."""

from typing import Annotated, Any, Literal

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
    clip: tuple[float, float] | None = None
    """Scores count as no less than the first and no more than the second, before the weight. Null: as they are."""
    options: dict[str, Any] = {}
    """Arguments with one value for the whole run, such as {pattern: "<answer>.*</answer>"}."""
    columns: dict[str, str] = {}
    """Argument -> column of the row, where their names differ, such as {answer: solution}."""

    @field_validator("clip")
    @classmethod
    def _rising(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"{list(value)} is no interval: the lower bound stands first")
        return value

    @property
    def title(self) -> str:
        """The name in metrics and messages, e.g. `exact_match`."""
        return self.label or self.name.rpartition(":")[2]


class RewardConfig(Config):
    """How completions are scored: by functions in worker processes with a deadline, and by a reward model."""

    functions: tuple[RewardFunction, ...] = ()
    """One or several; a name alone is a function with weight 1 and no options."""
    model: Place | None = None
    """Hub id, folder, or run of a reward model (a sequence classifier with one label). It scores in addition to the
    functions, under the name `model`, on the devices of the run."""
    model_weight: float = 1.0
    """Factor of its scores in the weighted sum."""
    model_length: Positive | None = None
    """Tokens of prompt and completion that it reads; a longer one fails. Null: data.max_length, twice that where its
    tokenizer is not the policy's, and never more than its own limit."""
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Seconds that a call may take; after that the sample counts as failed and the worker is replaced."""
    workers: Positive | None = None
    """Worker processes for scoring; null: as many as there are cores, at most 8. Never changes a result."""

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
        if twice := sorted({title for title in titles if titles.count(title) > 1}):
            raise ValueError(f"{', '.join(twice)} stands there twice: give one of them another label")
        if self.model is None and (self.model_weight != 1.0 or self.model_length):
            raise ValueError("model_weight and model_length change nothing without a reward model: set model")
        return self
