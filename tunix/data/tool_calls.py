r"""Calls of tools in the markup of a model's family: from the text of a turn to functions' names and arguments.

    MARKUPS["hermes"].parse('Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    -> ParsedTurn("Wait.", (Call("add", {"a": 1}),))

`MARKUPS` has the markup of each family, `markup_of` finds that of a tokenizer's chat template. A turn is read without
its stop token and with all other special tokens, which some markups are made of. Thoughts are set apart first: a call
that a model only thinks of is none. What opens as a call and cannot be read is a call with a `fault`, a sentence that
the model can be answered with. Loads without jax.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunix.errors import UserError

if TYPE_CHECKING:
    from tunix.data.tokenizer import Tokenizer


MarkupName = Literal["hermes", "xml", "llama", "tool_code", "gemma4", "harmony"]


@dataclass(frozen=True)
class Call:
    """A function that the model calls."""

    name: str
    """The function's, e.g. `search`; empty where it cannot be read."""
    arguments: Mapping[str, Any]
    """By name, e.g. `{"query": "tunix"}`."""
    fault: str | None = None
    """Why it cannot be read, e.g. `it is not JSON: ...`; None where it can."""


@dataclass(frozen=True)
class ParsedTurn:
    """What the model said, and what it calls."""

    content: str
    """The text without thoughts and calls, and without white space around it."""
    calls: tuple[Call, ...] = ()
    """In the order in which they stand."""
    thought: str = ""
    """What stands before `</think>`, or in a channel of thoughts, without white space around it."""

    @property
    def message(self) -> dict[str, Any]:
        """The turn as the assistant's message, with ids for calls that can be read."""
        calls = [
            {"type": "function", "id": f"call_{i}", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for i, call in enumerate(self.calls)
            if call.fault is None
        ]
        thought = {"reasoning_content": self.thought} if self.thought else {}
        return {"role": "assistant", "content": self.content, **thought, **({"tool_calls": calls} if calls else {})}


def markup_of(tokenizer: Tokenizer) -> MarkupName:
    """The markup of calls that a chat template writes.

    Raises:
        UserError: it writes another, or there is no template.
    """
    template = tokenizer.chat_template or ""
    # A template that knows no tools leaves its family's turns to tell.
    for sign, markup in _SIGNS if shows_tools(tokenizer) else (*_SIGNS, *_TURNS):
        if sign in template and markup is not None:
            return markup
        if sign in template:
            break
    raise UserError(
        f"the chat template of {tokenizer.name} writes calls of tools in none of the markups that are known "
        f"({', '.join(MARKUPS)}): name one as the environment's option `markup`, or use another data.chat_template"
    )


def shows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template has the variable `tools`, by which it shows them to the model."""
    return re.search(r"\btools\b", tokenizer.chat_template or "") is not None


def instructions(tools: Sequence[Mapping[str, Any]], markup: MarkupName) -> str:
    """What tells a model of its tools where the chat template does not, from their JSON schemas."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"You can call these functions:\n{schemas}\n\nWrite a call as\n{MARKUPS[markup].example}"


def opening(markup: MarkupName, name: str) -> str:
    """How a call of a function begins; of any function where the name is empty."""
    before, _, after = MARKUPS[markup].example.partition("NAME")
    return f"{before}{name}{after[0]}" if name else before


def typed(arguments: Mapping[str, Any], tool: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a markup that writes all values as text, as the types of the tool's JSON schema; a text that is
    no value of its type stays a text."""
    properties = tool["function"].get("parameters", {}).get("properties", {})
    values = dict(arguments)
    for name, value in arguments.items():
        types = _types(properties.get(name) or {})
        if not types or "string" in types:
            continue
        word = {"true": "true", "false": "false", "none": "null", "null": "null"}.get(value.strip().lower())
        with contextlib.suppress(ValueError, RecursionError):
            values[name] = json.loads(word or value)
    return values


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows."""
    declared = schema.get("type") or []
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return {*([declared] if isinstance(declared, str) else declared)}.union(*map(_types, choices))


def _json_call(text: str, name: str | None = None) -> list[Call]:
    """A call as a JSON object with a name and arguments, or as the arguments of a function whose name is known."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # the second is of deep nesting
        named = re.search(r'"name"\s*:\s*"([^"\\]+)"', text)
        return [Call(name or (named[1] if named else ""), {}, f"it is not JSON: {error}")]
    return [_object_call(value if name is None else {"name": name, "arguments": value}, "arguments")]


def _object_call(value: Any, key: str) -> Call:
    """A call whose arguments have this key, or `arguments`."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return Call("", {}, 'it is no JSON object with a "name"')
    arguments = next((x for x in (value.get(key), value.get("arguments")) if x is not None), {})
    if not isinstance(arguments, dict):
        return Call(name, {}, f'its "{key}" is {json.dumps(arguments):.80}, not a JSON object')
    return Call(name, arguments)


def _parted(text: str) -> tuple[str, str]:
    """What is thought, and the rest."""
    for opening, closing in (("<think>", "</think>"), ("<|channel>thought", "<channel|>")):
        thought, end, rest = text.partition(closing)
        if end:
            return thought.rpartition(opening)[2].strip(), rest
    return "", text


def _between(opening: str, closing: str, read: Callable[[str], Sequence[Call]]) -> Callable[[str], ParsedTurn]:
    """Reads calls between two marks, of which the last may lack the closing one."""
    block = re.compile(f"{opening}(.*?)(?:{closing}|$)", re.DOTALL)

    def parse_turn(text: str) -> ParsedTurn:
        thought, rest = _parted(text)
        calls = [call for match in block.finditer(rest) for call in read(match[1].strip())]
        return ParsedTurn(block.sub("", rest).strip(), tuple(calls), thought)

    return parse_turn


def _xml(text: str) -> list[Call]:
    """`<function=add>\n<parameter=a>\n1\n</parameter>\n</function>`; values are texts, see `typed`."""
    match = re.fullmatch(r"<function=([^\n>]+)>(.*?)(?:</function>)?", text, re.DOTALL)
    if match is None:
        return [Call("", {}, "it does not begin with <function=NAME>")]
    parameter = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    arguments = {name.strip(): value for name, value in parameter.findall(match[2])}
    if left := parameter.sub("", match[2]).strip():
        return [Call(match[1].strip(), {}, f"{left!r:.80} is not within <parameter=KEY> and </parameter>")]
    return [Call(match[1].strip(), arguments)]


def _llama(text: str) -> ParsedTurn:
    """The whole turn is JSON, after a python tag where there is one; several objects are parted by `;`."""
    thought, rest = _parted(text)
    before, tag, body = rest.rpartition("<|python_tag|>")
    if not tag and re.match(r'\s*\{\s*"name"\s*:', body) is None:
        return ParsedTurn(rest.strip(), (), thought)
    calls, decoder, at = list[Call](), json.JSONDecoder(), 0
    while body := body[at:].lstrip("; \r\n\t,"):
        try:
            value, at = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            calls += _json_call(body)
            break
        if not tag and not calls and isinstance(value, dict) and value.keys().isdisjoint(("parameters", "arguments")):
            return ParsedTurn(rest.strip(), (), thought)  # an answer that is JSON
        calls.append(_object_call(value, "parameters"))
    return ParsedTurn(before.strip(), tuple(calls), thought)


def _python(text: str) -> list[Call]:
    """Calls in Python's syntax with literal arguments by name, each in a line, as such or within `print()`."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two are of deep nesting
        return [Call("", {}, f"it is not Python: {error}")]
    calls = list[Call]()
    for statement in statements:
        node = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
            node = node.args[0]
        if not isinstance(node, ast.Call):
            calls.append(Call("", {}, f"{ast.unparse(statement)!r:.80} is no call"))
            continue
        name = ast.unparse(node.func)
        try:
            if node.args:
                raise ValueError("an argument has no name")
            calls.append(Call(name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}))
        except (ValueError, TypeError) as error:
            calls.append(Call(name, {}, f"its arguments are not literals by name, as in {name}(key=1): {error}"))
    return calls or [Call("", {}, "there is nothing in the block")]


def _gemma4(text: str) -> list[Call]:
    """`call:add{a:1,b:<|"|>x<|"|>}`: JSON whose keys have no quotes, and whose strings have a token for them."""
    match = re.fullmatch(r"call:([\w.-]+)(\{.*\})", text, re.DOTALL)
    if match is None:
        return [Call("", {}, "it is not call:NAME{...}")]
    parts = match[2].split('<|"|>')
    parts[::2] = [re.sub(r"([{,]\s*)([A-Za-z_][\w-]*)(\s*):", r'\1"\2"\3:', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return _json_call("".join(parts), name=match[1])


def _harmony(text: str) -> ParsedTurn:
    """gpt-oss: messages with a channel each; one that goes to a function is a call."""
    thoughts, said, calls = list[str](), list[str](), list[Call]()
    for message in re.split(r"<\|start\|>assistant", text):
        header, _, body = message.partition("<|message|>")
        body = re.sub(r"<\|(end|call|return)\|>.*", "", body, flags=re.DOTALL)
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        if recipient := re.search(r"\bto=(?:functions\.)?([\w.-]+)", header):
            calls += _json_call(body, name=recipient[1])
        else:
            (thoughts if channel and channel[1] == "analysis" else said).append(body if channel else message)
    join = "\n".join
    return ParsedTurn(join(said).strip(), tuple(calls), join(thoughts).strip())


@dataclass(frozen=True)
class Markup:
    """How a family writes calls."""

    parse: Callable[[str], ParsedTurn]
    """Reads a turn, special tokens included, without its stop token."""
    example: str
    """A call with placeholders, for a model that has written it wrongly or was never told."""
    as_text: bool = False
    """Whether all arguments are texts, whose types the tool's schema has; see `typed`."""
    role: str = "tool"
    """The role of messages that answer a call."""


MARKUPS: Mapping[MarkupName, Markup] = {
    "hermes": Markup(
        _between("<tool_call>", "</tool_call>", _json_call),
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>',
    ),
    "xml": Markup(
        _between("<tool_call>", "</tool_call>", _xml),
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        as_text=True,
    ),
    "llama": Markup(_llama, '{"name": "NAME", "parameters": {"KEY": "VALUE"}}'),
    "tool_code": Markup(
        _between(r"```tool_code\s*\n", "```", _python), '```tool_code\nNAME(key="VALUE")\n```', role="user"
    ),
    "gemma4": Markup(
        _between(r"<\|tool_call>", r"<tool_call\|>", _gemma4), '<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>'
    ),
    "harmony": Markup(
        _harmony, '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"KEY": "VALUE"}<|call|>'
    ),
}
"""Qwen 2.5 and 3 and Hermes; Qwen 3.5 and Qwen3-Coder; Llama 3; Gemma 1 to 3; Gemma 4; gpt-oss."""

_SIGNS: tuple[tuple[str, MarkupName | None], ...] = (
    ("<|channel|>", "harmony"),
    ("<|tool_call>", "gemma4"),
    ("<arg_key>", None),  # GLM's calls open like Hermes'
    ("<function=", "xml"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama"),
)
"""Text of a chat template -> the markup of its calls."""
_TURNS: tuple[tuple[str, MarkupName], ...] = (
    ("<start_of_turn>", "tool_code"),
    ("<|turn>", "gemma4"),
    ("<|im_start|>", "hermes"),
)
