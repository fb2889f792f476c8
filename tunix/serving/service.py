"""What is served: a model whose weights and adapters change when it is told to, as a run does that it samples for.

A body becomes requests for the engine (`prepared`), which the `Batcher` answers with those of all other callers, and an
`Answer` that says in the protocol's form what was sampled.

Axes: T time.
"""

import secrets
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunix.data.chat import Message, render_prompt
from tunix.data.tokenizer import Tokenizer
from tunix.data.tool_calls import MarkupName, instructions, markup_of, opening, shows_tools
from tunix.errors import UserError, nearest
from tunix.hf.source import beside, loaded, pretrained
from tunix.inference.batcher import Batcher, Ticket
from tunix.inference.model import InferenceModel
from tunix.lora.multi_lora import LoadedAdapter
from tunix.models.model import Params
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import check_prompt
from tunix.rollout.engine.sampling import check
from tunix.rollout.sessions import Turn
from tunix.serving.answers import Answer, ChatAnswer, CompletionAnswer, GenerateAnswer
from tunix.serving.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    TokenizeChatBody,
    read,
)
from tunix.serving.gate import Sessions
from tunix.serving.tinker.futures import Refusal
from tunix.types import Completion, Request, Sampling, Workload

FIRST = "default"
"""The version of the weights that a server is started with, as vLLM calls it."""
HALF = 32
"""Bits of a request's seed that seed the engine; the rest counts as the request's number."""
MOST_WAITING = 4096
"""Requests that are unanswered at a time, at most, unless a server is told otherwise: those of a few runs."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A request that can be answered."""

    requests: List[Request]
    """What the engine completes, one for each choice."""
    answer: Answer
    """Says what was sampled."""
    turns: List[Turn] = ()
    """Where they are recorded, one for each request; empty where they are of no session."""


class Service:
    """A model that answers."""

    def __init__(
        self,
        inference: InferenceModel,
        *,
        adapters: bool = False,
        devices: List[Any] | None = None,
        updates: Path | None = None,
        waiting: int = MOST_WAITING,
        engine: Engine | None = None,
        sessions: Sessions | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        """Reads the weights onto these devices, None for all. The engine of `inference` is not used, since weights are
        replaced here.

        Args:
            inference: the model.
            adapters: whether adapters may be loaded beside the weights, which then are kept.
            devices: where it is computed.
            updates: the folder from which weights and adapters may be loaded; None where none may.
            waiting: requests that are unanswered at a time, at most.
            engine: answers with the weights that others publish to it; None for one with the weights of `inference`.
            sessions: records what is asked; None for what the header X-Session-ID names.
            template_kwargs: variables of the chat template; None for those of `inference`.

        Raises:
            UserError: the model is not accessible, or cannot sample.
        """
        self._inference, self._keeps = inference, adapters
        self.name, self.length, self.version = inference.options.model, inference.limit, FIRST
        self.updates = updates and updates.expanduser().resolve()
        """The folder from within which weights and adapters may be loaded; None where they may not be changed."""
        self.sessions = sessions or Sessions()
        self._template_kwargs = inference.template_kwargs if template_kwargs is None else template_kwargs
        self._adapters: dict[str, tuple[Path, LoadedAdapter]] = {}
        self._unlisted: Mapping[str, LoadedAdapter] = {}
        self._publications, self._stale = 0, engine is None
        self.params: Params | None = None
        """The weights, where they are kept for adapters; None else."""
        if engine is None:
            model, self.params, mesh = inference.weights(devices)
            engine = inference.new_engine(model, mesh)
        self.engine = engine
        self._publish()
        self.batches = Batcher(self.engine, self._publish)
        """Answers; it can be paused."""
        self._most = waiting
        self.counts = Counter[str]()
        """What `metrics` tells, counted in the thread of the server alone."""

    def warm(self) -> None:
        """Compiles what the longest requests need, so that nothing compiles while they are answered."""
        self._publish()
        self.engine.warm(Workload(self.engine.slots, self.length, self.length))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            Refusal: there is none.
        """
        if self._inference.tokenizer is None:
            raise Refusal(400, f"{self.name} has no tokenizer: send token ids")
        return self._inference.tokenizer

    def prepared(self, body: CompletionBody | ChatBody | GenerateBody) -> Asked:
        """What a body asks for.

        Raises:
            Refusal: there is no such model, or the request is invalid.
        """
        adapter, choices, scored = self._adapter(body.model), 1, False
        match body:
            case CompletionBody():
                ids = (
                    self.tokens(x, special=body.add_special_tokens) if isinstance(x, str) else x for x in body.prompt
                )
                prompts = [np.array(x, np.int32) for x in ids]
                most, top, settings, choices = body.max_tokens, body.logprobs or 0, body, body.n
                scored = body.echo and (body.logprobs is not None or not most)
                answer: Answer = CompletionAnswer(body, prompts, self._inference.tokenizer)
            case ChatBody():
                prompt, markup = self.rendered(body)
                # The model goes on with a call that is begun for it.
                begun = "" if body.called is None or markup is None else opening(markup, body.called)
                ids = self.tokenizer.encode(begun, bos=False) if begun else []
                prompts = [prompt := np.concatenate([prompt, np.array(ids, np.int32)])]
                most = min(x for x in (body.max_completion_tokens, body.max_tokens, self.length) if x is not None)
                top, settings, choices = body.top_logprobs, body, body.n
                answer = ChatAnswer(body, prompt, self.tokenizer, None if body.tool_choice == "none" else markup, begun)
            case GenerateBody():
                settings = body.sampling_params
                prompts = [np.array(body.token_ids, np.int32)]
                most, top = settings.max_tokens, settings.logprobs or 0
                answer = GenerateAnswer(body, prompts[0], self._inference.tokenizer)
        if settings.stop and self._inference.tokenizer is None:
            raise Refusal(400, f"{self.name} has no tokenizer to find stop strings with: send stop_token_ids")
        requests, vocab = list[Request](), self.engine.model.config.vocab_size
        for number, prompt in enumerate(prompts):
            if (room := self.length - len(prompt)) < min(most, 1):
                raise Refusal(
                    400,
                    f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in a context of "
                    f"{self.length}: shorten it",
                    param="messages" if isinstance(body, ChatBody) else "prompt",
                    code="context_length_exceeded",
                )
            stop_ids = () if settings.ignore_eos else self._inference.source.stop_ids
            sampling = Sampling(
                max_tokens=min(most, room),
                temperature=float(settings.temperature),
                top_k=max(settings.top_k, 0),
                top_p=float(settings.top_p),
                min_p=float(settings.min_p),
                stop_ids=tuple(dict.fromkeys((*settings.stop_token_ids, *stop_ids))),
                stop_strings=(settings.stop,) if isinstance(settings.stop, str) else tuple(settings.stop),
                top_logprobs=top,
                prompt_logprobs=scored,
            )
            # The same tokens for the same body, whatever else the engine is asked for.
            seed = secrets.randbits(62) if settings.seed is None else settings.seed
            low, high = seed % (1 << HALF), seed >> HALF
            requests += [
                Request(prompt, sampling, low, (high + i) % (1 << 31), adapter=adapter) for i in range(choices)
            ]
            try:
                check(sampling, vocab)
                check_prompt(number, prompt, self.length + (not most), vocab)
            except UserError as error:
                raise Refusal(400, str(error)) from None
        return Asked(requests, answer)

    def submit(self, tickets: List[Ticket]) -> None:
        """Has requests answered.

        Raises:
            Refusal: too many wait, or an adapter has gone meanwhile.
        """
        self._adapter(tickets[0].request.adapter or self.name)
        if sum(self.batches.load) + len(tickets) > self._most:
            self.counts["refused"] += 1
            raise Refusal(429, "too many requests wait: try again", code="rate_limit_exceeded")
        self.batches.submit(tickets)

    def answered(self, prompt: int, completions: List[Completion]) -> None:
        """Counts a request whose prompt had so many tokens."""
        self.counts["prompt_tokens"] += prompt
        for completion in completions:
            self.counts["generation_tokens"] += len(completion.tokens)
            self.counts[f'completions{{finish="{completion.finish}"}}'] += 1

    def metrics(self) -> str:
        """The counts in the text format of Prometheus."""
        running, waiting = self.batches.load
        gauges = {"requests_running": running, "requests_waiting": waiting, "slots": self.engine.slots}
        counters = {"prompt_tokens": 0, "generation_tokens": 0, "refused": 0, "cancelled": 0, **self.counts}
        counters["prefilled_tokens"], total = self.engine.prefilled, self.engine.total
        counters |= {"drafted_tokens": total.drafted, "accepted_tokens": total.accepted}
        lines = list[str]()
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in sorted(values.items()):
                bare, brace, labels = name.partition("{")
                full = f"tunix_{bare}" + ("_total" if kind == "counter" else "")
                if (head := f"# TYPE {full} {kind}") not in lines:
                    lines.append(head)
                lines.append(f"{full}{brace}{labels} {value}")
        return "\n".join(lines) + "\n"

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text, by default after the BOS token where the tokenizer's own encoding begins with it.

        Raises:
            Refusal: there is no tokenizer, or the text has a lone surrogate.
        """
        try:
            return self.tokenizer.encode(text, bos=special and self.tokenizer.adds_bos)
        except UserError as error:
            raise Refusal(400, str(error)) from None

    def rendered(self, body: ChatBody | TokenizeChatBody) -> tuple[np.ndarray, MarkupName | None]:
        """The tokens `[T]` of messages by the folder's own template, and the markup of calls; None without tools.

        Raises:
            Refusal: there is no template, it does not know how to write a message, or its calls cannot be read.
        """
        messages: list[Message] = list(body.messages)
        kwargs = {**self._template_kwargs, **body.chat_template_kwargs}
        markup, tools = None, [tool.model_dump(exclude_unset=True) for tool in body.tools]
        try:
            if tools:
                tools = [{"type": "function", **tool} for tool in tools]
                markup = markup_of(self.tokenizer)
                if shows_tools(self.tokenizer):
                    kwargs["tools"] = tools
                else:
                    messages.insert(0, {"role": "system", "content": instructions(tools, markup)})
                    if len(messages) > 1 and messages[1].get("role") == "system":
                        said = messages.pop(1).get("content")
                        messages[0] = {"role": "system", "content": f"{said}\n\n{messages[0]['content']}"}
            return render_prompt(messages, self.tokenizer, **kwargs).tokens, markup
        except UserError as error:
            raise Refusal(400, str(error), param="messages") from None
        except RecursionError:
            raise Refusal(400, "messages or tools are nested too deeply") from None

    def tokenized(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The ids of a text or of messages, as vLLM answers them.

        Raises:
            Refusal: the body is invalid, there is no tokenizer, or the chat template refuses the messages.
        """
        if "messages" in body:
            ids = self.rendered(read(TokenizeChatBody, body))[0].tolist()
        else:
            text = read(TokenizeBody, body)
            ids = self.tokens(text.prompt, special=text.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.length}

    def detokenized(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The text of token ids, as vLLM answers it.

        Raises:
            Refusal: the body is invalid, there is no tokenizer, or an id is outside of its vocabulary.
        """
        ids = read(DetokenizeBody, body).tokens
        if max(ids, default=0) >= self.tokenizer.vocab_size:
            raise Refusal(400, f"tokens: {max(ids)} is outside of the vocabulary", param="tokens")
        return {"prompt": self.tokenizer.decode(ids)}

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """The special tokens and the chat template, with vLLM's names; null for what there is not.

        Raises:
            Refusal: there is no tokenizer.
        """
        hf = self.tokenizer.hf
        tokens = {"bos_token": hf.bos_token, "eos_token": hf.eos_token, "pad_token": hf.pad_token}
        return {**tokens, "chat_template": self.tokenizer.chat_template}

    def cards(self) -> list[dict[str, Any]]:
        """What is served: the model, and each adapter of it."""
        common = {"object": "model", "created": 0, "owned_by": "tunix", "max_model_len": self.length}
        base = {"id": self.name, "root": self.name, "parent": None, **common}
        adapters = [
            {"id": name, "root": str(folder), "parent": self.name, **common}
            for name, (folder, _) in self._adapters.items()
        ]
        return [base, *adapters]

    def card(self, model: str) -> dict[str, Any]:
        """That of one name.

        Raises:
            Refusal: nothing of that name is served.
        """
        self._adapter(model)
        return next(card for card in self.cards() if card["id"] == model)

    def allowed(self, path: str) -> Path:
        """A folder to load, its links followed.

        Raises:
            Refusal: it is not within the folder that may be loaded from.
        """
        folder = Path(path).resolve()
        if self.updates is None or not folder.is_relative_to(self.updates):
            raise Refusal(403, f"{path} is not within {self.updates}, from which alone it loads (--allow-updates)")
        return folder

    def load(self, folder: Path) -> None:
        """Answers from the weights of a folder, of the same structure.

        Raises:
            Refusal: they are not there, or of another model; the weights stay as they are.
        """
        if self._unlisted:
            raise Refusal(400, "its weights stay as they are: clients train adapters on them (--train)")
        try:
            source = pretrained(str(folder), mtp=self._inference.source.decoder.mtp)
            # An export names more ids to stop at than its base, where the turns of its chat template end in others.
            if replace(source.decoder, stops=()) != replace(self._inference.source.decoder, stops=()):
                raise UserError(f"{folder} holds a model of another structure than {self.name}")
            self.publish(loaded(source, self._inference.options.dtype, self.engine.mesh)[1])
        except UserError as error:
            raise Refusal(400, str(error)) from None

    def publish(self, params: Params) -> None:
        """Answers from these weights, as soon as the requests that have begun are answered."""
        with self.batches.idle():
            self.params, self._stale = params, True
            self._publish()

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serves a PEFT folder's adapter under a name, beside the weights.

        Raises:
            Refusal: adapters are not loaded here, or it does not fit.
        """
        if not self._keeps:
            raise Refusal(400, "it was started without --enable-lora")
        if name in self._adapters or name == self.name:
            raise Refusal(400, f"{name} is served already")
        try:
            assert self.params is not None
            adapter = LoadedAdapter(*beside(self.engine.model, self.params, self.engine.mesh, folder))
        except UserError as error:
            raise Refusal(400, str(error)) from None
        with self.batches.idle():
            self._adapters = {**self._adapters, name: (folder, adapter)}
            self._stale = True

    def unload_adapter(self, name: str) -> None:
        """Serves an adapter no more; requests that wait for it are told.

        Raises:
            Refusal: there is none of that name.
        """
        with self.batches.idle():
            if name not in self._adapters:
                raise Refusal(404, f"there is no adapter {name}")
            self._adapters = {key: adapter for key, adapter in self._adapters.items() if key != name}
            self._stale = True
            self.batches.refuse(lambda request: request.adapter == name, self._unknown(name))

    def _adapter(self, model: str) -> str | None:
        """The adapter of a name; None for the model itself.

        Raises:
            Refusal: nothing of that name is served.
        """
        if model == self.name:
            return None
        if model not in self._adapters:
            raise self._unknown(model)
        return model

    def _unknown(self, model: str) -> Refusal:
        known: Mapping[str, Any] = {self.name: None, **self._adapters}
        message = f"The model `{model:.200}` does not exist: there is {', '.join(known)}.{nearest(model, known)}"
        return Refusal(404, message, param="model", code="model_not_found")

    def publish_unlisted(self, adapters: Mapping[str, LoadedAdapter]) -> None:
        """Has the engine answer requests for adapters that `submit` does not know, for whoever submits to `batches`.
        While there are requests they are replaced as `Arrivals.published` says."""
        self._unlisted, self._stale = adapters, True

    def _publish(self) -> bool:
        """Gives the engine what was loaded since it was given something last, if anything: several adapters' comings
        and goings at once, so that what it has compiled for their number fits again."""
        if not self._stale:
            return False
        assert self.params is not None
        self._publications, self._stale = self._publications + 1, False
        adapters = {**{name: adapter for name, (_, adapter) in self._adapters.items()}, **self._unlisted}
        self.engine.publish(self.params, self._publications, adapters if self._keeps else None)
        if not self._keeps:
            self.params = None
        return True
