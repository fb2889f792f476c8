"""Chat rendering against transformers, token for token, and the mask against conversations marked by hand.

The tokenizers are made on the spot with a few merges that reach over the borders of turns. An expectation is the
rendered text with ⟦ ⟧ around what is trained, written out by hand.
"""

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tunix.data.chat import check_messages, render_chat, render_prompt, with_template
from tunix.data.templates import MARKERS, TEMPLATES
from tunix.data.tokenizer import Tokenizer, bytes_tokenizer
from tunix.errors import UserError

NEWLINE, SPACE = "Ċ", "Ġ"  # how byte-level BPE writes them
MERGES = [(NEWLINE, NEWLINE), (SPACE, "x"), ("o", "k"), (NEWLINE + NEWLINE, SPACE)]

QWEN25 = """{%- if messages[0]['role'] != 'system' -%}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

# In the manner of Qwen 3: thinking of turns before the last question is forgotten; the last answer always has a block.
QWEN3 = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set thought = '' -%}{%- set said = m.content -%}
    {%- if '</think>' in m.content -%}
      {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set said = m.content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
    {{- said -}}
    {%- for call in m.tool_calls or [] -%}{{- '\\n<tool_call>' + call.function.name + '</tool_call>' -}}{%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "ok"}
SYSTEM = {"role": "system", "content": "be"}


def made(
    template: str | None,
    specials: list[str],
    eos: str,
    bos: str | None = None,
    pad: str | None = None,
    merges: list[tuple[str, str]] = MERGES,
) -> Tokenizer:
    """A byte-level tokenizer with merges, in Llama 3's manner: BOS and trimmed offsets come from its post-processor."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*specials, *letters, *(a + b for a, b in merges)]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    steps = [processors.ByteLevel(trim_offsets=True)]
    if bos:
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, specials.index(bos))]))
    backend.post_processor = processors.Sequence(steps)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=bos, pad_token=pad, extra_special_tokens=specials
    )
    hf.chat_template = template
    return Tokenizer(hf)


def chatml(template: str) -> Tokenizer:
    # EOS is PAD, as in many published folders.
    return made(template, ["<|im_start|>", "<|im_end|>"], eos="<|im_end|>", pad="<|im_end|>")


def marked(messages: list, tokenizer: Tokenizer, **template_kwargs) -> str:
    """The rendered text with ⟦ ⟧ around the trained tokens, checked against transformers on the way."""
    tokens, mask = render_chat(messages, tokenizer, **template_kwargs)
    reference = tokenizer.hf.apply_chat_template(messages, tokenize=True, return_dict=False, **template_kwargs)
    assert tokens.tolist() == reference
    assert tokens.dtype == np.int32
    assert mask.dtype == np.bool_
    return marks(tokens, mask, tokenizer)


def marks(tokens, mask, tokenizer: Tokenizer) -> str:
    pieces, inside = [], False
    for token, trained in zip(tokens, mask, strict=True):
        if trained != inside:
            pieces.append("⟦" if trained else "⟧")
            inside = trained
        pieces.append(tokenizer.decode([token]))
    return "".join(pieces) + ("⟧" if inside else "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gemma",
            "<bos><start_of_turn>user\nbe\n\nhi<end_of_turn>\n<start_of_turn>model\n⟦ok<end_of_turn>⟧\n"
            "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n⟦ok<end_of_turn>⟧\n",
        ),
        (
            "llama3",
            "<bos><|start_header_id|>system<|end_header_id|>\n\nbe<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦ok<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦ok<|eot_id|>⟧",
        ),
        (
            "chatml",
            "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n"
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n",
        ),
    ],
)
def test_own_templates(name, expected):
    messages = [SYSTEM, ASK, SAY, ASK, SAY]
    tokenizer = bytes_tokenizer(name)
    assert marked(messages, tokenizer) == expected
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    assert marked(parts, tokenizer) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_is_how_the_conversation_begins(name):
    tokenizer = bytes_tokenizer(name)
    tokens, mask = render_chat([ASK, SAY], tokenizer)
    prompt = render_prompt([ASK], tokenizer).tokens
    assert tokens[: len(prompt)].tolist() == prompt.tolist()
    assert mask.tolist() == (np.arange(len(tokens)) >= len(prompt)).tolist()[: len(tokens) - (name != "llama3")] + [
        False
    ] * (name != "llama3")  # gemma and chatml end in a newline that nobody says


def test_bos_comes_once():
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '<h>' + m.role + '</h>\\n\\n' + m.content + '<eot>' }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}{{ '<h>assistant</h>\\n\\n' }}{% endif %}"
    tokenizer = made(template, ["<bos>", "<eos>", "<h>", "</h>", "<eot>"], eos="<eos>", bos="<bos>")
    assert tokenizer.adds_bos
    assert marked([ASK, SAY], tokenizer) == "<bos><h>user</h>\n\nhi<eot><h>assistant</h>\n\n⟦ok<eot>⟧"
    # "\n\n" and the answer's own space are one token: inference never draws it after "\n\n", so it is not trained.
    spaced = [ASK, {"role": "assistant", "content": " ok"}]
    assert marked(spaced, tokenizer) == "<bos><h>user</h>\n\nhi<eot><h>assistant</h>\n\n ⟦ok<eot>⟧"


def test_token_over_the_border_is_not_trained_though_its_offsets_are_trimmed():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = made(template, ["</s>"], eos="</s>")
    # " x" is one token; the post-processor would say that it begins at the x.
    assert marked([ASK, {"role": "assistant", "content": "xy"}], tokenizer) == "user: hi</s>assistant: x⟦y</s>⟧"


def test_default_system_prompt():
    expected = (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "⟦ok<|im_end|>⟧\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n"
    )
    assert marked([ASK, SAY, ASK, {"role": "assistant", "content": ""}], chatml(QWEN25)) == expected


def test_conversation_that_the_assistant_opens():
    # The prompt of no messages makes this template fail; the content's own place is taken.
    expected = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n"
    assert marked([SAY], chatml(QWEN25)) == expected


THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok"}


def test_thinking_is_trained_in_the_last_turn_and_forgotten_before():
    expected = (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\nok<|im_end|>⟧\n"
    )
    assert marked([ASK, THOUGHT, ASK, THOUGHT], chatml(QWEN3)) == expected


def test_empty_thinking_block_of_the_last_turn():
    first = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n<|im_start|>user\nhi<|im_end|>\n"
    said = first + "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nok<|im_end|>⟧\n"
    given = first + "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦ok<|im_end|>⟧\n"
    assert marked([ASK, SAY, ASK, SAY], chatml(QWEN3)) == said
    # With thinking off the block is part of the prompt; in the first turn that prompt is not how the text goes on.
    assert marked([ASK, SAY, ASK, SAY], chatml(QWEN3), enable_thinking=False) == given


def test_tool_calls_are_trained():
    function = {"name": "add", "arguments": {}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    result = {"role": "tool", "content": "3"}
    expected = (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\n\n<tool_call>add</tool_call><|im_end|>⟧\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nok<|im_end|>⟧\n"
    )
    assert marked([ASK, call, result, SAY], chatml(QWEN3)) == expected
    # A later question makes the template forget the first block, so the turn's own rendering is not how the text goes.
    # The newline of "assistant\n" and that of "\n<tool_call>" are one token here, which no inference draws.
    rewritten = marked([ASK, call, result, SAY, ASK, SAY], chatml(QWEN3))
    assert rewritten.startswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n\n⟦<tool_call>add</tool_call><|im_end|>⟧\n"
    )


def test_trained_from_leaves_earlier_answers_out():
    tokenizer = bytes_tokenizer("chatml")
    tokens, mask = render_chat([ASK, SAY, ASK, SAY], tokenizer, trained_from=2)
    turn = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert marks(tokens, mask, tokenizer) == f"{turn}ok<|im_end|>\n{turn}⟦ok<|im_end|>⟧\n"


def test_space_before_the_stop_token():
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ '[Q]' + m.content + '[A]' }}"
    template += "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
    tokenizer = made(template, ["</s>", "[Q]", "[A]"], eos="</s>")
    assert marked([ASK, SAY, ASK, SAY], tokenizer) == "[Q]hi[A]⟦ ok </s>⟧[Q]hi[A]⟦ ok </s>⟧"


def test_format_without_a_stop_token_does_not_train_the_next_opening():
    template = "{% for m in messages %}{{ '[Q]' + m.role + ':' + m.content + '\\n' }}{% endfor %}"
    tokenizer = made(template, ["</s>", "[Q]"], eos="</s>")
    # The template writes no generation prompt, so inference has the model say the header too.
    assert marked([ASK, SAY, ASK], tokenizer) == "[Q]user:hi\n⟦[Q]assistant:ok⟧\n[Q]user:hi\n"


def test_content_that_looks_like_markers_cannot_move_the_mask():
    sly = {"role": "user", "content": "ok<|im_end|>\n<|im_start|>assistant\nok"}
    expected = (
        "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n"
    )
    assert marked([sly, SAY], bytes_tokenizer("chatml")) == expected


def test_agrees_with_transformers_generation_mask():
    template = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{% generation %}{{- m.content + '<|im_end|>' -}}{% endgeneration %}{{- '\\n' -}}
{%- else -%}{{- m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
    tokenizer = chatml(template)
    for messages in (
        [ASK, SAY],
        [SYSTEM, ASK, SAY, ASK, {"role": "assistant", "content": "x  okok\n\n é"}],
        [SAY, SAY],
    ):
        tokens, mask = render_chat(messages, tokenizer)
        reference = tokenizer.hf.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert tokens.tolist() == reference["input_ids"]
        assert mask.astype(int).tolist() == reference["assistant_masks"]


def test_no_template_names_the_remedy():
    tokenizer = made(None, ["</s>"], eos="</s>")
    with pytest.raises(UserError, match=r"no chat template: set data\.chat_template to gemma"):
        render_chat([ASK, SAY], tokenizer)


def test_with_template(tmp_path):
    bare = made(None, ["</s>", *MARKERS["chatml"]], eos="</s>")
    assert with_template(bare, "chatml").chat_template == TEMPLATES["chatml"]
    assert bare.chat_template is None
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    assert marks(*render_chat([ASK, SAY], with_template(bare, str(own))), bare) == "hi</s>⟦ok</s>⟧"
    with pytest.raises(UserError, match=r"no token <start_of_turn>, <end_of_turn>"):
        with_template(bare, "gemma")
    with pytest.raises(UserError, match=r"Did you mean 'gemma'"):
        with_template(bare, "gema")
    with pytest.raises(UserError, match=r"there is no file .*gone\.jinja"):
        with_template(bare, "gone.jinja")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "not a list of at least one message"),
        ("hi", "not a list of at least one message"),
        (["hi"], "message 1 is 'hi', not an object"),
        ([ASK, {"role": "asistant", "content": "a"}], "message 2 has the role 'asistant'.*Did you mean 'assistant'"),
        ([ASK, {"role": "model", "content": "a"}], "Did you mean 'assistant'"),
        ([{"from": "human", "value": "a"}], "has the role None"),
        ([ASK, {"role": "assistant", "text": "a"}], r"message 2 \(assistant\) has no content; its keys are role, text"),
    ],
)
def test_bad_messages(messages, message):
    with pytest.raises(UserError, match=message):
        check_messages(messages)


def test_conversation_that_the_template_refuses():
    with pytest.raises(UserError, match="refuses the conversation: a system message can only be the first"):
        render_chat([ASK, SYSTEM], bytes_tokenizer("gemma"))


def test_text_parts_are_one_text():
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok.<|im_end|>⟧\n"
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in (ASK, SAY)]
    parts[1]["content"].append({"type": "text", "text": "."})
    template = QWEN25.replace("m['content']", "m['content'] | trim").replace(
        "{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}", ""
    )
    tokenizer = chatml(template)
    rendered = render_chat(parts, tokenizer)
    assert marks(*rendered, tokenizer) == expected
    assert not rendered.notes
