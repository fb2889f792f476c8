"""OpenEnv servers, really started on loopback: sessions, what a server does wrong, and a run that learns from one."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.run.test_kill import no_process_left
from tests.test_pages import blocks, write
from tests.tiny_runs import metrics, model_folder
from tests.worlds.learning import assert_learns_though_killed, write_learner
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.base import Episode, Episodes
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import Failure

pytestmark = pytest.mark.worlds
TOKENIZER = bytes_tokenizer()
SERVER = '''
import os, sys, time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

OPEN = []


class Say(Action):
    word: str


class Saying(Action):
    word: str
    loud: bool


class Heard(Observation):
    text: str
    left: int = 0


class Letters(Environment):
    """Rewards the share of small letters; three turns. A word says how it misbehaves."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        OPEN.append(self)

    def reset(self, seed=None, episode_id=None, shout=False, **rest):
        self.left = 3
        text = f"{seed} {sorted(rest.items())}" if rest else f"{seed % 7 if seed is not None else None}"
        return Heard(text=text.upper() if shout else text, left=3)

    def step(self, action, timeout_s=None, **rest):
        if action.word == "raise": raise KeyError("board")
        if action.word == "hang": time.sleep(3)
        if action.word == "die": os._exit(1)
        self.left -= 1
        letters = sum("a" <= letter <= "z" for letter in action.word)
        reward = float("nan") if action.word == "nan" else letters / max(len(action.word), 1)
        return Heard(text=f"{action.word}?\\n", left=self.left, reward=reward, done=self.left == 0)

    @property
    def state(self):
        return State()

    def close(self):
        OPEN.remove(self)


app = create_fastapi_app(Letters, Saying if "loud" in sys.argv else Say, Heard, max_concurrent_envs=int(sys.argv[2]))
app.get("/open")(lambda: len(OPEN))
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
'''


class Server:
    """A server of `Letters` in a process."""

    def __init__(self, folder: Path, port: int, sessions: int = 64, *words: str):
        self.url = f"http://127.0.0.1:{port}"
        (folder / "server.py").write_text(SERVER)
        self.process = subprocess.Popen([sys.executable, "server.py", str(port), str(sessions), *words], cwd=folder)
        try:
            self.until(lambda: self.open == 0)
        except BaseException:
            self.kill()
            raise

    @property
    def open(self) -> int:
        """How many sessions there are; -1 where nothing answers."""
        try:
            return int(httpx.get(f"{self.url}/open", timeout=5).text)
        except httpx.TransportError:
            return -1

    def until(self, happened: Callable[[], bool], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), free_port())
    yield server
    server.kill()


@pytest.fixture
def server(shared: Server) -> Server:
    """One for all tests that leave it alive; the sessions of the test before are closed."""
    shared.until(lambda: shared.open == 0)
    return shared


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers, which end with the test."""
    servers: list[Server] = []

    def start(*words: Any, port: int | None = None) -> Server:
        servers.append(Server(tmp_path, port or free_port(), *words))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def playing() -> Iterator[Callable[..., Player]]:
    """Makes players, whose workers end with the test."""
    players: list[Player] = []

    def player(server: Server | str, deadline: float = 60.0, workers: int = 1, **options: Any) -> Player:
        url = server if isinstance(server, str) else server.url
        config = EnvironmentConfig.model_validate(
            {"openenv": url, "options": options, "deadline": deadline, "workers": workers}
        )
        players.append(Player(config, TOKENIZER))
        return players[-1]

    yield player
    for one in players:
        one.close()


def say(episode: Episode, action: str) -> str | None:
    observed = episode.turn(np.asarray(TOKENIZER.encode(action), np.int32))
    return None if observed is None else TOKENIZER.decode(observed)


def prompts(episodes: Episodes) -> list[str]:
    return [TOKENIZER.decode(episode.prompt, skip_special=True) for episode in episodes.episodes]


def test_an_episode_is_a_session(server: Server, playing: Any):
    player = playing(server, workers=2)
    assert server.open == 0  # the schema takes none
    episodes = player([{"seed": 1, "index": i // 2} for i in range(4)], seed=0)
    assert server.open == 4
    shown = prompts(episodes)
    assert shown[0] == shown[1]  # the seed of the server follows from the row
    assert shown[2] == shown[3]
    first = episodes.episodes[0]
    assert say(first, "ab1\n") == "ab1?\n"  # the white space around an action is left out
    assert say(first, '{"word": "1 "}') == "1 ?\n"
    assert say(first, "abc") is None
    assert first.score == pytest.approx(2 / 3 + 0 + 1)
    server.until(lambda: server.open == 3)
    # Cut off: the answer is scored, and all sessions are closed.
    completions = [completion(episode) for episode in episodes.episodes]
    episodes.finish(dict(enumerate(completions)))
    assert episodes.scores[1:] == [1.0] * 3
    server.until(lambda: server.open == 0)


def completion(episode: Episode) -> Any:
    from tests.rollout.environments.test_environments import completion_of, ids

    return completion_of(*((i, i + 1) for i in range(max(len(episode.rewards), 1))), tokens=ids("abc"), finish="length")


def test_what_is_asked_of_reset_and_shown(server: Server, playing: Any):
    player = playing(server, observation="text", reset={"shout": True}, columns=["level"])
    (episode,) = player([{"level": "easy", "answer": 3}], 0).episodes
    assert prompts(Episodes([episode])) == ["NONE [('LEVEL', 'EASY')]"]
    (episode,) = playing(server, observation="left")([{"seed": 0, "index": 0}], 0).episodes
    assert prompts(Episodes([episode])) == ["3"]
    with pytest.raises(UserError, match=r"options.columns: 'lvel' is no column .* Did you mean 'level'"):
        playing(server, columns=["lvel"])([{"level": 1}], 0)


def test_a_session_that_breaks_fails_alone_and_is_closed(server: Server, playing: Any):
    player = playing(server, deadline=2.0)
    episodes = player([{"seed": 0, "index": i} for i in range(4)], 0).episodes
    for episode, action in zip(episodes, ("raise", "hang", "nan", "fine"), strict=True):
        say(episode, action)
    reasons = [episode.score.reason for episode in episodes[:2] if isinstance(episode.score, Failure)]
    assert "broke it: RuntimeError: Server error: 'board' (code: EXECUTION_ERROR)" in reasons[0]
    assert "TimeoutError" in reasons[1]  # before the deadline at which the worker would be killed
    assert episodes[2].rewards == [None]  # what JSON makes of NaN, in the server itself
    assert episodes[3].score == 1.0
    assert say(episodes[3], "on") == "on?\n"
    server.until(lambda: server.open == 2)


def test_an_action_that_the_schema_refuses_is_answered(serving: Any, playing: Any):
    server = serving(64, "loud")
    with pytest.raises(
        UserError, match=r"options.action: the action of .* has the fields word, loud; the option is not"
    ):
        playing(server)
    player = playing(server, action="word")
    (episode,) = player([{"seed": 0, "index": 0}], 0).episodes
    assert say(episode, "quiet") == 'not a valid action: {"word": "quiet"}\n'
    assert say(episode, '{"word": "abc", "loud": true}') == "abc?\n"
    assert episode.rewards == [None, 1.0]


def test_a_server_that_is_not_there_or_is_full(serving: Any, playing: Any):
    with pytest.raises(UserError, match=r"openenv: http://127\.0\.0\.1:9: no environment server answers \(C"):
        playing("http://127.0.0.1:9")
    with pytest.raises(UserError, match="openenv: host:8000 is no address of a server"):
        playing("host:8000")
    server = serving(2)
    with pytest.raises(UserError, match=r"starts no session \(.*CAPACITY_REACHED\)\): raise its max_concurrent_envs"):
        playing(server)([{"seed": 0, "index": i} for i in range(3)], 0)
    with pytest.raises(UserError, match=r"options.observation: .* has the fields text, left; .* Did you mean 'text'"):
        playing(server, observation="txt")


def test_a_lost_connection_is_not_made_again(serving: Any, playing: Any):
    """The client of the package would go on in a session that knows nothing of the episode."""
    server = serving()
    player = playing(server)
    one, two = player([{"seed": 0, "index": i} for i in range(2)], 0).episodes
    assert say(one, "a") == "a?\n"
    server.kill()
    again = serving(port=int(server.url.rpartition(":")[2]))
    for episode in (one, two):
        assert say(episode, "b") is None
        assert isinstance(episode.score, Failure)
        assert "lost its session" in episode.score.reason
    assert again.open == 0
    (fresh,) = player([{"seed": 0, "index": 0}], 0).episodes
    assert say(fresh, "b") == "b?\n"


def test_sessions_end_with_a_worker_that_is_killed(server: Server, playing: Any):
    player = playing(server)
    player([{"seed": 0, "index": 0}] * 3, 0)
    assert server.open == 3
    player.close()
    server.until(lambda: server.open == 0)


def test_a_run_whose_server_dies_says_so_once(serving: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What was trained before is saved, and the same command goes on with another server."""
    server = serving()
    environment = {"openenv": server.url, "turns": 3}
    write_learner(tmp_path, environment, steps=4, rollout__stop_after_failures=3)
    text = (tmp_path / "r.yaml").read_text()
    (tmp_path / "dying.py").write_text(
        "import os, signal\n"
        "from tunix.algorithms.grpo.algorithm import GRPO\n\n\n"
        "class Dying(GRPO):\n"
        "    def step(self, client, batch):\n"
        "        result = super().step(client, batch)\n"
        f"        if not os.path.exists('dead'): os.kill({server.process.pid}, signal.SIGKILL)\n"
        "        open('dead', 'w').close()\n"
        "        return result\n"
    )
    (tmp_path / "r.yaml").write_text(text.replace("name: grpo", "name: dying.py:Dying"))
    assert main(["run", "r.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"the environment server {server.url} starts no session (ConnectionError" in said
    assert "Traceback" not in said
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["1"]
    serving(port=int(server.url.rpartition(":")[2]))
    assert main(["run", "r.yaml"]) == 0


def test_the_page(tmp_path: Path):
    page, model, port = "docs/guide/openenv.md", str(model_folder(tmp_path / "model")), str(free_port())
    write(page, tmp_path, model)
    (recipe,) = blocks(page, "yaml")
    text = recipe.text.replace("Qwen/Qwen3-0.6B", model).replace("8000", port)
    (tmp_path / "letters.yaml").write_text(text)
    server = subprocess.Popen([sys.executable, "letters_server.py", port], cwd=tmp_path)
    try:
        while not reachable(int(port)):
            assert server.poll() is None
            time.sleep(0.1)
        assert main(["run", "letters.yaml", "steps=1"]) == 0
    finally:
        server.kill()
        server.wait()
    assert metrics("runs/letters")[-1]["reward/failed"] == 0


def reachable(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_learns_and_is_killed(serving: Any, tmp_path: Path):
    server = serving()
    with no_process_left() as runs:
        assert_learns_though_killed(tmp_path, {"openenv": server.url, "turns": 3}, runs, exact=False)
    server.until(lambda: server.open == 0)
