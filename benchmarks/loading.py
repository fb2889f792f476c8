"""`python -m benchmarks.loading`: a random folder's way onto one device: MB/s, CPU seconds, memory beyond the model.

`--saving` measures the way back instead, from weights in either type to a folder in bfloat16. Each measurement is a
process of its own. `--other CHECKOUT` takes turns with another commit's checkout: both load the same folder, which is
in the file cache after the first round.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from tunix.config import DType, MeshConfig
from tunix.hf.model_folder import load_params, save_folder
from tunix.mesh import build_mesh
from tunix.models.config import DecoderConfig
from tunix.models.families.table import read_config, small, with_sizes
from tunix.models.model import Model
from tunix.trainer.perf import peak_memory

SIZES = {"vocab_size": 32768, "d_model": 1024, "num_layers": 12, "num_heads": 16, "num_kv_heads": 8, "ffn": 3072}
CONFIG: DecoderConfig = with_sizes(small("llama"), {**SIZES, "head_dim": 64})
DTYPES: tuple[DType, ...] = ("bfloat16", "float32")


def write(folder: Path) -> None:
    """Writes the folder that is loaded, 369 MB in bfloat16."""
    model = Model(CONFIG)
    values = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "bfloat16"), build_mesh(MeshConfig()))
    save_folder(folder, CONFIG, values, source=None, dtype="bfloat16")


def measure(folder: Path, dtype: DType) -> None:
    """What each process runs: prints a line of JSON.

    Memory is that of the first load, compiling included; seconds are the least of five that follow.
    """
    model, mesh = Model(read_config(folder)), build_mesh(MeshConfig(), jax.devices()[:1])
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    load_params(model, folder, {"norm/w": "float32"}, mesh)
    before, beyond, seconds = peak_memory(), 0, []
    for _ in range(6):
        wall, cpu = time.perf_counter(), time.process_time()
        params = jax.block_until_ready(load_params(model, folder, dict.fromkeys(model.shapes, dtype), mesh))
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
        if len(seconds) == 1:
            beyond = peak_memory() - before - sum(array.nbytes for array in params.values())
        del params
    wall, cpu = np.min(seconds[1:], axis=0)
    print(json.dumps({"rate": size / wall, "cpu": cpu, "first": seconds[0][0], "beyond": beyond}))


def measure_saving(folder: Path, dtype: DType) -> None:
    """What each process runs with `--saving`; memory is what the first save takes on top of the weights."""
    model, mesh = Model(read_config(folder)), build_mesh(MeshConfig(), jax.devices()[:1])
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    params = jax.block_until_ready(load_params(model, folder, dict.fromkeys(model.shapes, dtype), mesh))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of loading is forgotten
    before, beyond, seconds = peak_memory(), 0, []
    for number in range(6):
        out, wall, cpu = folder.with_name(f"out-{number}"), time.perf_counter(), time.process_time()
        save_folder(out, model.config, params, source=None, dtype="bfloat16")
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
        if number == 0:
            beyond = peak_memory() - before
        shutil.rmtree(out)
    wall, cpu = np.min(seconds[1:], axis=0)
    print(json.dumps({"rate": size / wall, "cpu": cpu, "first": seconds[0][0], "beyond": beyond}))


def measured(checkout: Path, folder: Path, mode: str) -> list[dict]:
    """The measurements of a checkout, by this file's code and that checkout's library."""
    command = [sys.executable, __file__, mode, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    runs = [subprocess.run([*command, dtype], env=environment, check=True, stdout=subprocess.PIPE) for dtype in DTYPES]
    return [json.loads(run.stdout) for run in runs]


def table(found: dict[str, list[list[dict]]], way: str) -> Table:
    """The table of measurements: medians over the rounds.

    Args:
        way: heads the column of dtypes, e.g. `bfloat16 to`.
    """
    rows = Table("", way, "MB/s", "CPU, s", "first, s", "beyond the model, MB", title="369 MB, one device")
    for name, rounds in found.items():
        for index, dtype in enumerate(DTYPES):
            own = {
                key: float(np.median([one[index][key] for one in rounds])) for key in ("rate", "cpu", "first", "beyond")
            }
            numbers = (
                f"{own['rate'] / 1e6:.0f}",
                f"{own['cpu']:.2f}",
                f"{own['first']:.2f}",
                f"{own['beyond'] / 1e6:.0f}",
            )
            rows.add_row(name, dtype, *numbers)
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each checkout")
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="another commit's checkout, to take turns with")
    parser.add_argument("--saving", action="store_true", help="measures how folders are written")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "DTYPE"), help="used by the benchmark itself")
    parser.add_argument("--measure-saving", nargs=2, metavar=("FOLDER", "DTYPE"), help="likewise")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="likewise")
    arguments = parser.parse_args()
    if arguments.measure:
        folder, dtype = arguments.measure
        return measure(Path(folder), dtype)
    if arguments.measure_saving:
        folder, dtype = arguments.measure_saving
        return measure_saving(Path(folder), dtype)
    mode, way = ("--measure-saving", "bfloat16 from") if arguments.saving else ("--measure", "bfloat16 to")
    if arguments.write:
        return write(arguments.write)
    checkouts = {"this": Path(__file__).parents[1]} | ({"other": arguments.other} if arguments.other else {})
    found: dict[str, list[list[dict]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as place:
        # In a process of its own too: a process begins with the peak of the one that starts it.
        subprocess.run([sys.executable, "-m", "benchmarks.loading", "--write", f"{place}/model"], check=True)
        for _ in range(arguments.rounds):
            for name, checkout in checkouts.items():
                found[name].append(measured(checkout, Path(place) / "model", mode))
    console = Console(width=120)
    console.print(table(found, way))
    console.print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
