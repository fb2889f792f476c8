"""The sampler whose completions come from servers; a `protocols.Sampler`.

`publish` writes the weights, has every server load them, and compares a probe; `run` sends all requests at once and
hands completions on as they end. The HTTP calls run in an event loop in a thread of their own, environments in further
ones, callbacks in the caller's.

All processes of a run ask all servers, each for its own prompts. The lead alone has servers load weights, between two
exchanges (`publish`): before, no process has a request on the way; after, all know which servers have the weights.

Axes: T time, A alternatives, L layers, k chosen experts of a token.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tunix.distributed import processes
from tunix.errors import UserError
from tunix.protocols import Sampler
from tunix.rollout.engine.batch import THREADS
from tunix.rollout.engine.experts import UNKNOWN, Known
from tunix.rollout.engine.request import Decode, Episode, StopText, check_prompt
from tunix.rollout.servers.handover import Handover
from tunix.rollout.servers.probe import Probe, inspect
from tunix.rollout.servers.protocol import (
    FIELD,
    FLAG,
    Answer,
    Ask,
    Expected,
    Failed,
    Gone,
    Refused,
    Unfit,
    read_experts,
    refuse,
    settings,
    written_experts,
)
from tunix.rollout.servers.server import Pool, Server
from tunix.rollout.types import Pause
from tunix.types import Completion, OnDone, Reply, Request, Restart, Usage, Workload
from tunix.util.coded import array_of, coded
from tunix.util.ports import KEY

_log = logging.getLogger(__name__)
ENDING = 5.0
"""Seconds in which a call that is given up ends."""
LOOK = 1.0
"""Seconds after which a call looks whether it is to be given up, where nothing has ended meanwhile."""


class Turns:
    """One completion as it grows: what is asked next, and what was sampled and observed so far."""

    def __init__(self, request: Request, number: int, version: int, length: int, decode: Decode | None):
        """A request at its beginning, or where an earlier call has paused it.

        Args:
            request: what is completed.
            number: its index among the requests of the call.
            version: of the weights that servers have.
            length: tokens of prompt and completion at most.
            decode: token ids -> text, in which stop strings are found.
        """
        strings = request.sampling.stop_strings
        self.episode = Episode(request, number, StopText(strings, decode) if strings and decode else None)
        self._version, self._length = version, length
        self._tokens, self._logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        if (before := self.episode.so_far) is not None:
            self._tokens, self._logprobs, self.episode.experts = before.tokens, before.logprobs, []
            if before.experts is not None:
                self.episode.experts = [Known.of(before.experts, 0)]

    def left(self, new: int = 0) -> int:
        """Tokens that may still be sampled, where so many new ones are observed first."""
        request, number = self.episode.request, len(self._tokens)
        *turns, (start, _) = self.episode.turns
        drawn = sum(end - begin for begin, end in turns) + number - start
        return min(request.sampling.max_tokens - drawn, self._length - len(request.prompt) - number - new)

    def ask(self, identity: str, expected: Expected) -> Ask:
        """The request for the rest of the turn; its identity is that of the call, the request and the place."""
        request, number = self.episode.request, len(self._tokens)
        # A turn that begins after others has random numbers of its own: servers count tokens from a request's start.
        seed = int(np.random.SeedSequence([request.seed, request.index, number]).generate_state(1, np.uint64)[0] >> 1)
        prompt = (*request.prompt.tolist(), *self._tokens.tolist())[self.episode.begin :]
        what = settings(request.sampling, self.left(), seed)
        identity = f"{identity}-{self.episode.number}-{number}"
        return Ask(identity, prompt, what, expected)

    def take(self, answer: Answer) -> None:
        """Appends what a server sampled, up to the first token that completes a stop string."""
        episode, stopped, kept = self.episode, answer.stopped, len(answer.tokens)
        start, _ = episode.turns[-1]
        turn = np.concatenate([self._tokens[start:], answer.tokens])
        if episode.stop_text is not None and (end := episode.stop_text.find(turn, kept)) is not None:
            kept, stopped = kept - (len(turn) - end), True
        self._append(answer.tokens[:kept], answer.logprobs[:kept])
        if answer.top is not None:
            episode.keep_top(*(x[:kept] for x in answer.top))
        if answer.experts is not None:  # of the last transcript; those of what was cut off are dropped
            number = len(episode.request.prompt) + len(self._tokens) - episode.begin
            episode.experts.append(Known.of(answer.experts[:number], episode.begin))
        episode.turns[-1] = (start, len(self._tokens))
        episode.ended = "stop" if stopped else "length"

    def observe(self, observation: Sequence[int] | np.ndarray | Restart) -> bool:
        """Appends what an environment wrote, `[T]` token ids or another transcript, and opens the next turn; False, and
        nothing, where nothing could follow."""
        restart = isinstance(observation, Restart)
        new = np.asarray(observation.prompt if restart else observation, np.int32)
        if self.left(len(new)) <= 0:
            self.episode.ended = "length"
            return False
        self._append(new, np.zeros(len(new), np.float32))
        self.episode.observe(len(self._tokens) - len(new), len(self._tokens), restart)
        return True

    def completion(self) -> Completion:
        """What there is so far."""
        experts, known = None, self.episode.experts
        if known:
            experts = np.full((len(self._tokens), *known[0].piece.read().shape[2:]), UNKNOWN, np.int16)
        return self.episode.completion(self._tokens, self._logprobs, self._version, experts)

    def _append(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        self._tokens = np.concatenate([self._tokens, tokens])
        self._logprobs = np.concatenate([self._logprobs, logprobs])


class ServerSampler(Sampler):
    """Samples on servers, from the weights that were published last."""

    exclusive = True
    """Whether a publication waits until nobody holds the weights before: a server has one set."""

    def __init__(
        self, urls: Sequence[str], timeout: float, handover: Handover, probe: Probe, decode: Decode | None = None
    ):
        """Connects to nothing yet.

        Args:
            urls: addresses of the servers.
            timeout: seconds in which a server has to answer, or to load weights.
            handover: brings weights to the servers.
            probe: compares their answers with the trainer, and says what they have to have.
            decode: token ids -> text, in which stop strings are found.
        """
        self._loop, self._lock = asyncio.new_event_loop(), threading.Lock()
        threading.Thread(target=self._loop.run_forever, name="servers", daemon=True).start()
        self._free = threading.Condition()
        self._holds = 0
        """Calls that were promised the present weights, and have not ended."""
        self._handover, self._probe, self._expected, self._decode = handover, probe, probe.expected, decode
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self.pool = Pool([Server(url, timeout, headers) for url in urls])
        """All servers, drained ones included."""
        self._held: Path | None = None
        """The folder of the weights that servers answer from; None before the first."""
        self._version = 0
        # No two processes give a request the same name.
        self._name, self._calls = f"{secrets.token_hex(4)}-{processes.index()}", itertools.count()
        self._told = False
        self.usage: Usage | None = None
        """What the last call of `run` took; None where there was none."""

    def publish(self, params: Mapping[str, Any], version: int) -> None:
        """Has all servers load these weights; one that was drained is asked again if it does. To be called by all
        processes.

        A server has one set of weights: calls that hold the present ones are waited for.

        Raises:
            UserError: at first, any server that cannot sample for this run; later, that there is none.
        """
        with self._free:
            self._free.wait_for(lambda: not self._holds)
            folder = self._handover.written(params, version)
            # A server that any process asks no more, such as one that it alone does not reach, is so in all, and is
            # looked at again.
            own_reasons = json.dumps([server.reason for server in self.pool.servers]).encode()
            for reasons in map(json.loads, processes.allgathered("drained", own_reasons)):
                for server, reason in zip(self.pool.servers, reasons, strict=True):
                    if reason is not None and server.reason is None:
                        self.pool.drain(server, reason)

            async def renew() -> list[Answer | Exception]:
                return await asyncio.gather(*(self._renew(server, folder) for server in self.pool.servers))

            def load() -> list[dict[str, Any]]:
                future = asyncio.run_coroutine_threadsafe(renew(), self._loop)
                try:
                    loaded = future.result()
                except BaseException:  # the caller is interrupted
                    future.cancel()
                    raise
                return [_saved(server, answer) for server, answer in zip(self.pool.servers, loaded, strict=True)]

            states = processes.broadcast("servers", load)
            if not processes.lead():
                for server, state in zip(self.pool.servers, states, strict=True):  # each becomes what it is in the lead
                    server.base, server.model = state["base"], state["model"]
                    if server.reason is not None and state["reason"] is None:
                        self.pool.readmit(server)
                    elif state["reason"] is not None:
                        server.readmit()
                        server.drain(state["reason"])
            answers = [_answer(state) for state in states]
            for server, answer in zip(self.pool.servers, answers, strict=True):
                try:
                    if isinstance(answer, Failed):
                        raise answer
                    self._probe.check(server.url, answer, params)
                except (Failed, Unfit) as error:
                    if self._held is None:
                        raise UserError(f"rollout.servers: {server.url}: {error}") from None
                    self.pool.drain(server, str(error))
            pairs = zip(self.pool.servers, answers, strict=True)
            silent = [server.url for server, answer in pairs if isinstance(answer, Answer) and answer.experts is None]
            if self._expected.routing is not None and silent and not self._told:
                self._told = True
                _log.warning(
                    f"{', '.join(silent)}: the experts that a token used are not returned, and the trainer's routers "
                    f"choose themselves, which can make RL on a mixture unstable: start vLLM with {FLAG}"
                )
            self._handover.forget()
            self._held, self._version = folder, version
            if not self.pool.living:
                raise self.pool.none_left()

    def warm(self, work: Workload) -> None:
        """Nothing is compiled here; servers prepare by themselves."""

    def hold(self) -> Path:
        """The present weights, which the servers keep until the call of `run` that is given them has ended.

        Raises:
            ValueError: no weights were published.
        """
        with self._free:
            if self._held is None:
                raise ValueError("the servers have no weights: publish() them before sampling")
            self._holds += 1
            return self._held

    def run(
        self,
        requests: Sequence[Request],
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        pause: Pause | None = None,
        held: Path | None = None,
    ) -> list[Completion]:
        """Completes each request; see `protocols.SamplingClient.run`.

        A server's draws depend on the seed of each request, but also on its kernels and on what else it computes.

        Args:
            pause: whether the call is given up, with what has ended; it is asked as completions end.
            held: the weights, from `hold`; None for those that were published last.

        Raises:
            UserError: a setting or a prompt is invalid, or no server is left.
            ValueError: no weights were published.
        """
        vocab_size, length = self._expected.vocab_size, self._expected.length
        for number, request in enumerate(requests):
            refuse(request.sampling, vocab_size, self._decode is not None)
            check_prompt(number, request.prompt, length, vocab_size)
        weights = held or self.hold()
        assert weights is self._held, "weights are published only when nobody holds earlier ones"
        turns = [Turns(request, i, self._version, length, self._decode) for i, request in enumerate(requests)]
        done: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        try:
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(self._all(turns, reply, done), self._loop)
                number: int | None = -1
                try:
                    while True:
                        try:
                            number = done.get(timeout=LOOK)
                        except queue.Empty:
                            number = -1
                        if number is None:
                            future.result()
                            break
                        if number >= 0 and on_done is not None and on_done(number, turns[number].completion()):
                            break
                        if pause is not None and pause(0):
                            break
                finally:
                    if number is not None:
                        # A call that is given up may still be writing down an answer; `turns` are read when it has
                        # ended.
                        future.cancel()
                        with contextlib.suppress(queue.Empty):  # it was given up before it had begun
                            while done.get(timeout=ENDING) is not None:
                                pass
        finally:
            with self._free:
                self._holds -= 1
                self._free.notify_all()
        completions = [x.completion() for x in turns]
        drawn = [sum(end - start for start, end in completion.turns) for completion in completions]
        before = [0 if x.so_far is None else int(x.so_far.drawn.sum()) for x in requests]
        self.usage = Usage(sum(drawn) - sum(before), 0, 0.0)
        return completions

    async def _all(self, turns: Sequence[Turns], reply: Reply | None, done: "queue.SimpleQueue[int | None]") -> None:
        """Completes all, each in as many turns as its environment answers; puts the number of each that has ended, and
        None at the end."""
        loop = asyncio.get_running_loop()
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment") if reply else None
        name = f"tunix-{self._name}-{next(self._calls)}"

        async def complete(growing: Turns) -> None:
            episode = growing.episode
            while True:
                if growing.left() <= 0:
                    episode.ended = "length"
                    break
                growing.take(await self.pool.ask(growing.ask(name, self._expected)))
                if reply is None or episode.ended != "stop":
                    break
                observation = await loop.run_in_executor(threads, reply, episode.number, growing.completion())
                if observation is None or not growing.observe(observation):
                    break
            done.put(episode.number)

        watches = [asyncio.ensure_future(server.watch()) for server in self.pool.living]
        try:
            await asyncio.gather(*map(self._confirm, self.pool.living))
            async with asyncio.TaskGroup() as group:
                for growing in turns:
                    group.create_task(complete(growing))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for watch in watches:
                watch.cancel()
            done.put(None)
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)

    async def _renew(self, server: Server, folder: Path) -> Answer | Exception:
        drained = server.reason
        try:
            if (unwell := await server.well()) is not None:
                raise Failed(unwell)
            if drained is not None:
                server.readmit()
            fresh = drained is not None or not server.base
            if fresh:
                # One that a run which was killed while it handed weights over has left paused goes on.
                with contextlib.suppress(Failed, Refused):  # it says so itself where it answers nothing
                    await server.call("/resume", {})
                await inspect(server, self._expected)
            await self._handover.load(server, folder, fresh)
            answer = await server.complete(self._probe.ask)
            if drained is not None:
                self.pool.readmit(server)
            return answer
        except (Failed, Gone, Refused, Unfit) as error:
            server.drain(str(error))
            return error

    async def _confirm(self, server: Server) -> None:
        """Drains a server that has lost the weights since it loaded them, such as by being started anew."""
        assert self._held is not None
        try:
            if not await self._handover.holds(server, self._held):
                self.pool.drain(server, "it has lost the weights that it had loaded: it was started anew")
        except (Failed, Refused) as error:
            self.pool.drain(server, str(error))


def _saved(server: Server, answer: Answer | Exception) -> dict[str, Any]:
    """A server after a hand-over, as JSON values."""
    state = {"base": server.base, "model": server.model, "reason": server.reason}
    if isinstance(answer, Exception):
        return {**state, "error": str(answer)}
    # The probe asks for no alternatives.
    said = {"tokens": coded(answer.tokens), "logprobs": coded(answer.logprobs), "stopped": answer.stopped}
    return {**state, **said, FIELD: None if answer.experts is None else written_experts(answer.experts)}


def _answer(saved: Mapping[str, Any]) -> Answer | Failed:
    if "error" in saved:
        return Failed(saved["error"])
    experts = None if saved[FIELD] is None else read_experts(saved[FIELD]).astype(np.int16)
    return Answer(array_of(saved["tokens"]), array_of(saved["logprobs"]), saved["stopped"], experts=experts)
