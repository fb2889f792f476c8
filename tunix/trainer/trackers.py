"""Trackers of a run: wandb, trackio, MLflow and TensorBoard, as far as `logging` asks for them.

The run writes `metrics.jsonl` and its samples whatever a tracker does; these files are the queue. A thread for each
tracker reads them, hands over step by step, and remembers the last step in `trackers/NAME.json`. So a run never waits
for a tracker before its end, and what one misses while it is down, or since the run was killed, it gets later, also
from the next start. A value that it will never take, by what it says, keeps no later one waiting: it is set aside in
`trackers/NAME.refused.jsonl`. What was in a tracker's own buffers when the process was killed is the tracker's to
recover.
"""

import heapq
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.errors import UserError
from tunix.trainer.config import LoggingConfig
from tunix.trainer.progress import Display
from tunix.util.atomic_io import PACKED, SAMPLES, append_rows, members, write_text_atomic
from tunix.util.faults import planned

Row = dict[str, Any]
FILES = ("metrics.jsonl", SAMPLES, PACKED)
Item = tuple[int, int, List[Row], int]
"""Step, number of the file in `FILES`, rows of the step in it, and the byte where they end."""

SECONDS = 30.0
"""What each tracker gets at the end of a run to be handed what it has not, and what it gets to connect."""
PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds before what failed is tried again: the first time, and at most, each time twice as many."""
TRIES = 3
"""How often what is refused is tried before each of its values is tried alone."""
SHOWN = 4
"""Samples of a step in TensorBoard, which shows them one below the other; and messages about what is refused."""


@runtime_checkable
class Connection(Protocol):
    """A tracker that was reached, in the thread that uses it."""

    last: float
    """The last step that it has of this run, as far as it can tell; infinite where it cannot."""

    def send(self, step: int, values: Mapping[str, float], samples: List[Row]) -> None:
        """Hands over the metrics of a step and the samples that were recorded of it.

        Raises:
            TypeError, ValueError: it will never take them. Whatever else is raised may pass.
        """
        ...

    def close(self) -> None:
        """Waits until it has everything."""
        ...


class Tracker:
    """A sink whose thread hands the rows of the run folder to a tracker."""

    def __init__(
        self, name: str, connect: Callable[[str, float], Connection], folder: Path, display: Display, start: int | None
    ):
        """`connect`: reaches the tracker, from the run's identity there, e.g. `9f86d081`, which a start from no
        checkpoint (`start` is None) gets anew, and the last step that it was handed."""
        self._name, self._connect, self._folder, self._display = name, connect, folder, display
        self._file, self._refused = (folder / "trackers" / f"{name}{end}" for end in (".json", ".refused.jsonl"))
        state: dict[str, Any] = {"id": secrets.token_hex(4), "sent": -1}
        if start is not None and self._file.is_file():
            state = json.loads(self._file.read_text())
        else:
            self._refused.unlink(missing_ok=True)
        self.identity, self.sent = str(state["id"]), float(state["sent"])
        self.failures = self.refused = 0
        self._tries = 0
        """How often it has refused what it was handed last."""
        self._complete = -1.0
        """The last step of which all rows are in the files."""
        self._ends = [0] * len(FILES)
        """How far `FILES` were handed over, in bytes."""
        self._back: int | None = None
        """The step to which the run went back, until the thread has done so."""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._remember()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Says that `metrics.jsonl` has a row of this step: all that there is of earlier ones is in the files.

        A step before those that were complete says that the run went back: it is handed over again.
        """
        if step <= self._complete:
            self._back = step - 1
        self._complete = float(step - 1)
        self._wake.set()

    def close(self) -> None:
        """Gives the tracker `SECONDS` to be handed everything, once nothing more will be written."""
        self._complete = math.inf
        self._closing.set()
        self._wake.set()
        self._thread.join(SECONDS)
        failed = f" ({self.failures} attempts failed)" if self.failures else ""
        if self._thread.is_alive():
            self._display.say(
                f"logging.{self._name}: not everything was sent within {SECONDS:g} s of the run's end{failed}: the "
                "same command sends the rest"
            )
        elif failed:
            but = f" but for what it refuses, of {self.refused} steps, in {self._refused}" if self.refused else ""
            self._display.say(f"logging.{self._name}: everything was sent in the end{failed}{but}")

    def _run(self) -> None:
        connection, pause = None, PAUSE
        while True:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing.is_set()  # read before the files, which are complete where it is set
            try:
                if connection is None:
                    connection = self._connect(self.identity, self.sent)
                    self.sent = min(self.sent, connection.last)
                self._send(connection)
                if closing:
                    connection.close()
                    return
                pause = PAUSE
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    said = " ".join(str(error).split()) or type(error).__name__
                    with suppress(UserError):  # of a log that cannot be written: the main thread finds that out, too
                        self._display.say(
                            f"logging.{self._name}: {said[:300]}. The run goes on; what is missed is sent later"
                        )
                if self._closing.wait(pause):
                    time.sleep(PAUSE)
                pause = min(2 * pause, LONGEST_PAUSE)
                self._wake.set()

    def _send(self, connection: Connection) -> None:
        """Hands over the complete steps that it has not, in their order."""
        if self._back is not None:
            self.sent, self._ends, self._back = min(self.sent, self._back), [0] * len(FILES), None
        remembered, ends = time.monotonic(), list(self._ends)
        complete = self._complete  # read once: of a step all files are read, or none
        merged = heapq.merge(*(self._items(number, complete) for number in range(len(FILES))), key=itemgetter(0))
        for step, items in groupby(merged, key=itemgetter(0)):
            values, samples = dict[str, float](), list[Row]()
            for _, number, rows, end in items:
                ends[number] = end
                if number:
                    samples += rows
                else:
                    values |= {name: value for name, value in rows[0].items() if name != "step" and value is not None}
            if step > self.sent:
                fault, parts, refused = planned("tracker", step), [(values, samples)], list[Row]()
                for some, texts in parts:
                    try:
                        if fault == "hang":
                            time.sleep(10 * SECONDS)
                        elif fault:
                            raise (ValueError if fault == "refuse" else ConnectionError)("as planned")
                        connection.send(step, some, texts)
                    except (TypeError, ValueError) as error:
                        if isinstance(error, OSError):  # what `requests` cannot read is both, and may pass
                            raise
                        self._tries += 1
                        if self._tries < TRIES:
                            raise
                        if len(parts) > 1:
                            refused.append({"step": step, "error": str(error), "values": some, "samples": texts})
                        else:
                            parts += [({name: x}, list[Row]()) for name, x in values.items()]
                            parts += [({}, samples)] * bool(samples)
                if refused:
                    append_rows(self._refused, refused)
                    self.refused += 1
                    if self.refused <= SHOWN:
                        names = ", ".join(next(iter(row["values"]), "samples") for row in refused)
                        said = " ".join(refused[0]["error"].split())[:300]
                        with suppress(UserError):
                            self._display.say(
                                f"logging.{self._name}: step {step}: {names} refused for good ({said}): set aside in "
                                f"{self._refused}"
                            )
                if len(refused) < max(len(parts) - 1, 1):
                    self._tries = 0
                self.sent = step
            self._ends = list(ends)
            if time.monotonic() - remembered > 1:
                self._remember()
                remembered = time.monotonic()
        self._remember()

    def _items(self, number: int, complete: float) -> Iterator[Item]:
        """What a file has of steps up to `complete` that was not handed over."""
        path, end = self._folder / FILES[number], self._ends[number]
        if not path.exists():
            return
        if path.suffix == ".gz":
            parts = members(path, end)
        else:
            with path.open("rb") as file:
                file.seek(end)
                lines = [line for line in file if line.endswith(b"\n")]
            parts = zip(lines, (end := end + len(line) for line in lines), strict=True)
        for content, reached in parts:
            rows = [json.loads(line) for line in content.splitlines()]
            if rows[0]["step"] > complete:
                return
            yield rows[0]["step"], number, rows, reached

    def _remember(self) -> None:
        self._file.parent.mkdir(exist_ok=True)
        write_text_atomic(self._file, json.dumps({"id": self.identity, "sent": self.sent}))


class Wandb:
    """A Weights & Biases run; with `WANDB_MODE=offline` it is stored in the run folder's `wandb/`."""

    def __init__(self, project: str, folder: Path, settings: Row, identity: str, sent: float):
        import wandb

        self._wandb: Any = wandb  # its Table takes lists, and is annotated as taking none
        limits = wandb.Settings(init_timeout=SECONDS, finish_timeout=SECONDS)
        self._run = wandb.init(
            project=project,
            dir=folder,
            name=folder.name,
            config=settings,
            id=identity,
            resume="allow",
            settings=limits,
        )
        self.last = math.inf if self._run.offline else self._run.step - 1

    def send(self, step: int, values: Mapping[str, float], samples: List[Row]) -> None:
        table = {}
        if samples:
            names, rows = columns(samples)
            table["samples"] = self._wandb.Table(columns=names, data=rows, allow_mixed_types=True)
        self._run.log({**values, **table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio: on this machine, or where `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` says."""

    last = math.inf

    def __init__(self, project: str, folder: Path, settings: Row, identity: str, sent: float):
        import trackio

        self._trace = trackio.Trace
        self._run = trackio.init(
            project=project,
            name=f"{folder.name}-{identity}",
            config=settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, step: int, values: Mapping[str, float], samples: List[Row]) -> None:
        traces = {}
        if samples:
            traces["samples"] = [
                self._trace(
                    messages=[
                        {"role": "user", "content": _text(row["prompt"])},
                        {"role": "assistant", "content": _text(row["completion"])},
                    ],
                    metadata={name: x for name, x in row.items() if name not in ("prompt", "completion", "per_token")},
                )
                for row in samples
            ]
        self._run.log({**values, **traces}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the MLflow server, or the folder, that `MLFLOW_TRACKING_URI` names."""

    last = math.inf

    def __init__(self, experiment: str, name: str, settings: Row, identity: str, sent: float):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
        from requests import HTTPError

        self._client, self._metric, self._tables = MlflowClient(), Metric, MLFLOW_LOGGED_ARTIFACTS
        self._errors: Any = MlflowException, HTTPError
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        runs = self._client.search_runs([number], f"tags.`tunix.run` = '{identity}'")
        if runs:
            self._run: str = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(number, run_name=name, tags={"tunix.run": identity}).info.run_id
        params = [Param(_named(key), str(value)[:6000]) for key, value in settings.items()]
        for i in range(0, len(params), 100):  # the most that a server takes at once
            self._client.log_batch(self._run, params=params[i : i + 100])

    def send(self, step: int, values: Mapping[str, float], samples: List[Row]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(_named(name), x, now, step) for name, x in values.items()]
        try:
            if metrics:
                self._client.log_batch(self._run, metrics)
            if samples:
                # As `log_table` writes them, which would send all earlier ones again, or fill its tag with their names.
                names, rows = columns(samples)
                path = f"samples/{step:08}.json"
                self._client.log_text(self._run, json.dumps({"columns": names, "data": rows}), path)
                self._client.set_tag(self._run, self._tables, json.dumps([{"path": path, "type": "table"}]))
        except self._errors as error:  # of metrics, and of texts
            known = isinstance(error, self._errors[0])
            if (error.get_http_status_code() if known else error.response.status_code) in (400, 413, 422):
                raise ValueError(str(error)) from error
            raise

    def close(self) -> None:
        self._client.set_terminated(self._run)


class TensorBoard:
    """TensorBoard event files in the run folder's `tensorboard/`."""

    last = math.inf

    def __init__(self, folder: Path, identity: str, sent: float):
        from tensorboardX import SummaryWriter

        # Hides what an earlier start wrote of steps that are handed over again.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=int(sent) + 1)

    def send(self, step: int, values: Mapping[str, float], samples: List[Row]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for number, row in enumerate(samples[:SHOWN]):
            rest = {name: x for name, x in row.items() if name not in ("prompt", "completion", "per_token", "step")}
            parts = {"prompt": _text(row["prompt"]), "completion": _text(row["completion"]), "rest": json.dumps(rest)}
            # Indented, Markdown shows it as it stands, whatever it is.
            texts = [f"{name}:\n\n    " + text.replace("\n", "\n    ") for name, text in parts.items()]
            self._writer.add_text(f"samples/{number}", "\n\n".join(texts), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def columns(samples: List[Row]) -> tuple[list[Any], list[Any]]:
    """Samples as a table: the names of its columns, and its rows; without the values of tokens, lists as JSON."""
    names = [name for name in dict.fromkeys(name for row in samples for name in row) if name != "per_token"]
    plain = (str, int, float, type(None))
    return names, [[x if isinstance(x := row.get(name), plain) else json.dumps(x) for name in names] for row in samples]


def _text(value: Any) -> str:
    """A prompt or a completion as text; ids where there is no tokenizer."""
    return value if isinstance(value, str) else json.dumps(value)


def _named(name: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-./ :]", "_", name)[:250]


def trackers(
    config: LoggingConfig, folder: Path, sections: Row, values: Row, display: Display, start: int | None
) -> list[Tracker]:
    """The trackers of a run.

    Args:
        folder: the run folder.
        sections: those of the recipe.
        values: the same by dotted key.
        start: the step of the checkpoint that the run goes on from; None without one.
    """
    connects: dict[str, Callable[[str, float], Connection]] = {
        "wandb": partial(Wandb, str(config.wandb), folder, sections),
        "trackio": partial(Trackio, str(config.trackio), folder, sections),
        "mlflow": partial(MLflow, str(config.mlflow), folder.name, values),
        "tensorboard": partial(TensorBoard, folder),
    }
    return [
        Tracker(name, connect, folder, display, start) for name, connect in connects.items() if getattr(config, name)
    ]
