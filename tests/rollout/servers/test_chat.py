"""A judge on a server: retries, deadlines, refusals, which model it is."""

import threading
import time
from concurrent.futures import CancelledError
from contextlib import closing

import pytest

from tests.fake_judge import FakeJudge, served, verdict
from tunix.errors import Failure, UserError
from tunix.rollout.rewards.config import JudgeConfig
from tunix.rollout.servers.chat import ChatServer

QUESTION = [{"role": "user", "content": "<answer>\nABCD\n</answer>"}]


def server(url: str, **settings) -> closing[ChatServer]:
    return closing(ChatServer(JudgeConfig(model=url, rubric="rubric.md", **settings)))


def test_it_asks_what_an_openai_client_would_ask(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "abc")
    fake = FakeJudge()
    options = {"max_tokens": None, "max_completion_tokens": 9}
    with served(fake) as url, server(url, key_variable="JUDGE_KEY", options=options) as judge:
        assert judge([QUESTION]) == [verdict(1.0, 1)]
    assert fake.bodies == [{"model": "strict", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 9}]
    assert fake.keys == {"Bearer abc"}


def test_a_busy_server_is_asked_again_when_it_says():
    """429 with a Retry-After of one second, then 503 without one."""
    fake = FakeJudge(statuses=[429, 503], headers={"Retry-After": "1"})
    with served(fake) as url, server(url) as judge:
        began = time.monotonic()
        assert judge([QUESTION]) == [verdict(1.0, 1)]
        assert time.monotonic() - began >= 2
    assert len(fake.bodies) == 3


def test_no_more_are_asked_at_a_time_than_are_allowed():
    fake = FakeJudge(delay=0.05)
    with served(fake) as url, server(url, concurrency=2) as judge:
        assert judge([QUESTION] * 6) == [verdict(1.0, 1)] * 6
    assert fake.most == 2


def test_a_server_that_hangs_fails_the_sample_at_the_deadline():
    fake = FakeJudge()
    with served(fake) as url, server(url, deadline=0.5) as judge:
        fake.hangs.set()
        (reply,) = judge([QUESTION])
        assert isinstance(reply, Failure)
        assert reply.reason.startswith("judge did not answer in 0.5 s")
        fake.hangs.clear()
        assert judge([QUESTION]) == [verdict(1.0, 1)]


def test_a_server_that_dies_fails_the_sample_with_what_it_last_did():
    fake = FakeJudge(dies_after=1)
    with served(fake) as url, server(url, deadline=1.0) as judge:
        first, second = judge([QUESTION]), judge([QUESTION])
    assert first == [verdict(1.0, 1)]
    assert isinstance(second[0], Failure)
    assert "did not answer in 1 s (the last time /chat/completions: RemoteProtocolError" in second[0].reason


def test_what_is_refused_is_not_asked_again():
    fake = FakeJudge(statuses=[400])
    with served(fake) as url, server(url) as judge:
        assert judge([QUESTION]) == [
            Failure("judge is refused: it refuses /chat/completions with 400: come back later")
        ]
    assert len(fake.bodies) == 1


def test_no_message_is_no_reply():
    with served(FakeJudge(reply=lambda messages: None)) as url, server(url) as judge:
        assert judge([QUESTION]) == [""]


def test_what_is_wrong_with_a_server_is_told_at_the_start(monkeypatch):
    def refused(url: str, **settings) -> str:
        with pytest.raises(UserError) as error, server(url, **settings):
            pass
        return str(error.value)

    with served(FakeJudge(models=("strict", "lenient"))) as url:
        assert f"reward.judge.model: {url} lists 2 models (strict, lenient): name it in" in refused(url)
        assert "has no model 'strikt', but strict, lenient. Did you mean 'strict'?" in refused(url, served="strikt")
        with server(url, served="lenient") as judge:
            assert judge.served == "lenient"
    assert "cannot be asked: /models: ConnectError" in refused(url)
    with served(FakeJudge(lists=False)) as url:
        assert "it refuses /models with 404: no such page; name its model in reward.judge.served" in refused(url)
        with server(url, served="any") as judge:
            assert judge.served == "any"
    monkeypatch.delenv("NO_KEY", raising=False)
    assert "key_variable: NO_KEY is not set" in refused(url, key_variable="NO_KEY")


def test_closing_gives_up_what_is_asked():
    fake = FakeJudge()
    with served(fake) as url:
        judge = ChatServer(JudgeConfig(model=url, rubric="rubric.md"))
        fake.hangs.set()
        ended: list[str] = []

        def ask() -> None:
            try:
                judge([QUESTION])
            except CancelledError:
                ended.append("given up")

        waiting = threading.Thread(target=ask, daemon=True)
        waiting.start()
        while not fake.bodies:
            time.sleep(0.01)
        judge.close()
        waiting.join(10)
        assert ended == ["given up"]
