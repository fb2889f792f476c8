"""Requests that are answered together, with continuous batching over slots.

Each enters a free slot as soon as there are pages for its prompt, its tokens are computed in pieces with those of
others (`pieces.py`), and dispatches sample several tokens in all slots (`programs.decode`). The next one is sent before
the last is read, so that the device does not wait: what it samples for turns that turn out to have ended is dropped.
Where pages run short, the request that came last leaves its slot and is computed again later.

Requests with one prompt, under one adapter, share its pages. Where requests come one after the other, the pages of
sequences that have ended are kept for prompts that begin with them. No page outlasts the weights that filled it.

Axes: St decode steps, Sl slots, T time, s shards of the rows, Pt tokens of a page.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from tunix.models.config import MTP
from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine.experts import Known, Recorded
from tunix.rollout.engine.page_tables import Copy, Ended, PageTables, in_common
from tunix.rollout.engine.pieces import COPIES, Job, Piece, copy_calls
from tunix.rollout.engine.programs import State, Steps, copy_pages, decode, initial_state, prefill
from tunix.rollout.engine.request import Decode, Episode, StopText
from tunix.rollout.engine.shapes import Sizes, page_bytes, state_bytes
from tunix.rollout.engine.slots import Slots
from tunix.rollout.types import Pause
from tunix.types import Completion, OnDone, Reply, Request, Restart, Usage


class Meter:
    """Counts what a batch takes of the devices: slots that had something to sample, and bytes that had to be read."""

    def __init__(self, model: Model, weights: Weights, sizes: Sizes, requests: int):
        """Nothing has been counted; slots beyond the number of requests are never counted as idle."""
        # Each device reads its part of the weights in every step.
        read = (x for x in jax.tree.leaves(weights) if x is not weights.top["embed/w"] or model.config.tied)
        self._weights = sum(x.addressable_shards[0].data.nbytes for x in read)
        if model.config.mtp:  # each draft token reads the head that makes it, and the table of its logits
            head = [x for name, x in weights.top.items() if name.startswith(MTP)]
            head_bytes, table = (
                sum(x.addressable_shards[0].data.nbytes for x in of)
                for of in (head, [weights.top["embed/w" if model.config.tied else "head/w"]])
            )
            self._weights += (sizes.speculate - 1) * head_bytes + sizes.speculate * table
        mesh = jax.sharding.get_mesh()
        self._token = [size / sizes.page for size in page_bytes(model.config, mesh, sizes)]
        self._states = state_bytes(model.config, mesh)
        self._sizes, self._slots = sizes, min(sizes.slots, requests)
        self.usage = Usage(0, 0, 0.0)

    def add(self, held: np.ndarray, counts: np.ndarray, passes: np.ndarray) -> None:
        """Counts a dispatch, from the tokens in the cache of each slot before it, those that it sampled, and in how
        many passes through the model, `[Sl]`."""
        steps, sampled, read = int(counts.max(initial=0)), int(counts.sum()), self.usage.bytes
        drafted = self.usage.drafted + int(passes.sum()) * self._sizes.speculate
        accepted = self.usage.accepted + sampled - int(passes.sum())
        read += int(passes.max(initial=0)) * self._weights + self._states * sampled / self._sizes.shards
        for window, each in zip(self._sizes.windows, self._token, strict=True):
            # A slot that samples c tokens from h on reads h + 1, ..., h + c of them: c h + c (c + 1) / 2.
            seen = counts * (held + (counts + 1) / 2)
            if window is not None:
                seen = np.minimum(seen, counts * window)
            read += each * float(seen.sum()) / self._sizes.shards
        slot_steps = self.usage.slot_steps + steps * self._slots
        self.usage = Usage(self.usage.tokens + sampled, slot_steps, read, drafted, accepted)


THREADS = 32
"""Environments that are asked at the same time, at most."""
PATIENCE = 0.25
"""Seconds that answers are waited for while others could be sampled; where one took longer, no further one is."""


class Replies:
    """The answers of environments that are waited for: they answer in threads, while other slots are sampled.

    The threads wait for the processes in which environments live (`rollout/environments/remote.py`). Each environment
    is called by one thread at a time: its next turn is sampled after the answer to the last.

    Which tokens are computed together decides the last bits of their log-probs. So an answer is taken in the second
    round after its turn has ended, and is waited for a little: what is quick comes at the same place whatever the clock
    says.
    """

    def __init__(self, reply: Reply | None):
        """`reply` asks an environment; None where there is none."""
        self._reply = reply
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment") if reply else None
        self._waiting: dict[int, tuple[int, Future[np.ndarray | Restart | None]]] = {}
        """By slot, the round in which it was asked, and its answer."""
        self._round, self._patient = 0, True

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, slot: int) -> bool:
        return slot in self._waiting

    def ask(self, slot: int, number: int, completion: Completion) -> bool:
        """Asks about the turn of a slot that has stopped, of request `number`; whether there is an environment."""
        if self._reply is None or self._threads is None or completion.finish != "stop":
            return False
        self._waiting[slot] = self._round, self._threads.submit(self._reply, number, completion)
        return True

    def arrived(self) -> list[tuple[int, np.ndarray | Restart | None]]:
        """The answers of a further round, by slot: tokens, another transcript, or None at the end of an episode."""
        self._round += 1
        due = [(slot, future) for slot, (asked, future) in sorted(self._waiting.items()) if asked < self._round - 1]
        if due and self._patient:
            self._patient = not wait([future for _, future in due], timeout=PATIENCE).not_done
        arrived = [(slot, future) for slot, future in due if future.done()]
        for slot, _ in arrived:
            del self._waiting[slot]
        return [(slot, future.result()) for slot, future in arrived]

    def wait(self) -> None:
        """Waits until one more answer has come."""
        wait([future for _, future in self._waiting.values()], return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Ends the threads; answers that nobody waits for any more are given up."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


OnTokens = Callable[[int, np.ndarray], None]
"""Callback that receives (index of the request, its new tokens) after each dispatch."""
OnProgress = Callable[[int, Completion], None]
"""Callback that receives (number of a request that is watched, its completion so far) after each dispatch."""


class Arrivals(NamedTuple):
    """What has happened since the last dispatch to a batch that goes on for as long as requests come."""

    requests: Sequence[Request] = ()
    """New ones, which are numbered from 0 in the order in which they come."""
    gone: Collection[int] = ()
    """Numbers of requests that nobody waits for any more."""
    watched: Collection[int] = ()
    """Numbers of all requests whose tokens are read as they come: dispatches are short while there are some."""
    published: "Published | None" = None
    """Other adapters on the same base, as many and of the same settings, in the places of some that no request has any
    more and under new names; None where they are as before."""


Pull = Callable[[bool], Arrivals | None]
"""(whether nothing is left to do) -> what has come, or None to end the call; it may wait where nothing is left."""
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
        pull: Pull | None = None,
        on_progress: OnProgress | None = None,
    ):
        """Queues the requests; they, the callbacks and `decode` are those of `Engine` and its `run` and `serve`.

        Args:
            published: what answers them.
            sizes: the shapes of the programs.
            lock: held while programs are sent, so that those of other threads reach all devices in one order.
        """
        self._reply, self._pause, self._lock, self._sent = reply, pause, lock or nullcontext(), 0
        self.version, self.sizes = published.version, sizes
        self.model, self.weights = published.model, published.weights
        self.replies, self.on_tokens, self.on_done = Replies(reply), on_tokens, on_done
        self._pull, self._on_progress = pull, on_progress
        self._adapters, self._decode = published.adapters, decode
        self._came, self._gone, self._watched = 0, set[int](), frozenset[int]()
        self.waiting = deque[Episode]()
        self.expected = Counter[tuple]()
        """How many of those that wait have a prompt."""
        self._queue(requests)
        # Nobody reads many answers word by word.
        self._short = on_tokens is not None and len(requests) == 1
        self.leaders: dict[tuple, Job] = {}
        """Jobs that compute a prompt, which others may follow."""
        self.jobs: list[deque[Job]] = [deque() for _ in range(self.sizes.shards)]
        self.prefix_hits: list[tuple[Ended, list[Copy]]] = []
        """Kept sequences that slots begin with, whose pages are held until some of them are copied."""
        self.slots = Slots(sizes, self.model.config.routed)
        self.page_tables = PageTables(self.sizes)
        self.state: State = initial_state(self.model, self.sizes)
        self.in_flight: deque[InFlight] = deque()
        self.recorded: list[Recorded] = []
        """Experts of pieces that were sent after the last dispatch."""
        self.done: dict[int, Completion] = {}
        self.prefilled = 0
        """Tokens of prompts that were computed."""
        self.enough = False
        """Whether nobody waits for the requests that are left."""
        self.meter = Meter(self.model, self.weights, self.sizes, len(requests) or sizes.slots)

    def finish(self) -> list[Completion]:
        """The completions, in the order of the requests."""
        try:
            while self._goes_on():
                if self._pause is not None and self._pause(self._sent):
                    break
                self._take_replies()
                with self._lock:
                    self._admit()
                    self._compute()
                    sent = self._dispatch()
                if len(self.in_flight) > (self.sizes.ahead if sent else 0):
                    self._retire(self.in_flight.popleft())
                elif not sent and self.replies:
                    self.replies.wait()
            while self.in_flight:  # what they sample is kept for the call that continues it
                self._retire(self.in_flight.popleft())
            while self.enough and self.replies:  # a turn that has ended goes on with its answer
                self.replies.wait()
                self._take_replies()
        finally:
            self.replies.close()
        tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        for episode in [*self.waiting, *(self.slots.suspend(slot, self.version) for slot in list(self.slots.episodes))]:
            paused = episode.so_far or episode.completion(tokens, logprobs, self.version, None)
            self.done[episode.number] = paused
        return [completion for _, completion in sorted(self.done.items())]

    def _take_replies(self) -> None:
        """Goes on with the turns whose environments have answered, or ends their requests."""
        for slot, observation in self.replies.arrived():
            before, tokens = None, observation
            if isinstance(observation, Restart):
                before, tokens = self.slots.transcript(slot), observation.prompt
            restart = before is not None
            new = None if tokens is None else self.slots.observe(slot, np.asarray(tokens, np.int32), restart)
            if new is None:
                self._complete(slot)
                continue
            episode, held, shard = self.slots.episodes[slot], int(self.slots.held[slot]), self.page_tables.shard(slot)
            # States hold the last token already. They cannot go back to it, nor to the one before.
            if self.sizes.chunk is not None and (restart or self.slots.beyond[slot] or len(new) == 1):
                self._preempt(slot)
                continue
            if before is not None:  # the pages of what both transcripts begin with are kept
                kept = self.page_tables.rewind(slot, min(in_common(before, new), len(new) - 1))
                if kept and (experts := self.slots.completion(slot, self.version).experts) is not None:
                    # They are not computed again: their experts are those of the transcript before.
                    first = episode.begin - len(before)
                    episode.experts.append(Known.of(experts[first : first + kept], episode.begin))
                new = new[kept:]
            elif self.sizes.chunk is not None:
                new = new[1:]
            if self._has_room(slot, held):  # else it has made room for others
                self.page_tables.cover(slot, held - len(new), held, windows=False)
                job = Job(slot, new, held - len(new), episode.adapter, pictures=episode.pictures(held))
                self.jobs[shard].append(job)

    def _queue(self, requests: Sequence[Request]) -> None:
        """Queues requests, numbered on."""
        for number, request in enumerate(requests, start=self._came):
            strings, adapter = request.sampling.stop_strings, request.adapter
            stop_text = StopText(strings, self._decode) if strings and self._decode is not None else None
            episode = Episode(request, number, stop_text, 0 if adapter is None else self._adapters[adapter])
            self.waiting.append(episode)
            if episode.so_far is None:
                self.expected[episode.key] += 1
        self._came += len(requests)

    def _goes_on(self) -> bool:
        """Whether there is something to do, or may still come; takes what has come, and gives up what has gone."""
        at_work = bool(self.waiting or self.slots.episodes)
        if self._pull is None:
            return at_work and not self.enough
        if (arrivals := self._pull(not (at_work or self.in_flight))) is None:
            return False
        if arrivals.published is not None:
            self.weights, self._adapters = arrivals.published.weights, arrivals.published.adapters
        self._watched = frozenset(arrivals.watched)
        self._short = bool(self._watched)
        self._queue(arrivals.requests)
        self._gone.update(arrivals.gone)
        if self._gone:
            for episode in [episode for episode in self.waiting if episode.number in self._gone]:
                if episode.so_far is None:
                    self._enters(episode.key)
            self.waiting = deque(episode for episode in self.waiting if episode.number not in self._gone)
            # What others may follow is computed to its end.
            computed = {slot for jobs in self.jobs for job in jobs for slot in (job.slot, *job.followers)}
            for slot in [x for x, episode in self.slots.episodes.items() if episode.number in self._gone]:
                if slot not in computed:
                    self.slots.release(slot)
                    self.page_tables.release(slot)
            self._gone &= {episode.number for episode in self.slots.episodes.values()}
        return True

    def _enters(self, key: tuple) -> None:
        """One request less waits with a prompt."""
        self.expected[key] -= 1
        if not self.expected[key]:
            del self.expected[key]

    def _admit(self) -> None:
        """Fills free slots from the queue, in its order, as far as there are pages; queues what has to be computed."""
        shards, of_shard, tables = range(self.sizes.shards), self.sizes.slots_of_shard, self.page_tables
        idle = np.ones((len(shards), of_shard), bool)
        idle.flat[list(self.slots.episodes)] = False
        while self.waiting:
            episode, taken = self.waiting[0], (of_shard - idle.sum(axis=1)).tolist()
            key, again, owner = episode.key, episode.so_far is not None, None
            if not again:  # the shard that has its prompt, or will have computed it
                if key in tables.prefixes:
                    owner = tables.prefixes[key].shard
                elif key in self.leaders:
                    owner = tables.shard(self.leaders[key].slot)
            kept = None if again or owner is not None else self._kept(episode)
            nearest = owner if kept is None else kept[0].shard
            length = len(episode.request.prompt) + (0 if episode.so_far is None else len(episode.so_far.tokens))
            # Every slot at work may want one more page soon, but those that have all they will ever need.
            held, page = self.slots.held, self.sizes.page
            grows = ~idle.ravel() if self._reply else -(-(held + self.slots.left) // page) > -(-held // page)
            spare = grows.reshape(idle.shape).sum(axis=1).tolist()
            # Beside the pages of its prompt, or of what it begins with, or where most slots are free.
            for shard in sorted(shards, key=lambda shard: (shard != nearest, taken[shard])):
                if taken[shard] < of_shard and tables.fits(shard, length + 1, spare[shard], shared=shard == owner):
                    break
            else:
                if self.slots.episodes:
                    return
                # Only prompts that are kept can be in the way.
                tables.forget(next(iter(tables.prefixes)))
                continue
            self.waiting.popleft()
            slot = shard * of_shard + int(idle[shard].argmax())
            idle.flat[slot] = False
            tokens = self.slots.admit(slot, episode)
            pictures = episode.pictures(len(tokens))
            job = Job(slot, tokens, 0, episode.adapter, pictures=pictures, scores=episode.scores)
            if not again:
                self._enters(key)
            if owner != shard:
                # Looked for once more: what is kept may have made room for it.
                kept = None if again or owner is not None else self._kept(episode)
                if kept is not None and kept[0].shard == shard:
                    ended, number = kept
                    tables.share(shard, ended.held)  # it may have to make room for the pages that are copied
                    self.prefix_hits.append((ended, tables.adopt(slot, ended.held, number)))
                    if len(self.prefix_hits) == COPIES or any(window is not None for window in self.sizes.windows):
                        self._copy_prefix_hits()  # layers with a window have no pages to spare for what is to be copied
                    tables.leave(slot, number)
                    job.tokens, job.start = tokens[number:], number
                    if ended.experts is not None:
                        job.experts.append(Known.of(ended.experts[:number], 0))
                tables.cover(slot, job.start, len(tokens), windows=False)
                self.jobs[shard].append(job)
                if not again:
                    self.leaders[key] = job
            elif key in tables.prefixes:  # all that is left to compute is the state of the last token
                prefix = tables.prefixes[key]
                episode.experts += prefix.experts
                job.copies = tables.adopt(slot, prefix.held, len(tokens))
                job.reads = tables.share(shard, prefix.held)
                job.tokens, job.start = tokens[-1:], len(tokens) - 1
                if not self.expected[key]:
                    tables.forget(key)
                self.jobs[shard].append(job)
            else:
                leader = self.leaders[key]
                leader.copies += tables.adopt(slot, tables.held(leader.slot), len(tokens), windows=False)
                leader.followers.append(slot)

    def _kept(self, episode: Episode) -> tuple[Ended, int] | None:
        """A sequence that has ended, and how many tokens of it the prompt of a request begins with; None without any.
        States of what was sampled would have to be kept too, pictures be compared, and log-probs be kept."""
        whole = episode.request.pictures is not None or episode.scores is not None
        if self._pull is None or self.sizes.chunk is not None or whole:
            return None
        return self.page_tables.find(np.asarray(episode.request.prompt, np.int32), episode.request.adapter)

    def _copy_prefix_hits(self) -> None:
        """Copies the pages that slots begin with, of sequences that are kept, and will write to."""
        rows = [[list[Copy]() for _ in range(self.sizes.shards)] for _ in self.sizes.windows]
        for ended, copies in self.prefix_hits:
            for copy in copies:
                rows[copy.kind][ended.shard].append(copy)
        for copied in copy_calls(rows):
            self.state, _ = copy_pages(self.model, self.state, copied)
        for ended, _ in self.prefix_hits:
            self.page_tables.drop(ended.shard, ended.held)
        self.prefix_hits.clear()

    def _compute(self) -> None:
        """Computes what is queued, piece by piece: a dispatch takes as long with few slots at work as with all.

        No more than a long piece where many slots would wait for it and tokens are read as they come, as of a server.
        """
        self._copy_prefix_hits()
        computed = 0
        while any(self.jobs):
            longest = max(sum(len(job.tokens) for job in jobs) for jobs in self.jobs)
            piece = Piece(self.page_tables, self.sizes.piece_of(longest))
            for row, jobs in enumerate(self.jobs):
                piece.fill(row, jobs)
            done, copied = piece.finish()
            self.state, (experts, scores) = prefill(self.model, self.weights, self.state, piece.inputs)
            for copies in copied:
                self.state, _ = copy_pages(self.model, self.state, copies)
            if experts is not None:
                self.recorded.append(recorded := Recorded(experts))
                for job, row, begin, number, position in piece.parts:
                    job.experts.append(Known(recorded, row, begin, number, position))
            scores = jax.device_get(scores)
            for job, row, begin, number, position in piece.parts:
                if job.scores is not None:
                    for whole, new in zip(job.scores, scores, strict=True):
                        # Of a request that is computed again, tokens after the prompt are left out.
                        after = whole[position + 1 : position + 1 + number]
                        after[:] = new[row, begin : begin + len(after), *map(slice, whole.shape[1:])]
            for job in done:
                for slot in (job.slot, *job.followers):
                    self.slots.start(slot)
                    episode = self.slots.episodes[slot]
                    episode.experts += [x._replace(position=x.position + episode.begin) for x in job.experts]
                if job.reads is not None:
                    self.page_tables.drop(self.page_tables.shard(job.slot), job.reads)
                for key in [key for key, leader in self.leaders.items() if leader is job]:
                    del self.leaders[key]
                    # For requests that come later; states of a prompt's end would have to be kept too.
                    if self.expected[key] and self.sizes.chunk is None:
                        self.page_tables.keep(key, job.slot, job.start, tuple(job.experts))
            for slot in [job.slot for job in done if not self.slots.left[job.slot]]:  # scored, and nothing is sampled
                self.slots.episodes[slot].ended = "length"
                self._complete(slot)
            computed += piece.length
            self.prefilled += sum(number for *_, number, _ in piece.parts)
            many, read_along = 2 * len(self.slots.running) > self.sizes.slots, self.on_tokens or self._watched
            if read_along and many and computed >= self.sizes.piece:
                break

    def _dispatch(self) -> bool:
        """Sends a dispatch that samples some tokens in every slot; whether there is anything to sample."""
        cut_by_text = any(episode.stop_text is not None for episode in self.slots.episodes.values())
        # Whoever comes next to a free slot waits for the end of the dispatch.
        has_free_slots = self._pull is not None and len(self.slots.episodes) < self.sizes.slots
        most = min(SHORT if self._short or cut_by_text or has_free_slots else self.sizes.steps, self.sizes.steps)
        ahead = sum(flight.most for flight in self.in_flight)
        # The pages that the next tokens of all slots need, from those on that were read last.
        running, held = self.slots.running, self.slots.held.tolist()
        goal = self.slots.held[running] + np.minimum(ahead + most, self.slots.left[running])
        goals = dict(zip(running.tolist(), goal.tolist(), strict=True))
        for slot in self.page_tables.short(running, goal).tolist():
            if slot not in self.slots.episodes:
                continue  # it has made room for another
            self.page_tables.leave(slot, held[slot])
            if self._has_room(slot, goals[slot]):
                self.page_tables.cover(slot, held[slot], goals[slot])
        running = self.slots.running
        if not np.any(self.slots.left[running] > ahead):
            return False
        # Those at work, and idle ones that fill up each shard to as many.
        at_work = np.zeros((self.sizes.shards, self.sizes.slots_of_shard), bool)
        at_work.flat[running] = True
        busy, idle = at_work.sum(axis=1, keepdims=True), ~at_work
        width = self.sizes.width(int(busy.max())) // self.sizes.shards
        slots = np.flatnonzero(at_work | (idle & (np.cumsum(idle, axis=1) <= width - busy))).astype(np.int32)
        flow, reads, generations = self.slots.flow(slots), self.page_tables.reads(slots), self.slots.generations[slots]
        # The number of running slots at which the dispatch ends.
        if self.waiting or self._reply is not None or any(self.jobs):
            enough = len(running) - max(1, len(running) // REFILL)
        else:
            enough = max((width for width in self.sizes.widths if width < len(running)), default=0)
        self.state, sampled = decode(
            *(self.model, self.sizes.steps, self.sizes.speculate, self.weights, self.state, flow, reads),
            *(np.int32(most), np.int32(enough)),
        )
        self.in_flight.append(InFlight(slots, generations, most, sampled, tuple(self.recorded)))
        self.recorded.clear()
        self._sent += 1
        return True

    def _retire(self, flight: InFlight) -> None:
        """Reads what a dispatch sampled; ends the requests whose turn is over, or asks their environment."""
        draws, counts, passes, experts = flight.sampled
        if not any(episode.request.sampling.top_logprobs for episode in self.slots.episodes.values()):
            # Alternatives that nobody wants stay on the devices: they are most of what a dispatch returns.
            nothing = np.zeros((*draws.tokens.shape, 0), np.float32)
            draws = draws._replace(top_ids=nothing, top_logprobs=nothing)
        draws, counts, passes, experts = jax.device_get((draws, counts, passes, experts))
        for piece in flight.recorded:  # which the devices have computed before, and need not keep any longer
            piece.read()
        self.meter.add(self.slots.held[flight.slots], counts, passes)
        ended = self.slots.take(flight.slots, flight.generations, draws, counts, experts)
        if self.on_tokens is not None:
            for slot in flight.slots.tolist():
                if len(new := self.slots.new(slot)) and slot in self.slots.episodes:
                    self.on_tokens(self.slots.episodes[slot].number, new)
        if self._on_progress is not None and self._watched:
            for slot in set(flight.slots.tolist()).difference(ended):
                episode = self.slots.episodes.get(slot)
                if episode is not None and episode.number in self._watched and len(self.slots.new(slot)):
                    self._on_progress(episode.number, self.slots.completion(slot, self.version))
        for slot in ended:
            completion = self.slots.completion(slot, self.version)
            if not self.replies.ask(slot, self.slots.episodes[slot].number, completion):
                self._complete(slot)

    def _has_room(self, slot: int, tokens: int) -> bool:
        """Whether there are pages for so many tokens of a slot: prompts that are wanted later make room, then the last
        to come, which may be this one."""
        tables, shard = self.page_tables, self.page_tables.shard(slot)
        while tables.lacks(slot, tokens):
            if kept := [key for key, prefix in tables.prefixes.items() if prefix.shard == shard]:
                tables.forget(kept[0])
                continue
            of_shard = [other for other in self.slots.episodes if tables.shard(other) == shard]
            last = [other for other in of_shard if other not in self.replies][-1]
            # What is queued for it is forgotten; those that follow another came later, and have left before it.
            for job in list(self.jobs[shard]):
                if last in job.followers:
                    job.followers.remove(last)
                    pages = [set(held.values()) for held in tables.held(last)]
                    job.copies = [copy for copy in job.copies if copy.target not in pages[copy.kind]]
                elif job.slot == last:
                    self.jobs[shard].remove(job)
                    self.leaders = {key: leader for key, leader in self.leaders.items() if leader is not job}
                    if job.reads is not None:
                        tables.drop(shard, job.reads)
            self._preempt(last)
            if last == slot:
                return False
        return True

    def _preempt(self, slot: int) -> None:
        """Takes an episode out of its slot; it is the next to enter one, where all of its tokens are computed."""
        self.waiting.appendleft(self.slots.suspend(slot, self.version))
        self.page_tables.release(slot)

    def _complete(self, slot: int) -> None:
        """Ends a request."""
        episode = self.slots.episodes[slot]
        completion = self.slots.completion(slot, self.version)
        if self._pull is None:
            self.done[episode.number] = completion
        elif self.sizes.chunk is None and episode.request.pictures is None:
            sequence = np.concatenate([np.asarray(episode.request.prompt, np.int32), completion.tokens])
            self.page_tables.retain(slot, sequence, episode.request.adapter, completion.experts)
        self.slots.release(slot)
        self.page_tables.release(slot)
        self.enough |= self.on_done is not None and self.on_done(episode.number, completion)
