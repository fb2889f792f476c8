"""Programs that play episodes by themselves: how they are started, when they are killed, and what they leave.

A program gets a new folder, the row of its episode and the address of a server that answers it. It and all that it has
started end with its episode. Loads without jax.
"""

import json
import os
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tunix.errors import Failure
from tunix.rollout.environments.base import Episode, Row
from tunix.rollout.environments.config import AGENT, AgentConfig
from tunix.rollout.rewards.base import Score
from tunix.rollout.rewards.calls import as_outcome
from tunix.rollout.workers.process import MARK, end_marked, kill_group, refuse_unsendable, too_slow

if TYPE_CHECKING:
    from tunix.types import Completion

TAIL = 400
"""Characters of what a program has printed that are told of it, the last ones."""
REWARD = "reward.json"
"""The file in which a program leaves its reward."""


class PlayedEpisode(Episode):
    """An episode that a program has played to its end."""

    def __init__(self, prompt: np.ndarray, completion: "Completion", score: Score, folder: Path, *, ended: bool):
        """Its first prompt `[T]` and all that follows it, its score, the folder it ran in, and whether it ended by
        itself."""
        turns = len(completion.turns)
        self.name, self.prompt, self.completion, self.folder, self.done = AGENT, prompt, completion, folder, ended
        self.failure = score if isinstance(score, Failure) else None
        # All of it belongs to the last turn.
        last = None if score is None or isinstance(score, Failure) else float(score)
        self.rewards = [None] * (turns - 1) + [last] * bool(turns)
        self.seats, self.pictures = [0] * turns, None

    @property
    def score(self) -> Score:
        return self.failure or self.rewards[-1]


class Program:
    """A program that may run many times at once."""

    def __init__(self, config: AgentConfig):
        """Starts nothing yet; raises a UserError where there is no such program."""
        self._config, self._command = config, config.words()
        self._running, self._killed = set[subprocess.Popen[bytes]](), False

    def run(self, row: Row, folder: Path, variables: Mapping[str, str]) -> tuple[int | None, str]:
        """Runs it to its end, or to its deadline.

        Args:
            row: of the data; its columns may stand in the command.
            folder: a new one, in which it runs; what is beside it has its name, and ends in .row.json and .log.
            variables: of its environment, in addition to this process's.

        Returns:
            Its exit code, negative for a signal, None where it was killed at the deadline; and the end of what it
            printed.

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
            if self._killed:  # it has begun meanwhile
                kill_group(process)
            try:
                code = process.wait(self._config.deadline)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # it, and what it has left behind
                self._running.discard(process)
                kill_group(process)
                end_marked(mark)
        process.wait()
        return code, log.read_bytes()[-4 * TAIL :].decode(errors="replace").strip()[-TAIL:]

    def score(self, folder: Path, code: int | None, printed: str, *, asked: bool) -> Score:
        """The reward of an episode in a folder, or why it has none; None where the reward functions decide.

        Args:
            code: from `run`, and so is `printed`.
            asked: whether it has sampled anything.
        """
        printed, wanted = f", after it printed: {printed}" if printed else ", and printed nothing", self._config.reward
        outcome, wrong = None if wanted is None else float(code == 0), ""
        if code is None or code < 0:
            wrong = too_slow(self._config.deadline) if code is None else f"was killed by signal {-code}"
        elif not asked or (wanted is None and code):
            wrong = f"exited with {code}" if asked else f"asked for nothing and exited with {code}"
        elif wanted == "file":
            try:
                outcome = as_outcome(json.loads((folder / REWARD).read_text(encoding="utf-8")))
            except OSError:
                wrong = f"exited with {code} and left no {REWARD}"
            except ValueError as error:
                wrong = f"left a {REWARD} that is no JSON ({error})"
            if isinstance(outcome, str):
                wrong = f"left a {REWARD} that {outcome}"
        return Failure(f"the agent {wrong}{printed}") if wrong or isinstance(outcome, str) else outcome

    def kill(self) -> None:
        """Kills all that run, and those that are about to."""
        self._killed = True
        for process in [*self._running]:
            kill_group(process)
