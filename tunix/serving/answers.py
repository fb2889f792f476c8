"""What is answered: a whole object, or the chunks of a stream, in the forms of OpenAI with vLLM's additions.

An `Answer` knows the body and the prompt of a request, and makes of completions what its protocol says. A `Reader`
follows one choice as its completion grows; a whole answer is read in one go.

Axes: T time, A alternatives.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np

from tunix.data.tokenizer import Tokenizer
from tunix.data.tool_calls import MARKUPS, MarkupName, typed
from tunix.inference.model import TextStream
from tunix.rollout.servers.protocol import FIELD, ID, IMPOSSIBLE, written_experts
from tunix.serving.bodies import ChatBody, CompletionBody, GenerateBody
from tunix.types import Completion

Body = TypeVar("Body", CompletionBody, ChatBody, GenerateBody)


class Reader:
    """One choice, as it grows."""

    def __init__(self, tokenizer: Tokenizer | None, body: CompletionBody | ChatBody):
        """Nothing of it has been read; without a tokenizer there is no text."""
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        self._includes, self._ids = body.include_stop_str_in_output, 0
        self._text = tokenizer and TextStream(
            tokenizer, stops, skip_special=body.skip_special_tokens, includes=self._includes
        )

    def read(self, completion: Completion, *, ended: bool) -> tuple[str, slice]:
        """What is new in a completion, which will not grow any more where it has ended: characters that no later token
        changes, e.g. ` world`, and tokens."""
        start, self._ids = self._ids, len(completion.tokens)
        if self._text is None:
            return "", slice(start, self._ids)
        # The token that ends a completion is none of its text.
        stopped = ended and completion.finish == "stop" and completion.tokens[-1] in completion.sampling.stop_ids
        text = self._text.feed(completion.tokens[start : self._ids - (stopped and not self._includes)])
        return text + (self._text.finish() if ended else ""), slice(start, self._ids)


class Answer(ABC, Generic[Body]):
    """The answers to one request."""

    object: str
    """The name of a whole answer's form."""
    chunk: str
    """The name of a chunk's form."""
    prefix: str
    """How identities of answers begin."""

    def __init__(self, body: Body, prompt: np.ndarray, tokenizer: Tokenizer | None):
        """An answer to a body whose prompt has these tokens `[T]`."""
        self.body, self.prompt, self.tokenizer = body, prompt, tokenizer
        self._head = {"id": f"{self.prefix}{body.request_id}", "created": int(time.time()), "model": body.model}

    @abstractmethod
    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer of all choices, which have ended."""

    def first(self, index: int) -> dict[str, Any] | None:
        """What a stream begins with, for a choice; None for nothing."""

    def next(self, index: int, completion: Completion, *, ended: bool) -> dict[str, Any] | None:
        """The next chunk of a choice; None where nothing is new."""

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """How many tokens the request took."""
        asked, sampled = len(self.prompt), sum(len(completion.tokens) for completion in completions)
        return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}

    def last(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The chunk with the usage, at the end of a stream."""
        return {**self._head, "object": self.chunk, "choices": [], "usage": self.usage(completions)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk, "choices": [choice]}

    def _names(self, tokens: np.ndarray, *, as_ids: bool) -> list[str]:
        """How tokens are written: their text, or their ids, so that no text can be taken for one."""
        tokenizer = None if as_ids else self.tokenizer
        return [f"{ID}{i}" if tokenizer is None else tokenizer.decode([i]) for i in tokens.tolist()]


class CompletionAnswer(Answer[CompletionBody]):
    """The answers to a completion of text or tokens."""

    object, chunk, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, body: CompletionBody, prompts: Sequence[np.ndarray], tokenizer: Tokenizer | None):
        """Choices `i n` to `i n + n - 1` are those of prompt i."""
        super().__init__(body, np.concatenate(prompts), tokenizer)
        self._prompts = [prompt for prompt in prompts for _ in range(body.n)]
        self._readers = [Reader(tokenizer, body) for _ in self._prompts]
        echoes = [""] * len(prompts)
        if body.echo and tokenizer is not None:
            pairs = zip(body.prompt, prompts, strict=True)
            echoes = [text if isinstance(text, str) else tokenizer.decode(ids) for text, ids in pairs]
        self._echoes = [echo for echo in echoes for _ in range(body.n)]
        """The text of each choice's prompt, where it is to be repeated."""
        self._offsets = list(map(len, self._echoes))
        """Characters before the next token of each choice."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(completions):
            choice = self._choice(index, completion, ended=True)
            if self.body.return_token_ids and completion.experts is not None:
                choice[FIELD] = written_experts(completion.experts[:-1])
            if self.body.logprobs is not None and (scores := completion.prompt_scores) is not None and self.body.echo:
                asked = self._logprobs(self._prompts[index], scores.logprobs, (scores.top_ids, scores.top_logprobs), 0)
                asked["token_logprobs"][0] = asked["top_logprobs"][0] = None  # nothing predicts the first token
                choice["logprobs"] = {name: values + choice["logprobs"][name] for name, values in asked.items()}
            choices.append({**choice, "text": self._echoes[index] + choice["text"], **self._prompt_ids(index)})
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage(completions)}

    def first(self, index: int) -> dict[str, Any] | None:
        echo, ids = self._echoes[index], self._prompt_ids(index)
        if not echo and not ids:
            return None
        return self._chunk({"index": index, "text": echo, "logprobs": None, "finish_reason": None} | ids)

    def next(self, index: int, completion: Completion, *, ended: bool) -> dict[str, Any] | None:
        return self._chunk(self._choice(index, completion, ended=ended))

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[index].tolist()} if self.body.return_token_ids else {}

    def _choice(self, index: int, completion: Completion, *, ended: bool) -> dict[str, Any]:
        """What is new of a choice."""
        text, new = self._readers[index].read(completion, ended=ended)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self.body.logprobs is not None:
            top = completion.top and tuple(x[new] for x in completion.top)
            listed = self._logprobs(completion.tokens[new], completion.logprobs[new], top, self._offsets[index])
            choice["logprobs"], self._offsets[index] = listed, self._offsets[index] + sum(map(len, listed["tokens"]))
        choice["finish_reason"] = completion.finish if ended else None
        if self.body.return_token_ids:
            choice["token_ids"] = completion.tokens[new].tolist()
        return choice

    def _logprobs(
        self, tokens: np.ndarray, logprobs: np.ndarray, top: Sequence[np.ndarray] | None, offset: int
    ) -> dict[str, list[Any]]:
        """What is said of tokens `[T]` that begin after so many characters; `top` are ids and log-probs `[T A]`."""
        as_ids = self.body.return_tokens_as_token_ids
        names, values = self._names(tokens, as_ids=as_ids), logprobs.tolist()
        by_name = [{name: value} for name, value in zip(names, values, strict=True)]
        for listed, ids, likely in zip(by_name, top[0], top[1], strict=True) if top is not None else ():
            listed |= zip(self._names(ids, as_ids=as_ids), np.maximum(likely, IMPOSSIBLE).tolist(), strict=True)
        offsets = list(accumulate(map(len, names), initial=offset))[:-1]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": by_name, "text_offset": offsets}


class ChatAnswer(Answer[ChatBody]):
    """The answers to a conversation. Where there are tools a turn is read as a whole, in the markup of the family."""

    object, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self, body: ChatBody, prompt: np.ndarray, tokenizer: Tokenizer, markup: MarkupName | None, begun: str = ""
    ):
        """Calls of tools are looked for in a markup; None where there is no tool to call. A prompt may end with the
        beginning of a call, which belongs to the answer."""
        super().__init__(body, prompt, tokenizer)
        self._markup: MarkupName | None = markup
        self._begun = begun
        reads = body if markup is None else body.model_copy(update={"skip_special_tokens": False})
        self._readers = [Reader(tokenizer, reads) for _ in range(body.n)]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(completions):
            text, _ = self._readers[index].read(completion, ended=True)
            message, finish = self._message(text, completion)
            choice = {"index": index, "message": {"role": "assistant", "content": None, **message}}
            choice |= self._told(completion, slice(None)) | {"finish_reason": finish}
            choices.append(choice)
        ids = {"prompt_token_ids": self.prompt.tolist()} if self.body.return_token_ids else {}
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage(completions), **ids}

    def first(self, index: int) -> dict[str, Any] | None:
        ids = {"prompt_token_ids": self.prompt.tolist()} if self.body.return_token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}) | ids

    def next(self, index: int, completion: Completion, *, ended: bool) -> dict[str, Any] | None:
        if self._markup is not None and not ended:
            return None  # a call is known when it is whole
        text, new = self._readers[index].read(completion, ended=ended)
        delta: dict[str, Any] = {"content": text}
        finish: str | None = completion.finish if ended else None
        if self._markup is not None:
            delta, finish = self._message(text, completion)
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
        return self._chunk({"index": index, "delta": delta, **self._told(completion, new), "finish_reason": finish})

    def _message(self, text: str, completion: Completion) -> tuple[dict[str, Any], str]:
        """A turn as the assistant's message, and why it ended. Calls that cannot be read are text, as are others."""
        if self._markup is None:
            return {"content": text}, completion.finish
        turn = MARKUPS[self._markup].parse(self._begun + text)
        if not turn.calls or any(call.fault for call in turn.calls):
            assert self.tokenizer is not None
            skipped, _ = Reader(self.tokenizer, self.body).read(completion, ended=True)
            return {"content": self._begun + skipped}, completion.finish
        tools = {tool.function.name: tool.function.model_dump() for tool in self.body.tools}
        calls = []
        for number, call in enumerate(turn.calls):
            arguments = dict(call.arguments)
            if MARKUPS[self._markup].as_text and call.name in tools:
                arguments = typed(arguments, tools[call.name])
            function = {"name": call.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            identity = f"call_{self.body.request_id}_{number}"
            calls.append({"id": identity, "type": "function", "function": function})
        thought = {"reasoning_content": turn.thought} if turn.thought else {}
        return {"content": turn.content or None, **thought, "tool_calls": calls}, "tool_calls"

    def _told(self, completion: Completion, new: slice) -> dict[str, Any]:
        """What a choice has beside its message."""
        choice: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            choice["logprobs"] = {"content": self._logprobs(completion, new), "refusal": None}
        if self.body.return_token_ids:
            choice["token_ids"] = completion.tokens[new].tolist()
        return choice

    def _logprobs(self, completion: Completion, new: slice) -> list[dict[str, Any]]:
        def listed(tokens: np.ndarray, logprobs: np.ndarray) -> list[dict[str, Any]]:
            names = self._names(tokens, as_ids=self.body.return_tokens_as_token_ids)
            return [
                {"token": name, "logprob": value, "bytes": list(name.encode(errors="replace"))}
                for name, value in zip(names, np.maximum(logprobs, IMPOSSIBLE).tolist(), strict=True)
            ]

        content = listed(completion.tokens[new], completion.logprobs[new])
        for at, entry in enumerate(content, start=new.start or 0):
            entry["top_logprobs"] = [] if completion.top is None else listed(*(x[at] for x in completion.top))
        return content


class GenerateAnswer(Answer[GenerateBody]):
    """The answers to token ids: ids, with a log-prob each."""

    object, chunk, prefix = "generate", "generate", ""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(completions):
            names, values = self._names(completion.tokens, as_ids=True), completion.logprobs.tolist()
            content = [{"token": name, "logprob": x} for name, x in zip(names, values, strict=True)]
            if completion.top is not None:
                for entry, ids, likely in zip(content, *completion.top, strict=True):
                    named = zip(self._names(ids, as_ids=True), np.maximum(likely, IMPOSSIBLE).tolist(), strict=True)
                    entry["top_logprobs"] = [{"token": name, "logprob": x} for name, x in named]
            logprobs = None if self.body.sampling_params.logprobs is None else {"content": content}
            choice = {"index": index, "token_ids": completion.tokens.tolist(), "logprobs": logprobs}
            choices.append(choice | {"finish_reason": completion.finish})
        usage = self.usage(completions)
        return {"request_id": self.body.request_id, "model": self.body.model, "choices": choices, "usage": usage}
