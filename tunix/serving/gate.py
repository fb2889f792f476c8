"""Who is let in, and how much they may bring; and sessions, whose requests are recorded (`rollout/sessions.py`).

A session is named by the header X-Session-ID, or where a run serves its agents by the key that each of them gets. One
that has ended is answered no more: what it says would not be trained on.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tunix.rollout.sessions import NoRoom, Session, Turn
from tunix.serving.bodies import ChatBody, CompletionBody, GenerateBody
from tunix.serving.tinker.futures import Refusal
from tunix.types import Request, Sampling

HEADER = "x-session-id"
MOST, LONGEST, ROOM = 256, 200, 1 << 20
"""Sessions that are recorded by name (the oldest is forgotten for a further one), characters of a name, and tokens of a
session's transcripts, at most."""
REMEMBERED = 1 << 17
"""Names of sessions that have ended which are known, the last ones."""

LOOPBACK = re.compile(rb"(https?://)?(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
"""What a request for this machine names as its host, and as its origin."""


@dataclass(frozen=True)
class Gate:
    """Who is let in, and how much they may bring."""

    key: str | None = None
    """What a client has to send, e.g. from `ports.read_key`; None where everybody is let in."""
    body: int = 8 << 20
    """Bytes of a request's body at most."""
    streams: int = 1024
    """Answers that are streamed at a time, at most."""
    seconds: float = 3600.0
    """From a request to its whole answer at most; then it is given up."""


class Sessions:
    """The sessions of a server."""

    def __init__(self, sampling: Sampling | None = None, temperature: float = 1.0):
        """None is there.

        Args:
            sampling: how all requests are sampled, by sessions that the keys of requests name; None where requests say
                how, and the header X-Session-ID opens a session.
            temperature: what requests may ask for beside that of `sampling`, which is 0 in a greedy evaluation.
        """
        self.sampling, self.temperature = sampling, temperature
        self._live: dict[str, Session] = {}
        self._ended: dict[str, None] = {}
        self._lock = threading.Lock()

    def open(self, name: str, session: Session) -> None:
        """Begins a session."""
        with self._lock:
            self._live[name] = session

    def end(self, name: str) -> Session:
        """Ends a session, which is answered no more.

        Raises:
            Refusal: there is none of this name.
        """
        session = self.get(name)
        with self._lock:
            self._live.pop(name, None)
            self._ended[name] = None
            while len(self._ended) > REMEMBERED:
                del self._ended[next(iter(self._ended))]
        return session

    def get(self, name: str) -> Session:
        """A session that has not ended.

        Raises:
            Refusal: it has, or there is none of this name.
        """
        if name in self._ended:
            raise Refusal(
                409, "the session has ended, and may be trained on: begin another one", code="session_has_ended"
            )
        if name not in self._live:
            raise Refusal(404, f"there is no session {name:.{LONGEST}}", code="session_not_found")
        return self._live[name]

    def of(self, headers: Mapping[str, str]) -> Session | None:
        """The session of a request; None where it is not recorded.

        Raises:
            Refusal: it has ended, or there is no such key.
        """
        if self.sampling is not None:
            key = headers.get("authorization", "").partition("Bearer ")[2]
            if key not in self._live and key not in self._ended:
                raise Refusal(401, "the key is that of no episode: send OPENAI_API_KEY", code="invalid_api_key")
            return self.get(key)
        if not (name := headers.get(HEADER)):
            return None
        if len(name) > LONGEST:
            raise Refusal(400, f"X-Session-ID has {len(name)} characters, more than {LONGEST}")
        if name not in self._live and name not in self._ended:
            self.open(name, Session(ROOM, ROOM))
            with self._lock:  # clients that never end one, such as verifiers', are answered all the same
                while len(self._live) > MOST:
                    del self._live[next(iter(self._live))]
        return self.get(name)

    def begin(
        self, session: Session, body: CompletionBody | ChatBody | GenerateBody, requests: Sequence[Request]
    ) -> tuple[list[Request], list[Turn]]:
        """The requests of a body as they are sampled in a session, and their turns.

        Raises:
            Refusal: they ask for another distribution than the run trains on, or there is no room.
        """
        if (fixed := self.sampling) is not None:
            settings = body.sampling_params if isinstance(body, GenerateBody) else body
            allowed = {
                "temperature": (fixed.temperature, self.temperature),
                "top_p": (1.0,),
                "top_k": (0, -1),
                "min_p": (0.0,),
                "seed": (),
            }
            for name in settings.model_fields_set & allowed.keys():
                if getattr(settings, name) not in allowed[name]:
                    known = f"it is {allowed[name][-1]:g} here" if allowed[name] else "the run draws its own"
                    raise Refusal(400, f"{name}: {known}, by the run's recipe: leave it out", param=name)
        turns, sampled = list[Turn](), list[Request]()
        try:
            for request in requests:
                turns.append(turn := session.begin(request.prompt, request.sampling.max_tokens))
                settings = replace(request.sampling, max_tokens=turn.most)
                if fixed is not None:
                    stops = dict.fromkeys((*fixed.stop_strings, *settings.stop_strings))
                    settings = replace(settings, temperature=fixed.temperature, stop_strings=tuple(stops))
                    request = replace(request, seed=session.seed, index=turn.number)
                sampled.append(replace(request, sampling=settings))
        except NoRoom as error:
            for turn in turns:
                turn.end()
            raise Refusal(400, str(error), code="context_length_exceeded") from None
        return sampled, turns
