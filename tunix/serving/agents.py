"""Programs as the environment of a run: each plays an episode by asking the run's engine, served on loopback.

A program has a key of its own, by which what it asks is recorded (`sessions.py`). When it has ended, what was recorded
is its episode: a first prompt, and all that follows it. The server lives as long as the run; it answers while a step is
sampled, with the weights that were published last, and refuses what comes from programs that have ended.
"""

import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import uvicorn

from tunix.data.config import DataConfig
from tunix.errors import Failure
from tunix.hf.source import Source
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.protocols import SamplingClient
from tunix.rollout.engine.engine import Engine
from tunix.rollout.environments.agents import PlayedEpisode, Program
from tunix.rollout.environments.base import Episodes, Failures, Row
from tunix.rollout.environments.config import AgentConfig
from tunix.rollout.sessions import Session
from tunix.serving.app import server_of
from tunix.serving.gate import Sessions
from tunix.serving.service import Service
from tunix.serving.tinker.futures import Refusal
from tunix.types import Sampling

MODEL = "policy"
"""The name of the model that programs ask."""


@runtime_checkable
class Wrapped(Protocol):
    """A client or a progress bar around an engine."""

    @property
    def sampler(self) -> Any:
        """The engine."""
        ...


class AgentPlayer:
    """Runs the programs of an environment, and serves them."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, config: AgentConfig, source: Source, data: DataConfig, temperature: float, most: int | None):
        """Starts nothing yet.

        Args:
            config: the program.
            source: the model's tokenizer and structure.
            data: how long an episode may be, and the variables of the chat template.
            temperature: that requests may ask for; they have it anyway, but in a greedy evaluation.
            most: how many episodes in a row may fail; None for all of them.

        Raises:
            UserError: there is no such program.
        """
        self._config, self._data, self._program = config, data, Program(config)
        self._inference = InferenceModel(InferenceOptions(MODEL, length=data.max_length), source)
        self._failures, self._sessions = Failures(most), Sessions(Sampling(), temperature)
        self._service: Service | None = None
        self._server: uvicorn.Server | None = None
        self.scores = config.reward is not None

    def play(
        self, sampler: SamplingClient, rows: List[Row], sampling: Sampling, seed: int, numbers: List[int]
    ) -> Episodes:
        """See `rollout.collect.Agents`."""
        if self._service is None:  # served from the first step on
            engine = sampler.sampler if isinstance(sampler, Wrapped) else sampler
            assert isinstance(engine, Engine), "the recipe's rules want an engine of this process"
            kwargs = self._data.template_kwargs
            self._service = Service(self._inference, engine=engine, sessions=self._sessions, template_kwargs=kwargs)
            listener = socket.create_server(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._server = server_of(self._service)
            sockets = {"sockets": [listener]}
            threading.Thread(target=self._server.run, kwargs=sockets, name="agents", daemon=True).start()
            while not self._server.started:
                time.sleep(0.01)
        service, url = self._service, self._url
        self._sessions.sampling = sampling
        home, logged = tempfile.TemporaryDirectory(prefix="tunix-agents-"), dict[int, Any]()

        def played(number: int, row: Row) -> PlayedEpisode:
            (folder := Path(home.name) / str(number)).mkdir()
            key = f"episode-{secrets.token_hex(16)}"
            drawn = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
            session = Session(self._data.max_length, sampling.max_tokens, drawn)
            self._sessions.open(key, session)
            variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL}
            try:
                code, printed = self._program.run(row, folder, variables)
            finally:
                with suppress(Refusal):  # the program may have ended it
                    self._sessions.end(key)
            prompt, completion = session.episode(sampling)
            score = self._program.score(folder, code, printed, asked=bool(completion.turns))
            self._failures.count(score if isinstance(score, Failure) else None)
            logged[numbers.index(number)] = {"agent": {"exit": code, "printed": printed}}
            return PlayedEpisode(prompt, completion, score, folder, ended=code is not None)

        pool = ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="agent")
        try:
            episodes = list(pool.map(played, numbers, rows))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self._program.kill()
            raise
        finally:
            pool.shutdown()
            with service.batches.idle():  # so that the engine can be given other work, and weights
                pass
        return Episodes(episodes, close=home.cleanup, logged=logged)

    def close(self) -> None:
        """Ends the programs that still run, and the server."""
        self._program.kill()
        if self._server is not None and self._service is not None:
            self._server.should_exit = True
            self._service.batches.close()
            self._server = self._service = None
