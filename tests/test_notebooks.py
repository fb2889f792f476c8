"""Every notebook runs from top to bottom, on fewer steps, from either of the two folders that people start it in."""

import base64
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FIRST = ROOT / "notebooks" / "01_first_run.ipynb"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

SMALL = """\
overrides = [
    "output={folder}/first",
    "steps=6",
    "batch_size=8",
    "eval.every=3",
    "eval.rows=16",
    "eval.samples=2",
    "eval.sample_tokens=4",
    "model.sizes={{vocab_size: 512, d_model: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, ffn: 64}}",
]
next_steps = 2
"""
"""What takes the place of the first notebook's settings."""


def executed(path: Path, settings: str, start_in: Path, last: str | None = None) -> dict[str, nbformat.NotebookNode]:
    """Runs a notebook with other settings, up to the cell `last` where one is named; its cells by id."""
    notebook = nbformat.read(path, as_version=4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    cell.source = settings
    if last:
        names = [cell.id for cell in notebook.cells]
        notebook.cells = notebook.cells[: names.index(last) + 1]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(start_in)}}).execute()
    return {cell.id: cell for cell in notebook.cells}


def pictures(cell: nbformat.NotebookNode) -> list[bytes]:
    """The PNGs among a cell's outputs."""
    data = [output.data for output in cell.outputs if output.output_type == "display_data"]
    return [base64.b64decode(d["image/png"]) for d in data if "image/png" in d]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_what_it_printed(path: Path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)


@pytest.fixture
def _one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a laptop; and nothing is written to the home folder."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


@pytest.mark.usefixtures("_one_device")
def test_the_first_run(tmp_path: Path):
    cells = executed(FIRST, SMALL.format(folder=tmp_path), ROOT / "notebooks")
    assert "steps: 6" in cells["recipe"].outputs[0].text
    for name in ("plot", "next"):
        (picture,) = pictures(cells[name])
        assert picture.startswith(b"\x89PNG")
    table = cells["samples"].outputs[0].data["text/markdown"].splitlines()
    assert table[0] == "| prompt | step 0 | step 6 | the documentation says |"
    assert len(table) == 2 + 2
    assert all(row.count(" | ") == 3 for row in table[2:])
    assert (tmp_path / "first" / "export" / "config.json").is_file()
    assert (tmp_path / "first-next" / "export" / "config.json").is_file()


@pytest.mark.usefixtures("_one_device")
def test_it_also_starts_in_the_root(tmp_path: Path):
    cells = executed(FIRST, SMALL.format(folder=tmp_path), ROOT, last="recipe")
    assert "steps: 6" in cells["recipe"].outputs[0].text
