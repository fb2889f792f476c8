"""`tunix trace` of a profile: kernels, parts and the host's gaps, of this CPU's and of hand-written planes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.tiny_runs import metrics, train, write_recipe
from tunix.cli import main
from tunix.commands.trace import PARTS, SCOPE, kernels_of, table
from tunix.run import profiler as profiler_file
from tunix.trainer.config import LoggingConfig

ROOT = Path(__file__).parents[2]


@dataclass
class Event:
    """As `jax.profiler.ProfileEvent`."""

    name: str
    start_ns: float
    duration_ns: float
    stats: list[tuple[str | None, Any]] = field(default_factory=list)

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


def train_apart(*words: str) -> str:
    """`tunix run WORDS` in a process of its own, whose profile has no programs of other tests; what it says."""
    command = [sys.executable, "-m", "tunix.cli", "run", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stderr


def plane(name: str, **lines: list[Event]) -> Any:
    return SimpleNamespace(name=name, lines=[SimpleNamespace(name=x, events=events) for x, events in lines.items()])


def step(number: int, start: float) -> Event:
    return Event("step", start, 10.0, [("_r", 1), ("step_num", number)])


MS = 1e6


def test_kernels_of_a_gpu():
    """Two steps from 0 and 10 ms. Stream 13 is busy from 1 to 5, 6 to 8 and 11 to 15; stream 14 copies from 4 to 6 and
    from 15 to 16. Together: 1 to 8 and 11 to 16, which is 12 of 16 ms; idle 0 to 1 and 8 to 11, of which the longest
    belongs to step 1 (it began at 8) and ends with `flash`. 9 ms of kernels are flash's, in 3 launches: a compiler's
    clone counts as what it is a clone of. What a host does, and a module's line, are no kernels."""
    flash = [("hlo_op", "custom-call.7"), ("hlo_module", "jit_step"), ("program_id", 4)]
    compute = [
        Event("flash", 1 * MS, 4 * MS, flash),
        Event("flash.clone", 6 * MS, 2 * MS, flash),
        Event("flash.3", 11 * MS, 3 * MS, flash),
        Event("gemm", 14 * MS, 1 * MS, [("hlo_op", "dot.1"), ("hlo_module", "jit_step"), ("program_id", 4)]),
    ]
    copies = [Event("MemcpyD2D", 4 * MS, 2 * MS, [("hlo_op", "while.2")]), Event("MemcpyD2D", 15 * MS, 1 * MS)]
    device = plane("/device:GPU:0", **{"Stream #13(Compute)": compute, "Stream #14(Memcpy)": copies})
    device.lines.append(SimpleNamespace(name="XLA Modules", events=[Event("jit_step", 0, 16 * MS)]))
    host = plane("/host:CPU", python=[step(1, 0.0), step(2, 10 * MS), Event("dot", 0, 9 * MS, [("hlo_op", "dot.1")])])
    scopes = {
        ("4", "custom-call.7"): "jit(step)/while/body/transpose(jvp())/attention/pallas_call",
        ("jit_step", "dot.1"): "jit(step)/jvp(head)/dot_general",
    }
    devices, steps = kernels_of([host, device], scopes)
    assert (list(devices), steps) == (["/device:GPU:0"], {1: 0.0, 2: 10 * MS})
    lines = "\n".join(table(devices, steps)).splitlines()
    assert lines[:4] == [
        "steps 1 to 2; 1 x GPU:0; 3 kernels a step",
        "busy 75.0%: 6.000 of 8.000 ms a step",
        "idle 2.000 ms a step, in 1 gaps between kernels",
        "the longest: 3.000 ms in step 1, before flash",
    ]
    # Of 9 + 1 + 3 = 13 ms of kernels, a step half.
    assert [line.split() for line in lines[6:9]] == [
        ["4.500", "69.2%", "step:", "attention,", "backward"],
        ["1.500", "23.1%", "unknown:", "other"],
        ["0.500", "7.7%", "step:", "head"],
    ]
    assert [line.split() for line in lines[11:]] == [
        ["4.500", "69.2%", "1.5", "flash"],
        ["1.500", "23.1%", "1.0", "MemcpyD2D"],
        ["0.500", "7.7%", "0.5", "gemm"],
    ]
    assert max(map(len, lines)) <= 80


def test_operations_of_two_tpus():
    """A loop is no kernel, and its name is its HLO; each device was busy for 2 of 4 ms."""
    where = "jit(decode)/while/body/layer{}/attention/dot_general"
    operations = [
        Event("%while.2 = (f32[]) while((f32[]) %tuple)", 0, 4 * MS),
        Event(
            "%fusion.3 = f32[8]{0} fusion(%p)", 0, 1.5 * MS, [("tf_op", where.format(0)), ("hlo_module", "jit_decode")]
        ),
        Event(
            "%fusion.4 = f32[8]{0} fusion(%p)",
            3.5 * MS,
            0.5 * MS,
            [("tf_op", where.format(1)), ("hlo_module", "jit_decode")],
        ),
    ]
    planes = [plane(f"/device:TPU:{number}", **{"XLA Ops": operations}) for number in range(2)]
    lines = "\n".join(table(*kernels_of(planes, {}))).splitlines()
    assert lines[:2] == [
        "all that was traced, as one step; 2 x TPU:0; 2 kernels a step",
        "busy 50.0%: 2.000 of 4.000 ms a step",
    ]
    assert lines[-1] == "decode: 2 layers of 0.500 ms (layer1) to 1.500 ms (layer0)"
    assert [line.split() for line in lines if "fusion" in line][1:] == [["2.000", "100.0%", "2.0", "fusion"]]


def test_parts_are_those_that_programs_name():
    """Every scope in the package is one of the table's, but for notes on loops, and the table has no other."""
    texts = [file.read_text() for file in (ROOT / "tunix").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'named_scope\(f?"([^"]+)"\)', text)}
    assert {name.replace("{len(new)}", r"\d+") for name in named} - {"{SCOPE}{usual}"} == set(PARTS)
    assert SCOPE.findall("jit(decode)/layer12/transpose(jvp(attention))/norm/BTD,DF->ffn") == [
        "layer12",
        "attention",
        "norm",
    ]


def test_scopes_leave_a_program_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """The text of a program, by which compilers' answers are kept, does not have them."""
    from tunix.models.layers import rms_norm

    def text(function: Callable[..., Any]) -> str:
        shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
        return jax.jit(lambda x: function(x, x[0], eps=1e-6, offset=False)).lower(shape).as_text()

    assert text(rms_norm) == text(rms_norm.__wrapped__)


@pytest.fixture(autouse=True)
def keys_of_the_cache() -> Iterator[None]:
    """Those of the other tests, after a run that is profiled."""
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps, of which 2 and 3 are profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe(folder / "r.yaml", {"logging.profile": {"steps": [2, 3]}, "checkpoint": {"every": 2}})
        train_apart("r.yaml")
    return folder / "run"


@pytest.mark.slow
def test_a_profile_of_a_run(profiled: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["trace", str(profiled)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("steps 2 to 3; 1 x CPU; ")
    assert max(map(len, lines[1:])) <= 80
    parts = {line.partition("step: ")[2] for line in lines}
    both = {f"{part}{side}" for part in ("attention", "ffn", "norm", "head") for side in ("", ", backward")}
    assert both | {"optimizer", "embed", "loss"} <= parts
    # Perfetto and XProf read the same folder.
    assert [file.name.partition(".")[2] for file in sorted((profiled / "profile").rglob("*.*"))] == [
        "trace.json.gz",
        "xplane.pb",
    ]
    assert [row["step"] for row in metrics(profiled)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_that_goes_on_within_the_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of steps 2 to 4 the second start does 3 and 4: it profiles these, and step 2 is in the first start's profile."""
    write_recipe(tmp_path / "r.yaml", {"logging.profile": {"steps": [2, 2]}, "steps": 2})
    assert "steps 2 to 2 are profiled" in train_apart("r.yaml")
    assert "steps 3 to 4 are profiled" in train_apart("r.yaml", "steps=4", "logging.profile.steps=[2,4]")
    assert main(["trace", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(", the newest of 2")
    assert lines[1].startswith("steps 3 to 4; ")


def test_without_a_window_nothing_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiler_file.Profiler, "__init__", None)
    assert LoggingConfig().profile is None
    write_recipe(tmp_path / "r.yaml", {"steps": 1})
    train("r.yaml")
    assert not (tmp_path / "run/profile").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[4,5]", "logging.profile.steps: [4, 5] ends after the run's last step, 4; choose earlier ones"),
        ("[3,2]", "logging.profile.steps: [3, 2] ends before it begins: write the first step, then the last"),
        ("[0,2]", "logging.profile.steps.0: 0 is not a number above 0"),
    ],
)
def test_windows_that_are_refused(value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(tmp_path / "r.yaml")
    assert main(["run", "r.yaml", f"logging.profile.steps={value}"]) == 2
    assert capsys.readouterr().err == f"error: r.yaml: {message}\n"
    assert not (tmp_path / "run").exists()


def test_a_window_beyond_the_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """32 rows, 8 at a time: an epoch is 4 steps. Nothing is trained; `tunix check` says it too."""
    write_recipe(tmp_path / "r.yaml", {"steps": None, "logging.profile": {"steps": [3, 5]}})
    message = "logging.profile.steps: [3, 5] ends after the run's last step, 4; choose earlier ones\n"
    assert main(["check", "r.yaml"]) == 2
    assert capsys.readouterr().err == f"error: r.yaml: {message}"
    assert main(["run", "r.yaml"]) == 2
    assert capsys.readouterr().err.endswith(f"error: {message}")


def test_folders_without_a_profile(profiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def said(*words: str) -> str:
        assert main(["trace", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("error: ")

    assert said("nowhere") == "nowhere is no run folder: it has no recipe.yaml"
    run = tmp_path / "run"
    run.mkdir()
    text = (profiled / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text)
    assert said("run") == "run has no profile yet: it is written after step 3"
    (run / "recipe.yaml").write_text(text.replace("  profile:\n    steps:\n    - 2\n    - 3\n", "  profile: null\n"))
    assert said("run").startswith("run has no profile: set logging.profile.steps=[10,12] before those steps; ")
    (file,) = (profiled / "profile").rglob("*.xplane.pb")
    (run / "profile").mkdir()
    copy = run / "profile/vm.xplane.pb"
    copy.write_bytes(file.read_bytes()[:4000])
    assert said("run").startswith("run/profile/vm.xplane.pb is damaged, or still being written: ")
    copy.write_bytes(b"")
    assert said("run") == "run/profile/vm.xplane.pb has no kernel in it: the profiler saw no device at work"
    assert said("run", "--out", "x.json").startswith("--out belongs to a STEP")
