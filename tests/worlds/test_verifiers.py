"""Environments of verifiers' v1 API: tasksets and their rewards, an `Env` that answers back, what needs a harness, and
a run that learns."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run.test_kill import no_process_left
from tests.test_pages import blocks, write
from tests.tiny_runs import metrics, model_folder
from tests.worlds.learning import assert_learns_though_killed
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.base import Episode
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import Player
from tunix.rollout.environments.verifiers import Verifiers
from tunix.rollout.rewards.base import Failure

pytestmark = pytest.mark.worlds
TOKENIZER = bytes_tokenizer("chatml")
ENVIRONMENTS = {
    "say_v1": """
import verifiers.v1 as vf


class SayData(vf.TaskData):
    answer: str


class SayTask(vf.Task[SayData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "break": raise KeyError("rule")
        return {"nan": float("nan")}.get(trace.last_reply, float(trace.last_reply == self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)


class SayConfig(vf.TasksetConfig):
    num_tasks: int = 5


class SayTaskset(vf.Taskset[SayTask, SayConfig]):
    def load(self):
        for i in range(self.config.num_tasks):
            yield SayTask(SayData(prompt=f"say {i}", answer=str(i), system_prompt="be short"), self.config.task)


__all__ = ["SayTaskset"]
""",
    "duel_v1": """
import verifiers.v1 as vf


class DuelData(vf.TaskData):
    secret: int


class DuelTask(vf.Task[DuelData]):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward
    async def brief(self, trace) -> float:
        return 1.0 / trace.num_turns


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        secret = 0
        while True:
            yield DuelTask(DuelData(prompt="guess", secret=secret), self.config.task)
            secret += 1


class DuelConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and segment.last_reply != str(task.data.secret):
                segment = await talk.turn("no")
        talk.trace.info["guesses"] = talk.trace.num_turns

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("won", float(trace.last_reply == str(task.data.secret)))


__all__ = ["DuelEnv", "DuelTaskset"]
""",
    "runs_v1": """
import verifiers.v1 as vf


class RunsTask(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime):
        await runtime.write("number", b"7")

    @vf.reward
    async def read(self, trace, runtime) -> float:
        result = await runtime.run(["sh", "-c", f"test {trace.last_reply} = $(cat number)"], {})
        return float(result.exit_code == 0)


class RunsTaskset(vf.Taskset[RunsTask, vf.TasksetConfig]):
    def load(self):
        return [RunsTask(vf.TaskData(prompt="the number?"), self.config.task)]


__all__ = ["RunsTaskset"]
""",
    "tools_v1": '''
import verifiers.v1 as vf


class Search(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def find(self, text: str) -> str:
        """Finds."""
        return text


class ToolsTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Search(vf.ToolsetConfig())]

    @vf.reward
    async def none(self, trace) -> float:
        return 0.0


class ToolsTaskset(vf.Taskset[ToolsTask, vf.TasksetConfig]):
    def load(self):
        return [ToolsTask(vf.TaskData(prompt="find it"), self.config.task)]


__all__ = ["ToolsTaskset"]
''',
    "agent_v1": """
import verifiers.v1 as vf


class AgentTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt="go"), self.config.task)]


class AgentHarness(vf.Harness[vf.HarnessConfig]):
    async def launch(self, *arguments):
        raise NotImplementedError


__all__ = ["AgentHarness", "AgentTaskset"]
""",
    "letters_v1": '''
import verifiers.v1 as vf


class LettersTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        """The share of small letters."""
        return sum("a" <= letter <= "z" for letter in trace.last_reply) / max(len(trace.last_reply), 1)


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    def load(self):
        return [LettersTask(vf.TaskData(prompt=letter), self.config.task) for letter in "abcdefgh"]


__all__ = ["LettersTaskset"]
''',
}


@pytest.fixture(autouse=True)
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in ENVIRONMENTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def playing() -> Iterator[Callable[..., Player]]:
    """Makes players, whose workers end with the test."""
    players: list[Player] = []

    def player(name: str, **config: Any) -> Player:
        settings = {"verifiers": name, "options": {"config": config}, "deadline": 60, "workers": 1}
        players.append(Player(EnvironmentConfig.model_validate(settings), TOKENIZER))
        return players[-1]

    yield player
    for one in players:
        one.close()


def say(episode: Episode, action: str) -> str | None:
    """The user's next message."""
    ids = TOKENIZER.encode(f"{action}<|im_end|>")
    observed = episode.turn(np.asarray(ids, np.int32))
    return None if observed is None else TOKENIZER.decode(observed, skip_special=True)


def rows(*indices: int) -> list[dict[str, int]]:
    return [{"seed": 0, "index": index} for index in indices]


def test_a_taskset_and_its_weighted_rewards(playing: Any):
    player = playing("say-v1", taskset={"num_tasks": 3})
    right, wrong, breaks, lies, other = player(rows(4, 4, 1, 1, 2), 0).episodes
    assert right.start == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "say 1"},
    ]  # 4 modulo 3
    assert other.start[-1]["content"] == "say 2"
    for episode, action in ((right, "1"), (wrong, "what is it"), (breaks, "break"), (lies, "nan"), (other, "0")):
        assert say(episode, action) is None
    assert [x.score for x in (right, wrong, other)] == [1.5, 0.0, 0.5]
    assert isinstance(breaks.score, Failure)
    assert "raised TaskError: task SayTask scoring: KeyError: 'rule'" in breaks.score.reason
    assert isinstance(lies.score, Failure)
    assert "gave a reward that is no number: it returned NaN" in lies.score.reason


def test_an_env_that_answers_back(playing: Any):
    """A stop condition of the task and a limit of turns end it, and the conversation so far is scored."""
    player = playing("duel-v1")
    wins, gives_up = player(rows(2, 2), 0).episodes
    assert "no" in (say(wins, "1") or "")
    assert say(wins, "2") is None
    assert wins.score == 0.5 + 1
    assert [say(gives_up, word) is None for word in "456"] == [False, False, True]
    assert gives_up.score == pytest.approx(1 / 3)
    (limited,) = playing("duel-v1", player={"max_turns": 1})(rows(2), 0).episodes
    assert say(limited, "9") is None
    assert limited.score == 1.0


def test_a_runtime_that_the_recipe_names(playing: Any):
    (episode,) = playing("runs-v1", agent={"runtime": {"type": "subprocess"}})(rows(0), 0).episodes
    say(episode, "7")
    assert episode.score == 1.0
    with pytest.raises(
        UserError, match=r"task 0 wants a runtime for its read: name one, as in options: .config: .agent"
    ):
        playing("runs-v1")(rows(0), 0)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("sya-v1", {}, "taskset 'sya-v1' not found .* Did you mean 'say_v1'"),
        ("say-v1", {"taskset": {"num_task": 3}}, "config.taskset.num_task: Extra inputs are not permitted"),
        ("say-v1", {"retries": {"max_retries": 2}}, "config.retries is of verifiers' own runner"),
        ("say-v1", {"agent": {"model": "x"}}, "config.agent.model is of verifiers' own runner"),
        ("say-v1", {"id": "user-sim"}, "has the seats assistant, user: only an environment of one can be played"),
        ("agent-v1", {}, "needs the harness 'agent-v1', a program that asks an OpenAI endpoint for each turn"),
        ("tools-v1", {}, "task 0 has tools, which only a harness can give to a model"),
    ],
)
def test_what_cannot_be_played_is_named(name: str, config: dict[str, Any], said: str):
    with pytest.raises(UserError, match=f"rollout.environment: verifiers: {name}.*{said}"):
        Verifiers(name, config).reset({"index": 0}, np.random.default_rng(0))


def test_rows_without_a_number():
    with pytest.raises(UserError, match="index is None in a row with prompt"):
        Verifiers("say-v1").reset({"prompt": "p"}, np.random.default_rng(0))


def test_the_page(tmp_path: Path):
    page, model = "docs/guide/verifiers.md", str(model_folder(tmp_path / "model"))
    write(page, tmp_path, model)
    (recipe,) = blocks(page, "yaml")
    (tmp_path / "letters.yaml").write_text(recipe.text.replace("Qwen/Qwen3-0.6B", model))
    assert main(["run", "letters.yaml", "steps=1"]) == 0
    assert metrics("runs/letters")[-1]["reward/failed"] == 0


def test_a_run_learns_and_is_killed(tmp_path: Path):
    """The same to the bit as one that nobody killed."""
    with no_process_left() as runs:
        assert_learns_though_killed(tmp_path, {"verifiers": "letters-v1"}, runs, exact=True)
