"""What is asked of the server: the bodies of completions, chats, vLLM's generate, and texts to tokenize.

The words are those of OpenAI and vLLM, with the protocols' own defaults. A setting that the engine does not compute is
refused by its name, not ignored; one that has no effect is taken at its only value. A null is as if it was left out.

https://platform.openai.com/docs/api-reference, https://docs.vllm.ai/en/latest/serving/openai_compatible_server

Axes: T time.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from tunix.errors import nearest
from tunix.serving.tinker.futures import Refusal
from tunix.serving.tinker.wire import Id

MOST_CHOICES, MOST_STOPS, LONGEST_STOP = 128, 16, 1024
"""Choices of a prompt, stop strings of a request, and the characters of one of them, at most."""
CHOICES = ("auto", "none", "required")  # of a tool; any other is the name of a function
MOST_ANSWERS = 1024
"""Choices of all prompts of a request at most."""
HOTTEST, LEAST_MASS = 1e4, 1e-6
"""The highest temperature, and the least `top_p`: what float32 tells from infinity, and from 0."""
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Body = TypeVar("Body", bound=BaseModel)


def read(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """A body as its record.

    Raises:
        Refusal: a field is unknown, lacks, or has a value that cannot be computed; the first such one is named.
    """
    try:
        return kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = [name for name in kind.model_fields if name != where]
            message = f"{where}: there is no such field.{nearest(where, known)}"
        elif first["type"] == "missing":
            message = f"{where}: it has to be there"
        else:
            said = first["msg"].removeprefix("Value error, ")
            message = f"{where}: {said}, not {str(first['input'])[:80]!r}" if where else said
        raise Refusal(400, message, param=where or None) from None


class _Sampled(BaseModel):
    """What all requests say of how tokens are sampled."""

    model_config = ConfigDict(extra="forbid")

    temperature: Annotated[float, Field(ge=0, le=HOTTEST)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0
    top_p: Annotated[float, Field(ge=LEAST_MASS, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = []
    stop_token_ids: list[Id] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # What has no effect at these values, and cannot be had at others.
    repetition_penalty: Literal[1] = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0

    @field_validator("temperature")
    @classmethod
    def _greedy(cls, temperature: float) -> float:
        """Refuses what the logits cannot be divided by."""
        if 0 < temperature < 1 / HOTTEST:
            raise ValueError(f"it is 0 (greedy), or at least {1 / HOTTEST:g}")
        return temperature


class StreamOptions(BaseModel):
    """What a stream has beside the answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class _Answered(_Sampled):
    """What completions and chats share."""

    model: str
    request_id: str = Field(default_factory=lambda: secrets.token_hex(8))
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    user: str = ""
    metadata: dict[str, str] = {}
    # What has no effect at these values, and cannot be had at others.
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @model_validator(mode="after")
    def _streams(self) -> Any:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options: they go with stream: true")
        return self


class CompletionBody(_Answered):
    """POST /v1/completions."""

    prompt: list[str] | list[list[int]]
    """As a list, also where it is one."""
    max_tokens: Annotated[int, Field(ge=0)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _listed(cls, prompt: Any) -> Any:
        """One prompt as a list of it; digits in strings are texts, no token ids."""

        def is_ids(value: Any) -> bool:
            return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 31 for item in value)

        listed = [prompt] if isinstance(prompt, str) or is_ids(prompt) else prompt
        if isinstance(listed, list) and (all(isinstance(x, str) for x in listed) or all(map(is_ids, listed))):
            return listed
        raise ValueError("it is a text or a list of token ids, whole numbers, or a list of several texts or lists")

    @model_validator(mode="after")
    def _together(self) -> Any:
        if len(self.prompt) * self.n > MOST_ANSWERS:
            raise ValueError(f"prompt: {len(self.prompt)} with n={self.n} each are more than {MOST_ANSWERS} answers")
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens: 0 goes with echo: true, since nothing is sampled")
        if self.echo and self.logprobs is not None and self.stream:
            raise ValueError("stream: log-probs of a prompt (echo with logprobs) come whole; leave out stream")
        return self


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: Literal[False] | None = None

    @field_validator("parameters")
    @classmethod
    def _schema(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for

        try:
            validator_for(parameters).check_schema(parameters)
        except (SchemaError, TypeError, AttributeError) as error:
            said = error.message if isinstance(error, SchemaError) else str(error)
            raise ValueError(f"it is no JSON schema: {said:.200}") from None
        return parameters


class Tool(BaseModel):
    """A tool of a chat; only functions are known."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: Function


class ResponseFormat(BaseModel):
    """The form of an answer, which is not constrained."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]


class _Rendered(BaseModel):
    """Messages that the chat template renders."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=128)] = []
    chat_template_kwargs: dict[str, Any] = {}
    # What has no effect at these values, and cannot be had at others.
    add_generation_prompt: Literal[True] = True

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        """Refuses variables that are set already."""
        taken = {"messages", "tools", "conversations", "chat_template", "add_generation_prompt"} & variables.keys()
        if taken or any(not isinstance(value, str | int | float | None) for value in variables.values()):
            raise ValueError(f"variables of the template are texts, numbers or booleans, and none of {sorted(taken)}")
        return variables


class ChatBody(_Answered, _Rendered):
    """POST /v1/chat/completions."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tool_choice: str = "auto"  # or none, required, or the name of the function that has to be called
    # What has no effect at these values, and cannot be had at others.
    parallel_tool_calls: Literal[True] = True
    response_format: ResponseFormat | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice(cls, choice: Any) -> str:
        match choice:
            case str() if choice in CHOICES:
                return choice
            case {"type": "function", "function": {"name": str(name), **rest}} if not rest and name not in CHOICES:
                return name
        raise ValueError('it is "auto", "none", "required" or {"type": "function", "function": {"name": NAME}}')

    @property
    def called(self) -> str | None:
        """The function that has to be called; empty for any of several, None where none has to be."""
        if self.tool_choice == "required":
            return self.tools[0].function.name if len(self.tools) == 1 else ""
        return None if self.tool_choice in CHOICES else self.tool_choice

    @model_validator(mode="after")
    def _together(self) -> Any:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: they go with logprobs: true")
        names = [tool.function.name for tool in self.tools]
        if self.called is not None and (self.called not in names if self.called else not names):
            raise ValueError(f"tool_choice: it is none of the tools {names}")
        return self


class GenerateParams(_Sampled):
    """How `GenerateBody` is sampled, with vLLM's names."""

    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Literal[1] = 1
    routed_experts_prompt_start: int = 0  # of the mixtures' experts, which are not returned


class GenerateBody(BaseModel):
    """POST /inference/v1/generate: token ids in, token ids with log-probs out."""

    model_config = ConfigDict(extra="forbid")

    token_ids: list[Id]
    model: str
    request_id: str = Field(default_factory=lambda: secrets.token_hex(8))
    sampling_params: GenerateParams = GenerateParams()
    cache_salt: str = ""
    # What has no effect at these values, and cannot be had at others.
    priority: Literal[0] = 0
    stream: Literal[False] = False


class TokenizeBody(BaseModel):
    """POST /tokenize of a text."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    prompt: str
    add_special_tokens: StrictBool = True


class TokenizeChatBody(_Rendered):
    """POST /tokenize of messages."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    add_special_tokens: Literal[False] = False


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    tokens: list[Id]
