"""The process that environments run in: it holds the episodes that began in it, and calls the one a request names.

    {"episode": 3, "start": {"row": {...}, "rng": {...}}}   -> {"observation": {"text": "1-31\n"}}
    {"episode": 3, "action": "16\n", "tokens": {...}}       -> {"observation": ..., "reward": 0.5, "done": false}
    {"describe": true}                                      -> {"scores": true, "stop_strings": ["\n"]}

An answer with a `failure` ends the episode. Nothing is pickled: rows are JSON, a generator is its seed and its state.

Axes: T time.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tunix.errors import UserError
from tunix.rollout.environments.base import (
    Environment,
    EpisodeError,
    Observation,
    checked_observation,
    checked_step,
)
from tunix.rollout.environments.render import token_ids
from tunix.rollout.rewards.calls import raised
from tunix.rollout.workers.serving import serve_requests
from tunix.util.coded import array_of, coded
from tunix.util.plugins import load_object


def serve(descriptor: int) -> None:
    """Answers requests on the inherited socket until its other end closes."""
    serve_requests(descriptor, _prepare)


def _prepare(first: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Loads the class; returns what answers requests."""
    kind, options = load_object(first["source"]), first["options"]
    return Host(lambda: kind(**options)).answer


class Host:
    """The environments of the episodes that live here, by their numbers."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        """Holds none yet.

        Args:
            make: a new environment.
        """
        self._make = make
        self._living: dict[int, Environment] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Calls an environment; returns its answer, or its failure.

        Args:
            request: see above; episodes in `forget` are over.
        """
        for number in request.get("forget", ()):
            self._living.pop(number, None)
        try:
            return self._call(request)
        except EpisodeError as error:
            return {"failure": str(error)}
        except UserError as error:
            return {"failure": raised(error), "advice": str(error)}
        except BaseException as error:  # sys.exit in an environment ends its episode, not the worker
            return {"failure": raised(error)}

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "describe" in request:
            first = self._make()
            return {"scores": bool(first.scores), "stop_strings": [str(text) for text in first.stop_strings]}
        number = request["episode"]
        if "start" in request:
            environment, begin = self._make(), request["start"]
            start = checked_observation(environment.reset(begin["row"], generator_of(begin["rng"])))
            self._living[number] = environment
            return {"observation": written(start)}
        environment = self._living[number]
        step = checked_step(environment.step(request["action"], array_of(request["tokens"])))
        if step.done:
            del self._living[number]
        observation = None if step.observation is None else written(step.observation)
        return {"observation": observation, "reward": step.reward, "done": step.done}


def written(observation: Observation) -> dict[str, Any]:
    """An observation as JSON values.

    Raises:
        EpisodeError: its messages hold something that JSON does not have.
        UserError: an array that is no vector of token ids.
    """
    if isinstance(observation, str):
        return {"text": str(observation)}
    if isinstance(observation, np.ndarray):
        return {"ids": coded(token_ids(observation))}
    messages = [dict(message) for message in observation]
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise EpisodeError(
            f"answered with messages that are no JSON ({error}): only text, numbers, true, false, null and lists or "
            "mappings of these leave a worker"
        ) from error
    return {"messages": messages}


def read(observation: Mapping[str, Any]) -> Observation:
    """The inverse of `written`."""
    if "ids" in observation:
        return array_of(observation["ids"])
    return observation["text"] if "text" in observation else observation["messages"]


def saved_generator(rng: np.random.Generator) -> dict[str, Any]:
    """A generator of `np.random.default_rng` as JSON values."""
    bits = rng.bit_generator
    assert isinstance(bits, np.random.PCG64), "episodes have generators of np.random.default_rng"
    seed = bits.seed_seq
    assert isinstance(seed, np.random.SeedSequence)
    spawned = {"spawn_key": list(seed.spawn_key), "n_children_spawned": seed.n_children_spawned}
    return {"seed": {"entropy": seed.entropy, **spawned}, "state": bits.state}


def generator_of(saved: Mapping[str, Any]) -> np.random.Generator:
    """The inverse of `saved_generator`; it also spawns the same ones."""
    bits = np.random.PCG64(np.random.SeedSequence(**saved["seed"]))
    bits.state = saved["state"]
    return np.random.Generator(bits)
