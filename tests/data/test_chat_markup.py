"""Tools and thinking in the markup of Qwen 3.5, Gemma 4 and gpt-oss: transformers' tokens, masks marked by hand.

The templates are ours, in the manner of the published ones: of what those write, they have the markers, where thoughts
are forgotten, how a call and its result stand in the text, and what opens the assistant's turn.
"""

import pytest

from tests.data.test_chat import ASK, SAY, made, marked
from tunix.data.tokenizer import Tokenizer

QWEN35 = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last -%}
      {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- m.content -}}
    {%- for call in m.tool_calls or [] -%}
      {{- ('\\n\\n' if m.content else '') + '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
      {%- for name, value in call.function.arguments.items() -%}
        {{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' -}}
      {%- endfor -%}
      {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n<think>\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

# A call's result stands in the turn that called; what follows it is the same turn.
GEMMA4 = """{{- bos_token -}}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- if not loop.first and loop.previtem.role != 'tool' or loop.first -%}{{- '<|turn>model\\n' -}}{%- endif -%}
    {%- if m.reasoning_content and loop.last -%}
      {{- '<|channel>thought\\n' + m.reasoning_content + '<channel|>' -}}
    {%- endif -%}
    {{- m.content -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '<|tool_call>call:' + call.function.name + '{' -}}
      {%- for name, value in call.function.arguments.items() -%}{{- name + ':' + value | string -}}{%- endfor -%}
      {{- '}<tool_call|>' -}}
    {%- endfor -%}
    {%- if m.tool_calls -%}{{- '<|tool_response>' -}}{%- else -%}{{- '<turn|>\\n' -}}{%- endif -%}
  {%- elif m.role == 'tool' -%}
    {{- 'response:' + m.content + '<tool_response|>' -}}
  {%- else -%}
    {{- '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<|turn>model\\n' -}}{%- endif -%}"""

# Each channel is a message of its own; thoughts before the last answer are forgotten, but for those of an open call.
HARMONY = """{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- if m.thinking and (loop.last or m.tool_calls) -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
    {%- endif -%}
    {%- if m.tool_calls -%}
      {%- set call = m.tool_calls[0].function -%}
      {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
      {{- call.arguments | tojson + '<|call|>' -}}
    {%- else -%}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}
      {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
    {%- endif -%}
  {%- elif m.role == 'tool' -%}
    {{- '<|start|>functions.add to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' -}}
  {%- else -%}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

FUNCTION = {"name": "add", "arguments": {"a": 1}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "content": "3"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def qwen35() -> Tokenizer:
    specials = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
    return made(QWEN35, [*specials, "</tool_response>"], eos="<|im_end|>")


def test_qwen35_with_tools_and_thoughts(qwen35):
    """The prompt opens the thought, so the marker is not trained; a thought before the last question is forgotten."""
    thought, call = SAY | {"reasoning_content": "hm"}, CALL | {"reasoning_content": "so"}
    tools = '<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "add", "parameters": '
    assert marked([ASK, thought, ASK, call, RESULT, thought], qwen35, tools=[TOOL]) == (
        tools + '{"type": "object"}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n⟦so\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>⟧\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n⟦hm\n</think>\n\nok<|im_end|>⟧\n"
    )


def test_qwen35_without_thinking(qwen35):
    """The empty block is part of the prompt."""
    assert marked([ASK, SAY, ASK, SAY], qwen35, enable_thinking=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦ok<|im_end|>⟧\n"
    )


def test_gemma4_with_a_call_whose_result_stands_in_the_same_turn():
    specials = ["<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"]
    tokenizer = made(GEMMA4, [*specials, "<|tool_response>", "<tool_response|>"], eos="<turn|>", bos="<bos>")
    thought = SAY | {"reasoning_content": "hm"}
    assert marked([ASK, thought, ASK, CALL, RESULT, thought], tokenizer) == (
        "<bos><|turn>user\nhi<turn|>\n<|turn>model\n⟦ok<turn|>⟧\n<|turn>user\nhi<turn|>\n"
        "<|turn>model\n⟦<|tool_call>call:add{a:1}<tool_call|><|tool_response>⟧response:3<tool_response|>"
        "⟦<|channel>thought\nhm<channel|>ok<turn|>⟧\n"
    )


def test_gpt_oss_channels_are_one_turn():
    specials = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"]
    tokenizer = made(HARMONY, specials, eos="<|return|>")
    thought, call = SAY | {"thinking": "hm"}, CALL | {"thinking": "so"}
    assert marked([ASK, thought, ASK, call, RESULT, thought], tokenizer) == (
        "<|start|>user<|message|>hi<|end|><|start|>assistant⟦<|channel|>final<|message|>ok<|end|>⟧"
        "<|start|>user<|message|>hi<|end|><|start|>assistant⟦<|channel|>analysis<|message|>so<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>⟧'
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>ok<|return|>⟧"
    )
