"""`tunix chat`: a conversation on the terminal, or over a pipe, one line of input at a time.

With a chat template each line is a user's message, and all that was said is rendered anew for each answer. Without one
the lines and the answers are one text that goes on; where the model ends it, the next line begins another.
Answers go to stdout, everything else to stderr, so that `printf 'hello\\n' | tunix chat MODEL` gives the answers alone.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tunix.data.chat import Message, render_prompt
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError, nearest
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.inference.text_stream import TextStream
from tunix.rollout.engine.request import Request
from tunix.types import Sampling

COMMANDS = ("/quit", "/reset")


def chat(asked: InferenceOptions, *, sampling: Sampling, seed: int = 0) -> None:
    """Talks until `/quit` or the end of the input.

    Args:
        asked: the model.
        sampling: how tokens are drawn; the model's own stop ids are added.
        seed: of the draws; answer i draws by (seed, i, token index).

    Raises:
        UserError: the model is not to be had, has no tokenizer, or a setting means nothing.
    """
    speaker = InferenceModel(asked)
    if speaker.tokenizer is None:
        raise UserError(f"{asked.model} has no tokenizer: it cannot chat; tunix generate --input answers input_ids")
    talk = Talk(speaker, speaker.tokenizer, speaker.stopping(sampling), seed)
    # Found out and read now, so that neither a mistake nor the wait comes behind the first line.
    plain, _ = speaker.plain, speaker.engine
    _tell(f"{asked.model}: /reset forgets what was said, /quit or Ctrl-D ends, Ctrl-C stops an answer")
    if plain is not None:
        _tell(f"plain continuation: {plain}. Your lines and the answers are one text that goes on")
    while (line := _read()) is not None and line.strip() != "/quit":
        talk.hear(line)


def _read() -> str | None:
    """A line of the input; None at its end."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` its editing keys)

        prompt = "> "
    while True:
        try:
            line = input(prompt)
            line.encode()  # a POSIX locale lets bytes through that are no text
            return line
        except EOFError:
            return None
        except KeyboardInterrupt:
            _tell("\n/quit or Ctrl-D ends")
        except UnicodeError as error:
            raise UserError(f"the input is not UTF-8 text: {error}") from error


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(text: str) -> None:
    print(text, end="", flush=True)


@dataclass
class Talk:
    """What was said so far, and the next answer."""

    speaker: InferenceModel
    tokenizer: Tokenizer
    sampling: Sampling
    seed: int
    write: Callable[[str], None] = _write
    """Where the pieces of an answer go."""
    said: list[Message] = field(default_factory=list)
    """With a template: the turns."""
    text: list[int] = field(default_factory=list)
    """Without: the tokens of the text."""
    answers: int = 0
    """Given so far, also before a reset: each draws anew."""

    def hear(self, line: str) -> None:
        """A line of the person: a command, nothing, or what is to be answered."""
        word = line.strip()
        if word == "/reset":
            self.said, self.text = [], []
            _tell("forgotten")
        elif re.fullmatch(r"/\w+", word):
            _tell(f"{word} is no command; there are {', '.join(COMMANDS)}.{nearest(word, COMMANDS)}")
        elif word:
            self._answer(line)

    def _answer(self, line: str) -> None:
        said: list[Message] = [*self.said, {"role": "user", "content": line}]
        prompt = self._rendered(said) if self.speaker.plain is None else self._continued(line)
        if len(prompt) >= self.speaker.limit:
            _tell(
                f"all that was said has {len(prompt)} tokens, the model ends at {self.speaker.limit}: /reset forgets it"
            )
            return
        stream = TextStream(self.tokenizer, self.sampling.stop_strings)
        request = Request(prompt, self.sampling, self.seed, self.answers)
        self.answers += 1
        try:
            self.speaker.engine.run([request], on_tokens=lambda _, tokens: self.write(stream.feed(tokens)))
            self.write(stream.finish() + "\n")
        except KeyboardInterrupt:
            self.write("\n")
            _tell("(stopped)")
        self.said = [*said, {"role": "assistant", "content": stream.text}]
        ended = bool(stream.tokens) and stream.tokens[-1] in self.sampling.stop_ids
        self.text = [] if ended else [*prompt.tolist(), *stream.tokens]

    def _rendered(self, said: list[Message]) -> np.ndarray:
        system: list[Message] = []
        if self.speaker.system is not None:
            system = [{"role": "system", "content": self.speaker.system}]
        return render_prompt([*system, *said], self.tokenizer, **self.speaker.template_kwargs)

    def _continued(self, line: str) -> np.ndarray:
        bos = not self.text and self.tokenizer.adds_bos
        return np.array([*self.text, *self.tokenizer.encode(line, bos=bos)], np.int32)
