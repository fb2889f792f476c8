"""A run that shows nothing for long says what it waits for."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.tiny_rl import write_policy
from tests.tiny_runs import train
from tunix.data.shapes import listed
from tunix.data.sources import texts
from tunix.run import watchdog
from tunix.run.watchdog import Watchdog
from tunix.trainer.progress import Display

LATE = """
import asyncio
async def late(completion):
    await asyncio.sleep(6)
    return 1.0
"""


def test_what_a_silent_run_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two threads wait for rows, which is said again after twice the time; a step that is shown ends the silence."""
    monkeypatch.setattr(watchdog, "SILENCE", 0.5)
    monkeypatch.setattr(watchdog, "LOOK", 0.02)
    log, go_on = tmp_path / "log.txt", threading.Event()
    display, before = Display("run", 3, 0, log=log), threading.enumerate()

    class Late(list[str]):
        def __iter__(self) -> Iterator[str]:
            go_on.wait(60)
            return iter(())

    def lines(number: int) -> list[str]:
        end = time.monotonic() + 30
        while not log.exists() or len(log.read_text().splitlines()) < number:
            assert time.monotonic() < end
            time.sleep(0.01)
        return log.read_text().splitlines()

    threads = [threading.Thread(target=lambda: listed(texts(Late()))) for _ in range(2)]
    for thread in threads:
        thread.start()

    def silent(line: str) -> int:
        told = re.search(r"nothing for 0:00:(\d\d)\. Waiting for ", line)
        assert told is not None, line
        return int(told[1])

    with closing(Watchdog(display)):
        for line in lines(4)[1:]:
            assert re.search(r"rows \(data/sources\.py:\d+\) in 2 threads", line), line
        long = silent(lines(4)[3])
        assert long >= 4, "after 0.5, 1, 2 and 4 seconds"
        go_on.set()
        for thread in threads:
            thread.join()
        display.update(1, {})
        last = lines(len(lines(0)) + 2)[-1]  # one may have been on its way
        assert "data/sources" not in last
        assert silent(last) < long
    assert not [thread for thread in threading.enumerate() if thread.name == "silence" and thread not in before]


@pytest.mark.slow
def test_a_run_whose_rewards_are_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watchdog, "SILENCE", 2)
    (tmp_path / "late.py").write_text(LATE)
    write_policy(tmp_path, steps=1, reward__functions=["late.py:late"])
    train("r.yaml")
    said = (tmp_path / "run/log.txt").read_text()
    assert re.search(r"nothing for 0:00:\d\d.*Waiting for .*rewards \(rollout/rewards/\w+\.py:\d+\)", said), said
