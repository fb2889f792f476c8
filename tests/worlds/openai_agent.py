"""OpenAI's own client in a loop with a tool, as its documentation writes one; exits with 0 where the answer is 42."""

import json
import os
import sys
from typing import Any

from openai import OpenAI

client, model = OpenAI(), os.environ["OPENAI_MODEL"]  # the address and the key are the environment's
tools: Any = [
    {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Twice a number.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
messages: Any = [{"role": "user", "content": sys.argv[1]}]
while True:
    message = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        doubled = str(2 * json.loads(call.function.arguments)["a"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": doubled})
# The same question again, as a stream: another transcript.
stream = client.chat.completions.create(model=model, messages=messages[:1], tools=tools, stream=True)
assert list(stream)[-1].choices[0].finish_reason == "tool_calls"
sys.exit(message.content != "It is 42.")
