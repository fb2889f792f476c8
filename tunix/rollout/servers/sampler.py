"""The sampler whose completions come from servers; a `protocols.Sampler`.

`publish` writes the weights, has every server load them, and compares a probe; `run` sends all requests at once and
hands completions on as they end. The HTTP calls run in a thread of their own (`EventLoop`), environments in further
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
import queue
import secrets
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from tunix.distributed import processes
from tunix.errors import UserError
from tunix.protocols import Sampler
from tunix.rollout.engine.batch import THREADS
from tunix.rollout.engine.experts import UNKNOWN, Known, Recorded, of_sequence
from tunix.rollout.engine.request import Decode, StopText, check_prompt
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
    seed_of,
    settings,
    written_experts,
)
from tunix.rollout.servers.server import Pool, Server
from tunix.rollout.types import Pause
from tunix.types import Completion, OnDone, Reply, Request, Usage, Workload
from tunix.util.coded import array_of, coded

_log = logging.getLogger(__name__)
T = TypeVar("T")
ENDING = 5.0
"""Seconds in which a call that is given up ends."""
LOOK = 1.0
"""Seconds after which a call looks whether it is to be given up, where nothing has ended meanwhile."""


class Turns:
    """One completion as it grows: what is asked next, and what was sampled and observed so far."""

    def __init__(self, request: Request, length: int, decode: Decode | None):
        """A request at its beginning, or where an earlier call has paused it.

        Args:
            request: what is completed.
            length: tokens of prompt and completion at most.
            decode: token ids -> text, in which stop strings are found.
        """
        self._request, self._length = request, length
        self._prompt, self._sampling = request.prompt, request.sampling
        sampling, before = request.sampling, request.so_far
        n = sampling.top_logprobs
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
        seed = seed_of(self._request.seed, self._request.index, len(self._tokens))
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
        top = experts = None
        if self._sampling.top_logprobs:
            top = np.concatenate([ids for ids, _ in self._top]), np.concatenate([likely for _, likely in self._top])
        if self._experts:
            shape = len(self._tokens), *self._experts[0].experts().shape[1:]
            experts = of_sequence(len(self._prompt), np.full(shape, UNKNOWN, np.int16), self._experts)
        return Completion(
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish=self.finish,
            versions=self._versions,
            sampling=self._sampling,
            turns=tuple(self._turns),
            top=top,
            experts=experts,
        )

    @property
    def _drawn(self) -> int:
        return sum(end - start for start, end in self._turns)

    def _record(self, experts: np.ndarray | None) -> None:
        """Notes the experts `[T L k]` of prompt and tokens, as far as there are such tokens."""
        if experts is not None:
            number = min(len(experts), len(self._prompt) + len(self._tokens))
            self._experts.append(Known(Recorded(experts[None]), 0, 0, number, 0))

    def _append(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        self._tokens = np.concatenate([self._tokens, tokens])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
        self._versions = np.concatenate([self._versions, np.full(len(tokens), version, np.int32)])


class EventLoop:
    """An event loop in a thread of its own, so that it does not matter what runs in the caller's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="servers", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins some work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of some work, which is given up where the caller is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class ServerSampler(Sampler):
    """Samples on servers, from the weights that were published last."""

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float,
        handover: Handover,
        probe: Probe,
        expected: Expected,
        decode: Decode | None = None,
    ):
        """Connects to nothing yet.

        Args:
            urls: addresses of the servers.
            timeout: seconds in which a server has to answer, or to load weights.
            handover: brings weights to the servers.
            probe: compares their answers with the trainer.
            expected: what the servers have to have.
            decode: token ids -> text, in which stop strings are found.
        """
        self._loop, self._lock = EventLoop(), threading.Lock()
        self._free = threading.Condition()
        self._holds = 0
        """Calls that were promised the present weights, and have not ended."""
        self._handover, self._probe, self._expected, self._decode = handover, probe, expected, decode
        self._pool = Pool([Server(url, timeout) for url in urls])
        self._held: Path | None = None
        """The folder of the weights that servers answer from; None before the first."""
        self._version = 0
        # No two processes give a request the same name.
        self._name, self._calls = f"{secrets.token_hex(4)}-{processes.index()}", itertools.count()
        self._told = False
        self.usage: Usage | None = None
        """What the last call of `run` took; None where there was none."""

    @property
    def servers(self) -> Sequence[Server]:
        """All servers, drained ones included."""
        return self._pool.servers

    @property
    def again(self) -> int:
        """Requests that had to be asked again so far."""
        return self._pool.again

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
            own_reasons = json.dumps([server.reason for server in self.servers]).encode()
            for reasons in map(json.loads, processes.allgathered("drained", own_reasons)):
                for server, reason in zip(self.servers, reasons, strict=True):
                    if reason is not None and server.reason is None:
                        self._pool.drain(server, reason)

            def load() -> list[dict[str, Any]]:
                loaded = self._loop.run(self._renewed(folder))
                return [_saved(server, answer) for server, answer in zip(self.servers, loaded, strict=True)]

            states = processes.broadcast("servers", load)
            if not processes.lead():
                for server, state in zip(self.servers, states, strict=True):  # each becomes what it is in the lead
                    server.base, server.model = state["base"], state["model"]
                    if server.reason is not None and state["reason"] is None:
                        self._pool.readmit(server)
                    elif state["reason"] is not None:
                        server.readmit()
                        server.drain(state["reason"])
            answers = [_answer(state) for state in states]
            for server, answer in zip(self.servers, answers, strict=True):
                try:
                    if isinstance(answer, Failed):
                        raise answer
                    self._probe.check(server.url, answer, params)
                except (Failed, Unfit) as error:
                    if self._held is None:
                        raise UserError(f"rollout.servers: {server.url}: {error}") from None
                    self._pool.drain(server, str(error))
            pairs = zip(self.servers, answers, strict=True)
            silent = [server.url for server, answer in pairs if isinstance(answer, Answer) and answer.experts is None]
            if self._expected.routing is not None and silent and not self._told:
                self._told = True
                _log.warning(
                    f"{', '.join(silent)}: the experts that a token used are not returned, and the trainer's routers "
                    f"choose themselves, which can make RL on a mixture unstable: start vLLM with {FLAG}"
                )
            self._handover.forget()
            self._held, self._version = folder, version
            if not self._pool.living:
                raise self._pool.none_left()

    def warm(self, work: Workload) -> None:
        """Nothing is compiled here; servers prepare by themselves."""

    @property
    def exclusive(self) -> bool:
        """Whether a publication waits until nobody holds the weights before: a server has one set."""
        return True

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
        turns = [Turns(request, length, self._decode) for request in requests]
        weights = held or self.hold()
        assert weights is self._held, "weights are published only when nobody holds earlier ones"
        try:
            with self._lock:
                self._complete_all(turns, reply, on_done, pause)
        finally:
            with self._free:
                self._holds -= 1
                self._free.notify_all()
        completions = [x.completion() for x in turns]
        drawn = [sum(end - start for start, end in completion.turns) for completion in completions]
        before = [0 if x.so_far is None else int(x.so_far.drawn.sum()) for x in requests]
        self.usage = Usage(sum(drawn) - sum(before), 0, 0.0)
        return completions

    def _complete_all(
        self, turns: Sequence[Turns], reply: Reply | None, on_done: OnDone | None, pause: Pause | None
    ) -> None:
        """Completes all, unless `on_done` has enough before, or it is paused."""
        done: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        future = self._loop.start(self._all(turns, reply, done))
        number: int | None = -1
        try:
            while True:
                try:
                    number = done.get(timeout=LOOK)
                except queue.Empty:
                    number = -1
                if number is None:
                    break
                if number >= 0 and on_done is not None and on_done(number, turns[number].completion()):
                    return
                if pause is not None and pause(0):
                    return
            future.result()
        finally:
            if number is not None:
                # A call that is given up may still be writing down an answer; `turns` are read when it has ended.
                future.cancel()
                with contextlib.suppress(queue.Empty):  # it was given up before it had begun
                    while done.get(timeout=ENDING) is not None:
                        pass

    async def _all(self, turns: Sequence[Turns], reply: Reply | None, done: "queue.SimpleQueue[int | None]") -> None:
        """Completes all; puts the number of each that has ended, and None at the end."""
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment") if reply else None
        name = f"tunix-{self._name}-{next(self._calls)}"
        try:
            async with self._pool.watched():
                await self._confirm()
                async with asyncio.TaskGroup() as group:
                    for number, of_request in enumerate(turns):
                        task = self._complete(f"{name}-{number}", number, of_request, reply, threads, done)
                        group.create_task(task)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            done.put(None)
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)

    async def _complete(
        self,
        name: str,
        number: int,
        turns: Turns,
        reply: Reply | None,
        threads: ThreadPoolExecutor | None,
        done: "queue.SimpleQueue[int | None]",
    ) -> None:
        """Completes one request, in as many turns as its environment answers."""
        loop = asyncio.get_running_loop()
        while True:
            if turns.left <= 0:
                turns.finish = "length"
                break
            turns.take(await self._pool.ask(turns.ask(name, self._expected)), self._version)
            if reply is None or turns.finish != "stop":
                break
            observation = await loop.run_in_executor(threads, reply, number, turns.completion())
            if observation is None or not turns.observe(observation, self._version):
                break
        done.put(number)

    async def _renewed(self, folder: Path) -> list[Answer | Exception]:
        """Each server's answer to the probe, when it has loaded the weights; or why there is none."""
        return list(await asyncio.gather(*(self._renew(server, folder) for server in self.servers)))

    async def _renew(self, server: Server, folder: Path) -> Answer | Exception:
        drained = server.reason
        try:
            if (unwell := await server.well()) is not None:
                raise Failed(unwell)
            if drained is not None:
                server.readmit()
            if drained is not None or not server.base:
                # One that a run which was killed while it handed weights over has left paused goes on.
                with contextlib.suppress(Failed, Refused):  # it says so itself where it answers nothing
                    await server.post("/resume")
                await inspect(server, self._expected)
                await self._handover.tidy(server)
            await self._handover.load(server, folder)
            answer = await server.complete(self._probe.ask)
            if drained is not None:
                self._pool.readmit(server)
            return answer
        except (Failed, Gone, Refused, Unfit) as error:
            server.drain(str(error))
            return error

    async def _confirm(self) -> None:
        """Drains servers that have lost the weights since they loaded them, such as by being started anew."""
        held = self._held
        assert held is not None

        async def confirm(server: Server) -> None:
            try:
                if not await self._handover.holds(server, held):
                    self._pool.drain(server, "it has lost the weights that it had loaded: it was started anew")
            except (Failed, Refused) as error:
                self._pool.drain(server, str(error))

        await asyncio.gather(*map(confirm, self._pool.living))


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
