"""Tools that the model calls: the row's prompt, as many turns with calls as it likes, a turn without any at the end.

`prepare_options`, in the run's process, reads the functions that a recipe names, makes their JSON schemas and finds the
markup of calls in the model's chat template. In a worker a turn is parsed (`data/tool_calls.py`), each of its calls is
executed in its order, and the answers are messages of role `tool`, which the template renders. What is wrong with a
call is an answer too, which the model can read and mend: a markup that is broken, a name that is none, arguments that
do not fit, an exception of the function. Reward functions score.
"""

import asyncio
import inspect
import json
import re
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from tunix.data.chat import Message, render_continuation
from tunix.data.tokenizer import Tokenizer
from tunix.data.tool_calls import MARKUPS, Call, MarkupName, instructions, markup_of, shows_tools, typed
from tunix.errors import UserError, nearest
from tunix.rollout.environments.adapters import require_package
from tunix.rollout.environments.base import EpisodeError, Row, Step
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.mcp_servers import Server, background_loop
from tunix.rollout.environments.problem import Problem
from tunix.util.plugins import absolute, is_reference, load_object

Schema = dict[str, Any]
"""A tool as chat templates show it: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""


class Tools(Problem):
    """Python functions and MCP servers that the model calls in the markup of its family."""

    scores: ClassVar[bool] = False
    keeps_special: ClassVar[bool] = True
    ends_at_limit: ClassVar[bool] = True

    def __init__(
        self,
        template: str | None = None,
        system: str | None = None,
        markup: MarkupName | None = None,
        instructions: str | None = None,
        prepared: Mapping[str, Any] | None = None,
    ) -> None:
        """Calls nothing yet.

        Args:
            template: see `Problem`.
            system: see `Problem`.
            markup: a name in `tunix.data.tool_calls.MARKUPS`; None takes that of the chat template.
            instructions: what tells the model of the tools in front of the first message, where the chat template does
                not; None for their schemas and an example of a call, empty for nothing.
            prepared: what `prepare_options` adds, which is no option of a recipe.
        """
        super().__init__(template, True, system)
        self._prepared: Mapping[str, Any] = prepared or {}
        self._instructions = instructions
        self._markup: MarkupName = markup or "hermes"
        self._shown: bool = self._prepared.get("shown", True)
        self._schemas: dict[str, Schema] = {**self._prepared.get("schemas", {})}
        sources: Mapping[str, str] = self._prepared.get("sources", {})
        self._functions: dict[str, Callable[..., Any]] = {name: load_object(x) for name, x in sources.items()}
        self.messages = list[Message]()
        """The episode after its prompt, as messages."""

    @classmethod
    def prepare_options(
        cls, options: Mapping[str, Any], config: EnvironmentConfig, tokenizer: Tokenizer | None
    ) -> dict[str, Any]:
        """The options with the markup of calls, the tools' schemas, and where the tools are.

        Raises:
            UserError: a tool is no function, or has a signature that cannot be a schema; two have one name; an MCP
                server's program is missing; or the chat template has no known markup of calls, or cannot render them.
        """
        if "prepared" in options:
            raise UserError(f"the environment {config.name} has no option 'prepared'")
        markup, shown = options.get("markup"), True
        sources, schemas = dict[str, str](), cls.own_schemas(options)
        for reference in config.tools:
            if not is_reference(reference):
                raise UserError(f"environment.tools has {reference!r}: write `file.py:function` or `module:function`")
            schema = schema_of(load_object(reference), reference)
            if (name := schema["function"]["name"]) in schemas:
                raise UserError(f"environment.tools has {reference}, but another tool is called {name!r}: rename one")
            sources[name], schemas[name] = absolute(reference), schema
        for server in config.mcp:
            require_package("environment.mcp", "mcp", ">=2.3,<3", "mcp")
            if shutil.which(server.command[0]) is None:
                raise UserError(
                    f"environment.mcp: there is no program {server.command[0]!r}, with which the command begins: "
                    "install it, or write its whole path"
                )
        if tokenizer is not None and (schemas or config.mcp):
            markup, shown = markup or markup_of(tokenizer), shows_tools(tokenizer)
            answer = _asked([Call("name", {})], ["x"], markup, shown)
            render_continuation([{"role": "user", "content": "x"}], answer, tokenizer, True, tools=[*schemas.values()])
        servers = [server.model_dump() for server in config.mcp]
        prepared = {"sources": sources, "schemas": schemas, "servers": servers, "shown": shown}
        return {**options, "markup": markup, "prepared": prepared}

    @classmethod
    def own_schemas(cls, options: Mapping[str, Any]) -> dict[str, Schema]:
        """The schemas of tools that the environment has by itself, by name."""
        return {}

    @cached_property
    def _servers(self) -> dict[str, Server]:
        """The MCP server of each of their tools; they start where they are first asked for."""
        servers = dict[str, Server]()
        for description in self._prepared.get("servers", ()):
            server = Server(tuple(description["command"]), description["env"])
            if description["session"] == "worker":
                server = _SHARED.setdefault(json.dumps(description), server)
            for name, schema in server.schemas(self.patience).items():
                if name in self._schemas:
                    raise UserError(f"{server.name} has a tool {name!r}, and so has another one: leave one of them out")
                servers[name], self._schemas[name] = server, schema
        return servers

    @property
    def template_kwargs(self) -> Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tools, of all servers too."""
        return {"tools": [*self._schemas.values()]} if self._servers or self._schemas else {}

    def reset(self, row: Row, rng: np.random.Generator) -> list[Message]:
        """The row's prompt as messages.

        Raises:
            UserError: see `Problem`; or the row holds token ids.
        """
        prompt = super().reset(row, rng)
        if isinstance(prompt, str | np.ndarray):
            raise UserError(f"the environment {type(self).__name__} wants a prompt of text or messages, not token ids")
        if self._shown or self._instructions == "":
            return [*prompt]
        text = self._instructions or instructions([*self.template_kwargs.get("tools", ())], self._markup)
        first, *rest = prompt
        return [{**first, "content": joined(f"{text}\n\n", first["content"])}, *rest]

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """The answers to the turn's calls; the end where it has none."""
        turn = MARKUPS[self._markup].parse(action)
        self.messages.append(turn.message)
        if not turn.calls:
            return Step(done=True)
        said = _asked(turn.calls, [self._answer(call) for call in turn.calls], self._markup, self._shown)
        self.messages += [message for message in said if message["role"] != "assistant"]
        return Step(said)

    def _answer(self, call: Call) -> str:
        """The result of a call as text, or what is wrong with it."""
        if call.fault is not None:
            return self._error(f"the call is not understood: {call.fault}. Write it as {MARKUPS[self._markup].example}")
        function, servers = self._functions.get(call.name), {} if call.name in self._functions else self._servers
        if function is None and call.name not in servers:
            known = [*self._functions, *servers]
            return self._error(
                f"there is no tool {call.name!r}; there are {', '.join(known)}.{nearest(call.name, known)}"
            )
        schema, arguments = self._schemas[call.name], call.arguments
        if MARKUPS[self._markup].as_text:
            arguments = typed(arguments, schema)
        try:
            if function is None:
                return servers[call.name].call(call.name, arguments, self.patience)
            return str(settled(function(**arguments)))
        except EpisodeError:
            raise
        except Exception as error:
            return self._error(f"{type(error).__name__}: {error}", error)

    def _error(self, text: str, error: Exception | None = None) -> str:
        """What the model reads where a call has no result, because of a tool's exception where there is one."""
        return f"error: {text}"


def schema_of(function: Any, what: str) -> Schema:
    """The JSON schema of a function, from its signature and its docstring.

    Args:
        function: with type hints, and a docstring in Google's style that describes each argument.
        what: its name in messages, e.g. `tools.py:search`.

    Raises:
        UserError: it is no function, or cannot be a schema.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    if not inspect.isroutine(function):
        raise UserError(f"{what} is {function!r:.80}, not a function that a model can call")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"the tool {what} has the parameter {parameter}, which a call by names cannot fill")
    try:
        return get_json_schema(function)
    except Exception as error:  # type hints run the author's code, and transformers has several errors
        reason = " ".join(str(error).split())
        raise UserError(f"the tool {what} cannot be a JSON schema: {reason:.300}") from error


def joined(before: Any, after: Any) -> Any:
    """Two contents of messages as one: both are texts, or one has parts."""
    if isinstance(before, str) and isinstance(after, str):
        return before + after
    return [part for x in (before, after) for part in ([{"type": "text", "text": x}] if isinstance(x, str) else x)]


def settled(value: Any) -> Any:
    """The result of a coroutine, which runs in the background loop; any other value as it is."""
    if not isinstance(value, Coroutine):
        return value
    return asyncio.run_coroutine_threadsafe(value, background_loop()).result()


_SHARED: dict[str, Server] = {}
"""The servers of this process that its episodes share, by their descriptions."""


def _asked(calls: Sequence[Call], answers: Sequence[str], markup: MarkupName, shown: bool) -> list[Message]:
    """A turn's calls and the answers to them as messages; without the turn where the template writes no calls.

    What is called, and with what arguments, changes nothing after the turn, but for a name that a template repeats.
    """
    if MARKUPS[markup].role == "user":
        return [{"role": "user", "content": "\n".join(f"```tool_output\n{answer}\n```" for answer in answers)}]
    names = [call.name if re.fullmatch(r"[\w.-]+", call.name) else "unknown" for call in calls]
    asked = [
        {"type": "function", "id": f"call_{i}", "function": {"name": name, "arguments": {}}}
        for i, name in enumerate(names)
    ]
    turn = [{"role": "assistant", "content": "", "tool_calls": asked}] if shown else []
    pairs = enumerate(zip(names, answers, strict=True))
    return [
        *turn,
        *({"role": "tool", "name": name, "tool_call_id": f"call_{i}", "content": text} for i, (name, text) in pairs),
    ]
