"""The models and samplers of all clients, and the thread that computes for them.

A training client has an adapter of its own over the base that all share, with its optimizer and the sum of its
gradients. A sampler is an adapter as it was at some moment, or the base. One thread carries out the jobs of training
(`futures.Turns`), and computes log-probs. Samplers are answered by the server's one engine, together with all else that
it is asked: `PLACES` adapters at a time, in which others take the place of one that nobody waits for.
"""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix.errors import UserError
from tunix.hf.peft_folder import fingerprint, load_adapter, save_adapter
from tunix.inference.batcher import Batcher, Ticket
from tunix.inference.model import InferenceModel
from tunix.lora.config import AdapterConfig
from tunix.lora.multi_lora import LoadedAdapter
from tunix.serving.tinker.checkpoints import Checkpoints, Run
from tunix.serving.tinker.compute import ALPHA, Adapter, Chosen, Compute, Step, chosen
from tunix.serving.tinker.futures import Promise, Promises, Refusal, Result, Turns
from tunix.serving.tinker.wire import MESSAGES, Datum, config_of, data_of, forward_backward_output
from tunix.types import Request

_log = logging.getLogger(__name__)
PLACES = 4
"""Adapters that the engine samples from at a time: each one more makes every token a little dearer."""
SNAPSHOTS = 8
"""How many unnamed snapshots of a model are kept, the last ones, and how many named ones in memory."""


@dataclass
class Tenant:
    """A model that a client trains."""

    name: str
    """Its id, e.g. `6d1f:train:0`."""
    run: Run
    params: dict[str, jax.Array]
    """Its adapter's weights, of the highest rank; see `Compute`."""
    moments: optax.OptState
    """The optimizer's state."""
    gradients: dict[str, jax.Array] | None = None
    """Their sum since the last update; None where there are none."""


@dataclass
class Sampler:
    """What a client samples from."""

    name: str
    """Its id, e.g. `6d1f:sample:0`."""
    path: str | None = None
    """The checkpoint; None for the base, and for an unnamed snapshot."""
    model: str | None = None
    """The model that it is an unnamed snapshot of; None for others."""
    adapter: Adapter | None = None
    """The weights; None where they were not read yet, or are gone."""


@dataclass
class Place:
    """A place among the engine's adapters."""

    name: str
    """What requests call its adapter: another name for each that was there, e.g. `tinker 12`."""
    loaded: LoadedAdapter
    adapter: Adapter
    """What is loaded."""
    waiting: int = 0
    """How many requests have it."""
    used: int = 0
    """When it was needed last, counted in requests."""


@dataclass(eq=False)
class Sampling:
    """A request for completions of one prompt."""

    promise: Promise
    sampler: Sampler
    requests: list[Request]
    """One for each completion."""
    scored: int | None = None
    """The position from which on log-probs of the prompt are asked for, e.g. 1; None where none are."""
    adapter: Adapter | None = None
    """The sampler's; None for the base."""
    place: Place | None = None
    """Where the engine has it; None for the base."""
    tickets: list[Ticket] = field(default_factory=list)
    """The requests, once the engine has them."""

    @property
    def exact(self) -> bool:
        """Whether the engine's log-probs are those of the model itself."""
        sampling = self.requests[0].sampling
        return (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)


class Tenants:
    """All that clients train and sample from."""

    def __init__(
        self,
        inference: InferenceModel,
        compute: Compute,
        batches: Batcher,
        publish: Callable[[Mapping[str, LoadedAdapter]], None],
        folder: Path,
    ):
        """Starts the thread.

        Args:
            inference: the base; its own engine is not used.
            compute: trains adapters.
            batches: answers requests for the base, and for adapters.
            publish: sets these adapters.
            folder: where checkpoints are.
        """
        self.inference, self.name = inference, inference.options.model
        self.promises, self.checkpoints = Promises(), Checkpoints(folder)
        self.compute, self._batches, self._publish = compute, batches, publish
        self.models: dict[str, Tenant] = {}
        self.samplers: dict[str, Sampler] = {}
        self._changed, self._closed, self._turns = threading.Condition(), False, Turns()
        nothing, self._number = compute.loaded(compute.nothing), 0
        self._places = [Place(f"nothing {number}", nothing, compute.nothing) for number in range(PLACES)]
        self._publish({place.name: place.loaded for place in self._places})
        self._waiting, self._running, self._ready = deque[Sampling](), set[Sampling](), list[Sampling]()
        """What has no place yet, what the engine has, and what is sampled and lacks log-probs."""
        self._thread = threading.Thread(target=self._serve, name="tinker", daemon=True)
        self._thread.start()

    # What clients ask for, from any thread.

    def submit(
        self, model: str, number: int, body: bytes, work: Callable[[], Result], *, new: bool = False
    ) -> dict[str, str]:
        """Promises the result of a model's request of a number, as the protocol says it.

        Args:
            model: its id.
            number: the place in the order of the model's requests.
            body: what was asked, in one form for all that mean the same.
            work: computes the result, in the thread of this.
            new: whether the model's order begins with it.

        Raises:
            Refusal: there is no such model, or the number was used for another request.
        """
        name = f"{model}:{number}"
        with self._changed:
            if new:
                self._turns.open(model)
            self._turns.check(model)
            if (promise := self.promises.reserve(name, body)) is not None:
                try:
                    self._turns.add(model, number, (promise, work))
                except UserError as error:
                    promise.settle(error)
                self._changed.notify_all()
        return {"request_id": name, "model_id": model}

    def sample(self, sampling: Sampling) -> None:
        """Queues a request for completions; reads its adapter first, where it is not in memory."""
        try:
            sampling.adapter = self._weights(sampling.sampler)
        except UserError as error:
            sampling.promise.settle(error)
        else:
            with self._changed:
                self._waiting.append(sampling)
                self._begin()

    def end(self, session: str) -> None:
        """Frees the models and samplers of a session; what they have not answered fails."""
        with self._changed:
            self._turns.close(f"{session}:")
            for named in (self.models, self.samplers):
                for name in [name for name in named if name.startswith(f"{session}:")]:
                    del named[name]
            left = {x for x in (*self._waiting, *self._running) if x.sampler.name.startswith(f"{session}:")}
            self._waiting = deque(x for x in self._waiting if x not in left)
            for sampling in left & self._running:
                self._batches.give_up(sampling.tickets)
                self._leave(sampling)
            self._begin()
        self.promises.fail(UserError(f"the session {session} has ended"), f"{session}:")

    def close(self) -> None:
        """Ends the thread; what is not answered fails."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.promises.fail(RuntimeError("the server ends"))

    def sampler(self, name: str) -> Sampler:
        """A sampler by its id.

        Raises:
            Refusal: there is none.
        """
        if (sampler := self.samplers.get(name)) is None:
            raise Refusal(404, f"there is no sampler {name}: its session may have ended")
        return sampler

    # Jobs of training, in the thread.

    def create(self, model: str, run: Run, seed: int | None) -> Result:
        """A new adapter.

        Raises:
            UserError: this is another base, the rank is above the highest, or nothing would train.
        """
        self.check_base(run.base_model)
        if not 1 <= run.rank <= self.compute.rank:
            raise UserError(f"lora_config.rank: {run.rank}; this server trains 1 to {self.compute.rank} (--rank)")
        if not run.modules:
            raise UserError("lora_config: nothing would train: set train_mlp or train_attn")
        number = secrets.randbits(31) if seed is None else seed % (1 << 31)
        params = self.compute.fresh(number, run.rank, run.modules)
        self.checkpoints.begin(model, run)
        self._keep(Tenant(model, run, params, self.compute.moments(params)))
        return {"type": "create_model", "model_id": model}

    def forward_backward(self, message: Any) -> Result:
        """The losses of a `ForwardBackwardRequest`; adds gradients to the model's unless it is forward only.

        Raises:
            UserError: the loss or its data are not understood, or do not fit.
        """
        tenant = self._tenant(message.model_id)
        kind, loss = chosen(message.loss_fn, config_of(message))
        data = data_of(message)
        self.compute.check(data, kind)
        if message.forward_only:
            outputs = self.compute.forward(self._adapter(tenant), data, loss)
        else:
            sums, tenant.gradients = tenant.gradients, None  # they are donated
            if sums is None:
                sums = self.compute.zeros(tenant.params)
            outputs, tenant.gradients = self.compute.backward(self._adapter(tenant), sums, data, loss)
        total = float(sum(np.sum(x, dtype=np.float64) for x in outputs.losses))
        pairs = zip(outputs.logprobs, outputs.losses, strict=True)
        return forward_backward_output(
            [{"logprobs": logprobs, "elementwise_loss": losses} for logprobs, losses in pairs], {"loss:sum": total}
        )

    def optim_step(self, model: str, step: Step) -> Result:
        """An update with the sum of the gradients, which is 0 where there are none."""
        tenant = self._tenant(model)
        gradients = self.compute.zeros(tenant.params) if tenant.gradients is None else tenant.gradients
        tenant.params, tenant.moments, norm = self.compute.update(tenant.params, tenant.moments, gradients, step)
        tenant.gradients = None
        return {"metrics": {"grad_norm": norm, "learning_rate": float(step.learning_rate)}}

    def save(self, model: str, kind: str, name: str, overwrite: bool) -> Result:
        """Saves weights to sample from (`sampler_weights`), or what training goes on from (`weights`)."""
        tenant, path, state = self._tenant(model), f"tinker://{model}/{kind}/{name}", None
        rank, modules, moments = tenant.run.rank, tenant.run.modules, cast(Any, tenant.moments)
        if kind == "weights":
            state = {"count": np.asarray(moments.count)}
            for part, tree in (("mu", moments.mu), ("nu", moments.nu)):
                state |= {f"{part}/{name}": x for name, x in self.compute.narrowed(tree, rank, modules).items()}
        arrays = {name: jnp.asarray(x) for name, x in self.compute.narrowed(tenant.params, rank, modules).items()}
        settings, decoder = self.compute.settings(rank, modules), self.compute.model.config
        write = partial(save_adapter, params=arrays, adapter=settings, config=decoder, **self._origin)
        self.checkpoints.save(path, write, state, overwrite)
        return {"type": "save_weights" if state else "save_weights_for_sampler", "path": path}

    def snapshot(self, model: str, sampler: str) -> Result:
        """A sampler of the weights as they are now, in memory."""
        tenant = self._tenant(model)
        with self._changed:
            self.samplers[sampler] = Sampler(sampler, model=model, adapter=self._adapter(tenant))
            of_model = [x for x in self.samplers.values() if x.model == model and x.adapter is not None]
        for old in of_model[:-SNAPSHOTS]:
            old.adapter = None
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

    def load(self, model: str, base: str, path: str, optimizer: bool, about: Any, *, new: bool) -> Result:
        """The weights of a checkpoint, with its optimizer or a fresh one, in a model or as a new one.

        Raises:
            UserError: there is no such checkpoint, it is one to sample from, or it does not fit.
        """
        self.check_base(base)
        state = self.checkpoints.optimizer(path)
        settings, adapter = self._read(path)
        modules = tuple(name for name in self.compute.modules if name in settings.targeted)
        run = Run(base, settings.rank, modules, about)
        before = run if new else self._tenant(model).run
        if (before.rank, before.modules) != (run.rank, run.modules):
            raise UserError(f"{path} has rank {run.rank} and adapts {', '.join(run.modules)}, unlike {model}")
        moments: Any = self.compute.moments(adapter.params)
        if optimizer:
            mu, nu = (
                self.compute.widened({name[3:]: x for name, x in state.items() if name.startswith(part)})
                for part in ("mu/", "nu/")
            )
            moments = moments._replace(count=jnp.asarray(state["count"]), mu=mu, nu=nu)
        tenant = Tenant(model, before, adapter.params, moments)
        if new:
            self.checkpoints.begin(model, run)
        self._keep(tenant)
        return {"type": "load_weights", "path": path, "model_id": model}

    def check_base(self, name: str | None) -> None:
        """Checks that a base is the one that is served.

        Raises:
            UserError: it is another one.
        """
        if name != self.name:
            raise UserError(f"base_model: {name} is not served here; {self.name} is")

    def _keep(self, tenant: Tenant) -> None:
        """Has a model from now on, unless its session has ended meanwhile."""
        with self._changed:
            self._turns.check(tenant.name)
            self.models[tenant.name] = tenant

    def _tenant(self, model: str) -> Tenant:
        if (tenant := self.models.get(model)) is None:
            raise UserError(f"{model} was not created: its first request failed, or its session has ended")
        return tenant

    def _adapter(self, tenant: Tenant) -> Adapter:
        return Adapter(tenant.params, self.compute.rank / tenant.run.rank)

    @cached_property
    def _origin(self) -> dict[str, str | None]:
        """What a PEFT folder says of its base."""
        source = self.inference.source
        known = source.folder is not None and source.stands_alone
        digest = fingerprint(source.name, cast(Path, source.folder), source.decoder, None) if known else None
        return {"base": source.name, "fingerprint": digest}

    def _read(self, path: str) -> tuple[AdapterConfig, Adapter]:
        """The settings and the weights of a checkpoint.

        Raises:
            UserError: there is none, or it was not trained here, or its rank is above the highest.
        """
        settings, arrays = load_adapter(self.checkpoints.folder(path), self.compute.model.config, lm_head=True)
        if settings.rank > self.compute.rank or settings.alpha != ALPHA:
            raise UserError(
                f"{path} has rank {settings.rank} and alpha {settings.alpha:g}; this server trains ranks up to "
                f"{self.compute.rank} (--rank), with alpha {ALPHA:g}"
            )
        if foreign := sorted(arrays.keys() - self.compute.nothing.params.keys()):
            raise UserError(f"{path} has {foreign[0]}, which this server does not train")
        return settings, Adapter(self.compute.widened(arrays), self.compute.rank / settings.rank)

    # The thread.

    def _serve(self) -> None:
        """Trains, and computes log-probs for samplers, in turn."""
        while True:
            with self._changed:
                while (job := self._turns.take()) is None and not (self._closed or self._ready):
                    self._changed.wait()
                if self._closed:
                    return
                ready, self._ready = self._ready, []
            if job is not None:
                promise, work = job
                try:
                    promise.settle(work())
                except Exception as error:  # shown to the client that asked
                    if not isinstance(error, UserError | Refusal):
                        _log.exception("%s failed", promise.request_id)
                    promise.settle(error)
            for adapter in {id(x.adapter): x.adapter for x in ready}.values():
                alike = [x for x in ready if x.adapter is adapter]
                try:
                    self._finish(adapter or self.compute.nothing, alike)
                except Exception as error:
                    _log.exception("log-probs of samples failed")
                    for sampling in alike:
                        sampling.promise.settle(error)

    def _begin(self) -> None:
        """Hands the engine what waits, in its order, as long as its adapters have places; the lock is held."""
        while self._waiting:
            sampling = self._waiting[0]
            if (adapter := sampling.adapter) is not None:
                places = sorted(self._places, key=lambda x: (x.adapter is not adapter, x.waiting > 0, x.used))
                place, self._number = places[0], self._number + 1
                if place.adapter is not adapter:
                    if place.waiting:
                        return
                    place.name, place.adapter = f"tinker {self._number}", adapter
                    place.loaded = self.compute.loaded(adapter)
                    self._publish({x.name: x.loaded for x in self._places})
                place.waiting, place.used, sampling.place = place.waiting + 1, self._number, place
            self._waiting.popleft()
            self._running.add(sampling)
            name = None if sampling.place is None else sampling.place.name
            sampling.tickets = [Ticket(replace(request, adapter=name)) for request in sampling.requests]
            for ticket in sampling.tickets:
                ticket.future.add_done_callback(lambda _, sampling=sampling: self._sampled(sampling))
            self._batches.submit(sampling.tickets)

    def _leave(self, sampling: Sampling) -> None:
        """The engine has a request no more; the lock is held."""
        self._running.discard(sampling)
        if sampling.place is not None:
            sampling.place.waiting -= 1

    def _sampled(self, sampling: Sampling) -> None:
        """Answers a request whose completions are all there, or has log-probs computed first."""
        with self._changed:
            if sampling not in self._running or not all(ticket.future.done() for ticket in sampling.tickets):
                return
            self._leave(sampling)
            self._begin()
        errors = [error for ticket in sampling.tickets if (error := ticket.future.exception()) is not None]
        if errors:
            sampling.promise.settle(cast(Exception, errors[0]))
        elif sampling.exact and sampling.scored is None:
            self._finish(self.compute.nothing, [sampling])
        else:
            with self._changed:
                self._ready.append(sampling)
                self._changed.notify_all()

    def _weights(self, sampler: Sampler) -> Adapter | None:
        if sampler.adapter is None and sampler.model is not None:
            raise UserError(
                f"the weights of {sampler.name} are gone: the last {SNAPSHOTS} unnamed snapshots of a model are kept. "
                "save_weights_for_sampler with a name keeps more"
            )
        if sampler.path is None:
            return sampler.adapter
        if sampler.adapter is None:
            sampler.adapter = self._read(sampler.path)[1]
            others = [x for x in self.samplers.values() if x.path and x.adapter is not None and x is not sampler]
            for old in others[: 1 - SNAPSHOTS]:  # which are read again where they are asked for
                old.adapter = None
        return sampler.adapter

    def _finish(self, adapter: Adapter, ready: List[Sampling]) -> None:
        """Answers requests whose completions are there, with log-probs of their prompts where these are asked for."""
        wholes: list[np.ndarray] = []
        for sampling in ready:
            prompt = sampling.requests[0].prompt
            if sampling.scored is not None:
                wholes.append(prompt)
            if not sampling.exact:
                wholes += [np.append(prompt, ticket.future.result().tokens) for ticket in sampling.tickets]
        data = [Datum(whole[:-1], {"target_tokens": whole[1:]}) for whole in wholes if len(whole) > 1]
        scored = iter(self.compute.forward(adapter, data, Chosen()).logprobs if data else [])
        scores = iter([next(scored) if len(whole) > 1 else np.zeros(0) for whole in wholes])
        for sampling in ready:
            response = MESSAGES["SampleResponse"]()
            if sampling.scored is not None:  # NaN where there is none, or where nobody asked
                of_prompt = np.concatenate([[np.nan], next(scores)])
                of_prompt[: sampling.scored] = np.nan
                response.prompt_logprobs = of_prompt.astype("<f4").tobytes()
            for ticket in sampling.tickets:
                completion = ticket.future.result()
                logprobs = completion.logprobs if sampling.exact else next(scores)[-len(completion.tokens) :]
                response.sequences.add(
                    stop_reason=0 if completion.finish == "stop" else 1,
                    tokens=completion.tokens.astype("<i4").tobytes(),
                    logprobs=logprobs.astype("<f4").tobytes(),
                )
            sampling.promise.settle(response.SerializeToString())
