"""Trackers: each step once and in order, whatever fails, also after a kill; what the packages are called with."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import wandb

from tests.tiny_runs import write_recipe
from tunix.cli import main
from tunix.errors import UserError
from tunix.trainer import metrics, trackers
from tunix.trainer.config import LoggingConfig
from tunix.trainer.metrics import require_trackers
from tunix.trainer.progress import Display
from tunix.trainer.trackers import MLflow, TensorBoard, Tracker, Trackio, Wandb
from tunix.util.atomic_io import PACKED, SAMPLES, append_rows, forget_after


class Said(Display):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class Fake:
    """A tracker that keeps what it is handed; `fail` may raise or wait before."""

    last = float("inf")

    def __init__(self, fail: Callable[[], object] = lambda: None):
        self.steps: list[tuple[int, dict[str, float], list[str]]] = []
        self.identities: list[str] = []
        self.closed, self.fail = False, fail

    def connect(self, identity: str, sent: float) -> "Fake":
        self.fail()
        self.identities.append(identity)
        return self

    def send(self, step, values, samples) -> None:
        self.fail()
        self.steps.append((step, dict(values), [row["completion"] for row in samples]))

    def close(self) -> None:
        self.closed = True


def write(folder: Path, step: int, *, metrics: bool = True) -> None:
    """What a run writes of a step: two samples, then its metrics, one of which is no number."""
    append_rows(
        folder / (SAMPLES if step % 2 else PACKED),
        [{"step": step, "completion": f"{step} {i}"} for i in range(2)],
        10**9,
    )
    if metrics:
        append_rows(folder / "metrics.jsonl", [{"step": step, "loss": 1 / step, "nan": None}])


def handed(*steps: int) -> list[tuple[int, dict[str, float], list[str]]]:
    return [(step, {"loss": 1 / step}, [f"{step} 0", f"{step} 1"]) for step in steps]


def awaited(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def start(fake: Fake, folder: Path, display: Any, checkpoint: int | None) -> Tracker:
    return Tracker("fake", fake.connect, folder, display, checkpoint)


def test_each_step_is_handed_over_once_and_in_order(tmp_path: Path):
    """A step when the next one's row is there. A run that is killed after step 4 and goes on from 2 writes 3 and 4
    again, which the tracker has, as the same run; one that starts from no checkpoint is another run, with all of it."""
    fake, display = Fake(), Said()
    tracker = start(fake, tmp_path, display, None)
    for step in (1, 2, 3):
        write(tmp_path, step)
        tracker.write(step, {})
    awaited(lambda: len(fake.steps) == 2)
    write(tmp_path, 4, metrics=False)  # `logging.every`
    write(tmp_path, 5)
    tracker.write(5, {})
    awaited(lambda: len(fake.steps) == 4)
    expected = [*handed(1, 2, 3), (4, {}, ["4 0", "4 1"])]
    assert fake.steps == expected
    awaited(lambda: json.loads((tmp_path / "trackers/fake.json").read_text())["sent"] == 4)
    # Killed: its thread is left alone. Step 5 was not handed over.
    again = Fake()
    tracker = start(again, tmp_path, display, 2)
    tracker.close()
    assert again.steps == handed(5)
    assert again.closed
    assert again.identities == fake.identities
    other = Fake()
    start(other, tmp_path, display, None).close()
    assert other.steps == expected + handed(5)
    assert other.identities != fake.identities
    assert display.said == []


def test_steps_after_which_a_run_went_back_are_handed_over_again(tmp_path: Path):
    fake = Fake()
    tracker = start(fake, tmp_path, Said(), None)
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
        tracker.write(step, {})
    awaited(lambda: fake.steps == handed(1, 2, 3))
    for name in ("metrics.jsonl", SAMPLES):
        forget_after(tmp_path / name, 1)
    for step in (2, 3):
        append_rows(tmp_path / "metrics.jsonl", [{"step": step, "loss": 10.0 + step}])
        tracker.write(step, {})
    tracker.close()
    assert fake.steps == [*handed(1, 2, 3), (2, {"loss": 12.0}, []), (3, {"loss": 13.0}, [])]


def test_of_a_step_all_files_are_read_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Step 2 becomes complete just after its metrics were left for later, and before its samples are looked at."""
    fake, loads = Fake(), json.loads
    tracker = start(fake, tmp_path, Said(), None)
    for step in (1, 2):
        write(tmp_path, step)

    def meanwhile(text):
        row = loads(text)
        if row.get("step") == 2 and "loss" in row:
            tracker._complete = 2.0
        return row

    monkeypatch.setattr(trackers.json, "loads", meanwhile)
    tracker.write(2, {})
    awaited(lambda: fake.steps)
    tracker.close()
    assert fake.steps == handed(1, 2)


def test_a_tracker_that_has_less_gets_the_rest(tmp_path: Path):
    for step in range(1, 6):
        write(tmp_path, step)
    start(Fake(), tmp_path, Said(), None).close()
    forgetful = Fake()
    forgetful.last = 3
    start(forgetful, tmp_path, Said(), 5).close()
    assert forgetful.steps == handed(4, 5)


def test_what_is_missed_while_it_is_down_is_sent_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither an error nor an endless wait is noticed by who writes; an error is said once, and counted."""
    monkeypatch.setattr(trackers, "PAUSE", 0.01)
    failing = iter([True, True, False, False, True])

    def fail() -> None:
        if next(failing, False):
            raise OSError("no  route\nto host")

    fake, display = Fake(fail), Said()
    tracker = start(fake, tmp_path, display, None)
    for step in range(1, 5):
        write(tmp_path, step)
        tracker.write(step, {})
    tracker.close()
    assert fake.steps == handed(1, 2, 3, 4)
    assert display.said == [
        "logging.fake: no route to host. The run goes on; what is missed is sent later",
        "logging.fake: everything was sent in the end (3 attempts failed)",
    ]


def test_a_tracker_that_hangs_gets_its_seconds_and_the_next_start_sends_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trackers, "SECONDS", 0.2)
    hung, display = threading.Event(), Said()
    fake = Fake(lambda: fake.identities and hung.wait(60))
    tracker = start(fake, tmp_path, display, None)
    began = time.monotonic()
    for step in range(1, 4):
        write(tmp_path, step)
        tracker.write(step, {})
    tracker.close()
    assert time.monotonic() - began < 30
    (line,) = display.said
    assert line.startswith("logging.fake: not everything was sent within 0.2 s of the run's end: the same command")
    monkeypatch.setattr(trackers, "SECONDS", 60.0)
    later = Fake()
    start(later, tmp_path, display, 3).close()
    assert later.steps == handed(1, 2, 3)
    hung.set()


class Picky(Fake):
    """A tracker that refuses some values for good."""

    refuses: Callable[[int, str], bool] = staticmethod(lambda step, name: False)

    def send(self, step, values, samples) -> None:
        self.fail()
        if bad := [name for name in [*values, *["samples"][: len(samples)]] if self.refuses(step, name)]:
            raise ValueError(f"no  {bad[0]}\nhere")
        self.steps.append((step, dict(values), [row["completion"] for row in samples]))


def write_more(folder: Path, step: int) -> None:
    append_rows(folder / SAMPLES, [{"step": step, "completion": f"{step} {i}"} for i in range(2)], 10**9)
    append_rows(folder / "metrics.jsonl", [{"step": step, "loss": 1 / step, "odd": 7.0}])


def test_what_is_refused_for_good_is_set_aside_and_the_rest_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One value of step 2, the samples of step 4, and all of step 5: nothing else is missed, and each is named."""
    monkeypatch.setattr(trackers, "PAUSE", 0.01)
    fake, display = Picky(), Said()
    fake.refuses = lambda step, name: (step, name) in {(2, "odd"), (4, "samples")} or step == 5
    tracker = start(fake, tmp_path, display, None)
    for step in range(1, 7):
        write_more(tmp_path, step)
        tracker.write(step, {})
    tracker.close()
    both = {step: {"loss": 1 / step, "odd": 7.0} for step in range(1, 7)}
    texts = {step: [f"{step} 0", f"{step} 1"] for step in range(1, 7)}
    assert fake.steps == [
        (1, both[1], texts[1]),
        (2, {"loss": 1 / 2}, []),
        (2, {}, texts[2]),
        (3, both[3], texts[3]),
        (4, {"loss": 1 / 4}, []),
        (4, {"odd": 7.0}, []),
        (6, both[6], texts[6]),
    ]
    file = tmp_path / "trackers/fake.refused.jsonl"
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["values"], len(row["samples"])) for row in kept] == [
        (2, {"odd": 7.0}, 0),
        (4, {}, 2),
        (5, {"loss": 1 / 5}, 0),
        (5, {"odd": 7.0}, 0),
        (5, {}, 2),
    ]
    assert display.said == [
        "logging.fake: no odd here. The run goes on; what is missed is sent later",
        f"logging.fake: step 2: odd refused for good (no odd here): set aside in {file}",
        f"logging.fake: step 4: samples refused for good (no samples here): set aside in {file}",
        f"logging.fake: step 5: loss, odd, samples refused for good (no loss here): set aside in {file}",
        "logging.fake: everything was sent in the end (6 attempts failed) but for what it refuses, of 3 steps, in "
        f"{file}",
    ]
    assert json.loads((tmp_path / "trackers/fake.json").read_text())["sent"] == 6
    start(Picky(), tmp_path, Said(), 6).close()
    assert len(file.read_text().splitlines()) == 5
    start(Picky(), tmp_path, Said(), None).close()  # another run, which is refused nothing
    assert not file.exists()


def test_a_tracker_that_refuses_everything_is_tried_three_times_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Such as one whose run was deleted: each step is set aside, four are said."""
    monkeypatch.setattr(trackers, "PAUSE", 0.01)
    fake, display = Picky(), Said()
    fake.refuses = lambda step, name: True
    tracker = start(fake, tmp_path, display, None)
    for step in range(1, 10):
        write_more(tmp_path, step)
        tracker.write(step, {})
    tracker.close()
    assert fake.steps == []
    assert tracker.failures == 2
    assert len(display.said) == 1 + 4 + 1
    assert len((tmp_path / "trackers/fake.refused.jsonl").read_text().splitlines()) == 9 * 3


def test_what_fails_while_a_refused_step_is_tried_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Step 2 is refused three times; as its values are tried alone, the tracker is down, twice. An `OSError` is no
    refusal, though it may be a `ValueError` too."""

    class Unread(ValueError, OSError):
        pass

    monkeypatch.setattr(trackers, "PAUSE", 0.01)
    fake, display = Picky(), Said()
    fake.refuses = lambda step, name: (step, name) == (2, "odd")
    calls = iter(range(99))
    # Calls: connect, step 1, step 2 three times; then loss, and odd, which is down; the step, loss, and odd, unread; in
    # the end the step, loss, odd, samples.
    fails = {6: ConnectionError("down"), 9: Unread("half")}

    def fail() -> None:
        if error := fails.get(next(calls)):
            raise error

    fake.fail = fail
    tracker = start(fake, tmp_path, display, None)
    for step in (1, 2, 3):
        write_more(tmp_path, step)
        tracker.write(step, {})
    tracker.close()
    assert [step for step, *_ in fake.steps] == [1, 2, 2, 2, 2, 3]
    (kept,) = [json.loads(line) for line in (tmp_path / "trackers/fake.refused.jsonl").read_text().splitlines()]
    assert (kept["step"], kept["values"], kept["samples"], kept["error"]) == (2, {"odd": 7.0}, [], "no  odd\nhere")


SAMPLE = {
    "step": 7,
    "group": 0,
    "prompt": "2+2?",
    "completion": "# 4\nby `hand`",
    "rewards": {"math": 1.0},
    "per_token": {"tokens": ["#"]},
}


def board_values(folder: Path) -> list[tuple[int, Any]]:
    """What TensorBoard's files below a run folder have, with its step."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted((folder / "tensorboard").iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(event.step, value) for value in event.summary.value]
            at += 16 + size
    return found


def test_tensorboard_has_numbers_and_texts(tmp_path: Path):
    board = TensorBoard(tmp_path, "id", 6.0)
    board.send(7, {"loss": 0.5}, [SAMPLE])
    board.close()
    values = {value.tag: (step, value) for step, value in board_values(tmp_path)}
    assert (values["loss"][0], values["loss"][1].simple_value) == (7, 0.5)
    ((step, text),) = [value for tag, value in values.items() if tag.startswith("samples/0")]
    assert step == 7
    assert text.tensor.string_val[0].decode() == (
        "prompt:\n\n    2+2?\n\ncompletion:\n\n    # 4\n    by `hand`\n\nrest:\n\n"
        '    {"group": 0, "rewards": {"math": 1.0}}'
    )


def test_wandb_has_numbers_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # of what it read in a test before
    monkeypatch.setattr(trackers, "SECONDS", 300.0)  # of a crowded machine
    run = Wandb("tests", tmp_path, {"seed": 0}, "abcd1234", -1.0)
    run.send(7, {"loss": 0.5}, [SAMPLE, {"step": 7, "prompt": [1, 2], "completion": "b", "expected": 4}])
    run.close()
    wandb.teardown()  # its service writes the last block when it ends
    (stored,) = (tmp_path / "wandb").glob("offline-run-*-abcd1234/*.wandb")
    assert b"samples" in stored.read_bytes()
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["step", "group", "prompt", "completion", "rewards", "expected"],
        "data": [
            [7, 0, "2+2?", "# 4\nby `hand`", '{"math": 1.0}', None],
            [7, None, "[1, 2]", "b", None, 4],
        ],
    }


def test_what_trackio_is_called_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As trackio 0.43 takes it: tried against it by hand."""
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("finish"))
    module: Any = ModuleType("trackio")
    module.Trace = lambda messages, metadata: (messages, metadata)
    module.init = lambda **settings: calls.append(settings) or run
    monkeypatch.setitem(sys.modules, "trackio", module)
    connection = Trackio("project", tmp_path / "small", {"seed": 0}, "abcd", -1.0)
    connection.send(7, {"loss": 0.5}, [SAMPLE])
    connection.close()
    begun, (values, step), end = calls
    assert (begun["project"], begun["name"], begun["resume"]) == ("project", "small-abcd", "allow")
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "# 4\nby `hand`"}]
    assert values == {"loss": 0.5, "samples": [(said, {"step": 7, "group": 0, "rewards": {"math": 1.0}})]}
    assert (step, end) == (7, "finish")


class Answered(Exception):
    """As MLflow's client raises what a server answers, or that it does not: with a status of 500."""

    def get_http_status_code(self) -> int:
        return self.args[0]


class Unanswered(OSError):
    """As `requests` raises what the store of texts answers."""

    def __init__(self, status: int):
        super().__init__(status)
        self.response = SimpleNamespace(status_code=status)


def test_what_mlflow_is_called_with(monkeypatch: pytest.MonkeyPatch):
    """As mlflow-skinny 3.17 takes it: tried against it by hand. A run goes on where it has the tag."""
    calls: list[Any] = []

    class Client:
        runs: ClassVar[list[Any]] = []

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="5") if self.runs else None

        def create_experiment(self, name):
            return "5"

        def search_runs(self, experiments, text):
            calls.append((experiments, text))
            return self.runs

        def create_run(self, experiment, run_name, tags):
            run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
            self.runs.append(run)
            calls.append((experiment, run_name, tags))
            return run

        def __getattr__(self, name):
            return lambda *words, **named: self.fails(name) or calls.append((name, *words, *named.values()))

        def fails(self, name):
            if name in raises and (status := next(answers, None)):
                raise raises[name](status)

    for name, members in {
        "mlflow": {"MlflowClient": Client},
        "mlflow.entities": {"Metric": lambda *x: (x[0], x[1], x[3]), "Param": lambda *x: x},
        "mlflow.exceptions": {"MlflowException": Answered},
        "requests": {"HTTPError": Unanswered},
        "mlflow.utils": {},
        "mlflow.utils.mlflow_tags": {"MLFLOW_LOGGED_ARTIFACTS": "tables"},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    settings = {f"key{i}": i for i in range(101)}
    answers: Iterator[int] = iter([])
    raises: dict[str, Any] = {}
    for _ in range(2):
        connection = MLflow("experiment", "small", settings, "abcd", -1.0)
        connection.send(7, {"reward/wörd!": 0.5}, [SAMPLE])
        connection.close()
    table = {
        "columns": ["step", "group", "prompt", "completion", "rewards"],
        "data": [[7, 0, "2+2?", "# 4\nby `hand`", '{"math": 1.0}']],
    }
    sent = [
        ("log_batch", "r1", [("reward/wörd_", 0.5, 7)]),
        ("log_text", "r1", json.dumps(table), "samples/00000007.json"),
        ("set_tag", "r1", "tables", '[{"path": "samples/00000007.json", "type": "table"}]'),
        ("set_terminated", "r1"),
    ]
    looked = (["5"], "tags.`tunix.run` = 'abcd'")
    params = list(settings.items())
    assert calls == [
        looked,
        ("5", "small", {"tunix.run": "abcd"}),
        ("log_batch", "r1", [(key, str(x)) for key, x in params[:100]]),
        ("log_batch", "r1", [("key100", "100")]),
        *sent,
        looked,
        ("update_run", "r1", "RUNNING"),
        *sent,
    ]
    # What it is answered tells what it will never take from what may pass: a key, an address, a proxy, a busy server.
    connection, statuses = (
        MLflow("experiment", "small", {}, "abcd", -1.0),
        [400, 413, 422, 401, 403, 404, 408, 429, 500],
    )
    for name, kind in (("log_batch", Answered), ("log_text", Unanswered)):
        raises, answers, kinds = {name: kind}, iter(statuses), []
        for _ in statuses:
            with pytest.raises((ValueError, kind)) as raised:
                connection.send(8, {"loss": 0.5}, [SAMPLE])
            kinds.append(raised.type)
        assert kinds == [ValueError] * 3 + [kind] * 6


def test_a_tracker_without_package_or_key_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("HOME", "WANDB_CONFIG_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    wandb.teardown()  # of what it read in a test before
    recipe = str(write_recipe(tmp_path / "r.yaml"))
    assert main(["check", recipe, "logging.mlflow=a"]) == 2
    assert "logging.mlflow: mlflow is not installed: `pip install '.[mlflow]'`" in capsys.readouterr().err
    assert main(["run", recipe, "logging.trackio=a", "--no-plan"]) == 2
    assert "logging.trackio: trackio is not installed: `pip install '.[trackio]'`" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"logging\.wandb: a needs a key: set WANDB_API_KEY"):
        require_trackers(LoggingConfig(wandb="a"))
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(UserError, match=r"logging\.mlflow: a needs an address: set MLFLOW_TRACKING_URI"):
        require_trackers(LoggingConfig(mlflow="a"))
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match=r"logging\.trackio: TRACKIO_SPACE_ID needs a key: set HF_TOKEN"):
        require_trackers(LoggingConfig(trackio="a"))
