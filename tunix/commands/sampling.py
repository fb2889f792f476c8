"""How `tunix generate` and `tunix eval` sample and score: the rewards of the command line, and a bar that progresses.

    exact_match                                      a built-in one, or file.py:function, or module:function
    "length target=40 width=20"                      with options
    "{name: number, columns: {answer: solution}}"    an entry of a recipe, for all other settings

They are read as in a recipe, and run in the same worker processes with the same deadline. A `Collector` samples from a
`ProgressSampler`, whose requests are numbered consecutively across calls, so that rows which are sampled in several
calls get the completions that they would get in one.
"""

import math
import shlex
import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from tunix.config import MeshConfig
from tunix.data.config import DataConfig
from tunix.errors import UserError
from tunix.inference.model import InferenceModel
from tunix.mesh import build_mesh
from tunix.protocols import SamplingClient
from tunix.rollout.collect import Collector
from tunix.rollout.engine.engine import Engine
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.rewards.base import ADDED
from tunix.rollout.rewards.config import RewardConfig, RewardFunction
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import Scored
from tunix.run.collector import Play
from tunix.run.judges import judges_of
from tunix.trainer.progress import Display
from tunix.types import Completion, OnDone, Reply, Request, Sampling
from tunix.util.yaml_io import parse_yaml, problems


def reward_config(specs: List[str], model: str | None, deadline: float) -> RewardConfig | None:
    """The `reward` section for the values of --reward (as above), --reward-model and --deadline; None without any.

    Raises:
        UserError: one of them cannot be read.
    """
    if not specs and model is None:
        return None
    keys = {f"functions.{i}": list(RewardFunction.model_fields) for i in range(len(specs))}
    functions = []  # each as an entry of a recipe
    for spec in specs:
        where = f"--reward {spec!r}"
        if spec.lstrip().startswith("{"):
            functions.append(parse_yaml(spec, where))
            continue
        try:
            name, *options = shlex.split(spec) or [""]
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        if not name:
            raise UserError(f"{where}: it names no reward; say for instance --reward exact_match")
        values = {}
        for option in options:  # such as `target=40`, whose value is written as in a recipe
            key, equals, value = option.partition("=")
            if not (key and equals and value):
                raise UserError(f"{where}: {option!r} is no option; write key=value, as in target=40")
            values[key] = parse_yaml(value, f"{where}, option {key}")
        functions.append({"name": name, "options": values})
    section = {"functions": functions, "model": model, "deadline": deadline}
    try:
        return RewardConfig.model_validate(section)
    except ValidationError as error:
        raise UserError("\n".join(f"--reward: {line}" for line in problems(error, keys))) from error


def environment_config(spec: str, options: str | None) -> EnvironmentConfig:
    """The environment of `--environment`: a name, or an entry of a recipe; and its `--options`, a mapping in YAML.

    Raises:
        UserError: it is no such entry.
    """
    section = parse_yaml(spec, "--environment") if spec.lstrip().startswith("{") else {"name": spec}
    section |= {} if options is None else {"options": parse_yaml(options, "--options")}
    try:
        return EnvironmentConfig.model_validate(section)
    except ValidationError as error:
        lines = problems(error, {"": list(EnvironmentConfig.model_fields)})
        raise UserError("\n".join(f"--environment: {line}" for line in lines)) from error


@contextmanager
def open_collector(
    inference: InferenceModel,
    sampling: Sampling,
    config: RewardConfig | None,
    columns: List[str],
    data: DataConfig,
    play: Play | None = None,
) -> Iterator[Collector]:
    """Opens a collector, which samples and scores completions; its reward processes end with the context.

    Args:
        inference: the model that completes prompts.
        sampling: how completions are sampled.
        config: how they are scored; None without rewards.
        columns: of the rows, under the names in tunix.
        data: the limits of completions, and how prompts are rendered for a reward model.
        play: the environment, if there is one.

    Raises:
        UserError: there is no such reward, its options are invalid, or a column that it reads is missing.
    """
    with ExitStack() as stack:
        scorer, judges = None, ()
        if config is not None:
            scorer = stack.enter_context(Scorer(config.functions, config.deadline))
            scorer.check([*columns, *ADDED])
            judges = judges_of(config, inference.source, data, inference.options.dtype, build_mesh(MeshConfig()))
            for judge in judges:
                stack.callback(judge.close)
        yield Collector(inference.tokenizer, sampling, scorer, play, data.max_length, judges)


def score_fields(scored: Scored, total: float) -> dict[str, Any]:
    """The fields of a completion's rewards: their sum, each by name, and why some failed; null for no score."""
    rewards = {name: None if math.isnan(x) else x for name, x in scored.rewards.items()}
    failures = {"failures": dict(scored.failures)} if scored.failures else {}
    return {"reward": None if math.isnan(total) else total, "rewards": rewards, **failures}


PATIENCE = 2.0
"""Seconds before progress is shown."""


class Bar:
    """A progress bar that appears after `PATIENCE` seconds."""

    def __init__(self, title: str, total: int):
        """Starts the clock of a command, e.g. `generate`, that has to do `total` items; displays nothing yet."""
        self._title, self._total = title, total
        self._began = time.monotonic()
        self._display: Display | None = None

    def show(self, done: int, tokens: int = 0) -> None:
        """Displays how many items are done; the tokens since the bar was created say the speed."""
        seconds = time.monotonic() - self._began
        if self._display is None and seconds > PATIENCE:
            self._display = Display(self._title, self._total, done)
        if self._display is not None:
            self._display.update(done, {"perf/tokens_per_second": tokens / max(seconds, 1e-9)} if tokens else {})

    def close(self) -> None:
        """Ends the bar and restores the terminal."""
        if self._display is not None:
            self._display.close()


@dataclass
class ProgressSampler(SamplingClient):
    """A sampler over an engine that updates a progress bar."""

    sampler: Engine
    bar: Bar
    done: int = 0
    """Completions so far, including those of an earlier process."""
    tokens: int = 0
    """Tokens that this object has sampled."""

    def run(
        self, requests: List[Request], reply: Reply | None = None, on_done: OnDone | None = None
    ) -> list[Completion]:
        """Implements `protocols.SamplingClient.run`; the numbers of the requests go on after `done`."""

        def show(request: int, tokens: np.ndarray) -> None:
            self.tokens += len(tokens)
            # Requests start in order, so all but the latest `slots` of those seen have ended.
            self.bar.show(self.done + max(0, request + 1 - self.sampler.slots), self.tokens)

        numbered = [replace(request, index=self.done + request.index) for request in requests]
        sampled = self.sampler.run(numbered, reply, on_done, on_tokens=show)
        self.done += len(sampled)
        self.bar.show(self.done, self.tokens)
        return sampled
