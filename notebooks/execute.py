"""Executes the notebooks and stores what they show.

    python -m notebooks.execute          all of them (`make notebooks`)
    python -m notebooks.execute 01 03    those whose file names begin so

Each notebook runs in an empty folder that holds nothing but the recipes, so that nothing is found finished and no path
of this machine is shown. What differs between two executions of the same code is left out: times, speeds, and where the
kernel is installed. The digest of the code is stored with the outputs; `tests/test_notebooks.py` compares the two.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode, from_dict

from tunix.trainer.progress import LIVE

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem[:2]: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
KEY = "executed_code"
"""Where a notebook's metadata hold the digest of the code whose outputs it stores."""

_TIMES = (
    (re.compile(r"^step (\d+)/(?!\1\b).*\n", re.MULTILINE), ""),
    (re.compile(r"  [\d.]+[kM]? tokens/s"), ""),
    (re.compile(r"^compiling .+: \d+ done, \d+ s\n", re.MULTILINE), ""),
    (re.compile(r"^done in \S+ s:", re.MULTILINE), "done:"),
)
"""A run reports its progress every ten seconds, so what it says then is a matter of speed; only the last step stays."""


def digest(notebook: NotebookNode) -> str:
    """A digest of the code cells in their order; text may change without making the outputs out of date."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def execute(notebook: NotebookNode, folder: Path, timeout: float | None = None) -> None:
    """Runs every code cell in one kernel; the outputs replace those that were stored.

    Args:
        folder: where the kernel starts.
        timeout: seconds for a single cell.
    """
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, resources=place, record_timing=False).execute()


def cleaned(notebook: NotebookNode, folder: Path) -> None:
    """Leaves out what differs between executions, joins the pieces of a stream, and stores the digest of the code.

    Args:
        folder: where the kernel started; paths in it become relative.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = json.dumps(list(_joined(cell.outputs)))
            cell.outputs = from_dict(json.loads(text.replace(f"{folder}/", "")))
    notebook.metadata.language_info = NotebookNode(name="python")
    notebook.metadata[KEY] = digest(notebook)


def _joined(outputs: Iterable[NotebookNode]) -> Iterable[NotebookNode]:
    """The outputs of a cell, with the pieces of each stream as one: where it is cut depends on the machine's speed."""
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        if output.get("metadata") == LIVE:
            output.data["text/plain"] = without_times(output.data["text/plain"])
        if output.output_type != "stream":
            yield output
        elif output.name in streams:
            streams[output.name].text = without_times(streams[output.name].text + output.text)
        else:
            streams[output.name] = output
            output.text = without_times(output.text)
            yield output


def without_times(text: str) -> str:
    """What a run prints, without seconds and speeds.

    >>> without_times("step 27/90  loss 6.5938  2.43k tokens/s\\nstep 90/90  loss 0.6207  2.76k tokens/s\\n")
    'step 90/90  loss 0.6207\\n'
    """
    for pattern, replacement in _TIMES:
        text = pattern.sub(replacement, text)
    return text


def main(names: Iterable[str]) -> None:
    """Executes and stores each named notebook."""
    # A laptop's one device; and without what a library says that looks for widgets.
    os.environ |= {"JAX_NUM_CPU_DEVICES": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
    for prefix in names:
        path = NOTEBOOKS[prefix]
        notebook = nbformat.read(path, as_version=4)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            (folder / "recipes").symlink_to(ROOT / "recipes")
            execute(notebook, folder)
            cleaned(notebook, folder)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or NOTEBOOKS)
