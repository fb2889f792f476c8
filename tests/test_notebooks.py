"""Every notebook runs from top to bottom, on fewer steps and a smaller model, from either folder people start in.

What the files store is what `make notebooks` made of the code that they hold; a digest says so.
"""

import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from tempfile import gettempdir

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from notebooks.execute import KEY, NOTEBOOKS, ROOT, cleaned, digest, execute
from tunix.trainer.progress import LIVE

SMALL = """\
overrides = [
    "model.sizes={{vocab_size: 320, d_model: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, ffn: 64}}",
    "stages.0.steps={sft}",
    "stages.0.batch_size=64",
    "stages.0.optimizer.learning_rate=1e-2",
    "stages.0.eval={{every: {sft}, rows: 16}}",
    "stages.1.steps=4",
    "stages.1.optimizer.warmup=1",
    "stages.1.batch_size=8",
    "stages.1.algorithm.group_size=4",
    "stages.1.algorithm.updates=2",
    "stages.1.eval={{every: 2, rows: 16, samples: 2}}",
    {more}
]
"""
"""What takes the place of a notebook's settings: the same shapes in all of them, compiled once."""

PREFERENCES = """\
overrides = [
    "output={output}",
    "model.sizes={{vocab_size: 512, d_model: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, ffn: 64}}",
    "batch_size=16",
    "stages.0.steps=4",
    "stages.0.eval={{every: 4, rows: 16}}",
    "stages.1.optimizer={{learning_rate: 1.0e-2, warmup: 0}}",
    "stages.1.eval={{every: 4, rows: 64}}",
]
steps, every, reward_steps = 4, 2, 4
"""

QLORA = """\
overrides = [
    "model.sizes={{vocab_size: 512, d_model: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, ffn: 64}}",
    "batch_size=16",
    "eval={{every: 4, rows: 16, samples: 0}}",
    "optimizer.learning_rate=1e-2",
]
output = Path("{output}")
base_steps, steps = 4, 8
"""


def small(more: str, then: str, sft: int = 4) -> str:
    """The settings of a notebook on the quickstart.

    Args:
        more: one more override, as Python.
        then: further lines.
        sft: steps of the first stage.
    """
    return f"{SMALL.format(sft=sft, more=more)}\n{then}"


def executed(name: str, start_in: Path, settings: str, last: str | None = None) -> dict[str, nbformat.NotebookNode]:
    """Runs a notebook with other settings, up to the cell `last` where one is named; its cells by id.

    Args:
        name: the first two digits of its file.
        start_in: the folder of the kernel.
        settings: what its settings' cell holds instead.
    """
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    cell.source = settings
    if last:
        names = [cell.id for cell in notebook.cells]
        notebook.cells = notebook.cells[: names.index(last) + 1]
    execute(notebook, start_in, timeout=300)
    return {cell.id: cell for cell in notebook.cells}


def shown(cell: nbformat.NotebookNode, kind: str = "text/plain") -> str:
    """What a cell displays last, of one kind; what a run says comes before it."""
    *_, data = (output.data[kind] for output in cell.outputs if kind in output.get("data", {}))
    return data


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=lambda path: path.stem)
def test_what_a_notebook_shows_is_what_its_code_did(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.get(KEY) == digest(notebook), f"make notebooks ARGS={path.stem[:2]}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = str([cell.outputs for cell in code])
    assert "text" in shown
    for word in ("tokens/s", "Traceback", "Warning", str(ROOT), str(Path.home()), gettempdir() + "/"):
        assert word not in shown


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_the_package_is_there(path: Path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    lines = [line for source in cells for line in re.findall(r"^(?:from|import) tunix.*", source, re.MULTILINE)]
    assert lines
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, check=True)


def test_the_digest_is_of_the_code_in_its_order():
    first, second = new_code_cell("a = 1"), new_code_cell("b = 2")
    kept = digest(new_notebook(cells=[first, second]))
    assert kept == digest(new_notebook(cells=[first, new_markdown_cell("text"), second]))
    assert kept != digest(new_notebook(cells=[second, first]))
    assert kept != digest(new_notebook(cells=[new_code_cell("a = 1b = 2")]))


def test_two_executions_store_the_same():
    """The same run on a fast and on a slow machine: other speeds are reported, in other pieces."""
    fast = ["compiling\n", "run  3/3  loss 1.0  4k tokens/s", "done in 3.1 s: /a/runs\n"]
    slow = [
        "compiling\ncompiling the sampler: 3 done, 10 s\n",
        "run  3/3  loss 1.0  40 tokens/s",
        "step 2/3  loss 1.5  40 tokens/s\ndone in 310 s: /b/c/runs\n",
    ]
    stored = []
    for (before, live, after), folder in ((fast, "/a"), (slow, "/b/c")):
        outputs = [
            new_output("stream", name="stdout", text=before),
            new_output("display_data", {"text/plain": live}, metadata=LIVE),
            new_output("stream", name="stdout", text=after),
        ]
        notebook = new_notebook(cells=[new_code_cell("run()", outputs=outputs, id="run")])
        cleaned(notebook, Path(folder))
        stored.append(notebook)
    assert stored[0] == stored[1]
    said, live = stored[0].cells[0].outputs
    assert said.text == "compiling\ndone: runs\n"
    assert live.data == {"text/plain": "run  3/3  loss 1.0"}


@pytest.fixture(autouse=True)
def _one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a laptop; and nothing is written to the home folder."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


@pytest.mark.slow  # the longest notebook; the others are slow too
def test_the_first_run(tmp_path: Path):
    cells = executed("01", ROOT / "notebooks", small(f'"output={tmp_path}/first"', "next_steps = 2"))
    assert "until" in cells["recipe"].outputs[0].text
    for name in ("plot", "next"):
        assert shown(cells[name], "image/svg+xml").startswith("<svg")
    assert "1_grpo" in shown(cells["plot"], "image/svg+xml")
    table = shown(cells["samples"], "text/markdown").splitlines()
    assert table[0] == "| problem | step 0 | step 4 | right is |"
    assert len(table) == 2 + 2
    assert all(row.count(" | ") == 3 for row in table[2:])
    assert (tmp_path / "first/1_grpo/export/config.json").is_file()
    assert (tmp_path / "first-next/export/config.json").is_file()


def test_it_also_starts_in_the_root(tmp_path: Path):
    cells = executed("01", ROOT, small(f'"output={tmp_path}/first"', "next_steps = 2"), last="recipe")
    assert "until" in cells["recipe"].outputs[0].text


@pytest.mark.slow
def test_grpo_by_hand_is_grpo(tmp_path: Path):
    """The notebook itself asserts that two steps by hand have the numbers of the class."""
    cells = executed("02", ROOT, small(f'"output={tmp_path}/by_hand"', "steps = 2", sft=30))
    for row in literal_eval(shown(cells["class"])):
        assert 0 < row["reward/mean"] < 1
        assert row["train/grad_norm"] > 0
        assert row["mismatch/max"] < 1e-3


@pytest.mark.slow
def test_an_algorithm_of_ones_own(tmp_path: Path):
    then = f'folder = "{tmp_path}"\nsteps = 2'
    cells = executed("03", ROOT, small('"logging.samples.groups=1"', then, sft=30))
    terms = literal_eval(shown(cells["terms"]))
    assert terms["loss/entropy"] == pytest.approx(-0.001 * terms["policy/entropy"], rel=1e-5)
    assert terms["train/loss"] == pytest.approx(terms["loss/policy"] + terms["loss/entropy"], abs=1e-7)
    assert shown(cells["recipe"], "image/svg+xml").startswith("<svg")
    drawn = literal_eval(shown(cells["samples"]))
    assert len(drawn) == 4
    rewards, advantages = [row[1] for row in drawn], [row[2] for row in drawn]
    # The median of four is the mean of the middle two.
    middle = sum(sorted(rewards)[1:3]) / 2
    assert advantages == pytest.approx([reward - middle for reward in rewards], abs=1e-3)


@pytest.mark.slow
def test_preferences(tmp_path: Path):
    cells = executed("04", ROOT, PREFERENCES.format(output=tmp_path / "preferences"))
    printed = "".join(output.text for output in cells["train"].outputs if output.get("name") == "stdout")
    # Rows of metrics, after the run's first lines for people.
    first, *_, last = (literal_eval(line) for line in printed.splitlines() if line.startswith("{"))
    assert (first["step"], last["step"]) == (0, 4)
    # ln 2: at first the policy is the reference.
    assert (first["eval/loss"], first["eval/rewards/margin"]) == (0.693, 0.0)
    assert last["eval/rewards/margin"] == pytest.approx(
        last["eval/rewards/chosen"] - last["eval/rewards/rejected"], abs=2e-3
    )
    assert last["eval/loss"] != first["eval/loss"]
    assert any("image/png" in output.get("data", {}) for output in cells["plot"].outputs)
    assert "eval/rewards/accuracy" in shown(cells["reward"], "image/svg+xml")
    assert len(shown(cells["pairs"], "text/markdown").splitlines()) == 2 + 4
    gain = literal_eval(shown(cells["gain"]))
    assert gain["mean of the best"] > gain["mean of all"]


@pytest.mark.slow
def test_qlora(tmp_path: Path):
    cells = executed("05", ROOT, QLORA.format(output=tmp_path))
    table = [row.split(" | ") for row in shown(cells["types"], "text/markdown").splitlines()[2:]]
    sizes = {name.strip("| "): float(size) for name, size, _ in table}
    # 32 inputs are one tile: four bytes to 32 weights beside a weight's own.
    assert sizes == {"int8": 1.125, "fp8": 1.125, "nf4": 0.625, "int4": 0.625}
    errors = {name.strip("| "): float(error.strip("% |")) for name, _, error in table}
    assert 0 < errors["int8"] < errors["fp8"] < min(errors["nf4"], errors["int4"])
    assert max(errors.values()) < 20
    for name in ("grid", "curves"):
        assert any("image/png" in output.get("data", {}) for output in cells[name].outputs)
    told = literal_eval(shown(cells["memory"]))
    # Of each layer's matrices 32 x (32 + 16 + 16 + 32 + 64 + 64) weights in tiles of 32, and 64 x 32 in a tile of 64.
    assert told["bytes a weight"] == pytest.approx((7168 * 0.625 + 2048 * 0.5625) / 9216, abs=1e-4)
    assert told["frozen bytes by type"]["uint4"] == 2 * 9216 / 2
    # A and B of each: 16 x (inputs + outputs).
    assert told["trained weights"] == 2 * 16 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    assert literal_eval(shown(cells["adapter"])) == {"tensors": 2 * 7 * 2, "A": (16, 32), "B": (64, 16)}
    merged = literal_eval(shown(cells["merge"]))
    assert merged["left over"] < 1e-6 < merged["moved by the adapter"]
    assert merged["moved by rounding"] > 1e-3


@pytest.mark.slow
def test_a_day_at_a_time(tmp_path: Path):
    settings = f"""\
overrides = ["output={tmp_path}/days", "model.sizes={{vocab_size: 512, d_model: 32, num_layers: 2, num_heads: 2, \
num_kv_heads: 1, head_dim: 16, ffn: 64}}", "steps=4", "batch_size=16", "eval={{every: 4, rows: 16, samples: 0}}"]
minutes = 0
"""
    cells = executed("06", ROOT, settings)
    assert "stopped at step 0 of 4" in shown(cells["today"], "text/markdown")
    assert f"`{tmp_path}/days/export`" in shown(cells["tomorrow"], "text/markdown")
