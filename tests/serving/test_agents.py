"""Programs that play episodes on a served engine: what is recorded and refused, and what is said when they fail."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tiny_runs import model_folder
from tunix.data.config import DataConfig
from tunix.errors import Failure, UserError
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.rollout.config import RolloutConfig
from tunix.rollout.environments.base import Episodes
from tunix.rollout.environments.config import AgentConfig
from tunix.serving.agents import MODEL, AgentPlayer
from tunix.types import Sampling

AGENT = Path(__file__).parents[1] / "small_agent.py"
Play = Callable[..., tuple[AgentPlayer, Episodes]]


@pytest.fixture(scope="module")
def inference(tmp_path_factory: pytest.TempPathFactory) -> InferenceModel:
    folder = model_folder(tmp_path_factory.mktemp("model") / "llama")
    return InferenceModel(InferenceOptions(str(folder), slots=4, length=64))


@pytest.fixture
def play(inference: InferenceModel) -> Iterator[Play]:
    """Plays episodes of what the small agent does."""
    with ExitStack() as stack:

        def played(
            what: str, number: int = 1, stop_after: int | None = None, most: int = 40, seed: int = 0, **agent: Any
        ) -> tuple[AgentPlayer, Episodes]:
            section = {"command": [sys.executable, "-I", str(AGENT), what], "reward": "file", **agent}
            data = DataConfig(train="rows.jsonl", max_length=64)
            player = AgentPlayer(AgentConfig.model_validate(section), inference.source, data, 1.0, stop_after)
            stack.callback(player.close)
            rows = [{"prompt": "abcd", "number": i} for i in range(number)]
            sampling = Sampling(max_tokens=most, stop_ids=inference.source.stop_ids)
            return player, player.play(inference.engine, rows, sampling, seed, list(range(number)))

        yield played


@pytest.mark.slow
def test_what_is_sampled_follows_from_the_seed(play: Play):
    """Each episode has random numbers of its own, whoever else plays; log-probs are those of the engine."""
    _, first = play("two turns", 3)
    _, again = play("two turns", 3, concurrency=1)
    _, other = play("two turns", 3, seed=1)
    tokens = [[x.completion.tokens.tolist() for x in batch.episodes] for batch in (first, again, other)]
    assert tokens[0] == tokens[1]
    assert len({str(x) for x in (*tokens[0], *tokens[2])}) == 6
    for episode in first.episodes:
        completion = episode.completion
        assert len(completion.turns) == 2
        assert completion.restarts == ()
        assert bytes(completion.tokens[completion.turns[0][1] : completion.turns[1][0]].tolist()) == b"and"
        assert (completion.logprobs[completion.drawn] < 0).all()
        assert episode.done
        assert episode.rewards == [None, episode.score]
        assert 0 <= episode.score <= 1


WRONG = [
    ("asks nothing", {}, "the agent asked for nothing and exited with 1, after it printed: no idea what to ask"),
    ("hangs", {"deadline": 8.0}, "the agent took longer than 8 s, after it printed: waiting for nothing"),
    ("hot", {}, "the agent left a reward.json that returned NaN"),
    ("hot", {}, "temperature: it is 1 here, by the run's recipe: leave it out"),
    ("written", {}, "the agent exited with 0 and left no reward.json, and printed nothing"),
]
"""What a program does, its settings, and what is said of it."""


@pytest.mark.parametrize(("what", "agent", "said"), WRONG)
def test_an_agent_that_fails_is_named(what: str, agent: dict[str, Any], said: str, play: Play):
    _, batch = play(what, **agent)
    assert isinstance(failure := batch.scores[0], Failure)
    assert said in failure.reason
    assert batch.logged[0]["agent"]["exit"] == (None if what == "hangs" else what == "asks nothing")


def test_what_a_program_has_started_ends_with_it(play: Play, tmp_path: Path):
    """A child in a session of its own, which would write a file after the program has ended."""
    late = tmp_path / "late"
    script = f"(setsid sh -c 'sleep 1.5; touch {late}' &) ; exit 3"
    _, batch = play("", command=["sh", "-c", script], reward="exit")
    assert isinstance(batch.scores[0], Failure)
    time.sleep(2)
    assert not late.exists()


def test_an_exit_code_is_a_reward_and_a_column_an_argument(play: Play):
    _, batch = play("exits", 8, reward="exit")
    assert {*batch.scores} <= {0.0, 1.0}
    shell = 'test "$0" = "abcd" && test "$1" = 1 && exec "$2" -I "$3" exits'
    _, batch = play("", 2, reward=None, command=["sh", "-c", shell, "{prompt}", "{number}", sys.executable, str(AGENT)])
    first, second = batch.scores
    assert isinstance(first, Failure)
    assert "exited with 1, and printed nothing" in first.reason
    assert second is None or "exited with 1" in second.reason


def test_an_episode_has_room_for_so_many_tokens(play: Play):
    _, batch = play("long", most=30)
    completion = batch.episodes[0].completion
    assert batch.scores == [1.0]
    assert completion.drawn.sum() <= 30
    assert len(batch.episodes[0].prompt) + len(completion.tokens) <= 64
    assert completion.finish == "length"
    assert "the session has room for" in batch.logged[0]["agent"]["printed"]


def test_a_session_that_has_ended_is_answered_no_more(play: Play, tmp_path: Path):
    """The agent leaves its key; once its episode is over, the server says so."""
    note = tmp_path / "note"
    script = f'echo "$OPENAI_BASE_URL $OPENAI_API_KEY $OPENAI_MODEL" > {note}; exec "$0" -I "$1" "two turns"'
    _, batch = play("", command=["sh", "-c", script, sys.executable, str(AGENT)])
    assert batch.scores[0] is not None
    url, key, model = note.read_text().split()
    assert model == MODEL
    body = {"model": model, "prompt": "a"}
    answer = httpx.post(f"{url}/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_has_ended")
    for headers in ({}, {"Authorization": "Bearer mine"}, {"X-Session-ID": key}):
        answer = httpx.post(f"{url}/completions", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_too_many_failures_end_the_run_and_kill_what_still_plays(play: Play):
    began = time.monotonic()
    script = 'test "$0" -gt 1 && exec sleep 300; exit 0'
    with pytest.raises(UserError, match=r"stop_after_failures: 2 episodes in a row .* asked for nothing"):
        play("", 4, stop_after=2, command=["sh", "-c", script, "{number}"])
    assert time.monotonic() - began < 60


def test_a_program_that_is_not_there(play: Play):
    with pytest.raises(UserError, match=r"rollout.environment.agent.command: 'pyhton' is no program on the PATH"):
        play("", command=["pyhton", "agent.py"])


SECTIONS = [
    ({"max_staleness": 1}, "max_staleness: an agent asks the engine of this process"),
    ({"oversample": 1.5}, "oversample: an agent asks the engine of this process"),
    ({"engine": "vllm", "servers": ["http://host:8000"]}, "engine: vllm: an agent asks the engine of this process"),
    ({"environment": {"agent": {"command": ["x"]}, "turns": 3}}, "turns: changes nothing for an agent"),
    ({"environment": {"agent": {"command": ["x"]}, "name": "tools"}}, "the environment agent has a program"),
    ({"environment": "agent"}, "the environment agent has a program"),
    ({"environment": {"agent": {"command": []}}}, "at least 1 item"),
]


@pytest.mark.parametrize(("section", "said"), SECTIONS)
def test_settings_that_do_not_go_together(section: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        RolloutConfig.model_validate({"environment": {"agent": {"command": ["x"]}}, **section})
