"""What is trained under the manners of published chat templates, and what they leave out: all marked by hand.

The templates are ours; of the published ones they have what decides a mask: which thoughts they cut, how they write
calls and results, what they forget, what ends a turn. Each row of a table names the trained spans and the rules of what
was left out, or the reason why the row is refused.
"""

import json
from typing import Any

import pytest

from tests.data.test_chat import QWEN3, QWEN25, made
from tests.data.test_chat_markup import GEMMA4, HARMONY, QWEN35
from tunix.data.chat import render_chat, render_prompt
from tunix.data.templates import MARKERS, TEMPLATES
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import BEFORE_CALL, EMPTY_TURN, NO_STOP, NOT_WRITTEN, REWRITTEN, THOUGHTS, UNPROVED, Refused
from tunix.errors import UserError

IM = ["<|im_start|>", "<|im_end|>"]

# Thoughts are cut in every turn, calls want their arguments as text, and no newline separates turns.
DEEPSEEK = """{{- bos_token -}}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{- m.content -}}
  {%- elif m.role == 'user' -%}{{- '<|User|>' + m.content + '<|Assistant|>' -}}
  {%- elif m.role == 'tool' -%}{{- '<|out|>' + m.content + '<|/out|>' -}}
  {%- elif m.role == 'assistant' -%}
    {{- m.content.split('</think>')[-1] if m.content else '' -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '<|call|>' + call.function.name + '\\n' + call.function.arguments + '<|/call|>' -}}
    {%- endfor -%}
    {{- '<|eos|>' -}}
  {%- endif -%}
{%- endfor -%}"""

# The next turn's opening is the only end that a turn has.
GLM = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set thought = m.reasoning_content or '' -%}
    {%- set said = m.content -%}
    {%- if '</think>' in m.content -%}
      {%- set thought = m.content.split('</think>')[0].split('<think>')[-1] | trim -%}
      {%- set said = m.content.split('</think>')[-1] -%}
    {%- endif -%}
    {{- '<|assistant|>\\n<think>' + (thought if loop.index0 > ns.last else '') + '</think>' -}}
    {%- if said | trim -%}{{- '\\n' + said | trim -}}{%- endif -%}
  {%- else -%}
    {{- '<|' + m.role + '|>\\n' + m.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""

# The prompt opens a thought; a turn without one closes it at once, without the prompt's newline.
NEMOTRON = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set said = m.content -%}
    {%- if m.reasoning_content -%}
      {%- set said = '<think>\\n' + m.reasoning_content + '\\n</think>\\n' + said -%}
    {%- endif -%}
    {%- if '</think>' not in said -%}{%- set said = '<think></think>' + said -%}
    {%- elif loop.index0 < ns.last -%}{%- set said = '<think></think>' + said.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' + said -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '\\n<tool_call>' + call.function | tojson + '</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"""

# EOS stands at the end of a finished conversation alone, and calls are not written.
PHI = """{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}"""

# Of a turn with a call the call alone is written; results are JSON; the tools are told to the first user.
LLAMA31 = """{{- bos_token -}}
{%- for m in messages -%}
  {{- '<h>' + ('ipython' if m.role == 'tool' else m.role) + '</h>\\n\\n' -}}
  {%- if m.role == 'user' and loop.first and tools -%}{{- tools | tojson + '\\n\\n' -}}{%- endif -%}
  {%- if m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
    {%- set call = m.tool_calls[0].function -%}
    {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' -}}
  {%- elif m.role == 'tool' -%}{{- m.content | tojson -}}
  {%- else -%}{{- m.content | trim -}}
  {%- endif -%}
  {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<h>assistant</h>\\n\\n' -}}{%- endif -%}"""

# The system's message goes before the last question, and is lost where an answer follows it.
MISTRAL = """{{- bos_token -}}
{%- set messages_ = messages[1:] if messages[0].role == 'system' else messages -%}
{%- for m in messages_ -%}
  {%- if m.role == 'user' -%}
    {{- '[INST] ' + (messages[0].content + '\\n\\n' if loop.last and messages[0].role == 'system' else '') -}}
    {{- m.content + '[/INST]' -}}
  {%- elif m.role == 'tool' -%}{{- '[RESULT] ' + m.content + '[/RESULT]' -}}
  {%- elif m.tool_calls -%}{{- '[CALLS] ' -}}
    {%- for call in m.tool_calls -%}{{- call.function | tojson -}}{%- endfor -%}{{- eos_token -}}
  {%- else -%}{{- ' ' + m.content | trim + eos_token -}}
  {%- endif -%}
{%- endfor -%}"""

# The results of a call are named like it, and so is the call that they answer.
NAMED = """{%- for m in messages -%}
  {{- '<|im_start|>' + m.role -}}
  {%- if m.role == 'tool' -%}{{- ' ' + messages[loop.index0 - 1].tool_calls[0].function.name -}}{%- endif -%}
  {{- '\\n' + (m.content or '') -}}
  {%- for call in m.tool_calls or [] -%}{{- '<call>' + call.function | tojson + '</call>' -}}{%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

THINK = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOKENIZERS = {
    **{name: made(TEMPLATES[name], [*MARKERS[name], "<bos>", "<eos>"], eos="<eos>", bos="<bos>") for name in TEMPLATES},
    "qwen25": made(QWEN25, IM, eos="<|im_end|>"),
    "qwen3": made(QWEN3, [*IM, *THINK], eos="<|im_end|>"),
    "qwen35": made(QWEN35, [*IM, *THINK], eos="<|im_end|>"),
    "gemma4_tools": made(
        GEMMA4,
        ["<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"],
        eos="<turn|>",
        bos="<bos>",
    ),
    "harmony": made(
        HARMONY, ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"], eos="<|return|>"
    ),
    "deepseek": made(
        DEEPSEEK,
        ["<bos>", "<|User|>", "<|Assistant|>", "<|eos|>", "<|call|>", "<|/call|>", "<|out|>", "<|/out|>"],
        eos="<|eos|>",
        bos="<bos>",
    ),
    "glm": made(GLM, ["<|user|>", "<|assistant|>", "<|system|>", "<|eos|>", "<think>", "</think>"], eos="<|eos|>"),
    "nemotron": made(NEMOTRON, [*IM, *THINK], eos="<|im_end|>"),
    "nemotron_of_bytes": made(NEMOTRON, IM, eos="<|im_end|>"),
    "phi": made(PHI, ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|eos|>"], eos="<|eos|>"),
    "llama31": made(LLAMA31, ["<bos>", "<h>", "</h>", "<|eot_id|>"], eos="<|eot_id|>", bos="<bos>"),
    "mistral": made(MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]", "[CALLS]"], eos="</s>", bos="<s>"),
    "named": made(NAMED, IM, eos="<|im_end|>"),
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(*arguments: dict[str, Any], text: str = "", **more: Any) -> dict[str, Any]:
    functions = [{"name": f"see{n}" if n else "look", "arguments": x} for n, x in enumerate(arguments)]
    return says(text, tool_calls=[{"type": "function", "function": function} for function in functions], **more)


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


PLAIN = [user("Hi?"), says("Hello.")]
TURNS = [{"role": "system", "content": "Be brief."}, user("2 + 2?"), says("Four."), user("3 + 3?"), says("Six.")]
DEVELOPER = [{"role": "developer", "content": "One word."}, *PLAIN]
THOUGHT = [user("2?"), says("<think>\neasy\n</think>\n\nTwo."), user("3?"), says("<think>\nsame\n</think>\n\nThree.")]
FIELD = [user("2?"), says("Two.", reasoning_content="easy"), user("3?"), says("Three.", reasoning_content="same")]
CALL = [user("Rain?"), calls({"at": "Oslo"}), result("SECRET"), says("Wet."), user("Sure?"), says("Yes.")]
NUMBER = [user("Sum?"), calls({"a": 1}), result("3"), says("3.")]
SPOKEN = [user("Rain?"), calls({"at": "Oslo"}, text="I look."), result("SECRET"), says("Wet.")]
TWO = [user("Rain?"), calls({"at": "Oslo"}, {"at": "Rome"}), result("SECRET"), says("Wet.")]
EMPTY = [user("Hi?"), says(""), user("So?"), says("Ok.")]
CLOSED = ["Hello.<|im_end|>"]
LOOKED = '</think>\n<tool_call>{"name": "look", "arguments": {"at": "Oslo"}}</tool_call><|im_end|>'
WET = ["Wet.<|im_end|>", "Yes.<|im_end|>"]

Spans = list[str]
TABLE: list[tuple[str, list[dict[str, Any]], Spans, list[str]]] = [
    ("chatml", PLAIN, CLOSED, []),
    ("chatml", TURNS, ["Four.<|im_end|>", "Six.<|im_end|>"], []),
    ("chatml", DEVELOPER, CLOSED, []),
    ("chatml", EMPTY, ["<|im_end|>", "Ok.<|im_end|>"], []),
    ("chatml", THOUGHT, ["<think>\neasy\n</think>\n\nTwo.<|im_end|>",
     "<think>\nsame\n</think>\n\nThree.<|im_end|>"], []),
    ("chatml", FIELD, ["Two.<|im_end|>", "Three.<|im_end|>"], [THOUGHTS] * 2),
    ("gemma", TURNS, ["Four.<end_of_turn>", "Six.<end_of_turn>"], []),
    ("gemma", EMPTY, ["<end_of_turn>", "Ok.<end_of_turn>"], []),
    ("gemma4", TURNS, ["Four.<turn|>", "Six.<turn|>"], []),
    ("llama3", DEVELOPER, ["Hello.<|eot_id|>"], []),
    ("llama3", EMPTY, ["<|eot_id|>", "Ok.<|eot_id|>"], []),
    ("qwen25", TURNS, ["Four.<|im_end|>", "Six.<|im_end|>"], []),
    ("qwen3", THOUGHT, ["Two.<|im_end|>", "<think>\nsame\n</think>\n\nThree.<|im_end|>"], [THOUGHTS]),
    ("qwen3", EMPTY, ["<|im_end|>", "<think>\n\n</think>\n\nOk.<|im_end|>"], []),
    ("qwen35", FIELD, ["Two.<|im_end|>", "same\n</think>\n\nThree.<|im_end|>"], [THOUGHTS]),
    # The call is not in the last turn: no thought is opened there, and none is trained. Two newlines are one token.
    ("qwen35", CALL, ["<tool_call>\n<function=look>\n<parameter=at>\nOslo\n</parameter>\n</function>\n</tool_call>"
     "<|im_end|>", "Wet.<|im_end|>", "</think>\n\nYes.<|im_end|>"], []),
    ("gemma4_tools", CALL, ["<|tool_call>call:look{at:Oslo}<tool_call|><|tool_response>", "Wet.<turn|>",
     "Yes.<turn|>"], []),
    ("harmony", CALL, [' to=functions.look<|channel|>commentary json<|message|>{"at": "Oslo"}<|call|>',
     "<|channel|>final<|message|>Wet.<|end|>", "<|channel|>final<|message|>Yes.<|return|>"], []),
    ("harmony", SPOKEN, [' to=functions.look<|channel|>commentary json<|message|>{"at": "Oslo"}<|call|>',
     "<|channel|>final<|message|>Wet.<|return|>"], [BEFORE_CALL]),
    ("harmony", FIELD, ["<|channel|>final<|message|>Two.<|end|>", "<|channel|>analysis<|message|>same<|end|><|start|>"
     "assistant<|channel|>final<|message|>Three.<|return|>"], [THOUGHTS]),
    ("harmony", EMPTY, ["<|channel|>final<|message|><|end|>", "<|channel|>final<|message|>Ok.<|return|>"], []),
    ("deepseek", THOUGHT, ["\n\nTwo.<|eos|>", "\n\nThree.<|eos|>"], [THOUGHTS] * 2),
    ("deepseek", CALL, ['<|call|>look\n{"at": "Oslo"}<|/call|><|eos|>', "Wet.<|eos|>", "Yes.<|eos|>"], []),
    ("deepseek", TURNS, ["Four.<|eos|>", "Six.<|eos|>"], []),
    ("glm", THOUGHT, ["\n<think></think>\nTwo.", "\n<think>same</think>\nThree."], [THOUGHTS, NO_STOP, NO_STOP]),
    ("glm", FIELD, ["\n<think></think>\nTwo.", "\n<think>same</think>\nThree."], [THOUGHTS, NO_STOP, NO_STOP]),
    ("glm", EMPTY, ["\n<think></think>\nOk."], [EMPTY_TURN, NO_STOP]),
    ("nemotron", THOUGHT, ["Two.<|im_end|>", "same\n</think>\n\nThree.<|im_end|>"], [THOUGHTS]),
    ("nemotron", FIELD, ["Two.<|im_end|>", "same\n</think>\nThree.<|im_end|>"], [THOUGHTS]),
    ("nemotron", TURNS, ["Four.<|im_end|>", "Six.<|im_end|>"], []),
    ("nemotron", CALL, [LOOKED, *WET], []),
    # `<think>` and `</think>` are no tokens here, and share `<`: markers are whole all the same.
    ("nemotron_of_bytes", CALL, [LOOKED, *WET], []),
    ("phi", TURNS, ["Four.<|end|>", "Six.<|end|>"], []),
    ("phi", EMPTY, ["<|end|>", "Ok.<|end|>"], []),
    ("llama31", CALL, ['{"name": "look", "parameters": {"at": "Oslo"}}<|eot_id|>', "Wet.<|eot_id|>",
     "Yes.<|eot_id|>"], []),
    ("llama31", SPOKEN, ['{"name": "look", "parameters": {"at": "Oslo"}}<|eot_id|>', "Wet.<|eot_id|>"], [BEFORE_CALL]),
    ("llama31", NUMBER, ['{"name": "look", "parameters": {"a": 1}}<|eot_id|>', "3.<|eot_id|>"], []),
    ("mistral", CALL, ['[CALLS] {"name": "look", "arguments": {"at": "Oslo"}}</s>', " Wet.</s>", " Yes.</s>"], []),
    ("mistral", THOUGHT, [f" <think>\n{x}\n</think>\n\n{y}.</s>" for x, y in (("easy", "Two"), ("same", "Three"))], []),
    ("named", TWO, ['<call>{"name": "look", "arguments": {"at": "Oslo"}}</call><call>{"name": "see1", "arguments": '
     '{"at": "Rome"}}</call><|im_end|>', "Wet.<|im_end|>"], []),
    ("named", NUMBER, ['<call>{"name": "look", "arguments": {"a": 1}}</call><|im_end|>', "3.<|im_end|>"], []),
]  # fmt: skip

REFUSED: list[tuple[str, list[dict[str, Any]], str, str]] = [
    ("deepseek", DEVELOPER, NOT_WRITTEN, r"message 1 \(developer\).*'One word.': write it as the system's"),
    ("mistral", TURNS, NOT_WRITTEN, r"message 1 \(system\).*'Be brief.'"),
    ("chatml", CALL, NOT_WRITTEN, r"message 2 \(assistant\): the chat template does not write a tool call, 'look'"),
    ("phi", CALL, NOT_WRITTEN, "does not write a tool call"),
    ("harmony", TWO, NOT_WRITTEN, "does not write a tool call, 'see1'"),
    ("qwen3", CALL, NOT_WRITTEN, "does not write a tool call, 'Oslo'"),
]


def rendered(name: str, messages: list[dict[str, Any]]) -> tuple[Spans, list[str]]:
    """The texts of the trained spans, and the rules of the notes; the second time an outline of the first is used."""
    tokenizer = TOKENIZERS[name]
    results = []
    for _ in range(2):
        rendered = render_chat(messages, tokenizer)
        tokens, mask = rendered
        edges = [i for i in range(len(mask) + 1) if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        results.append(([tokenizer.decode(tokens[a:b]) for a, b in pairs], [note.rule for note in rendered.notes]))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize(("name", "messages", "spans", "rules"), TABLE)
def test_what_is_trained(name, messages, spans, rules):
    assert rendered(name, messages) == (spans, rules)


@pytest.mark.parametrize(("name", "messages", "reason", "message"), REFUSED)
def test_what_is_refused(name, messages, reason, message):
    with pytest.raises(Refused, match=message) as refused:
        render_chat(messages, TOKENIZERS[name])
    assert refused.value.reason == reason


# ---- The rows of a message ----


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in ("glm", "harmony")])
def test_parts_are_read_as_their_text(name):
    chat = [user("What now?"), says("Well then."), user("And now?"), says("All done.")]
    tokenizer = TOKENIZERS[name]
    whole, cut = (
        render_chat(chat, tokenizer),
        render_chat([{**m, "content": parts(m["content"])} for m in chat], tokenizer),
    )
    assert whole.tokens.tolist() == cut.tokens.tolist()
    assert whole.mask.tolist() == cut.mask.tolist()
    assert whole.mask.any()


@pytest.mark.parametrize("name", ["named", "deepseek", "llama31"])
@pytest.mark.parametrize("form", ["text", "flat", "list as text", "nothing"])
def test_calls_in_every_form(name, form):
    """OpenAI's arguments are JSON in a string; others leave the function out, or store all calls as a string."""
    arguments: dict[str, Any] = {} if form == "nothing" else {"at": "Oslo"}
    right = [user("Rain?"), calls(arguments), result("Wet."), says("Yes.")]
    (call,) = right[1]["tool_calls"]
    given: Any = {
        "text": [{**call, "function": {"name": "look", "arguments": '{"at": "Oslo"}'}}],
        "flat": [{"name": "look", "arguments": '{"at":"Oslo"}'}] if name != "deepseek" else [call["function"]],
        "list as text": json.dumps([call]),
        "nothing": [{**call, "function": {"name": "look", "arguments": "" if name != "deepseek" else {}}}],
    }[form]
    assert rendered(name, [right[0], says("", tool_calls=given), *right[2:]]) == rendered(name, right)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "look", "arguments": "at Oslo"}, "message 2 has the tool_calls .* the arguments of look .* not JSON"),
        ({"name": "look", "arguments": [1]}, r"the arguments of look are \[1\], not an object"),
        ({"arguments": {}}, "the function's name is None"),
        ("look", "'look' is not an object with a function"),
    ],
)
def test_calls_that_are_none(call, message):
    with pytest.raises(UserError, match=message):
        render_chat([user("Rain?"), says("", tool_calls=[call])], TOKENIZERS["named"])


@pytest.mark.parametrize("key", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_a_turn_of_weight_0_is_context(key):
    chat = [user("2?"), says("Five.") | key, user("Sure?"), says("No: two.", weight=1)]
    assert rendered("chatml", chat) == (["No: two.<|im_end|>"], [])
    assert rendered("qwen25", [*chat, user("Ok."), says("", weight=0)])[0] == ["No: two.<|im_end|>"]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (says("a", weight=0.5), r"message 2 \(assistant\) has the weight 0.5, not 0 or 1"),
        (says("a", train="no"), "has train 'no', not true or false"),
        (user("a") | {"weight": 1}, r"message 2 \(user\) has a weight of its own"),
        (says("a", function_call={"name": "f"}), "has a function_call: write tool_calls"),
        (user("a") | {"tool_calls": [1]}, "has tool_calls, which only an assistant's message has"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "has no content and tool_calls is empty"),
        (says("a", thinking="b", reasoning_content="c"), "has thoughts that are no string, or differ"),
        (user("a") | {"content": [{"type": "audio"}]}, "has the part .*audio.* one of text, image, thinking"),
        (user("a") | {"content": ["b"]}, "has the part 'b'"),
        (user("a") | {"content": [{"type": "text"}]}, "a part of type 'text' whose 'text' is None"),
        (user("a") | {"content": 3}, "has the content 3, not a string or a list of parts"),
    ],
)
def test_messages_that_are_none(message, complaint):
    with pytest.raises(UserError, match=complaint):
        render_chat([user("Hi?"), message], TOKENIZERS["chatml"])


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_by_any_of_their_names(name):
    chat = [user("3?"), says("Three.", **{name: "same"})]
    assert rendered("harmony", chat)[0] == [
        "<|channel|>analysis<|message|>same<|end|><|start|>assistant<|channel|>final<|message|>Three.<|return|>"
    ]


# ---- Templates that decide by words ----


def test_a_template_that_looks_at_names_is_proved_by_other_letters():
    template = NAMED.replace("'<call>' +", "('<python>' if call.function.name == 'look' else '<call>') +")
    TOKENIZERS["names"] = made(template, IM, eos="<|im_end|>")
    spans = ['<python>{"name": "look", "arguments": {"at": "Oslo"}}</call><|im_end|>', *WET]
    assert rendered("names", CALL) == (spans, [])


def test_a_template_that_looks_at_words_is_proved_by_the_ends_of_texts():
    template = TEMPLATES["chatml"].replace(
        "'<|im_end|>\\n'", "('!' if 'ell' in message.content else '') + '<|im_end|>\\n'"
    )
    TOKENIZERS["words"] = made(template, IM, eos="<|im_end|>")
    assert rendered("words", [user("Hi?"), says("Hello")]) == (["Hello!<|im_end|>"], [])


def test_a_template_that_writes_other_letters_is_refused():
    tokenizer = made(
        TEMPLATES["chatml"].replace("text(message.content)", "message.content | upper"), IM, eos="<|im_end|>"
    )
    with pytest.raises(Refused, match="writes other text around other words") as refused:
        render_chat(PLAIN, tokenizer)
    assert refused.value.reason == UNPROVED


def test_a_template_that_mixes_messages_is_refused():
    """The first letters of all messages, then the others."""
    template = (
        "{% for m in messages %}{{ m.content[0] }}{% endfor %}{% for m in messages %}{{ m.content[1:] }}{% endfor %}"
    )
    with pytest.raises(Refused, match=r"message 2 \(assistant\): the chat template mixes its text with that of others"):
        render_chat(PLAIN, made(template, ["</s>"], eos="</s>"))


@pytest.mark.parametrize("before", ["", "'Re: ' + "])
def test_a_template_that_repeats_a_question_in_the_answer_is_refused(before):
    repeated = f"({before}messages[loop.index0 - 1].content if loop.index0 % 2 else '') + text(message.content)"
    template = TEMPLATES["chatml"].replace("text(message.content)", repeated)
    with pytest.raises(Refused, match=r"message 1 would be trained: an assistant's turn holds its text too"):
        render_chat(PLAIN, made(template, IM, eos="<|im_end|>"))


def test_a_template_that_refuses_the_beginning_of_a_conversation():
    """What it writes after a turn that ends the conversation is unknown then: only known stop tokens end a turn."""
    refuses = "{%- if messages | length % 2 -%}{{- raise_exception('a question without an answer') -}}{%- endif -%}"
    tokenizer = made(refuses + TEMPLATES["chatml"], IM, eos="<|im_end|>")
    tokens, mask = render_chat(TURNS[1:], tokenizer)
    assert tokenizer.decode(tokens[mask]) == "Four.<|im_end|>Six.<|im_end|>"


def test_a_template_that_writes_no_empty_turn_trains_none():
    silent = "{%- for m in messages if m.role == 'user' or m.content | length > 1 -%}"
    tokenizer = made(silent + "{{- '[Q]' + m.content + '</s>' -}}{%- endfor -%}", ["</s>", "[Q]"], eos="</s>")
    rendered = render_chat(EMPTY, tokenizer)
    assert tokenizer.decode(rendered.tokens) == "[Q]Hi?</s>[Q]So?</s>[Q]Ok.</s>"
    assert tokenizer.decode(rendered.tokens[rendered.mask]) == "[Q]Ok.</s>"
    assert [note.rule for note in rendered.notes] == [EMPTY_TURN]


def test_text_that_is_written_otherwise_is_noted():
    template = TEMPLATES["chatml"].replace("text(message.content)", "message.content | replace('\"', '')")
    row = render_chat([user("Hi?"), says('Say "hi" now.')], made(template, IM, eos="<|im_end|>"))
    assert [(note.rule, note.text) for note in row.notes] == [(REWRITTEN, 'Say "hi" now.')]
    assert row.mask.any()


def test_generation_marks_decide():
    template = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|im_end|>\\n' -}}{%- endgeneration -%}
{%- else -%}{{- m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
    TOKENIZERS["marked"] = made(template, IM, eos="<|im_end|>")
    # The newline after the stop token is inside of the mark.
    assert rendered("marked", TURNS) == (["Four.<|im_end|>\n", "Six.<|im_end|>\n"], [])
    assert rendered("marked", EMPTY) == (["<|im_end|>\n", "Ok.<|im_end|>\n"], [])
    lighter = [TURNS[1], TURNS[2] | {"weight": 0}, *TURNS[3:]]
    assert rendered("marked", lighter) == (["Six.<|im_end|>\n"], [])
    around = template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    all_of_it = "{%- generation -%}" + around + "{%- endgeneration -%}"
    with pytest.raises(Refused, match="a generation mark of the chat template holds text that is not trained"):
        render_chat(PLAIN, made(all_of_it, IM, eos="<|im_end|>"))


def test_prompts_say_what_they_leave_out():
    row = render_prompt(THOUGHT[:3], TOKENIZERS["qwen3"])
    assert [note.rule for note in row.notes] == [THOUGHTS]
    assert not row.mask.any()
    with pytest.raises(Refused, match="developer"):
        render_prompt(DEVELOPER[:2], TOKENIZERS["deepseek"])


def test_letters_of_private_planes_are_letters():
    """Fonts put icons there; the code points that stand for letters are others."""
    said = "\U000f0101\U000f0102 ok \U0010fffd"
    tokenizer: Tokenizer = TOKENIZERS["chatml"]
    tokens, mask = render_chat([user("\U000f0001?"), says(said[:-2])], tokenizer)
    assert tokenizer.decode(tokens[mask]) == said[:-2] + "<|im_end|>"
