"""Programs that play episodes by themselves: how they are started, when they are killed, and what they leave.

A program gets a new folder, the row of its episode and the address of a server that answers it. It and all that it has
started end with its episode. Loads without jax.
"""

import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix.errors import Failure, UserError
from tunix.rollout.environments.base import Episode
from tunix.rollout.environments.config import AGENT, AgentConfig
from tunix.rollout.rewards.base import Score
from tunix.rollout.rewards.calls import as_outcome
from tunix.rollout.workers.process import MARK, end_marked, refuse_unsendable, too_slow

if TYPE_CHECKING:
    from tunix.types import Completion

WORKDIR = "workdir"
"""The column with the folder of an episode, for reward functions."""
TAIL = 400
"""Characters of what a program has printed that are told of it, the last ones."""
REWARD = "reward.json"
"""The file in which a program leaves its reward."""


@dataclass(frozen=True)
class Ended:
    """How a program has ended."""

    score: Score
    """Its reward, or why it has none; None where the reward functions decide."""
    code: int | None
    """Its exit code, negative for a signal; None where it was killed at the deadline."""
    said: str
    """The end of what it printed, e.g. `ValueError: no such file`."""

    @property
    def printed(self) -> str:
        """What it printed, as the end of a sentence."""
        return f", after it printed: {self.said}" if self.said else ", and printed nothing"


class PlayedEpisode(Episode):
    """An episode that a program has played to its end."""

    def __init__(self, prompt: np.ndarray, completion: "Completion", ended: Ended, folder: Path):
        """Its first prompt `[T]` and all that follows it; how the program ended, and the folder it ran in."""
        turns, score = len(completion.turns), ended.score
        if not turns and not isinstance(score, Failure):
            score = Failure(f"the agent asked for nothing and exited with {ended.code}{ended.printed}")
        self.name, self.prompt, self.completion, self.folder = AGENT, prompt, completion, folder
        self.ended = ended
        self.failure = score if isinstance(score, Failure) else None
        self.done = ended.code is not None
        self.rewards = [None] * (turns - 1) + [score if isinstance(score, float) else None] * bool(turns)
        self.seats = [0] * turns

    @property
    def score(self) -> Score | None:
        return self.failure or (self.rewards[-1] if self.rewards else None)


class Program:
    """A program that may run many times at once."""

    def __init__(self, config: AgentConfig):
        """Starts nothing yet.

        Raises:
            UserError: there is no such program.
        """
        command = config.command
        if shutil.which(command[0]) is None:
            raise UserError(
                f"rollout.environment.agent.command: {command[0]!r} is no program on the PATH and no file that can be "
                "executed: name one, as in [python, agent.py]"
            )
        self._config = config
        self._command = [str(Path(word).resolve()) if Path(word).is_file() else word for word in command]
        self._running = set[subprocess.Popen[bytes]]()

    def run(self, row: Mapping[str, Any], folder: Path, variables: Mapping[str, str]) -> Ended:
        """Runs it to its end, or to its deadline.

        Args:
            row: of the data; its columns may stand in the command.
            folder: a new one, in which it runs; what is beside it has its name, and ends in .row.json and .log.
            variables: of its environment, in addition to this process's.

        Raises:
            UserError: the row is no JSON.
        """
        for name, value in row.items():
            refuse_unsendable("an agent", name, value)
        (place := folder.with_suffix(".row.json")).write_text(json.dumps(dict(row)), encoding="utf-8")
        columns = {f"{{{name}}}": x if isinstance(x, str) else json.dumps(x) for name, x in row.items()}
        mark, log = uuid.uuid4().hex, folder.with_suffix(".log")
        # Code that imports jax does not take the accelerator; what is asked of this machine goes through no proxy.
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
        others = {"JAX_PLATFORMS": "cpu", "NO_PROXY": direct, "no_proxy": direct, "TUNIX_ROW": str(place), MARK: mark}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [columns.get(word, word) for word in self._command],
                cwd=folder,
                env={**os.environ, **others, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                code = process.wait(self._config.deadline)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # it, and what it has left behind
                self._running.discard(process)
                _kill(process)
                end_marked(mark)
        process.wait()
        said = log.read_bytes()[-4 * TAIL :].decode(errors="replace").strip()[-TAIL:]
        ended = Ended(None, code, said)
        return replace(ended, score=self._score(folder, ended))

    def kill(self) -> None:
        """Kills all that run."""
        for process in [*self._running]:
            _kill(process)

    def _score(self, folder: Path, ended: Ended) -> Score:
        """The reward of a program, or why it has none."""
        code, printed = ended.code, ended.printed
        if code is None:
            return Failure(f"the agent {too_slow(self._config.deadline)}{printed}")
        if code < 0:
            return Failure(f"the agent was killed by signal {-code}{printed}")
        if self._config.reward == "exit":
            return float(code == 0)
        if self._config.reward is None:
            return None if code == 0 else Failure(f"the agent exited with {code}{printed}")
        try:
            outcome = as_outcome(json.loads((folder / REWARD).read_text(encoding="utf-8")))
        except OSError:
            return Failure(f"the agent exited with {code} and left no {REWARD}{printed}")
        except ValueError as error:
            return Failure(f"the agent's {REWARD} is no JSON: {error}")
        return outcome if isinstance(outcome, float) else Failure(f"the agent's {REWARD} {outcome}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Until it has been waited for, its process id cannot belong to another process.
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
