"""What a program has asked of the policy, recorded as transcripts to train on.

A request is a prompt and what was sampled after it. A prompt that extends a transcript, token for token, continues it.
Any other (a fork, an edited history, a turn that reads otherwise when it is encoded again) begins another transcript,
which has its prefix again: only what is sampled from there on is trained there, so that each sampled token is trained
exactly once.

    request 1   p p p p | s s s                   transcript 1   p p p p s s s o o s s
    request 2   p p p p   s s s   o o | s s       transcript 2   p p p p q q s
    request 3   p p p p   q q | s

Axes: T time.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunix.types import Completion, Sampling


class NoRoom(Exception):
    """A session has no room for another request; the text says why."""


@dataclass(eq=False)
class Transcript:
    """What follows one another in a session."""

    tokens: np.ndarray
    """`[T]` int32: prompts with what was sampled after them."""
    drawn: list[tuple[int, Completion]] = field(default_factory=list)
    """Where each sampled turn begins, e.g. 12, and the turn."""
    pending: bool = True
    """Whether a turn of it is being sampled, so that nothing can follow yet."""

    @property
    def trained(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, int]]]:
        """`[T]` ids up to the last sampled one, their log-probs (0 where nothing was sampled) and versions (the first
        turn's there), and the (start, end) of each turn."""
        first = self.drawn[0][1]
        turns = [(start, start + len(turn.tokens)) for start, turn in self.drawn]
        length = turns[-1][1]
        logprobs, versions = np.zeros(length, np.float32), np.full(length, first.versions[0], np.int32)
        for (start, end), (_, turn) in zip(turns, self.drawn, strict=True):
            logprobs[start:end], versions[start:end] = turn.logprobs, turn.versions
        return self.tokens[:length].astype(np.int32), logprobs, versions, turns


@dataclass(eq=False)
class Turn:
    """A request of a session."""

    session: "Session"
    transcript: Transcript
    number: int
    """How many requests of the session came before it."""
    most: int
    """Tokens that may be sampled, e.g. 256."""
    wanted: int
    """Tokens that were asked for at most."""
    ended: bool = False

    def end(self, completion: Completion | None = None) -> None:
        """Records what was sampled; None where the request was given up. Once: what comes later is not recorded."""
        self.session.end(self, completion)


class Session:
    """The requests of one program, from any thread."""

    def __init__(self, room: int, most: int, seed: int = 0):
        """Nothing was asked.

        Args:
            room: tokens of all transcripts together, at most.
            most: sampled tokens among them, at most.
            seed: of its random numbers.
        """
        self.seed = seed
        self.transcripts: list[Transcript] = []
        self._room, self._most, self._lock, self._full = room, most, threading.Lock(), False
        self._asked = 0

    def begin(self, prompt: np.ndarray, wanted: int) -> Turn:
        """A request with the prompt `[T]`, for as many tokens as there is room for.

        Raises:
            NoRoom: that is none.
        """
        with self._lock:
            fits = (
                x
                for x in self.transcripts
                if not x.pending and len(x.tokens) <= len(prompt) and np.array_equal(x.tokens, prompt[: len(x.tokens)])
            )
            transcript = max(fits, key=lambda x: len(x.tokens), default=None)
            new = len(prompt) - (0 if transcript is None else len(transcript.tokens))
            most = min(wanted, self._most, self._room - new)
            if most < 1:
                self._full = True
                raise NoRoom(
                    f"the session has room for {max(self._room, 0)} further tokens, {self._most} of them sampled, and "
                    f"{new} are new in this prompt"
                )
            if transcript is None:
                transcript = Transcript(prompt)
                self.transcripts.append(transcript)
            transcript.tokens, transcript.pending = prompt, True
            self._room, self._most, self._asked = self._room - new - most, self._most - most, self._asked + 1
            return Turn(self, transcript, self._asked - 1, most, wanted)

    def end(self, turn: Turn, completion: Completion | None) -> None:
        """See `Turn.end`."""
        with self._lock:
            if turn.ended:
                return
            turn.ended, turn.transcript.pending = True, False
            left = turn.most - (0 if completion is None else len(completion.tokens))
            self._room, self._most = self._room + left, self._most + left
            if completion is not None:
                before = turn.transcript.tokens
                turn.transcript.drawn.append((len(before), completion))
                turn.transcript.tokens = np.concatenate([before, completion.tokens])
                self._full |= completion.finish == "length" and turn.most < turn.wanted

    def written(self) -> dict[str, Any]:
        """The transcripts as JSON values."""
        with self._lock:
            parts = [x.trained for x in self.transcripts if x.drawn]
        names = ("tokens", "logprobs", "versions", "turns")
        return {
            "transcripts": [dict(zip(names, [np.asarray(x).tolist() for x in part], strict=True)) for part in parts]
        }

    def episode(self, sampling: Sampling) -> tuple[np.ndarray, Completion]:
        """The first prompt `[T]`, and all that follows it, further transcripts included, with the settings of the run;
        a prompt of one token and nothing after it where nothing was sampled."""
        with self._lock:
            parts = [x.trained for x in self.transcripts if x.drawn]
            finish = "length" if self._full else "stop"
        if not parts:
            nothing = np.zeros(0, np.int32)
            return np.zeros(1, np.int32), Completion(nothing, np.zeros(0, np.float32), finish, nothing, sampling, ())
        start = parts[0][3][0][0]
        tokens, logprobs, versions = (np.concatenate([x[i] for x in parts]) for i in range(3))
        places = np.cumsum([0, *(len(x[0]) for x in parts)]) - start
        turns = [(int(at + a), int(at + b)) for at, x in zip(places, parts, strict=False) for a, b in x[3]]
        restarts = tuple(int(place) for place in places[1:-1])
        completion = Completion(
            tokens[start:], logprobs[start:], finish, versions[start:], sampling, tuple(turns), restarts=restarts
        )
        return tokens[:start], completion
