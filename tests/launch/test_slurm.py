"""The sbatch script: valid for bash, its options are sbatch's and srun's, and what it does when the run ends.

The scheduler's commands are stand-ins that a real bash finds first; docs/scale.md says what was seen under a real one.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launch.recipes import job, recipe
from tunix.errors import UserError
from tunix.launch.slurm import script
from tunix.recipe.recipe import Recipe

SCHEMAS = Path(__file__).parent / "schemas"
STAND_INS = {
    # As srun does for one process: runs the command after the options.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    "scontrol": 'echo "$*" >> asked\n',
    "tunix": 'echo "$*" >> ran\nexit "$CODE"\n',
}


def options_of(text: str) -> dict[str, str]:
    """The options of sbatch in a script: name -> value."""
    lines = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def run(folder: Path, text: str, code: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script among stand-ins.

    Args:
        code: what `tunix` exits with.
    """
    places = folder / "bin"
    places.mkdir(exist_ok=True)
    for name, body in STAND_INS.items():
        (places / name).write_text(f"#!/bin/bash\n{body}")
        (places / name).chmod(0o755)
    path = f"{places}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "41", "CODE": str(code), **variables}
    return subprocess.run(["bash", "-c", text], cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topology": "h100:1"},
        {"topology": "h100:64", "per_host": 4, "grace": 300},
        {
            "setup": ("module load cuda", "source ~/tunix/bin/activate"),
            "sbatch": ("partition=gpu", "time=04:00:00", "account=me"),
            "secrets": (("HF_TOKEN", "~/.hf token"),),
        },
    ],
)
def test_a_script_is_bash_with_options_of_sbatch_and_srun(options: dict[str, Any]):
    text = script(job("slurm", recipe(mesh="auto"), **options))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert options_of(text).keys() <= set((SCHEMAS / "sbatch_options.txt").read_text().split())
    called = re.search(r"^srun (.*) bash", text, re.MULTILINE)
    assert called
    flags = set(re.findall(r"--([a-z-]+)", called[1]))
    assert flags <= set((SCHEMAS / "srun_options.txt").read_text().split())


def test_a_node_has_one_process_with_all_of_its_gpus():
    # 16 GPUs, 8 in a node; whole nodes are taken with all of their cores and memory.
    found = options_of(script(job("slurm")))
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("2", "1", "8")
    assert {"exclusive", "requeue"} <= found.keys()
    assert found["mem"] == "0"
    # One GPU is a part of a node: 8 cores with it.
    part = options_of(script(job("slurm", topology="h100:1")))
    assert (part["nodes"], part["gpus-per-node"], part["cpus-per-task"]) == ("1", "1", "8")
    assert "exclusive" not in part
    # srun does not take over --cpus-per-task from sbatch.
    assert "--cpus-per-task=8 bash" in script(job("slurm", topology="h100:1"))


def test_sigterm_comes_before_the_end_and_reaches_the_processes():
    # Without `B:` the processes are signalled, and not the shell.
    assert options_of(script(job("slurm", grace=300)))["signal"] == "TERM@300"


def test_the_recipe_is_in_the_script(tmp_path: Path):
    given = recipe(data={"train": "org/rows", "chat": True, "system": "a\nRECIPE\n$HOME `date` 'b'\n"}, steps=7)
    assert run(tmp_path, script(job("slurm", given)), 0).returncode == 0
    assert Recipe.load(tmp_path / "small-1-41.yaml") == given
    assert (tmp_path / "ran").read_text() == f"run {tmp_path}/small-1-41.yaml --no-plan\n"


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        (0, "0", False),
        (2, "0", False),  # a user error
        (75, "0", True),  # a process was lost
        (130, "0", True),  # SIGTERM, with a checkpoint
        (137, "0", True),  # killed
        (75, "4", True),
        (75, "5", False),  # of 5 restarts
    ],
)
def test_a_job_goes_back_to_the_queue(code: int, restarts: str, again: bool, tmp_path: Path):
    done = run(tmp_path, script(job("slurm", restarts=5)), code, SLURM_RESTART_COUNT=restarts)
    assert (tmp_path / "asked").exists() == again
    if again:
        assert (tmp_path / "asked").read_text() == "requeue 41\n"
        assert "back to the queue" in done.stderr
    else:
        assert done.returncode == code


def test_a_user_error_counts_where_other_processes_were_lost_by_it(tmp_path: Path):
    # srun returns the highest code of all processes: 2 of one and 75 of the others is 75.
    text = script(job("slurm"))
    broken = text.replace("\ncode=$?\n\nif", "\ncode=75\n\nif")
    assert broken != text
    assert run(tmp_path, broken, 2).returncode == 2
    assert not (tmp_path / "asked").exists()


def test_a_cancelled_job_is_not_started_again(tmp_path: Path):
    # scancel signals the shell, which waits for srun; here the process signals it: its parent's parent is the script.
    text = script(job("slurm"))
    stand_in = STAND_INS["tunix"]
    STAND_INS["tunix"] = 'kill -TERM "$(ps -o ppid= -p "$PPID" | tr -d " ")"\nexit 130\n'
    try:
        done = run(tmp_path, text, 130)
    finally:
        STAND_INS["tunix"] = stand_in
    assert done.returncode == 130
    assert not (tmp_path / "asked").exists()


def test_secrets_are_read_where_the_job_runs(tmp_path: Path):
    (tmp_path / "a token").write_text("hf_abc\n")
    text = script(job("slurm", secrets=(("HF_TOKEN", f"{tmp_path}/a token"),)))
    assert "hf_abc" not in text
    text = text.replace("trap 'cancelled", 'echo "$HF_TOKEN"\ntrap \'cancelled')
    assert run(tmp_path, text, 0).stdout == "hf_abc\n"
    assert '"$(< ~/.hf_token)"' in script(job("slurm", secrets=(("HF_TOKEN", "~/.hf_token"),)))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--partition=gpu", "without its hyphens, e.g. partition=gpu"),
        ("partition=a b", "without its hyphens"),
        ("", "without its hyphens"),
        ("nodes=3", "the script sets --nodes=2 itself"),
        ("requeue", "the script sets --requeue itself"),
    ],
)
def test_options_of_sbatch_that_cannot_be(option: str, words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        script(job("slurm", sbatch=(option,)))
