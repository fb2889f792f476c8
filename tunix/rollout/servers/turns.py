"""One completion as it grows: what is asked next, and what was sampled and observed so far.

Axes: T time, A alternatives, L layers, k chosen experts of a token.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tunix.rollout.engine.experts import UNKNOWN, Known, Recorded, of_sequence
from tunix.rollout.engine.request import Decode, StopText
from tunix.rollout.servers.protocol import seed_of, settings
from tunix.rollout.servers.types import Answer, Ask, Expected
from tunix.types import Begun, Completion, Sampling


class Turns:
    """The turns of one completion."""

    def __init__(self, prompt: np.ndarray, sampling: Sampling, begun: Begun, length: int, decode: Decode | None):
        """A request at its beginning, or where an earlier call has paused it.

        Args:
            prompt: `[T]` token ids.
            sampling: how its tokens are sampled.
            begun: its seed and number, and what it has.
            length: tokens of prompt and completion at most.
            decode: token ids -> text, in which stop strings are found.
        """
        self._prompt, self._sampling, self._begun, self._length = prompt, sampling, begun, length
        n, before = sampling.top_logprobs, begun.so_far
        self._stop_text = StopText(sampling.stop_strings, decode) if sampling.stop_strings and decode else None
        self._tokens, self._logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self._versions = np.zeros(0, np.int32)
        self._top = [(np.zeros((0, n), np.int32), np.zeros((0, n), np.float32))]
        self._turns: list[tuple[int, int]] = [(0, 0)]
        self._experts: list[Known] = []
        """What is known of the experts of prompt and tokens, from which a token keeps what was recorded first."""
        self.finish: Literal["stop", "length", "paused"] = "paused"
        if before is not None and len(before.tokens):
            self._tokens, self._logprobs, self._versions = before.tokens, before.logprobs, before.versions
            self._turns = list(before.turns)
            self._top += [] if before.top is None else [before.top]
            self._record(before.experts)

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        room = self._length - len(self._prompt) - len(self._tokens)
        return min(self._sampling.max_tokens - self._drawn, room)

    def ask(self, identity: str, expected: Expected) -> Ask:
        """The request for the rest of the turn.

        Args:
            identity: of the call and the completion.
            expected: of the servers.
        """
        seed = seed_of(self._begun.seed, self._begun.index, len(self._tokens))
        prompt = (*self._prompt.tolist(), *self._tokens.tolist())
        what = settings(self._sampling, self.left, seed)
        return Ask(f"{identity}-{len(self._tokens)}", prompt, what, expected.vocab_size, expected.routing)

    def take(self, answer: Answer, version: int) -> None:
        """Appends what a server sampled, up to the first token that completes a stop string.

        Args:
            answer: of the server.
            version: of its weights.
        """
        start, stopped = self._turns[-1][0], answer.stopped
        turn = np.concatenate([self._tokens[start:], answer.tokens])
        kept = len(answer.tokens)
        if self._stop_text is not None and (end := self._stop_text.find(turn, kept)) is not None:
            kept, stopped = kept - (len(turn) - end), True
        self._append(answer.tokens[:kept], answer.logprobs[:kept], version)
        self._record(answer.experts)
        if answer.top is not None:
            self._top.append((answer.top[0][:kept], answer.top[1][:kept]))
        self._turns[-1] = (start, len(self._tokens))
        self.finish = "stop" if stopped else "length"

    def observe(self, observation: Sequence[int] | np.ndarray, version: int) -> bool:
        """Appends what an environment wrote and opens the next turn; False, and nothing, where nothing could follow.

        Args:
            observation: `[T]` token ids.
            version: of the weights at the time.
        """
        new = np.asarray(observation, np.int32)
        room = self._length - len(self._prompt) - len(self._tokens) - len(new)
        if min(self._sampling.max_tokens - self._drawn, room) <= 0:
            self.finish = "length"
            return False
        n = self._sampling.top_logprobs
        self._append(new, np.zeros(len(new), np.float32), version)
        self._top.append((np.zeros((len(new), n), np.int32), np.zeros((len(new), n), np.float32)))
        self._turns.append((len(self._tokens), len(self._tokens)))
        if self._stop_text is not None:
            self._stop_text.restart()
        return True

    def completion(self) -> Completion:
        """What there is so far."""
        ids, likely = (np.concatenate(part) for part in zip(*self._top, strict=True))
        return Completion(
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish=self.finish,
            versions=self._versions,
            sampling=self._sampling,
            turns=tuple(self._turns),
            top=(ids, likely) if self._sampling.top_logprobs else None,
            experts=self._recorded(),
        )

    @property
    def _drawn(self) -> int:
        return sum(end - start for start, end in self._turns)

    def _record(self, experts: np.ndarray | None) -> None:
        """Notes the experts `[T L k]` of prompt and tokens, as far as there are such tokens."""
        if experts is not None:
            number = min(len(experts), len(self._prompt) + len(self._tokens))
            self._experts.append(Known(Recorded(experts[None]), 0, 0, number, 0))

    def _recorded(self) -> np.ndarray | None:
        """`[T L k]` the experts of prompt and tokens; None where nothing was recorded."""
        if not self._experts:
            return None
        shape = len(self._tokens), *self._experts[0].experts().shape[1:]
        return of_sequence(len(self._prompt), np.full(shape, UNKNOWN, np.int16), self._experts)

    def _append(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        self._tokens = np.concatenate([self._tokens, tokens])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
        self._versions = np.concatenate([self._versions, np.full(len(tokens), version, np.int32)])
