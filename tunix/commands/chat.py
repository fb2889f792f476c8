"""`tunix chat`: a conversation on the terminal, or over a pipe, one line of input at a time.

With a chat template each line is a user's message, and all turns are rendered again for each answer. Without one the
lines and the answers are one continued text; where the model ends it, the next line starts another.
Answers go to stdout, everything else to stderr, so that `printf 'hello\\n' | tunix chat MODEL` gives the answers alone.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tunix.data.chat import Message, render_prompt
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError, nearest
from tunix.inference.model import InferenceModel, InferenceOptions, TextStream
from tunix.types import Request, Sampling

COMMANDS = ("/quit", "/reset")


def chat(options: InferenceOptions, *, sampling: Sampling, seed: int = 0) -> None:
    """Holds a conversation until `/quit` or the end of the input; answer i depends on (seed, i, token index).

    Raises:
        UserError: the model cannot be loaded, has no tokenizer, or a setting is invalid.
    """
    inference = InferenceModel(options)
    if inference.tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer: it cannot chat; tunix generate --input answers input_ids")
    sampling, write = inference.with_stop_ids(sampling), partial(print, end="", flush=True)
    conversation = Conversation(inference, inference.tokenizer, sampling, seed, write)
    # Loaded now, so that a mistake is reported and the wait is over before the first line.
    plain, _ = inference.plain_reason, inference.engine
    _print_status(f"{options.model}: /reset forgets what was said, /quit or Ctrl-D ends, Ctrl-C stops an answer")
    if plain is not None:
        _print_status(f"plain continuation: {plain}. Your lines and the answers are one text that goes on")
    while (line := _read()) is not None and line.strip() != "/quit":
        conversation.handle(line)
    if drafts := inference.engine.drafts:
        _print_status(f"{conversation.answers} answers{drafts}")


def _read() -> str | None:
    """Reads a line of the input; None at its end."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` its editing keys)

        prompt = "> "
    while True:
        try:
            line = input(prompt)
            line.encode()  # a POSIX locale admits bytes that are not text
            return line
        except EOFError:
            return None
        except KeyboardInterrupt:
            _print_status("\n/quit or Ctrl-D ends")
        except UnicodeError as error:
            raise UserError(f"the input is not UTF-8 text: {error}") from error


def _print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Conversation:
    """The turns so far, and the model that answers the next line."""

    inference: InferenceModel
    tokenizer: Tokenizer
    sampling: Sampling
    seed: int
    write: Callable[[str], None]
    """Receives the pieces of an answer."""
    turns: list[Message] = field(default_factory=list)
    """With a chat template, the turns so far."""
    text: list[int] = field(default_factory=list)
    """Without a chat template, the tokens of the text so far."""
    answers: int = 0
    """Number of answers so far, also before a reset: each has other random numbers."""

    def handle(self, line: str) -> None:
        """Handles a line of input: a command, an empty line, or a message to answer."""
        word = line.strip()
        if word == "/reset":
            self.turns, self.text = [], []
            _print_status("forgotten")
            return
        if re.fullmatch(r"/\w+", word):
            _print_status(f"{word} is no command; there are {', '.join(COMMANDS)}.{nearest(word, COMMANDS)}")
            return
        if not word:
            return
        turns: list[Message] = [*self.turns, {"role": "user", "content": line}]
        inference, tokenizer = self.inference, self.tokenizer
        if inference.plain_reason is None:
            system: list[Message] = []
            if inference.system is not None:
                system = [{"role": "system", "content": inference.system}]
            prompt = render_prompt([*system, *turns], tokenizer, **inference.template_kwargs).tokens
        elif self.text:
            prompt = np.array([*self.text, *tokenizer.encode_after(self.text, line)], np.int32)
        else:
            prompt = np.array(tokenizer.encode(line, bos=tokenizer.adds_bos), np.int32)
        if len(prompt) >= (limit := inference.limit):
            _print_status(f"all that was said has {len(prompt)} tokens, the model ends at {limit}: /reset forgets it")
            return
        stream = TextStream(tokenizer, self.sampling.stop_strings)
        request = Request(prompt, self.sampling, self.seed, self.answers)
        self.answers += 1
        try:
            inference.engine.run([request], on_tokens=lambda _, tokens: self.write(stream.feed(tokens)))
            self.write(stream.finish() + "\n")
        except KeyboardInterrupt:
            self.write("\n")
            _print_status("(stopped)")
        self.turns = [*turns, {"role": "assistant", "content": stream.text}]
        ended = bool(stream.tokens) and stream.tokens[-1] in self.sampling.stop_ids
        self.text = [] if ended else [*prompt.tolist(), *stream.tokens]
