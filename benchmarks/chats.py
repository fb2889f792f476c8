"""Rows per second of rendering chats, beside transformers' own rendering of the same text without a mask.

    python -m benchmarks.chats

`render_chat` proves whose each letter is, and finds the turns' bounds; `apply_chat_template` with `tokenize=True` gives
the tokens alone. Both are timed in turns by the processor time of this process: medians of `ROUNDS`, and their ratio.
Chats without tools are compared with the outline of their shape; chats with tools are rendered several times.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from tunix.data.chat import render_chat
from tunix.data.templates import TEMPLATES
from tunix.data.tokenizer import Tokenizer, bpe_tokenizer

CHATS, ROUNDS = 200, 9
WORDS = [f"{a}{b}" for a in ("th", "w", "s", "fr") for b in ("e", "as", "is", "om", "en", "ing")]
# In the manner of Qwen 3: calls and thoughts, of which those before the last question are forgotten.
TEMPLATE = (
    TEMPLATES["chatml"]
    .replace(
        "text(message.content)",
        "(text(message.content).split('</think>')[-1] if loop.index < messages | length else text(message.content))",
    )
    .replace(
        "+ '<|im_end|>",
        "-}}{%- for call in message.tool_calls or [] -%}{{- '<call>' + call.function | tojson + '</call>' -}}"
        "{%- endfor -%}{{- '<|im_end|>",
    )
)


def chats(kind: str) -> list[list[dict[str, Any]]]:
    """Conversations of one to three questions; the same in every call."""
    rng = random.Random(0)

    def said(number: int) -> str:
        return " ".join(rng.choices(WORDS, k=number))

    conversations = []
    for _ in range(CHATS):
        messages: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": said(30)})
            if kind == "tools":
                call = {"type": "function", "function": {"name": "look", "arguments": {"at": said(2)}}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "content": said(20)})
            thought = f"<think>\n{said(60)}\n</think>\n\n" if kind == "thoughts" else ""
            messages.append({"role": "assistant", "content": thought + said(80)})
        conversations.append(messages)
    return conversations


def seconds(render: Callable[[list[dict[str, Any]]], object], conversations: list[list[dict[str, Any]]]) -> float:
    """Processor time of rendering all conversations."""
    begin = time.process_time()
    for messages in conversations:
        render(messages)
    return time.process_time() - begin


def main() -> None:
    """Prints a line for each kind of chat."""
    made: Tokenizer = bpe_tokenizer([" ".join(WORDS) * 20], 600, "chatml").replace_template(TEMPLATE)
    print(f"{'chats':<10}{'transformers':>14}{'tunix':>10}{'ratio':>8}   rows per second")
    for kind in ("plain", "thoughts", "tools"):
        conversations = chats(kind)

        def ours(messages: list[dict[str, Any]]) -> object:
            return render_chat(messages, made)

        def theirs(messages: list[dict[str, Any]]) -> object:
            return made.hf.apply_chat_template(messages, tokenize=True, return_dict=False)

        rounds = [(seconds(theirs, conversations), seconds(ours, conversations)) for _ in range(ROUNDS)]
        plain, masked = (CHATS / statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{kind:<10}{plain:>14,.0f}{masked:>10,.0f}{masked / plain:>8.2f}")


if __name__ == "__main__":
    main()
