"""From a recipe to its job, written and submitted: `tunix launch`.

A pod's disk goes with the pod, and a restart is a new pod, so checkpoints and the run folder have to be on a volume or
on gs://, and files that the recipe names have to be on a volume, or small enough to be sent along.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel

from tunix.errors import UserError, install_command
from tunix.launch.job import PLATFORMS, Job, Options, placement
from tunix.launch.kubernetes import manifest
from tunix.launch.slurm import script
from tunix.recipe.recipe import Recipe
from tunix.util.atomic_io import write_text_atomic
from tunix.util.object_store import url_of
from tunix.util.plugins import is_reference

OWN_DISKS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every node of a cluster has for itself."""
MOST_BYTES = 900_000
"""Most bytes of the recipe and the files that go along: Kubernetes takes 1 MiB, with everything around them."""
WRITTEN = ("output", "folder")
"""Last part of the keys that name what a run writes."""
NAMES = ("name", "family", "split")
"""Last part of the keys that name what comes along with tunix or a data set, unless it is code."""
LONGEST_NAME = 40
"""Letters of a name: Kubernetes takes 63 for a pod's, which is longer by `-host-0-1023`."""


def mount_of(text: str) -> tuple[str, str]:
    """Reads `CLAIM:/path`.

    Raises:
        UserError: it is written otherwise.
    """
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/") or path == "/":
        raise UserError(f"--mount {text}: write CLAIM:/path, a PersistentVolumeClaim and where it is mounted")
    return claim, path.rstrip("/")


def launch(
    recipe: Recipe,
    options: Options,
    refuse_misfit: Callable[[Recipe, str, str], None] | None,
    *,
    out: Path | None,
    overwrite: bool,
    dry_run: bool,
    submit: bool,
) -> None:
    """Makes the job of a recipe, prints or writes it, and submits it where that is asked for.

    Args:
        refuse_misfit: refuses a recipe that does not fit a topology, with the way out (`commands/plan.py`); None where
            that is not asked.
        out, overwrite, dry_run, submit: what becomes of the file, as the help of `tunix launch` says.

    Raises:
        UserError: the recipe or an option is wrong, it does not fit, the file exists, or the scheduler refuses it.
    """
    if dry_run and submit:
        raise UserError("--dry-run writes nothing and --submit needs the file: leave one of them out")
    job, slurm = job_of(recipe, options), options.target == "slurm"
    text = script(job) if slurm else manifest(job)
    if job.placement.slices > 1 and refuse_misfit:
        print("not planned: several slices; `tunix plan` asks about one of them", file=sys.stderr)
    elif refuse_misfit:
        refuse_misfit(recipe, job.placement.topology, "`tunix launch --no-plan` writes the job all the same.")
    for warning in job.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if dry_run:
        print(text, end="")
        return
    command = ["sbatch"] if slurm else ["kubectl", "apply", "-f"]
    if submit and shutil.which(command[0]) is None:
        raise UserError(f"--submit: there is no {command[0]} on this machine; write the file here and submit it there")
    file = out or Path(job.name + (".sbatch" if slurm else ".yaml"))
    # A file that is there already stays, unless it is the same.
    if file.exists() and not overwrite and not (file.is_file() and file.read_text("utf-8") == text):
        raise UserError(f"--out {file}: it exists, and differs; --overwrite replaces it, or name another file")
    write_text_atomic(file, text)
    command.append(str(file))
    if not submit:
        print(f"{file}: {job.placement.described}; submit it with `{' '.join(command)}`")
        return
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"`{' '.join(command)}` was refused: {said}. The file stays, to be submitted again")


def job_of(recipe: Recipe, options: Options) -> Job:
    """The job of a recipe.

    Raises:
        UserError: something is missing, contradicts the recipe, or would be lost with a pod.
    """
    # What needs no recipe: options that are missing, or are another target's.
    slurm, target = options.target == "slurm", options.target
    foreign = {
        "--image": slurm and options.image,
        "--mount": slurm and options.mounts,
        "--namespace": slurm and options.namespace,
        "--service-account": slurm and options.service_account,
        "--setup": not slurm and options.setup,
        "--sbatch": not slurm and options.sbatch,
        "--pathways-dir": target != "pathways" and options.pathways_dir,
        "--slices": PLATFORMS[target] == "gpu" and options.slices > 1,
    }
    if wrong := [flag for flag, value in foreign.items() if value]:
        raise UserError(f"{', '.join(wrong)}: it means nothing with --target {target}; leave it out")
    if not slurm and options.image is None:
        extra = {"gke-gpu": "gpu", "gke-tpu": "tpu"}.get(target, "pathways,gcs")
        raise UserError(
            f"--image is missing: there is no public one. Build an image with {install_command(extra)}, "
            "push it to where the cluster pulls from, and name it: --image REGISTRY/tunix:TAG"
        )
    if target == "pathways" and not (options.pathways_dir or "").startswith("gs://"):
        raise UserError("--pathways-dir is missing: a folder that exists for Pathways' own files, gs://BUCKET/pathways")
    if options.name is not None and not re.fullmatch(
        rf"[a-z]([-a-z0-9]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", options.name
    ):
        raise UserError(
            f"--name {options.name}: at most {LONGEST_NAME} lower-case letters, digits and hyphens, from a letter to a "
            "letter or digit"
        )
    for variable, source in options.secrets:
        # What was given may be the secret itself, so no message repeats it.
        if not re.fullmatch(r"[A-Za-z_]\w*", variable):
            raise UserError("--secret: write VARIABLE=WHERE, e.g. HF_TOKEN=hf/token")
        if slurm and "/" not in source:
            raise UserError(
                f"--secret {variable}=...: name the file that holds it, e.g. ~/.hf_token, not the secret itself"
            )
        if not slurm and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[-\w.]+)?", source):
            raise UserError(f"--secret {variable}=...: name a Secret and its key, e.g. hf/token, not the secret itself")
    place = placement(recipe, PLATFORMS[options.target], options.topology, options.slices, options.per_host)
    # In letters that every scheduler takes.
    words = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(recipe.output).name.lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    name = options.name or words[:LONGEST_NAME].strip("-")
    if slurm:
        for stage in recipe.stages or (recipe,):
            for key, folder in (("output", recipe.output), ("checkpoint.folder", stage.checkpoint.folder)):
                if folder is not None and _within(folder, OWN_DISKS):
                    raise UserError(
                        f"{key}: {folder} is on each node's own disk: a job that is started again may get other nodes. "
                        "Take a folder that all nodes share, such as one in your home folder"
                    )
        return Job(name, recipe.to_yaml(), {}, place, options)
    # A pod's end must lose nothing that the next one needs.
    volumes, lost = [path for _, path in options.mounts], list[str]()
    if not _within(recipe.output, volumes):
        lost.append(
            f"output: {recipe.output} is on the pod's own disk: checkpoints stay, but metrics.jsonl, samples and "
            "export/ go with the pod; --mount CLAIM:/runs output=/runs/... keeps them"
        )
    for stage in recipe.stages or (recipe,):
        folder = stage.checkpoint.folder
        if lost if folder is None else url_of(folder) is None and not _within(folder, volumes):
            where = f"output: {recipe.output}" if folder is None else f"checkpoint.folder: {folder}"
            stem = PurePosixPath(recipe.output).name
            raise UserError(
                f"{where} is on the pod's own disk, which goes with the pod: a restart would begin again. Put the run "
                f"on a volume, --mount CLAIM:/runs output=/runs/{stem}, or its checkpoints on "
                f"checkpoint.folder=gs://BUCKET/{stem}"
            )
    # Small files that the recipe names and that are on no volume go along, from the current folder: code
    # (`judge.py:short`) and chat templates.
    texts: dict[str, str] = {}
    for key, value in _named({"stages": recipe.stages} if recipe.stages else recipe):
        code = is_reference(value) and value.rpartition(":")[0].endswith(".py")
        file = value.rpartition(":")[0] if code else value
        if key.rpartition(".")[2] in (WRITTEN if code else (*WRITTEN, *NAMES)) or _within(file, volumes):
            continue
        if not Path(file).expanduser().exists():
            continue
        if not (code or file.endswith(".jinja")):
            raise UserError(
                f"{key}: {file} is on this machine, and the pods do not see it: copy it to a volume (--mount "
                "CLAIM:/data) and name it there, or take a hub id, or for a model gs://"
            )
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise UserError(f"{key}: {file} goes along with the job, from the current folder down: name it from there")
        texts[str(PurePosixPath(file))] = Path(file).read_text(encoding="utf-8")
    if (size := sum(len(text.encode()) for text in texts.values())) > MOST_BYTES:
        raise UserError(f"{', '.join(texts)}: {size:,} bytes, and {MOST_BYTES:,} go along: put them into the image")
    return Job(name, recipe.to_yaml(), texts, place, options, tuple(lost))


def _named(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested values with its dotted key, but for a key's choices, which mean no file."""
    if isinstance(value, str):
        yield path, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    if isinstance(value, BaseModel):
        fields = ((name, getattr(value, name), field) for name, field in type(value).model_fields.items())
        inner = ((name, item) for name, item, field in fields if repr(item) not in str(field.annotation))
    for key, item in inner:
        yield from _named(item, f"{path}.{key}".lstrip("."))


def _within(place: str, folders: Iterable[str]) -> bool:
    return any(PurePosixPath(place).is_relative_to(folder) for folder in folders)
