"""`tunix doctor`: what this machine can run and what is missing, each with its remedy.

JAX is asked in a process of its own, with a deadline: an accelerator that hangs does not hang the answer, and none is
taken from a run.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tunix import __version__
from tunix.recipe.notes import read_header
from tunix.recipe.recipe import included_recipes
from tunix.util.accelerators import accelerated

PATIENCE = 60.0
"""Seconds that JAX has to name its devices."""
GIB = 2**30
LEAST_MEMORY, LEAST_DISK = 2 * GIB, 5 * GIB
"""Bytes below which the quickstart may not run, and below which a 1B model and its checkpoints find no room."""
EXTRAS = {
    "gpu": "NVIDIA GPUs",
    "tpu": "TPUs",
    "plan-gpu": "tunix plan for GPUs that are not here",
    "plan-tpu": "tunix plan for TPUs that are not here",
    "serve": "tunix serve",
    "pictures": "rows with pictures",
    "tensorboard": "logging.tensorboard",
    "trackio": "logging.trackio",
    "mlflow": "logging.mlflow",
    "stablehlo": "tunix export --format stablehlo",
    "gcs": "model folders and checkpoints on gs://",
    "s3": "model folders on s3://",
    "pathways": "Pathways on Google Cloud",
    "notebooks": "the notebooks",
}
"""Extras that a user may want -> what for."""
TRIED = (
    {"Python": "3.11", "jax": "0.10.2", "flax": "0.12.8", "optax": "0.2.8", "orbax-checkpoint": "0.12.8"}
    | {"grain": "0.2.18", "qwix": "0.1.8", "tokamax": "0.0.12"},
    {"Python": "3.12", "jax": "0.11.2", "flax": "0.12.12", "optax": "0.2.8", "tokamax": "0.0.17"},
    {"Python": "3.13", "jax": "0.12.0.1", "flax": "0.12.12", "tokamax": "0.0.17"},
)
"""Versions that ran together: the whole suite on CPUs (Python 3.11 and 3.13), kernels, parity and speed on an H200
(3.12, docs/devices). What a row lacks was not written down, and what is not installed does not count."""
_ASK = """
import json
from tunix.util.startup import prepare_jax
prepare_jax()
import jax
found = [{"platform": d.platform, "kind": d.device_kind, "memory": (d.memory_stats() or {}).get("bytes_limit")}
         for d in jax.local_devices()]
print(json.dumps({"version": jax.__version__, "devices": found}))
"""


Finding = tuple[Literal["ok", "note", "problem"], str, str]
"""Whether something is as it should be, worth knowing, or keeps runs from working; what was looked at, e.g. `disk`; and
what was found, with the remedy where there is one."""


def doctor() -> bool:
    """Prints what this machine can run and what is missing; whether nothing keeps runs from working."""
    findings = [*_packages(), *_devices(), *_places()]
    for state, what, text in findings:
        print(f"{state:<8}{what:<15}{text}")
    return all(state != "problem" for state, _, _ in findings)


def _packages() -> Iterator[Finding]:
    """Python, what tunix asks for, its extras, and whether such versions ever ran together, by installed metadata."""
    from packaging.requirements import Requirement

    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "" if fits else ": tunix wants 3.11, 3.12 or 3.13; make an environment with one of these"
    yield "ok" if fits else "problem", "Python", f"{version}, {sys.executable}{remedy}"
    yield "ok", "tunix", f"{__version__}, {Path(__file__).parents[1]}"

    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("tunix") or []]
    except importlib.metadata.PackageNotFoundError:
        yield "problem", "packages", "tunix is not installed here: `pip install .` in its clone"
        return
    missing = [need.name for need in wanted if _applies(need, "") and not _installed(need)]
    if missing:
        yield "problem", "packages", f"{', '.join(missing)} missing or too old: `pip install .` in the clone"
    else:
        yield "ok", "packages", "all that tunix asks for"
    for extra, purpose in EXTRAS.items():
        needs = [need for need in wanted if _applies(need, extra) and not _applies(need, "")]
        if absent := [str(need).partition(";")[0].strip() for need in needs if not _installed(need)]:
            text = f"not installed, for {purpose}: `pip install '.[{extra}]'` in the clone ({', '.join(absent)})"
            yield "note", f"[{extra}]", text
        else:
            yield "ok", f"[{extra}]", f"installed, for {purpose}"
    differing: list[list[str]] = [[] for _ in TRIED]
    for row, names in zip(TRIED, differing, strict=True):
        for name, tried in row.items():
            with suppress(importlib.metadata.PackageNotFoundError):
                there = version.rpartition(".")[0] if name == "Python" else importlib.metadata.version(name)
                names += [] if there == tried else [f"{name} {there} (with {tried})"]
    untried = min(differing, key=len)
    text = f"never tried together; nearest to what was: {', '.join(untried)}" if untried else "were tried together"
    yield "note" if untried else "ok", "versions", text


def _applies(need: Any, extra: str) -> bool:
    """Whether a requirement is one of an extra, or, with an empty one, of tunix alone, on this machine."""
    return need.marker is None or need.marker.evaluate({"extra": extra})


def _installed(need: Any) -> bool:
    """Whether a requirement is satisfied, with what its own extras ask for."""
    from packaging.requirements import Requirement

    try:
        there = importlib.metadata.version(need.name)
        inner = [Requirement(line) for line in importlib.metadata.requires(need.name) or []]
    except importlib.metadata.PackageNotFoundError:
        return False
    more = [part for extra in need.extras for part in inner if part.marker and _applies(part, extra)]
    return need.specifier.contains(there, prereleases=True) and all(
        _installed(part) for part in more if not _applies(part, "")
    )


def _devices() -> Iterator[Finding]:
    """What JAX sees, and which recipes that is enough for."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )
    except subprocess.TimeoutExpired:
        remedy = "another process may hold them; JAX_PLATFORMS=cpu leaves them out"
        yield "problem", "devices", f"JAX named none within {PATIENCE:.0f} s: {remedy}"
        return
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        yield "problem", "devices", f"JAX does not start: {last}"
        return
    said = json.loads(done.stdout.strip().splitlines()[-1])
    devices = said["devices"]
    kinds = [device["kind"] for device in devices]
    memory = devices[0]["memory"]
    each = "" if memory is None else f", {memory / GIB:.1f} GiB of each"
    text = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) + each
    yield "ok", "jax", said["version"]
    on_cpu = devices[0]["platform"] == "cpu"
    if on_cpu and accelerated():
        install = "`pip install '.[gpu]'` (NVIDIA) or `pip install '.[tpu]'` in the clone"
        yield "problem", "devices", f"JAX sees {text} alone, but there are accelerators here: {install}"
    else:
        yield "ok", "devices", text
    # Which of the included recipes fit, by what their headers say that they need.
    headers = {name: read_header(file) for name, file in included_recipes().items()}
    fits = [name for name, header in headers.items() if "laptop" in header.hardware]
    for name, header in headers.items():
        needs = re.search(r"(one|\d+) x? ?H100 \(80 GB\): ([\d.]+) of", header.hardware)
        if memory is not None and not on_cpu and needs:
            count = 1 if needs[1] == "one" else int(needs[1])
            fits += [name] if count <= len(devices) and float(needs[2]) * GIB <= memory else []
    rest = len(headers) - len(fits)
    text = f"{', '.join(sorted(fits))}; the other {rest} with --tiny" if rest else "all"
    yield "ok", "recipes", text


def _places() -> Iterator[Finding]:
    """Memory, disk, compiled programs; the cache, token and mode of Hugging Face's hub, without asking it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    state = "ok" if memory >= LEAST_MEMORY else "problem"
    remedy = "" if state == "ok" else f": the quickstart takes up to {LEAST_MEMORY / GIB:.0f} GiB"
    yield state, "memory", f"{memory / GIB:.1f} GiB, {os.cpu_count()} CPU cores{remedy}"
    free = shutil.disk_usage(Path.cwd()).free
    tight = free < LEAST_DISK
    remedy = f": less than {LEAST_DISK / GIB:.0f} GiB, which a model and its checkpoints soon take" if tight else ""
    yield "note" if tight else "ok", "disk", f"{free / GIB:.1f} GiB free in {Path.cwd()}{remedy}"
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    yield _writable("hub's cache", cache, "set HF_HOME to a folder that can be written")
    token = "HF_TOKEN" in os.environ or Path(os.environ.get("HF_TOKEN_PATH", home / "token")).expanduser().is_file()
    text = "there is one" if token else "none: models behind a licence (Gemma, Llama) want `hf auth login`"
    yield "ok" if token else "note", "hub's token", text
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        yield "note", "hub", "HF_HUB_OFFLINE is set: only what is in the cache can be used"
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/tunix/compiled")).expanduser()
    yield _writable("compiled", folder, "set JAX_COMPILATION_CACHE_DIR to a folder that can be written")


def _writable(what: str, folder: Path, remedy: str) -> Finding:
    """Whether a folder can be written, or made; nothing is made."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        return "problem", what, f"{folder} cannot be written: {remedy}"
    return "ok", what, f"{folder}{'' if folder.is_dir() else ' (made when it is needed)'}"
