"""`tunix.connect`: a light client of `tunix serve --train`, e.g. in a notebook, with the verbs of `tunix.client`.

Axes: T time.
"""

import itertools
import json
import os
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Any

import httpx
import numpy as np

from tunix.errors import UserError
from tunix.serving.tinker.wire import DTYPES, MESSAGES
from tunix.types import Completion, Sampling, Sequence
from tunix.util.ports import KEY


class RemoteClient:
    """An adapter over a server's model, which is trained and sampled there. Each verb waits for its result."""

    def __init__(self, url: str, *, rank: int = 32, seed: int = 0, key: str | None = None):
        """Begins a session on a server that `tunix serve MODEL --train FOLDER` has started, with a new adapter.

        Args:
            url: its address.
            rank: that of the adapter.
            seed: of its initial weights.
            key: what the server wants of clients; None for the environment's `TUNIX_API_KEY`, if there is one.

        Raises:
            UserError: no such server answers, the key is wrong, or the rank is too high.
        """
        sent = key or os.environ.get(KEY)
        headers = {"x-api-key": sent} if sent else {}
        self._http = httpx.Client(base_url=f"{url.rstrip('/')}/api/v1/", headers=headers, timeout=60)
        self._session = self._call("create_session", {"sdk_version": "0.38.0"})["session_id"]
        self._number, self._samples, self._version = 1, itertools.count(), -1
        (served,) = self._call("get_server_capabilities", method="GET")["supported_models"]
        self.model, self.length = str(served["model_name"]), int(served["max_context_length"])
        """The name of the server's model, and how many tokens a sequence may have."""
        body = {"model_seq_id": 0, "base_model": self.model, "lora_config": {"rank": rank, "seed": seed}}
        promise = self._call("create_model", {"session_id": self._session, **body})
        self.run = str(self._result(promise)["model_id"])
        """The name of the adapter, which paths of its checkpoints have."""
        self.publish()

    def forward_backward(
        self, sequences: List[Sequence], loss: str = "cross_entropy", config: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Adds the gradients of a loss, a plain sum over tokens, to those that `optim_step` applies; its metrics, e.g.
        `{"loss:sum": 3.2}`. A UserError where the server refuses the loss or its data.

        Args:
            sequences: `cross_entropy` weighs the tokens of `loss_mask` by `weight`; other losses read the sampler's
                `logprobs` and `advantages` of `per_token`.
            loss: the protocol's name, e.g. `ppo`.
            config: its settings, e.g. `{"clip_high_threshold": 1.3}`.
        """
        return dict(self._computed(sequences, loss, config or {}).metrics)

    def logprobs(self, sequences: List[Sequence]) -> list[np.ndarray]:
        """Log-probs in nats of each sequence's tokens, `[T]` each with 0 for the first; trains nothing."""
        output = self._computed(sequences, "cross_entropy", {}, forward_only=True)
        values = b"".join(record.fields["logprobs"].data for record in output.loss_fn_outputs)
        ends = np.cumsum([len(sequence.tokens) - 1 for sequence in sequences])[:-1]
        return [np.append(np.float32(0), x) for x in np.split(np.frombuffer(values, "<f4"), ends)]

    def optim_step(
        self, learning_rate: float = 1e-4, *, weight_decay: float = 0.0, grad_clip_norm: float = 0.0
    ) -> dict[str, float]:
        """An update of AdamW with the sum of the gradients; a norm of 0 clips nothing. Metrics such as `grad_norm`."""
        settings = {"learning_rate": learning_rate, "weight_decay": weight_decay, "grad_clip_norm": grad_clip_norm}
        return self._ordered("optim_step", {"adam_params": settings})["metrics"]

    def publish(self) -> None:
        """Makes `sample` use the weights as they are now."""
        self._ordered("save_weights_for_sampler", {"sampling_session_seq_id": self._version + 1})
        self._version += 1

    def sample(self, prompts: List[np.ndarray], n: int, sampling: Sampling, seed: int) -> list[list[Completion]]:
        """`n` completions of each prompt `[T]` with the weights that were published last. A UserError where a prompt or
        a setting is refused.

        Args:
            sampling: without `stop_ids` and `stop_strings` the model's own ids end a completion.
            seed: prompt i is sampled with `seed + i`.
        """
        if sampling.min_p or sampling.top_logprobs or (sampling.stop_ids and sampling.stop_strings):
            raise UserError(f"sampling: a server has no min_p, no top_logprobs and stops of one kind, not {sampling}")
        settings = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p")}
        settings |= {"top_k": sampling.top_k or -1, "stop": list(sampling.stop_ids or sampling.stop_strings) or None}
        promises, groups = [], []
        for i, prompt in enumerate(prompts):
            body = {"sampling_session_id": f"{self._session}:sample:{self._version}", "seq_id": next(self._samples)}
            body |= {"prompt": {"chunks": [{"tokens": np.asarray(prompt).tolist()}]}, "num_samples": n}
            promises.append(self._call("asample", {**body, "sampling_params": {**settings, "seed": seed + i}}))
        for promise in promises:
            groups.append([])
            for sequence in MESSAGES["SampleResponse"].FromString(self._result(promise)).sequences:
                tokens, logprobs = np.frombuffer(sequence.tokens, "<i4"), np.frombuffer(sequence.logprobs, "<f4")
                finish, versions = "length" if sequence.stop_reason else "stop", np.full(len(tokens), self._version)
                groups[-1].append(Completion(tokens, logprobs, finish, versions, sampling, ((0, len(tokens)),)))
        return groups

    def save(self, name: str) -> str:
        """Saves the weights with the optimizer's state, as a PEFT folder; its path, `tinker://RUN/weights/NAME`."""
        return self._ordered("save_weights", {"path": name})["path"]

    def load(self, path: str) -> None:
        """Goes on from what `save` has saved."""
        self._ordered("load_weights", {"path": path, "optimizer": True})

    def close(self) -> None:
        """Ends the session: the server frees the adapter, and keeps its checkpoints."""
        self._call(f"sessions/{self._session}/finish", {"reason": {"type": "success"}})
        self._http.close()

    def _computed(
        self, sequences: List[Sequence], loss: str, config: Mapping[str, float], forward_only: bool = False
    ) -> Any:
        """The `ForwardBackwardOutput` of sequences, each of whose tokens is the target of the one before."""
        names = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
        message = MESSAGES["ForwardBackwardRequest"](model_id=self.run, seq_id=self._number, loss_fn=loss)
        message.loss_fn_config.update(config)
        message.forward_only = forward_only
        for number, sequence in enumerate(sequences):
            known = {"weights": np.full(len(sequence.tokens), sequence.weight), **sequence.per_token}
            if lacking := [name for name in names if name not in known]:
                raise UserError(f"sequence {number} lacks {', '.join(lacking)} in per_token, which {loss} reads")
            inputs = {name: (known[name] * sequence.loss_mask).astype("<f4") for name in names}
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = sequence.tokens[:-1].astype("<i4").tobytes()
            for name, x in {"target_tokens": sequence.tokens.astype("<i8"), **inputs}.items():
                dtype = next(number for number, dtype in DTYPES.items() if dtype == x.dtype)
                tensor = MESSAGES["Tensor"](dense=x[1:].tobytes(), dtype=dtype, shape=[len(x) - 1])
                datum.loss_fn_inputs[name].CopyFrom(tensor)
        result = self._ordered("forward_backward", message.SerializeToString())
        return MESSAGES["ForwardBackwardOutput"].FromString(result)

    def _ordered(self, path: str, body: Any) -> Any:
        """The result of a request of the adapter; one that is refused takes no number, for which later ones wait."""
        place = {"model_id": self.run, "seq_id": self._number}
        promise = self._call(path, body if isinstance(body, bytes) else {**body, **place})
        self._number += 1
        return self._result(promise)

    def _result(self, promise: Mapping[str, Any]) -> Any:
        while (result := self._call("retrieve_future", {"request_id": promise["request_id"]})) is None:
            pass
        return result

    def _call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """JSON values, or a message's bytes; None where the result is not there yet. A UserError says what failed."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        try:
            response = self._http.request(method, path, content=content)
            if response.headers.get("content-type") == "application/x-protobuf" or response.status_code == 408:
                return response.content if response.is_success else None
            answer = response.json()
        except (httpx.TransportError, ValueError) as error:
            remedy = f"({error}): start one with `tunix serve MODEL --train FOLDER`"
            raise UserError(f"{self._http.base_url} is no server of ours {remedy}") from None
        if response.is_error or "error" in answer:
            raise UserError(f"{path}: {answer.get('detail') or answer.get('error')}")
        return answer


connect = RemoteClient
