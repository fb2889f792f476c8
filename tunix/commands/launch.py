"""`tunix launch`: makes the job of a recipe, prints or writes it, and submits it where that is asked for."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tunix.commands.plan import refuse_misfit
from tunix.errors import UserError
from tunix.launch import kubernetes, slurm
from tunix.launch.job import Job, Options, job_of
from tunix.recipe.recipe import Recipe
from tunix.util.atomic_io import write_text_atomic

WRITERS = {
    "slurm": slurm.script,
    "gke-tpu": kubernetes.manifest,
    "gke-gpu": kubernetes.manifest,
    "pathways": kubernetes.pathways_manifest,
}


@dataclass(frozen=True)
class Destination:
    """What becomes of the file."""

    out: Path | None = None
    """Where it is written; None for the job's name in the current folder."""
    overwrite: bool = False
    """Whether another file there may be replaced."""
    dry_run: bool = False
    """Whether it is printed instead."""
    submit: bool = False
    """Whether it is submitted once it is written."""


def launch(recipe: Recipe, options: Options, destination: Destination, *, plan: bool = True) -> None:
    """Makes the job of a recipe.

    Args:
        plan: whether the compilers are asked first if the recipe fits the devices.

    Raises:
        UserError: the recipe does not fit the devices, something is missing, or the file or the scheduler refuses.
    """
    if destination.dry_run and destination.submit:
        raise UserError("--dry-run writes nothing and --submit needs the file: leave one of them out")
    job = job_of(recipe, options)
    text = WRITERS[options.target](job)
    if plan and job.placement.slices > 1:
        print("not planned: several slices; `tunix plan` asks about one of them", file=sys.stderr)
    elif plan:
        refuse_misfit(recipe, job.placement.topology, "`tunix launch --no-plan` writes the job all the same.")
    for warning in job.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if destination.dry_run:
        print(text, end="")
        return
    command = ["sbatch"] if options.target == "slurm" else ["kubectl", "apply", "-f"]  # a file is its last word
    if destination.submit and shutil.which(command[0]) is None:
        raise UserError(f"--submit: there is no {command[0]} on this machine; write the file here and submit it there")
    file = _write(text, job, destination)
    if destination.submit:
        _submit([*command, str(file)])
    else:
        print(f"{file}: {job.placement.described}; submit it with `{' '.join(command)} {file}`")


def _write(text: str, job: Job, destination: Destination) -> Path:
    """Writes the file; one that is there already stays, unless it is the same.

    Raises:
        UserError: there is another one, or the disk refuses.
    """
    suffix = ".sbatch" if job.options.target == "slurm" else ".yaml"
    file = destination.out or Path(job.name + suffix)
    if file.exists() and not destination.overwrite and not (file.is_file() and file.read_text("utf-8") == text):
        raise UserError(f"--out {file}: it exists, and differs; --overwrite replaces it, or name another file")
    write_text_atomic(file, text)
    return file


def _submit(command: list[str]) -> None:
    """Runs the scheduler's own command.

    Raises:
        UserError: it refuses.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"`{' '.join(command)}` was refused: {said}. The file stays, to be submitted again")
