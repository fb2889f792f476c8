"""The command line from outside: exit codes, and one clear message for each thing that a user can get wrong."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tunix.cli import COMMANDS, main
from tunix.errors import Interrupted, UserError

ROOT = Path(__file__).parents[1]
GOOD = """\
model:
  path: google/gemma-3-1b-it
data:
  train: rows.jsonl
optimizer:
  learning_rate: 1e-4
steps: 50
"""

# A recipe's text, or overrides of GOOD -> what the message has to say.
BAD_TEXT = [
    ("", ["it is empty"]),
    ("- a\n- b\n", ["a recipe is a mapping"]),
    ("just words\n", ["a recipe is a mapping", "'just words'"]),
    ("model: {path: a\n", ["r.yaml:2:1"]),
    ("model:\n\tpath: a\n", ["r.yaml:2:1"]),
    ("model: *nowhere\n", ["r.yaml:1:8", "nowhere"]),
    ("a: !!python/object:os.system x\n", ["r.yaml:1:4", "constructor"]),
    (GOOD + "seed: 1\nseed: 2\n", ["r.yaml:9:1", "'seed' is given twice", "line 8"]),
    ("a: 1\n---\nb: 2\n", ["r.yaml:2:1", "another document"]),
    ("a: \x07\n", ["r.yaml", "not readable as YAML"]),
    ("data: {train: x}\n", ["r.yaml: model: missing"]),
    ("model: {path: x}\n", ["r.yaml: data: missing"]),
    ("model: {path: x}\ndata: {}\n", ["data.train: missing"]),
    ("model: x\ndata: y\n", ["model: 'x' is not a section", "data: 'y' is not a section"]),
    (GOOD + "stages: 3\n", ["stages: 3 is not a list"]),
    (GOOD + "stages: [{steps: 3}, 4]\n", ["stages:", "is not a list of mappings"]),
    (GOOD + "stages: [{output: here}]\n", ["stages.0.output", "above the stages"]),
    (GOOD + "stages: [{stages: []}]\n", ["stages.0.stages", "above the stages"]),
    (GOOD + "stages: [{}, {model: {path: b}}]\n", ["stages.1.model.path", "only the first", "runs/r/0_sft"]),
    (GOOD + "stages: [{}, {stepz: 3}]\n", ["stages.1.stepz: unknown key", "'steps'"]),
    (GOOD + "rollout: {n: 4}\n", ["rollout.n: unknown key; rollout has engine, servers"]),
    (GOOD + "reward: x.py:f\n", ["reward: 'x.py:f' is not a section with keys"]),
    (GOOD + "1: 2\n", ["r.yaml: 1"]),
]
BAD_OVERRIDES = [
    (["steps"], ["'steps'", "section.key=value"]),
    (["=3"], ["'=3'", "section.key=value"]),
    (["optimizer..b1=3"], ["section.key=value"]),
    (["seed="], ["no value after '='", "`seed=null`"]),
    (["seed=[1"], ["override 'seed=[1'"]),
    (["steps.a=3"], ["'steps.a=3'", "steps is 50"]),
    (["stages.zero.steps=3"], ["stages"]),
    (["stages=[{}]", "stages.1.steps=3"], ["'1'", "none of the 1 items"]),
    (["adapter={kind: qlora, base: nf5}"], ["adapter.base: 'nf5' is not one of", "Did you mean 'nf4'?"]),
    (["adapter={kind: qlora, tile: 0}"], ["adapter.tile: 0 is not"]),
    (["adapter={kind: qlora, rank: 0}"], ["adapter.rank: 0 is not a number above 0"]),
    (["adapter={kind: lora, base: nf4}"], ["adapter: base changes nothing for lora", "set kind to qlora"]),
    (["adapter={kind: lora, tile: 64}"], ["adapter: tile changes nothing for lora", "set kind to qlora"]),
    (["optimizer.learning_rat=3"], ["optimizer.learning_rat: unknown key. Did you mean 'learning_rate'?"]),
    (["optimizr.b1=0.9"], ["optimizr: unknown key. Did you mean 'optimizer'?"]),
    (["learning_rate=1e-4"], ["learning_rate: unknown key. Did you mean 'optimizer.learning_rate'?"]),
    (["data.zzz=1"], ["data.zzz: unknown key; data has train, eval, split"]),
    (["optimizer.learning_rate=fast"], ["optimizer.learning_rate: 'fast' is not a number"]),
    (["optimizer.learning_rate=-1"], ["optimizer.learning_rate: -1 is not a number above 0"]),
    (["optimizer.learning_rate=true"], ["optimizer.learning_rate: true", "no switch"]),
    (["optimizer.learning_rate=inf"], ["optimizer.learning_rate: 'inf' is not a finite number"]),
    (["optimizer.learning_rate=null"], ["optimizer.learning_rate: null is not a number"]),
    (["optimizer.b1=1"], ["optimizer.b1: 1 is not a number below 1"]),
    (["optimizer.name=adam"], ["optimizer.name: 'adam' is not one of", "Did you mean 'adamw'?"]),
    (["optimizer.name=sgd", "optimizer.b2=0.9"], ["optimizer: b2 changes nothing for sgd"]),
    (["optimizer.warmup=50"], ["optimizer.warmup: 50 steps", "the run's 50"]),
    (["batch_size=0"], ["batch_size: 0 is not a number above 0"]),
    (["batch_size=1.5"], ["batch_size: 1.5 is not a whole number"]),
    (["micro_batch_size=64"], ["micro_batch_size: 64 is above batch_size, which is 32"]),
    (["epochs=2"], ["steps and epochs", "50 and 2"]),
    (["seed=-1"], ["seed: -1 is not a number not below 0"]),
    (["output=3"], ["output: 3 is not text"]),
    (["model.dtype=bf16"], ["model.dtype: 'bf16'", "Did you mean 'bfloat16'?"]),
    (["model.path=null"], ["model: path is missing"]),
    (["model.init=random"], ["model: path is 'google/gemma-3-1b-it'"]),
    (["model.family=mistral"], ["model.family: 'mistral' is not one of", "'llama'"]),
    (["model.sizes=7"], ["model.sizes: 7 is not a mapping"]),
    (["model={init: random, family: gemma, sizes: {d_modl: 8}}"], ["model.sizes.d_modl", "'d_model'"]),
    (["model={init: random, family: gemma, sizes: {d_model: 0}}"], ["model.sizes.d_model = 0 must be positive"]),
    (["model={init: random, preset: gemma3-1}"], ["model.preset 'gemma3-1' is not known", "'gemma3-1b'"]),
    (["model={init: random, preset: gemma3-1b, family: llama}"], ["model.family: 'llama' is not that of preset"]),
    (["adapter.targets=5"], ["adapter.targets: 5 is neither 'all-linear' nor a list"]),
    (["adapter.targets=[q]"], ["adapter.targets: 'q' matches no module"]),
    (["adapter.rank=0"], ["adapter.rank: 0 is not a number above 0"]),
    (["adapter=lora"], ["adapter: 'lora' is not a section"]),
    (["data.packing=maybe"], ["data.packing: 'maybe' is not one of true, false, 'wrapped', 'split'"]),
    (["data.on_overflow=drp"], ["data.on_overflow", "Did you mean 'drop'?"]),
    (["mesh.fsdp=0"], ["mesh: sizes are positive"]),
    (["mesh.data=-1"], ["mesh: only one axis"]),
    (["eval.samples=3"], ["eval.samples: changes nothing", "data.eval"]),
    (["algorithm.name=stf"], ["algorithm: name is 'stf'", "Did you mean 'sft'?"]),
    (["algorithm=sft"], ["algorithm: 'sft' is not a section"]),
    (["algorithm.beta=1"], ["algorithm.beta: unknown key; algorithm has name, train_on"]),
    (["algorithm.train_on=completions"], ["algorithm.train_on", "Did you mean 'completion'?"]),
    (["algorithm.name=gone.py:Mine"], ["algorithm: gone.py:Mine", "there is no file gone.py"]),
    (["algorithm.name=nowhere.at_all:Mine"], ["importing nowhere.at_all failed", "ModuleNotFoundError"]),
    (["algorithm.name=own.py:Mien"], ["own.py has no 'Mien'. Did you mean 'Mine'?"]),
    (["algorithm.name=own.py:Mine"], ["a class without `Config`"]),
    (["algorithm.name=own.py:number"], ["is no class"]),
    (["algorithm.name=broken.py:Mine"], ["importing broken.py failed at broken.py, line 1 with ZeroDivisionError"]),
]
BAD_CALLS = [
    (["chek", "r.yaml"], ["'chek' is no command. Did you mean 'check'?"]),
    (["zzz"], ["'zzz' is no command.", "run, init, check"]),
    (["check"], ["required: RECIPE", "`tunix check --help`"]),
    (["check", "r.yaml", "--tinny"], ["--tinny", "Did you mean '--tiny'?"]),
    (["run", "r.yaml", "--fres"], ["--fres", "Did you mean '--fresh'?"]),
    (["check", "q.yaml"], ["q.yaml: no such file. Did you mean 'r.yaml'?"]),
    (["check", "."], ["cannot be read", "directory"]),
    (["check", "latin.yaml"], ["latin.yaml: cannot be read: it is not UTF-8 text"]),
    (["inspect", "r.yaml", "--rows", "0"], ["--rows", "'0' is not a whole number above 0"]),
    (["score", "model", "rows.jsonl"], ["--out"]),
    (["score", "model", "rows.jsonl", "--out", "o", "--dtype", "half"], ["--dtype", "'half'"]),
    (["export", "run"], ["OUT"]),
    (["export", "run", "out", "--step", "last"], ["--step", "'last'"]),
    (["export", "run", "out", "--format", "onnx"], ["--format", "'onnx'", "maxtext", "stablehlo"]),
    (["export", "run", "out", "--format", "maxtext", "--packed"], ["--packed belongs to --format huggingface"]),
    (["export", "run", "out", "--format", "maxtext", "--length", "9"], ["--length belongs to --format stablehlo"]),
    (
        ["export", "run", "out", "--prompt-length", "64"],
        ["--prompt-length belongs to --format stablehlo", "huggingface"],
    ),
    (["import", "checkpoints/0", "out"], ["checkpoints/0: write which format it is, maxtext:FOLDER"]),
    (["import", "maxtext:nowhere", "out"], ["nowhere has no config.json", "--like FOLDER"]),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a good recipe and code of the user's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(GOOD)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "latin.yaml").write_bytes("model: é".encode("latin-1"))
    (tmp_path / "own.py").write_text("class Mine: pass\nnumber = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    return tmp_path


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a call that has to be refused cleanly."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def stub(monkeypatch: pytest.MonkeyPatch, module: str, **names: object) -> None:
    """Stands in for a room that the front door calls."""
    monkeypatch.setitem(sys.modules, f"tunix.{module}", SimpleNamespace(**names))


@pytest.mark.parametrize(("text", "fragments"), BAD_TEXT)
def test_a_bad_recipe_is_refused(text: str, fragments: list[str], here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "r.yaml").write_text(text)
    message = refused(["check", "r.yaml"], capsys)
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(("overrides", "fragments"), BAD_OVERRIDES)
def test_a_bad_override_is_refused(overrides: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]):
    message = refused(["check", "r.yaml", *overrides], capsys)
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(("argv", "fragments"), BAD_CALLS)
def test_a_bad_call_is_refused(argv: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]):
    message = refused(argv, capsys)
    assert all(fragment in message for fragment in fragments), message


def test_all_mistakes_of_a_recipe_come_at_once(capsys: pytest.CaptureFixture[str]):
    message = refused(["check", "r.yaml", "sed=1", "batch_size=x", "model.dtype=half", "data.trian=y"], capsys)
    assert len(message.splitlines()) == 4
    assert all("r.yaml: " in line for line in message.splitlines())


def test_check_prints_a_recipe_that_checks_again(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", "r.yaml", "optimizer.learning_rate=3e-5"]) == 0
    first = capsys.readouterr().out
    assert first.endswith("# ok: r.yaml\n")
    assert yaml.safe_load(first)["optimizer"]["learning_rate"] == 3e-5
    (here / "again.yaml").write_text(first)
    assert main(["check", "again.yaml"]) == 0
    assert capsys.readouterr().out == first.replace("r.yaml", "again.yaml")


def test_options_and_overrides_mix(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "r.yaml", "steps=3", "--tiny", "seed=4"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert (resolved["steps"], resolved["seed"], resolved["output"]) == (3, 4, "runs/r-tiny")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"example: tunix {name} " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tunix 0.")


def test_each_command_reaches_its_room(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[object, ...]] = []
    stub(
        monkeypatch,
        "run.train",
        run=lambda recipe, fresh, minutes, verbose: calls.append(("run", recipe.steps, fresh, minutes, verbose)),
    )
    stub(
        monkeypatch,
        "run.export",
        export=lambda run, out, adapter, packed, step: calls.append(("export", run, out, adapter, packed, step)),
        export_as=None,
    )
    stub(
        monkeypatch,
        "commands.inspect",
        show=lambda recipe, rows, actions: calls.append(("inspect", recipe.steps, rows)),
    )
    stub(
        monkeypatch,
        "inference.load",
        score=lambda model, data, out, adapter, batch_size, max_length, dtype: calls.append(
            ("score", model, data, out, adapter, batch_size, max_length, dtype)
        ),
    )
    assert main(["run", "r.yaml", "--fresh", "steps=7", "-v", "--minutes", "30"]) == 0
    assert main(["inspect", "r.yaml", "--rows", "2"]) == 0
    assert main(["export", "runs/r", "out", "--adapter", "--step", "5"]) == 0
    assert main(["score", "m", "d.jsonl", "--out", "o.jsonl", "--adapter", "a"]) == 0
    assert calls == [
        ("run", 7, True, 30, True),
        ("inspect", 50, 2),
        ("export", Path("runs/r"), Path("out"), True, False, 5),
        ("score", "m", "d.jsonl", Path("o.jsonl"), Path("a"), 8, 1024, "float32"),
    ]


def raising(error: BaseException):
    def run(recipe: object, **_: bool) -> None:
        raise error

    return run


def test_an_interrupted_run_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    stub(monkeypatch, "run.train", run=raising(Interrupted("saved at step 3; the same command goes on")))
    assert main(["run", "r.yaml"]) == 130
    assert capsys.readouterr().err.endswith("\nsaved at step 3; the same command goes on\n")


def test_ctrl_c_elsewhere_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    stub(monkeypatch, "run.train", run=raising(KeyboardInterrupt()))
    assert main(["run", "r.yaml"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_our_own_defects_rise(monkeypatch: pytest.MonkeyPatch):
    stub(monkeypatch, "run.train", run=raising(RuntimeError("ours")))
    with pytest.raises(RuntimeError, match="ours"):
        main(["run", "r.yaml"])


def test_debug_shows_where_a_mistake_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    stub(monkeypatch, "run.train", run=raising(UserError("yours")))
    monkeypatch.setenv("TUNIX_DEBUG", "1")
    assert main(["run", "r.yaml"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: yours\n")


def test_a_reader_that_leaves_is_no_error():
    # `check` writes less than a pipe holds, so the reader has to be gone before the first byte comes.
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        command = [sys.executable, "-m", "tunix.cli", "check", "r.yaml"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert done.returncode == 141
    assert done.stderr == ""
