"""Environments in real worker processes: the same episodes as in this process; those that misbehave spoil no other.

An action of the model says how the environment is to behave.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rollout.environments.test_environments import completion_of, ids
from tests.rollout.rewards.test_rewards import gone, pids_in
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.rollout.environments import remote
from tunix.rollout.environments.base import Environment, Episode, Episodes, Step
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import Player, read_environment
from tunix.rollout.rewards.base import Failure
from tunix.rollout.workers.process import MARK, end_marked

TOKENIZER = bytes_tokenizer("chatml")
ENVIRONMENTS = '''
import os, signal, subprocess, sys, time
from pathlib import Path

import numpy as np

from tunix.errors import UserError
from tunix.rollout.environments.base import Environment, Step


def behave(what):
    if what == "exit": os._exit(3)
    if what == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang": time.sleep(3600)
    if what == "once" and not os.path.exists("once"):
        Path("once").touch()
        os._exit(3)
    if what == "spin":
        while True: pass
    if what == "raise": raise KeyError("board")
    if what == "leave": sys.exit("bye")
    if what == "advise": raise UserError("mend the row")


class Obeys(Environment):
    """Does what it is told; else it answers with its own random numbers."""

    stop_strings = ("|",)

    def __init__(self, ends: str = ".", starts: str = ""):
        behave(starts)
        self.ends = ends

    def reset(self, row, rng):
        behave(row.get("start"))
        self.rng, self.turn = rng, 0
        return f"{row.get('prompt')} {rng.integers(1000)}"

    def step(self, action, tokens):
        behave(action)
        self.turn += 1
        answers = {
            "print": lambda: Step("heard", reward=print("own words")),
            "pid": lambda: Step(str(os.getpid())),
            "text": lambda: "a text",
            "none": lambda: None,
            "number": lambda: Step(3.5),
            "numbers": lambda: Step([1, 2]),
            "floats": lambda: Step(np.zeros(2)),
            "nan": lambda: Step("more", reward=float("nan")),
            "bytes": lambda: Step([{"role": "user", "content": b"raw"}]),
        }
        if action in answers: return answers[action]()
        return Step(f"{self.turn} {self.rng.random()}", reward=np.float32(self.rng.random()), done=action == self.ends)


class Ids(Environment):
    scores = False

    def reset(self, row, rng):
        self.rng = rng
        return np.array(row["prompt_ids"])

    def step(self, action, tokens):
        return Step(np.concatenate([tokens[::-1], self.rng.integers(0, 200, 3)]), reward=self.rng.normal())


class Chats(Environment):
    def reset(self, row, rng):
        return row["prompt"]

    def step(self, action, tokens):
        return Step([{"role": "user", "content": action + "?"}], reward=1 / 3)


class Counts(Environment):
    """Answers by what its process was called with before: nothing that a replay could repeat."""

    def reset(self, row, rng):
        return "go "

    def step(self, action, tokens):
        behave(action)
        return Step(f"{os.getpid()}")


class Session(Environment):
    """Notes its end; of each call it knows only that it came."""

    replayable = False

    def reset(self, row, rng):
        self.name = row["name"]
        return f"{self.deadline:g} "

    def step(self, action, tokens):
        behave(action)
        if action == "fork" and os.fork():
            time.sleep(0.5)  # the child is first to go on
        return Step("on", reward=1.0, done=action == ".")

    def close(self):
        with open("closed", "a") as file:
            file.write(self.name)
        if self.name == "b": raise OSError("gone already")


class Starts(Environment):
    """Starts children, one of them in a session of its own."""

    def __init__(self):
        self.children = [subprocess.Popen(["sleep", "3600"], start_new_session=apart) for apart in (False, True)]

    def reset(self, row, rng):
        Path("pids").write_text(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in self.children))))
        return "go "

    def step(self, action, tokens):
        time.sleep(3600)
'''


@pytest.fixture(autouse=True)
def environments(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(ENVIRONMENTS)
    return tmp_path / "mine.py"


@pytest.fixture
def playing() -> Any:
    """Makes players, whose workers end with the test."""
    made: list[Player] = []

    def player(name: str = "Obeys", deadline: float = 60.0, workers: int = 1, **options: Any) -> Player:
        reference = name if ":" in name or name.islower() else f"mine.py:{name}"
        config = EnvironmentConfig(name=reference, options=options, deadline=deadline, workers=workers)
        made.append(Player(config, TOKENIZER))
        return made[-1]

    yield player
    for one in made:
        one.close()


def say(episode: Episode, action: str) -> str | None:
    """The environment's answer as a text."""
    answer = episode.turn(ids(action))
    return None if answer is None else TOKENIZER.decode(answer)


ROWS: dict[str, dict[str, Any]] = {
    "guessing": {},
    "calculator": {"prompt": "What is 3 * 4 + 5?", "answer": "17"},
    "problem": {"prompt": "1+1?"},
    "mine.py:Obeys": {"prompt": "p"},
    "mine.py:Ids": {"prompt_ids": np.array([7, 8, 9], np.int16)},
    "mine.py:Chats": {"prompt": [{"role": "user", "content": "2+2?"}]},
}


@pytest.mark.parametrize("name", ROWS)
def test_episodes_are_those_of_this_process_to_the_bit(playing: Any, name: str):
    """Five episodes over two workers; their random numbers follow from the seed and the number of each."""
    player, (make, *_) = playing(name, workers=2), read_environment(EnvironmentConfig(name=name))
    numbers = [3, 0, 7, 1, 12]
    played = player([ROWS[name]] * 5, 11, numbers).episodes
    here = [Episode(make(), ROWS[name], np.random.default_rng([11, i]), TOKENIZER) for i in numbers]
    assert (player.scores, player.stop_strings) == (make().scores, make().stop_strings)
    for one, other in zip(played, here, strict=True):
        assert one.name == other.name
        assert one.prompt.dtype == other.prompt.dtype
        assert one.prompt.tolist() == other.prompt.tolist()
        for action in ("16\n", "<calc>3*4</calc>", "."):
            if not other.done:
                there, expected = one.turn(ids(action)), other.turn(ids(action))
                assert (there is None) == (expected is None)
                assert expected is None or there is None or there.tolist() == expected.tolist()
            assert (one.rewards, one.done, one.score) == (other.rewards, other.done, other.score)


def test_turns_that_were_cut_off_are_passed_on_from_several_threads(playing: Any):
    played = playing("guessing", workers=2)([{"secret": 16}] * 3, seed=0)
    played.finish(dict(enumerate([completion_of((0, 2), tokens=ids("16"), finish="length")] * 3)))
    assert played.scores == [1.0] * 3


# --- What goes wrong


def test_what_goes_wrong_is_a_failure_of_that_episode(playing: Any):
    reasons = {
        "raise": "raised KeyError: 'board'",
        "advise": "raised UserError: mend the row",
        "leave": "raised SystemExit: bye",
        "text": "returned a str, not a Step",
        "none": "returned None, not a Step",
        "nan": "gave a reward that is no number: it returned NaN",
        "number": "answered with a float: an observation is a text, a list of messages or an array of ids",
        "numbers": "answered with a list that holds a int: an observation is a text,",
        "floats": "raised UserError: token ids are a vector of whole numbers, not float64",
        "bytes": "answered with messages that are no JSON (Object of type bytes is not JSON serializable)",
    }
    episodes = playing()([{}] * len(reasons), seed=0).episodes
    for episode, (action, reason) in zip(episodes, reasons.items(), strict=True):
        assert say(episode, action) is None
        assert isinstance(episode.score, Failure)
        assert episode.score.reason.startswith(f"the environment Obeys {reason}")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("exit", "ended its process (exit code 3)"),
        ("crash", "ended its process (signal 11)"),
        ("spin", "took longer than 2 s"),
    ],
)
def test_an_episode_that_ends_its_worker_takes_no_other_along(playing: Any, action: str, reason: str):
    """The other one lives in the same worker, and goes on in a new one as if nothing had happened."""
    player = playing(deadline=2.0 if action == "spin" else 60.0)
    bad, good = player([{"prompt": "a"}, {"prompt": "b"}], seed=0).episodes
    (undisturbed,) = player([{"prompt": "b"}], 0, [1]).episodes
    assert say(good, "on") == say(undisturbed, "on")
    assert say(bad, action) is None
    assert bad.score == Failure(f"the environment Obeys {reason}")
    assert say(good, "and on") == say(undisturbed, "and on")
    assert say(good, ".") is None
    assert say(undisturbed, ".") is None
    assert good.rewards == undisturbed.rewards
    assert good.done
    assert len(good.rewards) == 3


def test_an_episode_that_answers_differently_when_it_is_replayed(playing: Any):
    bad, first, idle = playing("Counts")([{}] * 3, seed=0).episodes
    say(first, "on")
    say(bad, "exit")
    assert say(first, "on") is None
    assert first.score == Failure(
        "the environment Counts is not deterministic given row and rng, so that it cannot be replayed: another episode "
        "of its worker ended its process (exit code 3), and when its actions were repeated in a new one the answer to "
        "turn 1 was not that of before"
    )
    assert say(idle, "on") is not None  # of it there was only the prompt to repeat, which is always the same


def test_what_cannot_be_replayed_fails_with_its_worker(playing: Any):
    bad, other = playing("Session")([{"name": "b"}, {"name": "o"}], seed=0).episodes
    say(bad, "exit")
    assert say(other, "on") is None
    assert other.score == Failure(
        "the environment Session is lost: another episode of its worker ended its process (exit code 3), and what it "
        "had begun cannot be replayed"
    )


def test_a_fork_that_comes_back_answers_nothing(playing: Any):
    """The answer of the child would be taken for that to the next call."""
    (episode,) = playing("Session")([{"name": "f"}], seed=0).episodes
    assert say(episode, "fork") == "on"
    assert say(episode, ".") is None
    assert episode.score == 2.0


def test_environments_are_closed_once_whatever_ends_them(
    playing: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """At the end, after a failure, where the token limit cut the last turn off; not where the process was ended."""
    player = playing("Session", workers=2)
    played = player([{"name": name} for name in "abcd"], seed=0)
    closed = tmp_path / "closed"
    done, fails, _, _ = played.episodes
    assert TOKENIZER.decode(done.prompt)[-3:] == "60 "  # the deadline, which the constructor does not know
    say(done, ".")
    assert closed.read_text() == "a"
    say(fails, "raise")
    assert closed.read_text() == "ab"
    assert "the environment Session: its close raised OSError: gone already" in capfd.readouterr().err
    assert fails.score == Failure("the environment Session raised KeyError: 'board' (mine.py, line 20)")
    played.finish(dict(enumerate([completion_of((0, 2), tokens=ids("on"), finish="length")] * 4)))
    assert sorted(closed.read_text()) == ["a", "b", "c", "d"]
    assert played.scores == [1.0, fails.score, 1.0, 1.0]


def test_so_many_failures_in_a_row_end_a_run(environments: Path):
    player = Player(EnvironmentConfig(name="mine.py:Obeys", workers=1), TOKENIZER, stop_after=2)
    played = player([{}] * 6, seed=0)

    def turn(request: int, action: str) -> None:
        played.reply(request, completion_of((0, len(ids(action))), tokens=ids(action)))

    turn(0, "raise")
    turn(1, "on")  # an episode that goes on is no end of a row
    turn(2, ".")
    turn(3, "text")
    with pytest.raises(
        UserError,
        match=r"rollout.stop_after_failures: 2 episodes in a row have failed, the last because the environment Obeys "
        r"raised KeyError: 'board' .* What was trained before is saved",
    ):
        turn(4, "raise")
    player.close()


def test_what_hangs_in_one_worker_stops_no_other(playing: Any):
    hanging, other = playing(deadline=3600.0, workers=2)([{}, {}], seed=0).episodes
    thread = threading.Thread(target=say, args=(hanging, "hang"), daemon=True)
    thread.start()
    assert all(say(other, "on") for _ in range(3))
    assert thread.is_alive()


def test_episodes_stay_where_they_began(playing: Any):
    episodes = playing(workers=2)([{}] * 4, seed=0).episodes
    pids = [[say(episode, "pid") for episode in episodes] for _ in range(2)]
    assert pids[0] == pids[1]
    assert pids[0][:2] == pids[0][2:]
    assert len({*pids[0], str(os.getpid())}) == 3


def test_what_it_prints_is_no_output(playing: Any, capfd: pytest.CaptureFixture[str]):
    (episode,) = playing()([{}], seed=0).episodes
    assert say(episode, "print") == "heard"
    out, err = capfd.readouterr()
    assert "own words" not in out
    assert "own words" in err


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("raise", "the environment Obeys does not start: it raised KeyError: 'board'"),
        ("advise", "^mend the row"),
        ("exit", r"the environment Obeys does not start: it ended its process \(exit code 3\)"),
        ("hang", r"the environment Obeys does not start: it took longer than 1 s"),
    ],
)
def test_an_episode_that_does_not_start_says_why(playing: Any, start: str, message: str):
    with pytest.raises(UserError, match=message):
        playing(deadline=1.0 if start == "hang" else 60.0)([{"start": start}], seed=0)


def test_a_reset_that_ends_the_process_is_tried_twice(playing: Any):
    episodes = playing()([{"prompt": "a"}, {"start": "once", "prompt": "b"}], seed=0).episodes
    assert [TOKENIZER.decode(episode.prompt)[:2] for episode in episodes] == ["a ", "b "]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("guessing", {"guesses": 0}, "guesses 0: 1 is the least"),
        ("calculator", {"calls": -1}, "calls: -1; it is 0 or more"),
        ("Obeys", {"starts": "raise"}, "the environment Obeys cannot be made: it raised KeyError: 'board'"),
        ("Obeys", {"starts": "crash"}, r"the environment Obeys cannot be made: it ended its process \(signal 11\)"),
        ("Obeys", {"starts": "hang"}, r"the environment Obeys cannot be made: it took longer than 1 s"),
    ],
)
def test_one_that_cannot_be_made_is_refused_at_the_start(
    playing: Any, monkeypatch: pytest.MonkeyPatch, name: str, options: Any, message: str
):
    """What a process makes first has the time of a start, which may import and load; here a second."""
    if "hang" in options.values():
        monkeypatch.setattr(remote, "START", 1.0)
    with pytest.raises(UserError, match=message):
        playing(name, deadline=1.0, **options)


def test_one_that_a_worker_cannot_import(playing: Any, environments: Path):
    environments.write_text("import sys\nassert 'pytest' in sys.modules, 'only here'\n" + ENVIRONMENTS)
    with pytest.raises(UserError, match=r"an environment's worker process does not start: .*AssertionError: only here"):
        playing()


def test_a_row_that_cannot_be_sent_is_named(playing: Any):
    player = playing()
    with pytest.raises(UserError, match="the environment Obeys reads the column 'bad', which holds function:"):
        player([{"prompt": "p", "bad": lambda: 0}], seed=0)


# --- Their end


def test_closing_waits_for_no_environment_that_hangs(playing: Any, tmp_path: Path):
    player = playing("Starts", deadline=3600.0)
    (episode,) = player([{}], seed=0).episodes
    thread = threading.Thread(target=say, args=(episode, "on"))
    thread.start()
    pids = pids_in(tmp_path / "pids")
    player.close()
    assert all(gone(pid) for pid in pids)
    thread.join(timeout=10)
    assert isinstance(episode.score, Failure)


def test_workers_end_with_the_last_that_uses_them(playing: Any, tmp_path: Path):
    player = Player(EnvironmentConfig(name="mine.py:Starts"), TOKENIZER)
    episodes = player([{}], seed=0)
    pids = pids_in(tmp_path / "pids")
    del player
    assert episodes.episodes[0].name == "Starts"
    assert Path(f"/proc/{pids[0]}").exists()
    del episodes
    assert all(gone(pid) for pid in pids)


def test_workers_end_with_a_trainer_that_is_killed(tmp_path: Path):
    script = (
        "from tunix.data.tokenizer import bytes_tokenizer\n"
        "from tunix.rollout.environments.config import EnvironmentConfig\n"
        "from tunix.rollout.environments.remote import Player\n"
        "player = Player(EnvironmentConfig(name='mine.py:Starts', deadline=3600), bytes_tokenizer())\n"
        "player([{}], 0).episodes[0].turn(__import__('numpy').zeros(1, int))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    pids = pids_in(tmp_path / "pids")
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert all(gone(pid) for pid in pids)


def test_episodes_that_are_over_are_forgotten(playing: Any):
    """A worker that has forgotten an episode cannot answer for it."""
    player = playing()
    (first,) = player([{}], seed=0).episodes
    player._workers[0].over.append(0)
    assert say(first, "on") is None
    assert first.score == Failure("the environment Obeys raised KeyError: 0")


# --- Of a notebook


class Here(Environment):
    """What a notebook's cell may hold."""

    go_on = False

    def reset(self, row: Any, rng: np.random.Generator) -> str:
        return f"{rng.integers(1000)} "

    def step(self, action: str, tokens: np.ndarray) -> Step:
        while action == "hang" and not Here.go_on:
            time.sleep(0.01)
        return Step(f"{os.getpid()}", reward=0.5)


def test_a_class_of_a_notebook_runs_here(playing: Any, monkeypatch: pytest.MonkeyPatch):
    """No other process could import it. One that hangs is left behind at its deadline, and the others go on."""
    monkeypatch.setattr(sys.modules["__main__"], "Here", Here, raising=False)
    episodes: Episodes = playing("__main__:Here", deadline=1.0)([{}] * 2, seed=5)
    bad, good = episodes.episodes
    assert TOKENIZER.decode(good.prompt) == f"{np.random.default_rng([5, 1]).integers(1000)} "
    assert say(bad, "hang") is None
    assert say(good, "on") == str(os.getpid())
    assert episodes.scores == [Failure("the environment Here took longer than 1 s"), 0.5]
    Here.go_on = True


def test_what_has_only_just_been_started_is_ended_too():
    """Children in sessions of their own, whose environment cannot be read before they run: of each start none is left
    that would write what it has slept for."""
    script = "(setsid sh -c 'sleep 0.5; echo late' &) ; exit 3"
    started = list[subprocess.Popen[bytes]]()
    for i in range(40):
        environment = {**os.environ, MARK: f"just started {i}"}
        started.append(subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.PIPE))
        started[-1].wait()
        end_marked(f"just started {i}")
    assert [x.communicate()[0] for x in started] == [b""] * 40
