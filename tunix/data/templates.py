"""Chat templates for tokenizers that have none, and the marker tokens that each template needs.

They write the format that the families were trained on (Gemma's turns and Gemma 4's, Llama 3's headers, ChatML's
im_start) and no more: no default system prompt, no tools, no thinking blocks. A folder's own template takes precedence.
"""

from pathlib import Path
from typing import Literal

from tunix.errors import UserError, nearest

TemplateName = Literal["gemma", "gemma4", "llama3", "chatml"]

# Content is a string, or a list of {"type": "text", "text": ...} and {"type": "image"} parts.
_TEXT = r"""
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {{- 'PICTURE' if part.type == 'image' else part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""

_GEMMA = r"""
{{- bos_token -}}
{%- set lead = namespace(text='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- if not loop.first -%}
            {{- raise_exception('a system message can only be the first') -}}
        {%- endif -%}
        {%- set lead.text = text(message.content) | trim + '\n\n' -%}
    {%- else -%}
        {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
        {{- lead.text + text(message.content) | trim + '<end_of_turn>\n' -}}
        {%- set lead.text = '' -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\n' -}}
{%- endif -%}
"""

_GEMMA4 = r"""
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
    {{- text(message.content) | trim + '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\n' -}}
{%- endif -%}
"""

_LLAMA3 = r"""
{%- macro header(role) -%}
    {{- '<|start_header_id|>' + ('ipython' if role == 'tool' else role) + '<|end_header_id|>\n\n' -}}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
    {{- header(message.role) + text(message.content) | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- header('assistant') -}}
{%- endif -%}
"""

_CHATML = r"""
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' + text(message.content) + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""

_GEMMA_TEXT = _TEXT.replace("PICTURE", "<start_of_image>")
_QWEN_TEXT = _TEXT.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
TEMPLATES: dict[TemplateName, str] = {
    "gemma": (_GEMMA_TEXT + _GEMMA).strip(),
    "gemma4": (_GEMMA_TEXT + _GEMMA4).strip(),
    "llama3": (_GEMMA_TEXT + _LLAMA3).strip(),
    "chatml": (_QWEN_TEXT + _CHATML).strip(),
}

MARKERS: dict[TemplateName, tuple[str, ...]] = {
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "gemma4": ("<|turn>", "<turn|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
}
_GEMMA_MARKERS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_QWEN_MARKERS = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
}
PICTURE_MARKERS: dict[TemplateName, dict[str, str]] = {
    **dict.fromkeys(("gemma", "gemma4", "llama3"), _GEMMA_MARKERS),
    "chatml": _QWEN_MARKERS,
}
"""The tokens before a picture's, after them and for each of them, by transformers' names for them."""

END_OF_TURN = ("<end_of_turn>", "<turn|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|call|>", "<|tool_response>")
"""Tokens that end an assistant's turn in the families' formats, also one that calls a tool; a vocabulary has some of
them or none."""


def template_text(spec: str, key: str = "data.chat_template") -> str:
    """The Jinja source of the chat template that a key of the recipe names.

    Args:
        spec: `gemma`, `gemma4`, `llama3`, `chatml`, or a .jinja file.
        key: the recipe's key, for messages.

    Raises:
        UserError: there is no such name or file.
    """
    if spec in TEMPLATES:
        return TEMPLATES[spec]
    path = Path(spec).expanduser()
    if path.suffix != ".jinja":
        hint = nearest(spec, TEMPLATES)
        raise UserError(f"{key} is {spec!r}, not one of {', '.join(TEMPLATES)} or a .jinja file.{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{key}: there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{key}: {path} cannot be read: {reason}") from error
