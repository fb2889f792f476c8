"""Requests that are answered together, with continuous batching over slots.

Requests wait in a queue. Each enters a free slot as soon as there are pages for its prompt, its tokens are computed in
pieces with those of others (`pieces.py`), and one dispatch after the other samples several tokens in all slots
(`programs.decode`). The next dispatch is sent before the last one is read, so that the device does not wait: what it
samples for turns that turn out to have ended is dropped. Where pages run short, the request that came last leaves its
slot and is computed again later.

Requests with one prompt, under one adapter, share its pages. All pages live as long as the batch: none outlasts the
weights that filled it.

Axes: St decode steps, Sl slots, T time, s shards of the rows, Pt tokens of a page.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine.experts import Recorded
from tunix.rollout.engine.page_tables import PageTables
from tunix.rollout.engine.pieces import Job, Piece
from tunix.rollout.engine.programs import State, Steps, copy_pages, decode, initial_state, prefill, score
from tunix.rollout.engine.request import Decode, Episode, StopText, prompt_key
from tunix.rollout.engine.shapes import Sizes, page_bytes, state_bytes
from tunix.rollout.engine.slots import Slots
from tunix.rollout.types import Pause
from tunix.types import Completion, OnDone, Reply, Request, Usage


class Meter:
    """Counts what a batch takes of the devices: slots that had something to sample, and bytes that had to be read."""

    def __init__(self, model: Model, weights: Weights, sizes: Sizes, requests: int):
        """Nothing has been counted.

        Args:
            model: what is sampled from.
            weights: its weights; each device reads its part of them in every step.
            sizes: the shapes of the batch.
            requests: how many there are: slots beyond them are never counted as idle.
        """
        read = (x for x in jax.tree.leaves(weights) if x is not weights.top["embed/w"] or model.config.tied)
        self._weights = sum(x.addressable_shards[0].data.nbytes for x in read)
        mesh = jax.sharding.get_mesh()
        self._token = [size / sizes.page for size in page_bytes(model.config, mesh, sizes)]
        self._states = state_bytes(model.config, mesh)
        self._sizes, self._slots = sizes, min(sizes.slots, requests)
        self._tokens = self._steps = 0
        self._bytes = 0.0

    def add(self, held: np.ndarray, counts: np.ndarray) -> None:
        """Counts a dispatch.

        Args:
            held: `[Sl]` tokens in the cache of each slot before it.
            counts: `[Sl]` tokens that it sampled in each.
        """
        steps = int(counts.max(initial=0))
        self._tokens, self._steps = self._tokens + int(counts.sum()), self._steps + steps
        self._bytes += steps * self._weights + self._states * int(counts.sum()) / self._sizes.shards
        for window, each in zip(self._sizes.windows, self._token, strict=True):
            # A slot that samples c tokens from h on reads h + 1, ..., h + c of them: c h + c (c + 1) / 2.
            seen = counts * (held + (counts + 1) / 2)
            if window is not None:
                seen = np.minimum(seen, counts * window)
            self._bytes += each * float(seen.sum()) / self._sizes.shards

    @property
    def usage(self) -> Usage:
        """All that was counted."""
        return Usage(self._tokens, self._steps * self._slots, self._bytes)


THREADS = 32
"""Environments that are asked at the same time, at most."""
PATIENCE = 0.25
"""Seconds that answers are waited for while others could be sampled; where one took longer, no further one is."""


class Replies:
    """The answers of environments that are waited for: they answer in threads, while other slots are sampled.

    An answer belongs to a slot whose turn has ended, and which waits for it; the threads wait for the processes in
    which environments live (`rollout/environments/remote.py`). Each environment is called by one thread at a time: its
    next turn is sampled after the answer to the last.

    Which tokens are computed together decides the last bits of their log-probs. So an answer is taken in the second
    round after its turn has ended, and is waited for a little: what is quick comes at the same place whatever the clock
    says.
    """

    def __init__(self, reply: Reply | None):
        """Nothing is waited for.

        Args:
            reply: asks the environment; None where there is none.
        """
        self._reply = reply
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment") if reply else None
        self._futures: dict[int, Future[np.ndarray | None]] = {}
        self._asked: dict[int, int] = {}
        """The round in which each was asked."""
        self._round, self._patient = 0, True

    def __bool__(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._futures)

    def __contains__(self, slot: int) -> bool:
        """Whether this slot waits for an answer."""
        return slot in self._futures

    def ask(self, slot: int, number: int, completion: Completion) -> bool:
        """Asks about the turn of a slot that has stopped; returns whether there is an environment to ask.

        Args:
            slot: waits for the answer.
            number: index of the request.
            completion: so far.
        """
        if self._reply is None or self._threads is None or completion.finish != "stop":
            return False
        self._futures[slot] = self._threads.submit(self._reply, number, completion)
        self._asked[slot] = self._round
        return True

    def arrived(self) -> list[tuple[int, np.ndarray | None]]:
        """The answers of a further round, by slot: tokens `[T]`, or None at the end of an episode."""
        self._round += 1
        due = [slot for slot in sorted(self._futures) if self._asked[slot] < self._round - 1]
        if due and self._patient:
            self._patient = not wait([self._futures[slot] for slot in due], timeout=PATIENCE).not_done
        return [(slot, self._futures.pop(slot).result()) for slot in due if self._futures[slot].done()]

    def wait(self) -> None:
        """Waits until one more answer has come."""
        wait(self._futures.values(), return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Ends the threads; answers that nobody waits for any more are given up."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


OnTokens = Callable[[int, np.ndarray], None]
"""Callback that receives (index of the request, its new tokens) after each dispatch."""
SHORT = 8
"""Steps of a dispatch where the host looks at the text: a single answer that is streamed, and stop strings."""
REFILL = 8
"""A dispatch ends early when one slot in so many has ended and another request can be admitted or continued."""


@dataclass(frozen=True)
class Published:
    """Weights that answer requests, whatever is published meanwhile."""

    model: Model
    """With the adapters that are loaded with the weights."""
    weights: Weights
    version: int
    adapters: Mapping[str, int]
    """Number of each adapter, from 1, by name."""


class InFlight(NamedTuple):
    """A dispatch that has been sent and not been read."""

    slots: np.ndarray
    """`[Sl]`."""
    generations: np.ndarray
    """`[Sl]` their generations when it was sent."""
    most: int
    """Tokens that it samples in a slot at most."""
    sampled: Steps
    recorded: tuple[Recorded, ...]
    """The experts of pieces that were sent before it."""


class Batch:
    """Requests that are answered together."""

    def __init__(
        self,
        published: Published,
        sizes: Sizes,
        decode: Decode | None,
        requests: Sequence[Request],
        reply: Reply | None = None,
        on_tokens: OnTokens | None = None,
        on_done: OnDone | None = None,
        pause: Pause | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ):
        """Queues the requests.

        Args:
            published: what answers them.
            sizes: the shapes of the programs.
            decode: token ids -> text, for stop strings.
            requests: as for `Engine.run`, like the callbacks.
            reply: see there.
            on_tokens: see there.
            on_done: see there.
            pause: see there.
            lock: held while programs are sent, so that those of other threads reach all devices in one order.
        """
        self._reply, self._pause, self._lock, self._sent = reply, pause, lock or nullcontext(), 0
        self.version, self.sizes = published.version, sizes
        self.model, self.weights = published.model, published.weights
        self.replies, self.on_tokens, self.on_done = Replies(reply), on_tokens, on_done
        numbers = [published.adapters[x.adapter] if x.adapter is not None else 0 for x in requests]
        episodes = []
        for number, (request, adapter) in enumerate(zip(requests, numbers, strict=True)):
            strings = request.sampling.stop_strings
            stop_text = StopText(strings, decode) if strings and decode is not None else None
            episodes.append(Episode.of(request, number, stop_text, adapter))
        self.waiting = deque(episodes)
        self.expected = Counter(prompt_key(x.request) for x in episodes if x.so_far is None)
        self.leaders: dict[tuple, Job] = {}
        """Jobs that compute a prompt, which others may follow."""
        self.jobs: list[deque[Job]] = [deque() for _ in range(self.sizes.shards)]
        self.slots = Slots(sizes.slots, sizes.max_length, sizes.speculate, self.model.config.routed, sizes.turns)
        self.page_tables = PageTables(self.sizes)
        self.state: State = initial_state(self.model, self.sizes)
        self.in_flight: deque[InFlight] = deque()
        self.recorded: list[Recorded] = []
        """Experts of pieces that were sent after the last dispatch."""
        self.done: list[Completion | None] = [None] * len(episodes)
        self.enough = False
        """Whether nobody waits for the requests that are left."""
        self.meter = Meter(self.model, self.weights, self.sizes, len(requests))

    def finish(self) -> list[Completion]:
        """The completions, in the order of the requests."""
        try:
            while (self.waiting or len(self.slots.taken)) and not self.enough:
                if self._pause is not None and self._pause(self._sent):
                    break
                for slot, observation in self.replies.arrived():
                    episode = self.slots.episodes[slot]
                    assert episode is not None
                    new = None if observation is None else self.slots.observe(slot, np.asarray(observation, np.int32))
                    if new is None:
                        self._complete(slot, episode)
                    else:
                        self._observed(slot, episode, new)
                with self._lock:
                    self._admit()
                    self._compute()
                    sent = self._dispatch()
                if len(self.in_flight) > (self.sizes.ahead if sent else 0):
                    self._retire(self.in_flight.popleft())
                elif not sent and self.replies:
                    self.replies.wait()
        finally:
            self.replies.close()
        while self.in_flight:  # what they sample is kept for the call that continues it
            self._retire(self.in_flight.popleft())
        tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        for episode in [*self.waiting, *(self.slots.suspend(slot, self.version) for slot in self.slots.taken.tolist())]:
            paused = episode.so_far or episode.completion(tokens, logprobs, self.version, "paused", None)
            self.done[episode.number] = paused
        assert all(self.done)
        return [completion for completion in self.done if completion is not None]

    def _admit(self) -> None:
        """Fills free slots from the queue, in its order, as far as there are pages."""
        idle = self.slots.idle.reshape(self.sizes.shards, -1)
        taken = (self.sizes.slots_of_shard - idle.sum(axis=1)).tolist()
        while self.waiting:
            slot = self._place(self.waiting[0], idle, taken)
            if slot is not None:
                self._enter(slot, self.waiting.popleft())
                idle.flat[slot] = False
                taken[self.page_tables.shard(slot)] += 1
            elif len(self.slots.taken):
                return
            else:  # only prompts that are kept can be in the way
                self.page_tables.forget(next(iter(self.page_tables.prefixes)))

    def _place(self, episode: Episode, idle: np.ndarray, taken: Sequence[int]) -> int | None:
        """A free slot with room for an episode: beside the pages of its prompt, or where most slots are free.

        Args:
            episode: enters it.
            idle: whether each slot of a shard is idle.
            taken: how many are not, in each shard.
        """
        owner = self._owner_shard(prompt_key(episode.request)) if episode.so_far is None else None
        for shard in sorted(range(self.sizes.shards), key=lambda shard: (shard != owner, taken[shard])):
            tokens = len(episode.request.prompt) + (0 if episode.so_far is None else len(episode.so_far.tokens))
            # Every slot at work may want one more page soon.
            free = taken[shard] < self.sizes.slots_of_shard
            if free and self.page_tables.fits(shard, tokens + 1, taken[shard], shared=shard == owner):
                return shard * self.sizes.slots_of_shard + int(idle[shard].argmax())
        return None

    def _owner_shard(self, key: tuple) -> int | None:
        """The shard that has a prompt, or will have computed it."""
        if key in self.page_tables.prefixes:
            return self.page_tables.prefixes[key].shard
        return self.page_tables.shard(self.leaders[key].slot) if key in self.leaders else None

    def _enter(self, slot: int, episode: Episode) -> None:
        """Puts an episode into a slot, and queues what has to be computed for it."""
        request, again = episode.request, episode.so_far is not None
        key, shard = prompt_key(request), self.page_tables.shard(slot)
        owner, tokens = None if again else self._owner_shard(key), self.slots.admit(slot, episode)
        scored = request.sampling if request.sampling.prompt_logprobs and episode.prompt_logprobs is None else None
        job = Job(slot, tokens, 0, episode.adapter, scored, pictures=episode.pictures(len(tokens)))
        if not again:
            self.expected[key] -= 1
        if owner != shard:
            self.page_tables.cover(slot, 0, len(tokens), windows=False)
            self.jobs[shard].append(job)
            if not again:
                self.leaders[key] = job
        elif key in self.page_tables.prefixes:
            self.jobs[shard].append(self._last_token(job, key))
        else:
            leader = self.leaders[key]
            held = self.page_tables.held(leader.slot)
            leader.copies += self.page_tables.adopt(slot, held, len(tokens), windows=False)
            leader.followers.append(slot)

    def _last_token(self, job: Job, key: tuple) -> Job:
        """What is left of a job whose prompt is kept: the state of its last token."""
        prefix, episode = self.page_tables.prefixes[key], self.slots.episodes[job.slot]
        assert episode is not None
        episode.prompt_logprobs = prefix.logprobs
        episode.experts += prefix.experts
        copies = self.page_tables.adopt(job.slot, prefix.held, len(job.tokens))
        reads = self.page_tables.share(prefix.shard, prefix.held)
        if not self.expected[key]:
            self.page_tables.forget(key)
        return replace(job, tokens=job.tokens[-1:], start=len(job.tokens) - 1, scored=None, copies=copies, reads=reads)

    def _compute(self) -> None:
        """Computes what is queued, piece by piece; no more than a long piece where many slots would wait for it."""
        computed = 0
        while any(self.jobs):
            longest = max(sum(len(job.tokens) for job in jobs) for jobs in self.jobs)
            piece = Piece(self.page_tables, self.sizes.piece_of(longest))
            for row, jobs in enumerate(self.jobs):
                piece.fill(row, jobs)
            for job in piece.done:
                held = self.page_tables.held(job.slot)
                # Followers get their pages of layers with a window.
                copies = [self.page_tables.adopt(slot, held, job.start, windows=True) for slot in job.followers]
                piece.finish(job, list(itertools.chain.from_iterable(copies)))
            piece.leave()
            self.state, output = prefill(self.model, self.weights, self.state, piece.inputs)
            for copies in piece.copies():
                self.state, _ = copy_pages(self.model, self.state, copies)
            self._score(piece, output.hidden)
            self.recorded += piece.record(output.experts)
            for job in piece.done:
                self._start(job)
            computed += piece.length
            if computed >= self.sizes.piece and 2 * len(self.slots.running) > self.sizes.slots:
                break

    def _score(self, piece: Piece, hidden: jax.Array) -> None:
        """Notes the log-probs of a piece's tokens, where they are wanted."""
        if not any(part.job.scored for part in piece.parts):
            return
        targets, settings = piece.targets()
        logprobs = np.asarray(score(self.model, self.weights.top, hidden, targets, settings))
        for job, row, begin, tokens, _ in piece.parts:
            if job.scored is not None:
                known = len(tokens) if len(job.tokens) else len(tokens) - 1  # what follows the last token is sampled
                job.logprobs.append(logprobs[row, begin : begin + known])

    def _start(self, job: Job) -> None:
        """Starts the slots whose tokens a job has computed, and keeps its pages for requests that come later."""
        logprobs = np.pad(np.concatenate(job.logprobs), (1, 0)) if job.logprobs else None
        for slot in (job.slot, *job.followers):
            self.slots.start(slot)
            episode = self.slots.episodes[slot]
            assert episode is not None
            episode.experts += job.experts
            if logprobs is not None:
                episode.prompt_logprobs = logprobs[: len(episode.request.prompt)]
        if job.reads is not None:
            self.page_tables.drop(self.page_tables.shard(job.slot), job.reads)
        for key in [key for key, leader in self.leaders.items() if leader is job]:
            del self.leaders[key]
            if self.expected[key] and self.sizes.chunk is None:  # states of a prompt's end would have to be kept too
                self.page_tables.keep(key, job.slot, job.start, logprobs, job.experts)

    def _dispatch(self) -> bool:
        """Sends a dispatch that samples some tokens in every slot; whether there is anything to sample."""
        watched = self.on_tokens is not None and len(self.done) == 1  # nobody reads many answers word by word
        cut_by_text = any(episode is not None and episode.stop_text is not None for episode in self.slots.episodes)
        most = min(SHORT if watched or cut_by_text else self.sizes.steps, self.sizes.steps)
        ahead = sum(flight.most for flight in self.in_flight)
        self._reserve(ahead + most)
        running = self.slots.running
        if not np.any(self.slots.left[running] > ahead):
            return False
        slots = self.sizes.dispatched(running)
        flow, reads, generations = self.slots.flow(slots), self.page_tables.reads(slots), self.slots.generations[slots]
        # The number of running slots at which the dispatch ends.
        if self.waiting or self._reply is not None or any(self.jobs):
            enough = len(running) - max(1, len(running) // REFILL)
        else:
            enough = max((width for width in self.sizes.widths if width < len(running)), default=0)
        self.state, sampled = decode(
            self.model, self.sizes.steps, self.weights, self.state, flow, reads, np.int32(most), np.int32(enough)
        )
        self.in_flight.append(InFlight(slots, generations, most, sampled, tuple(self.recorded)))
        self.recorded.clear()
        self._sent += 1
        return True

    def _retire(self, flight: InFlight) -> None:
        """Reads what a dispatch sampled; ends the requests whose turn is over, or asks their environment."""
        draws, counts, experts = jax.device_get(flight.sampled)
        for piece in flight.recorded:  # which the devices have computed before, and need not keep any longer
            piece.read()
        self.meter.add(self.slots.held[flight.slots], counts)
        ended = self.slots.take(flight.slots, flight.generations, draws, counts, experts)
        for slot in flight.slots.tolist() if self.on_tokens is not None else ():
            new, episode = self.slots.new(slot), self.slots.episodes[slot]
            if len(new) and self.on_tokens is not None and episode is not None:
                self.on_tokens(episode.number, new)
        for slot in ended:
            episode = self.slots.episodes[slot]
            assert episode is not None
            if not self.replies.ask(slot, episode.number, self.slots.completion(slot, self.version)):
                self._complete(slot, episode)

    def _reserve(self, most: int) -> None:
        """Takes the pages that the next tokens of all slots need, from those on that were read last; the last to come
        make room where they are too few."""
        running = self.slots.running
        goal = self.slots.held[running] + np.minimum(most, self.slots.left[running])
        goals = dict(zip(running.tolist(), goal.tolist(), strict=True))
        held = self.slots.held.tolist()
        for slot in self.page_tables.short(running, goal).tolist():
            if self.slots.episodes[slot] is None:
                continue  # it has made room for another
            shard = self.page_tables.shard(slot)
            self.page_tables.leave(slot, held[slot])
            while self.page_tables.free(shard) < self.page_tables.needs(slot, goals[slot]):
                if self._make_room(shard) == slot:
                    break
            else:
                self.page_tables.cover(slot, held[slot], goals[slot])

    def _make_room(self, shard: int) -> int | None:
        """Lets the pages of a prompt go that is wanted later; or takes the slot of the last to come, and returns it."""
        for key, prefix in self.page_tables.prefixes.items():
            if prefix.shard == shard:
                self.page_tables.forget(key)
                return None
        taken = [slot for slot in self.slots.taken.tolist() if self.page_tables.shard(slot) == shard]
        last = [slot for slot in taken if slot not in self.replies][-1]
        self._unqueue(last)
        self._preempt(last)
        return last

    def _preempt(self, slot: int) -> None:
        """Takes an episode out of its slot; it is the next to enter one, where all of its tokens are computed."""
        self.waiting.appendleft(self.slots.suspend(slot, self.version))
        self.page_tables.release(slot)

    def _unqueue(self, slot: int) -> None:
        """Forgets what is queued for a slot; those that follow another came later, and have left before it."""
        for jobs in self.jobs:
            for job in list(jobs):
                if slot in job.followers:
                    job.followers.remove(slot)
                    pages = [set(held.values()) for held in self.page_tables.held(slot)]
                    job.copies = [copy for copy in job.copies if copy.target not in pages[copy.kind]]
                elif job.slot == slot:
                    jobs.remove(job)
                    self.leaders = {key: one for key, one in self.leaders.items() if one is not job}
                    if job.reads is not None:
                        self.page_tables.drop(self.page_tables.shard(slot), job.reads)

    def _observed(self, slot: int, episode: Episode, new: np.ndarray) -> None:
        """Queues the tokens `[T]` of an observation, unless the slot has to make room for others."""
        held, shard = int(self.slots.held[slot]), self.page_tables.shard(slot)
        if self.sizes.chunk is not None:
            # States hold the last token already. They cannot go back to it, nor to the one before.
            if self.slots.beyond[slot] or len(new) == 1:
                self._preempt(slot)
                return
            new = new[1:]
        while self.page_tables.free(shard) < self.page_tables.needs(slot, held):
            if self._make_room(shard) == slot:
                return
        self.page_tables.cover(slot, held - len(new), held, windows=False)
        self.jobs[shard].append(Job(slot, new, held - len(new), episode.adapter, pictures=episode.pictures(held)))

    def _complete(self, slot: int, episode: Episode) -> None:
        """Ends a request."""
        self.done[episode.number] = completion = self.slots.completion(slot, self.version)
        self.slots.release(slot)
        self.page_tables.release(slot)
        self.enough |= self.on_done is not None and self.on_done(episode.number, completion)
