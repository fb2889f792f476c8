"""Runs of several real processes whose completions come from servers: stand-ins of vLLM in the test's own process."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_mistakes import until_step
from tests.distributed.test_runs import (
    IGNORED,
    assert_same_export,
    assert_same_numbers,
    assert_same_samples,
    write_judged,
)
from tests.fake_vllm import FakeVLLM, served
from tests.several import several
from tests.tiny_runs import metrics, model_folder
from tunix.distributed.meeting import LOST

pytestmark = pytest.mark.slow
STEPS = 3


class Servers:
    """Stand-ins that serve a folder, and the recipe of a run that samples on them."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self.model = folder, model_folder(folder / "llama")
        self.fakes = [FakeVLLM(self.model) for _ in range(2)]
        self.urls = [stack.enter_context(served(fake)) for fake in self.fakes]

    def recipe(self, **changes: Any) -> None:
        """Four devices, over which weights are sharded."""
        rollout = {"rollout__engine": "vllm", "rollout__servers": self.urls, "rollout__temperature": 0.7}
        model = {"path": str(self.model), "dtype": "float32"}
        write_judged(self.folder, model=model, mesh={"fsdp": 4}, **{"steps": STEPS, **rollout, **changes})

    def anew(self) -> None:
        """As they were before any run."""
        for fake in self.fakes:
            fake.manners.dies_after, fake.gone, fake.unanswered = None, False, 0
            fake.manners.silent.clear()
            fake.restart(self.model)
            fake.loads.clear()
            fake.asked.clear()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


@pytest.mark.parametrize("adapter", [None, {"rank": 4}, {"rank": 4, "dora": True}], ids=["all", "adapter", "merged"])
def test_two_processes_give_one_processs_numbers(servers: Servers, tmp_path: Path, adapter: Any):
    servers.recipe(**({} if adapter is None else {"adapter": adapter}))
    asked, loads = [], []
    for number in (1, 2):
        with several(tmp_path, number, "r.yaml", f"output=run{number}") as run:
            run.end_well()
        asked.append(sum(sum(fake.asked.values()) for fake in servers.fakes))
        loads.append([[name.rpartition("-")[2] for name in fake.loads] for fake in servers.fakes])
        assert all(count == 1 for fake in servers.fakes for count in fake.asked.values())
        servers.anew()
    one, two = tmp_path / "run1", tmp_path / "run2"
    assert len(metrics(two)) == len(metrics(one)) >= STEPS
    assert_same_numbers(one, two)
    assert_same_export(one, two)
    assert_same_samples(one, two)
    # As often as by one process: each prompt is sampled by one of them, and weights are loaded once.
    assert asked[0] == asked[1] > STEPS * 16
    assert loads[0] == loads[1]
    assert loads[1][0][:STEPS] == [str(step) for step in range(STEPS)]
    assert len(list((two / "weights").iterdir())) == 1


def test_where_all_servers_die_all_say_so_and_the_same_command_goes_on(servers: Servers, tmp_path: Path):
    servers.recipe(checkpoint={"every": 1})
    with several(tmp_path, 2, "r.yaml", "output=whole") as whole:
        whole.end_well()
    servers.anew()
    # Evaluations ask 4 times, each step 16 times: it ends in the third step.
    for fake in servers.fakes:
        fake.manners.dies_after = 20
    with several(tmp_path, 2) as run:
        assert run.wait() == [2, 2]
    for process in range(2):
        said = run.log(process).splitlines()[-1]
        assert "rollout.servers: no server is left" in said
        assert "Traceback" not in run.log(process)
    assert run.log(0).splitlines()[-1] == run.log(1).splitlines()[-1]
    done = [int(path.name) for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit()]
    assert 0 < max(done) < STEPS
    servers.anew()
    with several(tmp_path, 2) as again:
        again.end_well()
    assert "going on from step" in again.log(0)
    assert_same_numbers(tmp_path / "whole", tmp_path / "run")
    assert_same_export(tmp_path / "whole", tmp_path / "run")


def test_one_that_does_not_fit_is_named_by_all(servers: Servers, tmp_path: Path):
    servers.recipe()
    servers.fakes[1].manners.odd_tokens = True
    with several(tmp_path, 2) as run:
        assert run.wait() == [2, 2]
    for process in range(2):
        last = run.log(process).splitlines()[-1]
        assert f"rollout.servers: {servers.urls[1]}: " in last
        assert "another tokenizer" in last


def test_a_disk_that_is_full_amid_the_weights_ends_all_with_one_line(servers: Servers, tmp_path: Path):
    """The lead may write half of a file. Weights are sharded over both: it has to go on gathering them."""
    servers.recipe()
    half = (servers.model / "model.safetensors").stat().st_size // 2
    (tmp_path / "lead").mkdir()
    (tmp_path / "lead/sitecustomize.py").write_text(
        "import resource, sys\n"
        "if '--process' in sys.orig_argv and sys.orig_argv[sys.orig_argv.index('--process') + 1] == '0':\n"
        f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({half}, {half}))\n"
    )
    path = f"{tmp_path / 'lead'}:{Path(__file__).parents[2]}"
    with several(tmp_path, 2, PYTHONPATH=path) as run:
        assert run.wait(300) == [2, 2]
    (first, second) = (run.log(process).splitlines()[-1] for process in range(2))
    assert first == second
    assert "could not write" in first
    assert "run/weights/tunix-" in first
    assert "File too large. Nothing was left behind." in first
    assert not list((tmp_path / "run/weights").iterdir())
    assert not any(fake.loads for fake in servers.fakes)


# --- Sampling ahead ---------------------------------------------------------------------------------------------------


def replayed(folder: Path, first: str, number: int, name: str) -> Path:
    """The folder of a run, in so many processes, that has the record of another one and nothing else."""
    run = folder / name
    run.mkdir()
    for file in ("replay.jsonl", "recipe.yaml"):
        (run / file).write_text((folder / first / file).read_text().replace(f"output: {first}", f"output: {name}"))
    with several(folder, number, "r.yaml", f"output={name}") as again:
        again.end_well()
    return run


AHEAD = {"steps": 8, "checkpoint": {"every": 3}}
WAITS = ("rollout/trainer_waits", "rollout/sampler_waits")


def assert_same_steps(one: Path, other: Path) -> None:
    """All metrics but those of time, within 1e-5; and the weights at the end."""
    ignored = (*IGNORED, *WAITS)  # a step that was saved does not know its times
    kept = [
        [{k: v for k, v in row.items() if not k.startswith(ignored)} for row in metrics(run)] for run in (one, other)
    ]
    ours, theirs = kept
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.keys() == yours.keys()
        for name in mine:
            assert yours[name] == pytest.approx(mine[name], abs=1e-5, rel=1e-5), (name, mine["step"])
    assert_same_export(one, other)


@pytest.mark.parametrize(("k", "more"), [(1, {}), (2, {"adapter": {"rank": 4}})], ids=["1", "2"])
def test_two_processes_sample_ahead_what_one_does_with_their_record(
    servers: Servers, tmp_path: Path, k: int, more: dict[str, Any]
):
    servers.recipe(**AHEAD, rollout__max_staleness=k, **more)
    for fake in servers.fakes:
        fake.manners.delay = 0.02
    with several(tmp_path, 2, "r.yaml", "output=two") as run:
        run.end_well()
    rows = [row for row in metrics(tmp_path / "two") if "rollout/staleness/max" in row]
    assert len(rows) == AHEAD["steps"] - 1
    assert 0 < max(row["rollout/staleness/max"] for row in rows) <= k
    assert all(count == 1 for fake in servers.fakes for count in fake.asked.values())
    for number in (1, 2):
        servers.anew()
        assert_same_steps(tmp_path / "two", replayed(tmp_path, "two", number, f"again{number}"))


def test_killed_and_stopped_while_servers_are_silent_they_go_on(servers: Servers, tmp_path: Path):
    """SIGKILL to one of them; then SIGTERM to the other one alone, while no completion is answered: all save the same
    step and end. It ends with the numbers of one process that has their record."""
    servers.recipe(**{**AHEAD, "steps": 14}, rollout__max_staleness=2)
    with several(tmp_path, 2, "r.yaml", "output=two") as run:
        until_step(run, tmp_path / "two", 4)
        run.processes[1].kill()
        assert run.wait() == [LOST, -signal.SIGKILL]
    servers.anew()
    with several(tmp_path, 2, "r.yaml", "output=two") as run:
        while "going on from step" not in run.log(0):  # metrics of later steps are dropped then
            time.sleep(0.1)
        until_step(run, tmp_path / "two", 5)
        for fake in servers.fakes:
            fake.manners.silent.set()
        while not all(fake.unanswered for fake in servers.fakes):
            time.sleep(0.1)
        time.sleep(3)  # nothing is left to learn from
        run.processes[1].terminate()
        assert run.wait(90) == [130, 130]
        assert "with a checkpoint in" in run.log(0)
    assert all(fake.manners.silent.is_set() for fake in servers.fakes)
    servers.anew()
    with several(tmp_path, 2, "r.yaml", "output=two") as run:
        run.end_well()
    steps = [row["step"] for row in metrics(tmp_path / "two")]
    assert sorted(set(steps) - {0}) == list(range(1, 15))
    servers.anew()
    assert_same_steps(tmp_path / "two", replayed(tmp_path, "two", 1, "again"))
