"""Calls of tools in the families' markups: what is read, what is refused and why, what follows them in a template."""

from typing import Any

import pytest

from tests.data.test_chat import ASK, made
from tests.data.test_chat_markup import GEMMA4, HARMONY, QWEN35, TOOL
from tunix.data.chat import render_continuation, render_prompt
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer
from tunix.data.tool_calls import (
    MARKUPS,
    Call,
    MarkupName,
    ParsedTurn,
    instructions,
    markup_of,
    opening,
    shows_tools,
    typed,
)
from tunix.errors import UserError

A = Call("add", {"a": 1})
B = Call("mul", {"b": "x y"})


@pytest.mark.parametrize(
    ("markup", "text", "expected"),
    [
        (
            "hermes",
            'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>{"name": "mul", "arguments": {"b": "x y"}}',  # the last one may lack its end
            ParsedTurn("So.", (A, B)),
        ),
        (
            "hermes",
            "<think>\n<tool_call>hm</tool_call>\n</think>\n\n4",
            ParsedTurn("4", (), "<tool_call>hm</tool_call>"),
        ),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', ParsedTurn("", (Call("add", {}),))),
        (
            "xml",
            "hm\n</think>\n\nSo.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nx\ny\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=mul>\n</function>\n</tool_call>",
            ParsedTurn("So.", (Call("add", {"a": "1", "s": "x\ny"}), Call("mul", {})), "hm"),
        ),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', ParsedTurn("", (A,))),
        (
            "llama",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "mul", "arguments": {"b": "x y"}}',
            ParsedTurn("", (A, B)),
        ),
        ("llama", '{"name": "Ann", "age": 3}', ParsedTurn('{"name": "Ann", "age": 3}')),  # an answer that is JSON
        ("tool_code", "So.\n```tool_code\nadd(a=1)\nprint(mul(b='x y'))\n```", ParsedTurn("So.", (A, B))),
        (
            "gemma4",
            '<|channel>thought\nhm<channel|><|tool_call>call:add{a:1}<tool_call|><|tool_call>call:mul{b:<|"|>x y<|"|>}'
            "<tool_call|>",
            ParsedTurn("", (A, B), "hm"),
        ),
        (
            "gemma4",
            '<|tool_call>call:f{s:<|"|>{a:"b"}<|"|>,l:[1,{k:true}]}',
            ParsedTurn("", (Call("f", {"s": '{a:"b"}', "l": [1, {"k": True}]}),)),
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
            '<|message|>{"a": 1}',
            ParsedTurn("", (A,), "hm"),
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            ParsedTurn("So.", (A,)),
        ),
        ("harmony", "<|channel|>final<|message|>4", ParsedTurn("4")),
        *((markup, " 4\n", ParsedTurn("4")) for markup in MARKUPS),
    ],
)
def test_turns(markup: MarkupName, text: str, expected: ParsedTurn):
    assert MARKUPS[markup].parse(text) == expected


@pytest.mark.parametrize(
    ("markup", "text", "name", "fault"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {}</tool_call>', "add", "it is not JSON: Expecting ','"),
        ("hermes", "<tool_call>" + "[" * 100_000, "", "it is not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "", 'it is no JSON object with a "name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": 3}', "add", 'its "arguments" is 3, not a JSON object'),
        ("xml", "<tool_call>\nadd\n</tool_call>", "", "it does not begin with <function=NAME>"),
        ("xml", "<tool_call><function=add>1</function></tool_call>", "add", "'1' is not within <parameter=KEY>"),
        ("llama", '{"name": "add", "parameters": {"a": 1}', "add", "it is not JSON"),
        ("llama", '<|python_tag|>add.call(a="1")', "", "it is not JSON"),
        ("tool_code", "```tool_code\nadd(\n```", "", "it is not Python"),
        ("tool_code", "```tool_code\nadd(1)\n```", "add", "its arguments are not literals by name, as in add(key=1)"),
        ("tool_code", "```tool_code\nadd(a=b)\n```", "add", "its arguments are not literals by name"),
        ("tool_code", "```tool_code\nx = 1\n```", "", "'x = 1' is no call"),
        ("tool_code", "```tool_code\n```", "", "there is nothing in the block"),
        ("gemma4", "<|tool_call>add(1)<tool_call|>", "", "it is not call:NAME{...}"),
        ("gemma4", "<|tool_call>call:add{a:}<tool_call|>", "add", "it is not JSON"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>1", "add", 'its "arguments" is 1'),
    ],
)
def test_calls_that_cannot_be_read(markup: MarkupName, text: str, name: str, fault: str):
    (call,) = MARKUPS[markup].parse(text).calls
    assert (call.name, call.arguments) == (name, {})
    assert call.fault is not None
    assert call.fault.startswith(fault)


@pytest.mark.parametrize("markup", MARKUPS)
def test_examples_are_calls(markup: MarkupName):
    (call,) = MARKUPS[markup].parse(MARKUPS[markup].example).calls
    assert call.fault is None
    assert call.name == "NAME"
    assert MARKUPS[markup].example.startswith(opening(markup, "NAME"))
    assert len(opening(markup, "")) + len("NAME") + 1 == len(opening(markup, "NAME"))


def test_texts_get_the_types_of_the_schema():
    kinds = {"i": "integer", "s": "string", "b": "boolean", "l": "array", "u": ["integer", "string"], "n": "number"}
    properties: dict[str, Any] = {name: {"type": kind} for name, kind in kinds.items()}
    properties["o"] = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    given = {"i": "7", "s": "7", "b": "True", "l": "[1]", "u": "7", "n": "x", "o": "null", "other": "7"}
    assert typed(given, tool) == {
        "i": 7,
        "s": "7",
        "b": True,
        "l": [1],
        "u": "7",
        "n": "x",  # it is no number: the tool says what is wrong
        "o": None,
        "other": "7",
    }


# What decides after a call in Llama 3's and Qwen 3's published templates; those of other families stand beside the
# tests of training.
LLAMA = """{{- bos_token -}}{%- if tools -%}{{- tools | tojson -}}{%- endif -%}
{%- for m in messages -%}
  {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' -}}
  {%- if 'tool_calls' in m -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('only single calls') -}}{%- endif -%}
    {%- set call = m.tool_calls[0].function -%}
    {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' -}}
  {%- elif m.role == 'tool' -%}{{- m.content | tojson -}}
  {%- else -%}{{- m.content -}}{%- endif -%}
  {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""
QWEN3 = """{%- if tools -%}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {{- ('<think>\\n\\n</think>\\n\\n' if loop.last and m.role == 'assistant' else '') + m.content -}}
    {%- for call in m.tool_calls or [] -%}
      {{- ('' if loop.first else '\\n') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
FAMILIES: dict[str, tuple[str, list[str], str]] = {
    "hermes": (QWEN3, ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"], "<|im_end|>"),
    "xml": (QWEN35, ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"], "<|im_end|>"),
    "llama": (LLAMA, ["<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "gemma4": (
        GEMMA4.replace("{{- bos_token -}}", "{{- bos_token -}}{%- if tools -%}{{- tools | tojson -}}{%- endif -%}"),
        ["<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"],
        "<turn|>",
    ),
    "harmony": (
        "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}" + HARMONY,
        ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"],
        "<|return|>",
    ),
}


def family(markup: MarkupName) -> Tokenizer:
    template, specials, eos = FAMILIES[markup]
    return made(template, specials, eos=eos, bos="<bos>" if "<bos>" in specials else None)


def called(*functions: dict[str, Any]) -> dict[str, Any]:
    calls = [{"type": "function", "id": f"call_{i}", "function": x} for i, x in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize("markup", FAMILIES)
@pytest.mark.parametrize("stopped", [True, False])
def test_results_follow_a_call_as_the_template_writes_them(markup: MarkupName, stopped: bool):
    """Prompt, sampled call and continuation are the tokens of the conversation, though the continuation is made without
    the arguments."""
    tokenizer = family(markup)
    assert markup_of(tokenizer) == markup
    assert shows_tools(tokenizer)
    result = {"role": "tool", "name": "add", "tool_call_id": "call_0", "content": 'it is 3\n"x"'}
    arguments = {"a": 7 if markup == "gemma4" else "x y"}  # that template here writes no quotes
    said = called({"name": "add", "arguments": arguments})
    whole = tokenizer.hf.apply_chat_template(
        [ASK, said, result], tools=[TOOL], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    bare = called({"name": "add", "arguments": {}})
    answer = render_continuation([ASK], [bare, result], tokenizer, stopped, tools=[TOOL]).tolist()
    prompt = render_prompt([ASK], tokenizer, tools=[TOOL]).tokens.tolist()
    assert whole[-len(answer) :] == answer
    action = whole[: -len(answer)]
    assert (action[-1] in tokenizer.stop_ids) == stopped
    assert action[: len(prompt)] == prompt or markup == "xml"  # its line breaks merge, in and after the prompt
    turn = MARKUPS[markup].parse(tokenizer.decode(action[: len(action) - stopped][len(prompt) :]))
    assert turn.calls == (Call("add", arguments),)


def test_several_calls_where_a_template_refuses_them():
    """Llama 3's writes one call at most: its results follow as those of that call would."""
    tokenizer = family("llama")
    functions = [{"name": "add", "arguments": {}}, {"name": "mul", "arguments": {}}]
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    answer = render_continuation([ASK], [called(*functions), *results], tokenizer, True)
    assert tokenizer.decode(answer) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"one"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"two"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    ("name", "markup"), [("gemma", "tool_code"), ("gemma4", "gemma4"), ("llama3", "llama"), ("chatml", "hermes")]
)
def test_templates_without_tools_leave_it_to_their_turns(name: Any, markup: MarkupName):
    tokenizer = bytes_tokenizer(name)
    assert markup_of(tokenizer) == markup
    assert not shows_tools(tokenizer)
    assert '"name": "add"' in instructions([TOOL], markup)
    assert MARKUPS[markup].example in instructions([TOOL], markup)


def test_a_template_with_another_markup_is_refused():
    glm = "{% for t in tools %}{% endfor %}<tool_call>f<arg_key>a</arg_key>"
    with pytest.raises(UserError, match="writes calls of tools in none of the markups that are known"):
        markup_of(bytes_tokenizer("chatml").replace_template(glm))
